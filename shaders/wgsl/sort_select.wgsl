{#-
Selects the requested part of sorted long lines: the indices, as i64.

wide: if true, keys have two words
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    nan: u32,
    first: u32,
    count: u32,
    pick: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(wide) }}
@group(0) @binding(0) var<storage, read> keys: array<Key>;
@group(0) @binding(1) var<storage, read> places: array<u32>;
{{ t.output(2, "place", "i64w") }}
fn key_of(i: u32) -> Key { return keys[i]; }
{{ k.begin() }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let w = group_index(group, groups) * 256u + lane;
    if w >= p.rows * p.count { return; }
    let row = w / p.count;
    let at = w % p.count;
    let base = row * p.extent;
    let to = (row / p.inner) * p.count * p.inner + row % p.inner;
    place_put(to + at * p.inner, i32(places[base + begin(base) + at]));
}
