//! WGSL to CUDA C++.
//!
//! A kernel is written once, in WGSL. Here naga parses and checks it, and a writer turns naga's intermediate form
//! into CUDA C++ that needs no header, for NVRTC. What the text does is what WGSL says it does: memory layouts,
//! wrapping integers, saturating conversions, zeroed workgroup memory, order of evaluation.
//!
//! The kernel's parameters are, in this order:
//! 1. one pointer per storage binding of `@group(0)` that the module declares, in the order of the binding numbers:
//!    `const T* __restrict__` where the kernel only reads, so no slice that it writes may overlap another one;
//! 2. if [`TranslatedKernel::needs_lengths`], one struct of as many `u64`, by value: the byte length of every binding;
//! 3. if [`TranslatedKernel::params_size`] is not 0, the block of the uniform at `@group(1) @binding(0)`, by value, in
//!    WGSL's layout.

mod entry;
mod expression;
mod function;
mod intrinsics;
mod math;
mod names;
mod types;
mod uniformity;
mod visit;

use naga::back::PipelineConstants;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{Module, ShaderStage};

/// What a caller may choose about a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslateOptions<'a> {
    /// Named in the first line of the source.
    pub label: &'a str,
    /// Whether workgroup memory starts as zeros, as WGSL says. A kernel that writes every element before it reads
    /// it starts faster without.
    pub zero_workgroup_memory: bool,
}

impl Default for TranslateOptions<'_> {
    fn default() -> Self {
        Self { label: "", zero_workgroup_memory: true }
    }
}

/// A kernel as CUDA C++.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TranslatedKernel {
    /// The text, complete.
    pub source: String,
    /// The kernel's `extern "C"` name in it.
    pub entry: String,
    /// Threads of a block.
    pub workgroup_size: [u32; 3],
    /// Bytes of `__shared__` memory.
    pub workgroup_bytes: u32,
    /// Those of it that a launch asks for: all, where it is more than a block has without asking, else none.
    pub dynamic_shared_bytes: u32,
    /// The storage bindings, in the order of the kernel's parameters.
    pub bindings: Vec<StorageBinding>,
    /// Whether the kernel asks for the lengths of its runtime-sized arrays.
    pub needs_lengths: bool,
    /// Bytes of the uniform block; 0 if there is none.
    pub params_size: u32,
    /// What the device has to offer.
    pub required_features: RequiredFeatures,
}

/// One storage binding of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageBinding {
    /// Its `@binding` number in `@group(0)`.
    pub binding: u32,
    /// Its name in the WGSL.
    pub name: String,
    /// Whether this entry point uses it at all.
    pub is_used: bool,
    /// Whether this entry point, or a function it calls, may write it.
    pub is_written: bool,
    /// Bytes before its runtime-sized array, or its whole size if it has none.
    pub fixed_size: u32,
    /// Bytes from one element of its runtime-sized array to the next; 0 if it has none.
    pub stride: u32,
}

/// Features that a kernel uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequiredFeatures {
    /// 16-bit floats.
    pub f16: bool,
    /// 64-bit floats.
    pub f64: bool,
    /// 64-bit integers.
    pub i64: bool,
    /// Subgroup operations, or a subgroup builtin.
    pub subgroups: bool,
}

/// Why a kernel could not be translated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TranslateError {
    /// Not WGSL.
    #[error("the WGSL does not parse: {0}")]
    Parse(String),
    /// WGSL, but not a valid module.
    #[error("the WGSL is not valid: {0}")]
    Invalid(String),
    /// No compute entry point of that name.
    #[error("there is no compute entry point `{entry}`; the module has {}", join_names(found))]
    EntryNotFound {
        /// The name asked for.
        entry: String,
        /// The compute entry points that there are.
        found: Vec<String>,
    },
    /// An override that does not exist, has no value or does not hold the one given.
    #[error("an override of the WGSL cannot be set: {0}")]
    Override(String),
    /// A resource that kernels cannot have.
    #[error(
        "`{name}` is {found}: kernels have storage buffers at @group(0) and one uniform at @group(1) @binding(0)"
    )]
    Resource {
        /// The variable.
        name: String,
        /// What it is.
        found: String,
    },
    /// More invocations in a workgroup than a block has threads.
    #[error("a workgroup of {size:?} invocations is too large: CUDA's blocks have 1024 threads, 64 along z")]
    WorkgroupSize {
        /// The workgroup's size.
        size: [u32; 3],
    },
    /// More workgroup memory than a block has.
    #[error("the kernel uses {bytes} bytes of workgroup memory and a block has {limit}")]
    WorkgroupMemory {
        /// Bytes used.
        bytes: u64,
        /// Bytes there are.
        limit: u32,
    },
    /// Something that WGSL has and CUDA C++, as written here, has not.
    #[error("{0} cannot be translated to CUDA")]
    Unsupported(String),
}

/// Workgroup memory of a block without asking the driver for more.
const MAX_STATIC_SHARED_BYTES: u32 = 48 << 10;
/// The most that a block of any device has.
const MAX_SHARED_BYTES: u32 = 227 << 10;

/// Translates the compute entry point `entry` of a module, with the values of its `override` constants.
pub fn translate(
    wgsl: &str,
    entry: &str,
    overrides: &[(&str, f64)],
) -> Result<TranslatedKernel, TranslateError> {
    translate_with_options(wgsl, entry, overrides, &TranslateOptions::default())
}

/// [`translate`], with options.
pub fn translate_with_options(
    wgsl: &str,
    entry: &str,
    overrides: &[(&str, f64)],
    options: &TranslateOptions<'_>,
) -> Result<TranslatedKernel, TranslateError> {
    let declared =
        naga::front::wgsl::parse_str(wgsl).map_err(|e| TranslateError::Parse(e.emit_to_string(wgsl)))?;
    let is_entry = |e: &naga::EntryPoint| e.stage == ShaderStage::Compute && e.name == entry;
    if !declared.entry_points.iter().any(is_entry) {
        let computes = declared.entry_points.iter().filter(|e| e.stage == ShaderStage::Compute);
        let found = computes.map(|e| e.name.clone()).collect();
        return Err(TranslateError::EntryNotFound { entry: entry.to_owned(), found });
    }
    let info = validate(&declared, wgsl)?;
    let values: PipelineConstants = overrides.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
    let stage = Some((ShaderStage::Compute, entry));
    let (module, _) = naga::back::pipeline_constants::process_overrides(&declared, &info, stage, &values)
        .map_err(|e| TranslateError::Override(e.to_string()))?;
    // That pass leaves a module without overrides as it is; what the entry point does not use goes here.
    let mut module = module.into_owned();
    module.entry_points.retain(is_entry);
    naga::compact::compact(&mut module, naga::compact::KeepUnused::No);
    let info = validate(&module, wgsl)?;
    entry::write_module(&declared, &module, &info, wgsl, options)
}

fn validate(module: &Module, wgsl: &str) -> Result<naga::valid::ModuleInfo, TranslateError> {
    Validator::new(ValidationFlags::all(), Capabilities::all())
        .subgroup_stages(naga::valid::ShaderStages::all())
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(module)
        .map_err(|e| TranslateError::Invalid(e.emit_to_string(wgsl)))
}

fn join_names(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn unsupported<T>(what: impl Into<String>) -> Result<T, TranslateError> {
    Err(TranslateError::Unsupported(what.into()))
}
