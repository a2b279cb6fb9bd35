//! Fusion of elementwise chains: bits and memory equal to unfused execution, and correct order with other operations.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use forebay::autograd::{self, GradOptions, checkpoint, grad};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::profile::Profiler;
use forebay::stream::Stream;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::{skip, tests};

tests![
    fused_chains_are_bitwise_equal_to_single_kernels,
    broadcast_operands_of_fused_chains_give_the_same_bits,
    masks_of_fused_chains_give_the_same_bits,
    products_and_sums_round_twice,
    gradients_of_fused_chains_are_bitwise_equal,
    a_fused_chain_is_one_kernel_with_the_names_of_its_operations,
    only_results_that_are_alive_are_written,
    other_commands_see_the_results_of_pending_chains,
    fused_chains_take_the_memory_of_single_kernels,
    threads_and_streams_see_the_results_of_each_others_chains,
    long_chains_and_many_inputs_are_split,
    gated_units_save_and_write_nothing_but_their_operands,
    a_changed_activation_is_saved,
    an_activation_whose_input_changed_is_saved,
    dry_runs_save_what_gated_units_save,
    second_gradients_reach_recomputed_activations,
    second_gradients_of_random_programs_do_not_depend_on_fusion,
    gradients_of_gated_units_are_one_kernel_however_written,
    sums_of_gradients_join_the_kernels_of_their_terms,
    chains_of_gradients_take_no_more_memory,
    a_gradient_with_another_owner_is_not_overwritten,
];

/// Returns another handle to the card, which fuses from `least` bytes on.
fn other(device: &Device, least: Option<u64>) -> Device {
    let other = Device::with_config(device.backend().clone(), Config::default());
    other.set_fusion_min_bytes(least);
    other
}

fn both(device: &Device) -> [Device; 2] {
    [other(device, None), other(device, Some(0))]
}

fn ensure_same_bits_all(a: &[Tensor], b: &[Tensor]) -> Result<()> {
    ensure!(a.len() == b.len(), "{} results, and {}", a.len(), b.len());
    for (k, (a, b)) in a.iter().zip(b).enumerate() {
        ensure_same_bits(a, b).with_context(|| format!("result {k}: {} {:?}", a.dtype(), a.shape()))?;
    }
    Ok(())
}

/// Returns values around zero, including special ones.
fn values(n: usize, rng: &mut SplitMix64) -> Vec<f32> {
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e-30, 65519.9, -3e38];
    (0..n)
        .map(|k| match rng.below(50) {
            0 => special[k % special.len()],
            _ => (rng.below(2000) as f32 - 1000.0) / 313.0,
        })
        .collect()
}

fn fused_chains_are_bitwise_equal_to_single_kernels(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    let types = [DType::F32, DType::BF16, DType::F16];
    // Few kernels: mainly lengths and layouts vary.
    for (round, n) in [1usize, 5, 8, 31, 64, 1000].into_iter().enumerate() {
        let dtype = types[round % 3];
        let data: Vec<Vec<f32>> = (0..4).map(|_| values(4 * n, &mut rng)).collect();
        let steps: Vec<usize> = (0..4).map(|_| rng.below(6)).collect();
        let layout = rng.below(4);
        let chain = |device: &Device| -> Result<Vec<Tensor>> {
            let part = |k: usize, dtype: DType| -> Result<Tensor> {
                Ok(Tensor::from_slice(&data[k], [4, n], device)?.to_dtype(dtype)?)
            };
            let (x, y) = (part(0, dtype)?, part(1, types[(round + 1) % 3])?);
            let z = match layout {
                0 => part(2, dtype)?,
                1 => part(2, dtype)?.narrow(0, 1, 1)?,
                2 => part(2, dtype)?.reshape([n, 4])?.t()?,
                _ => part(2, DType::F32)?.narrow(1, n - 1, 1)?,
            };
            let mut out = vec![x.mul(&y)?];
            for &step in &steps {
                let last = &out[out.len() - 1];
                let next = match step {
                    0 => last.add(&z)?,
                    1 => last.mul(0.37)?.sub(&x)?,
                    2 => last.tanh()?,
                    3 => z.maximum(last)?,
                    4 => last.to_dtype(types[round % 2])?,
                    _ => last.neg()?.add(1.5)?,
                };
                out.push(next);
            }
            out.push(out[out.len() - 1].add(&z)?);
            // One result is dropped before the chain runs.
            out.remove(1);
            Ok(out)
        };
        let [alone, fused] = both(device);
        ensure_same_bits_all(&chain(&alone)?, &chain(&fused)?)
            .with_context(|| format!("{dtype} [4, {n}] layout {layout} steps {steps:?}"))?;
    }
    Ok(())
}

/// Lines of whole vectors are read as such, and an operand may have one element for each line.
fn broadcast_operands_of_fused_chains_give_the_same_bits(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(11);
    // Lines of whole vectors, of whole vectors of f32 only, and of neither.
    for (columns, dtype) in [
        (16, DType::F32),
        (16, DType::BF16),
        (16, DType::F16),
        (12, DType::BF16),
        (12, DType::F32),
        (7, DType::F32),
    ] {
        let (batch, rows) = (3, 5);
        let data = values(batch * rows * columns, &mut rng);
        let wide = values(batch * 3 * columns + 8, &mut rng);
        let chain = |device: &Device| -> Result<Vec<Tensor>> {
            let of = |data: &[f32], shape: &[usize], dtype| -> Result<Tensor> {
                Ok(Tensor::from_slice(&data[..shape.iter().product()], shape, device)?.to_dtype(dtype)?)
            };
            let x = of(&data, &[batch, rows, columns], dtype)?;
            // Scale, shift and gate of a modulation: thirds of one tensor, the second one at an offset.
            let modulation = of(&wide, &[batch, 1, 3 * columns], dtype)?;
            let [shift, scale, gate] = [0, 1, 2].map(|k| modulation.narrow(2, k * columns, columns));
            let modulated = x.mul(&scale?.add(1.0)?)?.add(&shift?)?;
            let gated = modulated.to_dtype(DType::F32)?.mul(&gate?)?.add(&x)?;
            // One value for each line, one line for all, and lines that begin between two vectors.
            let column = of(&data, &[batch, rows, 1], DType::F32)?;
            let line = of(&wide, &[columns], DType::F32)?;
            let uneven = of(&wide, &[columns + 1], DType::F32)?.narrow(0, 1, columns)?;
            let normalized = x.sub(&column)?.mul(&line)?.add(&of(&data, &[1], dtype)?)?;
            Ok(vec![gated, normalized, x.mul(&line)?.sub(&uneven)?, x.add(&column)?.neg()?])
        };
        let [alone, fused] = both(device);
        ensure_same_bits_all(&chain(&alone)?, &chain(&fused)?)
            .with_context(|| format!("{columns} {dtype}"))?;
    }
    Ok(())
}

/// A chain reads masks of any layout, in both directions, and is one kernel.
fn masks_of_fused_chains_give_the_same_bits(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(23);
    for (columns, dtype) in
        [(16, DType::F32), (16, DType::BF16), (24, DType::F16), (12, DType::BF16), (7, DType::F32)]
    {
        let (batch, rows) = (3, 6);
        let data = values(batch * rows * columns, &mut rng);
        let bools: Vec<bool> = (0..2 * rows * columns + 8).map(|_| rng.below(3) == 0).collect();
        // A mask for all batches, one in columns, one of lines, and one at an offset.
        for layout in 0..4 {
            let chain = |device: &Device| -> Result<(Vec<Tensor>, Vec<String>)> {
                let of = |shape: &[usize]| {
                    let count: usize = shape.iter().product();
                    Tensor::from_bools(&bools[..count], shape, device)
                };
                let mask = match layout {
                    0 => of(&[rows, columns])?,
                    1 => of(&[columns, rows])?.t()?,
                    2 => of(&[rows, 1])?,
                    _ => of(&[2 * rows, columns])?.narrow(0, rows, rows)?,
                };
                let x = Tensor::from_slice(&data, [batch, rows, columns], device)?.to_dtype(dtype)?;
                let (x, other) = (x.to_leaf()?, x.neg()?);
                let profiler = Profiler::start(device)?;
                let y = x.mul(0.25)?.masked_fill(&mask, f64::NEG_INFINITY)?.to_dtype(DType::F32)?;
                let names = profiler.finish()?.spans.iter().map(|span| span.name.to_string()).collect();
                let z = x.mul(&other)?.where_(&mask, &other)?.add(1.0)?;
                let sum = y.clamp_min(-8.0)?.mul(&z.to_dtype(DType::F32)?)?.tanh()?;
                sum.backward_with(&sum.ones_like()?)?;
                Ok((vec![y, z, x.grad().context("a gradient")?], names))
            };
            let [alone, fused] = both(device);
            let ((expected, single), (results, names)) = (chain(&alone)?, chain(&fused)?);
            let case = || format!("{columns} columns, {dtype}, layout {layout}");
            ensure_same_bits_all(&results, &expected).with_context(case)?;
            ensure!(single.len() >= 2 && names.len() == 1, "{}: {names:?}, alone {single:?}", case());
        }
    }
    Ok(())
}

fn products_and_sums_round_twice(device: &Device) -> Result<()> {
    // (1 + e)(1 - e) - 1 is 0 if the product is rounded, and -e² if it is contracted to a fused multiply-add.
    let e = f32::EPSILON;
    let data = [[1.0 + e; 8], [1.0 - e; 8], [-1.0; 8]];
    let device = other(device, Some(0));
    let [a, b, c] = data.map(|d| Tensor::from_slice(&d, [8], &device));
    let sum = a?.mul(&b?)?.add(&c?)?;
    ensure!(sum.to_vec::<f32>()? == [0.0; 8], "{:?}", sum.to_vec::<f32>()?);
    Ok(())
}

fn gradients_of_fused_chains_are_bitwise_equal(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(3);
    let data: Vec<Vec<f32>> =
        (0..3).map(|_| (0..96).map(|_| rng.below(500) as f32 / 250.0 - 1.0).collect()).collect();
    let run = |device: &Device| -> Result<Vec<Tensor>> {
        let leaf = |k: usize, rows: usize| -> Result<Tensor> {
            Ok(Tensor::from_slice(&data[k][..rows * 12], [rows, 12], device)?.to_leaf()?)
        };
        let (a, b, c) = (leaf(0, 8)?, leaf(1, 8)?, leaf(2, 1)?);
        let y = a.mul(&b)?.add(&c)?.gelu()?.mul(&a)?.sigmoid()?;
        y.sum_all()?.backward()?;
        let grad = |t: &Tensor| t.grad().context("no gradient");
        Ok(vec![y.detach(), grad(&a)?, grad(&b)?, grad(&c)?])
    };
    let [alone, fused] = both(device);
    ensure_same_bits_all(&run(&alone)?, &run(&fused)?)
}

/// Returns the names of the kernels that `run` launches.
fn names(device: &Device, run: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let profiler = Profiler::start(device)?;
    run()?;
    Ok(profiler.finish()?.spans.iter().map(|span| span.name.to_string()).collect())
}

fn a_fused_chain_is_one_kernel_with_the_names_of_its_operations(device: &Device) -> Result<()> {
    let device = other(device, Some(1 << 12));
    for (n, fused) in [(1 << 10, true), (1 << 9, false)] {
        let x = Tensor::ones([n], DType::F32, &device)?;
        let ran = names(&device, || x.mul(&x)?.add(&x)?.gelu().map(drop).map_err(Into::into))?;
        match fused {
            true => ensure!(ran == ["mul add gelu f32"], "{ran:?}"),
            false => ensure!(ran.len() == 3, "{ran:?}"),
        }
    }
    // A chain of one operation uses the ordinary kernel.
    let x = Tensor::ones([1 << 10], DType::F32, &device)?;
    let alone = names(&device, || x.exp().map(drop).map_err(Into::into))?;
    device.set_fusion_min_bytes(None);
    ensure!(alone == names(&device, || x.exp().map(drop).map_err(Into::into))?, "{alone:?}");
    Ok(())
}

fn only_results_that_are_alive_are_written(device: &Device) -> Result<()> {
    let device = other(device, Some(0));
    let n = 1 << 10;
    let x = Tensor::full([n], 3.0, DType::F32, &device)?;
    let bytes = |run: &dyn Fn() -> Result<()>| -> Result<u64> {
        let profiler = Profiler::start(&device)?;
        run()?;
        Ok(profiler.finish()?.spans.iter().map(|span| span.bytes).sum())
    };
    let one = 4 * n as u64;
    let dropped = bytes(&|| {
        let z = x.mul(2.0)?.add(&x)?;
        drop(z);
        Ok(())
    })?;
    ensure!(dropped == 2 * one, "{dropped} bytes for a read and a write of {one}");
    let kept = bytes(&|| {
        let y = x.mul(2.0)?;
        let z = y.add(&x)?;
        ensure!(z.to_vec::<f32>()? == vec![9.0; n] && y.to_vec::<f32>()? == vec![6.0; n], "wrong");
        Ok(())
    })?;
    // Three transfers of the chain, and two reads by the host.
    ensure!(kept == 5 * one, "{kept} bytes, not 5 of {one}");
    Ok(())
}

fn other_commands_see_the_results_of_pending_chains(device: &Device) -> Result<()> {
    let device = other(device, Some(0));
    let n = 64;
    let full = |v: f64| Tensor::full([n], v, DType::F32, &device);
    let is = |t: &Tensor, v: f32| -> Result<()> {
        let found = t.to_vec::<f32>()?;
        ensure!(found.iter().all(|x| *x == v), "{v} expected, got {:?}", &found[..4]);
        Ok(())
    };
    // The chain's inputs change afterwards.
    let x = full(2.0)?;
    let y = x.mul(3.0)?.add(1.0)?;
    x.add_(5.0)?;
    let z = x.mul(&y)?;
    x.mul_(0.0)?;
    is(&y, 7.0)?;
    is(&z, 49.0)?;
    // The chain's input is freed, and its memory is reused.
    for k in 0..20 {
        let v = f64::from(k);
        let x = full(v)?;
        let y = x.add(1.0)?;
        drop(x);
        let other = full(-7.0)?;
        let z = y.mul(2.0)?.add(&other)?;
        drop(y);
        let again = full(100.0)?;
        is(&z, 2.0 * (v as f32 + 1.0) - 7.0)?;
        is(&again, 100.0)?;
    }
    // View of a result, reduction, product and copy.
    let x = full(1.0)?.add(1.0)?;
    is(&x.reshape([8, 8])?.t()?.mul(2.0)?.reshape([n])?, 4.0)?;
    let x = full(1.0)?.mul(0.5)?;
    ensure!(x.add(&x)?.sum_all()?.item()? == n as f64, "the sum");
    let m = full(1.0)?.mul(2.0)?.reshape([8, 8])?;
    is(&m.matmul(&m)?.add(1.0)?.reshape([n])?, 33.0)?;
    let copy = m.add(1.0)?.copy()?;
    m.mul_(0.0)?;
    is(&copy.reshape([n])?, 3.0)?;
    // The same memory is written through another view, while its first writer is pending.
    let x = full(1.0)?;
    let y = x.add(1.0)?;
    let z = y.add(&y.narrow(0, 0, 1)?)?;
    is(&z, 4.0)?;
    is(&y, 2.0)?;
    Ok(())
}

fn fused_chains_take_the_memory_of_single_kernels(device: &Device) -> Result<()> {
    let run = |device: &Device| -> Result<(u64, u64, u64)> {
        let x = Tensor::ones([300, 1000], DType::F32, device)?.to_leaf()?;
        for k in 0..3 {
            let mut y = x.mul(2.0)?.add(f64::from(k))?.tanh()?;
            y = y.sub(&x)?;
            let half = y.to_dtype(DType::BF16)?.mul(0.5)?;
            half.sum_all()?.backward()?;
        }
        device.synchronize()?;
        let stats = device.memory();
        Ok((stats.peak_allocated(), stats.peak_reserved(), stats.allocated()))
    };
    let [alone, fused] = both(device);
    let (a, b) = (run(&alone)?, run(&fused)?);
    ensure!(a == b, "{a:?} bytes alone, {b:?} fused");
    Ok(())
}

fn threads_and_streams_see_the_results_of_each_others_chains(device: &Device) -> Result<()> {
    let device = other(device, Some(0));
    let n = 4096;
    let x = Tensor::full([n], 1.0, DType::F32, &device)?;
    let work = |from: f32| -> Result<()> {
        let stream = Stream::new(&device);
        let mut last = x.mul(f64::from(from))?;
        for k in 0..24 {
            let _on = (k % 3 == 0).then(|| stream.enter());
            let next = last.add(&x)?.sub(0.5)?;
            if k % 4 == 1 {
                next.add_(0.25)?;
            }
            last = next;
        }
        let expected = from + 24.0 * 0.5 + 6.0 * 0.25;
        let found = last.to_vec::<f32>()?;
        ensure!(found.iter().all(|v| *v == expected), "{expected} expected, got {:?}", &found[..4]);
        Ok(())
    };
    thread::scope(|scope| {
        let work = &work;
        let all: Vec<_> = (0..4u8).map(|k| scope.spawn(move || work(f32::from(k)))).collect();
        all.into_iter().try_for_each(|one| one.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })?;
    // Another thread reads the result of a chain.
    let y = x.add(1.0)?.mul(2.0)?;
    let read = thread::scope(|scope| scope.spawn(|| y.mul(0.5)?.to_vec::<f32>()).join());
    let read = read.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    ensure!(read.iter().all(|v| *v == 2.0), "{:?}", &read[..4]);
    if !device.backend().supports_pinned_host() {
        return skip("the device reaches no memory of the host: nothing is offloaded");
    }
    let y = x.add(1.0)?;
    x.offload_()?;
    ensure!(y.mul(&x)?.to_vec::<f32>()? == vec![2.0; n], "the chain read an offloaded input wrongly");
    Ok(())
}

fn long_chains_and_many_inputs_are_split(device: &Device) -> Result<()> {
    let [alone, fused] = both(device);
    let run = |device: &Device| -> Result<Vec<Tensor>> {
        let x = Tensor::full([40], 1.25, DType::F32, device)?;
        let inputs = (0..10)
            .map(|k| Tensor::full([40], f64::from(k), DType::F32, device))
            .collect::<Result<Vec<_>, _>>()?;
        let mut y = x.clone();
        for k in 0..40 {
            y = y.mul(0.99)?.add(f64::from(k))?;
        }
        let mut all = vec![y];
        for input in &inputs {
            all.push(all[all.len() - 1].add(input)?);
        }
        Ok(all)
    };
    ensure_same_bits_all(&run(&alone)?, &run(&fused)?)
}

/// Returns two leaves of random values.
fn gate_and_up(device: &Device) -> Result<[Tensor; 2]> {
    device.manual_seed(3);
    let random = || Tensor::randn([8, 33], DType::F32, device)?.to_leaf();
    Ok([random()?, random()?])
}

fn gated_units_save_and_write_nothing_but_their_operands(device: &Device) -> Result<()> {
    let gradients = both(device).map(|device| -> Result<_> {
        let [gate, up] = gate_and_up(&device)?;
        let allocated = || device.memory().allocated();
        let before = allocated();
        let y = gate.silu()?.mul(&up)?;
        let held = allocated() - before;
        let other = up.zeros_like()?;
        let of_one = allocated() - before - held;
        drop(other);
        let launched = names(&device, || Ok(y.sum_all()?.backward()?))?;
        let grads = [&gate, &up].map(|t| t.grad().context("a gradient is missing"));
        Ok(([held, of_one], launched, grads.into_iter().collect::<Result<Vec<_>>>()?))
    });
    let [single, fused] = gradients;
    let ((_, _, single), ([held, of_one], launched, fused)) = (single?, fused?);
    ensure!(held == of_one, "{held} bytes are held, the result has {of_one}");
    let chains: Vec<&String> = launched.iter().filter(|name| name.contains("silu")).collect();
    ensure!(chains.len() == 1, "the gradients of gate and up are {chains:?} of {launched:?}");
    ensure_same_bits_all(&fused, &single)
}

fn a_changed_activation_is_saved(device: &Device) -> Result<()> {
    let device = other(device, Some(0));
    let [gate, up] = gate_and_up(&device)?;
    let activated = gate.silu()?;
    activated.detach().mul_(2.0)?;
    let expected = activated.detach().copy()?;
    activated.mul(&up)?.sum_all()?.backward()?;
    ensure_same_bits(&up.grad().context("a gradient is missing")?, &expected)
}

/// The null device plans the memory of a device that fuses, although it runs no kernels.
fn dry_runs_save_what_gated_units_save(device: &Device) -> Result<()> {
    let run = |device: &Device| -> Result<[u64; 3]> {
        let leaf = || Tensor::ones([512, 256], DType::F32, device)?.to_leaf();
        let (gate, up) = (leaf()?, leaf()?);
        let before = device.memory().allocated();
        let y = gate.silu()?.mul(&up)?;
        let held = device.memory().allocated() - before;
        device.pool().reset_peak_stats();
        y.sum_all()?.backward()?;
        Ok([before, held, device.memory().peak_allocated()])
    };
    let (real, dry) =
        (Device::with_config(device.backend().clone(), Config::default()), Device::null(Default::default()));
    real.set_fusion_min_bytes(Some(256 << 10));
    let (real, dry) = (run(&real)?, run(&dry)?);
    ensure!(
        real[..2] == dry[..2],
        "bytes before and of the unit: {:?}, in a dry run {:?}",
        &real[..2],
        &dry[..2]
    );
    // Workspaces of the sum differ by less than a tensor.
    let apart = real[2].abs_diff(dry[2]);
    ensure!(apart < real[1] / 2, "the peak is {}, in a dry run {}", real[2], dry[2]);
    Ok(())
}

fn an_activation_whose_input_changed_is_saved(device: &Device) -> Result<()> {
    let device = other(device, Some(0));
    let [gate, up] = gate_and_up(&device)?;
    let input = gate.mul(1.0)?;
    let activated = input.silu()?;
    input.detach().zero_()?;
    let loss = activated.mul(&up)?.sum_all()?;
    // Only the gradient of the activation itself needs the input.
    let found = grad(&[&loss], &[&up], &GradOptions::retain_graph())?;
    ensure_same_bits(&found[0], &activated.detach())?;
    let error = loss.backward().err().map(|e| e.to_string()).unwrap_or_default();
    ensure!(error.contains("changed in place"), "expected an error of `silu`, got `{error}`");
    Ok(())
}

/// The gradient of `up` is the activation, which is part of the graph of the first gradient.
fn second_gradients_reach_recomputed_activations(device: &Device) -> Result<()> {
    let gradients = both(device).map(|device| -> Result<_> {
        let [gate, up] = gate_and_up(&device)?;
        let activated = gate.silu()?;
        let loss = activated.mul(&up)?.sum_all()?;
        let first = grad(&[&loss], &[&up], &GradOptions::create_graph())?;
        let second = first[0].square()?.sum_all()?;
        let mut found = grad(&[&second], &[&activated, &gate], &GradOptions::retain_graph())?;
        // A hook on the activation sees the second pass.
        activated.register_hook(|g| g.mul(8.0).map(Some))?;
        found.extend(grad(&[&second], &[&gate], &GradOptions::default())?);
        Ok(found)
    });
    let [single, fused] = gradients;
    let (single, fused) = (single?, fused?);
    let close = |a: &Tensor, b: &Tensor| ensure_close(&a.to_f64s()?, &b.to_f64s()?, 1e-5, 1e-6);
    single.iter().zip(&fused).try_for_each(|(a, b)| close(b, a))?;
    close(&fused[2], &fused[1].mul(8.0)?)
}

/// Runs a random program of elementwise operations, also in place, and returns its first and second gradients.
fn run_random_program(seed: u64, device: &Device) -> CoreResult<Vec<Option<Tensor>>> {
    let mut rng = SplitMix64(seed);
    let shape: &[usize] = [&[7][..], &[2, 5], &[3, 1, 4]][rng.below(3)];
    let mut leaf = || {
        let halves: Vec<f32> =
            (0..shape.iter().product()).map(|_| rng.below(129) as f32 / 128.0 - 0.5).collect();
        Tensor::from_slice(&halves, shape, device)?.to_leaf()
    };
    let leaves = [leaf()?, leaf()?, leaf()?];
    let mut nodes = leaves.iter().map(|t| t.mul(1.0)).collect::<CoreResult<Vec<Tensor>>>()?;
    for _ in 0..3 + rng.below(8) {
        let (p, q) = (nodes[rng.below(nodes.len())].clone(), nodes[rng.below(nodes.len())].clone());
        let made = match rng.below(14) {
            0 => p.silu()?,
            1 => p.gelu()?,
            2 => p.sin()?,
            3 => p.square()?,
            4 => p.softplus(1.0, 20.0)?,
            5 => p.elu(1.0)?,
            6 => p.add(&q)?,
            7 => p.div(&q.square()?.add(2.0)?)?,
            8 => p.mul(&q.silu()?)?,
            9 => {
                match rng.below(3) {
                    0 => p.mul_(&q)?,
                    1 => p.add_(0.25)?,
                    _ => p.mul_(0.5)?,
                }
                continue;
            }
            _ => p.mul(&q)?,
        };
        nodes.push(made);
    }
    let mut loss = nodes[nodes.len() - 1].sum_all()?;
    for t in &nodes[nodes.len().saturating_sub(4)..] {
        loss = loss.add(&t.square()?.sum_all()?)?;
    }
    // One input is a result of the program.
    let inputs: Vec<&Tensor> = leaves.iter().chain([&nodes[rng.below(nodes.len())]]).collect();
    let first = autograd::grad_allow_unused(&[&loss], &inputs, &GradOptions::create_graph())?;
    let mut second = Tensor::zeros((), DType::F32, device)?;
    for grad in first.iter().flatten() {
        second = second.add(&grad.square()?.sum_all()?)?;
    }
    let mut found: Vec<Option<Tensor>> = first.iter().map(|grad| grad.as_ref().map(Tensor::detach)).collect();
    if second.requires_grad() {
        found.extend(autograd::grad_allow_unused(&[&second], &inputs, &GradOptions::default())?);
    }
    Ok(found)
}

fn second_gradients_of_random_programs_do_not_depend_on_fusion(device: &Device) -> Result<()> {
    let [single, fused] = both(device);
    let mut compared = 0;
    for seed in 0..24 {
        let (expected, found) = match (run_random_program(seed, &single), run_random_program(seed, &fused)) {
            (Ok(expected), found) => (expected, found.with_context(|| format!("program {seed}"))?),
            // The program overwrites a tensor that is saved. Fusion may save another one.
            (Err(_), _) => continue,
        };
        compared += 1;
        ensure!(expected.len() == found.len(), "program {seed}: {} and {}", expected.len(), found.len());
        for (k, pair) in expected.iter().zip(&found).enumerate() {
            let values = |t: &Option<Tensor>| t.as_ref().map_or(Ok(Vec::new()), Tensor::to_f64s);
            ensure_close(&values(pair.1)?, &values(pair.0)?, 1e-4, 1e-4)
                .with_context(|| format!("program {seed}, gradient {k}"))?;
        }
    }
    ensure!(compared >= 16, "only {compared} programs have gradients");
    Ok(())
}

/// Gated unit between products, as decoders have it.
type GatedUnit = fn(&Tensor, &Tensor, &Tensor) -> CoreResult<Tensor>;

const GATED_UNITS: [(&str, GatedUnit); 7] = [
    ("silu", |x, gate, up| {
        let up = x.matmul(up)?;
        x.matmul(gate)?.silu()?.mul(&up)
    }),
    // The activation is older than the other operand's product.
    ("silu", |x, gate, up| x.matmul(gate)?.silu()?.mul(&x.matmul(up)?)),
    ("silu", |x, gate, up| x.matmul(up)?.mul(&x.matmul(gate)?.silu()?)),
    ("gelu", |x, gate, up| x.matmul(gate)?.gelu()?.mul(&x.matmul(up)?)),
    ("gelu_tanh", |x, gate, up| x.matmul(gate)?.gelu_tanh()?.mul(&x.matmul(up)?)),
    ("sigmoid", |x, gate, up| x.matmul(gate)?.sigmoid()?.mul(&x.matmul(up)?)),
    // Both operands have an activation.
    ("tanh", |x, gate, up| x.matmul(gate)?.tanh()?.mul(&x.matmul(up)?.sigmoid()?)),
];

/// Runs a gated unit with its backward pass in a type. Returns the names of the backward kernels, the peak of
/// allocated bytes, and the gradients.
fn run_gated_unit(device: &Device, unit: GatedUnit, dtype: DType) -> Result<(Vec<String>, u64, Vec<Tensor>)> {
    device.manual_seed(5);
    let leaf = |shape: [usize; 2]| Tensor::randn(shape, DType::F32, device)?.to_dtype(dtype)?.to_leaf();
    let (x, gate, up, down) = (leaf([16, 8])?, leaf([8, 64])?, leaf([8, 64])?, leaf([64, 8])?);
    let y = unit(&x, &gate, &up)?.matmul(&down)?;
    let seed = y.ones_like()?;
    device.synchronize()?;
    device.pool().reset_peak_stats();
    let launched = names(device, || Ok(y.backward_with(&seed)?))?;
    let peak = device.memory().peak_allocated();
    let grads = [&x, &gate, &up, &down].map(|t| t.grad().context("a gradient is missing"));
    Ok((launched, peak, grads.into_iter().collect::<Result<_>>()?))
}

fn gradients_of_gated_units_are_one_kernel_however_written(device: &Device) -> Result<()> {
    for (k, (name, unit)) in GATED_UNITS.into_iter().enumerate() {
        let dtype = if k % 2 == 0 { DType::F32 } else { DType::BF16 };
        let [alone, fused] = both(device);
        let (_, _, expected) = run_gated_unit(&alone, unit, dtype)?;
        let (launched, _, grads) = run_gated_unit(&fused, unit, dtype)?;
        let chains: Vec<&String> = launched.iter().filter(|kernel| kernel.contains(name)).collect();
        ensure!(chains.len() == 1, "unit {k}: the gradients of {name} are {chains:?} of {launched:?}");
        ensure!(chains[0].matches("mul").count() >= 2, "unit {k}: {chains:?} lacks the product's gradients");
        ensure_same_bits_all(&grads, &expected).with_context(|| format!("unit {k}, {dtype}"))?;
    }
    Ok(())
}

/// Units whose gate reads its own result twice, and the last activation of a step.
const SELF_GATED_UNITS: [(&str, GatedUnit); 3] = [
    ("sigmoid", |x, gate, up| {
        let (up, y) = (x.matmul(up)?, x.matmul(gate)?);
        y.mul(&y.mul(1.702)?.sigmoid()?)?.add(&up)
    }),
    ("tanh", |x, gate, up| {
        let (up, y) = (x.matmul(up)?, x.matmul(gate)?);
        y.tanh()?.mul(&y)?.mul(&up)
    }),
    ("square", |x, gate, up| {
        let (up, y) = (x.matmul(up)?, x.matmul(gate)?);
        y.mul(&y.square()?)?.add(&up)
    }),
];

fn sums_of_gradients_join_the_kernels_of_their_terms(device: &Device) -> Result<()> {
    for (k, (name, unit)) in SELF_GATED_UNITS.into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16] {
            let [alone, fused] = both(device);
            let (_, without, expected) = run_gated_unit(&alone, unit, dtype)?;
            let (launched, with, grads) = run_gated_unit(&fused, unit, dtype)?;
            let chains: Vec<&String> = launched.iter().filter(|kernel| kernel.contains(name)).collect();
            ensure!(
                chains.len() == 1 && chains[0].contains("add"),
                "unit {k}: the gradients of {name} are {chains:?} of {launched:?}"
            );
            ensure!(with <= without, "unit {k}: a peak of {with} bytes fused, and {without} alone");
            ensure_same_bits_all(&grads, &expected).with_context(|| format!("unit {k}, {dtype}"))?;
        }
    }
    Ok(())
}

fn chains_of_gradients_take_no_more_memory(device: &Device) -> Result<()> {
    for (k, (_, unit)) in GATED_UNITS.into_iter().enumerate() {
        let [alone, fused] = both(device);
        let (_, without, _) = run_gated_unit(&alone, unit, DType::F32)?;
        let (_, with, _) = run_gated_unit(&fused, unit, DType::F32)?;
        // Single kernels also save the activation.
        ensure!(with <= without, "unit {k}: a peak of {with} bytes fused, and {without} alone");
    }
    Ok(())
}

fn a_gradient_with_another_owner_is_not_overwritten(device: &Device) -> Result<()> {
    for device in both(device) {
        let [gate, up] = gate_and_up(&device)?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let activated = gate.silu()?;
        let keep = Arc::clone(&seen);
        // The hook keeps the gradient that the activation's backward pass reads.
        let _handle = activated.register_hook(move |grad| {
            let copy = grad.copy()?;
            keep.lock().unwrap_or_else(PoisonError::into_inner).push((grad.clone(), copy));
            Ok(None)
        })?;
        activated.mul(&up)?.sum_all()?.backward()?;
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let [(kept, copy)] = &seen[..] else { bail!("{} calls of the hook", seen.len()) };
        ensure_same_bits(kept, copy)?;
        // A checkpoint that captures the activation adds to its gradient after the product.
        let [gate, up] = gate_and_up(&device)?;
        let activated = gate.silu()?;
        let captured = activated.clone();
        let more = checkpoint(&[&up], move |x| x[0].mul(&captured))?;
        activated.mul(&up)?.add(&more)?.sum_all()?.backward()?;
        let grad = gate.grad().context("no gradient")?;
        let [plain_gate, plain_up] = gate_and_up(&device)?;
        let activated = plain_gate.silu()?;
        activated.mul(&plain_up)?.add(&plain_up.mul(&activated)?)?.sum_all()?.backward()?;
        ensure_same_bits(&grad, &plain_gate.grad().context("no gradient")?)?;
    }
    Ok(())
}
