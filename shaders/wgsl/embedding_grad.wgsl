{#-
Gradient of an embedding lookup: out[index[i]] += g[i], for all i in order. There are no float atomics, so two
  runs give the same bits. Rows of the table that were not looked up are not touched.

A workgroup is responsible for one i and 256 steps of a row. It searches all indices for its own, a tile at a
time, with all loads of a tile in flight. If an earlier i has the same index, that i's workgroup does the
work. Otherwise the workgroup lists the occurrences and adds those rows, eight loads in flight: more would
leave registers for few workgroups.

index: dtype of the index · g: dtype · out: dtype, also of the sums · width: elements of a step, 4 or 1
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    entries: u32,
    extent: u32,
    // Offset and stride of the indices.
    offset: u32,
    stride: u32,
    // A row without a gradient (padding index).
    skip: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.index(0, "index", index) }}
{{ rows.input(1, "g", g, width) }}
{{ rows.output(2, "out", out, width) }}
alias Step = {{ rows.step_type(width) }};
{{ t.place() }}
{% set tile = 4096 %}
{% set most = 2048 %}
// Bits of the tile's elements with the same index, and bits of the nonzero words.
var<workgroup> same: array<atomic<u32>, {{ tile // 32 }}>;
var<workgroup> some: array<atomic<u32>, {{ tile // 1024 }}>;
var<workgroup> list: array<u32, {{ most }}>;
// Number of listed elements; all bits set if an earlier one was found.
var<workgroup> listed: u32;

fn place_of(i: u32) -> u32 { return place(index_words(p.offset + i * p.stride), p.entries); }

// Moves the first bits of a tile to the list, up to its length.
fn list_some(start: u32) -> u32 {
    var count = 0u;
    for (var part = 0u; part < {{ tile // 1024 }}u; part++) {
        var words = atomicLoad(&some[part]);
        while words != 0u && count < {{ most }}u {
            let word = part * 32u + firstTrailingBit(words);
            var bits = atomicLoad(&same[word]);
            while bits != 0u && count < {{ most }}u {
                list[count] = start + word * 32u + firstTrailingBit(bits);
                bits &= bits - 1u;
                count += 1u;
            }
            atomicStore(&same[word], bits);
            if bits == 0u { words &= words - 1u; }
        }
        atomicStore(&some[part], words);
    }
    return count;
}

// Returns the sum of the listed rows, in order.
fn sum_of(count: u32, column: u32) -> Step {
    var total = Step(0.0);
    for (var k = 0u; k < count; k += 8u) {
        {% for u in range(8) %}
        let v{{ u }} = g_step(list[min(k + {{ u }}u, count - 1u)] * p.extent + column);
        {% endfor %}
        {% for u in range(1, 8) %}
        let w{{ u }} = select(Step(0.0), v{{ u }}, k + {{ u }}u < count);
        {% endfor %}
        total += ((v0 + w1) + (w2 + w3)) + ((w4 + w5) + (w6 + w7));
    }
    return total;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let number = group_index(group, groups);
    let i = number % p.n;
    let column = ((number / p.n) * 256u + thread) * {{ width }}u;
    let own = place_of(i);
    let live = column < p.extent && own < p.entries && own != p.skip;
    let near = select(0u, column, column < p.extent);
    // A row without a gradient has no indices to search.
    let n = select(0u, p.n, own < p.entries && own != p.skip);
    var total = Step(0.0);
    // In flight while indices are searched.
    let to = select(0u, own, n > 0u) * p.extent + near;
    let before = out_step(to);
    var mine = n > 0u;
    var first = true;
    for (var start = 0u; start < n; start += {{ tile }}u) {
        if thread < {{ tile // 32 }}u { atomicStore(&same[thread], 0u); }
        if thread < {{ tile // 1024 }}u { atomicStore(&some[thread], 0u); }
        {% for u in range(tile // 256) %}
        let j{{ u }} = start + {{ 256 * u }}u + thread;
        let place{{ u }} = place_of(min(j{{ u }}, n - 1u));
        {% endfor %}
        workgroupBarrier();
        {% for u in range(tile // 256) %}
        if place{{ u }} == own && j{{ u }} < n {
            let k = {{ 256 * u }}u + thread;
            atomicOr(&same[k >> 5u], 1u << (k & 31u));
            atomicOr(&some[k >> 10u], 1u << ((k >> 5u) & 31u));
        }
        {% endfor %}
        workgroupBarrier();
        loop {
            if thread == 0u {
                let count = list_some(start);
                listed = select(count, 0xffffffffu, first && count > 0u && list[0] < i);
            }
            let count = workgroupUniformLoad(&listed);
            if count == 0u || count == 0xffffffffu { break; }
            first = false;
            total += sum_of(count, near);
            workgroupBarrier();
        }
        if workgroupUniformLoad(&listed) != 0u {
            mine = false;
            break;
        }
    }
    if mine && live { out_put_step(to, before + total); }
}
