{#-
One reduction over any dimensions and strides: out[o] = post(combine over r of map(in[o, r])).

source · compute · out: dtypes of the input, of the arithmetic, of the result · math: files it needs
map: an expression of `v`, an element · center: dtype of one more number `m` for each output, or "" · post: of `acc`
combine: sum, prod, max, min, argmax, argmin · flat: the reduced dimensions are one · lanes: threads for one output
across: neighbouring threads hold neighbouring outputs (the kept dimensions are the inner ones), not neighbouring elements
For argmax and argmin: values: the value is written too · seen: indices come from a buffer, of a stage before
Few outputs of many elements are made in two stages: the first writes `splits` partial results for each output.
-#}
{%- import "types" as t -%}
{%- set V = t.value(source) -%}
{%- set T = t.value(compute) -%}
{%- set O = t.value(out) -%}
{%- set arg = combine in ["argmax", "argmin"] -%}
{%- set extreme = arg or combine in ["max", "min"] -%}
{%- set rows = 256 // lanes -%}
{% for file in math %}
{% include "math/" ~ file %}
{% endfor %}
{{ t.prelude() }}
alias T = {{ T }};
struct Params {
    outputs: u32,
    extent: u32,
    splits: u32,
    chunk: u32,
    offset: u32,
    kept_rank: u32,
    reduced_rank: u32,
    unused: u32,
    args: vec4<f32>,
    kept_shape: array<vec4<u32>, 2>,
    kept_strides: array<vec4<u32>, 2>,
    reduced_shape: array<vec4<u32>, 2>,
    reduced_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", source) }}
{% set next = namespace(binding=1) %}
{% if center %}
{{ t.input(next.binding, "center", center) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if seen %}
{{ t.input(next.binding, "seen", "u32") }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if not arg or values %}
{{ t.output(next.binding, "result", out) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if arg %}
{{ t.output(next.binding, "place", index) }}
{% endif %}

{% if T in ["f32", "f64"] and extreme %}
// By its bits, for compilers may take `v != v` for false; an f64 that is NaN is one as f32 too.
fn is_nan(v: T) -> bool { return (bitcast<u32>(f32(v)) & 0x7fffffffu) > 0x7f800000u; }
{% endif %}
{% set floats = T in ["f32", "f64"] %}

{% if arg %}
{% set better = ">" if combine == "argmax" else "<" %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the first.
fn combined(a: Acc, b: Acc) -> Acc {
    var take = b.v {{ better }} a.v || (b.v == a.v && b.i < a.i);
    {% if floats %}
    let na = is_nan(a.v);
    let nb = is_nan(b.v);
    take = select(take && !na, !na || b.i < a.i, nb);
    {% endif %}
    if take { return b; }
    return a;
}
{% else %}
alias Acc = T;
fn combined(a: T, b: T) -> T {
    {% if combine == "sum" %}
    return a + b;
    {% elif combine == "prod" %}
    return a * b;
    {% elif floats %}
    return select(select({{ combine }}(a, b), b, is_nan(b)), a, is_nan(a));
    {% else %}
    return {{ combine }}(a, b);
    {% endif %}
}
{% endif %}

fn nonzero(v: {{ V }}) -> T {
    {% if V == "bool" %}
    return select(T(0), T(1), v);
    {% elif V == "f32" %}
    // By its bits: NaN counts.
    return select(T(0), T(1), (bitcast<u32>(v) & 0x7fffffffu) != 0u);
    {% else %}
    return select(T(0), T(1), v != {{ V }}(0));
    {% endif %}
}

fn element(i: u32, r: u32, m: T) -> Acc {
    {% if map == "nonzero" %}
    return nonzero(input_at(i));
    {% else %}
    let v = {{ t.cast("input_at(i)", V, T) }};
    {% if not arg %}
    return {{ map }};
    {% elif seen %}
    return Acc(v, seen_at(i));
    {% else %}
    return Acc(v, r);
    {% endif %}
    {% endif %}
}

fn finished(acc: T, m: T) -> T { return {{ post }}; }

fn reduced_offset(r: u32) -> u32 {
    {% if flat %}
    return r * p.reduced_strides[0].x;
    {% else %}
    var left = r;
    var at = 0u;
    for (var d = p.reduced_rank; d > 0u; d--) {
        let axis = d - 1u;
        let extent = p.reduced_shape[axis >> 2u][axis & 3u];
        at += (left % extent) * p.reduced_strides[axis >> 2u][axis & 3u];
        left = left / extent;
    }
    return at;
    {% endif %}
}

{% if lanes > 1 %}
var<workgroup> shared_acc: array<Acc, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if across %}
    let row = thread % {{ rows }}u;
    let lane = thread / {{ rows }}u;
    {% else %}
    let row = thread / {{ lanes }}u;
    let lane = thread % {{ lanes }}u;
    {% endif %}
    let out_index = group_index(group, groups) * {{ rows }}u + row;
    // Threads without work stay for the barriers.
    let live = out_index < p.outputs * p.splits;
    let o = out_index % p.outputs;
    var base = p.offset;
    var left = o;
    for (var d = p.kept_rank; d > 0u; d--) {
        let axis = d - 1u;
        let extent = p.kept_shape[axis >> 2u][axis & 3u];
        base += (left % extent) * p.kept_strides[axis >> 2u][axis & 3u];
        left = left / extent;
    }
    {% if center %}
    let m = {{ t.cast("center_at(o)", t.value(center), T) }};
    {% else %}
    let m = T(0);
    {% endif %}
    var total: Acc;
    if live {
        let begin = (out_index / p.outputs) * p.chunk;
        let end = min(begin + p.chunk, p.extent);
        {% if extreme %}
        // An extreme of the range: harmless to count twice, and needs no infinity of every type.
        let identity = element(base + reduced_offset(begin), begin, m);
        {% else %}
        let identity = T({{ 1 if combine == "prod" else 0 }});
        {% endif %}
        total = identity;
        var r = begin + lane;
        // In blocks: rounding errors grow with the number of blocks, not of elements.
        while r < end {
            var block = identity;
            for (var k = 0u; k < 32u && r < end; k++) {
                block = combined(block, element(base + reduced_offset(r), r, m));
                r += {{ lanes }}u;
            }
            total = combined(total, block);
        }
    }
    {% if lanes > 1 %}
    shared_acc[thread] = total;
    workgroupBarrier();
    for (var step = {{ lanes // 2 }}u; step > 0u; step = step >> 1u) {
        if lane < step {
            let other = shared_acc[thread + step * {{ rows if across else 1 }}u];
            shared_acc[thread] = combined(shared_acc[thread], other);
        }
        workgroupBarrier();
    }
    total = shared_acc[thread];
    {% endif %}
    if live && lane == 0u {
        {% if arg %}
        {% if values %}
        result_put(out_index, {{ t.cast("total.v", T, O) }});
        {% endif %}
        place_put(out_index, {{ t.cast("total.i", "u32", t.value(index)) }});
        {% else %}
        result_put(out_index, {{ t.cast("finished(total, m)", T, O) }});
        {% endif %}
    }
}
