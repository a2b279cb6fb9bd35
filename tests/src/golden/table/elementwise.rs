//! Elementwise operations.

use forebay::ops::{NanToNumOptions, Operand, Scalar};

use super::{OpTable, missing_op, single};

macro_rules! unary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.register($name, |a| single(a.tensor(0)?.$method()));)*
    };
}

macro_rules! binary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.register($name, |a| single(a.tensor_or_scalar(0, 1)?.$method(a.operand(1, "other", Scalar::Int(0))?)));)*
    };
}

pub(super) fn register(t: &mut OpTable) {
    unary!(t, "abs" => abs, "acos" => acos, "asin" => asin, "atan" => atan, "ceil" => ceil, "cos" => cos, "cosh" => cosh,
        "erf" => erf, "erfc" => erfc, "erfinv" => erfinv, "exp" => exp, "exp2" => exp2, "expm1" => expm1,
        "floor" => floor, "frac" => frac, "isfinite" => isfinite, "isinf" => isinf, "isnan" => isnan, "log" => log,
        "log10" => log10, "log1p" => log1p, "log2" => log2, "logical_not" => logical_not, "neg" => neg,
        "rad2deg" => rad2deg, "rsqrt" => rsqrt, "sgn" => sign, "sigmoid" => sigmoid, "sign" => sign, "sin" => sin,
        "sinh" => sinh, "sqrt" => sqrt, "square" => square, "tan" => tan, "tanh" => tanh, "trunc" => trunc,
        "bitwise_not" => bitwise_not, "nn.functional.relu" => relu, "nn.functional.relu6" => relu6,
        "nn.functional.silu" => silu, "clone" => copy, "lgamma" => lgamma, "nn.functional.selu" => selu,
        "nn.functional.mish" => mish, "nn.functional.logsigmoid" => logsigmoid, "nn.functional.softsign" => softsign,
        "nn.functional.tanhshrink" => tanhshrink, "nn.functional.hardsigmoid" => hardsigmoid,
        "nn.functional.hardswish" => hardswish, "acosh" => acosh, "asinh" => asinh, "atanh" => atanh, "digamma" => digamma,
        "reciprocal" => reciprocal, "deg2rad" => deg2rad, "sinc" => sinc, "isposinf" => isposinf, "isneginf" => isneginf,
        "signbit" => signbit, "special.ndtr" => ndtr, "special.entr" => entr,
        "special.ndtri" => ndtri, "special.log_ndtr" => log_ndtr, "special.erfcx" => erfcx, "i0" => i0, "special.i0e" => i0e,
        "special.i1" => i1, "special.i1e" => i1e);
    binary!(t, "mul" => mul, "true_divide" => div, "pow" => pow, "maximum" => maximum, "minimum" => minimum,
        "atan2" => atan2, "eq" => eq, "ne" => ne, "lt" => lt, "le" => le, "gt" => gt, "ge" => ge,
        "logical_and" => logical_and, "logical_or" => logical_or, "logical_xor" => logical_xor,
        "bitwise_and" => bitwise_and, "bitwise_or" => bitwise_or, "bitwise_xor" => bitwise_xor, "hypot" => hypot, "fmod" => fmod, "remainder" => remainder,
        "floor_divide" => floor_divide, "copysign" => copysign, "xlogy" => xlogy, "fmax" => fmax, "fmin" => fmin,
        "logaddexp" => logaddexp, "logaddexp2" => logaddexp2, "special.xlog1py" => xlog1py,
        "special.zeta" => zeta, "ldexp" => ldexp, "gcd" => gcd, "lcm" => lcm, "bitwise_left_shift" => bitwise_left_shift,
        "bitwise_right_shift" => bitwise_right_shift);
    t.register("mvlgamma", |a| single(a.tensor(0)?.mvlgamma(usize::try_from(a.int(1, "p", 1)?)?)));
    t.register("heaviside", |a| single(a.tensor(0)?.heaviside(a.operand(1, "values", Scalar::Int(0))?)));
    t.register("logit", |a| {
        single(a.tensor(0)?.logit(a.get(1, "eps").is_some().then(|| a.float(1, "eps", 0.0)).transpose()?))
    });
    t.register("polygamma", |a| {
        // The database calls the function with the order first, and the method with the tensor first.
        single(match a.get(0, "n").is_some_and(|n| n.is_number()) {
            true => a.tensor(1)?.polygamma(a.int(0, "n", 0)? as usize),
            false => a.tensor(0)?.polygamma(a.int(1, "n", 0)? as usize),
        })
    });
    t.register("nn.functional.celu", |a| single(a.tensor(0)?.celu(a.float(1, "alpha", 1.0)?)));
    t.register("add", |a| {
        let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match a.float(9, "alpha", 1.0)? {
            1.0 => single(x.add(other)),
            alpha => single(x.addcmul(other, 1, alpha)),
        }
    });
    t.register("sub", |a| {
        let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match a.float(9, "alpha", 1.0)? {
            1.0 => single(x.sub(other)),
            alpha => single(x.addcmul(other, 1, -alpha)),
        }
    });
    t.register("rsub", |a| {
        let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match (a.scalar(9, "alpha")?.unwrap_or(Scalar::Int(1)), other) {
            (Scalar::Int(1), other) => single(x.rsub(other)),
            (_, Operand::Tensor(other)) => single(other.addcmul(&x, 1, -a.float(9, "alpha", 1.0)?)),
            (alpha, other) => single(x.mul(Operand::Scalar(alpha))?.rsub(other)),
        }
    });
    t.register("div", |a| {
        let (x, other) = (a.tensor_or_scalar(0, 1)?, a.operand(1, "other", Scalar::Int(1))?);
        match a.string(9, "rounding_mode", "") {
            "" => single(x.div(other)),
            "floor" => single(x.floor_divide(other)),
            _ => single(x.trunc_divide(other)),
        }
    });
    t.register("nan_to_num", |a| match (a.get(1, "nan"), a.get(2, "posinf"), a.get(3, "neginf")) {
        (None, None, None) => single(a.tensor(0)?.nan_to_num()),
        _ => {
            let max =
                if a.tensor(0)?.dtype() == forebay::dtype::DType::F64 { f64::MAX } else { f32::MAX.into() };
            let (nan, posinf, neginf) =
                (a.float(1, "nan", 0.0)?, a.float(2, "posinf", max)?, a.float(3, "neginf", -max)?);
            single(a.tensor(0)?.nan_to_num_with(&NanToNumOptions {
                nan,
                posinf: Some(posinf),
                neginf: Some(neginf),
            }))
        }
    });
    t.register("addcmul", |a| {
        single(a.tensor(0)?.addcmul(a.tensor(1)?, a.tensor(2)?, a.float(3, "value", 1.0)?))
    });
    t.register("addcdiv", |a| {
        single(a.tensor(0)?.addcdiv(a.tensor(1)?, a.tensor(2)?, a.float(3, "value", 1.0)?))
    });
    t.register("lerp", |a| match a.opt_tensor(2, "weight") {
        Some(w) => single(a.tensor(0)?.lerp(a.tensor(1)?, w)),
        None => single(a.tensor(0)?.lerp(a.tensor(1)?, a.float(2, "weight", 0.0)?)),
    });
    t.register("clamp", |a| {
        let (x, no_min, no_max) =
            (a.tensor(0)?, Scalar::Float(f64::NEG_INFINITY), Scalar::Float(f64::INFINITY));
        match (a.get(1, "min").is_some(), a.get(2, "max").is_some()) {
            (false, false) => Err(missing_op("clamp without bounds")),
            (true, false) => single(x.clamp_min(a.operand(1, "min", no_min)?)),
            (false, true) => single(x.clamp_max(a.operand(2, "max", no_max)?)),
            _ => single(x.clamp(a.operand(1, "min", no_min)?, a.operand(2, "max", no_max)?)),
        }
    });
    // The database calls it as a method of the first branch.
    t.register("where", |a| {
        single(a.tensor_or_scalar(0, 2)?.where_(a.tensor(1)?, a.operand(2, "other", Scalar::Int(0))?))
    });
    t.register("masked_fill", |a| {
        single(a.tensor(0)?.masked_fill(a.tensor(1)?, a.operand(2, "value", Scalar::Int(0))?))
    });
    t.register("nn.functional.leaky_relu", |a| {
        single(a.tensor(0)?.leaky_relu(a.float(1, "negative_slope", 0.01)?))
    });
    t.register("nn.functional.gelu", |a| match a.string(1, "approximate", "none") {
        "tanh" => single(a.tensor(0)?.gelu_tanh()),
        "none" => single(a.tensor(0)?.gelu()),
        other => anyhow::bail!("gelu by {other}"),
    });
    t.register("clamp_min", |a| single(a.tensor(0)?.clamp_min(a.operand(1, "min", Scalar::Int(0))?)));
    t.register("clamp_max", |a| single(a.tensor(0)?.clamp_max(a.operand(1, "max", Scalar::Int(0))?)));
    t.register("round", |a| single(a.tensor(0)?.round_decimals(a.int(1, "decimals", 0)? as i32)));
    t.register("fill", |a| {
        // The result depends on x by a factor of zero, so its gradient is zero, as in PyTorch.
        let x = a.tensor(0)?.copy()?;
        x.fill_(a.operand(1, "value", Scalar::Int(0))?)?;
        Ok(vec![x])
    });
    t.register("nn.functional.elu", |a| single(a.tensor(0)?.elu(a.float(1, "alpha", 1.0)?)));
    t.register("nn.functional.softplus", |a| {
        single(a.tensor(0)?.softplus(a.float(1, "beta", 1.0)?, a.float(2, "threshold", 20.0)?))
    });
    t.register("nn.functional.softshrink", |a| single(a.tensor(0)?.softshrink(a.float(1, "lambd", 0.5)?)));
    t.register("nn.functional.hardshrink", |a| single(a.tensor(0)?.hardshrink(a.float(1, "lambd", 0.5)?)));
    t.register("nn.functional.hardtanh", |a| {
        single(a.tensor(0)?.hardtanh(a.float(1, "min_val", -1.0)?, a.float(2, "max_val", 1.0)?))
    });
    t.register("nn.functional.threshold", |a| {
        single(a.tensor(0)?.threshold(a.float(1, "threshold", 0.0)?, a.float(2, "value", 0.0)?))
    });
    t.register("nn.functional.prelu", |a| match a.opt_tensor(1, "weight") {
        Some(w) => single(a.tensor(0)?.prelu(w)),
        None => Err(missing_op("prelu without a weight")),
    });
    t.register("nn.functional.glu", |a| single(a.tensor(0)?.glu(a.int(1, "dim", -1)? as isize)));
}
