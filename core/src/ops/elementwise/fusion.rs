//! Automatic fusion: a chain of elementwise operations runs as one kernel.
//!
//! An elementwise operation checks its inputs and allocates its result at once; only its launch is deferred.
//! It joins the device's [`FusionGroup`] if it reads a result of the group element by element. Anything else
//! that takes the [dispatch lock](crate::runtime::stream::DispatchGuard) flushes the group as one launch:
//! another operation, a copy, a read, an event, or compaction. So every submission finds all earlier work.
//!
//! A result that only the chain read and that was dropped before the flush is never written. Memory, argument
//! errors, gradients and bits match single launches, because each step rounds to its type.
//!
//! No memory returns to the pool while the group uses it ([`Device::flush_before_free`]).

use std::fmt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use forebay_shaders::KernelSpec;
use smallvec::SmallVec;

use crate::autograd;
use crate::backend::Slice;
use crate::environment;
use crate::error::{Error, Result};
use crate::memory::scope::{self, Scope};
use crate::ops::kernel::launch::{self, KernelParams, MAX_RANK, WORKGROUP_SIZE};
use crate::ops::kernel::pointwise_kernel::PointwiseLaunch;
use crate::runtime::device::Device;
use crate::runtime::stream::{Access, DispatchGuard};
use crate::tensor::layout::collapse_dims;
use crate::tensor::{Layout, Tensor, WeakStorage};

/// Smaller results use single kernels, because compiling a chain's kernel costs more than it saves.
const DEFAULT_MIN_BYTES: u64 = 256 << 10;

/// Limits of a group, set by `fused_pointwise.wgsl`: steps, tensors read, and scalars.
const MAX_STEPS: usize = 16;
const MAX_INPUTS: usize = 7;
const MAX_SCALARS: usize = 16;

const INPUT_NAMES: [&str; MAX_INPUTS] = ["e0", "e1", "e2", "e3", "e4", "e5", "e6"];
const STEP_NAMES: [&str; MAX_STEPS] =
    ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "s12", "s13", "s14", "s15"];

/// Reads the smallest fused result in bytes from the environment (0 gives `None`), or [`DEFAULT_MIN_BYTES`].
///
/// # Errors
/// The variable is not a number of bytes.
pub(crate) fn from_env() -> Result<Option<u64>> {
    Ok(Some(environment::read_bytes("FOREBAY_FUSION_MIN_BYTES")?.unwrap_or(DEFAULT_MIN_BYTES))
        .filter(|&least| least > 0))
}

/// Returns the setting of [`from_env`] without its error, which opening a device has reported.
pub(crate) fn min_bytes_or_default() -> Option<u64> {
    from_env().unwrap_or(Some(DEFAULT_MIN_BYTES))
}

/// Role of a storage in a fusion group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FusionSlot {
    /// Group, or 0 for none.
    group_id: u64,
    /// Step that writes the storage, or `None` if the group reads it.
    step: Option<u8>,
}

impl FusionSlot {
    pub(crate) fn group_id(self) -> u64 {
        self.group_id
    }
}

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
    result: WeakStorage,
    is_read: bool,
}

/// Elementwise operations of one device that wait to be launched together, protected by the dispatch lock.
pub(crate) struct FusionGroup {
    id: u64,
    queue: u8,
    inputs: Vec<FusionInput>,
    steps: Vec<FusionStep>,
    /// Error of an earlier launch, kept until a caller can return it.
    deferred_error: Option<Error>,
}

impl Default for FusionGroup {
    fn default() -> Self {
        Self { id: 1, queue: 0, inputs: Vec::new(), steps: Vec::new(), deferred_error: None }
    }
}

impl fmt::Debug for FusionGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ops = self.steps.iter().map(|step| step.launch.op).collect::<Vec<_>>();
        write!(f, "Group({}: {ops:?})", self.id)
    }
}

impl FusionGroup {
    /// Returns the id, which is unique among the device's groups.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns true if steps of another queue are pending.
    pub(crate) fn waits_on_other_queue(&self, queue: u8) -> bool {
        !self.is_empty() && self.queue != queue
    }

    /// Returns the unreported error of an earlier launch.
    pub(crate) fn take_failure(&mut self) -> Result<()> {
        self.deferred_error.take().map_or(Ok(()), Err)
    }

    /// Returns the pending step that writes a tensor.
    fn producing_step(&self, mark: FusionSlot) -> Option<u8> {
        mark.step.filter(|_| mark.group_id == self.id && !self.is_empty())
    }

    /// Returns true if the operation fits and reads a step's result element by element.
    fn accepts(
        &self,
        call: &PointwiseLaunch,
        tensors: &[&Tensor],
        marks: &[FusionSlot],
        out: &Tensor,
    ) -> bool {
        let Some(last) = self.steps.last() else { return false };
        let mut chained = 0;
        for (t, mark) in tensors.iter().zip(marks) {
            if let Some(k) = self.producing_step(*mark) {
                let Some(step) = self.steps.get(usize::from(k)) else { return false };
                if t.layout() != out.layout() || step.launch.out_dtype != t.dtype().name() {
                    return false;
                }
                chained += 1;
            }
        }
        let inputs = self.inputs.len() + tensors.len() - chained;
        let results = 1 + self.steps.iter().filter(|step| step.result.is_alive()).count();
        let numbers = self.steps.iter().map(|step| step.launch.scalars.len()).sum::<usize>();
        chained > 0
            && last.launch.layouts[0] == *out.layout()
            && self.steps.len() < MAX_STEPS
            && inputs <= MAX_INPUTS
            && inputs + results <= out.device().info().limits.max_bindings as usize
            && numbers + call.scalars.len() <= MAX_SCALARS
    }

    /// Returns the index of an input, which other steps may already read.
    fn add_input(&mut self, input: FusionInput) -> u8 {
        let same =
            |i: &FusionInput| i.slice == input.slice && i.dtype == input.dtype && i.layout == input.layout;
        let at = self.inputs.iter().position(same).unwrap_or_else(|| {
            self.inputs.push(input);
            self.inputs.len() - 1
        });
        at as u8
    }

    /// Launches the pending steps. The result of step `leaving` is being dropped but written nevertheless.
    fn launch(&mut self, device: &Device, leaving: Option<u8>) -> Result<()> {
        let (steps, inputs) = (std::mem::take(&mut self.steps), std::mem::take(&mut self.inputs));
        let Some(last) = steps.last() else { return Ok(()) };
        let mut bindings: SmallVec<[Slice; 8]> = SmallVec::new();
        let (kernel, params, groups) = if steps.len() == 1 {
            bindings.extend(last.operands.iter().filter_map(|source| match source {
                StepOperand::Input(at) => inputs.get(usize::from(*at)).map(|input| input.slice),
                StepOperand::Step(_) => None,
            }));
            bindings.push(last.slice);
            last.launch.resolve_kernel(device)?
        } else {
            let written =
                |k: usize| steps[k].result.is_alive() || leaving.is_some_and(|at| usize::from(at) == k);
            let written: SmallVec<[u8; 16]> = (0..steps.len()).map(|k| u8::from(written(k))).collect();
            bindings.extend(inputs.iter().map(|input| input.slice));
            let made = steps.iter().zip(&written).filter(|(_, written)| **written == 1);
            bindings.extend(made.map(|(step, _)| step.slice));
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
        return Err(Error::argument("fuse", "a chain of no operations"));
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
    let width = if in_memory.any(|dtype| dtype != "f32") { 8 } else { 4 };
    let vec4 = !strided.contains(&1)
        && n.is_multiple_of(width)
        && inputs.iter().all(|input| input.layout.offset().is_multiple_of(width));
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
    let spec = KernelSpec::new("fused_pointwise")
        .def("ops", &words(&mut calls().map(|call| call.op))[..])
        .def("math", &math[..])
        .def("inputs", &words(&mut inputs.iter().map(|input| input.dtype))[..])
        .def("strided", &strided[..])
        .def("exprs", &words(&mut calls().map(|call| call.expr))[..])
        .def("outs", &words(&mut calls().map(|call| call.out_dtype))[..])
        .def("written", written)
        .def("arities", &counts(|call| call.input_names.len())[..])
        .def("counts", &counts(|call| call.scalars.len())[..])
        .def("args", &words(&mut calls().flat_map(|call| call.input_names.iter().copied()))[..])
        .def("sources", &words(&mut steps.iter().flat_map(|step| step.operands.iter().map(source)))[..])
        .def("numbers", &words(&mut calls().flat_map(|call| call.scalars.iter().map(|(name, _)| *name)))[..])
        .def("layout", if vec4 { "vec4" } else { "each" })
        .def("width", each);
    let numbers = calls().flat_map(|call| &call.scalars).map(|(_, words)| words[0]);
    let mut params = KernelParams::new().size(n).size(shape.len()).u32(0).u32(0);
    for word in numbers.chain(std::iter::repeat(0)).take(MAX_SCALARS) {
        params = params.u32(word);
    }
    params = params.dims(&shape);
    params = params.dims(&inputs.iter().map(|input| input.layout.offset()).collect::<SmallVec<[usize; 8]>>());
    for k in 1..=MAX_INPUTS {
        params = params.dims(strides.get(k).map_or(&[], |s| &s[..]));
    }
    Ok((spec, params, n.div_ceil(each * WORKGROUP_SIZE)))
}

/// Returns true if a result is large enough for fusion.
#[inline]
pub(crate) fn reaches_min_bytes(out: &Tensor) -> bool {
    let bytes = (out.numel() * out.dtype().size()) as u64;
    out.device().fusion_min_bytes().is_some_and(|least| bytes >= least)
}

/// Returns true if fusion supports an operation that writes all of the new tensor `out`.
pub(crate) fn can_defer(call: &PointwiseLaunch, tensors: &[&Tensor], out: &Tensor) -> bool {
    let floats = |t: &Tensor| matches!(t.dtype().name(), "f32" | "f16" | "bf16");
    call.is_float_math
        && floats(out)
        && tensors.iter().all(|t| floats(t))
        && out.rank() <= MAX_RANK
        && call.scalars.len() <= MAX_SCALARS
}

/// Defers a launch that [`can_defer`] allows. Returns the launch if it cannot be deferred.
pub(crate) fn try_defer(
    call: PointwiseLaunch,
    tensors: &[&Tensor],
    out: &Tensor,
) -> Result<Option<PointwiseLaunch>> {
    let device = out.device();
    tensors.iter().try_for_each(|t| out.check_same_device(call.op, t))?;
    let queue = device.current_queue();
    let mut gate = device.lock_dispatch_on_queue(queue);
    gate.take_failure()?;
    if device.capture_recorder().is_active() && !device.capture_recorder().is_recording_here() {
        // Another thread captures a step, and pending launches would belong to that capture.
        return Ok(Some(call));
    }
    let marks: SmallVec<[FusionSlot; 4]> = tensors.iter().map(|t| t.fusion_slot(&gate)).collect();
    if !gate.accepts(&call, tensors, &marks, out) {
        device.flush_pending(&mut gate);
        gate.take_failure()?;
    }
    gate.queue = queue;
    let before = gate.inputs.len();
    let joined = bind_step(&mut gate, &call, tensors, &marks, out);
    let Ok(Some((sources, slice))) = joined else {
        gate.inputs.truncate(before);
        return joined.map(|_| Some(call));
    };
    for source in &sources {
        if let StepOperand::Step(at) = source
            && let Some(step) = gate.steps.get_mut(usize::from(*at))
        {
            step.is_read = true;
        }
    }
    gate.steps.push(FusionStep {
        launch: call,
        operands: sources,
        scope: scope::current(),
        slice,
        result: out.weak_storage(),
        is_read: false,
    });
    Ok(None)
}

/// Binds the operands and the result of the group's next step. Returns `None` if an operand is on the host.
fn bind_step(
    gate: &mut DispatchGuard<'_>,
    call: &PointwiseLaunch,
    tensors: &[&Tensor],
    marks: &[FusionSlot],
    out: &Tensor,
) -> Result<Option<(SmallVec<[StepOperand; 4]>, Slice)>> {
    let mut mark = FusionSlot { group_id: gate.id, step: None };
    let mut sources = SmallVec::new();
    for (k, (t, made)) in tensors.iter().zip(marks).enumerate() {
        sources.push(match gate.producing_step(*made) {
            Some(step) => {
                autograd::record_access(t, Access::Read);
                StepOperand::Step(step)
            }
            None => {
                let Some(slice) = t.bind_deferred(Access::Read, gate, mark)? else { return Ok(None) };
                let (dtype, layout) = (call.input_dtypes[k], call.layouts[k + 1].clone());
                StepOperand::Input(gate.add_input(FusionInput { slice, dtype, layout }))
            }
        });
    }
    mark.step = Some(gate.steps.len() as u8);
    Ok(out.bind_deferred(Access::Write, gate, mark)?.map(|slice| (sources, slice)))
}

impl Device {
    /// Smallest result, in bytes, for which chains of elementwise operations run as one kernel on this
    /// device. `None` if fusion is off. See [`set_fusion_min_bytes`](Self::set_fusion_min_bytes).
    #[must_use]
    #[inline]
    pub fn fusion_min_bytes(&self) -> Option<u64> {
        let least = self.stream_set().fusion_min_bytes.load(Ordering::Relaxed);
        (least != u64::MAX).then_some(least)
    }

    /// Runs chains of elementwise operations as one kernel if each result has at least `least` bytes. `None`
    /// disables fusion. Results are identical to the bit with and without fusion, and so is memory use.
    ///
    /// The default is 256 KiB, or `FOREBAY_FUSION_MIN_BYTES` (0 for off). The null device does not fuse.
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, profile::Profiler, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// device.set_fusion_min_bytes(Some(0));
    /// let [a, b, c] = [1.0, 2.0, 3.0].map(|v| Tensor::full(&[1024], v, DType::F32, &device));
    /// let (a, b, c) = (a?, b?, c?);
    /// let profiler = Profiler::start(&device)?;
    /// let y = a.mul(&b)?.add(&c)?.gelu()?;
    /// let profile = profiler.finish()?;
    /// assert_eq!(profile.spans.len(), 1);
    /// assert_eq!(&*profile.spans[0].name, "mul add gelu f32");
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn set_fusion_min_bytes(&self, least: Option<u64>) {
        self.stream_set().fusion_min_bytes.store(least.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Launches the pending steps under the dispatch lock. Stores an error for [`FusionGroup::take_failure`].
    pub(crate) fn flush_pending(&self, gate: &mut DispatchGuard<'_>) {
        self.flush_group(gate, None);
    }

    fn flush_group(&self, gate: &mut DispatchGuard<'_>, leaving: Option<u8>) {
        if gate.is_empty() {
            return;
        }
        // Pending launches belong to the step that is being captured.
        if let Err(error) = self.capture_recorder().run_recorded(|| gate.launch(self, leaving)) {
            gate.deferred_error.get_or_insert(error);
        }
        gate.id += 1;
        self.stream_set().fusion_group.store(gate.id, Ordering::Release);
    }

    /// Launches the pending steps and returns their error or an earlier one.
    #[doc(hidden)]
    pub fn flush_fusion(&self) -> Result<()> {
        self.lock_dispatch().take_failure()
    }

    /// Flushes a group before memory that the group uses returns to the pool. A result that only other steps
    /// have read is dropped without being written.
    pub(crate) fn flush_before_free(&self, mark: FusionSlot) {
        let mut gate = DispatchGuard::from_lock(
            self.stream_set().dispatch.lock().unwrap_or_else(PoisonError::into_inner),
        );
        if gate.id != mark.group_id {
            return;
        }
        let used = |k: u8| gate.steps.get(usize::from(k)).is_some_and(|step| step.is_read);
        if !mark.step.is_some_and(used) {
            self.flush_group(&mut gate, mark.step);
        }
    }
}
