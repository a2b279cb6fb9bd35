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

var<workgroup> most: array<{{ T }}, 256>;
var<workgroup> most_at: array<u32, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) all: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let batch = group_index(id, all);
    // A folded grid has workgroups beyond the last.
    if batch >= p.batch { return; }
    let base = batch * p.m * p.n;
    {% if pivoting %}
    var parity = {{ T }}(1.0);
    if p.first == 0u {
        for (var r = lane; r < p.m; r += 256u) { order[batch * p.m + r] = r; }
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
        for (var r = j + lane; r < p.m; r += 256u) {
            let v = abs(a[base + r * p.n + j]);
            if v > best { best = v; at = r; }
        }
        most[lane] = best;
        most_at[lane] = at;
        workgroupBarrier();
        for (var reach = 128u; reach > 0u; reach = reach >> 1u) {
            if lane < reach {
                let v = most[lane + reach];
                let place = most_at[lane + reach];
                if (v > most[lane]) | ((v == most[lane]) & (place < most_at[lane])) {
                    most[lane] = v;
                    most_at[lane] = place;
                }
            }
            workgroupBarrier();
        }
        let pivot = most_at[0];
        let there = base + pivot * p.n;
        if pivot != j {
            parity = -parity;
            for (var c = lane; c < p.n; c += 256u) {
                let v = a[row + c];
                a[row + c] = a[there + c];
                a[there + c] = v;
            }
            if lane == 0u {
                let v = order[batch * p.m + j];
                order[batch * p.m + j] = order[batch * p.m + pivot];
                order[batch * p.m + pivot] = v;
            }
        }
        storageBarrier();
        workgroupBarrier();
        let diagonal = a[row + j];
        // A column of zeros stays zero.
        for (var r = j + 1u + lane; r < p.m; r += 256u) {
            let i = base + r * p.n + j;
            if diagonal != {{ T }}(0.0) { a[i] = a[i] / diagonal; }
        }
        {% else %}
        let root = sqrt(a[row + j]);
        for (var r = j + 1u + lane; r < p.m; r += 256u) {
            let i = base + r * p.n + j;
            a[i] = a[i] / root;
        }
        // All threads have read the values that are overwritten now.
        storageBarrier();
        workgroupBarrier();
        if lane == 0u { a[row + j] = root; }
        {% endif %}
        storageBarrier();
        workgroupBarrier();
        let left = p.n - j - 1u;
        for (var e = lane; e < (p.m - j - 1u) * left; e += 256u) {
            let r = j + 1u + e / left;
            let c = j + 1u + e % left;
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
    if lane == 0u { sign[batch] = parity; }
    {% endif %}
}
