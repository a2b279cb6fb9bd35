{#-
Distances between all rows of a and all rows of b, in batches; any strides. A workgroup computes a tile of 16 x 16
distances, and loads rows to workgroup memory 16 elements at a time.

dtype: f32 or f64
norm: `zero`, `one`, `two`, `max` or `power`; for f64, p.power_rest is the rest of the exponent p.power
parts: writes partial sums (or maxima) of parts of the width to [splits, ..]
-#}
{%- import "types" as t -%}
{% include "cdist_common" %}
{% set T = dtype %}
{% set pow = "m_d_pow" if dtype == "f64" else "m_pow" -%}
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{{ t.output(2, "out", dtype) }}
var<workgroup> a_tile: array<{{ T }}, 272>;
var<workgroup> b_tile: array<{{ T }}, 272>;

// Adds one difference to the distance.
fn accumulate(sum: {{ T }}, d: {{ T }}) -> {{ T }} {
    {% if norm == "zero" %}
    return sum + select({{ T }}(1), {{ T }}(0), d == {{ T }}(0));
    {% elif norm == "one" %}
    return sum + d;
    {% elif norm == "two" %}
    return sum + d * d;
    {% elif norm == "max" %}
    return {{ "m_max" if dtype == "f32" else "max" }}(sum, d);
    {% else %}
    return sum + {{ pow }}(d, exponent());
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    let b_tiles = (p.b_rows + 15u) / 16u;
    let a_tiles = (p.a_rows + 15u) / 16u;
    let batch_split = linear_group / (a_tiles * b_tiles);
    if batch_split >= p.batch * p.splits { return; }
    let batch = batch_split % p.batch;
    let part_start = batch_split / p.batch * p.chunk;
    let part_end = min(part_start + p.chunk, p.width);
    let a_first = (linear_group / b_tiles % a_tiles) * 16u;
    let b_first = (linear_group % b_tiles) * 16u;
    let row = thread / 16u;
    let col = thread % 16u;
    let a_row = p.offsets.x + batch * p.batch_strides.x + min(a_first + row, p.a_rows - 1u) * p.row_strides.x;
    let b_row = p.offsets.y + batch * p.batch_strides.y + min(b_first + row, p.b_rows - 1u) * p.row_strides.y;
    var total = {{ T }}(0);
    for (var start = part_start; start < part_end; start += 16u) {
        // Beyond the width both values are zero, and so is their difference.
        let k = start + col;
        var a_value = {{ T }}(0);
        var b_value = {{ T }}(0);
        if k < part_end {
            a_value = a_at(a_row + k * p.col_strides.x);
            b_value = b_at(b_row + k * p.col_strides.y);
        }
        a_tile[row * 17u + col] = a_value;
        b_tile[row * 17u + col] = b_value;
        workgroupBarrier();
        var part = {{ T }}(0);
        for (var n = 0u; n < 16u; n++) { part = accumulate(part, abs(a_tile[row * 17u + n] - b_tile[col * 17u + n])); }
        {% if norm == "max" %}
        total = accumulate(total, part);
        {% else %}
        total += part;
        {% endif %}
        workgroupBarrier();
    }
    if a_first + row < p.a_rows && b_first + col < p.b_rows {
        let at = (batch_split * p.a_rows + a_first + row) * p.b_rows + b_first + col;
        {% if parts %}
        out_put(at, total);
        {% elif norm == "two" %}
        out_put(at, sqrt(total));
        {% elif norm == "power" %}
        out_put(at, {{ pow }}(total, 1.0 / exponent()));
        {% else %}
        out_put(at, total);
        {% endif %}
    }
}
