{#-
Scan (running totals) along one dimension: out[.., r, ..] combines in[.., 0, ..] to in[.., r, ..].

source · compute · out: dtypes of the input, of the arithmetic, of the result, which is contiguous
combine: sum, prod, max, min (with `index`, dtype of the extremes' positions), or affine: s[r] = in[r] +
  factor[r before] * s[r before]; `factor` has the input's dtype and is contiguous
exclusive: without element r itself · reverse: from the end · threads_per_row: threads for one row, 1 or 256
stage: `whole`: each row by its own threads. Long rows are processed in chunks: `totals` computes chunk
  totals, which are then scanned. `carried` scans each chunk, starting from the total of the chunks before it.
level: 0, or the input has totals of chunks, [rows, extent]
Totals have the type of the arithmetic, in two buffers if they have two parts.
-#}
{%- import "types" as t -%}
{%- set V = t.value(source) -%}
{%- set T = t.value(compute) -%}
{%- set O = t.value(out) -%}
{%- set extreme = combine in ["max", "min"] -%}
{%- set affine = combine == "affine" -%}
{%- set paired = extreme or affine -%}
{%- set second = "u32" if extreme else T -%}
{%- set totals = stage == "totals" -%}
{%- set carried = stage == "carried" -%}
{%- set words = T == "vec2<u32>" -%}
{% if "i64w" in [source, compute, out, index] %}
{% include "i64w" %}
{% endif %}
{{ t.prelude() }}
alias T = {{ T }};
struct Params {
    {{ t.row_fields() }}
    // Chunks of a row, and elements of a chunk.
    chunks: u32,
    chunk: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.row_offset() }}
{% set next = namespace(binding=0) %}
{% macro part(name, type, access) %}
@group(0) @binding({{ next.binding }}) var<storage, {{ access }}> {{ name }}: array<{{ type }}>;
{% endmacro %}
{% if level == 0 %}
{{ t.input(0, "input", source) }}
{% if affine %}{{ t.input(1, "factor", source) }}{% endif %}
{% set next.binding = 2 if affine else 1 %}
{% else %}
{{ part("in_totals", T, "read") }}
{% set next.binding = next.binding + 1 %}
{% if paired %}{{ part("in_totals_2", second, "read") }}{% set next.binding = next.binding + 1 %}{% endif %}
{% endif %}
{% if carried %}
{{ part("prefix", T, "read") }}
{% set next.binding = next.binding + 1 %}
{% if paired %}{{ part("prefix_2", second, "read") }}{% set next.binding = next.binding + 1 %}{% endif %}
{% endif %}
{% if totals or level > 0 %}
{{ part("out_totals", T, "read_write") }}
{% set next.binding = next.binding + 1 %}
{% if paired %}{{ part("out_totals_2", second, "read_write") }}{% set next.binding = next.binding + 1 %}{% endif %}
{% else %}
{{ t.output(next.binding, "result", out) }}
{% if extreme %}{{ t.output(next.binding + 1, "arg_index", index) }}{% endif %}
{% endif %}

{% if extreme %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the last wins.
fn combine_values(a: Acc, b: Acc) -> Acc {
    {% if words %}
    let take = !i64w_less({{ "b.v, a.v" if combine == "max" else "a.v, b.v" }});
    {% else %}
    var take = b.v {{ ">=" if combine == "max" else "<=" }} a.v;
    {% endif %}
    {% if T == "f32" %}
    let na = (bitcast<u32>(a.v) & 0x7fffffffu) > 0x7f800000u;
    let nb = (bitcast<u32>(b.v) & 0x7fffffffu) > 0x7f800000u;
    take = select(take & !na, true, nb);
    {% elif T == "f64" %}
    take = select(take & (a.v == a.v), true, !(b.v == b.v));
    {% endif %}
    if take { return b; }
    return a;
}
{% elif affine %}
// s -> a s + b.
struct Acc { a: T, b: T }
fn combine_values(f: Acc, g: Acc) -> Acc { return Acc(g.a * f.a, g.a * f.b + g.b); }
{% else %}
alias Acc = T;
{% if words %}
fn combine_values(a: T, b: T) -> T { return i64w_{{ "add" if combine == "sum" else "mul" }}(a, b); }
{% else %}
fn combine_values(a: T, b: T) -> T { return a {{ "+" if combine == "sum" else "*" }} b; }
{% endif %}
{% endif %}

// Returns the position of step k in the order of the scan.
fn step_index(k: u32) -> u32 { return {{ "p.extent - 1u - k" if reverse else "k" }}; }

{% macro acc_of(name, i) -%}
{%- if paired -%}Acc({{ name }}[{{ i }}], {{ name }}_2[{{ i }}]){%- else -%}{{ name }}[{{ i }}]{%- endif -%}
{%- endmacro %}
{% if level == 0 %}
fn element(base: u32, out_base: u32, k: u32) -> Acc {
    let r = step_index(k);
    let v = {{ t.cast("input_at(base + r * p.stride)", V, T) }};
    {% if extreme %}
    return Acc(v, r);
    {% elif affine %}
    if k == 0u { return Acc(T(0), v); }
    return Acc({{ t.cast("factor_at(out_base + step_index(k - 1u) * p.inner)", V, T) }}, v);
    {% else %}
    return v;
    {% endif %}
}
{% else %}
fn element(base: u32, out_base: u32, k: u32) -> Acc { return {{ acc_of("in_totals", "out_base + k") }}; }
{% endif %}

{% if totals or level > 0 %}
fn put_total(i: u32, acc: Acc) {
    {% if extreme %}
    out_totals[i] = acc.v;
    out_totals_2[i] = acc.i;
    {% elif affine %}
    out_totals[i] = acc.a;
    out_totals_2[i] = acc.b;
    {% else %}
    out_totals[i] = acc;
    {% endif %}
}
{% endif %}
{% if totals %}
fn write(out_base: u32, k: u32, acc: Acc) {}
{% elif level > 0 %}
fn write(out_base: u32, k: u32, acc: Acc) { put_total(out_base + k, acc); }
{% else %}
fn write(out_base: u32, k: u32, acc: Acc) {
    let i = out_base + step_index(k) * p.inner;
    {% if extreme %}
    result_put(i, {{ t.cast("acc.v", T, O) }});
    arg_index_put(i, {{ t.cast("acc.i", "u32", t.value(index)) }});
    {% elif affine %}
    result_put(i, {{ t.cast("acc.b", T, O) }});
    {% else %}
    result_put(i, {{ t.cast("acc", T, O) }});
    {% endif %}
}
{% endif %}

{% if threads_per_row > 1 %}
var<workgroup> shared_acc: array<Acc, {{ threads_per_row }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if threads_per_row > 1 %}
    let work_index = group_index(group, groups);
    {% else %}
    let work_index = group_index(group, groups) * 256u + thread;
    {% endif %}
    if work_index >= p.rows * p.chunks { return; }
    {% if threads_per_row == 1 and stage != "whole" %}
    // Neighbouring threads have neighbouring rows.
    let row = work_index % p.rows;
    let chunk = work_index / p.rows;
    {% else %}
    let row = work_index / p.chunks;
    let chunk = work_index % p.chunks;
    {% endif %}
    let begin = chunk * p.chunk;
    let end = min(begin + p.chunk, p.extent);
    {% if level == 0 %}
    let base = row_offset(row);
    let out_base = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% else %}
    let base = 0u;
    let out_base = row * p.extent;
    {% endif %}
    {% if exclusive and not totals %}
    {% set one = "T(1u, 0u)" if words else "T(1)" %}
    {% set zero = "T()" if words else "T(0)" %}
    let identity = {{ one if combine == "prod" else zero }};
    {% endif %}
    var carry: Acc;
    // True if a previous value exists.
    var has_carry = false;
    {% if carried %}
    if chunk > 0u {
        let b = row * p.chunks + chunk - 1u;
        carry = {{ acc_of("prefix", "b") }};
        has_carry = true;
    }
    {% endif %}
    {% if threads_per_row > 1 %}
    // Both loops have the same number of iterations in all threads, because of the barriers.
    for (var start = begin; start < end; start += {{ threads_per_row }}u) {
        let k = start + thread;
        var acc: Acc;
        if k < end { acc = element(base, out_base, k); }
        shared_acc[thread] = acc;
        workgroupBarrier();
        for (var offset = 1u; offset < {{ threads_per_row }}u; offset = offset << 1u) {
            if thread >= offset { acc = combine_values(shared_acc[thread - offset], acc); }
            workgroupBarrier();
            shared_acc[thread] = acc;
            workgroupBarrier();
        }
        {% if exclusive and not totals %}
        var exclusive_prefix = identity;
        if has_carry { exclusive_prefix = carry; }
        if thread > 0u {
            if has_carry {
                exclusive_prefix = combine_values(carry, shared_acc[thread - 1u]);
            } else {
                exclusive_prefix = shared_acc[thread - 1u];
            }
        }
        if k < end { write(out_base, k, exclusive_prefix); }
        {% elif not totals %}
        if has_carry { acc = combine_values(carry, acc); }
        if k < end { write(out_base, k, acc); }
        {% endif %}
        // The last value of a chunk that may end within this iteration.
        let last = shared_acc[min({{ threads_per_row }}u, end - start) - 1u];
        if has_carry { carry = combine_values(carry, last); } else { carry = last; }
        has_carry = true;
        workgroupBarrier();
    }
    {% if totals %}
    if thread == 0u { put_total(row * p.chunks + chunk, carry); }
    {% endif %}
    {% else %}
    for (var k = begin; k < end; k++) {
        let value = element(base, out_base, k);
        {% if exclusive and not totals %}
        if has_carry {
            write(out_base, k, carry);
            carry = combine_values(carry, value);
        } else {
            write(out_base, k, identity);
            carry = value;
        }
        {% else %}
        if has_carry { carry = combine_values(carry, value); } else { carry = value; }
        write(out_base, k, carry);
        {% endif %}
        has_carry = true;
    }
    {% if totals %}
    put_total(row * p.chunks + chunk, carry);
    {% endif %}
    {% endif %}
}
