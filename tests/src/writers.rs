//! Writes every kernel as MSL (Metal) and as HLSL (Direct3D 12), without their drivers.
//!
//! Kernels are those of null devices with the types of each API, and of devices without optional types. Modules come
//! from the wgpu backend in the form that wgpu receives, and the writers' options are wgpu's. A kernel that a writer
//! refuses would fail only on a machine with that API.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;
use forebay::backend::Features;
use forebay::backend::null::{CardProfile, NullKernel};
use naga::back::{hlsl, msl};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::ModuleInfo;
use naga::{AddressSpace, Module, ResourceBinding, ShaderStage};

use crate::{kernels, lowering};

/// Language into which kernels are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShaderLanguage {
    /// Metal's shading language.
    Msl,
    /// Direct3D's shading language.
    Hlsl,
}

impl fmt::Display for ShaderLanguage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Msl => "MSL",
            Self::Hlsl => "HLSL",
        })
    }
}

/// Results of all writers.
#[derive(Clone, Debug, Default)]
pub struct WriterReport {
    /// Number of kernels written in each language.
    pub written: BTreeMap<ShaderLanguage, usize>,
    /// Error messages by language and kernel.
    pub failures: BTreeMap<String, String>,
}

impl fmt::Display for WriterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (label, why) in &self.failures {
            writeln!(f, "FAILED {label}: {why}")?;
        }
        for (language, count) in &self.written {
            writeln!(f, "{language}: {count} kernels written")?;
        }
        let passed: usize = self.written.values().sum();
        write!(f, "writers: {passed} passed, {} failed", self.failures.len())
    }
}

/// Versions of the languages: those of devices with all optional types, and the oldest that wgpu uses.
#[derive(Clone, Copy)]
struct LanguageVersions {
    msl: (u8, u8),
    hlsl: hlsl::ShaderModel,
}

/// Writes all kernels in both languages. `filters` selects kernels whose label contains one of them. `golden` is the
/// folder of the golden calls.
///
/// # Errors
/// An operation fails on the null device.
pub fn check(golden: &Path, filters: &[String]) -> Result<WriterReport> {
    let start = Instant::now();
    let newest = LanguageVersions { msl: (3, 1), hlsl: hlsl::ShaderModel::V6_6 };
    let oldest = LanguageVersions { msl: (2, 0), hlsl: hlsl::ShaderModel::V5_1 };
    // Neither API has f64.
    let typed = Features { f64: false, f64_math: false, ..CardProfile::default().features };
    let mut jobs = Vec::new();
    for (features, is_software, versions) in [(typed, false, newest), (Features::default(), true, oldest)] {
        let mut seen = HashSet::new();
        for kernel in kernels::collect_kernels(features, is_software, golden)? {
            let is_wanted = filters.is_empty() || filters.iter().any(|f| kernel.label.contains(f.as_str()));
            if is_wanted && seen.insert(kernels::with_source(&kernel, |source| source.to_content())) {
                jobs.push((kernel, versions));
            }
        }
    }
    println!("{} kernels collected in {:.0} s", jobs.len(), start.elapsed().as_secs_f64());
    let (next, shared) = (AtomicUsize::new(0), Mutex::new(WriterReport::default()));
    let work = || {
        while let Some((kernel, versions)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let results = write_kernel(kernel, *versions);
            let mut report = shared.lock().unwrap_or_else(PoisonError::into_inner);
            for (language, result) in results {
                match result {
                    Ok(_) => *report.written.entry(language).or_default() += 1,
                    Err(why) => drop(report.failures.insert(format!("{language} {}", kernel.label), why)),
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    Ok(shared.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Writes a kernel in both languages.
fn write_kernel(
    kernel: &NullKernel,
    versions: LanguageVersions,
) -> [(ShaderLanguage, Result<String, String>); 2] {
    type Writer = fn(&NullKernel, LanguageVersions, &Module, &ModuleInfo) -> Result<String, String>;
    let writers: [(ShaderLanguage, Writer); 2] =
        [(ShaderLanguage::Msl, write_msl), (ShaderLanguage::Hlsl, write_hlsl)];
    let prepared = lowering::lower(kernel, &CardProfile::default().limits, u32::MAX);
    writers.map(|(language, write)| {
        let written = prepared.as_ref().map_err(Clone::clone).and_then(|(module, info)| {
            // Writers panic on some modules that they do not support.
            catch_unwind(|| write(kernel, versions, module, info))
                .unwrap_or_else(|_| Err("naga's writer panicked".to_owned()))
        });
        (language, written)
    })
}

/// Returns the bindings of a module's buffers.
fn buffers(module: &Module) -> impl Iterator<Item = ResourceBinding> {
    module.global_variables.iter().filter_map(|(_, variable)| variable.binding)
}

fn write_msl(
    kernel: &NullKernel,
    versions: LanguageVersions,
    module: &Module,
    info: &ModuleInfo,
) -> Result<String, String> {
    // wgpu orders the slots like this: immediates, then buffers, then the sizes of runtime arrays.
    let slots = buffers(module).zip(1u8..).map(|(binding, slot)| {
        (binding, msl::BindTarget { buffer: Some(slot), mutable: true, ..Default::default() })
    });
    let resources = msl::EntryPointResources {
        resources: slots.collect(),
        immediates_buffer: Some(0),
        sizes_buffer: Some(30),
    };
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = msl::Options {
        lang_version: versions.msl,
        per_entry_point_map: [(kernel.entry_point.clone(), resources)].into(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: kernel.zero_workgroup_memory,
        force_loop_bounding: false,
        ..msl::Options::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((ShaderStage::Compute, kernel.entry_point.clone())),
        ..Default::default()
    };
    let (source, translation) =
        msl::write_string(module, info, &options, &pipeline).map_err(|error| error.to_string())?;
    check_entry_names(translation.entry_point_names)?;
    Ok(source)
}

fn write_hlsl(
    kernel: &NullKernel,
    versions: LanguageVersions,
    module: &Module,
    info: &ModuleInfo,
) -> Result<String, String> {
    let target = |space: u8, register: u32| hlsl::BindTarget { space, register, ..Default::default() };
    let has_immediates =
        module.global_variables.iter().any(|(_, variable)| variable.space == AddressSpace::Immediate);
    let options = hlsl::Options {
        shader_model: versions.hlsl,
        binding_map: buffers(module)
            .zip(0..)
            .map(|(binding, register)| (binding, target(1, register)))
            .collect(),
        fake_missing_bindings: false,
        special_constants_binding: Some(target(2, 0)),
        immediates_target: has_immediates.then(|| target(0, 0)),
        zero_initialize_workgroup_memory: kernel.zero_workgroup_memory,
        restrict_indexing: false,
        force_loop_bounding: false,
        ..hlsl::Options::default()
    };
    let pipeline =
        hlsl::PipelineOptions { entry_point: Some((ShaderStage::Compute, kernel.entry_point.clone())) };
    let mut source = String::new();
    let reflection = hlsl::Writer::new(&mut source, &options, &pipeline)
        .write(module, info, None)
        .map_err(|error| error.to_string())?;
    check_entry_names(reflection.entry_point_names)?;
    Ok(source)
}

/// Checks that the writer found a resource for each binding of the entry point.
fn check_entry_names(names: Vec<Result<String, impl fmt::Display>>) -> Result<(), String> {
    if names.is_empty() {
        return Err("the writer wrote no entry point".to_owned());
    }
    names.into_iter().try_for_each(|name| name.map(drop).map_err(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(wgsl: &str, hlsl: hlsl::ShaderModel) -> [Result<String, String>; 2] {
        let kernel = NullKernel {
            label: "test".into(),
            wgsl: wgsl.into(),
            entry_point: "main".into(),
            overrides: vec![("factor".into(), 3.0)],
            zero_workgroup_memory: false,
        };
        write_kernel(&kernel, LanguageVersions { msl: (3, 1), hlsl }).map(|(_, result)| result)
    }

    const KERNEL: &str = "override factor: f32 = 1.0;
        struct Params { n: u32 }
        @group(0) @binding(0) var<storage, read_write> x: array<TYPE>;
        @group(1) @binding(0) var<uniform> params: Params;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if id.x < params.n { x[id.x] = x[id.x] * TYPE(factor); }
        }";

    #[test]
    fn kernels_are_written_in_both_languages() {
        let [msl, hlsl] =
            written(&KERNEL.replace("TYPE", "f32"), hlsl::ShaderModel::V5_1).map(Result::unwrap);
        assert!(msl.contains("kernel void") && msl.contains("[[buffer(0)]]"), "{msl}");
        assert!(hlsl.contains("numthreads(64, 1, 1)") && hlsl.contains("ConstantBuffer"), "{hlsl}");
    }

    #[test]
    fn a_type_that_a_language_lacks_is_an_error() {
        let [msl, _] = written(&KERNEL.replace("TYPE", "f64"), hlsl::ShaderModel::V6_6);
        assert!(msl.is_err(), "{msl:?}");
    }
}
