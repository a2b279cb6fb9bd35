{#-
`scatter` for long lines with sorted indices: out[..., targets[i], ...] op= src[order[i]], in place. A run is a
  sequence of equal targets. The order of operations is fixed: the same bits in every run.

The first thread of a run of at most p.short processes the whole run, in order. For a longer run, the first
thread in each chunk of p.chunk positions reduces the part of the run in that chunk. The stage `join` then
combines the parts of each long run. It finds long runs in the sorted indices: such a run contains a multiple
of p.short, and the first one represents the run. So without long runs the stage costs next to nothing.

dtype · op: `add`, `set`, `mul`, `max`, `min`; with `set` only the last element of a run counts
stage: `runs` or `join` · long: a run may be longer than p.short
divisor: of the stage `join`: `run` divides a sum by the number of elements of its run, `all` by one more, else ``
targets: the indices in ascending order (see `resolve_indices`); those of a line follow each other
order: their positions in the line; both have the same layout
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
    // Strides of the indexed dimension: of the result, the source.
    dim_strides: vec2<u32>,
    shape: array<vec4<u32>, 2>,
    out_strides: array<vec4<u32>, 2>,
    index_strides: array<vec4<u32>, 2>,
    src_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set T = t.value(dtype) %}
{% set P = "u32" if T == "bool" else T %}
@group(0) @binding(0) var<storage, read> targets: array<u32>;
{% if stage == "runs" %}
@group(0) @binding(1) var<storage, read> order: array<u32>;
{{ t.input(2, "src", dtype) }}
{{ t.output(3, "out", dtype, "scattered") }}
{% if long %}
@group(0) @binding(4) var<storage, read_write> parts: array<{{ P }}>;
{% endif %}
{% else %}
@group(0) @binding(1) var<storage, read> parts: array<{{ P }}>;
{{ t.output(2, "out", dtype, "scattered") }}
{% endif %}
{% if T == "f64" and op in ["max", "min"] %}{{ t.is_nan(T) }}{% endif %}

// Returns the index at a sorted position; `index_base` is the offset of the line.
fn target_at(index_base: u32, position: u32) -> u32 { return targets[index_base + position]; }
fn is_valid_target(target_index: u32) -> bool { return (target_index < p.extent) & (target_index != p.skip); }
// Slot of a run's part in a chunk: of the run that began before the chunk, or (`side` 1) of the one that
// continues after it.
fn part_slot(chunk: u32, side: u32, line: u32) -> u32 { return (chunk * 2u + side) * p.lines + line; }
{% if long or stage == "join" %}

// Reports whether the run that begins at a position has more than p.short elements.
fn is_long_run(index_base: u32, begin: u32, target_index: u32) -> bool {
    if begin + p.short >= p.length { return false; }
    return target_at(index_base, begin + p.short) == target_index;
}

// Returns the beginning of the run of more than p.short elements that contains a position and the previous
// one. A beginning at least p.short before the position is reported as exactly p.short before. For shorter
// runs, returns 0xffffffff.
fn find_run_begin(index_base: u32, position: u32, target_index: u32) -> u32 {
    // Such a run extends at least half of p.short to one side. This rejects most positions early.
    let half = p.short >> 1u;
    var spans_half = false;
    if position + half < p.length { spans_half = target_at(index_base, position + half) == target_index; }
    if !spans_half & (position >= half) { spans_half = target_at(index_base, position - half) == target_index; }
    if !spans_half { return 0xffffffffu; }
    var low = 0u;
    if position >= p.short {
        low = position - p.short;
        if target_at(index_base, low) == target_index { return low; }
    }
    var begin = position - 1u;
    while low < begin {
        let middle = (low + begin) >> 1u;
        if target_at(index_base, middle) == target_index { begin = middle; } else { low = middle + 1u; }
    }
    return select(0xffffffffu, begin, is_long_run(index_base, begin, target_index));
}
{% endif %}
{% if stage == "runs" %}

fn value_of(src_base: u32, k: u32) -> {{ T }} { return src_at(src_base + k * p.dim_strides.y); }
// Returns the element at a sorted position.
fn element_at(index_base: u32, position: u32) -> u32 { return order[index_base + position]; }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if global_index >= p.lines * p.length { return; }
    let first = global_index / p.lines;
    let line = global_index % p.lines;
    var linear_index = line;
    var i0 = p.out_offset;
    var i1 = 0u;
    var i2 = p.src_offset;
    {{ t.strided_offsets([("i0", "out_strides"), ("i1", "index_strides"), ("i2", "src_strides")]) }}
    let k = element_at(i1, first);
    let target_index = target_at(i1, first);
    let i = i0 + target_index * p.dim_strides.x;
    {% if op == "set" %}
    var last = is_valid_target(target_index);
    if last & (first + 1u < p.length) { last = target_at(i1, first + 1u) != target_index; }
    if last { out_put(i, value_of(i2, k)); }
    {% else %}
    if !is_valid_target(target_index) { return; }
    var starts_run = true;
    if first > 0u { starts_run = target_at(i1, first - 1u) != target_index; }
    {% if long %}
    let chunk = first / p.chunk;
    let end = min((chunk + 1u) * p.chunk, p.length);
    var continues_run = false;
    if !starts_run & (first == chunk * p.chunk) {
        continues_run = find_run_begin(i1, first, target_index) != 0xffffffffu;
    }
    if !(starts_run | continues_run) { return; }
    // Most runs end before their length matters.
    let check_position = select(0xffffffffu, first + 64u, starts_run);
    var limit = p.length;
    if continues_run { limit = end; }
    var long = false;
    {% else %}
    if !starts_run { return; }
    let limit = p.length;
    {% endif %}
    let start = value_of(i2, k);
    var acc = start;
    {% if long %}if starts_run { {% endif %}
    let old = out_at(i);
    acc = {{ t.combine(op, T, "old", "acc") }};
    {% if long %} } {% endif %}
    for (var next = first + 1u; next < limit; next++) {
        {% if long %}
        if next == check_position {
            long = is_long_run(i1, first, target_index);
            if long { break; }
        }
        {% endif %}
        if target_at(i1, next) != target_index { break; }
        let v = value_of(i2, element_at(i1, next));
        acc = {{ t.combine(op, T, "acc", "v") }};
    }
    {% if long %}
    if long {
        // The stage `join` adds the previous value of the result.
        acc = start;
        for (var next = first + 1u; next < end; next++) {
            let v = value_of(i2, element_at(i1, next));
            acc = {{ t.combine(op, T, "acc", "v") }};
        }
    }
    if continues_run | long {
        parts[part_slot(chunk, select(0u, 1u, long), line)] = {{ t.cast("acc", T, P) }};
        return;
    }
    {% endif %}
    out_put(i, acc);
    {% endif %}
}
{% else %}

// Returns part `part` of a run that begins in `chunk`.
fn part_at(chunk: u32, part: u32, line: u32) -> {{ T }} {
    return {{ t.cast("parts[part_slot(chunk + part, select(0u, 1u, part == 0u), line)]", P, T) }};
}

// `length` is the number of elements of the run.
fn combine_into_out(i: u32, acc: {{ T }}, length: u32) {
    let old = out_at(i);
    let both = {{ t.combine(op, T, "old", "acc") }};
    {% if divisor %}
    out_put(i, both / {{ T }}(length{{ " + 1u" if divisor == "all" }}));
    {% else %}
    out_put(i, both);
    {% endif %}
}

// Runs with so many parts that all threads combine them: first chunk, number of parts, line, element of the
// result.
var<workgroup> long_run_count: atomic<u32>;
// The count again, equal in all threads, for the barriers in the loop.
var<workgroup> shared_run_count: u32;
var<workgroup> long_runs: array<vec4<u32>, 256>;
{% if divisor %}
var<workgroup> run_lengths: array<u32, 256>;
{% endif %}
var<workgroup> values: array<{{ P }}, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if thread == 0u { atomicStore(&long_run_count, 0u); }
    workgroupBarrier();
    if global_index < p.lines * p.candidates {
        let line = global_index / p.candidates;
        let position = (global_index % p.candidates + 1u) * p.short;
        var linear_index = line;
        var i0 = p.out_offset;
        var i1 = 0u;
        {{ t.strided_offsets([("i0", "out_strides"), ("i1", "index_strides")]) }}
        let target_index = target_at(i1, position);
        var begin = 0xffffffffu;
        if is_valid_target(target_index) {
            if target_at(i1, position - 1u) == target_index { begin = find_run_begin(i1, position, target_index); }
            // The run began earlier: another multiple represents it.
            if (begin == position - p.short) & (begin > 0u) {
                if target_at(i1, begin - 1u) == target_index { begin = 0xffffffffu; }
            }
        }
        if begin != 0xffffffffu {
            // Finds the last element of the run.
            var end = begin + p.short;
            var high = p.length - 1u;
            while end < high {
                let middle = high - ((high - end) >> 1u);
                if target_at(i1, middle) == target_index { end = middle; } else { high = middle - 1u; }
            }
            let chunk = begin / p.chunk;
            let count = end / p.chunk - chunk + 1u;
            let i = i0 + target_index * p.dim_strides.x;
            let length = end - begin + 1u;
            if count > 64u {
                let slot = atomicAdd(&long_run_count, 1u);
                long_runs[slot] = vec4<u32>(chunk, count, line, i);
                {% if divisor %}
                run_lengths[slot] = length;
                {% endif %}
            } else {
                var acc = part_at(chunk, 0u, line);
                for (var part = 1u; part < count; part++) {
                    let v = part_at(chunk, part, line);
                    acc = {{ t.combine(op, T, "acc", "v") }};
                }
                combine_into_out(i, acc, length);
            }
        }
    }
    workgroupBarrier();
    // The order of the list does not matter: each run is combined by itself.
    if thread == 0u { shared_run_count = atomicLoad(&long_run_count); }
    let count = workgroupUniformLoad(&shared_run_count);
    for (var r = 0u; r < count; r++) {
        let run = long_runs[r];
        let part_count = min(run.y, 256u);
        if thread < part_count {
            var acc = part_at(run.x, thread, run.z);
            for (var part = thread + 256u; part < run.y; part += 256u) {
                let v = part_at(run.x, part, run.z);
                acc = {{ t.combine(op, T, "acc", "v") }};
            }
            values[thread] = {{ t.cast("acc", T, P) }};
        }
        workgroupBarrier();
        for (var stride = 128u; stride > 0u; stride = stride / 2u) {
            if (thread < stride) & (thread + stride < part_count) {
                let a = {{ t.cast("values[thread]", P, T) }};
                let b = {{ t.cast("values[thread + stride]", P, T) }};
                let both = {{ t.combine(op, T, "a", "b") }};
                values[thread] = {{ t.cast("both", T, P) }};
            }
            workgroupBarrier();
        }
        {% set length = "run_lengths[r]" if divisor else "0u" %}
        if thread == 0u { combine_into_out(run.w, {{ t.cast("values[0]", P, T) }}, {{ length }}); }
        workgroupBarrier();
    }
}
{% endif %}
