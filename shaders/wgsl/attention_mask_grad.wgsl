{#-
Gradient of a float mask of attention, summed over the batch entries and heads that share an element of the mask. The
  weights are computed again from q, k and the queries' statistics, so they are never in memory.

A workgroup has a tile of 32 queries and 32 keys of one mask, for a part of the repeats of the mask. A thread has two
  queries and two keys, 16 apart.

dtype: of q, k, v and the result's gradient · mask: of the mask · head, value: elements of a row
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
{% include "math/base" %}
{% include "math/exp" %}
struct Params {
    // Masks, heads of a mask, queries, keys.
    extents: vec4<u32>,
    // Heads among a mask's repeats, repeats of a mask, repeats of a part, parts.
    repeats: vec4<u32>,
    // Heads of q, heads of k and v, tiles of queries, tiles of keys.
    heads: vec4<u32>,
    // Offsets of q, k, v and the result's gradient.
    offsets: vec4<u32>,
    // Strides of the batch, the head, the row, the element.
    q: vec4<u32>,
    k: vec4<u32>,
    v: vec4<u32>,
    g: vec4<u32>,
    mask: vec4<u32>,
    mask_offset: u32,
    lines: u32,
    scale: f32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.input(0, "q", dtype) }}
{{ t.input(1, "k", dtype) }}
{{ t.input(2, "v", dtype) }}
{{ t.input(3, "g", dtype) }}
{{ t.input(4, "mask", mask) }}
// The log-sum-exps, then each query's sum of g · out.
{{ t.input(5, "stats", "f32") }}
{{ t.output(6, "grad", "f32") }}

const LOWEST_SCORE = -3.3e38;

// Rows of 33 elements, so that threads of one column are in different banks.
var<workgroup> left_tile: array<f32, 1056>;
var<workgroup> right_tile: array<f32, 1056>;

{%- macro multiply(sum, left, right, depth) %}
    for (var d0 = 0u; d0 < {{ depth }}u; d0 += 32u) {
        for (var i = thread; i < 1024u; i += 256u) {
            let row = i >> 5u;
            let d = d0 + (i & 31u);
            var a = 0.0;
            var b = 0.0;
            if d < {{ depth }}u {
                if query0 + row < p.extents.z {
                    a = {{ left }}_at({{ left }}_base + (query0 + row) * p.{{ left }}.z + d * p.{{ left }}.w);
                }
                if key0 + row < p.extents.w {
                    b = {{ right }}_at({{ right }}_base + (key0 + row) * p.{{ right }}.z + d * p.{{ right }}.w);
                }
            }
            left_tile[row * 33u + (i & 31u)] = a;
            right_tile[row * 33u + (i & 31u)] = b;
        }
        workgroupBarrier();
        for (var d = 0u; d < min({{ depth }}u - d0, 32u); d++) {
            let rows = vec2<f32>(left_tile[y * 33u + d], left_tile[(y + 16u) * 33u + d]);
            let columns = vec2<f32>(right_tile[x * 33u + d], right_tile[(x + 16u) * 33u + d]);
            {{ sum }} += vec4<f32>(rows.x * columns, rows.y * columns);
        }
        workgroupBarrier();
    }
{% endmacro %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    var rest = group_index(group, groups);
    let key0 = rest % p.heads.w * 32u;
    rest = rest / p.heads.w;
    let query0 = rest % p.heads.z * 32u;
    rest = rest / p.heads.z;
    let mask_head = rest % p.extents.y;
    rest = rest / p.extents.y;
    let mask_index = rest % p.extents.x;
    let part = rest / p.extents.x;
    if part >= p.repeats.w { return; }
    let x = thread & 15u;
    let y = thread >> 4u;
    var acc = vec4<f32>();
    let end = min((part + 1u) * p.repeats.z, p.repeats.y);
    for (var repeat = part * p.repeats.z; repeat < end; repeat++) {
        // A mask has all heads, or one that all heads share.
        let head = mask_head + repeat % p.repeats.x;
        let batch = repeat / p.repeats.x * p.extents.x + mask_index;
        let kv_head = head / (p.heads.x / p.heads.y);
        let q_base = p.offsets.x + batch * p.q.x + head * p.q.y;
        let k_base = p.offsets.y + batch * p.k.x + kv_head * p.k.y;
        let v_base = p.offsets.z + batch * p.v.x + kv_head * p.v.y;
        let g_base = p.offsets.w + batch * p.g.x + head * p.g.y;
        let mask_base = p.mask_offset + batch * p.mask.x + head * p.mask.y;
        var product = vec4<f32>();
        var weight_grad = vec4<f32>();
        {{ multiply("product", "q", "k", head) }}
        {{ multiply("weight_grad", "g", "v", value) }}
        for (var i = 0u; i < 4u; i++) {
            let query = query0 + y + (i >> 1u) * 16u;
            let key = key0 + x + (i & 1u) * 16u;
            if query < p.extents.z && key < p.extents.w {
                let bias = mask_at(mask_base + query * p.mask.z + key * p.mask.w);
                if !(m_isinf(bias) & m_signbit(bias)) {
                    let line = (batch * p.heads.x + head) * p.extents.z + query;
                    let s = max(product[i] * p.scale + bias, LOWEST_SCORE);
                    acc[i] += m_exp(s - stats_at(line)) * (weight_grad[i] - stats_at(p.lines + line));
                }
            }
        }
    }
    let base = ((part * p.extents.x + mask_index) * p.extents.y + mask_head) * p.extents.z;
    for (var i = 0u; i < 4u; i++) {
        let query = query0 + y + (i >> 1u) * 16u;
        let key = key0 + x + (i & 1u) * 16u;
        if query < p.extents.z && key < p.extents.w { grad_put((base + query) * p.extents.w + key, acc[i]); }
    }
}
