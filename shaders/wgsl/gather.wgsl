{#-
out[i] = in[..., index[i], ...]: one coordinate of every element comes from an index tensor. Copies bits of
any type.

size: bytes of an element (1, 2, 4, 8; 16 for vectors of neighbours)
index: dtype of the index, `i32`, `u32` or `i64w`
In in_strides the stride of the indexed dimension is 0; dim_stride has its value. Indices outside of the
dimension, also negative ones, read 0.
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    in_offset: u32,
    index_offset: u32,
    extent: u32,
    dim_stride: u32,
    unused0: u32,
    unused1: u32,
    shape: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set word = "vec4<u32>" if size == 16 else "vec2<u32>" if size == 8 else "u32" %}
{% set per_thread = 4 // size if size < 4 else 1 %}
@group(0) @binding(0) var<storage, read> input: array<{{ word }}>;
{{ t.index(1, "index", index) }}
@group(0) @binding(2) var<storage, read_write> output: array<{{ word }}>;

{{ t.resolve_index() }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = (group_index(group, groups) * 256u + thread) * {{ per_thread }}u;
    if start >= p.n { return; }
    var packed = {{ word }}(0u);
    for (var k = 0u; k < {{ per_thread }}u; k++) {
        if start + k >= p.n { break; }
        var linear_index = start + k;
        var i0 = p.in_offset;
        var i1 = p.index_offset;
        {{ t.strided_offsets([("i0", "in_strides"), ("i1", "index_strides")]) }}
        let resolved = resolve_index(index_words(i1), p.extent);
        if resolved < p.extent {
            let i = i0 + resolved * p.dim_stride;
            {% if per_thread > 1 %}
            let bits = (input[i / {{ per_thread }}u] >> ((i % {{ per_thread }}u) * {{ size * 8 }}u))
                & {{ "0xffffu" if size == 2 else "0xffu" }};
            packed |= bits << (k * {{ size * 8 }}u);
            {% else %}
            packed = input[i];
            {% endif %}
        }
    }
    output[start / {{ per_thread }}u] = packed;
}
