// needs: base, exp, log, erf
//
// Activations and their derivatives, each with the minimum of exponentials. The error of a derivative is
// below 2e-7 absolute, or 1e-6 for mish; that of gelu_tanh below 2e-7 |x|.

// ln(1 + e^x). Error: 2.1 ulp. With e = e^-|x| and s = e / (2 + e), ln(1 + e) is 2 artanh(s), which is
// e - s (e - z p(z)) with z = s^2 (fit 2^-26).
fn m_log1pexp(x: f32) -> f32 {
    let e = m_exp_down(-abs(x));
    let s = e * m_rcp_normal(2.0 + e);
    let z = s * s;
    let p = ((0.268515 * z + 0.2823662) * z + 0.4000756) * z + 0.6666664;
    return m_or_nan(max(x, 0.0) + (e - s * (e - z * p)), x);
}

// ln(sigmoid(x)).
fn m_logsigmoid(x: f32) -> f32 { return -m_log1pexp(-x); }

// x sigmoid(x). Error: 3.5 ulp.
fn m_silu(x: f32) -> f32 { return x * m_sigmoid(x); }
// For an infinity the result is NaN, as in PyTorch: x times zero.
fn m_silu_grad(x: f32) -> f32 {
    let s = m_logistic(x);
    return m_nan_unless_finite(s.x + s.y * x, x);
}

// x times the cumulative normal distribution. Error: 4.5 ulp.
fn m_gelu(x: f32) -> f32 { return x * m_normcdf(x); }
fn m_gelu_grad(x: f32) -> f32 {
    let e = m_gauss(x);
    return m_normcdf_of(x, e) + x * (e * 0.3989423);
}

// The same for results rounded to 16 bits, with a relative error below 2^-16 unless they round to zero. Let a = |x|
// and e = e^(-x^2 / 2). The cumulative normal distribution at -a is e times a polynomial of 1 / (1 + 0.26 a) (fit
// 2^-20 for a <= 13.4).
fn m_approx_normcdf_of(x: f32, e: f32) -> f32 {
    let t = m_approx_rcp(1.0 + 0.26 * min(abs(x), 14.0));
    let p = ((((((-0.07263602 * t + 0.22808934) * t - 0.105629245) * t + 0.166189) * t + 0.07325285) * t
        + 0.10722406) * t + 0.103510485) * t;
    let tail = e * p;
    return select(1.0 - tail, tail, m_signbit(x));
}
fn m_approx_gelu(x: f32) -> f32 {
    return m_or_nan(x * m_approx_normcdf_of(x, m_approx_exp2(x * x * -0.72134752)), x);
}
fn m_approx_gelu_grad(x: f32) -> f32 {
    let e = m_approx_exp2(x * x * -0.72134752);
    return m_or_nan(m_approx_normcdf_of(x, e) + x * (e * 0.3989423), x);
}

// x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
fn m_gelu_tanh(x: f32) -> f32 { return x * m_sigmoid(x * (0.071354814 * (x * x) + 1.5957691)); }
// gelu_tanh and its derivative, from one exponential.
fn m_gelu_tanh_both(x: f32) -> vec2<f32> {
    let s = m_logistic(x * (0.071354814 * (x * x) + 1.5957691));
    // Beyond 30 the derivative of the sigmoid is zero, and its factor must not become infinite.
    let c = clamp(x, -30.0, 30.0);
    let slope = s.x + s.y * (c * (0.21406444 * (c * c) + 1.5957691));
    return vec2<f32>(m_or_nan(x * s.x, x), m_or_nan(slope, x));
}
// Both for results rounded to 16 bits, with a relative error below 2^-17 unless they round to zero.
fn m_approx_gelu_tanh_both(x: f32) -> vec2<f32> {
    let c = clamp(x, -30.0, 30.0);
    // 2^-|u|, where u is log2(e) times the argument of the sigmoid.
    let u = c * (0.10294324 * (c * c) + 2.3022082);
    let e = m_approx_exp2(-abs(u));
    let d = m_approx_rcp(1.0 + e);
    let s = select(d, e * d, m_signbit(x));
    let slope = s + ((e * d) * d) * (c * (0.21406444 * (c * c) + 1.5957691));
    return select(vec2<f32>(x * s, slope), vec2<f32>(x), m_isnan(x));
}
fn m_approx_gelu_tanh(x: f32) -> f32 { return m_approx_gelu_tanh_both(x).x; }
fn m_approx_gelu_tanh_grad(x: f32) -> f32 { return m_approx_gelu_tanh_both(x).y; }
fn m_gelu_tanh_grad(x: f32) -> f32 { return m_gelu_tanh_both(x).y; }

// tanh(ln(1 + e^x)), a quotient of polynomials in e^-|x|.
fn m_mish_gate(x: f32) -> f32 {
    let n = m_exp_down(-abs(x));
    let p = select(1.0 + 2.0 * n, n * (n + 2.0), m_signbit(x));
    return m_or_nan(p * m_rcp_normal(p + 2.0 * select(n * n, 1.0, m_signbit(x))), x);
}
// x tanh(ln(1 + e^x)). Error: 4.3 ulp.
fn m_mish(x: f32) -> f32 { return x * m_mish_gate(x); }
fn m_mish_grad(x: f32) -> f32 {
    let t = m_mish_gate(x);
    return t + (x * m_sigmoid(x)) * (1.0 - t * t);
}
