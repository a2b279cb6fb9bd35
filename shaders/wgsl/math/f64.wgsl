// needs: base, f64_exp_log
//
// The functions of the other files for f64, on devices that support it: `m_d_exp` corresponds to `m_exp`.
// `base` has the rules. Errors are a few ulp, unless a function states another error. The coefficients of erf
// and of the arc tangent are those of FreeBSD's msun (Sun Microsystems, 1993: "Permission to use, copy,
// modify, and distribute this software is freely granted, provided that this notice is preserved").

fn m_d_isnan(x: f64) -> bool { return m_isnan(f32(x)); }
fn m_d_isfinite(x: f64) -> bool { return m_isfinite64(x); }
fn m_d_isinf(x: f64) -> bool { return !m_d_isfinite(x) & !m_d_isnan(x); }
fn m_d_nan() -> f64 { return f64(m_nan()); }
fn m_d_inf() -> f64 { return f64(m_inf()); }
fn m_d_copysign(x: f64, s: f64) -> f64 { return select(abs(x), -abs(x), m_signbit(f32(s))); }
fn m_d_iszero(x: f64) -> bool { return x == 0.0; }
fn m_d_signbit(x: f64) -> bool { return m_signbit(f32(x)); }
// Exact, like `mod`: b is doubled up to a, halved again, and subtracted where it fits; no step rounds.
fn m_d_fmod(a: f64, b: f64) -> f64 {
    if (m_d_isnan(b) | (b == 0.0) | !m_d_isfinite(a)) { return m_d_nan(); }
    if (m_d_isinf(b) | (abs(a) < abs(b))) { return a; }
    var r = abs(a);
    var part = abs(b);
    while (part <= r * 0.5) { part *= 2.0; }
    while (part >= abs(b)) {
        if (r >= part) { r -= part; }
        part *= 0.5;
    }
    return m_d_copysign(r, a);
}
fn m_d_remainder(a: f64, b: f64) -> f64 {
    let r = m_d_fmod(a, b);
    return select(r, r + b, !m_d_iszero(r) & (m_d_signbit(r) != m_d_signbit(b)));
}
fn m_d_floor_div(a: f64, b: f64) -> f64 {
    let r = m_d_fmod(a, b);
    let borrow = !m_d_iszero(r) & (m_d_signbit(r) != m_d_signbit(b));
    let q = (a - r) / b - select(f64(0.0), f64(1.0), borrow);
    let below = floor(q);
    let whole = select(below, below + 1.0, q - below > 0.5);
    let zero = select(f64(0.0), f64(m_from_bits(0x80000000u)), m_d_signbit(a) != m_d_signbit(b));
    return select(select(select(whole, zero, q == 0.0), m_d_nan(), m_d_isnan(r)), a / b, m_d_iszero(b));
}
fn m_d_trunc_div(a: f64, b: f64) -> f64 {
    let q = a / b;
    let near = select(floor(q + 0.5), q, abs(q) >= 0x1p52);
    return select(trunc(q), near, m_d_iszero(m_d_fmod(a, b)));
}
fn m_d_rsqrt(x: f64) -> f64 { return 1.0 / sqrt(x); }

fn m_d_exp(x: f64) -> f64 { return m_exp64(x); }
fn m_d_log(x: f64) -> f64 { return m_log64(x); }
// 2^k times e^(ln(2) f) for x = k + f: the difference is exact.
fn m_d_exp2(x: f64) -> f64 {
    let c = clamp(x, -1080.0, 1030.0);
    let k = round(c);
    let half = i32(k) / 2i;
    return select(m_exp64((c - k) * 0.6931471805599453) * m_pow2_64(half) * m_pow2_64(i32(k) - half), x, m_d_isnan(x));
}
fn m_d_log2(x: f64) -> f64 { return m_log64(x) * 1.4426950408889634; }
fn m_d_log10(x: f64) -> f64 { return m_log64(x) * 0.4342944819032518; }
// The series near 0, where e^x - 1 would cancel.
fn m_d_expm1(x: f64) -> f64 {
    let r = clamp(x, -0.5, 0.5);
    let series = ((((((((((((((((2.8114572543455206e-15 * r + 4.779477332387385e-14) * r
        + 7.647163731819816e-13) * r + 1.1470745597729725e-11) * r + 1.6059043836821613e-10) * r
        + 2.08767569878681e-09) * r + 2.505210838544172e-08) * r + 2.755731922398589e-07) * r
        + 2.7557319223985893e-06) * r + 2.48015873015873e-05) * r + 0.0001984126984126984) * r
        + 0.001388888888888889) * r + 0.008333333333333333) * r + 0.041666666666666664) * r
        + 0.16666666666666666) * r + 0.5) * r + 1.0) * r;
    return select(m_exp64(x) - 1.0, series, abs(x) < 0.5);
}
// Near 0 as 2 atanh(x / (2 + x)).
fn m_d_log1p(x: f64) -> f64 {
    let c = clamp(x, -0.375, 0.5);
    let s = c / (2.0 + c);
    let z = s * s;
    let series = (((((((((((((0.07407407407407407 * z + 0.08) * z + 0.08695652173913043) * z
        + 0.09523809523809523) * z + 0.10526315789473684) * z + 0.11764705882352941) * z + 0.13333333333333333) * z
        + 0.15384615384615385) * z + 0.18181818181818182) * z + 0.2222222222222222) * z + 0.2857142857142857) * z
        + 0.4) * z + 0.6666666666666666) * z + 2.0) * s;
    return select(m_log64(1.0 + x), series, (x > -0.375) & (x < 0.5));
}
fn m_d_xlogy(x: f64, y: f64) -> f64 { return select(x * m_log64(y), 0.0, (x == 0.0) & !m_d_isnan(y)); }

fn m_d_sigmoid(x: f64) -> f64 {
    let e = m_exp64(-abs(x));
    return select(1.0 / (1.0 + e), e / (1.0 + e), x < 0.0);
}
fn m_d_tanh(x: f64) -> f64 {
    let e = m_d_expm1(-2.0 * abs(x));
    return m_d_copysign(-e / (2.0 + e), x);
}
// Half of e^x, as the square of e^(x/2): e^x itself overflows beyond 700.
fn m_d_half_exp(x: f64) -> f64 {
    let h = m_exp64(0.5 * x);
    return 0.5 * h * h;
}
fn m_d_sinh(x: f64) -> f64 {
    let a = abs(x);
    let e = m_d_expm1(min(a, 700.0));
    return m_d_copysign(select(0.5 * (e + e / (e + 1.0)), m_d_half_exp(a), (a > 700.0) | m_d_isnan(x)), x);
}
fn m_d_cosh(x: f64) -> f64 {
    let a = abs(x);
    let e = m_exp64(min(a, 700.0));
    return select(0.5 * (e + 1.0 / e), m_d_half_exp(a), (a > 700.0) | m_d_isnan(x));
}
fn m_d_asinh(x: f64) -> f64 {
    let a = abs(x);
    let c = min(a, 1e150);
    let near = m_d_log1p(c + c * c / (1.0 + sqrt(c * c + 1.0)));
    return m_d_copysign(select(near, m_log64(a) + 0.6931471805599453, (a > 1e150) | m_d_isnan(x)), x);
}
fn m_d_acosh(x: f64) -> f64 {
    let t = min(x, 1e150) - 1.0;
    return select(m_d_log1p(t + sqrt(2.0 * t + t * t)), m_log64(x) + 0.6931471805599453, (x > 1e150) | m_d_isnan(x));
}
fn m_d_atanh(x: f64) -> f64 { return 0.5 * m_d_copysign(m_d_log1p(2.0 * abs(x) / (1.0 - abs(x))), x); }
fn m_d_hypot(a: f64, b: f64) -> f64 {
    let hi = max(abs(a), abs(b));
    let lo = min(abs(a), abs(b));
    let r = lo / hi;
    let special = select(m_d_nan(), m_d_inf(), m_d_isinf(a) | m_d_isinf(b));
    return select(select(hi * sqrt(1.0 + r * r), 0.0, hi == 0.0), special, !(m_d_isfinite(a) & m_d_isfinite(b)));
}

// For x >= 0: the argument is reduced to within 7/16 of 0, and the reduction is added back.
fn m_d_atan_positive(a: f64) -> f64 {
    var x = a;
    var hi = 0.0lf;
    if a >= 2.4375 { x = -1.0 / a; hi = 1.5707963267948966; }
    else if a >= 1.1875 { x = (a - 1.5) / (1.0 + 1.5 * a); hi = 0.982793723247329; }
    else if a >= 0.6875 { x = (a - 1.0) / (a + 1.0); hi = 0.7853981633974483; }
    else if a >= 0.4375 { x = (2.0 * a - 1.0) / (2.0 + a); hi = 0.4636476090008061; }
    let z = x * x;
    return hi + (x - x * (z * ((((((((((0.016285820115365782 * z + -0.036531572744216916) * z
        + 0.049768779946159324) * z + -0.058335701337905735) * z + 0.06661073137387531) * z
        + -0.0769187620504483) * z + 0.09090887133436507) * z + -0.11111110405462356) * z + 0.14285714272503466) * z
        + -0.19999999999876483) * z + 0.3333333333333293)));
}
fn m_d_atan(x: f64) -> f64 { return select(m_d_copysign(m_d_atan_positive(abs(x)), x), x, m_d_isnan(x)); }
fn m_d_atan2(y: f64, x: f64) -> f64 {
    let ay = abs(y);
    let ax = abs(x);
    // Two zeros give 0, two infinities a quarter of pi.
    let ratio = select(select(ay / ax, 0.0, ay == 0.0), 1.0, m_d_isinf(x) & m_d_isinf(y));
    let first = select(m_d_atan_positive(ratio), 1.5707963267948966, (ax == 0.0) & (ay != 0.0));
    let angle = select(first, 3.141592653589793 - first, m_signbit(f32(x)));
    return select(m_d_copysign(angle, y), m_d_nan(), m_d_isnan(x) | m_d_isnan(y));
}
fn m_d_asin(x: f64) -> f64 {
    return select(m_d_atan2(x, sqrt((1.0 - x) * (1.0 + x))), m_d_nan(), (abs(x) > 1.0) | m_d_isnan(x));
}
fn m_d_acos(x: f64) -> f64 {
    return select(m_d_atan2(sqrt((1.0 - x) * (1.0 + x)), x), m_d_nan(), (abs(x) > 1.0) | m_d_isnan(x));
}

// ln(erfc(a) a) + a^2 + 0.5625 for a >= 1.25.
fn m_d_erfc_rest(a: f64) -> f64 {
    let s = 1.0 / (a * a);
    if a < 2.857142857142857 {
        return (((((((-9.814329344169145 * s + -81.2874355063066) * s + -184.60509290671104) * s
            + -162.39666946257347) * s + -62.375332450326006) * s + -10.558626225323291) * s
            + -0.6938585727071818) * s + -0.009864944034847148) / ((((((((-0.0604244152148581 * s
            + 6.570249770319282) * s + 108.63500554177944) * s + 429.00814002756783) * s + 645.3872717332679) * s
            + 434.56587747522923) * s + 137.65775414351904) * s + 19.651271667439257) * s + 1.0);
    }
    return ((((((-483.5191916086514 * s + -1025.0951316110772) * s + -637.5664433683896) * s
        + -160.63638485582192) * s + -17.757954917754752) * s + -0.799283237680523) * s
        + -0.0098649429247001) / (((((((-22.44095244658582 * s + 474.52854120695537) * s + 2553.0504064331644) * s
        + 3199.8582195085955) * s + 1536.729586084437) * s + 325.7925129965739) * s + 30.33806074348246) * s + 1.0);
}
// erfc(a) for a >= 0.84375.
fn m_d_erfc_far(a: f64) -> f64 {
    if a < 1.25 {
        let s = a - 1.0;
        let p = ((((((-0.002166375594868791 * s + 0.035478304325618236) * s + -0.11089469428239668) * s
            + 0.31834661990116175) * s + -0.3722078760357013) * s + 0.41485611868374833) * s
            + -0.0023621185607526594);
        let q = ((((((0.011984499846799107 * s + 0.01363708391202905) * s + 0.12617121980876164) * s
            + 0.07182865441419627) * s + 0.540397917702171) * s + 0.10642088040084423) * s + 1.0);
        return 0.15493708848953247 - p / q;
    }
    let c = min(a, 28.0);
    // The square of 24 bits is exact.
    let z = f64(f32(c));
    return m_exp64(-z * z - 0.5625) * m_exp64((z - c) * (z + c) + m_d_erfc_rest(c)) / c;
}
// erf(x) / x - 1 for |x| below 0.84375.
fn m_d_erf_near(x: f64) -> f64 {
    let z = x * x;
    let p = ((((-2.3763016656650163e-05 * z + -0.005770270296489442) * z + -0.02848174957559851) * z
        + -0.3250421072470015) * z + 0.12837916709551256);
    return p / (((((-3.960228278775368e-06 * z + 0.00013249473800432164) * z + 0.005081306281875766) * z
        + 0.0650222499887673) * z + 0.39791722395915535) * z + 1.0);
}
fn m_d_erf(x: f64) -> f64 {
    let a = abs(x);
    if a < 0.84375 { return x + x * m_d_erf_near(x); }
    return select(m_d_copysign(1.0 - m_d_erfc_far(a), x), x, m_d_isnan(x));
}
fn m_d_erfc(x: f64) -> f64 {
    let a = abs(x);
    if a < 0.84375 { return (1.0 - x) - x * m_d_erf_near(x); }
    let far = m_d_erfc_far(a);
    return select(select(far, 2.0 - far, x < 0.0), x, m_d_isnan(x));
}
// Giles' approximation for f32 (2010), and three Newton steps, on the more accurate of erf and erfc.
fn m_d_erfinv(x: f64) -> f64 {
    let a = min(abs(x), 1.0);
    let w = -m_log64((1.0 - a) * (1.0 + a));
    let near = w - 2.5;
    let far = sqrt(max(w, 5.0)) - 3.0;
    var y = a * select((((((((-0.000200214257 * far + 0.000100950558) * far + 0.00134934322) * far
        - 0.00367342844) * far + 0.00573950773) * far - 0.0076224613) * far + 0.00943887047) * far
        + 1.00167406) * far + 2.83297682, (((((((2.81022636e-08 * near + 3.43273939e-07) * near
        - 3.5233877e-06) * near - 4.39150654e-06) * near + 0.00021858087) * near - 0.00125372503) * near
        - 0.00417768164) * near + 0.246640727) * near + 1.50140941, w < 5.0);
    y = min(y, 6.0);
    for (var step = 0i; step < 3i; step++) {
        let off = select(m_d_erf(y) - a, (1.0 - a) - m_d_erfc(y), a > 0.5);
        y -= off / (1.1283791670955126 * m_exp64(-y * y));
    }
    let special = select(m_d_nan(), m_d_inf(), abs(x) == 1.0);
    return m_d_copysign(select(special, y, a < 1.0), x);
}

// sin and cos of pi x.
fn m_d_sinpi(x: f64) -> f64 {
    let k = round(x);
    let r = (x - k) * 3.141592653589793;
    let z = r * r;
    let s = (((((((((((-3.868170170630684e-23 * z + 1.9572941063391263e-20) * z + -8.22063524662433e-18) * z
        + 2.8114572543455206e-15) * z + -7.647163731819816e-13) * z + 1.6059043836821613e-10) * z
        + -2.505210838544172e-08) * z + 2.7557319223985893e-06) * z + -0.0001984126984126984) * z
        + 0.008333333333333333) * z + -0.16666666666666666) * z + 1.0) * r;
    return select(s, -s, k * 0.5 != floor(k * 0.5));
}
fn m_d_cospi(x: f64) -> f64 {
    let k = round(x);
    let r = (x - k) * 3.141592653589793;
    let z = r * r;
    let c = (((((((((((-8.896791392450574e-22 * z + 4.110317623312165e-19) * z + -1.5619206968586225e-16) * z
        + 4.779477332387385e-14) * z + -1.1470745597729725e-11) * z + 2.08767569878681e-09) * z
        + -2.755731922398589e-07) * z + 2.48015873015873e-05) * z + -0.001388888888888889) * z
        + 0.041666666666666664) * z + -0.5) * z + 1.0);
    return select(c, -c, k * 0.5 != floor(k * 0.5));
}
// Error: 1e-14 absolute, or a few ulp of large results. Stirling's series from 8 on, reached by the
// recurrence.
fn m_d_lgamma(x: f64) -> f64 {
    let a = select(x, 1.0 - x, x < 0.5);
    var up = a;
    var factors = 1.0lf;
    for (var step = 0i; step < 8i; step++) {
        if up < 8.0 { factors *= up; up += 1.0; }
    }
    let z = 1.0 / up;
    let y = z * z;
    let series = z * (((((((-0.029550653594771242 * y + 0.00641025641025641) * y + -0.0019175269175269176) * y
        + 0.0008417508417508417) * y + -0.0005952380952380953) * y + 0.0007936507936507937) * y
        + -0.002777777777777778) * y + 0.08333333333333333);
    let positive = ((up - 0.5) * (m_log64(up) - 1.0) + (0.4189385332046727 + series)) - m_log64(factors);
    // For x below 0: pi / |sin(pi x)| over gamma(1 - x).
    let sine = abs(m_d_sinpi(x));
    let reflected = select(m_log64(3.141592653589793 / sine) - positive, m_d_inf(), sine == 0.0);
    return select(select(select(positive, reflected, x < 0.5), m_d_inf(), m_d_isinf(x) | (x == 0.0)), x, m_d_isnan(x));
}
// The derivative of lgamma.
fn m_d_digamma(x: f64) -> f64 {
    let a = select(x, 1.0 - x, x < 0.5);
    var up = a;
    var sum = 0.0lf;
    for (var step = 0i; step < 10i; step++) {
        if up < 10.0 { sum += 1.0 / up; up += 1.0; }
    }
    let y = 1.0 / (up * up);
    let positive = m_log64(up) - 0.5 / up - y * (((((((-0.4432598039215686 * y + 0.08333333333333333) * y
        + -0.021092796092796094) * y + 0.007575757575757576) * y + -0.004166666666666667) * y
        + 0.003968253968253968) * y + -0.008333333333333333) * y + 0.08333333333333333) - sum;
    let sine = m_d_sinpi(x);
    let reflected = select(positive - 3.141592653589793 * m_d_cospi(x) / sine, m_d_nan(), sine == 0.0);
    let zero = select(-m_d_inf(), m_d_inf(), m_signbit(f32(x)));
    return select(
        select(
            select(select(positive, reflected, x < 0.5), zero, x == 0.0),
            select(x, m_d_nan(), x < 0.0), m_d_isinf(x)),
        x, m_d_isnan(x));
}

// Hurwitz zeta function and derivatives of digamma, as in polygamma.wgsl, with twelve terms and eight of the
// series.
fn m_d_zeta_above(s: f64, q: f64) -> f64 {
    var sum = 0.0lf;
    var a = q;
    for (var k = 0u; k < 12u; k++) {
        sum += m_d_pow(a, -s);
        a += 1.0;
    }
    let rest = m_d_pow(a, 1.0 - s);
    let i = 1.0 / a;
    let step = i * i;
    let t1 = s * rest * step;
    let t2 = t1 * ((s + 1.0) * (s + 2.0) * step);
    let t3 = t2 * ((s + 3.0) * (s + 4.0) * step);
    let t4 = t3 * ((s + 5.0) * (s + 6.0) * step);
    let t5 = t4 * ((s + 7.0) * (s + 8.0) * step);
    let t6 = t5 * ((s + 9.0) * (s + 10.0) * step);
    let t7 = t6 * ((s + 11.0) * (s + 12.0) * step);
    let t8 = t7 * ((s + 13.0) * (s + 14.0) * step);
    let series = -3.3896802963225827e-13 * t8 + 1.3382536530684679e-11 * t7 - 5.284190138687493e-10 * t6
        + 2.08767569878681e-08 * t5 - 8.267195767195768e-07 * t4 + 3.306878306878307e-05 * t3
        - 0.001388888888888889 * t2 + 0.08333333333333333 * t1;
    return sum + select(rest / (s - 1.0) + (0.5 * rest * i + series), 0.0, rest == 0.0);
}
fn m_d_zeta(s: f64, q: f64) -> f64 {
    if m_d_isnan(s) | m_d_isnan(q) { return s + q; }
    if s <= 1.0 { return select(m_d_nan(), m_d_inf(), s == 1.0); }
    if q > 0.0 { return m_d_zeta_above(s, q); }
    let above = ceil(q) - q;
    if above == 0.0 { return m_d_inf(); }
    if floor(s) != s { return m_d_nan(); }
    let beyond = m_d_zeta_above(s, above) - m_d_zeta_above(s, 1.0 - q);
    return m_d_zeta_above(s, q - floor(q)) + select(beyond, -beyond, floor(0.5 * s) * 2.0 != s);
}
fn m_d_polygamma(x: f64, n: f64, factor: f64) -> f64 { return factor * m_d_zeta(n + 1.0, x); }

// Integer powers up to 1024 are products, others e^(y ln x), whose error grows with the exponent to 2e-13 of
// the result.
fn m_d_pow(x: f64, y: f64) -> f64 {
    let a = abs(x);
    let whole = floor(y) == y;
    let odd = whole & (abs(y) < 0x1p53) & (y * 0.5 != floor(y * 0.5));
    var r: f64;
    if whole & (abs(y) <= 1024.0) {
        var exponent = u32(abs(y));
        var square = a;
        r = 1.0;
        while exponent > 0u {
            if (exponent & 1u) == 1u { r *= square; }
            square *= square;
            exponent >>= 1u;
        }
        r = select(r, 1.0 / r, y < 0.0);
    } else {
        r = m_exp64(y * m_log64(a));
    }
    let signed = select(r, -r, odd & m_signbit(f32(x)));
    let real = select(signed, m_d_nan(), (x < 0.0) & !whole & m_d_isfinite(x) & m_d_isfinite(y));
    let checked = select(real, m_d_nan(), m_d_isnan(x) | m_d_isnan(y));
    return select(checked, 1.0, (y == 0.0) | (x == 1.0) | ((a == 1.0) & m_d_isinf(y)));
}

fn m_d_log1pexp(x: f64) -> f64 { return select(max(x, 0.0) + m_d_log1p(m_exp64(-abs(x))), x, m_d_isnan(x)); }
fn m_d_logsigmoid(x: f64) -> f64 { return -m_d_log1pexp(-x); }
fn m_d_silu(x: f64) -> f64 { return x * m_d_sigmoid(x); }
fn m_d_silu_grad(x: f64) -> f64 { return m_d_sigmoid(x) * (1.0 + x * m_d_sigmoid(-x)); }
fn m_d_gelu(x: f64) -> f64 { return 0.5 * x * m_d_erfc(x * -0.7071067811865476); }
fn m_d_gelu_grad(x: f64) -> f64 {
    return 0.5 * m_d_erfc(x * -0.7071067811865476) + x * 0.3989422804014327 * m_exp64(x * x * -0.5);
}
fn m_d_gelu_tanh(x: f64) -> f64 { return x * m_d_sigmoid(x * (0.07135481627159962 * (x * x) + 1.5957691216057308)); }
fn m_d_gelu_tanh_grad(x: f64) -> f64 {
    let s = m_d_sigmoid(x * (0.07135481627159962 * (x * x) + 1.5957691216057308));
    // Beyond 30 the derivative of the sigmoid is zero, and its factor must not become infinite.
    let c = clamp(x, -30.0, 30.0);
    return select(s + s * (1.0 - s) * (c * (0.21406444881479886 * (c * c) + 1.5957691216057308)), x, m_d_isnan(x));
}
fn m_d_mish(x: f64) -> f64 { return x * m_d_tanh(m_d_log1pexp(x)); }
fn m_d_mish_grad(x: f64) -> f64 {
    let t = m_d_tanh(m_d_log1pexp(x));
    return t + x * m_d_sigmoid(x) * (1.0 - t * t);
}
