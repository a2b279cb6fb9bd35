{#-
The gradient of picking rows of a table: out[index[i]] += g[i], for all i in order. No atomics on floats, so that two runs
give the same bits, and no row of the table is touched that was not picked.

Each workgroup is of one i, and of 256 steps of a row. It looks through all indices for its own one, a tile at a time, all of which are on
their way at once; if an earlier i has the same one, that i's workgroup does the work. Otherwise it lists where the index occurs, and
adds those rows, eight on their way at a time: with more, registers are left for few workgroups.

index: dtype of the index · g: dtype · out: dtype, in which all is summed · width: elements of a step, 4 or 1
-#}
{%- import "types" as t -%}
{%- import "row_reduce" as rows -%}
{{ t.prelude() }}
struct Params {
    n: u32,
    entries: u32,
    extent: u32,
    // Of the indices: where they start, and how far they are apart.
    offset: u32,
    stride: u32,
    // A row that gets nothing.
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
// Which of a tile have the index, a bit for each, and which words of bits are not empty.
var<workgroup> same: array<atomic<u32>, {{ tile // 32 }}>;
var<workgroup> some: array<atomic<u32>, {{ tile // 1024 }}>;
var<workgroup> list: array<u32, {{ most }}>;
// How many are listed; all bits where an earlier one was found.
var<workgroup> listed: u32;

fn place_of(i: u32) -> u32 { return place(index_words(p.offset + i * p.stride), p.entries); }

// Takes the first of a tile's bits off, up to the list's length, and lists what they stand for.
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

// The sum of the listed rows, in order.
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
    // Nothing is left to look through for a row that gets nothing.
    let n = select(0u, p.n, own < p.entries && own != p.skip);
    var total = Step(0.0);
    // On its way while indices are looked through.
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
