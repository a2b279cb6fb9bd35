// Two-dimensional workgroup memory; storage written by one invocation and read by another.
// expect: 70 71 72 73 74 75 76 77 60 61 62 63 64 65 66 67 50 51 52 53 54 55 56 57 40 41 42 43 44 45 46 47 30 31 32 33 34 35 36 37 20 21 22 23 24 25 26 27 10 11 12 13 14 15 16 17 0 1 2 3 4 5 6 7
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

var<workgroup> tile: array<array<u32, 8>, 8>;

@compute @workgroup_size(8, 8)
fn main(@builtin(local_invocation_id) id: vec3<u32>) {
    tile[id.y][id.x] = id.x * 10u + id.y;
    workgroupBarrier();
    out[id.y * 8u + id.x] = tile[id.x][id.y];
    storageBarrier();
    workgroupBarrier();
    let other = out[(7u - id.y) * 8u + id.x];
    workgroupBarrier();
    storageBarrier();
    out[id.y * 8u + id.x] = other;
}
