{#-
Solves triangular systems: x, [batch, n, columns], holds the right-hand sides and becomes the solution. Each
  solved row is subtracted from all rows that follow. A workgroup has some columns of one x.

dtype: f32 or f64 · upper: reads the upper triangle, from the last row on
unit: the diagonal is ones, and not read
-#}
{%- import "types" as t -%}
{%- set T = dtype -%}
{{ t.prelude() }}
struct Params {
    batch: u32,
    n: u32,
    columns: u32,
    // Columns of a workgroup.
    width: u32,
    // Offset and strides of the triangles.
    offset: u32,
    batch_stride: u32,
    row_stride: u32,
    column_stride: u32,
    // Rows of this launch; earlier launches did those before.
    first: u32,
    end: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> a: array<{{ T }}>;
@group(0) @binding(1) var<storage, read_write> x: array<{{ T }}>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) all: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, all);
    let groups = (p.columns + p.width - 1u) / p.width;
    let batch = group / groups;
    // A folded grid has workgroups beyond the last.
    if batch >= p.batch { return; }
    let first = (group % groups) * p.width;
    let width = min(p.width, p.columns - first);
    let triangle = p.offset + batch * p.batch_stride;
    let base = batch * p.n * p.columns + first;
    for (var step = p.first; step < p.end; step++) {
        let i = {{ "p.n - 1u - step" if upper else "step" }};
        {% if not unit %}
        let diagonal = a[triangle + i * (p.row_stride + p.column_stride)];
        for (var c = thread; c < width; c += 256u) {
            x[base + i * p.columns + c] = x[base + i * p.columns + c] / diagonal;
        }
        storageBarrier();
        workgroupBarrier();
        {% endif %}
        let remaining = p.n - 1u - step;
        for (var e = thread; e < remaining * width; e += 256u) {
            let r = {{ "e / width" if upper else "i + 1u + e / width" }};
            let c = e % width;
            x[base + r * p.columns + c] -= a[triangle + r * p.row_stride + i * p.column_stride]
                * x[base + i * p.columns + c];
        }
        storageBarrier();
        workgroupBarrier();
    }
}
