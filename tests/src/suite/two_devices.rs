//! Copies between devices: values, gradients, order, memory and errors, over a link and through the host.

use std::slice::from_ref;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, ensure};
use forebay::OpenDevice;
use forebay::autograd::{self, GradOptions, checkpoint, once_differentiable};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as CoreResult};
use forebay::memory::Config;
use forebay::profile::Profiler;
use forebay::stream::Stream;
use forebay::tensor::Tensor;

use super::faulty_backend::{FaultyBackend, NO_DOWNLOAD};
use super::host_reference::{ensure_close, ensure_same_bits, ensure_values};
use super::{skip, tests};

tests![
    values_of_every_type_and_layout_arrive,
    copies_take_the_path_of_their_backends,
    gradients_return_to_the_devices_of_their_leaves,
    second_gradients_cross_devices,
    a_leaf_may_be_used_on_both_devices,
    a_pass_may_start_on_both_devices,
    checkpoints_may_span_devices,
    memory_of_both_ends_is_reused_after_the_copy,
    each_device_has_its_own_stream,
    threads_may_copy_in_opposite_directions,
    memory_is_returned_on_both_devices,
    devices_are_not_mixed,
    a_failed_copy_is_a_typed_error_and_keeps_nothing,
    captured_steps_refuse_copies,
    two_cards_copy_over_their_link,
];

/// Second device of a test, with the reason for this choice.
pub(super) struct Pair {
    pub(super) name: &'static str,
    pub(super) second: Device,
}

fn with_own_pool(device: &Device) -> Device {
    Device::with_config(device.backend().clone(), Config::default())
}

/// Returns second devices: one that shares the backend, one that only the host reaches, and the next card.
pub(super) fn pairs(device: &Device) -> Result<Vec<Pair>> {
    let hidden = Arc::new(FaultyBackend::new(device.backend().clone()));
    let mut all = vec![
        Pair { name: "a pool of its own", second: with_own_pool(device) },
        Pair { name: "through the host", second: Device::with_config(hidden, Config::default()) },
    ];
    if let Ok(second) = next_card(device) {
        all.push(Pair { name: "the next card", second });
    }
    Ok(all)
}

/// Opens the CUDA card after this one, or skips the test.
fn next_card(device: &Device) -> Result<Device> {
    let info = device.info();
    if info.backend != "cuda" {
        return skip("it is not a CUDA card");
    }
    let next = info.index + 1;
    match Device::device_count("cuda") {
        count if count > next => Ok(Device::open(&format!("cuda:{next}"))?),
        count => {
            skip(format!("it takes two CUDA cards from cuda:{} on, and the driver found {count}", info.index))
        }
    }
}

/// Returns values that no copy of a part has.
fn wave(shape: &[usize], phase: f64, device: &Device) -> CoreResult<Tensor> {
    let n = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..n).map(|i| (0.7 * i as f64 + phase).sin() as f32).collect();
    Tensor::from_slice(&values, shape, device)
}

fn values_of_every_type_and_layout_arrive(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d) && second.supports_dtype(d))
        {
            let byte = |i: usize| if dtype == DType::Bool { i % 2 } else { (37 * i + 11) % 251 } as u8;
            let bytes: Vec<u8> = (0..35 * dtype.size()).map(byte).collect();
            let x = Tensor::from_bytes(&bytes, [7, 5], dtype, device)?;
            let views = [
                x.clone(),
                x.transpose(0, 1)?,
                x.narrow(0, 1, 3)?,
                x.narrow(1, 1, 2)?,
                x.select(1, -1)?,
                x.select(0, 3)?.select(0, 1)?,
                x.unsqueeze(1)?.expand([7, 2, 5])?,
                x.narrow(0, 2, 0)?,
            ];
            for (at, view) in views.iter().enumerate() {
                let what = || format!("{name}: {dtype}, view {at}");
                let there = view.to_device(&second)?;
                ensure!(there.device() == &second && there.is_contiguous(), "{}", what());
                ensure_same_bits(&there, view).with_context(what)?;
                ensure_same_bits(&there.to_device(device)?, view).with_context(what)?;
            }
        }
        let x = wave(&[3], 0.0, device)?;
        ensure!(
            x.to_device(device)?.storage_id() == x.storage_id(),
            "a tensor that is there already was copied"
        );
    }
    Ok(())
}

/// Returns the names of the spans that a copy leaves on both devices.
fn spans_of_copy(x: &Tensor, second: &Device) -> Result<[Vec<String>; 2]> {
    let profilers = [Profiler::start(x.device())?, Profiler::start(second)?];
    let copy = x.to_device(second)?;
    let names = profilers.map(|profiler| -> Result<Vec<String>> {
        Ok(profiler.finish()?.spans.iter().map(|span| span.name.to_string()).collect())
    });
    ensure_same_bits(&copy, x)?;
    let [first, second] = names;
    Ok([first?, second?])
}

fn copies_take_the_path_of_their_backends(device: &Device) -> Result<()> {
    let x = wave(&[1000], 0.0, device)?;
    for Pair { name, second } in pairs(device)?.iter().take(2) {
        let expected: [&[&str]; 2] = match *name {
            "through the host" => [&["download"], &["upload"]],
            _ => [&[], &["peer copy"]],
        };
        let names = spans_of_copy(&x, second)?;
        ensure!(names[0] == expected[0] && names[1] == expected[1], "{name}: {names:?}");
    }
    Ok(())
}

/// Two layers of a network, the second on another device, with a strided tensor between them.
struct Layers {
    x: Tensor,
    weights: [Tensor; 2],
    second: Device,
}

impl Layers {
    fn new(device: &Device, second: &Device) -> Result<Self> {
        Ok(Self {
            x: wave(&[6, 4], 0.3, device)?.to_leaf()?,
            weights: [wave(&[4, 5], 1.0, device)?.to_leaf()?, wave(&[5, 3], 2.0, second)?.to_leaf()?],
            second: second.clone(),
        })
    }

    fn loss(&self) -> CoreResult<Tensor> {
        let hidden = self.x.matmul(&self.weights[0])?.tanh()?.transpose(0, 1)?;
        let hidden = hidden.to_device(&self.second)?.transpose(0, 1)?;
        hidden.narrow(0, 1, 4)?.matmul(&self.weights[1])?.sin()?.square()?.mean_all()
    }

    fn leaves(&self) -> [Tensor; 3] {
        [self.x.clone(), self.weights[0].clone(), self.weights[1].clone()]
    }

    /// Returns the gradients of the leaves, which must be on the leaves' devices.
    fn grads(&self) -> Result<Vec<Vec<f64>>> {
        let read = |leaf: &Tensor| -> Result<Vec<f64>> {
            let grad = leaf.grad().context("a leaf got no gradient")?;
            ensure!(grad.device() == leaf.device(), "a gradient is on {}", grad.device());
            Ok(grad.to_f64s()?)
        };
        self.leaves().iter().map(read).collect()
    }
}

/// Compares lists of values that two devices computed.
fn ensure_all_close(got: &[Vec<f64>], expected: &[Vec<f64>]) -> Result<()> {
    ensure!(got.len() == expected.len());
    got.iter().zip(expected).try_for_each(|(a, b)| ensure_close(a, b, 1e-5, 1e-6))
}

fn gradients_return_to_the_devices_of_their_leaves(device: &Device) -> Result<()> {
    let run = |second: &Device| -> Result<Vec<Vec<f64>>> {
        let layers = Layers::new(device, second)?;
        // The second pass accumulates.
        for _ in 0..2 {
            let loss = layers.loss()?;
            ensure!(loss.device() == second);
            loss.backward()?;
        }
        layers.grads()
    };
    let expected = run(device)?;
    for Pair { name, second } in pairs(device)? {
        ensure_all_close(&run(&second)?, &expected).context(name)?;
        let unused = {
            let _no_grad = autograd::no_grad();
            wave(&[2], 0.0, device)?.to_leaf()?.to_device(&second)?
        };
        ensure!(!unused.requires_grad(), "{name}: recorded under `no_grad`");
    }
    Ok(())
}

fn second_gradients_cross_devices(device: &Device) -> Result<()> {
    let run = |second: &Device| -> Result<Vec<Vec<f64>>> {
        let layers = Layers::new(device, second)?;
        let loss = layers.loss()?;
        let slopes = autograd::grad(from_ref(&loss), &layers.leaves(), &GradOptions::create_graph())?;
        let mut total = loss;
        for slope in slopes {
            total = total.add(&slope.square()?.sum_all()?.to_device(second)?)?;
        }
        total.backward()?;
        layers.grads()
    };
    let expected = run(device)?;
    for Pair { name, second } in pairs(device)? {
        ensure_all_close(&run(&second)?, &expected).context(name)?;
        // (x^3)^2 has the derivatives 6 x^5, 30 x^4 and 120 x^3.
        let x = Tensor::from_slice(&[1.0f32, -2.0, 0.5], [3], device)?.to_leaf()?;
        let y = x.square()?.mul(&x)?.to_device(&second)?.square()?.sum_all()?;
        let mut slope = y;
        for factor in [6.0, 30.0, 120.0] {
            let grads = autograd::grad(from_ref(&slope), from_ref(&x), &GradOptions::create_graph())?;
            let power = if factor == 6.0 {
                5
            } else if factor == 30.0 {
                4
            } else {
                3
            };
            let exact = [1.0f64, -2.0, 0.5].map(|x| factor * x.powi(power));
            ensure!(grads[0].device() == device);
            ensure_close(&grads[0].to_f64s()?, &exact, 1e-5, 1e-5).context(name)?;
            slope = grads[0].sum_all()?;
        }
    }
    Ok(())
}

fn a_leaf_may_be_used_on_both_devices(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], device)?.to_leaf()?;
        let there = x.to_device(&second)?;
        // The copy is used twice, and a result returns to the first device.
        let sum = there.square()?.add(&there.mul(5.0)?)?.to_device(device)?.add(&x.mul(7.0)?)?;
        sum.sum_all()?.backward()?;
        let grad = x.grad().context("no gradient")?;
        ensure_values(&grad, &[14.0, 16.0, 18.0]).context(name)?;
    }
    Ok(())
}

fn a_pass_may_start_on_both_devices(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let x = Tensor::from_slice(&[1.0f32, 2.0], [2], device)?.to_leaf()?;
        let w = Tensor::from_slice(&[3.0f32, 4.0], [2], &second)?.to_leaf()?;
        let outputs = [x.square()?.sum_all()?, x.to_device(&second)?.mul(&w)?.sum_all()?];
        autograd::backward(&outputs, &GradOptions::default())?;
        ensure_values(&x.grad().context("x")?, &[5.0, 8.0]).context(name)?;
        ensure_values(&w.grad().context("w")?, &[1.0, 2.0]).context(name)?;
        // A target may be on the other device than the output.
        let there = x.square()?.to_device(&second)?;
        let grads = autograd::grad(&[there.mul(&w)?.sum_all()?], &[&there, &x, &w], &GradOptions::default())?;
        ensure_values(&grads[0], &[3.0, 4.0]).context(name)?;
        ensure_values(&grads[1], &[6.0, 16.0]).context(name)?;
        ensure_values(&grads[2], &[1.0, 4.0]).context(name)?;
    }
    Ok(())
}

fn checkpoints_may_span_devices(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let run = |checkpointed: bool| -> Result<Vec<f64>> {
            device.manual_seed(3);
            second.manual_seed(5);
            let x = wave(&[8, 16], 0.0, device)?.to_leaf()?;
            let target = second.clone();
            let body = move |t: &[Tensor]| {
                let hidden = t[0].exp()?.dropout(0.5, true)?.to_device(&target)?;
                hidden.dropout(0.5, true)?.square()
            };
            let y = if checkpointed { checkpoint(&[&x], body)? } else { body(from_ref(&x))? };
            y.sum_all()?.backward()?;
            Ok(x.grad().context("no gradient")?.to_f64s()?)
        };
        let (expected, got) = (run(false)?, run(true)?);
        ensure!(expected.contains(&0.0) && expected.iter().any(|&g| g != 0.0));
        ensure!(got == expected, "{name}: the checkpoint drew other numbers");
    }
    Ok(())
}

/// Copies constants while their memory is freed and reused on both devices, without a wait of the host.
fn copy_and_reuse(device: &Device, second: &Device) -> Result<()> {
    const N: usize = 1 << 16;
    let mut sums = Vec::new();
    for k in 0..12 {
        let there = {
            let value = Tensor::full([N], f64::from(k), DType::F32, device)?;
            // The second device works in memory that the copy may get next.
            drop(Tensor::full([N], -1.0, DType::F32, second)?.exp()?);
            value.to_device(second)?
        };
        // This tensor takes the memory of the source.
        let next = Tensor::full([N], 1e6, DType::F32, device)?;
        sums.push(there.sum_all()?);
        drop(next);
    }
    for (k, sum) in sums.iter().enumerate() {
        let (sum, exact) = (sum.item()?, (N * k) as f64);
        ensure!(sum == exact, "copy {k} sums up to {sum}, expected {exact}");
    }
    Ok(())
}

fn memory_of_both_ends_is_reused_after_the_copy(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        copy_and_reuse(device, &second).context(name)?;
        copy_and_reuse(&second, device).context(name)?;
    }
    Ok(())
}

fn each_device_has_its_own_stream(device: &Device) -> Result<()> {
    // Streams remain in use on a device that had one, so the device of the other tests gets none.
    let device = &with_own_pool(device);
    for Pair { name, second } in pairs(device)? {
        let streams = [Stream::new(device), Stream::new(&second)];
        let entered = streams.each_ref().map(Stream::enter);
        ensure!(Stream::current(device) == streams[0] && Stream::current(&second) == streams[1], "{name}");
        copy_and_reuse(device, &second).context(name)?;
        copy_and_reuse(&second, device).context(name)?;
        let layers = Layers::new(device, &second)?;
        layers.loss()?.backward()?;
        drop(entered);
        let expected = Layers::new(device, device)?;
        expected.loss()?.backward()?;
        ensure_all_close(&layers.grads()?, &expected.grads()?).context(name)?;
    }
    Ok(())
}

fn threads_may_copy_in_opposite_directions(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let ends = [device, &second];
        let run = |at: usize| -> Result<()> {
            for k in 0..20 {
                let x = Tensor::full([512], f64::from(k), DType::F32, ends[at])?.to_leaf()?;
                let y = x.add(1.0)?.mul(2.0)?.to_device(ends[1 - at])?.sub(3.0)?;
                y.sum_all()?.backward()?;
                ensure_values(&x.grad().context("no gradient")?, &[2.0; 512])?;
                ensure_values(&y.detach(), &[2.0 * f64::from(k) - 1.0; 512])?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let threads = [0, 1].map(|at| scope.spawn(move || run(at)));
            threads.map(|thread| thread.join().expect("no panic")).into_iter().collect::<Result<Vec<_>>>()
        })
        .context(name)?;
    }
    Ok(())
}

fn memory_is_returned_on_both_devices(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let before = device.memory().allocated();
        let layers = Layers::new(device, &second)?;
        let held = [device.memory().allocated(), second.memory().allocated()];
        let step = || -> Result<[u64; 2]> {
            layers.loss()?.backward()?;
            layers.leaves().iter().for_each(|leaf| leaf.set_grad(None));
            Ok([device.memory().allocated(), second.memory().allocated()])
        };
        for _ in 0..3 {
            ensure!(step()? == held, "{name}: a step keeps memory");
        }
        drop(layers);
        let left = [device.memory().allocated() - before, second.memory().allocated()];
        ensure!(left == [0, 0], "{name}: {left:?} bytes stay allocated");
    }
    Ok(())
}

fn devices_are_not_mixed(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let x = wave(&[3], 0.0, device)?.to_leaf()?;
        let there = x.to_device(&second)?;
        ensure!(matches!(there.add(&x), Err(Error::Device { op: "add", .. })), "{name}: mixed operands");
        let seed = Tensor::ones([3], DType::F32, device)?;
        ensure!(
            matches!(there.backward_with(&seed), Err(Error::Device { .. })),
            "{name}: a seed of `device`"
        );
        // A backward function of the program that returns a gradient of the wrong device.
        let wrong = once_differentiable("own", there.detach(), &[&there], move |_, _| {
            Ok([Some(seed.clone())].into_iter().collect())
        });
        let refused = wrong.sum_all()?.backward();
        let is_typed = |error: &Error| error.to_string().contains("to_device: tensors are on");
        ensure!(refused.as_ref().is_err_and(is_typed), "{name}: a wrong gradient: {refused:?}");
        ensure!(x.grad().is_none());
    }
    Ok(())
}

fn a_failed_copy_is_a_typed_error_and_keeps_nothing(device: &Device) -> Result<()> {
    let faulty = Arc::new(FaultyBackend::new(device.backend().clone()));
    let second = Device::with_config(faulty.clone(), Config::default());
    let before = device.memory().allocated();
    let x = wave(&[1 << 12], 0.0, device)?;
    faulty.allow_calls(0);
    let full = x.to_device(&second);
    ensure!(full.as_ref().is_err_and(Error::is_out_of_memory), "{full:?}");
    faulty.allow_calls(u64::MAX);
    let there = x.to_device(&second)?;
    faulty.fail_downloads(true);
    let held = device.memory().allocated();
    let failed = there.to_device(device);
    ensure!(failed.as_ref().is_err_and(|error| error.to_string().contains(NO_DOWNLOAD)), "{failed:?}");
    // The error is that of the pass, too, and the leaf keeps its gradient.
    let leaf = x.to_leaf()?;
    faulty.fail_downloads(false);
    let y = leaf.to_device(&second)?;
    faulty.fail_downloads(true);
    ensure!(y.sum_all()?.backward().is_err() && leaf.grad().is_none());
    faulty.fail_downloads(false);
    ensure_same_bits(&there.to_device(device)?, &x)?;
    ensure!(device.memory().allocated() == held, "a failed copy keeps memory");
    drop((x, leaf, there, y));
    ensure!(device.memory().allocated() == before && second.memory().allocated() == 0);
    let mut card = CardProfile::default();
    card.features.f64 = false;
    if device.supports_dtype(DType::F64) {
        let x = Tensor::ones([2], DType::F64, device)?;
        let refused = x.to_device(&Device::null(card));
        ensure!(matches!(refused, Err(Error::DType { .. } | Error::Unsupported { .. })), "{refused:?}");
    }
    Ok(())
}

fn captured_steps_refuse_copies(device: &Device) -> Result<()> {
    for Pair { name, second } in pairs(device)? {
        let x = wave(&[8], 0.0, device)?;
        for target in [&second, device] {
            let source = if target == &second { x.clone() } else { x.to_device(&second)? };
            let refused = device.capture(|| {
                let own = x.exp()?;
                source.to_device(target)?;
                Ok(own)
            });
            let text = refused.err().context("a captured step has a copy")?.to_string();
            ensure!(text.contains("to_device") && text.contains("one device"), "{name}: {text}");
        }
    }
    Ok(())
}

fn two_cards_copy_over_their_link(device: &Device) -> Result<()> {
    let second = next_card(device)?;
    let (from, to) = (device.info().index, second.info().index);
    if !forebay::cuda::can_device_access_peer(from, to)? {
        return skip(format!("the driver reports no link between cuda:{from} and cuda:{to}"));
    }
    if std::env::var("FOREBAY_CUDA_PEER").is_ok_and(|value| value == "0") {
        return skip("FOREBAY_CUDA_PEER=0 is set");
    }
    // Several sizes, because small and large blocks are in segments of their own.
    for n in [3, 1 << 12, 1 << 20, 48 << 20] {
        let x = Tensor::rand([n], DType::F32, device)?;
        for (source, target) in [(&x, &second), (&x.to_device(&second)?, device)] {
            let names = spans_of_copy(source, target)?;
            ensure!(names[0].is_empty() && names[1] == ["peer copy"], "{n} elements: {names:?}");
        }
    }
    // Segments that grow after the link was opened take it, too.
    let more: Vec<Tensor> =
        (0..16).map(|_| Tensor::rand([16 << 20], DType::F32, device)).collect::<CoreResult<_>>()?;
    let copies: Vec<Tensor> = more.iter().map(|x| x.to_device(&second)).collect::<CoreResult<_>>()?;
    for (x, copy) in more.iter().zip(&copies) {
        ensure!(spans_of_copy(x, &second)?[1] == ["peer copy"]);
        ensure_same_bits(copy, x)?;
    }
    Ok(())
}
