// Scans, broadcasts, shuffles and ballots.
// expect: 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767 32767
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_invocation_id) id: u32,
    @builtin(subgroup_size) size: u32) {
    let first = lane - id;
    let up = subgroupShuffleUp(lane, 1u);
    let down = subgroupShuffleDown(lane, 1u);
    let ballot = subgroupBallot(id % 2u == 0u);
    let everyone = subgroupBallot();
    out[lane] = u32(subgroupInclusiveAdd(1u) == id + 1u)
        + 2u * u32(subgroupExclusiveAdd(2u) == 2u * id)
        + 4u * u32(subgroupInclusiveMul(select(1.0, 3.0, id == 0u)) == 3.0)
        + 8u * u32(subgroupExclusiveMul(select(1.0, 3.0, id == 0u)) == select(3.0, 1.0, id == 0u))
        + 16u * u32(subgroupBroadcastFirst(lane) == first)
        + 32u * u32(subgroupBroadcast(lane, 1u) == first + 1u)
        + 64u * u32(id == 0u || up == lane - 1u)
        + 128u * u32(id == size - 1u || down == lane + 1u)
        + 256u * u32(subgroupShuffleXor(lane, 1u) == (lane ^ 1u))
        + 512u * u32(subgroupShuffle(lane, size - 1u - id) == first + size - 1u - id)
        + 1024u * u32((ballot.x & 3u) == 1u && countOneBits(ballot.x) == min(size, 32u) / 2u)
        + 2048u * u32(countOneBits(everyone.x) == min(size, 32u))
        + 4096u * u32(quadBroadcast(lane, 2u) == (lane & ~3u) + 2u)
        + 8192u * u32(quadSwapX(lane) == (lane ^ 1u) && quadSwapY(lane) == (lane ^ 2u))
        + 16384u * u32(quadSwapDiagonal(vec2(lane, 1u)).x == (lane ^ 3u));
}
