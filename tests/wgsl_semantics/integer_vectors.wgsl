// Integer division, wrapping and shifts on vectors, component by component.
// expect: 7 0x80000000 4 0 0 1 0x80000000 0x80000001 0x80000002 9 4 1
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let zero = vec3<i32>(i32(zeros[0]));
    let a = (zero + vec3(7, -2147483647 - 1, 9)) / (zero + vec3(0, -1, 2));
    let b = (zero + vec3(7, -2147483647 - 1, 9)) % (zero + vec3(0, -1, 2));
    let c = (zero + 2147483647) + vec3(1, 2, 3);
    let d = vec2<u32>(zeros[0]) + 9u;
    let e = d / vec2(zeros[0], 2u);
    for (var i = 0; i < 3; i++) {
        out[i] = u32(a[i]);
        out[i + 3] = u32(b[i]);
        out[i + 6] = u32(c[i]);
    }
    out[9] = e.x;
    out[10] = e.y;
    out[11] = (d % 4u).y;
}
