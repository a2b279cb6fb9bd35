{#-
out[..., index[i], ...] = in[i], in place: the inverse of `gather`. All targets are distinct. Copies bits.

size: bytes of an element (2, 4, 8) · index: dtype of the index
In out_strides the stride of the indexed dimension is 0; dim_stride has its value. Indices outside of the
dimension, also negative ones, are ignored.
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    in_offset: u32,
    index_offset: u32,
    out_offset: u32,
    extent: u32,
    dim_stride: u32,
    unused0: u32,
    shape: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set word = "vec2<u32>" if size == 8 else "u32" %}
@group(0) @binding(0) var<storage, read> input: array<{{ word }}>;
{{ t.index(1, "index", index) }}
{% if size == 2 %}
{{ t.scattered_bits(2, "output", size) }}
{% else %}
@group(0) @binding(2) var<storage, read_write> output: array<{{ word }}>;
{% endif %}

{{ t.resolve_index() }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = group_index(group, groups) * 256u + thread;
    if start >= p.n { return; }
    var linear_index = start;
    var i0 = p.in_offset;
    var i1 = p.index_offset;
    var i2 = p.out_offset;
    {{ t.strided_offsets([("i0", "in_strides"), ("i1", "index_strides"), ("i2", "out_strides")]) }}
    let resolved = resolve_index(index_words(i1), p.extent);
    if resolved >= p.extent { return; }
    let to = i2 + resolved * p.dim_stride;
    {% if size == 2 %}
    output_put_bits(to, (input[i0 >> 1u] >> ((i0 & 1u) * 16u)) & 0xffffu);
    {% else %}
    output[to] = input[i0];
    {% endif %}
}
