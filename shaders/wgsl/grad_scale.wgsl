{#-
Changes several gradients in place. `scale`: times the value in `factor`. `clamp`: to p.low .. p.high.
`unscale`: times the inverse scale of a gradient scaler (see amp_update), whose flag is set if an element is
infinite or NaN.

change: `scale`, `clamp` or `unscale` · dtypes, modes: as in optim.wgsl
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
{% set first = 0 if change == "clamp" else 1 %}
struct Item {
    n: u32,
    // First workgroup of this gradient.
    group: u32,
    offset: u32,
    unused: u32,
}
struct Params {
    low: f32,
    high: f32,
    // Index of the flag's word.
    flag: u32,
    unused: u32,
    items: array<Item, {{ dtypes | length }}>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if change == "scale" %}
@group(0) @binding(0) var<storage, read> factor: array<f32>;
fn multiplier() -> f32 { return factor[0]; }
fn scaled(g: f32, by: f32) -> f32 { return g * by; }
{% elif change == "unscale" %}
@group(0) @binding(0) var<storage, read_write> scaler: array<atomic<u32>>;
fn multiplier() -> f32 { return bitcast<f32>(atomicLoad(&scaler[1])); }
fn scaled(g: f32, by: f32) -> f32 {
    if !m_isfinite(g) { atomicStore(&scaler[p.flag], 0x3f800000u); }
    return g * by;
}
{% else %}
fn multiplier() -> f32 { return 1.0; }
fn scaled(g: f32, by: f32) -> f32 { return m_min(m_max(g, p.low), p.high); }
{% endif %}
{% for dtype in dtypes %}
{% set k = loop.index0 %}
{% if modes[k] == "vec4" %}
@group(0) @binding({{ first + k }}) var<storage, read_write> g{{ k }}: array<vec4<f32>>;
{% else %}
{{ t.output(first + k, "g" ~ k, dtype, modes[k]) }}
{% endif %}
{% endfor %}

fn scale_item(item: Item, k: u32, q: u32) {
    let start = q * 4u;
    if start >= item.n { return; }
    let by = multiplier();
    let count = min(4u, item.n - start);
    switch k {
        {% for dtype in dtypes %}
        {% set k = loop.index0 %}
        case {{ k }}u: {
            {% if modes[k] == "vec4" %}
            let g = g{{ k }}[item.offset / 4u + q];
            g{{ k }}[item.offset / 4u + q] =
                vec4<f32>(scaled(g.x, by), scaled(g.y, by), scaled(g.z, by), scaled(g.w, by));
            {% else %}
            var g: array<f32, 4>;
            for (var i = 0u; i < count; i++) { g[i] = scaled(g{{ k }}_at(item.offset + start + i), by); }
            {% if modes[k] == "packed" %}
            g{{ k }}_put4(start, g, item.n);
            {% else %}
            for (var i = 0u; i < count; i++) { g{{ k }}_put(item.offset + start + i, g[i]); }
            {% endif %}
            {% endif %}
        }
        {% endfor %}
        default: {}
    }
}

{{ t.dispatch_items("scale_item", dtypes | length) }}
