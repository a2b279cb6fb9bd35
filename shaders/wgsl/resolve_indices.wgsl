{#-
Validates indices: writes them as u32, those outside as 0xffffffff. `chained`: combines several indices into
  one, before * extent + index, with `before` from the previous ones. `narrow`: writes i32 instead; `ignored`
  becomes i32's lowest if an i32 does not hold it.

index: dtype of the index, of any strides; the result is contiguous · wraps: -extent to -1 count from the end
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
    ignored: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.index(0, "index", index) }}
{% if chained %}
@group(0) @binding(1) var<storage, read> before: array<u32>;
{% endif %}
@group(0) @binding({{ 2 if chained else 1 }}) var<storage, read_write> output: array<u32>;

{{ t.narrowed() if narrow else t.place(wraps) }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 256u + lane;
    if i >= p.n { return; }
    var left = i;
    var source = p.offset;
    {{ t.walk([("source", "strides")]) }}
    {% if narrow %}
    let words = index_words(source);
    let wide = words.y != select(0u, 0xffffffffu, words.x >= 0x80000000u);
    output[i] = bitcast<u32>(select(narrowed(words), -2147483647i - 1i, wide && all(words == p.ignored.xy)));
    {% else %}
    let chosen = place(index_words(source), p.extent);
    {% if chained %}
    let outside = (chosen >= p.extent) | (before[i] == 0xffffffffu);
    output[i] = select(before[i] * p.extent + chosen, 0xffffffffu, outside);
    {% else %}
    output[i] = select(chosen, 0xffffffffu, chosen >= p.extent);
    {% endif %}
    {% endif %}
}
