{#-
Cross-entropy from logits; a row has all classes of one example.

pass: `forward` writes loss [2, total] (the losses, and the weight of each in a mean) and lse [2, total]. Both
  parts of lse add up to the log-sum-exp: the largest logit, and the logarithm of the sum relative to it. The
  logits are read once; twice if targets are soft or smoothed.
`backward` writes the gradient of the logits, contiguous, from the log-sum-exps (with `soft` also the
weights); with `inplace` over the logits.
`both` does both over the logits: losses, and the gradient from the row's own statistics.
The rows are those from `first` on of `total`, the rows of targets, losses, log-sum-exps and scales.
dtype: of the logits (any strides) and their gradient · goal: of the targets
weight: dtype of the class weights, or ""
soft: targets are probabilities in the logits' shape (contiguous), not classes · smooth: label smoothing
lanes, across: see row_reduce · width: elements of a step, 4 if rows are aligned quads, else 1
ragged: with a width of 4, the extent is no multiple of 4; rows are padded in memory
held: with a width of 4 and at least 256 lanes, elements of workgroup memory in which `both` keeps a row, to
  read it once; else 0
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{#- 16-bit logits and gradients need exponentials of their precision only, and arithmetic faster than
memory. -#}
{% set near = dtype in ["f16", "bf16"] %}
{#- Maxima are taken of packed pairs. -#}
{% set pairs = near and width == 4 and pass != "backward" %}
{% if pairs %}{% include "math/packed_halves" %}{% endif %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    first: u32,
    total: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
    ignore_class: i32,
    // 0 if one value scales the gradient of all rows.
    scale_stride: u32,
    // Label smoothing: factor of the label, and the part of every class.
    keep: f32,
    share: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=0) %}
{% if not inplace %}
{{ rows.input(0, "input", dtype, width) }}
{% set next.binding = 1 %}
{% endif %}
{% if soft %}
{{ t.input(next.binding, "goal", goal) }}
{% else %}
{{ t.index(next.binding, "goal", goal) }}
{{ t.narrowed() }}
{% endif %}
{% set next.binding = next.binding + 1 %}
{% if weight %}
{{ t.input(next.binding, "weight", weight) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% set outputs = {"forward": ["loss", "lse"], "both": ["loss"], "backward": []}[pass] %}
{% set inputs = {"forward": [], "both": ["scale"], "backward": (["loss"] if soft else []) + ["lse", "scale"]}[pass] %}
{% for name in outputs %}
{{ t.output(next.binding, name, "f32") }}
{% set next.binding = next.binding + 1 %}
{% endfor %}
{% for name in inputs %}
{{ t.input(next.binding, name, "f32") }}
{% set next.binding = next.binding + 1 %}
{% endfor %}
{% if pass != "forward" %}
{{ rows.output(next.binding, "result", dtype, width) }}
{% endif %}
{{ rows.functions(lanes, across) }}
{{ rows.steps(width) }}
{{ rows.each("step_exp_down", "m_exp_down", width) }}
{{ rows.each("step_near_exp2", "m_near_exp2", width) }}
const LOG2_E = 1.442695;
{% set reach = lanes * width %}
{% set stride = "" if width == 4 else " * p.stride" %}
{% set inner = "" if width == 4 else " * p.inner" %}
{% set source = "result" if inplace else "input" %}

fn weight_of(c: u32) -> f32 { return {{ "weight_at(min(c, p.extent - 1u))" if weight else "1.0" }}; }

// The classes of a step, and their logits; beyond the row, logits are -inf.
{% if width == 4 %}
fn classes(c: u32) -> vec4<u32> { return vec4<u32>(c, c + 1u, c + 2u, c + 3u); }
alias Quad = {{ t.quad_type(dtype) }};
fn within(q: Quad, c: u32) -> Quad {
    {% if ragged and near %}
    let inside = classes(c) < vec4<u32>(p.extent);
    let low = select(vec2<u32>({{ "0xff80u" if dtype == "bf16" else "0xfc00u" }}), q & vec2<u32>(0xffffu), inside.xz);
    let high = select(vec2<u32>({{ "0xff800000u" if dtype == "bf16" else "0xfc000000u" }}),
        q & vec2<u32>(0xffff0000u), inside.yw);
    return low | high;
    {% elif ragged %}
    return select(Quad(m_from_bits(0xff800000u)), q, classes(c) < vec4<u32>(p.extent));
    {% else %}
    return q;
    {% endif %}
}
fn quad(base: u32, c: u32) -> Quad { return within({{ source }}[(base + c) >> 2u], c); }
fn numbers(q: Quad) -> Step { return {{ t.quad_value(dtype, "q") }}; }
fn logits(base: u32, c: u32) -> Step { return numbers(quad(base, c)); }
{% else %}
fn classes(c: u32) -> u32 { return c; }
fn logits(base: u32, c: u32) -> Step { return {{ source }}_step(base + c * p.stride); }
{% endif %}
{% if held %}
// Each thread reads only its own elements here, so no barrier is needed.
var<workgroup> row: array<Quad, {{ held // 4 }}>;
{% endif %}
// Returns one logit.
fn logit(base: u32, c: u32) -> f32 {
    {% if width == 4 %}
    let v = {{ source }}_step(base + c);
    let lane = c & 3u;
    return select(select(v.x, v.y, lane == 1u), select(v.z, v.w, lane == 3u), lane >= 2u);
    {% else %}
    return {{ source }}_step(base + c{{ stride }});
    {% endif %}
}
fn anchor(m: f32) -> f32 { return select(m, 0.0, m_bits(m) == 0xff800000u); }
// Returns the part of a row's target that a class gets in addition to the label's own part.
fn shared_part(c: u32, dense: u32) -> f32 {
    return weight_of(c) * {{ "(goal_at(dense + c * p.inner) * p.keep + p.share)" if soft else "p.share" }};
}

@compute @workgroup_size({{ lanes if lanes > 256 else 256 }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if pass == "both" %}
    // Last rows first: the previous product has left them in the cache, and the next one finds the first rows
    // there.
    let number = p.rows - 1u - row_of(group_index(group, groups), thread);
    {% else %}
    let number = row_of(group_index(group, groups), thread);
    {% endif %}
    let live = number < p.rows;
    let place = p.first + min(number, p.rows - 1u);
    // Threads without a row take part in the barriers only.
    let extent = select(0u, p.extent, live);
    let first = lane_of(thread) * {{ width }}u;
    var base = p.offset;
    var left = number;
    {{ t.walk([("base", "strides")]) }}
    let dense = (number / p.inner) * p.extent * p.inner + number % p.inner;
    {% if not soft %}
    var label = 0i;
    if live { label = narrowed(goal_words(place)); }
    let ignored = label == p.ignore_class;
    let valid = live && label >= 0i && label < i32(p.extent);
    // A label that is no class gives NaN, so that the error is visible.
    var own = m_nan();
    if valid { own = weight_of(u32(label)); }
    if ignored { own = 0.0; }
    {% endif %}
    {% if pass != "backward" %}
    {% if not soft %}
    // Read before other threads overwrite it.
    var own_logit = 0.0;
    if valid && lane_of(thread) == 0u { own_logit = logit(base, u32(label)); }
    {% if pass == "both" %}
    storageBarrier();
    {% endif %}
    {% endif %}
    {% set turn = 4 if width == 4 else 8 %}
    {% if held %}
    {#- As many loads in flight as registers hold, in iterations of equal length. -#}
    {% set each = (held // 4 + lanes - 1) // lanes %}
    {% set most = 12 if lanes == 256 else 6 %}
    {% set turns = (each + most - 1) // most %}
    {% set turn = (each + turns - 1) // turns %}
    {% endif %}
    var largest = m_from_bits(0xff800000u);
    var sum = 0.0;
    {% if pairs %}
    var larger = {{ "0xff80ff80u" if dtype == "bf16" else "0xfc00fc00u" }};
    var marks = 0u;
    {% elif near %}
    var magnitude = 0u;
    {% endif %}
    for (var at = first; at < extent; at += {{ reach * turn }}u) {
        {% for k in range(turn) %}
        let in{{ k }} = at + {{ k * reach }}u < extent;
        let c{{ k }} = select(at, at + {{ k * reach }}u, in{{ k }});
        let {{ "q" if width == 4 else "x" }}{{ k }} = {{ "quad" if width == 4 else "logits" }}(base, c{{ k }});
        {% endfor %}
        {% if width == 4 %}
        {% for k in range(turn) %}
        {% if held %}
        row[c{{ k }} >> 2u] = q{{ k }};
        {% endif %}
        let x{{ k }} = numbers(q{{ k }});
        {% endfor %}
        {% endif %}
        let before = largest;
        {% for k in range(turn) %}
        {% if pairs %}
        larger = m_pair_{{ dtype }}_larger(larger, m_pair_{{ dtype }}_larger(q{{ k }}.x, q{{ k }}.y));
        marks = m_pair_{{ dtype }}_marked(m_pair_{{ dtype }}_marked(marks, q{{ k }}.x), q{{ k }}.y);
        {% elif near %}
        magnitude = max(magnitude, m_bits(x{{ k }}) & 0x7fffffffu);
        largest = max(largest, x{{ k }});
        {% else %}
        largest = m_max(largest, step_max(x{{ k }}));
        {% endif %}
        {% endfor %}
        {% if pairs %}
        largest = max(m_pair_{{ dtype }}_numbers(larger).x, m_pair_{{ dtype }}_numbers(larger).y);
        {% endif %}
        let now = anchor(largest);
        sum *= m_exp_down(before - now);
        {% for k in range(turn) %}
        sum += select(0.0,
            step_sum(
                {{ "step_near_exp2((x" ~ k ~ " - now) * LOG2_E)" if near else "step_exp_down(x" ~ k ~ " - now)" }}),
            in{{ k }});
        {% endfor %}
    }
    {% if pairs %}
    let ends = m_pair_{{ dtype }}_numbers(larger);
    if m_isnan(ends.x) | m_isnan(ends.y) | ((marks & 0x80008000u) != 0u) { largest = m_nan(); }
    {% elif near %}
    // Bits above those of infinity are NaN, which `max` may ignore.
    if magnitude > 0x7f800000u { largest = m_nan(); }
    {% endif %}
    let m = row_max(largest, thread);
    let total = row_sum(sum * m_exp_down(anchor(largest) - anchor(m)), thread);
    // Separate from m, which would round away the small loss of a confident example.
    let log_sum = select(m_nan(), m_log(total), m_isfinite(m));
    {% if soft or smooth %}
    var spread = 0.0;
    var weights = 0.0;
    for (var c = lane_of(thread); c < extent; c += {{ lanes }}u) {
        let w = shared_part(c, dense);
        weights += w;
        spread += w * ((m - logit(base, c)) + log_sum);
    }
    let all_spread = row_sum(spread, thread);
    let all_weights = row_sum(weights, thread);
    {% endif %}
    if live && lane_of(thread) == 0u {
        {% if pass == "forward" %}
        lse_put(place, m);
        lse_put(p.total + place, log_sum);
        {% endif %}
        {% if soft %}
        loss_put(place, all_spread);
        loss_put(p.total + place, all_weights);
        {% else %}
        var value = m_nan();
        if valid { value = p.keep * own * ((m - own_logit) + log_sum){{ " + all_spread" if smooth else "" }}; }
        if ignored { value = 0.0; }
        loss_put(place, value);
        loss_put(p.total + place, own);
        {% endif %}
    }
    {% endif %}
    {% if pass != "forward" %}
    {% if pass == "both" %}
    {% if smooth %}
    let sum_of_row = p.keep * own + all_weights;
    {% else %}
    let sum_of_row = p.keep * own;
    {% endif %}
    {% else %}
    let m = lse_at(place);
    let log_sum = lse_at(p.total + place);
    {% if smooth and not soft %}
    var weights = 0.0;
    for (var c = lane_of(thread); c < extent; c += {{ lanes }}u) { weights += shared_part(c, dense); }
    let sum_of_row = p.keep * own + row_sum(weights, thread);
    {% elif soft %}
    let sum_of_row = loss_at(p.total + place);
    {% else %}
    let sum_of_row = p.keep * own;
    {% endif %}
    {% endif %}
    // A row with NaN or an infinity has a NaN gradient.
    let whole = select(m_nan(), sum_of_row, m_isfinite(m));
    {% if soft %}
    let scale = scale_at(place * p.scale_stride);
    {% else %}
    // Ignored examples get zero, also if the mean over no examples is NaN.
    let scale = select(scale_at(place * p.scale_stride), 0.0, ignored);
    {% endif %}
    {% if not soft and not smooth %}
    let gain = whole * scale;
    {% endif %}
    {% set turn = 4 %}
    {% if pass == "both" %}
    // From the end of the row, which was read last.
    for (var turn = (max(extent, first) - first + {{ reach * turn - 1 }}u) / {{ reach * turn }}u; turn > 0u; turn--) {
        let at = first + (turn - 1u) * {{ reach * turn }}u;
    {% else %}
    for (var at = first; at < extent; at += {{ reach * turn }}u) {
    {% endif %}
        {% for k in range(turn) %}
        let c{{ k }} = at + {{ k * reach }}u;
        let in{{ k }} = c{{ k }} < extent;
        {% if held %}
        let near{{ k }} = select(at, c{{ k }}, in{{ k }});
        let x{{ k }} = numbers(row[near{{ k }} >> 2u]);
        {% else %}
        let x{{ k }} = logits(base, select(at, c{{ k }}, in{{ k }}));
        {% endif %}
        {% endfor %}
        {% for k in range(turn) %}
        if in{{ k }} {
            {% if near %}
            let e{{ k }} = step_near_exp2((x{{ k }} - m) * LOG2_E - log_sum * LOG2_E);
            {% else %}
            let e{{ k }} = step_exp_down((x{{ k }} - m) - log_sum);
            {% endif %}
            {% if soft or smooth %}
            {% if width == 4 %}
            var r = e{{ k }} * whole - Step({% for i in range(4) %}
                shared_part(c{{ k }} + {{ i }}u, dense){{ ", " if not loop.last }}{% endfor %});
            {% else %}
            var r = e{{ k }} * whole - shared_part(c{{ k }}, dense);
            {% endif %}
            {% if not soft %}
            r -= select(Step(0.0), Step(p.keep * own), classes(c{{ k }}) == classes_of_label(label));
            {% endif %}
            r *= scale;
            {% else %}
            var r = e{{ k }} * gain;
            if bitcast<u32>(label) / {{ width }}u == c{{ k }} / {{ width }}u {
                r = select(r, (e{{ k }} * whole - Step(sum_of_row)) * scale,
                    classes(c{{ k }}) == classes_of_label(label));
            }
            {% endif %}
            {% if not soft %}
            if ignored { r = Step(0.0); }
            {% endif %}
            result_put_step({{ "base + c" ~ k ~ stride if inplace else "dense + c" ~ k ~ inner }}, r);
        }
        {% endfor %}
    }
    {% endif %}
}
{% if not soft %}
{% if width == 4 %}
fn classes_of_label(label: i32) -> vec4<u32> { return vec4<u32>(bitcast<u32>(label)); }
{% else %}
fn classes_of_label(label: i32) -> u32 { return bitcast<u32>(label); }
{% endif %}
{% endif %}
