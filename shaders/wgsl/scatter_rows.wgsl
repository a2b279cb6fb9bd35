{#-
`scatter_sorted` that writes every row of the result once: out[..., r, ...] = base[..., r, ...] op src[order[i]] for all
  targets[i] == r, in order. It saves the launch that writes the base, and the look at every index in every line: the
  thread of a row and a line finds its run by bisection. Neighbouring threads, of neighbouring lines, read the same
  indices.

A run of more than p.short elements is left to `scatter_sorted`, stage `join`: its row gets the base, and further
  threads reduce the parts of long runs, one for each chunk of p.chunk positions.

dtype: of the result · src: of the source · op: `add`, `set`, `mul`, `max`, `min`
long: a run may be longer than p.short · base: `zero`, or `copy` (a tensor of any strides)
replaces: the elements of a run replace the value of the base
averages: a sum is divided by its number of terms, of which the value of the base is one without `replaces`
ties: an element counts as 1 if it equals the element of `y` at its target, else as 0; y has the layout of the result
targets, order, parts: see `scatter_sorted`
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    lines: u32,
    rank: u32,
    length: u32,
    extent: u32,
    skip: u32,
    chunk: u32,
    // Chunks of a line, or 0 without long runs.
    chunks: u32,
    short: u32,
    // Of the result, the source, the base.
    offsets: vec4<u32>,
    dim_strides: vec4<u32>,
    shape: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    src_strides: array<vec4<u32>, 2>,
    base_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
{% set P = "u32" if T == "bool" else T %}
@group(0) @binding(0) var<storage, read> targets: array<u32>;
@group(0) @binding(1) var<storage, read> order: array<u32>;
{{ t.input(2, "src", src) }}
{{ t.output(3, "out", dtype, "scattered") }}
{% set next = namespace(binding=4) %}
{% if base == "copy" %}
{{ t.input(next.binding, "base", dtype) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if ties %}
{{ t.input(next.binding, "y", src) }}
{{ t.is_nan(t.value(src)) }}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% if long %}
@group(0) @binding({{ next.binding }}) var<storage, read_write> parts: array<{{ P }}>;
{% endif %}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

// Returns the value of a sorted position{{ ", compared with the result" if ties }}; `index_base` is the offset of the
// line.
fn value_at(index_base: u32, src_base: u32, position: u32{{ ", result: " ~ t.value(src) if ties }}) -> {{ T }} {
    let v = src_at(src_base + order[index_base + position] * p.dim_strides.y);
    {% if ties %}
    return select(0.0, 1.0, (v == result) & !is_nan(v));
    {% else %}
    return v;
    {% endif %}
}
{% set compared = ", result" if ties %}

// Returns the number of indices of a line that are below a row.
fn find_begin(index_base: u32, row: u32) -> u32 {
    var low = 0u;
    var high = p.length;
    while low < high {
        let middle = (low + high) >> 1u;
        if targets[index_base + middle] < row { low = middle + 1u; } else { high = middle; }
    }
    return low;
}
{% if long %}

// Reports whether the run that begins at a position has more than p.short elements.
fn is_long_run(index_base: u32, begin: u32, row: u32) -> bool {
    if begin + p.short >= p.length { return false; }
    return targets[index_base + begin + p.short] == row;
}

fn is_valid_row(row: u32) -> bool { return (row < p.extent) & (row != p.skip); }

// Reduces the positions of a row from `begin` to `limit`, without it, into one part of a run.
fn store_part(index_base: u32, src_base: u32, row: u32, begin: u32, limit: u32, slot: u32
        {{- ", result: " ~ t.value(src) if ties }}) {
    var acc = value_at(index_base, src_base, begin{{ compared }});
    for (var next = begin + 1u; next < limit; next++) {
        if targets[index_base + next] != row { break; }
        let v = value_at(index_base, src_base, next{{ compared }});
        acc = {{ t.combine(op, T, "acc", "v") }};
    }
    parts[slot] = {{ t.cast("acc", T, P) }};
}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if global_index >= p.lines * (p.extent + p.chunks) { return; }
    let row = global_index / p.lines;
    let line = global_index % p.lines;
    var linear_index = line;
    var i0 = p.offsets.x;
    var i1 = 0u;
    var i2 = p.offsets.y;
    var i3 = p.offsets.z;
    {% set own = [("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides"), ("i3", "base_strides")] %}
    {{ t.strided_offsets(own) }}
    {% if long %}
    if row >= p.extent {
        let chunk = row - p.extent;
        let first = chunk * p.chunk;
        let limit = min(first + p.chunk, p.length);
        let first_row = targets[i1 + first];
        if (first > 0u) & is_valid_row(first_row) {
            if targets[i1 + first - 1u] == first_row {
                let begin = find_begin(i1, first_row);
                let slot = chunk * 2u * p.lines + line;
                {% if ties %}
                let result = y_at(i0 + first_row * p.dim_strides.x);
                {% endif %}
                if is_long_run(i1, begin, first_row) {
                    store_part(i1, i2, first_row, first, limit, slot{{ compared }});
                }
            }
        }
        let last_row = targets[i1 + limit - 1u];
        if (limit < p.length) & is_valid_row(last_row) {
            if targets[i1 + limit] == last_row {
                let begin = find_begin(i1, last_row);
                let slot = (chunk * 2u + 1u) * p.lines + line;
                {% if ties %}
                let result = y_at(i0 + last_row * p.dim_strides.x);
                {% endif %}
                if (begin >= first) & is_long_run(i1, begin, last_row) {
                    store_part(i1, i2, last_row, begin, limit, slot{{ compared }});
                }
            }
        }
        return;
    }
    {% endif %}
    {% if base == "zero" %}
    var acc = {{ T }}(0);
    {% else %}
    var acc = base_at(i3 + row * p.dim_strides.z);
    {% endif %}
    if row != p.skip {
        {% if op == "set" %}
        let end = find_begin(i1, row + 1u);
        if end > 0u {
            if targets[i1 + end - 1u] == row { acc = value_at(i1, i2, end - 1u); }
        }
        {% else %}
        {% if ties %}
        let result = y_at(i0 + row * p.dim_strides.x);
        {% endif %}
        let begin = find_begin(i1, row);
        var next = begin;
        {% if replaces %}
        if begin < p.length {
            if targets[i1 + begin] == row {
                {% if op in ["max", "min"] %}
                acc = value_at(i1, i2, begin{{ compared }});
                next++;
                {% else %}
                acc = {{ T }}({{ 1 if op == "mul" else 0 }});
                {% endif %}
            }
        }
        {% endif %}
        {% if long %}
        // Most runs end before their length matters.
        let check_position = begin + 64u;
        // The stage `join` combines this value with the parts. An extremum may count an element twice.
        let before = acc;
        {% if averages %}
        var is_long = false;
        {% endif %}
        {% endif %}
        for (; next < p.length; next++) {
            if targets[i1 + next] != row { break; }
            {% if long %}
            if next == check_position {
                if is_long_run(i1, begin, row) {
                    acc = before;
                    {% if averages %}
                    is_long = true;
                    {% endif %}
                    break;
                }
            }
            {% endif %}
            let v = value_at(i1, i2, next{{ compared }});
            acc = {{ t.combine(op, T, "acc", "v") }};
        }
        {% if averages %}
        let count = next - begin{{ "" if replaces else " + 1u" }};
        if count > 1u{{ " && !is_long" if long }} { acc = acc / {{ T }}(count); }
        {% endif %}
        {% endif %}
    }
    out_put(i0 + row * p.dim_strides.x, acc);
}
