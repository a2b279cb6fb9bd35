{#-
Cross-entropy from logits; a row has all classes of one example.

pass: `forward` writes loss [2, total] (the losses, and the weight of each in a mean) and lse [2, total]. Both
  parts of lse add up to the log-sum-exp: the largest logit, and the logarithm of the sum relative to it. The
  logits are read once; twice if targets are soft or smoothed.
`backward` writes the gradient of the logits, contiguous, from the log-sum-exps (with `soft` also the
weights); with `inplace` over the logits.
`both` does both over the logits: losses, and the gradient from the row's own statistics.
The rows are those from `first` on of `total`, the rows of targets, losses, log-sum-exps and scales.
dtype: of the logits (any strides) and their gradient · targets: their dtype
weight: dtype of the class weights, or ""
soft: targets are probabilities in the logits' shape (contiguous), not classes · smooth: label smoothing
threads_per_row, across: see row_reduce · width: elements of a step, 4 if rows are aligned quads, else 1
ragged: with a width of 4, the extent is not a multiple of 4; rows are padded in memory
cached_elements: elements of workgroup memory in which `both` keeps a row, to read it once; else 0. Needs a width of
  4 and at least 256 threads for each row.
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{#- 16-bit logits and gradients need exponentials of their precision only, and arithmetic faster than
memory. -#}
{% set low_precision = dtype in ["f16", "bf16"] %}
{#- Maxima are taken of packed pairs. -#}
{% set pairs = low_precision and width == 4 and pass != "backward" %}
{% if pairs %}{% include "math/packed_halves" %}{% endif %}
{{ t.prelude() }}
struct Params {
    {{ t.row_fields() }}
    first: u32,
    total: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
    ignore_class: i32,
    // 0 if one value scales the gradient of all rows.
    scale_stride: u32,
    // Label smoothing: factor of the label, and the part of every class.
    label_factor: f32,
    class_factor: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.row_offset() }}
{% set next = namespace(binding=0) %}
{% if not inplace %}
{{ rows.input(0, "input", dtype, width) }}
{% set next.binding = 1 %}
{% endif %}
{% if soft %}
{{ t.input(next.binding, "targets", targets) }}
{% else %}
{{ t.index(next.binding, "targets", targets) }}
{{ t.saturate_to_i32() }}
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
{{ rows.functions(threads_per_row, across) }}
{{ rows.steps(width) }}
{{ rows.each("step_exp_down", "m_exp_down", width) }}
{{ rows.each("step_approx_exp2", "m_approx_exp2", width) }}
const LOG2_E = 1.442695;
{% set loop_stride = threads_per_row * width %}
{% set stride = "" if width == 4 else " * p.stride" %}
{% set inner = "" if width == 4 else " * p.inner" %}
{% set source = "result" if inplace else "input" %}

fn weight_of(c: u32) -> f32 { return {{ "weight_at(min(c, p.extent - 1u))" if weight else "1.0" }}; }

// The classes of a step, and their logits; beyond the row, logits are -inf.
{% if width == 4 %}
fn classes(c: u32) -> vec4<u32> { return vec4<u32>(c, c + 1u, c + 2u, c + 3u); }
alias Quad = {{ t.quad_type(dtype) }};
fn mask_padding(q: Quad, c: u32) -> Quad {
    {% if ragged and low_precision %}
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
fn quad(base: u32, c: u32) -> Quad { return mask_padding({{ source }}[(base + c) >> 2u], c); }
fn unpack_quad(q: Quad) -> Step { return {{ t.quad_value(dtype, "q") }}; }
fn logits(base: u32, c: u32) -> Step { return unpack_quad(quad(base, c)); }
{% else %}
fn classes(c: u32) -> u32 { return c; }
fn logits(base: u32, c: u32) -> Step { return {{ source }}_step(base + c * p.stride); }
{% endif %}
{% if cached_elements %}
// Each thread reads only elements that it has written, so no barrier is needed.
var<workgroup> cached_row: array<Quad, {{ cached_elements // 4 }}>;
{% endif %}
// Returns one logit.
fn logit(base: u32, c: u32) -> f32 {
    {% if width == 4 %}
    let v = {{ source }}_step(base + c);
    let component = c & 3u;
    return select(select(v.x, v.y, component == 1u), select(v.z, v.w, component == 3u), component >= 2u);
    {% else %}
    return {{ source }}_step(base + c{{ stride }});
    {% endif %}
}
fn finite_max(m: f32) -> f32 { return select(m, 0.0, m_bits(m) == 0xff800000u); }
// Returns the part of a row's target that a class gets in addition to the label's own part.
fn shared_part(c: u32, dense: u32) -> f32 {
    return weight_of(c)
        * {{ "(targets_at(dense + c * p.inner) * p.label_factor + p.class_factor)" if soft else "p.class_factor" }};
}

@compute @workgroup_size({{ threads_per_row if threads_per_row > 256 else 256 }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if pass == "both" %}
    // Workgroups begin with the last rows, which the previous product has left in the cache. The next product
    // then finds the first rows there.
    let row = p.rows - 1u - row_of(group_index(group, groups), thread);
    {% else %}
    let row = row_of(group_index(group, groups), thread);
    {% endif %}
    let live = row < p.rows;
    let target_row = p.first + min(row, p.rows - 1u);
    // Threads without a row take part in the barriers only.
    let extent = select(0u, p.extent, live);
    let first = thread_in_row(thread) * {{ width }}u;
    let base = row_offset(row);
    let dense = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% if not soft %}
    var label = 0i;
    if live { label = saturate_to_i32(targets_words(target_row)); }
    let ignored = label == p.ignore_class;
    let valid = live && label >= 0i && label < i32(p.extent);
    // A label that is no class gives NaN, so that the error is visible.
    var label_weight = m_nan();
    if valid { label_weight = weight_of(u32(label)); }
    if ignored { label_weight = 0.0; }
    {% endif %}
    {% if pass != "backward" %}
    {% if not soft %}
    // The label's logit is read before other threads overwrite it.
    var label_logit = 0.0;
    if valid && thread_in_row(thread) == 0u { label_logit = logit(base, u32(label)); }
    {% if pass == "both" %}
    storageBarrier();
    {% endif %}
    {% endif %}
    {% set unroll = 4 if width == 4 else 8 %}
    {% if cached_elements %}
    {#- As many loads in flight as registers hold, in iterations of equal length. -#}
    {% set steps_per_thread = (cached_elements // 4 + threads_per_row - 1) // threads_per_row %}
    {% set max_unroll = 12 if threads_per_row == 256 else 6 %}
    {% set unrolled_iterations = (steps_per_thread + max_unroll - 1) // max_unroll %}
    {% set unroll = (steps_per_thread + unrolled_iterations - 1) // unrolled_iterations %}
    {% endif %}
    var largest = m_from_bits(0xff800000u);
    var sum = 0.0;
    {% if pairs %}
    var packed_max = {{ "0xff80ff80u" if dtype == "bf16" else "0xfc00fc00u" }};
    var nan_marks = 0u;
    {% elif low_precision %}
    var max_magnitude = 0u;
    {% endif %}
    for (var at = first; at < extent; at += {{ loop_stride * unroll }}u) {
        {% for k in range(unroll) %}
        let in{{ k }} = at + {{ k * loop_stride }}u < extent;
        let c{{ k }} = select(at, at + {{ k * loop_stride }}u, in{{ k }});
        let {{ "q" if width == 4 else "x" }}{{ k }} = {{ "quad" if width == 4 else "logits" }}(base, c{{ k }});
        {% endfor %}
        {% if width == 4 %}
        {% for k in range(unroll) %}
        {% if cached_elements %}
        cached_row[c{{ k }} >> 2u] = q{{ k }};
        {% endif %}
        let x{{ k }} = unpack_quad(q{{ k }});
        {% endfor %}
        {% endif %}
        let old_max = largest;
        {% for k in range(unroll) %}
        {% if pairs %}
        packed_max = m_pair_{{ dtype }}_max(packed_max, m_pair_{{ dtype }}_max(q{{ k }}.x, q{{ k }}.y));
        nan_marks = m_pair_{{ dtype }}_mark_nan(m_pair_{{ dtype }}_mark_nan(nan_marks, q{{ k }}.x), q{{ k }}.y);
        {% elif low_precision %}
        max_magnitude = max(max_magnitude, m_bits(x{{ k }}) & 0x7fffffffu);
        largest = max(largest, x{{ k }});
        {% else %}
        largest = m_max(largest, step_max(x{{ k }}));
        {% endif %}
        {% endfor %}
        {% if pairs %}
        largest = max(m_pair_{{ dtype }}_unpack(packed_max).x, m_pair_{{ dtype }}_unpack(packed_max).y);
        {% endif %}
        let running_max = finite_max(largest);
        sum *= m_exp_down(old_max - running_max);
        {% for k in range(unroll) %}
        sum += select(0.0,
            step_sum(
                {{ "step_approx_exp2((x" ~ k ~ " - running_max) * LOG2_E)" if low_precision
                    else "step_exp_down(x" ~ k ~ " - running_max)" }}),
            in{{ k }});
        {% endfor %}
    }
    {% if pairs %}
    let half_maxima = m_pair_{{ dtype }}_unpack(packed_max);
    if m_isnan(half_maxima.x) | m_isnan(half_maxima.y) | ((nan_marks & 0x80008000u) != 0u) { largest = m_nan(); }
    {% elif low_precision %}
    // Bits above those of infinity are NaN, which `max` may ignore.
    if max_magnitude > 0x7f800000u { largest = m_nan(); }
    {% endif %}
    let m = row_max(largest, thread);
    let total = row_sum(sum * m_exp_down(finite_max(largest) - finite_max(m)), thread);
    // Separate from m, which would round away the small loss of a confident example.
    let log_sum = select(m_nan(), m_log(total), m_isfinite(m));
    {% if soft or smooth %}
    var thread_loss = 0.0;
    var thread_weight = 0.0;
    for (var c = thread_in_row(thread); c < extent; c += {{ threads_per_row }}u) {
        let w = shared_part(c, dense);
        thread_weight += w;
        thread_loss += w * ((m - logit(base, c)) + log_sum);
    }
    let row_loss = row_sum(thread_loss, thread);
    let row_weight = row_sum(thread_weight, thread);
    {% endif %}
    if live && thread_in_row(thread) == 0u {
        {% if pass == "forward" %}
        lse_put(target_row, m);
        lse_put(p.total + target_row, log_sum);
        {% endif %}
        {% if soft %}
        loss_put(target_row, row_loss);
        loss_put(p.total + target_row, row_weight);
        {% else %}
        var value = m_nan();
        if valid {
            value = p.label_factor * label_weight * ((m - label_logit) + log_sum){{ " + row_loss" if smooth else "" }};
        }
        if ignored { value = 0.0; }
        loss_put(target_row, value);
        loss_put(p.total + target_row, label_weight);
        {% endif %}
    }
    {% endif %}
    {% if pass != "forward" %}
    {% if pass == "both" %}
    {% if smooth %}
    let target_sum = p.label_factor * label_weight + row_weight;
    {% else %}
    let target_sum = p.label_factor * label_weight;
    {% endif %}
    {% else %}
    let m = lse_at(target_row);
    let log_sum = lse_at(p.total + target_row);
    {% if smooth and not soft %}
    var thread_weight = 0.0;
    for (var c = thread_in_row(thread); c < extent; c += {{ threads_per_row }}u) {
        thread_weight += shared_part(c, dense);
    }
    let target_sum = p.label_factor * label_weight + row_sum(thread_weight, thread);
    {% elif soft %}
    let target_sum = loss_at(p.total + target_row);
    {% else %}
    let target_sum = p.label_factor * label_weight;
    {% endif %}
    {% endif %}
    // A row with NaN or an infinity has a NaN gradient.
    let target_sum_or_nan = select(m_nan(), target_sum, m_isfinite(m));
    {% if soft %}
    let scale = scale_at(target_row * p.scale_stride);
    {% else %}
    // Ignored examples get zero, also if the mean over no examples is NaN.
    let scale = select(scale_at(target_row * p.scale_stride), 0.0, ignored);
    {% endif %}
    {% if not soft and not smooth %}
    let gain = target_sum_or_nan * scale;
    {% endif %}
    {% set unroll = 4 %}
    {% if pass == "both" %}
    // From the end of the row, which was read last.
    for (var iteration = (max(extent, first) - first + {{ loop_stride * unroll - 1 }}u) / {{ loop_stride * unroll }}u;
        iteration > 0u; iteration--) {
        let at = first + (iteration - 1u) * {{ loop_stride * unroll }}u;
    {% else %}
    for (var at = first; at < extent; at += {{ loop_stride * unroll }}u) {
    {% endif %}
        {% for k in range(unroll) %}
        let c{{ k }} = at + {{ k * loop_stride }}u;
        let in{{ k }} = c{{ k }} < extent;
        {% if cached_elements %}
        let clamped{{ k }} = select(at, c{{ k }}, in{{ k }});
        let x{{ k }} = unpack_quad(cached_row[clamped{{ k }} >> 2u]);
        {% else %}
        let x{{ k }} = logits(base, select(at, c{{ k }}, in{{ k }}));
        {% endif %}
        {% endfor %}
        {% for k in range(unroll) %}
        if in{{ k }} {
            {% if low_precision %}
            let e{{ k }} = step_approx_exp2((x{{ k }} - m) * LOG2_E - log_sum * LOG2_E);
            {% else %}
            let e{{ k }} = step_exp_down((x{{ k }} - m) - log_sum);
            {% endif %}
            {% if soft or smooth %}
            {% if width == 4 %}
            var r = e{{ k }} * target_sum_or_nan - Step({% for i in range(4) %}
                shared_part(c{{ k }} + {{ i }}u, dense){{ ", " if not loop.last }}{% endfor %});
            {% else %}
            var r = e{{ k }} * target_sum_or_nan - shared_part(c{{ k }}, dense);
            {% endif %}
            {% if not soft %}
            r -= select(Step(0.0), Step(p.label_factor * label_weight), classes(c{{ k }}) == classes_of_label(label));
            {% endif %}
            r *= scale;
            {% else %}
            var r = e{{ k }} * gain;
            if bitcast<u32>(label) / {{ width }}u == c{{ k }} / {{ width }}u {
                r = select(r, (e{{ k }} * target_sum_or_nan - Step(target_sum)) * scale,
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
