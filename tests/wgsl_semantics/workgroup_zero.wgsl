// Workgroup memory starts as zeros, of every type.
// expect: 127 126 125 124 123 122 121 120 119 118 117 116 115 114 113 112 111 110 109 108 107 106 105 104 103 102 101 100 99 98 97 96 95 94 93 92 91 90 89 88 87 86 85 84 83 82 81 80 79 78 77 76 75 74 73 72 71 70 69 68 67 66 65 64
@group(0) @binding(0) var<storage, read_write> out: array<u32>;

struct Thing {
    a: vec3<f32>,
    b: u32,
    c: array<i32, 3>,
}
var<workgroup> numbers: array<u32, 64>;
var<workgroup> words: array<array<vec3<u32>, 7>, 5>;
var<workgroup> flag: bool;
var<workgroup> thing: Thing;
var<workgroup> count: atomic<u32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
    let sum = numbers[lane] + words[lane % 5u][lane % 7u].z + u32(flag) + thing.b + u32(thing.c[lane % 3u])
        + atomicLoad(&count);
    workgroupBarrier();
    numbers[63u - lane] = lane;
    atomicAdd(&count, 1u);
    workgroupBarrier();
    out[lane] = sum * 1000u + numbers[lane] + atomicLoad(&count);
}
