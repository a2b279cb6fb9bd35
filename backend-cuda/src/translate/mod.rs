//! Translates WGSL to CUDA C++.
//!
//! A kernel is written once, in WGSL. naga parses and validates the text, and a writer turns naga's IR into
//! CUDA C++ without headers, for NVRTC. The output has WGSL's semantics: memory layouts, wrapping integers,
//! saturating conversions, zeroed workgroup memory, order of evaluation.
//!
//! The kernel's parameters are, in this order:
//! 1. One pointer for each storage binding of `@group(0)` that the module declares, in the order of the
//!    binding numbers. A binding that the kernel only reads is `const T* __restrict__`, so no written slice
//!    may overlap it.
//! 2. If [`TranslatedKernel::needs_lengths`], one struct of as many `u64`, by value: the byte length of every
//!    binding.
//! 3. If [`TranslatedKernel::params_size`] is not 0, the uniform block at `@group(1) @binding(0)`, by value,
//!    in WGSL's layout.

//!
//! Cooperative matrices of 16 x 16 elements are `mma.sync` instructions (`prelude/cooperative.cuh`). A module
//! declares two constants for what WGSL cannot say. `OPERAND_BITS` is 0xf16 or 0xbf16: f32 memory of matrices A and
//! B holds packed elements of this type. With `DIFFERENCE_IS_PRODUCT`, the difference of two matrices is their
//! product by elements. A module without such matrices may declare `RESIDENT_WORKGROUPS`, the number of workgroups on a
//! multiprocessor for which the compiler leaves registers.

mod entry;
mod expression;
mod function;
mod intrinsics;
mod math;
mod names;
mod types;
mod uniformity;
mod visit;

use forebay_core::backend::KernelSource;
use naga::back::PipelineConstants;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{Module, ShaderStage};

/// A kernel as CUDA C++.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TranslatedKernel {
    /// The complete source.
    pub source: String,
    /// The kernel's `extern "C"` name.
    pub entry: String,
    /// Threads of a block.
    pub workgroup_size: [u32; 3],
    /// Bytes of dynamic shared memory of a launch: all if they exceed the static limit, else 0.
    pub dynamic_shared_bytes: u32,
    /// Number of storage bindings.
    pub binding_count: usize,
    /// If true, the kernel uses the lengths of its runtime-sized arrays.
    pub needs_lengths: bool,
    /// Bytes of the uniform block; 0 if there is none.
    pub params_size: u32,
    /// If true, the kernel uses cooperative matrices, which need an architecture of 80 or later.
    pub needs_matrix_units: bool,
}

/// Reason why a kernel could not be translated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TranslateError {
    /// The text is not WGSL.
    #[error("the WGSL does not parse: {0}")]
    Parse(String),
    /// The module is not valid.
    #[error("the WGSL is not valid: {0}")]
    Invalid(String),
    /// There is no compute entry point of that name.
    #[error("there is no compute entry point `{entry}`; the module has {}", join_names(found))]
    EntryNotFound {
        /// The requested name.
        entry: String,
        /// The compute entry points of the module.
        found: Vec<String>,
    },
    /// An override does not exist, has no value, or cannot hold the value.
    #[error("an override of the WGSL cannot be set: {0}")]
    Override(String),
    /// A resource of an unsupported kind.
    #[error(
        "`{name}` is {found}: kernels have storage buffers at @group(0) and one uniform at @group(1) @binding(0)"
    )]
    Resource {
        /// The variable.
        name: String,
        /// Description of the resource.
        found: String,
    },
    /// A workgroup has more invocations than a block has threads.
    #[error("a workgroup of {size:?} invocations is too large: CUDA's blocks have 1024 threads, 64 along z")]
    WorkgroupSize {
        /// The workgroup's size.
        size: [u32; 3],
    },
    /// A kernel uses more workgroup memory than a block has.
    #[error("the kernel uses {bytes} bytes of workgroup memory and a block has {limit}")]
    WorkgroupMemory {
        /// Bytes used.
        bytes: u64,
        /// Bytes available.
        limit: u32,
    },
    /// A feature of WGSL that the translator does not support.
    #[error("{0} cannot be translated to CUDA")]
    Unsupported(String),
}

/// Static shared memory of a block.
const MAX_STATIC_SHARED_BYTES: u32 = 48 << 10;
/// Maximum shared memory of a block on any device.
const MAX_SHARED_BYTES: u32 = 227 << 10;

/// Translates the compute entry point of a module, with the values of its `override` constants.
pub fn translate(source: &KernelSource<'_>) -> Result<TranslatedKernel, TranslateError> {
    let KernelSource { wgsl, entry_point: entry, overrides, .. } = *source;
    let declared =
        naga::front::wgsl::parse_str(wgsl).map_err(|e| TranslateError::Parse(e.emit_to_string(wgsl)))?;
    let is_entry = |e: &naga::EntryPoint| e.stage == ShaderStage::Compute && e.name == entry;
    if !declared.entry_points.iter().any(is_entry) {
        let compute_entries = declared.entry_points.iter().filter(|e| e.stage == ShaderStage::Compute);
        let found = compute_entries.map(|e| e.name.clone()).collect();
        return Err(TranslateError::EntryNotFound { entry: entry.to_owned(), found });
    }
    let info = validate(&declared, wgsl)?;
    let values: PipelineConstants = overrides.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
    let stage = Some((ShaderStage::Compute, entry));
    let (module, _) = naga::back::pipeline_constants::process_overrides(&declared, &info, stage, &values)
        .map_err(|e| TranslateError::Override(e.to_string()))?;
    // The override pass returns a module without overrides unchanged; unused items are removed here.
    let mut module = module.into_owned();
    module.entry_points.retain(is_entry);
    naga::compact::compact(&mut module, naga::compact::KeepUnused::No);
    let info = validate(&module, wgsl)?;
    entry::write_module(&declared, &module, &info, source)
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

fn unsupported<T>(feature: impl Into<String>) -> Result<T, TranslateError> {
    Err(TranslateError::Unsupported(feature.into()))
}
