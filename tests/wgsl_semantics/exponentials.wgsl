// Powers, roots and logarithms, scaled and rounded: drivers differ in the last bits.
// expect: 272 1131 230 332 2471 141 58 84 54 156 52 105 111 -268 118 154 46 119 96 55 314 5730
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let values = array(
        exp(z + 1.0), exp2(z + 3.5), log(z + 10.0), log2(z + 10.0), pow(z + 2.5, 3.5), sqrt(z + 2.0),
        inverseSqrt(z + 3.0), sin(z + 1.0), cos(z + 1.0), tan(z + 1.0), asin(z + 0.5), acos(z + 0.5), atan(z + 2.0),
        atan2(z - 1.0, -2.0), sinh(z + 1.0), cosh(z + 1.0), tanh(z + 0.5), asinh(z + 1.5), acosh(z + 1.5),
        atanh(z + 0.5), radians(z + 180.0), degrees(z + 1.0),
    );
    var copy = values;
    for (var k = 0; k < 22; k++) {
        out[k] = u32(i32(round(copy[k] * 100.0)));
    }
}
