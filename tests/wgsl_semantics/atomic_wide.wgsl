// 64-bit atomics.
// expect: 0 7 0 -7 0 4 5 0 5 0

struct State {
    largest: atomic<u64>,
    smallest: atomic<i64>,
    sum: atomic<u64>,
    other: atomic<u64>,
    result: u64,
}
@group(0) @binding(0) var<storage, read_write> state: State;

@compute @workgroup_size(8)
fn main(@builtin(local_invocation_index) lane: u32) {
    atomicMax(&state.largest, u64(lane) * 0x100000000lu);
    atomicMin(&state.smallest, -i64(lane) * 0x100000000li);
    atomicAdd(&state.sum, 0x80000000lu);
    workgroupBarrier();
    if lane == 0u {
        state.result = atomicExchange(&state.other, 5lu) + atomicLoad(&state.other);
    }
}
