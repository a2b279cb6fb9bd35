//! In-place operations.

use super::elementwise::to_int;
use super::prelude::*;

macro_rules! unary {
    ($ops:ident, $kind:ident, $input:ident: $($name:ident),* $(,)?) => {$(
        $ops.add(method!($name()))
            .case($kind(stringify!($name), &[$input(S)], |x| apply_inplace(x, |y| y.$name())));
    )*};
}

macro_rules! binary {
    ($ops:ident, $kind:ident, $a:ident, $b:ident: $($name:ident),* $(,)?) => {$(
        $ops.add(method!($name(operand1)))
            .case($kind(stringify!($name), &[$a(S), $b(&[3, 1])], |x| apply_inplace(x, |y| y.$name(&x[1]))));
    )*};
}

/// Applies an in-place operation to a copy of the first input, which keeps the autograd history.
fn apply_inplace(x: &[Tensor], write: impl FnOnce(&Tensor) -> Result<()>) -> Result<Tensor> {
    let y = x[0].copy()?;
    write(&y)?;
    Ok(y)
}

pub(super) fn register(ops: &mut Registry) {
    unary!(ops, smooth, Signed:
        neg_, abs_, square_, reciprocal_, exp_, expm1_, sin_, cos_, tanh_, sigmoid_, relu_, relu6_,
        selu_, silu_, mish_, hardswish_, atan_, sinh_, cosh_, asinh_, erf_, erfc_, frac_, i0_,
        nan_to_num_
    );
    unary!(ops, smooth, Positive: sqrt_, rsqrt_, log_, log1p_, log2_, log10_, lgamma_, digamma_, sinc_);
    unary!(ops, smooth, Bounded: asin_, acos_, atanh_, tan_, erfinv_);
    unary!(ops, nonsmooth, Signed: sign_, floor_, ceil_, round_, trunc_, hardsigmoid_);
    binary!(ops, smooth, Signed, Positive: add_, sub_, mul_, div_, atan2_, hypot_, xlogy_, ldexp_);
    binary!(ops, nonsmooth, Signed, Positive: fmod_, remainder_, floor_divide_, copysign_);
    binary!(ops, smooth, Positive, Signed: pow_);
    ops.add(method!(leaky_relu_(float)))
        .case(smooth("leaky_relu_", &[Signed(S)], |x| apply_inplace(x, |y| y.leaky_relu_(0.1))));
    ops.add(method!(elu_(float))).case(smooth("elu_", &[Signed(S)], |x| apply_inplace(x, |y| y.elu_(1.0))));
    ops.add(method!(celu_(float)))
        .case(smooth("celu_", &[Signed(S)], |x| apply_inplace(x, |y| y.celu_(1.5))));
    ops.add(method!(cumsum_(int)))
        .case(smooth("cumsum_", &[Signed(S)], |x| apply_inplace(x, |y| y.cumsum_(1))));
    ops.add(method!(cumprod_(int)))
        .case(smooth("cumprod_", &[Signed(S)], |x| apply_inplace(x, |y| y.cumprod_(1))));
    ops.add(method!(tril_(int))).case(smooth("tril_", &[Signed(S)], |x| apply_inplace(x, |y| y.tril_(0))));
    ops.add(method!(triu_(int))).case(smooth("triu_", &[Signed(S)], |x| apply_inplace(x, |y| y.triu_(1))));
    ops.add(method!(polygamma_(count)))
        .case(smooth("polygamma_", &[Positive(S)], |x| apply_inplace(x, |y| y.polygamma_(1))));
    ops.add(method!(renorm_(float, int, float)))
        .case(nonsmooth("renorm_", &[Signed(S)], |x| apply_inplace(x, |y| y.renorm_(2.0, 0, 1.5))));
    ops.add(method!(rrelu_(RreluOptions { lower: float, upper: float, training: flag }))).case(nonsmooth(
        "rrelu_",
        &[Signed(S)],
        |x| apply_inplace(x, |y| y.rrelu_(&RreluOptions { lower: 0.1, upper: 0.3, training: false })),
    ));
    ops.add(method!(hardtanh_(float, float)))
        .case(nonsmooth("hardtanh_", &[Signed(S)], |x| apply_inplace(x, |y| y.hardtanh_(-1.0, 1.0))));
    ops.add(method!(threshold_(float, float)))
        .case(nonsmooth("threshold_", &[Signed(S)], |x| apply_inplace(x, |y| y.threshold_(0.2, 7.0))));
    ops.add(method!(clamp_(operand1, operand2)))
        .case(nonsmooth("clamp_", &[Signed(S)], |x| apply_inplace(x, |y| y.clamp_(-0.5, 1.0))));
    ops.add(method!(masked_fill_(t1, operand2))).case(smooth("masked_fill_", &[Signed(S), Bool(S)], |x| {
        apply_inplace(x, |y| y.masked_fill_(&x[1], 4.0))
    }));
    ops.add(method!(addcmul_(operand1, operand2, float))).case(smooth(
        "addcmul_",
        &[Signed(S), Signed(&[5]), Positive(&[3, 1])],
        |x| apply_inplace(x, |y| y.addcmul_(&x[1], &x[2], 0.7)),
    ));
    ops.add(method!(addcdiv_(operand1, operand2, float))).case(smooth(
        "addcdiv_",
        &[Signed(S), Signed(&[5]), Positive(&[3, 1])],
        |x| apply_inplace(x, |y| y.addcdiv_(&x[1], &x[2], 0.7)),
    ));
    ops.add(method!(lerp_(operand1, operand2))).case(smooth(
        "lerp_",
        &[Signed(S), Signed(&[5]), Positive(&[3, 1])],
        |x| apply_inplace(x, |y| y.lerp_(&x[1], &x[2])),
    ));
    ops.add(method!(copy_(t1))).case(smooth("copy_", &[Signed(S), Positive(&[5])], |x| {
        let y = x[0].mul(2.0)?;
        y.narrow(0, 1, 2)?.copy_(&x[1])?;
        Ok(y)
    }));
    ops.add(method!(embedding_renorm_(t1, float, float))).case(nonsmooth(
        "embedding_renorm_",
        &[Signed(&[6, 4]), Index(&[3], 6)],
        |x| {
            let table = x[0].detach().copy()?;
            table.embedding_renorm_(&x[1], 0.5, 2.0)?;
            x[0].add(&table)
        },
    ));
    ops.add(method!(fill_(operand1)))
        .case(smooth("fill_", &[Signed(S)], |x| apply_inplace(x, |y| y.narrow(0, 1, 1)?.fill_(2.5))));
    ops.add(method!(acosh_()))
        .case(smooth("acosh_", &[Positive(S)], |x| apply_inplace(&[x[0].add(1.5)?], |y| y.acosh_())));
    ops.add(method!(logit_(maybe_float)))
        .case(smooth("logit_", &[Positive(S)], |x| apply_inplace(&[x[0].mul(0.25)?], |y| y.logit_(None))));
    ops.add(method!(mvlgamma_(count))).case(
        smooth("mvlgamma_", &[Positive(S)], |x| apply_inplace(&[x[0].add(1.5)?], |y| y.mvlgamma_(3)))
            .with_tolerances(case::ONE_ROUNDING_NEAR_4),
    );
    ops.add(method!(addmm_(t1, t2, AddmmOptions { beta: float, alpha: float }))).case(
        smooth("addmm_", &[Signed(&[3, 5]), Signed(&[3, 4]), Signed(&[4, 5])], |x| {
            apply_inplace(x, |y| y.addmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
    );
    ops.add(method!(addmv_(t1, t2, AddmmOptions { beta: float, alpha: float }))).case(
        smooth("addmv_", &[Signed(&[3]), Signed(&[3, 4]), Signed(&[4])], |x| {
            apply_inplace(x, |y| y.addmv_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
    );
    ops.add(method!(addr_(t1, t2, AddmmOptions { beta: float, alpha: float }))).case(smooth(
        "addr_",
        &[Signed(&[3, 4]), Signed(&[3]), Signed(&[4])],
        |x| apply_inplace(x, |y| y.addr_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })),
    ));
    ops.add(method!(baddbmm_(t1, t2, AddmmOptions { beta: float, alpha: float }))).case(
        smooth("baddbmm_", &[Signed(&[2, 3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
            apply_inplace(x, |y| y.baddbmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
    );
    ops.add(method!(addbmm_(t1, t2, AddmmOptions { beta: float, alpha: float }))).case(
        smooth("addbmm_", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
            apply_inplace(x, |y| y.addbmm_(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 }))
        })
        .with_flops(|x, _| 2 * cost::numel(&x[1]) * cost::extent(&x[2], 2)),
    );
    ops.add(method!(scatter_(int, t1, t2))).case(smooth("scatter_", &[Signed(S), Signed(&[1, 5])], |x| {
        let rows = Tensor::from_slice(&[2i64, 0, 1, 1, 2], [1, 5], x[0].device())?;
        apply_inplace(x, |y| y.scatter_(0, &rows, &x[1]))
    }));
    ops.add(method!(scatter_value_(int, t1, float))).case(smooth(
        "scatter_value_",
        &[Signed(S), Index(&[1, 5], 3)],
        |x| apply_inplace(x, |y| y.scatter_value_(0, &x[1], 0.5)),
    ));
    ops.add(method!(scatter_add_(int, t1, t2))).case(smooth(
        "scatter_add_",
        &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])],
        |x| apply_inplace(x, |y| y.scatter_add_(0, &x[1], &x[2])),
    ));
    ops.add(method!(scatter_reduce_(int, t1, t2, scatter, flag))).case(smooth(
        "scatter_reduce_",
        &[Signed(&[4, 5]), Index(&[3, 5], 4), Signed(&[3, 5])],
        |x| apply_inplace(x, |y| y.scatter_reduce_(0, &x[1], &x[2], ScatterReduce::Prod, true)),
    ));
    ops.add(method!(index_add_(int, t1, t2, float))).case(smooth(
        "index_add_",
        &[Signed(S), Index(&[4], 3), Signed(&[4, 5])],
        |x| apply_inplace(x, |y| y.index_add_(0, &x[1], &x[2], 0.5)),
    ));
    ops.add(method!(index_copy_(int, t1, t2))).case(smooth(
        "index_copy_",
        &[Signed(S), Index(&[2], 3), Positive(&[2, 5])],
        |x| apply_inplace(x, |y| y.index_copy_(0, &x[1], &x[2])),
    ));
    ops.add(method!(index_fill_(int, t1, operand2))).case(smooth(
        "index_fill_",
        &[Signed(S), Index(&[2], 5)],
        |x| apply_inplace(x, |y| y.index_fill_(1, &x[1], 0.5)),
    ));
    ops.add(method!(index_put_(indices, t1, flag))).case(smooth(
        "index_put_",
        &[Signed(S), Index(&[2], 3), Positive(&[2, 5])],
        |x| apply_inplace(x, |y| y.index_put_(&[Some(&x[1])], &x[2], true)),
    ));
    ops.add(method!(index_reduce_(int, t1, t2, scatter, flag))).case(smooth(
        "index_reduce_",
        &[Signed(S), Index(&[4], 3), Positive(&[4, 5])],
        |x| apply_inplace(x, |y| y.index_reduce_(0, &x[1], &x[2], ScatterReduce::Amax, true)),
    ));
    ops.add(method!(masked_scatter_(t1, t2))).case(smooth(
        "masked_scatter_",
        &[Signed(S), Bool(&[5]), Positive(&[15])],
        |x| apply_inplace(x, |y| y.masked_scatter_(&x[1], &x[2])),
    ));
    ops.add(method!(put_(t1, t2, flag))).case(smooth(
        "put_",
        &[Signed(S), Index(&[4], 15), Positive(&[4])],
        |x| apply_inplace(x, |y| y.put_(&x[1], &x[2], true)),
    ));
    ops.add(method!(bitwise_not_()))
        .case(nondifferentiable("bitwise_not_", &[Bool(S)], |x| apply_inplace(x, |y| y.bitwise_not_())));
    ops.add(method!(bitwise_and_(operand1))).case(nondifferentiable(
        "bitwise_and_",
        &[Bool(S), Bool(&[5])],
        |x| apply_inplace(x, |y| y.bitwise_and_(&x[1])),
    ));
    ops.add(method!(bitwise_or_(operand1))).case(nondifferentiable(
        "bitwise_or_",
        &[Bool(S), Bool(&[5])],
        |x| apply_inplace(x, |y| y.bitwise_or_(&x[1])),
    ));
    ops.add(method!(bitwise_xor_(operand1))).case(nondifferentiable(
        "bitwise_xor_",
        &[Bool(S), Bool(&[5])],
        |x| apply_inplace(x, |y| y.bitwise_xor_(&x[1])),
    ));
    ops.add(method!(gcd_(operand1))).case(nondifferentiable("gcd_", &[Index(S, 60), Index(&[5], 48)], |x| {
        apply_inplace(&[to_int(&x[0])?], |y| y.gcd_(&to_int(&x[1])?))
    }));
    ops.add(method!(lcm_(operand1))).case(nondifferentiable("lcm_", &[Index(S, 60), Index(&[5], 48)], |x| {
        apply_inplace(&[to_int(&x[0])?], |y| y.lcm_(&to_int(&x[1])?))
    }));
    ops.add(method!(bitwise_left_shift_(operand1))).case(nondifferentiable(
        "bitwise_left_shift_",
        &[Index(S, 60), Index(&[5], 20)],
        |x| apply_inplace(&[to_int(&x[0])?], |y| y.bitwise_left_shift_(&to_int(&x[1])?)),
    ));
    ops.add(method!(bitwise_right_shift_(operand1))).case(nondifferentiable(
        "bitwise_right_shift_",
        &[Index(S, 60), Index(&[5], 5)],
        |x| apply_inplace(&[to_int(&x[0])?], |y| y.bitwise_right_shift_(&to_int(&x[1])?)),
    ));
    ops.add(method!(nan_to_num_with_(NanToNumOptions {
        nan: float,
        posinf: maybe_float,
        neginf: maybe_float
    })))
    .case(smooth("nan_to_num_with_", &[Signed(S)], |x| {
        apply_inplace(x, |y| y.nan_to_num_with_(&NanToNumOptions { nan: 1.0, ..Default::default() }))
    }));
    ops.add(method!(zero_()))
        .case(smooth("zero_", &[Signed(S)], |x| apply_inplace(x, |y| y.narrow(1, 2, 2)?.zero_())))
        .golden(|a| {
            let x = a.tensor(0)?.copy()?;
            x.zero_()?;
            Ok(vec![x])
        });
}
