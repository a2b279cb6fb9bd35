{#-
Convolutions of each channel with a filter of its own. A thread has a run of adjacent elements of one line, and keeps
the source elements that they share in registers.

pass: of source and result
  `forward`  y[position] = bias + the sum over taps of w[tap] * x[position * stride + tap * dilation - padding]
  `input`    the gradient of x: the sum over taps of w[tap] * dy[(position + padding - tap * dilation) / stride], where
             that is whole
  `weight`   partial sums of dy[position] * x[position * stride + tap * dilation - padding] over a part of the
             positions of all images: f32 [parts][channels][taps]. A workgroup has a part of one channel
dtype: of everything but the partial sums; tensors are contiguous
run: elements of a run; for `input` a multiple of the stride
kernel_x, stride_x, dilation_x, padding_x and those of y: of the convolution
bias: forward and input, added to each channel
mode: `packed` if lines of results have whole words, else `scattered` (see types); with `vectors`, runs follow each
  other in memory and are written in vectors
vector: (vectors) elements of a vector, 4, or 8 of 16 bits
straddles: (vectors) runs may contain ends of lines. Such a run is computed once for each of its lines, for strides of 1
  in the `input` pass
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- import "depthwise_macros" as m -%}
{%- set taps = kernel_x * kernel_y -%}
{{ t.prelude() }}
struct Params {
    // Threads (forward and input); runs of a line; channels; images.
    n: u32,
    runs: u32,
    channels: u32,
    images: u32,
    // Parts of a channel, and runs of a part (weight).
    parts: u32,
    chunk: u32,
    source_offset: u32,
    // Offset of the filters, or of dy (weight).
    other_offset: u32,
    bias_offset: u32,
    // Height and width of a plane of the source, and of the positions.
    source_height: u32,
    source_width: u32,
    height: u32,
    width: u32,
    // Lines and elements of the result (vectors).
    lines: u32,
    total: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ m.bindings(dtype, pass, bias, mode, vector) }}
{{ t.divide(f32_division) }}

{#- Number of the source element that result `r` and tap `k` read. 64 is the first element of the run, so numbers are
never negative. -#}
{%- macro place(r, k) -%}
{%- if pass != "input" -%}{{ 64 + r * stride_x + k * dilation_x - padding_x }}
{%- elif (64 * stride_x + r + padding_x - k * dilation_x) % stride_x == 0 -%}
{{ (64 * stride_x + r + padding_x - k * dilation_x) // stride_x }}
{%- endif -%}
{%- endmacro -%}
{%- set places = namespace(all=[]) -%}
{%- for r in range(run) -%}{%- for k in range(kernel_x) -%}
{%- set at = place(r, k) -%}
{%- if at and at not in places.all -%}{%- set places.all = places.all + [at] -%}{%- endif -%}
{%- endfor -%}{%- endfor -%}

{#- Loads the source elements of a run whose plane has this index, for line `y` and tap `ky`. -#}
{% macro load_sources(ky) %}
    {% if pass == "input" %}
    let shifted = y + {{ padding_y }}u - {{ ky }} * {{ dilation_y }}u;
    let source_y = shifted / {{ stride_y }}u;
    // Before the first line the difference wraps to a large value.
    let has_line = (shifted < 0x80000000u) & (shifted % {{ stride_y }}u == 0u) & (source_y < p.source_height);
    let first = x / {{ stride_x }}u;
    {% else %}
    let source_y = y * {{ stride_y }}u + {{ ky }} * {{ dilation_y }}u - {{ padding_y }}u;
    let has_line = source_y < p.source_height;
    let first = x * {{ stride_x }}u;
    {% endif %}
    let line = p.source_offset + (plane * p.source_height + select(0u, source_y, has_line)) * p.source_width;
    {% for at in places.all %}
    let x{{ at }} = first + {{ at }}u - 64u;
    let in{{ at }} = has_line & (x{{ at }} < p.source_width);
    let v{{ at }} = select(0.0, source_at(line + select(0u, x{{ at }}, in{{ at }})), in{{ at }});
    {% endfor %}
{% endmacro %}

{#- Declares the results of a run as sum0, sum1, .. from line `line_index` and element `x`. -#}
{% macro sum_run() %}
    let of_plane = divide(line_index, p.height);
    let plane = of_plane.x;
    let channel = divide(plane, p.channels).y;
    let y = of_plane.y;
    {% for r in range(run) %}
    var sum{{ r }} = {{ "bias_at(p.bias_offset + channel)" if bias else "0.0" }};
    {% endfor %}
    for (var ky = 0u; ky < {{ kernel_y }}u; ky++) {
        {{ load_sources("ky") }}
        let filter_line = p.other_offset + (channel * {{ kernel_y }}u + ky) * {{ kernel_x }}u;
        {% for k in range(kernel_x) %}
        let w{{ k }} = other_at(filter_line + {{ k }}u);
        {% for r in range(run) %}
        {% if place(r, k) %}
        sum{{ r }} += w{{ k }} * v{{ place(r, k) }};
        {% endif %}
        {% endfor %}
        {% endfor %}
    }
{% endmacro %}

{% if pass == "weight" %}
var<workgroup> sums: array<f32, {{ taps * 65 }}>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    let part = index / p.channels;
    let channel = index % p.channels;
    let runs_of_plane = p.runs * p.height;
    let end = select(0u, min((part + 1u) * p.chunk, runs_of_plane * p.images), part < p.parts);
    {% for tap in range(taps) %}
    var sum{{ tap }} = 0.0;
    {% endfor %}
    for (var i = part * p.chunk + thread; i < end; i += 64u) {
        let of_image = divide(i, runs_of_plane);
        let of_line = divide(of_image.y, p.runs);
        let plane = of_image.x * p.channels + channel;
        let y = of_line.x;
        let x = of_line.y * {{ run }}u;
        let grads = p.other_offset + (plane * p.height + y) * p.width;
        {% for r in range(run) %}
        let g{{ r }} = select(0.0, other_at(grads + min(x + {{ r }}u, p.width - 1u)), x + {{ r }}u < p.width);
        {% endfor %}
        {% for ky in range(kernel_y) %}
        {
            {{ load_sources(ky ~ "u") }}
            {% for k in range(kernel_x) %}
            {% for r in range(run) %}
            sum{{ ky * kernel_x + k }} += g{{ r }} * v{{ place(r, k) }};
            {% endfor %}
            {% endfor %}
        }
        {% endfor %}
    }
    {{ m.write_sums(taps) }}
}
{% else %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups) * 256u + thread;
    if index >= p.n { return; }
    {% if straddles %}
    let of_line = divide(index * {{ run }}u, p.width);
    var line_index = of_line.x;
    // Before the first element of a line, x wraps to a large value.
    var x = of_line.y;
    {% for r in range(run) %}
    var result{{ r }} = 0.0;
    {% endfor %}
    for (var first_result = 0u; first_result < {{ run }}u; ) {
        {{ sum_run() | indent }}
        {% for r in range(run) %}
        if x + {{ r }}u < p.width { result{{ r }} = sum{{ r }}; }
        {% endfor %}
        x -= p.width;
        first_result = 0u - x;
        line_index = min(line_index + 1u, p.lines - 1u);
    }
    {% else %}
    let of_line = divide(index, p.runs);
    let line_index = of_line.x;
    let x = of_line.y * {{ run }}u;
    {{ sum_run() }}
    {% endif %}
    {% set value = "result" if straddles else "sum" %}
    {% if mode == "vectors" %}
    {% for r in range(0, run, vector) %}
    if index * {{ run }}u + {{ r }}u < p.total {
        {% set number = "index * " ~ run // vector ~ "u + " ~ r // vector ~ "u" %}
        {{ m.write_vector(dtype, vector, number, value, r) | indent }}
    }
    {% endfor %}
    {% else %}
    let start = line_index * p.width;
    {{ m.write_run(mode, run, "start", "sum") }}
    {% endif %}
}
{% endif %}
