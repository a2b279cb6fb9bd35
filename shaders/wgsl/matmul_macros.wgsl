{#-
Variants of c[z][row][col] = Σ_k a[z][row][k] · b[z][k][col], as macros that use these definitions of a
kernel:

- `Params` with m, n, k, batch (matrices), chunk (the part of a sum for one workgroup), splits (number of
  parts)
- `a_base(z)`, `b_base(z)`: location of a matrix as a u32, for the next functions
- `a_value(base, row, k)`, `b_value(base, k, col)`: elements; arguments are always inside the matrices
- with `a_vectors` (`b_vectors`): `a_vector(base, row, k)`: the neighbours in memory from an element on, in one
  aligned access; `tiled` wants four elements, `cooperative` eight in a vec4<u32>
- `store(k_split, z, row, col, v)`, and for tiles `store4` with a vec4, whose col is a multiple of four; part of
  v may lie outside the matrix

k_edges: the last step of a sum may be partial
a_order, b_order: `k` if neighbours in memory are along the sum (K-major), else `line`; defines how a tile is
  loaded
-#}

{#- gelu_tanh of an f32 expression, for a result of type `dtype`. Needs the math library's `activation`. -#}
{%- macro gelu_tanh(v, dtype) -%}
{{ "m_approx_gelu_tanh(" ~ v ~ ")" if dtype in ["f16", "bf16"] else "m_gelu_tanh(" ~ v ~ ")" }}
{%- endmacro -%}

{#- The tile of this workgroup: row0, col0, the matrix z, the part of the sum, and the matrices' bases. -#}
{%- macro locate(rows, cols) -%}
    let tiles_n = (p.n + {{ cols - 1 }}u) / {{ cols }}u;
    let tiles_m = (p.m + {{ rows - 1 }}u) / {{ rows }}u;
    // Without calls and variables, so that validation sees that control flow is uniform.
    let index = group.y * groups.x + group.x;
    let tile = index % (tiles_n * tiles_m);
    let outer_index = index / (tiles_n * tiles_m);
    // Eight rows of tiles at a time: workgroups that run together share operands in the cache.
    let band = tile / (8u * tiles_n);
    let in_band = tile % (8u * tiles_n);
    let band_rows = min(8u, tiles_m - 8u * band);
    let row0 = (8u * band + in_band % band_rows) * {{ rows }}u;
    let col0 = (in_band / band_rows) * {{ cols }}u;
    let z = outer_index % p.batch;
    let k_split = outer_index / p.batch;
    // A folded grid may have more groups than there is work.
    if k_split >= p.splits { return; }
    let a0 = a_base(z);
    let b0 = b_base(z);
    let start = k_split * p.chunk;
    let end = min(start + p.chunk, p.k);
{%- endmacro -%}

{#- Runs a tile's sum over [start, end), `depth` steps at a time. With `prefetch`, `load` reads the next step's part
of the tile into registers while this one is computed, and `save` writes them to workgroup memory; without, `save`
does both, and its code occurs once. A second buffer in workgroup memory would save a barrier, but was slower. -#}
{%- macro pipelined(depth, prefetch, load, save, compute) %}
    {% if prefetch %}
    var k0 = start;
    {{ load }}
    {{ save }}
    workgroupBarrier();
    while k0 < end {
        k0 += {{ depth }}u;
        let more = k0 < end;
        if more {
            {{ load }}
        }
        {{ compute }}
        workgroupBarrier();
        if more {
            {{ save }}
        }
        workgroupBarrier();
    }
    {% else %}
    for (var k0 = start; k0 < end; k0 += {{ depth }}u) {
        {{ save }}
        workgroupBarrier();
        {{ compute }}
        workgroupBarrier();
    }
    {% endif %}
{% endmacro -%}

{%- macro guarded_value(side) %}
// Returns zero outside of the matrix, even if the element at its edge is NaN.
{% if side == "a" %}
fn a_or_zero(base: u32, row: u32, k: u32, end: u32) -> f32 {
    return select(0.0, a_value(base, min(row, p.m - 1u), min(k, end - 1u)), (row < p.m) & (k < end));
}
{% else %}
fn b_or_zero(base: u32, k: u32, col: u32, end: u32) -> f32 {
    return select(0.0, b_value(base, min(k, end - 1u), min(col, p.n - 1u)), (k < end) & (col < p.n));
}
{% endif %}
{% endmacro -%}

{#- A loaded vector, or zero past the end of the sum, even if the elements there are NaN. Lines outside of the
matrix need no zeros, since nothing is stored for them. -#}
{%- macro loaded(side, guarded) -%}
fn {{ side }}_loaded(v: vec4<f32>, k: u32, end: u32) -> vec4<f32> {
    {% if guarded %}
    return select(vec4<f32>(), v, k < end);
    {% else %}
    return v;
    {% endif %}
}
{% endmacro -%}

{#-
Tiled: thread_rows x thread_cols invocations compute thread_rows·rows x thread_cols·4·cols elements of c, with sums
in f32. thread_cols is 256 / thread_rows.
unroll: steps of the sum that are written out
-#}
{%- macro tiled(thread_rows, rows, cols, depth, a_order, b_order, a_vectors, b_vectors, k_edges, unroll) %}
{%- set thread_cols = 256 // thread_rows -%}
{%- set row_quads = rows // 4 -%}
{%- set quads_a = thread_rows * row_quads -%}
{%- set quads_b = thread_cols * cols -%}
{%- set components = [".x", ".y", ".z", ".w"] -%}
{%- set loads_a = (depth * quads_a + 255) // 256 -%}
{%- set loads_b = (depth * quads_b + 255) // 256 -%}
// Rows along the sum; one padding vector for each row keeps a tile's columns in different banks.
var<workgroup> tile_a: array<vec4<f32>, {{ depth * (quads_a + 1) }}>;
var<workgroup> tile_b: array<vec4<f32>, {{ depth * (quads_b + 1) }}>;
{% if not a_vectors %}{{ guarded_value("a") }}{% endif %}
{% if not b_vectors %}{{ guarded_value("b") }}{% endif %}
// Four neighbours in memory. A vector from outside of the matrix becomes zero when it is saved: the wait for it
// comes after the computation of a tile.
fn a_load(base: u32, row: u32, k: u32, end: u32) -> vec4<f32> {
    {% if a_vectors %}
    return a_vector(base, min(row, p.m - 1u), min(k, end - 1u));
    {% else %}
    return vec4<f32>({% for i in range(4) %}
        a_or_zero(base, row{{ " + " ~ i ~ "u" if a_order != "k" }}, k{{ " + " ~ i ~ "u" if a_order == "k" }}, end)
    {{ ", " if not loop.last }}{% endfor %});
    {% endif %}
}
fn b_load(base: u32, k: u32, col: u32, end: u32) -> vec4<f32> {
    {% if b_vectors %}
    return b_vector(base, min(k, end - 1u), min(col, p.n - 1u));
    {% else %}
    return vec4<f32>({% for i in range(4) %}
        b_or_zero(base, k{{ " + " ~ i ~ "u" if b_order == "k" }}, col{{ " + " ~ i ~ "u" if b_order != "k" }}, end)
    {{ ", " if not loop.last }}{% endfor %});
    {% endif %}
}
{{ loaded("a", a_vectors and k_edges) }}
{{ loaded("b", b_vectors and k_edges) }}

{%- set prefetch = a_vectors and b_vectors -%}
{#- Position of load q of a tile, the vector with index `at`: `k` along the sum and `line` across, of its first
element. -#}
{% macro load_position(side, q, lines, order, at) -%}
    let {{ side }}_at{{ q }} = {{ at }};
    {% if order == "k" %}
    let {{ side }}_k{{ q }} = {{ side }}_at{{ q }} % {{ depth // 4 }}u * 4u;
    let {{ side }}_line{{ q }} = {{ side }}_at{{ q }} / {{ depth // 4 }}u;
    {% else %}
    let {{ side }}_k{{ q }} = {{ side }}_at{{ q }} / {{ lines }}u;
    let {{ side }}_line{{ q }} = {{ side }}_at{{ q }} % {{ lines }}u * 4u;
    {% endif %}
{%- endmacro %}
{% macro save(side, q, lines, order) -%}
{% set last = prefetch and 256 * (q + 1) > depth * lines -%}
{% if last %}if {{ side }}_at{{ q }} < {{ depth * lines }}u {{ "{" }}{% endif %}
            {{ side }}_next{{ q }} = {{ side }}_loaded({{ side }}_next{{ q }}, k0 + {{ side }}_k{{ q }}, end);
            {% if order == "k" %}
            {% for i in range(4) %}
            tile_{{ side }}[({{ side }}_k{{ q }} + {{ i }}u) * {{ lines + 1 }}u + {{ side }}_line{{ q }} / 4u][
                {{ side }}_line{{ q }} % 4u] = {{ side }}_next{{ q }}{{ components[i] }};
            {% endfor %}
            {% else %}
            tile_{{ side }}[{{ side }}_k{{ q }} * {{ lines + 1 }}u + {{ side }}_line{{ q }} / 4u] =
                {{ side }}_next{{ q }};
            {% endif %}
            {% if last %}{{ "}" }}{% endif %}
{%- endmacro %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {{ locate(thread_rows * rows, 4 * quads_b) }}
    let x = thread % {{ thread_cols }}u;
    let y = thread / {{ thread_cols }}u;
    {% for s in range(row_quads) %}
    {% for i in range(4) %}
    {% for v in range(cols) %}
    var sum_{{ s }}_{{ i }}_{{ v }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
    {% endfor %}
    {% set load %}
    {% for q in range(loads_a) %}
            a_next{{ q }} = a_load(a0, row0 + a_line{{ q }}, k0 + a_k{{ q }}, end);
    {% endfor %}
    {% for q in range(loads_b) %}
            b_next{{ q }} = b_load(b0, k0 + b_k{{ q }}, col0 + b_line{{ q }}, end);
    {% endfor %}
    {% endset %}
    {% if prefetch %}
    {% for q in range(loads_a) %}
    {{ load_position("a", q, quads_a, a_order, "thread + " ~ 256 * q ~ "u") }}
    var a_next{{ q }} = vec4<f32>();
    {% endfor %}
    {% for q in range(loads_b) %}
    {{ load_position("b", q, quads_b, b_order, "thread + " ~ 256 * q ~ "u") }}
    var b_next{{ q }} = vec4<f32>();
    {% endfor %}
    {% set store_tile %}
    {% for q in range(loads_a) %}
            {{ save("a", q, quads_a, a_order) }}
    {% endfor %}
    {% for q in range(loads_b) %}
            {{ save("b", q, quads_b, b_order) }}
    {% endfor %}
    {% endset %}
    {% else %}
    {% set store_tile %}
        for (var at = thread; at < {{ depth * quads_a }}u; at += 256u) {
            {{ load_position("a", 0, quads_a, a_order, "at") }}
            var a_next0 = a_load(a0, row0 + a_line0, k0 + a_k0, end);
            {{ save("a", 0, quads_a, a_order) }}
        }
        for (var at = thread; at < {{ depth * quads_b }}u; at += 256u) {
            {{ load_position("b", 0, quads_b, b_order, "at") }}
            var b_next0 = b_load(b0, k0 + b_k0, col0 + b_line0, end);
            {{ save("b", 0, quads_b, b_order) }}
        }
    {% endset %}
    {% endif %}
    {% set compute %}
        for (var k = 0u; k < {{ depth }}u; k += {{ unroll }}u) {
            {% for u in range(unroll) %}
            {% for v in range(cols) %}
            let b_{{ u }}_{{ v }} = tile_b[(k + {{ u }}u) * {{ quads_b + 1 }}u + x + {{ v * thread_cols }}u];
            {% endfor %}
            {% for s in range(row_quads) %}
            let a_{{ u }}_{{ s }} = tile_a[(k + {{ u }}u) * {{ quads_a + 1 }}u + y + {{ s * thread_rows }}u];
            {% for part in components %}
            {% set i = loop.index0 %}
            {% for v in range(cols) %}
            sum_{{ s }}_{{ i }}_{{ v }} = fma(vec4<f32>(a_{{ u }}_{{ s }}{{ part }}), b_{{ u }}_{{ v }},
                sum_{{ s }}_{{ i }}_{{ v }});
            {% endfor %}
            {% endfor %}
            {% endfor %}
            {% endfor %}
        }
    {% endset %}
    {{ pipelined(depth, prefetch, load, store_tile, compute) }}
    {% for s in range(row_quads) %}
    {% for i in range(4) %}
    {% for v in range(cols) %}
    store_inside(k_split, z, row0 + (y + {{ s * thread_rows }}u) * 4u + {{ i }}u,
        col0 + (x + {{ v * thread_cols }}u) * 4u, sum_{{ s }}_{{ i }}_{{ v }});
    {% endfor %}
    {% endfor %}
    {% endfor %}
}
{{ store_inside() }}
{% endmacro -%}

{%- macro store_inside() %}
fn store_inside(k_split: u32, z: u32, row: u32, col: u32, v: vec4<f32>) {
    if row < p.m && col < p.n { store4(k_split, z, row, col, v); }
}
{% endmacro -%}

{#-
Cooperative: matrix units multiply 16-bit matrices of `side` x `side` elements with sums in f32. Subgroups of `lanes`
invocations compute `sub_rows` x `sub_cols` elements each, and a workgroup `rows` x `cols`.
side: 16 or 8 · lanes: a power of two of at least 8 · sub_rows: a multiple of `side` · sub_cols: a multiple of 32
dtype: `f16` or `bf16`, whose bits are in vec4s of f32: WGSL takes the type of a matrix from the memory that it
  is loaded from. A backend with matrix units reads OPERAND_BITS and replaces the type of matrices A and B.
-#}
{%- macro cooperative(dtype, side, lanes, rows, cols, depth, sub_rows, sub_cols, a_order, b_order, a_vectors, b_vectors,
    k_edges) %}
{%- set across = cols // sub_cols -%}
{%- set subgroups = rows // sub_rows * across -%}
{%- set threads = lanes * subgroups -%}
{%- set matrix = "coop_mat" ~ side ~ "x" ~ side -%}
{#- Vectors of eight elements along a side of a matrix. -#}
{%- set vectors = side // 8 -%}
{%- set pitch_a = (depth if a_order == "k" else rows) // 8 + 1 -%}
{%- set pitch_b = (depth if b_order == "k" else cols) // 8 + 1 -%}
{%- set loads_a = rows * depth // 8 // threads -%}
{%- set loads_b = cols * depth // 8 // threads -%}
{%- set vectors_a = (rows if a_order == "k" else depth) * pitch_a -%}
{#- Results pass through the memory of tile a, `side` rows and 32 columns of each subgroup at a time. -#}
{%- set pitch_c = 9 -%}
{%- set vectors_c = subgroups * side * pitch_c -%}
const OPERAND_BITS = {{ "0xbf16u" if dtype == "bf16" else "0xf16u" }};
// One padding vector for each line keeps neighbouring lines in different banks.
var<workgroup> tile_a: array<vec4<f32>, {{ [vectors_a, vectors_c] | max }}>;
var<workgroup> tile_b: array<vec4<f32>, {{ (cols if b_order == "k" else depth) * pitch_b }}>;
{% if not a_vectors %}{{ guarded_value("a") }}{% endif %}
{% if not b_vectors %}{{ guarded_value("b") }}{% endif %}
// Eight neighbours in memory.
fn a_load(base: u32, row: u32, k: u32, end: u32) -> vec4<f32> {
    {% if a_vectors %}
    return bitcast<vec4<f32>>(a_vector(base, min(row, p.m - 1u), min(k, end - 1u)));
    {% else %}
    {% set r, q = ("u", "") if a_order != "k" else ("", "u") %}
    return bitcast<vec4<f32>>(vec4<u32>({% for i in range(4) %}a_pair_{{ dtype }}(
        a_or_zero(base, row{{ " + " ~ 2 * i ~ r if r }}, k{{ " + " ~ 2 * i ~ q if q }}, end),
        a_or_zero(base, row{{ " + " ~ (2 * i + 1) ~ r if r }}, k{{ " + " ~ (2 * i + 1) ~ q if q }}, end))
    {{ ", " if not loop.last }}{% endfor %}));
    {% endif %}
}
fn b_load(base: u32, k: u32, col: u32, end: u32) -> vec4<f32> {
    {% if b_vectors %}
    return bitcast<vec4<f32>>(b_vector(base, min(k, end - 1u), min(col, p.n - 1u)));
    {% else %}
    {% set r, q = ("u", "") if b_order == "k" else ("", "u") %}
    return bitcast<vec4<f32>>(vec4<u32>({% for i in range(4) %}b_pair_{{ dtype }}(
        b_or_zero(base, k{{ " + " ~ 2 * i ~ r if r }}, col{{ " + " ~ 2 * i ~ q if q }}, end),
        b_or_zero(base, k{{ " + " ~ (2 * i + 1) ~ r if r }}, col{{ " + " ~ (2 * i + 1) ~ q if q }}, end))
    {{ ", " if not loop.last }}{% endfor %}));
    {% endif %}
}
{{ loaded("a", a_vectors and k_edges) }}
{{ loaded("b", b_vectors and k_edges) }}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {{ locate(rows, cols) }}
    let subgroup = thread / {{ lanes }}u;
    let sub_row = subgroup / {{ across }}u * {{ sub_rows }}u;
    let sub_col = subgroup % {{ across }}u * {{ sub_cols }}u;
    {% for i in range(sub_rows // side) %}
    {% for j in range(sub_cols // side) %}
    var sum_{{ i }}_{{ j }} = {{ matrix }}<f32, C>();
    {% endfor %}
    {% endfor %}
    {% set prefetch = a_vectors and b_vectors %}
    {% macro load_position(side, q, lines, order, at) -%}
    {% set vectors_per_line = (depth if order == "k" else lines) // 8 -%}
    let {{ side }}_vec{{ q }} = {{ at }} % {{ vectors_per_line }}u;
    let {{ side }}_line{{ q }} = {{ at }} / {{ vectors_per_line }}u;
    {%- endmacro %}
    {% macro load_a(q) -%}
    a_load(a0, row0 + {{ "a_line" ~ q if a_order == "k" else "8u * a_vec" ~ q }},
        k0 + {{ "8u * a_vec" ~ q if a_order == "k" else "a_line" ~ q }}, end)
    {%- endmacro %}
    {% macro load_b(q) -%}
    b_load(b0, k0 + {{ "8u * b_vec" ~ q if b_order == "k" else "b_line" ~ q }},
        col0 + {{ "b_line" ~ q if b_order == "k" else "8u * b_vec" ~ q }}, end)
    {%- endmacro %}
    {% macro save(side, q, pitch, order) -%}
    tile_{{ side }}[{{ side }}_line{{ q }} * {{ pitch }}u + {{ side }}_vec{{ q }}] =
        {{ side }}_loaded({{ side }}_next{{ q }},
            k0 + {{ "8u * " ~ side ~ "_vec" ~ q if order == "k" else side ~ "_line" ~ q }}, end);
    {%- endmacro %}
    {% if prefetch %}
    {% for q in range(loads_a) %}
    {{ load_position("a", q, rows, a_order, "(thread + " ~ threads * q ~ "u)") }}
    var a_next{{ q }} = vec4<f32>();
    {% endfor %}
    {% for q in range(loads_b) %}
    {{ load_position("b", q, cols, b_order, "(thread + " ~ threads * q ~ "u)") }}
    var b_next{{ q }} = vec4<f32>();
    {% endfor %}
    {% set load %}
    {% for q in range(loads_a) %}
            a_next{{ q }} = {{ load_a(q) }};
    {% endfor %}
    {% for q in range(loads_b) %}
            b_next{{ q }} = {{ load_b(q) }};
    {% endfor %}
    {% endset %}
    {% set store_tile %}
    {% for q in range(loads_a) %}
            {{ save("a", q, pitch_a, a_order) }}
    {% endfor %}
    {% for q in range(loads_b) %}
            {{ save("b", q, pitch_b, b_order) }}
    {% endfor %}
    {% endset %}
    {% else %}
    {% set load = "" %}
    {% set store_tile %}
        for (var at = thread; at < {{ rows * depth // 8 }}u; at += {{ threads }}u) {
            {{ load_position("a", 0, rows, a_order, "at") }}
            let a_next0 = {{ load_a(0) }};
            {{ save("a", 0, pitch_a, a_order) }}
        }
        for (var at = thread; at < {{ cols * depth // 8 }}u; at += {{ threads }}u) {
            {{ load_position("b", 0, cols, b_order, "at") }}
            let b_next0 = {{ load_b(0) }};
            {{ save("b", 0, pitch_b, b_order) }}
        }
    {% endset %}
    {% endif %}
    {% set compute %}
    {% for k in range(depth // side) %}
        {% for i in range(sub_rows // side) %}
        {% if a_order == "k" %}
        let a_{{ k }}_{{ i }} =
            coopLoadT<{{ matrix }}<f32, A>>(
                &tile_a[(sub_row + {{ side * i }}u) * {{ pitch_a }}u + {{ vectors * k }}u], {{ pitch_a }}u);
        {% else %}
        let a_{{ k }}_{{ i }} =
            coopLoad<{{ matrix }}<f32, A>>(
                &tile_a[{{ side * k * pitch_a + vectors * i }}u + sub_row / 8u], {{ pitch_a }}u);
        {% endif %}
        {% endfor %}
        {% for j in range(sub_cols // side) %}
        {% if b_order == "k" %}
        let b_{{ k }}_{{ j }} =
            coopLoad<{{ matrix }}<f32, B>>(
                &tile_b[(sub_col + {{ side * j }}u) * {{ pitch_b }}u + {{ vectors * k }}u], {{ pitch_b }}u);
        {% else %}
        let b_{{ k }}_{{ j }} =
            coopLoadT<{{ matrix }}<f32, B>>(
                &tile_b[{{ side * k * pitch_b + vectors * j }}u + sub_col / 8u], {{ pitch_b }}u);
        {% endif %}
        {% for i in range(sub_rows // side) %}
        sum_{{ i }}_{{ j }} = coopMultiplyAdd(a_{{ k }}_{{ i }}, b_{{ k }}_{{ j }}, sum_{{ i }}_{{ j }});
        {% endfor %}
        {% endfor %}
    {% endfor %}
    {% endset %}
    {{ pipelined(depth, prefetch, load, store_tile, compute) }}
    // The elements of a matrix belong to no known invocation, so that results go through workgroup memory.
    let base_c = subgroup * {{ side * pitch_c }}u;
    let lane = thread % {{ lanes }}u;
    let sub_row0 = row0 + sub_row + lane / 8u;
    let quad = lane % 8u;
    {% for i in range(sub_rows // side) %}
    {% for j in range(0, sub_cols // side, 32 // side) %}
    {% for part in range(32 // side) %}
    let at_{{ i }}_{{ j + part }} = base_c + {{ side // 4 * part }}u;
    coopStoreT(sum_{{ i }}_{{ j + part }}, &tile_a[at_{{ i }}_{{ j + part }}], {{ pitch_c }}u);
    {% endfor %}
    workgroupBarrier();
    {#- Rows of eight quads. -#}
    {% for line in range(0, side, lanes // 8) %}
    store_inside(k_split, z, sub_row0 + {{ side * i + line }}u, col0 + sub_col + {{ side * j }}u + 4u * quad,
        tile_a[base_c + (lane / 8u + {{ line }}u) * {{ pitch_c }}u + quad]);
    {% endfor %}
    workgroupBarrier();
    {% endfor %}
    {% endfor %}
}
{{ store_inside() }}
{% endmacro -%}

{#-
Simple: `threads_per_output` invocations (a power of two, at most 256) share the sum of one element, of type T.
order: `k` if neighbouring invocations read neighbours along the sum, else neighbouring elements of c (`line`)
-#}
{%- macro simple(T, threads_per_output, order) %}
{%- set outputs = 256 // threads_per_output -%}
{% if threads_per_output > 1 %}
var<workgroup> partial: array<{{ T }}, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    {% if order == "k" %}
    let part = thread % {{ threads_per_output }}u;
    let element = thread / {{ threads_per_output }}u;
    {% else %}
    let part = thread / {{ outputs }}u;
    let element = thread % {{ outputs }}u;
    {% endif %}
    let total = p.batch * p.m * p.n;
    let element_groups = (total + {{ outputs - 1 }}u) / {{ outputs }}u;
    let index = group_index(group, groups);
    let k_split = index / element_groups;
    let i = (index % element_groups) * {{ outputs }}u + element;
    let live = i < total && k_split < p.splits;
    let col = i % p.n;
    let row = (i / p.n) % p.m;
    let z = i / (p.n * p.m);
    var sum = {{ T }}(0);
    if live {
        let a0 = a_base(z);
        let b0 = b_base(z);
        let end = min((k_split + 1u) * p.chunk, p.k);
        // Adds sums of eight: the rounding error grows with the number of sequential additions.
        for (var block = k_split * p.chunk + part; block < end; block += {{ 8 * threads_per_output }}u) {
            var block_sum = {{ T }}(0);
            let block_end = min(end, block + {{ 8 * threads_per_output }}u);
            for (var k = block; k < block_end; k += {{ threads_per_output }}u) {
                {% if T in ["f32", "f64"] %}
                block_sum = fma(a_value(a0, row, k), b_value(b0, k, col), block_sum);
                {% else %}
                block_sum += a_value(a0, row, k) * b_value(b0, k, col);
                {% endif %}
            }
            sum += block_sum;
        }
    }
    {% if threads_per_output > 1 %}
    partial[thread] = sum;
    workgroupBarrier();
    for (var stride = {{ threads_per_output // 2 }}u; stride > 0u; stride = stride / 2u) {
        if part < stride { partial[thread] += partial[thread + stride * {{ 1 if order == "k" else outputs }}u]; }
        workgroupBarrier();
    }
    sum = partial[thread];
    {% endif %}
    if live && part == 0u { store(k_split, z, row, col, sum); }
}
{% endmacro -%}
