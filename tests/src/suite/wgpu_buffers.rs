//! Tensors over buffers of a program that uses wgpu itself, its commands on the memory of tensors, and textures.

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::Tag;
use forebay::optim::{Optimizer, Sgd};
use forebay::tensor::Tensor;
use forebay::wgpu::{self, BufferUsages, TextureFormat, TextureUsages};
use forebay::{WgpuDeviceExt, WgpuTensorExt};

use super::asynchronous::block_on;
use super::custom_op::ensure_bools;
use super::tests;
use super::wgpu_devices::{Program, TENSOR_USAGES, to_bytes};

tests![
    a_tensor_over_a_buffer_reads_and_writes_it,
    buffers_above_the_binding_limit_serve_tensors,
    unsuitable_buffers_are_refused,
    buffers_of_another_device_are_refused,
    operations_leave_the_bytes_after_a_tensor,
    a_mapped_buffer_fails_its_submission,
    a_tensors_memory_serves_the_programs_commands,
    the_backward_pass_notices_the_programs_writes,
    weights_in_the_programs_memory_are_cast_each_time,
    slices_of_any_size_are_bindings,
    textures_become_tensors_and_tensors_textures,
    bools_that_the_program_writes_are_zero_or_one,
];

fn a_tensor_over_a_buffer_reads_and_writes_it(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(512 + 64, TENSOR_USAGES);
    let values: Vec<f32> = (0..16).map(|i| i as f32).collect();
    program.queue.write_buffer(&buffer, 512, &to_bytes(&values));
    let before = shared.memory().allocated();
    {
        let x = Tensor::from_wgpu_buffer(&buffer, 512, [4, 4], DType::F32, &shared)?;
        ensure!(shared.memory().tag(Tag::External).current == 64, "{}", shared.memory());
        ensure!(shared.memory().allocated() == before, "the pool allocated the program's memory");
        ensure!(x.to_vec::<f32>()? == values, "the program's values");
        // A second tensor of the same buffer, and copies between both.
        let head = Tensor::from_wgpu_buffer(&buffer, 0, [4, 4], DType::F32, &shared)?;
        head.copy_(&x)?;
        x.mul_(2.0)?;
        let leaf = x.to_leaf()?;
        leaf.matmul(&head)?.sum_all()?.backward()?;
        ensure!(leaf.grad().context("a gradient")?.shape() == [4, 4], "its shape");
        // The program's write takes effect in the order of the queue.
        let slice = x.wgpu_slice_mut()?;
        ensure!(*slice.buffer() == buffer && slice.range() == (512..576), "{slice:?}");
        program.queue.write_buffer(&buffer, 512, &to_bytes(&[7.0]));
        drop(slice);
        ensure!(x.narrow(0, 0, 1)?.to_vec::<f32>()? == [7.0, 2.0, 4.0, 6.0], "a later write");
        x.offload_()?;
        ensure!(x.add(1.0)?.to_vec::<f32>()?[1] == 3.0, "offloading keeps the program's memory");
    }
    ensure!(shared.memory().tag(Tag::External).current == 0, "{}", shared.memory());
    let doubled: Vec<f32> =
        values.iter().enumerate().map(|(i, v)| if i == 0 { 7.0 } else { v * 2.0 }).collect();
    ensure!(
        program.read(&buffer, 512, 64)? == to_bytes(&doubled),
        "the buffer lost the values of its tensors"
    );
    ensure!(program.read(&buffer, 0, 64)? == to_bytes(&values), "the copy");
    Ok(())
}

/// A tensor is at most one binding, but its buffer may be larger.
fn buffers_above_the_binding_limit_serve_tensors(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let bytes = program.device.limits().max_buffer_size;
    ensure!(bytes > shared.info().limits.max_binding_bytes, "the buffer is one binding");
    let buffer = program.buffer(bytes, TENSOR_USAGES);
    let over = |offset, numel: usize| Tensor::from_wgpu_buffer(&buffer, offset, [numel], DType::F32, &shared);
    let (first, near, last) = (over(0, 1024)?, over(4096, 1003)?, over(bytes - 4096, 1024)?);
    last.fill_(2.0)?;
    first.copy_(&last)?;
    near.narrow(0, 1, 1001)?.fill_(3.0)?;
    last.narrow(0, 0, 4)?.fill_(0.0)?;
    last.narrow(0, 5, 1001)?.copy_(&near.narrow(0, 1, 1001)?)?;
    shared.flush()?;
    let first = program.read(&buffer, 0, 4096)?;
    let last = program.read(&buffer, bytes - 4096, 4096)?;
    ensure!(first == to_bytes(&[2.0; 1024]), "a distant copy of vectors");
    let expected = [&[0.0; 4][..], &[2.0], &[3.0; 1001], &[2.0; 18]].concat();
    ensure!(last == to_bytes(&expected), "fills, and a distant copy of words");
    Ok(())
}

fn unsuitable_buffers_are_refused(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let refuse = |buffer: &wgpu::Buffer, offset: u64, on: &Device, needle: &str| -> Result<()> {
        let made = Tensor::from_wgpu_buffer(buffer, offset, [4], DType::F32, on);
        let error = made.err().context("it was taken")?.to_string();
        ensure!(error.contains(needle) && error.contains("from_wgpu_buffer"), "{error}");
        Ok(())
    };
    let buffer = program.buffer(1024, TENSOR_USAGES);
    refuse(&program.buffer(1024, BufferUsages::STORAGE), 0, &shared, "create it with")?;
    refuse(&buffer, 100, &shared, "multiples of 256")?;
    refuse(&buffer, 2048, &shared, "past the end")?;
    refuse(&program.buffer(12, TENSOR_USAGES), 0, &shared, "make the buffer larger")?;
    // The suite's device may be a program's too (`wgpu-minimum`), and wgpu does not say whose a buffer is.
    if device.to_wgpu()?.0.features() != wgpu::Features::empty() {
        refuse(&buffer, 0, device, "Device::from_wgpu")?;
    }
    let wide = Tensor::from_wgpu_buffer(&buffer, 0, [80], DType::F32, &shared)?;
    refuse(&buffer, 0, &shared, "overlap a tensor over its bytes 0..320")?;
    refuse(&buffer, 256, &shared, "drop the tensor first")?;
    let next = Tensor::from_wgpu_buffer(&buffer, 512, [4], DType::F32, &shared)?;
    let empty = Tensor::from_wgpu_buffer(&buffer, 1024, [0, 3], DType::F32, &shared)?;
    ensure!(empty.shape() == [0, 3] && empty.to_vec::<f32>()?.is_empty(), "{empty:?}");
    // A view keeps the range, and a refusal releases nothing.
    let view = wide.narrow(0, 64, 4)?;
    drop((wide, empty));
    refuse(&buffer, 256, &shared, "overlap")?;
    drop((view, next));
    drop(Tensor::from_wgpu_buffer(&buffer, 256, [4], DType::F32, &shared)?);
    let x = Tensor::ones([64], DType::F32, &shared)?;
    refuse(x.wgpu_slice()?.buffer(), 0, &shared, "use the tensor itself")?;
    let turned = Tensor::ones([2, 3], DType::F32, &shared)?.t()?;
    ensure!(turned.wgpu_slice().is_err_and(|e| e.to_string().contains("contiguous")), "strides");
    let null = Device::null(Default::default());
    ensure!(Tensor::ones([1], DType::F32, &null)?.wgpu_slice().is_err(), "a null device has buffers");
    ensure!(shared.memory().tag(Tag::External).current == 0, "a refused buffer is counted");
    Ok(())
}

/// The devices are of one instance, because wgpu may mistake a buffer of another instance for its own.
fn buffers_of_another_device_are_refused(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let descriptor = wgpu::DeviceDescriptor::default();
    let (other, queue) = block_on(program.adapter.request_device(&descriptor))?;
    let other = Program { adapter: program.adapter.clone(), device: other, queue };
    let destroyed = program.buffer(64, TENSOR_USAGES);
    destroyed.destroy();
    for buffer in [other.buffer(64, TENSOR_USAGES), destroyed] {
        let made = Tensor::from_wgpu_buffer(&buffer, 0, [16], DType::F32, &shared);
        let error = made.err().context("the unsuitable buffer was accepted")?.to_string();
        ensure!(error.contains("cannot use the buffer"), "{error}");
    }
    ensure!(shared.memory().tag(Tag::External).current == 0, "a refused buffer is counted");
    ensure!(Tensor::ones([3], DType::F32, &shared)?.to_vec::<f32>()? == [1.0; 3], "after the refusals");
    Ok(())
}

fn operations_leave_the_bytes_after_a_tensor(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(1 << 18, TENSOR_USAGES);
    for dtype in [DType::U8, DType::Bool, DType::BF16] {
        // The last size is filled by the driver's command for large buffers, if the tensor has whole words.
        for numel in [1usize, 3, 7, 257, 70001] {
            let x = Tensor::from_wgpu_buffer(&buffer, 256, [numel], dtype, &shared)?;
            let ones = Tensor::ones([numel], dtype, &shared)?;
            let mask = Tensor::ones([numel], DType::Bool, &shared)?;
            let operations: [(&str, &dyn Fn() -> forebay::error::Result<()>); 7] = [
                ("fill_", &|| x.fill_(1.0)),
                ("zero_", &|| x.zero_()),
                ("copy_", &|| x.copy_(&ones)),
                ("cast", &|| x.copy_(&ones.to_dtype(DType::F32)?)),
                ("random_", &|| x.random_(0, 2)),
                ("masked_fill_", &|| x.masked_fill_(&mask, 1.0)),
                ("narrow", &|| x.narrow(0, numel - 1, 1)?.fill_(1.0)),
            ];
            for (name, run) in operations {
                program.queue.write_buffer(&buffer, 0, &vec![0xab; 1 << 18]);
                program.queue.submit([]);
                run().with_context(|| format!("{name} of {numel} {dtype}"))?;
                shared.flush()?;
                let bytes = program.read(&buffer, 0, 1 << 18)?;
                let (before, rest) = bytes.split_at(256);
                let after = &rest[numel * dtype.size()..];
                let is_kept = before.iter().chain(after).all(|&byte| byte == 0xab);
                ensure!(is_kept, "{name} of {numel} {dtype} changed the program's bytes: {:?}", &after[..8]);
            }
        }
    }
    Ok(())
}

/// wgpu refuses all commands of a submission, and the error says so.
fn a_mapped_buffer_fails_its_submission(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let descriptor =
        wgpu::BufferDescriptor { label: None, size: 64, usage: TENSOR_USAGES, mapped_at_creation: true };
    let buffer = program.device.create_buffer(&descriptor);
    let x = Tensor::from_wgpu_buffer(&buffer, 0, [16], DType::F32, &shared)?;
    let error = x
        .add(1.0)
        .and_then(|y| y.to_vec::<f32>())
        .err()
        .context("the tensor of a mapped buffer was read")?
        .to_string();
    ensure!(error.contains("mapped") && error.contains("have not run either"), "{error}");
    buffer.unmap();
    x.fill_(2.0)?;
    ensure!(x.add(1.0)?.to_vec::<f32>()? == [3.0; 16], "after the buffer was unmapped");
    Ok(())
}

fn a_tensors_memory_serves_the_programs_commands(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let x = Tensor::new([1.0, 2.0, 3.0, 4.0], &shared)?;
    let y = x.add(&x)?.exp()?;
    {
        let slice = y.wgpu_slice()?;
        ensure!(slice.size() == 16 && slice.offset().is_multiple_of(256), "{slice:?}");
        ensure!(slice.buffer().usage().contains(BufferUsages::VERTEX | BufferUsages::INDEX), "no vertices");
        let seen = program.read(slice.buffer(), slice.offset(), slice.size())?;
        ensure!(seen == y.to_bytes()?, "another content");
    }
    {
        let slice = x.wgpu_slice_mut()?;
        program.queue.write_buffer(slice.buffer(), slice.offset(), &to_bytes(&[9.0]));
        program.queue.submit([]);
    }
    ensure!(x.to_vec::<f32>()? == [9.0, 2.0, 3.0, 4.0], "the program's write");
    // Memory that is pinned serves no other tensor.
    let pinned = Tensor::full([64], 5.0, DType::F32, &shared)?.wgpu_slice()?;
    for _ in 0..8 {
        drop(Tensor::zeros([64], DType::F32, &shared)?);
    }
    let seen = program.read(pinned.buffer(), pinned.offset(), 256)?;
    ensure!(seen == to_bytes(&[5.0; 64]), "pinned memory was reused");
    Ok(())
}

/// A write that invalidates a saved tensor is an error of the backward pass, as for in-place operations.
fn the_backward_pass_notices_the_programs_writes(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(256, TENSOR_USAGES);
    let over = Tensor::from_wgpu_buffer(&buffer, 0, [4], DType::F32, &shared)?;
    for x in [over, Tensor::ones([4], DType::F32, &shared)?] {
        let leaf = x.to_leaf()?;
        ensure!(leaf.wgpu_slice()?.range() == x.wgpu_slice()?.range(), "the leaf is a copy");
        let refused = |loss: &Tensor| -> Result<()> {
            let error = loss.backward().err().context("the write was not detected")?.to_string();
            ensure!(error.contains("changed in place"), "{error}");
            Ok(())
        };
        let before = leaf.square()?.sum_all()?;
        let slice = x.wgpu_slice_mut()?;
        let during = leaf.square()?.sum_all()?;
        program.queue.write_buffer(slice.buffer(), slice.offset(), &to_bytes(&[2.0; 4]));
        program.queue.submit([]);
        drop(slice);
        refused(&before)?;
        refused(&during)?;
        let after = leaf.square()?.sum_all()?;
        drop(x.wgpu_slice()?);
        after.backward()?;
        ensure!(leaf.grad().context("a gradient")?.to_vec::<f32>()? == [4.0; 4], "a read is no write");
    }
    Ok(())
}

/// The program's writes to its buffer have no version, so a 16-bit copy of the weight would be stale after them.
fn weights_in_the_programs_memory_are_cast_each_time(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(64, TENSOR_USAGES);
    program.queue.write_buffer(&buffer, 0, &to_bytes(&[1.0; 16]));
    let w = Tensor::from_wgpu_buffer(&buffer, 0, [4, 4], DType::F32, &shared)?.to_leaf()?;
    let x = Tensor::ones([4, 4], DType::F32, &shared)?;
    let forward = || {
        let _autocast = autocast(DType::BF16)?;
        x.matmul(&w)?.to_dtype(DType::F32)
    };
    let mut optimizer = Sgd::new(vec![w.clone()], 0.0);
    for _ in 0..3 {
        forward()?.sum_all()?.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    shared.flush()?;
    program.queue.write_buffer(&buffer, 0, &to_bytes(&[2.0; 16]));
    program.queue.submit([]);
    let seen = forward()?.to_vec::<f32>()?;
    ensure!(seen == [8.0; 16], "the program's weights give {seen:?}");
    Ok(())
}

/// wgpu takes bindings and copies of whole words.
fn slices_of_any_size_are_bindings(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let entry = wgpu::BindGroupLayoutEntry {
        binding: 0,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only: true },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    };
    let layout = program
        .device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &[entry] });
    for (numel, dtype) in
        [(1, DType::U8), (3, DType::U8), (5, DType::Bool), (3, DType::BF16), (4, DType::F32)]
    {
        let x = Tensor::ones([numel], dtype, &shared)?;
        let slice = x.wgpu_slice()?;
        ensure!(slice.size() == (numel * dtype.size()) as u64, "{slice:?}");
        let scope = program.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let entries = [wgpu::BindGroupEntry { binding: 0, resource: slice.as_binding() }];
        let descriptor = wgpu::BindGroupDescriptor { label: None, layout: &layout, entries: &entries };
        drop(program.device.create_bind_group(&descriptor));
        let error = block_on(scope.pop());
        ensure!(error.is_none(), "{numel} of {dtype}: {error:?}");
    }
    Ok(())
}

fn textures_become_tensors_and_tensors_textures(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let texture = |width, format, usage| {
        program.device.create_texture(&wgpu::TextureDescriptor {
            label: None,
            size: wgpu::Extent3d { width, height: 3, depth_or_array_layers: 1 },
            mip_level_count: 1,
            sample_count: 1,
            dimension: wgpu::TextureDimension::D2,
            format,
            usage,
            view_formats: &[],
        })
    };
    let both = TextureUsages::COPY_SRC | TextureUsages::COPY_DST;
    for (width, format, channels, dtype) in [
        (5, TextureFormat::Rgba8Unorm, 4, DType::U8),
        (64, TextureFormat::Rgba8UnormSrgb, 4, DType::U8),
        (7, TextureFormat::R32Float, 1, DType::F32),
        (16, TextureFormat::Rgba32Float, 4, DType::F32),
    ] {
        let image = texture(width, format, both);
        let values = Tensor::arange(0.0, f64::from(3 * width) * channels as f64, 1.0, DType::F32, &shared)?;
        let x = values.to_dtype(dtype)?.reshape([3, width as isize, channels])?;
        x.copy_to_wgpu_texture(&image)?;
        let back = Tensor::from_wgpu_texture(&image, &shared)?;
        ensure!(back.shape() == x.shape() && back.to_bytes()? == x.to_bytes()?, "{format:?}");
    }
    let depth = texture(4, TextureFormat::Depth32Float, both);
    ensure!(Tensor::from_wgpu_texture(&depth, &shared).is_err(), "a depth texture");
    let sealed = texture(4, TextureFormat::R32Float, TextureUsages::COPY_DST);
    let error = Tensor::from_wgpu_texture(&sealed, &shared).unwrap_err().to_string();
    ensure!(error.contains("COPY_SRC"), "{error}");
    let wrong = Tensor::zeros([3, 4], DType::F32, &shared)?.copy_to_wgpu_texture(&sealed);
    ensure!(wrong.unwrap_err().to_string().contains("[3, 4, 1]"), "another shape");
    Ok(())
}

fn bools_that_the_program_writes_are_zero_or_one(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(256, TENSOR_USAGES);
    program.queue.write_buffer(&buffer, 0, &[0, 2, 255, 1, 0, 128, 9, 9]);
    program.queue.submit([]);
    let mask = Tensor::from_wgpu_buffer(&buffer, 0, [6], DType::Bool, &shared)?;
    ensure_bools(&mask, &[false, true, true, true, false, true])?;
    shared.flush()?;
    ensure!(program.read(&buffer, 0, 8)? == [0, 1, 1, 1, 0, 1, 9, 9], "the bytes of the buffer");
    let own = Tensor::from_bools(&[false; 6], [6], &shared)?;
    for (k, mask) in [mask, own].into_iter().enumerate() {
        let slice = mask.wgpu_slice_mut()?;
        program.queue.write_buffer(slice.buffer(), slice.offset(), &[7, 0, 0, 255]);
        program.queue.submit([]);
        drop(slice);
        let last = k == 0;
        ensure_bools(&mask, &[true, false, false, true, false, last])?;
        // A callback may drop the slice: the device's own thread normalises the bytes.
        let slice = mask.wgpu_slice_mut()?;
        program.queue.write_buffer(slice.buffer(), slice.offset(), &[0, 16, 0, 0]);
        program.queue.submit([]);
        program.queue.on_submitted_work_done(move || drop(slice));
        shared.synchronize()?;
        block_on(shared.synchronize_async())?;
        ensure_bools(&mask, &[false, true, false, false, false, last])?;
    }
    Ok(())
}
