{#-
Matrix products of any strides: c[z] = a[z] · b[z].

dtype: of a and b · out: of c, which may be f32 for 16-bit operands
variant: `tiled` (f32, f16, bf16), `cooperative` (f16, bf16) or `simple` (with threads_per_output, order); the first two
  with their tile, a_order, b_order, a_vectors, b_vectors, k_edges; see `matmul_macros`
split: workgroups share one sum; c is [splits][batch][m][n] in the type of the sums, and `splitk_reduce` adds
  them
mode: `packed` (tiles, n is a multiple of 4) or `scattered` output
bias: a value for each column is added before rounding
gelu: c is gelu_tanh of the sum · pre_activation: the sum is also written, to a matrix like c
accumulate: the result is added to c
  With `split`, `splitk_reduce` has these three.
-#}
{%- import "types" as t -%}
{%- import "matmul_macros" as body -%}
{%- set T = t.value(dtype) -%}
{% if variant == "cooperative" %}
enable wgpu_cooperative_matrix;
{% endif %}
{% if gelu %}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{% include "math/erf" %}
{% include "math/activation" %}
{% endif %}
{{ t.prelude() }}
struct Params {
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    chunk: u32,
    splits: u32,
    // Extent of the last of three batch dimensions.
    inner: u32,
    bias_offset: u32,
    // Offset, row stride, column stride, stride of the first batch dimension.
    a: vec4<u32>,
    b: vec4<u32>,
    // Strides of the other batch dimensions: two of a, two of b.
    batch_strides: vec4<u32>,
    // Extent of the second batch dimension.
    middle: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% for name, vectors in [("a", a_vectors), ("b", b_vectors)] %}
{% if not vectors %}
{{ t.input(loop.index0, name, dtype) }}
{% if variant == "cooperative" %}
{{ t.bits_function(name, dtype) }}
{% endif %}
{% elif variant == "cooperative" %}
@group(0) @binding({{ loop.index0 }}) var<storage, read> {{ name }}: array<vec4<u32>>;
{% else %}
{{ t.quads(loop.index0, name, dtype) }}
{% endif %}
{% endfor %}
{% if bias %}
{{ t.input(2, "bias", dtype) }}
{% endif %}
{% set first_output = 3 if bias else 2 %}
{% for name in (["pre", "c"] if pre_activation else ["c"]) %}
{% if mode == "packed" %}
{{ t.quads_output(first_output + loop.index0, name, T if split else out) }}
{% else %}
{{ t.output(first_output + loop.index0, name, T if split else out, mode) }}
{% endif %}
{% endfor %}

// Location of matrix z of an operand with the strides of three batch dimensions.
fn matrix_base(z: u32, start: u32, outer: u32, strides: vec2<u32>) -> u32 {
    let others = z / p.inner;
    return start + (others / p.middle) * outer + (others % p.middle) * strides.x + (z % p.inner) * strides.y;
}
fn a_base(z: u32) -> u32 { return matrix_base(z, p.a.x, p.a.w, p.batch_strides.xy); }
fn b_base(z: u32) -> u32 { return matrix_base(z, p.b.x, p.b.w, p.batch_strides.zw); }
fn a_index(base: u32, row: u32, k: u32) -> u32 { return base + row * p.a.y + k * p.a.z; }
fn b_index(base: u32, k: u32, col: u32) -> u32 { return base + k * p.b.y + col * p.b.z; }
{% if not a_vectors %}
fn a_value(base: u32, row: u32, k: u32) -> {{ T }} { return a_at(a_index(base, row, k)); }
{% elif variant == "cooperative" %}
fn a_vector(base: u32, row: u32, k: u32) -> vec4<u32> { return a[a_index(base, row, k) / 8u]; }
{% else %}
fn a_vector(base: u32, row: u32, k: u32) -> vec4<f32> { return a_quad(a_index(base, row, k) / 4u); }
{% endif %}
{% if not b_vectors %}
fn b_value(base: u32, k: u32, col: u32) -> {{ T }} { return b_at(b_index(base, k, col)); }
{% elif variant == "cooperative" %}
fn b_vector(base: u32, k: u32, col: u32) -> vec4<u32> { return b[b_index(base, k, col) / 8u]; }
{% else %}
fn b_vector(base: u32, k: u32, col: u32) -> vec4<f32> { return b_quad(b_index(base, k, col) / 4u); }
{% endif %}

// The first part of a sum includes the bias.
fn with_bias(k_split: u32, col: u32, v: {{ T }}) -> {{ T }} {
    {% if bias %}
    if k_split == 0u { return v + bias_at(p.bias_offset + min(col, p.n - 1u)); }
    {% endif %}
    return v;
}
{% if gelu %}
fn activate(v: f32) -> f32 { return {{ body.gelu_tanh("v", out) }}; }
{% endif %}
{% if mode != "packed" %}
// Writes element i of the result.
fn put(i: u32, v: {{ T }}) {
    {% if pre_activation %}
    pre_put(i, v);
    {% endif %}
    c_put(i, {{ "activate(v)" if gelu else "v" }}{{ " + c_at(i)" if accumulate }});
}
{% endif %}
{% if variant != "simple" %}
fn store4(k_split: u32, z: u32, row: u32, col: u32, sums: vec4<f32>) {
    let v = vec4<f32>(with_bias(k_split, col, sums.x), with_bias(k_split, col + 1u, sums.y),
        with_bias(k_split, col + 2u, sums.z), with_bias(k_split, col + 3u, sums.w));
    let i = ((k_split * p.batch + z) * p.m + row) * p.n + col;
    {% if mode == "packed" %}
    {% if pre_activation %}
    pre_put_quad(i / 4u, v);
    {% endif %}
    {% if gelu %}
    let result = vec4<f32>(activate(v.x), activate(v.y), activate(v.z), activate(v.w));
    {% else %}
    let result = v;
    {% endif %}
    c_put_quad(i / 4u, result{{ " + c_quad(i / 4u)" if accumulate }});
    {% else %}
    put(i, v.x);
    if col + 1u < p.n { put(i + 1u, v.y); }
    if col + 2u < p.n { put(i + 2u, v.z); }
    if col + 3u < p.n { put(i + 3u, v.w); }
    {% endif %}
}
{% if variant == "tiled" %}
{{ body.tiled(thread_rows, rows, cols, depth, a_order, b_order, a_vectors, b_vectors, k_edges, unroll) }}
{% else %}
{{ body.cooperative(dtype, side, lanes, rows, cols, depth, sub_rows, sub_cols, a_order, b_order, a_vectors, b_vectors,
    k_edges) }}
{% endif %}
{% else %}
fn store(k_split: u32, z: u32, row: u32, col: u32, v: {{ T }}) {
    put(((k_split * p.batch + z) * p.m + row) * p.n + col, with_bias(k_split, col, v));
}
{{ body.simple(T, threads_per_output, order) }}
{% endif %}
