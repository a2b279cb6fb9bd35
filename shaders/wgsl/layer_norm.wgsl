{#-
Layer and RMS normalisation of contiguous rows, with a weight for each element of a row. Each element is read
and written once: a thread holds its part of the row, `register_steps` steps.

pass `forward`: sum = x + residual (if present), result = (sum - mean) * rstd * weight + bias, statistics [2,
  rows]: rstd and mean.
pass `backward`: result = the gradient of x (with a residual: of the sum, in f32) from g, plus `extra_grad`, another
  gradient of x.
With `copy`, a copy of the result in that dtype is written. With `partial` of two or three, a workgroup has
rows `step` apart, and writes sums over its rows for each weight. These are of g times the normalised x, of g,
and of the result: partial [workgroups, partial, extent].
With `scale`, groups of `rows_per_group` rows have a line of factors each, and with `shift` a line of summands:
  the result is result * scale + shift, with every step rounded as if it were stored. The workgroups of the backward
  pass are `splits` for each group, whose rows are `step` apart; `g` is the gradient of the shifted result.

x, residual, sum, weight, bias, scale, shift, g, extra_grad, result, copy: dtypes, or "" · rms: no mean is subtracted
threads_per_row: see row_reduce
inplace: the result overwrites `extra_grad`
width: elements of a step, 4 if the extent is a multiple of four, else 1 
register_steps: steps that a thread holds
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    // Rows processed by all workgroups at a time.
    step: u32,
    eps: f32,
    {% if scale %}
    rows_per_group: u32,
    splits: u32,
    scale_offset: u32,
    scale_stride: u32,
    shift_offset: u32,
    shift_stride: u32,
    // This is always 0, which compilers do not know.
    zero: u32,
    {% endif %}
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=0) %}
{% set inputs = [("x", x), ("residual", residual), ("weight", weight), ("bias", bias), ("scale", scale),
    ("shift", shift)] if pass == "forward" else
    [("g", g), ("x", x), ("residual", residual), ("weight", weight), ("scale", scale), ("statistics", "f32"),
        ("extra_grad", "" if inplace else extra_grad)] %}
{% for name, dtype in inputs if dtype %}
{% if name == "statistics" %}
{{ t.input(next.binding, name, dtype) }}
{% else %}
{{ rows.input(next.binding, name, dtype, width) }}
{% endif %}
{% set next.binding = next.binding + 1 %}
{% endfor %}
{% if pass == "forward" %}
{{ t.output(next.binding, "statistics", "f32") }}
{% set next.binding = next.binding + 1 %}
{% if residual %}
{{ rows.output(next.binding, "sum", sum, width) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% endif %}
{{ rows.output(next.binding, "result", result, width) }}
{% if copy %}
{% set next.binding = next.binding + 1 %}
{{ rows.output(next.binding, "copy", copy, width) }}
{% endif %}
{% if partial %}
{{ rows.output(next.binding + 1, "partial", "f32", width) }}
var<workgroup> columns: array<Step, 256>;
{% endif %}
{{ rows.functions(threads_per_row, false) }}
{{ rows.steps(width) }}
{% if scale %}
// The value as stored: prevents fusing a product with the next sum, which would round only once.
fn stored(v: Step) -> Step {
    {% if width == 4 %}
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(v) | vec4<u32>(p.zero));
    {% else %}
    return bitcast<f32>(bitcast<u32>(v) | p.zero);
    {% endif %}
}
{% endif %}
{% set loop_stride = threads_per_row * width %}
{% set row_count = "row_count" if scale else "p.rows" %}
{% set in_group = " && in_group" if scale else "" %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    {% if scale and pass == "backward" %}
    // A grid in two dimensions may have more workgroups. They repeat a group, and write nothing.
    let row_groups = p.rows / p.rows_per_group;
    let in_group = linear_group / p.splits < row_groups;
    let row_group = min(linear_group / p.splits, row_groups - 1u);
    let index = row_of(linear_group % p.splits, thread);
    let first_row = row_group * p.rows_per_group;
    let row_count = p.rows_per_group;
    {% else %}
    let index = row_of(linear_group, thread);
    {% endif %}
    let n = f32(p.extent);
    {% for k in range(register_steps) %}
    let at{{ k }} = thread_in_row(thread) * {{ width }}u + {{ k * loop_stride }}u;
    let in{{ k }} = at{{ k }} < p.extent;
    let clamped{{ k }} = select(0u, at{{ k }}, in{{ k }});
    {% endfor %}
    {% if pass == "forward" %}
    // Threads without a row take part in the barriers: they repeat the last row, and write nothing.
    let live = index < p.rows;
    let row = min(index, p.rows - 1u);
    let base = row * p.extent;
    {% for k in range(register_steps) %}
    {% if residual %}
    let a{{ k }} = x_step(base + clamped{{ k }});
    let b{{ k }} = residual_step(base + clamped{{ k }});
    {% else %}
    let x{{ k }} = x_step(base + clamped{{ k }});
    {% endif %}
    {% endfor %}
    {% if residual %}
    {% for k in range(register_steps) %}
    let x{{ k }} = rounded(a{{ k }} + b{{ k }});
    {% endfor %}
    {% endif %}
    {% if rms %}
    let mean = 0.0;
    {% else %}
    var plain = 0.0;
    {% for k in range(register_steps) %}
    plain += select(0.0, step_sum(x{{ k }}), in{{ k }});
    {% endfor %}
    let mean = row_sum(plain, thread) / n;
    {% endif %}
    var squares = 0.0;
    {% for k in range(register_steps) %}
    let d{{ k }} = x{{ k }} - mean;
    squares += select(0.0, step_sum(d{{ k }} * d{{ k }}), in{{ k }});
    {% endfor %}
    let rstd = m_rsqrt(row_sum(squares, thread) / n + p.eps);
    {% if scale %}
    let line = row / p.rows_per_group;
    let scale_base = p.scale_offset + line * p.scale_stride;
    let shift_base = p.shift_offset + line * p.shift_stride;
    {% endif %}
    if live {
        {% for k in range(register_steps) %}
        if in{{ k }} {
            {% if residual %}
            sum_put_step(base + at{{ k }}, x{{ k }});
            {% endif %}
            {% if scale %}
            let scaled{{ k }} = stored(stored(d{{ k }} * rstd) * scale_step(scale_base + at{{ k }}));
            result_put_step(base + at{{ k }}, scaled{{ k }} + shift_step(shift_base + at{{ k }}));
            {% else %}
            result_put_step(base + at{{ k }},
                d{{ k }} * rstd{{ " * weight_step(at" ~ k ~ ")" if weight else "" }}
                    {{ " + bias_step(at" ~ k ~ ")" if bias else "" }});
            {% endif %}
        }
        {% endfor %}
        if thread_in_row(thread) == 0u {
            statistics_put(row, rstd);
            {% if not rms %}
            statistics_put(p.rows + row, mean);
            {% endif %}
        }
    }
    {% else %}
    {% for k in range(register_steps) %}
    {% if weight %}
    let w{{ k }} = weight_step(clamped{{ k }});
    {% elif scale %}
    let w{{ k }} = scale_step(p.scale_offset + row_group * p.scale_stride + clamped{{ k }});
    {% endif %}
    {% if partial %}
    var scaled{{ k }} = Step(0.0);
    var plain{{ k }} = Step(0.0);
    {% if partial == 3 %}
    var result_sum{{ k }} = Step(0.0);
    {% endif %}
    {% endif %}
    {% endfor %}
    // All threads have the same number of iterations, for the barriers.
    let iterations = ({{ row_count }} + p.step - 1u) / p.step;
    for (var iteration = 0u; iteration < iterations; iteration++) {
        let row_index = index + iteration * p.step;
        let live = index < p.step && row_index < {{ row_count }}{{ in_group }};
        let row = {{ "first_row + " if scale }}min(row_index, {{ row_count }} - 1u);
        let base = row * p.extent;
        {% for k in range(register_steps) %}
        let g{{ k }} = g_step(base + clamped{{ k }});
        let x{{ k }} = x_step(base + clamped{{ k }}){{ " + residual_step(base + clamped" ~ k ~ ")" if residual }};
        {% if extra_grad %}
        let extra_grad{{ k }} = {{ "result" if inplace else "extra_grad" }}_step(base + clamped{{ k }});
        {% endif %}
        {% endfor %}
        let rstd = statistics_at(row);
        let mean = {{ "0.0" if rms else "statistics_at(p.rows + row)" }};
        var both = vec2<f32>(0.0);
        {% for k in range(register_steps) %}
        let z{{ k }} = (x{{ k }} - mean) * rstd;
        let h{{ k }} = {{ "stored(g" ~ k ~ " * w" ~ k ~ ")" if scale else "g" ~ k ~ (" * w" ~ k if weight else "") }};
        both += select(vec2<f32>(0.0), vec2<f32>(step_sum(h{{ k }} * z{{ k }}), step_sum(h{{ k }})), in{{ k }});
        {% endfor %}
        let sums = row_sums(both, thread) / n;
        if live {
            {% for k in range(register_steps) %}
            {% if partial %}
            plain{{ k }} += g{{ k }};
            scaled{{ k }} += g{{ k }} * z{{ k }};
            {% endif %}
            let d{{ k }} = rstd * ((h{{ k }}{{ "" if rms else " - sums.y" }}) - z{{ k }} * sums.x)
                {{ " + extra_grad" ~ k if extra_grad else "" }};
            {% if partial == 3 %}
            result_sum{{ k }} += d{{ k }};
            {% endif %}
            if in{{ k }} {
                result_put_step(base + at{{ k }}, d{{ k }});
                {% if copy %}
                copy_put_step(base + at{{ k }}, d{{ k }});
                {% endif %}
            }
            {% endfor %}
        }
    }
    {% if partial %}
    // Adds the rows of a workgroup in order.
    let to = linear_group * p.extent * {{ partial }}u;
    {% for name in ["scaled", "plain", "result_sum"][:partial] %}
    {% set offset = loop.index0 ~ "u * p.extent" %}
    {% for k in range(register_steps) %}
    {% if threads_per_row == 256 %}
    if in{{ k }}{{ in_group }} { partial_put_step(to + {{ offset }} + at{{ k }}, {{ name }}{{ k }}); }
    {% else %}
    columns[thread] = {{ name }}{{ k }};
    workgroupBarrier();
    if thread < {{ threads_per_row }}u && in{{ k }}{{ in_group }} {
        var all = columns[thread];
        for (var r = 1u; r < {{ 256 // threads_per_row }}u; r++) {
            all += columns[thread + r * {{ threads_per_row }}u];
        }
        partial_put_step(to + {{ offset }} + at{{ k }}, all);
    }
    workgroupBarrier();
    {% endif %}
    {% endfor %}
    {% endfor %}
    {% endif %}
    {% endif %}
}
{% if pass == "forward" and residual %}
// The sum as stored, because the rounded value is normalised.
fn rounded(v: Step) -> Step {
    {% if sum == "f32" %}
    return v;
    {% else %}
    {% for c in [".x", ".y", ".z", ".w"][:width] %}
    {% set e = "v" ~ (c if width == 4 else "") %}
    let e{{ loop.index0 }} =
        {{ "bitcast<f32>(sum_bits(" ~ e ~ ") << 16u)" if sum == "bf16" else "unpack2x16float(sum_bits(" ~ e ~ ")).x" }};
    {% endfor %}
    return Step({{ "e0, e1, e2, e3" if width == 4 else "e0" }});
    {% endif %}
}
{% endif %}
