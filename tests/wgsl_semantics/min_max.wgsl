// min, max, clamp, step, smoothstep, mix, fma.
// expect: -3 0xfffffff0 4 -1.5 1.0 0.15625 1.0 3.0 10.0 4.0 10.0 3.0 2.5 12.0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let i = i32(zeros[0]);
    out[0] = u32(min(i - 3, 2));
    out[1] = max(zeros[0] + 3u, 0xfffffff0u);
    out[2] = u32(clamp(i + 9, -1, 4));
    out[3] = bitcast<u32>(clamp(z - 9.0, -1.5, 4.0));
    out[4] = bitcast<u32>(step(z + 1.0, 1.0) + step(1.0, z));
    out[5] = bitcast<u32>(smoothstep(0.0, 4.0, z + 1.0));
    out[6] = bitcast<u32>(smoothstep(0.0, 1.0, z - 3.0) + smoothstep(0.0, 1.0, z + 7.0));
    out[7] = bitcast<u32>(mix(z + 2.0, 6.0, 0.25));
    let m = mix(vec2(z + 2.0, 4.0), vec2(6.0, 8.0), 0.5);
    out[8] = bitcast<u32>(m.x + m.y);
    out[9] = bitcast<u32>(mix(vec2(z), vec2(8.0), vec2(0.25, 0.5)).y);
    out[10] = bitcast<u32>(fma(z + 3.0, 4.0, -2.0));
    out[11] = bitcast<u32>(max(vec3(z - 1.0), vec3(-2.0, 3.0, 0.0)).y);
    out[12] = bitcast<u32>(abs(z - 2.5));
    out[13] = bitcast<u32>(degrees(radians(z + 90.0)) * 0.0 + ldexp(z + 1.5, 3));
}
