{#-
Softmax or log-softmax along one dimension, forward and backward; a row is everything along it.

pass: `forward`: y from x; `backward`: the gradient of x from g and y · log · dtype: of all buffers
x and g have any strides, y and the results are contiguous · lanes, across: see rows
width: 4 where a thread writes four neighbours at once (halves in whole words), else 1
-#}
{%- import "types" as t -%}
{%- import "rows" as rows -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
    unused0: u32,
    unused1: u32,
    // The other dimensions of x or g.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", dtype) }}
{% if pass == "backward" %}
{{ t.input(1, "y", dtype) }}
{% endif %}
{{ t.output(1 if pass == "forward" else 2, "result", dtype, "packed" if width == 4 else "scattered") }}
{{ rows.functions(lanes, across) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = row_of(group_index(group, groups), thread);
    // Threads without a row stay for the barriers, with nothing to do.
    let extent = select(0u, p.extent, row < p.rows);
    let first = lane_of(thread) * {{ width }}u;
    var base = p.offset;
    var left = row;
    for (var d = p.rank; d > 0u; d--) {
        let axis = d - 1u;
        let n = p.shape[axis >> 2u][axis & 3u];
        base += (left % n) * p.strides[axis >> 2u][axis & 3u];
        left = left / n;
    }
    let dense = (row / p.inner) * p.extent * p.inner + row % p.inner;
    {% if pass == "forward" %}
    var largest = m_from_bits(0xff800000u);
    for (var at = first; at < extent; at += {{ lanes * width }}u) {
        {% for k in range(width) %}
        largest = m_max(largest, input_at(base + (at + {{ k }}u) * p.stride));
        {% endfor %}
    }
    let m = row_max(largest, thread);
    var sum = 0.0;
    for (var at = first; at < extent; at += {{ lanes * width }}u) {
        {% for k in range(width) %}
        sum += m_exp(input_at(base + (at + {{ k }}u) * p.stride) - m);
        {% endfor %}
    }
    let total = row_sum(sum, thread);
    {% if log %}
    let norm = m_log(total);
    {% endif %}
    {% else %}
    var sum = 0.0;
    for (var at = first; at < extent; at += {{ lanes * width }}u) {
        {% for k in range(width) %}
        sum += input_at(base + (at + {{ k }}u) * p.stride){{ "" if log else " * y_at(dense + (at + " ~ k ~ "u) * p.inner)" }};
        {% endfor %}
    }
    let total = row_sum(sum, thread);
    {% endif %}
    for (var at = first; at < extent; at += {{ lanes * width }}u) {
        {% if width == 4 %}
        var quad: array<f32, 4>;
        {% endif %}
        {% for k in range(width) %}
        let v{{ k }} = input_at(base + (at + {{ k }}u) * p.stride);
        {% if pass == "forward" %}
        let r{{ k }} = {{ "(v" ~ k ~ " - m) - norm" if log else "m_exp(v" ~ k ~ " - m) / total" }};
        {% else %}
        let y{{ k }} = y_at(dense + (at + {{ k }}u) * p.inner);
        let r{{ k }} = {{ "v" ~ k ~ " - m_exp(y" ~ k ~ ") * total" if log else "y" ~ k ~ " * (v" ~ k ~ " - total)" }};
        {% endif %}
        {% if width == 4 %}
        quad[{{ k }}] = r{{ k }};
        {% else %}
        result_put(dense + at * p.inner, r{{ k }});
        {% endif %}
        {% endfor %}
        {% if width == 4 %}
        result_put4(dense + at, quad, dense + extent);
        {% endif %}
    }
}
