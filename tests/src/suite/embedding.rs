//! Devices, buffers and textures of a program that uses wgpu itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::backend::SourceError;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::memory::Tag;
use forebay::nn::{Linear, Module};
use forebay::optim::{Optimizer, Sgd};
use forebay::tensor::Tensor;
use forebay::wgpu::{self, BufferUsages, TextureFormat, TextureUsages};
use forebay::{WgpuDeviceExt, WgpuTensorExt, request_wgpu_device, wgpu_device_descriptor};

use super::asynchronous::block_on;
use super::{skip, tests};

tests![
    a_device_is_registered_once_and_lives_as_long_as_its_tensors,
    the_programs_error_callback_sees_the_programs_errors_alone,
    callbacks_that_panic_do_not_end_the_device,
    callbacks_may_drop_tensors_and_the_device,
    a_lost_device_is_an_error_of_reads_and_no_error_of_the_program,
    a_queue_of_another_device_is_refused,
    a_program_keeps_its_callbacks_and_gets_its_memory_back,
    limits_below_the_minimum_are_refused,
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
    training_on_webgpus_minimum_equals_training_on_an_own_device,
    a_requested_device_has_the_abilities_of_an_own_device,
    a_requested_device_keeps_the_programs_description,
];

/// Device that a program opened for itself.
struct Program {
    adapter: wgpu::Adapter,
    device: wgpu::Device,
    queue: wgpu::Queue,
}

impl Program {
    /// Opens the adapter of this name, or the first one, with WebGPU's minimum.
    fn open(name: Option<&str>, limits: wgpu::Limits) -> Result<Self> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
        let adapters = block_on(instance.enumerate_adapters(backends));
        let mut adapters = adapters.into_iter();
        let adapter = adapters.find(|a| name.is_none_or(|name| a.get_info().name == name));
        let adapter = adapter.context("no adapter")?;
        let descriptor =
            wgpu::DeviceDescriptor { required_limits: limits, ..wgpu::DeviceDescriptor::default() };
        let (device, queue) = block_on(adapter.request_device(&descriptor))?;
        Ok(Self { adapter, device, queue })
    }

    /// Opens the adapter of a device of the suite.
    fn on(device: &Device) -> Result<Self> {
        if device.info().backend != "wgpu" {
            return skip("it is not a wgpu device");
        }
        Self::open(Some(&device.info().name), wgpu::Limits::default())
    }

    fn share(&self) -> Result<Device> {
        Ok(Device::from_wgpu(&self.adapter, &self.device, &self.queue)?)
    }

    fn buffer(&self, bytes: u64, usage: BufferUsages) -> wgpu::Buffer {
        let descriptor =
            wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false };
        self.device.create_buffer(&descriptor)
    }

    /// Reads a range of a buffer with the program's own commands.
    fn read(&self, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let staging = self.buffer(bytes, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, bytes);
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |result| result.expect("the staging buffer maps"));
        self.device.poll(wgpu::PollType::wait_indefinitely())?;
        Ok(staging.get_mapped_range(..)?.to_vec())
    }
}

const TENSOR_USAGES: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// Opens the first adapter with WebGPU's minimum limits and without features, as a device of the program.
pub fn open_minimum() -> Result<Device> {
    Program::open(None, wgpu::Limits::default())?.share()
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn a_device_is_registered_once_and_lives_as_long_as_its_tensors(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let own = || -> Result<u64> {
        program.device.poll(wgpu::PollType::wait_indefinitely())?;
        let report = program.device.generate_allocator_report().context("no report")?;
        Ok(report.allocations.iter().filter(|a| a.name.contains("forebay segment")).count() as u64)
    };
    let first = program.share()?;
    ensure!(first == program.share()?, "two devices for one");
    let other = Program::on(device)?;
    ensure!(first != other.share()?, "another device of the program is the same device");
    let (back, _) = first.to_wgpu()?;
    ensure!(back == program.device, "another device");
    ensure!(!first.info().features.f16, "a feature that the device lacks");
    let x = Tensor::ones([1 << 20], DType::F32, &first)?;
    drop(first);
    ensure!(x.sum_all()?.item()? == f64::from(1 << 20), "the handle is gone, the tensor is not");
    ensure!(own()? > 0, "the tensor has no memory");
    drop(x);
    ensure!(own()? == 0, "memory is left");
    // The program's objects go on, and a new registration works.
    let again = program.share()?;
    ensure!(Tensor::ones([3], DType::F32, &again)?.to_vec::<f32>()? == [1.0; 3], "registered again");
    Ok(())
}

fn the_programs_error_callback_sees_the_programs_errors_alone(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    program.device.on_uncaptured_error(Arc::new(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    }));
    let shared = program.share()?;
    let x = Tensor::ones([8], DType::F32, &shared)?;
    // An error of the program: a buffer that is mapped in both directions.
    drop(program.buffer(16, BufferUsages::MAP_READ | BufferUsages::MAP_WRITE | BufferUsages::STORAGE));
    ensure!(seen.load(Ordering::SeqCst) == 1, "the callback was replaced");
    ensure!(x.add(&x)?.to_vec::<f32>()? == [2.0; 8], "the program's error reached an operation");
    // An error of ours: a buffer that the program destroys while a tensor uses it.
    let buffer = program.buffer(64, TENSOR_USAGES);
    let y = Tensor::from_wgpu_buffer(&buffer, 0, [16], DType::F32, &shared)?;
    buffer.destroy();
    let failed = y.add(&y).and_then(|sum| sum.to_vec::<f32>());
    ensure!(failed.is_err(), "a destroyed buffer was read");
    drop(y);
    ensure!(seen.load(Ordering::SeqCst) == 1, "an error of ours reached the program's callback");
    ensure!(x.mul(3.0)?.to_vec::<f32>()? == [3.0; 8], "the device is unusable after an error");
    Ok(())
}

/// Trains, reads and shares memory on a device of the program, whose callbacks and memory stay the program's.
fn a_program_keeps_its_callbacks_and_gets_its_memory_back(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let count = || Arc::new(AtomicUsize::new(0));
    let (errors, losses, passed) = (count(), count(), count());
    let counts = |counter: &Arc<AtomicUsize>| {
        let counter = Arc::clone(counter);
        move || {
            counter.fetch_add(1, Ordering::SeqCst);
        }
    };
    let (error, lost) = (counts(&errors), counts(&losses));
    program.device.on_uncaptured_error(Arc::new(move |_| error()));
    program.device.set_device_lost_callback(move |_, _| lost());
    let used = || -> Result<u64> {
        program.device.poll(wgpu::PollType::wait_indefinitely())?;
        let report = program.device.generate_allocator_report().context("no report")?;
        Ok(report.total_allocated_bytes)
    };
    let buffer = program.buffer(1024, TENSOR_USAGES);
    let before = used()?;
    // Scopes of the program lie around Forebay's calls.
    let scope = |filter| program.device.push_error_scope(filter);
    // Dropped in the reverse order, which wgpu requires.
    let internal = scope(wgpu::ErrorFilter::Internal);
    let full = scope(wgpu::ErrorFilter::OutOfMemory);
    let invalid = scope(wgpu::ErrorFilter::Validation);
    let shared = program.share()?;
    let net = Linear::new(4, 3, &shared)?;
    let mut optimizer = Sgd::new(net.parameters(), 0.1);
    let x = Tensor::from_wgpu_buffer(&buffer, 0, [64, 4], DType::F32, &shared)?;
    for step in 0..4 {
        let slice = x.wgpu_slice_mut()?;
        program.queue.write_buffer(slice.buffer(), slice.offset(), &to_bytes(&[step as f32; 256]));
        program.queue.submit([]);
        program.queue.on_submitted_work_done(counts(&passed));
        drop(slice);
        let loss = net.forward(&x)?.square()?.mean((), false)?;
        loss.backward()?;
        optimizer.step()?;
        optimizer.zero_grad();
        ensure!(block_on(loss.item_async())?.is_finite(), "step {step}");
    }
    // An upload of several staging buffers, an operation that fails, and one that the program's limits refuse.
    let large = Tensor::from_slice(&vec![1.0f32; 6 << 20], [6 << 20], &shared)?;
    ensure!(large.sum_all()?.item()? == f64::from(6 << 20), "the upload");
    ensure!(large.matmul(&x).is_err(), "the shapes fit");
    ensure!(Tensor::zeros([1 << 30], DType::F32, &shared).is_err(), "the limits hold four gigabytes");
    for scope in [invalid, full, internal] {
        let seen = block_on(scope.pop());
        ensure!(seen.is_none(), "the program's scope caught {seen:?}");
    }
    ensure!(used()? > before, "tensors take no memory");
    drop((net, optimizer, x, large, shared));
    ensure!(passed.load(Ordering::SeqCst) == 4, "callbacks of finished work");
    let after = used()?;
    ensure!(after <= before, "{after} bytes instead of {before}");
    // The program's own error, and the end of the device, reach the program.
    ensure!(errors.load(Ordering::SeqCst) == 0, "an error of ours reached the program");
    drop(program.buffer(16, BufferUsages::MAP_READ | BufferUsages::MAP_WRITE | BufferUsages::STORAGE));
    ensure!(errors.load(Ordering::SeqCst) == 1, "the program's error was lost");
    ensure!(losses.load(Ordering::SeqCst) == 0, "the device was lost");
    program.device.destroy();
    program.device.poll(wgpu::PollType::wait_indefinitely())?;
    ensure!(losses.load(Ordering::SeqCst) == 1, "the end of the device was not reported");
    Ok(())
}

/// Callbacks of the program run inside of Forebay's submissions and waits.
fn callbacks_that_panic_do_not_end_the_device(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let called = Arc::new(AtomicUsize::new(0));
    let panics = |called: &Arc<AtomicUsize>| {
        let called = Arc::clone(called);
        move || {
            called.fetch_add(1, Ordering::SeqCst);
            panic!("a callback of the program panics, as the test wants");
        }
    };
    // Panics of the program's own calls are the program's.
    let survive = |call: &dyn Fn()| drop(catch_unwind(AssertUnwindSafe(call)));
    let register = || {
        survive(&|| {
            program.queue.submit([]);
        });
        survive(&|| program.queue.on_submitted_work_done(panics(&called)));
        let staging = program.buffer(16, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        let (mapped, kept) = (panics(&called), staging.clone());
        staging.map_async(wgpu::MapMode::Read, .., move |_| {
            // If the buffer were dropped before its map, the drop would run the callback.
            drop(kept);
            mapped();
        });
    };
    // The uploads need the staging buffers again and again.
    let large = vec![1.0f32; 12 << 20];
    let mut x = Tensor::zeros([4], DType::F32, &shared)?;
    for round in 1..=4 {
        x = x.add(1.0)?;
        let fence = shared.fence()?;
        register();
        let values = block_on(x.to_vec_async::<f32>())?;
        ensure!(values == [round as f32; 4], "round {round}: {values:?}");
        ensure!(fence.is_ready()?, "round {round}: a fence is lost");
        register();
        let uploaded = Tensor::from_slice(&large, [large.len()], &shared)?;
        register();
        ensure!(uploaded.sum_all()?.item()? == large.len() as f64, "round {round}: an upload");
        register();
        shared.synchronize()?;
        // The program's own poll passes the panic on, and drops Forebay's callbacks.
        let read = x.to_vec_async::<f32>();
        register();
        survive(&|| drop(program.device.poll(wgpu::PollType::wait_indefinitely())));
        ensure!(block_on(read)? == values, "round {round}: a read during the program's poll");
    }
    ensure!(called.load(Ordering::SeqCst) > 4, "the callbacks did not run");
    // Callbacks that are left would run, and panic, when the program drops its queue.
    for _ in 0..4 {
        survive(&|| drop(program.device.poll(wgpu::PollType::wait_indefinitely())));
    }
    // A device that is really lost is an error, although the callback panics.
    program.device.set_device_lost_callback(|_, _| panic!("the callback of a lost device panics"));
    survive(&|| program.device.destroy());
    ensure!(x.add(1.0).and_then(|y| y.to_vec::<f32>()).is_err(), "a lost device computes");
    Ok(())
}

/// Callbacks of the program run while Forebay's locks are held, which freeing memory takes.
fn callbacks_may_drop_tensors_and_the_device(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let shared = program.share()?;
    let buffer = program.buffer(256, TENSOR_USAGES);
    let x = Tensor::ones([64], DType::F32, &shared)?;
    let dropped = Arc::new(AtomicUsize::new(0));
    let before = shared.memory().allocated();
    for round in 0..20 {
        // Memory of the pool, memory of the program, a slice, and a pending elementwise operation.
        let tensors = [
            Tensor::zeros([1 << 20], DType::F32, &shared)?,
            Tensor::from_wgpu_buffer(&buffer, 0, [64], DType::F32, &shared)?,
            x.add(f64::from(round))?,
        ];
        let slice = x.exp()?.wgpu_slice()?;
        let counter = Arc::clone(&dropped);
        program.queue.submit([]);
        program.queue.on_submitted_work_done(move || {
            drop((tensors, slice));
            counter.fetch_add(1, Ordering::SeqCst);
        });
        // A submission, an allocation and a read run the callbacks.
        shared.flush()?;
        drop(Tensor::zeros([4 << 20], DType::F32, &shared)?);
        ensure!(x.add(1.0)?.to_vec::<f32>()? == [2.0; 64], "round {round}");
        program.device.poll(wgpu::PollType::wait_indefinitely())?;
        // The device's thread releases the range of the buffer.
        block_on(shared.synchronize_async())?;
    }
    ensure!(dropped.load(Ordering::SeqCst) == 20, "the callbacks did not run");
    ensure!(shared.memory().allocated() == before, "{}", shared.memory());
    // A callback drops the last handle, during a wait of the device's own thread.
    let read = x.add(&x)?.to_vec_async::<f32>();
    program.queue.submit([]);
    program.queue.on_submitted_work_done(move || drop((x, shared)));
    ensure!(block_on(read)? == [2.0; 64], "a read outlives its device");
    program.device.poll(wgpu::PollType::wait_indefinitely())?;
    Ok(())
}

/// Errors that wgpu reports for lost buffers of Forebay are no errors of the program.
fn a_lost_device_is_an_error_of_reads_and_no_error_of_the_program(device: &Device) -> Result<()> {
    let program = Program::on(device)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let errors = Arc::clone(&seen);
    program.device.on_uncaptured_error(Arc::new(move |error| {
        errors.lock().expect("no test panics here").push(error.to_string());
    }));
    let shared = program.share()?;
    let x = Tensor::ones([64], DType::F32, &shared)?;
    ensure!(x.add(1.0)?.to_vec::<f32>()? == [2.0; 64], "before the loss");
    let (pending, staged) = (x.exp()?.to_vec_async::<f32>(), Tensor::new([1.0, 2.0], &shared)?);
    program.device.destroy();
    let _ = block_on(pending);
    let reads = [
        x.mul(3.0).and_then(|y| y.to_vec::<f32>()),
        block_on(x.to_vec_async::<f32>()),
        staged.to_vec::<f32>(),
        Tensor::from_slice(&[1.0f32; 3], [3], &shared).and_then(|y| y.to_vec::<f32>()),
    ];
    for read in reads {
        let error = read.err().context("a lost device was read")?;
        ensure!(matches!(error, Error::Driver(SourceError::DeviceLost(_))), "{error}");
    }
    drop((x, staged, shared));
    let seen = seen.lock().expect("no test panics here");
    ensure!(seen.is_empty(), "the program's callback got {seen:?}");
    Ok(())
}

/// wgpu reports a submission to the wrong queue to that queue's device, and reads would return zeros.
fn a_queue_of_another_device_is_refused(device: &Device) -> Result<()> {
    if cfg!(target_vendor = "apple") {
        return skip("Metal does not tell whose a queue is");
    }
    let (program, other) = (Program::on(device)?, Program::on(device)?);
    let refused = || -> Result<()> {
        let made = Device::from_wgpu(&program.adapter, &program.device, &other.queue);
        let error = made.err().context("the queue was taken")?.to_string();
        ensure!(error.contains("another device's"), "{error}");
        Ok(())
    };
    refused()?;
    // A registered device is no exception.
    let shared = program.share()?;
    refused()?;
    drop(shared);
    Ok(())
}

fn limits_below_the_minimum_are_refused(device: &Device) -> Result<()> {
    Program::on(device)?;
    let program = Program::open(Some(&device.info().name), wgpu::Limits::downlevel_defaults())?;
    let error = program.share().unwrap_err().to_string();
    ensure!(error.contains("storage buffers") && error.contains("Limits::default()"), "{error}");
    Ok(())
}

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
    ensure!(program.read(&buffer, 512, 64)? == to_bytes(&doubled), "the buffer after its tensors");
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
        let error = made.err().context("the buffer was taken")?.to_string();
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
    let error = x.add(1.0).and_then(|y| y.to_vec::<f32>()).err().context("it was read")?.to_string();
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
            let error = loss.backward().err().context("the write went unnoticed")?.to_string();
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

/// Trains a small network from a fixed seed, and returns the losses.
fn train(device: &Device) -> Result<Vec<f64>> {
    device.manual_seed(3);
    let (first, second) = (Linear::new(20, 32, device)?, Linear::new(32, 4, device)?);
    let mut optimizer = Sgd::new([first.parameters(), second.parameters()].concat(), 0.1);
    let x = Tensor::randn([64, 20], DType::F32, device)?;
    let y = Tensor::from_slice(&(0..64).map(|i| i % 4).collect::<Vec<i64>>(), [64], device)?;
    (0..5)
        .map(|_| {
            let loss = second.forward(&first.forward(&x)?.relu()?)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss.item()?)
        })
        .collect()
}

fn training_on_webgpus_minimum_equals_training_on_an_own_device(device: &Device) -> Result<()> {
    let shared = Program::on(device)?.share()?;
    let limits = shared.info().limits;
    ensure!(limits.max_bindings == 8 && limits.max_binding_bytes == 128 << 20, "{limits:?}");
    let (minimum, own) = (train(&shared)?, train(device)?);
    for (a, b) in minimum.iter().zip(&own) {
        ensure!((a - b).abs() <= 1e-5 * b.abs(), "{minimum:?} and {own:?}");
    }
    Ok(())
}

/// Kernels depend on the features, the limits and the paths. The description for wgpu's own request lacks the matrix
/// units alone.
fn a_requested_device_has_the_abilities_of_an_own_device(device: &Device) -> Result<()> {
    let adapter = Program::on(device)?.adapter;
    let own = device.info();
    let descriptor = wgpu::DeviceDescriptor::default();
    let (opened, queue) = block_on(request_wgpu_device(&adapter, &descriptor))?;
    let shared = Device::from_wgpu(&adapter, &opened, &queue)?;
    let info = shared.info();
    ensure!(info.features == own.features, "{:?} and {:?}", info.features, own.features);
    ensure!(info.limits == own.limits, "{:?} and {:?}", info.limits, own.limits);
    ensure!(info.paths == own.paths, "{:?} and {:?}", info.paths, own.paths);
    ensure!(train(&shared)? == train(device)?, "the losses differ");

    let descriptor = wgpu_device_descriptor(&adapter);
    let experimental = descriptor.required_features & wgpu::Features::all_experimental_mask();
    ensure!(experimental.is_empty(), "a request needs consent for {experimental:?}");
    let (opened, queue) = block_on(adapter.request_device(&descriptor))?;
    let shared = Device::from_wgpu(&adapter, &opened, &queue)?;
    let mut features = own.features;
    (features.cooperative_f16, features.cooperative_bf16, features.cooperative_side) = (false, false, 0);
    ensure!(shared.info().features == features, "{:?} and {features:?}", shared.info().features);
    ensure!(shared.info().limits == own.limits, "{:?} and {:?}", shared.info().limits, own.limits);
    Ok(())
}

fn a_requested_device_keeps_the_programs_description(device: &Device) -> Result<()> {
    let adapter = Program::on(device)?.adapter;
    let request =
        |descriptor: &wgpu::DeviceDescriptor<'_>| block_on(request_wgpu_device(&adapter, descriptor));
    let known = wgpu_device_descriptor(&adapter).required_features;
    let optional = adapter.features() - known - wgpu::Features::all_experimental_mask();
    let Some(feature) = optional.iter().next() else {
        return skip("the adapter has no feature that kernels do not use");
    };
    let required_limits = wgpu::Limits { max_color_attachments: 4, ..wgpu::Limits::default() };
    let descriptor =
        wgpu::DeviceDescriptor { required_features: feature, required_limits, ..Default::default() };
    let (opened, _) = request(&descriptor)?;
    ensure!(opened.features().contains(known | feature), "{:?} lack {feature:?}", opened.features());
    ensure!(opened.limits().max_color_attachments >= 4, "{:?}", opened.limits());

    let required_features = wgpu::Features::EXPERIMENTAL_RAY_QUERY;
    let error = request(&wgpu::DeviceDescriptor { required_features, ..Default::default() }).err();
    let error = error.context("an experimental feature needs no consent")?.to_string();
    ensure!(error.contains("EXPERIMENTAL_RAY_QUERY") && error.contains("experimental_features"), "{error}");
    let required_limits = wgpu::Limits { max_texture_dimension_2d: u32::MAX, ..wgpu::Limits::default() };
    let error = request(&wgpu::DeviceDescriptor { required_limits, ..Default::default() }).err();
    let error = error.context("the adapter has textures of any size")?.to_string();
    ensure!(
        error.contains(&adapter.get_info().name) && error.contains("max_texture_dimension_2d"),
        "{error}"
    );
    Ok(())
}
