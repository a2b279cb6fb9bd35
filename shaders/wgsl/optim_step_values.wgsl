{#-
Values that steps made of tensor operations read from the device: for each of p.items the learning rate, the
  number of this step, and 1, or 0 if the step is skipped.

counted, skip: as in optim.wgsl · items: number of items
-#}
struct Item {
    lr: f32,
    {% if counted %}
    unused: f32,
    // Index of the step count; the new count is at `count ^ 1`.
    count: u32,
    // Index of the skip flag in `flags`.
    flag: u32,
    {% else %}
    step: f32,
    unused0: u32,
    unused1: u32,
    {% endif %}
}
struct Params { items: array<Item, {{ items }}> }
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> values: array<f32>;
{% if counted %}
@group(0) @binding(1) var<storage, read_write> counts: array<f32>;
{% endif %}
{% if skip %}
@group(0) @binding(2) var<storage, read> flags: array<u32>;
{% endif %}

@compute @workgroup_size({{ items }})
fn main(@builtin(local_invocation_index) k: u32) {
    let item = p.items[k];
    values[4u * k] = item.lr;
    {% if counted %}
    let steps_done = counts[item.count];
    let keep = {{ "select(1.0, 0.0, (flags[item.flag] & 0x7fffffffu) != 0u)" if skip else "1.0" }};
    counts[item.count ^ 1u] = steps_done + keep;
    values[4u * k + 1u] = steps_done + 1.0;
    values[4u * k + 2u] = keep;
    {% else %}
    values[4u * k + 1u] = item.step;
    values[4u * k + 2u] = 1.0;
    {% endif %}
    values[4u * k + 3u] = 0.0;
}
