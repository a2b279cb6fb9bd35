//! Elementwise operations.

use super::{Table, missing, one};

macro_rules! unary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.op($name, |a| one(a.t(0)?.$method()));)*
    };
}

macro_rules! binary {
    ($t:ident, $($name:literal => $method:ident),* $(,)?) => {
        $($t.op($name, |a| match a.opt_t(1, "other") {
            Some(other) => one(a.t(0)?.$method(other)),
            None => one(a.t(0)?.$method(a.f(1, "other", 0.0)?)),
        });)*
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
        "nn.functional.silu" => silu, "clone" => copy, "lgamma" => lgamma, "nan_to_num" => nan_to_num, "nn.functional.selu" => selu,
        "nn.functional.mish" => mish, "nn.functional.logsigmoid" => logsigmoid, "nn.functional.softsign" => softsign,
        "nn.functional.tanhshrink" => tanhshrink, "nn.functional.hardsigmoid" => hardsigmoid,
        "nn.functional.hardswish" => hardswish);
    binary!(t, "mul" => mul, "true_divide" => div, "pow" => pow, "maximum" => maximum, "minimum" => minimum,
        "atan2" => atan2, "eq" => eq, "ne" => ne, "lt" => lt, "le" => le, "gt" => gt, "ge" => ge,
        "logical_and" => logical_and, "logical_or" => logical_or, "logical_xor" => logical_xor,
        "bitwise_and" => bitwise_and, "bitwise_or" => bitwise_or, "bitwise_xor" => bitwise_xor, "hypot" => hypot, "fmod" => fmod, "remainder" => remainder,
        "floor_divide" => floor_divide, "copysign" => copysign, "xlogy" => xlogy);
    t.op("add", |a| match a.f(9, "alpha", 1.0)? {
        1.0 => one(a.t(0)?.add(a.t(1)?)),
        alpha => one(a.t(0)?.addcmul(a.t(1)?, 1.0, alpha)),
    });
    t.op("sub", |a| match a.f(9, "alpha", 1.0)? {
        1.0 => one(a.t(0)?.sub(a.t(1)?)),
        alpha => one(a.t(0)?.addcmul(a.t(1)?, 1.0, -alpha)),
    });
    t.op("rsub", |a| match (a.f(9, "alpha", 1.0)?, a.opt_t(1, "other")) {
        (1.0, Some(other)) => one(a.t(0)?.rsub(other)),
        (1.0, None) => one(a.t(0)?.rsub(a.f(1, "other", 0.0)?)),
        (alpha, Some(other)) => one(other.addcmul(a.t(0)?, 1.0, -alpha)),
        (alpha, None) => one(a.t(0)?.mul(alpha)?.rsub(a.f(1, "other", 0.0)?)),
    });
    t.op("div", |a| match a.s(9, "rounding_mode", "") {
        "" => one(a.t(0)?.div(a.t(1)?)),
        "floor" => one(a.t(0)?.floor_divide(a.t(1)?)),
        _ => one(a.t(0)?.trunc_divide(a.t(1)?)),
    });
    t.op("addcmul", |a| one(a.t(0)?.addcmul(a.t(1)?, a.t(2)?, a.f(3, "value", 1.0)?)));
    t.op("addcdiv", |a| one(a.t(0)?.addcdiv(a.t(1)?, a.t(2)?, a.f(3, "value", 1.0)?)));
    t.op("lerp", |a| match a.opt_t(2, "weight") {
        Some(w) => one(a.t(0)?.lerp(a.t(1)?, w)),
        None => one(a.t(0)?.lerp(a.t(1)?, a.f(2, "weight", 0.0)?)),
    });
    t.op("clamp", |a| match (a.opt_t(1, "min"), a.opt_t(2, "max")) {
        (Some(min), Some(max)) => one(a.t(0)?.clamp(min, max)),
        (Some(min), None) => one(a.t(0)?.clamp(min, f64::INFINITY)),
        (None, Some(max)) => one(a.t(0)?.clamp(f64::NEG_INFINITY, max)),
        (None, None) => Err(missing("clamp without bounds")),
    });
    // The database calls it as a method of the first branch.
    t.op("where", |a| one(a.t(0)?.where_(a.t(1)?, a.t(2)?)));
    t.op("masked_fill", |a| match a.opt_t(2, "value") {
        Some(value) => one(a.t(0)?.masked_fill(a.t(1)?, value)),
        None => one(a.t(0)?.masked_fill(a.t(1)?, a.f(2, "value", 0.0)?)),
    });
    t.op("nn.functional.leaky_relu", |a| one(a.t(0)?.leaky_relu(a.f(1, "negative_slope", 0.01)?)));
    t.op("nn.functional.gelu", |a| match a.s(1, "approximate", "none") {
        "tanh" => one(a.t(0)?.gelu_tanh()),
        _ => one(a.t(0)?.gelu()),
    });
    t.op("clamp_min", |a| one(a.t(0)?.maximum(a.t(1)?)));
    t.op("clamp_max", |a| one(a.t(0)?.minimum(a.t(1)?)));
    t.op("round", |a| match a.i(1, "decimals", 0)? {
        0 => one(a.t(0)?.round()),
        d if d > 0 => one(a.t(0)?.mul(10f64.powi(d as i32))?.round()?.div(10f64.powi(d as i32))),
        d => one(a.t(0)?.div(10f64.powi(-d as i32))?.round()?.mul(10f64.powi(-d as i32))),
    });
    t.op("fill", |a| {
        let x = a.t(0)?;
        // The result depends on x by a factor of zero: its gradient is zero, as PyTorch's.
        one(x.where_(&x.detach().isnan()?.logical_and(false)?, a.f(1, "value", 0.0)?))
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
