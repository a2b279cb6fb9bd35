{#-
Pooling of planes, forward or backward. Backward gathers from every window that covers an element, so no two
invocations write one element.

dtype · kind: `max`, `avg` · adaptive: windows divide the plane evenly, for any extents
pass: `forward`, `backward`
large: adaptive, and products of extents may reach 2^32
stage: `each`: an invocation computes an element (four, if smaller than 32 bits). For long windows, a
  workgroup computes an element (`whole`) or one of its `p.splits` parts (`parts`). Stage `join` then combines
  the parts, in the order of the window.
-#}
{%- import "types" as t -%}
{%- set V = t.value(dtype) -%}
{%- set per_thread = 4 if dtype in ["f16", "bf16", "u8"] else 1 -%}
{%- set is_integer = dtype in ["i32", "u32", "i64", "i64w", "u8"] -%}
{%- set returns_indices = kind == "max" and pass == "forward" -%}
{%- set source = V if stage == "join" else dtype -%}
{%- set target = V if stage == "parts" else dtype -%}
{% include "math/base" %}
{{ t.prelude() }}
struct Params {
    n: u32,
    count_include_pad: u32,
    divisor: f32,
    // Parts of an element, and window elements of a part.
    splits: u32,
    // Height and width of the input, then of the result.
    extents: vec4<u32>,
    kernel_stride: vec4<u32>,
    pad_dilation: vec4<u32>,
    chunk: u32,
    // The divisor as a 64-bit integer, for divisors that f32 cannot represent.
    divisor_low: u32,
    divisor_high: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% set input = "input" if pass == "forward" else "grad" %}
{{ t.input(0, input, source) }}
{{ t.output(1, "out", target, "packed" if stage == "each" else "scattered") }}
{% if returns_indices %}
@group(0) @binding(2) var<storage, read_write> indices: array<i32>;
{% elif kind == "max" and stage != "join" %}
@group(0) @binding(2) var<storage, read> indices: array<i32>;
{% endif %}
{% if returns_indices and stage == "join" %}
@group(0) @binding(3) var<storage, read> part_indices: array<i32>;
{% endif %}

{% if adaptive %}
// Returns the quotient of a * b and c, and whether there is a remainder; a <= c.
fn mul_div(a: u32, b: u32, c: u32) -> vec2<u32> {
    {% if large %}
    // The product may need 64 bits: it is computed and divided bit by bit.
    let b_remainder = b % c;
    var quotient = 0u;
    var remainder = 0u;
    for (var bit = 32u; bit > 0u; bit--) {
        quotient = quotient << 1u;
        remainder = remainder << 1u;
        if remainder >= c { remainder -= c; quotient += 1u; }
        remainder += ((a >> (bit - 1u)) & 1u) * b_remainder;
        if remainder >= c { remainder -= c; quotient += 1u; }
    }
    return vec2<u32>(a * (b / c) + quotient, min(remainder, 1u));
    {% else %}
    return vec2<u32>((a * b) / c, min((a * b) % c, 1u));
    {% endif %}
}
{% endif %}

// First index, end, and unclipped end of window `o` along one axis of the input.
fn window(o: u32, extent: u32, outs: u32, kernel: u32, stride: u32, pad: u32, dilation: u32) -> vec3<i32> {
    {% if adaptive %}
    let first = i32(mul_div(o, extent, outs).x);
    let last = mul_div(o + 1u, extent, outs);
    let end = i32(last.x + last.y);
    return vec3<i32>(first, end, end);
    {% else %}
    let first = i32(o * stride) - i32(pad);
    let end = first + i32((kernel - 1u) * dilation + 1u);
    return vec3<i32>(first, min(end, i32(extent)), min(end, i32(extent + pad)));
    {% endif %}
}

fn rows_of(o: u32) -> vec3<i32> {
    return window(o, p.extents.x, p.extents.z, p.kernel_stride.x, p.kernel_stride.z, p.pad_dilation.x,
        p.pad_dilation.z);
}

fn cols_of(o: u32) -> vec3<i32> {
    return window(o, p.extents.y, p.extents.w, p.kernel_stride.y, p.kernel_stride.w, p.pad_dilation.y,
        p.pad_dilation.w);
}

// Divisor of a window, in the compute type: exact for f64 and integers.
fn elements_of(rows: i32, cols: i32) -> {{ V }} {
    {% if V in ["f64", "i64"] %}
    return {{ V }}(rows) * {{ V }}(cols);
    {% else %}
    return {{ V }}(u32(rows) * u32(cols));
    {% endif %}
}

fn divisor_of(rows: vec3<i32>, cols: vec3<i32>) -> {{ V }} {
    {% if V == "f32" %}
    if p.divisor != 0.0 { return p.divisor; }
    {% else %}
    if (p.divisor_low | p.divisor_high) != 0u {
        {% if V == "f64" %}
        let low = f64(i32(p.divisor_low >> 16u)) * 65536.0 + f64(i32(p.divisor_low & 0xffffu));
        return f64(bitcast<i32>(p.divisor_high)) * 65536.0 * 65536.0 + low;
        {% elif V == "i64" %}
        return (i64(bitcast<i32>(p.divisor_high)) << 32u) | {{ t.u32_to_i64("p.divisor_low") }};
        {% else %}
        return {{ "bitcast<i32>(p.divisor_low)" if V == "i32" else "p.divisor_low" }};
        {% endif %}
    }
    {% endif %}
    if p.count_include_pad != 0u { return elements_of(rows.z - rows.x, cols.z - cols.x); }
    return elements_of(rows.y - max(rows.x, 0), cols.y - max(cols.x, 0));
}

{% if pass == "forward" %}
// First index of a window inside the plane, and number of such indices.
fn clip_window(window: vec3<i32>, dilation: u32) -> vec2<u32> {
    let step = i32(dilation);
    let first = select(window.x, window.x + (step - 1 - window.x) / step * step, window.x < 0);
    return vec2<u32>(u32(first), u32(max(window.y - first + step - 1, 0) / step));
}
{% else %}
// Windows along one axis that may cover index `i`: first and end.
fn windows_over(i: u32, extent: u32, outs: u32, kernel: u32, stride: u32, pad: u32, dilation: u32) -> vec2<u32> {
    {% if adaptive %}
    // Conservative by one at each end; the caller checks exactly.
    let first = mul_div(i, outs, extent).x;
    return vec2<u32>(select(first - 1u, 0u, first == 0u), min(first + 2u + outs / extent, outs));
    {% else %}
    let window_extent = (kernel - 1u) * dilation;
    let at = i + pad;
    let first = select((at - window_extent + stride - 1u) / stride, 0u, at < window_extent);
    return vec2<u32>(first, min(at / stride + 1u, outs));
    {% endif %}
}
{% endif %}

{#- Defines the values for element `i` before the loops over its window: `base`, and (first, count) of
both axes. -#}
{% macro prepare() %}
    {% if pass == "forward" %}
    let base = (i / (p.extents.z * p.extents.w)) * p.extents.x * p.extents.y;
    let rows = rows_of((i / p.extents.w) % p.extents.z);
    let cols = cols_of(i % p.extents.w);
    let over_rows = clip_window(rows, p.pad_dilation.z);
    let over_cols = clip_window(cols, p.pad_dilation.w);
    var index = -1;
    {% else %}
    let base = (i / (p.extents.x * p.extents.y)) * p.extents.z * p.extents.w;
    let y = (i / p.extents.y) % p.extents.x;
    let x = i % p.extents.y;
    let ends_y = windows_over(y, p.extents.x, p.extents.z, p.kernel_stride.x, p.kernel_stride.z, p.pad_dilation.x,
        p.pad_dilation.z);
    let ends_x = windows_over(x, p.extents.y, p.extents.w, p.kernel_stride.y, p.kernel_stride.w, p.pad_dilation.y,
        p.pad_dilation.w);
    let over_rows = vec2<u32>(ends_y.x, max(ends_y.y, ends_y.x) - ends_y.x);
    let over_cols = vec2<u32>(ends_x.x, max(ends_x.y, ends_x.x) - ends_x.x);
    {% endif %}
    var value = {{ V }}(0);
{% endmacro %}
{#- Defines the values for row `row` of the window before its loop; `row` and `col` count from the
window's first. -#}
{% macro line() %}
        {% if pass == "forward" %}
        let line = (over_rows.x + row * p.pad_dilation.z) * p.extents.y + over_cols.x;
        {% else %}
        let oy = over_rows.x + row;
        {% if kind == "avg" %}
        let rows = rows_of(oy);
        let covers = i32(y) >= rows.x && i32(y) < rows.y;
        {% endif %}
        {% endif %}
{% endmacro %}
{% macro element() %}
            {% if pass == "forward" %}
            let at = line + col * p.pad_dilation.w;
            let v = input_at(base + at);
            {% if kind == "max" %}
            if index < 0 || v > value{{ "" if is_integer else " || m_isnan(f32(v))" }} {
                value = v;
                index = i32(at);
            }
            {% else %}
            value += v;
            {% endif %}
            {% else %}
            let ox = over_cols.x + col;
            let at = base + oy * p.extents.w + ox;
            {% if kind == "max" %}
            if indices[at] == i32(y * p.extents.y + x) { value += grad_at(at); }
            {% else %}
            let cols = cols_of(ox);
            if covers && i32(x) >= cols.x && i32(x) < cols.y { value += grad_at(at) / divisor_of(rows, cols); }
            {% endif %}
            {% endif %}
{% endmacro %}
{#- The maximum of a window that lies wholly in the padding is the smallest value of the type. -#}
{% set smallest = {"i32": "(-0x7fffffffi - 1i)", "i64": "(i64(-0x7fffffff - 1) << 32u)", "u32": "0u", "u8": "0u",
    "f64": "f64(m_from_bits(0xff800000u))"} %}
{% set lowest = smallest[dtype] if dtype in smallest else "m_from_bits(0xff800000u)" %}
{% macro finished(value, index) -%}
{% if returns_indices %}select({{ value }}, {{ lowest }}, {{ index }} < 0)
{%- elif pass == "forward" %}{{ value }} / divisor_of(rows, cols)
{%- else %}{{ value }}
{%- endif %}
{%- endmacro %}

{% if stage == "each" %}
fn value_at(i: u32) -> {{ V }} {
{{ prepare() }}
    for (var row = 0u; row < over_rows.y; row++) {
{{ line() }}
        for (var col = 0u; col < over_cols.y; col++) {
{{ element() }}
        }
    }
    {% if returns_indices %}
    indices[i] = index;
    {% endif %}
    return {{ finished("value", "index") }};
}

{{ t.each_output("value_at", V, per_thread) }}
{% else %}
var<workgroup> shared_values: array<{{ V }}, 256>;
{% if returns_indices %}
var<workgroup> shared_indices: array<i32, 256>;

// Reports whether the second of two maxima wins: the last NaN, else the first of the largest. A negative
// index means none.
fn second_wins(a: {{ V }}, a_index: i32, b: {{ V }}, b_index: i32) -> bool {
    if b_index < 0 || a_index < 0 { return b_index >= 0; }
    {% if not is_integer %}
    let a_nan = m_isnan(f32(a));
    let b_nan = m_isnan(f32(b));
    if a_nan || b_nan { return b_nan && (!a_nan || b_index > a_index); }
    {% endif %}
    return b > a || (b == a && b_index < a_index);
}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    let i = linear_group % p.n;
    {% if stage == "join" %}
    let live = linear_group < p.n;
    var value = {{ V }}(0);
    {% if returns_indices %}
    var index = -1;
    {% elif pass == "forward" %}
    let rows = rows_of((i / p.extents.w) % p.extents.z);
    let cols = cols_of(i % p.extents.w);
    {% endif %}
    for (var part = thread; part < p.splits; part += 256u) {
        {% if returns_indices %}
        let v = {{ input }}_at(part * p.n + i);
        let at = part_indices[part * p.n + i];
        if second_wins(value, index, v, at) {
            value = v;
            index = at;
        }
        {% else %}
        value += {{ input }}_at(part * p.n + i);
        {% endif %}
    }
    {% else %}
    let live = linear_group < p.n * p.splits;
{{ prepare() }}
    let begin = (linear_group / p.n) * p.chunk;
    let end = select(0u, min(begin + p.chunk, over_rows.y * over_cols.y), live);
    for (var e = begin + thread; e < end; e += 256u) {
        let row = e / over_cols.y;
        let col = e % over_cols.y;
{{ line() }}
{{ element() }}
    }
    {% endif %}
    shared_values[thread] = value;
    {% if returns_indices %}
    shared_indices[thread] = index;
    {% endif %}
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride = stride / 2u) {
        if thread < stride {
            {% if returns_indices %}
            if second_wins(shared_values[thread], shared_indices[thread],
                shared_values[thread + stride], shared_indices[thread + stride]) {
                shared_values[thread] = shared_values[thread + stride];
                shared_indices[thread] = shared_indices[thread + stride];
            }
            {% else %}
            shared_values[thread] += shared_values[thread + stride];
            {% endif %}
        }
        workgroupBarrier();
    }
    if live && thread == 0u {
        {% if returns_indices %}
        indices[linear_group] = shared_indices[0];
        {% endif %}
        out_put(linear_group,
            {{ "shared_values[0]" if stage == "parts" else finished("shared_values[0]", "shared_indices[0]") }});
    }
}
{% endif %}
