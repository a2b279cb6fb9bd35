// Columns, products, transposes, determinants; a mat3x3 has columns of 16 bytes.
// expect: 14.0 36.0 654.0 6.0 36.0 24.0 -2.0 5.0 10.0 4.0 3.0 -2.0
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

var<private> local: array<mat3x3<f32>, 2>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let n = zeros[0];
    let m = mat2x3(z + 1.0, 2.0, 3.0, 4.0, 5.0, 6.0);
    let v = m * vec2(10.0, 1.0);
    out[0] = bitcast<u32>(v.x);
    out[1] = bitcast<u32>(v.z);
    let r = vec3(1.0, 10.0, 100.0) * m;
    out[2] = bitcast<u32>(r.y);
    let t = transpose(m);
    out[3] = bitcast<u32>(t[2].y);
    let p = m * t;
    out[4] = bitcast<u32>(p[1][2]);
    let q = mat3x3(vec3(2.0, 0.0, z), vec3(1.0, 3.0, 0.0), vec3(0.0, 5.0, 4.0));
    out[5] = bitcast<u32>(determinant(q));
    out[6] = bitcast<u32>(determinant(mat2x2(z + 1.0, 2.0, 3.0, 4.0)));
    let f = mat4x4(1.0, 0.0, 2.0, z, 0.0, 3.0, 0.0, 1.0, 2.0, 0.0, 5.0, 0.0, 0.0, 1.0, 0.0, 2.0);
    out[7] = bitcast<u32>(determinant(f));
    var s = (q + q) * 0.5 - q * 2.0;
    s[n + 1u][0] = 5.0;
    s[2] = vec3(7.0);
    out[8] = bitcast<u32>(s[1].x + s[0][0] + s[2].z);
    let big = 2.0 * f;
    out[9] = bitcast<u32>(big[2][0]);
    local[n + 1u] = q;
    out[10] = bitcast<u32>(local[1][n + 1u].y);
    out[11] = bitcast<u32>((q * -1.0)[0].x);
}
