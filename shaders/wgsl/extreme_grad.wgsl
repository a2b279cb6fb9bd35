{#-
Gradient of a maximum or minimum over adjacent dimensions: the elements that equal the result share its gradient.

x and out are [outer, extent, inner], y and g [outer, inner], all contiguous.
dtype: type of all four, f32, f16 or bf16
equal_nan: NaN elements share the gradient of a NaN result; else its gradient is NaN
across: inner > 1, and neighbouring threads have neighbouring results; else inner is 1
width: elements of one access, 1 or 4: of one result or, `across`, of four results. Parameters then count quads.
threads_per_row: threads of one result, or quad of results · steps: accesses of a thread that stay in registers, or 0
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as r -%}
{%- set T = t.value(dtype) -%}
{%- set rows = 256 // threads_per_row -%}
{%- set outs = width if across else 1 -%}
{%- set components = [".x", ".y", ".z", ".w"] if width == 4 else [""] -%}
{{ t.prelude() }}
struct Params {
    outputs: u32,
    extent: u32,
    inner: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ r.mapping(threads_per_row, across) }}
{{ r.input(0, "x", dtype, width) }}
{{ t.input(1, "y", dtype) }}
{{ t.input(2, "g", dtype) }}
{{ r.output(3, "out", dtype, width) }}
alias Step = {{ r.step_type(width, T) }};
alias Count = {{ "vec4<u32>" if width == 4 else "u32" }};
{{ t.is_nan(T) }}
{% if threads_per_row > 1 %}
var<workgroup> counts: array<atomic<u32>, {{ rows * outs }}>;
{% endif %}

fn is_tie(v: {{ T }}, y: {{ T }}) -> bool {
    {% if equal_nan %}
    return ((v == y) & !is_nan(v)) | (is_nan(v) & is_nan(y));
    {% else %}
    return (v == y) & !is_nan(v);
    {% endif %}
}

fn ties(v: Step, y: Step) -> Count {
    return Count({% for c in components -%}
        select(0u, 1u, is_tie(v{{ c }}, y{{ c }})){{ ", " if not loop.last }}
    {%- endfor %});
}

// The share times 0: NaN if the share is not finite.
fn zero_of(share: {{ T }}) -> {{ T }} {
    let b = bitcast<u32>(share);
    // By bits, because drivers may assume that a product with 0 is 0.
    return bitcast<f32>((b & 0x80000000u) | select(0u, 0x7fc00000u, (b & 0x7f800000u) == 0x7f800000u));
}

fn result_step(v: Step, y: Step, share: Step, zero: Step) -> Step {
    return Step({% for c in components -%}
        select(zero{{ c }}, share{{ c }}, is_tie(v{{ c }}, y{{ c }})){{ ", " if not loop.last }}
    {%- endfor %});
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group_row = row_in_group(thread);
    let row_thread = thread_in_row(thread);
    let row = row_of(group_index(group, groups), thread);
    let live = row < p.outputs;
    // Threads without a row take part in the barriers.
    let o = min(row, p.outputs - 1u);
    let base = (o / p.inner) * p.extent * p.inner + o % p.inner;
    {% if outs == 4 %}
    let y = Step({% for k in range(4) %}y_at(o * 4u + {{ k }}u){{ ", " if not loop.last }}{% endfor %});
    {% else %}
    let y = Step(y_at(o));
    {% endif %}
    var count = Count(0u);
    {% if steps > 0 %}
    {% for s in range(steps) %}
    let r{{ s }} = row_thread + {{ s * threads_per_row }}u;
    let x{{ s }} = x_step((base + min(r{{ s }}, p.extent - 1u) * p.inner) * {{ width }}u);
    {% endfor %}
    {% for s in range(steps) %}
    count += select(Count(0u), ties(x{{ s }}, y), r{{ s }} < p.extent);
    {% endfor %}
    {% else %}
    for (var r = row_thread; r < p.extent; r += {{ threads_per_row }}u) {
        count += ties(x_step((base + r * p.inner) * {{ width }}u), y);
    }
    {% endif %}
    {% if width == 4 and not across %}
    let own = count.x + count.y + count.z + count.w;
    {% else %}
    let own = count;
    {% endif %}
    {% if threads_per_row > 1 %}
    if thread < {{ rows * outs }}u { atomicStore(&counts[thread], 0u); }
    workgroupBarrier();
    {% for k in range(outs) %}
    atomicAdd(&counts[group_row * {{ outs }}u + {{ k }}u], own{{ components[k] if outs == 4 }});
    {% endfor %}
    workgroupBarrier();
    {% for k in range(outs) %}
    let total{{ k }} = atomicLoad(&counts[group_row * {{ outs }}u + {{ k }}u]);
    {% endfor %}
    {% else %}
    {% for k in range(outs) %}
    let total{{ k }} = own{{ components[k] if outs == 4 }};
    {% endfor %}
    {% endif %}
    if !live { return; }
    {% for k in range(outs) %}
    let share{{ k }} = g_at(o * {{ outs }}u + {{ k }}u) / {{ T }}(total{{ k }});
    {% endfor %}
    {% if outs == 4 %}
    let share = Step(share0, share1, share2, share3);
    let zero = Step(zero_of(share0), zero_of(share1), zero_of(share2), zero_of(share3));
    {% else %}
    let share = Step(share0);
    let zero = Step(zero_of(share0));
    {% endif %}
    {% if steps > 0 %}
    {% for s in range(steps) %}
    if r{{ s }} < p.extent {
        out_put_step((base + r{{ s }} * p.inner) * {{ width }}u, result_step(x{{ s }}, y, share, zero));
    }
    {% endfor %}
    {% else %}
    for (var r = row_thread; r < p.extent; r += {{ threads_per_row }}u) {
        let i = (base + r * p.inner) * {{ width }}u;
        out_put_step(i, result_step(x_step(i), y, share, zero));
    }
    {% endif %}
}
