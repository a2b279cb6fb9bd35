// Floats saturate to the range of both types, and are truncated towards zero.
// expect: 3 -3 0x7fffff80 0x80000000 3 0 0xffffff00 0xffffff00 1 -2 0x80000000 1 0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    out[0] = u32(i32(z + 3.9));
    out[1] = u32(i32(z - 3.9));
    out[2] = u32(i32(z + 1e20));
    out[3] = u32(i32(z - 1e20));
    out[4] = u32(z + 3.9);
    out[5] = u32(z - 3.9);
    out[6] = u32(z + 1e20);
    out[7] = u32(z + 4294967040.0);
    let v = vec3<i32>(vec3(z + 1.5, z - 2.5, z - 3e9));
    out[8] = u32(v.x);
    out[9] = u32(v.y);
    out[10] = u32(v.z);
    out[11] = u32(bool(z + 0.5));
    out[12] = u32(bool(z));
}
