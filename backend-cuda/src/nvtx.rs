//! NVTX: shows the modules and operations of a program as ranges in tools such as Nsight Systems.
//!
//! Since version 3, NVTX has no library of its own: a tool names its library in `NVTX_INJECTION64_PATH` or
//! preloads it. The program passes that library the addresses of function pointers, which the tool fills in.
//! This module does that much, so nothing is linked, and without a tool nothing runs. NVTX's `nvtxTypes.h`
//! describes the protocol.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{env, mem, ptr};

use forebay_core::memory::profiler_ranges::{self, RangeListener};
use libloading::Library;

use crate::settings;

/// Reason why no tool receives ranges.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvtxUnavailable {
    /// The program does not run under a tool.
    #[error(
        "no tool records NVTX ranges: NVTX_INJECTION64_PATH is not set; run the program under one, as `nsys profile --trace=cuda,nvtx`"
    )]
    NoTool,
    /// The library that `NVTX_INJECTION64_PATH` names is not a tool's, or cannot be loaded.
    #[error("NVTX_INJECTION64_PATH={path}: {reason}")]
    LoadFailed {
        /// The file.
        path: String,
        /// The cause.
        reason: String,
    },
}

/// Shows modules and operations as NVTX ranges, or stops. `FOREBAY_NVTX=1` enables this when the first device
/// is opened. The setting applies to the whole process and all its devices.
///
/// # Errors
/// The program does not run under a tool that listens, or the tool's library cannot be used.
pub fn set_nvtx(on: bool) -> Result<(), NvtxUnavailable> {
    static TOOL: OnceLock<Result<NvtxTool, NvtxUnavailable>> = OnceLock::new();
    if !on {
        profiler_ranges::set_range_listener(None);
        settings::set_direct_launches(false);
        return Ok(());
    }
    let tool = TOOL.get_or_init(NvtxTool::load).as_ref().map_err(Clone::clone)?;
    profiler_ranges::set_range_listener(Some(tool));
    settings::set_direct_launches(true);
    Ok(())
}

/// Maximum number of functions of an NVTX module, including the unused index 0, plus a terminating null.
const MAX_FUNCTIONS: usize = 17;
/// Number of functions of NVTX's modules, by index: none, core, CUDA, OpenCL, the CUDA runtime, core with
/// domains, synchronisation.
const FUNCTION_COUNTS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const NVTX_VERSION: u32 = 3;
/// Indices of functions of the core module.
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

type FunctionSlot = AtomicPtr<c_void>;
type GetExportTableFn = extern "C" fn(u32) -> *const c_void;
type InitializeFn = unsafe extern "C" fn(GetExportTableFn) -> c_int;
type RangePushFn = unsafe extern "C" fn(*const c_char) -> c_int;
type RangePopFn = unsafe extern "C" fn() -> c_int;

/// Slots into which a tool writes its functions.
static FUNCTIONS: [[FunctionSlot; MAX_FUNCTIONS]; FUNCTION_COUNTS.len()] =
    [const { [const { FunctionSlot::new(ptr::null_mut()) }; MAX_FUNCTIONS] }; FUNCTION_COUNTS.len()];

#[repr(C)]
struct ExportTableCallbacks {
    size: usize,
    table: extern "C" fn(c_uint, *mut *const *const FunctionSlot, *mut c_uint) -> c_int,
}

static CALLBACKS: ExportTableCallbacks =
    ExportTableCallbacks { size: size_of::<ExportTableCallbacks>(), table: get_function_table };

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set: extern "C" fn(u32),
}

static VERSION_INFO: VersionInfo =
    VersionInfo { size: size_of::<VersionInfo>(), version: NVTX_VERSION, reserved: 0, set: ignore_version };

extern "C" fn ignore_version(_: u32) {}

extern "C" fn get_export_table(id: u32) -> *const c_void {
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// Stores the slots of a module's functions in `table`, as a null-terminated array, and their number.
extern "C" fn get_function_table(
    module: c_uint,
    table: *mut *const *const FunctionSlot,
    size: *mut c_uint,
) -> c_int {
    struct SlotPointers([[*const FunctionSlot; MAX_FUNCTIONS]; FUNCTION_COUNTS.len()]);
    // SAFETY: the pointers are to a static, whose slots are atomic.
    unsafe impl Sync for SlotPointers {}
    // SAFETY: as above.
    unsafe impl Send for SlotPointers {}
    static POINTERS: OnceLock<SlotPointers> = OnceLock::new();
    let pointers = POINTERS.get_or_init(|| {
        let mut pointers = [[ptr::null(); MAX_FUNCTIONS]; FUNCTION_COUNTS.len()];
        for ((pointers, slots), count) in pointers.iter_mut().zip(&FUNCTIONS).zip(FUNCTION_COUNTS) {
            let used = pointers.iter_mut().zip(slots).take(count).skip(1);
            used.for_each(|(pointer, slot)| *pointer = ptr::from_ref(slot));
        }
        SlotPointers(pointers)
    });
    let number = module as usize;
    let (Some(found), Some(&count @ 1..)) = (pointers.0.get(number), FUNCTION_COUNTS.get(number)) else {
        return 0;
    };
    // SAFETY: each pointer is null or a location of the tool for one result.
    unsafe {
        if let Some(size) = size.as_mut() {
            *size = count as c_uint;
        }
        if let Some(table) = table.as_mut() {
            *table = found.as_ptr();
        }
    }
    1
}

/// The functions of a tool.
struct NvtxTool {
    push: RangePushFn,
    pop: RangePopFn,
}

impl NvtxTool {
    /// Loads the tool's library and lets the tool fill in its functions.
    fn load() -> Result<Self, NvtxUnavailable> {
        let file = env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty());
        let path = file.as_deref().map_or_else(String::new, |path| path.to_string_lossy().into_owned());
        let load_failed = |reason: String| NvtxUnavailable::LoadFailed { path: path.clone(), reason };
        let load = |file| {
            // SAFETY: the user asked for this library; its initialisers are the tool's responsibility.
            unsafe { Library::new(file) }.map_err(|error| load_failed(error.to_string()))
        };
        let library = match (find_preloaded_tool(), &file) {
            (Some(library), _) => library,
            (None, Some(file)) => load(file)?,
            (None, None) => return Err(NvtxUnavailable::NoTool),
        };
        // SAFETY: NVTX defines the symbol's type, and this is that type.
        let initialize = unsafe { library.get::<InitializeFn>(INIT_SYMBOL) }
            .map_err(|error| load_failed(error.to_string()))?;
        // SAFETY: the tables that the tool reads have NVTX's layout and live as long as the process.
        if unsafe { initialize(get_export_table) } == 0 {
            return Err(load_failed("its InitializeInjectionNvtx2 failed".into()));
        }
        // The tool's functions are called until the process ends.
        mem::forget(library);
        let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|number| FUNCTIONS[1][number].load(Ordering::Acquire));
        if push.is_null() || pop.is_null() {
            return Err(load_failed("the tool does not accept ranges".into()));
        }
        // SAFETY: NVTX assigns these indices to nvtxRangePushA and nvtxRangePop, which have these types.
        unsafe {
            Ok(Self {
                push: mem::transmute::<*mut c_void, RangePushFn>(push),
                pop: mem::transmute::<*mut c_void, RangePopFn>(pop),
            })
        }
    }
}

/// Symbol that a tool's library exports.
const INIT_SYMBOL: &[u8] = b"InitializeInjectionNvtx2\0";

/// Returns a handle to the running program if a tool was preloaded into it.
#[cfg(unix)]
fn find_preloaded_tool() -> Option<Library> {
    let program = Library::from(libloading::os::unix::Library::this());
    // SAFETY: the address is never dereferenced.
    let is_tool = unsafe { program.get::<*const c_void>(INIT_SYMBOL) }.is_ok();
    is_tool.then_some(program)
}

#[cfg(not(unix))]
fn find_preloaded_tool() -> Option<Library> {
    None
}

impl RangeListener for NvtxTool {
    fn push(&self, name: &str) {
        thread_local! {
            static NAME: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        // At thread exit the range has no name: a guard of the program may be dropped after this buffer.
        let pushed = NAME.try_with(|bytes| {
            let bytes = &mut *bytes.borrow_mut();
            bytes.clear();
            // A name ends at its first null.
            bytes.extend(name.bytes().take_while(|&byte| byte != 0));
            bytes.push(0);
            if let Ok(name) = CStr::from_bytes_with_nul(bytes) {
                // SAFETY: the tool's function, with a null-terminated string.
                unsafe { (self.push)(name.as_ptr()) };
            }
        });
        if pushed.is_err() {
            // SAFETY: the tool's function, with a null-terminated string. `pop` ends this range, too.
            unsafe { (self.push)(c"".as_ptr()) };
        }
    }

    fn pop(&self) {
        // SAFETY: the tool's function, which takes nothing.
        unsafe { (self.pop)() };
    }
}
