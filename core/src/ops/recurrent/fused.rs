//! Recurrent layers by a backend's own kernels, which run all time steps in one launch ([`RecurrentCall`]).
//!
//! The kernels keep the weight on the chip, and need no memory for the products of a step. Their states stay f32 from
//! the first step to the last, as between the launches of the portable kernels.

use super::{InitialGrads, RecurrentOp, RecurrentRun};
use crate::backend::{Command, RecurrentCall, RecurrentKind, RecurrentPass, Slice};
use crate::ops::prelude::*;
use crate::tensor::binding::BoundTensors;

/// Slices of bound operands, which are asked for in the order of the operands.
struct OperandSlices<'a> {
    bound: BoundTensors<'a>,
    taken: usize,
}

impl<'a> OperandSlices<'a> {
    /// Binds the operands that a kernel reads, and then those that it writes.
    fn bind(
        read: impl Iterator<Item = &'a Tensor> + Clone,
        written: impl Iterator<Item = &'a Tensor> + Clone,
    ) -> Result<Self> {
        let operands = read.map(|t| (t, Access::Read)).chain(written.map(|t| (t, Access::Write)));
        Ok(Self { bound: launch::bind_tensors(operands)?, taken: 0 })
    }

    /// Returns the bytes of the next operand, which is `t`.
    fn next(&mut self, t: &Tensor) -> Slice {
        self.taken += 1;
        t.byte_range_in(self.bound[self.taken - 1])
    }
}

impl RecurrentRun {
    /// Reports whether the backend has kernels for a pass of this layer.
    fn has_fused_kernel(&self, is_backward: bool) -> bool {
        let (weight, sizes) = (&self.weight_hh, self.sizes.map(|n| n as u64));
        // 8-bit products of the steps have scales of their own.
        !amp::is_fp8_enabled()
            && self.h_0.shape()[1] == self.sizes[2]
            && weight.device().library_features().recurrent
            && RecurrentCall::fits(self.kind, weight.dtype(), is_backward, sizes)
    }

    /// Runs all steps, and writes all slots of the states. Returns false if the backend declines; the memory of the
    /// states may then still be unwritten.
    pub(super) fn try_fused_forward(&self, input: &Tensor, of: &RecurrentOp<'_>) -> Result<bool> {
        if !self.has_fused_kernel(false) {
            return Ok(false);
        }
        let (h_0, weight) = (self.h_0.contiguous()?, self.weight_hh.contiguous()?);
        let contiguous = |t: Option<&Tensor>| t.map(|t| t.detach().contiguous()).transpose();
        let (bias, c_0) = (contiguous(of.bias_hh)?, contiguous(of.c_0)?);
        let read = [input, &weight, &h_0].into_iter().chain(&self.lengths).chain(&bias).chain(&c_0);
        let written = [&self.states].into_iter().chain(&self.saved_gates);
        let mut slices = OperandSlices::bind(read, written)?;
        let mut next = |t: &Tensor| slices.next(t);
        let input_strides = [0, 1].map(|dim: usize| input.strides()[dim] as u64);
        let (input, weight, h_0) = (next(input), next(&weight), next(&h_0));
        let lengths = self.lengths.as_ref().map(&mut next);
        let (bias, c_0) = (bias.as_ref().map(&mut next), c_0.as_ref().map(&mut next));
        let states = next(&self.states);
        let saved = self.saved_gates.as_ref().map(&mut next);
        let pass = RecurrentPass::Forward { input, input_strides, bias, h_0, c_0, states, saved };
        let call = self.fused_call(weight, lengths, pass);
        self.states.device().try_enqueue(|| describe_for_profiler(&call), &Command::Recurrent(&call))
    }

    /// Writes the gradients of the gates, and returns those of the initial values. Returns `None` if the backend
    /// declines. `inner` is the gradient of the state's products of a GRU.
    pub(super) fn try_fused_backward(
        &self,
        g: &Tensor,
        gates: &Tensor,
        inner: Option<&Tensor>,
    ) -> Result<Option<InitialGrads>> {
        if !self.has_fused_kernel(true) {
            return Ok(None);
        }
        let [_, batch, hidden] = self.sizes;
        let empty = || Tensor::empty([batch, hidden], g.dtype(), g.device());
        let h_0 = empty()?;
        let c_0 = (self.kind == RecurrentKind::Lstm).then(empty).transpose()?;
        let weight = self.weight_hh.contiguous()?;
        let saved = self.saved_gates.as_ref().unwrap_or(&self.states);
        let accepted = {
            let read = [g, &weight, saved].into_iter().chain(&self.lengths);
            let written = [gates, &h_0].into_iter().chain(inner).chain(&c_0);
            let mut slices = OperandSlices::bind(read, written)?;
            let mut next = |t: &Tensor| slices.next(t);
            let (grad, weight, saved) = (next(g), next(&weight), next(saved));
            let lengths = self.lengths.as_ref().map(&mut next);
            let (gates, h_0) = (next(gates), next(&h_0));
            let (inner, c_0) = (inner.map(&mut next), c_0.as_ref().map(&mut next));
            let pass = RecurrentPass::Backward { grad, saved, gates, inner, h_0, c_0 };
            let call = self.fused_call(weight, lengths, pass);
            g.device().try_enqueue(|| describe_for_profiler(&call), &Command::Recurrent(&call))?
        };
        Ok(accepted.then_some(InitialGrads { h_0, c_0 }))
    }

    fn fused_call(&self, weight: Slice, lengths: Option<Slice>, pass: RecurrentPass) -> RecurrentCall {
        let [steps, batch, hidden] = self.sizes.map(|n| n as u64);
        let (kind, dtype, reverse) = (self.kind, self.states.dtype(), self.reverse);
        RecurrentCall { kind, dtype, steps, batch, hidden, reverse, weight, lengths, pass }
    }
}

pub(crate) fn describe_for_profiler(call: &RecurrentCall) -> WorkItem {
    let RecurrentCall { kind, dtype, steps, batch, hidden, .. } = *call;
    let pass = match call.pass {
        RecurrentPass::Forward { .. } => "forward",
        RecurrentPass::Backward { .. } => "backward",
    };
    WorkItem {
        name: format!("{} {pass} {dtype} {steps}x{batch}x{hidden}", kind.op_name()).into(),
        bytes: call.bytes(),
        flops: call.flops(),
    }
}
