{#-
Gradient of a strided view: out[k] = sum of all elements of the input that the view's layout places at element
  k, in index order. This adds up the gradients of repeated elements. Each invocation finds the indices that
  lead to its element, so no two write one element.

dtype · rank: dimensions of the layout, at least one, with descending nonzero strides
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set per_thread = 4 if dtype in ["f16", "bf16"] else 1 -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    // Offset of the layout minus that of the result, split by sign: one of both is 0.
    offset_above: u32,
    offset_below: u32,
    in_offset: u32,
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
    // Largest offset by the dimensions after this one.
    max_offsets: array<vec4<u32>, 2>,
    in_strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "input", dtype) }}
{{ t.output(1, "out", dtype, "packed") }}

fn sum_at(i: u32) -> {{ T }} {
    var total = {{ T }}(0);
    if i < p.offset_above { return total; }
    let remaining0 = i + p.offset_below - p.offset_above;
    let from0 = p.in_offset;
    {% for d in range(rank) %}
    {% set at = "[" ~ (d // 4) ~ "u][" ~ (d % 4) ~ "u]" %}
    let stride{{ d }} = p.strides{{ at }};
    let excess{{ d }} = remaining{{ d }} - min(remaining{{ d }}, p.max_offsets{{ at }});
    let first{{ d }} = (excess{{ d }} + stride{{ d }} - 1u) / stride{{ d }};
    let end{{ d }} = min(remaining{{ d }} / stride{{ d }} + 1u, p.shape{{ at }});
    for (var i{{ d }} = first{{ d }}; i{{ d }} < end{{ d }}; i{{ d }}++) {
    let remaining{{ d + 1 }} = remaining{{ d }} - i{{ d }} * stride{{ d }};
    let from{{ d + 1 }} = from{{ d }} + i{{ d }} * p.in_strides{{ at }};
    {% endfor %}
    // No dimension follows the last one, so the remainder is zero here.
    total += input_at(from{{ rank }});
    {% for d in range(rank) %}
    }
    {% endfor %}
    return total;
}

{{ t.each_output("sum_at", T, per_thread) }}
