//! Recurrent layers as operations of the catalog.

use forebay::error::Result;
use forebay::ops::{RecurrentKind, RecurrentOp, cat};
use forebay::tensor::Tensor;

/// Runs one direction of a recurrent layer on input projections, state, weight, bias and, for an LSTM, the cell.
pub(super) fn run_recurrent(x: &[Tensor], kind: RecurrentKind, lengths: Option<&[i32]>) -> Result<Tensor> {
    let lengths = lengths.map(|n| Tensor::from_slice(n, [n.len()], x[0].device())).transpose()?;
    let of = RecurrentOp::new(kind, &x[0], &x[1], &x[2]);
    let reverse = lengths.is_some();
    let states =
        RecurrentOp { bias_hh: Some(&x[3]), c_0: x.get(4), lengths: lengths.as_ref(), reverse, ..of }
            .run()?;
    match &states.c_n {
        Some(cell) => cat(&[&states.output, &cell.unsqueeze(0)?], 0),
        None => states.output.mul(&states.h_n),
    }
}
