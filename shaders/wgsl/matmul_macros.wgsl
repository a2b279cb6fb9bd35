{#-
Two variants of c[z][row][col] = Σ_k a[z][row][k] · b[z][k][col], as macros that use these definitions of a
kernel:

- `Params` with m, n, k, batch (matrices), chunk (the part of a sum for one workgroup), splits (number of
  parts)
- `a_base(z)`, `b_base(z)`: location of a matrix as a u32, for the next two
- `a_value(base, row, k)`, `b_value(base, k, col)`: elements; arguments are always inside the matrices
- `store(piece, z, row, col, v)`, and for tiles `store4` with a vec4, whose col is a multiple of four; part of
  v may lie outside the matrix
-#}

{#-
Tiled: `high` x 256/`high` invocations compute high·rows x 256/high·4·cols elements of c, with sums in f32.
a_order, b_order: `k` if neighbours in memory are along the sum (K-major), else `line`; defines how a tile is
  loaded
-#}
{%- macro tiled(high, rows, cols, depth, a_order, b_order) %}
{%- set wide = 256 // high -%}
{%- set width = 4 if rows >= 4 else rows -%}
{%- set sheets = rows // width -%}
{%- set A = "f32" if width == 1 else "vec" ~ width ~ "<f32>" -%}
{%- set parts = [""] if width == 1 else [".x", ".y", ".z", ".w"][:width] -%}
{%- set lines_a = high * sheets -%}
{%- set lines_b = wide * cols -%}
// Rows along the sum; one padding vector for each row keeps a tile's columns in different banks.
var<workgroup> tile_a: array<{{ A }}, {{ depth * (lines_a + 1) }}>;
var<workgroup> tile_b: array<vec4<f32>, {{ depth * (lines_b + 1) }}>;

// Returns zero outside of the matrix, even if the element at its edge is NaN.
fn a_or_zero(base: u32, row: u32, k: u32, end: u32) -> f32 {
    return select(0.0, a_value(base, min(row, p.m - 1u), min(k, end - 1u)), (row < p.m) & (k < end));
}
fn b_or_zero(base: u32, k: u32, col: u32, end: u32) -> f32 {
    return select(0.0, b_value(base, min(k, end - 1u), min(col, p.n - 1u)), (k < end) & (col < p.n));
}

{% macro place(at, lines, order) -%}
{% if order == "k" %}
let k = {{ at }} % {{ depth }}u;
            let line = {{ at }} / {{ depth }}u;
{%- else %}
let k = {{ at }} / {{ lines }}u;
            let line = {{ at }} % {{ lines }}u;
{%- endif %}
{%- endmacro %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let tiles_n = (p.n + {{ 4 * lines_b - 1 }}u) / {{ 4 * lines_b }}u;
    let tiles_m = (p.m + {{ high * rows - 1 }}u) / {{ high * rows }}u;
    var left = group_index(group, groups);
    let col0 = (left % tiles_n) * {{ 4 * lines_b }}u;
    left = left / tiles_n;
    let row0 = (left % tiles_m) * {{ high * rows }}u;
    left = left / tiles_m;
    let z = left % p.batch;
    let piece = left / p.batch;
    // A folded grid may have more groups than there is work.
    if piece >= p.splits { return; }
    let a0 = a_base(z);
    let b0 = b_base(z);
    let start = piece * p.chunk;
    let end = min(start + p.chunk, p.k);
    let x = lane % {{ wide }}u;
    let y = lane / {{ wide }}u;
    {% for s in range(sheets) %}
    {% for i in range(width) %}
    {% for v in range(cols) %}
    var sum_{{ s }}_{{ i }}_{{ v }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
    {% endfor %}
    for (var k0 = start; k0 < end; k0 += {{ depth }}u) {
        for (var at = lane; at < {{ depth * lines_a }}u; at += 256u) {
            {{ place("at", lines_a, a_order) }}
            let row = row0 + line * {{ width }}u;
            tile_a[k * {{ lines_a + 1 }}u + line] = {{ A }}({% for i in range(width) %}a_or_zero(a0, row + {{ i }}u, k0 + k, end){{ ", " if not loop.last }}{% endfor %});
        }
        for (var at = lane; at < {{ depth * lines_b }}u; at += 256u) {
            {{ place("at", lines_b, b_order) }}
            let col = col0 + line * 4u;
            tile_b[k * {{ lines_b + 1 }}u + line] = vec4<f32>({% for i in range(4) %}b_or_zero(b0, k0 + k, col + {{ i }}u, end){{ ", " if not loop.last }}{% endfor %});
        }
        workgroupBarrier();
        for (var k = 0u; k < {{ depth }}u; k++) {
            {% for v in range(cols) %}
            let b_{{ v }} = tile_b[k * {{ lines_b + 1 }}u + x + {{ v * wide }}u];
            {% endfor %}
            {% for s in range(sheets) %}
            let a_{{ s }} = tile_a[k * {{ lines_a + 1 }}u + y + {{ s * high }}u];
            {% for part in parts %}
            {% set i = loop.index0 %}
            {% for v in range(cols) %}
            sum_{{ s }}_{{ i }}_{{ v }} = fma(vec4<f32>(a_{{ s }}{{ part }}), b_{{ v }}, sum_{{ s }}_{{ i }}_{{ v }});
            {% endfor %}
            {% endfor %}
            {% endfor %}
        }
        workgroupBarrier();
    }
    {% for s in range(sheets) %}
    {% for i in range(width) %}
    {% for v in range(cols) %}
    store_inside(piece, z, row0 + (y + {{ s * high }}u) * {{ width }}u + {{ i }}u, col0 + (x + {{ v * wide }}u) * 4u, sum_{{ s }}_{{ i }}_{{ v }});
    {% endfor %}
    {% endfor %}
    {% endfor %}
}

fn store_inside(piece: u32, z: u32, row: u32, col: u32, v: vec4<f32>) {
    if row < p.m && col < p.n { store4(piece, z, row, col, v); }
}
{% endmacro -%}

{#-
Simple: `lanes` invocations (a power of two, at most 256) share the sum of one element, of type T.
order: `k` if neighbouring invocations read neighbours along the sum, else neighbouring elements of c (`line`)
-#}
{%- macro simple(T, lanes, order) %}
{%- set outputs = 256 // lanes -%}
{% if lanes > 1 %}
var<workgroup> partial: array<{{ T }}, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    {% if order == "k" %}
    let part = lane % {{ lanes }}u;
    let element = lane / {{ lanes }}u;
    {% else %}
    let part = lane / {{ outputs }}u;
    let element = lane % {{ outputs }}u;
    {% endif %}
    let total = p.batch * p.m * p.n;
    let pieces = (total + {{ outputs - 1 }}u) / {{ outputs }}u;
    let index = group_index(group, groups);
    let piece = index / pieces;
    let i = (index % pieces) * {{ outputs }}u + element;
    let live = i < total && piece < p.splits;
    let col = i % p.n;
    let row = (i / p.n) % p.m;
    let z = i / (p.n * p.m);
    var sum = {{ T }}(0);
    if live {
        let a0 = a_base(z);
        let b0 = b_base(z);
        let end = min((piece + 1u) * p.chunk, p.k);
        // Adds sums of eight: the rounding error grows with the number of sequential additions.
        for (var k8 = piece * p.chunk + part; k8 < end; k8 += {{ 8 * lanes }}u) {
            var some = {{ T }}(0);
            let stop = min(end, k8 + {{ 8 * lanes }}u);
            for (var k = k8; k < stop; k += {{ lanes }}u) {
                {% if T in ["f32", "f64"] %}
                some = fma(a_value(a0, row, k), b_value(b0, k, col), some);
                {% else %}
                some += a_value(a0, row, k) * b_value(b0, k, col);
                {% endif %}
            }
            sum += some;
        }
    }
    {% if lanes > 1 %}
    partial[lane] = sum;
    workgroupBarrier();
    for (var reach = {{ lanes // 2 }}u; reach > 0u; reach = reach / 2u) {
        if part < reach { partial[lane] += partial[lane + reach * {{ 1 if order == "k" else outputs }}u]; }
        workgroupBarrier();
    }
    sum = partial[lane];
    {% endif %}
    if live && part == 0u { store(piece, z, row, col, sum); }
}
{% endmacro -%}
