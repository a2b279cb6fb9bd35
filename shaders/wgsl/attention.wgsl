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
The gradients of k and v share one buffer.
-#}
{%- import "types" as t -%}
{% set cooperative = false %}
{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% include "attention_common" %}

{% set fours_of = namespace(head=(head + 3) // 4, value=(value + 3) // 4) %}
{% set wide = namespace(head=(head + 31) // 32, value=(value + 31) // 32) %}
{% if whole %}
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
// Weights, with nine quads for each row.
var<workgroup> weights: array<vec4<f32>, 576>;
fn store_weights(row: u32, quad: u32, w: vec4<f32>) { weights[row * 9u + quad] = w; }
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
        {{ into }}[four * {{ count + 1 }}u + (line & 3u) * {{ count // 4 }}u + (line >> 2u)] =
            {{ name }}_four({{ first }} + line, {{ d }} + four * 4u);
    }
{% endmacro %}

{#- Barrier between writes and reads of whole columns in memory; partial loads have their own barriers. -#}
{% macro between() %}
    {% if whole %}
    workgroupBarrier();
    {% endif %}
{% endmacro %}

{#- Loads whole columns of a tile after the previous tile: of the first product, and of the second one's
operand. -#}
{% macro columns(first, second) %}
    {% if whole %}
    workgroupBarrier();
    {{ load("near", first, "col0", 32, fours_of.head, "0u") }}
    {{ load("far", second, "col0", 32, fours_of.value, "0u") }}
    {% endif %}
{% endmacro %}

{#- Product of rows of `a` from row0 on and rows of `b` from col0 on. `target`[r][c] is for row 4 y + r
and column 4 x + c. Whole columns are in `columns`; whole rows too, if `kept`. -#}
{% macro multiply_tiles(target, a, b, depth, columns, kept) %}
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
{% endmacro %}

{#- `target` += weights times rows of `b` from col0 on, in `columns` if whole; quads x + 8 c of rows 4 y +
r. -#}
{% macro accumulate_product(target, b, depth, columns) %}
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
        @builtin(local_invocation_index) lane: u32) {
    {% include "attention_rows" %}

    let x = lane & 7u;
    let y = lane >> 3u;
    {% if pass == "keys" %}
    // The queries that attend to some key of these.
    let last = min(row0 + 63u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / 32u * 32u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zero_accumulators("dk", head) }}
    {{ zero_accumulators("dv", value) }}
    let sharing = p.extents.y / p.extents.z;
    for (var member = 0u; member < sharing; member++) {
        select_head(batch, head * sharing + member);
        for (var col0 = begin; col0 < end; col0 += 32u) {
            {{ columns("q", "g") }}
            {{ multiply_tiles("s", "k", "q", head, "near", false) }}
            {{ between() }}
            {{ multiply_tiles("dw", "v", "g", value, "far" if whole else "near", false) }}
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
            let keep{{ r }}_{{ c }} = dropout_factor(query{{ c }}, key{{ r }});
            dropped{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * keep{{ r }}_{{ c }};
            dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }} * (dw{{ r }}[{{ c }}] * keep{{ r }}_{{ c }} - delta{{ c }});
            {% endfor %}
            store_weights(y * 4u + {{ r }}u, x, dropped{{ r }});
            {% endfor %}
            {{ between() }}
            {{ accumulate_product("dv", "g", value, "far") }}
            {{ between() }}
            {% for r in range(4) %}
            store_weights(y * 4u + {{ r }}u, x, dw{{ r }});
            {% endfor %}
            {{ between() }}
            {{ accumulate_product("dk", "q", head, "near") }}
        }
    }
    {{ store_rows("dk", head, "one", keys, "p.scale") }}
    {{ store_rows("dv", value, "two", keys, "1.0") }}
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
    let line{{ r }} = at_head * {{ queries }} + min(query{{ r }}, {{ queries }} - 1u);
    let lse{{ r }} = stats_at(line{{ r }});
    let delta{{ r }} = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ r }});
    {% endfor %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ columns("k", "v") }}
        {{ multiply_tiles("s", "q", "k", head, "near", false) }}
        {{ between() }}
        {{ multiply_tiles("dw", "g", "v", value, "far" if whole else "near", false) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        let key{{ r }}_{{ c }} = col0 + x * 4u + {{ c }}u;
        let score{{ r }}_{{ c }} = score(s{{ r }}[{{ c }}], query{{ r }}, key{{ r }}_{{ c }});
        let w{{ r }}_{{ c }} = select(m_exp(score{{ r }}_{{ c }} - lse{{ r }}), 0.0, score{{ r }}_{{ c }} == NEVER);
        dw{{ r }}[{{ c }}] = w{{ r }}_{{ c }}
            * (dw{{ r }}[{{ c }}] * dropout_factor(query{{ r }}, key{{ r }}_{{ c }}) - delta{{ r }});
        {% endfor %}
        store_weights(y * 4u + {{ r }}u, x, dw{{ r }});
        {% endfor %}
        {{ between() }}
        {{ accumulate_product("dq", "k", head, "near") }}
    }
    {{ store_rows("dq", head, "one", queries, "p.scale") }}
    {% else %}
    {{ zero_accumulators("sum", value) }}
    // Two invocations share a row's statistics, and each has half of its sum.
    let mine = lane >> 1u;
    let side = lane & 1u;
    var largest = NEVER;
    var total = 0.0;
    {% if whole %}
    {{ load("tile", "q", "row0", 64, fours_of.head, "0u") }}
    {% endif %}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ columns("k", "v") }}
        {{ between() }}
        {{ multiply_tiles("s", "q", "k", head, "near", whole) }}
        {% for r in range(4) %}
        {% for c in range(4) %}
        s{{ r }}[{{ c }}] = score(s{{ r }}[{{ c }}], row0 + y * 4u + {{ r }}u, col0 + x * 4u + {{ c }}u);
        {% endfor %}
        weights[(y * 4u + {{ r }}u) * 9u + x] = s{{ r }};
        {% endfor %}
        workgroupBarrier();
        var high = NEVER;
        for (var i = 0u; i < 4u; i++) {
            let s = weights[mine * 9u + side * 4u + i];
            high = m_max(high, m_max(m_max(s.x, s.y), m_max(s.z, s.w)));
        }
        parts[lane] = high;
        workgroupBarrier();
        high = m_max(m_max(high, parts[lane ^ 1u]), largest);
        let rescale = m_exp(largest - high);
        largest = high;
        total *= rescale;
        for (var i = 0u; i < 4u; i++) {
            let s = weights[mine * 9u + side * 4u + i];
            var kept: vec4<f32>;
            {% for e in range(4) %}
            let w{{ e }} = select(m_exp(s[{{ e }}] - high), 0.0, s[{{ e }}] == NEVER);
            total += w{{ e }};
            kept[{{ e }}] = w{{ e }} * dropout_factor(row0 + mine, col0 + side * 16u + i * 4u + {{ e }}u);
            {% endfor %}
            store_weights(mine, side * 4u + i, kept);
        }
        if side == 0u { factors[mine] = rescale; }
        workgroupBarrier();
        {% for r in range(4) %}
        let factor{{ r }} = factors[y * 4u + {{ r }}u];
        {% for c in range((value + 31) // 32) %}
        sum_{{ r }}_{{ c }} *= factor{{ r }};
        {% endfor %}
        {% endfor %}
        {{ accumulate_product("sum", "v", value, "far") }}
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
    {{ store_rows("sum", value, "one", queries, "1.0") }}
    {% endif %}
    {% endif %}
}
