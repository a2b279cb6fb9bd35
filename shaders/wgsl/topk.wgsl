{#-
First elements of rows in order, by selection instead of a sort: the indices of the ranks p.first to p.needed - 1.

kind: see sort_keys.wgsl
threads_per_row: threads of one row, at least p.needed · steps: elements that a thread holds in registers
partial: indices of each chunk of a row are written as u32, for another launch; else those of the row, as i64
indirect: the elements of a row are those at p.elements indices, the result of a launch with `partial`

Each thread finds the first of its own elements. Exactly p.needed threads have a first element up to the one of rank
p.needed - 1 among these. So only these threads hold selected elements, and none after that one. The few that remain
are ranked by counting the ones before each. Pairs of key and position all differ, which keeps the order stable.
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{%- set is_wide = k.wide(kind) -%}
{%- set rows = 256 // threads_per_row -%}
{%- set capacity = 1024 if is_wide else 1536 -%}
{%- set row_capacity = capacity // rows -%}
{{ t.prelude() }}
struct Params {
    {{ t.row_fields() }}
    flip: u32,
    nan: u32,
    first: u32,
    count: u32,
    // Number of elements of each chunk that are needed, in order.
    needed: u32,
    // Number of elements, or of indices, of each row.
    elements: u32,
    chunks: u32,
    // Elements of a chunk. The first `longer_chunks` have one more.
    chunk: u32,
    longer_chunks: u32,
    unused0: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.row_offset() }}
{{ k.order(is_wide) }}
{{ k.input(0, "x", kind) }}
{% if indirect %}
@group(0) @binding(1) var<storage, read> candidates: array<u32>;
{% endif %}
{% set out = 2 if indirect else 1 %}
{% if partial %}
@group(0) @binding({{ out }}) var<storage, read_write> chunk_index: array<u32>;
{% else %}
{{ t.output(out, "sorted_index", "i64w") }}
{% endif %}

// First element of each thread.
var<workgroup> first_keys: array<Key, 256>;
var<workgroup> first_positions: array<u32, 256>;
// Last first element that is needed, of each row.
var<workgroup> limit_keys: array<Key, {{ rows }}>;
var<workgroup> limit_positions: array<u32, {{ rows }}>;
// Elements up to the limit.
var<workgroup> counts: array<atomic<u32>, {{ rows }}>;
var<workgroup> keys: array<Key, {{ capacity }}>;
var<workgroup> positions: array<u32, {{ capacity }}>;

fn is_before(a: Key, a_position: u32, b: Key, b_position: u32) -> bool {
    return less(a, b) | (same(a, b) & (a_position < b_position));
}

// Index along the dimension of element `i` of a row.
fn index_of(row: u32, i: u32) -> u32 {
    return {{ "candidates[row * p.elements + i]" if indirect else "i" }};
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row_thread = thread % {{ threads_per_row }}u;
    let group_row = thread / {{ threads_per_row }}u;
    let group_start = group_index(group, groups) * {{ rows }}u;
    let line = group_start + group_row;
    if group_start >= p.rows * p.chunks { return; }
    let live = line < p.rows * p.chunks;
    // Threads without a row take part in the barriers, with elements of the last row.
    let row = min(line / p.chunks, p.rows - 1u);
    let chunk = line % p.chunks;
    let chunk_start = chunk * p.chunk + min(chunk, p.longer_chunks);
    let length = p.chunk + select(0u, 1u, chunk < p.longer_chunks);
    let base = row_offset(row);

    // Reads do not depend on conditions, so that all are in flight. Padding has the last key and later positions.
    {% for s in range(steps) %}
    let position{{ s }} = row_thread + {{ s * threads_per_row }}u;
    let read{{ s }} = x_key(base + index_of(row, chunk_start + min(position{{ s }}, length - 1u)) * p.stride);
    {% endfor %}
    {% for s in range(steps) %}
    let key{{ s }} = select(Key(0xffffffffu), read{{ s }}, position{{ s }} < length);
    {% endfor %}
    var first_key = key0;
    var first_position = position0;
    {% for s in range(1, steps) %}
    if less(key{{ s }}, first_key) {
        first_key = key{{ s }};
        first_position = position{{ s }};
    }
    {% endfor %}
    first_keys[thread] = first_key;
    first_positions[thread] = first_position;
    if row_thread == 0u { atomicStore(&counts[group_row], 0u); }
    workgroupBarrier();

    let row_start = thread - row_thread;
    var first_rank = 0u;
    for (var n = row_start; n < row_start + {{ threads_per_row }}u; n++) {
        first_rank += select(0u, 1u, is_before(first_keys[n], first_positions[n], first_key, first_position));
    }
    if first_rank == p.needed - 1u {
        limit_keys[group_row] = first_key;
        limit_positions[group_row] = first_position;
    }
    workgroupBarrier();

    let list = group_row * {{ row_capacity }}u;
    if first_rank < p.needed {
        let limit_key = limit_keys[group_row];
        let limit_position = limit_positions[group_row];
        {% for s in range(steps) %}
        if !is_before(limit_key, limit_position, key{{ s }}, position{{ s }}) {
            // The order of the list does not matter.
            let slot = list + atomicAdd(&counts[group_row], 1u);
            keys[slot] = key{{ s }};
            positions[slot] = position{{ s }};
        }
        {% endfor %}
    }
    workgroupBarrier();

    let count = atomicLoad(&counts[group_row]);
    for (var c = row_thread; c < count; c += {{ threads_per_row }}u) {
        let key = keys[list + c];
        let position = positions[list + c];
        var rank = 0u;
        for (var n = list; n < list + count; n++) {
            rank += select(0u, 1u, is_before(keys[n], positions[n], key, position));
        }
        if live & (rank >= p.first) & (rank < p.needed) {
            let index = index_of(row, chunk_start + position);
            {% if partial %}
            chunk_index[line * p.count + rank - p.first] = index;
            {% else %}
            let to = (row / p.inner) * p.count * p.inner + row % p.inner;
            sorted_index_put(to + (rank - p.first) * p.inner, vec2<u32>(index, 0u));
            {% endif %}
        }
    }
}
