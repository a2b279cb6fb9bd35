{#-
Gradient of the source of a scatter by maximum or minimum along the first dimension: an element that equals the result
  of its row gets the row's share, and others get 0. So do elements whose index is out of range.

src and out are [rows, elements], y and share [extent, elements], all contiguous; an index for each row
dtype: type of all four, f32, f16 or bf16 · index: dtype of the index, `i32`, `u32` or `i64w`
width: elements of one access, 1 or 4, a divisor of the elements of a row
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as r -%}
{%- set T = t.value(dtype) -%}
{%- set components = [".x", ".y", ".z", ".w"] if width == 4 else [""] -%}
{{ t.prelude() }}
struct Params {
    // Accesses of all rows, and of a row.
    n: u32,
    steps: u32,
    extent: u32,
    index_offset: u32,
    index_stride: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.index(0, "index", index) }}
{{ r.input(1, "src", dtype, width) }}
{{ r.input(2, "y", dtype, width) }}
{{ r.input(3, "share", dtype, width) }}
{{ r.output(4, "out", dtype, width) }}
alias Step = {{ r.step_type(width, T) }};
{{ t.is_nan(T) }}
{{ t.resolve_index() }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    if global_index >= p.n { return; }
    let row = global_index / p.steps;
    let resolved = resolve_index(index_words(p.index_offset + row * p.index_stride), p.extent);
    var grad = Step(0.0);
    if resolved < p.extent {
        let at = (resolved * p.steps + global_index % p.steps) * {{ width }}u;
        let v = src_step(global_index * {{ width }}u);
        let y = y_step(at);
        let share = share_step(at);
        grad = Step({% for c in components -%}
            select(0.0, share{{ c }}, (v{{ c }} == y{{ c }}) & !is_nan(v{{ c }})){{ ", " if not loop.last }}
        {%- endfor %});
    }
    out_put_step(global_index * {{ width }}u, grad);
}
