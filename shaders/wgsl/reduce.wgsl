{#-
One reduction over any dimensions and strides: out[o] = post(combine over r of map(in[o, r])).

source · compute · out: dtypes of the input, of the arithmetic, of the result · math: files that it needs
factor: dtype of a tensor of the input's strides, whose elements multiply those of the input in f32, or ""
map: an expression of `v`, an element · center: dtype of one more value `m` for each output, or ""
from_first: `map` also has `k`, the first element of the output
post: expression of `acc`
combine: sum, prod, max, min, argmax, argmin · flat: the reduced dimensions are one · planar: they are two
f32_division: (planar) all quotients are below 2^20
threads_per_row: threads for one output
across: neighbouring threads have neighbouring outputs (the kept dimensions are the inner ones), not
  neighbouring elements
width: 4 if neighbours are read in one aligned access (elements of one output or, `across`, of four outputs),
  else 1. Parameters then count quads of the inner dimension, and `across` quads of outputs.
unroll: loads that a thread has in flight
staged: results of 16 bits are collected, and written in quads; not `across`, no index, and a multiple of four outputs
values: for argmax and argmin, the value is written too
has_indices: for argmax and argmin, indices come from a buffer of a previous stage
Few outputs of many elements need two stages: the first writes `splits` partial results for each output.
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as row_reduce -%}
{%- set V = t.value(source) -%}
{%- set T = t.value(compute) -%}
{%- set O = t.value(out) -%}
{%- set arg = combine in ["argmax", "argmin"] -%}
{%- set extreme = arg or combine in ["max", "min"] -%}
{%- set rows = 256 // threads_per_row -%}
{%- set components = [".x", ".y", ".z", ".w"] if width == 4 else [""] -%}
{%- set outs = width if across else 1 -%}
{%- set packed = staged or (outs == 4 and out in ["f32", "f16", "bf16"]) -%}
{%- set words = T == "vec2<u32>" -%}
{% for file in math %}
{% include "math/" ~ file %}
{% endfor %}
{% if "i64w" in [source, compute, out, index] %}
{% include "i64w" %}
{% endif %}
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
    factor_offset: u32,
    args: vec4<f32>,
    kept_shape: array<vec4<u32>, 2>,
    kept_strides: array<vec4<u32>, 2>,
    reduced_shape: array<vec4<u32>, 2>,
    reduced_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.quads(0, "input", source) if width == 4 else t.input(0, "input", source) }}
{% set next = namespace(binding=1) %}
{% if factor %}
{{ t.quads(next.binding, "factor", factor) if width == 4 else t.input(next.binding, "factor", factor) }}
{% set next.binding = next.binding + 1 %}
fn product_at(i: u32) -> {{ "vec4<f32>" if width == 4 else "f32" }} {
    let k = i - p.offset + p.factor_offset;
    return {{ "input_quad(i >> 2u) * factor_quad(k >> 2u)" if width == 4 else "input_at(i) * factor_at(k)" }};
}
{% endif %}
{% if center %}
{{ t.input(next.binding, "center", center) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if has_indices %}
{{ t.input(next.binding, "input_indices", "u32") }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if not arg or values %}
{{ t.quads_output(next.binding, "result", out) if packed else t.output(next.binding, "result", out) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if arg %}
{{ t.output(next.binding, "arg_index", index) }}
{% endif %}

{% if T in ["f32", "f64"] and extreme %}
{{ t.is_nan("T") }}
{% endif %}
{% set floats = T in ["f32", "f64"] %}

{% if arg %}
{% set better = ">" if combine == "argmax" else "<" %}
{% set ordered = "i64w_less(a.v, b.v)" if combine == "argmax" else "i64w_less(b.v, a.v)" %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the first wins.
fn combine_values(a: Acc, b: Acc) -> Acc {
    {% if words %}
    let take = {{ ordered }} | (all(b.v == a.v) & (b.i < a.i));
    {% else %}
    var take = (b.v {{ better }} a.v) | ((b.v == a.v) & (b.i < a.i));
    {% endif %}
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
fn combine_values(a: T, b: T) -> T {
    {% if words %}
    return i64w_{{ "add" if combine == "sum" else "mul" if combine == "prod" else combine }}(a, b);
    {% elif combine == "sum" %}
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
    {% elif V == "vec2<u32>" %}
    return select(T(0), T(1), any(v != vec2<u32>()));
    {% elif V == "f32" %}
    // Compares by bits: NaN counts.
    return select(T(0), T(1), (bitcast<u32>(v) & 0x7fffffffu) != 0u);
    {% else %}
    return select(T(0), T(1), v != {{ V }}(0));
    {% endif %}
}

fn map_element(e: {{ V }}, i: u32, r: u32, m: T{{ ", k: T" if from_first }}) -> Acc {
    {% if map == "nonzero" %}
    return nonzero(e);
    {% else %}
    let v = {{ t.cast("e", V, T) }};
    {% if not arg %}
    return {{ map }};
    {% elif has_indices %}
    return Acc(v, input_indices_at(i));
    {% else %}
    return Acc(v, r);
    {% endif %}
    {% endif %}
}

fn finalize(acc: T, m: T) -> T { return {{ post }}; }

{{ row_reduce.mapping(threads_per_row, across) }}
{% if planar %}
{{ t.divide(f32_division) }}
{% endif %}
fn reduced_offset(r: u32) -> u32 {
    {% if flat %}
    return r * p.reduced_strides[0].x;
    {% elif planar %}
    let at = divide(r, p.reduced_shape[0].y);
    return at.x * p.reduced_strides[0].x + at.y * p.reduced_strides[0].y;
    {% else %}
    var linear_index = r;
    var at = 0u;
    {{ t.strided_offsets([("at", "reduced_strides")], of="reduced_") }}
    return at;
    {% endif %}
}

{#- Combines the values of `count` threads in pairs, so that rounding errors grow with the number of levels. -#}
{% macro combine_in_pairs(k, count, stride) %}
{% for n in range(count) %}
        let t{{ k }}_{{ count }}_{{ n }} = shared_acc[thread + {{ n * stride + k * 256 }}u];
{% endfor %}
{% for m in [16, 8, 4, 2, 1] if m < count %}
{% for n in range(m) %}
        let t{{ k }}_{{ m }}_{{ n }} = combine_values(t{{ k }}_{{ m * 2 }}_{{ n }}, t{{ k }}_{{ m * 2 }}_{{ n + m }});
{% endfor %}
{% endfor %}
        total{{ k }} = t{{ k }}_1_0;
{% endmacro %}
{% if staged %}
var<workgroup> staged_results: array<f32, {{ rows }}>;
{% endif %}
{% set read = "product_at(i" if factor else "input_quad(i" if width == 4 else "input_at(i" %}
{% set element = " >> 2u)" if width == 4 and not factor else ")" %}
{#- Arguments of `map_element` for output `k` of a thread. -#}
{% macro of_output(k) -%}m{{ k }}{{ ", k" ~ k if from_first }}{%- endmacro %}
{% if threads_per_row > 1 %}
var<workgroup> shared_acc: array<Acc, {{ 256 * outs }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row_thread = thread_in_row(thread);
    let out_index = row_of(group_index(group, groups), thread);
    // Threads without work take part in the barriers.
    let live = out_index < p.outputs * p.splits;
    let o = out_index % p.outputs;
    var base = p.offset;
    var linear_index = o;
    {{ t.strided_offsets([("base", "kept_strides")], of="kept_") }}
    {% for k in range(outs) %}
    {% if center %}
    let m{{ k }} = {{ t.cast("center_at(o * " ~ outs ~ "u + " ~ k ~ "u)", t.value(center), T) }};
    {% else %}
    let m{{ k }} = {{ "T()" if words else "T(0)" }};
    {% endif %}
    {% endfor %}
    {% if from_first %}
    let first = {{ "input_quad(base >> 2u)" if width == 4 else "input_at(base)" }};
    {% for k in range(outs) %}
    let k{{ k }} = {{ t.cast("first" ~ components[k], V, T) }};
    {% endfor %}
    {% endif %}
    {% for c in components %}
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
        {% for c in components %}
        {% if extreme %}
        total{{ loop.index0 }} = map_element(e{{ c }}, i, begin, {{ of_output(loop.index0 % outs) }});
        {% else %}
        {% set one = "T(1u, 0u)" if words else "T(1)" %}
        {% set zero = "T()" if words else "T(0)" %}
        total{{ loop.index0 }} = {{ one if combine == "prod" else zero }};
        {% endif %}
        {% endfor %}
        var r = begin + row_thread;
        {% if unroll > 1 %}
        // Combines in pairs: rounding errors grow with the number of iterations, not of elements.
        while r + {{ (unroll - 1) * threads_per_row }}u < end {
            {% for u in range(unroll) %}
            let r{{ u }} = r + {{ u * threads_per_row }}u;
            let i{{ u }} = base + reduced_offset(r{{ u }});
            let e{{ u }} = {{ read }}{{ u }}{{ element }};
            {% endfor %}
            {% for c in components %}
            {% set at = loop.index0 %}
            {% for u in range(0, unroll, 4) %}
            let b{{ at }}_{{ u }} = combine_values(
                combine_values(map_element(e{{ u }}{{ c }}, i{{ u }}, r{{ u }}, {{ of_output(at % outs) }}),
                    map_element(e{{ u + 1 }}{{ c }}, i{{ u + 1 }}, r{{ u + 1 }}, {{ of_output(at % outs) }})),
                combine_values(map_element(e{{ u + 2 }}{{ c }}, i{{ u + 2 }}, r{{ u + 2 }}, {{ of_output(at % outs) }}),
                    map_element(e{{ u + 3 }}{{ c }}, i{{ u + 3 }}, r{{ u + 3 }}, {{ of_output(at % outs) }})));
            {% endfor %}
            {% if unroll == 8 %}
            total{{ at }} = combine_values(total{{ at }}, combine_values(b{{ at }}_0, b{{ at }}_4));
            {% else %}
            total{{ at }} = combine_values(total{{ at }}, b{{ at }}_0);
            {% endif %}
            {% endfor %}
            r += {{ unroll * threads_per_row }}u;
        }
        {% endif %}
        while r < end {
            let i = base + reduced_offset(r);
            let e = {{ read }}{{ element }};
            {% for c in components %}
            total{{ loop.index0 }} = combine_values(total{{ loop.index0 }},
                map_element(e{{ c }}, i, r, {{ of_output(loop.index0 % outs) }}));
            {% endfor %}
            r += {{ threads_per_row }}u;
        }
    }
    {% if width == 4 and not across %}
    total0 = combine_values(combine_values(total0, total1), combine_values(total2, total3));
    {% endif %}
    {% if threads_per_row > 1 %}
    {% for k in range(outs) %}
    shared_acc[thread + {{ k * 256 }}u] = total{{ k }};
    {% endfor %}
    workgroupBarrier();
    {% set step = rows if across else 1 %}
    {% set partials = 16 if threads_per_row == 256 else threads_per_row %}
    {% if threads_per_row == 256 %}
    // Sixteen sums of sixteen, then their sum; a thread overwrites only values that it alone reads.
    if row_thread < 16u {
        {% for k in range(outs) %}
        {{ combine_in_pairs(k, 16, 16 * step) }}
        shared_acc[thread + {{ k * 256 }}u] = total{{ k }};
        {% endfor %}
    }
    workgroupBarrier();
    {% endif %}
    if row_thread == 0u {
        {% for k in range(outs) %}
        {{ combine_in_pairs(k, partials, step) }}
        {% endfor %}
    }
    {% endif %}
    {% if staged %}
    if row_thread == 0u { staged_results[row_in_group(thread)] = {{ t.cast("finalize(total0, m0)", T, "f32") }}; }
    workgroupBarrier();
    let quad = group_index(group, groups) * {{ rows // 4 }}u + thread;
    if (thread < {{ rows // 4 }}u) & (quad * 4u < p.outputs) {
        result_put_quad(quad, vec4<f32>({% for k in range(4) -%}
            staged_results[thread * 4u + {{ k }}u]{{ ", " if not loop.last }}
        {%- endfor %}));
    }
    {% else %}
    if live && row_thread == 0u {
        {% if arg %}
        {% if values %}
        result_put(out_index, {{ t.cast("total0.v", T, O) }});
        {% endif %}
        arg_index_put(out_index, {{ t.cast("total0.i", "u32", t.value(index)) }});
        {% elif packed %}
        result_put_quad(out_index, vec4<{{ O }}>({% for k in range(4) %}
            {{ t.cast("finalize(total" ~ k ~ ", m" ~ k ~ ")", T, O) }}{{ ", " if not loop.last }}{% endfor %}));
        {% else %}
        {% for k in range(outs) %}
        result_put(out_index * {{ outs }}u + {{ k }}u, {{ t.cast("finalize(total" ~ k ~ ", m" ~ k ~ ")", T, O) }});
        {% endfor %}
        {% endif %}
    }
    {% endif %}
}
