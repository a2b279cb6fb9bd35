// Builtin functions that return structs.
// expect: -0.75 -2.0 0.75 4 0.5 -0.25 0.75 -1 -0.5 11
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let a = modf(z - 2.75);
    out[0] = bitcast<u32>(a.fract);
    out[1] = bitcast<u32>(a.whole);
    let b = frexp(z + 12.0);
    out[2] = bitcast<u32>(b.fract);
    out[3] = u32(b.exp);
    let c = modf(vec2(z + 1.5, z - 0.25));
    out[4] = bitcast<u32>(c.fract.x + c.whole.y);
    out[5] = bitcast<u32>(c.fract.y);
    let d = frexp(vec3(z + 0.375, z - 1.0, z + 1024.0));
    out[6] = bitcast<u32>(d.fract.x);
    out[7] = u32(d.exp.x);
    out[8] = bitcast<u32>(d.fract.y);
    out[9] = u32(d.exp.z);
}
