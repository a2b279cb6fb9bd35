{#-
Pooling of planes, element by element (of less than 32 bits by fours): of the result (`forward`), or of the input (`backward`, which gathers
from every window that covers it, so that no two invocations write one place).

dtype · kind: `max`, `avg` · adaptive: windows divide the plane evenly, whatever its extents · pass
-#}
{%- import "types" as t -%}
{%- set V = t.value(dtype) -%}
{%- set lanes = 4 if dtype in ["f16", "bf16", "u8"] else 1 -%}
{%- set whole = dtype in ["i32", "u32", "i64", "u8"] -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    count_include_pad: u32,
    divisor: f32,
    unused0: u32,
    // Height and width of the input, then of the result.
    extents: vec4<u32>,
    kernel_stride: vec4<u32>,
    pad_dilation: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if pass == "forward" %}
{{ t.input(0, "input", dtype) }}
{{ t.output(1, "out", dtype, "packed") }}
{% if kind == "max" %}@group(0) @binding(2) var<storage, read_write> places: array<i32>;{% endif %}
{% else %}
{{ t.input(0, "grad", dtype) }}
{{ t.output(1, "out", dtype, "packed") }}
{% if kind == "max" %}@group(0) @binding(2) var<storage, read> places: array<i32>;{% endif %}
{% endif %}

// First index, end, and end before it is cut at the edge, of window `o` along one axis of the input.
fn window(o: u32, extent: u32, outs: u32, kernel: u32, stride: u32, pad: u32, dilation: u32) -> vec3<i32> {
    {% if adaptive %}
    let first = i32((o * extent) / outs);
    let end = i32(((o + 1u) * extent + outs - 1u) / outs);
    return vec3<i32>(first, end, end);
    {% else %}
    let first = i32(o * stride) - i32(pad);
    let end = first + i32((kernel - 1u) * dilation + 1u);
    return vec3<i32>(first, min(end, i32(extent)), min(end, i32(extent + pad)));
    {% endif %}
}

fn rows_of(o: u32) -> vec3<i32> {
    return window(o, p.extents.x, p.extents.z, p.kernel_stride.x, p.kernel_stride.z, p.pad_dilation.x, p.pad_dilation.z);
}

fn cols_of(o: u32) -> vec3<i32> {
    return window(o, p.extents.y, p.extents.w, p.kernel_stride.y, p.kernel_stride.w, p.pad_dilation.y, p.pad_dilation.w);
}

fn divisor_of(rows: vec3<i32>, cols: vec3<i32>) -> f32 {
    if p.divisor != 0.0 { return p.divisor; }
    if p.count_include_pad != 0u { return f32((rows.z - rows.x) * (cols.z - cols.x)); }
    return f32((rows.y - max(rows.x, 0)) * (cols.y - max(cols.x, 0)));
}

{% if pass == "backward" %}
// The windows along one axis that may cover index `i`: first and end.
fn windows_over(i: u32, extent: u32, outs: u32, kernel: u32, stride: u32, pad: u32, dilation: u32) -> vec2<u32> {
    {% if adaptive %}
    // Conservative by one at each end; the caller looks closely.
    let first = (i * outs) / extent;
    return vec2<u32>(select(first - 1u, 0u, first == 0u), min(first + 2u + outs / extent, outs));
    {% else %}
    let reach = (kernel - 1u) * dilation;
    let at = i + pad;
    let first = select((at - reach + stride - 1u) / stride, 0u, at < reach);
    return vec2<u32>(first, min(at / stride + 1u, outs));
    {% endif %}
}
{% endif %}

fn value_at(i: u32) -> {{ V }} {
    {% if pass == "forward" %}
    let base = (i / (p.extents.z * p.extents.w)) * p.extents.x * p.extents.y;
    let rows = rows_of((i / p.extents.w) % p.extents.z);
    let cols = cols_of(i % p.extents.w);
    var best = {{ V }}(0);
    var place = -1;
    for (var y = rows.x; y < rows.y; y += i32(p.pad_dilation.z)) {
        if y < 0 { continue; }
        for (var x = cols.x; x < cols.y; x += i32(p.pad_dilation.w)) {
            if x < 0 { continue; }
            let at = u32(y) * p.extents.y + u32(x);
            let v = input_at(base + at);
            {% if kind == "max" %}
            if place < 0 || v > best{{ "" if whole else " || m_isnan(f32(v))" }} {
                best = v;
                place = i32(at);
            }
            {% else %}
            best += v;
            {% endif %}
        }
    }
    {% if kind == "max" %}
    places[i] = place;
    return best;
    {% else %}
    return best / {{ V }}(divisor_of(rows, cols));
    {% endif %}
    {% else %}
    let base = (i / (p.extents.x * p.extents.y)) * p.extents.z * p.extents.w;
    let y = (i / p.extents.y) % p.extents.x;
    let x = i % p.extents.y;
    let over_rows = windows_over(y, p.extents.x, p.extents.z, p.kernel_stride.x, p.kernel_stride.z, p.pad_dilation.x, p.pad_dilation.z);
    let over_cols = windows_over(x, p.extents.y, p.extents.w, p.kernel_stride.y, p.kernel_stride.w, p.pad_dilation.y, p.pad_dilation.w);
    var sum = {{ V }}(0);
    for (var oy = over_rows.x; oy < over_rows.y; oy++) {
        {% if kind == "avg" %}
        let rows = rows_of(oy);
        if i32(y) < rows.x || i32(y) >= rows.y { continue; }
        {% endif %}
        for (var ox = over_cols.x; ox < over_cols.y; ox++) {
            let at = base + oy * p.extents.w + ox;
            {% if kind == "max" %}
            if places[at] == i32(y * p.extents.y + x) { sum += grad_at(at); }
            {% else %}
            let cols = cols_of(ox);
            if i32(x) < cols.x || i32(x) >= cols.y { continue; }
            sum += grad_at(at) / {{ V }}(divisor_of(rows, cols));
            {% endif %}
        }
    }
    return sum;
    {% endif %}
}

{{ t.each_output("value_at", V, lanes) }}
