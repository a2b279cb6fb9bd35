{#-
Cross product of vectors of three along one dimension; one invocation computes all three elements. Any
strides.

dtype: element type
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    unused0: u32,
    unused1: u32,
    // Offsets of a, b and the result.
    offsets: vec4<u32>,
    dim_strides: vec4<u32>,
    shape: array<vec4<u32>, 2>,
    a_strides: array<vec4<u32>, 2>,
    b_strides: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{{ t.output(2, "out", dtype, "scattered") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    var linear_index = i;
    var offset = p.offsets.xyz;
    {{ t.strided_offsets([("offset.x", "a_strides"), ("offset.y", "b_strides"), ("offset.z", "out_strides")]) }}
    let stride = p.dim_strides.xyz;
    let a0 = a_at(offset.x);
    let a1 = a_at(offset.x + stride.x);
    let a2 = a_at(offset.x + 2u * stride.x);
    let b0 = b_at(offset.y);
    let b1 = b_at(offset.y + stride.y);
    let b2 = b_at(offset.y + 2u * stride.y);
    out_put(offset.z, a1 * b2 - a2 * b1);
    out_put(offset.z + stride.z, a2 * b0 - a0 * b2);
    out_put(offset.z + 2u * stride.z, a0 * b1 - a1 * b0);
}
