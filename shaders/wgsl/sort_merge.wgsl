{#-
Merges sorted runs of (key, index) pairwise: the runs [0, run), [run, 2 run), ... of each line become runs
twice as long. Only the first `keep` elements of each run matter. A workgroup computes one tile of a pair's
result, and finds its parts of both runs by bisection; within the tile each thread does the same for a few
elements.

wide: if true, keys have two words
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{%- set tile = 1024 if wide else 2048 -%}
{%- set each = tile // 256 -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    run: u32,
    keep: u32,
    pairs: u32,
    tiles: u32,
    nan: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(wide) }}
@group(0) @binding(0) var<storage, read> in_keys: array<Key>;
@group(0) @binding(1) var<storage, read> in_places: array<u32>;
@group(0) @binding(2) var<storage, read_write> out_keys: array<Key>;
@group(0) @binding(3) var<storage, read_write> out_places: array<u32>;

var<workgroup> keys: array<Key, {{ tile }}>;
var<workgroup> chosen: array<u32, {{ tile }}>;

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
        @builtin(local_invocation_index) lane: u32) {
    let number = group_index(group, groups);
    let tile = number % p.tiles;
    let pair = (number / p.tiles) % p.pairs;
    let row = number / p.tiles / p.pairs;
    if row >= p.rows { return; }
    let start = 2u * p.run * pair;
    let a_count = min(min(p.run, p.extent - start), p.keep);
    let second = min(start + p.run, p.extent);
    let b_count = min(min(p.run, p.extent - second), p.keep);
    let total = min(a_count + b_count, p.keep);
    let begins = tile * {{ tile }}u;
    if begins >= total { return; }
    let count = min(total - begins, {{ tile }}u);
    let a = row * p.extent + start;
    let b = row * p.extent + second;
    if lane < 2u { chosen[lane] = split_runs(begins + lane * count, a, a_count, b, b_count); }
    workgroupBarrier();
    let a_from = a + chosen[0];
    let b_from = b + begins - chosen[0];
    let of_a = chosen[1] - chosen[0];
    let of_b = count - of_a;
    for (var i = lane; i < count; i += 256u) {
        keys[i] = in_keys[select(b_from + i - of_a, a_from + i, i < of_a)];
    }
    workgroupBarrier();
    let mine = min(lane * {{ each }}u, count);
    var i = split_tile(mine, 0u, of_a, of_a, of_b);
    var j = of_a + mine - i;
    for (var to = mine; to < min(mine + {{ each }}u, count); to++) {
        var first = i < of_a;
        if first & (j < count) { first = !less(keys[j], keys[i]); }
        chosen[to] = select(j, i, first);
        i += select(0u, 1u, first);
        j += select(1u, 0u, first);
    }
    workgroupBarrier();
    for (var to = lane; to < count; to += 256u) {
        let at = chosen[to];
        out_keys[a + begins + to] = keys[at];
        out_places[a + begins + to] = in_places[select(b_from + at - of_a, a_from + at, at < of_a)];
    }
}
