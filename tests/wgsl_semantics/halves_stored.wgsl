// f16 in storage: two bytes each, vectors and matrices with their alignment.
// expect: 0x3c00 0x42004000 0x45004400 0x47004600 0x40003c00 0x4200 0x40003c00 0x4200 0x45004400 0x4600 0x48000000 0x4600
enable f16;


struct Data {
    a: f16,
    b: vec2<f16>,
    c: vec3<f16>,
    d: f16,
    e: array<f16, 3>,
    m: mat2x3<f16>,
    rest: array<f16>,
}
@group(0) @binding(0) var<storage, read_write> data: Data;

@compute @workgroup_size(1)
fn main() {
    data.a = 1.0h;
    data.b = vec2(2.0h, 3.0h);
    data.c = vec3(4.0h, 5.0h, 6.0h);
    data.d = 7.0h;
    data.e = array(1.0h, 2.0h, 3.0h);
    data.m = mat2x3<f16>(1.0h, 2.0h, 3.0h, 4.0h, 5.0h, 6.0h);
    data.rest[1] = 8.0h;
    data.rest[2] = data.a + data.c.y;
}
