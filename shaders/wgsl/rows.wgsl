{#-
What kernels that work row by row share: `lanes` threads hold one row, and a workgroup 256 / lanes rows. Threads that
lie side by side hold elements of one row or, `across`, elements of neighbouring rows. All threads, with a row or
without, call row_sum and row_max.
-#}
{%- macro functions(lanes, across) %}
{% set rows = 256 // lanes %}
{% set step = rows if across else 1 %}
{% if lanes > 1 %}
var<workgroup> row_values: array<f32, 256>;
{% endif %}
{% if across %}
fn lane_of(thread: u32) -> u32 { return thread / {{ rows }}u; }
fn row_of(group: u32, thread: u32) -> u32 { return group * {{ rows }}u + thread % {{ rows }}u; }
{% else %}
fn lane_of(thread: u32) -> u32 { return thread % {{ lanes }}u; }
fn row_of(group: u32, thread: u32) -> u32 { return group * {{ rows }}u + thread / {{ lanes }}u; }
{% endif %}
{% for name, value in [("sum", "mine + other"), ("max", "m_max(mine, other)")] %}
fn row_{{ name }}(v: f32, thread: u32) -> f32 {
    {% if lanes == 1 %}
    return v;
    {% else %}
    let lane = lane_of(thread);
    row_values[thread] = v;
    workgroupBarrier();
    for (var reach = {{ lanes // 2 }}u; reach > 0u; reach = reach >> 1u) {
        if lane < reach {
            let mine = row_values[thread];
            let other = row_values[thread + reach * {{ step }}u];
            row_values[thread] = {{ value }};
        }
        workgroupBarrier();
    }
    let all = row_values[thread - lane * {{ step }}u];
    workgroupBarrier();
    return all;
    {% endif %}
}
{% endfor %}
{% endmacro -%}
