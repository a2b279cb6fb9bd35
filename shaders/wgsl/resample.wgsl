{#-
Separable resampling of planes: an element of the result is a weighted sum of elements that are contiguous
  along every axis of the input. Tables from the host define the elements. For every index of an axis of the
  result they have the first input index, the count, and the offset of the weights. The gradient is the same
  kernel with transposed tables, so each result has one writer.

dtype · rank: axes of a plane, 1 to 3, the last one first here
weighted: if false, each element is one of the input
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set per_thread = 4 if dtype in ["f16", "bf16", "u8"] else 1 -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    in_offset: u32,
    unused0: u32,
    unused1: u32,
    // Sizes of a plane of the input and of the result, and offset of an axis in the table.
    in_size: vec4<u32>,
    out_size: vec4<u32>,
    table: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", dtype) }}
{{ t.input(1, "spans", "u32") }}
{% if weighted %}
{{ t.input(2, "weights", "f64" if dtype == "f64" else "f32") }}
{% endif %}
{{ t.output(3 if weighted else 2, "out", dtype, "packed") }}

fn value_at(i: u32) -> {{ T }} {
    var linear_index = i;
    var base = p.in_offset;
    {% for axis in ["x", "y", "z"][:rank] %}
    let at_{{ axis }} = (p.table.{{ axis }} + linear_index % p.out_size.{{ axis }}) * 3u;
    linear_index = linear_index / p.out_size.{{ axis }};
    let first_{{ axis }} = spans_at(at_{{ axis }});
    {% endfor %}
    {% for axis in ["z", "y", "x"][3 - rank:] %}
    linear_index = linear_index * p.in_size.{{ axis }} + first_{{ axis }};
    {% endfor %}
    base += linear_index;
    {% if not weighted %}
    return input_at(base);
    {% else %}
    {% for axis in ["x", "y", "z"][:rank] %}
    let count_{{ axis }} = spans_at(at_{{ axis }} + 1u);
    let weights_{{ axis }} = spans_at(at_{{ axis }} + 2u);
    {% endfor %}
    var total = {{ T }}(0);
    {% if rank == 3 %}
    for (var z = 0u; z < count_z; z++) {
    let row_z = base + z * p.in_size.y * p.in_size.x;
    let weight_z = weights_at(weights_z + z);
    {% endif %}
    {% if rank >= 2 %}
    for (var y = 0u; y < count_y; y++) {
    let row = {{ "row_z" if rank == 3 else "base" }} + y * p.in_size.x;
    {% else %}
    let row = base;
    {% endif %}
    var sum = {{ T }}(0);
    for (var x = 0u; x < count_x; x++) { sum += weights_at(weights_x + x) * input_at(row + x); }
    total += {{ "weight_z * " if rank == 3 else "" }}{{ "weights_at(weights_y + y) * " if rank >= 2 else "" }}sum;
    {{ "}" if rank >= 2 else "" }}
    {{ "}" if rank == 3 else "" }}
    return total;
    {% endif %}
}

{{ t.each_output("value_at", T, per_thread) }}
