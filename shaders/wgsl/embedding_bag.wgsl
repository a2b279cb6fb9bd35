{#-
Rows of a table, reduced bag by bag: the samples of a bag lie side by side in the index. One invocation an element of the
result walks through its bag.

dtype · index: dtype of the index · offsets: dtype of the bags' first samples, or `none` for bags of p.length each
mode: `sum`, `mean` or `max` · scaled: each sample has a factor
Beside the result it writes, for the gradient, each sample's bag (p.bags where it counts in none), and in mode `mean` how
many samples a bag has, at least 1; in mode `max` which row gave each element, p.entries where a bag is empty.
An index outside the table counts as no sample, as does the row p.skip.
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set lanes = 4 if dtype in ["f16", "bf16"] else 1 -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    bags: u32,
    width: u32,
    samples: u32,
    entries: u32,
    length: u32,
    offset_count: u32,
    skip: u32,
    weight_offset: u32,
    index_offset: u32,
    bag_offset: u32,
    scale_offset: u32,
    unused0: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set inputs = 2 + (1 if offsets != "none" else 0) + (1 if scaled else 0) %}
{{ t.input(0, "weight", dtype) }}
{{ t.input(1, "index", index) }}
{% if offsets != "none" %}{{ t.input(2, "starts", offsets) }}{% endif %}
{% if scaled %}{{ t.input(inputs - 1, "scale", dtype) }}{% endif %}
{{ t.output(inputs, "out", dtype, "packed") }}
{{ t.output(inputs + 1, "bag_of", "i32") }}
{% if mode == "mean" %}{{ t.output(inputs + 2, "counts", "f64" if dtype == "f64" else "f32") }}{% endif %}
{% if mode == "max" %}{{ t.output(inputs + 2, "places", "i32") }}{% endif %}
{{ t.place(index) }}

fn bag_start(bag: u32) -> u32 {
    {% if offsets == "none" %}
    return bag * p.length;
    {% else %}
    if bag >= p.offset_count { return p.samples; }
    return min(u32(starts_at(p.bag_offset + bag)), p.samples);
    {% endif %}
}

fn value_at(i: u32) -> {{ T }} {
    let bag = i / p.width;
    let column = i % p.width;
    var total = {{ T }}(0);
    var count = 0u;
    var best = p.entries;
    let end = bag_start(bag + 1u);
    for (var sample = bag_start(bag); sample < end; sample++) {
        let row = place(index_at(p.index_offset + sample), p.entries);
        let taken = (row < p.entries) & (row != p.skip);
        if column == 0u { bag_of_put(sample, i32(select(p.bags, bag, taken))); }
        if taken {
            let v = weight_at(p.weight_offset + row * p.width + column);
            {% if mode == "max" %}
            {% if T == "f32" %}
            if count == 0u || v > total || m_isnan(v) {
            {% else %}
            if count == 0u || v > total {
            {% endif %}
                total = v;
                best = row;
            }
            {% elif scaled %}
            total += v * scale_at(p.scale_offset + sample);
            {% else %}
            total += v;
            {% endif %}
            count += 1u;
        }
    }
    {% if mode == "mean" %}
    let several = {{ "f64" if dtype == "f64" else "f32" }}(max(count, 1u));
    if column == 0u { counts_put(bag, several); }
    total = total / several;
    {% elif mode == "max" %}
    places_put(i, i32(best));
    {% endif %}
    return total;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let n = p.bags * p.width;
    let start = (group_index(group, groups) * 256u + lane) * {{ lanes }}u;
    if start >= n { return; }
    {% if lanes == 4 %}
    var values: array<{{ T }}, 4>;
    for (var k = 0u; k < 4u; k++) { values[k] = value_at(min(start + k, n - 1u)); }
    out_put4(start, values, n);
    {% else %}
    out_put(start, value_at(start));
    {% endif %}
}
