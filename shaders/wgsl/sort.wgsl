{#-
Sorting permutation of lines, or of tiles of long lines: a stable sort of (key, index) in workgroup memory.

kind: see sort_keys.wgsl
tiled: lines have several tiles, whose keys and indices are written for `sort_merge`; else the requested
  indices are written, as i64
A tile has at most 1 << p.shift elements, and a workgroup sorts tiles of 1 << p.room elements together. The
bitonic network is stable, because all pairs of key and index differ.
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{%- set is_wide = k.wide(kind) -%}
{%- set capacity = 1024 if is_wide else 2048 -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    flip: u32,
    nan: u32,
    first: u32,
    count: u32,
    pick: u32,
    tiles: u32,
    shift: u32,
    room: u32,
    // Number of elements of each tile that are needed.
    keep: u32,
    unused0: u32,
    // The other dimensions.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(is_wide) }}
{{ k.input(0, "x", kind) }}
{% if tiled %}
@group(0) @binding(1) var<storage, read_write> out_keys: array<Key>;
@group(0) @binding(2) var<storage, read_write> out_places: array<u32>;
{% else %}
{{ t.output(1, "place", "i64w") }}
{% endif %}

var<workgroup> keys: array<Key, {{ capacity }}>;
var<workgroup> places: array<u32, {{ capacity }}>;

fn line_start(row: u32) -> u32 {
    var base = p.offset;
    var left = row;
    {{ t.walk([("base", "strides")]) }}
    return base;
}

fn after(a: u32, b: u32) -> bool {
    return less(keys[b], keys[a]) | (same(keys[a], keys[b]) & (places[b] < places[a]));
}

{% if not tiled %}
fn key_of(i: u32) -> Key { return keys[i]; }
{{ k.begin() }}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let size = 1u << p.shift;
    let room = 1u << p.room;
    let taken = room >> p.shift;
    let first_tile = group_index(group, groups) * taken;
    if first_tile >= p.rows * p.tiles { return; }
    for (var e = lane; e < room; e += 256u) {
        let tile = first_tile + (e >> p.shift);
        let i = ((tile % p.tiles) << p.shift) + (e & (size - 1u));
        // Padding sorts last.
        var key = Key(0xffffffffu);
        var place = 0xffffffffu;
        if (tile < p.rows * p.tiles) & (i < p.extent) {
            key = x_key(line_start(tile / p.tiles) + i * p.stride);
            place = i;
        }
        keys[e] = key;
        places[e] = place;
    }
    workgroupBarrier();
    for (var run = 2u; run <= size; run = run << 1u) {
        for (var reach = run >> 1u; reach > 0u; reach = reach >> 1u) {
            for (var q = lane; q < (room >> 1u); q += 256u) {
                let a = 2u * q - (q & (reach - 1u));
                let b = a + reach;
                let rising = (a & run & (size - 1u)) == 0u;
                if after(a, b) == rising {
                    let key = keys[a];
                    let place = places[a];
                    keys[a] = keys[b];
                    places[a] = places[b];
                    keys[b] = key;
                    places[b] = place;
                }
            }
            workgroupBarrier();
        }
    }
    {% if tiled %}
    let start = (first_tile % p.tiles) << p.shift;
    let to = (first_tile / p.tiles) * p.extent + start;
    for (var e = lane; e < min(min(size, p.extent - start), p.keep); e += 256u) {
        out_keys[to + e] = keys[e];
        out_places[to + e] = places[e];
    }
    {% else %}
    for (var w = lane; w < taken * p.count; w += 256u) {
        let line = w / p.count;
        let at = w % p.count;
        let row = first_tile + line;
        if row < p.rows {
            let base = line << p.shift;
            let to = (row / p.inner) * p.count * p.inner + row % p.inner;
            place_put(to + at * p.inner, i32(places[base + begin(base) + at]));
        }
    }
    {% endif %}
}
