{#-
Distances between all rows of a and all rows of b, in batches, for many rows of f32. A workgroup computes a tile of
64 x 64 distances, and each thread 4 x 4, so that it loads less from workgroup memory for each distance.

norm: `zero`, `one`, `two` or `max`
parts: writes partial sums (or maxima) of parts of the width to [splits, ..]
symmetric: b is a, so that a tile is also the transpose of another, which is not computed
quads: rows consist of aligned quads of neighbours in memory; else the operands have any strides

The tiles have the differences themselves, not the product of both rows: |a|² + |b|² - 2 a b loses near neighbours.
-#}
{%- import "types" as t -%}
{% set dtype = "f32" %}
{% include "cdist_common" %}
{% if quads %}
{{ t.quads(0, "a", "f32") }}
{{ t.quads(1, "b", "f32") }}
{% else %}
{{ t.input(0, "a", "f32") }}
{{ t.input(1, "b", "f32") }}
{% endif %}
{{ t.output(2, "out", "f32") }}
// Four quads of each row, and one more: neighbouring rows are in other banks.
var<workgroup> a_tile: array<array<vec4<f32>, 5>, 64>;
var<workgroup> b_tile: array<array<vec4<f32>, 5>, 64>;
{% if symmetric %}
// 16 rows of the tile, to write its columns.
var<workgroup> transposed: array<array<f32, 65>, 16>;
{% endif %}

{% for name, axis in [("a", "x"), ("b", "y")] %}
// Elements k to k + 3 of a row. They are zero from `end` on, and so are their differences.
fn {{ name }}_next(row: u32, k: u32, end: u32) -> vec4<f32> {
    {% if quads %}
    if k < end { return {{ name }}_quad((row + k) >> 2u); }
    return vec4<f32>();
    {% else %}
    return vec4<f32>({% for e in range(4) -%}
        {{ name }}_or_zero(row, k + {{ e }}u, end){{ ", " if not loop.last }}
    {%- endfor %});
    {% endif %}
}
{% if not quads %}
fn {{ name }}_or_zero(row: u32, k: u32, end: u32) -> f32 {
    if k < end { return {{ name }}_at(row + k * p.col_strides.{{ axis }}); }
    return 0.0;
}
{% endif %}
{% endfor %}

// Adds four differences to a distance.
fn accumulate(sum: f32, d: vec4<f32>) -> f32 {
    {% if norm == "zero" %}
    let differs = select(vec4<f32>(1.0), vec4<f32>(), d == vec4<f32>());
    return sum + ((differs.x + differs.y) + (differs.z + differs.w));
    {% elif norm == "one" %}
    return (((sum + abs(d.x)) + abs(d.y)) + abs(d.z)) + abs(d.w);
    {% elif norm == "two" %}
    return fma(d.w, d.w, fma(d.z, d.z, fma(d.y, d.y, fma(d.x, d.x, sum))));
    {% else %}
    let size = abs(d);
    return m_max(m_max(m_max(m_max(sum, size.x), size.y), size.z), size.w);
    {% endif %}
}

fn norm_of(total: f32) -> f32 { return {{ "sqrt(total)" if norm == "two" and not parts else "total" }}; }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    let a_tiles = (p.a_rows + 63u) / 64u;
    {% if symmetric %}
    // Tile i meets itself and the next ones, cyclically, up to half of them: each pair of tiles once.
    let steps = a_tiles / 2u + 1u;
    let batch_split = linear_group / (a_tiles * steps);
    let first_tile = linear_group % a_tiles;
    let step = linear_group / a_tiles % steps;
    if step * 2u == a_tiles && first_tile >= step { return; }
    let second_tile = (first_tile + step) % a_tiles;
    {% else %}
    let b_tiles = (p.b_rows + 63u) / 64u;
    let batch_split = linear_group / (a_tiles * b_tiles);
    let first_tile = linear_group / b_tiles % a_tiles;
    let second_tile = linear_group % b_tiles;
    {% endif %}
    if batch_split >= p.batch * p.splits { return; }
    let batch = batch_split % p.batch;
    let part_start = batch_split / p.batch * p.chunk;
    let part_end = min(part_start + p.chunk, p.width);
    let a_first = first_tile * 64u;
    let b_first = second_tile * 64u;
    // The quad that a thread loads, and the first of the distances that it computes: all others are 16 rows apart.
    let line = thread / 4u;
    let quad = thread % 4u;
    let row = thread / 16u;
    let col = thread % 16u;
    let a_row = p.offsets.x + batch * p.batch_strides.x + min(a_first + line, p.a_rows - 1u) * p.row_strides.x;
    let b_row = p.offsets.y + batch * p.batch_strides.y + min(b_first + line, p.b_rows - 1u) * p.row_strides.y;
    {% for r in range(4) %}{% for c in range(4) %}
    var total_{{ r }}_{{ c }} = 0.0;
    {% endfor %}{% endfor %}
    var a_quads = a_next(a_row, part_start + quad * 4u, part_end);
    var b_quads = b_next(b_row, part_start + quad * 4u, part_end);
    for (var start = part_start; start < part_end; start += 16u) {
        a_tile[line][quad] = a_quads;
        b_tile[line][quad] = b_quads;
        workgroupBarrier();
        // The next elements are on their way during the sums.
        let next = start + 16u + quad * 4u;
        a_quads = a_next(a_row, next, part_end);
        b_quads = b_next(b_row, next, part_end);
        {% for r in range(4) %}{% for c in range(4) %}
        var part_{{ r }}_{{ c }} = 0.0;
        {% endfor %}{% endfor %}
        let count = (min(part_end - start, 16u) + 3u) / 4u;
        for (var n = 0u; n < count; n++) {
            {% for r in range(4) %}
            let a{{ r }} = a_tile[row + {{ 16 * r }}u][n];
            {% endfor %}
            {% for c in range(4) %}
            let b{{ c }} = b_tile[col + {{ 16 * c }}u][n];
            {% for r in range(4) %}
            part_{{ r }}_{{ c }} = accumulate(part_{{ r }}_{{ c }}, a{{ r }} - b{{ c }});
            {% endfor %}
            {% endfor %}
        }
        {% for r in range(4) %}{% for c in range(4) %}
        {% if norm == "max" %}
        total_{{ r }}_{{ c }} = m_max(total_{{ r }}_{{ c }}, part_{{ r }}_{{ c }});
        {% else %}
        total_{{ r }}_{{ c }} += part_{{ r }}_{{ c }};
        {% endif %}
        {% endfor %}{% endfor %}
        workgroupBarrier();
    }
    let out_start = batch_split * p.a_rows;
    {% for r in range(4) %}{% for c in range(4) %}
    if a_first + row + {{ 16 * r }}u < p.a_rows && b_first + col + {{ 16 * c }}u < p.b_rows {
        out_put((out_start + a_first + row + {{ 16 * r }}u) * p.b_rows + b_first + col + {{ 16 * c }}u,
            norm_of(total_{{ r }}_{{ c }}));
    }
    {% endfor %}{% endfor %}
    {% if symmetric %}
    if step == 0u { return; }
    {% for r in range(4) %}
    {% for c in range(4) %}
    transposed[row][col + {{ 16 * c }}u] = norm_of(total_{{ r }}_{{ c }});
    {% endfor %}
    workgroupBarrier();
    if a_first + {{ 16 * r }}u + col < p.a_rows {
        for (var n = row; n < min(64u, p.b_rows - b_first); n += 16u) {
            out_put((out_start + b_first + n) * p.a_rows + a_first + {{ 16 * r }}u + col, transposed[col][n]);
        }
    }
    {% if not loop.last %}
    workgroupBarrier();
    {% endif %}
    {% endfor %}
    {% endif %}
}
