// Four bytes or two halves in a word.
// expect: 0x7f007f81 0xff0000ff 0x7fff8001 0xffff 0xc0003e00 0x808202ff 0xff2c0201 0xfb057f80 0x00ff05ff 1.0 -1.0 -1.0 1.0 0.0 1.0 1.5 -2.0 -128 127 255 -239 529
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let u = zeros[0];
    let i = i32(u);
    out[0] = pack4x8snorm(vec4(z - 1.0, 1.0, 0.0, 7.0));
    out[1] = pack4x8unorm(vec4(z + 1.0, 0.0, -3.0, 2.0));
    out[2] = pack2x16snorm(vec2(z - 1.0, 1.0));
    out[3] = pack2x16unorm(vec2(z + 1.0, 0.0));
    out[4] = pack2x16float(vec2(z + 1.5, -2.0));
    out[5] = pack4xI8(vec4(i - 1, 2, 130, -128));
    out[6] = pack4xU8(vec4(u + 1u, 2u, 300u, 255u));
    out[7] = pack4xI8Clamp(vec4(i - 1000, 1000, 5, -5));
    out[8] = pack4xU8Clamp(vec4(u + 1000u, 5u, 256u, 0u));
    let a = unpack4x8snorm(u + 0x7f8100c0u);
    out[9] = bitcast<u32>(a.w);
    out[10] = bitcast<u32>(a.z);
    out[11] = bitcast<u32>(unpack4x8snorm(u + 0x80u).x);
    out[12] = bitcast<u32>(unpack4x8unorm(u + 0xff00u).y);
    out[13] = bitcast<u32>(unpack2x16snorm(u + 0x80007fffu).x + unpack2x16snorm(u + 0x80007fffu).y);
    out[14] = bitcast<u32>(unpack2x16unorm(u + 0xffff0000u).y);
    let h = unpack2x16float(u + 0xc0003e00u);
    out[15] = bitcast<u32>(h.x);
    out[16] = bitcast<u32>(h.y);
    let b = unpack4xI8(u + 0x80ff7f01u);
    out[17] = u32(b.w);
    out[18] = u32(b.x + b.y + b.z);
    out[19] = unpack4xU8(u + 0x80ff7f01u).z;
    out[20] = u32(dot4I8Packed(u + 0xff028003u, u + 0x01030204u));
    out[21] = dot4U8Packed(u + 0xff028003u, u + 0x01030204u);
}
