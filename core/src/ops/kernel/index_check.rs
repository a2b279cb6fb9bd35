//! Out-of-range indices: how kernels handle them, and an optional check that reports them.
//!
//! Kernels compare an index with its range in 64 bits, for every index type (`index` and `resolve_index` of
//! shaders/wgsl/types.wgsl). An index out of range selects no element. Reading indices back would synchronise
//! with the device at each operation, so the check is opt-in.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::environment;
use crate::error::{Error, Result};
use crate::memory::scope;
use crate::scoped_local::{GetCurrent as _, ScopedGuard, ScopedLocal};
use crate::tensor::Tensor;

const ENV_VAR: &str = "FOREBAY_CHECK_INDICES";

static ALL_THREADS_ENABLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static THREAD_ENABLED: ScopedLocal<Cell<bool>> = const { ScopedLocal::new(Cell::new(false)) };
}

/// Guard that enables index checks for operations of this thread until it is dropped. See [`check_indices`].
#[derive(Debug)]
pub struct CheckIndicesGuard {
    _enabled: ScopedGuard<Cell<bool>>,
}

/// Makes an out-of-range index an error in operations of this thread, until the guard is dropped. The error
/// names the operation, the index, its position, the range and the line of the call.
///
/// Without the guard, an out-of-range index reads as 0, and writes and gradients skip it. The host waits for
/// the indices of every operation, so this is for debugging. `FOREBAY_CHECK_INDICES=1` enables it for the
/// program.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// # let (table, index) = (Tensor::zeros(&[3, 2], DType::F32, &device)?, Tensor::from_slice(&[0i64], &[1], &device)?);
/// let guard = ops::check_indices();
/// let rows = table.embedding(&index, None)?;
/// drop(guard);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[must_use = "nothing is checked after the guard is dropped"]
pub fn check_indices() -> CheckIndicesGuard {
    CheckIndicesGuard { _enabled: ScopedGuard::new(&THREAD_ENABLED, true) }
}

/// Sets [`check_indices`] for all threads, until the next call.
pub fn set_check_indices(on: bool) {
    ALL_THREADS_ENABLED.store(on, Ordering::Relaxed);
}

fn is_enabled_by_env() -> Result<bool> {
    static FROM_ENV: OnceLock<std::result::Result<bool, String>> = OnceLock::new();
    let enabled = FROM_ENV.get_or_init(|| {
        environment::read_switch(ENV_VAR).map(|on| on == Some(true)).map_err(|e| e.to_string())
    });
    enabled.clone().map_err(Error::InvalidConfig)
}

/// Range of the indices that an operation accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexRange {
    pub(crate) extent: usize,
    /// If true, `-extent..0` counts from the end.
    pub(crate) allows_negative: bool,
    pub(crate) ignored_index: Option<i64>,
}

impl IndexRange {
    pub(crate) fn from_dim(x: &Tensor, dim: usize) -> Self {
        Self { extent: x.shape().get(dim).copied().unwrap_or(1), allows_negative: false, ignored_index: None }
    }
}

/// Reports whether operations of this thread check their indices.
pub(crate) fn is_enabled() -> Result<bool> {
    Ok(THREAD_ENABLED.current() || ALL_THREADS_ENABLED.load(Ordering::Relaxed) || is_enabled_by_env()?)
}

/// Fails for an out-of-range index if the check is enabled.
#[track_caller]
pub(crate) fn check_in_range(op: &'static str, index: &Tensor, range: IndexRange) -> Result<()> {
    if !is_enabled()? {
        return Ok(());
    }
    let IndexRange { extent, allows_negative: wraps, ignored_index: skipped } = range;
    let start = if wraps { -(extent as i128) } else { 0 };
    let inside = |_, i: i64| (start..extent as i128).contains(&i128::from(i)) || skipped == Some(i);
    find_outside(op, ("index", "the index tensor"), index, inside, &format!("{start}..{extent}"))
}

/// Fails for an element outside `range` if the check is enabled, for lengths and offsets. `names` are those of
/// an element and of the tensor.
#[track_caller]
#[doc(hidden)]
pub fn check_lengths(
    op: &'static str,
    names: (&str, &str),
    lengths: &Tensor,
    range: RangeInclusive<usize>,
) -> Result<()> {
    if !is_enabled()? {
        return Ok(());
    }
    let inside = |_, i: i64| usize::try_from(i).is_ok_and(|i| range.contains(&i));
    find_outside(op, names, lengths, inside, &format!("{range:?}"))
}

/// Fails for the first element, by position and value, that is not `inside` the `range`. Waits for the device.
#[track_caller]
pub(crate) fn find_outside(
    op: &'static str,
    (element, tensor): (&str, &str),
    values: &Tensor,
    inside: impl Fn(usize, i64) -> bool,
    range: &str,
) -> Result<()> {
    let found = values.to_integers()?.into_iter().enumerate().find(|&(at, i)| !inside(at, i));
    let Some((at, i)) = found else { return Ok(()) };
    let scope_op = scope::current().op;
    let op = if scope_op.is_empty() { op } else { scope_op };
    let text = format!("{element} {i}, number {at} of {tensor}, is outside {range}");
    Err(Error::argument(op, text))
}
