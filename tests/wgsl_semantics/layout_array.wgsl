// Runtime-sized arrays of vec3, arrays of arrays, and their lengths.
// expect: 1 2 3 0 11 12 13 0 21 22 23 0 0 7 0 0 0 0 8 0 16 0 0 0 34 0 0 0
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

@group(0) @binding(0) var<storage, read_write> points: array<vec3<u32>>;

@compute @workgroup_size(1)
fn main() {
    for (var i = 0u; i < 3u; i++) {
        points[i] = vec3(10u * i + 1u, 10u * i + 2u, 10u * i + 3u);
    }
    points[zeros[0] + 3u].y = 7u;
    points[4][zeros[0] + 2u] = 8u;
    points[5].x = arrayLength(&points) / 4u * 4u;
    points[6].x = points[1].z + points[zeros[0] + 2u].x;
}
