//! Devices that a program opened with wgpu itself, its callbacks and its memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use forebay::backend::SourceError;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::nn::{Linear, Module};
use forebay::optim::{Optimizer, Sgd};
use forebay::tensor::Tensor;
use forebay::wgpu::{self, BufferUsages};
use forebay::{WgpuDeviceExt, WgpuTensorExt, request_wgpu_device, wgpu_device_descriptor};

use super::asynchronous::block_on;
use super::{skip, tests};

tests![
    a_device_is_registered_once_and_lives_as_long_as_its_tensors,
    the_programs_error_callback_sees_the_programs_errors_alone,
    callbacks_that_panic_do_not_end_the_device,
    callbacks_may_drop_tensors_and_the_device,
    callbacks_that_use_the_device_get_errors,
    a_lost_device_is_an_error_of_reads_and_no_error_of_the_program,
    a_queue_of_another_device_is_refused,
    a_program_keeps_its_callbacks_and_gets_its_memory_back,
    limits_below_the_minimum_are_refused,
    training_on_webgpus_minimum_equals_training_on_an_own_device,
    a_requested_device_has_the_abilities_of_an_own_device,
    a_requested_device_keeps_the_programs_description,
];

/// Device that a program opened for itself.
pub(super) struct Program {
    pub(super) adapter: wgpu::Adapter,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
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
    pub(super) fn on(device: &Device) -> Result<Self> {
        if device.info().backend != "wgpu" {
            return skip("it is not a wgpu device");
        }
        Self::open(Some(&device.info().name), wgpu::Limits::default())
    }

    pub(super) fn share(&self) -> Result<Device> {
        Ok(Device::from_wgpu(&self.adapter, &self.device, &self.queue)?)
    }

    pub(super) fn buffer(&self, bytes: u64, usage: BufferUsages) -> wgpu::Buffer {
        let descriptor =
            wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false };
        self.device.create_buffer(&descriptor)
    }

    /// Reads a range of a buffer with the program's own commands.
    pub(super) fn read(&self, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let staging = self.buffer(bytes, BufferUsages::MAP_READ | BufferUsages::COPY_DST);
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, bytes);
        self.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |result| result.expect("the staging buffer maps"));
        self.device.poll(wgpu::PollType::wait_indefinitely())?;
        Ok(staging.get_mapped_range(..)?.to_vec())
    }
}

pub(super) const TENSOR_USAGES: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// Opens the first adapter with WebGPU's minimum limits and without features, as a device of the program.
pub fn open_minimum() -> Result<Device> {
    Program::open(None, wgpu::Limits::default())?.share()
}

pub(super) fn to_bytes(values: &[f32]) -> Vec<u8> {
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
    ensure!(x.sum_all()?.item()? == f64::from(1 << 20), "the device was freed before its tensor");
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

/// Locks are held while callbacks run, so calls that take them would never return.
fn callbacks_that_use_the_device_get_errors(device: &Device) -> Result<()> {
    type Call = fn(&Tensor) -> CoreResult<()>;
    let calls: [(&str, Call); 11] = [
        ("a read", |x| x.to_vec::<f32>().map(drop)),
        ("an item", |x| x.narrow(0, 0, 1)?.item().map(drop)),
        ("a read as a future", |x| block_on(x.to_vec_async::<f32>()).map(drop)),
        ("an elementwise operation", |x| x.add(1.0).map(drop)),
        ("an operation in place", |x| x.add_(1.0)),
        ("a reduction", |x| x.sum_all().map(drop)),
        ("a new tensor", |x| Tensor::from_slice(&[1f32], [1], x.device()).map(drop)),
        ("a slice", |x| x.wgpu_slice().map(drop)),
        ("a wait", |x| x.device().synchronize()),
        ("a fence", |x| x.device().fence().map(drop)),
        ("a capture", |x| x.device().capture(|| x.mul(2.0)).map(drop)),
    ];
    let program = Program::on(device)?;
    let shared = program.share()?;
    let x = Tensor::ones([64], DType::F32, &shared)?;
    for (name, call) in calls {
        let answer = Arc::new(Mutex::new(None));
        let (sent, kept) = (Arc::clone(&answer), x.clone());
        program.queue.submit([]);
        program.queue.on_submitted_work_done(move || {
            *sent.lock().expect("no test panics here") = Some(call(&kept).err().map(|e| e.to_string()));
        });
        // A submission under the locks runs the callback.
        while answer.lock().expect("no test panics here").is_none() {
            x.copy()?;
            shared.flush()?;
        }
        let answer = answer.lock().expect("no test panics here").take().flatten();
        let text = answer.with_context(|| format!("{name} in a callback"))?;
        ensure!(text.contains("a callback of the driver") && text.contains("a later call"), "{name}: {text}");
    }
    ensure!(x.to_vec::<f32>()? == [1.0; 64], "the device goes on");
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
        let error = made.err().context("the queue of another device was accepted")?.to_string();
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
    let refuse = |limits: wgpu::Limits, expected: &[&str]| -> Result<()> {
        let program = Program::open(Some(&device.info().name), limits)?;
        let error = program.share().err().with_context(|| format!("{expected:?} were accepted"))?.to_string();
        for text in expected.iter().chain(&["Limits::default()", "wgpu_device_descriptor"]) {
            ensure!(error.contains(text), "{text}: {error}");
        }
        Ok(())
    };
    macro_rules! refuse_each {
        ($($limit:ident: $value:expr, $needed:literal;)*) => {$(
            let limits = wgpu::Limits { $limit: $value, ..wgpu::Limits::default() };
            let name = format!("`{}` is {}, and {} is needed", stringify!($limit), $value, $needed);
            refuse(limits, &[&name])?;
        )*};
    }
    refuse_each! {
        max_bind_groups: 1, 2;
        max_bindings_per_bind_group: 7, 8;
        max_storage_buffers_per_shader_stage: 7, 8;
        max_uniform_buffers_per_shader_stage: 0, 1;
        max_dynamic_uniform_buffers_per_pipeline_layout: 0, 1;
        max_buffers_and_acceleration_structures_per_shader_stage: 8, 9;
        max_uniform_buffer_binding_size: 2048, 4096;
        max_compute_workgroup_size_x: 128, 256;
        max_compute_workgroup_size_y: 0, 1;
        max_compute_workgroup_size_z: 0, 1;
        max_compute_invocations_per_workgroup: 255, 256;
        max_compute_workgroup_storage_size: 8192, 16384;
        max_compute_workgroups_per_dimension: 0, 65535;
        max_buffer_size: 1 << 20, 16777216;
        max_storage_buffer_binding_size: 1 << 20, 16777216;
    }
    let names = ["`max_storage_buffers_per_shader_stage` is 4", "; `max_compute_workgroup_storage_size`"];
    let limits = wgpu::Limits { max_compute_workgroup_storage_size: 0, ..wgpu::Limits::downlevel_defaults() };
    refuse(limits, &names)
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
