// Subgroup operations where only some lanes take part, in a loop and in a function.
// expect: 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331 331
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

fn pairs(x: u32) -> u32 {
    return subgroupMax(x);
}

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) id: u32,
    @builtin(subgroup_size) size: u32) {
    var result = 0u;
    if id % 2u == 0u {
        result = u32(subgroupAdd(1u) == size / 2u);
    } else {
        result = u32(countOneBits(subgroupBallot().x) == min(size, 32u) / 2u);
    }
    for (var i = 0u; i < 3u; i++) {
        result += 10u * u32(subgroupAdd(1u) == size);
        if id < 2u {
            result += 100u * u32(pairs(id) == 1u);
        } else {
            result += 100u;
        }
    }
    out[lane] = result;
}
