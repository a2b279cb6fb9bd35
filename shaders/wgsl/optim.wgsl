{#-
One optimiser step over up to p.items.length parameters: reads the gradients, updates parameters and state in
place.

algorithm, with its flags: see optim_algorithms · states: state values of each element
dtypes: of the parameters, and of their gradients
modes: one for each parameter: `vec4` (f32, length and offsets multiples of 4), `packed`, `scattered`
counted: the device counts steps, because the host does not know which were skipped
skip: a flag skips the step
copies: 16-bit dtypes of additional copies of the parameters, "" for none; the list is empty if there are none
A thread updates a quad. Each state of a parameter is padded to whole vec4s; padding stays padding.
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% if counted %}
{% include "math/exp" %}
{% include "math/log" %}
{% endif %}
{{ t.prelude() }}
{% set first = 1 if states > 0 else 0 %}
struct Item {
    n: u32,
    // First workgroup of this parameter.
    group: u32,
    param: u32,
    grad: u32,
    // Offset of the first state, in vec4s.
    state: u32,
    {% if counted %}
    // Index of the step count. The new count is written to `count ^ 1`, so that no thread reads a count that
    // another one writes.
    count: u32,
    // Index of the skip flag in `flags`.
    flag: u32,
    unused: u32,
    {% else %}
    // Values that depend on the number of steps.
    x: f32,
    y: f32,
    z: f32,
    {% endif %}
}
struct Params {
    c: array<vec4<f32>, 2>,
    items: array<Item, {{ dtypes | length }}>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if states > 0 %}
@group(0) @binding(0) var<storage, read_write> state: array<vec4<f32>>;
{% endif %}
{% if counted %}
@group(0) @binding({{ first }}) var<storage, read_write> counts: array<f32>;
{% set first = first + 1 %}
{% endif %}
{% if skip %}
@group(0) @binding({{ first }}) var<storage, read> flags: array<u32>;
{% set first = first + 1 %}
{% endif %}
{% for dtype in dtypes %}
{% set k = loop.index0 %}
{% if modes[k] == "vec4" %}
@group(0) @binding({{ first + 2 * k }}) var<storage, read_write> w{{ k }}: array<vec4<f32>>;
@group(0) @binding({{ first + 2 * k + 1 }}) var<storage, read> g{{ k }}: array<vec4<f32>>;
{% else %}
{{ t.output(first + 2 * k, "w" ~ k, dtype, modes[k]) }}
{{ t.input(first + 2 * k + 1, "g" ~ k, dtype) }}
{% endif %}
{% endfor %}

{% set next = namespace(binding = first + 2 * (dtypes | length)) %}
{% for copy in copies %}
{% if copy %}
{% if modes[loop.index0] == "vec4" %}
{{ t.quads_output(next.binding, "l" ~ loop.index0, copy) }}
{% else %}
{{ t.output(next.binding, "l" ~ loop.index0, copy, "packed") }}
{% endif %}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% endfor %}

{% include "optim_algorithms" %}
// Updates quad `q` of parameter `k`. The long update code exists once, between one switch that reads and one
// that writes.
fn step(item: Item, k: u32, q: u32) {
    {% if counted %}
    let steps_done = counts[item.count];
    {% if skip %}
    let skipped = (flags[item.flag] & 0x7fffffffu) != 0u;
    {% else %}
    let skipped = false;
    {% endif %}
    if q == 0u { counts[item.count ^ 1u] = steps_done + select(1.0, 0.0, skipped); }
    // Copies are always written, even if the step is skipped.
    {% if not copies %}
    if skipped { return; }
    {% endif %}
    let step_values = at_step(steps_done + 1.0);
    {% else %}
    let step_values = vec3<f32>(item.x, item.y, item.z);
    {% endif %}
    let start = q * 4u;
    if start >= item.n { return; }
    let count = min(4u, item.n - start);
    var w: vec4<f32>;
    var g: vec4<f32>;
    switch k {
        {% for dtype in dtypes %}
        {% set k = loop.index0 %}
        case {{ k }}u: {
            {% if modes[k] == "vec4" %}
            w = w{{ k }}[item.param / 4u + q];
            g = g{{ k }}[item.grad / 4u + q];
            {% else %}
            for (var i = 0u; i < count; i++) {
                w[i] = w{{ k }}_at(item.param + start + i);
                g[i] = g{{ k }}_at(item.grad + start + i);
            }
            {% endif %}
        }
        {% endfor %}
        default: {}
    }
    {% if counted and copies %}
    if !skipped { w = update(item, step_values, q, w, g); }
    {% else %}
    w = update(item, step_values, q, w, g);
    {% endif %}
    switch k {
        {% for dtype in dtypes %}
        {% set k = loop.index0 %}
        {% set copy = copies[k] if copies else "" %}
        case {{ k }}u: {
            {% if modes[k] == "vec4" %}
            w{{ k }}[item.param / 4u + q] = w;
            {% elif modes[k] == "packed" %}
            w{{ k }}_put4(start, array<f32, 4>(w.x, w.y, w.z, w.w), item.n);
            {% else %}
            for (var i = 0u; i < count; i++) { w{{ k }}_put(item.param + start + i, w[i]); }
            {% endif %}
            {% if copy %}
            {% if modes[k] == "vec4" %}
            l{{ k }}_put_quad(q, w);
            {% else %}
            l{{ k }}_put4(start, array<f32, 4>(w.x, w.y, w.z, w.w), item.n);
            {% endif %}
            {% endif %}
        }
        {% endfor %}
        default: {}
    }
}

{{ t.dispatch_items("step", dtypes | length) }}
