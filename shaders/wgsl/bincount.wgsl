{#-
Counts the values below p.extent among n integers: counts[v] += 1; other values are ignored. Integer sums do
not depend on the order, so threads use atomics.

privatized: each workgroup counts in workgroup memory first, for a small extent
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
@group(0) @binding(0) var<storage, read> values: array<i32>;
@group(0) @binding(1) var<storage, read_write> counts: array<atomic<u32>>;
{% set capacity = 2048 %}
{% if privatized %}
var<workgroup> local_counts: array<atomic<u32>, {{ capacity }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let begin = group_index(group, groups) * p.tile;
    let end = begin + min(p.tile, max(p.n, begin) - begin);
    {% if privatized %}
    for (var k = thread; k < p.extent; k += 256u) { atomicStore(&local_counts[k], 0u); }
    workgroupBarrier();
    {% endif %}
    for (var i = begin + thread; i < end; i += 256u) {
        // As u32, a negative value is larger than any extent.
        let v = bitcast<u32>(values[p.offset + i * p.stride]);
        if v < p.extent { atomicAdd(&{{ "local_counts" if privatized else "counts" }}[v], 1u); }
    }
    {% if privatized %}
    workgroupBarrier();
    for (var k = thread; k < p.extent; k += 256u) {
        let count = atomicLoad(&local_counts[k]);
        if count > 0u { atomicAdd(&counts[k], count); }
    }
    {% endif %}
}
