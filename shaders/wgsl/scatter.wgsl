{#-
out[..., index[i], ...] op= src[i], in place, in a fixed order: there are no float atomics, so two runs give
the same bits.

dtype · index: dtype of the index · op: `add`, `set`, `mul`, `max`, `min` · scalar: src is the value p.value
A line has all elements along the indexed dimension at one coordinate of the others; lines are disjoint. One
invocation iterates over a line in order and writes the indices of one slice of 0..extent: `slices` of
them share a line.
Indices outside of the dimension, also negative ones, and the index `skip` are ignored.
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    lines: u32,
    rank: u32,
    length: u32,
    extent: u32,
    slices: u32,
    skip: u32,
    value: f32,
    unused0: u32,
    offsets: vec4<u32>,
    dim_strides: vec4<u32>,
    shape: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    src_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
{{ t.index(0, "index", index) }}
{% if not scalar %}{{ t.input(1, "src", dtype) }}{% endif %}
{{ t.output(1 if scalar else 2, "out", dtype, "scattered") }}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

{{ t.resolve_index() }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if global_index >= p.lines * p.slices { return; }
    // Neighbouring threads have neighbouring lines, and so neighbouring elements.
    let slice = global_index / p.lines;
    let per_slice = (p.extent + p.slices - 1u) / p.slices;
    let low = slice * per_slice;
    let high = min(low + per_slice, p.extent);
    var linear_index = global_index % p.lines;
    var i0 = p.offsets.x;
    var i1 = p.offsets.y;
    var i2 = p.offsets.z;
    {{ t.strided_offsets([("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides")]) }}
    for (var k = 0u; k < p.length; k++) {
        let resolved = resolve_index(index_words(i1 + k * p.dim_strides.y), p.extent);
        if resolved < low || resolved >= high || resolved == p.skip { continue; }
        let i = i0 + resolved * p.dim_strides.x;
        {% if scalar %}
        let v = {{ t.cast("p.value", "f32", T) }};
        {% else %}
        let v = src_at(i2 + k * p.dim_strides.z);
        {% endif %}
        {% if op != "set" %}let before = out_at(i);{% endif %}
        out_put(i, {{ t.combine(op, T, "before", "v") }});
    }
}
