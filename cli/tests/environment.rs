//! Command-line errors: invalid environment variables, and files of the wrong kind.

use std::process::Command;

/// Runs the program, which must fail, and returns its message.
fn run_failing(arguments: &[&str], variable: Option<(&str, &str)>) -> std::io::Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let output = command.args(arguments).envs(variable).env_remove("RUST_BACKTRACE").output()?;
    assert!(!output.status.success(), "{arguments:?} with {variable:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn invalid_variables_end_every_command() -> std::io::Result<()> {
    let wrong = [
        ("FOREBAY_ALLOC_CONF", "nonsense:1", "unrecognized key `nonsense`"),
        ("FOREBAY_ALLOC_CONF_NULL_0", "max_memory_mb:x", "expected a whole number"),
        ("FOREBAY_CUDA_VMM", "maybe", "expected 0 (off) or 1 (on)"),
        ("FOREBAY_FUSE", "0", "FOREBAY_FUSE is called FOREBAY_FUSION_MIN_BYTES now"),
        ("FOREBAY_VALIDATOIN", "0", "did you mean FOREBAY_VALIDATION?"),
    ];
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/gnn_varsize.trace.xz");
    for (name, value, reason) in wrong {
        for arguments in [&["plan", "--quick"][..], &["replay", trace]] {
            let message = run_failing(arguments, Some((name, value)))?;
            assert!(message.contains(name) && message.contains(reason), "{arguments:?}: {message}");
        }
    }
    Ok(())
}

#[test]
fn a_report_of_another_file_names_its_kind() -> std::io::Result<()> {
    let folder = std::env::temp_dir().join(format!("forebay-kinds-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("x.pickle");
    std::fs::write(&path, b"\x80\x02}(X\x08\0\0\0segments")?;
    let pickle = run_failing(&["memory", "report", &path.to_string_lossy()], None);
    std::fs::write(&path, b"{\"workload\": \"w\"}\n")?;
    let trace = run_failing(&["memory", "view", &path.to_string_lossy()], None);
    std::fs::remove_dir_all(&folder)?;
    let pickle = pickle?;
    assert!(pickle.contains("x.pickle: no snapshot of memory: it is a Python pickle"), "{pickle}");
    assert!(pickle.contains("`snapshot.save(\"memory.json\")`"), "{pickle}");
    assert!(trace?.contains("`forebay replay` takes traces"));
    Ok(())
}

/// A file without an end is refused before the memory of the machine is used up.
#[cfg(target_os = "linux")]
#[test]
fn files_without_an_end_are_refused() -> std::io::Result<()> {
    let out = std::env::temp_dir().join(format!("forebay-endless-{}.html", std::process::id()));
    for arguments in [
        &["memory", "report", "/dev/zero"][..],
        &["memory", "view", "/dev/zero", "--out", &out.to_string_lossy()],
        &["memory", "diff", "/dev/zero", "/dev/zero"],
        &["replay", "/dev/zero"],
    ] {
        let message = run_failing(arguments, None)?;
        assert!(message.contains("/dev/zero: "), "{arguments:?}: {message}");
    }
    assert!(!out.exists());
    Ok(())
}

/// Names in files cannot give commands to the terminal, or look like lines of the report.
#[test]
fn names_in_files_are_printed_with_escapes() -> std::io::Result<()> {
    let text = r#"{"version":1,"device":"d\u001b[2J","time_us":0,"config":"c\u0007","stats":{},
        "holders":[{"tag":"other","module":"m\u202e\n","op":"o\u001b]0;x","frames":[{"name":"n","filename":"f\u009b","line":1}]}],
        "segments":[{"address":4294967296,"total_size":512,"stream":0,"small":true,"allocated_size":512,"active_size":512,
        "requested_size":512,"is_expandable":false,"blocks":[{"address":4294967296,"size":512,"requested_size":512,
        "state":"active_allocated","holder":0}]}],"events":[],"dropped_events":0}"#;
    let folder = std::env::temp_dir().join(format!("forebay-escapes-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).map(|()| path.to_string_lossy().into_owned())
    };
    let (full, empty) = (
        path("full.json", text)?,
        path("empty\u{1b}[1m.json", "{\"version\":1,\"device\":\"\\u001b[31m\",\"time_us\":\"\\u001b[1m\"}")?,
    );
    let run = |arguments: &[&str]| -> std::io::Result<String> {
        let output = Command::new(env!("CARGO_BIN_EXE_forebay")).args(arguments).output()?;
        Ok(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
    };
    let report = run(&["memory", "report", &full])?;
    let texts = [
        report.clone(),
        run(&["memory", "diff", &full, &full])?,
        run(&["memory", "report", &empty])?,
        run(&["replay", &empty])?,
    ];
    std::fs::remove_dir_all(&folder)?;
    for text in texts {
        let unsafe_character = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(unsafe_character), "{text:?}");
    }
    for escaped in [r"d\u{1b}[2J", r"c\u{7}", r"m\u{202e}\u{a}", r"o\u{1b}]0;x", r"f\u{9b}"] {
        assert!(report.contains(escaped), "{escaped}: {report}");
    }
    Ok(())
}
