{#-
Batch normalisation of [batch, channels, run], in passes over all elements:
  `moments`   sum of each part of a channel, and sum of squared distances from the part's mean; elements stay
              in registers
  `finish`    mean and reciprocal deviation of each channel from the moments; updates the running statistics, and
              with `counts` the number of batches
  `forward`   y = (x - mean) * rstd * weight + bias, and its activation; `finishes`: does the work of `finish` itself,
              from the moments of few parts
  `sums`      backward: for each part of a channel the sums of g * (x - mean) * rstd and of g
  `backward`  the gradient of x; `fixed`: the statistics are constants; `copies_sums`: copies the first sums to the
              gradient of the weight; `adds_parts`: adds the sums of at most four parts of a channel itself, and
              copies both

x, g, result, weight, bias: dtypes, or "" for what the pass does not bind
mean, var: of running statistics, or "" (finish, forward)
activation: see row_reduce; with one, `sums` and `backward` multiply g by its derivative
width: elements of a pack, 8, 4 or 1 (moments, sums: of one channel)
same_channel: a pack's elements are of one channel (forward, backward) · single: a run is one element (moments, sums)
register_steps: packs in a thread's registers (moments) · threads_per_row, across: see row_reduce
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% if activation == "silu" %}{% for file in rows.activation_math %}{% include "math/" ~ file %}{% endfor %}{% endif %}
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
{% if kind == "in" %}{{ t.input(b.next, name, type) }}{% elif kind == "out" %}{{ t.output(b.next, name, type) }}
{% elif kind == "packs" %}{{ rows.pack_input(b.next, name, type, width) }}
{% else %}{{ rows.pack_output(b.next, name, type, width) }}{% endif %}
{% set b.next = b.next + 1 %}
{% endmacro %}
{#- Computes the mean of a channel and the sum of squared distances of its parts, from part `first` to `end` in steps of
`step`. `sum` is the sum of all totals. -#}
{% macro combine_parts(first, end, step, sum) %}
    var total = 0.0;
    for (var part = {{ first }}; part < {{ end }}; part += {{ step }}u) {
        total += partial_at(part * 2u * p.channels + channel);
    }
    let mean = {{ sum }} / n;
    var squares = 0.0;
    for (var part = {{ first }}; part < {{ end }}; part += {{ step }}u) {
        let at = part * 2u * p.channels + channel;
        let count = f32(min(p.chunk, p.extent - part * p.chunk));
        let deviation = partial_at(at) / count - mean;
        squares += partial_at(at + p.channels) + count * (deviation * deviation);
    }
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
    {{ combine_parts("thread_in_row(thread)", "end", threads_per_row, "row_sum(total, thread)") }}
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
{{ rows.packs(width) }}
{% set parts = range(2 if width == 8 else 1) %}
{% if pass in ["sums", "backward"] %}
{{ buffer("packs", "g", g) }}
{% endif %}
{{ buffer("packs", "x", x) }}
{% if pass != "moments" %}
{% set finishes = pass == "forward" and finishes %}
{{ buffer("in", "partial" if finishes else "statistics", "f32") }}
{% if weight %}
{{ buffer("in", "weight", weight) }}
{% endif %}
{% if bias %}
{{ buffer("in", "bias", bias) }}
{% endif %}
{% endif %}
{% set centred = pass == "backward" and not fixed %}
{% if centred %}
{{ buffer("in", "sums", "f32") }}
{% endif %}
{% macro scaled(z, weight_value, bias_value) -%}
{{ z }}{{ " * " ~ weight_value if weight else "" }}{{ " + " ~ bias_value if bias else "" }}
{%- endmacro %}

{% if pass in ["moments", "sums"] %}
{{ buffer("out", "partial", "f32") }}
{{ rows.functions(threads_per_row, across) }}
{{ rows.activation_functions(activation, width) }}

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
    var v{{ k }} = Pack();
    if first + {{ k * threads_per_row * width }}u < end {
        v{{ k }} = x_load(element_index(channel, first + {{ k * threads_per_row * width }}u));
        sum += {% for h in parts %}{{ " + " if not loop.first }}part_sum(v{{ k }}[{{ h }}]){% endfor %};
    }
    {% endfor %}
    let all = row_sum(sum, thread);
    let mean = all / f32(max(end, begin + 1u) - begin);
    var squares = 0.0;
    {% for k in range(register_steps) %}
    if first + {{ k * threads_per_row * width }}u < end {
        {% for h in parts %}
        let d{{ h }} = v{{ k }}[{{ h }}] - Part(mean);
        squares += part_sum(d{{ h }} * d{{ h }});
        {% endfor %}
    }
    {% endfor %}
    let other = row_sum(squares, thread);
    {% else %}
    let at = min(channel, p.channels - 1u);
    let mean = statistics_at(at);
    let rstd = statistics_at(p.channels + at);
    {% if activation %}
    let w = Part({{ "weight_at(at)" if weight else "1.0" }});
    let b = Part({{ "bias_at(at)" if bias else "0.0" }});
    {% endif %}
    var plain = Part(0.0);
    var scaled_sum = Part(0.0);
    for (var e = first; e < end; e += {{ threads_per_row * width }}u) {
        let i = element_index(channel, e);
        let x_pack = x_load(i);
        let g_pack = g_load(i);
        {% for k in parts %}
        let z{{ k }} = (x_pack[{{ k }}] - Part(mean)) * Part(rstd);
        {% if activation %}
        let dy{{ k }} = activate_grad(g_pack[{{ k }}], {{ scaled("z" ~ k, "w", "b") }});
        {% else %}
        let dy{{ k }} = g_pack[{{ k }}];
        {% endif %}
        plain += dy{{ k }};
        scaled_sum += dy{{ k }} * z{{ k }};
        {% endfor %}
    }
    let both_sums = row_sums(vec2<f32>(part_sum(scaled_sum), part_sum(plain)), thread);
    let all = both_sums.x;
    let other = both_sums.y;
    {% endif %}
    if live && thread_in_row(thread) == 0u {
        partial_put(part * 2u * p.channels + channel, all);
        partial_put((part * 2u + 1u) * p.channels + channel, other);
    }
}
{% else %}
{{ buffer("packs_out", "result", result) }}
{% if copies_sums %}
{{ buffer("out", "weight_grad", "f32") }}
{% endif %}
{% if adds_parts %}
{{ buffer("out", "bias_grad", "f32") }}
{% endif %}
{% if finishes %}
{{ buffer("out", "statistics", "f32") }}
{% if mean %}
{{ buffer("out", "running_mean", mean) }}
{{ buffer("out", "running_var", var) }}
{% endif %}
{% if counts %}
{{ buffer("out", "batches", "i32") }}
{% endif %}
{% endif %}
{{ rows.activation_functions(activation, width) }}

{% if finishes %}
// The mean, the reciprocal deviation and the sum of squared distances, as in `finish`.
fn channel_moments(channel: u32) -> vec3<f32> {
    let n = f32(p.extent);
    {{ combine_parts("0u", "p.splits", 1, "total") }}
    return vec3<f32>(mean, m_rsqrt(squares / n + p.eps), squares);
}
{% else %}
fn channel_moments(channel: u32) -> vec2<f32> {
    return vec2<f32>(statistics_at(channel), statistics_at(p.channels + channel));
}
{% endif %}

{% if centred %}
{% if adds_parts %}
// Adds the parts in the order of a reduction, which adds four values in pairs.
fn total_sum(at: u32) -> f32 {
    let step = 2u * p.channels;
    if p.splits == 4u {
        return (sums_at(at) + sums_at(at + step)) + (sums_at(at + 2u * step) + sums_at(at + 3u * step));
    }
    var total = sums_at(at);
    for (var part = 1u; part < p.splits; part += 1u) {
        total += sums_at(at + part * step);
    }
    return total;
}
{% else %}
fn total_sum(at: u32) -> f32 { return sums_at(at); }
{% endif %}

// The sums of g * (x - mean) * rstd and of g.
fn total_sums(channel: u32) -> vec2<f32> {
    return vec2<f32>(total_sum(channel), total_sum(p.channels + channel));
}
{% endif %}

fn element(x: f32, g: f32, channel: u32, moments: vec2<f32>
        {{- ", sums_of_channel: vec2<f32>" if centred }}) -> f32 {
    let mean = moments.x;
    let rstd = moments.y;
    {% if weight %}
    let w = weight_at(channel);
    {% endif %}
    {% if bias %}
    let b = bias_at(channel);
    {% endif %}
    let z = (x - mean) * rstd;
    {% if pass == "forward" %}
    return activate_element({{ scaled("z", "w", "b") }});
    {% else %}
    let dy = {{ "activate_grad_element(g, " ~ scaled("z", "w", "b") ~ ")" if activation else "g" }};
    let scale = rstd{{ " * w" if weight else "" }};
    {% if fixed %}
    return dy * scale;
    {% else %}
    let n = f32(p.extent);
    return scale * ((dy - sums_of_channel.y / n) - z * (sums_of_channel.x / n));
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
    {% if adds_parts %}
    if index < p.channels {
        let both = total_sums(index);
        weight_grad_put(index, both.x);
        bias_grad_put(index, both.y);
    }
    {% elif copies_sums %}
    if index < p.channels { weight_grad_put(index, sums_at(index)); }
    {% endif %}
    {% if finishes %}
    if index < p.channels {
        let moments = channel_moments(index);
        statistics_put(index, moments.x);
        statistics_put(p.channels + index, moments.y);
        {% if mean %}
        let n = f32(p.extent);
        running_mean_put(index, (1.0 - p.momentum) * running_mean_at(index) + p.momentum * moments.x);
        running_var_put(index, (1.0 - p.momentum) * running_var_at(index) + p.momentum * (moments.z / (n - 1.0)));
        {% endif %}
        {% if counts %}
        if index == 0u { batches_put(0u, batches_at(0u) + 1); }
        {% endif %}
    }
    {% endif %}
    let x_pack = x_load(i);
    {% if pass == "backward" %}
    let g_pack = g_load(i);
    {% endif %}
    {% set components = [""] if width == 1 else [".x", ".y", ".z", ".w"] %}
    {% for k in range(width) %}
    {% set v = "_pack[" ~ k // 4 ~ "]" ~ components[k % 4] %}
    let at{{ k }} = {{ "at0" if same_channel and k > 0 else "channel_of(i + " ~ k ~ "u)" }};
    {% if k == 0 %}
    var moments = channel_moments(at0).xy;
    {% elif not same_channel %}
    if at{{ k }} != at{{ k - 1 }} { moments = channel_moments(at{{ k }}).xy; }
    {% endif %}
    {% if centred and k == 0 %}
    var both_sums = total_sums(at0);
    {% elif centred and not same_channel %}
    if at{{ k }} != at{{ k - 1 }} { both_sums = total_sums(at{{ k }}); }
    {% endif %}
    let v{{ k }} = element(x{{ v }}, {{ "g" ~ v if pass == "backward" else "0.0" }}, at{{ k }}, moments
        {{- ", both_sums" if centred }});
    {% endfor %}
    {% for k in parts %}
    let out{{ k }} = Part({% for c in range(width // (parts | length)) %}v{{ 4 * k + c }}, {% endfor %});
    {% endfor %}
    result_store(i, Pack({% for k in parts %}out{{ k }}, {% endfor %}));
}
{% endif %}
{% endif %}
