{#-
Partial gradients of weight and bias of a normalisation: for weight j and part s of its elements, partial[s,
  0, j] = sum of g * (x - mean) * rstd and partial[s, 1, j] = sum of g. A reduction adds the parts. With an
  activation, g is first multiplied by the activation's derivative.

Element q of weight j is at j * weight_stride + (q / run) * step + q % run. Its row in the statistics is (q /
run) * row_step + (j / row_weights) * row_inner.

x, g, weight, bias: dtypes, or "" · activation: see row_reduce; it needs weight and bias
rms: no mean was subtracted · single: runs of one element · one_run: a part is one run
threads_per_row, across, width: see row_reduce; runs, steps and strides are multiples of the width
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% if activation == "silu" %}{% for file in rows.activation_math %}{% include "math/" ~ file %}{% endfor %}{% endif %}
{{ t.prelude() }}
struct Params {
    weights: u32,
    extent: u32,
    run: u32,
    step: u32,
    weight_stride: u32,
    row_step: u32,
    row_weights: u32,
    row_inner: u32,
    splits: u32,
    chunk: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=2) %}
{% set parts = range(2 if width == 8 else 1) %}
{{ rows.packs(width) }}
{{ rows.pack_input(0, "g", g, width) }}
{{ rows.pack_input(1, "x", x, width) }}
{% for name, dtype in [("weight", weight), ("bias", bias), ("mean", "" if rms else "f32"), ("rstd", "f32")] if dtype %}
{{ t.input(next.binding, name, dtype) }}
{% set next.binding = next.binding + 1 %}
{% endfor %}
{{ t.output(next.binding, "partial", "f32") }}
{{ rows.functions(threads_per_row, across) }}
{{ rows.activation_functions(activation, width) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = row_of(group_index(group, groups), thread);
    let j = index % p.weights;
    let part = index / p.weights;
    let live = part < p.splits;
    let begin = part * p.chunk;
    let end = select(0u, min(begin + p.chunk, p.extent), live);
    let first = j * p.weight_stride;
    let first_row = (j / p.row_weights) * p.row_inner;
    {% if weight %}
    let w = weight_at(j);
    {% endif %}
    {% if bias %}
    let b = bias_at(j);
    {% endif %}
    {% if one_run %}
    let run_start = first + part * p.step - begin;
    let row = select(0u, first_row + part * p.row_step, live);
    let mean = {{ "0.0" if rms else "mean_at(row)" }};
    let rstd = rstd_at(row);
    {% endif %}
    var plain = Part(0.0);
    var scaled = Part(0.0);
    for (var q = begin + thread_in_row(thread) * {{ width }}u; q < end; q += {{ threads_per_row * width }}u) {
        {% if one_run %}
        let i = run_start + q;
        {% elif single %}
        let i = first + q * p.step;
        let row = first_row + q * p.row_step;
        {% else %}
        let i = first + (q / p.run) * p.step + q % p.run;
        let row = first_row + (q / p.run) * p.row_step;
        {% endif %}
        {% if not one_run %}
        let mean = {{ "0.0" if rms else "mean_at(row)" }};
        let rstd = rstd_at(row);
        {% endif %}
        let g_pack = g_load(i);
        let x_pack = x_load(i);
        {% for k in parts %}
        let z{{ k }} = (x_pack[{{ k }}] - mean) * rstd;
        {% if activation %}
        let y{{ k }} = z{{ k }}{{ " * w" if weight }}{{ " + b" if bias }};
        let dy{{ k }} = activate_grad(g_pack[{{ k }}], y{{ k }});
        {% else %}
        let dy{{ k }} = g_pack[{{ k }}];
        {% endif %}
        plain += dy{{ k }};
        scaled += dy{{ k }} * z{{ k }};
        {% endfor %}
    }
    let both = row_sums(vec2<f32>(part_sum(scaled), part_sum(plain)), thread);
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.weights + j, both.x);
        partial_put((part * 2u + 1u) * p.weights + j, both.y);
    }
}
