{#-
One elementwise operation: out[i] = expr(a[i], b[i], ...), over any strides.

names, inputs: names of the tensors in the expression, and their dtypes
scalars: names of its scalars, at most four
expr · compute: type of the arithmetic · result: type of the expression · out: dtype of the output
math: files that it needs
layout: `vec4` (all operands contiguous, of 4-byte types or 16-bit floats, length and offsets multiples of
  `width`: 4, or 8 with 16-bit floats), `lines` (like `vec4`, with the same types and alignment of the lines along the
  last dimension; an input in `repeated` has one element for a line), `dense` (contiguous), `tiled` (an input has
  adjacent elements along the last dimension but one; lines of the packed output are multiples of four), `strided`
repeated: for each input, whether its stride along the lines is 0
mode: `packed` or `scattered` output · inplace: the first input is the output itself
Every thread computes four neighbouring elements (`vec4`: `width`), so that a packed output is written in
whole words.
-#}
{%- import "types" as t -%}
{%- set components = ["x", "y", "z", "w"] -%}
{%- set T = t.value(compute) -%}
{%- set R = t.value(result) -%}
{%- set O = t.value(out) -%}
{%- set first = 1 if inplace else 0 -%}
{%- set halves = ["f16", "bf16"] -%}
{%- set vectors = layout in ["vec4", "lines"] -%}
{% for file in math %}
{% include "math/" ~ file %}
{% endfor %}
{% if "i64w" in [compute, out] or "i64w" in inputs %}
{% include "i64w" %}
{% endif %}
{{ t.prelude() }}
{# f64 has its own set of functions. -#}
{%- set expr = expr | replace("m_", "m_d_") if "f64" in math else expr -%}
alias T = {{ T }};
struct Params {
    n: u32,
    rank: u32,
    unused0: u32,
    unused1: u32,
    scalars: array<vec4<u32>, 2>,
    shape: array<vec4<u32>, 2>,
    // Operand 0 is the output, 1.. are the inputs.
    offsets: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 12>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% for dtype in inputs[first:] %}
{% set name = names[loop.index0 + first] ~ "_in" %}
{% if vectors and not repeated[loop.index0 + first] %}
@group(0) @binding({{ loop.index0 }}) var<storage, read> {{ name }}: array<{{ t.vector(dtype) }}>;
{% else %}
{{ t.input(loop.index0, name, dtype) }}
{% endif %}
{% endfor %}
{% if vectors %}
@group(0) @binding({{ inputs | length - first }}) var<storage, read_write> result: array<{{ t.vector(out) }}>;
{{ t.bits_function("result", out) }}
{% else %}
{{ t.output(inputs | length - first, "result", out, mode) }}
{% endif %}

{% if "power(" in expr %}
{% if T == "f64" %}
fn power(x: f64, y: f64) -> f64 { return m_d_pow(x, y); }
{% else %}
// By repeated squaring, modulo the type's range; negative powers are 0, except those of 1 and -1.
fn power(x: {{ T }}, y: {{ T }}) -> {{ T }} {
    var square = x;
    var exponent = y;
    {% if T in ["i32", "i64"] %}
    if y < {{ T }}(0) {
        if (x != {{ T }}(1)) & (x != {{ T }}(-1)) { return {{ T }}(0); }
        exponent = {{ T }}(0) - y;
    }
    {% endif %}
    var result = {{ T }}(1);
    while exponent > {{ T }}(0) {
        if (exponent & {{ T }}(1)) == {{ T }}(1) { result *= square; }
        square *= square;
        exponent >>= 1u;
    }
    return result;
}
{% endif %}
{% endif %}
{% if "int_remainder(" in expr or "int_floor_div(" in expr %}
// Rounded down. No step overflows: a sum of the remainder and the divisor is formed only for opposite signs.
{% if T in ["i32", "i64"] %}
fn rounds_down(remainder: {{ T }}, y: {{ T }}) -> bool {
    return (remainder != {{ T }}(0)) & ((remainder ^ y) < {{ T }}(0));
}
fn int_remainder(x: {{ T }}, y: {{ T }}) -> {{ T }} {
    let remainder = x % y;
    return select(remainder, remainder + y, rounds_down(remainder, y));
}
fn int_floor_div(x: {{ T }}, y: {{ T }}) -> {{ T }} {
    return x / y - select({{ T }}(0), {{ T }}(1), rounds_down(x % y, y));
}
{% else %}
fn int_remainder(x: {{ T }}, y: {{ T }}) -> {{ T }} { return x % y; }
fn int_floor_div(x: {{ T }}, y: {{ T }}) -> {{ T }} { return x / y; }
{% endif %}
{% endif %}
{% if "gcd(" in expr or "lcm(" in expr %}
fn gcd(x: {{ T }}, y: {{ T }}) -> {{ T }} {
    var one = x;
    var other = y;
    while other != {{ T }}(0) {
        let remainder = one % other;
        one = other;
        other = remainder;
    }
    return {{ "select(one, -one, one < " ~ T ~ "(0))" if T in ["i32", "i64"] else "one" }};
}
fn lcm(x: {{ T }}, y: {{ T }}) -> {{ T }} {
    let divisor = gcd(x, y);
    if divisor == {{ T }}(0) { return divisor; }
    let both = x / divisor * y;
    return {{ "select(both, -both, both < " ~ T ~ "(0))" if T in ["i32", "i64"] else "both" }};
}
{% endif %}
{% if "shifted_" in expr %}
{% set bits = 64 if T == "i64" else 8 if compute == "u8" else 32 %}
fn is_valid_shift(by: {{ T }}) -> bool {
    return {{ "by >= " ~ T ~ "(0) && " if T in ["i32", "i64"] }}by < {{ T }}({{ bits }});
}
fn shifted_left(v: {{ T }}, by: {{ T }}) -> {{ T }} {
    return select({{ T }}(0), v << (u32(by) & {{ bits - 1 }}u), is_valid_shift(by));
}
// For signed types, only the sign remains.
fn shifted_right(v: {{ T }}, by: {{ T }}) -> {{ T }} {
    return v >> select({{ bits - 1 }}u, u32(by), is_valid_shift(by))
        {{ "" if T in ["i32", "i64"] else " >> select(1u, 0u, is_valid_shift(by))" }};
}
{% endif %}
{% if "round_even(" in expr %}
// For integers and f64: llvmpipe (Mesa 22) rounds an f64 of 1.5 to 1 on some processors.
fn round_even(v: T) -> T {
    {% if T == "f64" %}
    let below = floor(v);
    let remainder = v - below;
    let odd = floor(below * 0.5) != below * 0.5;
    let whole = below + select(T(0), T(1), remainder > 0.5 || (remainder == 0.5 && odd));
    return select(whole, v * T(0), whole == T(0));
    {% else %}
    return v;
    {% endif %}
}
{% endif %}
{% if compute == "f64" and scalars %}
// 2^k for -540 <= k <= 540.
fn pow2(k: i32) -> f64 {
    let eighth = k >> 3u;
    let a = f64(bitcast<f32>(u32(127i + eighth) << 23u));
    let b = a * a;
    let c = b * b;
    return c * c * f64(1i << u32(k - eighth * 8i));
}
// An f64 from its bits, which WGSL cannot cast: from integers of at most 16 bits and powers of two; every
// step is exact.
fn f64_from_bits(hi: u32, lo: u32) -> f64 {
    let exponent = (hi >> 20u) & 0x7ffu;
    let top = f64(i32((hi & 0xfffffu) | select(0x100000u, 0u, exponent == 0u)));
    let whole = (top * 65536.0 + f64(i32(lo >> 16u))) * 65536.0 + f64(i32(lo & 0xffffu));
    let k = i32(max(exponent, 1u)) - 1075i;
    let half = k >> 1u;
    let nan = ((hi & 0xfffffu) | lo) != 0u;
    let special = f64(bitcast<f32>(select(0x7f800000u, 0x7fc00000u, nan)));
    let size = select(whole * pow2(half) * pow2(k - half), special, exponent == 0x7ffu);
    return select(size, -size, (hi >> 31u) != 0u);
}
{% endif %}
fn apply({% for dtype in inputs %}{{ names[loop.index0] }}: {{ T }}{{ ", " if not loop.last }}{% endfor %}) -> {{ R }} {
    {% for scalar in scalars %}
    {% set k = loop.index0 %}
    {% set hi = "p.scalars[" ~ (k // 2) ~ "]." ~ ("x" if k % 2 == 0 else "z") %}
    {% set lo = "p.scalars[" ~ (k // 2) ~ "]." ~ ("y" if k % 2 == 0 else "w") %}
    {% if compute == "f64" %}
    let {{ scalar }} = f64_from_bits({{ hi }}, {{ lo }});
    {% elif compute == "i64" %}
    let {{ scalar }} = (i64(bitcast<i32>({{ hi }})) << 32u) | {{ t.u32_to_i64(lo) }};
    {% elif compute == "i64w" %}
    let {{ scalar }} = vec2<u32>({{ lo }}, {{ hi }});
    {% elif T == "bool" %}
    let {{ scalar }} = {{ hi }} != 0u;
    {% else %}
    let {{ scalar }} = bitcast<{{ T }}>({{ hi }});
    {% endif %}
    {% endfor %}
    return {{ t.rounded_expression(expr, result) }};
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    {% if vectors %}
    if global_index >= p.n / {{ width }}u { return; }
    {% if layout == "lines" %}
    var linear_index = global_index * {{ width }}u;
    {{ t.operand_positions(range(1, inputs | length + 2)) }}
    {% endif %}
    {% for dtype in inputs %}
    {% set name = "result" if inplace and loop.first else names[loop.index0] ~ "_in" %}
    {% set arg = names[loop.index0] %}
    {% set count = 1 if dtype in halves else width // 4 %}
    {% if repeated[loop.index0] %}
    let {{ arg }} = {{ t.cast(name ~ "_at(i" ~ loop.index ~ ")", t.value(dtype), T) }};
    {% else %}
    {% if layout == "lines" %}
    let {{ arg }}_at = i{{ 0 if inplace and loop.first else loop.index }} / {{ width }}u * {{ count }}u;
    {% else %}
    let {{ arg }}_at = (global_index + p.offsets[{{ loop.index // 4 }}].{{ components[loop.index % 4] }} / {{ width }}u)
        * {{ count }}u;
    {% endif %}
    {% for v in range(count) %}
    let {{ arg }}_{{ v }} = {{ name }}[{{ arg }}_at + {{ v }}u];
    {% endfor %}
    {% endif %}
    {% endfor %}
    {% for k in range(width) %}
    {% set call %}apply({% for dtype in inputs %}
        {{ names[loop.index0] if repeated[loop.index0]
            else t.cast(t.element(names[loop.index0], dtype, k), t.value(dtype), T) }}{{ ", " if not loop.last }}
    {% endfor %}){% endset %}
    let r{{ k }} = {{ t.cast(call, R, O) }};
    {% endfor %}
    let r_at = {{ "i0" if layout == "lines" else "global_index + p.offsets[0].x" }} / {{ width }}u;
    {% if out in halves %}
    result[r_at] = vec4<u32>({% for k in range(4) %}
        result_pair_{{ out }}(r{{ 2 * k }}, r{{ 2 * k + 1 }}){{ ", " if not loop.last }}{% endfor %});
    {% else %}
    {% for v in range(width // 4) %}
    result[r_at * {{ width // 4 }}u + {{ v }}u] =
        {{ t.vector(out) }}(r{{ 4 * v }}, r{{ 4 * v + 1 }}, r{{ 4 * v + 2 }}, r{{ 4 * v + 3 }});
    {% endfor %}
    {% endif %}
    {% else %}
    {% if layout == "tiled" %}
    // A workgroup has a tile of 32 x 32 elements, so that it uses all of the cache lines that it reads.
    let last = p.rank - 1u;
    let columns = p.shape[last >> 2u][last & 3u];
    let rows = p.shape[(last - 1u) >> 2u][(last - 1u) & 3u];
    let tile = group_index(group, groups);
    let column = tile % ((columns + 31u) / 32u) * 32u + (thread & 7u) * 4u;
    let tile_rows = tile / ((columns + 31u) / 32u);
    let row = tile_rows % ((rows + 31u) / 32u) * 32u + (thread >> 3u);
    if column >= columns || row >= rows { return; }
    var linear_index = (tile_rows / ((rows + 31u) / 32u) * rows + row) * columns + column;
    {{ t.operand_positions(range(1, inputs | length + 2)) }}
    let start = i0;
    {% else %}
    let start = global_index * 4u;
    if start >= p.n { return; }
    {% endif %}
    {% if mode == "packed" %}
    var r: array<{{ O }}, 4>;
    {% endif %}
    for (var k = 0u; k < 4u; k++) {
        {% if layout == "tiled" %}
        if k > 0u {
            {% for k in range(1, inputs | length + 1) %}
            i{{ k }} += p.strides[{{ k * 2 }}u + (last >> 2u)][last & 3u];
            {% endfor %}
        }
        {% else %}
        let i = start + k;
        if i >= p.n { break; }
        {% endif %}
        {% if layout == "dense" %}
        {% for k in range(inputs | length + 1) %}
        let i{{ k }} = i + p.offsets[{{ k // 4 }}].{{ components[k % 4] }};
        {% endfor %}
        {% elif layout == "strided" %}
        var linear_index = i;
        {{ t.operand_positions(range(1, inputs | length + 2)) }}
        {% endif %}
        {% for dtype in inputs %}
        {% set name = "result" if inplace and loop.first else names[loop.index0] ~ "_in" %}
        let {{ names[loop.index0] }} =
            {{ t.cast(name ~ "_at(i" ~ (0 if inplace and loop.first else loop.index) ~ ")", t.value(dtype), T) }};
        {% endfor %}
        {% set call %}apply({% for dtype in inputs %}
            {{ names[loop.index0] }}{{ ", " if not loop.last }}{% endfor %}){% endset %}
        let v = {{ t.cast(call, R, O) }};
        {% if mode == "packed" %}
        r[k] = v;
        {% else %}
        result_put(i0, v);
        {% endif %}
    }
    {% if mode == "packed" %}
    result_put4(start, r, p.n);
    {% endif %}
    {% endif %}
}
