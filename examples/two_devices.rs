//! Trains a network whose halves are on two devices. Activations go to the second device, and gradients come back.
//!
//! `cargo run --release --example two_devices -- cuda:0 cuda:1`. Without arguments, the first two CUDA cards are used.
//! On a machine with one device both halves are on it, each in a memory pool of its own.

use std::f64::consts::TAU;
use std::time::Instant;

use forebay::memory::Config;
use forebay::prelude::*;

const CLASSES: usize = 3;
const POINTS: usize = 1536;
const WIDTH: usize = 128;
/// Parts of a batch. While the second device works on one part, the first device works on the next one.
const MICRO_BATCHES: usize = 4;
const STEPS: usize = 200;

/// First half of the network, on the first device.
#[derive(Module)]
struct Front {
    fc1: Linear,
    fc2: Linear,
}

/// Second half of the network, on the second device.
#[derive(Module)]
struct Back {
    fc3: Linear,
    head: Linear,
}

#[derive(Module)]
struct Net {
    front: Front,
    back: Back,
    /// Device of `back`.
    second: Device,
}

impl Net {
    fn new(first: &Device, second: &Device) -> Result<Self> {
        Ok(Self {
            front: Front { fc1: Linear::new(2, WIDTH, first)?, fc2: Linear::new(WIDTH, WIDTH, first)? },
            back: Back {
                fc3: Linear::new(WIDTH, WIDTH, second)?,
                head: Linear::new(WIDTH, CLASSES, second)?,
            },
            second: second.clone(),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.front.fc2.forward(&self.front.fc1.forward(x)?.gelu()?)?.gelu()?;
        let hidden = hidden.to_device(&self.second)?;
        self.back.head.forward(&self.back.fc3.forward(&hidden)?.gelu()?)
    }
}

/// Opens the devices that the arguments name, else two CUDA cards, else one device twice.
fn open_devices() -> Result<[Device; 2]> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let found = Device::device_count("cuda");
    let [first, second] = match &names[..] {
        [first, second] => [first.as_str(), second.as_str()],
        [] if found >= 2 => ["cuda:0", "cuda:1"],
        _ => {
            let device = Device::best()?;
            println!(
                "there are {found} CUDA cards, so both halves are on {device}, each in a pool of its own"
            );
            let again = Device::with_config(device.backend().clone(), Config::default());
            return Ok([device, again]);
        }
    };
    Ok([Device::open(first)?, Device::open(second)?])
}

/// Returns points on the arms of a spiral, and the arms as classes.
fn spiral(first: &Device, second: &Device) -> Result<(Tensor, Tensor)> {
    let (mut points, mut classes) = (Vec::new(), Vec::new());
    for k in 0..POINTS {
        let (arm, radius) = (k % CLASSES, (k as f64 + 1.0) / POINTS as f64);
        let angle = TAU * (arm as f64 / CLASSES as f64 + 0.9 * radius) + 0.2 * (7.0 * k as f64).sin();
        points.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        classes.push(arm as i64);
    }
    // The loss is on the second device, and so are its classes.
    Ok((Tensor::from_slice(&points, [POINTS, 2], first)?, Tensor::from_slice(&classes, [POINTS], second)?))
}

fn main() -> anyhow::Result<()> {
    let [first, second] = open_devices()?;
    println!("first half:  {}\nsecond half: {}", first.info(), second.info());
    first.manual_seed(1);
    second.manual_seed(2);
    let net = Net::new(&first, &second)?;
    let mut optimizer = AdamW::new(net.parameters(), 3e-3);
    let (x, classes) = spiral(&first, &second)?;
    let part = POINTS / MICRO_BATCHES;
    let start = Instant::now();
    for step in 1..=STEPS {
        let mut total = Tensor::zeros((), DType::F32, &second)?;
        for k in 0..MICRO_BATCHES {
            let (x, classes) = (x.narrow(0, k * part, part)?, classes.narrow(0, k * part, part)?);
            let loss = net.forward(&x)?.cross_entropy(&classes)?.div(MICRO_BATCHES as f64)?;
            loss.backward()?; // Each gradient is on the device of its parameter.
            total = total.add(&loss.detach())?;
        }
        clip_grad_norm_(optimizer.parameters(), 1.0)?; // One norm for both devices.
        optimizer.step()?;
        optimizer.zero_grad();
        if step == 1 || step % 50 == 0 {
            println!("step {step}: loss {:.4}", total.item()?);
        }
    }
    let _no_grad = forebay::autograd::no_grad();
    let hits = net.forward(&x)?.argmax(1, false)?.eq(&classes)?.to_dtype(DType::F32)?.mean_all()?.item()?;
    println!("{:.1} % of the points are right, after {:.2} s", 100.0 * hits, start.elapsed().as_secs_f64());
    for (half, device) in [("first half", &first), ("second half", &second)] {
        println!("{half}: {}", device.memory().summary());
    }
    anyhow::ensure!(hits > 0.9, "the network has learned only {:.1} % of the points", 100.0 * hits);
    Ok(())
}
