//! Reads and waits without blocking, and operations without reads.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::{self, Thread};

use anyhow::{Context, Result, ensure};
use forebay::OpenDevice;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::Config;
use forebay::nn::{Linear, Module};
use forebay::optim::{AdamW, Optimizer, clip_grad_norm_};
use forebay::tensor::Tensor;

use super::faulty_backend::{FaultyBackend, NO_DOWNLOAD};
use super::tests;
use crate::catalog;

tests![
    futures_equal_blocking_reads,
    a_read_returns_the_values_at_its_call,
    dropped_futures_leak_nothing,
    a_fence_and_a_device_can_be_awaited,
    errors_are_returned_by_the_await,
    a_waker_that_panics_fails_no_other_task,
    only_listed_operations_read_back,
];

/// Operations that return a host value, or a tensor whose shape depends on values.
const VALUES_ON_THE_HOST: [&str; 13] = [
    "allclose",
    "argwhere",
    "bincount",
    "bincount of weights",
    "equal",
    "masked_select",
    "nonzero",
    "nonzero_tuple",
    "repeat_interleave_by",
    "unique",
    "unique_consecutive",
    "unique_consecutive_dim",
    "unique_dim",
];

/// Operations that read although the shape of their result is known: to check values, or to choose a number of steps.
const VALUES_CHECKED: [&str; 2] = ["cov of weights", "matrix_exp"];

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, which sleeps until it is woken. The call hangs if the future never wakes the thread.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Waker of a task that fails when it is woken.
struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a waker panics, as the test wants");
    }
}

fn a_waker_that_panics_fails_no_other_task(device: &Device) -> Result<()> {
    let x = Tensor::ones([100], DType::F32, device)?;
    let failing = Waker::from(Arc::new(PanickingWaker));
    for round in 0..10 {
        let mut reads: Vec<_> =
            (0..20).map(|k| x.mul(k).map(|y| Box::pin(y.to_vec_async::<f32>()))).collect::<Result<_, _>>()?;
        let mut waits: Vec<_> = (0..3).map(|_| Box::pin(device.synchronize_async())).collect();
        let context = &mut TaskContext::from_waker(&failing);
        // A read that is complete already wakes no task, and has no second result.
        let complete = [round, 2 * round, 19].map(|k| (k, reads[k].as_mut().poll(context)));
        let complete = complete.into_iter().filter(|(_, read)| read.is_ready()).collect::<BTreeMap<_, _>>();
        let is_waiting = waits[1].as_mut().poll(context).is_pending();
        // This thread polls the device, too.
        ensure!(x.add(1.0)?.to_vec::<f32>()? == [2.0; 100], "round {round}: a blocking read");
        for (k, read) in reads.into_iter().enumerate().filter(|(k, _)| !complete.contains_key(k)) {
            ensure!(block_on(read)? == [k as f32; 100], "round {round}: read {k}");
        }
        let waits = waits.into_iter().enumerate().filter(|(k, _)| *k != 1 || is_waiting);
        waits.into_iter().try_for_each(|(_, wait)| block_on(wait))?;
    }
    Ok(())
}

fn futures_equal_blocking_reads(device: &Device) -> Result<()> {
    // The second size takes several of the backends' staging buffers.
    for numel in [0, 1, 5, 3 << 20] {
        let x = Tensor::rand([numel], DType::F32, device)?;
        ensure!(block_on(x.to_vec_async::<f32>())? == x.to_vec::<f32>()?, "{numel} elements");
    }
    let x = Tensor::new([[1i64, 2], [3, 4]], device)?;
    let turned = x.t()?;
    ensure!(block_on(turned.to_vec_async::<i64>())? == [1, 3, 2, 4], "a view");
    ensure!(block_on(turned.to_f64s_async())? == [1.0, 3.0, 2.0, 4.0], "as f64");
    let bytes = Tensor::new([1u8, 2, 3, 4, 5], device)?.narrow(0, 1, 3)?;
    ensure!(block_on(bytes.to_bytes_async())? == [2, 3, 4], "bytes between words");
    ensure!(block_on(bytes.select(0, 1)?.item_async())? == 3.0, "an item");
    Ok(())
}

fn a_read_returns_the_values_at_its_call(device: &Device) -> Result<()> {
    let x = Tensor::zeros([1000], DType::F32, device)?;
    let mut reads = Vec::new();
    for _ in 0..20 {
        reads.push(x.to_vec_async::<f32>());
        x.add_(1.0)?;
    }
    // Memory that is freed at once and reused.
    drop(x);
    let _other = Tensor::full([1000], -1.0, DType::F32, device)?;
    for (k, read) in reads.into_iter().enumerate() {
        ensure!(block_on(read)? == vec![k as f32; 1000], "read {k}");
    }
    Ok(())
}

fn dropped_futures_leak_nothing(device: &Device) -> Result<()> {
    let own = Device::with_config(device.backend().clone(), Config::default());
    for _ in 0..10 {
        let x = Tensor::ones([1 << 16], DType::F32, &own)?;
        drop(x.to_vec_async::<f32>());
        drop(own.synchronize_async());
    }
    ensure!(own.memory().allocated() == 0, "{}", own.memory());
    Ok(())
}

fn a_fence_and_a_device_can_be_awaited(device: &Device) -> Result<()> {
    let x = Tensor::rand([64, 64], DType::F32, device)?;
    let y = x.matmul(&x)?.exp()?;
    let fence = device.fence()?;
    block_on(fence.clone().into_future())?;
    ensure!(fence.is_ready()?, "the fence was awaited");
    block_on(device.synchronize_async())?;
    drop(y);
    // One task awaits several.
    let both = block_on(async {
        let (a, b) = (x.sum_all()?.item_async(), x.max_all()?.item_async());
        Ok::<_, forebay::error::Error>((a.await?, b.await?))
    })?;
    ensure!(both == (x.sum_all()?.item()?, x.max_all()?.item()?), "{both:?}");
    let opened = block_on(Device::open_async("null"))?;
    ensure!(opened.is_null(), "{opened}");
    Ok(())
}

fn errors_are_returned_by_the_await(device: &Device) -> Result<()> {
    let x = Tensor::zeros([2], DType::F32, device)?;
    let wrong = block_on(x.to_vec_async::<i64>()).unwrap_err().message();
    ensure!(wrong == x.to_vec::<i64>().unwrap_err().message(), "{wrong}");
    ensure!(block_on(x.item_async()).unwrap_err().to_string().contains("one element"), "two elements");
    let missing = block_on(Device::open_async("abacus:0")).unwrap_err().to_string();
    ensure!(missing.contains("abacus"), "{missing}");
    Ok(())
}

/// Runs all operations, their gradients and training steps on a backend whose downloads fail.
fn only_listed_operations_read_back(device: &Device) -> Result<()> {
    let backend = Arc::new(FaultyBackend::new(device.backend().clone()));
    let blind = Device::with_config(backend.clone(), Config::default());
    backend.fail_downloads(true);
    let mut reading = BTreeSet::new();
    for case in catalog::cases() {
        let inputs = case.inputs(DType::F32, &blind).with_context(|| case.name)?;
        let leaf = |t: &Tensor| if t.dtype().is_float() { t.to_leaf() } else { Ok(t.clone()) };
        let inputs = match case.has_gradient {
            true => inputs.iter().map(leaf).collect::<forebay::error::Result<Vec<_>>>()?,
            false => inputs,
        };
        let out = match case.run(&inputs) {
            Err(error) if error.to_string().contains(NO_DOWNLOAD) => {
                reading.insert(case.name);
                continue;
            }
            out => out.with_context(|| case.name)?,
        };
        if case.has_gradient {
            out.backward_with(&Tensor::ones(out.shape(), out.dtype(), &blind)?).with_context(|| case.name)?;
        }
    }
    let expected = VALUES_ON_THE_HOST.into_iter().chain(VALUES_CHECKED).collect::<BTreeSet<_>>();
    ensure!(reading == expected, "these operations read: {reading:?}");
    let net = Linear::new(8, 4, &blind)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-3);
    for _ in 0..3 {
        let x = Tensor::randn([16, 8], DType::F32, &blind)?;
        let y = Tensor::from_slice(&[1i64; 16], [16], &blind)?;
        net.forward(&x)?.cross_entropy(&y)?.backward()?;
        clip_grad_norm_(&net.parameters(), 1.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
    }
    ensure!(net.weight.to_vec::<f32>().is_err(), "downloads fail");
    backend.fail_downloads(false);
    ensure!(net.weight.to_vec::<f32>()?.iter().all(|w| w.is_finite()), "the step computed nothing");
    Ok(())
}
