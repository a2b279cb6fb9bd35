{#-
One time step of a recurrent layer, after its matrix products: gates, state and output of every element of
  [batch, hidden], or their gradients. One invocation has one element of all gates.

kind: "lstm", "gru", "tanh" or "relu" · pass: "forward" or "backward"
dtype: of everything but the running state, which is f32 · keep: forward saves values for backward
lengths: dtype of the sequences' lengths, or ""; a sequence that has ended keeps its state
-#}
{%- import "types" as t -%}
{% set gates = 4 if kind == "lstm" else 3 if kind == "gru" else 1 %}
{{ t.prelude() }}
{% include "math/base" %}
{% include "math/exp" %}
struct Params {
    n: u32,
    hidden: u32,
    // Index of the time step, for the lengths.
    step: u32,
    // Products of the input: offset, and stride between sequences. Backward: of the result's gradient, dense.
    input_offset: u32,
    input_stride: u32,
    // Products of the state, dense. Backward: the gradient from the next step.
    carry_offset: u32,
    out_offset: u32,
    saved_offset: u32,
    lengths_offset: u32,
    // Backward: the gradients of the gates.
    gates_offset: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", dtype) }}
{{ t.input(1, "carry", dtype) }}
// Two planes of n. Forward: output and cell. Backward: the state's gradient that bypasses the products, and
// the cell's gradient.
{{ t.output(2, "state", "f32") }}
{% if pass == "forward" %}
{{ t.output(3, "out", dtype, "scattered") }}
{% set next = 4 %}
{% if keep %}{{ t.output(4, "saved", dtype, "scattered") }}{% set next = 5 %}{% endif %}
{% else %}
{{ t.input(3, "saved", dtype) }}
{{ t.output(4, "gates", dtype, "scattered") }}
{% set next = 5 %}
{% if kind == "gru" %}{{ t.output(5, "inner", dtype, "scattered") }}{% set next = 6 %}{% endif %}
{% endif %}
{% if lengths %}{{ t.input(next, "lengths", lengths) }}{% endif %}

{% if pass == "forward" %}
fn input_gate(b: u32, j: u32, gate: u32) -> f32 {
    return input_at(p.input_offset + b * p.input_stride + gate * p.hidden + j);
}
fn carry_gate(b: u32, j: u32, gate: u32) -> f32 {
    return carry_at(p.carry_offset + (b * {{ gates }}u + gate) * p.hidden + j);
}
{% endif %}
{% if gates > 1 %}
fn saved_index(b: u32, j: u32, k: u32) -> u32 { return p.saved_offset + (b * 5u + k) * p.hidden + j; }
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 256u + lane;
    if i >= p.n { return; }
    let b = i / p.hidden;
    let j = i % p.hidden;
    {% if lengths %}
    let ended = i32(p.step) >= i32(lengths_at(p.lengths_offset + b));
    {% endif %}
    {% if pass == "forward" %}
    {% if lengths %}
    if ended {
        out_put(p.out_offset + i, state_at(i));
        return;
    }
    {% endif %}
    {% if kind == "lstm" %}
    let enter = m_sigmoid(input_gate(b, j, 0u) + carry_gate(b, j, 0u));
    let forget = m_sigmoid(input_gate(b, j, 1u) + carry_gate(b, j, 1u));
    let fresh = m_tanh(input_gate(b, j, 2u) + carry_gate(b, j, 2u));
    let leave = m_sigmoid(input_gate(b, j, 3u) + carry_gate(b, j, 3u));
    let before = state_at(p.n + i);
    let cell = forget * before + enter * fresh;
    let h = leave * m_tanh(cell);
    state_put(p.n + i, cell);
    {% if keep %}
    saved_put(saved_index(b, j, 0u), enter);
    saved_put(saved_index(b, j, 1u), forget);
    saved_put(saved_index(b, j, 2u), fresh);
    saved_put(saved_index(b, j, 3u), leave);
    saved_put(saved_index(b, j, 4u), before);
    {% endif %}
    {% elif kind == "gru" %}
    let reset = m_sigmoid(input_gate(b, j, 0u) + carry_gate(b, j, 0u));
    let stay = m_sigmoid(input_gate(b, j, 1u) + carry_gate(b, j, 1u));
    let inside = carry_gate(b, j, 2u);
    let fresh = m_tanh(input_gate(b, j, 2u) + reset * inside);
    let before = state_at(i);
    let h = fresh + stay * (before - fresh);
    {% if keep %}
    saved_put(saved_index(b, j, 0u), reset);
    saved_put(saved_index(b, j, 1u), stay);
    saved_put(saved_index(b, j, 2u), fresh);
    saved_put(saved_index(b, j, 3u), inside);
    saved_put(saved_index(b, j, 4u), before);
    {% endif %}
    {% else %}
    let sum = input_gate(b, j, 0u) + carry_gate(b, j, 0u);
    let h = {{ "m_tanh(sum)" if kind == "tanh" else "m_max(sum, 0.0)" }};
    {% endif %}
    state_put(i, h);
    out_put(p.out_offset + i, h);
    {% else %}
    let dh = input_at(p.input_offset + i) + carry_at(p.carry_offset + i) + state_at(i);
    let to = p.gates_offset + b * {{ gates }}u * p.hidden + j;
    {% if lengths %}
    if ended {
        {% for k in range(gates) %}
        gates_put(to + {{ k }}u * p.hidden, 0.0);
        {% if kind == "gru" %}inner_put(to + {{ k }}u * p.hidden, 0.0);{% endif %}
        {% endfor %}
        state_put(i, dh);
        return;
    }
    {% endif %}
    {% if kind == "lstm" %}
    let enter = saved_at(saved_index(b, j, 0u));
    let forget = saved_at(saved_index(b, j, 1u));
    let fresh = saved_at(saved_index(b, j, 2u));
    let leave = saved_at(saved_index(b, j, 3u));
    let before = saved_at(saved_index(b, j, 4u));
    let open = m_tanh(forget * before + enter * fresh);
    let dc = state_at(p.n + i) + dh * leave * (1.0 - open * open);
    gates_put(to, dc * fresh * enter * (1.0 - enter));
    gates_put(to + p.hidden, dc * before * forget * (1.0 - forget));
    gates_put(to + 2u * p.hidden, dc * enter * (1.0 - fresh * fresh));
    gates_put(to + 3u * p.hidden, dh * open * leave * (1.0 - leave));
    state_put(i, 0.0);
    state_put(p.n + i, dc * forget);
    {% elif kind == "gru" %}
    let reset = saved_at(saved_index(b, j, 0u));
    let stay = saved_at(saved_index(b, j, 1u));
    let fresh = saved_at(saved_index(b, j, 2u));
    let inside = saved_at(saved_index(b, j, 3u));
    let before = saved_at(saved_index(b, j, 4u));
    let dn = dh * (1.0 - stay) * (1.0 - fresh * fresh);
    let dr = dn * inside * reset * (1.0 - reset);
    let dz = dh * (before - fresh) * stay * (1.0 - stay);
    gates_put(to, dr);
    gates_put(to + p.hidden, dz);
    gates_put(to + 2u * p.hidden, dn);
    inner_put(to, dr);
    inner_put(to + p.hidden, dz);
    inner_put(to + 2u * p.hidden, dn * reset);
    state_put(i, dh * stay);
    {% else %}
    let h = saved_at(p.saved_offset + i);
    gates_put(to, {{ "dh * (1.0 - h * h)" if kind == "tanh" else "select(0.0, dh, h > 0.0)" }});
    state_put(i, 0.0);
    {% endif %}
    {% endif %}
}
