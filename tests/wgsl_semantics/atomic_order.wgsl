// Every invocation gets a distinct value from one counter.
// expect: 32 -32 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

var<workgroup> counter: atomic<u32>;
var<workgroup> other: atomic<i32>;
var<workgroup> taken: array<u32, 32>;

@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) lane: u32) {
    let ticket = atomicAdd(&counter, 1u);
    taken[ticket] = 1u;
    let back = atomicSub(&other, 1);
    workgroupBarrier();
    if lane == 0u {
        var all = 0u;
        for (var i = 0; i < 32; i++) {
            all += taken[i];
        }
        out[0] = all;
        out[1] = u32(atomicLoad(&other));
    }
    out[2u + lane] = u32(back <= 0 && back > -32);
}
