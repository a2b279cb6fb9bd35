//! Streams and offload: results equal those of one queue, memory use is as planned.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::memory::Config;
use forebay::stream::Stream;
use forebay::tensor::Tensor;

use super::host_reference::ensure_same_bits;
use super::{skip, tests};

tests![
    streams_equal_one_queue,
    memory_that_streams_free_is_safe_and_peaks_are_the_same_each_time,
    a_private_pool_serves_only_its_step,
    offloaded_tensors_come_back_with_the_same_bits,
    an_offload_waits_for_what_writes_and_a_write_for_the_offload,
    offloads_in_a_loop_keep_their_contents,
    small_operations_keep_their_order,
    a_fence_follows_operations_that_wait,
    tensors_are_not_evicted_while_another_thread_reads_them,
];

/// Size of products that take long enough on a GPU to expose a missing wait.
fn wide(device: &Device) -> usize {
    if device.info().software { 96 } else { 1024 }
}

fn streams_equal_one_queue(device: &Device) -> Result<()> {
    let wide = wide(device);
    let inputs =
        (0..3).map(|_| Tensor::rand([wide, wide], DType::F32, device)).collect::<Result<Vec<_>, _>>()?;
    let streams = [Stream::default_stream(device), Stream::new(device), Stream::new(device)];
    let chain = |streams: &[Stream]| -> Result<Vec<Tensor>> {
        let mut all = inputs.clone();
        for k in 0..24 {
            let _on = streams[k % streams.len()].enter();
            let (a, b) = (&all[all.len() - 1], &all[all.len() - 3]);
            let next = a.matmul(b)?.mul(1.0 / wide as f64)?.add(&all[k % 3])?;
            // In place, in memory that another stream has just read.
            next.mul_(0.5)?;
            all.push(next);
        }
        Ok(all)
    };
    let serial = chain(&streams[..1])?;
    for _ in 0..4 {
        for (a, b) in chain(&streams)?.iter().zip(&serial) {
            ensure_same_bits(a, b)?;
        }
    }
    Ok(())
}

fn memory_that_streams_free_is_safe_and_peaks_are_the_same_each_time(device: &Device) -> Result<()> {
    let wide = wide(device);
    let run = || -> Result<u64> {
        let device = Device::with_config(device.backend().clone(), Config::default());
        let x = Tensor::rand([wide, wide], DType::F32, &device)?;
        let sum = x.matmul(&x)?.sum_all()?.item()?;
        let side = Stream::new(&device);
        for k in 0..20 {
            let total = {
                let _on = side.enter();
                let product = x.matmul(&x)?;
                product.sum_all()?
                // The product is freed here, long before the device has computed it.
            };
            // Equal sizes on the default stream, which may reuse memory of the side stream.
            let other = Tensor::full([wide, wide], f64::from(k), DType::F32, &device)?;
            let more = other.add(&x)?.sub(&x)?;
            ensure!(total.item()? == sum, "the product of step {k} sums up to {}, not {sum}", total.item()?);
            let off = more.sub(f64::from(k))?.abs()?.amax([0, 1], false)?.item()?;
            ensure!(off < 1e-4, "the constant of step {k} is off by {off}");
        }
        device.synchronize()?;
        Ok(device.memory().peak_reserved())
    };
    let (first, second) = (run()?, run()?);
    ensure!(first == second, "a peak of {first} bytes, then of {second}");
    Ok(())
}

fn a_private_pool_serves_only_its_step(device: &Device) -> Result<()> {
    let wide = wide(device);
    let device = Device::with_config(device.backend().clone(), Config::default());
    let private = device.pool().create_private_pool();
    let step = || -> Result<Tensor> {
        let _inside = private.enter();
        let x = Tensor::full([wide, wide], 0.5, DType::F32, &device)?;
        Ok(x.matmul(&x)?.exp()?)
    };
    let first = step()?;
    let held = private.reserved();
    let before = device.memory().reserved();
    ensure!(held > 0 && before == held, "{held} of {before} bytes are the private pool's");
    drop(first);
    ensure!(device.pool().empty_cache()? == 0, "the private pool returned memory during its lifetime");
    let outside = Tensor::zeros([wide, wide], DType::F32, &device)?;
    ensure!(device.memory().reserved() > before, "the private pool served a request from outside");
    let again = step()?;
    ensure!(private.reserved() == held, "the same step took more: {} of {held}", private.reserved());
    drop(private);
    ensure_same_bits(
        &again,
        &Tensor::full([wide, wide], 0.5, DType::F32, &device)?
            .matmul(&Tensor::full([wide, wide], 0.5, DType::F32, &device)?)?
            .exp()?,
    )?;
    drop((again, outside));
    device.pool().empty_cache()?;
    ensure!(device.memory().reserved() == 0, "{}", device.memory().summary());
    Ok(())
}

/// Skips the test if the backend has no access to host memory.
fn require_host_memory(device: &Device) -> Result<()> {
    if device.backend().supports_pinned_host() {
        Ok(())
    } else {
        skip("the device reaches no memory of the host")
    }
}

fn offloaded_tensors_come_back_with_the_same_bits(device: &Device) -> Result<()> {
    require_host_memory(device)?;
    let before = device.memory().allocated();
    let all = (0..9)
        .map(|k| Tensor::randn([k + 1, 3001], [DType::F32, DType::F16, DType::BF16][k % 3], device))
        .collect::<Result<Vec<_>, _>>()?;
    let copies = all.iter().map(Tensor::to_bytes).collect::<Result<Vec<_>, _>>()?;
    all.iter().try_for_each(Tensor::offload_)?;
    ensure!(all.iter().all(Tensor::is_offloaded), "a tensor was not offloaded");
    ensure!(device.memory().allocated() == before, "the device still holds {}", device.memory().summary());
    ensure!(device.host_pool().stats().allocated() > 0, "the host holds nothing");
    // Freed memory is reused.
    let others = (0..9)
        .map(|k| Tensor::full([k + 1, 3001], 7.0, DType::F32, device))
        .collect::<Result<Vec<_>, _>>()?;
    all[3].prefetch_()?;
    ensure!(!all[3].is_offloaded() && all[4].is_offloaded(), "only one was prefetched");
    // A read of a view moves the whole storage back.
    let view = all[4].narrow(1, 1000, 11)?.to_bytes()?;
    ensure!(view.len() == 5 * 11 * 2 && !all[4].is_offloaded(), "a view of {} bytes", view.len());
    for (t, bytes) in all.iter().zip(&copies) {
        ensure!(t.to_bytes()? == *bytes, "{t:?} has changed");
    }
    for t in &others {
        ensure!(t.to_f64s()?.iter().all(|v| *v == 7.0), "{t:?} was written over");
    }
    ensure!(
        device.host_pool().stats().allocated() == 0,
        "the host keeps {}",
        device.host_pool().stats().summary()
    );
    Ok(())
}

fn an_offload_waits_for_what_writes_and_a_write_for_the_offload(device: &Device) -> Result<()> {
    let wide = wide(device);
    require_host_memory(device)?;
    let x = Tensor::rand([wide, wide], DType::F32, device)?;
    let expected = x.matmul(&x)?.matmul(&x)?.to_bytes()?;
    for _ in 0..5 {
        let y = x.matmul(&x)?.matmul(&x)?;
        // The products have not run yet.
        y.offload_()?;
        let other = Tensor::full([wide, wide], 3.0, DType::F32, device)?;
        let z = y.add(&other)?;
        y.offload_()?;
        y.mul_(2.0)?;
        ensure!(y.mul(0.5)?.to_bytes()? == expected, "the offloaded product has other bytes");
        ensure!(
            z.sub(&other)?.sub(&y.mul(0.5)?)?.abs()?.amax([0, 1], false)?.item()? < 1.0,
            "the sum is off"
        );
    }
    Ok(())
}

fn offloads_in_a_loop_keep_their_contents(device: &Device) -> Result<()> {
    require_host_memory(device)?;
    let device = Device::with_config(device.backend().clone(), Config::default());
    let all = (0..6)
        .map(|k| Tensor::full([1 << 18], f64::from(k), DType::F32, &device))
        .collect::<Result<Vec<_>, _>>()?;
    all.iter().try_for_each(Tensor::offload_)?;
    device.pool().reset_peak_stats();
    let mut taken = Vec::new();
    for _ in 0..30 {
        for t in &all {
            t.add_(1.0)?;
            t.offload_()?;
        }
        taken.push((device.memory().reserved(), device.host_pool().stats().reserved()));
    }
    ensure!(
        device.memory().peak_allocated() == 1 << 20,
        "one at a time takes {}",
        device.memory().peak_allocated()
    );
    ensure!(taken.iter().all(|t| *t == taken[1]), "memory grows: {taken:?}");
    for (k, t) in all.iter().enumerate() {
        ensure!(t.to_f64s()?.iter().all(|v| *v == (k + 30) as f64), "{t:?} lost a step");
    }
    Ok(())
}

/// Backends may submit several small kernels at once. Their order with large kernels, copies and reads must be kept.
fn small_operations_keep_their_order(device: &Device) -> Result<()> {
    const SMALL: usize = 257;
    let (large, steps) = if device.info().software { (1 << 14, 400) } else { (1 << 22, 6000) };
    let mut seed = 0x9e37_79b9_u32;
    let mut random = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        seed as usize % below
    };
    let start = |k: usize, n: usize| (0..n).map(|i| (i * (2 * k + 3)) as i32).collect::<Vec<_>>();
    let made = |values: &[i32]| Tensor::from_slice(values, [values.len()], device);
    let mut expected: Vec<Vec<i32>> = (0..5).map(|k| start(k, SMALL)).collect();
    let mut tensors = expected.iter().map(|values| made(values)).collect::<Result<Vec<_>, _>>()?;
    let (mut wide_expected, mut wide) = (start(9, large), made(&start(9, large))?);
    for step in 0..steps {
        let (a, b, to) = (random(5), random(5), random(5));
        let on_host = |f: fn(i32, i32) -> i32| -> Vec<i32> {
            expected[a].iter().zip(&expected[b]).map(|(&x, &y)| f(x, y)).collect()
        };
        match random(200) {
            0..60 => {
                (tensors[to], expected[to]) = (tensors[a].add(&tensors[b])?, on_host(i32::wrapping_add));
            }
            60..100 if a != b => {
                tensors[a].sub_(&tensors[b])?;
                expected[a] = on_host(i32::wrapping_sub);
            }
            100..140 => {
                (tensors[to], expected[to]) =
                    (tensors[a].mul(&tensors[b])?.add(1)?, on_host(|x, y| x.wrapping_mul(y).wrapping_add(1)));
            }
            140..160 => {
                (tensors[to], expected[to]) = (tensors[a].maximum(&tensors[b])?, on_host(i32::max));
            }
            160..170 if a != b => {
                tensors[a].copy_(&tensors[b])?;
                expected[a] = expected[b].clone();
            }
            170..172 => {
                // A kernel that fills the device, before and after small ones.
                wide.narrow(0, step % 1000, SMALL)?.copy_(&tensors[a])?;
                wide = wide.add(7)?;
                tensors[to] = wide.narrow(0, step % 1000 + 3, SMALL)?.copy()?;
                wide_expected[step % 1000..][..SMALL].copy_from_slice(&expected[a]);
                wide_expected.iter_mut().for_each(|x| *x = x.wrapping_add(7));
                expected[to] = wide_expected[step % 1000 + 3..][..SMALL].to_vec();
            }
            172 => {
                let read = tensors[a].to_vec::<i32>()?;
                ensure!(read == expected[a], "step {step}: tensor {a} is not what was computed");
            }
            _ => {}
        }
    }
    for (k, (tensor, expected)) in tensors.iter().zip(&expected).enumerate() {
        ensure!(tensor.to_vec::<i32>()? == *expected, "tensor {k} is not what was computed");
    }
    ensure!(wide.to_vec::<i32>()? == wide_expected, "the large tensor is not what was computed");
    Ok(())
}

fn a_fence_follows_operations_that_wait(device: &Device) -> Result<()> {
    let device = Device::with_config(device.backend().clone(), Config::default());
    device.set_fusion_min_bytes(Some(0));
    let x = Tensor::ones([1024], DType::F32, &device)?;
    let backend = device.backend().clone();
    // A fence has the number of the last submitted work.
    let raw = || -> Result<_> { Ok(backend.record_fence()?) };
    let before = raw()?;
    ensure!(raw()? == before, "nothing new was submitted");
    let y = x.mul(3.0)?.add(&x)?.neg()?;
    let after = raw()?;
    ensure!(after != before, "the chain still waits");
    backend.wait_fence(after)?;
    ensure!(backend.is_fence_signaled(after)?);
    let z = y.mul(2.0)?.add(1.0)?;
    let fence = device.fence()?;
    let now = raw()?;
    ensure!(now != after, "the fence comes before the chain");
    fence.wait()?;
    ensure!(fence.is_ready()? && backend.is_fence_signaled(now)?);
    let _later = z.add(1.0)?.exp()?;
    device.flush()?;
    let flushed = raw()?;
    ensure!(flushed != now && raw()? == flushed, "the chain waits after a flush");
    ensure!(z.to_vec::<f32>()? == [-7.0; 1024]);
    Ok(())
}

fn tensors_are_not_evicted_while_another_thread_reads_them(device: &Device) -> Result<()> {
    require_host_memory(device)?;
    const ELEMENTS: usize = 6000;
    let value = |k: usize| (k + 1) as f32;
    let all = (0..4)
        .map(|k| Tensor::full([ELEMENTS], value(k), DType::F32, device))
        .collect::<Result<Vec<_>, _>>()?;
    let rounds = if device.info().software { 800 } else { 2000 };
    std::thread::scope(|threads| -> Result<()> {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                threads.spawn(|| -> Result<()> {
                    for round in 0..rounds {
                        let k = round % all.len();
                        let read = all[k].to_vec::<f32>()?;
                        ensure!(
                            read.iter().all(|&v| v == value(k)),
                            "round {round}: {k} reads as {}",
                            read[0]
                        );
                    }
                    Ok(())
                })
            })
            .collect();
        let away = threads.spawn(|| -> Result<()> {
            for round in 0..rounds {
                all[round % all.len()].offload_()?;
                // Memory of the offloaded tensor is reused and overwritten.
                let other = Tensor::full([ELEMENTS], -1.0, DType::F32, device)?;
                drop(other);
            }
            Ok(())
        });
        for thread in readers.into_iter().chain([away]) {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(())
    })?;
    // An offload that waited for a read happened when the read ended.
    for (k, t) in all.iter().enumerate() {
        t.offload_()?;
        ensure!(t.is_offloaded() && t.to_vec::<f32>()? == [value(k); ELEMENTS], "{k} is lost");
    }
    Ok(())
}
