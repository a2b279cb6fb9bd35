// Every atomic function on every type, in storage and in workgroup memory.
struct Counters {
    u: array<atomic<u32>, 4>,
    i: atomic<i32>,
    f: atomic<f32>,
    wide: atomic<u64>,
    signed_wide: atomic<i64>,
}

@group(0) @binding(0) var<storage, read_write> counters: array<Counters>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
var<workgroup> local_u: atomic<u32>;
var<workgroup> local_i: array<atomic<i32>, 8>;
var<workgroup> local_wide: atomic<u64>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) i: u32) {
    var r = atomicAdd(&counters[i].u[1], 1u) + atomicSub(&counters[i].u[i % 4u], 2u);
    r += atomicMin(&local_u, i) + atomicMax(&local_u, i) + atomicAnd(&local_u, i);
    r += atomicOr(&local_u, i) + atomicXor(&local_u, i) + atomicExchange(&local_u, i);
    let c = atomicCompareExchangeWeak(&counters[0].u[0], r, i);
    r += select(c.old_value, 1u, c.exchanged);
    let d = atomicCompareExchangeWeak(&local_i[i % 8u], i32(r), i32(i));
    r += u32(d.old_value);
    atomicAdd(&counters[0].i, -1);
    atomicMin(&counters[0].i, i32(i));
    atomicMax(&local_i[0], i32(i));
    atomicSub(&local_i[1], 3);
    r += u32(atomicLoad(&counters[0].i) + atomicLoad(&local_i[2]));
    atomicStore(&local_i[3], 5);
    atomicAdd(&counters[0].f, 1.5);
    r += u32(atomicExchange(&counters[0].f, 2.0) + atomicLoad(&counters[1].f));
    atomicMin(&counters[0].wide, u64(i));
    atomicMax(&local_wide, u64(i));
    r += u32(atomicAdd(&counters[0].wide, 3lu) + atomicSub(&local_wide, 1lu));
    r += u32(atomicAnd(&counters[0].wide, 3lu) | atomicOr(&local_wide, 1lu) | atomicXor(&local_wide, 9lu));
    r += u32(atomicMin(&counters[0].signed_wide, -3li) + atomicAdd(&counters[0].signed_wide, 4li));
    let e = atomicCompareExchangeWeak(&local_wide, 1lu, 2lu);
    r += u32(e.old_value);
    workgroupBarrier();
    let u = workgroupUniformLoad(&local_u);
    out[i] = r + u;
}
