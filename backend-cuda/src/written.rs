//! Kernels that are written in CUDA C++ (`shaders/cuda`): compiled when one is first asked for, and kept on disk as all others are.

use std::collections::hash_map::Entry;
use std::ffi::CStr;
use std::fmt::Debug;
use std::hash::Hash;
use std::iter;
use std::sync::{Arc, PoisonError, RwLock};

use forebay_core::backend::SourceError;
use rustc_hash::FxHashMap;

use crate::compiler::Coming;
use crate::context::{Call, Context, Function, Module, Stream, value};
use crate::kernels::{Code, Kernels};
use crate::nvrtc;

/// One form of a kernel.
pub trait Source: Copy + Debug + Eq + Hash {
    /// What happens where it cannot be compiled.
    const WITHOUT: &'static str;

    /// Its CUDA C++.
    fn source(&self) -> String;

    /// What NVRTC must be told besides.
    fn options(&self) -> &'static [&'static str] {
        &[]
    }

    /// The function's name.
    fn entry(&self) -> &'static CStr;

    /// Threads of a block.
    fn threads(&self) -> u32;

    /// Bytes of shared memory of a block.
    fn shared(&self) -> u32;

    /// Whether it is never launched together with small kernels in front of it or behind it.
    fn alone(&self) -> bool {
        true
    }
}

/// Texts behind what must be defined before them.
pub(crate) fn defined(defines: &[(&str, u32)], texts: &[&str]) -> String {
    let defines = defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let texts = iter::once(&forebay_shaders::cuda::FOLLOW).chain(texts);
    defines.chain(texts.map(|&text| text.to_owned())).collect()
}

/// Enqueues a form of a kernel, which is loaded as `function`.
///
/// # Safety
/// The kernel takes one `P`, in this layout, and the addresses in it hold what the kernel reads and writes.
pub(crate) unsafe fn launch<P>(
    stream: &Stream,
    kernel: &impl Source,
    function: Function,
    blocks: [u32; 3],
    params: &P,
) -> Result<(), SourceError> {
    let (block, shared) = ([kernel.threads(), 1, 1], kernel.shared());
    let call = Call { function, groups: blocks, block, shared, alone: kernel.alone() };
    // SAFETY: the caller's promise.
    unsafe { stream.launch(&call, &[value(params)]) }
}

/// The forms of a kernel that a device was asked for.
#[derive(Debug)]
pub(crate) struct Written<K> {
    states: RwLock<FxHashMap<K, State>>,
}

impl<K> Default for Written<K> {
    fn default() -> Self {
        Self { states: RwLock::default() }
    }
}

#[derive(Debug)]
enum State {
    /// Its code is on its way.
    Coming(Arc<Coming>),
    /// It is loaded; the module keeps the code.
    Ready { function: Function, _module: Module },
    /// It cannot be compiled.
    Missing,
}

/// What there is of a form.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    Ready(Function),
    Compiling,
    Missing,
}

impl<K: Source> Written<K> {
    /// A form, which is begun to be compiled if it has not been, behind those of `ahead`, which will be wanted soon. It is loaded when it
    /// is there, or waited for.
    pub(crate) fn find(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        kernel: K,
        ahead: &[K],
        wait: bool,
    ) -> Result<Found, SourceError> {
        match self.states.read().unwrap_or_else(PoisonError::into_inner).get(&kernel) {
            Some(State::Ready { function, .. }) => return Ok(Found::Ready(*function)),
            Some(State::Missing) => return Ok(Found::Missing),
            Some(State::Coming(_)) | None => {}
        }
        // Under the lock: who else needs it waits, and does not begin it too.
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        for &kernel in ahead.iter().chain([&kernel]) {
            if let Entry::Vacant(place) = states.entry(kernel) {
                place.insert(State::begun(kernel, context, kernels)?);
            }
        }
        if let Some(State::Coming(code)) = states.get(&kernel) {
            // Compilers from this version on are known to take the kernels; else it is waited for what they say.
            let sure = nvrtc::version().is_ok_and(|version| version >= (13, 0));
            if !wait && sure && !code.is_done() {
                return Ok(Found::Compiling);
            }
            let module =
                code.wait().and_then(|cubin| Module::load(context, &cubin).map_err(|e| e.to_string()));
            let state = match module {
                Ok(module) => State::ready(kernel, module)?,
                Err(error) => State::missing::<K>(&error),
            };
            states.insert(kernel, state);
        }
        Ok(match states.get(&kernel) {
            Some(State::Ready { function, .. }) => Found::Ready(*function),
            _ => Found::Missing,
        })
    }
}

impl State {
    /// That of a form which is asked for for the first time.
    fn begun<K: Source>(kernel: K, context: &Arc<Context>, kernels: &Kernels) -> Result<Self, SourceError> {
        match kernels.code(context, &format!("{kernel:?}"), &kernel.source(), kernel.options()) {
            Ok(Code::Coming(code)) => Ok(Self::Coming(code)),
            Ok(Code::Here(module)) => Self::ready(kernel, module),
            Err(error) => Ok(Self::missing::<K>(&error.to_string())),
        }
    }

    fn ready<K: Source>(kernel: K, module: Module) -> Result<Self, SourceError> {
        let function = module.function(kernel.entry())?;
        function.allow_shared(kernel.shared())?;
        Ok(Self::Ready { function, _module: module })
    }

    fn missing<K: Source>(error: &str) -> Self {
        log::warn!("{}: {error}", K::WITHOUT);
        Self::Missing
    }
}
