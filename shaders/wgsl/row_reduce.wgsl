{#-
Shared code of kernels that process rows: `lanes` threads have one row, and a workgroup 256 / lanes rows, or
  one row if lanes are more. Neighbouring threads hold elements of one row or, with `across`, of neighbouring
  rows. All threads, with a row or without, call row_sum, row_max and row_sums (two sums at once); all lanes
  of a row get the result.
value: type of the sums, f32 or f64, which needs math/f64_exp_log.
-#}
{%- macro functions(lanes, across, value="f32") %}
{% set threads = lanes if lanes > 256 else 256 %}
{% set rows = threads // lanes %}
{% set step = rows if across else 1 %}
{% set few = 16 if lanes >= 256 else 8 if lanes >= 64 else 4 if lanes == 32 else lanes %}
{% if across %}
fn lane_of(thread: u32) -> u32 { return thread / {{ rows }}u; }
fn row_of(group: u32, thread: u32) -> u32 { return group * {{ rows }}u + thread % {{ rows }}u; }
{% else %}
fn lane_of(thread: u32) -> u32 { return thread % {{ lanes }}u; }
fn row_of(group: u32, thread: u32) -> u32 { return group * {{ rows }}u + thread / {{ lanes }}u; }
{% endif %}
{% if lanes > 1 %}
var<workgroup> row_values: array<{{ value }}, {{ threads }}>;
var<workgroup> row_pairs: array<vec2<{{ value }}>, {{ threads }}>;
{% endif %}
{% for name, type, memory, both in [
    ("sum", value, "row_values", "all + other"),
    ("max", value, "row_values", "m_max" ~ ("64" if value == "f64") ~ "(all, other)"),
    ("sums", "vec2<" ~ value ~ ">", "row_pairs", "all + other")] %}
fn row_{{ name }}(v: {{ type }}, thread: u32) -> {{ type }} {
    {% if lanes == 1 %}
    return v;
    {% else %}
    let lane = lane_of(thread);
    {{ memory }}[thread] = v;
    workgroupBarrier();
    {% if few < lanes %}
    // A few lanes combine {{ lanes // few }} values each; they overwrite only values that they alone read.
    if lane < {{ few }}u {
        var all = v;
        for (var n = 1u; n < {{ lanes // few }}u; n++) {
            let other = {{ memory }}[thread + n * {{ few * step }}u];
            all = {{ both }};
        }
        {{ memory }}[thread] = all;
    }
    workgroupBarrier();
    {% endif %}
    let first = thread - lane * {{ step }}u;
    var all = {{ memory }}[first];
    for (var n = 1u; n < {{ few }}u; n++) {
        let other = {{ memory }}[first + n * {{ step }}u];
        all = {{ both }};
    }
    workgroupBarrier();
    return all;
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
