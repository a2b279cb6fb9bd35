// Rounding to 16-bit floats, kept in 32 bits: exact values only, as the rounding is the driver's.
// expect: 1.5 -2048.0 3.0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    out[0] = bitcast<u32>(quantizeToF16(z + 1.5));
    out[1] = bitcast<u32>(quantizeToF16(z + 2049.0) * 0.0 + quantizeToF16(z - 2048.0));
    out[2] = bitcast<u32>(quantizeToF16(vec2(z + 0.25, 3.0)).y);
}
