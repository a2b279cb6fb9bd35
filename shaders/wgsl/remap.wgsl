{#-
Copies elements of any type bit by bit: a rule for each dimension maps a position of the output to one of the input.

size: bytes of an element (1, 2, 4, 8; 16 for vectors of neighbours)
rule: for positions outside of the input: `reflect`, `replicate`, `circular`
`before` is the number of positions before the input; if its highest bit is set, the negative number of positions that
  are left out. A dimension that is not padded has the input's extent and 0 before.
A stride may be negative, as an integer that wraps: in_offset is then the last position.
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    in_offset: u32,
    unused0: u32,
    shape: array<vec4<u32>, 2>,
    extents: array<vec4<u32>, 2>,
    before: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set word = "vec4<u32>" if size == 16 else "vec2<u32>" if size == 8 else "u32" %}
{% set per_thread = 4 // size if size < 4 else 1 %}
@group(0) @binding(0) var<storage, read> input: array<{{ word }}>;
@group(0) @binding(1) var<storage, read_write> output: array<{{ word }}>;

fn source(coordinate: u32, before: u32, extent: u32) -> u32 {
    let at = coordinate - before;
    let is_before = (before < 0x80000000u) & (coordinate < before);
    {% if rule == "reflect" %}
    return select(select(at, 2u * (extent - 1u) - at, at >= extent), before - coordinate, is_before);
    {% elif rule == "replicate" %}
    return select(min(at, extent - 1u), 0u, is_before);
    {% else %}
    return select(select(at, at - extent, at >= extent), at + extent, is_before);
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = (group_index(group, groups) * 256u + thread) * {{ per_thread }}u;
    if start >= p.n { return; }
    var packed = {{ word }}(0u);
    for (var k = 0u; k < {{ per_thread }}u; k++) {
        if start + k >= p.n { break; }
        var linear_index = start + k;
        var i = p.in_offset;
        for (var d = p.rank; d > 0u; d--) {
            let axis = (d - 1u) >> 2u;
            let lane = (d - 1u) & 3u;
            let extent = p.shape[axis][lane];
            let coordinate = linear_index % extent;
            linear_index = linear_index / extent;
            i += source(coordinate, p.before[axis][lane], p.extents[axis][lane]) * p.in_strides[axis][lane];
        }
        {% if per_thread > 1 %}
        let bits = (input[i / {{ per_thread }}u] >> ((i % {{ per_thread }}u) * {{ size * 8 }}u))
            & {{ "0xffffu" if size == 2 else "0xffu" }};
        packed |= bits << (k * {{ size * 8 }}u);
        {% else %}
        packed = input[i];
        {% endif %}
    }
    output[start / {{ per_thread }}u] = packed;
}
