// Integers and bools converted to floats.
// expect: -7.0 4294967296.0 16777216.0 1.0 12.0 1
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = zeros[0];
    out[0] = bitcast<u32>(f32(i32(z) - 7));
    out[1] = bitcast<u32>(f32(z + 0xffffffffu));
    out[2] = bitcast<u32>(f32(z + 16777217u));
    out[3] = bitcast<u32>(f32(z == 0u));
    let v = vec2<f32>(vec2(z + 3u, z + 4u));
    out[4] = bitcast<u32>(v.x * v.y);
    out[5] = u32(i32(z == 1u)) + u32(true);
}
