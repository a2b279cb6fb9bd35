// Overrides with defaults, which this test keeps.
// expect: 12 3 10
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

override SIZE: u32 = 4;
override TWICE: u32 = SIZE * 2u;
override SCALE: f32 = 0.25;
override FLAG: bool = true;
override OFFSET = -3;
var<private> list: array<u32, 4> = array(1u, 2u, 3u, 4u);

@compute @workgroup_size(SIZE)
fn main() {
    out[0] = SIZE + TWICE;
    out[1] = u32(SCALE * 8.0) + u32(FLAG);
    out[2] = list[zeros[0] + 2u] + u32(OFFSET + 10);
}
