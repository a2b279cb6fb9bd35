{#-
Where indices point, as u32: negative ones counted from the end, those outside as 0xffffffff. `chained`: inside rows that
`before` names, so that several indices become one: before * extent + place.

index: dtype of the index, of any strides; the result is contiguous
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    offset: u32,
    extent: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "index", index) }}
{% if chained %}
@group(0) @binding(1) var<storage, read> before: array<u32>;
{% endif %}
@group(0) @binding({{ 2 if chained else 1 }}) var<storage, read_write> output: array<u32>;

{{ t.place(index) }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 256u + lane;
    if i >= p.n { return; }
    var left = i;
    var source = p.offset;
    {{ t.walk([("source", "strides")]) }}
    let chosen = place(index_at(source), p.extent);
    {% if chained %}
    let outside = (chosen >= p.extent) | (before[i] == 0xffffffffu);
    output[i] = select(before[i] * p.extent + chosen, 0xffffffffu, outside);
    {% else %}
    output[i] = select(chosen, 0xffffffffu, chosen >= p.extent);
    {% endif %}
}
