{#-
Norm of several gradients together. Stage `parts`: sums of powers of every 4096 elements. Stage `total`: the
norm from those sums, and the clipping factor.

stage · norm: `one`, `two`, `power` (any other order) or `largest`, whose sums are maxima
dtypes (parts): of the gradients
-#}
{%- import "types" as t -%}
{% include "math/base" %}
{% if norm == "power" %}
{% for file in ["exp", "log", "pow"] %}{% include "math/" ~ file %}{% endfor %}
{% endif %}
{{ t.prelude() }}
fn join(a: f32, b: f32) -> f32 { return {{ "m_max(a, b)" if norm == "largest" else "a + b" }}; }
var<workgroup> sums: array<f32, 256>;

// Returns the sum over the workgroup, in lane 0.
fn total(lane: u32, mine: f32) -> f32 {
    sums[lane] = mine;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half >>= 1u) {
        if lane < half { sums[lane] = join(sums[lane], sums[lane + half]); }
        workgroupBarrier();
    }
    return sums[0];
}

{% if stage == "parts" %}
struct Item {
    n: u32,
    // First workgroup of this gradient.
    group: u32,
    offset: u32,
    // Offset of its sums.
    part: u32,
}
struct Params {
    {{ "power: vec4<f32>," if norm == "power" }}
    items: array<Item, {{ dtypes | length }}>,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
{% for dtype in dtypes %}
{{ t.input(loop.index, "g" ~ loop.index0, dtype) }}
fn powers{{ loop.index0 }}(item: Item, part: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var k = 0u; k < 16u; k++) {
        let i = part * 4096u + k * 256u + lane;
        if i < item.n {
            let g = g{{ loop.index0 }}_at(item.offset + i);
            sum = join(sum, {{ {
                "one": "abs(g)", "two": "g * g", "power": "m_pow(abs(g), p.power.x)", "largest": "abs(g)"
            }[norm] }});
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
        mine = powers{{ k }}(p.items[{{ k }}], part, lane);
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
    // 1 / order of the norm.
    root: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
@group(0) @binding(0) var<storage, read> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> norm: array<f32>;
@group(0) @binding(2) var<storage, read_write> factor: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) lane: u32) {
    var mine = 0.0;
    for (var i = lane; i < p.n; i += 256u) { mine = join(mine, parts[i]); }
    let sum = total(lane, mine);
    if lane == 0u {
        let length = {{ {"one": "sum", "two": "sqrt(sum)", "power": "m_pow(sum, p.root)", "largest": "sum"}[norm] }};
        norm[0] = length;
        factor[0] = m_min(p.max_norm / (length + 1e-6), 1.0);
    }
}
{% endif %}
