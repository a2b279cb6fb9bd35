{#-
Fills a contiguous tensor with random numbers: Philox block k makes elements 4k..4k+3. The same bits on every device.

dtype · kind: `uniform` (scale * u + shift), `normal` (scale * z + shift), `integer` (low + x * range / 2^32),
`bernoulli` (1 where x < threshold, or always)
-#}
{%- import "types" as t -%}
{% include "math/wide" %}
{% include "math/philox" %}
{% if kind == "normal" %}{% include "math/normal" %}{% endif %}
{{ t.prelude() }}
struct Params {
    n: u32,
    // Always 0, which no compiler knows: a product goes through it, so that it cannot be fused with the sum.
    zero: u32,
    scale: f32,
    shift: f32,
    offset: vec2<u32>,
    seed: vec2<u32>,
    low: i32,
    range: u32,
    threshold: u32,
    always: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
{{ t.output(0, "out", dtype, "packed") }}

fn number(x: u32) -> {{ T }} {
    {% if kind == "integer" %}
    let v = p.low + i32(m_mul_wide(x, p.range).x);
    return {{ t.cast("v", "i32", T) }};
    {% elif kind == "bernoulli" %}
    let v = x < p.threshold || p.always != 0u;
    return {{ t.cast("v", "bool", T) }};
    {% else %}
    let v = bitcast<f32>(bitcast<u32>({{ "m_normal" if kind == "normal" else "m_unit" }}(x) * p.scale) ^ p.zero) + p.shift;
    return {{ t.cast("v", "f32", T) }};
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let block = group_index(group, groups) * 256u + lane;
    if block * 4u >= p.n { return; }
    let x = m_philox_block(block, p.offset, p.seed);
    // In a loop that no compiler writes out: four of what makes a normal number take three times as long to compile as one.
    var numbers: array<{{ T }}, 4>;
    for (var i = 0u; i < 4u + p.zero; i++) { numbers[i] = number(x[i]); }
    out_put4(block * 4u, numbers, p.n);
}
