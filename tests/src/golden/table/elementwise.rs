//! Elementwise operations.

use forebay::ops::{Operand, Scalar};

use super::{Table, missing, one};

macro_rules! unary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.op($name, |a| one(a.t(0)?.$method()));)*
    };
}

macro_rules! binary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.op($name, |a| one(a.tensor_or_number(0, 1)?.$method(a.operand(1, "other", Scalar::Int(0))?)));)*
    };
}

pub(super) fn register(t: &mut Table) {
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
    t.op("mvlgamma", |a| one(a.t(0)?.mvlgamma(usize::try_from(a.i(1, "p", 1)?)?)));
    t.op("heaviside", |a| one(a.t(0)?.heaviside(a.operand(1, "values", Scalar::Int(0))?)));
    t.op("logit", |a| one(a.t(0)?.logit(a.get(1, "eps").is_some().then(|| a.f(1, "eps", 0.0)).transpose()?)));
    t.op("polygamma", |a| {
        // The database calls it as a function of the order, or as a method.
        one(match a.get(0, "n").is_some_and(|n| n.is_number()) {
            true => a.t(1)?.polygamma(a.i(0, "n", 0)? as usize),
            false => a.t(0)?.polygamma(a.i(1, "n", 0)? as usize),
        })
    });
    t.op("nn.functional.celu", |a| one(a.t(0)?.celu(a.f(1, "alpha", 1.0)?)));
    t.op("add", |a| {
        let (x, other) = (a.tensor_or_number(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match a.f(9, "alpha", 1.0)? {
            1.0 => one(x.add(other)),
            alpha => one(x.addcmul(other, 1, alpha)),
        }
    });
    t.op("sub", |a| {
        let (x, other) = (a.tensor_or_number(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match a.f(9, "alpha", 1.0)? {
            1.0 => one(x.sub(other)),
            alpha => one(x.addcmul(other, 1, -alpha)),
        }
    });
    t.op("rsub", |a| {
        let (x, other) = (a.tensor_or_number(0, 1)?, a.operand(1, "other", Scalar::Int(0))?);
        match (a.scalar(9, "alpha")?.unwrap_or(Scalar::Int(1)), other) {
            (Scalar::Int(1), other) => one(x.rsub(other)),
            (_, Operand::Tensor(other)) => one(other.addcmul(&x, 1, -a.f(9, "alpha", 1.0)?)),
            (alpha, other) => one(x.mul(Operand::Scalar(alpha))?.rsub(other)),
        }
    });
    t.op("div", |a| {
        let (x, other) = (a.tensor_or_number(0, 1)?, a.operand(1, "other", Scalar::Int(1))?);
        match a.s(9, "rounding_mode", "") {
            "" => one(x.div(other)),
            "floor" => one(x.floor_divide(other)),
            _ => one(x.trunc_divide(other)),
        }
    });
    t.op("nan_to_num", |a| match (a.get(1, "nan"), a.get(2, "posinf"), a.get(3, "neginf")) {
        (None, None, None) => one(a.t(0)?.nan_to_num()),
        _ => {
            let most = if a.t(0)?.dtype() == forebay::dtype::DType::F64 { f64::MAX } else { f32::MAX.into() };
            let (nan, posinf, neginf) =
                (a.f(1, "nan", 0.0)?, a.f(2, "posinf", most)?, a.f(3, "neginf", -most)?);
            one(a.t(0)?.nan_to_num_with(nan, posinf, neginf))
        }
    });
    t.op("addcmul", |a| one(a.t(0)?.addcmul(a.t(1)?, a.t(2)?, a.f(3, "value", 1.0)?)));
    t.op("addcdiv", |a| one(a.t(0)?.addcdiv(a.t(1)?, a.t(2)?, a.f(3, "value", 1.0)?)));
    t.op("lerp", |a| match a.opt_t(2, "weight") {
        Some(w) => one(a.t(0)?.lerp(a.t(1)?, w)),
        None => one(a.t(0)?.lerp(a.t(1)?, a.f(2, "weight", 0.0)?)),
    });
    t.op("clamp", |a| {
        let (x, least, most) = (a.t(0)?, Scalar::Float(f64::NEG_INFINITY), Scalar::Float(f64::INFINITY));
        match (a.get(1, "min").is_some(), a.get(2, "max").is_some()) {
            (false, false) => Err(missing("clamp without bounds")),
            (true, false) => one(x.clamp_min(a.operand(1, "min", least)?)),
            (false, true) => one(x.clamp_max(a.operand(2, "max", most)?)),
            _ => one(x.clamp(a.operand(1, "min", least)?, a.operand(2, "max", most)?)),
        }
    });
    // The database calls it as a method of the first branch.
    t.op("where", |a| one(a.tensor_or_number(0, 2)?.where_(a.t(1)?, a.operand(2, "other", Scalar::Int(0))?)));
    t.op("masked_fill", |a| one(a.t(0)?.masked_fill(a.t(1)?, a.operand(2, "value", Scalar::Int(0))?)));
    t.op("nn.functional.leaky_relu", |a| one(a.t(0)?.leaky_relu(a.f(1, "negative_slope", 0.01)?)));
    t.op("nn.functional.gelu", |a| match a.s(1, "approximate", "none") {
        "tanh" => one(a.t(0)?.gelu_tanh()),
        "none" => one(a.t(0)?.gelu()),
        other => anyhow::bail!("gelu by {other}"),
    });
    t.op("clamp_min", |a| one(a.t(0)?.clamp_min(a.operand(1, "min", Scalar::Int(0))?)));
    t.op("clamp_max", |a| one(a.t(0)?.clamp_max(a.operand(1, "max", Scalar::Int(0))?)));
    t.op("round", |a| one(a.t(0)?.round_decimals(a.i(1, "decimals", 0)? as i32)));
    t.op("fill", |a| {
        // The result depends on x by a factor of zero: its gradient is zero, as PyTorch's.
        let x = a.t(0)?.copy()?;
        x.fill_(a.operand(1, "value", Scalar::Int(0))?)?;
        Ok(vec![x])
    });
    t.op("nn.functional.elu", |a| one(a.t(0)?.elu(a.f(1, "alpha", 1.0)?)));
    t.op("nn.functional.softplus", |a| {
        one(a.t(0)?.softplus(a.f(1, "beta", 1.0)?, a.f(2, "threshold", 20.0)?))
    });
    t.op("nn.functional.softshrink", |a| one(a.t(0)?.softshrink(a.f(1, "lambd", 0.5)?)));
    t.op("nn.functional.hardshrink", |a| one(a.t(0)?.hardshrink(a.f(1, "lambd", 0.5)?)));
    t.op("nn.functional.hardtanh", |a| {
        one(a.t(0)?.hardtanh(a.f(1, "min_val", -1.0)?, a.f(2, "max_val", 1.0)?))
    });
    t.op("nn.functional.threshold", |a| {
        one(a.t(0)?.threshold(a.f(1, "threshold", 0.0)?, a.f(2, "value", 0.0)?))
    });
    t.op("nn.functional.prelu", |a| match a.opt_t(1, "weight") {
        Some(w) => one(a.t(0)?.prelu(w)),
        None => Err(missing("prelu without a weight")),
    });
    t.op("nn.functional.glu", |a| one(a.t(0)?.glu(a.i(1, "dim", -1)? as isize)));
}
