{#-
Distances between all rows of a and all rows of b, in batches; any strides.

dtype: f32 or f64
norm: `zero`, `one`, `two`, `max` or `power`; for f64, p.power_rest is the rest of the exponent p.power
pass: `forward`, a workgroup computes a tile of 16 x 16 distances, and loads rows to workgroup memory 16
  elements at a time
      `backward`, the gradient of a: the invocation of each element sums over the rows of b
parts: writes partial sums (or maxima) to [splits, ..]: of parts of the width (`forward`), of parts of b's
  rows (`backward`)
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% if norm == "power" %}
{% if dtype == "f64" %}
{% include "math/f64_exp_log" %}{% include "math/f64" %}
{% else %}
{% include "math/exp" %}{% include "math/log" %}{% include "math/pow" %}
{% endif %}
{% endif %}
{{ t.prelude() }}
{% set T = dtype %}
struct Params {
    batch: u32,
    a_rows: u32,
    b_rows: u32,
    width: u32,
    power: f32,
    power_rest: f32,
    // Parts of a sum, and terms of a part.
    splits: u32,
    chunk: u32,
    // Offsets and strides of the operands, in the order of the bindings.
    offsets: vec4<u32>,
    batch_strides: vec4<u32>,
    row_strides: vec4<u32>,
    col_strides: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set pow = "m_d_pow" if dtype == "f64" else "m_pow" -%}
fn exponent() -> {{ T }} { return {{ "f64(p.power) + f64(p.power_rest)" if dtype == "f64" else "p.power" }}; }
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{% if pass == "forward" %}
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
{% else %}
{{ t.input(2, "g", dtype) }}
{{ t.input(3, "distance", dtype) }}
{{ t.output(4, "out", dtype) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    let elements = p.batch * p.a_rows * p.width;
    if global_index / elements >= p.splits { return; }
    let i = global_index % elements;
    let first = global_index / elements * p.chunk;
    let k = i % p.width;
    let row = i / p.width % p.a_rows;
    let start = p.offsets + (i / (p.width * p.a_rows)) * p.batch_strides;
    let a_element = a_at(start.x + row * p.row_strides.x + k * p.col_strides.x);
    let b_start = start.y + k * p.col_strides.y;
    let g_start = start.z + row * p.row_strides.z;
    let distance_start = start.w + row * p.row_strides.w;
    var total = {{ T }}(0);
    var part = {{ T }}(0);
    for (var j = first; j < min(first + p.chunk, p.b_rows); j++) {
        let difference = a_element - b_at(b_start + j * p.row_strides.y);
        let dist = distance_at(distance_start + j * p.col_strides.w);
        let grad = g_at(g_start + j * p.col_strides.z);
        let size = abs(difference);
        // The gradient between two equal elements is zero, as in PyTorch.
        {% if norm == "one" %}
        let is_zero = size == {{ T }}(0);
        let derivative = {{ T }}(1);
        {% elif norm == "two" %}
        let is_zero = dist == {{ T }}(0);
        let derivative = size / select(dist, {{ T }}(1), is_zero);
        {% elif norm == "max" %}
        let is_zero = (size == {{ T }}(0)) | (size < dist);
        let derivative = {{ T }}(1);
        {% else %}
        let is_zero = (dist == {{ T }}(0)) | (size == {{ T }}(0));
        let derivative = {{ pow }}(size / select(dist, {{ T }}(1), is_zero), exponent() - 1.0);
        {% endif %}
        part += select(select(derivative, -derivative, difference < {{ T }}(0)) * grad, {{ T }}(0), is_zero);
        // Adds in blocks, so that long sums stay accurate.
        if (j & 31u) == 31u {
            total += part;
            part = {{ T }}(0);
        }
    }
    out_put(global_index, total + part);
}
{% endif %}
