{#-
LU or Cholesky decomposition of matrices, [batch, m, n], in place: Gaussian elimination, a row at a time, with
partial pivoting (Golub and Van Loan, Matrix Computations, 3.4). A workgroup has a matrix.

dtype: f32 or f64
form: `lu`, with the row permutation and its sign, or `cholesky` of a symmetric matrix, whose lower triangle
  is read and written
-#}
{%- import "types" as t -%}
{%- set T = dtype -%}
{%- set pivoting = form == "lu" -%}
{{ t.prelude() }}
struct Params {
    batch: u32,
    m: u32,
    n: u32,
    // Columns of this launch; earlier launches did those before.
    first: u32,
    end: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> a: array<{{ T }}>;
{% if pivoting %}
// Original index of each row, and the sign of the permutation.
@group(0) @binding(1) var<storage, read_write> order: array<u32>;
@group(0) @binding(2) var<storage, read_write> sign: array<{{ T }}>;

var<workgroup> max_values: array<{{ T }}, 256>;
var<workgroup> max_rows: array<u32, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) all: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let batch = group_index(id, all);
    // A folded grid has workgroups beyond the last.
    if batch >= p.batch { return; }
    let base = batch * p.m * p.n;
    {% if pivoting %}
    var parity = {{ T }}(1.0);
    if p.first == 0u {
        for (var r = thread; r < p.m; r += 256u) { order[batch * p.m + r] = r; }
    } else {
        parity = sign[batch];
    }
    {% endif %}
    for (var j = p.first; j < p.end; j++) {
        let row = base + j * p.n;
        {% if pivoting %}
        // The first of equal elements.
        var best = {{ T }}(-1.0);
        var at = j;
        for (var r = j + thread; r < p.m; r += 256u) {
            let v = abs(a[base + r * p.n + j]);
            if v > best { best = v; at = r; }
        }
        max_values[thread] = best;
        max_rows[thread] = at;
        workgroupBarrier();
        for (var stride = 128u; stride > 0u; stride = stride >> 1u) {
            if thread < stride {
                let v = max_values[thread + stride];
                let other_row = max_rows[thread + stride];
                if (v > max_values[thread]) | ((v == max_values[thread]) & (other_row < max_rows[thread])) {
                    max_values[thread] = v;
                    max_rows[thread] = other_row;
                }
            }
            workgroupBarrier();
        }
        let pivot = max_rows[0];
        let pivot_start = base + pivot * p.n;
        if pivot != j {
            parity = -parity;
            for (var c = thread; c < p.n; c += 256u) {
                let v = a[row + c];
                a[row + c] = a[pivot_start + c];
                a[pivot_start + c] = v;
            }
            if thread == 0u {
                let v = order[batch * p.m + j];
                order[batch * p.m + j] = order[batch * p.m + pivot];
                order[batch * p.m + pivot] = v;
            }
        }
        storageBarrier();
        workgroupBarrier();
        let diagonal = a[row + j];
        // A column of zeros stays zero.
        for (var r = j + 1u + thread; r < p.m; r += 256u) {
            let i = base + r * p.n + j;
            if diagonal != {{ T }}(0.0) { a[i] = a[i] / diagonal; }
        }
        {% else %}
        let root = sqrt(a[row + j]);
        for (var r = j + 1u + thread; r < p.m; r += 256u) {
            let i = base + r * p.n + j;
            a[i] = a[i] / root;
        }
        // All threads have read the values that are overwritten now.
        storageBarrier();
        workgroupBarrier();
        if thread == 0u { a[row + j] = root; }
        {% endif %}
        storageBarrier();
        workgroupBarrier();
        let trailing = p.n - j - 1u;
        for (var e = thread; e < (p.m - j - 1u) * trailing; e += 256u) {
            let r = j + 1u + e / trailing;
            let c = j + 1u + e % trailing;
            {% if pivoting %}
            a[base + r * p.n + c] -= a[base + r * p.n + j] * a[row + c];
            {% else %}
            if c <= r { a[base + r * p.n + c] -= a[base + r * p.n + j] * a[base + c * p.n + j]; }
            {% endif %}
        }
        storageBarrier();
        workgroupBarrier();
    }
    {% if pivoting %}
    if thread == 0u { sign[batch] = parity; }
    {% endif %}
}
