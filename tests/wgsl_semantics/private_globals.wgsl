// Private variables start at their value in every invocation and are seen by all functions.
// expect: 123 162 203 244
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

var<private> seed: u32 = 3u;
var<private> table: array<u32, 4> = array(1u, 2u, 3u, 4u);

fn step() {
    seed = seed * 2u;
    touch(0u);
}

fn touch(i: u32) {
    table[i] += 1u;
}

@compute @workgroup_size(4)
fn main(@builtin(local_invocation_index) lane: u32) {
    seed += lane;
    step();
    step();
    out[lane] = seed * 10u + table[lane];
}
