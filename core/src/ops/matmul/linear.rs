//! Linear layers: a product with a weight and a bias as one operation. Epilogues of the vendor's library then
//! add the bias, apply GELU and sum the bias gradients. The weight's gradient accumulates in f32.
//!
//! Under autocast the products are of 16-bit values, while weights and their gradients stay in f32.

use crate::amp::OperandCast;
use crate::autograd::BackwardCtx;
use crate::backend::GELU_GRAD_SUM_ROWS;
use crate::ops::elementwise::activation;
use crate::ops::matmul::linear_fp8;
use crate::ops::matmul::{self, EpilogueTensors, add_scaled};
use crate::ops::prelude::*;
use crate::ops::reduce::{sum_columns, sum_parts};

/// Weight and optional bias of a linear layer.
struct LinearOperands {
    op: &'static str,
    /// Operands of the autograd graph, in the type of their gradients.
    weight: Tensor,
    bias: Option<Tensor>,
    /// Compute weight and bias: cast to the type of x, without history.
    compute_weight: Tensor,
    compute_bias: Option<Tensor>,
}

impl LinearOperands {
    /// Checks a layer's shapes, and casts its parameters to the type of x.
    fn new(
        op: &'static str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        cast: Option<&OperandCast>,
    ) -> Result<Self> {
        check_shapes(op, x, weight, bias)?;
        let cast = |t: &Tensor| match cast {
            Some(cast) => cast.cast_detached(t),
            None => Ok(t.detach()),
        };
        Ok(Self {
            op,
            compute_weight: cast(weight)?,
            compute_bias: bias.map(&cast).transpose()?,
            weight: weight.clone(),
            bias: bias.cloned(),
        })
    }

    /// Saves an operand. Only `create_graph` needs it if the product uses a cast of it.
    fn save_operand(&self, operand: &Tensor) -> SavedTensor {
        if self.compute_weight.dtype() == operand.dtype() {
            SavedTensor::input(operand)
        } else {
            SavedTensor::input_for_create_graph(operand)
        }
    }

    /// Computes x · weightᵀ + bias for rows, without a gradient.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let weight = self.compute_weight.t()?;
        let Some(bias) = &self.compute_bias else { return matmul::gemm(self.op, x, &weight) };
        let out = self.empty_output(x)?;
        let bias = &contiguous_zero_offset(bias)?;
        matmul::gemm_bias_into(self.op, x, &weight, &out, bias)?;
        Ok(out)
    }

    /// Allocates the result for rows.
    fn empty_output(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::empty([x.shape()[0], self.compute_weight.shape()[0]], x.dtype(), x.device())
    }

    /// Computes the gradient of x, of shape `x_shape`, from rows. If x is a cast that layers share, the product is
    /// not rounded, and is added to the gradients of the other layers.
    fn input_grad(&self, g: &Tensor, x_shape: &[usize], ctx: &BackwardCtx<'_>) -> Result<Tensor> {
        // Products of 16 bits are written in their own type or in f32. The other 16-bit type gets a rounded product.
        let is_wider = |dtype: &DType| *dtype == DType::F32 && g.dtype().size() == 2;
        let Some(dtype) = ctx.shared_cast_source_dtype(0).filter(is_wider) else {
            return matmul::gemm(self.op, g, &self.compute_weight)?.reshape(x_shape);
        };
        let product = |g: &Tensor| matmul::gemm_as(self.op, g, &self.compute_weight, dtype)?.reshape(x_shape);
        match ctx.take_pending_grad(0)? {
            None => product(g),
            Some(sum) if sum.is_unique() && sum.is_contiguous() && sum.dtype() == dtype => {
                matmul::gemm_into(self.op, g, &self.compute_weight, &flatten_to_rows(&sum)?, true)?;
                Ok(sum)
            }
            Some(sum) => sum.add(&product(g)?),
        }
    }

    /// Computes the requested gradients of weight and bias from rows. They are inputs `at` and `at + 1` of
    /// the operation. `sums` are the column sums of g, if already computed.
    fn parameter_grads(
        &self,
        g: &Tensor,
        x: Option<&Tensor>,
        mut sums: Option<Tensor>,
        ctx: &BackwardCtx<'_>,
        at: usize,
    ) -> Result<[Option<Tensor>; 2]> {
        let needs_sums = sums.is_none() && self.bias.is_some() && ctx.needs_input_grad[at + 1];
        let mut computed = false;
        let dw = match x.filter(|_| ctx.needs_input_grad[at]) {
            None => None,
            Some(x) => {
                let before = ctx.leaf_grad_to_accumulate(at).filter(|sum| sum.dtype() == self.weight.dtype());
                let add = before.is_some();
                let dw = before.map_or_else(
                    || Tensor::empty(self.weight.shape(), self.weight.dtype(), g.device()),
                    Ok,
                )?;
                let gt = g.t()?;
                if needs_sums {
                    let row = Tensor::empty([g.shape()[1]], g.dtype(), g.device())?;
                    if matmul::try_gemm_epilogue(self.op, &gt, x, &dw, add, EpilogueTensors::RowSums(&row))? {
                        (sums, computed) = (Some(row), true);
                    }
                }
                if !computed {
                    matmul::gemm_into(self.op, &gt, x, &dw, add)?;
                }
                Some(dw)
            }
        };
        let db = match &self.bias {
            Some(bias) if ctx.needs_input_grad[at + 1] => {
                let sums = sums.map_or_else(|| sum_columns(g, bias.dtype()), Ok)?;
                Some(sums.to_dtype(bias.dtype())?)
            }
            _ => None,
        };
        Ok([dw, db])
    }

    /// Computes the gradients of x, weight and bias by differentiable operations.
    fn differentiable_grads(
        &self,
        g: &Tensor,
        x: Option<Tensor>,
        weight: Option<Tensor>,
        x_shape: &[usize],
        ctx: &BackwardCtx<'_>,
    ) -> Result<InputGrads> {
        let dx = weight
            .filter(|_| ctx.needs_input_grad[0])
            .map(|w| g.mm(&w.to_dtype(g.dtype())?)?.reshape(x_shape));
        let dw = x.filter(|_| ctx.needs_input_grad[1]).map(|x| g.t()?.mm(&x)?.to_dtype(self.weight.dtype()));
        let mut grads: InputGrads = smallvec![dx.transpose()?, dw.transpose()?];
        if let Some(bias) = &self.bias {
            let db = ctx.needs_input_grad[2].then(|| g.sum_to(&[g.shape()[1]])?.to_dtype(bias.dtype()));
            grads.push(db.transpose()?);
        }
        Ok(grads)
    }
}

pub(super) fn check_shapes(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    let (&[outputs, features], Some(&x_features)) = (weight.shape(), x.shape().last()) else {
        fail!(shape(op, [x, weight]), "takes x of [.., in] and a weight of [out, in]")
    };
    fail_if!(features != x_features;
        shape(op, [x, weight]), "the weight takes {features} features, the last extent of x is {x_features}");
    if let Some(bias) = bias.filter(|bias| bias.shape() != [outputs]) {
        let rule = format!("takes a bias of [{outputs}], one value for each output");
        return Err(Error::shape(op, rule, &[weight.shape(), bias.shape()]));
    }
    Ok(())
}

/// Computes x · weight + bias and [`gelu_tanh`](Tensor::gelu_tanh) of it, and returns both. The first may be missing
/// without `requires_grad`.
fn mlp_hidden_forward(
    layer: &LinearOperands,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    requires_grad: bool,
) -> Result<(Option<Tensor>, Tensor)> {
    // The library's epilogue always writes the argument of GELU.
    let writes_before = requires_grad || x.device().library_features().matmul;
    let before = writes_before.then(|| layer.empty_output(x)).transpose()?;
    let gelu = layer.empty_output(x)?;
    if let Some(before) = &before {
        let finish = EpilogueTensors::GeluBias { bias, pre_activation: before };
        if matmul::try_gemm_epilogue(layer.op, x, weight, &gelu, false, finish)? {
            return Ok((Some(before.clone()), gelu));
        }
    }
    if matmul::try_gemm_bias_gelu(layer.op, x, weight, &gelu, bias, before.as_ref())? {
        return Ok((before, gelu));
    }
    drop(gelu);
    let before = before.map_or_else(|| layer.empty_output(x), Ok)?;
    matmul::gemm_bias_into(layer.op, x, weight, &before, bias)?;
    let gelu = before.gelu_tanh()?;
    Ok((Some(before), gelu))
}

/// Computes the backward pass through the next layer, of this weight, and [`gelu_tanh`](Tensor::gelu_tanh) of
/// x. Returns the gradient of x, gelu_tanh(x), and the f32 column sums of the gradient.
fn mlp_hidden_backward(
    op: &'static str,
    g: &Tensor,
    weight: &Tensor,
    x: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    if x.device().library_features().gelu_grad_epilogue && x.dtype().size() == 2 {
        let like = || Tensor::empty(x.shape(), x.dtype(), x.device());
        let (hidden, gelu) = (like()?, like()?);
        let sums = {
            let _tag = memory::scope::enter_tag(Tag::Workspace);
            let parts = x.shape()[0].div_ceil(GELU_GRAD_SUM_ROWS);
            Tensor::empty([parts, 1, x.shape()[1]], DType::F32, x.device())?
        };
        let finish = EpilogueTensors::GeluGrad { x, gelu: &gelu, sums: &sums };
        if matmul::try_gemm_epilogue(op, g, weight, &hidden, false, finish)? {
            return Ok((hidden, gelu, sum_parts(&sums)?.remove(0)));
        }
    }
    let hidden = matmul::gemm(op, g, weight)?;
    let (gelu, sums) = activation::gelu_tanh_backward_recompute(x, &hidden)?;
    Ok((hidden, gelu, sums))
}

/// Fails if the parameters of a layer do not have the type of its input.
fn check_same_dtype(op: &'static str, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    for (name, t) in [("weight", Some(weight)), ("bias", bias)] {
        if let Some(t) = t.filter(|t| t.dtype() != x.dtype()) {
            let (shape, parameter_shape, dtype) = (x.shape(), t.shape(), t.dtype());
            let rule = format!(
                "the {name} {parameter_shape:?} is {dtype}, the input {shape:?} is not; cast the input to {dtype} with `to_dtype`"
            );
            return Err(Error::dtype(op, x.dtype(), rule));
        }
    }
    Ok(())
}

/// Returns true if layers of this type currently multiply in 8 bits.
fn uses_fp8(dtype: DType) -> bool {
    amp::is_fp8_enabled() && matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Reshapes a tensor to rows of its last dimension.
pub(crate) fn flatten_to_rows(t: &Tensor) -> Result<Tensor> {
    let (last, before) = t.shape().split_last().map_or((1, 1), |(last, before)| (*last, numel(before)));
    t.reshape([before, last])
}

fn replace_last_extent(shape: &[usize], last: usize) -> Dims {
    shape[..shape.len() - 1].iter().copied().chain([last]).collect()
}

impl Tensor {
    /// Computes x · weightᵀ + bias. The weight is \[out, in\], or \[in\] for one output without a dimension;
    /// the bias is \[out\]. Within [`fp8`](crate::amp::fp8()) the product is computed in 8 bits.
    ///
    /// # Errors
    /// The last extent of `self` is not the weight's, or the bias does not fit.
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        operation!(OP = "linear");
        fail_if!(self.rank() == 0 || !matches!(weight.rank(), 1 | 2);
            shape(OP, [self, weight]), "takes x of [.., in] and a weight of [out, in] or [in]");
        if weight.rank() == 1 {
            let out = self.linear(&weight.unsqueeze(0)?, None)?.squeeze(-1)?;
            return match bias {
                None => Ok(out),
                Some(bias) => out.add(bias),
            };
        }
        let cast = OperandCast::for_op(OP, &[Some(self.dtype()), Some(weight.dtype())]);
        let x = match &cast {
            Some(cast) => &cast.apply(self)?,
            None => self,
        };
        if cast.is_none() {
            check_same_dtype(OP, x, weight, bias)?;
            matmul::check_matmul_operands(OP, x, weight)?;
            bias.map_or(Ok(()), |bias| matmul::check_matmul_operands(OP, x, bias))?;
        }
        if uses_fp8(x.dtype()) {
            check_shapes(OP, x, weight, bias)?;
            return linear_fp8::forward_with_grad(OP, x, weight, bias);
        }
        let layer = LinearOperands::new(OP, x, weight, bias, cast.as_ref())?;
        let flat = flatten_to_rows(x)?;
        let shape = replace_last_extent(x.shape(), weight.shape()[0]);
        let out = layer.forward(&flat.detach())?.reshape(&shape[..])?;
        let inputs = bindings![x, weight, bias];
        if !autograd::compute_requires_grad(&inputs) {
            return Ok(out);
        }
        // x is saved for the weight's gradient only.
        let saved_x = weight.requires_grad().then(|| SavedTensor::input(&flat));
        // Save the original weight, whose type the gradient has. The product uses the layer's cast.
        let saved_weight = x.requires_grad().then(|| layer.save_operand(weight));
        drop(flat);
        let x_shape = Dims::from_slice(x.shape());
        Ok(autograd::differentiable(OP, out, &inputs, move |g, ctx| {
            let sums = g.cached_column_sums();
            let g = flatten_to_rows(g)?;
            let x = saved_x.as_ref().map(|x| x.unpack(ctx)).transpose()?;
            let weight = saved_weight.as_ref().map(|w| w.unpack(ctx)).transpose()?;
            if ctx.create_graph() {
                return layer.differentiable_grads(&g, x, weight, &x_shape, ctx);
            }
            let dx = ctx.needs_input_grad[0].then(|| layer.input_grad(&g, &x_shape, ctx)).transpose()?;
            let [dw, db] = layer.parameter_grads(&g, x.as_ref(), sums, ctx, 1)?;
            let mut grads: InputGrads = smallvec![dx, dw];
            if layer.bias.is_some() {
                grads.push(db);
            }
            Ok(grads)
        }))
    }
}

impl Tensor {
    /// Computes gelu(x · upᵀ + up_bias) · downᵀ + down_bias with the tanh form of GELU, as one operation: a
    /// transformer's MLP block. Weights are \[out, in\] as in [`linear`](Self::linear). The operation saves x
    /// and the input of GELU, and recomputes GELU's output in the backward pass.
    ///
    /// # Errors
    /// The shapes do not fit, or the types differ outside of autocast.
    #[track_caller]
    pub fn mlp(&self, up: &Tensor, up_bias: &Tensor, down: &Tensor, down_bias: &Tensor) -> Result<Tensor> {
        operation!(OP = "mlp");
        if uses_fp8(self.dtype()) {
            return self.linear(up, Some(up_bias))?.gelu_tanh()?.linear(down, Some(down_bias));
        }
        // The operation consists of linear layers, so autocast treats it like them.
        let cast = OperandCast::for_op("linear", &[Some(self.dtype()), Some(up.dtype())]);
        let x = match &cast {
            Some(cast) => &cast.apply(self)?,
            None => self,
        };
        if cast.is_none() {
            [up, up_bias, down, down_bias]
                .iter()
                .try_for_each(|t| matmul::check_matmul_operands(OP, x, t))?;
        }
        // The kernel that recomputes GELU works in f32.
        if x.dtype() == DType::F64 {
            return x.linear(up, Some(up_bias))?.gelu_tanh()?.linear(down, Some(down_bias));
        }
        let first = LinearOperands::new(OP, x, up, Some(up_bias), cast.as_ref())?;
        let flat = flatten_to_rows(&x.detach())?;
        let weight = first.compute_weight.t()?;
        let bias = contiguous_zero_offset(first.compute_bias.as_ref().unwrap_or(up_bias))?;
        let inputs = [x, up, up_bias, down, down_bias];
        let requires_grad = autograd::compute_requires_grad(&inputs);
        let (before, wide) = mlp_hidden_forward(&first, &flat, &weight, &bias, requires_grad)?;
        let second = LinearOperands::new(OP, &wide, down, Some(down_bias), cast.as_ref())?;
        let shape = replace_last_extent(x.shape(), down.shape()[0]);
        let out = second.forward(&wide)?.reshape(&shape[..])?;
        let Some(before) = before.filter(|_| requires_grad) else { return Ok(out) };
        let x_shape = Dims::from_slice(x.shape());
        let [w1, b1, w2, b2] = [(&first, up), (&first, up_bias), (&second, down), (&second, down_bias)]
            .map(|(layer, t)| layer.save_operand(t));
        let saved = [SavedTensor::input(x), w1, b1, w2, b2].into_iter().collect();
        let composed = |t: &[Tensor]| {
            let low = |k: usize| t[k].to_dtype(t[0].dtype());
            t[0].linear(&low(1)?, Some(&low(2)?))?.gelu_tanh()?.linear(&low(3)?, Some(&low(4)?))
        };
        Ok(autograd::composite_differentiable(OP, out, &inputs, saved, composed, move |g, ctx| {
            let column_sums = g.cached_column_sums();
            let g = flatten_to_rows(g)?;
            let (hidden, wide, sums) = mlp_hidden_backward(OP, &g, &second.compute_weight, &before)?;
            let [dw2, db2] = second.parameter_grads(&g, Some(&wide), column_sums, ctx, 3)?;
            drop((g, wide));
            let [dw1, db1] = first.parameter_grads(&hidden, Some(&flat), Some(sums), ctx, 1)?;
            let dx = ctx.needs_input_grad[0].then(|| first.input_grad(&hidden, &x_shape, ctx)).transpose()?;
            Ok(smallvec![dx, dw1, db1, dw2, db2] as InputGrads)
        }))
    }
}

impl Tensor {
    /// Computes y\[.., o\] = Σ x1\[.., i\] · weight\[o, i, j\] · x2\[.., j\] + bias\[o\], with `self` as x1.
    ///
    /// # Errors
    /// The shapes do not fit, or the types differ.
    #[track_caller]
    pub fn bilinear(&self, x2: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        operation!(OP = "bilinear", in_f32 [self, x2, weight, bias], |x1, x2, w, b|
            x1.bilinear(&x2, &w, b.as_ref()));
        let (&[o, i, j], Some((&given1, batch)), Some((&given2, batch2))) =
            (weight.shape(), self.shape().split_last(), x2.shape().split_last())
        else {
            fail!(
                shape(OP, [self, x2, weight]),
                "takes x1 of [.., i], x2 of [.., j] and a weight of [out, i, j]"
            );
        };
        fail_if!((given1, given2) != (i, j) || batch != batch2;
            shape(OP, [self, x2, weight]), "the weight takes {i} and {j} features of one batch");
        // One product of x1 with the weights of all outputs, then one small product for each row.
        let rows = numel(batch);
        let left = self.reshape([rows, i])?.mm(&weight.transpose(0, 1)?.reshape([i, o * j])?)?;
        let out = left.reshape([rows, o, j])?.bmm(&x2.reshape([rows, j, 1])?)?;
        let shape: Dims = batch.iter().copied().chain([o]).collect();
        let out = out.reshape(&shape[..])?;
        match bias {
            None => Ok(out),
            Some(bias) => add_scaled(OP, bias, &out, &Default::default()),
        }
    }
}
