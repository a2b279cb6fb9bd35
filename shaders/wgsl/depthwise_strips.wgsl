{#-
Convolutions of each channel with a filter of its own, with strides of 1 and lines without dilation between them. A
thread goes down a strip of lines, in a run of adjacent elements. It reads a line of the source once, for all taps: with
every line of the source it adds to the results of as many lines as the filter has, or to the sums of all taps.

pass: of source and result
  `forward`  y[position] = bias + the sum over taps of w[tap] * x[position + tap * dilation - padding]
  `input`    the gradient of x: the sum over taps of w[tap] * dy[position + padding - tap * dilation]
  `weight`   partial sums of dy[position] * x[position + tap * dilation - padding] over some strips of all images: f32
             [parts][channels][taps]. A workgroup has a part of one channel
dtype: of everything but the partial sums; tensors are contiguous
run: elements of a run, even
kernel_x, dilation_x, padding_x and those of y: of the convolution; dilation_y is 1
bias: forward, added to each channel
mode: `vectors` if lines of results are whole vectors, `packed` if they have whole words, else `scattered` (see types)
vector: (vectors) elements of a vector, 4, or 8 of 16 bits
pairs: lines of the source, and of dy (weight), are whole words of two elements
f32_division: all quotients are below 2^20
-#}
{%- import "types" as t -%}
{%- import "depthwise_macros" as m -%}
{%- set taps = kernel_x * kernel_y -%}
{{ t.prelude() }}
struct Params {
    // Threads (forward and input).
    n: u32,
    // Runs of a line, strips of a plane, lines of a strip.
    runs: u32,
    strips: u32,
    strip: u32,
    channels: u32,
    images: u32,
    // Parts of a channel, and strips of runs in a part (weight).
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
}
@group(1) @binding(0) var<uniform> p: Params;
{{ m.bindings(dtype, pass, bias, mode, vector) }}
{{ t.divide(f32_division) }}

{#- Number of the source element that result `r` and tap `k` read. 64 is the first element of the run, so numbers are
never negative. -#}
{%- macro place(r, k) -%}
{{ 64 + r + padding_x - k * dilation_x if pass == "input" else 64 + r + k * dilation_x - padding_x }}
{%- endmacro -%}
{%- set places = namespace(all=[]) -%}
{%- for r in range(run) -%}{%- for k in range(kernel_x) -%}
{%- set at = place(r, k) | int -%}
{%- if at not in places.all -%}{%- set places.all = places.all + [at] -%}{%- endif -%}
{%- endfor -%}{%- endfor -%}

{#- Declares NAME followed by each number as an element of the line at `line`, zero outside of the line. -#}
{% macro load_line(name, buffer, numbers, line, width) %}
{% set loaded = namespace(words=[]) %}
{% for at in numbers %}
{% if not pairs %}
let x{{ at }} = x + {{ at }}u - 64u;
let {{ name }}{{ at }} = select(0.0, {{ buffer }}_at({{ line }} + select(0u, x{{ at }}, x{{ at }} < {{ width }})),
    x{{ at }} < {{ width }});
{% elif at // 2 not in loaded.words %}
{% set loaded.words = loaded.words + [at // 2] %}
let x{{ at // 2 }} = x + {{ at // 2 * 2 }}u - 64u;
let in{{ at // 2 }} = x{{ at // 2 }} < {{ width }};
let word{{ at // 2 }} = select(0u, {{ buffer }}[({{ line }} + select(0u, x{{ at // 2 }}, in{{ at // 2 }})) >> 1u],
    in{{ at // 2 }});
{% endif %}
{% if pairs and dtype == "f16" %}
let {{ name }}{{ at }} = unpack2x16float(word{{ at // 2 }}).{{ "y" if at % 2 else "x" }};
{% elif pairs %}
let {{ name }}{{ at }} = bitcast<f32>(word{{ at // 2 }} {{ "& 0xffff0000u" if at % 2 else "<< 16u" }});
{% endif %}
{% endfor %}
{% endmacro %}

{#- Number of the source's line that step `step` of a strip reads. Before the first line it wraps to a large value. -#}
{%- macro source_line(step) -%}
first + {{ step }} + {{ padding_y if pass == "input" else 0 }}u - {{ kernel_y - 1 if pass == "input" else padding_y }}u
{%- endmacro -%}

{% if pass == "weight" %}
var<workgroup> sums: array<f32, {{ taps * 65 }}>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups);
    let part = index / p.channels;
    let channel = index % p.channels;
    let strips_of_plane = p.runs * p.strips;
    let end = select(0u, min((part + 1u) * p.chunk, strips_of_plane * p.images), part < p.parts);
    {% for tap in range(taps) %}
    var sum{{ tap }} = 0.0;
    {% endfor %}
    for (var i = part * p.chunk + thread; i < end; i += 64u) {
        let of_image = divide(i, strips_of_plane);
        let of_strip = divide(of_image.y, p.runs);
        let plane = of_image.x * p.channels + channel;
        let first = of_strip.x * p.strip;
        let lines = min(p.strip, p.height - first);
        let x = of_strip.y * {{ run }}u;
        // Line `j` of dy goes with line `j` of the filter, for the source's line of this step.
        {% for j in range(kernel_y) %}
        {% for r in range(run) %}
        var g{{ j }}_{{ r }} = 0.0;
        {% endfor %}
        {% endfor %}
        for (var step = 0u; step < lines + {{ kernel_y - 1 }}u; step++) {
            {% for j in range(kernel_y - 1, 0, -1) %}
            {% for r in range(run) %}
            g{{ j }}_{{ r }} = g{{ j - 1 }}_{{ r }};
            {% endfor %}
            {% endfor %}
            {
                let has_line = step < lines;
                let grads = p.other_offset + (plane * p.height + first + select(0u, step, has_line)) * p.width;
                {{ load_line("grad", "other", range(64, 64 + run), "grads", "p.width") | indent(12) }}
                {% for r in range(run) %}
                g0_{{ r }} = select(0.0, grad{{ 64 + r }}, has_line);
                {% endfor %}
            }
            let y = {{ source_line("step") }};
            if y < p.source_height {
                let line = p.source_offset + (plane * p.source_height + y) * p.source_width;
                {{ load_line("v", "source", places.all, "line", "p.source_width") | indent(12) }}
                {% for j in range(kernel_y) %}
                {% for k in range(kernel_x) %}
                {% for r in range(run) %}
                sum{{ j * kernel_x + k }} += g{{ j }}_{{ r }} * v{{ place(r, k) }};
                {% endfor %}
                {% endfor %}
                {% endfor %}
            }
        }
    }
    {{ m.write_sums(taps) }}
}
{% else %}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let index = group_index(group, groups) * 64u + thread;
    if index >= p.n { return; }
    let of_strip = divide(index, p.runs);
    let of_plane = divide(of_strip.x, p.strips);
    let plane = of_plane.x;
    let channel = divide(plane, p.channels).y;
    let first = of_plane.y * p.strip;
    let lines = min(p.strip, p.height - first);
    let x = of_strip.y * {{ run }}u;
    let filter_start = p.other_offset + channel * {{ taps }}u;
    {% for tap in range(taps) %}
    let w{{ tap }} = other_at(filter_start + {{ tap }}u);
    {% endfor %}
    let start = {{ "bias_at(p.bias_offset + channel)" if bias else "0.0" }};
    // Results of the lines that the source's line of this step contributes to. Line 0 gets its last tap.
    {% for j in range(kernel_y) %}
    {% for r in range(run) %}
    var sum{{ j }}_{{ r }} = start;
    {% endfor %}
    {% endfor %}
    for (var step = 0u; step < lines + {{ kernel_y - 1 }}u; step++) {
        let y = {{ source_line("step") }};
        if y < p.source_height {
            let line = p.source_offset + (plane * p.source_height + y) * p.source_width;
            {{ load_line("v", "source", places.all, "line", "p.source_width") | indent(8) }}
            {% for j in range(kernel_y) %}
            {% set filter_line = j if pass == "input" else kernel_y - 1 - j %}
            {% for k in range(kernel_x) %}
            {% for r in range(run) %}
            sum{{ j }}_{{ r }} += w{{ filter_line * kernel_x + k }} * v{{ place(r, k) }};
            {% endfor %}
            {% endfor %}
            {% endfor %}
        }
        if step >= {{ kernel_y - 1 }}u {
            let results = (plane * p.height + first + step - {{ kernel_y - 1 }}u) * p.width;
            {% if mode == "vectors" %}
            {% for r in range(0, run, vector) %}
            {% set number = "(results + x + " ~ r ~ "u) >> " ~ (3 if vector == 8 else 2) ~ "u" %}
            if x + {{ r }}u < p.width {
                {{ m.write_vector(dtype, vector, number, "sum0_", r) | indent(16) }}
            }
            {% endfor %}
            {% else %}
            {{ m.write_run(mode, run, "results", "sum0_") | indent(8) }}
            {% endif %}
        }
        {% for j in range(kernel_y) %}
        {% for r in range(run) %}
        sum{{ j }}_{{ r }} = {{ "start" if j == kernel_y - 1 else "sum" ~ (j + 1) ~ "_" ~ r }};
        {% endfor %}
        {% endfor %}
    }
}
{% endif %}
