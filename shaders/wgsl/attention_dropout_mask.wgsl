{#-
Dropout factors of attention's weights, [.., queries, keys]: for second-order gradients, which have the
weights in memory.
-#}
{%- import "types" as t -%}
{% include "math/mul_wide" %}
{% include "math/philox" %}
{% include "math/dropout_mask" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    keys: u32,
    threshold: u32,
    dropout_scale: f32,
    offset: vec2<u32>,
    seed: vec2<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.output(0, "result", "f32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    result_put(i, m_dropout_factor(i / p.keys, i % p.keys, p.offset, p.seed, p.threshold, p.dropout_scale));
}
