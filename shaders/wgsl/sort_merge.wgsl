{#-
Merges sorted runs of (key, index) pairwise: the runs [0, run), [run, 2 run), ... of each line become runs
twice as long. Only the first `needed` elements of each run matter. A workgroup computes one tile of a pair's
result, and finds its parts of both runs by bisection; in the tile each thread does the same for a few
elements.

wide: if true, keys have two words
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{%- set tile = 1024 if wide else 2048 -%}
{%- set per_thread = tile // 256 -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    run: u32,
    needed: u32,
    pairs: u32,
    tiles: u32,
    nan: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(wide) }}
@group(0) @binding(0) var<storage, read> in_keys: array<Key>;
@group(0) @binding(1) var<storage, read> in_indices: array<u32>;
@group(0) @binding(2) var<storage, read_write> out_keys: array<Key>;
@group(0) @binding(3) var<storage, read_write> out_indices: array<u32>;

var<workgroup> keys: array<Key, {{ tile }}>;
var<workgroup> sources: array<u32, {{ tile }}>;

{#- Returns how many of the first `wanted` elements of two merged runs come from the first run, which wins
ties. -#}
{% macro split(name, buffer) %}
fn {{ name }}(wanted: u32, a: u32, a_count: u32, b: u32, b_count: u32) -> u32 {
    var low = select(0u, wanted - b_count, wanted > b_count);
    var high = min(wanted, a_count);
    while low < high {
        let middle = (low + high) >> 1u;
        if less({{ buffer }}[b + wanted - 1u - middle], {{ buffer }}[a + middle]) {
            high = middle;
        } else {
            low = middle + 1u;
        }
    }
    return low;
}
{% endmacro %}
{{ split("split_runs", "in_keys") }}
{{ split("split_tile", "keys") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    let tile = linear_group % p.tiles;
    let pair = (linear_group / p.tiles) % p.pairs;
    let row = linear_group / p.tiles / p.pairs;
    if row >= p.rows { return; }
    let start = 2u * p.run * pair;
    let a_count = min(min(p.run, p.extent - start), p.needed);
    let second_start = min(start + p.run, p.extent);
    let b_count = min(min(p.run, p.extent - second_start), p.needed);
    let total = min(a_count + b_count, p.needed);
    let tile_start = tile * {{ tile }}u;
    if tile_start >= total { return; }
    let count = min(total - tile_start, {{ tile }}u);
    let a = row * p.extent + start;
    let b = row * p.extent + second_start;
    if thread < 2u { sources[thread] = split_runs(tile_start + thread * count, a, a_count, b, b_count); }
    workgroupBarrier();
    let a_start = a + sources[0];
    let b_start = b + tile_start - sources[0];
    let a_length = sources[1] - sources[0];
    let b_length = count - a_length;
    for (var i = thread; i < count; i += 256u) {
        keys[i] = in_keys[select(b_start + i - a_length, a_start + i, i < a_length)];
    }
    workgroupBarrier();
    let thread_start = min(thread * {{ per_thread }}u, count);
    var i = split_tile(thread_start, 0u, a_length, a_length, b_length);
    var j = a_length + thread_start - i;
    for (var to = thread_start; to < min(thread_start + {{ per_thread }}u, count); to++) {
        var first = i < a_length;
        if first & (j < count) { first = !less(keys[j], keys[i]); }
        sources[to] = select(j, i, first);
        i += select(0u, 1u, first);
        j += select(1u, 0u, first);
    }
    workgroupBarrier();
    for (var to = thread; to < count; to += 256u) {
        let at = sources[to];
        out_keys[a + tile_start + to] = keys[at];
        out_indices[a + tile_start + to] = in_indices[select(b_start + at - a_length, a_start + at, at < a_length)];
    }
}
