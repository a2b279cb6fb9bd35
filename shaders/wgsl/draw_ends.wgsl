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
    each: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> weights: array<f32>;
@group(0) @binding(1) var<storage, read_write> ends: array<f32>;

var<workgroup> numbers: array<f32, 256>;
var<workgroup> bits: array<u32, 256>;
var<workgroup> lasts: array<u32, 256>;

// Positive and finite, compared by bits: bits of positive floats are ordered like the floats.
fn counts(weight: u32) -> bool { return (weight > 0u) & (weight < 0x7f800000u); }

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let row = group_index(group, groups);
    if row >= p.rows { return; }
    let base = row * p.classes;
    let begin = min(lane * p.each, p.classes);
    let end = min(begin + p.each, p.classes);
    var most = 0u;
    // One more than the last class with a weight.
    var last = 0u;
    for (var i = begin; i < end; i++) {
        let weight = bitcast<u32>(weights[base + i]);
        if counts(weight) {
            most = max(most, weight);
            last = i + 1u;
        }
    }
    bits[lane] = most;
    lasts[lane] = last;
    workgroupBarrier();
    for (var reach = 128u; reach > 0u; reach = reach >> 1u) {
        if lane < reach {
            bits[lane] = max(bits[lane], bits[lane + reach]);
            lasts[lane] = max(lasts[lane], lasts[lane + reach]);
        }
        workgroupBarrier();
    }
    let largest = bitcast<f32>(bits[0]);
    let weighted = lasts[0];
    // Scaled by the largest weight: the sum is finite, and the reciprocal is a normal float.
    var scale = 1.0;
    if largest > 1e30 { scale = 0x1p-4f; }
    if largest < 1e-18 { scale = 0x1p+64f; }
    let scaled = largest * scale;
    var part = 1.0;
    if scaled > 0.0 { part = 1.0 / scaled; }
    var own = 0.0;
    for (var i = begin; i < end; i++) {
        let weight = weights[base + i];
        if counts(bitcast<u32>(weight)) { own += weight * scale * part; }
    }
    // The sum before a thread's classes.
    var sum = own;
    numbers[lane] = sum;
    workgroupBarrier();
    for (var reach = 1u; reach < 256u; reach = reach << 1u) {
        if lane >= reach { sum += numbers[lane - reach]; }
        workgroupBarrier();
        numbers[lane] = sum;
        workgroupBarrier();
    }
    var running = 0.0;
    if lane > 0u { running = numbers[lane - 1u]; }
    workgroupBarrier();
    // Threads sum in different orders: taking the running maximum keeps ends constant for classes without
    // weight.
    var highest = 0.0;
    for (var i = begin; i < end; i++) {
        let weight = weights[base + i];
        if counts(bitcast<u32>(weight)) {
            running += weight * scale * part;
            highest = max(highest, running);
        }
        ends[base + i] = highest;
    }
    numbers[lane] = highest;
    workgroupBarrier();
    for (var reach = 1u; reach < 256u; reach = reach << 1u) {
        if lane >= reach { highest = max(highest, numbers[lane - reach]); }
        workgroupBarrier();
        numbers[lane] = highest;
        workgroupBarrier();
    }
    let total = numbers[255];
    // Multiplication by one factor is monotonic; division need not be.
    var share = 1.0;
    if total > 0.0 { share = 1.0 / total; }
    var before = 0.0;
    if lane > 0u { before = numbers[lane - 1u]; }
    for (var i = begin; i < end; i++) {
        let reached = max(before, ends[base + i]);
        ends[base + i] = select(reached * share, 2.0, i + 1u >= weighted);
    }
}
