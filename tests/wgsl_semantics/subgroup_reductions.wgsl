// Reductions within a subgroup, checked without knowing its size.
// expect: 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047 2047
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

fn mask(n: u32) -> u32 {
    return select((1u << n) - 1u, 0xffffffffu, n >= 32u);
}

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) id: u32,
    @builtin(subgroup_size) size: u32) {
    let first = lane - id;
    let n = size;
    out[lane] = u32(subgroupAdd(1u) == n)
        + 2u * u32(subgroupAdd(lane) == n * first + n * (n - 1u) / 2u)
        + 4u * u32(subgroupMin(lane + 3u) == first + 3u)
        + 8u * u32(subgroupMax(i32(lane)) == i32(first + n - 1u))
        + 16u * u32(subgroupOr(1u << (id % 32u)) == mask(n))
        + 32u * u32(subgroupAnd(0xf0u | id) == 0xf0u)
        + 64u * u32(subgroupXor(1u) == n % 2u)
        + 128u * u32(subgroupMul(select(1u, 2u, id < 3u)) == 8u)
        + 256u * u32(subgroupAll(lane < 64u) && !subgroupAll(id == 0u))
        + 512u * u32(subgroupAny(id == 1u) && !subgroupAny(lane > 63u))
        + 1024u * u32(subgroupAdd(vec2(1.0, f32(id))).y == f32(n * (n - 1u) / 2u));
}
