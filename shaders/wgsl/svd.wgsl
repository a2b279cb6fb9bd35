{#-
One-sided Jacobi SVD (Hestenes, 1958): rotates pairs of columns until all are orthogonal. `w` is [batch, n,
height]: n columns, of whose elements the first m are the matrix, and the others are rotated with them. In a
round every column is in at most one pair: a round-robin tournament, in which the last player is fixed.

dtype: f32 or f64 · threads_per_row: threads that rotate a pair
Either one workgroup has a matrix (p.groups = 1) and runs many rounds, or each launch is one round.
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{% include "math/base" %}
{% if dtype == "f64" %}
{% include "math/f64_exp_log" %}
{% endif %}
{{ t.prelude() }}
{% set T = dtype %}
struct Params {
    batch: u32,
    n: u32,
    m: u32,
    height: u32,
    // Columns, plus one if that is odd: the column paired with the extra player rests.
    players: u32,
    first: u32,
    rounds: u32,
    // Workgroups of a matrix.
    groups: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
// Flags of matrices that were rotated in the last sweep, and in this one.
@group(0) @binding(0) var<storage, read> rotated_before: array<u32>;
@group(0) @binding(1) var<storage, read_write> rotated: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> w: array<{{ T }}>;
// Equal in all threads, for the barriers in the loop.
var<workgroup> shared_rounds: u32;
{{ rows.functions(threads_per_row, false, T) }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) all: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, all);
    let batch = group / p.groups;
    // A folded grid has workgroups beyond the last.
    if batch >= p.batch { return; }
    if thread == 0u { shared_rounds = select(p.rounds, 0u, rotated_before[batch] == 0u); }
    let rounds = workgroupUniformLoad(&shared_rounds);
    let row_thread = thread_in_row(thread);
    let ring = p.players - 1u;
    var any_rotated = false;
    for (var round = p.first; round < p.first + rounds; round++) {
        for (var first = 0u; first * {{ 256 // threads_per_row }}u < p.players / 2u; first += p.groups) {
            let pair = row_of(first + group % p.groups, thread);
            let col_p = select((round + pair) % ring, ring, pair == 0u);
            let col_q = (round + p.players - 1u - pair) % ring;
            let live = (pair < p.players / 2u) & (max(col_p, col_q) < p.n);
            let a = (batch * p.n + col_p) * p.height;
            let b = (batch * p.n + col_q) * p.height;
            var squares = vec2<{{ T }}>();
            var product = {{ T }}(0.0);
            if live {
                for (var k = row_thread; k < p.m; k += {{ threads_per_row }}u) {
                    let x = w[a + k];
                    let y = w[b + k];
                    squares += vec2<{{ T }}>(x * x, y * y);
                    product += x * y;
                }
            }
            squares = row_sums(squares, thread);
            product = row_sum(product, thread);
            // Products below this are rounding errors.
            let threshold = {{ "1e-15" if T == "f64" else "1e-7" }} * sqrt(squares.x) * sqrt(squares.y);
            if live & (abs(product) > threshold) {
                any_rotated = true;
                // The smaller angle whose rotation makes the product zero.
                let z = (squares.y - squares.x) / (2.0 * product);
                let z_is_large = abs(z) > {{ "1e150" if T == "f64" else "1e18" }};
                let z_safe = select(z, {{ T }}(1.0), z_is_large);
                let root = sqrt(1.0 + z_safe * z_safe) + abs(z_safe);
                let t = select(select(-1.0 / root, 1.0 / root, z_safe >= 0.0), 0.5 / z, z_is_large);
                let c = 1.0 / sqrt(1.0 + t * t);
                let s = c * t;
                for (var k = row_thread; k < p.height; k += {{ threads_per_row }}u) {
                    let x = w[a + k];
                    let y = w[b + k];
                    w[a + k] = c * x - s * y;
                    w[b + k] = s * x + c * y;
                }
            }
        }
        storageBarrier();
        workgroupBarrier();
    }
    if any_rotated & (row_thread == 0u) { atomicStore(&rotated[batch], 1u); }
}
