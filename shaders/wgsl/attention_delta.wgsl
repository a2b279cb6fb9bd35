{#-
Statistics of each query for attention's gradients: its log-sum-exp, copied, and after all of these the sum of
g · out. Eight invocations for a query.

dtype: of g and out, which have any strides · value: elements of a row
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    // Batch, heads, queries, unused; offsets of g and out.
    extents: vec4<u32>,
    firsts: vec4<u32>,
    // Strides of the batch, the head, the row, the element.
    g: vec4<u32>,
    out: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "g", dtype) }}
{{ t.input(1, "out", dtype) }}
{{ t.input(2, "lse", "f32") }}
{{ t.output(3, "stats", "f32") }}

var<workgroup> parts: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let line = group_index(group, groups) * 32u + (lane >> 3u);
    let lines = p.extents.x * p.extents.y * p.extents.z;
    var sum = 0.0;
    if line < lines {
        let query = line % p.extents.z;
        let head = line / p.extents.z % p.extents.y;
        let batch = line / p.extents.z / p.extents.y;
        let g0 = p.firsts.x + batch * p.g.x + head * p.g.y + query * p.g.z;
        let out0 = p.firsts.y + batch * p.out.x + head * p.out.y + query * p.out.z;
        for (var d = lane & 7u; d < {{ value }}u; d += 8u) { sum += g_at(g0 + d * p.g.w) * out_at(out0 + d * p.out.w); }
    }
    parts[lane] = sum;
    workgroupBarrier();
    if (lane & 7u) == 0u && line < lines {
        for (var i = 1u; i < 8u; i++) { sum += parts[lane + i]; }
        stats_put(line, lse_at(line));
        stats_put(lines + line, sum);
    }
}
