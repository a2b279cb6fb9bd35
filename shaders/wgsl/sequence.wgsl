{#-
Creates a sequence of equal steps. The first `half` elements count from the start, the others back from the end.

dtype: f32, f16, bf16, f64, i32, u32, i64, u8
kind
`integer`: start + i * (quotient + remainder / divisor), without the fraction; for integer types
`float`: start + i * step, or end + i * back counted from the end, in the arithmetic of an f64; rounded to floats,
  truncated to integers
`power`: the base to the powers of `float`
Elements of 8 bytes are written as words, so a device needs no 64-bit types.
-#}
{%- import "types" as t -%}
{%- set words = dtype in ["i64", "f64"] -%}
{%- set T = "vec2<u32>" if words else t.value(dtype) -%}
{% include "math/mul_wide" %}
{% include "wide" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    half: u32,
    // If 1, the base of powers is negative, and `base` its absolute value.
    negative_base: u32,
    divisor: u32,
    // Floats are the words of a `Wide`. Integers are two words, the lower one first; the remainder is step.z.
    start: vec4<u32>,
    end: vec4<u32>,
    step: vec4<u32>,
    back: vec4<u32>,
    base: vec4<u32>,
    log2_base: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if words %}
@group(0) @binding(0) var<storage, read_write> out: array<vec2<u32>>;
fn out_put(i: u32, v: vec2<u32>) { out[i] = v; }
{% else %}
{{ t.output(0, "out", dtype, "packed" if dtype in ["f16", "bf16", "u8"] else "scattered") }}
{% endif %}

{% if kind == "integer" %}
fn add_words(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < b.x));
}
fn value_at(i: u32) -> {{ T }} {
    // Sums wrap, and every element fits.
    let low = m_mul_wide(i, p.step.x);
    var sum = add_words(p.start.xy, vec2<u32>(low.y, low.x + i * p.step.y));
    // i * remainder / divisor, bit by bit. The remainder is below the divisor, so the quotient is below i.
    let dividend = m_mul_wide(i, p.step.z);
    var rest = dividend.x;
    var quotient = 0u;
    // Whole steps have no remainder.
    let bits = select(0u, 32u, p.step.z != 0u);
    for (var bit = 0u; bit < bits; bit++) {
        let carry = rest >> 31u;
        rest = (rest << 1u) | ((dividend.y >> (31u - bit)) & 1u);
        quotient <<= 1u;
        if (carry == 1u) | (rest >= p.divisor) {
            rest -= p.divisor;
            quotient |= 1u;
        }
    }
    sum = add_words(sum, vec2<u32>(quotient, 0u));
    // So far the value is rounded down.
    let up = (rest != 0u) & (sum.y >= 0x80000000u);
    sum = add_words(sum, vec2<u32>(select(0u, 1u, up), 0u));
    return {{ "sum" if words else "bitcast<i32>(sum.x)" if dtype == "i32" else "sum.x" }};
}
{% else %}
fn value_at(i: u32) -> {{ T }} {
    let from_start = i < p.half;
    let step = w_from_words(select(p.back, p.step, from_start));
    let count = w_from_u32(select(p.n - 1u - i, i, from_start));
    var v = w_add(w_from_words(select(p.end, p.start, from_start)), w_mul(count, step));
    {% if kind == "power" %}
    let exponent = v;
    v = w_pow(w_from_words(p.base), w_from_words(p.log2_base), exponent);
    let whole = w_whole(exponent);
    v.negative = (p.negative_base == 1u) & ((whole.y & 1u) == 1u);
    // A fractional power of a negative base is NaN. The exponent has at most 53 bits.
    let below_point = clamp(-exponent.exponent, 0, 64);
    let shifted = w_shift_left(w_shift_right(exponent.mantissa, u32(below_point)), u32(below_point));
    let is_whole = (shifted.x == exponent.mantissa.x) & (shifted.y == exponent.mantissa.y);
    let is_nan = (p.negative_base == 1u) & !is_whole;
    {% endif %}
    {% if T == "f32" %}
    var bits = w_f32_bits(v);
    {% else %}
    var bits = {{ "w_f64_words(v)" if dtype == "f64" else "w_i64_words(v)" }};
    {% endif %}
    {% if kind == "power" %}
    {% set high = "0x7ff80000u" if dtype == "f64" else "0u" %}
    bits = select(bits, {{ "0x7fc00000u" if T == "f32" else "vec2<u32>(0u, " ~ high ~ ")" }}, is_nan);
    {% endif %}
    {% set integer = "bitcast<i32>(bits.x)" if T == "i32" else "bits.x" %}
    return {{ "bits" if words else "bitcast<f32>(bits)" if T == "f32" else integer }};
}
{% endif %}

{{ t.each_output("value_at", T, 4 if dtype in ["f16", "bf16", "u8"] else 1) }}
