{#-
Attention on matrix units, like FlashAttention-2: the passes, bindings and definitions of `attention`, for f16 and
bf16 with rows of whole aligned vectors of eight elements.

A workgroup has 64 rows of one head, `side` for each subgroup, and iterates over tiles of 32 columns. Matrices of the
rows and all sums stay in registers. WGSL has no access to elements of a matrix. Scores therefore pass through
workgroup memory, `side` columns at a time. Two invocations share a row there if `side` is 16, and one has a row if it
is 8. They turn scores into weights and write these in 16 bits to the same memory. Workgroup memory limits the number
of resident workgroups, so it is kept small.

side: of matrices: 16 with subgroups of 32 invocations, or 8 with subgroups of 8 · head, value: multiples of 16 ·
skip_hidden: a subgroup leaves out the tiles whose columns no row of its own attends to
See `cooperative` in `matmul_macros` for the types of matrices A and B. A difference of two accumulators
becomes their product by elements in `spirv.rs` of the wgpu backend: WGSL has no such product.
-#}
{%- import "types" as t -%}
enable wgpu_cooperative_matrix;
const OPERAND_BITS = {{ "0xbf16u" if dtype == "bf16" else "0xf16u" }};
// A backend computes a difference of accumulators as their product by elements, which WGSL lacks.
const DIFFERENCE_IS_PRODUCT = true;
{% set cooperative = true %}
{% set queries = "p.extents.w" %}
{% set keys = "p.window.x" %}
{% set rows = 64 %}
{% include "attention_common" %}

{%- set row_lanes = side // 8 -%}
{%- set lanes = side * row_lanes -%}
{%- set threads = 64 * row_lanes -%}
{%- set parts = 32 // side -%}
{%- set vectors_of_side = side // 8 -%}
{%- set matrix = "coop_mat" ~ side ~ "x" ~ side -%}
const LOG2_E = 1.442695;
const LN_2 = 0.6931472;
// Columns in 16 bits, eight elements a vector; a padding vector for each line.
var<workgroup> head_cols: array<vec4<f32>, {{ 32 * (head // 8 + 1) }}>;
var<workgroup> value_cols: array<vec4<f32>, {{ 32 * (value // 8 + 1) }}>;
// Of each row: at most 16 values in f32, with six vectors to the next row, or 32 values in 16 bits, with five. These
// strides let eight invocations access different banks of memory.
var<workgroup> values: array<vec4<f32>, 384>;
{% if pass == "forward" %}
// Factors of the rows' sums.
var<workgroup> factors: array<f32, 64>;
{% elif pass == "keys" %}
// Of the columns: log-sum-exps in base 2, then sums of g · out.
var<workgroup> column_stats: array<vec4<f32>, 16>;
{% endif %}

// Packs two values in 16 bits, rounded to nearest.
fn pack_pair(a: f32, b: f32) -> f32 {
    {% if dtype == "f16" %}
    return bitcast<f32>(pack2x16float(vec2<f32>(a, b)));
    {% else %}
    return bitcast<f32>(out_pair_bf16(a, b));
    {% endif %}
}
// Packs two weights, which are not negative. Ties round up, and the bits of a NaN are above those of infinity.
fn pack_weights(a: f32, b: f32) -> f32 {
    {% if dtype == "f16" %}
    return pack_pair(a, b);
    {% else %}
    let bits = min(bitcast<vec2<u32>>(vec2<f32>(a, b)) + 0x8000u, vec2<u32>(0x7fc00000u));
    return bitcast<f32>((bits.x >> 16u) | (bits.y & 0xffff0000u));
    {% endif %}
}

{#- Reads the rows of `name` from row0 on into matrices A in registers, 32 elements of a row at a time. -#}
{% macro load_rows(target, name, depth) %}
{% for part in range(0, depth, 32) %}
    {% set vectors = [depth - part, 32] | min // 8 %}
    workgroupBarrier();
    for (var at = thread; at < {{ 64 * vectors }}u; at += {{ threads }}u) {
        values[at / {{ vectors }}u * 5u + at % {{ vectors }}u] =
            {{ name }}_row_vector(row0 + at / {{ vectors }}u, {{ part }}u + at % {{ vectors }}u * 8u);
    }
    workgroupBarrier();
    {% for d in range(vectors // vectors_of_side) %}
    let {{ target }}_rows{{ part // side + d }} =
        coopLoadT<{{ matrix }}<f32, A>>(&values[subgroup_row * 5u + {{ vectors_of_side * d }}u], 5u);
    {% endfor %}
{% endfor %}
{% endmacro %}

{% macro zero_accumulators(target, depth) %}
    {% for j in range(depth // side) %}
    var {{ target }}_sum{{ j }} = {{ matrix }}<f32, C>();
    {% endfor %}
{% endmacro %}

{#- Vector i that an invocation moves, of `count` of a tile. The last ones may move one vector twice. -#}
{% macro vector_index(i, count) -%}
    {{ "min(thread + " ~ threads * i ~ "u, " ~ (count - 1) ~ "u)" if threads * (i + 1) > count
        else "(thread + " ~ threads * i ~ "u)" }}
{%- endmacro %}

{#- Reads a tile of columns of two operands from column `from` on into registers, while the previous tile is in use.
`declare` is "var" for the first tile. -#}
{% macro prefetch_tile(first, second, from, declare) %}
    {% for into, name, depth in [("head_cols", first, head), ("value_cols", second, value)] %}
    {% set vectors = depth // 8 %}
    {% for i in range((32 * vectors + threads - 1) // threads) %}
    {{ declare }} {{ into }}_next{{ i }} =
        {{ name }}_row_vector({{ from }} + {{ vector_index(i, 32 * vectors) }} / {{ vectors }}u,
            {{ vector_index(i, 32 * vectors) }} % {{ vectors }}u * 8u);
    {% endfor %}
    {% endfor %}
    {% if pass == "keys" %}
    {% set line = "head_index * " ~ queries ~ " + min(" ~ from ~ " + (thread & 31u), " ~ queries ~ " - 1u)" %}
    {{ declare }} lse_next = stats_at({{ line }}) * LOG2_E;
    {{ declare }} delta_next = stats_at(p.extents.x * p.extents.y * {{ queries }} + {{ line }});
    {% endif %}
{% endmacro %}

{#- Writes the fetched tile to workgroup memory. -#}
{% macro write_tile() %}
    workgroupBarrier();
    {% for into, depth in [("head_cols", head), ("value_cols", value)] %}
    {% set vectors = depth // 8 %}
    {% for i in range((32 * vectors + threads - 1) // threads) %}
    {{ into }}[{{ vector_index(i, 32 * vectors) }} / {{ vectors }}u * {{ vectors + 1 }}u
        + {{ vector_index(i, 32 * vectors) }} % {{ vectors }}u] = {{ into }}_next{{ i }};
    {% endfor %}
    {% endfor %}
    {% if pass == "keys" %}
    if thread < 32u {
        column_stats[thread >> 2u][thread & 3u] = lse_next;
        column_stats[8u + (thread >> 2u)][thread & 3u] = delta_next;
    }
    {% endif %}
    workgroupBarrier();
{% endmacro %}

{#- Products of the rows with the columns in `lines`: quad j of part c has columns side c + 8 half + 4 (j ^ half) on.
The halves read their quads in different orders, so that they access different banks. -#}
{% macro multiply_tiles(target, rows_of, depth, lines) %}
    {% set line = depth // 8 + 1 %}
    {% for c in range(parts) %}
    var {{ target }}_product{{ c }} = {{ matrix }}<f32, C>();
    {% endfor %}
    {% for d in range(depth // side) %}
    {% for c in range(parts) %}
    let {{ target }}_column{{ d }}_{{ c }} =
        coopLoad<{{ matrix }}<f32, B>>(&{{ lines }}[{{ side * c * line + vectors_of_side * d }}], {{ line }}u);
    {{ target }}_product{{ c }} =
        coopMultiplyAdd({{ rows_of }}_rows{{ d }}, {{ target }}_column{{ d }}_{{ c }}, {{ target }}_product{{ c }});
    {% endfor %}
    {% endfor %}
    {% for c in range(parts) %}
    coopStoreT({{ target }}_product{{ c }}, &values[subgroup_row * 6u], 6u);
    subgroupBarrier();
    var {{ target }}{{ c }}_0 = values[quad_at + half];
    var {{ target }}{{ c }}_1 = values[quad_at + 1u - half];
    subgroupBarrier();
    {% endfor %}
{% endmacro %}

{#- The sums += `weights`, an invocation's part of a row, times the columns in `lines`. -#}
{% macro accumulate_product(target, depth, weights, pack, lines) %}
    {% set line = depth // 8 + 1 %}
    {% for c in range(parts) %}
    {% for j in range(2) %}
    let {{ target }}_packed{{ c }}_{{ j }} =
        vec2<f32>({{ pack }}({{ weights }}{{ c }}_{{ j }}.x, {{ weights }}{{ c }}_{{ j }}.y),
            {{ pack }}({{ weights }}{{ c }}_{{ j }}.z, {{ weights }}{{ c }}_{{ j }}.w));
    {% endfor %}
    values[weight_at + {{ vectors_of_side * c }}u] =
        select(vec4<f32>({{ target }}_packed{{ c }}_0, {{ target }}_packed{{ c }}_1),
            vec4<f32>({{ target }}_packed{{ c }}_1, {{ target }}_packed{{ c }}_0), half == 1u);
    {% endfor %}
    subgroupBarrier();
    {% for k in range(parts) %}
    let {{ target }}_weights{{ k }} =
        coopLoadT<{{ matrix }}<f32, A>>(&values[subgroup_row * 6u + {{ vectors_of_side * k }}u], 5u);
    {% for j in range(depth // side) %}
    let {{ target }}_line{{ j }}_{{ k }} =
        coopLoadT<{{ matrix }}<f32, B>>(&{{ lines }}[{{ side * k * line + vectors_of_side * j }}], {{ line }}u);
    {{ target }}_sum{{ j }} =
        coopMultiplyAdd({{ target }}_weights{{ k }}, {{ target }}_line{{ j }}_{{ k }}, {{ target }}_sum{{ j }});
    {% endfor %}
    {% endfor %}
    subgroupBarrier();
{% endmacro %}

{#- Begins and ends the products of a tile. With `skip_hidden`, a loop of one turn encloses them: the subgroup leaves it
at once if all its rows are past the last of `count`, or if each column is more than `before` below the rows or more
than `after` above them. -#}
{% macro begin_visible(before, after, count) %}
    {% if skip_hidden %}
    let first_row = row0 + subgroup_row;
    let is_hidden = (col0 + 31u + {{ before }} < first_row) | (first_row + {{ side - 1 }}u + {{ after }} < col0)
        | (first_row >= {{ count }});
    loop {
        if is_hidden { break; }
    {% endif %}
{% endmacro %}
{% macro end_visible() %}
    {% if skip_hidden %}
        break;
    }
    {% endif %}
{% endmacro %}

{#- The query and the key of element e of quad j of part c. -#}
{% macro query_and_key(c, j, e) -%}
    {% set column =
        "col0 + half * 8u + " ~ (side * c + e) ~ "u + " ~ ("half" if j == 0 else "(1u - half)") ~ " * 4u" -%}
    {{ column ~ ", row" if pass == "keys" else "row, " ~ column }}
{%- endmacro %}

{#- Turns products into scores in base 2. `all`: no pair of these rows and columns is masked. -#}
{% macro scale_scores() %}
    if all {
        {% for c in range(parts) %}
        {% for j in range(2) %}
        s{{ c }}_{{ j }} *= scale;
        {% endfor %}
        {% endfor %}
    } else {
        {% for c in range(parts) %}
        {% for j in range(2) %}
        {% for e in range(4) %}
        s{{ c }}_{{ j }}[{{ e }}] = score(s{{ c }}_{{ j }}[{{ e }}], {{ query_and_key(c, j, e) }}) * LOG2_E;
        {% endfor %}
        {% endfor %}
        {% endfor %}
    }
{% endmacro %}

{#- Draws the dropout factors of an invocation's part of a row: quads kept{c}_{j}. Eight neighbouring keys share a
Philox block. If the columns are keys, an invocation draws its own blocks. If the rows are keys, the subgroup draws each
block once, and passes it on through workgroup memory. -#}
{% macro draw_dropout() %}
    {% if pass == "keys" %}
    // The rows of a subgroup have one block of a query, or two.
    let lane = thread % {{ lanes }}u;
    {% for c in range(parts) %}
    values[subgroup_row * 6u + {{ lanes * c }}u + lane] = bitcast<vec4<f32>>(
        dropout_block(col0 + {{ side * c }}u + lane % {{ side }}u, row0 + subgroup_row + lane / {{ side }}u * 8u));
    {% endfor %}
    subgroupBarrier();
    let blocks_at = subgroup_row * 6u + lane / {{ 8 * row_lanes }}u * {{ side }}u + half * 8u;
    let word = (row >> 1u) & 3u;
    {% for c in range(parts) %}
    {% for j in range(2) %}
    let kept{{ c }}_{{ j }} = vec4<f32>({% for e in range(4) %}
        m_dropout_select(
            bitcast<u32>(
                values[blocks_at + {{ lanes * c + e }}u + {{ "half" if j == 0 else "(1u - half)" }} * 4u][word]),
            row, p.threshold, p.dropout_scale), {% endfor %});
    {% endfor %}
    {% endfor %}
    subgroupBarrier();
    {% else %}
    {% for c in range(parts) %}
    let block{{ c }} = dropout_block(row, col0 + half * 8u + {{ side * c }}u);
    {% for j in range(2) %}
    let kept{{ c }}_{{ j }} = m_dropout_quad(
        select(block{{ c }}.{{ "xy, " if j == 0 else "zw, " }}block{{ c }}.{{ "zw" if j == 0 else "xy" }}, half == 1u),
        p.threshold, p.dropout_scale);
    {% endfor %}
    {% endfor %}
    {% endif %}
{% endmacro %}

{#- Turns products `s` into weights, and the gradients `w` of the weights into those of the scores. -#}
{% macro compute_weights() %}
    {{ scale_scores() }}
    {% if dropout %}
    {{ draw_dropout() }}
    {% endif %}
    {% for c in range(parts) %}
    {% for j in range(2) %}
    {% if pass == "keys" %}
    let quad{{ c }}_{{ j }} = {{ side // 4 * c }}u + half * 2u + {{ "half" if j == 0 else "1u - half" }};
    let lse{{ c }}_{{ j }} = column_stats[quad{{ c }}_{{ j }}];
    let delta{{ c }}_{{ j }} = column_stats[8u + quad{{ c }}_{{ j }}];
    {% else %}
    let lse{{ c }}_{{ j }} = lse;
    let delta{{ c }}_{{ j }} = delta;
    {% endif %}
    {% if mask and mask != "bool" %}
    // Near the lowest float, a score may be rounded to more than its row's log-sum-exp.
    let weight{{ c }}_{{ j }} = exp2(min(s{{ c }}_{{ j }} - lse{{ c }}_{{ j }}, vec4<f32>()));
    {% else %}
    let weight{{ c }}_{{ j }} = exp2(s{{ c }}_{{ j }} - lse{{ c }}_{{ j }});
    {% endif %}
    {% if dropout %}
    s{{ c }}_{{ j }} = weight{{ c }}_{{ j }} * kept{{ c }}_{{ j }};
    w{{ c }}_{{ j }} = weight{{ c }}_{{ j }} * (w{{ c }}_{{ j }} * kept{{ c }}_{{ j }} - delta{{ c }}_{{ j }});
    {% else %}
    s{{ c }}_{{ j }} = weight{{ c }}_{{ j }};
    w{{ c }}_{{ j }} = weight{{ c }}_{{ j }} * (w{{ c }}_{{ j }} - delta{{ c }}_{{ j }});
    {% endif %}
    {% endfor %}
    {% endfor %}
{% endmacro %}

{#- Writes the sums of the rows times `factor` to result `name`. -#}
{% macro store_rows(target, depth, name, count, factor) %}
    {% for j in range(depth // side) %}
    subgroupBarrier();
    coopStoreT({{ target }}_sum{{ j }}, &values[subgroup_row * 6u], 6u);
    subgroupBarrier();
    store_{{ name }}({{ name }}_base, row, {{ count }}, {{ side * j }}u + half * 8u, values[quad_at] * {{ factor }});
    store_{{ name }}({{ name }}_base, row, {{ count }}, {{ side * j + 4 }}u + half * 8u,
        values[quad_at + 1u] * {{ factor }});
    {% endfor %}
{% endmacro %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% include "attention_rows" %}

    // The first row of the subgroup, and the row of the invocation in the workgroup. If two invocations share a row,
    // each has a half of 16 columns.
    let subgroup_row = thread / {{ lanes }}u * {{ side }}u;
    let own_row = thread / {{ row_lanes }}u;
    let row = row0 + own_row;
    let half = {{ "thread & 1u" if row_lanes == 2 else "0u" }};
    let quad_at = own_row * 6u + half * 2u;
    let weight_at = subgroup_row + own_row * 5u + half;
    let scale = p.scale * LOG2_E;
    {% if pass == "keys" %}
    // The queries that attend to some key of these.
    let last = min(row0 + 63u, {{ keys }} - 1u);
    let begin = (max(row0, p.window.z) - p.window.z) / 32u * 32u;
    let end = min(last + p.window.y + 1u, {{ queries }});
    {{ zero_accumulators("dk", head) }}
    {{ zero_accumulators("dv", value) }}
    let group_size = p.extents.y / p.extents.z;
    select_head(batch, head * group_size);
    {{ load_rows("k", "k", head) }}
    {{ load_rows("v", "v", value) }}
    for (var member = 0u; member < group_size; member++) {
        select_head(batch, head * group_size + member);
        {{ prefetch_tile("q", "g", "begin", "var") }}
        for (var col0 = begin; col0 < end; col0 += 32u) {
            {{ write_tile() }}
            {{ prefetch_tile("q", "g", "col0 + 32u", "") }}
            {{ begin_visible("p.window.z", "p.window.y", keys) }}
            {{ multiply_tiles("s", "k", head, "head_cols") }}
            {{ multiply_tiles("w", "v", value, "value_cols") }}
            // All these queries attend to all these keys.
            let all = (col0 + 31u < {{ queries }}) & (row0 + 63u < {{ keys }}) & (row0 + p.window.y >= col0 + 31u)
                & (row0 + 63u <= col0 + p.window.z){{ " & false" if mask }};
            {{ compute_weights() }}
            {{ accumulate_product("dv", value, "s", "pack_weights", "value_cols") }}
            {{ accumulate_product("dk", head, "w", "pack_pair", "head_cols") }}
            {{ end_visible() }}
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
    {{ load_rows("q", "q", head) }}
    {% if pass == "queries" %}
    {{ load_rows("g", "g", value) }}
    {{ zero_accumulators("dq", head) }}
    let line = head_index * {{ queries }} + min(row, {{ queries }} - 1u);
    let lse = stats_at(line) * LOG2_E;
    let delta = stats_at(p.extents.x * p.extents.y * {{ queries }} + line);
    {% else %}
    {{ zero_accumulators("out", value) }}
    var running_max = MASKED_SCORE * LOG2_E;
    var total = 0.0;
    {% endif %}
    {{ prefetch_tile("k", "v", "begin", "var") }}
    for (var col0 = begin; col0 < end; col0 += 32u) {
        {{ write_tile() }}
        {{ prefetch_tile("k", "v", "col0 + 32u", "") }}
        {{ begin_visible("p.window.y", "p.window.z", queries) }}
        // All these queries attend to all these keys.
        let all = (col0 + 31u < {{ keys }}) & (row0 + 63u < {{ queries }}) & (col0 + p.window.y >= row0 + 63u)
            & (col0 + 31u <= row0 + p.window.z){{ " & false" if mask }};
        {{ multiply_tiles("s", "q", head, "head_cols") }}
        {% if pass == "queries" %}
        {{ multiply_tiles("w", "g", value, "value_cols") }}
        {{ compute_weights() }}
        {{ accumulate_product("dq", head, "w", "pack_pair", "head_cols") }}
        {% else %}
        {{ scale_scores() }}
        var quad_max = max(s0_0, s0_1);
        {% for c in range(1, parts) %}
        quad_max = max(quad_max, max(s{{ c }}_0, s{{ c }}_1));
        {% endfor %}
        var row_max = max(max(quad_max.x, quad_max.y), max(quad_max.z, quad_max.w));
        {% if row_lanes == 2 %}
        row_max = max(row_max, subgroupShuffleXor(row_max, 1u));
        {% endif %}
        row_max = max(running_max, row_max);
        // Weights of a row without any key stay zero.
        let base = select(row_max, 0.0, row_max < MASKED_SCORE);
        let rescale = exp2(running_max - row_max);
        running_max = row_max;
        {% for c in range(parts) %}
        {% for j in range(2) %}
        s{{ c }}_{{ j }} = exp2(s{{ c }}_{{ j }} - base);
        {% endfor %}
        {% endfor %}
        let totals = {% for c in range(parts) %}(s{{ c }}_0 + s{{ c }}_1){{ " + " if not loop.last }}{% endfor %};
        total = total * rescale + ((totals.x + totals.y) + (totals.z + totals.w));
        {% if dropout %}
        {{ draw_dropout() }}
        {% for c in range(parts) %}
        {% for j in range(2) %}
        s{{ c }}_{{ j }} *= kept{{ c }}_{{ j }};
        {% endfor %}
        {% endfor %}
        {% endif %}
        if half == 0u { factors[own_row] = rescale; }
        subgroupBarrier();
        let row_factors = coopLoad<{{ matrix }}<f32, C>>(&factors[subgroup_row], 0u);
        {% for j in range(value // side) %}
        out_sum{{ j }} = out_sum{{ j }} - row_factors;
        {% endfor %}
        {{ accumulate_product("out", value, "s", "pack_weights", "value_cols") }}
        {% endif %}
        {{ end_visible() }}
    }
    {% if pass == "queries" %}
    {{ store_rows("dq", head, "out", queries, "p.scale") }}
    {% else %}
    {% if row_lanes == 2 %}
    total += subgroupShuffleXor(total, 1u);
    {% endif %}
    // A query that attends to no key gets zeros.
    let has_keys = !(total == 0.0);
    let factor = select(0.0, 1.0 / total, has_keys);
    if half == 0u && row < {{ queries }} {
        lse_put(head_index * {{ queries }} + row, select(0.0, (running_max + log2(total)) * LN_2, has_keys));
    }
    {{ store_rows("out", value, "out", queries, "factor") }}
    {% endif %}
    {% endif %}
}
