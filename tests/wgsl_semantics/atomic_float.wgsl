// Adding floats atomically.
// expect: 992.0 1024.0 32.0 7.0

@group(0) @binding(0) var<storage, read_write> sums: array<atomic<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    atomicAdd(&sums[lane % 2u], f32(lane));
    atomicAdd(&sums[2], 0.5);
    workgroupBarrier();
    if lane == 0u {
            let old = atomicExchange(&sums[3], 8.0);
        atomicAdd(&sums[3], old - 1.0);
    }
}
