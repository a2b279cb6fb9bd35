//! Segments: parts of a model that a plan may recompute or offload.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use crate::{Result, Tensor};
use forebay_core::autograd::{self, checkpoint};
use forebay_core::backend::null::NullBackend;
use forebay_core::scoped_local::{NoDropCell, ScopedGuard, ScopedLocal, WithCurrent};
use forebay_core::tensor::offload::OffloadSet;

/// Policy for the activations that a segment saves for the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationPolicy {
    /// Activations stay on the device.
    #[default]
    Keep,
    /// Activations are dropped and recomputed.
    Recompute,
    /// Activations are copied to the host while the next segment runs. They are copied back during the
    /// backward pass of the segment after.
    Offload,
}

/// State of this thread's forward passes under a plan or the planner.
#[derive(Debug, Default)]
struct SegmentPass {
    policies: Arc<[ActivationPolicy]>,
    next_segment: usize,
    probe: Option<SegmentProbe>,
    /// Copies to the host in progress. Their device memory is released once the next segment is enqueued.
    pending_offload: Option<Arc<OffloadSet>>,
    /// Saved activations of the last offloaded segment.
    last_offload: Weak<OffloadSet>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SegmentCost {
    /// Bytes that the segment saves for the backward pass, without its result.
    pub(crate) saved_bytes: u64,
    /// Seconds that the segment takes, at the profile's speed.
    pub(crate) seconds: f64,
}

#[derive(Clone, Debug)]
struct SegmentProbe {
    backend: Arc<NullBackend>,
    costs: Rc<RefCell<Vec<SegmentCost>>>,
}

thread_local! {
    static CURRENT_PASS: ScopedLocal<NoDropCell<Option<SegmentPass>>> = const { ScopedLocal::new(NoDropCell::new(None)) };
}

/// Guard that applies a plan's policies to segments during its lifetime. Guards may be dropped in any order.
#[derive(Debug)]
#[must_use = "segments are computed again only while the guard lives"]
pub struct SegmentGuard {
    _scope: ScopedGuard<NoDropCell<Option<SegmentPass>>>,
}

impl SegmentGuard {
    fn install_pass(pass: Option<SegmentPass>) -> Self {
        Self { _scope: ScopedGuard::new(&CURRENT_PASS, pass) }
    }

    /// Applies the policies to segments, in the order of the forward pass, until the guard is dropped.
    pub(crate) fn apply_policies(saved: Arc<[ActivationPolicy]>) -> Self {
        // The step may apply its configuration itself; the planner's measurement continues.
        let probe = CURRENT_PASS.with_current(|pass| pass.as_ref().and_then(|p| p.probe.clone()));
        Self::install_pass(Some(SegmentPass { policies: saved, probe, ..SegmentPass::default() }))
    }

    /// Measures segments, without recomputation, until the guard is dropped.
    pub(crate) fn start_measuring(backend: Arc<NullBackend>) -> Self {
        Self::install_pass(Some(SegmentPass {
            probe: Some(SegmentProbe { backend, costs: Rc::default() }),
            ..SegmentPass::default()
        }))
    }

    /// Returns the costs measured since [`start_measuring`](Self::start_measuring) or the last call.
    pub(crate) fn take_costs(&self) -> Vec<SegmentCost> {
        CURRENT_PASS.with_current(|pass| {
            let probe = pass.as_ref().and_then(|p| p.probe.as_ref());
            probe.map(|p| p.costs.take()).unwrap_or_default()
        })
    }
}

/// Runs `body` on `inputs` as a segment of a model. A [`StepPlan`](crate::plan::StepPlan) may recompute its
/// activations in the backward pass, like a [`checkpoint`], or offload them to the host. Otherwise it is a
/// plain call.
///
/// Every forward pass must run the same segments in order. A nested segment is part of the outer one.
///
/// ```
/// # use std::sync::Arc;
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::{nn::{Linear, Module}, plan::segment};
/// # let device = Device::null(Default::default());
/// let layer = |_| Linear::new(64, 64, &device).map(Arc::new);
/// let layers: Vec<_> = (0..8).map(layer).collect::<Result<_, _>>()?;
/// let mut x = Tensor::zeros(&[16, 64], DType::F32, &device)?;
/// for layer in &layers {
///     let layer = Arc::clone(layer);
///     x = segment(&[&x], move |x| layer.forward(&x[0])?.gelu())?;
/// }
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[track_caller]
pub fn segment(
    inputs: &[&Tensor],
    body: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let run_directly = |body: &dyn Fn(&[Tensor]) -> Result<Tensor>| {
        body(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>())
    };
    // Inside a checkpoint, segments are part of the checkpoint, also during recomputation.
    if !autograd::is_grad_enabled() || autograd::is_recomputing() {
        return run_directly(&body);
    }
    let Some((saved, backend)) = CURRENT_PASS.with_current_mut(|pass| {
        let pass = pass.as_mut()?;
        let saved = pass.policies.get(pass.next_segment).copied().unwrap_or_default();
        pass.next_segment = (pass.next_segment + 1) % pass.policies.len().max(1);
        Some((saved, pass.probe.as_ref().map(|p| Arc::clone(&p.backend))))
    }) else {
        return run_directly(&body);
    };
    // Nested segments are part of this one, also during recomputation.
    let run_without_pass = move |x: &[Tensor]| {
        let _inside = SegmentGuard::install_pass(None);
        body(x)
    };
    match saved {
        ActivationPolicy::Keep => {}
        ActivationPolicy::Recompute => {
            return checkpoint(inputs, run_without_pass).inspect(|_| evict_previous_segment());
        }
        ActivationPolicy::Offload => return run_offloaded(inputs, || run_directly(&run_without_pass)),
    }
    let (Some(backend), Some(device)) = (backend, inputs.first().map(|t| t.device())) else {
        return run_directly(&run_without_pass).inspect(|_| evict_previous_segment());
    };
    let (bytes_before, seconds_before) = (device.memory().allocated(), backend.estimated_work().seconds);
    let out = run_directly(&run_without_pass)?;
    let bytes =
        device.memory().allocated().saturating_sub(bytes_before + (out.numel() * out.dtype().size()) as u64);
    let part = SegmentCost { saved_bytes: bytes, seconds: backend.estimated_work().seconds - seconds_before };
    CURRENT_PASS.with_current(|pass| {
        if let Some(probe) = pass.as_ref().and_then(|p| p.probe.as_ref()) {
            probe.costs.borrow_mut().push(part);
        }
    });
    Ok(out)
}

/// Reports whether a plan applies to segments here.
pub(crate) fn is_segment_pass_active() -> bool {
    autograd::is_grad_enabled() && CURRENT_PASS.with_current(Option::is_some)
}

/// Releases the device memory of the previous segment's activations. Its copy has finished, or the next user
/// of the memory waits for the copy on the device.
fn evict_previous_segment() {
    let offload = CURRENT_PASS.with_current_mut(|pass| pass.as_mut().and_then(|p| p.pending_offload.take()));
    if let Some(offload) = offload {
        offload.evict();
    }
}

/// Runs a segment and offloads its saved activations, including its inputs. They are copied back when the
/// backward pass reaches the next segment, so that the copy overlaps with that segment's work.
fn run_offloaded(inputs: &[&Tensor], body: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    let (out, mut offload) = OffloadSet::track_allocations(body);
    let out = out?;
    for input in inputs.iter().filter(|t| t.requires_grad() && !t.is_leaf()) {
        offload.insert(input);
    }
    offload.retain_offloadable(&out);
    // Released before this segment's copies, so that reuse of the memory waits for earlier copies only.
    evict_previous_segment();
    offload.copy_to_host()?;
    let offload = Arc::new(offload);
    let before = CURRENT_PASS.with_current_mut(|pass| {
        let pass = pass.as_mut()?;
        pass.pending_offload = Some(Arc::clone(&offload));
        Some(std::mem::replace(&mut pass.last_offload, Arc::downgrade(&offload)))
    });
    let before = before.unwrap_or_default();
    Ok(autograd::differentiable("segment", out.detach(), &[&out], move |g, _| {
        offload.copy_to_device()?;
        if let Some(before) = before.upgrade() {
            before.copy_to_device()?;
        }
        Ok(smallvec::smallvec![Some(g.clone())])
    }))
}

/// Returns the Pareto-optimal sets of segments to recompute, in order of time. The first set is empty except
/// for segments that take no time. The last has all segments that save memory.
///
/// Among equal segments, earlier ones are preferred. Their recomputation happens when later segments have
/// already been freed, which lowers the peak.
pub(crate) fn pareto_sets(parts: &[SegmentCost], max_count: usize) -> Vec<Arc<[bool]>> {
    struct Set {
        bytes: u64,
        seconds: f64,
        chosen: Vec<bool>,
    }
    let empty = Set { bytes: 0, seconds: 0.0, chosen: vec![false; parts.len()] };
    let mut front = vec![empty];
    for (k, part) in parts.iter().enumerate().filter(|(_, p)| p.saved_bytes > 0) {
        let extended = front.iter().map(|set| {
            let mut chosen = set.chosen.clone();
            chosen[k] = true;
            Set { bytes: set.bytes + part.saved_bytes, seconds: set.seconds + part.seconds, chosen }
        });
        let extended: Vec<Set> = extended.collect();
        front.extend(extended);
        // With equal time and bytes, the set of earlier segments comes first.
        front.sort_by(|a, b| {
            a.seconds.total_cmp(&b.seconds).then(b.bytes.cmp(&a.bytes)).then(b.chosen.cmp(&a.chosen))
        });
        let mut saved = None;
        front.retain(|set| {
            // Drops sets that save no more than a faster one.
            let before = saved.replace(saved.unwrap_or(0).max(set.bytes));
            before.is_none_or(|before| set.bytes > before)
        });
        thin_out_evenly(&mut front, 4 * max_count);
    }
    thin_out_evenly(&mut front, max_count);
    front.into_iter().map(|set| set.chosen.into()).collect()
}

/// Keeps at most `max_count` items, evenly spread, including the first and the last.
fn thin_out_evenly<T>(list: &mut Vec<T>, max_count: usize) {
    let (n, max_count) = (list.len(), max_count.max(2));
    if n > max_count {
        let mut kept_indices = (0..max_count).map(|k| k * (n - 1) / (max_count - 1)).peekable();
        let mut index = 0..n;
        list.retain(|_| kept_indices.next_if_eq(&index.next().unwrap_or(n)).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: u64, seconds: f64) -> SegmentCost {
        SegmentCost { saved_bytes: bytes, seconds }
    }

    #[test]
    fn equal_segments_are_taken_from_the_front() {
        let sets = pareto_sets(&[part(10, 1.0); 4], 16);
        let counts: Vec<usize> = sets.iter().map(|s| s.iter().filter(|c| **c).count()).collect();
        assert_eq!(counts, [0, 1, 2, 3, 4]);
        assert_eq!(*sets[2], [true, true, false, false]);
    }

    #[test]
    fn the_front_starts_with_cheap_bytes_and_has_no_dominated_set() {
        let parts = [part(10, 5.0), part(100, 1.0), part(0, 1.0), part(50, 0.5), part(60, 4.0)];
        let sets = pareto_sets(&parts, 64);
        let cost = |set: &[bool]| {
            let of = |f: fn(&SegmentCost) -> f64| -> f64 {
                parts.iter().zip(set).filter(|(_, c)| **c).map(|(p, _)| f(p)).sum()
            };
            (of(|p| p.seconds), of(|p| p.saved_bytes as f64))
        };
        // Compares with every subset.
        for mask in 0..1 << parts.len() {
            let subset: Vec<bool> = (0..parts.len()).map(|k| mask >> k & 1 == 1).collect();
            let (seconds, bytes) = cost(&subset);
            assert!(
                sets.iter().map(|s| cost(s)).any(|(s, b)| s <= seconds && b >= bytes),
                "{subset:?} is better than what was found"
            );
        }
        assert_eq!(*sets[0], [false; 5]);
        assert_eq!(sets.last().map(|s| s.to_vec()), Some(vec![true, true, false, true, true]));
        assert!(!sets.iter().any(|s| s[2]), "a segment that keeps nothing is never computed again");
    }

    #[test]
    fn many_different_segments_stay_manageable() {
        let parts: Vec<SegmentCost> = (0..60).map(|k| part(1 << (k % 13), (k * 7 % 11 + 1) as f64)).collect();
        let sets = pareto_sets(&parts, 24);
        assert_eq!(sets.len(), 24);
        assert!(sets[0].iter().all(|c| !c) && sets[23].iter().all(|c| *c));
    }
}
