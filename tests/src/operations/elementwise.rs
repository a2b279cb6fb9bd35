//! Elementwise operations and activations.

use super::prelude::*;

/// Adds operations of one input that take no other argument: the name is all that differs.
macro_rules! unary {
    ($ops:ident, $kind:ident, $input:ident: $($name:ident),* $(,)?) => {$(
        $ops.add(method!($name()))
            .case($kind(stringify!($name), &[$input(S)], |x| x[0].$name()).elementwise())
            .golden(unary_call!($name));
    )*};
}

/// Adds operations of two inputs that are broadcast.
macro_rules! binary {
    ($ops:ident, $kind:ident, $a:ident, $b:ident: $($name:ident),* $(,)?) => {$(
        $ops.add(method!($name(operand1)))
            .case(
                $kind(stringify!($name), &[$a(&[3, 1, 5]), $b(&[4, 1])], |x| x[0].$name(&x[1])).elementwise(),
            )
            .golden(binary_call!($name));
    )*};
}

const REPLACEMENTS: NanToNumOptions = NanToNumOptions { nan: 0.5, posinf: Some(2.0), neginf: Some(-2.0) };

/// Casts to an integer type that every device supports.
pub(super) fn to_int(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::I32)
}

pub(super) fn register(ops: &mut Registry) {
    unary!(ops, smooth, Signed:
        neg, square, exp, exp2, expm1, sin, cos, atan, sinh, cosh, tanh, asinh, erf, erfc, sigmoid,
        frac, rad2deg, deg2rad, log_ndtr, spherical_bessel_j0, erfcx, i0, i0e, i1, i1e, gelu_tanh, silu,
        mish, logsigmoid, softsign, tanhshrink, ndtr, selu, relu, relu6, hardswish, abs, reciprocal
    );
    unary!(ops, smooth, Positive: sqrt, rsqrt, log, log2, log10, log1p, lgamma, digamma, entr, sinc);
    unary!(ops, smooth, Bounded: asin, acos, atanh, tan, erfinv);
    unary!(ops, nonsmooth, Signed: floor, ceil, trunc, hardsigmoid);
    unary!(ops, nondifferentiable, Signed:
        isnan, isinf, isfinite, isposinf, isneginf, signbit, logical_not
    );
    binary!(ops, smooth, Signed, Positive: mul, atan2, hypot);
    binary!(ops, smooth, Positive, Signed: pow);
    ops.golden_of("mul", "__rmul__", reversed_call!(mul));
    ops.golden_of("pow", "__rpow__", reversed_call!(pow));
    ops.golden_of("pow", "float_power", |a| {
        let double = |t: &Tensor| t.to_dtype(DType::F64);
        let x = double(&a.tensor_or_scalar(0, 1)?)?;
        match a.opt_tensor(1, "exponent") {
            Some(exponent) => single(x.pow(&double(exponent)?)),
            None => single(x.pow(a.float(1, "exponent", 1.0)?)),
        }
    });
    binary!(ops, smooth, Signed, Positive: xlogy, xlog1py, logaddexp, logaddexp2, ldexp);
    binary!(ops, nonsmooth, Signed, Positive:
        maximum, minimum, fmax, fmin, fmod, remainder, floor_divide, trunc_divide, copysign
    );
    ops.golden_of("remainder", "__rmod__", reversed_call!(remainder));
    binary!(ops, nondifferentiable, Signed, Positive:
        eq, ne, lt, le, gt, ge, logical_and, logical_or, logical_xor
    );
    ops.add(method!(gelu())).case(smooth("gelu", &[Signed(S)], |x| x[0].gelu()).elementwise()).golden(|a| {
        match a.string(1, "approximate", "none") {
            "tanh" => single(a.tensor(0)?.gelu_tanh()),
            "none" => single(a.tensor(0)?.gelu()),
            other => anyhow::bail!("gelu by {other}"),
        }
    });
    ops.add(method!(softplus(float, float)))
        .case(smooth("softplus", &[Signed(S)], |x| x[0].softplus(1.0, 20.0)).elementwise())
        .golden(|a| single(a.tensor(0)?.softplus(a.float(1, "beta", 1.0)?, a.float(2, "threshold", 20.0)?)));
    ops.add(method!(elu(float)))
        .case(smooth("elu", &[Signed(S)], |x| x[0].elu(1.0)).elementwise())
        .golden(|a| single(a.tensor(0)?.elu(a.float(1, "alpha", 1.0)?)));
    ops.add(method!(celu(float)))
        .case(smooth("celu", &[Signed(S)], |x| x[0].celu(1.5)).elementwise())
        .golden(|a| single(a.tensor(0)?.celu(a.float(1, "alpha", 1.0)?)));
    ops.add(method!(leaky_relu(float)))
        .case(smooth("leaky_relu", &[Signed(S)], |x| x[0].leaky_relu(0.1)).elementwise())
        .golden(|a| single(a.tensor(0)?.leaky_relu(a.float(1, "negative_slope", 0.01)?)));
    ops.add(method!(polygamma(count)))
        .case(smooth("polygamma", &[Positive(S)], |x| x[0].polygamma(1)).elementwise())
        .case(smooth("polygamma of the second order", &[Positive(S)], |x| x[0].polygamma(2)).elementwise())
        .golden(|a| {
            // The database calls the function with the order first, and the method with the tensor first.
            single(match a.get(0, "n").is_some_and(|n| n.is_i64()) {
                true => a.tensor(1)?.polygamma(a.int(0, "n", 0)? as usize),
                false => a.tensor(0)?.polygamma(a.int(1, "n", 0)? as usize),
            })
        });
    ops.add(method!(round()))
        .case(nonsmooth("round", &[Signed(S)], |x| x[0].round()).elementwise())
        .golden(|a| single(a.tensor(0)?.round_decimals(a.int(1, "decimals", 0)? as i32)));
    ops.add(method!(softshrink(float)))
        .case(nonsmooth("softshrink", &[Signed(S)], |x| x[0].softshrink(0.5)).elementwise())
        .golden(|a| single(a.tensor(0)?.softshrink(a.float(1, "lambd", 0.5)?)));
    ops.add(method!(hardshrink(float)))
        .case(nonsmooth("hardshrink", &[Signed(S)], |x| x[0].hardshrink(0.5)).elementwise())
        .golden(|a| single(a.tensor(0)?.hardshrink(a.float(1, "lambd", 0.5)?)));
    ops.add(method!(hardtanh(float, float)))
        .case(nonsmooth("hardtanh", &[Signed(S)], |x| x[0].hardtanh(-1.0, 1.0)).elementwise())
        .golden(|a| {
            single(a.tensor(0)?.hardtanh(a.scalar_or(1, "min_val", -1)?, a.scalar_or(2, "max_val", 1)?))
        });
    ops.add(method!(threshold(float, float)))
        .case(nonsmooth("threshold", &[Signed(S)], |x| x[0].threshold(0.2, 7.0)).elementwise())
        .golden(|a| {
            single(a.tensor(0)?.threshold(a.scalar_or(1, "threshold", 0)?, a.scalar_or(2, "value", 0)?))
        });
    ops.add(method!(nan_to_num()))
        .case(nonsmooth("nan_to_num", &[Signed(S)], |x| x[0].nan_to_num()).elementwise())
        .golden(|a| match (a.opt_float(1, "nan")?, a.opt_float(2, "posinf")?, a.opt_float(3, "neginf")?) {
            (None, None, None) => single(a.tensor(0)?.nan_to_num()),
            (nan, posinf, neginf) => {
                let nan = nan.unwrap_or_default();
                single(a.tensor(0)?.nan_to_num_with(&NanToNumOptions { nan, posinf, neginf }))
            }
        });
    ops.add(method!(nan_to_num_with(NanToNumOptions {
        nan: float,
        posinf: maybe_float,
        neginf: maybe_float
    })))
    .case(nonsmooth("nan_to_num_with", &[Signed(S)], |x| x[0].nan_to_num_with(&REPLACEMENTS)).elementwise());
    ops.add(method!(round_decimals(int32)))
        .case(nonsmooth("round_decimals", &[Signed(S)], |x| x[0].round_decimals(1)).elementwise());
    ops.add(method!(add(operand1)))
        .case(smooth("add", &[Signed(&[3, 1, 5]), Positive(&[4, 1])], |x| x[0].add(&x[1])).elementwise())
        .case(smooth("add a number", &[Signed(S)], |x| x[0].add(1.5)))
        .golden_as("__radd__", reversed_call!(add))
        .golden(|a| {
            let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
            match a.float(NAMED, "alpha", 1.0)? {
                1.0 => single(x.add(other)),
                alpha => single(x.addcmul(other, 1, alpha)),
            }
        });
    ops.add(method!(sub(operand1)))
        .case(smooth("sub", &[Signed(&[3, 1, 5]), Positive(&[4, 1])], |x| x[0].sub(&x[1])).elementwise())
        .golden_as("__rsub__", reversed_call!(sub))
        .golden(|a| {
            let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
            match a.float(NAMED, "alpha", 1.0)? {
                1.0 => single(x.sub(other)),
                alpha => single(x.addcmul(other, 1, -alpha)),
            }
        });
    ops.add(method!(rsub(operand1)))
        .case(smooth("rsub", &[Signed(&[3, 1, 5]), Positive(&[4, 1])], |x| x[0].rsub(&x[1])).elementwise())
        .golden(|a| {
            let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
            match (a.scalar(NAMED, "alpha")?.unwrap_or(Scalar::Int(1)), other) {
                (Scalar::Int(1), other) => single(x.rsub(other)),
                (_, Operand::Tensor(other)) => single(other.addcmul(&x, 1, -a.float(NAMED, "alpha", 1.0)?)),
                (alpha, other) => single(x.mul(Operand::Scalar(alpha))?.rsub(other)),
            }
        });
    ops.add(method!(div(operand1)))
        .case(smooth("div", &[Signed(&[3, 1, 5]), Positive(&[4, 1])], |x| x[0].div(&x[1])).elementwise())
        .case(smooth("div of a number", &[Positive(S)], |x| {
            Tensor::full((), 2.0, x[0].dtype(), x[0].device())?.div(&x[0])
        }))
        .golden(|a| {
            let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(1))?);
            match a.string(NAMED, "rounding_mode", "") {
                "" => single(x.div(other)),
                "floor" => single(x.floor_divide(other)),
                "trunc" => single(x.trunc_divide(other)),
                other => Err(missing_op(&format!("div rounded by {other}"))),
            }
        })
        .golden_as("true_divide", binary_call!(div))
        .golden_as("__rdiv__", reversed_call!(div));
    ops.add(method!(heaviside(operand1)))
        .case(
            nondifferentiable("heaviside", &[Signed(&[3, 1, 5]), Positive(&[4, 1])], |x| {
                x[0].heaviside(&x[1])
            })
            .elementwise(),
        )
        .golden(|a| single(a.tensor(0)?.heaviside(a.operand(1, "values", Scalar::Int(0))?)));
    ops.add(method!(logit(maybe_float)))
        .case(smooth("logit", &[Positive(S)], |x| x[0].mul(0.25)?.logit(None)).elementwise())
        .case(nonsmooth("logit of clamped values", &[Bounded(S)], |x| x[0].logit(Some(0.1))))
        .golden(|a| single(a.tensor(0)?.logit(a.opt_float(1, "eps")?)));
    ops.add(method!(ndtri()))
        .case(smooth("ndtri", &[Positive(S)], |x| x[0].mul(0.25)?.ndtri()).elementwise())
        .golden(unary_call!(ndtri));
    ops.add(method!(mvlgamma(count)))
        .case(
            smooth("mvlgamma", &[Positive(S)], |x| x[0].add(1.5)?.mvlgamma(3))
                .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        )
        .golden(|a| single(a.tensor(0)?.mvlgamma(usize::try_from(a.int(1, "p", 1)?)?)));
    ops.add(method!(zeta(operand1)))
        .case(smooth("zeta", &[Positive(S)], |x| {
            Tensor::full((), 2.5, x[0].dtype(), x[0].device())?.zeta(&x[0])
        }))
        .golden(binary_call!(zeta));
    ops.add(method!(prelu(t1)))
        .case(
            smooth("prelu", &[Signed(&[2, 3, 4]), Positive(&[3])], |x| x[0].prelu(&x[1]))
                .with_batched_inputs(1),
        )
        .golden(|a| match a.opt_tensor(1, "weight") {
            Some(w) => single(a.tensor(0)?.prelu(w)),
            None => Err(missing_op("prelu without a weight")),
        });
    ops.add(method!(glu(int)))
        .case(smooth("glu", &[Signed(&[2, 6])], |x| x[0].glu(-1)).with_batched_inputs(1))
        .golden(|a| single(a.tensor(0)?.glu(a.dim(1, "dim", -1)?)));
    // The database calls it as a method of the first branch.
    ops.add(method!(where_(t1, operand2)))
        .case(
            smooth("where_", &[Bool(&[3, 1]), Signed(S), Positive(&[5])], |x| x[1].where_(&x[0], &x[2]))
                .with_bench_inputs(&[Bool(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden_as("where", |a| {
            single(a.tensor_or_scalar(0, 2)?.where_(a.tensor(1)?, a.operand(2, "other", Scalar::Int(0))?))
        });
    ops.add(constructor!(where_cond(t1, operand2, operand3))).case(smooth(
        "where_cond",
        &[Bool(&[3, 1]), Signed(S), Positive(&[5])],
        |x| Tensor::where_cond(&x[0], &x[1], &x[2]),
    ));
    ops.add(method!(masked_fill(t1, operand2)))
        .case(
            smooth("masked_fill", &[Signed(S), Bool(S)], |x| x[0].masked_fill(&x[1], 4.0))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Bool(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.masked_fill(a.tensor(1)?, a.operand(2, "value", Scalar::Int(0))?)));
    ops.add(method!(clamp(operand1, operand2)))
        .case(
            nonsmooth("clamp", &[Signed(S)], |x| x[0].clamp(-0.5, 1.0))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .case(nonsmooth("clamp by tensors", &[Signed(S), Bounded(&[5]), Positive(&[3, 1])], |x| {
            x[0].clamp(&x[1], &x[2])
        }))
        .golden(|a| {
            let (x, no_min, no_max) =
                (a.tensor(0)?, Scalar::Float(f64::NEG_INFINITY), Scalar::Float(f64::INFINITY));
            match (a.get(1, "min").is_some(), a.get(2, "max").is_some()) {
                (false, false) => Err(missing_op("clamp without bounds")),
                (true, false) => single(x.clamp_min(a.operand(1, "min", no_min)?)),
                (false, true) => single(x.clamp_max(a.operand(2, "max", no_max)?)),
                _ => single(x.clamp(a.operand(1, "min", no_min)?, a.operand(2, "max", no_max)?)),
            }
        });
    ops.add(method!(clamp_min(operand1)))
        .case(nonsmooth("clamp_min", &[Signed(S)], |x| x[0].clamp_min(-0.5)))
        .golden(|a| single(a.tensor(0)?.clamp_min(a.operand(1, "min", Scalar::Int(0))?)));
    ops.add(method!(clamp_max(operand1)))
        .case(nonsmooth("clamp_max", &[Signed(S)], |x| x[0].clamp_max(0.5)))
        .golden(|a| single(a.tensor(0)?.clamp_max(a.operand(1, "max", Scalar::Int(0))?)));
    ops.add(method!(addcmul(operand1, operand2, float)))
        .case(
            smooth("addcmul", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| {
                x[0].addcmul(&x[1], &x[2], 0.7)
            })
            .with_bench_inputs(&[
                Signed(&[4096, 4096]),
                Signed(&[4096, 4096]),
                Positive(&[4096, 4096]),
            ]),
        )
        .golden(|a| single(a.tensor(0)?.addcmul(a.tensor(1)?, a.tensor(2)?, a.scalar_or(3, "value", 1)?)));
    ops.add(method!(addcdiv(operand1, operand2, float)))
        .case(
            smooth("addcdiv", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| {
                x[0].addcdiv(&x[1], &x[2], 0.7)
            })
            .with_bench_inputs(&[
                Signed(&[4096, 4096]),
                Signed(&[4096, 4096]),
                Positive(&[4096, 4096]),
            ]),
        )
        .golden(|a| single(a.tensor(0)?.addcdiv(a.tensor(1)?, a.tensor(2)?, a.scalar_or(3, "value", 1)?)));
    ops.add(method!(lerp(operand1, operand2)))
        .case(
            smooth("lerp", &[Signed(S), Signed(&[5]), Positive(&[3, 1])], |x| x[0].lerp(&x[1], &x[2]))
                .with_bench_inputs(&[Signed(&[4096, 4096]), Signed(&[4096, 4096]), Positive(&[4096, 4096])]),
        )
        .golden(|a| match a.opt_tensor(2, "weight") {
            Some(w) => single(a.tensor(0)?.lerp(a.tensor(1)?, w)),
            None => single(a.tensor(0)?.lerp(a.tensor(1)?, a.float(2, "weight", 0.0)?)),
        });
    ops.add(method!(to_dtype(dtype)))
        .case(nonsmooth("to_dtype", &[Signed(S)], |x| x[0].to_dtype(DType::BF16)?.to_dtype(x[0].dtype())))
        .golden_as("bfloat16", cast_call!(BF16))
        .golden_as("bool", cast_call!(Bool))
        .golden_as("byte", cast_call!(U8))
        .golden_as("double", cast_call!(F64))
        .golden_as("float", cast_call!(F32))
        .golden_as("half", cast_call!(F16))
        .golden_as("int", cast_call!(I32))
        .golden_as("long", cast_call!(I64))
        .golden_as("to", |a| {
            let x = a.tensor(0)?;
            // The type follows a device, is alone, or is that of another tensor. `non_blocking` and `copy` follow.
            let at = if a.string(1, "device", "").is_empty() { 1 } else { 2 };
            let dtype = match a.opt_tensor(1, "other") {
                Some(other) => other.dtype(),
                None => a.dtype(at, "dtype")?.unwrap_or(x.dtype()),
            };
            a.flag(at + 1, "non_blocking", false);
            a.flag(at + 2, "copy", false);
            single(x.to_dtype(dtype))
        });
    ops.add(method!(acosh()))
        .case(smooth("acosh", &[Positive(S)], |x| x[0].add(1.5)?.acosh()))
        .golden(unary_call!(acosh));
    ops.add(method!(softmin(int)))
        .case(smooth("softmin", &[Signed(S)], |x| x[0].softmin(-1)))
        .golden(|a| single(a.tensor_as_dtype_arg(0)?.softmin(a.dim(1, "dim", -1)?)));
    ops.add(method!(bitwise_not()))
        .case(nondifferentiable("bitwise_not", &[Bool(S)], |x| x[0].bitwise_not()))
        .golden(unary_call!(bitwise_not));
    ops.add(method!(bitwise_and(operand1)))
        .case(nondifferentiable("bitwise_and", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_and(&x[1])))
        .golden_as("__rand__", reversed_call!(bitwise_and))
        .golden(binary_call!(bitwise_and));
    ops.add(method!(bitwise_or(operand1)))
        .case(nondifferentiable("bitwise_or", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_or(&x[1])))
        .golden_as("__ror__", reversed_call!(bitwise_or))
        .golden(binary_call!(bitwise_or));
    ops.add(method!(bitwise_xor(operand1)))
        .case(nondifferentiable("bitwise_xor", &[Bool(S), Bool(&[5])], |x| x[0].bitwise_xor(&x[1])))
        .golden_as("__rxor__", reversed_call!(bitwise_xor))
        .golden(binary_call!(bitwise_xor));
    ops.add(method!(gcd(operand1)))
        .case(nondifferentiable("gcd", &[Index(S, 60), Index(&[5], 48)], |x| {
            to_int(&x[0])?.gcd(&to_int(&x[1])?)
        }))
        .golden(binary_call!(gcd));
    ops.add(method!(lcm(operand1)))
        .case(nondifferentiable("lcm", &[Index(S, 60), Index(&[5], 48)], |x| {
            to_int(&x[0])?.lcm(&to_int(&x[1])?)
        }))
        .golden(binary_call!(lcm));
    ops.add(method!(bitwise_left_shift(operand1)))
        .case(nondifferentiable("bitwise_left_shift", &[Index(S, 60), Index(&[5], 40)], |x| {
            to_int(&x[0])?.bitwise_left_shift(&to_int(&x[1])?)
        }))
        .golden(binary_call!(bitwise_left_shift));
    ops.add(method!(bitwise_right_shift(operand1)))
        .case(nondifferentiable("bitwise_right_shift", &[Index(S, 60), Index(&[5], 5)], |x| {
            to_int(&x[0])?.bitwise_right_shift(&to_int(&x[1])?)
        }))
        .golden(binary_call!(bitwise_right_shift));
    ops.add(method!(sign()))
        .case(nonsmooth("sign", &[Signed(S)], |x| x[0].sign()).elementwise())
        .golden_as("sgn", unary_call!(sign))
        .golden(unary_call!(sign));
}
