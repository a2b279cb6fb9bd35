//! Fused optimiser steps: grouping of parameters, layout of their state, and launches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_shaders::KernelSpec;
use rustc_hash::FxHashSet;
use smallvec::{SmallVec, smallvec};

use super::composite::{ParamStep, ParamUpdate};
use super::state_staging::{StateStaging, max_group_numel, warn_offload_failed};
use crate::{DType, Device, Result, Tag, autograd, check, fail, fail_if, memory};
use forebay_core::amp;
use forebay_core::capture::ReplayCtx;
use forebay_core::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use forebay_core::tensor::{Dims, Layout, Tensor, layout::contiguous_strides};

pub(super) const ELEMENTS_PER_WORKGROUP: usize = 4 * WORKGROUP_SIZE;

/// Number of bindings that every device supports. Kernels use more only on devices with a higher limit.
const MIN_BINDINGS: usize = 7;

/// Maximum number of tensors in one launch, limited by the uniform block.
pub(super) const MAX_LAUNCH_TENSORS: usize = 16;

/// Options of an update rule; [`optimizer`](super::optimizer) implements them.
pub(super) trait RuleOptions {
    /// Fails for an option that is out of range. Called before each step.
    fn check_ranges(&self) -> Result<()>;
    /// Returns the weight decay, unless the parameter group overrides it.
    fn weight_decay(&self) -> f64;
    /// Reports whether the objective is maximised.
    fn maximize(&self) -> bool;
}

pub(super) trait UpdateRule: RuleOptions + Copy + Send + Sync + 'static {
    /// Name of the rule in optim_algorithms.wgsl, or `None` for a rule with `compute_update`.
    const ALGORITHM: Option<&'static str> = None;
    /// Names of the states, in the kernel's order, if they do not depend on the options.
    const STATES: &'static [&'static str] = &[];
    /// If false, PyTorch's state has no step count. A parameter with state then counts as one step.
    const HAS_STEP_COUNT: bool = true;

    /// Returns the kernel without parameter-dependent definitions.
    fn kernel(&self) -> Option<KernelSpec> {
        let kernel = KernelSpec::new("optim").def("algorithm", Self::ALGORITHM?);
        Some(kernel.def("maximize", self.maximize()))
    }
    /// Computes the updated parameter by tensor operations.
    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        Ok((at.param, at.states))
    }
    /// Fails for a parameter that the rule does not support.
    fn check_parameter(&self, _parameter: &Tensor) -> Result<()> {
        Ok(())
    }
    /// Fails for options that do not fit together. Called before each step.
    fn check_combination(&self) -> Result<()> {
        Ok(())
    }
    /// Returns names in PyTorch's state whose values follow from the step count. Loading ignores them.
    fn derived_state_names(&self) -> &'static [&'static str] {
        &[]
    }
    fn state_names(&self) -> SmallVec<[&'static str; 3]> {
        SmallVec::from_slice(Self::STATES)
    }
    /// Returns the shape of a state, by default the parameter's.
    fn state_shape(&self, _state: &'static str, shape: &[usize]) -> Dims {
        shape.into()
    }
    /// Reports whether weight decay applies to a parameter. In one launch, it applies to all parameters or to none.
    fn has_weight_decay(&self, _parameter: &Tensor) -> bool {
        true
    }
    /// Returns the constants shared by all parameters of a launch.
    fn launch_constants(&self, _weight_decay: f64, _lr: f64) -> [f64; 8] {
        [0.0; 8]
    }
    /// Returns the constants that depend on the number of this step, from 1. The kernel repeats the formula
    /// for its counts.
    fn step_constants(&self, _step: u64, _lr: f64) -> [f64; 3] {
        [0.0; 3]
    }
}

/// Parameters with their own learning rate or weight decay, like PyTorch's parameter groups.
///
/// ```
/// # use forebay_core::{device::Device, error::Result};
/// # use forebay_nn::{nn::{Linear, Module}, optim::{AdamW, Optimizer, ParamGroup}};
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// # let (body, head) = (Linear::new(8, 8, &device)?, Linear::new(8, 2, &device)?);
/// let mut opt = AdamW::new(body.parameters(), 1e-4);
/// opt.add_param_group(ParamGroup::new(head.parameters()).lr(1e-3).weight_decay(0.0))?;
/// // Schedules change the rates of all groups in proportion.
/// opt.set_lr(5e-5);
/// assert_eq!(opt.lrs(), [5e-5, 5e-4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ParamGroup {
    parameters: Vec<Tensor>,
    lr: Option<f64>,
    weight_decay: Option<f64>,
}

impl ParamGroup {
    /// Creates a group with the optimiser's options.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>) -> Self {
        Self { parameters, lr: None, weight_decay: None }
    }

    setters! {
        /// Sets the group's learning rate, which keeps its ratio to the optimiser's.
        fn lr(lr: f64) { lr: Some(lr) }
        /// Sets the group's weight decay.
        fn weight_decay(weight_decay: f64) { weight_decay: Some(weight_decay) }
    }
}

/// Options that a [`ParamGroup`] overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GroupOverrides {
    /// Ratio of the group's learning rate to the optimiser's.
    lr_ratio: Option<f64>,
    weight_decay: Option<f64>,
}

impl GroupOverrides {
    pub(super) fn lr(self, lr: f64) -> f64 {
        self.lr_ratio.map_or(lr, |ratio| ratio * lr)
    }

    pub(super) fn weight_decay_for(self, rule: &impl UpdateRule, parameter: &Tensor) -> f64 {
        if rule.has_weight_decay(parameter) { self.weight_decay.unwrap_or(rule.weight_decay()) } else { 0.0 }
    }
}

/// Parameters of an optimiser and their state.
#[derive(Debug)]
pub(super) struct FusedOptimizer {
    pub(super) parameters: Vec<Tensor>,
    /// First parameter of each group, and the group's overrides.
    group_overrides: SmallVec<[(usize, GroupOverrides); 2]>,
    /// Learning rate as last set. Captured steps use the last valid one.
    pub(super) lr: f64,
    pub(super) step_state: Arc<StepState>,
    pub(super) groups: Vec<FusedGroup>,
    /// Indices of parameters without a group. They have had no gradient yet and therefore have no state.
    ungrouped: Vec<usize>,
    /// State names of the existing groups.
    state_names: SmallVec<[&'static str; 3]>,
    /// If true, the parameters were checked.
    is_checked: bool,
    /// If true, the state is on the host between steps.
    pub(super) offloads_state: bool,
    /// If true, steps also write 16-bit copies of the parameters that autocast casts.
    pub(super) writes_low_precision_copies: bool,
}

/// Values that change between steps; captured steps read and count them at each replay.
#[derive(Debug)]
pub(super) struct StepState {
    /// Bits of the learning rate.
    lr: AtomicU64,
    /// Step counts of the parameters, including steps that the device may have skipped.
    steps: Box<[AtomicU64]>,
}

impl StepState {
    fn new(lr: f64, parameters: usize) -> Self {
        Self { lr: AtomicU64::new(lr.to_bits()), steps: (0..parameters).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn lr(&self) -> f64 {
        f64::from_bits(self.lr.load(Ordering::Relaxed))
    }

    pub(super) fn steps(&self, parameter: usize) -> u64 {
        self.steps[parameter].load(Ordering::Relaxed)
    }

    /// Increments the step count, and returns the count before.
    pub(super) fn increment_steps(&self, parameter: usize) -> u64 {
        self.steps[parameter].fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn set_steps(&self, parameter: usize, steps: u64) {
        self.steps[parameter].store(steps, Ordering::Relaxed);
    }
}

/// Parameters that one launch updates.
#[derive(Debug)]
pub(super) struct FusedGroup {
    /// Indices of the parameters.
    pub(super) members: Vec<usize>,
    pub(super) overrides: GroupOverrides,
    /// Offset of each member's state, in elements.
    offsets: Vec<usize>,
    /// State of all members, or `None` for a rule without state.
    pub(super) state: Option<Tensor>,
    /// Step counts of the members on the device, in two slots each: a step reads one slot and writes the
    /// other. `None` while the host counts.
    pub(super) step_counts: Option<Tensor>,
}

fn max_bindings_per_launch(device: &Device) -> usize {
    let bindings = device.info().limits.max_bindings as usize;
    // Backends count some internal buffers towards the limit, so only a generous limit is used.
    if bindings >= 2 * MIN_BINDINGS { bindings } else { MIN_BINDINGS }
}

/// Returns the most tensors in a launch of `each` bindings a tensor and `shared` common ones.
pub(super) fn max_tensors_per_launch(device: &Device, each: usize, shared: usize) -> usize {
    ((max_bindings_per_launch(device) - shared) / each).min(MAX_LAUNCH_TENSORS)
}

/// Reports whether a tensor may join a launch. A kernel declares the conversion to f16 only once, so an f16
/// tensor is launched alone.
pub(super) fn can_share_launch(first: &Tensor, next: &Tensor, count: usize, max_tensors: usize) -> bool {
    count < max_tensors
        && first.device() == next.device()
        && ![first, next].iter().any(|t| t.dtype() == DType::F16)
}

/// Returns the mode in which a kernel writes a tensor: see optim.wgsl.
pub(super) fn write_mode(t: &Tensor, other: Option<&Tensor>) -> &'static str {
    let offsets = [Some(t), other].into_iter().flatten().map(|t| t.layout().offset());
    if t.dtype() == DType::F32 {
        let is_whole_vectors = t.numel().is_multiple_of(4) && offsets.clone().all(|o| o.is_multiple_of(4));
        return if is_whole_vectors { "vec4" } else { "scattered" };
    }
    if t.layout().offset() == 0 && t.numel().is_multiple_of(2) { "packed" } else { "scattered" }
}

/// Fails for a dtype that the kernels of this module do not support.
#[track_caller]
pub(super) fn check_dtype(op: &'static str, t: &Tensor) -> Result<()> {
    fail_if!(
        !matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16);
        dtype(op, t.dtype()), "takes parameters of f32, f16 and bf16"
    );
    Ok(())
}

impl FusedGroup {
    /// Returns the index of a member's current slot in `step_counts`, from the host's count `steps`.
    pub(super) fn count_index(member: usize, steps: u64) -> usize {
        2 * member + (steps % 2) as usize
    }

    /// Creates the device's step counts of all members.
    pub(super) fn create_step_counts(
        &self,
        steps: impl Fn(usize) -> u64,
        parameters: &[Tensor],
    ) -> Result<Tensor> {
        let steps: Vec<f32> = self.members.iter().flat_map(|&k| [steps(k) as f32; 2]).collect();
        Tensor::from_slice(&steps, [steps.len()], parameters[self.members[0]].device())
    }

    pub(super) fn state_views(
        &self,
        rule: &impl UpdateRule,
        member: usize,
        shape: &[usize],
    ) -> SmallVec<[Tensor; 3]> {
        let Some(state) = &self.state else { return SmallVec::new() };
        let mut offset = self.offsets[member];
        let view = |name| {
            let shape = rule.state_shape(name, shape);
            let strides = contiguous_strides(&shape);
            let view = state.with_layout(Layout::new(&*shape, strides, offset));
            offset += padded_numel(&shape);
            view
        };
        rule.state_names().into_iter().map(view).collect()
    }
}

/// Fails for a list of parameters that cannot be trained.
pub(super) fn check_parameter_list(parameters: &[Tensor]) -> Result<()> {
    const OP: &str = "optimizer";
    fail_if!(parameters.is_empty(); argument(OP), "got an empty parameter list; pass `model.parameters()`");
    let mut seen = FxHashSet::default();
    for (k, p) in parameters.iter().enumerate() {
        let leaf = autograd::leaf_id(p);
        let reason = if leaf.is_some_and(|leaf| !seen.insert(leaf)) {
            "is in the list twice; pass each parameter once, as `model.parameters()` does"
        } else if leaf.is_none() && p.requires_grad() {
            "is not a leaf but the result of an operation, so it gets no gradient; pass the leaf that it was made from"
        } else if leaf.is_none() {
            "requires no gradient and never did; pass the leaf that `to_leaf` returns"
        } else if p.layout().has_internal_overlap() {
            "repeats elements (it was expanded); pass a leaf made from a copy"
        } else {
            ""
        };
        fail_if!(!reason.is_empty(); argument(OP), "parameter {k} of shape {:?} {reason}", p.shape());
    }
    Ok(())
}

/// Returns the size of a state in the buffer, in elements: a multiple of a vec4.
fn padded_numel(shape: &[usize]) -> usize {
    shape.iter().product::<usize>().next_multiple_of(4)
}

impl FusedOptimizer {
    /// Creates an optimiser. The first step checks the parameters.
    pub(super) fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        Self {
            group_overrides: smallvec![(0, GroupOverrides::default())],
            lr,
            step_state: Arc::new(StepState::new(lr, parameters.len())),
            groups: Vec::new(),
            ungrouped: (0..parameters.len()).collect(),
            state_names: SmallVec::new(),
            is_checked: false,
            offloads_state: false,
            writes_low_precision_copies: true,
            parameters,
        }
    }

    /// Adds parameters with their own learning rate or weight decay.
    #[track_caller]
    pub(super) fn add_param_group(&mut self, group: ParamGroup) -> Result<()> {
        const OP: &str = "add_param_group";
        fail_if!(
            !self.groups.is_empty();
            argument(OP), "comes before the first step; make an optimiser of all parameters and load the state"
        );
        let lr = self.lr;
        check::non_negative(OP, "lr", group.lr.unwrap_or(0.0))?;
        check::non_negative(OP, "weight_decay", group.weight_decay.unwrap_or(0.0))?;
        let lr_ratio = group.lr.map(|own| own / lr);
        fail_if!(
            lr_ratio.is_some_and(|ratio| !ratio.is_finite());
            argument(OP), "a learning rate keeps its ratio to the optimiser's, which is 0; begin with another"
        );
        let mut seen: FxHashSet<_> = self.parameters.iter().filter_map(autograd::leaf_id).collect();
        fail_if!(
            group.parameters.iter().any(|p| autograd::leaf_id(p).is_some_and(|leaf| !seen.insert(leaf)));
            argument(OP), "a parameter is in more than one group, or twice in one"
        );
        let overrides = GroupOverrides { lr_ratio, weight_decay: group.weight_decay };
        self.group_overrides.push((self.parameters.len(), overrides));
        self.parameters.extend(group.parameters);
        self.ungrouped = (0..self.parameters.len()).collect();
        self.is_checked = false;
        self.step_state = Arc::new(StepState::new(lr, self.parameters.len()));
        Ok(())
    }

    fn overrides_for_parameter(&self, parameter: usize) -> GroupOverrides {
        // The first group begins at parameter 0.
        let after = self.group_overrides.partition_point(|(first, _)| *first <= parameter);
        self.group_overrides[after - 1].1
    }

    /// Returns the learning rates of all groups.
    pub(super) fn lrs(&self) -> Vec<f64> {
        self.group_overrides.iter().map(|(_, settings)| settings.lr(self.lr)).collect()
    }

    pub(super) fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
        match check::non_negative("set_lr", "lr", lr) {
            Ok(()) => self.step_state.lr.store(lr.to_bits(), Ordering::Relaxed),
            Err(_) => {
                log::warn!("the learning rate {lr} fails the next step; captured steps keep the last one")
            }
        }
    }

    /// Fails for options out of range; in the first call, also for parameters that cannot be trained.
    #[track_caller]
    pub(super) fn check_step(&mut self, rule: &impl UpdateRule) -> Result<()> {
        for (_, settings) in &self.group_overrides {
            check::non_negative("step", "lr", settings.lr(self.lr))?;
        }
        rule.check_ranges()?;
        rule.check_combination()?;
        if !self.groups.is_empty() && self.state_names != rule.state_names() {
            let (existing, new) = (self.state_names.join(", "), rule.state_names().join(", "));
            fail!(
                argument("step"),
                "the states are [{existing}] and would be [{new}]; set options before the first step"
            );
        }
        if !self.is_checked {
            self.check_parameters(rule)?;
            self.is_checked = true;
        }
        Ok(())
    }

    /// Fails for parameters that cannot be trained, or not by this rule.
    #[track_caller]
    fn check_parameters(&self, rule: &impl UpdateRule) -> Result<()> {
        check_parameter_list(&self.parameters)?;
        self.parameters.iter().try_for_each(|p| {
            check_dtype("step", p)?;
            rule.check_parameter(p)
        })
    }

    /// Groups the parameters for which `trains` returns true, and allocates their state. Parameters that
    /// never have a gradient take no memory.
    pub(super) fn create_groups(
        &mut self,
        rule: &impl UpdateRule,
        trains: impl Fn(usize, &Tensor) -> Result<bool>,
    ) -> Result<()> {
        let chosen = self.ungrouped.iter().map(|&k| Ok(trains(k, &self.parameters[k])?.then_some(k)));
        let new: Vec<usize> = chosen.filter_map(Result::transpose).collect::<Result<_>>()?;
        let states = rule.state_names();
        let Some(&first) = new.first() else { return Ok(()) };
        if !states.is_empty() {
            let reason = "every replay would begin with new state; make one step before one is recorded";
            self.parameters[first].device().check_not_recording("step", reason)?;
        }
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        // Groups with the elements of their states, and the bindings of their parameters.
        let mut groups: Vec<(FusedGroup, usize, usize)> = Vec::new();
        let size_of = |&k: &usize| {
            let numel = |&name| padded_numel(&rule.state_shape(name, self.parameters[k].shape()));
            states.iter().map(numel).sum::<usize>()
        };
        let max_size = match self.offloads_state {
            true => max_group_numel(new.iter().map(size_of).sum()),
            false => usize::MAX,
        };
        for k in &new {
            let (k, size, p) = (*k, size_of(k), &self.parameters[*k]);
            let copies = self.writes_low_precision_copies && amp::low_precision_copy::is_wanted(p);
            let bindings = bindings_per_parameter(copies);
            let max_bindings = max_bindings_per_launch(p.device()) - usize::from(!states.is_empty());
            // Limited by the bytes of a binding and by the 32-bit indices of kernels.
            let room = (p.device().info().limits.max_binding_bytes as usize / 4).min(u32::MAX as usize);
            let room = room.min(max_size);
            // At most one group of each kind is still open on each device.
            let overrides = self.overrides_for_parameter(k);
            let kind = |overrides, p: &Tensor| (overrides, rule.has_weight_decay(p), p.device().clone());
            let own = kind(overrides, p);
            let first = |group: &FusedGroup| &self.parameters[group.members[0]];
            let open = groups.iter_mut().rfind(|(group, ..)| kind(group.overrides, first(group)) == own);
            if let Some((group, total, bound)) = open
                && can_share_launch(first(group), p, group.members.len(), MAX_LAUNCH_TENSORS)
                && *bound + bindings <= max_bindings
                && *total + size <= room
            {
                group.members.push(k);
                group.offsets.push(*total);
                *total += size;
                *bound += bindings;
            } else {
                let (members, offsets) = (vec![k], vec![0]);
                let group = FusedGroup { members, overrides, offsets, state: None, step_counts: None };
                groups.push((group, size, bindings));
            }
        }
        for (group, size, _) in groups.iter_mut().filter(|(_, size, _)| *size > 0) {
            let state = Tensor::zeros([*size], DType::F32, self.parameters[group.members[0]].device())?;
            if self.offloads_state {
                state.offload_()?;
            }
            group.state = Some(state);
        }
        // `new` is in ascending order.
        self.ungrouped.retain(|k| new.binary_search(k).is_err());
        self.state_names = states;
        self.groups.extend(groups.into_iter().map(|(group, ..)| group));
        Ok(())
    }

    fn enable_device_step_counts(&mut self) -> Result<()> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        for group in self.groups.iter_mut().filter(|group| group.step_counts.is_none()) {
            group.step_counts =
                Some(group.create_step_counts(|k| self.step_state.steps(k), &self.parameters)?);
        }
        Ok(())
    }

    /// Steps all parameters that have gradients, unless the value in `skip` is not zero.
    #[track_caller]
    pub(super) fn step(&mut self, rule: &impl UpdateRule, skip: Option<&Tensor>) -> Result<()> {
        let _op = memory::scope::enter_op("optimizer_step");
        self.check_step(rule)?;
        // The cached casts become stale with this step.
        amp::clear_autocast_cache();
        self.create_groups(rule, |k, p| match p.grad().filter(|_| p.numel() > 0) {
            Some(grad) => check_grad("step", k, p, &grad).map(|()| true),
            None => Ok(false),
        })?;
        let skips = match skip {
            Some(skip) => {
                let skips = self.copy_skip_to_devices(skip)?;
                self.enable_device_step_counts()?;
                skips
            }
            None => SmallVec::new(),
        };
        // Allocates first, so that a step that runs out of memory has changed nothing.
        let grads: Vec<MemberGrads> =
            self.groups.iter().map(|group| self.collect_group_grads(group)).collect::<Result<_>>()?;
        let Some(kernel) = rule.kernel() else { return self.step_composed(rule, &grads, &skips) };
        let packed: Vec<PackedParams> = self
            .groups
            .iter()
            .zip(&grads)
            .map(|(group, grads)| self.pack_params(group, grads))
            .collect::<Result<_>>()?;
        let mut staging = StateStaging::new(&self.groups, self.offloads_state)?;
        for (at, grads) in grads.iter().enumerate() {
            staging.bring_states(&self.groups, at)?;
            self.launch_group(rule, &kernel, &self.groups[at], grads, &packed[at], skips.get(at))?;
            self.unpack_params(&self.groups[at], &packed[at])?;
            self.store_copies(&self.groups[at], grads);
            staging.offload_state(&self.groups, at);
        }
        Ok(())
    }

    /// Steps by tensor operations. All updates are computed before any parameter changes.
    fn step_composed(&self, rule: &impl UpdateRule, grads: &[MemberGrads], skips: &[Tensor]) -> Result<()> {
        let (_no_grad, _no_autocast) = (autograd::no_grad(), amp::no_autocast());
        let before: Vec<u64> = (0..self.parameters.len()).map(|k| self.step_state.steps(k)).collect();
        let compute = |(at, (group, grads))| self.compute_writes(rule, group, grads, skips.get(at));
        let updates: Result<Vec<_>> = self.groups.iter().zip(grads).enumerate().map(compute).collect();
        let writes = updates.inspect_err(|_| {
            // Restores the counts, because no step was made.
            before.iter().enumerate().for_each(|(k, &steps)| self.step_state.set_steps(k, steps));
        })?;
        // These copies allocate nothing: each value has the dtype of its destination and its own memory.
        writes.iter().flatten().try_for_each(|(value, to)| to.copy_(value))?;
        for (group, grads) in self.groups.iter().zip(grads) {
            self.store_copies(group, grads);
            if let Some(state) = group.state.as_ref().filter(|_| self.offloads_state) {
                state.offload_().unwrap_or_else(|error| warn_offload_failed(&error));
            }
        }
        Ok(())
    }

    pub(super) fn device_of(&self, group: &FusedGroup) -> &Device {
        self.parameters[group.members[0]].device()
    }

    fn collect_group_grads(&self, group: &FusedGroup) -> Result<MemberGrads> {
        let mut grads = MemberGrads::new();
        for (member, &k) in group.members.iter().enumerate() {
            let p = &self.parameters[k];
            let Some(grad) = p.grad() else { continue };
            check_grad("step", k, p, &grad)?;
            if p.numel() > 0 {
                let copies = self.writes_low_precision_copies;
                let copy = if copies { amp::low_precision_copy::alloc_next_copy(p)? } else { None };
                grads.push(MemberGrad { member, grad: grad.contiguous()?, copy });
            }
        }
        Ok(grads)
    }

    /// Copies the parameters with gradients that are not contiguous, because kernels update elements in row-major
    /// order.
    fn pack_params(&self, group: &FusedGroup, grads: &MemberGrads) -> Result<PackedParams> {
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let mut packed = PackedParams::new();
        for &MemberGrad { member, .. } in grads {
            let p = &self.parameters[group.members[member]];
            if !p.is_contiguous() {
                packed.push((member, p.detach().copy()?));
            }
        }
        Ok(packed)
    }

    /// Writes updated copies back to their parameters. Allocates nothing.
    fn unpack_params(&self, group: &FusedGroup, packed: &PackedParams) -> Result<()> {
        packed.iter().try_for_each(|(member, values)| {
            values.copy_into(&self.parameters[group.members[*member]].detach())
        })
    }

    /// Registers the updated 16-bit copies of a group's parameters.
    fn store_copies(&self, group: &FusedGroup, grads: &MemberGrads) {
        for MemberGrad { member, copy, .. } in grads {
            if let Some(copy) = copy {
                amp::low_precision_copy::store_copy(&self.parameters[group.members[*member]], copy.clone());
            }
        }
    }

    /// Returns a `skip` tensor for each group, on the group's device. Fails if `skip` is not a single f32.
    #[track_caller]
    fn copy_skip_to_devices(&self, skip: &Tensor) -> Result<SmallVec<[Tensor; 4]>> {
        const OP: &str = "step_unless";
        fail_if!(skip.dtype() != DType::F32; dtype(OP, skip.dtype()), "takes one number of f32");
        fail_if!(skip.numel() != 1; shape(OP, [skip]), "takes one number");
        let mut copies: SmallVec<[Tensor; 4]> = smallvec![skip.detach()];
        self.groups
            .iter()
            .map(|group| {
                let device = self.device_of(group);
                if let Some(copy) = copies.iter().find(|copy| copy.device() == device) {
                    return Ok(copy.clone());
                }
                copies.push(skip.detach().to_device(device)?);
                Ok(copies[copies.len() - 1].clone())
            })
            .collect()
    }

    /// Steps the members of a group that have gradients, in as many launches as the bindings require.
    fn launch_group(
        &self,
        rule: &impl UpdateRule,
        kernel: &KernelSpec,
        group: &FusedGroup,
        grads: &MemberGrads,
        packed: &PackedParams,
        skip: Option<&Tensor>,
    ) -> Result<()> {
        let states = rule.state_names().len();
        let weight_decay = group.overrides.weight_decay_for(rule, &self.parameters[group.members[0]]);
        let shared: SmallVec<[&Tensor; 3]> =
            group.state.iter().chain(&group.step_counts).chain(skip).collect();
        let max_bindings = max_bindings_per_launch(self.device_of(group)) - shared.len();
        let mut rest = &grads[..];
        while !rest.is_empty() {
            let (grads, after) = rest.split_at(count_launch_members(rest, max_bindings));
            rest = after;
            let copies = grads.iter().any(|grad| grad.copy.is_some());
            let mut dtypes: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
            let mut modes: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
            // Dtypes of the copies, if there are any.
            let mut copied: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
            let mut tensors: SmallVec<[&Tensor; 3 * MAX_LAUNCH_TENSORS + 3]> = SmallVec::from_slice(&shared);
            let mut items: SmallVec<[LaunchItem; MAX_LAUNCH_TENSORS]> = SmallVec::new();
            let mut groups = 0;
            for MemberGrad { member, grad, copy } in grads {
                let parameter = group.members[*member];
                let packed_copy = packed.iter().find(|(packed, _)| packed == member);
                let p = packed_copy.map_or(&self.parameters[parameter], |(_, values)| values);
                let n = p.numel();
                let words =
                    [n, groups, p.layout().offset(), grad.layout().offset(), group.offsets[*member] / 4];
                items.push(LaunchItem { parameter, member: *member, words });
                groups += n.div_ceil(ELEMENTS_PER_WORKGROUP);
                dtypes.push(p.dtype().name());
                modes.push(write_mode(p, Some(grad)));
                if copies {
                    copied.push(copy.as_ref().map_or("", |copy| copy.dtype().name()));
                }
                tensors.push(p);
                tensors.push(grad);
            }
            tensors.extend(grads.iter().filter_map(|grad| grad.copy.as_ref()));
            let spec = kernel
                .clone()
                .def("states", states)
                .def("counted", group.step_counts.is_some())
                .def("skip", skip.is_some())
                .def("dtypes", &dtypes[..])
                .def("modes", &modes[..])
                .def("copies", &copied[..]);
            let (rule, step_state, counted) =
                (*rule, Arc::clone(&self.step_state), group.step_counts.is_some());
            let skip = skip.map_or(0, |skip| skip.layout().offset());
            let overrides = group.overrides;
            let params = move |_: &ReplayCtx| {
                let lr = overrides.lr(step_state.lr());
                let params = rule
                    .launch_constants(weight_decay, lr)
                    .into_iter()
                    .fold(KernelParams::new(), |p, c| p.f32(c as f32));
                items.iter().fold(params, |params, item| {
                    let params = item.words.into_iter().fold(params, KernelParams::size);
                    let before = step_state.increment_steps(item.parameter);
                    if counted {
                        return params.size(FusedGroup::count_index(item.member, before)).size(skip).size(0);
                    }
                    rule.step_constants(before + 1, lr).into_iter().fold(params, |p, x| p.f32(x as f32))
                })
            };
            launch::launch_dynamic(&spec, &tensors, params, groups)?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct LaunchItem {
    parameter: usize,
    member: usize,
    /// Kernel arguments that stay constant across steps.
    words: [usize; 5],
}

/// Gradient of a group member, with the destination of the updated copy.
pub(super) struct MemberGrad {
    pub(super) member: usize,
    pub(super) grad: Tensor,
    /// Destination of the 16-bit copy.
    pub(super) copy: Option<Tensor>,
}

pub(super) type MemberGrads = SmallVec<[MemberGrad; MAX_LAUNCH_TENSORS]>;

/// Group members that are not contiguous, with contiguous copies that the kernel updates in their place.
type PackedParams = SmallVec<[(usize, Tensor); 1]>;

fn bindings_per_parameter(copies: bool) -> usize {
    2 + usize::from(copies)
}

/// Returns the number of members, at least one, that a launch with this many bindings updates.
fn count_launch_members(grads: &[MemberGrad], max_bindings: usize) -> usize {
    let mut bound = 0;
    let fits = |grad: &&MemberGrad| {
        bound += bindings_per_parameter(grad.copy.is_some());
        bound <= max_bindings
    };
    grads.iter().take(MAX_LAUNCH_TENSORS).take_while(fits).count().max(1)
}

/// Fails for a gradient of another shape, dtype or device, because `set_grad` accepts any tensor.
#[track_caller]
pub(super) fn check_grad(op: &'static str, k: usize, p: &Tensor, grad: &Tensor) -> Result<()> {
    fail_if!(grad.shape() != p.shape(); shape(op, [grad, p]), "the gradient of parameter {k} has the parameter's shape");
    fail_if!(
        grad.dtype() != p.dtype();
        dtype(op, grad.dtype()), "the gradient of parameter {k} has the parameter's type, {}", p.dtype()
    );
    p.check_same_device(op, grad)
        .map_err(|error| error.with_context(format!("the gradient of parameter {k}")))
}

/// Makes a parameter's gradient contiguous, so that it can be changed in place.
pub(super) fn make_grad_contiguous(p: &Tensor) -> Result<Option<Tensor>> {
    let Some(grad) = p.grad().filter(|grad| !grad.is_contiguous()) else { return Ok(p.grad()) };
    let _tag = memory::scope::enter_tag(Tag::Gradient);
    let grad = grad.copy()?;
    p.set_grad(Some(grad.clone()));
    Ok(Some(grad))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_has_as_many_members_as_its_bindings_allow() -> Result<()> {
        let device = Device::null(Default::default());
        let grad = Tensor::zeros([4], DType::F32, &device)?;
        let member =
            |copy: bool| MemberGrad { member: 0, grad: grad.clone(), copy: copy.then(|| grad.clone()) };
        let count = |copies: &[bool], bindings| {
            count_launch_members(&copies.iter().map(|&copy| member(copy)).collect::<Vec<_>>(), bindings)
        };
        // Members with a copy have three bindings, others have two.
        assert_eq!(count(&[true, true, false, true], 8), 3);
        assert_eq!(count(&[true, true, false, true], 7), 2);
        assert_eq!(count(&[true], 1), 1);
        assert_eq!(count(&[false; 20], 100), MAX_LAUNCH_TENSORS);
        Ok(())
    }
}
