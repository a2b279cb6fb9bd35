{#-
Batch normalisation of [batch, channels, run], in passes over all elements:
  `moments`   sum of each part of a channel, and sum of squared distances from the part's mean; elements stay
              in registers
  `finish`    mean and reciprocal deviation of each channel from the moments; updates the running statistics, and
              with `counts` the number of batches
  `forward`   y = (x - mean) * rstd * weight + bias, clamped at 0 with `relu`
  `sums`      backward: for each part of a channel the sums of g * (x - mean) * rstd and of g
  `backward`  the gradient of x; `fixed`: the statistics are constants; `copies_sums`: copies the first sums to the
              gradient of the weight

dtype: of x, y and their gradients · weight, bias: dtypes, or ""
mean, var: of running statistics, or "" (finish)
relu: the gradient is 0 for negative y · width: elements of a step, 4 or 1 (moments, sums: of one channel)
same_channel: a step's elements are of one channel (forward, backward) · single: a run is one element (moments, sums)
register_steps: steps in a thread's registers (moments) · threads_per_row, across: see row_reduce
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    // Elements; channels; elements of a run; elements of a channel.
    n: u32,
    channels: u32,
    run: u32,
    extent: u32,
    // Parts of a channel, and elements of a part.
    splits: u32,
    chunk: u32,
    eps: f32,
    momentum: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.divide(f32_division) }}
{% set b = namespace(next=0) %}
{% macro buffer(kind, name, type) %}
{% if kind == "in" %}{{ rows.input(b.next, name, type, 1) }}{% elif kind == "out" %}{{ t.output(b.next, name, type) }}
{% elif kind == "steps" %}{{ rows.input(b.next, name, type, width) }}
{% else %}{{ rows.output(b.next, name, type, width) }}{% endif %}
{% set b.next = b.next + 1 %}
{% endmacro %}
{% if pass == "finish" %}
{{ buffer("in", "partial", "f32") }}
{{ buffer("out", "statistics", "f32") }}
{% if mean %}
{{ buffer("out", "running_mean", mean) }}
{{ buffer("out", "running_var", var) }}
{% endif %}
{% if counts %}
{{ buffer("out", "batches", "i32") }}
{% endif %}
{{ rows.functions(threads_per_row, false) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let channel = row_of(group_index(group, groups), thread);
    let live = channel < p.channels;
    let end = select(0u, p.splits, live);
    let n = f32(p.extent);
    var total = 0.0;
    for (var part = thread_in_row(thread); part < end; part += {{ threads_per_row }}u) {
        total += partial_at(part * 2u * p.channels + channel);
    }
    let mean = row_sum(total, thread) / n;
    var squares = 0.0;
    for (var part = thread_in_row(thread); part < end; part += {{ threads_per_row }}u) {
        let at = part * 2u * p.channels + channel;
        let count = f32(min(p.chunk, p.extent - part * p.chunk));
        let deviation = partial_at(at) / count - mean;
        squares += partial_at(at + p.channels) + count * (deviation * deviation);
    }
    let all = row_sum(squares, thread);
    if live && thread_in_row(thread) == 0u {
        statistics_put(channel, mean);
        statistics_put(p.channels + channel, m_rsqrt(all / n + p.eps));
        {% if mean %}
        running_mean_put(channel, (1.0 - p.momentum) * running_mean_at(channel) + p.momentum * mean);
        running_var_put(channel, (1.0 - p.momentum) * running_var_at(channel) + p.momentum * (all / (n - 1.0)));
        {% endif %}
        {% if counts %}
        if channel == 0u { batches_put(0u, batches_at(0u) + 1); }
        {% endif %}
    }
}
{% else %}
{% if pass in ["sums", "backward"] %}
{{ buffer("steps", "g", dtype) }}
{% endif %}
{{ buffer("steps", "x", dtype) }}
{% if pass != "moments" %}
{{ buffer("in", "statistics", "f32") }}
{% if weight %}
{{ buffer("in", "weight", weight) }}
{% endif %}
{% if bias %}
{{ buffer("in", "bias", bias) }}
{% endif %}
{% endif %}
{% if pass == "backward" and not fixed %}
{{ buffer("in", "sums", "f32") }}
{% endif %}
{{ rows.steps(width) }}
{% macro scaled(x, mean, rstd, weight_value, bias_value) -%}
({{ x }} - {{ mean }}) * {{ rstd }}{{ " * " ~ weight_value if weight else "" }}{{ " + " ~ bias_value if bias else "" }}
{%- endmacro %}

{% if pass in ["moments", "sums"] %}
{{ buffer("out", "partial", "f32") }}
{{ rows.functions(threads_per_row, across) }}

fn element_index(channel: u32, e: u32) -> u32 {
    {% if single %}
    return e * p.channels + channel;
    {% else %}
    let parts = divide(e, p.run);
    return (parts.x * p.channels + channel) * p.run + parts.y;
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = row_of(group_index(group, groups), thread);
    let blocks = divide(index, p.channels);
    let channel = blocks.y;
    let part = blocks.x;
    let live = part < p.splits;
    let begin = part * p.chunk;
    let end = select(0u, min(begin + p.chunk, p.extent), live);
    let first = begin + thread_in_row(thread) * {{ width }}u;
    {% if pass == "moments" %}
    var sum = 0.0;
    {% for k in range(register_steps) %}
    var v{{ k }} = Step(0.0);
    if first + {{ k * threads_per_row * width }}u < end {
        v{{ k }} = x_step(element_index(channel, first + {{ k * threads_per_row * width }}u));
        sum += step_sum(v{{ k }});
    }
    {% endfor %}
    let all = row_sum(sum, thread);
    let mean = all / f32(max(end, begin + 1u) - begin);
    var squares = 0.0;
    {% for k in range(register_steps) %}
    if first + {{ k * threads_per_row * width }}u < end {
        let d = v{{ k }} - Step(mean);
        squares += step_sum(d * d);
    }
    {% endfor %}
    let other = row_sum(squares, thread);
    {% else %}
    let at = min(channel, p.channels - 1u);
    let mean = statistics_at(at);
    let rstd = statistics_at(p.channels + at);
    {% if relu %}
    let w = Step({{ "weight_at(at)" if weight else "1.0" }});
    let b = Step({{ "bias_at(at)" if bias else "0.0" }});
    {% endif %}
    var plain = Step(0.0);
    var scaled_sum = Step(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let i = element_index(channel, e);
        let x = x_step(i);
        {% if relu %}
        let g = select(Step(0.0), g_step(i), {{ scaled("x", "Step(mean)", "Step(rstd)", "w", "b") }} > Step(0.0));
        {% else %}
        let g = g_step(i);
        {% endif %}
        plain += g;
        scaled_sum += g * ((x - Step(mean)) * Step(rstd));
    }
    let both_sums = row_sums(vec2<f32>(step_sum(scaled_sum), step_sum(plain)), thread);
    let all = both_sums.x;
    let other = both_sums.y;
    {% endif %}
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.channels + channel, all);
        partial_put((part * 2u + 1u) * p.channels + channel, other);
    }
}
{% else %}
{{ buffer("steps_out", "result", dtype) }}
{% if copies_sums %}
{{ buffer("out", "weight_grad", "f32") }}
{% endif %}

fn element(x: f32, g: f32, channel: u32) -> f32 {
    let mean = statistics_at(channel);
    let rstd = statistics_at(p.channels + channel);
    {% if weight %}
    let w = weight_at(channel);
    {% endif %}
    {% if bias %}
    let b = bias_at(channel);
    {% endif %}
    {% if pass == "forward" or relu %}
    let y = {{ scaled("x", "mean", "rstd", "w", "b") }};
    {% endif %}
    {% if pass == "forward" %}
    return {{ "m_max(y, 0.0)" if relu else "y" }};
    {% else %}
    let dy = {{ "select(0.0, g, y > 0.0)" if relu else "g" }};
    let scale = rstd{{ " * w" if weight else "" }};
    {% if fixed %}
    return dy * scale;
    {% else %}
    let n = f32(p.extent);
    return scale * ((dy - sums_at(p.channels + channel) / n) - (x - mean) * rstd * (sums_at(channel) / n));
    {% endif %}
    {% endif %}
}

fn channel_of(i: u32) -> u32 { return divide(divide(i, p.run).x, p.channels).y; }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups) * 256u + thread;
    let i = index * {{ width }}u;
    if i >= p.n { return; }
    {% if copies_sums %}
    if index < p.channels { weight_grad_put(index, sums_at(index)); }
    {% endif %}
    let x = x_step(i);
    let g = {{ "g_step(i)" if pass == "backward" else "x" }};
    {% if width == 4 %}
    {% for k in ["x", "y", "z", "w"] %}
    {% if same_channel and not loop.first %}
    let at_{{ k }} = at_x;
    {% else %}
    let at_{{ k }} = channel_of(i + {{ loop.index0 }}u);
    {% endif %}
    {% endfor %}
    result_put_step(i, vec4<f32>(element(x.x, g.x, at_x), element(x.y, g.y, at_y),
        element(x.z, g.z, at_z), element(x.w, g.w, at_w)));
    {% else %}
    result_put_step(i, element(x, g, channel_of(i)));
    {% endif %}
}
{% endif %}
{% endif %}
