{#-
Attention without the matrix of weights, like FlashAttention-2. A workgroup has 64 rows of one head and
iterates over tiles of 32 columns. Rows are queries and columns keys; in the last pass rows are keys. Sums are
f32, and nothing depends on the order of workgroups. Each of the 128 threads has four rows and four columns of
a tile.

pass: `forward` (out and the log-sum-exp of each query), `queries` (the gradient of q), `keys` (those of k and
  v)
dtype: of q, k, v, out and their gradients · head, value: elements of a row of q and k, and of v
mask: the mask's dtype, or ""; bool keeps scores, floats are added
dropout: with dropout, equal in every pass
mode: `packed` if rows of results are aligned and whole quads, else `scattered`
fours: the rows of operands are, too
whole: rows and columns are in workgroup memory at full length (the forward pass's rows permanently); else 16
  elements at a time
units: products run on matrix units, with 16-bit weights; requires `whole`, 16-bit types, rows of whole aligned
  vectors of eight elements, and head and value of 16 to 64 in steps of 16. A subgroup has 16 rows, those of
  its own invocations. See `cooperative` in `matmul_macros` for the types of matrices
The gradients of k and v share one buffer.
-#}
{% if units %}
enable wgpu_cooperative_matrix;
const OPERAND_BITS = {{ "0xbf16u" if dtype == "bf16" else "0xf16u" }};
{% endif %}
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
    // Offsets of q, k, v, the gradient; of both results, the mask.
    ins: vec4<u32>,
    outs: vec4<u32>,
    // Strides of the batch, the head, the row, the element.
    q: vec4<u32>,
    k: vec4<u32>,
    v: vec4<u32>,
    g: vec4<u32>,
    one: vec4<u32>,
    two: vec4<u32>,
    mask: vec4<u32>,
    scale: f32,
    // Factor of a weight that is kept.
    kept: f32,
    threshold: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set next = namespace(binding=3) %}
{% if units %}
{% for name in ["q", "k", "v"] %}
@group(0) @binding({{ loop.index0 }}) var<storage, read> {{ name }}: array<vec4<u32>>;
{% endfor %}
{% elif fours %}
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
{{ t.output(next.binding, "one", dtype, mode) }}
{{ t.output(next.binding + 1, "lse", "f32") }}
{% else %}
{% if units %}
@group(0) @binding({{ next.binding }}) var<storage, read> g: array<vec4<u32>>;
{% else %}
{{ t.quads(next.binding, "g", dtype) if fours else t.input(next.binding, "g", dtype) }}
{% endif %}
// The log-sum-exps, then each query's sum of g · out.
{{ t.input(next.binding + 1, "stats", "f32") }}
{{ t.output(next.binding + 2, "one", dtype, mode) }}
{% endif %}

// Offsets of the current head in each operand.
var<private> q_base: u32;
var<private> k_base: u32;
var<private> v_base: u32;
var<private> g_base: u32;
var<private> mask_base: u32;
// Index of the head among all queries' heads.
var<private> at_head: u32;

{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% for name, rows, depth in [("q", queries, head), ("k", keys, head), ("v", keys, value)] + ([] if pass == "forward" else [("g", queries, value)]) %}
{% if units %}
// Reads eight elements of a row; zeros outside.
fn {{ name }}_eight(row: u32, d: u32) -> vec4<f32> {
    let at = {{ name }}_base + min(row, {{ rows }} - 1u) * p.{{ name }}.z + d;
    return bitcast<vec4<f32>>(select(vec4<u32>(), {{ name }}[at >> 3u], row < {{ rows }}));
}
{% else %}
// Reads a quad of a row; zeros outside.
fn {{ name }}_four(row: u32, d: u32) -> vec4<f32> {
    let at = {{ name }}_base + min(row, {{ rows }} - 1u) * p.{{ name }}.z;
    {% if fours %}
    return select(vec4<f32>(), {{ name }}_quad((at + min(d, {{ depth - 4 }}u)) >> 2u), (row < {{ rows }}) & (d < {{ depth }}u));
    {% else %}
    var four: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        four[i] = select(0.0, {{ name }}_at(at + min(d + i, {{ depth - 1 }}u) * p.{{ name }}.w), (row < {{ rows }}) & (d + i < {{ depth }}u));
    }
    return four;
    {% endif %}
}
{% endif %}
{% endfor %}

// Lower than every score: marks the keys that a query does not attend to.
const NEVER = -3.4e38;
fn sees(query: u32, key: u32) -> bool {
    return (query < {{ queries }}) & (key < {{ keys }}) & (key + p.window.y >= query) & (key <= query + p.window.z);
}
// Returns the score of a product, or NEVER.
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
// Returns the dropout factor of a weight.
fn keep(query: u32, key: u32) -> f32 {
    {% if dropout %}
    return m_kept(at_head * {{ queries }} + query, key, p.random.xy, p.random.zw, p.threshold, p.kept);
    {% else %}
    return 1.0;
    {% endif %}
}

{% set fours_of = namespace(head=(head + 3) // 4, value=(value + 3) // 4) %}
{% set wide = namespace(head=(head + 31) // 32, value=(value + 31) // 32) %}
{% if units %}
{% set longest = head if pass == "forward" or head >= value else value %}
{% set pitch = 9 %}
// Rows and columns in 16 bits, eight elements a vector; a padding vector for each line.
var<workgroup> tile: array<vec4<f32>, {{ 64 * (longest // 8 + 1) }}>;
var<workgroup> near: array<vec4<f32>, {{ 32 * (head // 8 + 1) }}>;
var<workgroup> far: array<vec4<f32>, {{ 32 * (value // 8 + 1) }}>;
// Products of the 16 rows of each subgroup, 32 columns at a time. Little memory means more workgroups at a time.
var<workgroup> results: array<vec4<f32>, {{ 64 * pitch }}>;
// Weights in 16 bits. The forward pass has the rows in registers, and weights in their memory.
{% set weights = "tile" if pass == "forward" and longest >= 32 else "weights" %}
{% if weights == "weights" %}
var<workgroup> weights: array<vec4<f32>, 320>;
{% endif %}
{{ t.bits_function("weight", dtype) }}
fn put_weights(row: u32, quad: u32, w: vec4<f32>) {
    let at = row * 5u + (quad >> 1u);
    let part = (quad & 1u) * 2u;
    {{ weights }}[at][part] = bitcast<f32>(weight_pair_{{ dtype }}(w.x, w.y));
    {{ weights }}[at][part + 1u] = bitcast<f32>(weight_pair_{{ dtype }}(w.z, w.w));
}
{% elif whole %}
{% set longest = fours_of.head if pass == "forward" or head >= value else fours_of.value %}
// 64 rows, and 32 columns for the first and second product. Quads of a row are 65, or 33, apart.
var<workgroup> tile: array<vec4<f32>, {{ 65 * longest }}>;
var<workgroup> near: array<vec4<f32>, {{ 33 * 8 * wide.head }}>;
var<workgroup> far: array<vec4<f32>, {{ 33 * 8 * wide.value }}>;
{% else %}
// Part of 64 rows, or some whole columns; part of 32 columns.
var<workgroup> tile: array<vec4<f32>, 260>;
var<workgroup> near: array<vec4<f32>, 132>;
{% endif %}
{% if not units %}
// Weights, with nine quads for each row.
var<workgroup> weights: array<vec4<f32>, 576>;
fn put_weights(row: u32, quad: u32, w: vec4<f32>) { weights[row * 9u + quad] = w; }
{% endif %}
{% set scores = ("results", pitch) if units else ("weights", 9) %}
// Statistics of the rows.
{% if pass == "forward" %}
var<workgroup> parts: array<f32, 128>;
var<workgroup> factors: array<f32, 64>;
{% endif %}

{#- Loads `count` lines of `name`, `fours` of each from element `d` on, to `into`; a thread's lines are
`count / 4` apart. -#}
{% macro load(into, name, first, count, fours, d) %}
    for (var at = lane; at < {{ count * fours }}u; at += 128u) {
        let line = at / {{ fours }}u;
        let four = at % {{ fours }}u;
        {{ into }}[four * {{ count + 1 }}u + (line & 3u) * {{ count // 4 }}u + (line >> 2u)] = {{ name }}_four({{ first }} + line, {{ d }} + four * 4u);
    }
{% endmacro %}

{#- Loads whole lines in 16 bits. -#}
{% macro load_eights(into, name, first, count, depth) %}
    for (var at = lane; at < {{ count * depth // 8 }}u; at += 128u) {
        let line = at / {{ depth // 8 }}u;
        let eight = at % {{ depth // 8 }}u;
        {{ into }}[line * {{ depth // 8 + 1 }}u + eight] = {{ name }}_eight({{ first }} + line, eight * 8u);
    }
{% endmacro %}

{#- Barrier between the invocations that share rows: those of a subgroup. -#}
{% macro sync_rows() -%}
    {{ "subgroupBarrier();" if units else "workgroupBarrier();" }}
{%- endmacro %}

{#- Barrier between writes and reads of whole columns in memory; partial loads have their own barriers. -#}
{% macro between() %}
    {% if whole %}
    workgroupBarrier();
    {% endif %}
{% endmacro %}

{#- Loads whole columns of a tile after the previous tile: of the first product, and of the second one's
operand. -#}
{% macro columns(first, second) %}
    {% if units %}
    workgroupBarrier();
    {{ load_eights("near", first, "col0", 32, head) }}
    {{ load_eights("far", second, "col0", 32, value) }}
    {% elif whole %}
    workgroupBarrier();
    {{ load("near", first, "col0", 32, fours_of.head, "0u") }}
    {{ load("far", second, "col0", 32, fours_of.value, "0u") }}
    {% endif %}
{% endmacro %}

{#- Loads a matrix of the subgroup's rows in `tile`. -#}
{% macro load_row(target, d, line) -%}
    let {{ target }}_row{{ d }} = coopLoadT<coop_mat16x16<f32, A>>(&tile[strip * {{ line }}u + {{ 2 * d }}u], {{ line }}u);
{%- endmacro %}

{#- The same as `products`, on matrix units. -#}
{% macro products_in_units(target, a, depth, columns, kept) %}
    {% set line = depth // 8 + 1 %}
    {% if not kept %}
    {{ load_eights("tile", a, "row0", 64, depth) }}
    workgroupBarrier();
    {% endif %}
    {% for c in range(2) %}
    var {{ target }}_unit{{ c }} = coop_mat16x16<f32, C>();
    {% endfor %}
    {% for d in range(depth // 16) %}
    {% if not kept %}
    {{ load_row(target, d, line) }}
    {% endif %}
    {% for c in range(2) %}
    let {{ target }}_column{{ d }}_{{ c }} = coopLoad<coop_mat16x16<f32, B>>(&{{ columns }}[{{ 16 * c * line + 2 * d }}], {{ line }}u);
    {{ target }}_unit{{ c }} = coopMultiplyAdd({{ 'kept' if kept else target }}_row{{ d }}, {{ target }}_column{{ d }}_{{ c }}, {{ target }}_unit{{ c }});
    {% endfor %}
    {% endfor %}
    subgroupBarrier();
    {% for c in range(2) %}
    let {{ target }}_at{{ c }} = strip * {{ pitch }}u + {{ 4 * c }}u;
    coopStoreT({{ target }}_unit{{ c }}, &results[{{ target }}_at{{ c }}], {{ pitch }}u);
    {% endfor %}
    subgroupBarrier();
    {% for r in range(4) %}
    var {{ target }}{{ r }} = results[(y * 4u + {{ r }}u) * {{ pitch }}u + x];
    {% endfor %}
{% endmacro %}

{#- The same as `gather`, on matrix units. Quads past the end of a row have no use. -#}
{% macro gather_in_units(target, depth, columns) %}
    {% set line = depth // 8 + 1 %}
    {% for k in range(2) %}
    let {{ target }}_weights{{ k }} = coopLoadT<coop_mat16x16<f32, A>>(&{{ weights }}[strip * 5u + {{ 2 * k }}u], 5u);
    {% endfor %}
    subgroupBarrier();
    {% for c in range((depth + 31) // 32) %}
    {% for j in range(2 * c, [2 * c + 2, depth // 16] | min) %}
    var {{ target }}_sum{{ j }} = coop_mat16x16<f32, C>();
    {% for k in range(2) %}
    let {{ target }}_column{{ j }}_{{ k }} = coopLoadT<coop_mat16x16<f32, B>>(&{{ columns }}[{{ 16 * k * line + 2 * j }}], {{ line }}u);
    {{ target }}_sum{{ j }} = coopMultiplyAdd({{ target }}_weights{{ k }}, {{ target }}_column{{ j }}_{{ k }}, {{ target }}_sum{{ j }});
    {% endfor %}
    let {{ target }}_at{{ j }} = strip * {{ pitch }}u + {{ 4 * (j - 2 * c) }}u;
    coopStoreT({{ target }}_sum{{ j }}, &results[{{ target }}_at{{ j }}], {{ pitch }}u);
    {% endfor %}
    subgroupBarrier();
    {% for r in range(4) %}
    {{ target }}_{{ r }}_{{ c }} += results[(y * 4u + {{ r }}u) * {{ pitch }}u + x];
    {% endfor %}
    subgroupBarrier();
    {% endfor %}
{% endmacro %}

{#- Product of rows of `a` from row0 on and rows of `b` from col0 on. `target`[r][c] is for row 4 y + r
and column 4 x + c. Whole columns are in `columns`; whole rows too, if `kept`. -#}
{% macro products(target, a, b, depth, columns, kept) %}
    {% if units %}
    {{ products_in_units(target, a, depth, columns, kept) }}
    {% else %}
    {% for r in range(4) %}
    var {{ target }}{{ r }} = vec4<f32>();
    {% endfor %}
    {% set fours = (depth + 3) // 4 if whole else 4 %}
    {% if not whole %}
    for (var d = 0u; d < {{ depth }}u; d += 16u) {
        {{ load(columns, b, "col0", 32, fours, "d") }}
    {% endif %}
    {% if not kept %}
        {{ load("tile", a, "row0", 64, fours, "d" if not whole else "0u") }}
        workgroupBarrier();
    {% endif %}
        for (var i = 0u; i < {{ fours }}u; i++) {
            {% for c in range(4) %}
            let b{{ c }} = {{ columns }}[i * 33u + {{ c * 8 }}u + x];
            {% endfor %}
            {% for r in range(4) %}
            let a{{ r }} = tile[i * 65u + {{ r * 16 }}u + y];
            {% for e in ["x", "y", "z", "w"] %}
            {{ target }}{{ r }} += a{{ r }}.{{ e }} * vec4<f32>(b0.{{ e }}, b1.{{ e }}, b2.{{ e }}, b3.{{ e }});
            {% endfor %}
            {% endfor %}
        }
    {% if not whole %}
        workgroupBarrier();
    }
    {% endif %}
    {% endif %}
{% endmacro %}

{#- `target` += weights times rows of `b` from col0 on, in `columns` if whole; quads x + 8 c of rows 4 y +
r. -#}
{% macro gather(target, b, depth, columns) %}
    {% if units %}
    {{ gather_in_units(target, depth, columns) }}
    {% else %}
{% set across = (depth + 31) // 32 %}
{% set lines = 32 if whole or across == 1 else 16 if across == 2 else 8 %}
    {% if not whole %}
    for (var line = 0u; line < 32u; line += {{ lines }}u) {
        for (var at = lane; at < {{ lines * across * 8 }}u; at += 128u) {
            tile[at] = {{ b }}_four(col0 + line + at / {{ across * 8 }}u, at % {{ across * 8 }}u * 4u);
        }
        workgroupBarrier();
    {% endif %}
        for (var i = 0u; i < {{ lines // 4 }}u; i++) {
            {% for r in range(4) %}
            let w{{ r }} = weights[(y * 4u + {{ r }}u) * 9u + {{ "" if whole else "(line >> 2u) + " }}i];
            {% endfor %}
            {% for e in range(4) %}
            {% for c in range(across) %}
            {% if whole %}
            let b{{ e }}_{{ c }} = {{ columns }}[(x + {{ c * 8 }}u) * 33u + {{ e * 8 }}u + i];
            {% else %}
            let b{{ e }}_{{ c }} = tile[(i * 4u + {{ e }}u) * {{ across * 8 }}u + x + {{ c * 8 }}u];
            {% endif %}
            {% for r in range(4) %}
            {{ target }}_{{ r }}_{{ c }} += w{{ r }}[{{ e }}] * b{{ e }}_{{ c }};
            {% endfor %}
            {% endfor %}
            {% endfor %}
        }
    {% if not whole %}
        workgroupBarrier();
    }
    {% endif %}
    {% endif %}
{% endmacro %}

{% macro zeros(target, depth) %}
    {% for r in range(4) %}
    {% for c in range((depth + 31) // 32) %}
    var {{ target }}_{{ r }}_{{ c }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Writes `target` · `factor` of the rows below `rows` to result `name`. -#}
{% macro store(target, depth, name, rows, factor) %}
    {% for r in range(4) %}
    {% for c in range((depth + 31) // 32) %}
    put_{{ name }}({{ name }}_base, row0 + y * 4u + {{ r }}u, {{ rows }}, (x + {{ 8 * c }}u) * 4u, {{ target }}_{{ r }}_{{ c }} * {{ factor }});
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

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    // Written out, so that validation sees that control flow is uniform.
    let index = group.y * groups.x + group.x;
    let tiles = p.window.w;
    {% if pass == "keys" %}
    let heads = p.extents.z;
    {% else %}
    let heads = p.extents.y;
    {% endif %}
    if index >= p.extents.x * heads * tiles { return; }
    // Rows with the most work start first: the last queries, or the first keys.
    let row0 = {{ "index % tiles" if pass == "keys" else "(tiles - 1u - index % tiles)" }} * 64u;
    let batch = index / tiles / heads;
    let head = index / tiles % heads;
    let x = lane & 7u;
    let y = lane >> 3u;
    {% if units %}
    // The first row of the subgroup.
    let strip = lane / 32u * 16u;
    {% endif %}
    let one_base = p.outs.x + batch * p.one.x + head * p.one.y;
    let two_base = p.outs.y + batch * p.two.x + head * p.two.y;
    {% if pass == "keys" %}
    // The queries that attend to some key of these.
    let last = min(row0 + 63u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / 32u * 32u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zeros("dk", head) }}
    {{ zeros("dv", value) }}
    let sharing = p.extents.y / p.extents.z;
    for (var member = 0u; member < sharing; member++) {
        enter(batch, head * sharing + member);
        for (var col0 = begin; col0 < end; col0 += 32u) {
            {{ columns("q", "g") }}
            {{ products("s", "k", "q", head, "near", false) }}
            {{ between() }}
            {{ products("dw", "v", "g", value, "far" if whole else "near", false) }}
            {% for c in range(4) %}
            let query{{ c }} = col0 + x * 4u + {{ c }}u;
            let line{{ c }} = at_head * {{ queries }} + min(query{{ c }}, {{ queries }} - 1u);
            let lse{{ c }} = stats_at(line{{ c }});
            let delta{{ c }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ c }});
            {% endfor %}
            {% for r in range(4) %}
            let key{{ r }} = row0 + y * 4u + {{ r }}u;
            var dropped{{ r }}: vec4<f32>;
            {% for c in range(4) %}
            let score{{ r }}_{{ c }} = score(s{{ r }}[{{ c }}], query{{ c }}, key{{ r }});
            let w{{ r }}_{{ c }} = select(m_exp(score{{ r }}_{{ c }} - lse{{ c }}), 0.0, score{{ r }}_{{ c }} == NEVER);
            let keep{{ r }}_{{ c }} = keep(query{{ c }}, key{{ r }});
            dropped{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * keep{{ r }}_{{ c }};
            dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * (dw{{ r }}[{{ c }}] * keep{{ r }}_{{ c }} - delta{{ c }});
            {% endfor %}
            put_weights(y * 4u + {{ r }}u, x, dropped{{ r }});
            {% endfor %}
            {{ sync_rows() if whole }}
            {{ gather("dv", "g", value, "far") }}
            {{ sync_rows() if whole }}
            {% for r in range(4) %}
            put_weights(y * 4u + {{ r }}u, x, dw{{ r }});
            {% endfor %}
            {{ sync_rows() if whole }}
            {{ gather("dk", "q", head, "near") }}
        }
    }
    {{ store("dk", head, "one", keys, "p.scale") }}
    {{ store("dv", value, "two", keys, "1.0") }}
    {% else %}
    // The keys that some query of these attends to.
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
        {{ columns("k", "v") }}
        {{ products("s", "q", "k", head, "near", false) }}
        {{ between() }}
        {{ products("dw", "g", "v", value, "far" if whole else "near", false) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        let key{{ r }}_{{ c }} = col0 + x * 4u + {{ c }}u;
        let score{{ r }}_{{ c }} = score(s{{ r }}[{{ c }}], query{{ r }}, key{{ r }}_{{ c }});
        let w{{ r }}_{{ c }} = select(m_exp(score{{ r }}_{{ c }} - lse{{ r }}), 0.0, score{{ r }}_{{ c }} == NEVER);
        dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * (dw{{ r }}[{{ c }}] * keep(query{{ r }}, key{{ r }}_{{ c }}) - delta{{ r }});
        {% endfor %}
        put_weights(y * 4u + {{ r }}u, x, dw{{ r }});
        {% endfor %}
        {{ sync_rows() if whole }}
        {{ gather("dq", "k", head, "near") }}
    }
    {{ store("dq", head, "one", queries, "p.scale") }}
    {% else %}
    {{ zeros("sum", value) }}
    // Two invocations share a row's statistics, and each has half of its sum.
    let mine = lane >> 1u;
    let side = lane & 1u;
    var largest = NEVER;
    var total = 0.0;
    {% if whole %}
    {{ load_eights("tile", "q", "row0", 64, head) if units else load("tile", "q", "row0", 64, fours_of.head, "0u") }}
    {% endif %}
    {% if units %}
    workgroupBarrier();
    {% for d in range(head // 16) %}
    {{ load_row("kept", d, head // 8 + 1) }}
    {% endfor %}
    {% endif %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ columns("k", "v") }}
        {{ between() }}
        {{ products("s", "q", "k", head, "near", whole) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        s{{ r }}[{{ c }}] = score(s{{ r }}[{{ c }}], row0 + y * 4u + {{ r }}u, col0 + x * 4u + {{ c }}u);
        {% endfor %}
        {{ scores[0] }}[(y * 4u + {{ r }}u) * {{ scores[1] }}u + x] = s{{ r }};
        {% endfor %}
        {{ sync_rows() }}
        var high = NEVER;
        for (var i = 0u; i < 4u; i++) {
            let s = {{ scores[0] }}[mine * {{ scores[1] }}u + side * 4u + i];
            high = m_max(high, m_max(m_max(s.x, s.y), m_max(s.z, s.w)));
        }
        parts[lane] = high;
        {{ sync_rows() }}
        high = m_max(m_max(high, parts[lane ^ 1u]), largest);
        let rescale = m_exp(largest - high);
        largest = high;
        total *= rescale;
        for (var i = 0u; i < 4u; i++) {
            let s = {{ scores[0] }}[mine * {{ scores[1] }}u + side * 4u + i];
            var kept: vec4<f32>;
            {% for e in range(4) %}
            let w{{ e }} = select(m_exp(s[{{ e }}] - high), 0.0, s[{{ e }}] == NEVER);
            total += w{{ e }};
            kept[{{ e }}] = w{{ e }} * keep(row0 + mine, col0 + side * 16u + i * 4u + {{ e }}u);
            {% endfor %}
            put_weights(mine, side * 4u + i, kept);
        }
        if side == 0u { factors[mine] = rescale; }
        {{ sync_rows() }}
        {% for r in range(4) %}
        let factor{{ r }} = factors[y * 4u + {{ r }}u];
        {% for c in range((value + 31) // 32) %}
        sum_{{ r }}_{{ c }} *= factor{{ r }};
        {% endfor %}
        {% endfor %}
        {{ gather("sum", "v", value, "far") }}
    }
    parts[lane] = total;
    workgroupBarrier();
    total = parts[mine * 2u] + parts[mine * 2u + 1u];
    // A query that attends to no key gets zeros.
    let seen = !(total == 0.0);
    if side == 0u {
        factors[mine] = select(0.0, 1.0 / total, seen);
        if row0 + mine < {{ queries }} {
            lse_put(at_head * {{ queries }} + row0 + mine, select(0.0, largest + m_log(total), seen));
        }
    }
    workgroupBarrier();
    {% for r in range(4) %}
    let last_factor{{ r }} = factors[y * 4u + {{ r }}u];
    {% for c in range((value + 31) // 32) %}
    sum_{{ r }}_{{ c }} *= last_factor{{ r }};
    {% endfor %}
    {% endfor %}
    {{ store("sum", value, "one", queries, "1.0") }}
    {% endif %}
    {% endif %}
}
