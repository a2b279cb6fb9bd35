{#-
x *= scale, in place. Reads and writes nothing if the scale is 1, as at the start of backward from a loss.

dtype: of x · width: 4 if its length is a multiple of four, else 1
steps_per_thread: steps of a thread
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{{ t.prelude() }}
struct Params {
    steps: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "scale", "f32") }}
{{ rows.output(1, "result", dtype, width) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let scale = scale_at(0u);
    if scale == 1.0 { return; }
    // Several steps for each thread, so that few workgroups only find that there is no work.
    let first = group_index(group, groups) * {{ 256 * steps_per_thread }}u + thread;
    for (var i = first; i < min(p.steps, first + {{ 256 * steps_per_thread }}u); i += 256u) {
        result_put_step(i * {{ width }}u, result_step(i * {{ width }}u) * scale);
    }
}
