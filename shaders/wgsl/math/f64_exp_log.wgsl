// needs: base
//
// exp and log of f64, for devices that support it: WGSL has none. `base` has the rules. Errors are bounds,
// tested against correctly rounded values of all magnitudes (tests/data/double.py), without denormal results
// that were flushed.

// Maximum; NaN if either is NaN.
fn m_max64(a: f64, b: f64) -> f64 { return select(select(max(a, b), b, m_isnan(f32(b))), a, m_isnan(f32(a))); }

// By the bits of an f32 that is infinite or NaN only if `x` is.
fn m_isfinite64(x: f64) -> bool { return m_isfinite(f32(x * 0x1p-900)); }

// 2^k for -600 <= k <= 600, from powers of two in f32: all products are exact.
fn m_pow2_64(k: i32) -> f64 {
    let eighth = k >> 3u;
    let a = f64(m_pow2(eighth));
    let b = a * a;
    let c = b * b;
    return c * c * f64(m_pow2(k - eighth * 8i));
}

// ln 2 in two parts: the first has 32 bits, so k times it is exact. The clamps after its use change no value.
// They guard against NVIDIA's Vulkan compiler (580): it turns (x - a) - b into x - (a + b), and so rounds a +
// b.
const LN2_HIGH: f64 = 0.6931471803691238;
const LN2_LOW: f64 = 1.9082149292705877e-10;

// Error: 1.5 ulp. e^r 2^k with |r| <= ln(2) / 2 and the series up to r^13: the remainder is below 2^-57.
fn m_exp64(x: f64) -> f64 {
    let nan = m_isnan(f32(x));
    let xc = select(clamp(x, -746.0, 710.0), 0.0, nan);
    let kf = round(f32(xc) * 1.442695);
    let k = i32(kf);
    let r = clamp(xc - f64(kf) * LN2_HIGH, -1.0, 1.0) - f64(kf) * LN2_LOW;
    let tail = (((((((((((1.6059043836821613e-10 * r + 2.08767569878681e-09) * r + 2.505210838544172e-08) * r
        + 2.755731922398589e-07) * r + 2.7557319223985893e-06) * r + 2.48015873015873e-05) * r
        + 0.0001984126984126984) * r + 0.001388888888888889) * r + 0.008333333333333333) * r
        + 0.041666666666666664) * r + 0.16666666666666666) * r + 0.5) * (r * r);
    // In two steps, each within range: the last one rounds, or overflows.
    let half = k >> 1u;
    return select((1.0 + (r + tail)) * m_pow2_64(half) * m_pow2_64(k - half), x, nan);
}

// Error: 1.5 ulp. x is m 2^k with m in [sqrt(1/2), sqrt(2)), and ln(m) is 2 atanh(s) for s = (m - 1) / (m +
// 1). |s| <= 0.172; the series goes up to s^21, with a remainder below 2^-59.
fn m_log64(x: f64) -> f64 {
    var m = x;
    var k = 0i;
    // Into the range of f32, from which m_split reads the exponent.
    for (var step = 512i; step >= 64i; step /= 2i) {
        for (var twice = 0i; twice < 2i; twice++) {
            if m >= m_pow2_64(step) { m *= m_pow2_64(-step); k += step; }
            if m < m_pow2_64(-step) { m *= m_pow2_64(step); k -= step; }
        }
    }
    let part = m_split(f32(m)).k;
    m *= m_pow2_64(-part);
    k += part;
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let series = (((((((((0.09523809523809523 * z + 0.10526315789473684) * z + 0.11764705882352941) * z
        + 0.13333333333333333) * z + 0.15384615384615385) * z + 0.18181818181818182) * z + 0.2222222222222222) * z
        + 0.2857142857142857) * z + 0.4) * z + 0.6666666666666666) * z;
    // 2 s is f - s f, whose first term is exact.
    let y = f64(k) * LN2_HIGH + clamp(f - (s * (f - series) - f64(k) * LN2_LOW), -1.0, 1.0);
    let bits = f32(x);
    let special = select(select(f64(m_nan()), x, (m_bits(f32(x * 0x1p-900)) == 0x7f800000u) | m_isnan(bits)),
        f64(m_from_bits(0xff800000u)), x == 0.0);
    return select(special, y, (x > 0.0) & m_isfinite64(x));
}
