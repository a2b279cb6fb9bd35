//! One kernel for several parameters: how they are grouped, where their state lies, how a step is launched.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_shaders::KernelSpec;
use rustc_hash::FxHashSet;
use smallvec::{SmallVec, smallvec};

use super::composite::{self, ParamStep, ParamUpdate};
use super::staging_slots::{self, StagingSlots};
use forebay_core::amp;
use forebay_core::autograd;
use forebay_core::capture::ReplayCtx;
use forebay_core::check;
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::{self, Tag};
use forebay_core::ops::kernel::launch::{self, KernelParams, WORKGROUP_SIZE};
use forebay_core::tensor::{Dims, Layout, Tensor, layout::contiguous_strides};

/// Elements that one workgroup changes.
pub(super) const ELEMENTS_PER_WORKGROUP: usize = 4 * WORKGROUP_SIZE;

/// Bindings that every device has and kernels are held to; more are used where there are more.
const MIN_BINDINGS: usize = 7;

/// Tensors in one launch at most: what their parameters take of the uniform block.
pub(super) const MAX_LAUNCH_TENSORS: usize = 16;

/// An algorithm, as the kernel sees it.
pub(super) trait UpdateRule: Copy + Send + Sync + 'static {
    /// The kernel, without what depends on the parameters; `None` for a rule of tensor operations, which has `compose` instead.
    fn kernel(&self) -> Option<KernelSpec> {
        None
    }
    /// What a parameter becomes, by tensor operations.
    fn compute_update(&self, at: ParamStep) -> Result<ParamUpdate> {
        Ok((at.param, at.states))
    }
    /// Fails for a parameter that the rule does not take.
    fn check_parameter(&self, parameter: &Tensor) -> Result<()> {
        let _ = parameter;
        Ok(())
    }
    /// Fails for an option that is out of its range. Called before each step.
    fn check_options(&self) -> Result<()>;
    /// The names of the numbers kept for each element, in the kernel's order.
    fn state_names(&self) -> SmallVec<[&'static str; 3]>;
    /// Other names in PyTorch's state of it: numbers that follow from the count of steps, which are passed over.
    fn derived_state_names(&self) -> &'static [&'static str] {
        &[]
    }
    /// Whether PyTorch's state of it has a count of steps: without one, who has a state has made one.
    fn has_step_count(&self) -> bool {
        true
    }
    /// The shape of a state, where it is not the parameter's.
    fn state_shape(&self, state: &'static str, shape: &[usize]) -> Dims {
        let _ = state;
        shape.into()
    }
    /// How fast parameters decay, unless their group says otherwise.
    fn weight_decay(&self) -> f64;
    /// Whether a parameter decays at all: one launch is of parameters that do, or of others.
    fn has_weight_decay(&self, parameter: &Tensor) -> bool {
        let _ = parameter;
        true
    }
    /// What is the same for all parameters of a launch, at their weight decay and learning rate.
    fn launch_constants(&self, weight_decay: f64, lr: f64) -> [f64; 8] {
        let _ = (weight_decay, lr);
        [0.0; 8]
    }
    /// What depends on how many steps a parameter has made, this one included. The kernel has the same as `step_constants`, where the
    /// device counts.
    fn step_constants(&self, step: u64, lr: f64) -> [f64; 3] {
        let _ = (step, lr);
        [0.0; 3]
    }
}

/// Parameters of an optimiser that have a learning rate or a weight decay of their own, as PyTorch's parameter groups.
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
    /// Parameters with the optimiser's own options.
    #[must_use]
    pub fn new(parameters: Vec<Tensor>) -> Self {
        Self { parameters, lr: None, weight_decay: None }
    }

    /// Their learning rate, while the optimiser's is what it is now: later it keeps its ratio to that.
    #[must_use]
    pub fn lr(self, lr: f64) -> Self {
        Self { lr: Some(lr), ..self }
    }

    /// How fast they decay.
    #[must_use]
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay: Some(weight_decay), ..self }
    }
}

/// What the parameters of a [`ParamGroup`] have of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GroupOverrides {
    /// Their learning rate over the optimiser's.
    lr_ratio: Option<f64>,
    weight_decay: Option<f64>,
}

impl GroupOverrides {
    pub(super) fn lr(self, lr: f64) -> f64 {
        self.lr_ratio.map_or(lr, |ratio| ratio * lr)
    }

    /// Of a parameter, by a rule.
    pub(super) fn weight_decay_for(self, rule: &impl UpdateRule, parameter: &Tensor) -> f64 {
        if rule.has_weight_decay(parameter) { self.weight_decay.unwrap_or(rule.weight_decay()) } else { 0.0 }
    }
}

/// The parameters of an optimiser and their state.
#[derive(Debug)]
pub(super) struct FusedOptimizer {
    pub(super) parameters: Vec<Tensor>,
    /// The first parameter of each group, and what its parameters have of their own.
    group_overrides: SmallVec<[(usize, GroupOverrides); 2]>,
    /// The learning rate as it was set; captured steps have the last one that is in its range.
    lr: f64,
    pub(super) step_state: Arc<StepState>,
    pub(super) groups: Vec<FusedGroup>,
    /// Parameters that are in no group yet, since they had no gradient to step by: they have no state.
    ungrouped: Vec<usize>,
    /// The states of the groups there are.
    state_names: SmallVec<[&'static str; 3]>,
    /// If true, the parameters were checked.
    is_checked: bool,
    /// Whether the state is on the host between steps.
    offloads_state: bool,
    /// Whether 16-bit copies of parameters are written too.
    writes_low_precision_copies: bool,
}

/// What changes from one step to the next: captured steps read it at each replay, and count.
#[derive(Debug)]
pub(super) struct StepState {
    /// The bits of the learning rate.
    lr: AtomicU64,
    /// Steps of each parameter; those that the device may have skipped are among them.
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

    /// Counts a step; returns how many there were before.
    pub(super) fn increment_steps(&self, parameter: usize) -> u64 {
        self.steps[parameter].fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn set_steps(&self, parameter: usize, steps: u64) {
        self.steps[parameter].store(steps, Ordering::Relaxed);
    }
}

/// Parameters that are stepped by one launch.
#[derive(Debug)]
pub(super) struct FusedGroup {
    /// Numbers of the parameters.
    pub(super) members: Vec<usize>,
    pub(super) overrides: GroupOverrides,
    /// Where the state of each starts, in elements.
    offsets: Vec<usize>,
    /// The state of all; `None` where the rule keeps none.
    pub(super) state: Option<Tensor>,
    /// Steps that each member has made, twice: a step reads one number and writes the other. `None` while the host knows.
    pub(super) step_counts: Option<Tensor>,
}

/// How many tensors one launch takes, if each needs `each` bindings and all share `shared`.
pub(super) fn max_tensors_per_launch(device: &Device, each: usize, shared: usize) -> usize {
    let bindings = (device.info().limits.max_bindings as usize).max(MIN_BINDINGS);
    // Backends count some buffers of their own among the limit: only a generous one is used.
    let bindings = if bindings >= 2 * MIN_BINDINGS { bindings } else { MIN_BINDINGS };
    ((bindings - shared) / each).min(MAX_LAUNCH_TENSORS)
}

/// Whether a tensor may join a launch. The conversion to f16 is declared once in a kernel, so one f16 tensor is alone.
pub(super) fn can_share_launch(first: &Tensor, next: &Tensor, count: usize, most: usize) -> bool {
    count < most && first.device() == next.device() && ![first, next].iter().any(|t| t.dtype() == DType::F16)
}

/// How a kernel writes a tensor: see optim.wgsl.
pub(super) fn write_mode(t: &Tensor, other: Option<&Tensor>) -> &'static str {
    let offsets = [Some(t), other].into_iter().flatten().map(|t| t.layout().offset());
    if t.dtype() == DType::F32 {
        let whole = t.numel().is_multiple_of(4) && offsets.clone().all(|o| o.is_multiple_of(4));
        return if whole { "vec4" } else { "scattered" };
    }
    if t.layout().offset() == 0 && t.numel().is_multiple_of(2) { "packed" } else { "scattered" }
}

/// Fails for a dtype that the kernels of this module do not compute.
pub(super) fn check_dtype(op: &'static str, t: &Tensor) -> Result<()> {
    match t.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        dtype => Err(Error::dtype(op, dtype, "takes parameters of f32, f16 and bf16")),
    }
}

impl FusedGroup {
    /// Where in `counts` the steps of a member are, of which the host knows `steps`.
    pub(super) fn count_index(member: usize, steps: u64) -> usize {
        2 * member + (steps % 2) as usize
    }

    /// The steps of all members, as the device counts them.
    pub(super) fn create_step_counts(
        &self,
        steps: impl Fn(usize) -> u64,
        parameters: &[Tensor],
    ) -> Result<Tensor> {
        let steps: Vec<f32> = self.members.iter().flat_map(|&k| [steps(k) as f32; 2]).collect();
        Tensor::from_slice(&steps, &[steps.len()], parameters[self.members[0]].device())
    }

    /// The states of a member, each as a tensor.
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

/// What a state takes of the buffer, in elements: whole vec4s.
fn padded_numel(shape: &[usize]) -> usize {
    shape.iter().product::<usize>().next_multiple_of(4)
}

impl FusedOptimizer {
    /// Takes each parameter once: PyTorch warns where one list names a parameter twice.
    pub(super) fn new(parameters: Vec<Tensor>, lr: f64) -> Self {
        let mut seen = FxHashSet::default();
        let parameters: Vec<Tensor> = parameters
            .into_iter()
            .filter(|p| autograd::leaf_id(p).is_none_or(|leaf| seen.insert(leaf)))
            .collect();
        Self {
            group_overrides: smallvec![(0, GroupOverrides::default())],
            lr,
            step_state: Arc::new(StepState::new(lr, parameters.len())),
            groups: Vec::new(),
            ungrouped: (0..parameters.len()).collect(),
            state_names: SmallVec::new(),
            is_checked: false,
            offloads_state: false,
            writes_low_precision_copies: false,
            parameters,
        }
    }

    /// More parameters, with a learning rate or a weight decay of their own.
    pub(super) fn add_param_group(&mut self, group: ParamGroup) -> Result<()> {
        const OP: &str = "add_param_group";
        let error = |why: &str| Err(Error::argument(OP, why));
        if !self.groups.is_empty() {
            return error(
                "comes before the first step; make an optimiser of all parameters and load the state",
            );
        }
        let lr = self.lr();
        check::non_negative(OP, "lr", group.lr.unwrap_or(0.0))?;
        check::non_negative(OP, "weight_decay", group.weight_decay.unwrap_or(0.0))?;
        let ratio = group.lr.map(|own| own / lr);
        if ratio.is_some_and(|ratio| !ratio.is_finite()) {
            return error(
                "a learning rate keeps its ratio to the optimiser's, which is 0; begin with another",
            );
        }
        let mut seen: FxHashSet<_> = self.parameters.iter().filter_map(autograd::leaf_id).collect();
        if group.parameters.iter().any(|p| autograd::leaf_id(p).is_some_and(|leaf| !seen.insert(leaf))) {
            return error("a parameter is in more than one group, or twice in one");
        }
        self.group_overrides.push((
            self.parameters.len(),
            GroupOverrides { lr_ratio: ratio, weight_decay: group.weight_decay },
        ));
        self.parameters.extend(group.parameters);
        self.ungrouped = (0..self.parameters.len()).collect();
        self.is_checked = false;
        self.step_state = Arc::new(StepState::new(lr, self.parameters.len()));
        Ok(())
    }

    /// What a parameter has of its own.
    fn overrides_for_parameter(&self, parameter: usize) -> GroupOverrides {
        self.group_overrides
            .iter()
            .rev()
            .find(|(first, _)| *first <= parameter)
            .map_or_else(GroupOverrides::default, |s| s.1)
    }

    /// The learning rates of all groups of parameters.
    pub(super) fn lrs(&self) -> Vec<f64> {
        self.group_overrides.iter().map(|(_, settings)| settings.lr(self.lr())).collect()
    }

    pub(super) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    pub(super) fn lr(&self) -> f64 {
        self.lr
    }

    pub(super) fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
        if check::non_negative("set_lr", "lr", lr).is_ok() {
            self.step_state.lr.store(lr.to_bits(), Ordering::Relaxed);
        } else {
            log::warn!(
                "the learning rate {lr} is refused by the next step; captured steps keep the last one"
            );
        }
    }

    /// Sends the state to the host, or brings it back, with the next step.
    pub(super) fn set_offload_state(&mut self, on: bool) {
        self.offloads_state = on;
    }

    /// Writes 16-bit copies of the parameters that autocast casts, or no more. Before the first step.
    pub(super) fn set_low_precision_copies(&mut self, on: bool) {
        self.writes_low_precision_copies = on;
    }

    /// Fails for options out of range, and once for parameters that cannot be trained.
    pub(super) fn check_step(&mut self, rule: &impl UpdateRule) -> Result<()> {
        for (_, settings) in &self.group_overrides {
            check::non_negative("step", "lr", settings.lr(self.lr))?;
        }
        rule.check_options()?;
        if !self.groups.is_empty() && self.state_names != rule.state_names() {
            let (kept, now) = (self.state_names.join(", "), rule.state_names().join(", "));
            let why =
                format!("the states are [{kept}] and would be [{now}]; set options before the first step");
            return Err(Error::argument("step", why));
        }
        if !self.is_checked {
            self.check_parameters(rule)?;
            self.is_checked = true;
        }
        Ok(())
    }

    /// Fails for parameters that cannot be trained, or not by this rule.
    fn check_parameters(&self, rule: &impl UpdateRule) -> Result<()> {
        const OP: &str = "optimizer";
        if self.parameters.is_empty() {
            let why = "got an empty parameter list; pass `model.parameters()`";
            return Err(Error::argument(OP, why));
        }
        for (k, p) in self.parameters.iter().enumerate() {
            let refuse =
                |why: &str| Err(Error::argument(OP, format!("parameter {k} of shape {:?} {why}", p.shape())));
            if autograd::leaf_id(p).is_none() {
                return refuse(if p.requires_grad() {
                    "is no leaf but the result of an operation, so it gets no gradient; pass the leaf that it was made from"
                } else {
                    "requires no gradient and never did; pass the leaf that `requires_grad_` returns"
                });
            }
            check_dtype("step", p)?;
            if !p.is_contiguous() {
                return refuse("is not contiguous; make it from a copy");
            }
            rule.check_parameter(p)?;
        }
        Ok(())
    }

    /// Groups those parameters that `trains` and allocates their state, once for each: what never has a gradient has no state.
    pub(super) fn create_groups(
        &mut self,
        rule: &impl UpdateRule,
        trains: impl Fn(usize, &Tensor) -> Result<bool>,
    ) -> Result<()> {
        let mut new: Vec<usize> = Vec::new();
        for &k in &self.ungrouped {
            if trains(k, &self.parameters[k])? {
                new.push(k);
            }
        }
        let states = rule.state_names();
        let Some(&first) = new.first() else { return Ok(()) };
        if !states.is_empty() {
            let reason = "every replay would begin with new state; make one step before one is recorded";
            self.parameters[first].device().check_not_recording("step", reason)?;
        }
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        let mut groups: Vec<FusedGroup> = Vec::new();
        let mut sizes: Vec<usize> = Vec::new();
        for &k in &new {
            let p = &self.parameters[k];
            let size =
                states.iter().map(|&name| padded_numel(&rule.state_shape(name, p.shape()))).sum::<usize>();
            let most = max_tensors_per_launch(
                p.device(),
                bindings_per_parameter(self.writes_low_precision_copies),
                usize::from(!states.is_empty()),
            );
            // A binding's bytes, and a tensor's elements.
            let room = (p.device().info().limits.max_binding_bytes as usize / 4).min(u32::MAX as usize);
            // Each kind has a group that still takes members.
            let settings = self.overrides_for_parameter(k);
            let kind = (settings, rule.has_weight_decay(p));
            let open = groups
                .iter()
                .rposition(|g| (g.overrides, rule.has_weight_decay(&self.parameters[g.members[0]])) == kind);
            if let Some((group, total)) = open.map(|at| (&mut groups[at], &mut sizes[at]))
                && can_share_launch(&self.parameters[group.members[0]], p, group.members.len(), most)
                && *total + size <= room
            {
                group.members.push(k);
                group.offsets.push(*total);
                *total += size;
            } else {
                groups.push(FusedGroup {
                    members: vec![k],
                    overrides: settings,
                    offsets: vec![0],
                    state: None,
                    step_counts: None,
                });
                sizes.push(size);
            }
        }
        for (group, &size) in groups.iter_mut().zip(&sizes) {
            if size > 0 {
                let device = self.parameters[group.members[0]].device();
                let state = Tensor::zeros(&[size], DType::F32, device)?;
                if self.offloads_state {
                    state.offload_()?;
                }
                group.state = Some(state);
            }
        }
        // In order, as they were found.
        self.ungrouped.retain(|k| new.binary_search(k).is_err());
        self.state_names = states;
        self.groups.extend(groups);
        Ok(())
    }

    /// Lets the device count the steps from here on.
    fn enable_device_step_counts(&mut self) -> Result<()> {
        let _tag = memory::scope::enter_tag(Tag::OptimizerState);
        for group in self.groups.iter_mut().filter(|group| group.step_counts.is_none()) {
            group.step_counts =
                Some(group.create_step_counts(|k| self.step_state.steps(k), &self.parameters)?);
        }
        Ok(())
    }

    /// Steps all parameters that have gradients; unless the number in `skip` is other than zero.
    #[track_caller]
    pub(super) fn step(&mut self, rule: &impl UpdateRule, skip: Option<&Tensor>) -> Result<()> {
        let _op = memory::scope::enter_op("optimizer_step");
        self.check_step(rule)?;
        // Casts of the parameters as they were.
        amp::clear_autocast_cache();
        self.create_groups(rule, |k, p| match p.grad().filter(|_| p.numel() > 0) {
            Some(grad) => check_grad("step", k, p, &grad).map(|()| true),
            None => Ok(false),
        })?;
        if let Some(skip) = skip {
            check_skip(skip, &self.parameters)?;
            self.enable_device_step_counts()?;
        }
        // All that takes memory comes first: a step that runs out of it has changed nothing.
        let grads: Vec<MemberGrads> = self
            .groups
            .iter()
            .map(|group| collect_group_grads(group, &self.parameters, self.writes_low_precision_copies))
            .collect::<Result<_>>()?;
        let Some(kernel) = rule.kernel() else { return self.step_composed(rule, &grads, skip) };
        let mut room = StagingSlots::new(&self.groups, self.offloads_state)?;
        for (at, grads) in grads.iter().enumerate() {
            room.prefetch_state(&self.groups, at)?;
            room.prefetch_state(&self.groups, at + 1)?;
            launch_group(rule, &kernel, &self.groups[at], grads, skip, &self.parameters, &self.step_state)?;
            for grad in grads {
                if let Some(copy) = &grad.copy {
                    amp::low_precision_copy::store_copy(
                        &self.parameters[self.groups[at].members[grad.member]],
                        copy.clone(),
                    );
                }
            }
            room.offload_state(&self.groups, at);
        }
        Ok(())
    }

    /// The same by tensor operations. What parameters become is made before any is changed.
    fn step_composed(
        &self,
        rule: &impl UpdateRule,
        grads: &[MemberGrads],
        skip: Option<&Tensor>,
    ) -> Result<()> {
        let (_no_grad, _no_autocast) = (autograd::no_grad(), amp::no_autocast());
        let before: Vec<u64> = (0..self.parameters.len()).map(|k| self.step_state.steps(k)).collect();
        let make = |(group, grads)| {
            composite::compute_writes(rule, group, grads, skip, &self.parameters, &self.step_state)
        };
        let made: Result<Vec<_>> = self.groups.iter().zip(grads).map(make).collect();
        let writes = made.inspect_err(|_| {
            // No step was made, whatever was counted on the way.
            before.iter().enumerate().for_each(|(k, &steps)| self.step_state.set_steps(k, steps));
        })?;
        // No write takes memory: values have the type of what they replace, and memory of their own.
        writes.iter().flatten().try_for_each(|(value, to)| to.copy_(value))?;
        for (group, grads) in self.groups.iter().zip(grads) {
            for grad in grads {
                if let Some(copy) = &grad.copy {
                    amp::low_precision_copy::store_copy(
                        &self.parameters[group.members[grad.member]],
                        copy.clone(),
                    );
                }
            }
            if let Some(state) = group.state.as_ref().filter(|_| self.offloads_state) {
                state.offload_().unwrap_or_else(|error| staging_slots::warn_offload_failed(&error));
            }
        }
        Ok(())
    }
}

/// What steps a member of a group.
pub(super) struct MemberGrad {
    pub(super) member: usize,
    pub(super) grad: Tensor,
    /// Where its 16-bit copy goes.
    pub(super) copy: Option<Tensor>,
}

pub(super) type MemberGrads = SmallVec<[MemberGrad; MAX_LAUNCH_TENSORS]>;

/// Bindings of a parameter: it, its gradient, and its copy.
fn bindings_per_parameter(copies: bool) -> usize {
    2 + usize::from(copies)
}

/// Fails for a gradient that is not of its parameter's shape, type and device, as `set_grad` takes any.
pub(super) fn check_grad(op: &'static str, k: usize, p: &Tensor, grad: &Tensor) -> Result<()> {
    if grad.shape() != p.shape() {
        let rule = format!("the gradient of parameter {k} has the parameter's shape");
        return Err(Error::shape(op, rule, &[grad.shape(), p.shape()]));
    }
    if grad.dtype() != p.dtype() {
        let rule = format!("the gradient of parameter {k} has the parameter's type, {}", p.dtype());
        return Err(Error::dtype(op, grad.dtype(), rule));
    }
    p.check_same_device(op, grad)
        .map_err(|error| error.with_context(format!("the gradient of parameter {k}")))
}

/// The gradients of those members of a group that have any.
fn collect_group_grads(group: &FusedGroup, parameters: &[Tensor], copies: bool) -> Result<MemberGrads> {
    let mut grads = MemberGrads::new();
    for (member, &k) in group.members.iter().enumerate() {
        let p = &parameters[k];
        let Some(grad) = p.grad() else { continue };
        check_grad("step", k, p, &grad)?;
        if p.numel() > 0 {
            let copy = if copies { amp::low_precision_copy::alloc_next_copy(p)? } else { None };
            grads.push(MemberGrad { member, grad: grad.contiguous()?, copy });
        }
    }
    Ok(grads)
}

/// Fails for what a kernel cannot decide by.
fn check_skip(skip: &Tensor, parameters: &[Tensor]) -> Result<()> {
    const OP: &str = "step_unless";
    if skip.dtype() != DType::F32 {
        return Err(Error::dtype(OP, skip.dtype(), "takes one number of f32"));
    }
    if skip.numel() != 1 {
        return Err(Error::shape(OP, "takes one number", &[skip.shape()]));
    }
    parameters.iter().try_for_each(|p| skip.check_same_device(OP, p))
}

/// A parameter in a launch.
#[derive(Clone, Copy)]
struct LaunchItem {
    parameter: usize,
    member: usize,
    /// What the kernel is told of it at every step.
    words: [usize; 5],
}

/// Steps the members of a group that have gradients, by as many launches as the bindings take.
fn launch_group(
    rule: &impl UpdateRule,
    kernel: &KernelSpec,
    group: &FusedGroup,
    grads: &MemberGrads,
    skip: Option<&Tensor>,
    parameters: &[Tensor],
    pace: &Arc<StepState>,
) -> Result<()> {
    let states = rule.state_names().len();
    let weight_decay = group.overrides.weight_decay_for(rule, &parameters[group.members[0]]);
    let shared: SmallVec<[&Tensor; 3]> = group.state.iter().chain(&group.step_counts).chain(skip).collect();
    let copies = grads.iter().any(|grad| grad.copy.is_some());
    let most = max_tensors_per_launch(
        parameters[group.members[0]].device(),
        bindings_per_parameter(copies),
        shared.len(),
    );
    for grads in grads.chunks(most) {
        let mut dtypes: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
        let mut modes: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
        // Of the copies, where there are any.
        let mut copied: SmallVec<[&'static str; MAX_LAUNCH_TENSORS]> = SmallVec::new();
        let mut tensors: SmallVec<[&Tensor; 3 * MAX_LAUNCH_TENSORS + 3]> = SmallVec::from_slice(&shared);
        let mut items: SmallVec<[LaunchItem; MAX_LAUNCH_TENSORS]> = SmallVec::new();
        let mut groups = 0;
        for MemberGrad { member, grad, copy } in grads {
            let parameter = group.members[*member];
            let p = &parameters[parameter];
            let n = p.numel();
            let words = [n, groups, p.layout().offset(), grad.layout().offset(), group.offsets[*member] / 4];
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
        let (rule, pace, counted) = (*rule, Arc::clone(pace), group.step_counts.is_some());
        let skip = skip.map_or(0, |skip| skip.layout().offset());
        let settings = group.overrides;
        let params = move |_: &ReplayCtx| {
            let lr = settings.lr(pace.lr());
            let params = rule
                .launch_constants(weight_decay, lr)
                .into_iter()
                .fold(KernelParams::new(), |p, c| p.f32(c as f32));
            items.iter().fold(params, |params, item| {
                let params = item.words.into_iter().fold(params, KernelParams::size);
                let before = pace.increment_steps(item.parameter);
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

/// The gradient of a parameter, contiguous, to be changed in place.
pub(super) fn make_grad_contiguous(p: &Tensor) -> Result<Option<Tensor>> {
    let Some(grad) = p.grad() else { return Ok(None) };
    if grad.is_contiguous() {
        return Ok(Some(grad));
    }
    let _tag = memory::scope::enter_tag(Tag::Gradient);
    let grad = grad.copy()?;
    p.set_grad(Some(grad.clone()));
    Ok(Some(grad))
}
