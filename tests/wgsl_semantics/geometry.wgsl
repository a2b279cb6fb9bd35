// dot, cross, length, distance, normalize, reflect, refract, faceForward.
// expect: 7.5 -11.0 -6.5 8.0 5.0 5.0 80.0 1.0 2.0 -100.0 46 12 5.0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let a = vec3(z + 1.0, z + 2.0, z + 3.0);
    let b = vec3(z - 2.0, z + 4.0, z + 0.5);
    out[0] = bitcast<u32>(dot(a, b));
    let c = cross(a, b);
    out[1] = bitcast<u32>(c.x);
    out[2] = bitcast<u32>(c.y);
    out[3] = bitcast<u32>(c.z);
    out[4] = bitcast<u32>(length(vec2(z + 3.0, z - 4.0)));
    out[5] = bitcast<u32>(distance(vec2(z + 3.0, 1.0), vec2(0.0, z + 5.0)));
    out[6] = bitcast<u32>(round(normalize(vec2(z + 3.0, 4.0)).y * 100.0));
    out[7] = bitcast<u32>(reflect(vec2(z + 1.0, -1.0), vec2(0.0, 1.0)).y);
    out[8] = bitcast<u32>(faceForward(a, b, vec3(z + 1.0, 0.0, 0.0)).y);
    out[9] = bitcast<u32>(round(refract(vec2(z, -1.0), vec2(0.0, 1.0), 0.5).y * 100.0));
    out[10] = u32(dot(vec4(i32(z) + 1, 2, 3, 4), vec4(5, -6, 7, 8)));
    out[11] = dot(vec2(zeros[0] + 0x80000000u, 3u), vec2(2u, 4u));
    out[12] = bitcast<u32>(length(z - 2.0) + distance(z + 1.0, 4.0));
}
