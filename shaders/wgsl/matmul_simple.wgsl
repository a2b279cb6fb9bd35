{#-
Matrix products element by element: c[z] = a[z] · b[z], any strides. For vectors, small matrices, and types without a
tiled kernel.

dtype: the elements · lanes: invocations that share the sum of one element of c (a power of two, at most 256)
order: `k` if neighbouring invocations read neighbours along the sum, else neighbouring elements of c (`line`)
split: c is [splits][batch][m][n] in the type of the sums, summed up by `matmul_sum`
-#}
{%- import "types" as t -%}
{%- set T = t.value(dtype) -%}
{%- set outputs = 256 // lanes -%}
{{ t.prelude() }}
struct Params {
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    // The second of two batch dimensions.
    inner: u32,
    // How much of the sum a workgroup makes, and how many share it.
    chunk: u32,
    splits: u32,
    unused: u32,
    // Offset, strides of rows, columns.
    a: vec4<u32>,
    b: vec4<u32>,
    // Strides of the batch dimensions: a's two, b's two.
    steps: vec4<u32>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "a", dtype) }}
{{ t.input(1, "b", dtype) }}
{{ t.output(2, "c", T if split else dtype, "scattered") }}
{% if lanes > 1 %}
var<workgroup> partial: array<{{ T }}, 256>;
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    {% if order == "k" %}
    let part = lane % {{ lanes }}u;
    let element = lane / {{ lanes }}u;
    {% else %}
    let part = lane / {{ outputs }}u;
    let element = lane % {{ outputs }}u;
    {% endif %}
    let total = p.batch * p.m * p.n;
    let pieces = (total + {{ outputs - 1 }}u) / {{ outputs }}u;
    let index = group_index(group, groups);
    let piece = index / pieces;
    let i = (index % pieces) * {{ outputs }}u + element;
    let live = i < total && piece < p.splits;
    var sum = {{ T }}(0);
    if live {
        let col = i % p.n;
        let row = (i / p.n) % p.m;
        let z = i / (p.n * p.m);
        let a0 = p.a.x + (z / p.inner) * p.steps.x + (z % p.inner) * p.steps.y + row * p.a.y;
        let b0 = p.b.x + (z / p.inner) * p.steps.z + (z % p.inner) * p.steps.w + col * p.b.z;
        let end = min((piece + 1u) * p.chunk, p.k);
        for (var k = piece * p.chunk + part; k < end; k += {{ lanes }}u) {
            {% if T in ["f32", "f64"] %}
            sum = fma(a_at(a0 + k * p.a.z), b_at(b0 + k * p.b.y), sum);
            {% else %}
            sum += a_at(a0 + k * p.a.z) * b_at(b0 + k * p.b.y);
            {% endif %}
        }
    }
    {% if lanes > 1 %}
    partial[lane] = sum;
    workgroupBarrier();
    for (var reach = {{ lanes // 2 }}u; reach > 0u; reach = reach / 2u) {
        if part < reach { partial[lane] += partial[lane + reach * {{ 1 if order == "k" else outputs }}u]; }
        workgroupBarrier();
    }
    if live && part == 0u { c_put(piece * total + i, partial[lane]); }
    {% else %}
    if live { c_put(piece * total + i, sum); }
    {% endif %}
}
