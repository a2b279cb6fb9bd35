//! Automatic fusion: a chain of elementwise operations runs as one kernel.
//!
//! An elementwise operation checks its inputs and allocates its result at once; only its launch is deferred.
//! It joins the device's [`FusionGroup`] if it reads a result of the group element by element. A gradient also joins
//! if it reads an input of the group, or replaces a result of the group in memory. Anything else
//! that takes the [dispatch lock](crate::runtime::dispatch::DispatchGuard) flushes the group as one launch:
//! another operation, a copy, a read, an event, or compaction. So every submission finds all earlier work.
//!
//! A result that only the chain read and that was dropped before the flush is never written. Memory, argument
//! errors, gradients and bits match single launches, because each step rounds to its type and hides its operands.
//!
//! No memory returns to the pool while the group uses it ([`Device::flush_before_free`]).

use std::fmt;
use std::sync::Weak;

use crate::backend::Slice;
use crate::memory::scope::{self, Scope};
use crate::ops::kernel::heuristics::has_vector_lines;
use crate::ops::kernel::launch::MAX_RANK;
use crate::ops::kernel::pointwise_kernel::PointwiseLaunch;
use crate::ops::prelude::*;
use crate::runtime::dispatch::{DispatchGuard, FusionSlot, PendingLaunches};
use crate::storage::Storage;

/// Limits of a group, set by `fused_pointwise.wgsl`: steps, tensors read, and scalars.
const MAX_STEPS: usize = 16;
const MAX_INPUTS: usize = 7;
const MAX_SCALARS: usize = 16;

const INPUT_NAMES: [&str; MAX_INPUTS] = ["e0", "e1", "e2", "e3", "e4", "e5", "e6"];
const STEP_NAMES: [&str; MAX_STEPS] =
    ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "s12", "s13", "s14", "s15"];

/// Source of a step's operand: an input of the group or the result of an earlier step.
#[derive(Clone, Copy)]
enum StepOperand {
    Input(u8),
    Step(u8),
}

/// Memory that a group reads.
struct FusionInput {
    slice: Slice,
    dtype: &'static str,
    layout: Layout,
}

struct FusionStep {
    launch: PointwiseLaunch,
    operands: SmallVec<[StepOperand; 4]>,
    scope: Scope,
    slice: Slice,
    result: Weak<Storage>,
    is_read: bool,
    /// If true, a later step writes its result to the same memory.
    is_overwritten: bool,
}

impl FusionStep {
    /// Reports whether the result is still needed in memory.
    fn is_alive(&self) -> bool {
        !self.is_overwritten && self.result.strong_count() > 0
    }
}

/// Elementwise operations of one device that wait to be launched together, protected by the dispatch lock.
#[derive(Default)]
pub(crate) struct FusionGroup {
    queue: u8,
    inputs: Vec<FusionInput>,
    steps: Vec<FusionStep>,
}

impl fmt::Debug for FusionGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ops = self.steps.iter().map(|step| step.launch.op).collect::<Vec<_>>();
        write!(f, "FusionGroup({ops:?})")
    }
}

impl FusionGroup {
    /// Returns true if the operation fits and reads a step's result element by element. For a gradient, an input of
    /// the group suffices.
    fn accepts(
        &self,
        call: &PointwiseLaunch,
        tensors: &[&Tensor],
        producers: &[Option<u8>],
        shares_input: bool,
        out: &Tensor,
    ) -> bool {
        let Some(last) = self.steps.last() else { return false };
        let mut chained = 0;
        for (t, producer) in tensors.iter().zip(producers) {
            if let Some(k) = *producer {
                let Some(step) = self.steps.get(usize::from(k)) else { return false };
                if t.layout() != out.layout() || step.launch.out_dtype != t.dtype().name() {
                    return false;
                }
                chained += 1;
            }
        }
        let inputs = self.inputs.len() + tensors.len() - chained;
        let results = 1 + self.steps.iter().filter(|step| step.is_alive()).count();
        let scalars = self.steps.iter().map(|step| step.launch.scalars.len()).sum::<usize>();
        (chained > 0 || (call.is_grad && shares_input))
            && last.launch.layouts[0] == *out.layout()
            && self.steps.len() < MAX_STEPS
            && inputs <= MAX_INPUTS
            && inputs + results <= out.device().info().limits.max_bindings as usize
            && scalars + call.scalars.len() <= MAX_SCALARS
    }

    /// Returns the index of an input, which other steps may already read.
    fn add_input(&mut self, input: FusionInput) -> u8 {
        let is_same =
            |i: &FusionInput| i.slice == input.slice && i.dtype == input.dtype && i.layout == input.layout;
        let at = self.inputs.iter().position(is_same).unwrap_or_else(|| {
            self.inputs.push(input);
            self.inputs.len() - 1
        });
        at as u8
    }
}

impl PendingLaunches for FusionGroup {
    fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    fn queue(&self) -> u8 {
        self.queue
    }

    fn is_read(&self, step: u8) -> bool {
        self.steps.get(usize::from(step)).is_some_and(|step| step.is_read)
    }

    fn launch(&mut self, device: &Device, dropped: Option<u8>) -> Result<()> {
        let (steps, inputs) = (std::mem::take(&mut self.steps), std::mem::take(&mut self.inputs));
        let Some(last) = steps.last() else { return Ok(()) };
        let mut bindings: SmallVec<[Slice; 8]> = SmallVec::new();
        // The kernel of a single operation reads masks byte by byte.
        let reads_mask = inputs.iter().any(|input| input.dtype == "bool");
        let (kernel, params, groups) = if steps.len() == 1 && !reads_mask {
            bindings.extend(last.operands.iter().filter_map(|source| match source {
                StepOperand::Input(at) => inputs.get(usize::from(*at)).map(|input| input.slice),
                StepOperand::Step(_) => None,
            }));
            bindings.push(last.slice);
            last.launch.resolve_kernel(device)?
        } else {
            let is_written = |k: usize| steps[k].is_alive() || dropped.is_some_and(|at| usize::from(at) == k);
            let written: SmallVec<[u8; 16]> = (0..steps.len()).map(|k| u8::from(is_written(k))).collect();
            bindings.extend(inputs.iter().map(|input| input.slice));
            let outputs = steps.iter().zip(&written).filter(|(_, written)| **written == 1);
            bindings.extend(outputs.map(|(step, _)| step.slice));
            let (spec, params, groups) = build_fused_kernel(&steps, &inputs, &written)?;
            (device.kernel_for_spec(&spec)?, params, groups)
        };
        let groups = launch::fit_grid(device, [groups, 1, 1])?;
        device.launch_on_queue(self.queue, last.scope, kernel, &bindings, params.align().bytes(), groups)
    }
}

/// Returns the kernel of several steps, its parameters and its number of workgroups.
fn build_fused_kernel(
    steps: &[FusionStep],
    inputs: &[FusionInput],
    written: &[u8],
) -> Result<(KernelSpec, KernelParams, usize)> {
    type Words = SmallVec<[&'static str; 16]>;
    let Some(out) = steps.last().map(|step| &step.launch.layouts[0]) else {
        fail!(argument("fuse"), "a chain of no operations")
    };
    let n = out.numel();
    let mut math: Words = SmallVec::new();
    for file in steps.iter().flat_map(|step| step.launch.math_files) {
        // Keep the order of each step's files, since files depend on earlier ones.
        if !math.contains(file) {
            math.push(file);
        }
    }
    let strides: SmallVec<[&[usize]; 8]> =
        std::iter::once(out).chain(inputs.iter().map(|input| &input.layout)).map(Layout::strides).collect();
    let (shape, strides) = collapse_dims(out.shape(), &strides);
    let strided: SmallVec<[u8; 8]> = strides[1..].iter().map(|s| u8::from(*s != strides[0])).collect();
    let in_memory =
        steps.iter().zip(written).filter(|(_, w)| **w == 1).map(|(step, _)| step.launch.out_dtype);
    let mut in_memory = inputs.iter().map(|input| input.dtype).chain(in_memory);
    let width = if in_memory.any(|dtype| matches!(dtype, "f16" | "bf16")) { 8 } else { 4 };
    let is_repeated = |strides: &Dims| strides.last() == Some(&0);
    let vec4 = shape.last().is_some_and(|extent| extent.is_multiple_of(width))
        && inputs.iter().zip(&strides[1..]).all(|(input, strides)| {
            is_repeated(strides) || has_vector_lines(input.layout.offset(), strides, width)
        });
    let repeated: SmallVec<[u8; 8]> =
        strides[1..].iter().map(|strides| u8::from(vec4 && is_repeated(strides))).collect();
    let each = if vec4 { width } else { 4 };
    let calls = || steps.iter().map(|step| &step.launch);
    let words = |words: &mut dyn Iterator<Item = &'static str>| words.collect::<Words>();
    let source = |source: &StepOperand| match source {
        StepOperand::Input(at) => INPUT_NAMES[usize::from(*at)],
        StepOperand::Step(at) => STEP_NAMES[usize::from(*at)],
    };
    let counts = |of: fn(&PointwiseLaunch) -> usize| {
        calls().map(|call| of(call) as u8).collect::<SmallVec<[u8; 16]>>()
    };
    let spec = kernel_spec! {
        "fused_pointwise", ops: &words(&mut calls().map(|call| call.op))[..], math: &math[..],
        inputs: &words(&mut inputs.iter().map(|input| input.dtype))[..], strided: &strided[..],
        repeated: &repeated[..], exprs: &words(&mut calls().map(|call| call.expr))[..],
        outs: &words(&mut calls().map(|call| call.out_dtype))[..], written,
        arities: &counts(|call| call.input_names.len())[..], counts: &counts(|call| call.scalars.len())[..],
        args: &words(&mut calls().flat_map(|call| call.input_names.iter().copied()))[..],
        sources: &words(&mut steps.iter().flat_map(|step| step.operands.iter().map(source)))[..],
        scalar_names: &words(&mut calls().flat_map(|call| call.scalars.iter().map(|(name, _)| *name)))[..],
        layout: if vec4 { "vec4" } else { "each" }, width: each,
    };
    let scalars = calls().flat_map(|call| &call.scalars).map(|(_, words)| words[0]);
    let mut params = KernelParams::new().size(n).size(shape.len()).align();
    for word in scalars.chain(std::iter::repeat(0)).take(MAX_SCALARS) {
        params = params.u32(word);
    }
    params = params.dims(&shape);
    params = params.dims(&inputs.iter().map(|input| input.layout.offset()).collect::<SmallVec<[usize; 8]>>());
    for k in 1..=MAX_INPUTS {
        params = params.dims(strides.get(k).map_or(&[], |s| &s[..]));
    }
    // One zero for each operand.
    for _ in steps.iter().flat_map(|step| &step.operands) {
        params = params.u32(0);
    }
    Ok((spec, params, n.div_ceil(each * WORKGROUP_SIZE)))
}

/// Returns true if a result is large enough for fusion.
#[inline]
pub(crate) fn reaches_min_bytes(out: &Tensor) -> bool {
    let bytes = (out.numel() * out.dtype().size()) as u64;
    out.device().fusion_min_bytes().is_some_and(|least| bytes >= least)
}

/// Returns true if fusion supports an operation that writes all of `out`. It may read masks.
pub(crate) fn can_defer(call: &PointwiseLaunch, tensors: &[&Tensor], out: &Tensor) -> bool {
    let is_float = |t: &Tensor| matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
    call.is_float_math
        && is_float(out)
        && tensors.iter().all(|t| is_float(t) || t.dtype() == DType::Bool)
        && out.rank() <= MAX_RANK
        && call.scalars.len() <= MAX_SCALARS
}

/// Defers a launch that [`can_defer`] allows. Returns the launch if it cannot be deferred. In place, an operation is
/// deferred only if it overwrites a pending result. Otherwise the ordinary kernel reads and writes one buffer.
pub(crate) fn try_defer(
    call: PointwiseLaunch,
    tensors: &[&Tensor],
    out: &Tensor,
) -> Result<Option<PointwiseLaunch>> {
    let device = out.device();
    tensors.iter().try_for_each(|t| out.check_same_device(call.op, t))?;
    device.check_can_enqueue(call.op)?;
    let queue = device.current_queue();
    let mut guard = device.lock_dispatch_on_queue(queue);
    guard.take_failure()?;
    if device.capture_recorder().is_active() && !device.capture_recorder().is_recording_here() {
        // Another thread captures a step, and pending launches would belong to that capture.
        return Ok(Some(call));
    }
    let slots: SmallVec<[FusionSlot; 4]> = tensors.iter().map(|t| t.fusion_slot(&guard)).collect();
    let mut producers = find_producers(&slots, &guard);
    let (group_id, is_pending) = (guard.group_id(), !guard.is_empty());
    let shares_input =
        is_pending && slots.iter().any(|slot| slot.group_id == group_id && slot.step.is_none());
    if call.inplace && producers[0].is_none() {
        return Ok(Some(call));
    }
    if !guard.pending_mut::<FusionGroup>().accepts(&call, tensors, &producers, shares_input, out) {
        if call.inplace {
            return Ok(Some(call));
        }
        device.flush_pending(&mut guard);
        guard.take_failure()?;
        producers = find_producers(&slots, &guard);
    }
    let group = guard.pending_mut::<FusionGroup>();
    group.queue = queue;
    let before = group.inputs.len();
    let joined = bind_step(&mut guard, &call, tensors, &producers, out);
    let group = guard.pending_mut::<FusionGroup>();
    let Ok(Some((operands, slice))) = joined else {
        group.inputs.truncate(before);
        return joined.map(|_| Some(call));
    };
    for operand in &operands {
        if let StepOperand::Step(at) = operand
            && let Some(step) = group.steps.get_mut(usize::from(*at))
        {
            step.is_read = true;
        }
    }
    // The group keeps the earlier result in a register, so its memory may hold the new one.
    if let Some(&StepOperand::Step(at)) = operands.first().filter(|_| call.inplace)
        && let Some(step) = group.steps.get_mut(usize::from(at))
    {
        step.is_overwritten = true;
    }
    group.steps.push(FusionStep {
        launch: call,
        operands,
        scope: scope::current(),
        slice,
        result: out.downgrade_storage(),
        is_read: false,
        is_overwritten: false,
    });
    Ok(None)
}

/// Returns, for each operand, the pending step that writes it.
fn find_producers(slots: &[FusionSlot], guard: &DispatchGuard<'_>) -> SmallVec<[Option<u8>; 4]> {
    let is_pending = |slot: &FusionSlot| slot.group_id == guard.group_id() && !guard.is_empty();
    slots.iter().map(|slot| slot.step.filter(|_| is_pending(slot))).collect()
}

/// Binds the operands and the result of the group's next step. Returns `None` if an operand is on the host.
fn bind_step(
    guard: &mut DispatchGuard<'_>,
    call: &PointwiseLaunch,
    tensors: &[&Tensor],
    producers: &[Option<u8>],
    out: &Tensor,
) -> Result<Option<(SmallVec<[StepOperand; 4]>, Slice)>> {
    let mut slot = FusionSlot { group_id: guard.group_id(), step: None };
    let mut sources = SmallVec::new();
    for (k, (t, producer)) in tensors.iter().zip(producers).enumerate() {
        sources.push(match *producer {
            Some(step) => {
                t.record_access(Access::Read);
                StepOperand::Step(step)
            }
            None => {
                let Some(slice) = t.bind_deferred(Access::Read, guard, slot)? else { return Ok(None) };
                let (dtype, layout) = (call.input_dtypes[k], call.layouts[k + 1].clone());
                StepOperand::Input(guard.pending_mut::<FusionGroup>().add_input(FusionInput {
                    slice,
                    dtype,
                    layout,
                }))
            }
        });
    }
    slot.step = Some(guard.pending_mut::<FusionGroup>().steps.len() as u8);
    Ok(out.bind_deferred(Access::Write, guard, slot)?.map(|slice| (sources, slice)))
}
