// 16-bit integers wrap at 16 bits.
// expect: 2 -32768 -3 24464 4464 -25536 8 65535 10
enable wgpu_int16;

@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = u16(zeros[0]);
    let i = i16(zeros[0]);
    out[0] = u32((z + u16(65535u)) + u16(3u));
    out[1] = u32(i32((i + i16(32767)) + i16(1)));
    out[2] = u32(i32((i - i16(7)) / i16(2)));
    out[3] = u32((z + u16(300u)) * u16(300u));
    out[4] = u32(u16(zeros[0] + 70000u));
    out[5] = u32(i32(i16(i32(zeros[0]) + 40000)));
    out[6] = u32(u32(z + u16(9u)) & 12u);
    var v = vec2<u16>(z + u16(1u), z + u16(2u));
    v = v - vec2<u16>(u16(2u));
    out[7] = u32(v.x);
    out[8] = u32(f32(z + u16(5u)) * 2.0);
}
