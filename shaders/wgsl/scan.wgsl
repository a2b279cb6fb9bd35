{#-
Scan (running totals) along one dimension: out[.., r, ..] combines in[.., 0, ..] to in[.., r, ..].

source · compute · out: dtypes of the input, of the arithmetic, of the result, which is contiguous
combine: sum, prod, max, min (with `index`, dtype of the extremes' positions), or affine: s[r] = in[r] +
  factor[r before] * s[r before]; `factor` has the input's dtype and is contiguous
exclusive: without element r itself · reverse: from the end · lanes: threads for one row, 1 or 256
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
{{ t.prelude() }}
alias T = {{ T }};
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    // Chunks of a row, and elements of a chunk.
    chunks: u32,
    chunk: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set at = namespace(next=0) %}
{% macro part(name, type, access) %}
@group(0) @binding({{ at.next }}) var<storage, {{ access }}> {{ name }}: array<{{ type }}>;
{% endmacro %}
{% if level == 0 %}
{{ t.input(0, "input", source) }}
{% if affine %}{{ t.input(1, "factor", source) }}{% endif %}
{% set at.next = 2 if affine else 1 %}
{% else %}
{{ part("given", T, "read") }}
{% set at.next = at.next + 1 %}
{% if paired %}{{ part("given_too", second, "read") }}{% set at.next = at.next + 1 %}{% endif %}
{% endif %}
{% if carried %}
{{ part("before", T, "read") }}
{% set at.next = at.next + 1 %}
{% if paired %}{{ part("before_too", second, "read") }}{% set at.next = at.next + 1 %}{% endif %}
{% endif %}
{% if totals or level > 0 %}
{{ part("sums", T, "read_write") }}
{% set at.next = at.next + 1 %}
{% if paired %}{{ part("sums_too", second, "read_write") }}{% set at.next = at.next + 1 %}{% endif %}
{% else %}
{{ t.output(at.next, "result", out) }}
{% if extreme %}{{ t.output(at.next + 1, "place", index) }}{% endif %}
{% endif %}

{% if extreme %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the last wins.
fn combined(a: Acc, b: Acc) -> Acc {
    var take = b.v {{ ">=" if combine == "max" else "<=" }} a.v;
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
fn combined(f: Acc, g: Acc) -> Acc { return Acc(g.a * f.a, g.a * f.b + g.b); }
{% else %}
alias Acc = T;
fn combined(a: T, b: T) -> T { return a {{ "+" if combine == "sum" else "*" }} b; }
{% endif %}

// Returns the position of step k in the order of the scan.
fn step_index(k: u32) -> u32 { return {{ "p.extent - 1u - k" if reverse else "k" }}; }

{% macro acc_of(name, i) -%}
{%- if paired -%}Acc({{ name }}[{{ i }}], {{ name }}_too[{{ i }}]){%- else -%}{{ name }}[{{ i }}]{%- endif -%}
{%- endmacro %}
{% if level == 0 %}
fn element(base: u32, to_base: u32, k: u32) -> Acc {
    let r = step_index(k);
    let v = {{ t.cast("input_at(base + r * p.stride)", V, T) }};
    {% if extreme %}
    return Acc(v, r);
    {% elif affine %}
    if k == 0u { return Acc(T(0), v); }
    return Acc({{ t.cast("factor_at(to_base + step_index(k - 1u) * p.inner)", V, T) }}, v);
    {% else %}
    return v;
    {% endif %}
}
{% else %}
fn element(base: u32, to_base: u32, k: u32) -> Acc { return {{ acc_of("given", "to_base + k") }}; }
{% endif %}

{% if totals or level > 0 %}
fn put_total(i: u32, acc: Acc) {
    {% if extreme %}
    sums[i] = acc.v;
    sums_too[i] = acc.i;
    {% elif affine %}
    sums[i] = acc.a;
    sums_too[i] = acc.b;
    {% else %}
    sums[i] = acc;
    {% endif %}
}
{% endif %}
{% if totals %}
fn write(to_base: u32, k: u32, acc: Acc) {}
{% elif level > 0 %}
fn write(to_base: u32, k: u32, acc: Acc) { put_total(to_base + k, acc); }
{% else %}
fn write(to_base: u32, k: u32, acc: Acc) {
    let i = to_base + step_index(k) * p.inner;
    {% if extreme %}
    result_put(i, {{ t.cast("acc.v", T, O) }});
    place_put(i, {{ t.cast("acc.i", "u32", t.value(index)) }});
    {% elif affine %}
    result_put(i, {{ t.cast("acc.b", T, O) }});
    {% else %}
    result_put(i, {{ t.cast("acc", T, O) }});
    {% endif %}
}
{% endif %}

{% if lanes > 1 %}
var<workgroup> window: array<Acc, {{ lanes }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    {% if lanes > 1 %}
    let number = group_index(group, groups);
    {% else %}
    let number = group_index(group, groups) * 256u + lane;
    {% endif %}
    if number >= p.rows * p.chunks { return; }
    {% if lanes == 1 and stage != "whole" %}
    // Neighbouring threads have neighbouring rows.
    let row = number % p.rows;
    let chunk = number / p.rows;
    {% else %}
    let row = number / p.chunks;
    let chunk = number % p.chunks;
    {% endif %}
    let begin = chunk * p.chunk;
    let end = min(begin + p.chunk, p.extent);
    {% if level == 0 %}
    var base = p.offset;
    var left = row;
    {{ t.walk([("base", "strides")]) }}
    let to_base = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% else %}
    let base = 0u;
    let to_base = row * p.extent;
    {% endif %}
    {% if exclusive and not totals %}
    let identity = T({{ 1 if combine == "prod" else 0 }});
    {% endif %}
    var carry: Acc;
    // True if a previous value exists.
    var any = false;
    {% if carried %}
    if chunk > 0u {
        let b = row * p.chunks + chunk - 1u;
        carry = {{ acc_of("before", "b") }};
        any = true;
    }
    {% endif %}
    {% if lanes > 1 %}
    // Both loops have the same number of iterations in all threads, because of the barriers.
    for (var start = begin; start < end; start += {{ lanes }}u) {
        let k = start + lane;
        var acc: Acc;
        if k < end { acc = element(base, to_base, k); }
        window[lane] = acc;
        workgroupBarrier();
        for (var reach = 1u; reach < {{ lanes }}u; reach = reach << 1u) {
            if lane >= reach { acc = combined(window[lane - reach], acc); }
            workgroupBarrier();
            window[lane] = acc;
            workgroupBarrier();
        }
        {% if exclusive and not totals %}
        var before_this = identity;
        if any { before_this = carry; }
        if lane > 0u {
            if any { before_this = combined(carry, window[lane - 1u]); } else { before_this = window[lane - 1u]; }
        }
        if k < end { write(to_base, k, before_this); }
        {% elif not totals %}
        if any { acc = combined(carry, acc); }
        if k < end { write(to_base, k, acc); }
        {% endif %}
        // The last value of a chunk that may end within this iteration.
        let last = window[min({{ lanes }}u, end - start) - 1u];
        if any { carry = combined(carry, last); } else { carry = last; }
        any = true;
        workgroupBarrier();
    }
    {% if totals %}
    if lane == 0u { put_total(row * p.chunks + chunk, carry); }
    {% endif %}
    {% else %}
    for (var k = begin; k < end; k++) {
        let now = element(base, to_base, k);
        {% if exclusive and not totals %}
        if any {
            write(to_base, k, carry);
            carry = combined(carry, now);
        } else {
            write(to_base, k, identity);
            carry = now;
        }
        {% else %}
        if any { carry = combined(carry, now); } else { carry = now; }
        write(to_base, k, carry);
        {% endif %}
        any = true;
    }
    {% if totals %}
    put_total(row * p.chunks + chunk, carry);
    {% endif %}
    {% endif %}
}
