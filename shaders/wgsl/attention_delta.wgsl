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
    offsets: vec4<u32>,
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
        @builtin(local_invocation_index) thread: u32) {
    let line = group_index(group, groups) * 32u + (thread >> 3u);
    let lines = p.extents.x * p.extents.y * p.extents.z;
    var sum = 0.0;
    if line < lines {
        let query = line % p.extents.z;
        let head = line / p.extents.z % p.extents.y;
        let batch = line / p.extents.z / p.extents.y;
        let g0 = p.offsets.x + batch * p.g.x + head * p.g.y + query * p.g.z;
        let out0 = p.offsets.y + batch * p.out.x + head * p.out.y + query * p.out.z;
        for (var d = thread & 7u; d < {{ value }}u; d += 8u) {
            sum += g_at(g0 + d * p.g.w) * out_at(out0 + d * p.out.w);
        }
    }
    parts[thread] = sum;
    workgroupBarrier();
    if (thread & 7u) == 0u && line < lines {
        for (var i = 1u; i < 8u; i++) { sum += parts[thread + i]; }
        stats_put(line, lse_at(line));
        stats_put(lines + line, sum);
    }
}
