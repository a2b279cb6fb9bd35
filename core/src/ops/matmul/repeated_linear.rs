//! Products of one operand after another with the same weight and bias, as in a recurrent layer.

use crate::ops::matmul::linear::check_shapes;
use crate::ops::matmul::problem::MatmulProblem;
use crate::ops::matmul::{EpilogueTensors, write_biased_product};
use crate::ops::prelude::*;

/// Largest number of products whose bias one launch copies.
const MAX_COPIES: usize = 16;
/// Alignment of a result in bytes, as of a tensor's memory, so that the library chooses the same kernel.
const RESULT_ALIGNMENT: usize = 256;

/// Linear layer for a known number of operands of one shape, without a gradient.
///
/// Where the library adds a product to a copy of the bias, one launch copies the bias for several products.
pub(crate) struct RepeatedLinear<'a> {
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    /// Number of products that are still to come.
    remaining: usize,
    /// Copies of the bias for the next products, \[products, rows, outputs\].
    copies: Option<Tensor>,
    /// Index of the first copy that no product was added to.
    next_copy: usize,
}

impl<'a> RepeatedLinear<'a> {
    /// Creates the layer for `count` operands.
    pub(crate) fn new(weight: &'a Tensor, bias: Option<&'a Tensor>, count: usize) -> Self {
        Self { weight, bias, remaining: count, copies: None, next_copy: 0 }
    }

    /// Computes x · weightᵀ + bias, like [`Tensor::linear`], to a contiguous tensor.
    pub(crate) fn forward(&mut self, x: &Tensor) -> Result<Tensor> {
        self.remaining = self.remaining.saturating_sub(1);
        let is_plain = x.rank() == 2 && !x.requires_grad() && !amp::is_fp8_enabled();
        let Some(bias) =
            self.bias.filter(|bias| is_plain && bias.is_contiguous() && bias.layout().offset() == 0)
        else {
            return x.linear(self.weight, self.bias)?.contiguous();
        };
        operation!(OP = "linear");
        check_shapes(OP, x, self.weight, Some(bias))?;
        let weight = self.weight.t()?;
        if let Some(out) = self.take_copy()? {
            if MatmulProblem::new(OP, x, &weight)?.try_vendor_library(&out, true, EpilogueTensors::None)? {
                return Ok(out);
            }
            // The library declines this operand, although it took others.
            self.copies = None;
        }
        let out = Tensor::empty([x.shape()[0], weight.shape()[1]], x.dtype(), x.device())?;
        if write_biased_product(OP, x, &weight, &out, bias)? {
            self.copy_bias(&out, bias)?;
        }
        Ok(out)
    }

    /// Returns the next copy of the bias, if there is one.
    fn take_copy(&mut self) -> Result<Option<Tensor>> {
        let Some(copies) = &self.copies else { return Ok(None) };
        let copy = copies.select(0, self.next_copy as isize)?;
        self.next_copy += 1;
        if self.next_copy == copies.shape()[0] {
            self.copies = None;
        }
        Ok(Some(copy))
    }

    /// Copies the bias for the next products, whose results have the shape of `out`.
    fn copy_bias(&mut self, out: &Tensor, bias: &Tensor) -> Result<()> {
        let count = self.remaining.min(MAX_COPIES);
        let is_aligned = (out.numel() * out.dtype().size()).is_multiple_of(RESULT_ALIGNMENT);
        if count < 2 || !is_aligned {
            return Ok(());
        }
        let copies = empty_workspace(&[count, out.shape()[0], out.shape()[1]], out.dtype(), out.device())?;
        bias.broadcast_to(copies.shape())?.copy_into(&copies)?;
        (self.copies, self.next_copy) = (Some(copies), 0);
        Ok(())
    }
}
