{#-
Indices of the nonzero elements, in row-major order. Stage `count` counts each tile of 2048; stage `write`
writes indices from the prefix sums of the counts.

kind: see sort_keys.wgsl · stage
coordinates: writes one index for each dimension, as i64; else one linear index, as u32
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    offset: u32,
    unused0: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.bits(0, "x", kind) }}
{% if stage == "count" %}
@group(0) @binding(1) var<storage, read_write> counts: array<u32>;
{% else %}
@group(0) @binding(1) var<storage, read> totals: array<u32>;
{% if coordinates %}
{{ t.output(2, "indices", "i64w") }}
{% else %}
@group(0) @binding(2) var<storage, read_write> indices: array<u32>;
{% endif %}
{% endif %}

fn nonzero_bit(i: u32) -> u32 {
    if i >= p.n { return 0u; }
    var linear_index = i;
    var source = p.offset;
    {{ t.strided_offsets([("source", "strides")]) }}
    let b = x_bits(source);
    return select(0u, 1u, {{ k.nonzero(kind, "b") }});
}

var<workgroup> sums: array<u32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let tile = group_index(group, groups);
    if tile * 2048u >= p.n { return; }
    let start = tile * 2048u + thread * 8u;
    var thread_count = 0u;
    var flags = 0u;
    for (var e = 0u; e < 8u; e++) {
        let flag = nonzero_bit(start + e);
        thread_count += flag;
        flags |= flag << e;
    }
    var prefix = thread_count;
    sums[thread] = prefix;
    workgroupBarrier();
    for (var offset = 1u; offset < 256u; offset = offset << 1u) {
        if thread >= offset { prefix += sums[thread - offset]; }
        workgroupBarrier();
        sums[thread] = prefix;
        workgroupBarrier();
    }
    {% if stage == "count" %}
    if thread == 255u { counts[tile] = prefix; }
    {% else %}
    var to = prefix - thread_count;
    if tile > 0u { to += totals[tile - 1u]; }
    for (var e = 0u; e < 8u; e++) {
        if ((flags >> e) & 1u) == 1u {
            {% if coordinates %}
            var linear_index = start + e;
            for (var d = p.rank; d > 0u; d--) {
                let axis = d - 1u;
                let extent = p.shape[axis >> 2u][axis & 3u];
                indices_put(to * p.rank + axis, vec2<u32>(linear_index % extent, 0u));
                linear_index = linear_index / extent;
            }
            {% else %}
            indices[to] = start + e;
            {% endif %}
            to++;
        }
    }
    {% endif %}
}
