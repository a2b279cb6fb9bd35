{#-
Copies elements of any type bit by bit: out[strides of out][i] = in[strides of in][i].

size: bytes of an element (1, 2, 4, 8)
mode: `packed` (the output is contiguous from its start), `scattered`, `runs` or `vectors`
`scattered`: four elements for each thread, in `rank` dimensions; neighbours belong to different threads, so that a
  subgroup writes adjacent elements
`runs`: packed, one vector of 16 bytes for each thread, from neighbours in `rank` dimensions; `adjacent`: those along
  the last dimension are adjacent in the input
`vectors`: one vector for each thread; the last dimension, all other strides and the offsets are whole vectors
f32_division: all quotients are below 2^20 (`scattered` and `runs`)
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    in_offset: u32,
    out_offset: u32,
    shape: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set word = "vec2<u32>" if size == 8 else "u32" %}
{% set per_thread = 16 // size if mode in ["runs", "vectors"] else 4 // size if size < 4 else 1 %}
{% set per_word = 4 // size if size < 4 else 1 %}
{% set mask = "0xffffu" if size == 2 else "0xffu" %}
{% set vector = "vec4<u32>" %}
@group(0) @binding(0) var<storage, read> input: array<{{ vector if mode == "vectors" else word }}>;
{% if mode == "scattered" and size < 4 %}
{{ t.scattered_bits(1, "output", size) }}
{% else %}
@group(0) @binding(1) var<storage, read_write> output: array<{{ vector if mode in ["runs", "vectors"] else word }}>;
{% endif %}

{% if mode != "vectors" %}
fn element(i: u32) -> {{ word }} {
    {% if per_word > 1 %}
    return (input[i / {{ per_word }}u] >> ((i % {{ per_word }}u) * {{ size * 8 }}u)) & {{ mask }};
    {% else %}
    return input[i];
    {% endif %}
}
{% endif %}
{% if mode in ["scattered", "runs"] %}
{{ t.divide(f32_division) }}
{% endif %}
{% macro of(array, d) %}p.{{ array }}[{{ d // 4 }}u][{{ d % 4 }}u]{% endmacro %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if mode != "scattered" %}
    let start = (group_index(group, groups) * 256u + thread) * {{ per_thread }}u;
    {% endif %}
    {% if mode == "scattered" %}
    let start = group_index(group, groups) * 1024u + thread;
    {% for k in range(4) %}
    var linear_index{{ k }} = min(start + {{ k * 256 }}u, p.n - 1u);
    var from{{ k }} = p.in_offset;
    var to{{ k }} = p.out_offset;
    {% for d in range(rank - 1, -1, -1) %}
    {
        {% if d > 0 %}
        let parts = divide(linear_index{{ k }}, {{ of("shape", d) }});
        linear_index{{ k }} = parts.x;
        let coordinate = parts.y;
        {% else %}
        let coordinate = linear_index{{ k }};
        {% endif %}
        from{{ k }} += coordinate * {{ of("in_strides", d) }};
        to{{ k }} += coordinate * {{ of("out_strides", d) }};
    }
    {% endfor %}
    let value{{ k }} = element(from{{ k }});
    {% endfor %}
    {% for k in range(4) %}
    if start + {{ k * 256 }}u < p.n {
        {{ "output_put_bits(to%d, value%d);" | format(k, k) if size < 4 else "output[to%d] = value%d;" | format(k, k) }}
    }
    {% endfor %}
    {% elif mode == "vectors" %}
    if start >= p.n { return; }
    var linear_index = start;
    var i0 = p.out_offset;
    var i1 = p.in_offset;
    {{ t.strided_offsets([("i0", "out_strides"), ("i1", "in_strides")]) }}
    output[i0 / {{ per_thread }}u] = input[i1 / {{ per_thread }}u];
    {% elif mode == "runs" %}
    if start >= p.n { return; }
    var from0 = p.in_offset;
    var linear_index = start;
    {% for d in range(rank - 1, 0, -1) %}
    let parts{{ d }} = divide(linear_index, {{ of("shape", d) }});
    var at{{ d }} = parts{{ d }}.y;
    linear_index = parts{{ d }}.x;
    from0 += at{{ d }} * {{ of("in_strides", d) }};
    {% endfor %}
    var at0 = linear_index;
    from0 += linear_index * {{ of("in_strides", 0) }};
    {% if size == 2 and adjacent %}
    // Eight neighbours span five words, or four.
    if at{{ rank - 1 }} + 8u <= {{ of("shape", rank - 1) }} {
        let word = from0 >> 1u;
        let odd = (from0 & 1u) * 16u;
        let complement = 31u - odd;
        let w0 = input[word];
        let w1 = input[word + 1u];
        let w2 = input[word + 2u];
        let w3 = input[word + 3u];
        let w4 = input[word + select(3u, 4u, odd != 0u)];
        output[start >> 3u] = (vec4<u32>(w0, w1, w2, w3) >> vec4<u32>(odd))
            | ((vec4<u32>(w1, w2, w3, w4) << vec4<u32>(1u)) << vec4<u32>(complement));
        return;
    }
    {% endif %}
    {% for k in range(per_thread) %}
    let v{{ k }} = element(from0);
    {% if not loop.last %}
    from0 += {{ "1u" if adjacent else of("in_strides", rank - 1) }};
    at{{ rank - 1 }} += 1u;
    {% for d in range(rank - 1, 0, -1) %}
    if at{{ d }} == {{ of("shape", d) }} {
        at{{ d }} = 0u;
        from0 += {{ of("in_strides", d - 1) }} - {{ of("shape", d) }} * {{ of("in_strides", d) }};
        at{{ d - 1 }} += 1u;
    {% endfor %}
    {{ "}" * (rank - 1) }}
    {% endif %}
    {% endfor %}
    output[start / {{ per_thread }}u] = vec4<u32>(
        {%- for w in range(4) -%}
        {%- if size == 8 -%}v{{ w // 2 }}.{{ "xy"[w % 2] }}
        {%- else -%}
        {%- for k in range(per_word) -%}
        {{ "v" ~ (w * per_word + k) }}{{ " << " ~ (k * size * 8) ~ "u" if k }}{{ " | " if not loop.last }}
        {%- endfor -%}
        {%- endif -%}
        {{ ", " if not loop.last else "" }}
        {%- endfor -%}
    );
    {% else %}
    {% if per_thread > 1 %}
    var packed = 0u;
    {% endif %}
    for (var k = 0u; k < {{ per_thread }}u; k++) {
        let i = start + k;
        if i >= p.n { break; }
        var linear_index = i;
        var i0 = p.out_offset;
        var i1 = p.in_offset;
        {{ t.strided_offsets([("i0", "out_strides"), ("i1", "in_strides")]) }}
        {% if per_thread == 1 %}
        output[i0] = element(i1);
        {% else %}
        packed |= element(i1) << (k * {{ size * 8 }}u);
        {% endif %}
    }
    {% if per_thread > 1 %}
    if start < p.n { output[start / {{ per_thread }}u] = packed; }
    {% endif %}
    {% endif %}
}
