{#-
Second stage of a sum that several workgroups share: out[i] = Σ parts[s][i], always in the same order.

T: type of the parts · dtype: of the output, which is contiguous from its start
gelu: out is gelu_tanh of the sum · pre_activation: the sum is also written, to a tensor like out
accumulate: the result is added to out
-#}
{%- import "types" as t -%}
{%- import "matmul_macros" as body -%}
{% if gelu %}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{% include "math/erf" %}
{% include "math/activation" %}
{% endif %}
{{ t.prelude() }}
struct Params {
    n: u32,
    splits: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> parts: array<{{ T }}>;
{% if pre_activation %}
{{ t.output(1, "pre", dtype, "packed") }}
{% endif %}
{{ t.output(2 if pre_activation else 1, "result", dtype, "packed") }}

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
    {% if pre_activation %}
    pre_put4(start, sums, p.n);
    {% endif %}
    {% if gelu or accumulate %}
    for (var j = 0u; j < 4u; j++) {
        {% if gelu %}
        sums[j] = {{ body.gelu_tanh("sums[j]", dtype) }};
        {% endif %}
        {% if accumulate %}
        sums[j] += result_at(min(start + j, p.n - 1u));
        {% endif %}
    }
    {% endif %}
    result_put4(start, sums, p.n);
}
