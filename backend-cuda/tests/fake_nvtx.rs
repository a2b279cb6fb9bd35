//! NVTX ranges as a listening tool receives them.
#![cfg(target_os = "linux")]

mod fake_cuda;

use fake_cuda::Libraries::Driver;
use fake_cuda::{NVTX_TOOL, call_log, on_fake, open};
use forebay_core::memory::scope;
use forebay_cuda::{NvtxUnavailable, set_nvtx};

/// Returns the calls that the tool received.
fn recorded_ranges() -> Vec<String> {
    call_log().into_iter().filter(|line| line.starts_with(['+', '-'])).collect()
}

/// Runs a module with an operation in it.
fn step() {
    let _module = scope::enter_module("fc1");
    let _op = scope::enter_op("linear");
}

fn broken(variable: &str) -> String {
    // The parent process has set the variable for this test alone.
    assert!(std::env::var_os(variable).is_some());
    set_nvtx(true).unwrap_err().to_string()
}

on_fake! {
    ranges_are_pushed_and_popped_in_order(Driver, "NVTX_INJECTION64_PATH" = NVTX_TOOL) {
        step();
        set_nvtx(true).unwrap();
        step();
        set_nvtx(false).unwrap();
        step();
        set_nvtx(true).unwrap();
        drop(scope::enter_module("again\0not this"));
        assert_eq!(recorded_ranges(), ["+fc1", "+fc1: linear", "-", "-", "+again", "-"]);
    }

    the_variable_is_read_where_a_device_is_opened(Driver, "NVTX_INJECTION64_PATH" = NVTX_TOOL, "FOREBAY_NVTX" = "1") {
        step();
        let _backend = open();
        step();
        assert_eq!(recorded_ranges(), ["+fc1", "+fc1: linear", "-", "-"]);
    }

    a_device_opens_without_a_tool(Driver, "FOREBAY_NVTX" = "1") {
        let _backend = open();
        assert_eq!(set_nvtx(true), Err(NvtxUnavailable::NoTool));
    }

    a_file_that_is_no_library_is_named(Driver, "NVTX_INJECTION64_PATH" = "/nowhere/libtool.so") {
        let error = broken("NVTX_INJECTION64_PATH");
        assert!(error.starts_with("NVTX_INJECTION64_PATH=/nowhere/libtool.so: "), "{error}");
    }

    a_tool_that_fails_is_named(Driver, "NVTX_INJECTION64_PATH" = NVTX_TOOL, "FAKE_NVTX_FAIL" = "1") {
        let error = broken("FAKE_NVTX_FAIL");
        assert!(error.ends_with("libfake_nvtx.so: its InitializeInjectionNvtx2 failed"), "{error}");
    }

    a_tool_that_takes_no_ranges_is_named(Driver, "NVTX_INJECTION64_PATH" = NVTX_TOOL, "FAKE_NVTX_DEAF" = "1") {
        let error = broken("FAKE_NVTX_DEAF");
        assert!(error.ends_with("libfake_nvtx.so: the tool does not accept ranges"), "{error}");
    }
}
