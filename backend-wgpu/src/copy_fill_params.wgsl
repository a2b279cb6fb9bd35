// Parameters and the written segment of copies and fills. Positions are in words, or in vectors of four words.

struct Params {
    dst: u32,
    src: u32,
    count: u32,
    value: u32,
}

@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@group(0) @binding(0) var<storage, read_write> quads: array<vec4<u32>>;
@group(1) @binding(0) var<uniform> params: Params;

// Groups beyond the limit of one dimension continue in y.
fn position(id: vec3<u32>, groups: vec3<u32>) -> u32 {
    return id.y * groups.x * 64u + id.x;
}

