{#-
Partial gradients of weight and bias of a normalisation: for weight j and part s of its elements, partial[s,
  0, j] = sum of g * (x - mean) * rstd and partial[s, 1, j] = sum of g. A reduction adds the parts.

Element q of weight j is at j * weight_stride + (q / run) * step + q % run. Its row in the statistics is (q /
run) * row_step + (j / row_weights) * row_inner.

dtype: of g and x · rms: no mean was subtracted · single: runs of one element
threads_per_row, across, width: see row_reduce; with a width of 4, runs, steps and strides are multiples of 4
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
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
{{ rows.input(0, "g", dtype, width) }}
{{ rows.input(1, "x", dtype, width) }}
{{ t.input(2, "rstd", "f32") }}
{% if not rms %}
{{ t.input(3, "mean", "f32") }}
{% endif %}
{{ t.output(3 if rms else 4, "partial", "f32") }}
{{ rows.functions(threads_per_row, across) }}
{{ rows.steps(width) }}

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
    var plain = Step(0.0);
    var scaled = Step(0.0);
    for (var q = begin + thread_in_row(thread) * {{ width }}u; q < end; q += {{ threads_per_row * width }}u) {
        {% if single %}
        let i = first + q * p.step;
        let row = first_row + q * p.row_step;
        {% else %}
        let i = first + (q / p.run) * p.step + q % p.run;
        let row = first_row + (q / p.run) * p.row_step;
        {% endif %}
        let g = g_step(i);
        let x = x_step(i){{ "" if rms else " - mean_at(row)" }};
        plain += g;
        scaled += g * (x * rstd_at(row));
    }
    let all_scaled = row_sum(step_sum(scaled), thread);
    let all_plain = row_sum(step_sum(plain), thread);
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.weights + j, all_scaled);
        partial_put((part * 2u + 1u) * p.weights + j, all_plain);
    }
}
