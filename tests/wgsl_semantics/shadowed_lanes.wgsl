// Values that differ by invocation survive barriers and calls.
// expect: 90401 120602 150803 181004 211205 241406 271607 301808 332009 362210 392411 422612 452813 3014 30015 60200
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

var<workgroup> board: array<u32, 16>;

@compute @workgroup_size(16)
fn main(@builtin(local_invocation_index) lane: u32) {
    var mine = array(lane, lane * 2u, lane * 3u);
    for (var round = 0u; round < 3u; round++) {
        board[lane] = mine[round];
        workgroupBarrier();
        mine[round] = board[(lane + round + 1u) % 16u];
        workgroupBarrier();
    }
    out[lane] = mine[0] + mine[1] * 100u + mine[2] * 10000u;
}
