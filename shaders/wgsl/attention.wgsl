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
aligned_quads: the rows of operands are, too
whole: rows and columns are in workgroup memory at full length (the forward pass's rows permanently); else 16
  elements at a time
The gradients of k and v share one buffer.
-#}
{%- import "types" as t -%}
{% set cooperative = false %}
{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% set rows = 64 %}
{% include "attention_common" %}

{% set quads_of = namespace(head=(head + 3) // 4, value=(value + 3) // 4) %}
{% set blocks_of = namespace(head=(head + 31) // 32, value=(value + 31) // 32) %}
{% if whole %}
{% set longest = quads_of.head if pass == "forward" or head >= value else quads_of.value %}
// 64 rows, and 32 columns for the first and second product. Quads of a row are 65, or 33, apart.
var<workgroup> tile: array<vec4<f32>, {{ 65 * longest }}>;
var<workgroup> head_cols: array<vec4<f32>, {{ 33 * 8 * blocks_of.head }}>;
var<workgroup> value_cols: array<vec4<f32>, {{ 33 * 8 * blocks_of.value }}>;
{% else %}
// Part of 64 rows, or some whole columns; part of 32 columns.
var<workgroup> tile: array<vec4<f32>, 260>;
var<workgroup> head_cols: array<vec4<f32>, 132>;
{% endif %}
// Weights, with nine quads for each row.
var<workgroup> weights: array<vec4<f32>, 576>;
fn store_weights(row: u32, quad: u32, w: vec4<f32>) { weights[row * 9u + quad] = w; }
// Statistics of the rows.
{% if pass == "forward" %}
var<workgroup> parts: array<f32, 128>;
var<workgroup> factors: array<f32, 64>;
{% endif %}

{#- Loads `count` lines of `name`, `quads` of each from element `d` on, to `into`; a thread's lines are
`count / 4` apart. -#}
{% macro load(into, name, first, count, quads, d) %}
    for (var at = thread; at < {{ count * quads }}u; at += 128u) {
        let line = at / {{ quads }}u;
        let quad = at % {{ quads }}u;
        {{ into }}[quad * {{ count + 1 }}u + (line & 3u) * {{ count // 4 }}u + (line >> 2u)] =
            {{ name }}_row_quad({{ first }} + line, {{ d }} + quad * 4u);
    }
{% endmacro %}

{#- Barrier between writes and reads of whole columns in memory; partial loads have their own barriers. -#}
{% macro barrier_if_whole() %}
    {% if whole %}
    workgroupBarrier();
    {% endif %}
{% endmacro %}

{#- Loads whole columns of a tile after the previous tile: of the first product, and of the second one's
operand. -#}
{% macro load_columns(first, second) %}
    {% if whole %}
    workgroupBarrier();
    {{ load("head_cols", first, "col0", 32, quads_of.head, "0u") }}
    {{ load("value_cols", second, "col0", 32, quads_of.value, "0u") }}
    {% endif %}
{% endmacro %}

{#- Product of rows of `a` from row0 on and rows of `b` from col0 on. `target`[r][c] is for row 4 y + r
and column 4 x + c. Whole columns are in `tile_b`; whole rows too, if `kept`. -#}
{% macro multiply_tiles(target, a, b, depth, tile_b, kept) %}
    {% for r in range(4) %}
    var {{ target }}{{ r }} = vec4<f32>();
    {% endfor %}
    {% set quads = (depth + 3) // 4 if whole else 4 %}
    {% if not whole %}
    for (var d = 0u; d < {{ depth }}u; d += 16u) {
        {{ load(tile_b, b, "col0", 32, quads, "d") }}
    {% endif %}
    {% if not kept %}
        {{ load("tile", a, "row0", 64, quads, "d" if not whole else "0u") }}
        workgroupBarrier();
    {% endif %}
        for (var i = 0u; i < {{ quads }}u; i++) {
            {% for c in range(4) %}
            let b{{ c }} = {{ tile_b }}[i * 33u + {{ c * 8 }}u + x];
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
{% endmacro %}

{#- `target` += weights times rows of `b` from col0 on, in `tile_b` if whole; quads x + 8 c of rows 4 y +
r. -#}
{% macro accumulate_product(target, b, depth, tile_b) %}
{% set across = (depth + 31) // 32 %}
{% set lines = 32 if whole or across == 1 else 16 if across == 2 else 8 %}
    {% if not whole %}
    for (var line = 0u; line < 32u; line += {{ lines }}u) {
        for (var at = thread; at < {{ lines * across * 8 }}u; at += 128u) {
            tile[at] = {{ b }}_row_quad(col0 + line + at / {{ across * 8 }}u, at % {{ across * 8 }}u * 4u);
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
            let b{{ e }}_{{ c }} = {{ tile_b }}[(x + {{ c * 8 }}u) * 33u + {{ e * 8 }}u + i];
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
{% endmacro %}

{% macro zero_accumulators(target, depth) %}
    {% for r in range(4) %}
    {% for c in range((depth + 31) // 32) %}
    var {{ target }}_{{ r }}_{{ c }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Writes `target` · `factor` of the rows below `rows` to result `name`. -#}
{% macro store_rows(target, depth, name, rows, factor) %}
    {% for r in range(4) %}
    {% for c in range((depth + 31) // 32) %}
    store_{{ name }}({{ name }}_base, row0 + y * 4u + {{ r }}u, {{ rows }},
        (x + {{ 8 * c }}u) * 4u, {{ target }}_{{ r }}_{{ c }} * {{ factor }});
    {% endfor %}
    {% endfor %}
{% endmacro %}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% include "attention_rows" %}

    let x = thread & 7u;
    let y = thread >> 3u;
    {% if pass == "keys" %}
    // The queries that attend to some key of these.
    let last = min(row0 + 63u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / 32u * 32u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zero_accumulators("dk", head) }}
    {{ zero_accumulators("dv", value) }}
    let group_size = p.extents.y / p.extents.z;
    for (var member = 0u; member < group_size; member++) {
        select_head(batch, head * group_size + member);
        for (var col0 = begin; col0 < end; col0 += 32u) {
            {{ load_columns("q", "g") }}
            {{ multiply_tiles("s", "k", "q", head, "head_cols", false) }}
            {{ barrier_if_whole() }}
            {{ multiply_tiles("dw", "v", "g", value, "value_cols" if whole else "head_cols", false) }}
            {% for c in range(4) %}
            let query{{ c }} = col0 + x * 4u + {{ c }}u;
            let line{{ c }} = head_index * {{ queries }} + min(query{{ c }}, {{ queries }} - 1u);
            let lse{{ c }} = stats_at(line{{ c }});
            let delta{{ c }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ c }});
            {% endfor %}
            {% for r in range(4) %}
            let key{{ r }} = row0 + y * 4u + {{ r }}u;
            var dropped{{ r }}: vec4<f32>;
            {% for c in range(4) %}
            let score{{ r }}_{{ c }} = score(s{{ r }}[{{ c }}], query{{ c }}, key{{ r }});
            let w{{ r }}_{{ c }} =
                select(m_exp(score{{ r }}_{{ c }} - lse{{ c }}), 0.0, score{{ r }}_{{ c }} == MASKED_SCORE);
            let keep{{ r }}_{{ c }} = dropout_factor(query{{ c }}, key{{ r }});
            dropped{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * keep{{ r }}_{{ c }};
            dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * (dw{{ r }}[{{ c }}] * keep{{ r }}_{{ c }} - delta{{ c }});
            {% endfor %}
            store_weights(y * 4u + {{ r }}u, x, dropped{{ r }});
            {% endfor %}
            {{ barrier_if_whole() }}
            {{ accumulate_product("dv", "g", value, "value_cols") }}
            {{ barrier_if_whole() }}
            {% for r in range(4) %}
            store_weights(y * 4u + {{ r }}u, x, dw{{ r }});
            {% endfor %}
            {{ barrier_if_whole() }}
            {{ accumulate_product("dk", "q", head, "head_cols") }}
        }
    }
    {{ store_rows("dk", head, "out", keys, "p.scale") }}
    {{ store_rows("dv", value, "out_v", keys, "1.0") }}
    {% else %}
    // The keys that some query of these attends to.
    let last = min(row0 + 63u, {{ queries }} - 1u);
    let begin = (max(row0, p.window.y) - p.window.y) / 32u * 32u;
    let end = min(last + p.window.z + 1u, {{ keys }});
    select_head(batch, head);
    {% if pass == "queries" %}
    {{ zero_accumulators("dq", head) }}
    {% for r in range(4) %}
    let query{{ r }} = row0 + y * 4u + {{ r }}u;
    let line{{ r }} = head_index * {{ queries }} + min(query{{ r }}, {{ queries }} - 1u);
    let lse{{ r }} = stats_at(line{{ r }});
    let delta{{ r }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ r }});
    {% endfor %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ load_columns("k", "v") }}
        {{ multiply_tiles("s", "q", "k", head, "head_cols", false) }}
        {{ barrier_if_whole() }}
        {{ multiply_tiles("dw", "g", "v", value, "value_cols" if whole else "head_cols", false) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        let key{{ r }}_{{ c }} = col0 + x * 4u + {{ c }}u;
        let score{{ r }}_{{ c }} = score(s{{ r }}[{{ c }}], query{{ r }}, key{{ r }}_{{ c }});
        let w{{ r }}_{{ c }} =
            select(m_exp(score{{ r }}_{{ c }} - lse{{ r }}), 0.0, score{{ r }}_{{ c }} == MASKED_SCORE);
        dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }}
            * (dw{{ r }}[{{ c }}] * dropout_factor(query{{ r }}, key{{ r }}_{{ c }}) - delta{{ r }});
        {% endfor %}
        store_weights(y * 4u + {{ r }}u, x, dw{{ r }});
        {% endfor %}
        {{ barrier_if_whole() }}
        {{ accumulate_product("dq", "k", head, "head_cols") }}
    }
    {{ store_rows("dq", head, "out", queries, "p.scale") }}
    {% else %}
    {{ zero_accumulators("sum", value) }}
    // Two invocations share a row's statistics, and each has half of its sum.
    let stat_row = thread >> 1u;
    let half = thread & 1u;
    var running_max = MASKED_SCORE;
    var total = 0.0;
    {% if whole %}
    {{ load("tile", "q", "row0", 64, quads_of.head, "0u") }}
    {% endif %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ load_columns("k", "v") }}
        {{ barrier_if_whole() }}
        {{ multiply_tiles("s", "q", "k", head, "head_cols", whole) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        s{{ r }}[{{ c }}] = score(s{{ r }}[{{ c }}], row0 + y * 4u + {{ r }}u, col0 + x * 4u + {{ c }}u);
        {% endfor %}
        weights[(y * 4u + {{ r }}u) * 9u + x] = s{{ r }};
        {% endfor %}
        workgroupBarrier();
        var tile_max = MASKED_SCORE;
        for (var i = 0u; i < 4u; i++) {
            let s = weights[stat_row * 9u + half * 4u + i];
            tile_max = m_max(tile_max, m_max(m_max(s.x, s.y), m_max(s.z, s.w)));
        }
        parts[thread] = tile_max;
        workgroupBarrier();
        tile_max = m_max(m_max(tile_max, parts[thread ^ 1u]), running_max);
        let rescale = m_exp(running_max - tile_max);
        running_max = tile_max;
        total *= rescale;
        for (var i = 0u; i < 4u; i++) {
            let s = weights[stat_row * 9u + half * 4u + i];
            var kept: vec4<f32>;
            {% for e in range(4) %}
            let w{{ e }} = select(m_exp(s[{{ e }}] - tile_max), 0.0, s[{{ e }}] == MASKED_SCORE);
            total += w{{ e }};
            kept[{{ e }}] = w{{ e }} * dropout_factor(row0 + stat_row, col0 + half * 16u + i * 4u + {{ e }}u);
            {% endfor %}
            store_weights(stat_row, half * 4u + i, kept);
        }
        if half == 0u { factors[stat_row] = rescale; }
        workgroupBarrier();
        {% for r in range(4) %}
        let factor{{ r }} = factors[y * 4u + {{ r }}u];
        {% for c in range((value + 31) // 32) %}
        sum_{{ r }}_{{ c }} *= factor{{ r }};
        {% endfor %}
        {% endfor %}
        {{ accumulate_product("sum", "v", value, "value_cols") }}
    }
    parts[thread] = total;
    workgroupBarrier();
    total = parts[stat_row * 2u] + parts[stat_row * 2u + 1u];
    // A query that attends to no key gets zeros.
    let has_keys = !(total == 0.0);
    if half == 0u {
        factors[stat_row] = select(0.0, 1.0 / total, has_keys);
        if row0 + stat_row < {{ queries }} {
            lse_put(head_index * {{ queries }} + row0 + stat_row, select(0.0, running_max + m_log(total), has_keys));
        }
    }
    workgroupBarrier();
    {% for r in range(4) %}
    let last_factor{{ r }} = factors[y * 4u + {{ r }}u];
    {% for c in range((value + 31) // 32) %}
    sum_{{ r }}_{{ c }} *= last_factor{{ r }};
    {% endfor %}
    {% endfor %}
    {{ store_rows("sum", value, "out", queries, "1.0") }}
    {% endif %}
    {% endif %}
}
