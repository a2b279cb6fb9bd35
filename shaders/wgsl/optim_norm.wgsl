{#-
The norm of several gradients together. stage `parts`: the sum of squares of every 4096 elements; stage `total`: from
those sums the norm, and the factor that clips it.

stage · dtypes (parts): of the gradients
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{{ t.prelude() }}
var<workgroup> sums: array<f32, 256>;

// The sum over the workgroup, in lane 0.
fn total(lane: u32, mine: f32) -> f32 {
    sums[lane] = mine;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half >>= 1u) {
        if lane < half { sums[lane] += sums[lane + half]; }
        workgroupBarrier();
    }
    return sums[0];
}

{% if stage == "parts" %}
struct Item {
    n: u32,
    // The first workgroup of this gradient.
    group: u32,
    offset: u32,
    // Where its sums go.
    part: u32,
}
struct Params { items: array<Item, {{ dtypes | length }}> }
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
{% for dtype in dtypes %}
{{ t.input(loop.index, "g" ~ loop.index0, dtype) }}
fn squares{{ loop.index0 }}(item: Item, part: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var k = 0u; k < 16u; k++) {
        let i = part * 4096u + k * 256u + lane;
        if i < item.n {
            let g = g{{ loop.index0 }}_at(item.offset + i);
            sum += g * g;
        }
    }
    return sum;
}
{% endfor %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let group = group_index(id, groups);
    var mine = 0.0;
    var at = 0u;
    var inside = false;
    {% for dtype in dtypes | reverse %}
    {% set k = dtypes | length - loop.index %}
    {{ "else " if not loop.first }}if group >= p.items[{{ k }}].group {
        let part = group - p.items[{{ k }}].group;
        mine = squares{{ k }}(p.items[{{ k }}], part, lane);
        at = p.items[{{ k }}].part + part;
        // A folded grid has workgroups beyond the last.
        inside = part * 4096u < p.items[{{ k }}].n;
    }
    {% endfor %}
    let sum = total(lane, mine);
    if lane == 0u && inside { parts[at] = sum; }
}
{% else %}
struct Params {
    n: u32,
    max_norm: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> norm: array<f32>;
@group(0) @binding(2) var<storage, read_write> factor: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) lane: u32) {
    var mine = 0.0;
    for (var i = lane; i < p.n; i += 256u) { mine += parts[i]; }
    let sum = total(lane, mine);
    if lane == 0u {
        let length = sqrt(sum);
        norm[0] = length;
        factor[0] = m_min(p.max_norm / (length + 1e-6), 1.0);
    }
}
{% endif %}
