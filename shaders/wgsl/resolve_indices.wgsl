{#-
Validates indices: writes them as u32, those outside as 0xffffffff. `chained`: combines several indices into
  one, outer * extent + index, where `outer_indices` combines the previous ones. `narrow`: writes i32 instead; `ignored`
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
@group(0) @binding(1) var<storage, read> outer_indices: array<u32>;
{% endif %}
@group(0) @binding({{ 2 if chained else 1 }}) var<storage, read_write> output: array<u32>;

{{ t.saturate_to_i32() if narrow else t.resolve_index(wraps) }}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    var linear_index = i;
    var source = p.offset;
    {{ t.strided_offsets([("source", "strides")]) }}
    {% if narrow %}
    let words = index_words(source);
    let wide = words.y != select(0u, 0xffffffffu, words.x >= 0x80000000u);
    output[i] = bitcast<u32>(select(saturate_to_i32(words), -2147483647i - 1i, wide && all(words == p.ignored.xy)));
    {% else %}
    let resolved = resolve_index(index_words(source), p.extent);
    {% if chained %}
    let outside = (resolved >= p.extent) | (outer_indices[i] == 0xffffffffu);
    output[i] = select(outer_indices[i] * p.extent + resolved, 0xffffffffu, outside);
    {% else %}
    output[i] = select(resolved, 0xffffffffu, resolved >= p.extent);
    {% endif %}
    {% endif %}
}
