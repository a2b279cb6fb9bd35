{#-
One reduction over any dimensions and strides: out[o] = post(combine over r of map(in[o, r])).

source · compute · out: dtypes of the input, of the arithmetic, of the result · math: files that it needs
map: an expression of `v`, an element · center: dtype of one more value `m` for each output, or ""
post: expression of `acc`
combine: sum, prod, max, min, argmax, argmin · flat: the reduced dimensions are one
lanes: threads for one output
across: neighbouring threads have neighbouring outputs (the kept dimensions are the inner ones), not
  neighbouring elements
width: 4 if neighbours are read in one aligned access (elements of one output or, `across`, of four outputs),
  else 1. Parameters then count quads of the inner dimension, and `across` quads of outputs.
unroll: loads that a thread has in flight
For argmax and argmin: values: the value is written too · seen: indices come from a buffer of a previous stage
Few outputs of many elements need two stages: the first writes `splits` partial results for each output.
-#}
{%- import "types" as t -%}
{%- set V = t.value(source) -%}
{%- set T = t.value(compute) -%}
{%- set O = t.value(out) -%}
{%- set arg = combine in ["argmax", "argmin"] -%}
{%- set extreme = arg or combine in ["max", "min"] -%}
{%- set rows = 256 // lanes -%}
{%- set lanes_of = [".x", ".y", ".z", ".w"] if width == 4 else [""] -%}
{%- set outs = width if across else 1 -%}
{%- set packed = outs == 4 and out in ["f32", "f16", "bf16"] -%}
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
{{ t.quads(0, "input", source) if width == 4 else t.input(0, "input", source) }}
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
{{ t.quads_output(next.binding, "result", out) if packed else t.output(next.binding, "result", out) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if arg %}
{{ t.output(next.binding, "place", index) }}
{% endif %}

{% if T in ["f32", "f64"] and extreme %}
{{ t.is_nan("T") }}
{% endif %}
{% set floats = T in ["f32", "f64"] %}

{% if arg %}
{% set better = ">" if combine == "argmax" else "<" %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the first wins.
fn combined(a: Acc, b: Acc) -> Acc {
    var take = (b.v {{ better }} a.v) | ((b.v == a.v) & (b.i < a.i));
    {% if floats %}
    let na = is_nan(a.v);
    let nb = is_nan(b.v);
    take = select(take & !na, !na | (b.i < a.i), nb);
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
    // Compares by bits: NaN counts.
    return select(T(0), T(1), (bitcast<u32>(v) & 0x7fffffffu) != 0u);
    {% else %}
    return select(T(0), T(1), v != {{ V }}(0));
    {% endif %}
}

fn mapped(e: {{ V }}, i: u32, r: u32, m: T) -> Acc {
    {% if map == "nonzero" %}
    return nonzero(e);
    {% else %}
    let v = {{ t.cast("e", V, T) }};
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
    {{ t.walk([("at", "reduced_strides")], of="reduced_") }}
    return at;
    {% endif %}
}

{#- Combines the values of `count` lanes in pairs, so that rounding errors grow with the number of levels. -#}
{% macro in_pairs(k, count, apart) %}
{% for n in range(count) %}
        let t{{ k }}_{{ count }}_{{ n }} = shared_acc[thread + {{ n * apart + k * 256 }}u];
{% endfor %}
{% for m in [16, 8, 4, 2, 1] if m < count %}
{% for n in range(m) %}
        let t{{ k }}_{{ m }}_{{ n }} = combined(t{{ k }}_{{ m * 2 }}_{{ n }}, t{{ k }}_{{ m * 2 }}_{{ n + m }});
{% endfor %}
{% endfor %}
        total{{ k }} = t{{ k }}_1_0;
{% endmacro %}
{% set read = "input_quad(i" if width == 4 else "input_at(i" %}
{% set element = " >> 2u)" if width == 4 else ")" %}
{% if lanes > 1 %}
var<workgroup> shared_acc: array<Acc, {{ 256 * outs }}>;
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
    // Threads without work take part in the barriers.
    let live = out_index < p.outputs * p.splits;
    let o = out_index % p.outputs;
    var base = p.offset;
    var left = o;
    {{ t.walk([("base", "kept_strides")], of="kept_") }}
    {% for k in range(outs) %}
    {% if center %}
    let m{{ k }} = {{ t.cast("center_at(o * " ~ outs ~ "u + " ~ k ~ "u)", t.value(center), T) }};
    {% else %}
    let m{{ k }} = T(0);
    {% endif %}
    {% endfor %}
    {% for c in lanes_of %}
    var total{{ loop.index0 }}: Acc;
    {% endfor %}
    if live {
        let begin = (out_index / p.outputs) * p.chunk;
        let end = min(begin + p.chunk, p.extent);
        {% if extreme %}
        // An element of the range: harmless to count twice, and avoids an infinity for every type.
        let i = base + reduced_offset(begin);
        let e = {{ read }}{{ element }};
        {% endif %}
        {% for c in lanes_of %}
        {% if extreme %}
        total{{ loop.index0 }} = mapped(e{{ c }}, i, begin, m{{ loop.index0 % outs }});
        {% else %}
        total{{ loop.index0 }} = T({{ 1 if combine == "prod" else 0 }});
        {% endif %}
        {% endfor %}
        var r = begin + lane;
        {% if unroll > 1 %}
        // Combines in pairs: rounding errors grow with the number of iterations, not of elements.
        while r + {{ (unroll - 1) * lanes }}u < end {
            {% for u in range(unroll) %}
            let r{{ u }} = r + {{ u * lanes }}u;
            let i{{ u }} = base + reduced_offset(r{{ u }});
            let e{{ u }} = {{ read }}{{ u }}{{ element }};
            {% endfor %}
            {% for c in lanes_of %}
            {% set at = loop.index0 %}
            {% for u in range(0, unroll, 4) %}
            let b{{ at }}_{{ u }} = combined(
                combined(mapped(e{{ u }}{{ c }}, i{{ u }}, r{{ u }}, m{{ at % outs }}),
                    mapped(e{{ u + 1 }}{{ c }}, i{{ u + 1 }}, r{{ u + 1 }}, m{{ at % outs }})),
                combined(mapped(e{{ u + 2 }}{{ c }}, i{{ u + 2 }}, r{{ u + 2 }}, m{{ at % outs }}),
                    mapped(e{{ u + 3 }}{{ c }}, i{{ u + 3 }}, r{{ u + 3 }}, m{{ at % outs }})));
            {% endfor %}
            {% if unroll == 8 %}
            total{{ at }} = combined(total{{ at }}, combined(b{{ at }}_0, b{{ at }}_4));
            {% else %}
            total{{ at }} = combined(total{{ at }}, b{{ at }}_0);
            {% endif %}
            {% endfor %}
            r += {{ unroll * lanes }}u;
        }
        {% endif %}
        while r < end {
            let i = base + reduced_offset(r);
            let e = {{ read }}{{ element }};
            {% for c in lanes_of %}
            total{{ loop.index0 }} = combined(total{{ loop.index0 }},
                mapped(e{{ c }}, i, r, m{{ loop.index0 % outs }}));
            {% endfor %}
            r += {{ lanes }}u;
        }
    }
    {% if width == 4 and not across %}
    total0 = combined(combined(total0, total1), combined(total2, total3));
    {% endif %}
    {% if lanes > 1 %}
    {% for k in range(outs) %}
    shared_acc[thread + {{ k * 256 }}u] = total{{ k }};
    {% endfor %}
    workgroupBarrier();
    {% set step = rows if across else 1 %}
    {% set few = 16 if lanes == 256 else lanes %}
    {% if lanes == 256 %}
    // Sixteen sums of sixteen, then their sum; a thread overwrites only values that it alone reads.
    if lane < 16u {
        {% for k in range(outs) %}
        {{ in_pairs(k, 16, 16 * step) }}
        shared_acc[thread + {{ k * 256 }}u] = total{{ k }};
        {% endfor %}
    }
    workgroupBarrier();
    {% endif %}
    if lane == 0u {
        {% for k in range(outs) %}
        {{ in_pairs(k, few, step) }}
        {% endfor %}
    }
    {% endif %}
    if live && lane == 0u {
        {% if arg %}
        {% if values %}
        result_put(out_index, {{ t.cast("total0.v", T, O) }});
        {% endif %}
        place_put(out_index, {{ t.cast("total0.i", "u32", t.value(index)) }});
        {% elif packed %}
        result_put_quad(out_index, vec4<{{ O }}>({% for k in range(4) %}
            {{ t.cast("finished(total" ~ k ~ ", m" ~ k ~ ")", T, O) }}{{ ", " if not loop.last }}{% endfor %}));
        {% else %}
        {% for k in range(outs) %}
        result_put(out_index * {{ outs }}u + {{ k }}u, {{ t.cast("finished(total" ~ k ~ ", m" ~ k ~ ")", T, O) }});
        {% endfor %}
        {% endif %}
    }
}
