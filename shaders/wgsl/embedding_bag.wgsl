{#-
Rows of a table, reduced for each bag; the samples of a bag are contiguous in the index. Each invocation
reduces one element of the result.

dtype · index: dtype of the index
offsets: dtype of the bags' first samples, or `none` for bags of p.length each
mode: `sum`, `mean` or `max` · scaled: each sample has a factor
For the gradient, the kernel also writes each sample's bag (p.bags if the sample is skipped). With `mean` it
writes the number of samples of a bag, at least 1. With `max` it writes the row that gave each element,
p.entries if a bag is empty.
An index outside of the table is skipped, and so is the row p.skip.
stage: `whole`; for long bags `parts`, then `joined`. `parts` reduces chunks of p.chunk samples that lie
  within one bag of more than p.long samples, with one invocation for each column. `joined` reduces bags from
  the parts.
Parts are [chunks, width], for maxima with the rows that gave them; with `mean` one more column has the
counts.
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set per_thread = 4 if dtype in ["f16", "bf16"] else 1 -%}
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
    chunk: u32,
    long: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set inputs = 2 + (1 if offsets != "none" else 0) + (1 if scaled else 0) %}
{{ t.input(0, "weight", dtype) }}
{{ t.index(1, "index", index) }}
{% if offsets != "none" %}{{ t.index(2, "starts", offsets) }}{% endif %}
{% if scaled %}{{ t.input(inputs - 1, "scale", dtype) }}{% endif %}
{% set P = "u32" if mode == "max" else T %}
{% if stage == "parts" %}
{{ t.output(inputs, "bag_of", "i32") }}
@group(0) @binding({{ inputs + 1 }}) var<storage, read_write> parts: array<{{ P }}>;
{% else %}
{% set first = inputs + (1 if stage == "joined" else 0) %}
{% if stage == "joined" %}
@group(0) @binding({{ inputs }}) var<storage, read> parts: array<{{ P }}>;
{% endif %}
{{ t.output(first, "out", dtype, "packed") }}
{{ t.output(first + 1, "bag_of", "i32") }}
{% if mode == "mean" %}{{ t.output(first + 2, "counts", "f64" if dtype == "f64" else "f32") }}{% endif %}
{% if mode == "max" %}{{ t.output(first + 2, "row_indices", "i32") }}{% endif %}
{% endif %}
{{ t.resolve_index() }}

fn bag_start(bag: u32) -> u32 {
    {% if offsets == "none" %}
    return bag * p.length;
    {% else %}
    if bag >= p.offset_count { return p.samples; }
    return min(resolve_index(starts_words(p.bag_offset + bag), p.samples), p.samples);
    {% endif %}
}

struct BagAcc { total: {{ T }}, count: u32, max_row: u32 }

{% if mode == "max" %}
fn update_max(acc: BagAcc, v: {{ T }}, row: u32) -> BagAcc {
    {% if T == "f32" %}
    if acc.count == 0u || v > acc.total || m_isnan(v) { return BagAcc(v, acc.count + 1u, row); }
    {% else %}
    if acc.count == 0u || v > acc.total { return BagAcc(v, acc.count + 1u, row); }
    {% endif %}
    return BagAcc(acc.total, acc.count + 1u, acc.max_row);
}
{% endif %}

// Adds a range of samples of a bag.
fn add_samples(before: BagAcc, bag: u32, column: u32, start: u32, end: u32) -> BagAcc {
    var acc = before;
    for (var sample = start; sample < end; sample++) {
        let row = resolve_index(index_words(p.index_offset + sample), p.entries);
        let is_used = (row < p.entries) & (row != p.skip);
        if column == 0u { bag_of_put(sample, i32(select(p.bags, bag, is_used))); }
        if is_used {
            let v = weight_at(p.weight_offset + row * p.width + column);
            {% if mode == "max" %}
            acc = update_max(acc, v, row);
            {% else %}
            acc.total += v{% if scaled %} * scale_at(p.scale_offset + sample){% endif %};
            acc.count += 1u;
            {% endif %}
        }
    }
    return acc;
}
{% set columns = "(p.width + 1u)" if mode == "mean" else "p.width" %}

{% if stage == "parts" %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    let start = i / p.width * p.chunk;
    let column = i % p.width;
    if i >= p.samples / p.chunk * p.width { return; }
    // The last bag that begins here or before.
    {% if offsets == "none" %}
    let bag = start / p.length;
    {% else %}
    var low = 0u;
    var high = p.bags;
    while low < high {
        let middle = (low + high) >> 1u;
        if bag_start(middle) <= start { low = middle + 1u; } else { high = middle; }
    }
    if low == 0u { return; }
    let bag = low - 1u;
    {% endif %}
    let begin = bag_start(bag);
    let end = bag_start(bag + 1u);
    if (end <= begin) | (end - begin <= p.long) | (start + p.chunk > end) { return; }
    let acc = add_samples(BagAcc({{ T }}(0), 0u, p.entries), bag, column, start, start + p.chunk);
    let at = i / p.width * {{ columns }} + column;
    parts[at] = {{ "acc.max_row" if mode == "max" else "acc.total" }};
    {% if mode == "mean" %}
    if column == 0u { parts[at + p.width] = {{ T }}(acc.count); }
    {% endif %}
}
{% else %}
fn value_at(i: u32) -> {{ T }} {
    let bag = i / p.width;
    let column = i % p.width;
    var acc = BagAcc({{ T }}(0), 0u, p.entries);
    var start = bag_start(bag);
    let end = bag_start(bag + 1u);
    {% if stage == "joined" %}
    if end > start && end - start > p.long {
        let chunk = (start + p.chunk - 1u) / p.chunk;
        acc = add_samples(acc, bag, column, start, chunk * p.chunk);
        start = end / p.chunk * p.chunk;
        for (var c = chunk; c < end / p.chunk; c++) {
            let part = parts[c * {{ columns }} + column];
            {% if mode == "max" %}
            if part < p.entries { acc = update_max(acc, weight_at(p.weight_offset + part * p.width + column), part); }
            {% else %}
            acc.total += part;
            {% if mode == "mean" %}acc.count += u32(parts[c * {{ columns }} + p.width]);{% endif %}
            {% endif %}
        }
    }
    {% endif %}
    acc = add_samples(acc, bag, column, start, end);
    {% if mode == "mean" %}
    let divisor = {{ "f64" if dtype == "f64" else "f32" }}(max(acc.count, 1u));
    if column == 0u { counts_put(bag, divisor); }
    return acc.total / divisor;
    {% elif mode == "max" %}
    row_indices_put(i, i32(acc.max_row));
    return acc.total;
    {% else %}
    return acc.total;
    {% endif %}
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let n = p.bags * p.width;
    let start = (group_index(group, groups) * 256u + thread) * {{ per_thread }}u;
    if start >= n { return; }
    {% if per_thread == 4 %}
    var values: array<{{ T }}, 4>;
    for (var k = 0u; k < 4u; k++) { values[k] = value_at(min(start + k, n - 1u)); }
    out_put4(start, values, n);
    {% else %}
    out_put(start, value_at(start));
    {% endif %}
}
{% endif %}
