{#-
Weight of each example in a mean: its class's weight; 0 if the class is ignored, NaN if the target is no
  class.

targets: their dtype · weight: dtype of the class weights, or ""
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    classes: u32,
    ignore_class: i32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.index(0, "targets", targets) }}
{{ t.saturate_to_i32() }}
{% if weight %}
{{ t.input(1, "weight", weight) }}
{% endif %}
{{ t.output(2 if weight else 1, "result", "f32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    let label = saturate_to_i32(targets_words(i));
    var value = m_nan();
    if label >= 0i && label < i32(p.classes) { value = {{ "weight_at(u32(label))" if weight else "1.0" }}; }
    if label == p.ignore_class { value = 0.0; }
    result_put(i, value);
}
