{#-
Insertion positions of values in sorted lines: number of elements that are less, or not greater (`right`).

kind: see sort_keys.wgsl · sorter: dtype of the index that sorts the lines, or empty for sorted lines
out: i64w or i32
Lines and values are contiguous and begin at offset 0. `per_line` values belong to one line.
-#}
{%- import "types" as t -%}
{%- import "sort_keys" as k -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    extent: u32,
    per_line: u32,
    right: u32,
    flip: u32,
    nan: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ k.order(k.wide(kind)) }}
{{ k.input(0, "sorted", kind) }}
{{ k.input(1, "value", kind) }}
{% if sorter %}
{{ t.index(2, "sorter", sorter) }}
{{ t.resolve_index() }}
{% endif %}
{{ t.output(3 if sorter else 2, "found", out) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    let key = value_key(i);
    let base = (i / p.per_line) * p.extent;
    var low = 0u;
    var high = p.extent;
    while low < high {
        let middle = (low + high) >> 1u;
        {% if sorter %}
        let other = sorted_key(base + min(resolve_index(sorter_words(base + middle), p.extent), p.extent - 1u));
        {% else %}
        let other = sorted_key(base + middle);
        {% endif %}
        var go_right = less(other, key) | ((p.right != 0u) & same(other, key));
        {% if kind in ["f64", "f32", "f16", "bf16"] %}
        // As in PyTorch, a comparison with NaN is false, and the search goes right.
        go_right = go_right | same(other, nan_key()) | same(key, nan_key());
        {% endif %}
        if go_right { low = middle + 1u; } else { high = middle; }
    }
    found_put(i, {{ "vec2<u32>(low, 0u)" if out == "i64w" else "i32(low)" }});
}
