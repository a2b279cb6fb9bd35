//! Joining tensors, replacing parts, sets, integration.

use forebay::dtype::DType;
use forebay::error::Result;
use forebay::ops::{
    CovOptions, IsCloseOptions, ScatterReduce, block_diag, broadcast_tensors, cartesian_prod, cat,
    column_stack, dstack, hstack, meshgrid, stack, vstack,
};
use forebay::tensor::Tensor;

use super::InputSpec::{Bool, Bounded, Index, Positive, Signed};
use super::case::{OpCase, S, nondifferentiable, nonsmooth, smooth};
use super::cost;

/// Makes a tensor from a bool that the host has read.
fn bool_tensor(x: &[Tensor], found: bool) -> Result<Tensor> {
    Tensor::from_bools(&[found], (), x[0].device())
}

/// Casts to an integer type that every device supports.
fn to_int(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::I32)
}

pub(super) const MANIPULATION: &[OpCase] = &[
    smooth("hstack", &[Signed(&[2, 3]), Signed(&[2, 2])], |x| hstack(&[&x[0], &x[1]])),
    smooth("vstack", &[Signed(&[3]), Signed(&[2, 3])], |x| vstack(&[&x[0], &x[1]])),
    smooth("dstack", &[Signed(&[2, 3]), Signed(&[2, 3, 2])], |x| dstack(&[&x[0], &x[1]])),
    smooth("column_stack", &[Signed(&[3]), Signed(&[3, 2])], |x| column_stack(&[&x[0], &x[1]])),
    smooth("block_diag", &[Signed(&[2, 3]), Positive(&[2])], |x| block_diag(&[&x[0], &x[1]])),
    smooth("cartesian_prod", &[Signed(&[3]), Positive(&[2])], |x| cartesian_prod(&[&x[0], &x[1]])),
    smooth("meshgrid", &[Signed(&[3]), Positive(&[2])], |x| {
        cat(&meshgrid(&[&x[0], &x[1]], true)?.iter().collect::<Vec<_>>(), 0)
    }),
    smooth("broadcast_tensors", &[Signed(&[3, 1]), Positive(&[2])], |x| {
        cat(&broadcast_tensors(&[&x[0], &x[1]])?.iter().collect::<Vec<_>>(), 0)
    }),
    smooth("atleast_1d", &[Signed(&[3])], |x| x[0].atleast_1d()).with_bytes(cost::no_bytes),
    smooth("atleast_2d", &[Signed(&[3])], |x| x[0].atleast_2d()).with_bytes(cost::no_bytes),
    smooth("atleast_3d", &[Signed(S)], |x| x[0].atleast_3d()).with_bytes(cost::no_bytes),
    smooth("tile", &[Signed(S)], |x| x[0].tile([2])),
    smooth("rot90", &[Signed(&[2, 3, 4])], |x| x[0].rot90(-1, [0, 2])),
    smooth("combinations", &[Signed(&[5])], |x| x[0].combinations(3, false)),
    smooth("kron", &[Signed(&[2, 3]), Positive(&[2])], |x| x[0].kron(&x[1])),
    smooth("tensordot", &[Signed(&[2, 3, 4]), Signed(&[4, 3, 5])], |x| x[0].tensordot(&x[1], [1, 2], [1, 0]))
        .with_flops(|_, y| 2 * cost::numel(y) * 12),
    smooth("slice_scatter", &[Signed(S), Positive(&[3, 2])], |x| x[0].slice_scatter(&x[1], 1, 1, 5, 2)),
    smooth("select_scatter", &[Signed(S), Positive(&[5])], |x| x[0].select_scatter(&x[1], 0, -1)),
    smooth("diagonal_scatter", &[Signed(S), Positive(&[3])], |x| x[0].diagonal_scatter(&x[1], 1, 0, 1)),
    smooth("diag_embed", &[Signed(S)], |x| x[0].diag_embed(-1, 0, -1)),
    smooth("diag", &[Signed(&[4])], |x| x[0].diag(1)),
    smooth("diag of a matrix", &[Signed(S)], |x| x[0].diag(1)),
    smooth("take", &[Signed(S), Index(&[2, 3], 15)], |x| x[0].take(&x[1])).with_bytes(cost::gather_bytes),
    smooth("put", &[Signed(S), Index(&[4], 15), Positive(&[4])], |x| x[0].put(&x[1], &x[2], true)),
    smooth("index_copy", &[Signed(S), Index(&[2], 3), Positive(&[2, 5])], |x| {
        x[0].index_copy(0, &x[1], &x[2])
    }),
    smooth("index_reduce", &[Signed(S), Index(&[4], 3), Positive(&[4, 5])], |x| {
        x[0].index_reduce(0, &x[1], &x[2], ScatterReduce::Prod, true)
    }),
    smooth("index_reduce of means", &[Signed(S), Index(&[4], 5), Positive(&[3, 4])], |x| {
        x[0].index_reduce(1, &x[1], &x[2], ScatterReduce::Mean, false)
    }),
    nondifferentiable("unravel_index", &[Index(&[7], 24)], |x| {
        stack(&x[0].unravel_index([2, 3, 4])?.iter().collect::<Vec<_>>(), 0)
    }),
    smooth("expand_as", &[Signed(&[3, 1]), Signed(S)], |x| x[0].expand_as(&x[1])?.mul(&x[1])),
    smooth("reshape_as", &[Signed(S), Signed(&[5, 3])], |x| x[0].reshape_as(&x[1])?.mul(&x[1])),
    smooth("view_as", &[Signed(S), Signed(&[5, 3])], |x| x[0].contiguous()?.view_as(&x[1])?.mul(&x[1])),
    smooth("sum_to_size", &[Signed(&[2, 3, 5])], |x| x[0].sum_to_size([3, 1])),
    smooth("masked_scatter", &[Signed(S), Bool(&[5]), Positive(&[15])], |x| {
        x[0].masked_scatter(&x[1], &x[2])
    }),
    nondifferentiable("isclose", &[Signed(S), Bounded(&[5])], |x| {
        x[0].isclose(&x[1], &IsCloseOptions { rtol: 0.5, atol: 0.1, equal_nan: true })
    }),
    nondifferentiable("allclose", &[Signed(S), Bounded(&[5])], |x| {
        bool_tensor(x, x[0].allclose(&x[1], &IsCloseOptions { rtol: 9.0, atol: 9.0, ..Default::default() })?)
    }),
    nondifferentiable("equal", &[Signed(S), Bounded(S)], |x| bool_tensor(x, x[0].equal(&x[1])?)),
    nondifferentiable("isin", &[Index(S, 7), Index(&[3], 7)], |x| x[0].isin(&x[1], false)),
    smooth("unique", &[Signed(S)], |x| {
        let found = cat(&[&x[0], &x[0]], 0)?.unique()?;
        found.values.mul(&found.counts.to_dtype(x[0].dtype())?)
    }),
    smooth("unique_consecutive", &[Signed(S)], |x| {
        Ok(x[0].unsqueeze(-1)?.repeat([1, 1, 2])?.unique_consecutive()?.values)
    }),
    smooth("unique_dim", &[Signed(S)], |x| Ok(cat(&[&x[0], &x[0]], 1)?.unique_dim(1)?.values)),
    smooth("unique_consecutive_dim", &[Signed(S)], |x| {
        Ok(x[0].repeat_interleave(2, 0)?.unique_consecutive_dim(0)?.values)
    }),
    smooth("mode", &[Signed(S)], |x| {
        let (values, _) = cat(&[&x[0], &x[0].narrow(1, 1, 2)?], 1)?.mode(1, true)?;
        Ok(values)
    }),
    smooth("hsplit", &[Signed(&[3, 4])], |x| x[0].hsplit(2)?[1].mul(2.0)),
    smooth("vsplit", &[Signed(&[4, 3])], |x| x[0].vsplit(2)?[1].mul(2.0)),
    smooth("dsplit", &[Signed(&[2, 1, 6])], |x| x[0].dsplit(3)?[1].mul(2.0)),
    nondifferentiable("gcd", &[Index(S, 60), Index(&[5], 48)], |x| to_int(&x[0])?.gcd(&to_int(&x[1])?)),
    nondifferentiable("lcm", &[Index(S, 60), Index(&[5], 48)], |x| to_int(&x[0])?.lcm(&to_int(&x[1])?)),
    nondifferentiable("bitwise_left_shift", &[Index(S, 60), Index(&[5], 40)], |x| {
        to_int(&x[0])?.bitwise_left_shift(&to_int(&x[1])?)
    }),
    nondifferentiable("bitwise_right_shift", &[Index(S, 60), Index(&[5], 5)], |x| {
        to_int(&x[0])?.bitwise_right_shift(&to_int(&x[1])?)
    }),
    nondifferentiable("bincount", &[Index(&[9], 5)], |x| x[0].bincount(None, 7)),
    smooth("bincount of weights", &[Index(&[9], 5), Positive(&[9])], |x| x[0].bincount(Some(&x[1]), 0)),
    nondifferentiable("histogram", &[Bounded(S)], |x| {
        let edges = Tensor::new([-0.5, -0.1, 0.2, 0.6], x[0].device())?.to_dtype(x[0].dtype())?;
        x[0].histogram(&edges, None, true)
    }),
    nondifferentiable("histogram of weights", &[Bounded(S), Positive(S)], |x| {
        let edges = Tensor::new([-0.5, -0.1, 0.2, 0.6], x[0].device())?.to_dtype(x[0].dtype())?;
        x[0].histogram(&edges, Some(&x[1]), false)
    }),
    nondifferentiable("histc", &[Signed(S)], |x| x[0].histc(4, -1.0, 1.0)),
    nondifferentiable("multinomial", &[Positive(S)], |x| x[0].multinomial(3, false)),
    nondifferentiable("multinomial with replacement", &[Positive(S)], |x| x[0].multinomial(9, true)),
    nonsmooth("renorm", &[Signed(S)], |x| x[0].renorm(2.0, 0, 1.5)),
    smooth("nansum", &[Signed(S)], |x| x[0].nansum([1], false)),
    smooth("nanmean", &[Signed(S)], |x| x[0].nanmean([0], true)),
    smooth("std_mean", &[Signed(S)], |x| {
        let (std, mean) = x[0].std_mean([1], 1.0, false)?;
        cat(&[&std, &mean], 0)
    }),
    smooth("logcumsumexp", &[Signed(S)], |x| x[0].logcumsumexp(1)),
    smooth("trapezoid", &[Signed(S), Positive(&[5])], |x| x[0].trapezoid(&x[1], 1)),
    smooth("cumulative_trapezoid", &[Signed(S)], |x| x[0].cumulative_trapezoid(0.5, 0)),
    smooth("gradient", &[Signed(S)], |x| x[0].gradient(0.5, 1, 2)),
    smooth("gradient at positions", &[Signed(S)], |x| {
        x[0].gradient(&Tensor::new([0.0, 0.5, 0.8, 2.0, 2.5], x[0].device())?, -1, 1)
    }),
    smooth("cov", &[Signed(&[3, 6])], |x| x[0].cov(&Default::default()))
        .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
    smooth("cov of weights", &[Signed(&[3, 6]), Index(&[6], 4), Positive(&[6])], |x| {
        x[0].cov(&CovOptions { fweights: Some(&x[1]), aweights: Some(&x[2]), ..Default::default() })
    })
    .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
    nonsmooth("corrcoef", &[Signed(&[3, 6])], |x| x[0].corrcoef())
        .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 1)),
];
