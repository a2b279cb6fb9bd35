{#-
The gradient of picking elements along a dimension: out[row, place[row, j]] += g[row, j], one thread for each row, so
that the sum has one order. All three are contiguous as [outer, dimension, inner]; out was filled with zeros.

dtype: of g and out · index: of place
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    inner: u32,
    picks: u32,
    extent: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "g", dtype) }}
{{ t.input(1, "place", index) }}
{{ t.output(2, "result", dtype) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let row = group_index(group, groups) * 256u + lane;
    if row >= p.rows { return; }
    let outer = row / p.inner;
    let inner = row % p.inner;
    for (var j = 0u; j < p.picks; j++) {
        let from_index = (outer * p.picks + j) * p.inner + inner;
        let at = u32(place_at(from_index));
        if at < p.extent {
            let to_index = (outer * p.extent + at) * p.inner + inner;
            result_put(to_index, result_at(to_index) + g_at(from_index));
        }
    }
}
