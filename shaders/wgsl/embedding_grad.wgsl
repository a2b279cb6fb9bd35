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
{{ t.resolve_index() }}
{% set tile = 4096 %}
{% set capacity = 2048 %}
// Bits of the tile's elements with the same index, and bits of the nonzero words.
var<workgroup> match_bits: array<atomic<u32>, {{ tile // 32 }}>;
var<workgroup> match_words: array<atomic<u32>, {{ tile // 1024 }}>;
var<workgroup> matches: array<u32, {{ capacity }}>;
// Number of listed elements; all bits set if an earlier one was found.
var<workgroup> match_count: u32;
// Row of the table, equal in all threads, for the barriers in the loops.
var<workgroup> shared_row: u32;

fn row_of(i: u32) -> u32 { return resolve_index(index_words(p.offset + i * p.stride), p.entries); }

// Moves the first bits of a tile to the list, up to its length.
fn list_matches(start: u32) -> u32 {
    var count = 0u;
    for (var part = 0u; part < {{ tile // 1024 }}u; part++) {
        var words = atomicLoad(&match_words[part]);
        while words != 0u && count < {{ capacity }}u {
            let word = part * 32u + firstTrailingBit(words);
            var bits = atomicLoad(&match_bits[word]);
            while bits != 0u && count < {{ capacity }}u {
                matches[count] = start + word * 32u + firstTrailingBit(bits);
                bits &= bits - 1u;
                count += 1u;
            }
            atomicStore(&match_bits[word], bits);
            if bits == 0u { words &= words - 1u; }
        }
        atomicStore(&match_words[part], words);
    }
    return count;
}

// Returns the sum of the listed rows, in order.
fn sum_rows(count: u32, column: u32) -> Step {
    var total = Step(0.0);
    for (var k = 0u; k < count; k += 8u) {
        {% for u in range(8) %}
        let v{{ u }} = g_step(matches[min(k + {{ u }}u, count - 1u)] * p.extent + column);
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
    let linear_group = group_index(group, groups);
    let i = linear_group % p.n;
    let column = ((linear_group / p.n) * 256u + thread) * {{ width }}u;
    if thread == 0u { shared_row = row_of(i); }
    let row = workgroupUniformLoad(&shared_row);
    let live = column < p.extent && row < p.entries && row != p.skip;
    let load_column = select(0u, column, column < p.extent);
    // A row without a gradient has no indices to search.
    let n = select(0u, p.n, row < p.entries && row != p.skip);
    var total = Step(0.0);
    // In flight while indices are searched.
    let to = select(0u, row, n > 0u) * p.extent + load_column;
    let before = out_step(to);
    var owns_row = n > 0u;
    var first_tile = true;
    for (var start = 0u; start < n; start += {{ tile }}u) {
        if thread < {{ tile // 32 }}u { atomicStore(&match_bits[thread], 0u); }
        if thread < {{ tile // 1024 }}u { atomicStore(&match_words[thread], 0u); }
        {% for u in range(tile // 256) %}
        let j{{ u }} = start + {{ 256 * u }}u + thread;
        let row{{ u }} = row_of(min(j{{ u }}, n - 1u));
        {% endfor %}
        workgroupBarrier();
        {% for u in range(tile // 256) %}
        if row{{ u }} == row && j{{ u }} < n {
            let k = {{ 256 * u }}u + thread;
            atomicOr(&match_bits[k >> 5u], 1u << (k & 31u));
            atomicOr(&match_words[k >> 10u], 1u << ((k >> 5u) & 31u));
        }
        {% endfor %}
        workgroupBarrier();
        loop {
            if thread == 0u {
                let count = list_matches(start);
                match_count = select(count, 0xffffffffu, first_tile && count > 0u && matches[0] < i);
            }
            let count = workgroupUniformLoad(&match_count);
            if count == 0u || count == 0xffffffffu { break; }
            first_tile = false;
            total += sum_rows(count, load_column);
            workgroupBarrier();
        }
        if workgroupUniformLoad(&match_count) != 0u {
            owns_row = false;
            break;
        }
    }
    if owns_row && live { out_put_step(to, before + total); }
}
