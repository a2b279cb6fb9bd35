{#-
Normalisation of rows, forward and the gradient of the input. Parameters define rows and weights, so one
kernel serves layer, group, instance and RMS normalisation:
  element e of row r is at r * row_stride + (e / run) * step + e % run,
  and has weight (r % weight_rows) * weight_row + (e / run) * weight_step + (e % run) * weight_inner.

stage: `whole`: the threads of a row process it in one launch. Long rows are processed in `p.splits` parts.
  `parts` writes two sums for each, partial [parts, 2, rows]: of the elements, and of squared distances from
  the part's mean. Backward, these are the addends of `sums` [2, rows]. `finish` computes mean and rstd from
  them; `apply` computes the elements.
pass: `forward` or `backward` · x, g, result, weight, bias: dtypes, or "" for what the stage does not bind
activation: applied to the result; see row_reduce
rms: no mean is subtracted
contiguous: a row is contiguous · flat: a row is one run. Each saves a division.
one_weight: the elements of a pack share a weight
channel_sums (apply, backward): `sums` [batch, 2, channels] are of channels, as norm_weight_grad writes them
threads_per_row, across, width: see row_reduce; runs, steps and rows are multiples of the width
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% if activation == "silu" %}{% for file in rows.activation_math %}{% include "math/" ~ file %}{% endfor %}{% endif %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    run: u32,
    step: u32,
    row_stride: u32,
    weight_rows: u32,
    weight_row: u32,
    weight_step: u32,
    weight_inner: u32,
    eps: f32,
    splits: u32,
    chunk: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=0) %}
{% set forward = pass == "forward" %}
{% set parts = range(2 if width == 8 else 1) %}
{{ rows.packs(width) }}
{% if stage == "finish" %}
{{ t.input(next.binding, "partial", "f32") }}
{% set next.binding = next.binding + 1 %}
{% else %}
{% if not forward %}
{{ rows.pack_input(next.binding, "g", g, width) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{{ rows.pack_input(next.binding, "x", x, width) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if weight %}
{{ t.input(next.binding, "weight", weight) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if bias %}
{{ t.input(next.binding, "bias", bias) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% set stored = forward and stage in ["whole", "finish"] %}
{% set statistics = ["rstd"] if rms else ["mean", "rstd"] %}
{% for name in statistics if stage != "parts" or not forward %}
{% if stored %}
{{ t.output(next.binding, name, "f32") }}
{% else %}
{{ t.input(next.binding, name, "f32") }}
{% endif %}
{% set next.binding = next.binding + 1 %}
{% endfor %}
{% if stage == "parts" %}
{{ t.output(next.binding, "partial", "f32") }}
{% elif stage != "finish" %}
{% if stage == "apply" and not forward %}
{{ t.input(next.binding, "sums", "f32") }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{{ rows.pack_output(next.binding, "result", result, width) }}
{% endif %}
{{ rows.functions(threads_per_row, across) }}
{{ rows.activation_functions(activation, width) }}

{% if contiguous %}
fn element_index(row: u32, e: u32) -> u32 { return row * p.row_stride + e; }
{% else %}
fn element_index(row: u32, e: u32) -> u32 { return row * p.row_stride + (e / p.run) * p.step + e % p.run; }
{% endif %}
{% if flat %}
fn weight_index(row: u32, e: u32) -> u32 { return (row % p.weight_rows) * p.weight_row + e * p.weight_inner; }
{% else %}
fn weight_index(row: u32, e: u32) -> u32 {
    return (row % p.weight_rows) * p.weight_row + (e / p.run) * p.weight_step + (e % p.run) * p.weight_inner;
}
{% endif %}
{% for name in (["weight"] if weight else []) + (["bias"] if bias else []) %}
fn {{ name }}_pack(at: u32) -> Pack {
    {% if one_weight or width == 1 %}
    let v = Part({{ name }}_at(at));
    return Pack({{ "v, v" if width == 8 else "v" }});
    {% else %}
    {% for k in parts %}
    let v{{ k }} = Part({% for c in range(4) %}{{ name }}_at(at + {{ 4 * k + c }}u * p.weight_inner), {% endfor %});
    {% endfor %}
    return Pack({{ "v0, v1" if width == 8 else "v0" }});
    {% endif %}
}
{% endfor %}
{% macro load_weights() %}
        {% if weight or bias %}
        let weight_of = weight_index(row, e);
        {% endif %}
        {% if weight %}
        let w = weight_pack(weight_of);
        {% endif %}
        {% if bias %}
        let b = bias_pack(weight_of);
        {% endif %}
{% endmacro %}
{% macro scaled(z, k) %}{{ z }}{{ " * w[" ~ k ~ "]" if weight }}{{ " + b[" ~ k ~ "]" if bias }}{% endmacro %}
{#- Defines, for each part k of the pack e: zK, the normalised elements, and hK, their gradients. -#}
{% macro gradients() %}
        let at = element_index(row, e);
        let x_pack = x_load(at);
        let g_pack = g_load(at);
        {{ load_weights() }}
        {% for k in parts %}
        let z{{ k }} = (x_pack[{{ k }}] - mean) * rstd;
        {% if activation %}
        let dy{{ k }} = activate_grad(g_pack[{{ k }}], {{ scaled("z" ~ k, k) }});
        {% else %}
        let dy{{ k }} = g_pack[{{ k }}];
        {% endif %}
        let h{{ k }} = dy{{ k }}{{ " * w[" ~ k ~ "]" if weight }};
        {% endfor %}
{% endmacro %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = row_of(group_index(group, groups), thread);
    let row = index % p.rows;
    // Threads without a row take part in the barriers.
    {% if stage in ["parts", "apply"] %}
    let part = index / p.rows;
    let live = part < p.splits;
    let begin = part * p.chunk;
    let end = select(0u, min(begin + p.chunk, p.extent), live);
    {% else %}
    let live = index < p.rows;
    let begin = 0u;
    let end = select(0u, {{ "p.splits" if stage == "finish" else "p.extent" }}, live);
    {% endif %}
    let first = begin + thread_in_row(thread) * {{ width }}u;
    let count = max(end, begin + 1u) - begin;
    let n = f32({{ "count" if stage == "parts" else "p.extent" }});
    {% if stage == "finish" %}
    {% if rms %}
    let mean = 0.0;
    {% else %}
    var sum = 0.0;
    for (var e = first; e < end; e += {{ threads_per_row }}u) { sum += partial_at(e * 2u * p.rows + row); }
    let mean = row_sum(sum, thread) / n;
    {% endif %}
    // The squares of a part are relative to its own mean.
    var part_squares = 0.0;
    for (var e = first; e < end; e += {{ threads_per_row }}u) {
        let at = e * 2u * p.rows + row;
        {% if rms %}
        part_squares += partial_at(at + p.rows);
        {% else %}
        let elements = f32(min(p.chunk, p.extent - e * p.chunk));
        let deviation = partial_at(at) / elements - mean;
        part_squares += partial_at(at + p.rows) + elements * (deviation * deviation);
        {% endif %}
    }
    let squares = row_sum(part_squares, thread);
    {% elif forward and stage != "apply" %}
    var square_part = Part(0.0);
    {% if rms %}
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let v = x_load(element_index(row, e));
        {% for k in parts %}
        square_part += v[{{ k }}] * v[{{ k }}];
        {% endfor %}
    }
    let squares = row_sum(part_sum(square_part), thread);
    let total = 0.0;
    let mean = 0.0;
    {% else %}
    // One loop computes both sums, relative to a pivot: the mean of each thread's first elements. The pivot's
    // distance from the mean of all is bounded by their deviation, so the difference below loses few digits.
    var head = Part(0.0);
    if first < end {
        let v = x_load(element_index(row, first));
        head = {{ "v[0] + v[1]" if width == 8 else "v[0]" }};
    }
    let pivot = row_sum(part_sum(head), thread) / f32(min({{ threads_per_row * width }}u, count));
    var plain_part = Part(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let v = x_load(element_index(row, e));
        {% for k in parts %}
        let d{{ k }} = v[{{ k }}] - pivot;
        plain_part += d{{ k }};
        square_part += d{{ k }} * d{{ k }};
        {% endfor %}
    }
    let both = row_sums(vec2<f32>(part_sum(plain_part), part_sum(square_part)), thread);
    let offset = both.x / n;
    let mean = pivot + offset;
    let total = pivot * n + both.x;
    let squares = m_max(both.y - both.x * offset, 0.0);
    {% endif %}
    {% endif %}
    {% if stage == "parts" and forward %}
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.rows + row, total);
        partial_put((part * 2u + 1u) * p.rows + row, squares);
    }
    {% elif stored %}
    let rstd = m_rsqrt(squares / n + p.eps);
    if live && thread_in_row(thread) == 0u {
        {% if not rms %}
        mean_put(row, mean);
        {% endif %}
        rstd_put(row, rstd);
    }
    {% else %}
    let mean = {{ "0.0" if rms else "mean_at(row)" }};
    let rstd = rstd_at(row);
    {% endif %}
    {% if not forward and stage == "apply" %}
    {% if channel_sums %}
    let channels = p.weight_rows * p.weight_row;
    let first_channel = (row % p.weight_rows) * p.weight_row;
    let sums_of = (row / p.weight_rows) * 2u * channels + first_channel;
    let channel_end = select(0u, p.weight_row, live);
    var both = vec2<f32>(0.0);
    for (var c = thread_in_row(thread); c < channel_end; c += {{ threads_per_row }}u) {
        both += vec2<f32>(sums_at(sums_of + channels + c), sums_at(sums_of + c))
            {{ " * weight_at(first_channel + c)" if weight }};
    }
    let means = row_sums(both, thread) / n;
    let mean_plain = means.x;
    let mean_scaled = means.y;
    {% else %}
    let mean_plain = {{ "0.0" if rms else "sums_at(row) / n" }};
    let mean_scaled = sums_at(p.rows + row) / n;
    {% endif %}
    {% elif not forward %}
    var plain_part = Part(0.0);
    var scaled_part = Part(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        {{ gradients() }}
        {% for k in parts %}
        plain_part += h{{ k }};
        scaled_part += h{{ k }} * z{{ k }};
        {% endfor %}
    }
    let plain = part_sum(plain_part);
    let scaled = part_sum(scaled_part);
    {% if stage == "parts" %}
    let both_sums = row_sums(vec2<f32>(plain, scaled), thread);
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.rows + row, both_sums.x);
        partial_put((part * 2u + 1u) * p.rows + row, both_sums.y);
    }
    {% else %}
    let mean_plain = {{ "0.0" if rms else "row_sum(plain, thread) / n" }};
    let mean_scaled = row_sum(scaled, thread) / n;
    {% endif %}
    {% endif %}
    {% if stage in ["whole", "apply"] %}
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        {% if forward %}
        let at = element_index(row, e);
        let x_pack = x_load(at);
        {{ load_weights() }}
        {% for k in parts %}
        let z{{ k }} = (x_pack[{{ k }}] - mean) * rstd;
        let y{{ k }} = {{ scaled("z" ~ k, k) }};
        {% endfor %}
        result_store(at, Pack({% for k in parts %}activate(y{{ k }}), {% endfor %}));
        {% else %}
        {{ gradients() }}
        {% for k in parts %}
        let d{{ k }} = rstd * ((h{{ k }} - mean_plain) - z{{ k }} * mean_scaled);
        {% endfor %}
        result_store(at, Pack({% for k in parts %}d{{ k }}, {% endfor %}));
        {% endif %}
    }
    {% endif %}
}
