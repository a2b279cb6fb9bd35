// 64-bit floats: more digits than f32 has.
// expect: 0 1 2.25 -9 875 141421356
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f64(zeros[0]);
    let third = (z + 1.0lf) / 3.0lf;
    out[0] = u32((third * 3.0lf - 1.0lf) * 1e20lf);
    out[1] = u32((z + 16777217.0lf) - 16777216.0lf);
    out[2] = bitcast<u32>(f32(floor(z + 2.5lf) + abs(z - 0.25lf)));
    out[3] = u32(i32(max(z - 3.5lf, -2.25lf) * 4.0lf));
    let v = vec2<f64>(z + 1.5lf, 2.5lf) + 1.0lf;
    out[4] = u32(v.x * v.y * 100.0lf);
    out[5] = u32(sqrt(z + 2.0lf) * 100000000.0lf);
}
