// round goes to even; floor, ceil, trunc, fract, sign.
// expect: 0.0 2.0 2.0 -4.0 -2.0 -1.0 -1.0 0.75 -1.0 1.0 1.0 -1 1.0 -1.5 3.5
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    out[0] = bitcast<u32>(round(z + 0.5));
    out[1] = bitcast<u32>(round(z + 1.5));
    out[2] = bitcast<u32>(round(z + 2.5));
    out[3] = bitcast<u32>(round(z - 3.5));
    out[4] = bitcast<u32>(floor(z - 1.25));
    out[5] = bitcast<u32>(ceil(z - 1.25));
    out[6] = bitcast<u32>(trunc(z - 1.75));
    out[7] = bitcast<u32>(fract(z - 1.25));
    out[8] = bitcast<u32>(sign(z - 4.0));
    out[9] = bitcast<u32>(sign(z + 0.25));
    out[10] = bitcast<u32>(sign(z) + 1.0);
    out[11] = u32(sign(vec2(i32(zeros[0]) - 5, 3)).x);
    out[12] = bitcast<u32>(saturate(z + 1.5));
    out[13] = bitcast<u32>((z - 7.5) % 2.0);
    out[14] = bitcast<u32>((vec2(z + 7.5) % vec2(2.0, -4.0)).y);
}
