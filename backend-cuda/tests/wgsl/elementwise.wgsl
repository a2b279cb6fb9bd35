// A fused elementwise kernel: uniform parameters, a grid folded into y, runtime-sized arrays.
struct Params {
    n: u32,
    scale: f32,
    shape: vec4<u32>,
    strides: array<vec4<u32>, 2>,
    bias: vec3<f32>,
    last: u32,
}

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read_write> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(1) @binding(0) var<uniform> params: Params;

override block: u32 = 256;

fn gelu(x: f32) -> f32 {
    return 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}

fn offset(linear: u32) -> u32 {
    var rest = linear;
    var at = 0u;
    for (var d = 3; d >= 0; d--) {
        let size = params.shape[d];
        at += (rest % size) * params.strides[1][d];
        rest /= size;
    }
    return at;
}

@compute @workgroup_size(block)
fn fused(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = id.x + id.y * groups.x * block;
    if i >= params.n {
        return;
    }
    out[i] = gelu(a[i] * b[offset(i)] + params.bias.y) * params.scale;
}

@compute @workgroup_size(64)
fn four(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.x * 4u;
    if i + 3u < arrayLength(&out) {
        let v = vec4(a[i], a[i + 1u], a[i + 2u], a[i + 3u]) * 2.0;
        out[i] = v.x;
        out[i + 1u] = v.y;
        out[i + 2u] = v.z;
        out[i + 3u] = v.w;
    }
}
