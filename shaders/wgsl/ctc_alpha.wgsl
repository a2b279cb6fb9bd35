{#-
Recursion of the CTC loss over time steps: log-probabilities `alphas` [steps, batch, width] that a path is in a state
  at a step, or the gradient of the scores. A workgroup has one example, and a thread the states 256 apart.

pass: "forward" or "backward"
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
struct Params {
    steps: u32,
    batch: u32,
    width: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
// Log-probabilities of each state's label, [steps, batch, width].
@group(0) @binding(0) var<storage, read> scores: array<f32>;
// True for states that are not entered from two states before, [batch, width].
{{ t.input(1, "cannot_skip", "bool") }}
// Steps of each example.
@group(0) @binding(2) var<storage, read> lengths: array<i32>;
{% if pass == "forward" %}
@group(0) @binding(3) var<storage, read_write> alphas: array<f32>;
{% else %}
@group(0) @binding(3) var<storage, read> alphas: array<f32>;
// Gradient of the alphas of the step, [batch, width]; at first of the last step.
@group(0) @binding(4) var<storage, read_write> carry: array<f32>;
@group(0) @binding(5) var<storage, read_write> grad: array<f32>;
{% endif %}

// Stands for log(0).
const LOG_ZERO: f32 = -1e30;

// Returns the logarithm of the sum over the states from which state `s` is entered. `before` is the index of the
// example's first alpha of the previous step.
fn enter(row: u32, before: u32, s: u32) -> f32 {
    let a = alphas[before + s];
    var b = LOG_ZERO;
    if s >= 1u { b = alphas[before + s - 1u]; }
    var c = LOG_ZERO;
    if s >= 2u { if !cannot_skip_at(row * p.width + s) { c = alphas[before + s - 2u]; } }
    let largest = max(a, max(b, c));
    return largest + m_log(m_exp(a - largest) + m_exp(b - largest) + m_exp(c - largest));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = group_index(group, groups);
    if row >= p.batch { return; }
    let base = row * p.width;
    let plane = p.batch * p.width;
    let length = lengths[row];
    {% if pass == "forward" %}
    for (var s = thread; s < p.width; s += 256u) { alphas[base + s] = select(LOG_ZERO, scores[base + s], s < 2u); }
    storageBarrier();
    workgroupBarrier();
    for (var step = 1u; step < p.steps; step++) {
        let at = step * plane + base;
        for (var s = thread; s < p.width; s += 256u) {
            if length <= i32(step) {
                alphas[at + s] = alphas[at - plane + s];
            } else {
                alphas[at + s] = m_max(enter(row, at - plane, s) + scores[at + s], LOG_ZERO);
            }
        }
        storageBarrier();
        workgroupBarrier();
    }
    {% else %}
    for (var step = p.steps - 1u; step > 0u; step--) {
        let at = step * plane + base;
        for (var s = thread; s < p.width; s += 256u) {
            var g = carry[base + s];
            if length <= i32(step) { g = 0.0; }
            // The limit at log(0) has no gradient.
            if alphas[at + s] <= LOG_ZERO { g = 0.0; }
            grad[at + s] = g;
        }
        storageBarrier();
        workgroupBarrier();
        for (var s = thread; s < p.width; s += 256u) {
            if length > i32(step) {
                let a = alphas[at - plane + s];
                var g = grad[at + s] * m_exp(a - enter(row, at - plane, s));
                if s + 1u < p.width { g += grad[at + s + 1u] * m_exp(a - enter(row, at - plane, s + 1u)); }
                if s + 2u < p.width {
                    if !cannot_skip_at(base + s + 2u) {
                        g += grad[at + s + 2u] * m_exp(a - enter(row, at - plane, s + 2u));
                    }
                }
                carry[base + s] = g;
            }
        }
        storageBarrier();
        workgroupBarrier();
    }
    for (var s = thread; s < p.width; s += 256u) { grad[base + s] = select(0.0, carry[base + s], s < 2u); }
    {% endif %}
}
