{#-
Rotary position embeddings (Su et al., 2021): rotates pairs of features by an angle for each position. One
invocation rotates a pair, or copies a feature that is not rotated. Any strides; the result is dense. With `vectors`,
an invocation rotates four pairs, or copies four features: rows begin at vectors of four elements, and pairs and
features are counted in vectors.

dtype: of x and the result · table: dtype of the cosines and sines
interleaved: pairs are neighbours; else features of a pair are half of the rotated features apart
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    rank: u32,
    positions: u32,
    // Rotated pairs, and invocations of a row.
    pairs: u32,
    units: u32,
    features: u32,
    x_offset: u32,
    x_step: u32,
    cos_offset: u32,
    sin_offset: u32,
    // 1, or -1 backward.
    direction: f32,
    unused: u32,
    // Shape and strides of the rows.
    shape: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if vectors %}
{{ t.quads(0, "x", dtype) }}
{{ t.quads(1, "cosine", table) }}
{{ t.quads(2, "sine", table) }}
{{ t.quads_output(3, "y", dtype) }}
{% else %}
{{ t.input(0, "x", dtype) }}
{{ t.input(1, "cosine", table) }}
{{ t.input(2, "sine", table) }}
{{ t.output(3, "y", dtype, "scattered") }}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    let row = i / p.units;
    let unit = i % p.units;
    var linear_index = row;
    var at = p.x_offset;
    {{ t.strided_offsets([("at", "strides")]) }}
    let to = row * p.features;
    {% if vectors %}
    let x_start = at / 4u;
    if unit >= p.pairs {
        let feature = unit + p.pairs;
        y_put_quad(to + feature, x_quad(x_start + feature));
        return;
    }
    {% else %}
    if unit >= p.pairs {
        let feature = unit + p.pairs;
        y_put(to + feature, x_at(at + feature * p.x_step));
        return;
    }
    {% endif %}
    let angle = (row % p.positions) * p.pairs + unit;
    {% if interleaved %}
    let first = unit * 2u;
    let second = first + 1u;
    {% else %}
    let first = unit;
    let second = first + p.pairs;
    {% endif %}
    {% if vectors %}
    let c = cosine_quad(p.cos_offset / 4u + angle);
    let s = sine_quad(p.sin_offset / 4u + angle) * p.direction;
    let v = x_quad(x_start + first);
    let w = x_quad(x_start + second);
    {% if interleaved %}
    let a = vec4<f32>(v.xz, w.xz);
    let b = vec4<f32>(v.yw, w.yw);
    let rotated_a = a * c - b * s;
    let rotated_b = b * c + a * s;
    y_put_quad(to + first, vec4<f32>(rotated_a.x, rotated_b.x, rotated_a.y, rotated_b.y));
    y_put_quad(to + second, vec4<f32>(rotated_a.z, rotated_b.z, rotated_a.w, rotated_b.w));
    {% else %}
    y_put_quad(to + first, v * c - w * s);
    y_put_quad(to + second, w * c + v * s);
    {% endif %}
    {% else %}
    let c = {{ t.value(dtype) }}(cosine_at(p.cos_offset + angle));
    let s = {{ t.value(dtype) }}(sine_at(p.sin_offset + angle)) * {{ t.value(dtype) }}(p.direction);
    let a = x_at(at + first * p.x_step);
    let b = x_at(at + second * p.x_step);
    y_put(to + first, a * c - b * s);
    y_put(to + second, b * c + a * s);
    {% endif %}
}
