// The bits of one type as another.
// expect: 1.0 0x40c90fdb -1 -1.0 2.0 4
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = zeros[0];
    out[0] = bitcast<u32>(f32(z) + 1.0);
    out[1] = bitcast<u32>(bitcast<f32>(z + 0x40490fdbu) * 2.0);
    out[2] = bitcast<u32>(bitcast<i32>(z + 0xfffffffeu) / 2);
    let v = bitcast<vec2<u32>>(vec2(f32(z) - 1.0, f32(z) + 2.0));
    out[3] = v.x;
    out[4] = v.y;
    let w = bitcast<vec3<i32>>(vec3(z, z + 0xffffffffu, z + 5u));
    out[5] = u32(w.y + w.z);
}
