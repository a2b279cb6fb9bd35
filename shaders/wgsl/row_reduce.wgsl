{#-
Shared code of kernels that process rows.

A row has `threads_per_row` threads. A workgroup has 256 / threads_per_row rows, or one row if a row has more threads.
Neighbouring threads hold elements of one row or, with `across`, of neighbouring rows. row_sum, row_max and row_sums
(two sums at once) have barriers, so all threads of the workgroup call them, also those without a row. All threads of a
row get the result.

value: type of the sums, f32 or f64. f64 needs math/f64_exp_log.
-#}
{#- The row of each thread: thread_in_row(thread), row_in_group(thread) and row_of(group, thread). -#}
{%- macro mapping(threads_per_row, across) %}
{% set rows = 256 // threads_per_row if threads_per_row < 256 else 1 %}
{% if across %}
fn thread_in_row(thread: u32) -> u32 { return thread / {{ rows }}u; }
fn row_in_group(thread: u32) -> u32 { return thread % {{ rows }}u; }
{% else %}
fn thread_in_row(thread: u32) -> u32 { return thread % {{ threads_per_row }}u; }
fn row_in_group(thread: u32) -> u32 { return thread / {{ threads_per_row }}u; }
{% endif %}
fn row_of(group: u32, thread: u32) -> u32 { return group * {{ rows }}u + row_in_group(thread); }
{% endmacro -%}

{#- The mapping, and functions that combine values of a row: row_sum, row_max and row_sums. -#}
{%- macro functions(threads_per_row, across, value="f32") %}
{% set threads = threads_per_row if threads_per_row > 256 else 256 %}
{% set rows = threads // threads_per_row %}
{% set step = rows if across else 1 %}
{% set partials = 16 if threads_per_row >= 256 else 8 if threads_per_row >= 64 else 4 if threads_per_row == 32
    else threads_per_row %}
{{ mapping(threads_per_row, across) }}
{% if threads_per_row > 1 %}
var<workgroup> row_values: array<{{ value }}, {{ threads }}>;
var<workgroup> row_pairs: array<vec2<{{ value }}>, {{ threads }}>;
{% endif %}
{% for name, type, memory, combined in [
    ("sum", value, "row_values", "acc + other"),
    ("max", value, "row_values", "m_max" ~ ("64" if value == "f64") ~ "(acc, other)"),
    ("sums", "vec2<" ~ value ~ ">", "row_pairs", "acc + other")] %}
fn row_{{ name }}(v: {{ type }}, thread: u32) -> {{ type }} {
    {% if threads_per_row == 1 %}
    return v;
    {% else %}
    let row_thread = thread_in_row(thread);
    {{ memory }}[thread] = v;
    workgroupBarrier();
    {% if partials < threads_per_row %}
    // {{ partials }} threads combine {{ threads_per_row // partials }} values each. Each overwrites only values that
    // it alone reads.
    if row_thread < {{ partials }}u {
        var acc = v;
        for (var n = 1u; n < {{ threads_per_row // partials }}u; n++) {
            let other = {{ memory }}[thread + n * {{ partials * step }}u];
            acc = {{ combined }};
        }
        {{ memory }}[thread] = acc;
    }
    workgroupBarrier();
    {% endif %}
    let first = thread - row_thread * {{ step }}u;
    var acc = {{ memory }}[first];
    for (var n = 1u; n < {{ partials }}u; n++) {
        let other = {{ memory }}[first + n * {{ step }}u];
        acc = {{ combined }};
    }
    workgroupBarrier();
    return acc;
    {% endif %}
}
{% endfor %}
{% endmacro -%}

{#- A buffer accessed in steps of `width` elements: NAME_step(i) and NAME_put_step(i, v), i in elements. -#}
{%- import "types" as t -%}
{%- macro step_type(width, value="f32") -%}{{ "vec4<f32>" if width == 4 else value }}{%- endmacro -%}
{%- macro input(binding, name, dtype, width) %}
{% if width == 4 %}
{{ t.quads(binding, name, dtype) }}
fn {{ name }}_step(i: u32) -> vec4<f32> { return {{ name }}_quad(i >> 2u); }
{% else %}
{{ t.input(binding, name, dtype) }}
fn {{ name }}_step(i: u32) -> {{ t.value(dtype) }} { return {{ name }}_at(i); }
{% endif %}
{% endmacro -%}
{%- macro output(binding, name, dtype, width) %}
{% if width == 4 %}
{{ t.quads_output(binding, name, dtype) }}
fn {{ name }}_step(i: u32) -> vec4<f32> { return {{ name }}_quad(i >> 2u); }
fn {{ name }}_put_step(i: u32, v: vec4<f32>) { {{ name }}_put_quad(i >> 2u, v); }
{% else %}
{{ t.output(binding, name, dtype) }}
fn {{ name }}_step(i: u32) -> {{ t.value(dtype) }} { return {{ name }}_at(i); }
fn {{ name }}_put_step(i: u32, v: {{ t.value(dtype) }}) { {{ name }}_put(i, v); }
{% endif %}
{% endmacro -%}

{#- Functions of one step: element-wise, or reducing all components to one value. -#}
{%- macro steps(width, value="f32") %}
alias Step = {{ step_type(width, value) }};
{% if width == 4 %}
fn step_sum(v: Step) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn step_max(v: Step) -> f32 { return m_max(m_max(v.x, v.y), m_max(v.z, v.w)); }
{% else %}
fn step_sum(v: Step) -> {{ value }} { return v; }
fn step_max(v: Step) -> {{ value }} { return v; }
{% endif %}
{% endmacro -%}
{%- macro each(name, function, width) %}
{% if width == 4 %}
fn {{ name }}(v: Step) -> Step {
    return Step({{ function }}(v.x), {{ function }}(v.y), {{ function }}(v.z), {{ function }}(v.w));
}
{% else %}
fn {{ name }}(v: Step) -> Step { return {{ function }}(v); }
{% endif %}
{% endmacro -%}

{#-
Buffers accessed in packs of `width` elements, 1, 4 or 8: NAME_load(i) and NAME_store(i, v), i in elements. Eight
elements of 16 bits are one access of 16 bytes. A Pack has one Part, or two of four elements.
-#}
{%- macro pack_parts(width) -%}{{ 2 if width == 8 else 1 }}{%- endmacro -%}
{%- macro packs(width) %}
alias Part = {{ "f32" if width == 1 else "vec4<f32>" }};
alias Pack = array<Part, {{ pack_parts(width) }}>;
fn part_sum(v: Part) -> f32 { return {{ "v" if width == 1 else "(v.x + v.y) + (v.z + v.w)" }}; }
{% endmacro -%}
{%- macro pack_input(binding, name, dtype, width) %}
{% if width == 8 and dtype in ["f16", "bf16"] %}
@group(0) @binding({{ binding }}) var<storage, read> {{ name }}: array<vec4<u32>>;
fn {{ name }}_load(i: u32) -> Pack {
    let w = {{ name }}[i >> 3u];
    return Pack({{ t.quad_value(dtype, "w.xy") }}, {{ t.quad_value(dtype, "w.zw") }});
}
{% elif width == 8 %}
{{ t.quads(binding, name, dtype) }}
fn {{ name }}_load(i: u32) -> Pack { return Pack({{ name }}_quad(i >> 2u), {{ name }}_quad((i >> 2u) + 1u)); }
{% else %}
{{ input(binding, name, dtype, width) }}
fn {{ name }}_load(i: u32) -> Pack { return Pack({{ name }}_step(i)); }
{% endif %}
{% endmacro -%}
{%- macro pack_output(binding, name, dtype, width) %}
{% if width == 8 and dtype in ["f16", "bf16"] %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<vec4<u32>>;
{{ t.bits_function(name, dtype) }}
fn {{ name }}_store(i: u32, v: Pack) {
    let low = v[0];
    let high = v[1];
    {% set pair = name ~ "_pair_" ~ dtype %}
    {{ name }}[i >> 3u] = vec4<u32>({{ pair }}(low.x, low.y), {{ pair }}(low.z, low.w),
        {{ pair }}(high.x, high.y), {{ pair }}(high.z, high.w));
}
{% elif width == 8 %}
{{ t.quads_output(binding, name, dtype) }}
fn {{ name }}_store(i: u32, v: Pack) {
    {{ name }}_put_quad(i >> 2u, v[0]);
    {{ name }}_put_quad((i >> 2u) + 1u, v[1]);
}
{% else %}
{{ output(binding, name, dtype, width) }}
fn {{ name }}_store(i: u32, v: Pack) { {{ name }}_put_step(i, v[0]); }
{% endif %}
{% endmacro -%}

{#-
Activation of a normalisation, "", "relu" or "silu": activate(y), and activate_grad(g, y), the gradient of y. SiLU
needs the files of `activation_math`.
-#}
{%- macro activation_functions(activation, width) %}
{% if activation == "silu" %}
fn activate_element(y: f32) -> f32 { return m_silu(y); }
fn activate_grad_element(g: f32, y: f32) -> f32 { return g * m_silu_grad(y); }
{% elif activation == "relu" %}
fn activate_element(y: f32) -> f32 { return m_max(y, 0.0); }
fn activate_grad_element(g: f32, y: f32) -> f32 { return select(0.0, g, y > 0.0); }
{% else %}
fn activate_element(y: f32) -> f32 { return y; }
fn activate_grad_element(g: f32, y: f32) -> f32 { return g; }
{% endif %}
{% set parts = [""] if width == 1 else [".x", ".y", ".z", ".w"] %}
fn activate(y: Part) -> Part {
    return Part({% for c in parts %}activate_element(y{{ c }}){{ ", " if not loop.last }}{% endfor %});
}
fn activate_grad(g: Part, y: Part) -> Part {
    return Part({% for c in parts %}activate_grad_element(g{{ c }}, y{{ c }}){{ ", " if not loop.last }}{% endfor %});
}
{% endmacro -%}
{%- set activation_math = ["exp", "log", "erf", "activation"] -%}
