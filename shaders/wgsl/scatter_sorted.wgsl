{#-
What `scatter` does, for long lines whose indices were sorted: out[..., to, ...] op= src[i], in place, for the run of equal
indices `to`. No order depends on the device: the same sums, bit by bit, in every run.

The first of a run of at most p.short walks all of it, in order. Of longer ones each chunk of p.chunk positions is walked, in which the run has
one or two parts, and what is reduced next (`level` 1) are these: of each chunk that of the run which comes from the chunk before it, and that of the
run which goes on behind it, each with its index, or 0xffffffff where there is none. A chunk in the middle of a run leaves its last element to
the second part.

dtype · op: `add`, `set`, `mul`, `max`, `min`; of `set` the last of a run alone counts · more: there are several chunks · level: 0 or 1
to: the places as u32 (see `places`) · order: where they stand in ascending order, as i64; both are laid out alike
Parts and their indices are [parts, lines].
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
    out_offset: u32,
    src_offset: u32,
    chunk: u32,
    short: u32,
    unused0: u32,
    unused1: u32,
    unused2: u32,
    // Of the result, the indices, the source.
    dim_strides: vec4<u32>,
    shape: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    src_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
{% set P = "u32" if T == "bool" else T %}
@group(0) @binding(0) var<storage, read> to: array<u32>;
{% if level == 0 %}
{{ t.input(1, "order", "i64w") }}
{{ t.input(2, "src", dtype) }}
{{ t.output(3, "out", dtype, "scattered") }}
{% set next = 4 %}
{% else %}
@group(0) @binding(1) var<storage, read> parts: array<{{ P }}>;
{{ t.output(2, "out", dtype, "scattered") }}
{% set next = 3 %}
{% endif %}
{% if more %}
@group(0) @binding({{ next }}) var<storage, read_write> next_to: array<u32>;
@group(0) @binding({{ next + 1 }}) var<storage, read_write> next_parts: array<{{ P }}>;
{% endif %}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

// Which element stands at a position, and of that one its index and its value; `from_index` and `from_src` are those of the line.
{% if level == 0 %}
fn element(from_index: u32, position: u32) -> u32 { return u32(order_at(from_index + position * p.dim_strides.y)); }
fn index_of(from_index: u32, k: u32) -> u32 { return to[from_index + k * p.dim_strides.y]; }
fn value_of(from_src: u32, k: u32) -> {{ T }} { return src_at(from_src + k * p.dim_strides.z); }
{% else %}
fn element(line: u32, position: u32) -> u32 { return position; }
fn index_of(line: u32, k: u32) -> u32 { return to[k * p.lines + line]; }
fn value_of(line: u32, k: u32) -> {{ T }} { return {{ t.cast("parts[k * p.lines + line]", P, T) }}; }
{% endif %}
fn index_at(from_index: u32, position: u32) -> u32 { return index_of(from_index, element(from_index, position)); }
{% if more and level == 0 %}

// Whether the run of an index that stands at a position has more than p.short elements.
fn is_long(from_index: u32, position: u32, chosen: u32, fresh: bool) -> bool {
    var begin = position;
    if !fresh {
        var low = 0u;
        if position >= p.short {
            low = position - p.short;
            if index_at(from_index, low) == chosen { return true; }
        }
        while low < begin {
            let middle = (low + begin) >> 1u;
            if index_at(from_index, middle) == chosen { begin = middle; } else { low = middle + 1u; }
        }
    }
    if begin + p.short >= p.length { return false; }
    return index_at(from_index, begin + p.short) == chosen;
}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let thread = group_index(group, groups) * 256u + lane;
    if thread >= p.lines * p.length { return; }
    let first = thread / p.lines;
    let line = thread % p.lines;
    var left = line;
    var i0 = p.out_offset;
    {% if level == 0 %}
    var i1 = 0u;
    var i2 = p.src_offset;
    {{ t.walk([("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides")]) }}
    {% else %}
    let i1 = line;
    let i2 = line;
    {{ t.walk([("i0", "out_strides")]) }}
    {% endif %}
    let k = element(i1, first);
    let chosen = index_of(i1, k);
    let counts = (chosen < p.extent) & (chosen != p.skip);
    let i = i0 + chosen * p.dim_strides.x;
    {% if op == "set" %}
    var last = counts;
    if last & (first + 1u < p.length) { last = index_at(i1, first + 1u) != chosen; }
    if last { out_put(i, value_of(i2, k)); }
    {% else %}
    var fresh = true;
    if first > 0u { fresh = index_at(i1, first - 1u) != chosen; }
    {% if more %}
    let chunk = first / p.chunk;
    let begin = chunk * p.chunk;
    let end = min(begin + p.chunk, p.length);
    var beyond = false;
    if counts & (end < p.length) { beyond = (index_at(i1, end - 1u) == chosen) & (index_at(i1, end) == chosen); }
    var long = {{ "true" if level > 0 else "false" }};
    {% if level == 0 %}
    if counts & (fresh | (first == begin) | ((first == end - 1u) & beyond)) { long = is_long(i1, first, chosen, fresh); }
    {% endif %}
    beyond = beyond & long;
    var filling = false;
    if beyond & (begin > 0u) { filling = (index_at(i1, begin) == chosen) & (index_at(i1, begin - 1u) == chosen); }
    let enters = counts & !fresh & long & (first == begin);
    let slot = chunk * 2u * p.lines + line;
    if (first == begin) & !enters { next_to[slot] = 0xffffffffu; }
    if (first == end - 1u) & !beyond { next_to[slot + p.lines] = 0xffffffffu; }
    let alone = filling & (first == end - 1u);
    if !counts | !(fresh | enters | alone) { return; }
    var stop = end;
    if filling & !alone { stop = end - 1u; }
    if !long { stop = p.length; }
    let part = enters | beyond;
    {% else %}
    if !counts | !fresh { return; }
    let stop = p.length;
    {% endif %}
    var all = value_of(i2, k);
    {% if more %}if !part { {% endif %}
    let before = out_at(i);
    all = {{ t.joined(op, T, "before", "all") }};
    {% if more %} } {% endif %}
    for (var next = first + 1u; next < stop; next++) {
        let k = element(i1, next);
        if index_of(i1, k) != chosen { break; }
        let v = value_of(i2, k);
        all = {{ t.joined(op, T, "all", "v") }};
    }
    {% if more %}
    if part {
        let at = select(slot + p.lines, slot, enters);
        next_to[at] = chosen;
        next_parts[at] = {{ t.cast("all", T, P) }};
        return;
    }
    {% endif %}
    out_put(i, all);
    {% endif %}
}
