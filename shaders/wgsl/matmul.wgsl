{#-
Matrix products in tiles: c[z] = a[z] · b[z], any strides, sums in f32.

dtype: f32, f16, bf16 · rows, cols: a workgroup of 16 x 16 makes 16·rows x 64·cols elements of c (rows: 1, 2, 4, 8; cols: 1, 2)
a_order, b_order: `k` if neighbours in memory are neighbours along the sum, else `line`: which way a tile is loaded
split: workgroups share one sum; c is then f32[splits][batch][m][n], summed up by `matmul_sum`
mode: `packed` (n is a multiple of 4) or `scattered` output
-#}
{%- import "types" as t -%}
{%- set depth = 16 -%}
{%- set width = 4 if rows >= 4 else rows -%}
{%- set sheets = rows // width -%}
{%- set A = "f32" if width == 1 else "vec" ~ width ~ "<f32>" -%}
{%- set parts = [""] if width == 1 else [".x", ".y", ".z", ".w"][:width] -%}
{%- set lines_a = 16 * sheets -%}
{%- set lines_b = 16 * cols -%}
{{ t.prelude() }}
struct Params {
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    // The second of two batch dimensions.
    inner: u32,
    // How much of the sum a workgroup makes, and how many share it.
    chunk: u32,
    splits: u32,
    unused: u32,
    // Offset, strides of rows, columns.
    a: vec4<u32>,
    b: vec4<u32>,
    // Strides of the batch dimensions: a's two, b's two.
    steps: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{{ t.output(2, "c", "f32" if split else dtype, mode) }}

// Line by line of the sum; one spare vector a line keeps the columns of a tile in different banks.
var<workgroup> tile_a: array<{{ A }}, {{ depth * (lines_a + 1) }}>;
var<workgroup> tile_b: array<vec4<f32>, {{ depth * (lines_b + 1) }}>;

// Outside the matrix: zero, read from its edge.
fn a_or_zero(base: u32, row: u32, k: u32, end: u32) -> f32 {
    let v = a_at(base + min(row, p.m - 1u) * p.a.y + min(k, end - 1u) * p.a.z);
    return select(0.0, v, row < p.m && k < end);
}
fn b_or_zero(base: u32, k: u32, col: u32, end: u32) -> f32 {
    let v = b_at(base + min(k, end - 1u) * p.b.y + min(col, p.n - 1u) * p.b.z);
    return select(0.0, v, k < end && col < p.n);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let tiles_n = (p.n + {{ 64 * cols - 1 }}u) / {{ 64 * cols }}u;
    let tiles_m = (p.m + {{ 16 * rows - 1 }}u) / {{ 16 * rows }}u;
    var left = group_index(group, groups);
    let col0 = (left % tiles_n) * {{ 64 * cols }}u;
    left = left / tiles_n;
    let row0 = (left % tiles_m) * {{ 16 * rows }}u;
    left = left / tiles_m;
    let z = left % p.batch;
    let piece = left / p.batch;
    // A folded grid may have more groups than there is work.
    if piece >= p.splits { return; }
    let a_base = p.a.x + (z / p.inner) * p.steps.x + (z % p.inner) * p.steps.y;
    let b_base = p.b.x + (z / p.inner) * p.steps.z + (z % p.inner) * p.steps.w;
    let start = piece * p.chunk;
    let end = min(start + p.chunk, p.k);
    let x = lane % 16u;
    let y = lane / 16u;
    {% for s in range(sheets) %}
    {% for i in range(width) %}
    {% for v in range(cols) %}
    var sum_{{ s }}_{{ i }}_{{ v }} = vec4<f32>();
    {% endfor %}
    {% endfor %}
    {% endfor %}
    for (var k0 = start; k0 < end; k0 += {{ depth }}u) {
        {% for s in range(sheets) %}
        {
            let at = lane + {{ s * 256 }}u;
            {% if a_order == "k" %}
            let k = at % {{ depth }}u;
            let line = at / {{ depth }}u;
            {% else %}
            let k = at / {{ lines_a }}u;
            let line = at % {{ lines_a }}u;
            {% endif %}
            let row = row0 + line * {{ width }}u;
            tile_a[k * {{ lines_a + 1 }}u + line] = {{ A }}({% for i in range(width) %}a_or_zero(a_base, row + {{ i }}u, k0 + k, end){{ ", " if not loop.last }}{% endfor %});
        }
        {% endfor %}
        {% for v in range(cols) %}
        {
            let at = lane + {{ v * 256 }}u;
            {% if b_order == "k" %}
            let k = at % {{ depth }}u;
            let line = at / {{ depth }}u;
            {% else %}
            let k = at / {{ lines_b }}u;
            let line = at % {{ lines_b }}u;
            {% endif %}
            let col = col0 + line * 4u;
            tile_b[k * {{ lines_b + 1 }}u + line] = vec4<f32>({% for i in range(4) %}b_or_zero(b_base, k0 + k, col + {{ i }}u, end){{ ", " if not loop.last }}{% endfor %});
        }
        {% endfor %}
        workgroupBarrier();
        for (var k = 0u; k < {{ depth }}u; k++) {
            {% for v in range(cols) %}
            let b{{ v }} = tile_b[k * {{ lines_b + 1 }}u + x + {{ v * 16 }}u];
            {% endfor %}
            {% for s in range(sheets) %}
            let a{{ s }} = tile_a[k * {{ lines_a + 1 }}u + y + {{ s * 16 }}u];
            {% for part in parts %}
            {% set i = loop.index0 %}
            {% for v in range(cols) %}
            sum_{{ s }}_{{ i }}_{{ v }} = fma(vec4<f32>(a{{ s }}{{ part }}), b{{ v }}, sum_{{ s }}_{{ i }}_{{ v }});
            {% endfor %}
            {% endfor %}
            {% endfor %}
        }
        workgroupBarrier();
    }
    let c_base = (piece * p.batch + z) * p.m * p.n;
    {% for s in range(sheets) %}
    {% for i in range(width) %}
    {% for v in range(cols) %}
    store(c_base, row0 + (y + {{ s * 16 }}u) * {{ width }}u + {{ i }}u, col0 + (x + {{ v * 16 }}u) * 4u, sum_{{ s }}_{{ i }}_{{ v }});
    {% endfor %}
    {% endfor %}
    {% endfor %}
}

fn store(base: u32, row: u32, col: u32, v: vec4<f32>) {
    if row >= p.m || col >= p.n { return; }
    let i = base + row * p.n + col;
    {% if mode == "packed" %}
    c_put4(i, array<f32, 4>(v.x, v.y, v.z, v.w), i + 4u);
    {% else %}
    c_put(i, v.x);
    if col + 1u < p.n { c_put(i + 1u, v.y); }
    if col + 2u < p.n { c_put(i + 2u, v.z); }
    if col + 3u < p.n { c_put(i + 3u, v.w); }
    {% endif %}
}
