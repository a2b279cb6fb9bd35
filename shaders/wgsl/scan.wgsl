{#-
Running totals along one dimension: out[.., r, ..] combines in[.., 0, ..] to in[.., r, ..].

source · compute · out: dtypes of the input, of the arithmetic, of the result, which is contiguous
combine: sum, prod, max, min (with `index`, the dtype of where the extreme stands), or
affine: s[r] = in[r] + factor[r before] * s[r before], where `factor` has the input's dtype and is contiguous
exclusive: without element r itself · reverse: from the end · lanes: threads for one row, 1 or 256
-#}
{%- import "types" as t -%}
{%- set V = t.value(source) -%}
{%- set T = t.value(compute) -%}
{%- set O = t.value(out) -%}
{%- set extreme = combine in ["max", "min"] -%}
{%- set affine = combine == "affine" -%}
{{ t.prelude() }}
alias T = {{ T }};
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    unused0: u32,
    unused1: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", source) }}
{% if affine %}
{{ t.input(1, "factor", source) }}
{% endif %}
{{ t.output(2 if affine else 1, "result", out) }}
{% if extreme %}
{{ t.output(2, "place", index) }}
{% endif %}

{% if extreme %}
struct Acc { v: T, i: u32 }
// Of equal values, and of several NaN, the last.
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

// The place of step k, in the order of the scan.
fn step_index(k: u32) -> u32 { return {{ "p.extent - 1u - k" if reverse else "k" }}; }

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

{% if lanes > 1 %}
var<workgroup> window: array<Acc, {{ lanes }}>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    {% if lanes > 1 %}
    let row = group_index(group, groups);
    {% else %}
    let row = group_index(group, groups) * 256u + lane;
    {% endif %}
    if row >= p.rows { return; }
    var base = p.offset;
    var left = row;
    {{ t.walk([("base", "strides")]) }}
    let to_base = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% if exclusive %}
    let identity = T({{ 1 if combine == "prod" else 0 }});
    {% endif %}
    var carry: Acc;
    {% if lanes > 1 %}
    // Both loops take the same turns in all threads, which wait for each other in them.
    for (var start = 0u; start < p.extent; start += {{ lanes }}u) {
        let k = start + lane;
        var acc: Acc;
        if k < p.extent { acc = element(base, to_base, k); }
        window[lane] = acc;
        workgroupBarrier();
        for (var reach = 1u; reach < {{ lanes }}u; reach = reach << 1u) {
            if lane >= reach { acc = combined(window[lane - reach], acc); }
            workgroupBarrier();
            window[lane] = acc;
            workgroupBarrier();
        }
        {% if exclusive %}
        var before = identity;
        if start > 0u { before = carry; }
        if lane > 0u {
            if start > 0u { before = combined(carry, window[lane - 1u]); } else { before = window[lane - 1u]; }
        }
        if k < p.extent { write(to_base, k, before); }
        {% else %}
        if start > 0u { acc = combined(carry, acc); }
        if k < p.extent { write(to_base, k, acc); }
        {% endif %}
        let last = window[{{ lanes - 1 }}];
        if start > 0u { carry = combined(carry, last); } else { carry = last; }
        workgroupBarrier();
    }
    {% else %}
    for (var k = 0u; k < p.extent; k++) {
        let now = element(base, to_base, k);
        {% if exclusive %}
        if k == 0u { write(to_base, k, identity); carry = now; } else { write(to_base, k, carry); carry = combined(carry, now); }
        {% else %}
        if k == 0u { carry = now; } else { carry = combined(carry, now); }
        write(to_base, k, carry);
        {% endif %}
    }
    {% endif %}
}
