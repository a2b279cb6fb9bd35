{#-
Moves elements by their bits, whatever their type: out[strides of out][i] = in[strides of in][i].

size: bytes of an element (1, 2, 4, 8) · mode: `packed` (the output is contiguous from its start) or `scattered`
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    in_offset: u32,
    out_offset: u32,
    shape: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set word = "vec2<u32>" if size == 8 else "u32" %}
{% set lanes = 4 // size if size < 4 else 1 %}
{% set mask = "0xffffu" if size == 2 else "0xffu" %}
{% set out_word = "atomic<u32>" if lanes > 1 and mode == "scattered" else word %}
@group(0) @binding(0) var<storage, read> input: array<{{ word }}>;
@group(0) @binding(1) var<storage, read_write> output: array<{{ out_word }}>;

fn element(i: u32) -> {{ word }} {
    {% if lanes > 1 %}
    return (input[i / {{ lanes }}u] >> ((i % {{ lanes }}u) * {{ size * 8 }}u)) & {{ mask }};
    {% else %}
    return input[i];
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let start = (group_index(group, groups) * 256u + lane) * {{ lanes }}u;
    {% if lanes > 1 and mode == "packed" %}
    var packed = 0u;
    {% endif %}
    for (var k = 0u; k < {{ lanes }}u; k++) {
        let i = start + k;
        if i >= p.n { break; }
        var left = i;
        var i0 = p.out_offset;
        var i1 = p.in_offset;
        for (var d = p.rank; d > 0u; d--) {
            let axis = d - 1u;
            let extent = p.shape[axis >> 2u][axis & 3u];
            let at = left % extent;
            left = left / extent;
            i0 += at * p.out_strides[axis >> 2u][axis & 3u];
            i1 += at * p.in_strides[axis >> 2u][axis & 3u];
        }
        {% if lanes == 1 %}
        output[i0] = element(i1);
        {% elif mode == "packed" %}
        packed |= element(i1) << (k * {{ size * 8 }}u);
        {% else %}
        let shift = (i0 % {{ lanes }}u) * {{ size * 8 }}u;
        let old = atomicLoad(&output[i0 / {{ lanes }}u]) & ({{ mask }} << shift);
        atomicXor(&output[i0 / {{ lanes }}u], old ^ (element(i1) << shift));
        {% endif %}
    }
    {% if lanes > 1 and mode == "packed" %}
    if start < p.n { output[start / {{ lanes }}u] = packed; }
    {% endif %}
}
