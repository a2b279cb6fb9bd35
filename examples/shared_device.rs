//! Shares a wgpu device with Forebay, like a program that draws. The example trains on the program's device, reads
//! the result with the program's own commands, and never blocks on tensors.
//!
//! `cargo run --example shared_device`

use forebay::prelude::*;
use forebay::{request_wgpu_device, wgpu};

async fn run() -> anyhow::Result<()> {
    // The program's own objects: an adapter, a device and a queue. The device has what makes kernels fast.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await?;
    let (device, queue) = request_wgpu_device(&adapter, &wgpu::DeviceDescriptor::default()).await?;

    let shared = Device::from_wgpu(&adapter, &device, &queue)?;
    println!("{}", shared.info());
    let net = Linear::new(2, 1, &shared)?;
    let mut optimizer = AdamW::new(net.parameters(), 0.05);
    let x = Tensor::randn([256, 2], DType::F32, &shared)?;
    let y = x.sum(1, true)?;
    for step in 0..100 {
        let loss = net.forward(&x)?.sub(&y)?.square()?.mean((), false)?;
        let value = loss.item_async();
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        if step % 20 == 0 {
            println!("step {step}: loss {:.4}", value.await?);
        }
    }

    // The program's own commands read the weights where they are.
    let weights = net.weight.wgpu_slice()?;
    let copy = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("the program's copy"),
        size: weights.size().next_multiple_of(16),
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(weights.buffer(), weights.offset(), &copy, 0, weights.size());
    queue.submit([encoder.finish()]);
    drop(weights);

    // A tensor over the program's buffer.
    let copied = Tensor::from_wgpu_buffer(&copy, 0, [2], DType::F32, &shared)?;
    println!("weights: {:?}", copied.to_vec_async::<f32>().await?);
    println!("{}", shared.memory().summary());
    Ok(())
}

fn main() -> anyhow::Result<()> {
    pollster::block_on(run())
}
