//! Autocast mode of a thread: the dtype of the scope and the cached casts of leaves.
//!
//! The modes are kept here because backward passes suspend them and checkpoints restore them; PyTorch keeps
//! its autocast mode below autograd for the same reason. [`amp`](crate::amp) decides what is cast.

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::autograd::{GradEdge, TensorState};
use crate::dtype::DType;
use crate::error::Result;
use crate::scoped_local::{GetCurrent, NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};
use crate::tensor::Tensor;

/// Casts that the scope of a thread keeps.
#[derive(Default)]
pub(crate) struct CastCache {
    /// Casts of leaves by leaf id and dtype. The map is ordered, so that every step frees memory in the same
    /// order.
    pub(crate) leaves: BTreeMap<(u64, DType), CachedCast>,
    /// Latest recorded cast to 16 bits. Layers that share an input, such as the projections of attention, share
    /// the cast and the sum of its gradients.
    pub(crate) latest: Option<RecordedCast>,
}

/// Recorded cast of a tensor, with the history of the tensor.
pub(crate) struct RecordedCast {
    pub(crate) cast: CachedCast,
    /// Edge of the tensor that was cast.
    pub(crate) edge: GradEdge,
}

impl RecordedCast {
    /// Reports whether this is the cast of `t` to `dtype`, with the history of `t`.
    pub(crate) fn is_valid_for(&self, t: &Tensor, dtype: DType) -> bool {
        self.cast.cast.dtype() == dtype
            && self.cast.is_valid_for(t)
            && t.grad_edge().is_some_and(|edge| edge.is_same(&self.edge))
    }
}

/// Cast of a tensor, with the state of the tensor for which the cast is valid.
pub(crate) struct CachedCast {
    pub(crate) cast: Tensor,
    /// Version of the cast itself. An operation may return the cast as its result, which the program may
    /// change.
    cast_version: u64,
    source: TensorState,
}

impl CachedCast {
    /// Casts a tensor. Its version is read before the cast, so that a concurrent write invalidates the cast.
    pub(crate) fn from_source(source: &Tensor, cast: impl FnOnce() -> Result<Tensor>) -> Result<Self> {
        let source = TensorState::new(source);
        let cast = cast()?;
        Ok(Self { cast_version: cast.version(), cast, source })
    }

    pub(crate) fn is_valid_for(&self, source: &Tensor) -> bool {
        self.cast_version == self.cast.version() && self.source.is_state_of(source)
    }
}

thread_local! {
    /// 16-bit dtype of the scope; `None` if operations are not cast.
    static AUTOCAST_DTYPE: ScopedLocal<Cell<Option<DType>>> = const { ScopedLocal::new(Cell::new(None)) };
    /// Cached casts, kept until the outermost scope ends.
    pub(crate) static CAST_CACHE: ScopedLocal<NoDropCell<CastCache>> = const { ScopedLocal::new(NoDropCell::new(CastCache { leaves: BTreeMap::new(), latest: None })) };
    pub(crate) static FP8_ENABLED: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
}

/// Returns the 16-bit dtype that operations of this thread are cast to; `None` outside of
/// [`autocast`](crate::amp::autocast).
#[must_use]
pub fn autocast_dtype() -> Option<DType> {
    AUTOCAST_DTYPE.current()
}

/// Reports whether operations of this thread are cast.
#[must_use]
pub fn is_autocast_enabled() -> bool {
    autocast_dtype().is_some()
}

/// Frees the casts that this thread's [`autocast`](crate::amp::autocast) scopes cache. Results do not change,
/// because outdated casts are never used.
pub fn clear_autocast_cache() {
    // Taken out first, because dropping a tensor must not find the map borrowed.
    let casts = CAST_CACHE.with_current_mut(std::mem::take);
    drop(casts);
}

/// Snapshot of the autocast and [`fp8`](crate::amp::fp8()) state, which a checkpoint restores when it is recomputed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AutocastState {
    dtype: Option<DType>,
    fp8: bool,
}

impl AutocastState {
    pub(crate) fn current() -> Self {
        Self { dtype: autocast_dtype(), fp8: FP8_ENABLED.current() }
    }

    /// Restores the state with an empty cast cache. Casts cached outside belong to another graph, which a
    /// backward pass through this one must not free. Casts made here must not outlive the closure.
    pub(crate) fn enter(self) -> AutocastStateGuard {
        AutocastStateGuard {
            _cast_cache: ScopedGuard::new(&CAST_CACHE, CastCache::default()),
            _dtype: ScopedGuard::new(&AUTOCAST_DTYPE, self.dtype),
            _fp8: ScopedGuard::new(&FP8_ENABLED, self.fp8),
        }
    }
}

/// Guard during which an [`AutocastState`] is in force.
#[derive(Debug)]
pub(crate) struct AutocastStateGuard {
    _dtype: ScopedGuard<Cell<Option<DType>>>,
    _fp8: ScopedGuard<Cell<bool>>,
    _cast_cache: ScopedGuard<NoDropCell<CastCache>>,
}

/// Guard during which operations of this thread choose their dtypes: see [`autocast`](crate::amp::autocast). Guards
/// may be dropped in any order: the innermost live guard decides.
#[derive(Debug)]
pub struct AutocastGuard {
    dtype: Option<ScopedGuard<Cell<Option<DType>>>>,
}

impl AutocastGuard {
    /// Sets the 16-bit dtype of operations. `None` suspends autocast and keeps the cached casts.
    pub(crate) fn enter(dtype: Option<DType>) -> Self {
        Self { dtype: Some(ScopedGuard::new(&AUTOCAST_DTYPE, dtype)) }
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        self.dtype = None;
        // The last scope may have ended in the meantime.
        if AUTOCAST_DTYPE.with(ScopedLocal::has_no_guards) {
            clear_autocast_cache();
        }
    }
}
