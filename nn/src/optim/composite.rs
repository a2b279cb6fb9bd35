//! Optimiser steps of tensor operations, for rules that need norms, rows or matrix products.
//!
//! Values that change from step to step are read from the device, where one launch writes them for several
//! parameters. Captured steps therefore stay up to date, and a step can be skipped, as with fused kernels.

use std::sync::Arc;

use forebay_shaders::KernelSpec;
use smallvec::SmallVec;

use super::fused::{FusedGroup, FusedOptimizer, MAX_LAUNCH_TENSORS, MemberGrad, MemberGrads, UpdateRule};
use crate::{DType, Result, Tag, Tensor, memory};
use forebay_core::capture::ReplayCtx;
use forebay_core::ops::kernel::launch::{self, KernelParams};

/// Inputs of the update of one parameter, all in f32.
pub(super) struct ParamStep {
    /// Parameter before the step.
    pub(super) param: Tensor,
    /// Gradient of the objective to minimise.
    pub(super) grad: Tensor,
    /// States of the parameter, in the rule's order.
    pub(super) states: SmallVec<[Tensor; 3]>,
    /// Learning rate and number of this step (from 1), as scalars on the device.
    pub(super) lr: Tensor,
    pub(super) step: Tensor,
    pub(super) weight_decay: f64,
    /// Dtype in which the parameter is stored.
    pub(super) dtype: DType,
}

/// Updated parameter and states.
pub(super) type ParamUpdate = (Tensor, SmallVec<[Tensor; 3]>);

/// Value and its destination.
pub(super) type PendingWrite = (Tensor, Tensor);

impl FusedOptimizer {
    /// Computes the updates of the group members that have gradients. Changes nothing except the step counts.
    pub(super) fn compute_writes(
        &self,
        rule: &impl UpdateRule,
        group: &FusedGroup,
        grads: &MemberGrads,
        skip: Option<&Tensor>,
    ) -> Result<Vec<PendingWrite>> {
        let mut writes = Vec::new();
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        for grads in grads.chunks(MAX_LAUNCH_TENSORS) {
            let scalars = self.compute_step_scalars(group, grads, skip)?;
            for (k, grad) in grads.iter().enumerate() {
                let scalar = |at: isize| scalars.select(0, k as isize)?.select(0, at);
                let p = &self.parameters[group.members[grad.member]];
                let states: SmallVec<[Tensor; 3]> = group.state_views(rule, grad.member, p.shape());
                // Contiguous, so that the order of sums does not depend on the parameter's layout.
                let param = p.detach().contiguous()?.to_dtype(DType::F32)?;
                let gradient = grad.grad.detach().to_dtype(DType::F32)?;
                let at = ParamStep {
                    param,
                    grad: if rule.maximize() { gradient.neg()? } else { gradient },
                    states: states.clone(),
                    lr: scalar(0)?,
                    step: scalar(1)?,
                    weight_decay: group.overrides.weight_decay_for(rule, p),
                    dtype: p.dtype(),
                };
                let before = at.param.clone();
                let (updated, new_states) = rule.compute_update(at)?;
                let skipped = skip.map(|_| scalar(2)?.eq(0.0)).transpose()?;
                let unless_skipped = |new: Tensor, old: &Tensor| match &skipped {
                    Some(skipped) => old.where_(skipped, &new),
                    None => Ok(new),
                };
                for (view, new) in states.into_iter().zip(new_states) {
                    // The rule returns the view of an unused state as is; no write is needed.
                    if view.numel() > 0 && !new.shares_storage(&view) {
                        writes.push((unless_skipped(new, &view)?, view));
                    }
                }
                let updated = unless_skipped(updated, &before)?.to_dtype(p.dtype())?;
                if let Some(copy) = &grad.copy {
                    writes.push((updated.to_dtype(copy.dtype())?, copy.clone()));
                }
                writes.push((updated, p.detach()));
            }
        }
        Ok(writes)
    }

    /// Computes [members, 4] on the device: the learning rate, the step number, and 0 if the step is skipped.
    fn compute_step_scalars(
        &self,
        group: &FusedGroup,
        grads: &[MemberGrad],
        skip: Option<&Tensor>,
    ) -> Result<Tensor> {
        let scalars = Tensor::empty([grads.len(), 4], DType::F32, self.device_of(group))?;
        let counted = group.step_counts.is_some();
        let spec = KernelSpec::new("optim_step_values")
            .def("counted", counted)
            .def("skip", skip.is_some())
            .def("items", grads.len());
        let items: SmallVec<[[usize; 2]; MAX_LAUNCH_TENSORS]> =
            grads.iter().map(|grad| [grad.member, group.members[grad.member]]).collect();
        let flag = skip.map_or(0, |skip| skip.layout().offset());
        let (step_state, overrides) = (Arc::clone(&self.step_state), group.overrides);
        let params = move |_: &ReplayCtx| {
            let lr = overrides.lr(step_state.lr()) as f32;
            items.iter().fold(KernelParams::new(), |params, &[member, parameter]| {
                let before = step_state.increment_steps(parameter);
                let params = params.f32(lr);
                if counted {
                    return params.u32(0).size(FusedGroup::count_index(member, before)).size(flag);
                }
                params.f32((before + 1) as f32).u32(0).u32(0)
            })
        };
        let tensors: SmallVec<[&Tensor; 3]> =
            [&scalars].into_iter().chain(&group.step_counts).chain(skip).collect();
        launch::launch_dynamic(&spec, &tensors, params, 1)?;
        drop(tensors);
        Ok(scalars)
    }
}
