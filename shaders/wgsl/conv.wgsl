{#-
Convolutions as matrix products whose operands are gathered where they lie: no image is unfolded in memory.

kind: which of three products, one for each group of channels
  `forward`  y[channel][image, place] = Σ w[channel][channel in, tap] · x[..]        (and the gradient of a transposed one)
  `input`    dx[channel in][image, place] = Σ w[channel][channel in, tap] · dy[..]   (and a transposed convolution)
  `weight`   dw[channel][channel in, tap] = Σ over images and places of dy · x
dtype: of all tensors, which are contiguous · rank: spatial dimensions, 2 or 3 · bias: added to each row of the product
way, split, mode: as in `matmul`; packed needs places of c in multiples of four
-#}
{%- import "types" as t -%}
{%- import "matmul_body" as body -%}
{%- set T = t.value(dtype) -%}
{%- set axes = ["x", "y", "z"][:rank] -%}
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
    // Channels in all, and their number in a group: of x, of y.
    x_channels: u32,
    x_group: u32,
    y_channels: u32,
    y_group: u32,
    // Places of an image of x, of y; taps of a filter; elements of c.
    x_places: u32,
    y_places: u32,
    taps: u32,
    total: u32,
    bias_offset: u32,
    unused0: u32,
    unused1: u32,
    unused2: u32,
    // Extents of an image of x, of y, of a filter.
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
{% if bias %}
{{ t.input(2, "bias", dtype) }}
{% endif %}
{{ t.output(3 if bias else 2, "c", T if split else dtype, mode) }}

// Both operands of a group are found by its number.
fn a_base(z: u32) -> u32 { return z; }
fn b_base(z: u32) -> u32 { return z; }

{% macro gather(from_size, channels, places) %}
{# The position along each axis, from the last; `inside` and `place` grow. #}
    var place = 0u;
    var scale = 1u;
    var inside = true;
    {% for axis in axes | reverse %}
    {
        let tap_at = tap % p.kernel.{{ axis }};
        tap = tap / p.kernel.{{ axis }};
        {% if kind == "input" %}
        let at = spot % p.x_size.{{ axis }};
        spot = spot / p.x_size.{{ axis }};
        // Unsigned: before the first place it wraps to a large number, which is outside too.
        let shifted = at + p.padding.{{ axis }} - tap_at * p.dilation.{{ axis }};
        let from_at = shifted / p.stride.{{ axis }};
        inside = inside && shifted % p.stride.{{ axis }} == 0u && from_at < p.{{ from_size }}.{{ axis }} && shifted < 0x80000000u;
        {% else %}
        let at = spot % p.y_size.{{ axis }};
        spot = spot / p.y_size.{{ axis }};
        let from_at = at * p.stride.{{ axis }} + tap_at * p.dilation.{{ axis }} - p.padding.{{ axis }};
        inside = inside && from_at < p.{{ from_size }}.{{ axis }};
        {% endif %}
        place += select(0u, from_at, inside) * scale;
        scale *= p.{{ from_size }}.{{ axis }};
    }
    {% endfor %}
    // In the padding: zero, read from the image's first place.
    let v = b_at(p.b_offset + (image * p.{{ channels }} + channel) * p.{{ places }} + select(0u, place, inside));
    return select({{ T }}(0), v, inside);
{% endmacro %}

{% if kind == "forward" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} { return a_at(p.a_offset + (z * p.m + row) * p.k + k); }
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let channel = z * p.x_group + k / p.taps;
    let image = col / p.y_places;
    var tap = k % p.taps;
    var spot = col % p.y_places;
{{ gather("x_size", "x_channels", "x_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    return ((col / p.y_places) * p.y_channels + z * p.m + row) * p.y_places + col % p.y_places;
}
{% elif kind == "input" %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    return a_at(p.a_offset + ((z * p.y_group + k / p.taps) * p.m + row) * p.taps + k % p.taps);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let channel = z * p.y_group + k / p.taps;
    let image = col / p.x_places;
    var tap = k % p.taps;
    var spot = col % p.x_places;
{{ gather("y_size", "y_channels", "y_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 {
    return ((col / p.x_places) * p.x_channels + z * p.m + row) * p.x_places + col % p.x_places;
}
{% else %}
fn a_value(z: u32, row: u32, k: u32) -> {{ T }} {
    return a_at(p.a_offset + ((k / p.y_places) * p.y_channels + z * p.m + row) * p.y_places + k % p.y_places);
}
fn b_value(z: u32, k: u32, col: u32) -> {{ T }} {
    let channel = z * p.x_group + col / p.taps;
    let image = k / p.y_places;
    var tap = col % p.taps;
    var spot = k % p.y_places;
{{ gather("x_size", "x_channels", "x_places") }}
}
fn c_index(z: u32, row: u32, col: u32) -> u32 { return (z * p.m + row) * p.n + col; }
{% endif %}

// The first piece of a sum brings the bias along.
fn with_bias(piece: u32, z: u32, row: u32, v: {{ T }}) -> {{ T }} {
    {% if bias %}
    if piece == 0u { return v + bias_at(p.bias_offset + z * p.m + row); }
    {% endif %}
    return v;
}
{% if way == "tiled" %}
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
{{ body.tiled(high, rows, cols, depth, a_order, b_order) }}
{% else %}
fn store(piece: u32, z: u32, row: u32, col: u32, v: {{ T }}) {
    c_put(piece * p.total + c_index(z, row, col), with_bias(piece, z, row, v));
}
{{ body.simple(T, lanes, order) }}
{% endif %}
