{#-
Windows of images as a matrix, copied bit by bit: a line for each channel and tap of a filter, a column for
  each position of the filter. A thread has the columns of one vector of 16 bytes, and writes them for all
  taps along the last axis, which share index computations.

Element [outer, group, line, column] of the result is of image outer + column / positions at position column %
positions. Lines after the last tap and columns after the last position are zeros.

size: bytes of an element, 2 or 4 · rank: spatial dimensions, 2 or 3 
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- set per_vector = 16 // size -%}
{%- set axes = ["x", "y", "z"][:rank] -%}
{%- set last = axes[rank - 1] -%}
{%- set parts = ["x", "y", "z", "w"] -%}
{{ t.prelude() }}
struct Params {
    // Threads; vectors of a line; taps along all axes but the last, of all channels of a group; groups.
    n: u32,
    vectors: u32,
    rows: u32,
    groups: u32,
    // Lines of a group, and those with taps; columns with positions; positions of an image of the result.
    depth: u32,
    used_depth: u32,
    used_columns: u32,
    positions: u32,
    // Channels in all, and of a group; positions of an image; taps along all axes but the last.
    channels: u32,
    group: u32,
    in_positions: u32,
    taps: u32,
    in_offset: u32,
    unused0: u32,
    unused1: u32,
    unused2: u32,
    // Sizes of an image, of the positions, of a filter; strides of positions and taps, and the start, modulo
    // 2^32.
    in_size: vec4<u32>,
    out_size: vec4<u32>,
    kernel: vec4<u32>,
    stride: vec4<u32>,
    tap_step: vec4<u32>,
    first_tap: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> input: array<u32>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<u32>>;
{{ t.divide(f32_division) }}

// Returns the bits of element i; zeros outside.
fn element(i: u32, inside: bool) -> u32 {
    let at = select(0u, i, inside);
    {% if size == 2 %}
    return select(0u, (input[at >> 1u] >> ((at & 1u) * 16u)) & 0xffffu, inside);
    {% else %}
    return select(0u, input[at], inside);
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if global_index >= p.n { return; }
    let lines = divide(global_index, p.vectors);
    let blocks = divide(lines.x, p.rows);
    let outer = divide(blocks.x, p.groups);
    let taps = divide(blocks.y, p.taps);
    let columns = divide(lines.y * {{ per_vector }}u, p.positions);
    {% if rank == 3 %}
    let tap_yz = divide(taps.y, p.kernel.y);
    let tap = vec2<u32>(tap_yz.x, tap_yz.y);
    let at_yz = divide(columns.y, p.out_size.z);
    let at_xy = divide(at_yz.x, p.out_size.y);
    var at = vec3<u32>(at_xy.x, at_xy.y, at_yz.y);
    {% else %}
    let tap = vec2<u32>(taps.y, 0u);
    var at = divide(columns.y, p.out_size.y);
    {% endif %}
    {% for axis in axes[:-1] %}
    let shift_{{ axis }} = tap.{{ axis }} * p.tap_step.{{ axis }} + p.first_tap.{{ axis }};
    {% endfor %}
    let image_step = p.channels * p.in_positions;
    let channel = outer.y * p.group + taps.x;
    var plane = p.in_offset + (outer.x + columns.x) * image_step + channel * p.in_positions;
    let column = lines.y * {{ per_vector }}u;
    {% for k in range(per_vector) %}
    var row{{ k }} = 0u;
    var in{{ k }} = column + {{ k }}u < p.used_columns;
    {% for axis in axes[:-1] %}
    let from{{ k }}_{{ axis }} = at.{{ axis }} * p.stride.{{ axis }} + shift_{{ axis }};
    in{{ k }} = in{{ k }} & (from{{ k }}_{{ axis }} < p.in_size.{{ axis }});
    row{{ k }} = (row{{ k }} + from{{ k }}_{{ axis }}) * p.in_size.{{ axes[loop.index] }};
    {% endfor %}
    row{{ k }} += plane;
    let along{{ k }} = at.{{ last }} * p.stride.{{ last }} + p.first_tap.{{ last }};
    {% if not loop.last %}
    at.{{ last }} += 1u;
    {% for axis in (axes | reverse) %}
    {% if not loop.last %}
    if at.{{ axis }} == p.out_size.{{ axis }} {
        at.{{ axis }} = 0u;
        at.{{ (axes | reverse | list)[loop.index] }} += 1u;
    }
    {% else %}
    if at.{{ axis }} == p.out_size.{{ axis }} {
        at.{{ axis }} = 0u;
        plane += image_step;
    }
    {% endif %}
    {% endfor %}
    {% endif %}
    {% endfor %}
    let line = blocks.x * p.depth + blocks.y * p.kernel.{{ last }};
    var to = line * p.vectors + lines.y;
    var shift = 0u;
    for (var tap_at = 0u; tap_at < p.kernel.{{ last }}; tap_at++) {
        {% for k in range(per_vector) %}
        let i{{ k }} = along{{ k }} + shift;
        let v{{ k }} = element(row{{ k }} + i{{ k }}, in{{ k }} & (i{{ k }} < p.in_size.{{ last }}));
        {% endfor %}
        {% if size == 2 %}
        output[to] = vec4<u32>(v0 | (v1 << 16u), v2 | (v3 << 16u), v4 | (v5 << 16u), v6 | (v7 << 16u));
        {% else %}
        output[to] = vec4<u32>(v0, v1, v2, v3);
        {% endif %}
        to += p.vectors;
        shift += p.tap_step.{{ last }};
    }
    if blocks.y + 1u == p.rows {
        for (var padding_line = p.used_depth; padding_line < p.depth; padding_line++) {
            output[(blocks.x * p.depth + padding_line) * p.vectors + lines.y] = vec4<u32>(0u);
        }
    }
}
