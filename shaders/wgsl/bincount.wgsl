{#-
Counts the values below p.extent among n integers: counts[v] += 1; other values are ignored. Integer sums do
not depend on the order, so threads use atomics.

near: the extent is small, so each workgroup counts in its own memory first
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    offset: u32,
    stride: u32,
    extent: u32,
    // Elements of a workgroup.
    tile: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> number: array<i32>;
@group(0) @binding(1) var<storage, read_write> counts: array<atomic<u32>>;
{% set capacity = 2048 %}
{% if near %}
var<workgroup> own: array<atomic<u32>, {{ capacity }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let begin = group_index(group, groups) * p.tile;
    let end = begin + min(p.tile, max(p.n, begin) - begin);
    {% if near %}
    for (var k = lane; k < p.extent; k += 256u) { atomicStore(&own[k], 0u); }
    workgroupBarrier();
    {% endif %}
    for (var i = begin + lane; i < end; i += 256u) {
        // As u32, a negative value is larger than any extent.
        let v = bitcast<u32>(number[p.offset + i * p.stride]);
        if v < p.extent { atomicAdd(&{{ "own" if near else "counts" }}[v], 1u); }
    }
    {% if near %}
    workgroupBarrier();
    for (var k = lane; k < p.extent; k += 256u) {
        let count = atomicLoad(&own[k]);
        if count > 0u { atomicAdd(&counts[k], count); }
    }
    {% endif %}
}
