//! Compiles CUDA C++ to machine code through NVRTC.
//!
//! NVRTC is loaded at first use and needs neither a GPU nor a driver. The result is a cubin for one
//! architecture: the driver has nothing to compile, and no PTX version to refuse.

use std::ffi::{CString, NulError, c_char};

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use crate::toolkit;

/// Reason why a kernel could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// The library is not installed.
    #[error(
        "NVRTC was not found: install the CUDA toolkit's libnvrtc (13.x) where the loader looks for libraries"
    )]
    NotInstalled,
    /// The compiler refuses the source.
    #[error("NVRTC does not compile the kernel for sm_{arch}:\n{log}")]
    InvalidSource {
        /// The requested architecture.
        arch: u32,
        /// The compiler's log.
        log: String,
    },
    /// The source has a zero byte.
    #[error("the source of a kernel has a zero byte: {0}")]
    NulByte(#[from] NulError),
    /// NVRTC itself failed.
    #[error("NVRTC failed while {doing}: {error:?}")]
    Nvrtc {
        /// The step.
        doing: &'static str,
        /// NVRTC's error.
        error: NvrtcError,
    },
}

/// Reports whether NVRTC can be loaded.
pub fn is_available() -> bool {
    toolkit::load_nvrtc();
    // SAFETY: loads the library and runs its initialisers, as every later call does.
    unsafe { sys::is_culib_present() }
}

/// Returns NVRTC's version as major and minor number.
pub fn version() -> Result<(u32, u32), CompileError> {
    if !is_available() {
        return Err(CompileError::NotInstalled);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid for writes.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
        .result()
        .map_err(nvrtc_error("asking its version"))?;
    Ok((major.unsigned_abs(), minor.unsigned_abs()))
}

/// Compiles a source without headers for `sm_{arch}` (for example 90) to a cubin.
pub fn compile(source: &str, name: &str, arch: u32) -> Result<Vec<u8>, CompileError> {
    compile_with_options(source, name, arch, &[])
}

/// Compiles like [`compile`], with additional compiler options. `--gpu-architecture=sm_90a` among the options
/// selects an architecture-specific variant and replaces the one made from `arch`.
pub fn compile_with_options(
    source: &str,
    name: &str,
    arch: u32,
    options: &[&str],
) -> Result<Vec<u8>, CompileError> {
    let machine = format!("--gpu-architecture=sm_{arch}");
    let machine = (!options.iter().any(|o| o.starts_with("--gpu-architecture"))).then_some(machine.as_str());
    let options: Vec<&str> = machine.into_iter().chain(options.iter().copied()).collect();
    NvrtcProgram::compile(source, name, arch, &options)?.cubin()
}

/// Compiles a source for the instruction set `compute_{arch}` without making machine code, which finds all errors of
/// the language in less time.
pub fn check(source: &str, name: &str, arch: u32, options: &[&str]) -> Result<(), CompileError> {
    let virtual_machine = format!("--gpu-architecture=compute_{arch}");
    let options: Vec<&str> = options.iter().copied().chain([virtual_machine.as_str()]).collect();
    NvrtcProgram::compile(source, name, arch, &options).map(drop)
}

/// A program of NVRTC, destroyed with this value.
struct NvrtcProgram {
    handle: sys::nvrtcProgram,
    /// NVRTC may keep pointers to the source and its name.
    _texts: [CString; 2],
}

impl NvrtcProgram {
    fn compile(source: &str, name: &str, arch: u32, options: &[&str]) -> Result<Self, CompileError> {
        if !is_available() {
            return Err(CompileError::NotInstalled);
        }
        let program = Self::new(source, name)?;
        let mut all = vec!["--std=c++17".to_owned()];
        // Omits built-in headers for features that no kernel uses, such as textures, so parsing is faster. NVRTC
        // before 13 lacks the option.
        if version()?.0 >= 13 {
            all.push("--minimal".to_owned());
        }
        all.extend(options.iter().map(|&o| o.to_owned()));
        // SAFETY: the program has been created and not destroyed.
        match unsafe { result::compile_program(program.handle, &all) } {
            Ok(()) => Ok(program),
            Err(NvrtcError(sys::nvrtcResult::NVRTC_ERROR_COMPILATION)) => {
                Err(CompileError::InvalidSource { arch, log: program.log()? })
            }
            Err(error) => Err(CompileError::Nvrtc { doing: "compiling", error }),
        }
    }

    fn new(source: &str, name: &str) -> Result<Self, CompileError> {
        let (source, name) = (CString::new(source)?, CString::new(name)?);
        let handle =
            result::create_program(&source, Some(&name)).map_err(nvrtc_error("creating a program"))?;
        Ok(Self { handle, _texts: [source, name] })
    }

    fn log(&self) -> Result<String, CompileError> {
        // SAFETY: the program has been created and not destroyed.
        let log = unsafe { result::get_program_log(self.handle) }.map_err(nvrtc_error("reading the log"))?;
        let bytes: Vec<u8> = log.iter().map(|&c: &c_char| c as u8).take_while(|&b| b != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CompileError> {
        let mut size = 0;
        // SAFETY: the program has been created and not destroyed; `size` is valid for writes.
        unsafe { sys::nvrtcGetCUBINSize(self.handle, &mut size) }
            .result()
            .map_err(nvrtc_error("sizing the cubin"))?;
        let mut cubin = vec![0u8; size];
        // SAFETY: as above, and `cubin` has the size that NVRTC has just returned.
        unsafe { sys::nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast()) }
            .result()
            .map_err(nvrtc_error("reading the cubin"))?;
        Ok(cubin)
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the program has been created and is not used again. An error here cannot be handled.
        let _ = unsafe { result::destroy_program(self.handle) };
    }
}

fn nvrtc_error(doing: &'static str) -> impl Fn(NvrtcError) -> CompileError {
    move |error| CompileError::Nvrtc { doing, error }
}
