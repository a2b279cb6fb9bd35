{#-
Cross-entropy from logits, a row for each example: all classes of it.

pass: `forward` writes loss [2, rows] (the losses, and the weight each has in a mean) and lse [2, rows], whose sum is the
log-sum-exp: the largest logit, and the logarithm of the sum over it;
`backward` writes the gradient of the logits, contiguous, from the log-sum-exps (and with `soft` the weights)
dtype: of the logits (any strides) and their gradient · goal: of the targets · weight: dtype of the class weights, or ""
soft: targets are probabilities in the logits' shape (contiguous), not classes · smooth: labels are smoothed
lanes, across: see rows · width: 4 where a thread writes four neighbours at once (halves in whole words), else 1
-#}
{%- import "types" as t -%}
{%- import "rows" as rows -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    unused0: u32,
    unused1: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
    ignore_class: i32,
    // 0 where one number scales the gradient of all rows.
    scale_stride: u32,
    // What smoothing leaves of a label, and what it gives to every class.
    keep: f32,
    share: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", dtype) }}
{{ t.input(1, "goal", goal) }}
{% set next = namespace(binding=2) %}
{% if weight %}
{{ t.input(2, "weight", weight) }}
{% set next.binding = 3 %}
{% endif %}
{% if pass == "forward" %}
{{ t.output(next.binding, "loss", "f32") }}
{{ t.output(next.binding + 1, "lse", "f32") }}
{% else %}
{% if soft %}
{{ t.input(next.binding, "loss", "f32") }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{{ t.input(next.binding, "lse", "f32") }}
{{ t.input(next.binding + 1, "scale", "f32") }}
{{ t.output(next.binding + 2, "result", dtype, "packed" if width == 4 else "scattered") }}
{% endif %}
{{ rows.functions(lanes, across) }}

fn weight_of(c: u32) -> f32 { return {{ "weight_at(c)" if weight else "1.0" }}; }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = row_of(group_index(group, groups), thread);
    let live = row < p.rows;
    // Threads without a row stay for the barriers, with nothing to do.
    let extent = select(0u, p.extent, live);
    let first = lane_of(thread) * {{ width if pass == "backward" else 1 }}u;
    var base = p.offset;
    var left = row;
    for (var d = p.rank; d > 0u; d--) {
        let axis = d - 1u;
        let n = p.shape[axis >> 2u][axis & 3u];
        base += (left % n) * p.strides[axis >> 2u][axis & 3u];
        left = left / n;
    }
    let dense = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% if not soft %}
    var label = 0i;
    if live { label = i32(goal_at(row)); }
    let ignored = label == p.ignore_class;
    let valid = live && label >= 0i && label < i32(p.extent);
    // A label that is no class gives NaN rather than a wrong loss that nobody sees.
    var own = m_nan();
    if valid { own = weight_of(u32(label)); }
    if ignored { own = 0.0; }
    {% endif %}
    {% if pass == "forward" %}
    var largest = m_from_bits(0xff800000u);
    for (var c = first; c < extent; c += {{ lanes }}u) { largest = m_max(largest, input_at(base + c * p.stride)); }
    let m = row_max(largest, thread);
    var sum = 0.0;
    for (var c = first; c < extent; c += {{ lanes }}u) { sum += m_exp(input_at(base + c * p.stride) - m); }
    // Kept apart from m, which would round away what a sure example has left of its loss.
    let log_sum = m_log(row_sum(sum, thread));
    {% if soft or smooth %}
    var spread = 0.0;
    var weights = 0.0;
    for (var c = first; c < extent; c += {{ lanes }}u) {
        let w = weight_of(c){{ " * (goal_at(dense + c * p.inner) * p.keep + p.share)" if soft else " * p.share" }};
        weights += w;
        spread += w * ((m - input_at(base + c * p.stride)) + log_sum);
    }
    let all_spread = row_sum(spread, thread);
    let all_weights = row_sum(weights, thread);
    {% endif %}
    if live && lane_of(thread) == 0u {
        lse_put(row, m);
        lse_put(p.rows + row, log_sum);
        {% if soft %}
        loss_put(row, all_spread);
        loss_put(p.rows + row, all_weights);
        {% else %}
        var value = m_nan();
        if valid { value = p.keep * own * ((m - input_at(base + u32(label) * p.stride)) + log_sum){{ " + all_spread" if smooth else "" }}; }
        if ignored { value = 0.0; }
        loss_put(row, value);
        loss_put(p.rows + row, own);
        {% endif %}
    }
    {% else %}
    {% if smooth and not soft %}
    var weights = 0.0;
    for (var c = lane_of(thread); c < extent; c += {{ lanes }}u) { weights += weight_of(c) * p.share; }
    let whole = p.keep * own + row_sum(weights, thread);
    {% elif soft %}
    let whole = loss_at(p.rows + min(row, p.rows - 1u));
    {% else %}
    let whole = p.keep * own;
    {% endif %}
    {% if soft %}
    let scale = scale_at(min(row, p.rows - 1u) * p.scale_stride);
    {% else %}
    // Nothing flows to what is ignored, also where a mean of nothing is NaN.
    let scale = select(scale_at(min(row, p.rows - 1u) * p.scale_stride), 0.0, ignored);
    {% endif %}
    let m = lse_at(min(row, p.rows - 1u));
    let log_sum = lse_at(p.rows + min(row, p.rows - 1u));
    for (var at = first; at < extent; at += {{ lanes * width }}u) {
        {% if width == 4 %}
        var quad: array<f32, 4>;
        {% endif %}
        {% for k in range(width) %}
        let c{{ k }} = at + {{ k }}u;
        var r{{ k }} = m_exp((input_at(base + c{{ k }} * p.stride) - m) - log_sum) * whole;
        {% if soft %}
        r{{ k }} -= weight_of(c{{ k }}) * (goal_at(dense + c{{ k }} * p.inner) * p.keep + p.share);
        {% else %}
        {% if smooth %}
        r{{ k }} -= weight_of(c{{ k }}) * p.share;
        {% endif %}
        r{{ k }} -= select(0.0, p.keep * own, i32(c{{ k }}) == label);
        if ignored { r{{ k }} = 0.0; }
        {% endif %}
        {% if width == 4 %}
        quad[{{ k }}] = r{{ k }} * scale;
        {% else %}
        result_put(dense + c{{ k }} * p.inner, r{{ k }} * scale);
        {% endif %}
        {% endfor %}
        {% if width == 4 %}
        result_put4(dense + at, quad, dense + extent);
        {% endif %}
    }
    {% endif %}
}
