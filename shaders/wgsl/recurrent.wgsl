{#-
One time step of a recurrent layer, after its matrix products: gates, state and output of every element of
  [batch, hidden], or their gradients. One invocation has one element of all gates.

kind: "lstm", "gru", "tanh" or "relu" · pass: "forward" or "backward"
dtype: of everything but the running state, which is f32, or f64 if dtype is f64
keep: forward saves values for backward
lengths: dtype of the sequences' lengths, or ""; a sequence that has ended keeps its state
-#}
{%- import "types" as t -%}
{% set gates = 4 if kind == "lstm" else 3 if kind == "gru" else 1 %}
{% set T = t.value(dtype) %}
{{ t.prelude() }}
{% include "math/base" %}
{% if T == "f64" %}
{% include "math/f64_exp_log" %}
{% include "math/f64" %}
{% else %}
{% include "math/exp" %}
{% endif %}
{% set sigmoid = "m_d_sigmoid" if T == "f64" else "m_sigmoid" %}
{% set tanh = "m_d_tanh" if T == "f64" else "m_tanh" %}
{% set max = "m_max64" if T == "f64" else "m_max" %}
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
{{ t.output(2, "state", T) }}
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
fn input_product(b: u32, j: u32, gate: u32) -> {{ T }} {
    return input_at(p.input_offset + b * p.input_stride + gate * p.hidden + j);
}
fn state_product(b: u32, j: u32, gate: u32) -> {{ T }} {
    return carry_at(p.carry_offset + (b * {{ gates }}u + gate) * p.hidden + j);
}
{% endif %}
{% if gates > 1 %}
fn saved_index(b: u32, j: u32, k: u32) -> u32 { return p.saved_offset + (b * 5u + k) * p.hidden + j; }
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
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
    let i_gate = {{ sigmoid }}(input_product(b, j, 0u) + state_product(b, j, 0u));
    let f_gate = {{ sigmoid }}(input_product(b, j, 1u) + state_product(b, j, 1u));
    let candidate = {{ tanh }}(input_product(b, j, 2u) + state_product(b, j, 2u));
    let o_gate = {{ sigmoid }}(input_product(b, j, 3u) + state_product(b, j, 3u));
    let previous = state_at(p.n + i);
    let cell = f_gate * previous + i_gate * candidate;
    let h = o_gate * {{ tanh }}(cell);
    state_put(p.n + i, cell);
    {% if keep %}
    saved_put(saved_index(b, j, 0u), i_gate);
    saved_put(saved_index(b, j, 1u), f_gate);
    saved_put(saved_index(b, j, 2u), candidate);
    saved_put(saved_index(b, j, 3u), o_gate);
    saved_put(saved_index(b, j, 4u), previous);
    {% endif %}
    {% elif kind == "gru" %}
    let reset_gate = {{ sigmoid }}(input_product(b, j, 0u) + state_product(b, j, 0u));
    let update_gate = {{ sigmoid }}(input_product(b, j, 1u) + state_product(b, j, 1u));
    let hidden_product = state_product(b, j, 2u);
    let candidate = {{ tanh }}(input_product(b, j, 2u) + reset_gate * hidden_product);
    let previous = state_at(i);
    let h = candidate + update_gate * (previous - candidate);
    {% if keep %}
    saved_put(saved_index(b, j, 0u), reset_gate);
    saved_put(saved_index(b, j, 1u), update_gate);
    saved_put(saved_index(b, j, 2u), candidate);
    saved_put(saved_index(b, j, 3u), hidden_product);
    saved_put(saved_index(b, j, 4u), previous);
    {% endif %}
    {% else %}
    let sum = input_product(b, j, 0u) + state_product(b, j, 0u);
    let h = {{ tanh if kind == "tanh" else max }}(sum{{ "" if kind == "tanh" else ", 0.0" }});
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
    let i_gate = saved_at(saved_index(b, j, 0u));
    let f_gate = saved_at(saved_index(b, j, 1u));
    let candidate = saved_at(saved_index(b, j, 2u));
    let o_gate = saved_at(saved_index(b, j, 3u));
    let previous = saved_at(saved_index(b, j, 4u));
    let cell_tanh = {{ tanh }}(f_gate * previous + i_gate * candidate);
    let dc = state_at(p.n + i) + dh * o_gate * (1.0 - cell_tanh * cell_tanh);
    gates_put(to, dc * candidate * i_gate * (1.0 - i_gate));
    gates_put(to + p.hidden, dc * previous * f_gate * (1.0 - f_gate));
    gates_put(to + 2u * p.hidden, dc * i_gate * (1.0 - candidate * candidate));
    gates_put(to + 3u * p.hidden, dh * cell_tanh * o_gate * (1.0 - o_gate));
    state_put(i, 0.0);
    state_put(p.n + i, dc * f_gate);
    {% elif kind == "gru" %}
    let reset_gate = saved_at(saved_index(b, j, 0u));
    let update_gate = saved_at(saved_index(b, j, 1u));
    let candidate = saved_at(saved_index(b, j, 2u));
    let hidden_product = saved_at(saved_index(b, j, 3u));
    let previous = saved_at(saved_index(b, j, 4u));
    let dn = dh * (1.0 - update_gate) * (1.0 - candidate * candidate);
    let dr = dn * hidden_product * reset_gate * (1.0 - reset_gate);
    let dz = dh * (previous - candidate) * update_gate * (1.0 - update_gate);
    gates_put(to, dr);
    gates_put(to + p.hidden, dz);
    gates_put(to + 2u * p.hidden, dn);
    inner_put(to, dr);
    inner_put(to + p.hidden, dz);
    inner_put(to + 2u * p.hidden, dn * reset_gate);
    state_put(i, dh * update_gate);
    {% else %}
    let h = saved_at(p.saved_offset + i);
    gates_put(to, {{ "dh * (1.0 - h * h)" if kind == "tanh" else "select(0.0, dh, h > 0.0)" }});
    state_put(i, 0.0);
    {% endif %}
    {% endif %}
}
