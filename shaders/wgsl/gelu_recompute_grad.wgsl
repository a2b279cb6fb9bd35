{#-
Operands for the gradients of two linear layers with gelu_tanh(x) between them, from one read of x [rows,
extent]. Writes gelu = gelu_tanh(x). Updates result *= the derivative in place; result is the gradient of
gelu_tanh(x). A workgroup has `strip` rows of 64 steps of columns, and writes the sums of result over its
rows: partial [strips, extent].

dtype: of x, gelu and result · width: elements of a step, 4 if the extent is a multiple of four, else 1
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{%- set both = "m_approx_gelu_tanh_both" if dtype in ["f16", "bf16"] else "m_gelu_tanh_both" -%}
{% include "math/base" %}
{% include "math/exp" %}
{% include "math/log" %}
{% include "math/erf" %}
{% include "math/activation" %}
{{ t.prelude() }}
struct Params {
    rows: u32,
    extent: u32,
    // Rows of a strip: a multiple of 16.
    strip: u32,
    // Workgroups along the columns, and number of all workgroups.
    tiles: u32,
    groups: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ rows.input(0, "x", dtype, width) }}
{{ rows.output(1, "gelu", dtype, width) }}
{{ rows.output(2, "result", dtype, width) }}
{{ rows.output(3, "partial", "f32", width) }}
{{ rows.steps(width) }}
var<workgroup> sums: array<Step, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    if group_index(group, groups) >= p.groups { return; }
    // Workgroups begin with the last rows, which the previous product has left in the cache.
    let linear_group = p.groups - 1u - group_index(group, groups);
    let strip = linear_group / p.tiles;
    let column = (linear_group % p.tiles * 64u + thread % 64u) * {{ width }}u;
    let inside = column < p.extent;
    let load_column = select(0u, column, inside);
    var sum = Step(0.0);
    // A thread has four rows in flight, which are four apart.
    for (var first = thread / 64u; first < p.strip; first += 16u) {
        {% for k in range(4) %}
        let row{{ k }} = strip * p.strip + first + {{ 4 * k }}u;
        let live{{ k }} = inside & (row{{ k }} < p.rows);
        let at{{ k }} = min(row{{ k }}, p.rows - 1u) * p.extent + load_column;
        let x{{ k }} = x_step(at{{ k }});
        let g{{ k }} = result_step(at{{ k }});
        {% endfor %}
        {% for k in range(4) %}
        {% if width == 4 %}
        {% for c in ["x", "y", "z", "w"] %}
        let both{{ k }}{{ c }} = {{ both }}(x{{ k }}.{{ c }});
        {% endfor %}
        let gelu{{ k }} = Step({% for c in ["x", "y", "z", "w"] %}
            both{{ k }}{{ c }}.x{{ ", " if not loop.last }}{% endfor %});
        let slope{{ k }} = Step({% for c in ["x", "y", "z", "w"] %}
            both{{ k }}{{ c }}.y{{ ", " if not loop.last }}{% endfor %});
        {% else %}
        let both{{ k }} = {{ both }}(x{{ k }});
        let gelu{{ k }} = both{{ k }}.x;
        let slope{{ k }} = both{{ k }}.y;
        {% endif %}
        let h{{ k }} = g{{ k }} * slope{{ k }};
        if live{{ k }} {
            sum += h{{ k }};
            result_put_step(at{{ k }}, h{{ k }});
            gelu_put_step(at{{ k }}, gelu{{ k }});
        }
        {% endfor %}
    }
    sums[thread] = sum;
    workgroupBarrier();
    if (thread < 64u) & inside {
        partial_put_step(strip * p.extent + column,
            (sums[thread] + sums[thread + 64u]) + (sums[thread + 128u] + sums[thread + 192u]));
    }
}
