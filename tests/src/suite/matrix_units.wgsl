// c [m, n] = a [m, k] · bᵀ, of b [n, k], by matrix units. The test declares OPERAND_BITS in front of this text.
struct Params { n: u32, k: u32 }
@group(0) @binding(0) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read> b: array<u32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@group(1) @binding(0) var<uniform> p: Params;
// 16 rows of 16 elements; a vector holds eight.
var<workgroup> tile_a: array<vec4<f32>, 32>;
var<workgroup> tile_b: array<vec4<f32>, 32>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = 16u * group.y;
    let col = 16u * group.x;
    var sums = coop_mat16x16<f32, C>();
    var twice = coop_mat16x16<f32, C>();
    for (var k = 0u; k < p.k; k += 16u) {
        let word = (lane / 2u * p.k + k) / 2u + 4u * (lane % 2u);
        let from_a = row * p.k / 2u + word;
        let from_b = col * p.k / 2u + word;
        tile_a[lane] = bitcast<vec4<f32>>(vec4<u32>(a[from_a], a[from_a + 1u], a[from_a + 2u], a[from_a + 3u]));
        tile_b[lane] = bitcast<vec4<f32>>(vec4<u32>(b[from_b], b[from_b + 1u], b[from_b + 2u], b[from_b + 3u]));
        workgroupBarrier();
        // `T` loads rows, without `T` columns: the rows of b are the columns of its transpose.
        let left = coopLoadT<coop_mat16x16<f32, A>>(&tile_a[0], 2u);
        let right = coopLoad<coop_mat16x16<f32, B>>(&tile_b[0], 2u);
        sums = coopMultiplyAdd(left, right, sums);
        twice = coopMultiplyAdd(left, right, twice);
        twice = coopMultiplyAdd(left, right, twice);
        workgroupBarrier();
    }
    // A difference is a difference, unless the module declares it a product.
    let difference = twice - sums;
    let pitch = p.n;
    let at = row * pitch + col;
    coopStoreT(difference, &c[at], pitch);
}
