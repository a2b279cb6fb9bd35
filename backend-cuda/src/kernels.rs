//! Kernels: from WGSL to loaded code, and launching it.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, Once, PoisonError, RwLock};

use forebay_core::backend::{KernelContent, KernelId, KernelSource, Launch, SourceError};
use forebay_core::error::{Error, Result};
use smallvec::SmallVec;

use crate::cache::{DiskCache, Key, Version};
use crate::compiler::{self, Coming};
use crate::context::{Call, Context, Function, Module, Stream, Value, addresses, value};
use crate::graph::{Graph, Node};
use crate::{lock, matmul, nvrtc, switches, translate};

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
    /// Those that have no function yet, by number.
    unfinished: Mutex<HashMap<u32, Unfinished>>,
    /// The code behind `loaded`, which is unloaded with it.
    modules: Mutex<Vec<Module>>,
}

/// What is needed to launch it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    /// `None` while it is compiled.
    function: Option<Function>,
    block: [u32; 3],
    bindings: usize,
    params: usize,
    /// Whether it takes the bindings' lengths.
    lengths: bool,
    /// Bytes of workgroup memory that a launch asks for.
    shared: u32,
}

/// What became of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ran {
    /// It is enqueued.
    Done,
    /// It is not, and will not be: the core has to see to it.
    Declined,
    /// It is not: its kernel is still being compiled.
    NotYet,
}

/// A kernel that is being compiled.
#[derive(Debug)]
struct Unfinished {
    label: String,
    entry: CString,
    code: Arc<Coming>,
}

/// Code for the device: loaded, or on its way.
pub(crate) enum Code {
    Here(Module),
    Coming(Arc<Coming>),
}

impl Kernels {
    /// For a device of architecture `arch`, such as 90.
    pub(crate) fn new(arch: u32, disk: DiskCache) -> Self {
        Self {
            arch,
            disk,
            loaded: RwLock::default(),
            known: Mutex::default(),
            unfinished: Mutex::default(),
            modules: Mutex::default(),
        }
    }

    /// The number of a kernel, which may still be compiled: see [`finish`](Self::finish).
    pub(crate) fn compile(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<KernelId> {
        let content = source.content();
        // Under the lock: who else wants the same waits, and does not begin it too.
        let mut known = lock(&self.known);
        if let Some(id) = known.get(&content) {
            return Ok(*id);
        }
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
        let entry = CString::new(translated.entry.as_str()).map_err(|error| refuse(error.to_string()))?;
        let code = self.code(context, source.label, &translated.source, &[])?;
        let mut kernel = Kernel {
            shared: translated.dynamic_memory,
            function: None,
            block: translated.workgroup_size,
            bindings,
            params,
            lengths: translated.needs_lengths,
        };
        if let Code::Here(module) = &code {
            kernel.function = Some(kernel.find(module, &entry, source.label)?);
        }
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let id = KernelId(loaded.len() as u32);
        match code {
            Code::Here(module) => lock(&self.modules).push(module),
            Code::Coming(code) => {
                let unfinished = Unfinished { label: source.label.to_owned(), entry, code };
                lock(&self.unfinished).insert(id.0, unfinished);
            }
        }
        loaded.push(kernel);
        known.insert(content, id);
        Ok(id)
    }

    /// Whether a kernel can be launched without waiting for the compiler.
    pub(crate) fn is_compiled(&self, id: KernelId) -> bool {
        lock(&self.unfinished).get(&id.0).is_none_or(|unfinished| unfinished.code.is_done())
    }

    /// Waits until a kernel is compiled, and loads it. What fails is tried again by the next call.
    pub(crate) fn finish(&self, context: &Arc<Context>, id: KernelId) -> Result<()> {
        let found = |unfinished: &Unfinished| {
            (unfinished.label.clone(), unfinished.entry.clone(), Arc::clone(&unfinished.code))
        };
        let Some((label, entry, code)) = lock(&self.unfinished).get(&id.0).map(found) else { return Ok(()) };
        let cubin = code.wait().map_err(|message| Error::Kernel { label: label.clone(), message })?;
        let module = Module::load(context, &cubin)?;
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let Some(kernel) = loaded.get_mut(id.0 as usize) else { return Ok(()) };
        // Another thread may have been first.
        if lock(&self.unfinished).contains_key(&id.0) {
            kernel.function = Some(kernel.find(&module, &entry, &label)?);
            lock(&self.modules).push(module);
            lock(&self.unfinished).remove(&id.0);
        }
        Ok(())
    }

    /// The device's architecture.
    pub(crate) fn arch(&self) -> u32 {
        self.arch
    }

    /// The code of CUDA C++: from the disk if it is there, else begun to be compiled. The options are decided by the source.
    pub(crate) fn code(
        &self,
        context: &Arc<Context>,
        label: &str,
        source: &str,
        options: &'static [&'static str],
    ) -> Result<Code> {
        let key = Key::new(source, self.arch);
        let compiler = nvrtc::version();
        if let Some(cubin) = self.disk.find(key, compiler.as_ref().ok().copied()) {
            match Module::load(context, &cubin) {
                Ok(module) => return Ok(Code::Here(module)),
                Err(error @ SourceError::DeviceLost(_)) => return Err(error.into()),
                Err(error) => log::debug!("the kept code of `{label}` is of no use: {error}"),
            }
        }
        let version = compiler
            .map_err(|error| Error::Kernel { label: label.to_owned(), message: error.to_string() })?;
        Ok(Code::Coming(self.begin(key, version, label, source, options)))
    }

    fn begin(
        &self,
        key: Key,
        version: Version,
        label: &str,
        source: &str,
        options: &'static [&'static str],
    ) -> Arc<Coming> {
        // A program without kernels on disk has not multiplied before: the library takes as long to load as a kernel to compile.
        static PRODUCTS: Once = Once::new();
        if !switches::portable() {
            PRODUCTS.call_once(|| compiler::beside(Box::new(|| _ = matmul::version())));
        }
        let (disk, arch) = (self.disk.clone(), self.arch);
        let (label, source) = (label.to_owned(), source.to_owned());
        compiler::start(move || {
            let cubin =
                nvrtc::compile_with(&source, &label, arch, options).map_err(|error| error.to_string())?;
            disk.store(key, version, &cubin);
            Ok(cubin)
        })
    }

    /// Enqueues one run; `false` where the kernel is still being compiled.
    pub(crate) fn launch(&self, stream: &Stream, launch: &Launch<'_>) -> Result<bool> {
        self.with_call(launch, |call, arguments| {
            // SAFETY: one value for each parameter of the translated kernel, in its order and of its size; the core has checked that
            // the slices lie inside their segments.
            unsafe { stream.launch(call, arguments) }
        })
    }

    /// Changes the parameters that a kernel in a graph is given.
    pub(crate) fn relaunch(&self, graph: &Graph, node: Node, launch: &Launch<'_>) -> Result<()> {
        self.with_call(launch, |call, arguments| {
            // SAFETY: as for a launch; the node is of this graph.
            unsafe { graph.set(node, call, &mut addresses(arguments)) }
        })
        .map(drop)
    }

    /// The kernel of a launch that gives it what it takes.
    pub(crate) fn check(&self, launch: &Launch<'_>) -> Result<Kernel> {
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
        Ok(kernel)
    }

    fn with_call(
        &self,
        launch: &Launch<'_>,
        run: impl FnOnce(&Call, &[&Value]) -> Result<(), SourceError>,
    ) -> Result<bool> {
        let kernel = self.check(launch)?;
        let Some(function) = kernel.function else { return Ok(false) };
        let mut starts: SmallVec<[u64; 8]> = SmallVec::new();
        let mut lengths: SmallVec<[u64; 8]> = SmallVec::new();
        for slice in launch.bindings {
            starts.push(slice.segment.0 + slice.offset);
            lengths.push(slice.bytes);
        }
        let mut arguments: SmallVec<[&Value; 10]> = SmallVec::new();
        starts.iter().for_each(|start| arguments.push(value(start)));
        if kernel.lengths {
            arguments.push(value(&lengths[..]));
        }
        if kernel.params > 0 {
            arguments.push(value(&launch.params[..kernel.params]));
        }
        let Kernel { block, shared, .. } = kernel;
        run(&Call { function, groups: launch.groups, block, shared, alone: false }, &arguments)?;
        Ok(true)
    }
}

impl Kernel {
    /// Its function in the loaded code.
    fn find(&self, module: &Module, entry: &CStr, label: &str) -> Result<Function> {
        let function = module.function(entry)?;
        if self.shared > 0 {
            function.allow_shared(self.shared).map_err(|error| Error::Kernel {
                label: label.to_owned(),
                message: format!(
                    "it takes {} bytes of workgroup memory, which the device refuses: {error}",
                    self.shared
                ),
            })?;
        }
        Ok(function)
    }
}
