//! A user-defined kernel on matrix units (tensor cores): one WGSL string that runs natively through CUDA and Vulkan.
//!
//! `cargo run --example matrix_units` runs it on the best device here; `FOREBAY_DEVICE` chooses another one.

use forebay::ops::CustomOp;
use forebay::prelude::*;

/// Elements of a matrix that one instruction multiplies, in each dimension.
const SIDE: usize = 16;

/// c \[m, n\] = a \[m, k\] · bᵀ, of b \[n, k\], with sums in f32. A workgroup is one subgroup, and computes 16 x 16
/// elements.
static PRODUCT: CustomOp = CustomOp::new(
    "bf16_product",
    "
    enable wgpu_cooperative_matrix;
    // The memory of matrices A and B holds bf16, two elements in a word: WGSL has no such type.
    const OPERAND_BITS = 0xbf16u;
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
            workgroupBarrier();
        }
        let pitch = p.n;
        let at = row * pitch + col;
        coopStoreT(sums, &c[at], pitch);
    }",
);

/// Returns a · bᵀ in f32, for bf16 matrices whose extents are multiples of 16.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (m, n, k) = (a.shape()[0], b.shape()[0], a.shape()[1]);
    PRODUCT
        .inputs(&[a, b])
        .output([m, n], DType::F32)
        .params(&[n as u32, k as u32])
        .workgroups([n / SIDE, m / SIDE, 1])
        .run()
}

fn main() -> Result<()> {
    let device = Device::best()?;
    let features = device.info().features;
    if !features.has_cooperative(DType::BF16) || features.cooperative_side as usize != SIDE {
        println!("{} has no matrix units for bf16 matrices of {SIDE} x {SIDE}", device.info());
        return Ok(());
    }
    // Small integers, so that every order of the sums is exact.
    let [a, b] = [[256, 512], [128, 512]]
        .map(|shape| Tensor::randint(-4, 5, shape, DType::F32, &device)?.to_dtype(DType::BF16));
    let (a, b) = (a?, b?);
    let ours = product(&a, &b)?.to_vec::<f32>()?;
    let built_in = a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?.t()?)?.to_vec::<f32>()?;
    println!("on {}: results equal: {}", device.info(), ours == built_in);
    if ours == built_in { Ok(()) } else { Err(Error::argument("bf16_product", "differs from matmul")) }
}
