{#-
Copies elements of 16 or 32 bits to an output whose last dimension, j, has adjacent elements and is not the one with
adjacent elements in the input, i. A workgroup copies a tile through workgroup memory, so that reads and writes are both
of adjacent elements.

size: bytes of an element, 2 or 4; elements of 2 bytes need even offsets and strides of the output, and an even extent
    of j, so that a thread writes whole words
word_reads: pairs of elements in the input are whole words (size 2)
split: i stands for two dimensions of the output, whose elements follow each other in the input, such as the channels
    and the taps of a filter
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    // Dimensions other than i and j, and the tiles of both.
    rank: u32,
    tiles_i: u32,
    tiles_j: u32,
    extent_i: u32,
    extent_j: u32,
    in_stride_j: u32,
    out_stride_i: u32,
    in_offset: u32,
    // Extent and output stride of the inner dimension of i, if it is split.
    inner_i: u32,
    out_stride_inner: u32,
    out_offset: u32,
    shape: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> input: array<u32>;
@group(0) @binding(1) var<storage, read_write> output: array<u32>;
{% set per_word = 4 // size %}
{% set side = 32 * per_word %}
// Words of a line of i for each j; padded against bank conflicts.
var<workgroup> tile: array<u32, {{ side * 33 }}>;

// Returns the word of elements `at` and, if it exists, `at` + 1.
fn read_word(at: u32, has_both: bool) -> u32 {
    {% if per_word == 1 %}
    return input[at];
    {% elif word_reads %}
    return input[at >> 1u];
    {% else %}
    let next = at + select(0u, 1u, has_both);
    let low = (input[at >> 1u] >> ((at & 1u) * 16u)) & 0xffffu;
    let high = input[next >> 1u] >> ((next & 1u) * 16u);
    return low | (high << 16u);
    {% endif %}
}

// Returns the offset of line i in the output.
fn out_line(i: u32) -> u32 {
    {% if split %}
    return i / p.inner_i * p.out_stride_i + i % p.inner_i * p.out_stride_inner;
    {% else %}
    return i * p.out_stride_i;
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    let i0 = index % p.tiles_i * {{ side }}u;
    let j0 = index / p.tiles_i % p.tiles_j * {{ side }}u;
    var linear_index = index / (p.tiles_i * p.tiles_j);
    var to = p.out_offset;
    var from0 = p.in_offset;
    {{ t.strided_offsets([("to", "out_strides"), ("from0", "in_strides")]) }}
    let lane = thread & 31u;
    let pair = lane * {{ per_word }}u;
    {% for k in range(side // 8) %}
    {
        let line = (thread >> 5u) + {{ 8 * k }}u;
        let j = j0 + line;
        let i = i0 + pair;
        if j < p.extent_j && i < p.extent_i {
            tile[line * 33u + lane] = read_word(from0 + j * p.in_stride_j + i, i + 1u < p.extent_i);
        }
    }
    {% endfor %}
    workgroupBarrier();
    {% for k in range(side // 8) %}
    {
        let line = (thread >> 5u) + {{ 8 * k }}u;
        let i = i0 + line;
        let j = j0 + pair;
        if i < p.extent_i && j < p.extent_j {
            {% if per_word == 1 %}
            output[to + out_line(i) + j] = tile[lane * 33u + line];
            {% else %}
            let shift = (line & 1u) * 16u;
            let low = (tile[pair * 33u + (line >> 1u)] >> shift) & 0xffffu;
            let high = tile[(pair + 1u) * 33u + (line >> 1u)] >> shift;
            output[(to + out_line(i) + j) >> 1u] = low | (high << 16u);
            {% endif %}
        }
    }
    {% endfor %}
}
