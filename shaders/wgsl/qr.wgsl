{#-
QR decomposition of matrices by Householder reflections (Golub and Van Loan, Matrix Computations, 5.2), with
LAPACK's signs.

dtype: f32 or f64
form: `factor`: `a`, [batch, m, n], becomes the triangle, and below it the reflections' vectors, whose
  diagonal elements are ones and not stored. Their factors go to `tau`, [batch, count]. A workgroup has a
  matrix.
`apply`: `x`, [batch, m, columns], becomes the product of these reflections and `x`. A workgroup has 32
  columns of a matrix.
-#}
{%- import "types" as t -%}
{%- set T = dtype -%}
{%- set factor = form == "factor" -%}
{{ t.prelude() }}
struct Params {
    batch: u32,
    m: u32,
    n: u32,
    // Reflections of a matrix.
    count: u32,
    columns: u32,
    // Reflections of this launch; earlier launches did those before.
    first: u32,
    end: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{% if factor %}
@group(0) @binding(0) var<storage, read_write> a: array<{{ T }}>;
@group(0) @binding(1) var<storage, read_write> tau: array<{{ T }}>;
{% else %}
@group(0) @binding(0) var<storage, read> a: array<{{ T }}>;
@group(0) @binding(1) var<storage, read> tau: array<{{ T }}>;
@group(0) @binding(2) var<storage, read_write> x: array<{{ T }}>;
{% endif %}

// One value of each thread, for reductions.
var<workgroup> parts: array<{{ T }}, 256>;

{% if factor %}
// Returns the sum over all threads, each of which contributes one value.
fn sum_of_all(thread: u32, part: {{ T }}) -> {{ T }} {
    parts[thread] = part;
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride = stride >> 1u) {
        if thread < stride { parts[thread] += parts[thread + stride]; }
        workgroupBarrier();
    }
    let total = parts[0];
    workgroupBarrier();
    return total;
}
fn max_of_all(thread: u32, part: {{ T }}) -> {{ T }} {
    parts[thread] = part;
    workgroupBarrier();
    for (var stride = 128u; stride > 0u; stride = stride >> 1u) {
        if thread < stride { parts[thread] = max(parts[thread], parts[thread + stride]); }
        workgroupBarrier();
    }
    let total = parts[0];
    workgroupBarrier();
    return total;
}
{% endif %}

{#- Reflection j of 32 columns from `first` on; eight threads share a column. -#}
{% macro reflect(of, base, width, first) %}
        let column = {{ first }} + thread % 32u;
        let live = column < {{ width }};
        let top_at = {{ base }} + j * {{ width }} + column;
        var sum = {{ T }}(0.0);
        if live {
            for (var r = j + 1u + thread / 32u; r < p.m; r += 8u) {
                sum += a[vectors + r * p.n + j] * {{ of }}[{{ base }} + r * {{ width }} + column];
            }
        }
        parts[thread] = sum;
        storageBarrier();
        workgroupBarrier();
        var product = {{ T }}(0.0);
        if live { product = {{ of }}[top_at]; }
        let top = product;
        for (var k = thread % 32u; k < 256u; k += 32u) { product += parts[k]; }
        product = product * scale;
        // All threads have read the values that are overwritten now.
        storageBarrier();
        workgroupBarrier();
        if live {
            if thread < 32u { {{ of }}[top_at] = top - product; }
            for (var r = j + 1u + thread / 32u; r < p.m; r += 8u) {
                {{ of }}[{{ base }} + r * {{ width }} + column] -= product * a[vectors + r * p.n + j];
            }
        }
{% endmacro %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) all: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, all);
    {% if factor %}
    let batch = group;
    {% else %}
    let groups = (p.columns + 31u) / 32u;
    let batch = group / groups;
    {% endif %}
    // A folded grid has workgroups beyond the last.
    if batch >= p.batch { return; }
    let vectors = batch * p.m * p.n;
    {% if factor %}
    for (var j = p.first; j < p.end; j++) {
        let at = vectors + j * p.n + j;
        let head = a[at];
        // Scales, because squares must not overflow or underflow.
        var column_max = {{ T }}(0.0);
        for (var r = j + 1u + thread; r < p.m; r += 256u) {
            column_max = max(column_max, abs(a[vectors + r * p.n + j]));
        }
        column_max = max_of_all(thread, column_max);
        let largest = max(column_max, abs(head));
        let column_scale = select({{ T }}(1.0), largest, largest > {{ T }}(0.0));
        var squares = {{ T }}(0.0);
        for (var r = j + 1u + thread; r < p.m; r += 256u) {
            let v = a[vectors + r * p.n + j] / column_scale;
            squares += v * v;
        }
        squares = sum_of_all(thread, squares);
        let part = head / column_scale;
        let length = column_scale * sqrt(part * part + squares);
        // A column that is zero below the diagonal is left unchanged.
        let diagonal = select(head, select(-length, length, head < {{ T }}(0.0)), squares != {{ T }}(0.0));
        var scale = {{ T }}(0.0);
        if squares != {{ T }}(0.0) {
            scale = (diagonal - head) / diagonal;
            for (var r = j + 1u + thread; r < p.m; r += 256u) {
                let i = vectors + r * p.n + j;
                a[i] = a[i] / (head - diagonal);
            }
        }
        if thread == 0u {
            a[at] = diagonal;
            tau[batch * p.count + j] = scale;
        }
        storageBarrier();
        workgroupBarrier();
        for (var first = j + 1u; first < p.n; first += 32u) {
            {{ reflect("a", "vectors", "p.n", "first") }}
        }
        storageBarrier();
        workgroupBarrier();
    }
    {% else %}
    let base = batch * p.m * p.columns;
    let first = (group % groups) * 32u;
    for (var remaining = p.end; remaining > p.first; remaining--) {
        let j = remaining - 1u;
        let scale = tau[batch * p.count + j];
        {{ reflect("x", "base", "p.columns", "first") }}
        storageBarrier();
        workgroupBarrier();
    }
    {% endif %}
}
