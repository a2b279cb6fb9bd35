// Cooperative matrices in every role and order, from workgroup and storage memory.
enable f16;
enable wgpu_cooperative_matrix;

@group(0) @binding(0) var<storage, read> x: array<f16>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
var<workgroup> tile: array<vec4<f16>, 128>;
var<workgroup> sums: array<vec4<f32>, 64>;

@compute @workgroup_size(32)
fn products(@builtin(local_invocation_index) lane: u32) {
    for (var i = lane; i < 128u; i += 32u) {
        tile[i] = vec4<f16>(x[4u * i], x[4u * i + 1u], x[4u * i + 2u], x[4u * i + 3u]);
    }
    workgroupBarrier();
    let a = coopLoadT<coop_mat16x16<f16, A>>(&tile[0], 4u);
    let b = coopLoad<coop_mat16x16<f16, B>>(&tile[64], 4u);
    let in_memory = coopLoad<coop_mat16x16<f16, A>>(&x[0], 16u);
    var c = coop_mat16x16<f32, C>();
    c = coopMultiplyAdd(a, b, c);
    c = coopMultiplyAdd(in_memory, b, c);
    c = c - coopLoadT<coop_mat16x16<f32, C>>(&y[0], 16u);
    c = c + coopLoad<coop_mat16x16<f32, C>>(&y[256], 16u);
    c = c * 2.0;
    coopStoreT(c, &sums[0], 4u);
    workgroupBarrier();
    coopStore(c, &y[0], 16u);
    y[512u + lane] = sums[lane].x;
}
