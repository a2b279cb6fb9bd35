// 64-bit integers: wrapping, division, shifts, conversions. WGSL has no 64-bit integers, so the result of a
// shift by 64 or more is undefined: naga passes the shift to the driver, and no kernel may rely on it.
// expect: 1 0x80000000 7 -3 2 0x0fffffff -3.0 2 4 6 9 -2
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = i64(zeros[0]);
    let u = u64(zeros[0]);
    let a = (u + 0xfffffffffffffffflu) + 2lu;
    out[0] = u32(a);
    let b = (z - 9223372036854775807li - 1li) / (z - 1li);
    out[1] = u32(u64(b) >> (zeros[0] + 32u));
    out[2] = u32((z + 7li) / z);
    out[3] = u32((z - 7li) % (z + 4li));
    let c = (u + 1lu) << (zeros[0] + 33u);
    out[4] = u32(c >> 32u);
    out[5] = u32(u64(z - 1li) >> (zeros[0] + 36u));
    out[6] = bitcast<u32>(f32(z - 3li));
    out[7] = u32(u64(f32(zeros[0]) + 1e10) >> (zeros[0] + 32u));
    out[8] = u32(min(z - 5li, 3li)) + u32(max(u + 1lu, 9lu));
    out[9] = u32(abs(z - 6li));
    let v = vec2<i64>(z + 1li, z + 2li) * 3li;
    out[10] = u32(v.x + v.y);
    out[11] = u32(i32(z - 2li));
}
