//! Matrix products: by the vendor's library if it supports them, else by the crate's kernels.
//!
//! [`MatmulProblem`] multiplies batches of matrices of any strides. Every operation here is a view of its
//! operands, one product and a view of the result, so its gradients are products too. Sums are accumulated in
//! f32 (f64 and integers in their own type), always in the same order.
//!
//! `try_vendor_library` describes a product to the backend, which may decline; `run_kernel` then launches the
//! WGSL kernel, whose tile `matmul_tiling` chooses. Other operations multiply through `gemm`, `gemm_into` and
//! `try_gemm_epilogue`. A new epilogue is a variant of [`EpilogueTensors`] and of the backend's `Epilogue`.

pub(crate) mod einsum;
pub(crate) mod linear;
pub(crate) mod linear_fp8;
pub(crate) mod matmul_tiling;
mod matrix_layout;
pub(crate) mod problem;
pub(crate) mod repeated_linear;
pub(crate) mod scaled_mm;
mod tile_autotune;

use crate::autograd::BackwardCtx;
use crate::ops::elementwise::pointwise::pointwise_ops;
use crate::ops::elementwise::pointwise::{GradRule, PointwiseOp, TypeRule, run_pointwise};
use crate::ops::matmul::matmul_tiling::{MatmulExtents, SumEpilogue};
pub(in crate::ops) use crate::ops::matmul::problem::EpilogueTensors;
use crate::ops::matmul::problem::MatmulProblem;
use crate::ops::prelude::*;
use crate::ops::reduce::accumulator_dtype;

/// Returns the last two extents.
fn last_two(shape: &[usize]) -> (usize, usize) {
    let rank = shape.len();
    (shape[rank - 2], shape[rank - 1])
}

/// Checks that the operands are on one device and have the same type, which must support products.
#[track_caller]
pub(super) fn check_matmul_operands(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    a.check_same_device(op, b)?;
    launch::check_computable(op, a)?;
    launch::check_computable(op, b)?;
    fail_if!(a.dtype() != b.dtype();
        dtype(op, b.dtype()), "the other operand is {}; cast one with `to_dtype`", a.dtype());
    fail_if!(a.dtype() == DType::Bool; dtype(op, DType::Bool), "bool has no products; cast with `to_dtype`");
    launch::check_device_dtype(op, a.dtype(), a.device())
}

/// Returns the transpose of a saved operand if input `k` wants a gradient.
fn unpack_transposed(kept: &Option<SavedTensor>, ctx: &BackwardCtx<'_>, k: usize) -> Result<Option<Tensor>> {
    kept.as_ref()
        .filter(|_| ctx.needs_input_grad[k])
        .map(|kept| kept.unpack(ctx)?.transpose(-2, -1))
        .transpose()
}

/// Computes a · b with its gradient. Operands have at least two dimensions, and batch dimensions broadcast.
fn matmul_with_grad(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    matmul_with_grad_as(op, a, b, a.dtype())
}

/// Computes a · b with its gradient in `dtype`: the operands' type, or f32 for 16-bit operands.
fn matmul_with_grad_as(op: &'static str, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    if !autograd::compute_requires_grad(&[a, b]) {
        return gemm_as(op, a, b, dtype);
    }
    let out = gemm_as(op, &a.detach(), &b.detach(), dtype)?;
    // Each operand is saved for the gradient of the other, and its shape for its own gradient.
    let left = b.requires_grad().then(|| SavedTensor::input(a));
    let right = a.requires_grad().then(|| SavedTensor::input(b));
    let (a_shape, b_shape): (Dims, Dims) = (a.shape().into(), b.shape().into());
    Ok(autograd::differentiable(op, out, &[a, b], move |g, ctx| {
        let of = |kept, k| unpack_transposed(kept, ctx, k);
        // The gradient of an f32 result of 16-bit operands is cast to the operands' type for its products.
        let da =
            of(&right, 0)?.map(|b| matmul_sum_to(op, &g.to_dtype(b.dtype())?, &b, &a_shape)).transpose()?;
        let db =
            of(&left, 1)?.map(|a| matmul_sum_to(op, &a, &g.to_dtype(a.dtype())?, &b_shape)).transpose()?;
        Ok(smallvec![da, db] as InputGrads)
    }))
}

/// Number of multiplications from which the vendor's library and a second kernel for the bias are faster than one
/// portable kernel.
const MIN_SEPARATE_BIAS: u64 = 1 << 24;

/// Computes a · b, summed to a shape, with its gradient.
fn matmul_sum_to(op: &'static str, a: &Tensor, b: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let is_unsummed = problem::product_shape(op, a, b)?.as_slice() == shape;
    if !is_unsummed
        && !autograd::compute_requires_grad(&[a, b])
        && let Some(sum) = problem::try_summed_product(op, a, b, shape)?
    {
        return Ok(sum);
    }
    let dtype = if is_unsummed { a.dtype() } else { accumulator_dtype(a.dtype()) };
    matmul_with_grad_as(op, a, b, dtype)?.sum_to(shape)?.to_dtype(a.dtype())
}

/// Computes a · b without a gradient.
pub(super) fn gemm(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    gemm_as(op, a, b, a.dtype())
}

/// Computes a · b in the type of the operands, or unrounded in f32, without a gradient.
pub(super) fn gemm_as(op: &'static str, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let product = MatmulProblem::new(op, a, b)?;
    if product.is_empty() {
        return Tensor::zeros(&product.shape, dtype, a.device());
    }
    let out = Tensor::empty(&product.shape, dtype, a.device())?;
    product.write_into(&out, false)?;
    Ok(out)
}

/// Writes a · b to `out`, or adds it if `add` is true, without a gradient. `out` has the product's shape,
/// contiguous rows, and the type of a and b, or f32 for unrounded sums of 16-bit operands.
pub(super) fn gemm_into(op: &'static str, a: &Tensor, b: &Tensor, out: &Tensor, add: bool) -> Result<()> {
    let product = MatmulProblem::new(op, a, b)?;
    fail_if!(product.shape.as_slice() != out.shape(); shape(op, [a, b, out]),
        "the product is {:?}, and its output {:?}", &product.shape[..], out.shape());
    match product.is_empty() {
        true if add => Ok(()),
        true => {
            let _no_grad = autograd::no_grad();
            out.zero_()
        }
        false => product.write_into(out, add),
    }
}

/// Writes a · b + `bias` to `out` as [`gemm_into`] does, and rounds the sum once. `bias` is contiguous with
/// one element for each column. `out` is dense at the start of its memory.
pub(super) fn gemm_bias_into(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    bias: &Tensor,
) -> Result<()> {
    write_biased_product(op, a, b, out, bias).map(drop)
}

/// Runs [`gemm_bias_into`]. Returns true if the library has added the product to a copy of the bias.
fn write_biased_product(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    bias: &Tensor,
) -> Result<bool> {
    if try_gemm_epilogue(op, a, b, out, false, EpilogueTensors::Bias(bias))? {
        return Ok(false);
    }
    let product = MatmulProblem::new(op, a, b)?;
    let write_bias = || bias.broadcast_to(out.shape())?.copy_into(out);
    if product.is_empty() {
        return write_bias().map(|()| false);
    }
    // The library has no epilogues for rows of some alignments. It then adds its product to the bias.
    let MatmulExtents { m, n, k, batch } = product.extents;
    let multiplications = [m, n, k, batch].into_iter().map(|extent| extent as u64).product::<u64>();
    if out.device().library_features().matmul && multiplications >= MIN_SEPARATE_BIAS {
        write_bias()?;
        if product.try_vendor_library(out, true, EpilogueTensors::None)? {
            return Ok(true);
        }
    }
    product.run_kernel(out, Some(bias), SumEpilogue::default()).map(|()| false)
}

/// Writes gelu_tanh(a · b + `bias`) to `out` by the crate's kernel, and the argument of GELU to
/// `pre_activation` if there is one. Both are dense at the start of their memory. Returns false for devices
/// with a library and types without a GELU in f32.
pub(super) fn try_gemm_bias_gelu(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    bias: &Tensor,
    pre_activation: Option<&Tensor>,
) -> Result<bool> {
    let product = MatmulProblem::new(op, a, b)?;
    let has_f32_sums = matches!(a.dtype(), DType::F32 | DType::F16 | DType::BF16);
    if product.is_empty() || !has_f32_sums || out.device().library_features().matmul {
        return Ok(false);
    }
    let epilogue = SumEpilogue { gelu: true, pre_activation, accumulate: false };
    product.run_kernel(out, Some(bias), epilogue)?;
    Ok(true)
}

/// Runs [`gemm_into`] with an epilogue of the vendor's library, or returns false if unsupported.
pub(super) fn try_gemm_epilogue(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    add: bool,
    finish: EpilogueTensors<'_>,
) -> Result<bool> {
    let product = MatmulProblem::new(op, a, b)?;
    if product.is_empty() { Ok(false) } else { product.try_vendor_library(out, add, finish) }
}

/// Writes a · b of 8-bit float matrices by the vendor's library, or returns false if unsupported.
pub(super) fn try_gemm_fp8(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    finish: EpilogueTensors<'_>,
) -> Result<bool> {
    if !out.device().library_features().f8_matmul {
        return Ok(false);
    }
    let product = MatmulProblem::from_checked(op, a, b)?;
    if product.is_empty() { Ok(false) } else { product.try_vendor_library(out, false, finish) }
}

pointwise_ops! {
    // With a beta of 0 the input is ignored, even if it is NaN.
    ADD_SCALED "addmm": Number, "select(T(beta) * a, T(0), T(beta) == T(0)) + T(alpha) * b", [], [
        GradRule::Expr("g * T(beta)", &[]), GradRule::Expr("g * T(alpha)", &[])];
}

/// Computes beta · input + alpha · product in the product's shape. A beta of 0 ignores the input, even NaN.
#[track_caller]
pub(super) fn add_scaled(
    op: &'static str,
    input: &Tensor,
    product: &Tensor,
    &AddmmOptions { beta, alpha }: &AddmmOptions,
) -> Result<Tensor> {
    let shape = broadcast_shapes(op, &[input.shape(), product.shape()])?;
    fail_if!(shape.as_slice() != product.shape();
        shape(op, [input, product]), "the input does not broadcast to the product");
    if beta == 1.0 && alpha == 1.0 {
        return input.add(product);
    }
    if beta == 0.0 && !input.requires_grad() {
        return product.mul(alpha);
    }
    let attrs = [("beta", Scalar::Float(beta)), ("alpha", Scalar::Float(alpha))];
    run_pointwise(&ADD_SCALED, &[Operand::Tensor(input), Operand::Tensor(product)], &attrs)
}

/// Computes beta · input + alpha · (a · b) of matrices or batches of matrices, rounded once.
#[track_caller]
fn add_matmul(
    op: &'static str,
    input: &Tensor,
    (a, b): (&Tensor, &Tensor),
    options: &AddmmOptions,
) -> Result<Tensor> {
    operation!(op);
    let wide = accumulator_dtype(a.dtype());
    let product = gemm_as(op, &a.detach(), &b.detach(), wide)?;
    let mut out = add_scaled(op, &input.detach(), &product, options)?;
    if input.dtype() == a.dtype() {
        out = out.to_dtype(a.dtype())?;
    }
    if !autograd::compute_requires_grad(&[input, a, b]) {
        return Ok(out);
    }
    let &AddmmOptions { beta, alpha } = options;
    // Each operand is saved for the gradient of the other.
    let left = b.requires_grad().then(|| SavedTensor::input(a));
    let right = a.requires_grad().then(|| SavedTensor::input(b));
    let (shape, dtype): (Dims, _) = (input.shape().into(), input.dtype());
    Ok(autograd::differentiable(op, out, &[input, a, b], move |g, ctx| {
        let self_grad = match (ctx.needs_input_grad[0], beta == 1.0) {
            (false, _) => None,
            (true, true) => Some(g.sum_to(&shape)?.to_dtype(dtype)?),
            (true, false) => Some(amp::half_to_f32(g)?.mul(beta)?.sum_to(&shape)?.to_dtype(dtype)?),
        };
        let of = |kept, k| unpack_transposed(kept, ctx, k);
        // Scale after the product, because its sums may cancel.
        let scaled = |a: &Tensor, b: &Tensor| match alpha == 1.0 {
            true => matmul_with_grad(op, a, b),
            false => matmul_with_grad_as(op, a, b, wide)?.mul(alpha)?.to_dtype(a.dtype()),
        };
        let da = of(&right, 1)?.map(|b| scaled(&g.to_dtype(b.dtype())?, &b)).transpose()?;
        let db = of(&left, 2)?.map(|a| scaled(&a, &g.to_dtype(a.dtype())?)).transpose()?;
        Ok(smallvec![self_grad, da, db] as InputGrads)
    }))
}

/// Fails if a tensor does not have the number of dimensions that an operation takes.
#[track_caller]
fn check_ranks(op: &'static str, rule: &'static str, pairs: &[(&Tensor, usize)]) -> Result<()> {
    if pairs.iter().all(|(t, rank)| t.rank() == *rank) {
        return Ok(());
    }
    let shapes: Vec<&[usize]> = pairs.iter().map(|(t, _)| t.shape()).collect();
    Err(Error::shape(op, rule, &shapes))
}

with_defaults! {
    /// Options of [`Tensor::addmm`], [`Tensor::addmv`], [`Tensor::addr`], [`Tensor::baddbmm`] and
    /// [`Tensor::addbmm`].
    #[derive(Clone, Copy, Debug)]
    pub struct AddmmOptions {
        /// Factor of the summand; 1. If 0, the summand is ignored.
        pub beta: f64 = 1.0,
        /// Factor of the product; 1.
        pub alpha: f64 = 1.0,
    }
}

impl Tensor {
    /// Computes the matrix product as PyTorch and NumPy define it. A vector counts as a row on the left and
    /// as a column on the right, and two vectors give their dot product. Further dimensions are batches,
    /// which broadcast.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let a = Tensor::zeros(&[8, 1, 3, 4], DType::F32, &device)?;
    /// let b = Tensor::zeros(&[5, 4, 2], DType::F32, &device)?;
    /// assert_eq!(a.matmul(&b)?.shape(), [8, 5, 3, 2]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// An operand has no dimensions, the shapes do not match, or the types differ.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        operation!(OP = "matmul", autocast [self, other], |a, b| a.matmul(&b));
        check_matmul_operands(OP, self, other)?;
        fail_if!(self.rank() == 0 || other.rank() == 0;
            shape(OP, [self, other]), "takes tensors of at least one dimension; use `mul`");
        let (last, first) = (self.shape()[self.rank() - 1], other.shape()[other.rank().saturating_sub(2)]);
        fail_if!(last != first; shape(OP, [self, other]),
            "the first has {last} columns, the second {first} rows; they must be equal");
        match (self.rank(), other.rank()) {
            (1, 1) => {
                matmul_with_grad(OP, &self.unsqueeze(0)?, &other.unsqueeze(1)?)?.reshape(&[][..] as &[usize])
            }
            (1, _) => matmul_with_grad(OP, &self.unsqueeze(0)?, other)?.squeeze(-2),
            (_, 1) => matmul_fold_batch(OP, self, &other.unsqueeze(1)?)?.squeeze(-1),
            (_, 2) => matmul_fold_batch(OP, self, other),
            _ => matmul_with_grad(OP, self, other),
        }
    }

    /// Multiplies two matrices.
    ///
    /// # Errors
    /// An operand is not a matrix. See also [`matmul`](Self::matmul).
    #[track_caller]
    pub fn mm(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("mm", [self, other], |a, b| a.mm(&b));
        check_ranks("mm", "takes two matrices", &[(self, 2), (other, 2)])?;
        operation!("mm");
        matmul_with_grad("mm", self, other)
    }

    /// Multiplies two batches of matrices of the same batch size.
    ///
    /// # Errors
    /// An operand is not a batch of matrices, or the batch sizes differ. See also [`matmul`](Self::matmul).
    #[track_caller]
    pub fn bmm(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("bmm", [self, other], |a, b| a.bmm(&b));
        check_ranks("bmm", "takes two batches of matrices", &[(self, 3), (other, 3)])?;
        fail_if!(self.shape()[0] != other.shape()[0];
            shape("bmm", [self, other]), "takes batches of the same length; `matmul` broadcasts");
        operation!("bmm");
        matmul_with_grad("bmm", self, other)
    }

    /// Multiplies a matrix by a vector.
    ///
    /// # Errors
    /// The operands are not a matrix and a vector. See also [`matmul`](Self::matmul).
    #[track_caller]
    pub fn mv(&self, vector: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("mv", [self, vector], |a, v| a.mv(&v));
        check_ranks("mv", "takes a matrix and a vector", &[(self, 2), (vector, 1)])?;
        self.matmul(vector)
    }

    /// Computes the dot product of two vectors.
    ///
    /// # Errors
    /// The operands are not vectors of the same length. See also [`matmul`](Self::matmul).
    #[doc(alias = "vdot")]
    #[track_caller]
    pub fn dot(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("dot", [self, other], |a, b| a.dot(&b));
        check_ranks("dot", "takes two vectors", &[(self, 1), (other, 1)])?;
        self.matmul(other)
    }

    /// Computes the outer product of two vectors: \[n\] and \[m\] give \[n, m\].
    ///
    /// # Errors
    /// An operand is not a vector.
    #[doc(alias = "ger")]
    #[track_caller]
    pub fn outer(&self, other: &Tensor) -> Result<Tensor> {
        check_ranks("outer", "takes two vectors", &[(self, 1), (other, 1)])?;
        self.unsqueeze(1)?.mul(other)
    }

    /// Computes the dot products over the last dimensions: \[.., k\] and \[*, k\] give \[.., *\].
    ///
    /// # Errors
    /// The last extents differ. See also [`matmul`](Self::matmul).
    #[track_caller]
    pub fn inner(&self, other: &Tensor) -> Result<Tensor> {
        dispatch_autocast!("inner", [self, other], |a, b| a.inner(&b));
        if self.rank() == 0 || other.rank() == 0 {
            return self.mul(other);
        }
        let k = self.shape()[self.rank() - 1];
        fail_if!(other.shape()[other.rank() - 1] != k;
            shape("inner", [self, other]), "the last extents must be equal");
        let lines = |t: &Tensor| t.reshape(&[numel(&t.shape()[..t.rank() - 1]), k][..]);
        let shape: Dims = self.shape()[..self.rank() - 1]
            .iter()
            .chain(&other.shape()[..other.rank() - 1])
            .copied()
            .collect();
        lines(self)?.mm(&lines(other)?.t()?)?.reshape(&shape[..])
    }

    /// Computes beta · self + alpha · (a · b) of matrices. `self` broadcasts, and is ignored if beta is 0.
    ///
    /// # Errors
    /// `self` does not broadcast to the product. See also [`mm`](Self::mm).
    #[track_caller]
    pub fn addmm(&self, a: &Tensor, b: &Tensor, options: &AddmmOptions) -> Result<Tensor> {
        dispatch_autocast!("addmm", [self, a, b], |x, a, b| x.addmm(&a, &b, options));
        check_ranks("mm", "takes two matrices", &[(a, 2), (b, 2)])?;
        add_matmul("addmm", self, (a, b), options)
    }

    /// Computes beta · self + alpha · (matrix · vector). `self` broadcasts, and is ignored if beta is 0.
    ///
    /// # Errors
    /// `self` does not broadcast to the product. See also [`mv`](Self::mv).
    #[track_caller]
    pub fn addmv(&self, matrix: &Tensor, vector: &Tensor, options: &AddmmOptions) -> Result<Tensor> {
        dispatch_autocast!("addmv", [self, matrix, vector], |x, a, v| x.addmv(&a, &v, options));
        check_ranks("mv", "takes a matrix and a vector", &[(matrix, 2), (vector, 1)])?;
        check_matmul_operands("addmv", matrix, vector)?;
        let column = if self.rank() == 0 { self.clone() } else { self.unsqueeze(-1)? };
        add_matmul("addmv", &column, (matrix, &vector.unsqueeze(1)?), options)?.squeeze(-1)
    }

    /// Computes beta · self + alpha · [`outer`](Self::outer)(a, b). `self` broadcasts; a beta of 0 ignores
    /// it.
    ///
    /// # Errors
    /// `self` does not broadcast to the product. See also [`outer`](Self::outer).
    #[track_caller]
    pub fn addr(&self, a: &Tensor, b: &Tensor, options: &AddmmOptions) -> Result<Tensor> {
        dispatch_autocast!("addr", [self, a, b], |x, a, b| x.addr(&a, &b, options));
        if [self, a, b].iter().all(|t| t.dtype() == DType::Bool) {
            // As in PyTorch, sums and products of bools are `or` and `and`.
            check_ranks("outer", "takes two vectors", &[(a, 1), (b, 1)])?;
            let both = a.unsqueeze(1)?.logical_and(&b.logical_and(options.alpha != 0.0)?)?;
            return self.logical_and(options.beta != 0.0)?.logical_or(&both);
        }
        let wide = accumulator_dtype(a.dtype());
        let out = add_scaled("addr", self, &a.to_dtype(wide)?.outer(&b.to_dtype(wide)?)?, options)?;
        if self.dtype() == a.dtype() { out.to_dtype(a.dtype()) } else { Ok(out) }
    }

    /// Computes beta · self + alpha · (a · b) of batches of matrices. `self` broadcasts; a beta of 0 ignores
    /// it.
    ///
    /// # Errors
    /// `self` does not broadcast to the product. See also [`bmm`](Self::bmm).
    #[track_caller]
    pub fn baddbmm(&self, a: &Tensor, b: &Tensor, options: &AddmmOptions) -> Result<Tensor> {
        dispatch_autocast!("baddbmm", [self, a, b], |x, a, b| x.baddbmm(&a, &b, options));
        check_ranks("baddbmm", "takes two batches of matrices", &[(a, 3), (b, 3)])?;
        fail_if!(a.shape()[0] != b.shape()[0]; shape("baddbmm", [a, b]), "takes batches of the same length");
        add_matmul("baddbmm", self, (a, b), options)
    }

    /// Computes beta · self + alpha · Σ (a · b) over a batch. `self` broadcasts; a beta of 0 ignores it.
    ///
    /// # Errors
    /// `self` does not broadcast to the product. See also [`bmm`](Self::bmm).
    #[track_caller]
    pub fn addbmm(&self, a: &Tensor, b: &Tensor, options: &AddmmOptions) -> Result<Tensor> {
        dispatch_autocast!("addbmm", [self, a, b], |x, a, b| x.addbmm(&a, &b, options));
        check_ranks("addbmm", "takes two batches of matrices", &[(a, 3), (b, 3)])?;
        fail_if!(a.shape()[0] != b.shape()[0]; shape("addbmm", [a, b]), "takes batches of the same length");
        // The sum over the batch becomes part of the inner dimension of one product.
        let (m, n) = (a.shape()[1], b.shape()[2]);
        let long = a.transpose(0, 1)?.reshape(&[m, a.shape()[0] * a.shape()[2]][..])?;
        let stacked_b = b.reshape(&[b.shape()[0] * b.shape()[1], n][..])?;
        add_matmul("addbmm", self, (&long, &stacked_b), options)
    }
}

/// Computes a · b for a matrix b, with the batch of a folded into rows. The gradient of b is then one
/// product, without a batched product and a sum.
fn matmul_fold_batch(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (m, k) = last_two(a.shape());
    let rows: [usize; 2] = [numel(&a.shape()[..a.rank() - 1]), k];
    if a.rank() == 2
        || (a.layout().compute_view_strides(&rows).is_none() && !autograd::compute_requires_grad(&[b]))
    {
        return matmul_with_grad(op, a, b);
    }
    let mut shape = Dims::from_slice(&a.shape()[..a.rank() - 2]);
    shape.extend_from_slice(&[m, b.shape()[1]]);
    matmul_with_grad(op, &a.reshape(rows)?, b)?.reshape(&shape[..])
}
