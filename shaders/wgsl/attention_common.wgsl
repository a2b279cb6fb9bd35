{#-
Parts that both attention kernels share: parameters, bindings, readers of operands, scores, dropout factors and
writers of results. `cooperative` is true in `attention_cooperative`, which reads vectors of eight 16-bit elements;
the other definitions are those of `attention`. `queries` and `keys` are expressions for their counts.
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{% if dropout %}
{% include "math/mul_wide" %}
{% include "math/philox" %}
{% include "math/dropout_mask" %}
{% endif %}
{{ t.prelude() }}
struct Params {
    // Batch, heads, kv heads, queries.
    extents: vec4<u32>,
    // Keys; left and right: query i attends to keys i - left to i + right; workgroups for the rows of a head.
    window: vec4<u32>,
    // Philox offset and seed.
    random: vec4<u32>,
    // Offsets of q, k, v, the gradient; of out and out_v, the mask.
    in_offsets: vec4<u32>,
    out_offsets: vec4<u32>,
    // Strides of the batch, the head, the row, the element.
    q: vec4<u32>,
    k: vec4<u32>,
    v: vec4<u32>,
    g: vec4<u32>,
    out: vec4<u32>,
    out_v: vec4<u32>,
    mask: vec4<u32>,
    scale: f32,
    // Factor of a weight that dropout keeps.
    dropout_scale: f32,
    threshold: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=3) %}
{% if cooperative %}
{% for name in ["q", "k", "v"] %}
@group(0) @binding({{ loop.index0 }}) var<storage, read> {{ name }}: array<vec4<u32>>;
{% endfor %}
{% elif aligned_quads %}
{{ t.quads(0, "q", dtype) }}
{{ t.quads(1, "k", dtype) }}
{{ t.quads(2, "v", dtype) }}
{% else %}
{{ t.input(0, "q", dtype) }}
{{ t.input(1, "k", dtype) }}
{{ t.input(2, "v", dtype) }}
{% endif %}
{% if mask %}
{{ t.input(next.binding, "mask", mask) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if pass == "forward" %}
{{ t.output(next.binding, "out", dtype, mode) }}
{{ t.output(next.binding + 1, "lse", "f32") }}
{% else %}
{% if cooperative %}
@group(0) @binding({{ next.binding }}) var<storage, read> g: array<vec4<u32>>;
{% else %}
{{ t.quads(next.binding, "g", dtype) if aligned_quads else t.input(next.binding, "g", dtype) }}
{% endif %}
// The log-sum-exps, then each query's sum of g · out.
{{ t.input(next.binding + 1, "stats", "f32") }}
{{ t.output(next.binding + 2, "out", dtype, mode) }}
{% endif %}

// Offsets of the current head in each operand.
var<private> q_base: u32;
var<private> k_base: u32;
var<private> v_base: u32;
var<private> g_base: u32;
var<private> mask_base: u32;
// Index of the head among all queries' heads.
var<private> head_index: u32;

{% for name, count, depth in [("q", queries, head), ("k", keys, head), ("v", keys, value)]
    + ([] if pass == "forward" else [("g", queries, value)]) %}
{% if cooperative %}
// Reads eight elements of a row. A row past the end reads as the last row, and has weights of zero.
fn {{ name }}_row_vector(row: u32, d: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>({{ name }}[({{ name }}_base + min(row, {{ count }} - 1u) * p.{{ name }}.z + d) >> 3u]);
}
{% else %}
// Reads a quad of a row; zeros outside.
fn {{ name }}_row_quad(row: u32, d: u32) -> vec4<f32> {
    let at = {{ name }}_base + min(row, {{ count }} - 1u) * p.{{ name }}.z;
    {% if aligned_quads %}
    return select(vec4<f32>(), {{ name }}_quad((at + min(d, {{ depth - 4 }}u)) >> 2u),
        (row < {{ count }}) & (d < {{ depth }}u));
    {% else %}
    var quad: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        quad[i] = select(0.0, {{ name }}_at(at + min(d + i, {{ depth - 1 }}u) * p.{{ name }}.w),
            (row < {{ count }}) & (d + i < {{ depth }}u));
    }
    return quad;
    {% endif %}
}
{% endif %}
{% endfor %}

// Lower than every score: marks the keys that a query does not attend to. Times log2(e), it is still finite.
const MASKED_SCORE = {{ "-1.0e38" if cooperative else "-3.4e38" }};
const LOWEST_SCORE = {{ "-0.5e38" if cooperative else "-3.3e38" }};
fn attends(query: u32, key: u32) -> bool {
    return (query < {{ queries }}) & (key < {{ keys }}) & (key + p.window.y >= query) & (key <= query + p.window.z);
}
// Returns the score of a product, or NEVER.
fn score(product: f32, query: u32, key: u32) -> f32 {
    if !attends(query, key) { return MASKED_SCORE; }
    var s = product * p.scale;
    {% if mask %}
    let bias = mask_at(mask_base + query * p.mask.z + key * p.mask.w);
    {% if mask == "bool" %}
    if !bias { return MASKED_SCORE; }
    {% else %}
    if m_isinf(bias) & m_signbit(bias) { return MASKED_SCORE; }
    s += bias;
    {% endif %}
    {% endif %}
    return select(s, LOWEST_SCORE, s < LOWEST_SCORE);
}
{% if dropout and cooperative %}
// Returns the Philox block of a query and of the eight keys around `key`.
fn dropout_block(query: u32, key: u32) -> vec4<u32> {
    return m_dropout_block(head_index * {{ queries }} + query, key, p.random.xy, p.random.zw);
}
{% elif not cooperative %}
// Returns the dropout factor of a weight.
fn dropout_factor(query: u32, key: u32) -> f32 {
    {% if dropout %}
    return m_dropout_factor(head_index * {{ queries }} + query, key, p.random.xy, p.random.zw, p.threshold,
        p.dropout_scale);
    {% else %}
    return 1.0;
    {% endif %}
}
{% endif %}

{% for name, depth in [("out", value if pass == "forward" else head)]
    + ([("out_v", value)] if pass == "keys" else []) %}
fn store_{{ name }}(base: u32, row: u32, rows: u32, d: u32, v: vec4<f32>) {
    if row >= rows || d >= {{ depth }}u { return; }
    {% if mode == "packed" %}
    let at = base + row * p.{{ name }}.z + d;
    out_put4(at, array<f32, 4>(v.x, v.y, v.z, v.w), at + 4u);
    {% else %}
    for (var i = 0u; i < min({{ depth }}u - d, 4u); i++) {
        out_put(base + row * p.{{ name }}.z + (d + i) * p.{{ name }}.w, v[i]);
    }
    {% endif %}
}
{% endfor %}

fn select_head(batch: u32, head: u32) {
    let kv_head = head / (p.extents.y / p.extents.z);
    head_index = batch * p.extents.y + head;
    q_base = p.in_offsets.x + batch * p.q.x + head * p.q.y;
    k_base = p.in_offsets.y + batch * p.k.x + kv_head * p.k.y;
    v_base = p.in_offsets.z + batch * p.v.x + kv_head * p.v.y;
    g_base = p.in_offsets.w + batch * p.g.x + head * p.g.y;
    mask_base = p.out_offsets.z + batch * p.mask.x + head * p.mask.y;
}
