{#-
Convolutions as implicit matrix products (implicit GEMM): operands are gathered, and no image is unfolded in
memory.

kind: one of three products for each group of channels
  `forward`  y[channel][image, position] = Σ w[channel][channel in, tap] · x[..]      (and gradient of a
             transposed one)
  `input`    dx[channel in][image, position] = Σ w[channel][channel in, tap] · dy[..] (and transposed
             convolution)
  `weight`   dw[channel][channel in, tap] = Σ over images and positions of dy · x
dtype: of all tensors, which are contiguous · rank: spatial dimensions, 2 or 3
bias: added to each row of the product
quick: all quotients are below 2^20, so division may go through f32
way, split, mode: as in `matmul`; packed requires that the positions of c are multiples of four
-#}
{%- import "types" as t -%}
{%- import "matmul_macros" as body -%}
{%- set T = t.value(dtype) -%}
{%- set axes = ["x", "y", "z"][:rank] -%}
{% if way == "cooperative" %}
enable wgpu_cooperative_matrix;
{% endif %}
{{ t.prelude() }}
struct Params {
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    chunk: u32,
    splits: u32,
    a_offset: u32,
    b_offset: u32,
    // Number of channels in all, and in a group: of x, of y.
    x_channels: u32,
    x_group: u32,
    y_channels: u32,
    y_group: u32,
    // Positions of an image of x, of y; taps of a filter; elements of c.
    x_places: u32,
    y_places: u32,
    taps: u32,
    total: u32,
    bias_offset: u32,
    unused0: u32,
    unused1: u32,
    unused2: u32,
    // Sizes of an image of x, of y, of a filter.
    x_size: vec4<u32>,
    y_size: vec4<u32>,
    kernel: vec4<u32>,
    stride: vec4<u32>,
    padding: vec4<u32>,
    dilation: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{% if way == "cooperative" %}
{{ t.bits_function("a", dtype) }}
{{ t.bits_function("b", dtype) }}
{% endif %}
{% if bias %}
{{ t.input(2, "bias", dtype) }}
{% endif %}
{{ t.output(3 if bias else 2, "c", T if split else dtype, mode) }}

// Both operands are found by the index of the group.
fn a_base(z: u32) -> u32 { return z; }
fn b_base(z: u32) -> u32 { return z; }

{{ t.divide(quick) }}

{% macro gather(from_size, channels, places) %}
{# `spot`: a position; `tap`: of the filter; both are decomposed from the last axis on. #}
    var place = 0u;
    var scale = 1u;
    var inside = true;
    {% for axis in axes | reverse %}
    {
        {% if loop.last %}
        let tap_at = tap;
        let at = spot;
        {% else %}
        let tap_parts = divide(tap, p.kernel.{{ axis }});
        let tap_at = tap_parts.y;
        tap = tap_parts.x;
        let spot_parts = divide(spot, p.{{ "x_size" if kind == "input" else "y_size" }}.{{ axis }});
        let at = spot_parts.y;
        spot = spot_parts.x;
        {% endif %}
        {% if kind == "input" %}
        let shifted = at + p.padding.{{ axis }} - tap_at * p.dilation.{{ axis }};
        // Unsigned: before the first position the value wraps to a large one.
        let reached = shifted < 0x80000000u;
        let steps = divide(select(0u, shifted, reached), p.stride.{{ axis }});
        let from_at = steps.x;
        inside = inside & reached & (steps.y == 0u) & (from_at < p.{{ from_size }}.{{ axis }});
        {% else %}
        let from_at = at * p.stride.{{ axis }} + tap_at * p.dilation.{{ axis }} - p.padding.{{ axis }};
        inside = inside & (from_at < p.{{ from_size }}.{{ axis }});
        {% endif %}
        place += select(0u, from_at, inside) * scale;
        scale *= p.{{ from_size }}.{{ axis }};
    }
    {% endfor %}
    // In the padding: zero; the load uses the image's first position.
    let v = b_at(p.b_offset + (image * p.{{ channels }} + channel) * p.{{ places }} + select(0u, place, inside));
    return select({{ T }}(0), v, inside);
{% endmacro %}

{% if kind == "forward" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} { return a_at(p.a_offset + (z * p.m + row) * p.k + k); }
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.taps);
    let col_parts = divide(col, p.y_places);
    let channel = z * p.x_group + k_parts.x;
    let image = col_parts.x;
    var tap = k_parts.y;
    var spot = col_parts.y;
{{ gather("x_size", "x_channels", "x_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    let parts = divide(col, p.y_places);
    return (parts.x * p.y_channels + z * p.m + row) * p.y_places + parts.y;
}
{% elif kind == "input" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    let parts = divide(k, p.taps);
    return a_at(p.a_offset + ((z * p.y_group + parts.x) * p.m + row) * p.taps + parts.y);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.taps);
    let col_parts = divide(col, p.x_places);
    let channel = z * p.y_group + k_parts.x;
    let image = col_parts.x;
    var tap = k_parts.y;
    var spot = col_parts.y;
{{ gather("y_size", "y_channels", "y_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    let parts = divide(col, p.x_places);
    return (parts.x * p.x_channels + z * p.m + row) * p.x_places + parts.y;
}
{% else %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    let parts = divide(k, p.y_places);
    return a_at(p.a_offset + (parts.x * p.y_channels + z * p.m + row) * p.y_places + parts.y);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.y_places);
    let col_parts = divide(col, p.taps);
    let channel = z * p.x_group + col_parts.x;
    let image = k_parts.x;
    var tap = col_parts.y;
    var spot = k_parts.y;
{{ gather("x_size", "x_channels", "x_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 { return (z * p.m + row) * p.n + col; }
{% endif %}

// The first part of a sum includes the bias.
fn with_bias(piece: u32, z: u32, row: u32, v: {{ T }}) -> {{ T }} {
    {% if bias %}
    if piece == 0u { return v + bias_at(p.bias_offset + z * p.m + row); }
    {% endif %}
    return v;
}
{% if way != "simple" %}
fn store4(piece: u32, z: u32, row: u32, col: u32, sums: vec4<f32>) {
    let v = sums + vec4<f32>(with_bias(piece, z, row, 0.0));
    {% if mode == "packed" %}
    let i = piece * p.total + c_index(z, row, col);
    c_put4(i, array<f32, 4>(v.x, v.y, v.z, v.w), i + 4u);
    {% else %}
    c_put(piece * p.total + c_index(z, row, col), v.x);
    if col + 1u < p.n { c_put(piece * p.total + c_index(z, row, col + 1u), v.y); }
    if col + 2u < p.n { c_put(piece * p.total + c_index(z, row, col + 2u), v.z); }
    if col + 3u < p.n { c_put(piece * p.total + c_index(z, row, col + 3u), v.w); }
    {% endif %}
}
{% if way == "tiled" %}
{{ body.tiled(high, rows, cols, depth, a_order, b_order, false, false, false, unroll) }}
{% else %}
{{ body.cooperative(dtype, rows, cols, depth, sub_rows, sub_cols, a_order, b_order, false, false, false) }}
{% endif %}
{% else %}
fn store(piece: u32, z: u32, row: u32, col: u32, v: {{ T }}) {
    c_put(piece * p.total + c_index(z, row, col), with_bias(piece, z, row, v));
}
{{ body.simple(T, lanes, order) }}
{% endif %}
