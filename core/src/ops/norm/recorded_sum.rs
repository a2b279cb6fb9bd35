//! Residual sums that the kernel of a following norm computes in a captured step.
//!
//! A captured step computes a norm again where a product reads its result in 16 bits: see
//! [`row_norm_record`](super::row_norm_record). If the input is the newest sum of the step, the kernel reads both terms
//! and also writes the sum. The plan then drops the addition, unless something reads the sum before the norm. Eager
//! steps have no such sums.

use crate::autograd::{self, TensorState};
use crate::ops::prelude::*;

/// Note of a captured step: its newest sum, with the terms.
pub(crate) struct RecordedSum {
    terms: [Tensor; 2],
    states: [TensorState; 2],
    sum: TensorState,
}

impl RecordedSum {
    /// Notes that the operation `op` has added two tensors, if a norm's kernel could do so.
    pub(crate) fn note_sum(op: &str, args: &[Operand<'_>], out: &Tensor) {
        let (&[Operand::Tensor(a), Operand::Tensor(b)], "add") = (args, op) else { return };
        let recorder = out.device().capture_recorder();
        if !recorder.is_recording_here() {
            return;
        }
        // A pending elementwise operation is fused with the addition, so its result is not in memory. The norm's kernel
        // would need a launch that writes it.
        let is_in_memory = |t: &Tensor| !autograd::is_elementwise(t) || autograd::use_count(t) > 0;
        let is_dense = |t: &Tensor| {
            // After an addition in place, a term has the value of the sum.
            !t.shares_storage(out)
                && matches!(t.dtype(), DType::F32 | DType::F16 | DType::BF16)
                && t.shape() == out.shape()
                && t.is_contiguous()
                && t.layout().offset() == 0
        };
        if out.dtype() != DType::F32 || ![a, b].into_iter().all(|t| is_dense(t) && is_in_memory(t)) {
            return;
        }
        let [branch, residual] = if a.dtype() == DType::F32 { [b, a] } else { [a, b] };
        drop(recorder.take_notes::<Self>(|_| true));
        let sum = Self {
            states: [branch, residual].map(TensorState::new),
            terms: [branch, residual].map(Tensor::detach),
            sum: TensorState::new(out),
        };
        recorder.add_note(|| sum, |_| false);
    }

    /// Takes the terms of the newest sum, if `t` is this sum, and neither it nor the terms have changed.
    pub(super) fn take_terms(t: &Tensor) -> Option<[Tensor; 2]> {
        let note = t.device().capture_recorder().take_notes::<Self>(|_| true).pop()?;
        let Ok(Self { terms, states, sum }) = note.downcast::<Self>().map(|note| *note) else { return None };
        let is_unchanged = sum.is_state_of(t) && states.iter().zip(&terms).all(|(s, t)| s.is_state_of(t));
        is_unchanged.then_some(terms)
    }
}
