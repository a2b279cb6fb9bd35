// Construction, swizzles, components by index, writes to components.
// expect: 3.0 312.0 1795.0 3155.0 128.0 465.0 -1.5 4 7 32.0 1
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let z = f32(zeros[0]);
    let n = zeros[0];
    var v = vec4(z + 1.0, 2.0, 3.0, 4.0);
    out[0] = bitcast<u32>(v.wzyx[n + 1u]);
    let w = v.zxy;
    out[1] = bitcast<u32>(w.x * 100.0 + w.y * 10.0 + w.z);
    v.y = 7.0;
    v[n + 2u] = 9.0;
    v[3] += 1.0;
    out[2] = bitcast<u32>(dot(v, vec4(1000.0, 100.0, 10.0, 1.0)));
    let j = vec4(w.xy, vec2(v.w));
    out[3] = bitcast<u32>(dot(j, vec4(1000.0, 100.0, 10.0, 1.0)));
    let k = vec4(z, w.yz, 8.0);
    out[4] = bitcast<u32>(dot(k, vec4(1000.0, 100.0, 10.0, 1.0)));
    let l = vec3(vec2(z + 3.0), 4.0) + vec3(1.0, w.xy);
    out[5] = bitcast<u32>(l.x * 100.0 + l.y * 10.0 + l.z);
    out[6] = bitcast<u32>((2.0 - v.xy / 2.0).y);
    let e = vec3(n, n + 1u, n + 2u);
    out[7] = e[n + 2u] + vec3<u32>().y + vec2(e.zy).x;
    out[8] = u32(all(v > vec4(0.0))) + 2u * u32(any(v == vec4(7.0))) + 4u * u32(all(v.xy != v.yx));
    let picked = select(vec2(1.0, 2.0), vec2(3.0, 4.0), vec2(n == 0u, n == 1u));
    out[9] = bitcast<u32>(picked.x * 10.0 + picked.y);
    let b = vec2(true, false) | vec2(n == 1u, n == 0u);
    out[10] = u32(all(b)) + 2u * u32(any(b & vec2(n == 1u))) + 4u * u32(!b.x);
}
