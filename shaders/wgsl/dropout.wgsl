{#-
out[i] = in[i] * scale if the random value of i keeps it, else 0. The mask is not stored: the gradient draws
it again.

dtype · quads: the length and the offset are multiples of four, and elements have 16 or 32 bits
-#}
{%- import "types" as t -%}
{% include "math/mul_wide" %}
{% include "math/philox" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    in_offset: u32,
    scale: f32,
    threshold: u32,
    offset: vec2<u32>,
    seed: vec2<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.quads(0, "input", dtype) if quads else t.input(0, "input", dtype) }}
{{ t.quads_output(1, "out", dtype) if quads else t.output(1, "out", dtype, "packed") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let block = group_index(group, groups) * 256u + thread;
    if block * 4u >= p.n { return; }
    let x = m_philox_block(block, p.offset, p.seed);
    {% if quads %}
    let kept = x >= vec4<u32>(p.threshold);
    let scaled = input_quad(block + (p.in_offset >> 2u)) * {{ t.value(dtype) }}(p.scale);
    out_put_quad(block, select(vec4<{{ t.value(dtype) }}>(), scaled, kept));
    {% else %}
    var r: array<{{ t.value(dtype) }}, 4>;
    for (var k = 0u; k < 4u; k++) {
        let i = block * 4u + k;
        if i < p.n && x[k] >= p.threshold { r[k] = input_at(p.in_offset + i) * {{ t.value(dtype) }}(p.scale); }
    }
    out_put4(block * 4u, r, p.n);
    {% endif %}
}
