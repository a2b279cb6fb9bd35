{#-
Attention of f32 rows on GPUs: the passes, bindings and definitions of `attention`, for rows of whole aligned quads.

An invocation has a larger part of a tile than in `attention`, so that it loads less from workgroup memory for each
product. The invocations that share a row are among the same 32. A workgroup of 128 invocations keeps its rows in
workgroup memory, and iterates over tiles of columns. The next tile is read into registers during the last products of
a tile.

exchanged: columns whose weights are in workgroup memory at a time
resident: workgroups for which a GPU has enough workgroup memory
subgroups: subgroups have 32 invocations, which exchange values without the rest of the workgroup
unroll: steps of the second products that are written out
skip_hidden: 32 invocations leave out the products of columns that no row of theirs attends to
-#}
{%- import "types" as t -%}
{% set cooperative = false %}
{% set aligned_quads = true %}
{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% include "attention_common" %}

// CUDA compiles for this many workgroups on a multiprocessor.
const RESIDENT_WORKGROUPS = {{ resident }}u;
{#- Invocations that share a row, and columns of a tile. core/src/ops/attention/kernels.rs has both numbers. -#}
{%- set lanes = 8 -%}
{%- set columns = 64 -%}
{#- Rows of an invocation and of the workgroup. -#}
{%- set row_count = 4 -%}
{%- set rows = 128 // lanes * row_count -%}
{#- Rows of 32 invocations, and the distance between two rows of one invocation. -#}
{%- set part_rows = rows // 4 -%}
{%- set row_step = 32 // lanes -%}
{%- set col_count = columns // lanes -%}
{%- set col_quads = col_count // 4 -%}
{%- set head_quads = head // 4 -%}
{%- set value_quads = value // 4 -%}
{#- Quads of a row of results that an invocation has. -#}
{%- set head_blocks = (head_quads + lanes - 1) // lanes -%}
{%- set value_blocks = (value_quads + lanes - 1) // lanes -%}
{#- Distance between columns of weights: eight invocations that write quads access different banks. -#}
{%- set weight_stride = rows // 4 + 2 -%}
{%- set keep_mask = " & false" if mask else "" -%}

// Quads of the rows and columns: quad i of every line, with one more for other banks. Indices in two dimensions let
// compilers compute addresses outside of loops.
var<workgroup> head_rows: array<array<vec4<f32>, {{ rows + 1 }}>, {{ head_quads }}>;
{% if pass != "forward" %}
var<workgroup> value_rows: array<array<vec4<f32>, {{ rows + 1 }}>, {{ value_quads }}>;
{% endif %}
var<workgroup> head_cols: array<array<vec4<f32>, {{ columns + 1 }}>, {{ lanes * head_blocks }}>;
var<workgroup> value_cols: array<array<vec4<f32>, {{ columns + 1 }}>, {{ lanes * value_blocks }}>;
// For each column, the weights of four rows in a quad.
var<workgroup> weights: array<array<vec4<f32>, {{ weight_stride }}>, {{ exchanged }}>;
{% if pass == "forward" %}
{% if not subgroups %}
// For each invocation of a row, its part of a maximum or of a sum.
var<workgroup> parts: array<array<vec4<f32>, {{ weight_stride }}>, {{ lanes }}>;
{% endif %}
{% elif pass == "queries" %}
// Log-sum-exps of the rows, then sums of g · out, ordered like weights.
var<workgroup> row_stats: array<vec4<f32>, {{ rows // 2 }}>;
{% else %}
// Log-sum-exps of the columns, then sums of g · out.
var<workgroup> column_stats: array<f32, {{ 2 * columns }}>;
{% endif %}

// The maximum may lose NaN, which the weights and their sum keep.
fn max_of_quads(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> { return max(a, b); }
fn sum_of_quads(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> { return a + b; }
fn exp_of_quad(x: vec4<f32>) -> vec4<f32> { return vec4<f32>(m_exp(x.x), m_exp(x.y), m_exp(x.z), m_exp(x.w)); }

{#- Barrier between accesses of invocations that share rows. -#}
{%- macro barrier_of_rows() -%}
    {{ "subgroupBarrier();" if subgroups else "workgroupBarrier();" }}
{%- endmacro -%}

{#- Row r of an invocation in the workgroup, and column c in a tile. -#}
{%- macro row_at(r) -%}(own_row + {{ r * row_step }}u){%- endmacro -%}
{%- macro column_at(c) -%}(x + {{ c * lanes }}u){%- endmacro -%}
{#- The query and the key of an element. -#}
{%- macro query_and_key(r, c) -%}
    {{ "col0 + " ~ column_at(c) ~ ", row0 + " ~ row_at(r) if pass == "keys"
        else "row0 + " ~ row_at(r) ~ ", col0 + " ~ column_at(c) }}
{%- endmacro -%}

{#- Loads the rows of `name`, which stay in workgroup memory. -#}
{% macro load_rows(into, name, quads) %}
    for (var at = thread; at < {{ rows * quads }}u; at += 128u) {
        {{ into }}[at % {{ quads }}u][at / {{ quads }}u] =
            {{ name }}_row_quad(row0 + at / {{ quads }}u, at % {{ quads }}u * 4u);
    }
{% endmacro %}

{#- Reads a tile of columns of two operands from column `from` on into registers. `declare` is "var" for the first
tile. -#}
{% macro prefetch_tile(first, second, from, declare) %}
    {% for into, name, quads in [("head_next", first, head_quads), ("value_next", second, value_quads)] %}
    {% for i in range((columns * quads + 127) // 128) %}
    {{ declare }} {{ into }}{{ i }} = {{ name }}_row_quad({{ from }} + (thread + {{ 128 * i }}u) / {{ quads }}u,
        (thread + {{ 128 * i }}u) % {{ quads }}u * 4u);
    {% endfor %}
    {% endfor %}
    {% if pass == "keys" %}
    {% set column = from ~ " + thread % " ~ columns ~ "u" %}
    {% set line = "head_index * " ~ queries ~ " + min(" ~ column ~ ", " ~ queries ~ " - 1u)" %}
    {{ declare }} lse_next = stats_at({{ line }});
    {{ declare }} delta_next = stats_at(p.extents.x * p.extents.y * {{ queries }} + {{ line }});
    {% endif %}
{% endmacro %}

{#- Writes the tile in registers to workgroup memory, after all accesses to the previous one. -#}
{% macro write_tile() %}
    workgroupBarrier();
    {% for name, quads in [("head", head_quads), ("value", value_quads)] %}
    {% for i in range((columns * quads + 127) // 128) %}
    {% set at = "(thread + " ~ 128 * i ~ "u)" %}
    {% if 128 * (i + 1) > columns * quads %}if {{ at }} < {{ columns * quads }}u { {% endif %}
    {{ name }}_cols[{{ at }} % {{ quads }}u][{{ at }} / {{ quads }}u] = {{ name }}_next{{ i }};
    {% if 128 * (i + 1) > columns * quads %} } {% endif %}
    {% endfor %}
    {% endfor %}
    {% if pass == "keys" %}
    if thread < {{ columns }}u {
        column_stats[thread] = lse_next;
        column_stats[thread + {{ columns }}u] = delta_next;
    }
    {% endif %}
    workgroupBarrier();
{% endmacro %}

{#- Declares `is_hidden`, if no row of these 32 invocations attends to a column of the tile, and `all`, if all their
rows attend to all columns: those at most `before` below and `after` above the row. `count` and `other` are the
numbers of rows and columns. -#}
{% macro compare_with_window(before, after, count, other) %}
    let first_row = row0 + part_row;
    let all = (first_row + {{ part_rows - 1 }}u < {{ count }}) & (col0 + {{ columns - 1 }}u < {{ other }})
        & (col0 + {{ before }} >= first_row + {{ part_rows - 1 }}u)
        & (col0 + {{ columns - 1 }}u <= first_row + {{ after }}){{ keep_mask }};
    {% if skip_hidden %}
    let is_hidden = (col0 + {{ columns - 1 }}u + {{ before }} < first_row)
        | (first_row + {{ part_rows - 1 }}u + {{ after }} < col0) | (first_row >= {{ count }});
    {% endif %}
{% endmacro %}

{#- `target`{r}_{c}[e] is the product of row r and column 4 c + e of an invocation. -#}
{% macro multiply_tiles(target, rows_of, cols_of, quads) %}
    {% for r in range(row_count) %}
    {% for c in range(col_quads) %}
    var {{ target }}{{ r }}_{{ c }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
    {% if skip_hidden %}if !is_hidden { {% endif %}
    {% set steps = 2 if unroll > 1 and quads % 2 == 0 else 1 %}
    for (var i = 0u; i < {{ quads }}u; i += {{ steps }}u) {
        {% for u in range(steps) %}
        {% for c in range(col_count) %}
        let b{{ u }}_{{ c }} = {{ cols_of }}[i + {{ u }}u][{{ column_at(c) }}];
        {% endfor %}
        {% for r in range(row_count) %}
        let a{{ u }}_{{ r }} = {{ rows_of }}[i + {{ u }}u][{{ row_at(r) }}];
        {% for e in ["x", "y", "z", "w"] %}
        {% for c in range(col_quads) %}
        {{ target }}{{ r }}_{{ c }} = fma(vec4<f32>(a{{ u }}_{{ r }}.{{ e }}),
            vec4<f32>({% for j in range(4) %}b{{ u }}_{{ 4 * c + j }}.{{ e }}, {% endfor %}),
            {{ target }}{{ r }}_{{ c }});
        {% endfor %}
        {% endfor %}
        {% endfor %}
        {% endfor %}
    }
    {% if skip_hidden %} } {% endif %}
{% endmacro %}

{#- Turns products into scores. -#}
{% macro scale_scores() %}
    if all {
        {% for r in range(row_count) %}
        {% for c in range(col_quads) %}
        s{{ r }}_{{ c }} *= p.scale;
        {% endfor %}
        {% endfor %}
    } else {
        {% for r in range(row_count) %}
        {% for c in range(col_count) %}
        s{{ r }}_{{ c // 4 }}[{{ c % 4 }}] = score(s{{ r }}_{{ c // 4 }}[{{ c % 4 }}], {{ query_and_key(r, c) }});
        {% endfor %}
        {% endfor %}
    }
{% endmacro %}

{#- `target` += `w` times the columns in `cols_of`. `target`_{r}_{b} has quad x + lanes b of row r. `is_first`: no
product of this tile used `weights`. The caller's code is for the last part, when only sums are in registers. -#}
{% macro accumulate_product(target, w, cols_of, blocks, is_first) %}
    {% for part in range(0, columns, exchanged) %}
    {% if part > 0 or not is_first %}
    {{ barrier_of_rows() }}
    {% endif %}
    {% for c in range(exchanged // lanes) %}
    {% set col = part // lanes + c %}
    weights[{{ column_at(c) }}][own_quad] = vec4<f32>(
        {% for r in range(4) %}{{ w }}{{ r }}_{{ col // 4 }}[{{ col % 4 }}], {% endfor %});
    {% endfor %}
    {{ barrier_of_rows() }}
    {{ caller() if loop.last else "" }}
    {% if skip_hidden %}if !is_hidden { {% endif %}
    for (var j = 0u; j < {{ exchanged }}u; j += {{ unroll }}u) {
        {% for u in range(unroll) %}
        let w{{ u }} = weights[j + {{ u }}u][own_quad];
        {% for b in range(blocks) %}
        let b{{ u }}_{{ b }} = {{ cols_of }}[{{ column_at(b) }}][j + {{ part + u }}u];
        {% for r in range(row_count) %}
        {{ target }}_{{ r }}_{{ b }} =
            fma(vec4<f32>(w{{ u }}[{{ r }}]), b{{ u }}_{{ b }}, {{ target }}_{{ r }}_{{ b }});
        {% endfor %}
        {% endfor %}
        {% endfor %}
    }
    {% if skip_hidden %} } {% endif %}
    {% endfor %}
{% endmacro %}

{% macro zero_accumulators(target, blocks) %}
    {% for r in range(row_count) %}
    {% for b in range(blocks) %}
    var {{ target }}_{{ r }}_{{ b }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Writes `target` times `factor` of the rows below `count` to result `name`. -#}
{% macro store_rows(target, blocks, name, count, factor) %}
    {% for r in range(row_count) %}
    {% for b in range(blocks) %}
    store_{{ name }}({{ name }}_base, row0 + {{ row_at(r) }}, {{ count }}, {{ column_at(b) }} * 4u,
        {{ target }}_{{ r }}_{{ b }} * {{ factor }});
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Combines a quad of rows over the invocations that share the rows. -#}
{% macro reduce_rows(name, combine) %}
    {% if subgroups %}
    {% for bit in [2, 4, 8] %}
    {{ name }} = {{ combine }}({{ name }}, subgroupShuffleXor({{ name }}, {{ bit }}u));
    {% endfor %}
    {% else %}
    parts[x][own_quad] = {{ name }};
    workgroupBarrier();
    {{ name }} = parts[0][own_quad];
    for (var i = 1u; i < {{ lanes }}u; i++) {
        {{ name }} = {{ combine }}({{ name }}, parts[i][own_quad]);
    }
    {% endif %}
{% endmacro %}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% include "attention_rows" %}

    // Pairs of invocations have equal columns, and pairs of these equal rows: loads of a subgroup are few.
    let x = (thread >> 1u) & 7u;
    let y = (thread & 1u) + ((thread >> 3u) & 2u);
    // The first row of 32 invocations; the first row of this one, and its quad of rows in `weights`.
    let part_row = thread / 32u * {{ part_rows }}u;
    let own_row = part_row + y;
    let own_quad = thread / 32u * {{ part_rows // 4 }}u + y;
    {% if pass == "keys" %}
    // The queries that attend to some key of these.
    let last = min(row0 + {{ rows - 1 }}u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / {{ columns }}u * {{ columns }}u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zero_accumulators("dk", head_blocks) }}
    {{ zero_accumulators("dv", value_blocks) }}
    let group_size = p.extents.y / p.extents.z;
    select_head(batch, head * group_size);
    {{ load_rows("head_rows", "k", head_quads) }}
    {{ load_rows("value_rows", "v", value_quads) }}
    for (var member = 0u; member < group_size; member++) {
        select_head(batch, head * group_size + member);
        {{ prefetch_tile("q", "g", "begin", "var") }}
        for (var col0 = begin; col0 < end; col0 += {{ columns }}u) {
            {{ write_tile() }}
            {{ compare_with_window("p.window.z", "p.window.y", keys, queries) }}
            {{ multiply_tiles("s", "head_rows", "head_cols", head_quads) }}
            {{ multiply_tiles("dw", "value_rows", "value_cols", value_quads) }}
            {{ scale_scores() }}
            {% for c in range(col_count) %}
            let lse{{ c }} = column_stats[{{ column_at(c) }}];
            let delta{{ c }} = column_stats[{{ column_at(c) }} + {{ columns }}u];
            {% for r in range(row_count) %}
            {% set at = r ~ "_" ~ (c // 4) ~ "[" ~ c % 4 ~ "]" %}
            let w{{ r }}_{{ c }} = m_exp(s{{ at }} - lse{{ c }});
            {% if dropout %}
            let keep{{ r }}_{{ c }} = dropout_factor({{ query_and_key(r, c) }});
            s{{ at }} = w{{ r }}_{{ c }} * keep{{ r }}_{{ c }};
            dw{{ at }} = w{{ r }}_{{ c }} * (dw{{ at }} * keep{{ r }}_{{ c }} - delta{{ c }});
            {% else %}
            s{{ at }} = w{{ r }}_{{ c }};
            dw{{ at }} = w{{ r }}_{{ c }} * (dw{{ at }} - delta{{ c }});
            {% endif %}
            {% endfor %}
            {% endfor %}
            {% call accumulate_product("dv", "s", "value_cols", value_blocks, true) %}{% endcall %}
            {% call accumulate_product("dk", "dw", "head_cols", head_blocks, false) %}
            {{ prefetch_tile("q", "g", "col0 + " ~ columns ~ "u", "") }}
            {% endcall %}
        }
    }
    {{ store_rows("dk", head_blocks, "out", keys, "p.scale") }}
    {{ store_rows("dv", value_blocks, "out_v", keys, "1.0") }}
    {% else %}
    // The keys that some query of these attends to.
    let last = min(row0 + {{ rows - 1 }}u, {{ queries }} - 1u);
    let begin = (max(row0, p.window.y) - p.window.y) / {{ columns }}u * {{ columns }}u;
    let end = min(last + p.window.z + 1u, {{ keys }});
    select_head(batch, head);
    {{ load_rows("head_rows", "q", head_quads) }}
    {% if pass == "queries" %}
    {{ load_rows("value_rows", "g", value_quads) }}
    if x == 0u {
        var lse: vec4<f32>;
        var delta: vec4<f32>;
        {% for r in range(4) %}
        let line{{ r }} = head_index * {{ queries }} + min(row0 + {{ row_at(r) }}, {{ queries }} - 1u);
        lse[{{ r }}] = stats_at(line{{ r }});
        delta[{{ r }}] = stats_at(p.extents.x * p.extents.y * {{ queries }} + line{{ r }});
        {% endfor %}
        row_stats[own_quad] = lse;
        row_stats[own_quad + {{ rows // 4 }}u] = delta;
    }
    {{ zero_accumulators("dq", head_blocks) }}
    {% else %}
    {{ zero_accumulators("sum", value_blocks) }}
    var running_max = vec4<f32>(LOWEST_SCORE);
    var total = vec4<f32>();
    {% endif %}
    {{ prefetch_tile("k", "v", "begin", "var") }}
    for (var col0 = begin; col0 < end; col0 += {{ columns }}u) {
        {{ write_tile() }}
        {{ compare_with_window("p.window.y", "p.window.z", queries, keys) }}
        {{ multiply_tiles("s", "head_rows", "head_cols", head_quads) }}
        {% if pass == "queries" %}
        {{ multiply_tiles("dw", "value_rows", "value_cols", value_quads) }}
        {{ scale_scores() }}
        let lse = row_stats[own_quad];
        let delta = row_stats[own_quad + {{ rows // 4 }}u];
        {% for r in range(row_count) %}
        {% for c in range(col_count) %}
        {% set at = r ~ "_" ~ (c // 4) ~ "[" ~ c % 4 ~ "]" %}
        {% set keep = " * dropout_factor(" ~ query_and_key(r, c) ~ ")" if dropout else "" %}
        dw{{ at }} = m_exp(s{{ at }} - lse[{{ r }}])
            * (dw{{ at }}{{ keep }} - delta[{{ r }}]);
        {% endfor %}
        {% endfor %}
        {% call accumulate_product("dq", "dw", "head_cols", head_blocks, true) %}
        {{ prefetch_tile("k", "v", "col0 + " ~ columns ~ "u", "") }}
        {% endcall %}
        {% else %}
        {{ scale_scores() }}
        var tile_max: vec4<f32>;
        {% for r in range(4) %}
        var quad{{ r }} = s{{ r }}_0;
        {% for c in range(1, col_quads) %}
        quad{{ r }} = max_of_quads(quad{{ r }}, s{{ r }}_{{ c }});
        {% endfor %}
        tile_max[{{ r }}] = max(max(quad{{ r }}.x, quad{{ r }}.y), max(quad{{ r }}.z, quad{{ r }}.w));
        {% endfor %}
        {{ reduce_rows("tile_max", "max_of_quads") }}
        tile_max = max_of_quads(tile_max, running_max);
        let rescale = exp_of_quad(running_max - tile_max);
        running_max = tile_max;
        total *= rescale;
        {% for r in range(4) %}
        {% for c in range(col_quads) %}
        s{{ r }}_{{ c }} = exp_of_quad(s{{ r }}_{{ c }} - vec4<f32>(tile_max[{{ r }}]));
        total[{{ r }}] += (s{{ r }}_{{ c }}.x + s{{ r }}_{{ c }}.y) + (s{{ r }}_{{ c }}.z + s{{ r }}_{{ c }}.w);
        {% endfor %}
        {% if dropout %}
        {% for c in range(col_count) %}
        s{{ r }}_{{ c // 4 }}[{{ c % 4 }}] *= dropout_factor({{ query_and_key(r, c) }});
        {% endfor %}
        {% endif %}
        {% for b in range(value_blocks) %}
        sum_{{ r }}_{{ b }} *= rescale[{{ r }}];
        {% endfor %}
        {% endfor %}
        {% call accumulate_product("sum", "s", "value_cols", value_blocks, true) %}
        {{ prefetch_tile("k", "v", "col0 + " ~ columns ~ "u", "") }}
        {% endcall %}
        {% endif %}
    }
    {% if pass == "queries" %}
    {{ store_rows("dq", head_blocks, "out", queries, "p.scale") }}
    {% else %}
    {{ reduce_rows("total", "sum_of_quads") }}
    {% for r in range(row_count) %}
    // A query that attends to no key gets zeros.
    let has_keys{{ r }} = !(total[{{ r }}] == 0.0);
    let factor{{ r }} = select(0.0, 1.0 / total[{{ r }}], has_keys{{ r }});
    if x == 0u && row0 + {{ row_at(r) }} < {{ queries }} {
        lse_put(head_index * {{ queries }} + row0 + {{ row_at(r) }},
            select(0.0, running_max[{{ r }}] + m_log(total[{{ r }}]), has_keys{{ r }}));
    }
    {% for b in range(value_blocks) %}
    sum_{{ r }}_{{ b }} *= factor{{ r }};
    {% endfor %}
    {% endfor %}
    {{ store_rows("sum", value_blocks, "out", queries, "1.0") }}
    {% endif %}
    {% endif %}
}
