{#-
`scatter` for long lines with sorted indices: out[..., to, ...] op= src[i], in place, for each run of equal
  indices `to`. The order of operations is fixed: the same bits in every run.

The first thread of a run of at most p.short processes the whole run, in order. For a longer run, the first
thread in each chunk of p.chunk positions reduces the part of the run in that chunk. The stage `join` then
combines the parts of each long run. It finds long runs in the sorted indices: such a run contains a multiple
of p.short, and the first one represents the run. So without long runs the stage costs next to nothing.

dtype · op: `add`, `set`, `mul`, `max`, `min`; with `set` only the last element of a run counts
stage: `walk` or `join` · long: a run may be longer than p.short
to: the indices as u32 (see `resolve_indices`)
order: their positions in ascending order, as i64; both have the same layout
parts: [chunks, 2, lines]; for each chunk the part of the run that began before it, and of the run that
  continues after it
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
    // Multiples of p.short in a line, without 0.
    candidates: u32,
    unused0: u32,
    unused1: u32,
    // Strides of the indexed dimension: of the result, the indices, the source.
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
{{ t.input(1, "order", "i64w") }}
{% if stage == "walk" %}
{{ t.input(2, "src", dtype) }}
{{ t.output(3, "out", dtype, "scattered") }}
{% if long %}
@group(0) @binding(4) var<storage, read_write> parts: array<{{ P }}>;
{% endif %}
{% else %}
@group(0) @binding(2) var<storage, read> parts: array<{{ P }}>;
{{ t.output(3, "out", dtype, "scattered") }}
{% endif %}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

// Returns the element at a sorted position, and its index; `from_index` is the offset of the line.
fn element(from_index: u32, position: u32) -> u32 { return u32(order_at(from_index + position * p.dim_strides.y)); }
fn index_of(from_index: u32, k: u32) -> u32 { return to[from_index + k * p.dim_strides.y]; }
fn index_at(from_index: u32, position: u32) -> u32 { return index_of(from_index, element(from_index, position)); }
fn counts(chosen: u32) -> bool { return (chosen < p.extent) & (chosen != p.skip); }
// Slot of a run's part in a chunk: of the run that began before the chunk, or (`side` 1) of the one that
// continues after it.
fn part_slot(chunk: u32, side: u32, line: u32) -> u32 { return (chunk * 2u + side) * p.lines + line; }
{% if long or stage == "join" %}

// Reports whether the run that begins at a position has more than p.short elements.
fn is_long_run(from_index: u32, begin: u32, chosen: u32) -> bool {
    if begin + p.short >= p.length { return false; }
    return index_at(from_index, begin + p.short) == chosen;
}

// Returns the beginning of the run of more than p.short elements that contains a position and the previous
// one. A beginning at least p.short before the position is reported as exactly p.short before. For shorter
// runs, returns 0xffffffff.
fn begin_of(from_index: u32, position: u32, chosen: u32) -> u32 {
    // Such a run extends at least half of p.short to one side. This rejects most positions early.
    let half = p.short >> 1u;
    var near = false;
    if position + half < p.length { near = index_at(from_index, position + half) == chosen; }
    if !near & (position >= half) { near = index_at(from_index, position - half) == chosen; }
    if !near { return 0xffffffffu; }
    var low = 0u;
    if position >= p.short {
        low = position - p.short;
        if index_at(from_index, low) == chosen { return low; }
    }
    var begin = position - 1u;
    while low < begin {
        let middle = (low + begin) >> 1u;
        if index_at(from_index, middle) == chosen { begin = middle; } else { low = middle + 1u; }
    }
    return select(0xffffffffu, begin, is_long_run(from_index, begin, chosen));
}
{% endif %}
{% if stage == "walk" %}

fn value_of(from_src: u32, k: u32) -> {{ T }} { return src_at(from_src + k * p.dim_strides.z); }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let thread = group_index(group, groups) * 256u + lane;
    if thread >= p.lines * p.length { return; }
    let first = thread / p.lines;
    let line = thread % p.lines;
    var left = line;
    var i0 = p.out_offset;
    var i1 = 0u;
    var i2 = p.src_offset;
    {{ t.walk([("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides")]) }}
    let k = element(i1, first);
    let chosen = index_of(i1, k);
    let i = i0 + chosen * p.dim_strides.x;
    {% if op == "set" %}
    var last = counts(chosen);
    if last & (first + 1u < p.length) { last = index_at(i1, first + 1u) != chosen; }
    if last { out_put(i, value_of(i2, k)); }
    {% else %}
    if !counts(chosen) { return; }
    var fresh = true;
    if first > 0u { fresh = index_at(i1, first - 1u) != chosen; }
    {% if long %}
    let chunk = first / p.chunk;
    let end = min((chunk + 1u) * p.chunk, p.length);
    var part = false;
    if !fresh & (first == chunk * p.chunk) { part = begin_of(i1, first, chosen) != 0xffffffffu; }
    if !(fresh | part) { return; }
    // Most runs end before their length matters.
    let watch = select(0xffffffffu, first + 64u, fresh);
    var stop = p.length;
    if part { stop = end; }
    var long = false;
    {% else %}
    if !fresh { return; }
    let stop = p.length;
    {% endif %}
    let start = value_of(i2, k);
    var all = start;
    {% if long %}if fresh { {% endif %}
    let before = out_at(i);
    all = {{ t.combine(op, T, "before", "all") }};
    {% if long %} } {% endif %}
    for (var next = first + 1u; next < stop; next++) {
        {% if long %}
        if next == watch {
            long = is_long_run(i1, first, chosen);
            if long { break; }
        }
        {% endif %}
        let k = element(i1, next);
        if index_of(i1, k) != chosen { break; }
        let v = value_of(i2, k);
        all = {{ t.combine(op, T, "all", "v") }};
    }
    {% if long %}
    if long {
        // The stage `join` adds the previous value of the result.
        all = start;
        for (var next = first + 1u; next < end; next++) {
            let v = value_of(i2, element(i1, next));
            all = {{ t.combine(op, T, "all", "v") }};
        }
    }
    if part | long {
        parts[part_slot(chunk, select(0u, 1u, long), line)] = {{ t.cast("all", T, P) }};
        return;
    }
    {% endif %}
    out_put(i, all);
    {% endif %}
}
{% else %}

// Returns part `number` of a run that begins in `chunk`.
fn part_at(chunk: u32, number: u32, line: u32) -> {{ T }} {
    return {{ t.cast("parts[part_slot(chunk + number, select(0u, 1u, number == 0u), line)]", P, T) }};
}

fn finish(i: u32, all: {{ T }}) {
    let before = out_at(i);
    out_put(i, {{ t.combine(op, T, "before", "all") }});
}

// Runs with so many parts that all threads combine them: first chunk, number of parts, line, element of the
// result.
var<workgroup> listed: atomic<u32>;
var<workgroup> runs: array<vec4<u32>, 256>;
var<workgroup> values: array<{{ P }}, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let thread = group_index(group, groups) * 256u + lane;
    if lane == 0u { atomicStore(&listed, 0u); }
    workgroupBarrier();
    if thread < p.lines * p.candidates {
        let line = thread / p.candidates;
        let position = (thread % p.candidates + 1u) * p.short;
        var left = line;
        var i0 = p.out_offset;
        var i1 = 0u;
        {{ t.walk([("i0", "out_strides"), ("i1", "index_strides")]) }}
        let chosen = index_at(i1, position);
        var begin = 0xffffffffu;
        if counts(chosen) {
            if index_at(i1, position - 1u) == chosen { begin = begin_of(i1, position, chosen); }
            // The run began earlier: another multiple represents it.
            if (begin == position - p.short) & (begin > 0u) {
                if index_at(i1, begin - 1u) == chosen { begin = 0xffffffffu; }
            }
        }
        if begin != 0xffffffffu {
            // Finds the last element of the run.
            var end = begin + p.short;
            var high = p.length - 1u;
            while end < high {
                let middle = high - ((high - end) >> 1u);
                if index_at(i1, middle) == chosen { end = middle; } else { high = middle - 1u; }
            }
            let chunk = begin / p.chunk;
            let count = end / p.chunk - chunk + 1u;
            let i = i0 + chosen * p.dim_strides.x;
            if count > 64u {
                runs[atomicAdd(&listed, 1u)] = vec4<u32>(chunk, count, line, i);
            } else {
                var all = part_at(chunk, 0u, line);
                for (var number = 1u; number < count; number++) {
                    let v = part_at(chunk, number, line);
                    all = {{ t.combine(op, T, "all", "v") }};
                }
                finish(i, all);
            }
        }
    }
    workgroupBarrier();
    // The order of the list does not matter: each run is combined by itself.
    let count = atomicLoad(&listed);
    for (var r = 0u; r < count; r++) {
        let run = runs[r];
        let live = min(run.y, 256u);
        if lane < live {
            var all = part_at(run.x, lane, run.z);
            for (var number = lane + 256u; number < run.y; number += 256u) {
                let v = part_at(run.x, number, run.z);
                all = {{ t.combine(op, T, "all", "v") }};
            }
            values[lane] = {{ t.cast("all", T, P) }};
        }
        workgroupBarrier();
        for (var reach = 128u; reach > 0u; reach = reach / 2u) {
            if (lane < reach) & (lane + reach < live) {
                let a = {{ t.cast("values[lane]", P, T) }};
                let b = {{ t.cast("values[lane + reach]", P, T) }};
                let both = {{ t.combine(op, T, "a", "b") }};
                values[lane] = {{ t.cast("both", T, P) }};
            }
            workgroupBarrier();
        }
        if lane == 0u { finish(run.w, {{ t.cast("values[0]", P, T) }}); }
        workgroupBarrier();
    }
}
{% endif %}
