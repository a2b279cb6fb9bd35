{#-
Normalisation of rows, forward and the gradient of the input. Parameters define rows and weights, so one
kernel serves layer, group, instance and RMS normalisation:
  element e of row r is at r * row_stride + (e / run) * step + e % run,
  and has weight (r % weight_rows) * weight_row + (e / run) * weight_step + (e % run) * weight_inner.

stage: `whole`: the threads of a row process it in one pass. Long rows are processed in `p.splits` parts.
  `parts` writes two sums for each, partial [parts, 2, rows]: of the elements, and of squared distances from
  the part's mean. Backward, these are the addends of `sums` [2, rows]. `finish` computes mean and rstd from
  them; `apply` computes the elements.
pass: `forward` or `backward` · dtype: of x, y and their gradients · weight, bias: dtypes, or ""
rms: no mean is subtracted
contiguous: a row is contiguous · flat: a row is one run. Each saves a division.
threads_per_row, across, width: see row_reduce; with a width of 4, runs, steps and rows are multiples of 4
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
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
{% if stage == "finish" %}
{{ t.input(next.binding, "partial", "f32") }}
{% set next.binding = next.binding + 1 %}
{% else %}
{% if not forward %}
{{ rows.input(next.binding, "g", dtype, width) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{{ rows.input(next.binding, "x", dtype, width) }}
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
{{ rows.output(next.binding, "result", dtype, width) }}
{% endif %}
{{ rows.functions(threads_per_row, across) }}
{{ rows.steps(width) }}

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
fn {{ name }}_step(at: u32) -> Step {
    {% if width == 4 %}
    return Step({% for k in range(4) %}{{ name }}_at(at + {{ k }}u * p.weight_inner), {% endfor %});
    {% else %}
    return {{ name }}_at(at);
    {% endif %}
}
{% endfor %}

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
    let first = begin + thread_in_row(thread) * {{ width }}u;
    {% else %}
    let live = index < p.rows;
    let end = select(0u, {{ "p.splits" if stage == "finish" else "p.extent" }}, live);
    let first = thread_in_row(thread) * {{ width }}u;
    {% endif %}
    let n = f32({{ "max(end, begin + 1u) - begin" if stage == "parts" else "p.extent" }});
    {% if stage == "finish" %}
    {% if rms %}
    let mean = 0.0;
    {% else %}
    var sum = 0.0;
    for (var e = first; e < end; e += {{ threads_per_row }}u) { sum += partial_at(e * 2u * p.rows + row); }
    let mean = row_sum(sum, thread) / n;
    {% endif %}
    // The squares of a part are relative to its own mean.
    var squares = 0.0;
    for (var e = first; e < end; e += {{ threads_per_row }}u) {
        let at = e * 2u * p.rows + row;
        {% if rms %}
        squares += partial_at(at + p.rows);
        {% else %}
        let count = f32(min(p.chunk, p.extent - e * p.chunk));
        let deviation = partial_at(at) / count - mean;
        squares += partial_at(at + p.rows) + count * (deviation * deviation);
        {% endif %}
    }
    {% elif forward and stage != "apply" %}
    {% if rms %}
    let total = 0.0;
    let mean = 0.0;
    {% else %}
    var sum_step = Step(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) { sum_step += x_step(element_index(row, e)); }
    let total = row_sum(step_sum(sum_step), thread);
    let mean = total / n;
    {% endif %}
    var square_step = Step(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let deviation = x_step(element_index(row, e)) - mean;
        square_step += deviation * deviation;
    }
    let squares = step_sum(square_step);
    {% endif %}
    {% if stage == "parts" and forward %}
    let all = row_sum(squares, thread);
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.rows + row, total);
        partial_put((part * 2u + 1u) * p.rows + row, all);
    }
    {% elif stored %}
    let rstd = m_rsqrt(row_sum(squares, thread) / n + p.eps);
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
    let mean_plain = {{ "0.0" if rms else "sums_at(row) / n" }};
    let mean_scaled = sums_at(p.rows + row) / n;
    {% elif not forward %}
    var plain_step = Step(0.0);
    var scaled_step = Step(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let at = element_index(row, e);
        let gw = g_step(at){{ " * weight_step(weight_index(row, e))" if weight else "" }};
        plain_step += gw;
        scaled_step += gw * ((x_step(at) - mean) * rstd);
    }
    let plain = step_sum(plain_step);
    let scaled = step_sum(scaled_step);
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
        let at = element_index(row, e);
        let z = (x_step(at) - mean) * rstd;
        {% if weight or bias %}
        let w = weight_index(row, e);
        {% endif %}
        {% if forward %}
        result_put_step(at, z{{ " * weight_step(w)" if weight else "" }}{{ " + bias_step(w)" if bias else "" }});
        {% else %}
        let h = g_step(at){{ " * weight_step(w)" if weight else "" }};
        result_put_step(at, rstd * ((h - mean_plain) - z * mean_scaled));
        {% endif %}
    }
    {% endif %}
}
