// Atomics on storage and on workgroup memory.
// expect: 1952 23 -58 0xffffffff 0 0 9 6 700 16 2016

struct State {
    sum: atomic<u32>,
    largest: atomic<i32>,
    smallest: atomic<i32>,
    bits: atomic<u32>,
    mask: atomic<u32>,
    parity: atomic<u32>,
    stored: atomic<u32>,
    compared: atomic<u32>,
    results: array<u32, 3>,
}
@group(0) @binding(0) var<storage, read_write> state: State;
var<workgroup> shared_sum: atomic<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    atomicAdd(&shared_sum, lane);
    atomicAdd(&state.sum, lane);
    atomicSub(&state.sum, 1u);
    atomicMax(&state.largest, i32(lane) - 40);
    atomicMin(&state.smallest, 5 - i32(lane));
    atomicOr(&state.bits, 1u << (lane % 32u));
    atomicAnd(&state.mask, ~(1u << (lane % 16u)));
    atomicXor(&state.parity, lane);
    if lane == 0u {
        atomicStore(&state.stored, 7u);
        let old = atomicExchange(&state.stored, 9u);
        let a = atomicCompareExchangeWeak(&state.compared, 1u, 5u);
        state.results[0] = old * 100u + a.old_value * 10u + u32(a.exchanged);
        // A weak exchange may fail although the values are equal.
        var done = false;
        for (var tries = 0; tries < 1000 && !done; tries++) {
            done = atomicCompareExchangeWeak(&state.compared, 0u, 6u).exchanged;
        }
        state.results[1] = u32(done) * 10u + atomicLoad(&state.compared);
    }
    workgroupBarrier();
    if lane == 63u {
        state.results[2] = atomicLoad(&shared_sum);
    }
}
