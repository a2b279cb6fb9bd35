{#-
Matrix products of any strides: c[z] = a[z] · b[z].

dtype: of a and b · out: of c, which may be f32 for 16-bit operands
way: `tiled` (f32, f16, bf16; with high, rows, cols, depth, a_order, b_order) or `simple` (with lanes, order);
  see `matmul_macros`
split: workgroups share one sum; c is [splits][batch][m][n] in the type of the sums, and `splitk_reduce` adds
  them
mode: `packed` (only `tiled`, n is a multiple of 4) or `scattered` output
bias: a value for each column is added before rounding
-#}
{%- import "types" as t -%}
{%- import "matmul_macros" as body -%}
{%- set T = t.value(dtype) -%}
{{ t.prelude() }}
struct Params {
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    chunk: u32,
    splits: u32,
    // Size of the second of two batch dimensions.
    inner: u32,
    bias_offset: u32,
    // Offset, row stride, column stride.
    a: vec4<u32>,
    b: vec4<u32>,
    // Strides of the batch dimensions: two of a, two of b.
    steps: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{% if bias %}
{{ t.input(2, "bias", dtype) }}
{% endif %}
{{ t.output(3 if bias else 2, "c", T if split else out, mode) }}

fn a_base(z: u32) -> u32 { return p.a.x + (z / p.inner) * p.steps.x + (z % p.inner) * p.steps.y; }
fn b_base(z: u32) -> u32 { return p.b.x + (z / p.inner) * p.steps.z + (z % p.inner) * p.steps.w; }
fn a_value(base: u32, row: u32, k: u32) -> {{ T }} { return a_at(base + row * p.a.y + k * p.a.z); }
fn b_value(base: u32, k: u32, col: u32) -> {{ T }} { return b_at(base + k * p.b.y + col * p.b.z); }

// The first part of a sum includes the bias.
fn with_bias(piece: u32, col: u32, v: {{ T }}) -> {{ T }} {
    {% if bias %}
    if piece == 0u { return v + bias_at(p.bias_offset + min(col, p.n - 1u)); }
    {% endif %}
    return v;
}
{% if way == "tiled" %}
fn store4(piece: u32, z: u32, row: u32, col: u32, sums: vec4<f32>) {
    let v = vec4<f32>(with_bias(piece, col, sums.x), with_bias(piece, col + 1u, sums.y), with_bias(piece, col + 2u, sums.z), with_bias(piece, col + 3u, sums.w));
    let i = ((piece * p.batch + z) * p.m + row) * p.n + col;
    {% if mode == "packed" %}
    c_put4(i, array<f32, 4>(v.x, v.y, v.z, v.w), i + 4u);
    {% else %}
    c_put(i, v.x);
    if col + 1u < p.n { c_put(i + 1u, v.y); }
    if col + 2u < p.n { c_put(i + 2u, v.z); }
    if col + 3u < p.n { c_put(i + 3u, v.w); }
    {% endif %}
}
{{ body.tiled(high, rows, cols, depth, a_order, b_order) }}
{% else %}
fn store(piece: u32, z: u32, row: u32, col: u32, v: {{ T }}) {
    c_put(((piece * p.batch + z) * p.m + row) * p.n + col, with_bias(piece, col, v));
}
{{ body.simple(T, lanes, order) }}
{% endif %}
