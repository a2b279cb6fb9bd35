{#-
Parameters and functions of the kernels of `cdist`, for the definitions `norm` and `dtype`.
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% if norm == "power" %}
{% if dtype == "f64" %}
{% include "math/f64_exp_log" %}{% include "math/f64" %}
{% else %}
{% include "math/exp" %}{% include "math/log" %}{% include "math/pow" %}
{% endif %}
{% endif %}
{{ t.prelude() }}
struct Params {
    batch: u32,
    a_rows: u32,
    b_rows: u32,
    width: u32,
    power: f32,
    power_rest: f32,
    // Parts of a sum, and terms of a part.
    splits: u32,
    chunk: u32,
    // Offsets and strides of the operands, in the order of the bindings.
    offsets: vec4<u32>,
    batch_strides: vec4<u32>,
    row_strides: vec4<u32>,
    col_strides: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set pow = "m_d_pow" if dtype == "f64" else "m_pow" -%}
fn exponent() -> {{ dtype }} { return {{ "f64(p.power) + f64(p.power_rest)" if dtype == "f64" else "p.power" }}; }
