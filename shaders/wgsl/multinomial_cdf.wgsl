{#-
Cumulative class weights of rows, scaled to 0 to 1, for sampling: [rows, classes], in f32. A draw u selects
  the first class whose end is above u. A workgroup processes a row, and each thread the ends of neighbouring
  classes.

A weight that is not finite and positive counts as zero, so its class ends where the previous class does. The
last class with a weight and all later ones end at 2, which no draw reaches.
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    classes: u32,
    // Classes of a thread.
    per_thread: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> weights: array<f32>;
@group(0) @binding(1) var<storage, read_write> cdf: array<f32>;

var<workgroup> shared_values: array<f32, 256>;
var<workgroup> shared_bits: array<u32, 256>;
var<workgroup> shared_ends: array<u32, 256>;

// Positive and finite, compared by bits: bits of positive floats are ordered like the floats.
fn counts(weight: u32) -> bool { return (weight > 0u) & (weight < 0x7f800000u); }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = group_index(group, groups);
    if row >= p.rows { return; }
    let base = row * p.classes;
    let begin = min(thread * p.per_thread, p.classes);
    let end = min(begin + p.per_thread, p.classes);
    var max_bits = 0u;
    // One more than the last class with a weight.
    var thread_end = 0u;
    for (var i = begin; i < end; i++) {
        let weight = bitcast<u32>(weights[base + i]);
        if counts(weight) {
            max_bits = max(max_bits, weight);
            thread_end = i + 1u;
        }
    }
    shared_bits[thread] = max_bits;
    shared_ends[thread] = thread_end;
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride = stride >> 1u) {
        if thread < stride {
            shared_bits[thread] = max(shared_bits[thread], shared_bits[thread + stride]);
            shared_ends[thread] = max(shared_ends[thread], shared_ends[thread + stride]);
        }
        workgroupBarrier();
    }
    let largest = bitcast<f32>(shared_bits[0]);
    let weighted_end = shared_ends[0];
    // Scaled by the largest weight: the sum is finite, and the reciprocal is a normal float.
    var scale = 1.0;
    if largest > 1e30 { scale = 0x1p-4f; }
    if largest < 1e-18 { scale = 0x1p+64f; }
    let scaled = largest * scale;
    var inverse_largest = 1.0;
    if scaled > 0.0 { inverse_largest = 1.0 / scaled; }
    var thread_sum = 0.0;
    for (var i = begin; i < end; i++) {
        let weight = weights[base + i];
        if counts(bitcast<u32>(weight)) { thread_sum += weight * scale * inverse_largest; }
    }
    // The sum before a thread's classes.
    var sum = thread_sum;
    shared_values[thread] = sum;
    workgroupBarrier();
    for (var offset = 1u; offset < 256u; offset = offset << 1u) {
        if thread >= offset { sum += shared_values[thread - offset]; }
        workgroupBarrier();
        shared_values[thread] = sum;
        workgroupBarrier();
    }
    var running = 0.0;
    if thread > 0u { running = shared_values[thread - 1u]; }
    workgroupBarrier();
    // Threads sum in different orders: taking the running maximum keeps ends constant for classes without
    // weight.
    var highest = 0.0;
    for (var i = begin; i < end; i++) {
        let weight = weights[base + i];
        if counts(bitcast<u32>(weight)) {
            running += weight * scale * inverse_largest;
            highest = max(highest, running);
        }
        cdf[base + i] = highest;
    }
    shared_values[thread] = highest;
    workgroupBarrier();
    for (var offset = 1u; offset < 256u; offset = offset << 1u) {
        if thread >= offset { highest = max(highest, shared_values[thread - offset]); }
        workgroupBarrier();
        shared_values[thread] = highest;
        workgroupBarrier();
    }
    let total = shared_values[255];
    // Multiplication by one factor is monotonic; division need not be.
    var normalizer = 1.0;
    if total > 0.0 { normalizer = 1.0 / total; }
    var before = 0.0;
    if thread > 0u { before = shared_values[thread - 1u]; }
    for (var i = begin; i < end; i++) {
        let reached = max(before, cdf[base + i]);
        cdf[base + i] = select(reached * normalizer, 2.0, i + 1u >= weighted_end);
    }
}
