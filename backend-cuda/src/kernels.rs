//! Kernels: from WGSL to loaded code, and launching it. Code that is not on the disk is compiled beside the program
//! (`compiling`); what a launch of it must wait for waits in its queue (`waiting`).

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use forebay_core::backend::{KernelContent, KernelId, KernelSource, Launch, SourceError};
use forebay_core::error::{Error, Result};

use crate::cache::{DiskCache, Key};
use crate::compiling::{Job, Order};
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
#[derive(Clone, Debug)]
struct Kernel {
    code: Code,
    block: [u32; 3],
    bindings: usize,
    params: usize,
    /// Whether it takes the bindings' lengths.
    lengths: bool,
}

#[derive(Clone, Debug)]
enum Code {
    Loaded(Function),
    Compiling(Arc<Source>),
}

/// What is being compiled.
#[derive(Debug)]
struct Source {
    label: String,
    entry: CString,
    job: Arc<Job>,
}

/// Code that is loaded, or will be compiled.
pub(crate) enum Making {
    Loaded(Module),
    Compiling(Arc<Job>),
}

fn refuse(label: &str, message: impl ToString) -> Error {
    Error::Kernel { label: label.to_owned(), message: message.to_string() }
}

impl Kernels {
    /// For a device of architecture `arch`, such as 90.
    pub(crate) fn new(arch: u32, disk: DiskCache) -> Self {
        Self { arch, disk, loaded: RwLock::default(), known: Mutex::default(), modules: Mutex::default() }
    }

    /// The kernel's number. What translation refuses is an error here; what the compiler refuses is one of its launches.
    pub(crate) fn compile(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<KernelId> {
        let content = source.content();
        if let Some(id) = self.lock_known().get(&content) {
            return Ok(*id);
        }
        // Without the lock, so that several threads can translate. Two may make the same; the first one counts.
        let (module, kernel) = self.build(context, source)?;
        let mut known = self.lock_known();
        if let Some(id) = known.get(&content) {
            return Ok(*id);
        }
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let id = KernelId(loaded.len() as u32);
        loaded.push(kernel);
        self.lock_modules().extend(module);
        known.insert(content, id);
        Ok(id)
    }

    fn build(&self, context: &Arc<Context>, source: &KernelSource<'_>) -> Result<(Option<Module>, Kernel)> {
        let label = source.label;
        let options = translate::Options { zero_workgroup_memory: source.zeroed, ..Default::default() };
        let translated = translate::translate_with(source.wgsl, source.entry, source.overrides, &options)
            .map_err(|error| refuse(label, error))?;
        let (bindings, params) = (translated.bindings.len(), translated.params_size as usize);
        if bindings > MAX_BINDINGS || params > MAX_PARAMS {
            return Err(refuse(
                label,
                format!(
                    "it has {bindings} storage bindings and {params} bytes of parameters; \
                     CUDA devices take {MAX_BINDINGS} and {MAX_PARAMS}"
                ),
            ));
        }
        let entry = CString::new(translated.entry).map_err(|error| refuse(label, error))?;
        let (module, code) = match self.make(context, label, translated.source, &[])? {
            Making::Loaded(module) => {
                let function = module.function(&entry)?;
                (Some(module), Code::Loaded(function))
            }
            Making::Compiling(job) => {
                let source = Source { label: label.to_owned(), entry, job };
                (None, Code::Compiling(Arc::new(source)))
            }
        };
        let block = translated.workgroup_size;
        Ok((module, Kernel { code, block, bindings, params, lengths: translated.needs_lengths }))
    }

    /// The device's architecture.
    pub(crate) fn arch(&self) -> u32 {
        self.arch
    }

    /// CUDA C++ as code: loaded from the disk if it is there, else being compiled. The options are decided by the source.
    pub(crate) fn make(
        &self,
        context: &Arc<Context>,
        label: &str,
        source: String,
        options: &'static [&'static str],
    ) -> Result<Making> {
        let key = Key::new(&source, self.arch);
        toolkit::find_nvrtc();
        let compiler = nvrtc::version();
        if let Some(cubin) = self.disk.find(key, compiler.as_ref().ok().copied()) {
            match Module::load(context, &cubin) {
                Ok(module) => return Ok(Making::Loaded(module)),
                Err(error @ SourceError::DeviceLost(_)) => return Err(error.into()),
                Err(error) => log::debug!("the kept code of `{label}` is of no use: {error}"),
            }
        }
        let version = compiler.map_err(|error| refuse(label, error))?;
        let (label, disk, arch) = (label.to_owned(), self.disk.clone(), self.arch);
        Ok(Making::Compiling(Job::new(Order { label, source, arch, options, disk, key, version })))
    }

    /// Loads what was compiled; waits for it.
    pub(crate) fn load(context: &Arc<Context>, label: &str, job: &Job) -> Result<Module> {
        let cubin = job.wait().map_err(|error| refuse(label, error))?;
        Ok(Module::load(context, &cubin)?)
    }

    /// Whether a launch need not wait for its code. One of a kernel that does not compile need not.
    pub(crate) fn is_ready(&self, id: KernelId) -> bool {
        match self.kernel(id) {
            Ok(Kernel { code: Code::Compiling(source), .. }) => source.job.is_done(),
            _ => true,
        }
    }

    /// Checks what a launch is given.
    pub(crate) fn check(&self, launch: &Launch<'_>) -> Result<()> {
        self.kernel(launch.kernel)?.check(launch)
    }

    /// Enqueues one run; `false` where its code is still being compiled, unless that is waited for.
    pub(crate) fn launch(&self, stream: &Stream, launch: &Launch<'_>, wait: bool) -> Result<bool> {
        self.with_arguments(&stream.context, launch, wait, |function, block, arguments| {
            // SAFETY: one value for each parameter of the translated kernel, in its order and of at least its size; the
            // core has checked that the slices lie inside their segments.
            unsafe { stream.launch(function, launch.groups, block, arguments) }
        })
    }

    /// Changes the parameters that a kernel in a graph is given.
    pub(crate) fn relaunch(
        &self,
        context: &Arc<Context>,
        graph: &Graph,
        node: Node,
        launch: &Launch<'_>,
    ) -> Result<()> {
        self.with_arguments(context, launch, true, |function, block, arguments| {
            // SAFETY: as for a launch; the node was made by one of the same kernel.
            unsafe { graph.set(node, function, launch.groups, block, arguments) }
        })
        .map(drop)
    }

    fn kernel(&self, id: KernelId) -> Result<Kernel> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let kernel = loaded.get(id.0 as usize).cloned();
        kernel.ok_or_else(|| Error::argument("launch", format!("there is no kernel {}", id.0)))
    }

    /// The function of code that was being compiled; waits for it.
    #[cold]
    fn finish(&self, context: &Arc<Context>, id: KernelId, source: &Source) -> Result<Function> {
        let module = Self::load(context, &source.label, &source.job)?;
        let function = module.function(&source.entry)?;
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let Some(kernel) = loaded.get_mut(id.0 as usize) else { return Ok(function) };
        // Another thread may have been faster: its module is the one that stays.
        if let Code::Loaded(function) = kernel.code {
            return Ok(function);
        }
        kernel.code = Code::Loaded(function);
        self.lock_modules().push(module);
        Ok(function)
    }

    fn with_arguments(
        &self,
        context: &Arc<Context>,
        launch: &Launch<'_>,
        wait: bool,
        run: impl FnOnce(Function, [u32; 3], &mut [*mut c_void]) -> Result<(), SourceError>,
    ) -> Result<bool> {
        let kernel = self.kernel(launch.kernel)?;
        kernel.check(launch)?;
        let function = match &kernel.code {
            Code::Loaded(function) => *function,
            Code::Compiling(source) if !wait && !source.job.is_done() => return Ok(false),
            Code::Compiling(source) => self.finish(context, launch.kernel, source)?,
        };
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
        run(function, kernel.block, &mut arguments[..count])?;
        Ok(true)
    }

    fn lock_modules(&self) -> std::sync::MutexGuard<'_, Vec<Module>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_known(&self) -> std::sync::MutexGuard<'_, HashMap<KernelContent, KernelId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernel {
    /// The driver reads as many values as the kernel takes, whatever it is given.
    fn check(&self, launch: &Launch<'_>) -> Result<()> {
        if launch.bindings.len() == self.bindings && launch.params.len() >= self.params {
            return Ok(());
        }
        Err(Error::argument(
            "launch",
            format!(
                "the kernel takes {} bindings and {} bytes of parameters; got {} and {}",
                self.bindings,
                self.params,
                launch.bindings.len(),
                launch.params.len()
            ),
        ))
    }
}
