// Shift counts are taken modulo the width; right shifts of signed integers keep the sign.
// expect: 2 0x10000000 -4 -128 -1 16 3 -4 4
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = zeros[0];
    out[0] = (z + 1u) << (z + 33u);
    out[1] = (z + 0x80000000u) >> (z + 35u);
    out[2] = u32((i32(z) - 8) >> (z + 1u));
    out[3] = u32((i32(z) - 8) << (z + 36u));
    out[4] = u32((i32(z) - 1) >> (z + 63u));
    let v = vec2(z + 1u, z + 3u) << vec2(z + 4u, z + 32u);
    out[5] = v.x;
    out[6] = v.y;
    let s = vec2(i32(z) - 16, i32(z) + 16) >> vec2(z + 2u, z + 34u);
    out[7] = u32(s.x);
    out[8] = u32(s.y);
}
