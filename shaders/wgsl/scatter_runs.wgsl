{#-
What `scatter` does, for long lines whose indices were sorted: out[..., to, ...] op= src[i], in place, for the run of equal
indices `to`. The first of a run walks it, in order: the same sums, bit by bit, in every run.

dtype · op: `add`, `set`, `mul`, `max`, `min`
to: the places as u32 (see `places`) · order: where they stand in ascending order, as i64; both are laid out alike
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    lines: u32,
    rank: u32,
    length: u32,
    extent: u32,
    skip: u32,
    out_offset: u32,
    src_offset: u32,
    unused0: u32,
    // Of the result, the indices, the source.
    dim_strides: vec4<u32>,
    shape: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    src_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
@group(0) @binding(0) var<storage, read> to: array<u32>;
{{ t.input(1, "order", "i64w") }}
{{ t.input(2, "src", dtype) }}
{{ t.output(3, "out", dtype, "scattered") }}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let thread = group_index(group, groups) * 256u + lane;
    if thread >= p.lines * p.length { return; }
    let first = thread / p.lines;
    var left = thread % p.lines;
    var i0 = p.out_offset;
    var i1 = 0u;
    var i2 = p.src_offset;
    {{ t.walk([("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides")]) }}
    var k = u32(order_at(i1 + first * p.dim_strides.y));
    let chosen = to[i1 + k * p.dim_strides.y];
    if (chosen >= p.extent) | (chosen == p.skip) { return; }
    if first > 0u {
        let before = u32(order_at(i1 + (first - 1u) * p.dim_strides.y));
        if to[i1 + before * p.dim_strides.y] == chosen { return; }
    }
    let i = i0 + chosen * p.dim_strides.x;
    var all = out_at(i);
    var next = first;
    loop {
        let v = src_at(i2 + k * p.dim_strides.z);
        all = {{ t.joined(op, T, "all", "v") }};
        next++;
        if next >= p.length { break; }
        k = u32(order_at(i1 + next * p.dim_strides.y));
        if to[i1 + k * p.dim_strides.y] != chosen { break; }
    }
    out_put(i, all);
}
