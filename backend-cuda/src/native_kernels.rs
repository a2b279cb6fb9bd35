//! Kernels written in CUDA C++ (`shaders/cuda`): compiled at first use and cached on disk like all others.
//!
//! A new kernel implements [`NativeKernel`] for the type of its variants; [`NativeKernels`] compiles, caches and
//! launches them. `sgemm_small` and `attention` are examples.

use std::collections::hash_map::Entry;
use std::ffi::CStr;
use std::fmt::Debug;
use std::hash::Hash;
use std::iter;
use std::sync::{Arc, RwLock};

use forebay_core::backend::SourceError;
use forebay_core::backend::compile_pool::PendingCode;
use forebay_core::sync::RwLockUnpoisoned;
use rustc_hash::FxHashMap;

use crate::context::{Context, CudaModule, CudaStream, Function, KernelLaunch, arg_bytes};
use crate::kernels::{KernelCode, KernelRegistry, SubmitStatus};
use crate::nvrtc;

/// Most blocks of a cluster on every device that has clusters.
const PORTABLE_CLUSTER_BLOCKS: u32 = 8;

/// One variant of a kernel.
pub trait NativeKernel: Copy + Debug + Eq + Hash {
    /// Message that is logged if the kernel cannot be compiled.
    const FALLBACK_MESSAGE: &'static str;

    /// Returns the CUDA C++ source.
    fn source(&self) -> String;

    /// Returns additional NVRTC options.
    fn options(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the name of the function.
    fn entry(&self) -> &'static CStr;

    /// Returns the threads of a block.
    fn block_threads(&self) -> u32;

    /// Returns the bytes of shared memory of a block.
    fn shared_bytes(&self) -> u32;

    /// Returns the blocks of a cluster.
    fn cluster_blocks(&self) -> u32 {
        1
    }
}

/// Joins source texts after a header of `#define` lines.
pub(crate) fn with_defines(defines: &[(&str, u32)], texts: &[&str]) -> String {
    let defines = defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let texts = iter::once(&forebay_shaders::cuda::PDL).chain(texts);
    defines.chain(texts.map(|&text| text.to_owned())).collect()
}

/// Converts sizes or strides; `None` if one is out of range.
pub(crate) fn convert_all<F, T: TryFrom<F> + Copy + Default, const N: usize>(from: [F; N]) -> Option<[T; N]> {
    let mut all = [T::default(); N];
    for (to, value) in all.iter_mut().zip(from) {
        *to = value.try_into().ok()?;
    }
    Some(all)
}

/// A kernel with its parameters and its grid.
pub(crate) type LaunchPlan<K, P> = (K, P, [u32; 3]);

/// Enqueues a variant of a kernel, which is loaded as `function`.
///
/// # Safety
/// The kernel takes one `P`, in this layout, and the addresses in it hold what the kernel reads and writes.
pub(crate) unsafe fn launch_native<P>(
    stream: &CudaStream,
    kernel: &impl NativeKernel,
    function: Function,
    blocks: [u32; 3],
    params: &P,
) -> Result<(), SourceError> {
    let call = launch_of(kernel, function, blocks);
    // SAFETY: the caller's promise.
    unsafe { stream.launch(&call, &[arg_bytes(params)]) }
}

fn launch_of(kernel: &impl NativeKernel, function: Function, blocks: [u32; 3]) -> KernelLaunch {
    KernelLaunch {
        function,
        grid: blocks,
        block: [kernel.block_threads(), 1, 1],
        dynamic_shared_bytes: kernel.shared_bytes(),
    }
}

/// The variants of a kernel that a device has requested.
#[derive(Debug)]
pub(crate) struct NativeKernels<K> {
    variants: RwLock<FxHashMap<K, NativeKernelState>>,
}

impl<K> Default for NativeKernels<K> {
    fn default() -> Self {
        Self { variants: RwLock::default() }
    }
}

#[derive(Debug)]
enum NativeKernelState {
    /// The code is being compiled.
    Compiling(Arc<PendingCode<Vec<u8>>>),
    /// The kernel is loaded; the module keeps the code alive.
    Ready { function: Function, _module: CudaModule },
    /// The kernel cannot be compiled.
    Failed,
}

/// Result of a lookup of a variant.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NativeKernelLookup {
    Ready(Function),
    Compiling,
    Failed,
}

impl<K: NativeKernel> NativeKernels<K> {
    /// Enqueues a variant on `stream` if it is compiled. Without a stream, only starts to compile the variant.
    /// If `wait` is true, waits for the compiler.
    ///
    /// # Safety
    /// Same conditions as [`launch_native`].
    pub(crate) unsafe fn submit<P>(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        (kernel, params, blocks): LaunchPlan<K, P>,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        match (self.get_or_compile(context, kernels, kernel, &[], wait)?, stream) {
            (NativeKernelLookup::Compiling, _) => return Ok(SubmitStatus::Compiling),
            (NativeKernelLookup::Failed, _) => return Ok(SubmitStatus::Declined),
            (NativeKernelLookup::Ready(_), None) => {}
            (NativeKernelLookup::Ready(function), Some(stream)) => {
                // SAFETY: the caller's promise.
                unsafe { launch_native(stream, &kernel, function, blocks, &params) }?;
            }
        }
        Ok(SubmitStatus::Submitted)
    }

    /// Returns a variant, starting its compilation if necessary, after those of `ahead`, which will be needed
    /// soon. Loads the variant once it is compiled; if `wait` is true, waits for the compiler.
    pub(crate) fn get_or_compile(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        kernel: K,
        ahead: &[K],
        wait: bool,
    ) -> Result<NativeKernelLookup, SourceError> {
        match self.variants.read_unpoisoned().get(&kernel) {
            Some(NativeKernelState::Ready { function, .. }) => {
                return Ok(NativeKernelLookup::Ready(*function));
            }
            Some(NativeKernelState::Failed) => return Ok(NativeKernelLookup::Failed),
            Some(NativeKernelState::Compiling(_)) | None => {}
        }
        // The lock is held meanwhile: another thread that needs the variant waits, and does not compile it again.
        let mut states = self.variants.write_unpoisoned();
        for &kernel in ahead.iter().chain([&kernel]) {
            if let Entry::Vacant(vacant) = states.entry(kernel) {
                vacant.insert(NativeKernelState::start(kernel, context, kernels)?);
            }
        }
        if let Some(NativeKernelState::Compiling(code)) = states.get(&kernel) {
            // NVRTC 13.0 and later are known to accept the kernels. An older version may refuse them, so the
            // thread waits for its answer.
            let accepts_kernels = nvrtc::version().is_ok_and(|version| version >= (13, 0));
            if !wait && accepts_kernels && code.get().is_none() {
                return Ok(NativeKernelLookup::Compiling);
            }
            let module = code.wait().map_err(str::to_owned);
            let module = module.and_then(|cubin| CudaModule::load(context, cubin).map_err(|e| e.to_string()));
            let state = match module {
                Ok(module) => NativeKernelState::from_module(kernel, module)?,
                Err(error) => NativeKernelState::log_failure::<K>(&error),
            };
            states.insert(kernel, state);
        }
        Ok(match states.get(&kernel) {
            Some(NativeKernelState::Ready { function, .. }) => NativeKernelLookup::Ready(*function),
            _ => NativeKernelLookup::Failed,
        })
    }
}

impl NativeKernelState {
    /// Starts the compilation of a variant at its first use.
    fn start<K: NativeKernel>(
        kernel: K,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
    ) -> Result<Self, SourceError> {
        match kernels.load_or_compile(context, &format!("{kernel:?}"), &kernel.source(), kernel.options()) {
            Ok(KernelCode::Compiling(code)) => Ok(Self::Compiling(code)),
            Ok(KernelCode::Loaded(module)) => Self::from_module(kernel, module),
            Err(error) => Ok(Self::log_failure::<K>(&error.to_string())),
        }
    }

    fn from_module<K: NativeKernel>(kernel: K, module: CudaModule) -> Result<Self, SourceError> {
        let function = module.function(kernel.entry())?;
        function.set_max_dynamic_shared(kernel.shared_bytes())?;
        if kernel.cluster_blocks() > PORTABLE_CLUSTER_BLOCKS {
            function.allow_non_portable_clusters()?;
            // The device, or the part of it that this process may use, may have no room for such a cluster.
            if function.max_active_clusters(kernel.cluster_blocks(), &launch_of(&kernel, function, [1; 3]))?
                == 0
            {
                let blocks = kernel.cluster_blocks();
                return Ok(Self::log_failure::<K>(&format!(
                    "the device runs no clusters of {blocks} blocks"
                )));
            }
        }
        Ok(Self::Ready { function, _module: module })
    }

    fn log_failure<K: NativeKernel>(error: &str) -> Self {
        log::warn!("{}: {error}", K::FALLBACK_MESSAGE);
        Self::Failed
    }
}
