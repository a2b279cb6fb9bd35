//! Kernels: from WGSL to loaded code, and launching it.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use forebay_core::backend::{KernelContent, KernelId, KernelSource, Launch, SourceError};
use forebay_core::error::{Error, Result};

use crate::cache::{DiskCache, Key};
use crate::context::{Context, Function, Module, Stream};
use crate::graph::{Graph, Node};
use crate::{nvrtc, toolkit, translate};

/// Storage bindings in one kernel.
pub(crate) const MAX_BINDINGS: usize = 32;
/// Bytes that CUDA takes for all parameters of one launch, everywhere.
const MAX_ARGUMENTS: usize = 4096;
/// Bytes left for the uniform block: the pointers and the lengths go with it, and all may be padded to 16.
pub(crate) const MAX_PARAMS: usize = MAX_ARGUMENTS - MAX_BINDINGS * (8 + 8) - 64;

/// The compiled kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    /// The compute capability as one number: 90 is an H100.
    arch: u32,
    disk: DiskCache,
    /// By number. Never shrinks, so that a number once given is good for ever.
    loaded: RwLock<Vec<Kernel>>,
    /// The numbers by content.
    known: Mutex<HashMap<KernelContent, KernelId>>,
    /// The code behind `loaded`, which is unloaded with it.
    modules: Mutex<Vec<Module>>,
}

/// What is needed to launch it.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    function: Function,
    block: [u32; 3],
    bindings: usize,
    params: usize,
    /// Whether it takes the bindings' lengths.
    lengths: bool,
    /// Bytes of workgroup memory that a launch asks for.
    shared: u32,
}

impl Kernels {
    /// For a device of architecture `arch`, such as 90.
    pub(crate) fn new(arch: u32, disk: DiskCache) -> Self {
        Self { arch, disk, loaded: RwLock::default(), known: Mutex::default(), modules: Mutex::default() }
    }

    pub(crate) fn compile(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<KernelId> {
        let content = source.content();
        if let Some(id) = self.lock_known().get(&content) {
            return Ok(*id);
        }
        // Without the lock, so that several threads can compile. Two may compile the same; the first one counts.
        let (module, kernel) = self.build(context, source)?;
        let mut known = self.lock_known();
        if let Some(id) = known.get(&content) {
            return Ok(*id);
        }
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let id = KernelId(loaded.len() as u32);
        loaded.push(kernel);
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).push(module);
        known.insert(content, id);
        Ok(id)
    }

    fn build(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<(Module, Kernel)> {
        let refuse = |message: String| Error::Kernel { label: source.label.to_owned(), message };
        let options = translate::Options { zero_workgroup_memory: source.zeroed, ..Default::default() };
        let translated = translate::translate_with(source.wgsl, source.entry, source.overrides, &options)
            .map_err(|error| refuse(error.to_string()))?;
        let (bindings, params) = (translated.bindings.len(), translated.params_size as usize);
        if bindings > MAX_BINDINGS || params > MAX_PARAMS {
            return Err(refuse(format!(
                "it has {bindings} storage bindings and {params} bytes of parameters; \
                 CUDA devices take {MAX_BINDINGS} and {MAX_PARAMS}"
            )));
        }
        let name = CString::new(translated.entry.as_str()).map_err(|error| refuse(error.to_string()))?;
        let module = self.load(context, source.label, &translated.source, &refuse, &[])?;
        let function = module.function(&name)?;
        let shared = translated.dynamic_memory;
        if shared > 0 {
            function.allow_shared(shared).map_err(|error| {
                refuse(format!(
                    "it takes {shared} bytes of workgroup memory, which the device refuses: {error}"
                ))
            })?;
        }
        let kernel = Kernel {
            shared,
            function,
            block: translated.workgroup_size,
            bindings,
            params,
            lengths: translated.needs_lengths,
        };
        Ok((module, kernel))
    }

    /// The device's architecture.
    pub(crate) fn arch(&self) -> u32 {
        self.arch
    }

    /// Loads CUDA C++ that was written as such. The options are decided by the source.
    pub(crate) fn load_cuda(
        &self,
        context: &Arc<Context>,
        label: &str,
        source: &str,
        options: &[&str],
    ) -> Result<Module> {
        let refuse = |message: String| Error::Kernel { label: label.to_owned(), message };
        self.load(context, label, source, &refuse, options)
    }

    /// Loads CUDA C++ as code: from the disk if it is there, else compiled.
    fn load(
        &self,
        context: &Arc<Context>,
        label: &str,
        source: &str,
        refuse: &dyn Fn(String) -> Error,
        options: &[&str],
    ) -> Result<Module> {
        let key = Key::new(source, self.arch);
        toolkit::find_nvrtc();
        let compiler = nvrtc::version();
        if let Some(cubin) = self.disk.find(key, compiler.as_ref().ok().copied()) {
            match Module::load(context, &cubin) {
                Ok(module) => return Ok(module),
                Err(error @ SourceError::DeviceLost(_)) => return Err(error.into()),
                Err(error) => log::debug!("the kept code of `{label}` is of no use: {error}"),
            }
        }
        let version = compiler.map_err(|error| refuse(error.to_string()))?;
        let cubin = nvrtc::compile_with(source, label, self.arch, options)
            .map_err(|error| refuse(error.to_string()))?;
        let module = Module::load(context, &cubin)?;
        self.disk.store(key, version, &cubin);
        Ok(module)
    }

    /// Enqueues one run.
    pub(crate) fn launch(&self, stream: &Stream, launch: &Launch<'_>) -> Result<()> {
        self.with_arguments(launch, |kernel, arguments| {
            // SAFETY: one value for each parameter of the translated kernel, in its order and of at least its size; the
            // core has checked that the slices lie inside their segments.
            unsafe { stream.launch(kernel.function, launch.groups, kernel.block, kernel.shared, arguments) }
        })
    }

    /// Changes the parameters that a kernel in a graph is given.
    pub(crate) fn relaunch(&self, graph: &Graph, node: Node, launch: &Launch<'_>) -> Result<()> {
        self.with_arguments(launch, |kernel, arguments| {
            // SAFETY: as for a launch; the node was made by one of the same kernel.
            unsafe { graph.set(node, kernel.function, launch.groups, kernel.block, kernel.shared, arguments) }
        })
    }

    fn with_arguments(
        &self,
        launch: &Launch<'_>,
        run: impl FnOnce(&Kernel, &mut [*mut c_void]) -> Result<(), SourceError>,
    ) -> Result<()> {
        let kernel = {
            let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
            loaded.get(launch.kernel.0 as usize).copied()
        };
        let Some(kernel) = kernel else {
            return Err(Error::argument("launch", format!("there is no kernel {}", launch.kernel.0)));
        };
        // The driver reads as many values as the kernel takes, whatever it is given.
        if launch.bindings.len() != kernel.bindings || launch.params.len() < kernel.params {
            return Err(Error::argument(
                "launch",
                format!(
                    "the kernel takes {} bindings and {} bytes of parameters; got {} and {}",
                    kernel.bindings,
                    kernel.params,
                    launch.bindings.len(),
                    launch.params.len()
                ),
            ));
        }
        let mut addresses = [0_u64; MAX_BINDINGS];
        let mut lengths = [0_u64; MAX_BINDINGS];
        let mut arguments = [ptr::null_mut::<c_void>(); MAX_BINDINGS + 2];
        let mut count = kernel.bindings;
        for (at, slice) in launch.bindings.iter().enumerate() {
            addresses[at] = slice.segment.0 + slice.offset;
            lengths[at] = slice.bytes;
            arguments[at] = ptr::from_mut(&mut addresses[at]).cast();
        }
        if kernel.lengths {
            arguments[count] = lengths.as_mut_ptr().cast();
            count += 1;
        }
        if kernel.params > 0 {
            arguments[count] = launch.params.as_ptr().cast_mut().cast();
            count += 1;
        }
        run(&kernel, &mut arguments[..count])?;
        Ok(())
    }

    fn lock_known(&self) -> std::sync::MutexGuard<'_, HashMap<KernelContent, KernelId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
