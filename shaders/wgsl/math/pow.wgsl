// needs: base, exp
//
// pow, like C's powf.

// |x|^y for finite x != 0 and finite y. log2(x) is known to about 2^-31 as a 12-bit head and a tail, so that
// its product with the head of y is exact. With m in [sqrt(1/2), sqrt(2)) and s = (m - 1) / (m + 1), log2(m)
// = 2 s / ln 2 + s^3 p(s^2) (fit 2^-34).
fn m_pow_abs(x: f32, y: f32) -> f32 {
    let parts = m_split(abs(x));
    let m = parts.m;
    let k = f32(parts.k);
    let f = m - 1.0;
    // m + 1 as head and tail, then the quotient: its head, and the tail from the remainder.
    let dh = m_head(m + 1.0);
    let dl = m - (dh - 1.0);
    let d = dh + dl;
    let sh = m_head(f / d);
    let sl = ((f - sh * dh) - sh * dl) / d;
    let s = sh + sl;
    let z = s * s;
    let p = ((0.33661053 * z + 0.4119218) * z + 0.5770789) * z + 0.9617967;
    // 2 / ln 2 = 2.8853900817779268 in a head of 12 bits and a tail.
    let hi = sh * 2.884765625;
    let lo = sh * 0.0006244568 + (sl * 2.88539 + (s * z) * p);
    let log_head = m_head(k + (hi + lo));
    let log_tail = ((k - log_head) + hi) + lo;
    let yh = m_head(y);
    let yl = y - yh;
    let product = y * (log_head + log_tail);
    // Far beyond overflow and underflow the product is replaced, which keeps every step below finite.
    let fits = abs(product) < 160.0;
    let zh = select(select(-160.0, 160.0, product > 0.0), yh * log_head, fits);
    let zl = select(0.0, yh * log_tail + yl * (log_head + log_tail), fits);
    return m_exp2_sum(zh, zl);
}

// Error: 2.3 ulp.
fn m_pow(x: f32, y: f32) -> f32 {
    let ax = m_bits(x) & 0x7fffffffu;
    let ay = m_bits(y) & 0x7fffffffu;
    let y_negative = m_signbit(y);
    let finite_y = ay < 0x7f800000u;
    let integer = finite_y & ((ay >= 0x4b800000u) | (floor(abs(y)) == abs(y)));
    let odd = integer & (ay < 0x4b800000u) & ((u32(min(abs(y), 16777215.0)) & 1u) == 1u);
    // Zero and infinity: only the direction matters.
    let to_zero = (ax == 0u) != y_negative;
    var r = m_pow_abs(x, y);
    r = select(r, select(m_inf(), 0.0, to_zero), (ax == 0u) | (ax == 0x7f800000u));
    // y infinite: compare |x| with 1.
    let grows = (ax > 0x3f800000u) != y_negative;
    r = select(r, select(0.0, m_inf(), grows), !finite_y);
    // The sign of a negative base.
    r = select(r, -r, odd & m_signbit(x));
    r = select(r, m_nan(), m_signbit(x) & (ax != 0u) & (ax != 0x7f800000u) & finite_y & !integer);
    r = select(r, m_nan(), (ax > 0x7f800000u) | (ay > 0x7f800000u));
    let one = (ay == 0u) | (m_bits(x) == 0x3f800000u) | ((ax == 0x3f800000u) & (ay == 0x7f800000u));
    return select(r, 1.0, one);
}
