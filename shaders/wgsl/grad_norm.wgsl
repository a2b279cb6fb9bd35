{#-
Norm of several gradients together. Stage `parts`: sums of powers of every 4096 elements. Stage `total`: the
norm from those sums, and the clipping factor.

stage · norm: `one`, `two`, `power` (any other order) or `largest`, whose sums are maxima
dtypes (parts): of the gradients
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% if norm == "power" %}
{% for file in ["exp", "log", "pow"] %}{% include "math/" ~ file %}{% endfor %}
{% endif %}
{{ t.prelude() }}
fn accumulate(a: f32, b: f32) -> f32 { return {{ "m_max(a, b)" if norm == "largest" else "a + b" }}; }
var<workgroup> sums: array<f32, 256>;

// Returns the sum over the workgroup, in thread 0.
fn sum_workgroup(thread: u32, thread_sum: f32) -> f32 {
    sums[thread] = thread_sum;
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride >>= 1u) {
        if thread < stride { sums[thread] = accumulate(sums[thread], sums[thread + stride]); }
        workgroupBarrier();
    }
    return sums[0];
}

{% if stage == "parts" %}
struct Item {
    n: u32,
    // First workgroup of this gradient.
    group: u32,
    offset: u32,
    // Offset of its sums.
    part: u32,
}
struct Params {
    {{ "power: vec4<f32>," if norm == "power" }}
    items: array<Item, {{ dtypes | length }}>,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
{% for dtype in dtypes %}
{{ t.input(loop.index, "g" ~ loop.index0, dtype) }}
fn powers{{ loop.index0 }}(item: Item, part: u32, thread: u32) -> f32 {
    var sum = 0.0;
    for (var k = 0u; k < 16u; k++) {
        let i = part * 4096u + k * 256u + thread;
        if i < item.n {
            let g = g{{ loop.index0 }}_at(item.offset + i);
            sum = accumulate(sum, {{ {
                "one": "abs(g)", "two": "g * g", "power": "m_pow(abs(g), p.power.x)", "largest": "abs(g)"
            }[norm] }});
        }
    }
    return sum;
}
{% endfor %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, groups);
    var thread_sum = 0.0;
    var at = 0u;
    var inside = false;
    {% for dtype in dtypes | reverse %}
    {% set k = dtypes | length - loop.index %}
    {{ "else " if not loop.first }}if group >= p.items[{{ k }}].group {
        let part = group - p.items[{{ k }}].group;
        thread_sum = powers{{ k }}(p.items[{{ k }}], part, thread);
        at = p.items[{{ k }}].part + part;
        // A folded grid has workgroups beyond the last.
        inside = part * 4096u < p.items[{{ k }}].n;
    }
    {% endfor %}
    let sum = sum_workgroup(thread, thread_sum);
    if thread == 0u && inside { parts[at] = sum; }
}
{% else %}
struct Params {
    n: u32,
    max_norm: f32,
    // 1 / order of the norm.
    root: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> norm: array<f32>;
@group(0) @binding(2) var<storage, read_write> factor: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    var thread_sum = 0.0;
    for (var i = thread; i < p.n; i += 256u) { thread_sum = accumulate(thread_sum, parts[i]); }
    let sum = sum_workgroup(thread, thread_sum);
    if thread == 0u {
        let norm_value =
            {{ {"one": "sum", "two": "sqrt(sum)", "power": "m_pow(sum, p.root)", "largest": "sum"}[norm] }};
        norm[0] = norm_value;
        factor[0] = m_min(p.max_norm / (norm_value + 1e-6), 1.0);
    }
}
{% endif %}
