{#-
Sorting permutation of lines, or of tiles of long lines: a stable sort of (key, index) in workgroup memory.

kind: see sort_keys.wgsl
index: empty, or the type of indices whose keys are their values, 0xffffffff if no extent contains them; kind is u32
tiled: the keys and indices of all tiles are written, for `sort_merge` or as the result; else lines have one tile, and
  the requested indices are written, as i64
A tile has at most 1 << p.tile_shift elements, and a workgroup sorts tiles of 1 << p.block_shift elements together. The
bitonic network is stable, because all pairs of key and index differ.
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{%- set is_wide = k.wide(kind) -%}
{%- set capacity = 1024 if is_wide else 2048 -%}
{{ t.prelude() }}
struct Params {
    {{ t.row_fields() }}
    flip: u32,
    nan: u32,
    first: u32,
    count: u32,
    start_kind: u32,
    tiles: u32,
    tile_shift: u32,
    block_shift: u32,
    // Number of elements of each tile that are needed.
    needed: u32,
    unused0: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.row_offset() }}
{{ k.order(is_wide) }}
{% if index %}
{{ t.index(0, "x", index) }}
{{ t.resolve_index() }}
fn x_key(i: u32) -> Key { return resolve_index(x_words(i), 0xffffffffu); }
{% else %}
{{ k.input(0, "x", kind) }}
{% endif %}
{% if tiled %}
@group(0) @binding(1) var<storage, read_write> out_keys: array<Key>;
@group(0) @binding(2) var<storage, read_write> out_indices: array<u32>;
{% else %}
{{ t.output(1, "sorted_index", "i64w") }}
{% endif %}

var<workgroup> keys: array<Key, {{ capacity }}>;
var<workgroup> indices: array<u32, {{ capacity }}>;

fn is_after(a: u32, b: u32) -> bool {
    return less(keys[b], keys[a]) | (same(keys[a], keys[b]) & (indices[b] < indices[a]));
}

{% if not tiled %}
fn key_of(i: u32) -> Key { return keys[i]; }
{{ k.rank_start() }}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let size = 1u << p.tile_shift;
    let block_size = 1u << p.block_shift;
    let tiles_per_group = block_size >> p.tile_shift;
    let first_tile = group_index(group, groups) * tiles_per_group;
    if first_tile >= p.rows * p.tiles { return; }
    for (var e = thread; e < block_size; e += 256u) {
        let tile = first_tile + (e >> p.tile_shift);
        let i = ((tile % p.tiles) << p.tile_shift) + (e & (size - 1u));
        // Padding sorts last.
        var key = Key(0xffffffffu);
        var index = 0xffffffffu;
        if (tile < p.rows * p.tiles) & (i < p.extent) {
            key = x_key(row_offset(tile / p.tiles) + i * p.stride);
            index = i;
        }
        keys[e] = key;
        indices[e] = index;
    }
    workgroupBarrier();
    for (var run = 2u; run <= size; run = run << 1u) {
        for (var stride = run >> 1u; stride > 0u; stride = stride >> 1u) {
            for (var pair = thread; pair < (block_size >> 1u); pair += 256u) {
                let a = 2u * pair - (pair & (stride - 1u));
                let b = a + stride;
                let ascending = (a & run & (size - 1u)) == 0u;
                if is_after(a, b) == ascending {
                    let key = keys[a];
                    let index = indices[a];
                    keys[a] = keys[b];
                    indices[a] = indices[b];
                    keys[b] = key;
                    indices[b] = index;
                }
            }
            workgroupBarrier();
        }
    }
    {% if tiled %}
    for (var e = thread; e < block_size; e += 256u) {
        let tile = first_tile + (e >> p.tile_shift);
        let in_tile = e & (size - 1u);
        let i = ((tile % p.tiles) << p.tile_shift) + in_tile;
        if (tile < p.rows * p.tiles) & (i < p.extent) & (in_tile < p.needed) {
            let to = (tile / p.tiles) * p.extent + i;
            out_keys[to] = keys[e];
            out_indices[to] = indices[e];
        }
    }
    {% else %}
    for (var w = thread; w < tiles_per_group * p.count; w += 256u) {
        let line = w / p.count;
        let at = w % p.count;
        let row = first_tile + line;
        if row < p.rows {
            let base = line << p.tile_shift;
            let to = (row / p.inner) * p.count * p.inner + row % p.inner;
            sorted_index_put(to + at * p.inner, vec2<u32>(indices[base + rank_start(base) + at], 0u));
        }
    }
    {% endif %}
}
