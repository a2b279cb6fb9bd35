{#-
Fills a contiguous tensor with random values: Philox block k gives elements 4k..4k+3. The bits are the same on
  every device.

dtype
kind: `uniform` (scale * u + shift), `normal` (scale * z + shift), `integer` (low + x * range / 2^32),
`bernoulli` (1 if x < threshold, or always), `key` (two words: the upper one is `integer`, the lower one
another draw)
Uniform values and integers that are rounded to a float type are clamped to its smallest and largest value in
the range.
-#}
{%- import "types" as t -%}
{% include "math/mul_wide" %}
{% include "math/philox" %}
{% if kind == "normal" %}{% include "math/normal" %}{% endif %}
{{ t.prelude() }}
struct Params {
    n: u32,
    // This is always 0, which no compiler knows. It keeps a product from being fused with the sum.
    zero: u32,
    scale: f32,
    shift: f32,
    offset: vec2<u32>,
    seed: vec2<u32>,
    low: i32,
    range: u32,
    threshold: u32,
    always: u32,
    // Bounds of floats, as integers in the order of the floats.
    min_bits: i32,
    max_bits: i32,
    // 2 if the range is too wide for an f32, with `scale` and `shift` halved; else 1.
    factor: f32,
    unused0: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if kind == "key" %}
@group(0) @binding(0) var<storage, read_write> out: array<vec2<u32>>;
{% else %}
{% set T = t.value(dtype) %}
{% set bounded = T == "f32" and kind in ["uniform", "integer"] %}
{{ t.output(0, "out", dtype, "packed") }}
{% if dtype == "i64w" %}
{% include "i64w" %}
{% endif %}

{% if bounded %}
// Compares by bits: subnormals compare as zeros on some devices.
fn ordered_bits(b: i32) -> i32 { return select(b, b ^ 0x7fffffff, b < 0); }
fn clamp_to_bounds(v: f32) -> f32 {
    return bitcast<f32>(ordered_bits(max(p.min_bits, min(p.max_bits, ordered_bits(bitcast<i32>(v))))));
}
{% endif %}

fn sample(x: u32) -> {{ T }} {
    {% if kind == "integer" %}
    let v = p.low + i32(m_mul_wide(x, p.range).x);
    return {{ "clamp_to_bounds(f32(v))" if bounded else t.cast("v", "i32", T) }};
    {% elif kind == "bernoulli" %}
    let v = x < p.threshold || p.always != 0u;
    return {{ t.cast("v", "bool", T) }};
    {% else %}
    var v = bitcast<f32>(bitcast<u32>({{ "m_normal" if kind == "normal" else "m_unit" }}(x) * p.scale) ^ p.zero)
        + p.shift;
    {% if kind == "uniform" %}v = v * p.factor;{% endif %}
    return {{ "clamp_to_bounds(v)" if bounded else t.cast("v", "f32", T) }};
    {% endif %}
}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let block = group_index(group, groups) * 256u + thread;
    if block * 4u >= p.n { return; }
    {% if kind == "key" %}
    let low = p.offset.x + block;
    let high = p.offset.y + select(0u, 1u, low < block);
    let x = m_philox(vec4<u32>(low, high, 0u, 0u), p.seed);
    // The third counter word is 0 for all other draws.
    let y = m_philox(vec4<u32>(low, high, 1u, 0u), p.seed);
    for (var i = 0u; i < 4u; i++) {
        if block * 4u + i < p.n {
            out[block * 4u + i] = vec2<u32>(y[i], bitcast<u32>(p.low + i32(m_mul_wide(x[i], p.range).x)));
        }
    }
    {% else %}
    let x = m_philox_block(block, p.offset, p.seed);
    // A loop that no compiler unrolls: four unrolled normal draws take three times as long to compile as one.
    var samples: array<{{ T }}, 4>;
    for (var i = 0u; i < 4u + p.zero; i++) { samples[i] = sample(x[i]); }
    out_put4(block * 4u, samples, p.n);
    {% endif %}
}
