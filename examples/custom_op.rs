//! A user-defined kernel as an operation: squared ReLU as a WGSL string, with a second kernel for its gradient.
//!
//! `cargo run --example custom_op` runs it on the best device here; `FOREBAY_DEVICE` chooses another one.

use forebay::ops::CustomOp;
use forebay::prelude::*;

static FORWARD: CustomOp = CustomOp::new(
    "squared_relu",
    "
    struct Params { count: u32 }
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read_write> y: array<f32>;
    @group(1) @binding(0) var<uniform> p: Params;

    @compute @workgroup_size(256)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < p.count {
            let positive = max(x[id.x], 0.0);
            y[id.x] = positive * positive;
        }
    }",
);

static BACKWARD: CustomOp = CustomOp::new(
    "squared_relu_backward",
    "
    struct Params { count: u32 }
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read> g: array<f32>;
    @group(0) @binding(2) var<storage, read_write> dx: array<f32>;
    @group(1) @binding(0) var<uniform> p: Params;

    @compute @workgroup_size(256)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < p.count {
            dx[id.x] = 2.0 * max(x[id.x], 0.0) * g[id.x];
        }
    }",
);

/// Returns `max(x, 0)²` for an input of any strides.
fn squared_relu(x: &Tensor) -> Result<Tensor> {
    let n = x.numel();
    FORWARD
        .inputs(&[x])
        .output(x.shape(), DType::F32)
        .params(&[n as u32])
        .workgroups([n.div_ceil(256), 1, 1])
        .gradient(move |saved, g| {
            let x = &saved.inputs()[0];
            let call = BACKWARD.inputs(&[x, g]).output(x.shape(), DType::F32);
            Ok(vec![Some(call.params(&[n as u32]).workgroups([n.div_ceil(256), 1, 1]).run()?)])
        })
        .run()
}

fn main() -> Result<()> {
    let device = Device::best()?;
    let x = Tensor::randn([1000, 100], DType::F32, &device)?.to_leaf()?;

    // A transposed input works as well: the operation receives a contiguous copy.
    let y = squared_relu(&x.t()?)?;
    y.backward_with(&y.ones_like()?)?;
    let gradient = x.grad();

    // The same function, composed of built-in operations.
    x.set_grad(None);
    let composed = x.t()?.relu()?.square()?;
    composed.backward_with(&composed.ones_like()?)?;

    let same = y.to_vec::<f32>()? == composed.to_vec::<f32>()?;
    let same_gradient = match (gradient, x.grad()) {
        (Some(a), Some(b)) => a.to_vec::<f32>()? == b.to_vec::<f32>()?,
        _ => false,
    };
    println!("on {}: results equal: {same}, gradients equal: {same_gradient}", device.info());
    if same && same_gradient {
        Ok(())
    } else {
        Err(Error::argument("squared_relu", "differs from relu and square"))
    }
}
