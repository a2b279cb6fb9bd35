{#-
Images as sums of windows, the inverse of `im2col`. An element of the image is the sum of the matrix elements
of all windows that cover it, from the last window on. Each thread gathers its own elements, so no two write
one element.

from: dtype of the matrix, whose element of image i, line l and position q is at
  i * image_stride + l * line_stride + q
dtype: of the images
rank: spatial dimensions, 2 or 3 · kernel_x, stride_x, dilation_x and those of y and z
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set axes = ["x", "y", "z"][:rank] -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    in_offset: u32,
    // Strides of the matrix: between images, between lines.
    image_stride: u32,
    line_stride: u32,
    channels: u32,
    taps: u32,
    // Offset of the result, a multiple of four.
    out_offset: u32,
    unused: u32,
    // Sizes of an image, and of the window positions.
    size: vec4<u32>,
    positions: vec4<u32>,
    padding: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", from) }}
{{ t.output(1, "out", dtype, "packed") }}
{{ t.divide(f32_division) }}
const KERNEL = vec{{ rank }}<u32>({{ kernel_x }}u, {{ kernel_y }}u{{ ", " ~ kernel_z ~ "u" if rank == 3 else "" }});
const STRIDE = vec{{ rank }}<u32>({{ stride_x }}u, {{ stride_y }}u{{ ", " ~ stride_z ~ "u" if rank == 3 else "" }});
const DILATION = vec{{ rank }}<u32>(
    {{ dilation_x }}u, {{ dilation_y }}u{{ ", " ~ dilation_z ~ "u" if rank == 3 else "" }});

// Returns the sum for an element of an image whose lines begin at `base`.
fn sum_at(base: u32, at: vec{{ rank }}<u32>) -> {{ T }} {
    var total = {{ T }}(0);
    {% set ns = namespace(line="0u", position="0u") %}
    {% for axis in axes %}
    let edge_{{ axis }} = at.{{ axis }} + p.padding.{{ axis }};
    {% endfor %}
    {% for axis in axes %}
    for (var tap_{{ axis }} = edge_{{ axis }} % STRIDE.{{ axis }};
        tap_{{ axis }} <= min((KERNEL.{{ axis }} - 1u) * DILATION.{{ axis }}, edge_{{ axis }});
        tap_{{ axis }} += STRIDE.{{ axis }}) {
    let position_{{ axis }} = (edge_{{ axis }} - tap_{{ axis }}) / STRIDE.{{ axis }};
    if (position_{{ axis }} >= p.positions.{{ axis }}) | (tap_{{ axis }} % DILATION.{{ axis }} != 0u) { continue; }
    {% set ns.line = "(" ~ ns.line ~ " * KERNEL." ~ axis ~ " + tap_" ~ axis ~ " / DILATION." ~ axis ~ ")" %}
    {% set ns.position = "(" ~ ns.position ~ " * p.positions." ~ axis ~ " + position_" ~ axis ~ ")" %}
    {% endfor %}
    total += input_at(base + {{ ns.line }} * p.line_stride + {{ ns.position }});
    {% for axis in axes %}
    }
    {% endfor %}
    return total;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = (group_index(group, groups) * 256u + thread) * 4u;
    if start >= p.n { return; }
    var linear_index = start;
    var at: vec{{ rank }}<u32>;
    {% for axis in axes | reverse %}
    let parts_{{ axis }} = divide(linear_index, p.size.{{ axis }});
    at.{{ axis }} = parts_{{ axis }}.y;
    linear_index = parts_{{ axis }}.x;
    {% endfor %}
    let planes = divide(linear_index, p.channels);
    var image = planes.x;
    var channel = planes.y;
    var sums: array<{{ T }}, 4>;
    {% for k in range(4) %}
    sums[{{ k }}] = sum_at(p.in_offset + image * p.image_stride + channel * p.taps * p.line_stride, at);
    {% if not loop.last %}
    // After the last element the position stays the same.
    if start + {{ k + 1 }}u < p.n {
        at.{{ axes[rank - 1] }} += 1u;
        {% for d in range(rank - 1, 0, -1) %}
        if at.{{ axes[d] }} == p.size.{{ axes[d] }} { at.{{ axes[d] }} = 0u; at.{{ axes[d - 1] }} += 1u; }
        {% endfor %}
        if at.x == p.size.x { at.x = 0u; channel += 1u; }
        if channel == p.channels { channel = 0u; image += 1u; }
    }
    {% endif %}
    {% endfor %}
    out_put4(p.out_offset + start, sums, p.out_offset + p.n);
}
