{#-
Gradient of a from that of the distances, in batches; any strides. A workgroup computes 64 rows and `cols` elements of
each. It loads `depth` rows of b at a time, and the gradients and distances of these and its own rows, so that each is
read once for all elements.

dtype: f32 or f64
norm: `one`, `two`, `max` or `power`; for f64, p.power_rest is the rest of the exponent p.power
parts: writes partial sums of parts of b's rows to [splits, ..]
cols: 4, 16 or 64 elements, of which a thread computes one, those of four rows, or 4 x 4
g_across: neighbours in memory of the gradients are along the rows of a, else along those of b
-#}
{%- import "types" as t -%}
{% include "cdist_common" %}
{%- set T = dtype -%}
{%- set pow = "m_d_pow" if dtype == "f64" else "m_pow" -%}
{%- set has_distance = norm in ["max", "power"] -%}
{#- Workgroup memory stays below 16 KiB. -#}
{%- set depth = 8 if dtype == "f64" else 16 -%}
{#- Rows and elements of a thread, and threads along the elements. -#}
{%- set row_count = 1 if cols == 4 else 4 -%}
{%- set col_count = 4 if cols == 64 else 1 -%}
{%- set lanes = cols // col_count -%}
{%- set V = "vec4<" ~ T ~ ">" if col_count == 4 else T -%}
{%- set W = "vec4<" ~ T ~ ">" if row_count == 4 else T -%}
{%- set components = [".x", ".y", ".z", ".w"] if col_count == 4 else [""] -%}
{%- set row_components = [".x", ".y", ".z", ".w"] if row_count == 4 else [""] -%}
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{{ t.input(2, "g", dtype) }}
{% if norm != "one" %}
{{ t.input(3, "distance", dtype) }}
{% endif %}
{{ t.output(3 if norm == "one" else 4, "out", dtype) }}
// For each row of b, the rows of a, and one more: neighbouring rows are in other banks.
var<workgroup> g_tile: array<array<{{ W }}, {{ 64 // row_count + 1 }}>, {{ depth }}>;
{% if has_distance %}
var<workgroup> distance_tile: array<array<{{ W }}, {{ 64 // row_count + 1 }}>, {{ depth }}>;
{% endif %}
var<workgroup> b_tile: array<array<{{ V }}, {{ lanes }}>, {{ depth }}>;

// The gradient of an element by one distance. That between two equal elements is zero, as in PyTorch.
fn term(difference: {{ V }}, g: {{ T }}, distance: {{ T }}) -> {{ V }} {
    {% if norm == "two" %}
    return {{ V }}(g) * difference;
    {% else %}
    let size = abs(difference);
    let zero = {{ V }}({{ T }}(0));
    {% if norm == "one" %}
    let is_zero = size == zero;
    let derivative = {{ V }}({{ T }}(1));
    {% elif norm == "max" %}
    let is_zero = (size == zero) | (size < {{ V }}(distance));
    let derivative = {{ V }}({{ T }}(1));
    {% else %}
    let is_zero = (distance == {{ T }}(0)) | (size == zero);
    let derivative = {{ pow }}(size / select(distance, {{ T }}(1), is_zero), exponent() - {{ T }}(1));
    {% endif %}
    return select(select(derivative, -derivative, difference < zero) * g, zero, is_zero);
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    let row_tiles = (p.a_rows + 63u) / 64u;
    let col_tiles = (p.width + {{ cols - 1 }}u) / {{ cols }}u;
    let batch_split = linear_group / (row_tiles * col_tiles);
    if batch_split >= p.batch * p.splits { return; }
    let batch = batch_split % p.batch;
    let part_start = batch_split / p.batch * p.chunk;
    let part_end = min(part_start + p.chunk, p.b_rows);
    let tile_row = linear_group / col_tiles % row_tiles * 64u;
    let tile_col = linear_group % col_tiles * {{ cols }}u;
    let starts = p.offsets + batch * p.batch_strides;

    // The first row and element of this thread, as in its tile.
    let own_row = thread / {{ lanes }}u;
    let own_col = thread % {{ lanes }}u;
    let row = tile_row + own_row * {{ row_count }}u;
    let col = tile_col + own_col * {{ col_count }}u;
    {% for r in range(row_count) %}
    let a_row{{ r }} = starts.x + min(row + {{ r }}u, p.a_rows - 1u) * p.row_strides.x;
    let a{{ r }} = {{ V }}({% for c in components -%}
        a_at(a_row{{ r }} + min(col + {{ loop.index0 }}u, p.width - 1u) * p.col_strides.x){{ ", " if not loop.last }}
    {%- endfor %});
    var total{{ r }} = {{ V }}({{ T }}(0));
    {% endfor %}

    // What this thread loads: four rows of a for one row of b, and elements of one row of b.
    {% if g_across %}
    let g_quad = thread % 16u;
    let g_line = thread / 16u;
    {% else %}
    let g_quad = thread / {{ depth }}u;
    let g_line = thread % {{ depth }}u;
    {% endif %}
    let b_line = thread / {{ lanes }}u;
    for (var start = part_start; start < part_end; start += {{ depth }}u) {
        if thread < {{ 16 * depth }}u {
            // Rows beyond the part have no weight.
            let j = min(start + g_line, part_end - 1u);
            let is_inside = start + g_line < part_end;
            {% for r in range(4) %}
            let row{{ r }} = min(tile_row + g_quad * 4u + {{ r }}u, p.a_rows - 1u);
            var g{{ r }} = g_at(starts.z + row{{ r }} * p.row_strides.z + j * p.col_strides.z);
            {% if norm != "one" %}
            var distance{{ r }} = distance_at(starts.w + row{{ r }} * p.row_strides.w + j * p.col_strides.w);
            {% endif %}
            {% if norm == "two" %}
            // Equal rows get no gradient, as in PyTorch.
            let is_equal{{ r }} = distance{{ r }} == {{ T }}(0);
            g{{ r }} = select(g{{ r }} / select(distance{{ r }}, {{ T }}(1), is_equal{{ r }}), {{ T }}(0),
                is_equal{{ r }} | !is_inside);
            {% else %}
            g{{ r }} = select({{ T }}(0), g{{ r }}, is_inside);
            {% endif %}
            {% endfor %}
            {% for name in ["g", "distance"] if name == "g" or has_distance %}
            {% if row_count == 4 %}
            {{ name }}_tile[g_line][g_quad] = {{ W }}({{ name }}0, {{ name }}1, {{ name }}2, {{ name }}3);
            {% else %}
            {% for r in range(4) %}
            {{ name }}_tile[g_line][g_quad * 4u + {{ r }}u] = {{ name }}{{ r }};
            {% endfor %}
            {% endif %}
            {% endfor %}
        }
        if b_line < {{ depth }}u {
            let b_row = starts.y + min(start + b_line, part_end - 1u) * p.row_strides.y;
            b_tile[b_line][own_col] = {{ V }}({% for c in components -%}
                b_at(b_row + min(col + {{ loop.index0 }}u, p.width - 1u) * p.col_strides.y){{ ", " if not loop.last }}
            {%- endfor %});
        }
        workgroupBarrier();
        // Adds in blocks, so that long sums stay accurate.
        {% for r in range(row_count) %}
        var part{{ r }} = {{ V }}({{ T }}(0));
        {% endfor %}
        for (var n = 0u; n < {{ depth }}u; n++) {
            let b = b_tile[n][own_col];
            let g = g_tile[n][own_row];
            {% if has_distance %}
            let distance = distance_tile[n][own_row];
            {% else %}
            let distance = {{ W }}();
            {% endif %}
            {% for r in range(row_count) %}
            part{{ r }} += term(a{{ r }} - b, g{{ row_components[r] }}, distance{{ row_components[r] }});
            {% endfor %}
        }
        {% for r in range(row_count) %}
        total{{ r }} += part{{ r }};
        {% endfor %}
        workgroupBarrier();
    }
    {% for r in range(row_count) %}{% for c in components %}
    if row + {{ r }}u < p.a_rows && col + {{ loop.index0 }}u < p.width {
        out_put((batch_split * p.a_rows + row + {{ r }}u) * p.width + col + {{ loop.index0 }}u, total{{ r }}{{ c }});
    }
    {% endfor %}{% endfor %}
}
