{#-
Sums over parts of several rows at once: NAME_s[i] = the sum over k of partial[k, s, i], for each of `outs`
  sections, in f32. Kernels that write partial column sums end with one launch of this, where reductions would
  need one for each section.

outs: sections, 1 to 3 · width: elements of a step, 4 if the extent is a multiple of four, else 1
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{{ t.prelude() }}
struct Params {
    parts: u32,
    extent: u32,
    // Workgroups of a section, and of all sections.
    tiles: u32,
    groups: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ rows.input(0, "partial", "f32", width) }}
{% for s in range(outs) %}
{{ rows.output(s + 1, "out" ~ s, "f32", width) }}
{% endfor %}
alias Step = {{ rows.step_type(width) }};
var<workgroup> sums: array<Step, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let linear_group = group_index(group, groups);
    if linear_group >= p.groups { return; }
    let section = linear_group / p.tiles;
    // Four steps are contiguous, and 64 threads take every 64th part each: most sums have few columns, and
    // are short.
    let column = (linear_group % p.tiles * 4u + thread % 4u) * {{ width }}u;
    let inside = column < p.extent;
    let at = section * p.extent + select(0u, column, inside);
    var sum = Step(0.0);
    for (var part = thread / 4u; part < p.parts; part += 512u) {
        {% for k in range(8) %}
        let in{{ k }} = part + {{ 64 * k }}u < p.parts;
        let v{{ k }} = partial_step(select(part, part + {{ 64 * k }}u, in{{ k }}) * p.extent * {{ outs }}u + at);
        {% endfor %}
        {% for k in range(8) %}
        sum += select(Step(0.0), v{{ k }}, in{{ k }});
        {% endfor %}
    }
    sums[thread] = sum;
    workgroupBarrier();
    // In order, so that the bits are the same in every run.
    if thread < 64u {
        sum = sums[thread];
        for (var k = 64u; k < 256u; k += 64u) { sum += sums[thread + k]; }
        sums[thread] = sum;
    }
    workgroupBarrier();
    if thread < 4u && inside {
        sum = sums[thread];
        for (var k = 4u; k < 64u; k += 4u) { sum += sums[thread + k]; }
        {% for s in range(outs) %}
        if section == {{ s }}u { out{{ s }}_put_step(column, sum); }
        {% endfor %}
    }
}
