{#-
Second stage of a sum that several workgroups share: out[i] = Σ parts[s][i], always in the same order.

T: type of the parts · dtype: of the output, which is contiguous from its start
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    splits: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> parts: array<{{ T }}>;
{{ t.output(1, "result", dtype, "packed") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = (group_index(group, groups) * 256u + thread) * 4u;
    if start >= p.n { return; }
    var sums: array<{{ T }}, 4>;
    for (var j = 0u; j < 4u; j++) {
        if start + j >= p.n { break; }
        var sum = {{ T }}(0);
        for (var s = 0u; s < p.splits; s++) {
            sum += parts[s * p.n + start + j];
        }
        sums[j] = sum;
    }
    result_put4(start, sums, p.n);
}
