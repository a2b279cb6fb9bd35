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
    start_kind: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(wide) }}
@group(0) @binding(0) var<storage, read> keys: array<Key>;
@group(0) @binding(1) var<storage, read> indices: array<u32>;
{{ t.output(2, "sorted_index", "i64w") }}
fn key_of(i: u32) -> Key { return keys[i]; }
{{ k.rank_start() }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let w = group_index(group, groups) * 256u + thread;
    if w >= p.rows * p.count { return; }
    let row = w / p.count;
    let at = w % p.count;
    let base = row * p.extent;
    let to = (row / p.inner) * p.count * p.inner + row % p.inner;
    sorted_index_put(to + at * p.inner, vec2<u32>(indices[base + rank_start(base) + at], 0u));
}
