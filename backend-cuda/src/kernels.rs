//! Kernels of the core: translates their WGSL, compiles and loads the code, and launches them.
//!
//! `KernelRegistry` belongs to a device and assigns the ids. Kernels in CUDA C++ are in `native_kernels`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::{Arc, Mutex, Once, RwLock};

use forebay_core::backend::compile_pool::{self, PendingCode};
use forebay_core::backend::{KernelContent, KernelId, KernelSource, Launch, SourceError};
use forebay_core::error::{Error, Result};
use forebay_core::sync::{LockUnpoisoned, RwLockUnpoisoned};
use smallvec::SmallVec;

use crate::backend::slice_address;
use crate::context::{
    ArgBytes, Context, CudaModule, CudaStream, Function, KernelLaunch, arg_bytes, arg_pointers,
};
use crate::cubin_cache::{CubinCache, CubinKey};
use crate::graph::{CudaGraph, GraphNode};
use crate::{cublaslt, nvrtc, settings, translate};

/// Maximum number of storage bindings in one kernel.
pub(crate) const MAX_BINDINGS: usize = 32;
/// Bytes that CUDA accepts for all parameters of one launch, on every device.
const MAX_ARGUMENT_BYTES: usize = 4096;
/// Bytes left for the uniform block: pointers and lengths are parameters too, and all may be padded to 16.
pub(crate) const MAX_PARAM_BYTES: usize = MAX_ARGUMENT_BYTES - MAX_BINDINGS * (8 + 8) - 64;

/// The compiled kernels of one device.
#[derive(Debug)]
pub(crate) struct KernelRegistry {
    /// The compute capability as one number: 90 is an H100.
    arch: u32,
    disk: CubinCache,
    /// Kernels by id. Never shrinks, so that ids stay valid.
    loaded: RwLock<Vec<LoadedKernel>>,
    ids_by_content: Mutex<HashMap<KernelContent, KernelId>>,
    /// Kernels without a function yet, by id.
    pending: Mutex<HashMap<u32, PendingKernel>>,
    /// The modules of `loaded`, which are unloaded with it.
    modules: Mutex<Vec<CudaModule>>,
}

/// Everything needed to launch a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadedKernel {
    /// `None` while the kernel is being compiled.
    function: Option<Function>,
    block: [u32; 3],
    binding_count: usize,
    param_bytes: usize,
    /// If true, the kernel has a parameter with the lengths of the bindings.
    takes_lengths: bool,
    /// Bytes of dynamic shared memory, for workgroup variables.
    dynamic_shared_bytes: u32,
}

/// Result of submitting a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubmitStatus {
    /// The command is enqueued.
    Submitted,
    /// The command is not supported; the core must use another implementation.
    Declined,
    /// The command is not enqueued: its kernel is still being compiled.
    Compiling,
}

/// A kernel that is being compiled.
#[derive(Debug)]
struct PendingKernel {
    label: String,
    entry: CString,
    code: Arc<PendingCode<Vec<u8>>>,
}

/// Device code: loaded, or being compiled.
pub(crate) enum KernelCode {
    Loaded(CudaModule),
    Compiling(Arc<PendingCode<Vec<u8>>>),
}

impl KernelRegistry {
    /// Creates a registry for a device of architecture `arch`, such as 90.
    pub(crate) fn new(arch: u32, disk: CubinCache) -> Self {
        Self {
            arch,
            disk,
            loaded: RwLock::default(),
            ids_by_content: Mutex::default(),
            pending: Mutex::default(),
            modules: Mutex::default(),
        }
    }

    /// Returns the id of a kernel, which may still be compiling: see
    /// [`finish_compile`](Self::finish_compile).
    pub(crate) fn compile(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<KernelId> {
        let content = source.to_content();
        // The lock is held during the translation, so another thread that needs the same kernel waits for it and
        // does not compile it again.
        let mut known = self.ids_by_content.lock_unpoisoned();
        if let Some(id) = known.get(&content) {
            return Ok(*id);
        }
        let refuse = |error: &dyn fmt::Display| compilation_error(source.label, error);
        let translated = translate::translate(source).map_err(|error| refuse(&error))?;
        let (bindings, params) = (translated.binding_count, translated.params_size as usize);
        if bindings > MAX_BINDINGS || params > MAX_PARAM_BYTES {
            return Err(refuse(&format_args!(
                "it has {bindings} storage bindings and {params} bytes of parameters; \
                 CUDA devices take {MAX_BINDINGS} and {MAX_PARAM_BYTES}"
            )));
        }
        let entry = CString::new(translated.entry.as_str()).map_err(|error| refuse(&error))?;
        let code = self.load_or_compile(context, source.label, &translated.source, &[])?;
        let mut kernel = LoadedKernel {
            dynamic_shared_bytes: translated.dynamic_shared_bytes,
            function: None,
            block: translated.workgroup_size,
            binding_count: bindings,
            param_bytes: params,
            takes_lengths: translated.needs_lengths,
        };
        if let KernelCode::Loaded(module) = &code {
            kernel.function = Some(kernel.resolve_function(module, &entry, source.label)?);
        }
        let mut loaded = self.loaded.write_unpoisoned();
        let id = KernelId(loaded.len() as u32);
        match code {
            KernelCode::Loaded(module) => self.modules.lock_unpoisoned().push(module),
            KernelCode::Compiling(code) => {
                let unfinished = PendingKernel { label: source.label.to_owned(), entry, code };
                self.pending.lock_unpoisoned().insert(id.0, unfinished);
            }
        }
        loaded.push(kernel);
        known.insert(content, id);
        Ok(id)
    }

    /// Reports whether a kernel can be launched without waiting for the compiler.
    pub(crate) fn is_compiled(&self, id: KernelId) -> bool {
        self.pending.lock_unpoisoned().get(&id.0).is_none_or(|unfinished| unfinished.code.get().is_some())
    }

    /// Waits until a kernel is compiled, and loads it. The next call retries after an error.
    pub(crate) fn finish_compile(&self, context: &Arc<Context>, id: KernelId) -> Result<()> {
        let clone_parts = |unfinished: &PendingKernel| {
            (unfinished.label.clone(), unfinished.entry.clone(), Arc::clone(&unfinished.code))
        };
        let Some((label, entry, code)) = self.pending.lock_unpoisoned().get(&id.0).map(clone_parts) else {
            return Ok(());
        };
        let cubin = code.wait().map_err(|message| compilation_error(&label, &message))?;
        let module = CudaModule::load(context, cubin)?;
        let mut loaded = self.loaded.write_unpoisoned();
        let Some(kernel) = loaded.get_mut(id.0 as usize) else { return Ok(()) };
        // Another thread may have loaded the kernel.
        if self.pending.lock_unpoisoned().contains_key(&id.0) {
            kernel.function = Some(kernel.resolve_function(&module, &entry, &label)?);
            self.modules.lock_unpoisoned().push(module);
            self.pending.lock_unpoisoned().remove(&id.0);
        }
        Ok(())
    }

    /// Returns the device's architecture.
    pub(crate) fn arch(&self) -> u32 {
        self.arch
    }

    /// Loads the code of CUDA C++ from disk, or starts to compile it. The source determines the options, so
    /// they are not part of the key.
    pub(crate) fn load_or_compile(
        &self,
        context: &Arc<Context>,
        label: &str,
        source: &str,
        options: &'static [&'static str],
    ) -> Result<KernelCode> {
        let key = CubinKey::new(source, self.arch);
        let compiler = nvrtc::version();
        if let Some(cubin) = self.disk.load(key, compiler.as_ref().ok().copied()) {
            match CudaModule::load(context, &cubin) {
                Ok(module) => return Ok(KernelCode::Loaded(module)),
                Err(error @ SourceError::DeviceLost(_)) => return Err(error.into()),
                Err(error) => log::debug!("the cached code of `{label}` cannot be loaded: {error}"),
            }
        }
        let version = compiler.map_err(|error| compilation_error(label, &error))?;
        prepare_compile_pool();
        let (disk, arch) = (self.disk.clone(), self.arch);
        let (label, source) = (label.to_owned(), source.to_owned());
        Ok(KernelCode::Compiling(compile_pool::start_compile(move || {
            let cubin = nvrtc::compile_with_options(&source, &label, arch, options)
                .map_err(|error| error.to_string())?;
            disk.store(key, version, &cubin);
            Ok(cubin)
        })))
    }

    /// Enqueues one launch; returns `false` if the kernel is still being compiled.
    pub(crate) fn launch(&self, stream: &CudaStream, launch: &Launch<'_>) -> Result<bool> {
        self.with_kernel_launch(launch, |call, arguments| {
            // SAFETY: one value for each parameter of the translated kernel, in its order and of its size.
            // The core has checked that the slices lie inside their segments.
            unsafe { stream.launch(call, arguments) }
        })
    }

    /// Changes the parameters of a kernel in a graph.
    pub(crate) fn set_node_params(
        &self,
        graph: &CudaGraph,
        node: GraphNode,
        launch: &Launch<'_>,
    ) -> Result<()> {
        self.with_kernel_launch(launch, |call, arguments| {
            // SAFETY: as for a launch; the node is of this graph.
            unsafe { graph.set_node_params(node, call, &mut arg_pointers(arguments)) }
        })
        .map(drop)
    }

    /// Returns the kernel of a launch after checking bindings and parameters.
    pub(crate) fn check_launch(&self, launch: &Launch<'_>) -> Result<LoadedKernel> {
        let kernel = {
            let loaded = self.loaded.read_unpoisoned();
            loaded.get(launch.kernel.0 as usize).copied()
        };
        let Some(kernel) = kernel else {
            return Err(Error::argument("launch", format!("there is no kernel {}", launch.kernel.0)));
        };
        // The driver reads as many values as the kernel has parameters, independent of what the caller
        // passes.
        if launch.bindings.len() != kernel.binding_count || launch.params.len() < kernel.param_bytes {
            return Err(Error::argument(
                "launch",
                format!(
                    "the kernel takes {} bindings and {} bytes of parameters; got {} and {}",
                    kernel.binding_count,
                    kernel.param_bytes,
                    launch.bindings.len(),
                    launch.params.len()
                ),
            ));
        }
        Ok(kernel)
    }

    fn with_kernel_launch(
        &self,
        launch: &Launch<'_>,
        run: impl FnOnce(&KernelLaunch, &[&ArgBytes]) -> Result<(), SourceError>,
    ) -> Result<bool> {
        let kernel = self.check_launch(launch)?;
        let Some(function) = kernel.function else { return Ok(false) };
        let slices = launch.bindings.iter();
        let starts: SmallVec<[u64; 8]> = slices.clone().map(|&slice| slice_address(slice)).collect();
        let lengths: SmallVec<[u64; 8]> = slices.map(|slice| slice.bytes).collect();
        let mut arguments: SmallVec<[&ArgBytes; 10]> = starts.iter().map(arg_bytes).collect();
        if kernel.takes_lengths {
            arguments.push(arg_bytes(&lengths[..]));
        }
        if kernel.param_bytes > 0 {
            arguments.push(arg_bytes(&launch.params[..kernel.param_bytes]));
        }
        let call = KernelLaunch {
            function,
            grid: launch.groups,
            block: kernel.block,
            dynamic_shared_bytes: kernel.dynamic_shared_bytes,
        };
        run(&call, &arguments).map(|()| true).map_err(Error::from)
    }
}

/// Prepares the pool for the first kernel that is compiled. NVRTC must be loaded.
fn prepare_compile_pool() {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(compile_pool::register_exit_handler);
    // Loading cuBLASLt takes as long as compiling a kernel, so the first product need not wait for both.
    static LOAD_CUBLASLT: Once = Once::new();
    if !settings::portable_kernels() {
        LOAD_CUBLASLT.call_once(|| compile_pool::spawn(Box::new(|| _ = cublaslt::version())));
    }
}

fn compilation_error(label: &str, reason: &dyn fmt::Display) -> Error {
    Error::KernelCompilation { label: label.to_owned(), message: reason.to_string() }
}

impl LoadedKernel {
    /// Returns the kernel's function in the loaded code.
    fn resolve_function(&self, module: &CudaModule, entry: &CStr, label: &str) -> Result<Function> {
        let function = module.function(entry)?;
        if self.dynamic_shared_bytes > 0 {
            let bytes = self.dynamic_shared_bytes;
            function.set_max_dynamic_shared(bytes).map_err(|error| {
                let reason =
                    format!("it takes {bytes} bytes of workgroup memory, which the device refuses: {error}");
                compilation_error(label, &reason)
            })?;
        }
        Ok(function)
    }
}
