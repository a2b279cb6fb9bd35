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
f32_division: all quotients are below 2^20, so division may go through f32
variant, split, mode: as in `matmul`; packed requires that the positions of c are multiples of four
-#}
{%- import "types" as t -%}
{%- import "matmul_macros" as body -%}
{%- set T = t.value(dtype) -%}
{%- set axes = ["x", "y", "z"][:rank] -%}
{% if variant == "cooperative" %}
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
    x_positions: u32,
    y_positions: u32,
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
{% if variant == "cooperative" %}
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

{{ t.divide(f32_division) }}

{% macro gather(source_size, channels, positions) %}
{# `position` and `tap` (of the filter) are linear indices, decomposed from the last axis on. #}
    var offset = 0u;
    var scale = 1u;
    var inside = true;
    {% for axis in axes | reverse %}
    {
        {% if loop.last %}
        let tap_coordinate = tap;
        let coordinate = position;
        {% else %}
        let tap_parts = divide(tap, p.kernel.{{ axis }});
        let tap_coordinate = tap_parts.y;
        tap = tap_parts.x;
        let position_parts = divide(position, p.{{ "x_size" if kind == "input" else "y_size" }}.{{ axis }});
        let coordinate = position_parts.y;
        position = position_parts.x;
        {% endif %}
        {% if kind == "input" %}
        let shifted = coordinate + p.padding.{{ axis }} - tap_coordinate * p.dilation.{{ axis }};
        // Unsigned: before the first position the value wraps to a large one.
        let in_range = shifted < 0x80000000u;
        let steps = divide(select(0u, shifted, in_range), p.stride.{{ axis }});
        let source = steps.x;
        inside = inside & in_range & (steps.y == 0u) & (source < p.{{ source_size }}.{{ axis }});
        {% else %}
        let source = coordinate * p.stride.{{ axis }} + tap_coordinate * p.dilation.{{ axis }} - p.padding.{{ axis }};
        inside = inside & (source < p.{{ source_size }}.{{ axis }});
        {% endif %}
        offset += select(0u, source, inside) * scale;
        scale *= p.{{ source_size }}.{{ axis }};
    }
    {% endfor %}
    // In the padding: zero; the load reads the image's first element.
    let v = b_at(p.b_offset + (image * p.{{ channels }} + channel) * p.{{ positions }} + select(0u, offset, inside));
    return select({{ T }}(0), v, inside);
{% endmacro %}

{% if kind == "forward" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} { return a_at(p.a_offset + (z * p.m + row) * p.k + k); }
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.taps);
    let col_parts = divide(col, p.y_positions);
    let channel = z * p.x_group + k_parts.x;
    let image = col_parts.x;
    var tap = k_parts.y;
    var position = col_parts.y;
{{ gather("x_size", "x_channels", "x_positions") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    let parts = divide(col, p.y_positions);
    return (parts.x * p.y_channels + z * p.m + row) * p.y_positions + parts.y;
}
{% elif kind == "input" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    let parts = divide(k, p.taps);
    return a_at(p.a_offset + ((z * p.y_group + parts.x) * p.m + row) * p.taps + parts.y);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.taps);
    let col_parts = divide(col, p.x_positions);
    let channel = z * p.y_group + k_parts.x;
    let image = col_parts.x;
    var tap = k_parts.y;
    var position = col_parts.y;
{{ gather("y_size", "y_channels", "y_positions") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    let parts = divide(col, p.x_positions);
    return (parts.x * p.x_channels + z * p.m + row) * p.x_positions + parts.y;
}
{% else %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    let parts = divide(k, p.y_positions);
    return a_at(p.a_offset + (parts.x * p.y_channels + z * p.m + row) * p.y_positions + parts.y);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let k_parts = divide(k, p.y_positions);
    let col_parts = divide(col, p.taps);
    let channel = z * p.x_group + col_parts.x;
    let image = k_parts.x;
    var tap = col_parts.y;
    var position = k_parts.y;
{{ gather("x_size", "x_channels", "x_positions") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 { return (z * p.m + row) * p.n + col; }
{% endif %}

// The first part of a sum includes the bias.
fn with_bias(k_split: u32, z: u32, row: u32, v: {{ T }}) -> {{ T }} {
    {% if bias %}
    if k_split == 0u { return v + bias_at(p.bias_offset + z * p.m + row); }
    {% endif %}
    return v;
}
{% if variant != "simple" %}
fn store4(k_split: u32, z: u32, row: u32, col: u32, sums: vec4<f32>) {
    let v = sums + vec4<f32>(with_bias(k_split, z, row, 0.0));
    {% if mode == "packed" %}
    let i = k_split * p.total + c_index(z, row, col);
    c_put4(i, array<f32, 4>(v.x, v.y, v.z, v.w), i + 4u);
    {% else %}
    c_put(k_split * p.total + c_index(z, row, col), v.x);
    if col + 1u < p.n { c_put(k_split * p.total + c_index(z, row, col + 1u), v.y); }
    if col + 2u < p.n { c_put(k_split * p.total + c_index(z, row, col + 2u), v.z); }
    if col + 3u < p.n { c_put(k_split * p.total + c_index(z, row, col + 3u), v.w); }
    {% endif %}
}
{% if variant == "tiled" %}
{{ body.tiled(thread_rows, rows, cols, depth, a_order, b_order, false, false, false, unroll) }}
{% else %}
{{ body.cooperative(dtype, side, lanes, rows, cols, depth, sub_rows, sub_cols, a_order, b_order, false, false, false) }}
{% endif %}
{% else %}
fn store(k_split: u32, z: u32, row: u32, col: u32, v: {{ T }}) {
    c_put(k_split * p.total + c_index(z, row, col), with_bias(k_split, z, row, v));
}
{{ body.simple(T, threads_per_output, order) }}
{% endif %}
