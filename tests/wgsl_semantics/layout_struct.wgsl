// A struct in storage has WGSL's offsets: written by member, read back as words.
// expect: 1 0 0 0 2 3 4 5 6 7 0 0 8 9 10 0 11 12 13 0 14 0 0 0 15 16 17 18 19 0 0 0 1.0 2.0 3.0 0 4.0 5.0 6.0 0 20 0 0 0 21 0 22 23

struct Inner {
    x: u32,
    y: vec4<u32>,
}
struct Pair {
    k: u32,
    v: vec2<u32>,
}
struct Data {
    a: u32,
    b: vec3<u32>,
    c: u32,
    d: vec2<u32>,
    e: array<vec3<u32>, 2>,
    f: Inner,
    @size(12) g: u32,
    m: mat2x3<f32>,
    @align(16) rest: array<Pair>,
}
@group(0) @binding(0) var<storage, read_write> data: Data;

@compute @workgroup_size(1)
fn main() {
    data.a = 1u;
    data.b = vec3(2u, 3u, 4u);
    data.c = 5u;
    data.d = vec2(6u, 7u);
    data.e[0] = vec3(8u, 9u, 10u);
    data.e[1] = vec3(11u, 12u, 13u);
    data.f.x = 14u;
    data.f.y = vec4(15u, 16u, 17u, 18u);
    data.g = 19u;
    data.m = mat2x3(1.0, 2.0, 3.0, 4.0, 5.0, 6.0);
    data.rest[0].k = 20u;
    data.rest[1].k = 21u;
    data.rest[1].v = vec2(22u, 23u);
}
