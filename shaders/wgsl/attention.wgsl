{#-
Attention without the matrix of weights, FlashAttention-2's way: 64 rows of one head in a workgroup walk over what they
meet in tiles of 32 columns. Rows are queries and columns keys, in the last pass the other way round; sums are f32, and
nothing depends on the order of workgroups.

pass: `forward`: out and the logarithm of each query's sum of exponentials · `queries`: the gradient of q · `keys`: those of k and v
dtype: of q, k, v, out and their gradients · head, value: elements of a row of q and k, and of v
mask: the mask's dtype, or "": bool lets through, floats are added · dropout: weights are dropped, by the same numbers in every pass
mode: `packed` if rows of results are aligned runs of whole fours, else `scattered`
The gradients of k and v lie in one buffer.
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{% if dropout %}
{% include "math/wide" %}
{% include "math/philox" %}
{% include "math/kept" %}
{% endif %}
{{ t.prelude() }}
struct Params {
    // Of each: batch, heads, kv heads, queries.
    extents: vec4<u32>,
    // Keys; query i sees keys i - left to i + right; workgroups for the rows of a head.
    window: vec4<u32>,
    // The generator's offset and seed.
    random: vec4<u32>,
    // First elements of q, k, v, the gradient; of both results, the mask.
    ins: vec4<u32>,
    outs: vec4<u32>,
    // Steps of the batch, the head, the row, the element.
    q: vec4<u32>,
    k: vec4<u32>,
    v: vec4<u32>,
    g: vec4<u32>,
    one: vec4<u32>,
    two: vec4<u32>,
    mask: vec4<u32>,
    scale: f32,
    // What a weight that is kept is multiplied by.
    kept: f32,
    threshold: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=3) %}
{{ t.input(0, "q", dtype) }}
{{ t.input(1, "k", dtype) }}
{{ t.input(2, "v", dtype) }}
{% if mask %}
{{ t.input(next.binding, "mask", mask) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if pass == "forward" %}
{{ t.output(next.binding, "one", dtype, mode) }}
{{ t.output(next.binding + 1, "lse", "f32") }}
{% else %}
{{ t.input(next.binding, "g", dtype) }}
// The logarithms, then each query's sum of g · out.
{{ t.input(next.binding + 1, "stats", "f32") }}
{{ t.output(next.binding + 2, "one", dtype, mode) }}
{% endif %}

// Where the head at hand begins in each.
var<private> q_base: u32;
var<private> k_base: u32;
var<private> v_base: u32;
var<private> g_base: u32;
var<private> mask_base: u32;
// The head's number among all queries' heads.
var<private> at_head: u32;

{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% for name, rows, depth in [("q", queries, head), ("k", keys, head), ("v", keys, value)] + ([] if pass == "forward" else [("g", queries, value)]) %}
// Four elements of a row; zeros outside.
fn {{ name }}_quad(row: u32, d: u32) -> vec4<f32> {
    let at = {{ name }}_base + min(row, {{ rows }} - 1u) * p.{{ name }}.z;
    var quad: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        quad[i] = select(0.0, {{ name }}_at(at + min(d + i, {{ depth - 1 }}u) * p.{{ name }}.w), (row < {{ rows }}) & (d + i < {{ depth }}u));
    }
    return quad;
}
{% endfor %}

// Lower than every score: marks what a query does not see.
const NEVER = -3.4e38;
fn sees(query: u32, key: u32) -> bool {
    return (query < {{ queries }}) & (key < {{ keys }}) & (key + p.window.y >= query) & (key <= query + p.window.z);
}
// The score of a product, or NEVER.
fn score(product: f32, query: u32, key: u32) -> f32 {
    if !sees(query, key) { return NEVER; }
    var s = product * p.scale;
    {% if mask %}
    let bias = mask_at(mask_base + query * p.mask.z + key * p.mask.w);
    {% if mask == "bool" %}
    if !bias { return NEVER; }
    {% else %}
    if m_isinf(bias) & m_signbit(bias) { return NEVER; }
    s += bias;
    {% endif %}
    {% endif %}
    return select(s, -3.3e38, s < -3.3e38);
}
// What a weight is multiplied by.
fn keep(query: u32, key: u32) -> f32 {
    {% if dropout %}
    return m_kept(at_head * {{ queries }} + query, key, p.random.xy, p.random.zw, p.threshold, p.kept);
    {% else %}
    return 1.0;
    {% endif %}
}

// Part of 64 rows; the same of 32 columns, or some of their rows whole; weights, a row 33 apart; numbers of the rows.
var<workgroup> tile: array<vec4<f32>, 256>;
var<workgroup> columns: array<vec4<f32>, 128>;
var<workgroup> weights: array<f32, 2112>;
{% if pass == "forward" %}
var<workgroup> parts: array<f32, 256>;
var<workgroup> factors: array<f32, 64>;
{% endif %}

{#- Rows of `a` from row0 on times those of `b` from col0 on: `target`[r][c] is that of row 4 y + r and column x + 16 c. -#}
{% macro products(target, a, b, depth) %}
    {% for r in range(4) %}
    {% for c in range(2) %}
    var {{ target }}_{{ r }}_{{ c }} = 0.0;
    {% endfor %}
    {% endfor %}
    for (var d = 0u; d < {{ depth }}u; d += 16u) {
        tile[(lane & 3u) * 64u + (lane >> 2u)] = {{ a }}_quad(row0 + (lane >> 2u), d + (lane & 3u) * 4u);
        if lane < 128u {
            columns[(lane & 3u) * 32u + (lane >> 2u)] = {{ b }}_quad(col0 + (lane >> 2u), d + (lane & 3u) * 4u);
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) {
            let b0 = columns[i * 32u + x];
            let b1 = columns[i * 32u + x + 16u];
            {% for r in range(4) %}
            let a{{ r }} = tile[i * 64u + y * 4u + {{ r }}u];
            {{ target }}_{{ r }}_0 += dot(a{{ r }}, b0);
            {{ target }}_{{ r }}_1 += dot(a{{ r }}, b1);
            {% endfor %}
        }
        workgroupBarrier();
    }
{% endmacro %}

{#- `target` += weights times rows of `b` from col0 on; quad x + 16 c of rows 4 y + r. -#}
{% macro gather(target, b, depth) %}
{% set wide = (depth + 63) // 64 %}
    for (var line = 0u; line < 32u; line += {{ 16 // wide }}u) {
        tile[lane] = {{ b }}_quad(col0 + line + lane / {{ 16 * wide }}u, (lane % {{ 16 * wide }}u) * 4u);
        workgroupBarrier();
        for (var i = 0u; i < {{ 16 // wide }}u; i++) {
            {% for c in range(wide) %}
            let b{{ c }} = tile[i * {{ 16 * wide }}u + x + {{ 16 * c }}u];
            {% endfor %}
            {% for r in range(4) %}
            let w{{ r }} = weights[(y * 4u + {{ r }}u) * 33u + line + i];
            {% for c in range(wide) %}
            {{ target }}_{{ r }}_{{ c }} += w{{ r }} * b{{ c }};
            {% endfor %}
            {% endfor %}
        }
        workgroupBarrier();
    }
{% endmacro %}

{% macro zeros(target, depth) %}
    {% for r in range(4) %}
    {% for c in range((depth + 63) // 64) %}
    var {{ target }}_{{ r }}_{{ c }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Writes `target` · `factor` of the rows below `rows`, where result `name` lies. -#}
{% macro store(target, depth, name, rows, factor) %}
    {% for r in range(4) %}
    {% for c in range((depth + 63) // 64) %}
    put_{{ name }}({{ name }}_base, row0 + y * 4u + {{ r }}u, {{ rows }}, (x + {{ 16 * c }}u) * 4u, {{ target }}_{{ r }}_{{ c }} * {{ factor }});
    {% endfor %}
    {% endfor %}
{% endmacro %}

{% for name, depth in [("one", value if pass == "forward" else head)] + ([("two", value)] if pass == "keys" else []) %}
fn put_{{ name }}(base: u32, row: u32, rows: u32, d: u32, v: vec4<f32>) {
    if row >= rows || d >= {{ depth }}u { return; }
    {% if mode == "packed" %}
    let at = base + row * p.{{ name }}.z + d;
    one_put4(at, array<f32, 4>(v.x, v.y, v.z, v.w), at + 4u);
    {% else %}
    for (var i = 0u; i < min({{ depth }}u - d, 4u); i++) {
        one_put(base + row * p.{{ name }}.z + (d + i) * p.{{ name }}.w, v[i]);
    }
    {% endif %}
}
{% endfor %}

fn enter(batch: u32, head: u32) {
    let shared_head = head / (p.extents.y / p.extents.z);
    at_head = batch * p.extents.y + head;
    q_base = p.ins.x + batch * p.q.x + head * p.q.y;
    k_base = p.ins.y + batch * p.k.x + shared_head * p.k.y;
    v_base = p.ins.z + batch * p.v.x + shared_head * p.v.y;
    g_base = p.ins.w + batch * p.g.x + head * p.g.y;
    mask_base = p.outs.z + batch * p.mask.x + head * p.mask.y;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let index = group_index(group, groups);
    let tiles = p.window.w;
    {% if pass == "keys" %}
    let heads = p.extents.z;
    {% else %}
    let heads = p.extents.y;
    {% endif %}
    if index >= p.extents.x * heads * tiles { return; }
    let row0 = (index % tiles) * 64u;
    let batch = index / tiles / heads;
    let head = index / tiles % heads;
    let x = lane & 15u;
    let y = lane >> 4u;
    let one_base = p.outs.x + batch * p.one.x + head * p.one.y;
    let two_base = p.outs.y + batch * p.two.x + head * p.two.y;
    {% if pass == "keys" %}
    // The queries that see some key of these.
    let last = min(row0 + 63u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / 32u * 32u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zeros("dk", head) }}
    {{ zeros("dv", value) }}
    let sharing = p.extents.y / p.extents.z;
    for (var member = 0u; member < sharing; member++) {
        enter(batch, head * sharing + member);
        for (var col0 = begin; col0 < end; col0 += 32u) {
            {{ products("s", "k", "q", head) }}
            {{ products("dw", "v", "g", value) }}
            {% for c in range(2) %}
            let query{{ c }} = col0 + x + {{ 16 * c }}u;
            let line{{ c }} = at_head * {{ queries }} + min(query{{ c }}, {{ queries }} - 1u);
            let lse{{ c }} = stats_at(line{{ c }});
            let delta{{ c }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ c }});
            {% for r in range(4) %}
            let key{{ r }}_{{ c }} = row0 + y * 4u + {{ r }}u;
            let score{{ r }}_{{ c }} = score(s_{{ r }}_{{ c }}, query{{ c }}, key{{ r }}_{{ c }});
            let w{{ r }}_{{ c }} = select(m_exp(score{{ r }}_{{ c }} - lse{{ c }}), 0.0, score{{ r }}_{{ c }} == NEVER);
            let keep{{ r }}_{{ c }} = keep(query{{ c }}, key{{ r }}_{{ c }});
            weights[(y * 4u + {{ r }}u) * 33u + x + {{ 16 * c }}u] = w{{ r }}_{{ c }} * keep{{ r }}_{{ c }};
            let ds{{ r }}_{{ c }} = w{{ r }}_{{ c }} * (dw_{{ r }}_{{ c }} * keep{{ r }}_{{ c }} - delta{{ c }});
            {% endfor %}
            {% endfor %}
            // The next barrier stands between these weights and their use, the last one behind it.
            {{ gather("dv", "g", value) }}
            {% for c in range(2) %}
            {% for r in range(4) %}
            weights[(y * 4u + {{ r }}u) * 33u + x + {{ 16 * c }}u] = ds{{ r }}_{{ c }};
            {% endfor %}
            {% endfor %}
            {{ gather("dk", "q", head) }}
        }
    }
    {{ store("dk", head, "one", keys, "p.scale") }}
    {{ store("dv", value, "two", keys, "1.0") }}
    {% else %}
    // The keys that some query of these sees.
    let last = min(row0 + 63u, {{ queries }} - 1u);
    let begin = (max(row0, p.window.y) - p.window.y) / 32u * 32u;
    let end = min(last + p.window.z + 1u, {{ keys }});
    enter(batch, head);
    {% if pass == "queries" %}
    {{ zeros("dq", head) }}
    {% for r in range(4) %}
    let query{{ r }} = row0 + y * 4u + {{ r }}u;
    let line{{ r }} = at_head * {{ queries }} + min(query{{ r }}, {{ queries }} - 1u);
    let lse{{ r }} = stats_at(line{{ r }});
    let delta{{ r }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ r }});
    {% endfor %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ products("s", "q", "k", head) }}
        {{ products("dw", "g", "v", value) }}
        {% for r in range(4) %}
        {% for c in range(2) %}
        let key{{ r }}_{{ c }} = col0 + x + {{ 16 * c }}u;
        let score{{ r }}_{{ c }} = score(s_{{ r }}_{{ c }}, query{{ r }}, key{{ r }}_{{ c }});
        let w{{ r }}_{{ c }} = select(m_exp(score{{ r }}_{{ c }} - lse{{ r }}), 0.0, score{{ r }}_{{ c }} == NEVER);
        weights[(y * 4u + {{ r }}u) * 33u + x + {{ 16 * c }}u] =
            w{{ r }}_{{ c }} * (dw_{{ r }}_{{ c }} * keep(query{{ r }}, key{{ r }}_{{ c }}) - delta{{ r }});
        {% endfor %}
        {% endfor %}
        {{ gather("dq", "k", head) }}
    }
    {{ store("dq", head, "one", queries, "p.scale") }}
    {% else %}
    {{ zeros("sum", value) }}
    // Four invocations share the numbers of a row, and each has a quarter of its sum.
    let mine = lane >> 2u;
    let quarter = lane & 3u;
    var largest = NEVER;
    var total = 0.0;
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ products("s", "q", "k", head) }}
        {% for r in range(4) %}
        {% for c in range(2) %}
        weights[(y * 4u + {{ r }}u) * 33u + x + {{ 16 * c }}u] =
            score(s_{{ r }}_{{ c }}, row0 + y * 4u + {{ r }}u, col0 + x + {{ 16 * c }}u);
        {% endfor %}
        {% endfor %}
        workgroupBarrier();
        var high = NEVER;
        for (var i = quarter; i < 32u; i += 4u) { high = m_max(high, weights[mine * 33u + i]); }
        parts[lane] = high;
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) { high = m_max(high, parts[mine * 4u + i]); }
        high = m_max(high, largest);
        let rescale = m_exp(largest - high);
        largest = high;
        total *= rescale;
        for (var i = quarter; i < 32u; i += 4u) {
            let s = weights[mine * 33u + i];
            let w = select(m_exp(s - high), 0.0, s == NEVER);
            total += w;
            weights[mine * 33u + i] = w * keep(row0 + mine, col0 + i);
        }
        if quarter == 0u { factors[mine] = rescale; }
        workgroupBarrier();
        {% for r in range(4) %}
        let factor{{ r }} = factors[y * 4u + {{ r }}u];
        {% for c in range((value + 63) // 64) %}
        sum_{{ r }}_{{ c }} *= factor{{ r }};
        {% endfor %}
        {% endfor %}
        {{ gather("sum", "v", value) }}
    }
    parts[lane] = total;
    workgroupBarrier();
    total = 0.0;
    for (var i = 0u; i < 4u; i++) { total += parts[mine * 4u + i]; }
    // A query that sees nothing gets zeros.
    let seen = !(total == 0.0);
    if quarter == 0u {
        factors[mine] = select(0.0, 1.0 / total, seen);
        if row0 + mine < {{ queries }} {
            lse_put(at_head * {{ queries }} + row0 + mine, select(0.0, largest + m_log(total), seen));
        }
    }
    workgroupBarrier();
    {% for r in range(4) %}
    let last_factor{{ r }} = factors[y * 4u + {{ r }}u];
    {% for c in range((value + 63) // 64) %}
    sum_{{ r }}_{{ c }} *= last_factor{{ r }};
    {% endfor %}
    {% endfor %}
    {{ store("sum", value, "one", queries, "1.0") }}
    {% endif %}
    {% endif %}
}
