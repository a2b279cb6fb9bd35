// f16: arithmetic, conversions, vectors and storage in structs; every value is exact in 11 bits.
// expect: 3.5 0.25 22.0 -7 1100 0x4c204200 7.0 326.0 -0.5 3.0 73.0 6.5 6.0
enable f16;

@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

struct Keep {
    list: array<f16, 3>,
    v: vec3<f16>,
}
var<private> keep: Keep;

@compute @workgroup_size(1)
fn main() {
    let z = f16(zeros[0]);
    let a = z + 1.5h;
    out[0] = bitcast<u32>(f32(a * 2.5h - 0.25h));
    out[1] = bitcast<u32>(f32((z + 1.0h) / 4.0h));
    var v = vec4<f16>(z + 1.0h, 2.0h, -3.0h, 4.0h);
    v.y = 8.0h;
    v = v * 2.0h + vec4(0.5h);
    out[2] = bitcast<u32>(f32(v.x + v.y + v.z + v.w));
    out[3] = u32(i32(f16(-7.75)));
    out[4] = u32(f16(i32(zeros[0]) + 100)) + u32(v.x > v.z) * 1000u;
    let m = max(v.xy, vec2(3.0h, 1.0h));
    out[5] = pack2x16float(vec2<f32>(m));
    let s = sqrt(z + 16.0h) + abs(z - 2.0h) + floor(z + 1.75h);
    out[6] = bitcast<u32>(f32(s));
    keep.list[1] = 5.0h;
    keep.v = vec3(1.0h, z + 2.0h, 3.0h);
    let copy = keep;
    out[7] = bitcast<u32>(f32(copy.list[zeros[0] + 1u] + dot(copy.v, vec3(1.0h, 10.0h, 100.0h))));
    let d = -select(1.0h, 2.0h, z == 0.0h) % 1.5h;
    out[8] = bitcast<u32>(f32(d));
    out[9] = bitcast<u32>(f32(mat2x2<f16>(1.0h, z + 2.0h, 3.0h, 4.0h) [1] [zeros[0]]));
    let w = mat2x2<f16>(1.0h, 2.0h, 3.0h, z + 4.0h) * vec2(1.0h, 10.0h);
    out[10] = bitcast<u32>(f32(w.x + w.y));
    out[11] = bitcast<u32>(fma(f32(z), 1.0, f32(clamp(z + 9.0h, 0.0h, 6.5h))));
    // f32, because naga's SPIR-V for the frexp of an f16 is invalid.
    let f = frexp(f32(z + 12.0h));
    let g = modf(z + 1.25h);
    out[12] = bitcast<u32>(f32(f16(f.fract) + f16(f.exp) + g.fract + g.whole));
}
