// Every subgroup function on every type, where all lanes take part and where only some do; workgroups that are no
// multiple of a warp.
enable f16;

@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read_write> halves: array<vec2<f16>>;

fn integers(x: u32) -> u32 {
    var r = subgroupAdd(x) + subgroupMul(x) + subgroupMin(x) + subgroupMax(x);
    r += subgroupAnd(x) + subgroupOr(x) + subgroupXor(x);
    r += subgroupInclusiveAdd(x) + subgroupExclusiveAdd(x) + subgroupInclusiveMul(x) + subgroupExclusiveMul(x);
    r += subgroupBroadcast(x, 3u) + subgroupBroadcastFirst(x) + subgroupShuffle(x, r) + subgroupShuffleXor(x, 2u);
    r += subgroupShuffleUp(x, 1u) + subgroupShuffleDown(x, 1u);
    r += quadBroadcast(x, 1u) + quadSwapX(x) + quadSwapY(x) + quadSwapDiagonal(x);
    r += u32(subgroupAll(x > 1u)) + u32(subgroupAny(x > 1u)) + subgroupBallot(x > 1u).x + subgroupBallot().y;
    return r;
}

fn floats(x: vec3<f32>) -> vec3<f32> {
    var r = subgroupAdd(x) + subgroupMul(x) + subgroupMin(x) + subgroupMax(x);
    r += subgroupInclusiveAdd(x) + subgroupExclusiveAdd(x) + subgroupInclusiveMul(x) + subgroupExclusiveMul(x);
    r += subgroupBroadcast(x, 3u) + subgroupBroadcastFirst(x) + subgroupShuffle(x, 5u) + quadSwapX(x);
    return r;
}

fn signed(x: vec2<i32>) -> vec2<i32> {
    return subgroupAdd(x) + subgroupMin(x) + subgroupMax(x) + subgroupAnd(x) + subgroupInclusiveAdd(x);
}

fn half(x: vec2<f16>) -> vec2<f16> {
    return subgroupAdd(x) + subgroupMax(x) + subgroupExclusiveAdd(x) + subgroupShuffleXor(x, 1u);
}

fn kernel(i: u32, size: u32) {
    var r = integers(i);
    subgroupBarrier();
    if i % 3u == 0u {
        r += integers(r);
        subgroupBarrier();
        r += u32(floats(vec3(f32(i))).y);
    }
    r += u32(floats(vec3(f32(i))).z) + u32(signed(vec2(i32(i))).x) + size;
    halves[i] = half(halves[i]);
    out[i] = r;
}

@compute @workgroup_size(64)
fn whole(@builtin(local_invocation_index) i: u32, @builtin(subgroup_size) size: u32) {
    kernel(i, size);
}

@compute @workgroup_size(45)
fn uneven(@builtin(local_invocation_index) i: u32, @builtin(subgroup_invocation_id) id: u32) {
    kernel(i, id);
}

@compute @workgroup_size(12)
fn small(@builtin(local_invocation_index) i: u32, @builtin(subgroup_id) id: u32, @builtin(num_subgroups) n: u32) {
    kernel(i, id + n);
}
