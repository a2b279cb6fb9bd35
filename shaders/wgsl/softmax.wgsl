{#-
Softmax or log-softmax along one dimension, forward and backward; a row has all elements along the dimension.
Elements are read and written once: a thread holds its part of the row, up to `register_steps` steps. Longer rows
are read twice, first for the maximum and the sum together (online softmax).

stage: `whole`: the threads of a row process it in one pass. A few very long rows are processed in `p.splits`
  parts. `parts` writes the maximum and the sum of exponentials of each, or backward the sum alone, to partial
  [parts, 1 or 2, rows]. `finish` combines them for rows; `apply` computes the elements.
pass: `forward`: y from x; `backward`: the gradient of x from g and y · log
dtype: of x or g · y, result: types of y in the backward pass, and of the result; f64 if one of them is f64
x and g have any strides, y and the results are contiguous · threads_per_row, across: see row_reduce
width: elements of a step, 4 if rows are contiguous aligned quads, else 1
register_steps: steps that a thread holds, 0 for longer rows
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% set T = "f64" if dtype == "f64" else "f32" %}
{% include "math/base" %}
{% if T == "f64" %}
{% include "math/f64_exp_log" %}
{% else %}
{% include "math/exp" %}
{% include "math/log" %}
{% endif %}
{% set max = "m_max64" if T == "f64" else "m_max" %}
{% set exp_down = "m_exp64" if T == "f64" else "m_exp_down" %}
{% set log_of = "m_log64" if T == "f64" else "m_log" %}
{% set isfinite = "m_isfinite64" if T == "f64" else "m_isfinite" %}
{{ t.prelude() }}
struct Params {
    {{ t.row_fields() }}
    splits: u32,
    chunk: u32,
    // The other dimensions of x or g.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.row_offset() }}
{% set forward = pass == "forward" %}
{% if stage == "finish" %}
{{ t.input(0, "partial", T) }}
{{ t.output(1, "statistics", T) }}
{% else %}
{{ rows.input(0, "input", dtype, width) }}
{% if not forward %}
{{ rows.input(1, "y", y, width) }}
{% endif %}
{% set next = 1 if forward else 2 %}
{% if stage == "parts" %}
{{ t.output(next, "partial", T) }}
{% else %}
{% if stage == "apply" %}
{{ t.input(next, "statistics", T) }}
{% endif %}
{{ rows.output(next + (1 if stage == "apply" else 0), "result", result, width) }}
{% endif %}
{% endif %}
{{ rows.functions(threads_per_row, across, T) }}
{{ rows.steps(width, T) }}
{{ rows.each("step_exp", "m_exp64" if T == "f64" else "m_exp", width) }}
{{ rows.each("step_exp_down", exp_down, width) }}
{% set loop_stride = threads_per_row * width %}
// The value to subtract: an infinity minus itself is NaN, and e^-inf must be 0 before there is a maximum.
fn finite_max(m: {{ T }}) -> {{ T }} {
    return select(m, 0.0, m_bits(f32({{ "m * 0x1p-900" if T == "f64" else "m" }})) == 0xff800000u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = row_of(group_index(group, groups), thread);
    // Threads without a row take part in the barriers, and write nothing.
    {% if stage == "whole" %}
    let live = index < p.rows;
    let row = min(index, p.rows - 1u);
    let first = thread_in_row(thread) * {{ width }}u;
    let end = p.extent;
    {% elif stage == "finish" %}
    let live = index < p.rows;
    let row = min(index, p.rows - 1u);
    var largest = {{ T }}(m_from_bits(0xff800000u));
    for (var part = thread_in_row(thread); part < p.splits; part += {{ threads_per_row }}u) {
        largest = {{ max }}(largest, partial_at(part * 2u * p.rows + row));
    }
    let m = row_max(largest, thread);
    var sum = {{ T }}(0.0);
    for (var part = thread_in_row(thread); part < p.splits; part += {{ threads_per_row }}u) {
        let at = part * 2u * p.rows + row;
        sum += partial_at(at + p.rows) * {{ exp_down }}(finite_max(partial_at(at)) - finite_max(m));
    }
    let total = row_sum(sum, thread);
    if live && thread_in_row(thread) == 0u {
        statistics_put(row, m);
        statistics_put(p.rows + row, total);
    }
    {% else %}
    let part = index / p.rows;
    let row = index % p.rows;
    let live = part < p.splits;
    let first = part * p.chunk + thread_in_row(thread) * {{ width }}u;
    let end = select(0u, min((part + 1u) * p.chunk, p.extent), live);
    {% endif %}
    {% if stage != "finish" %}
    let base = row_offset(row);
    let dense = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% set stride = "" if width == 4 else " * p.stride" %}
    {% set inner = "" if width == 4 else " * p.inner" %}
    {% if register_steps > 0 %}
    {% for k in range(register_steps) %}
    let at{{ k }} = first + {{ k * loop_stride }}u;
    let in{{ k }} = at{{ k }} < p.extent;
    let clamped{{ k }} = select(0u, at{{ k }}, in{{ k }});
    let x{{ k }} = input_step(base + clamped{{ k }}{{ stride }});
    {% if pass == "backward" %}
    let y{{ k }} = y_step(dense + clamped{{ k }}{{ inner }});
    {% endif %}
    {% endfor %}
    {% if pass == "forward" %}
    var largest = {{ T }}(m_from_bits(0xff800000u));
    {% for k in range(register_steps) %}
    // Elements that are read twice do not change the maximum.
    largest = {{ max }}(largest, step_max(x{{ k }}));
    {% endfor %}
    let m = row_max(largest, thread);
    var sum = {{ T }}(0.0);
    {% for k in range(register_steps) %}
    let e{{ k }} = step_exp_down(x{{ k }} - m);
    sum += select(0.0, step_sum(e{{ k }}), in{{ k }});
    {% endfor %}
    let total = row_sum(sum, thread);
    {% if log %}
    let norm = select({{ T }}(m_nan()), {{ log_of }}(total), {{ isfinite }}(m));
    {% else %}
    // A row is NaN if it has NaN or +inf, or only -inf.
    let scale = select({{ T }}(m_nan()), 1.0 / total, {{ isfinite }}(m));
    {% endif %}
    {% for k in range(register_steps) %}
    let r{{ k }} = {{ "(x" ~ k ~ " - m) - norm" if log else "e" ~ k ~ " * scale" }};
    {% endfor %}
    {% else %}
    var sum = {{ T }}(0.0);
    {% for k in range(register_steps) %}
    sum += select(0.0, step_sum(x{{ k }}{{ "" if log else " * y" ~ k }}), in{{ k }});
    {% endfor %}
    let total = row_sum(sum, thread);
    {% for k in range(register_steps) %}
    let r{{ k }} = {{ "x" ~ k ~ " - step_exp(y" ~ k ~ ") * total" if log else "y" ~ k ~ " * (x" ~ k ~ " - total)" }};
    {% endfor %}
    {% endif %}
    {% for k in range(register_steps) %}
    if live && in{{ k }} { result_put_step(dense + at{{ k }}{{ inner }}, r{{ k }}); }
    {% endfor %}
    {% else %}
    {% set unroll = 4 %}
    {% if pass == "forward" %}
    var largest = {{ T }}(m_from_bits(0xff800000u));
    {% endif %}
    var sum = {{ T }}(0.0);
    {% if stage == "apply" %}
    {% if forward %}
    let m = statistics_at(row);
    let total = statistics_at(p.rows + row);
    {% else %}
    let total = statistics_at(row);
    {% endif %}
    {% else %}
    for (var at = first; at < end; at += {{ loop_stride * unroll }}u) {
        {% for k in range(unroll) %}
        let in{{ k }} = at + {{ k * loop_stride }}u < end;
        let clamped{{ k }} = select(at, at + {{ k * loop_stride }}u, in{{ k }});
        let x{{ k }} = input_step(base + clamped{{ k }}{{ stride }});
        {% if pass == "backward" and not log %}
        let y{{ k }} = y_step(dense + clamped{{ k }}{{ inner }});
        {% endif %}
        {% endfor %}
        {% if pass == "forward" %}
        let old_max = largest;
        {% for k in range(unroll) %}
        largest = {{ max }}(largest, step_max(x{{ k }}));
        {% endfor %}
        let m = finite_max(largest);
        sum *= {{ exp_down }}(old_max - m);
        {% endif %}
        {% for k in range(unroll) %}
        {% if pass == "forward" %}
        sum += select(0.0, step_sum(step_exp_down(x{{ k }} - m)), in{{ k }});
        {% else %}
        sum += select(0.0, step_sum(x{{ k }}{{ "" if log else " * y" ~ k }}), in{{ k }});
        {% endif %}
        {% endfor %}
    }
    {% if pass == "forward" %}
    let m = row_max(largest, thread);
    let total = row_sum(sum * {{ exp_down }}(finite_max(largest) - finite_max(m)), thread);
    {% else %}
    let total = row_sum(sum, thread);
    {% endif %}
    {% endif %}
    {% if stage == "parts" %}
    if live && thread_in_row(thread) == 0u {
        {% if forward %}
        partial_put(part * 2u * p.rows + row, m);
        partial_put((part * 2u + 1u) * p.rows + row, total);
        {% else %}
        partial_put(part * p.rows + row, total);
        {% endif %}
    }
    {% else %}
    {% if forward %}
    {% if log %}
    let norm = select({{ T }}(m_nan()), {{ log_of }}(total), {{ isfinite }}(m));
    {% else %}
    let scale = select({{ T }}(m_nan()), 1.0 / total, {{ isfinite }}(m));
    {% endif %}
    {% endif %}
    if live {
        for (var at = first; at < end; at += {{ loop_stride }}u) {
            let x = input_step(base + at{{ stride }});
            {% if pass == "backward" %}
            let y = y_step(dense + at{{ inner }});
            let r = {{ "x - step_exp(y) * total" if log else "y * (x - total)" }};
            {% else %}
            let r = {{ "(x - m) - norm" if log else "step_exp_down(x - m) * scale" }};
            {% endif %}
            result_put_step(dense + at{{ inner }}, r);
        }
    }
    {% endif %}
    {% endif %}
    {% endif %}
}
