//! Training steps on images: ResNet-50 and ViT-B/16, with 64 images of 224 x 224 in a step.

use anyhow::Result;
use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, LayerNorm, Linear, Module, SelfAttention};
use forebay::ops::{Pool2dOptions, cat};
use forebay::optim::{Optimizer, Sgd};
use forebay::tensor::Tensor;
use serde_json::json;

use crate::timing::Bench;

const CLASSES: usize = 1000;

/// Convolution without bias, and its batch norm.
#[derive(Module)]
struct ConvBn {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl ConvBn {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> CoreResult<Self> {
        let options = Conv2dOptions {
            stride: [stride; 2],
            padding: [kernel / 2; 2],
            bias: false,
            ..Conv2dOptions::default()
        };
        Ok(Self {
            conv: Conv2d::new(channels[0], channels[1], [kernel; 2], options, device)?,
            norm: BatchNorm2d::new(channels[1], device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        self.norm.forward(&self.conv.forward(x)?)
    }

    fn forward_relu(&self, x: &Tensor) -> CoreResult<Tensor> {
        self.norm.forward_relu(&self.conv.forward(x)?)
    }
}

/// Bottleneck of ResNet-50: a 3 x 3 convolution between two 1 x 1 convolutions, and a shortcut.
#[derive(Module)]
struct Bottleneck {
    reduce: ConvBn,
    conv: ConvBn,
    expand: ConvBn,
    down: Option<ConvBn>,
}

impl Bottleneck {
    fn new(inputs: usize, width: usize, stride: usize, device: &Device) -> CoreResult<Self> {
        let outputs = 4 * width;
        let down =
            (inputs != outputs || stride != 1).then(|| ConvBn::new([inputs, outputs], 1, stride, device));
        Ok(Self {
            reduce: ConvBn::new([inputs, width], 1, 1, device)?,
            conv: ConvBn::new([width, width], 3, stride, device)?,
            expand: ConvBn::new([width, outputs], 1, 1, device)?,
            down: down.transpose()?,
        })
    }

    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        let h = self.conv.forward_relu(&self.reduce.forward_relu(x)?)?;
        let aside = self.down.as_ref().map_or_else(|| Ok(x.clone()), |down| down.forward(x))?;
        self.expand.forward(&h)?.add(&aside)?.relu()
    }
}

#[derive(Module)]
struct ResNet {
    stem: ConvBn,
    blocks: Vec<Bottleneck>,
    head: Linear,
}

impl ResNet {
    fn new(layers: &[usize], width: usize, device: &Device) -> CoreResult<Self> {
        let (mut blocks, mut channels) = (Vec::new(), width);
        for (stage, &count) in layers.iter().enumerate() {
            for block in 0..count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Bottleneck::new(channels, width << stage, stride, device)?);
                channels = 4 * (width << stage);
            }
        }
        Ok(Self {
            stem: ConvBn::new([3, width], 7, 2, device)?,
            blocks,
            head: Linear::new(channels, CLASSES, device)?,
        })
    }
}

/// Transformer block without a causal mask.
#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: SelfAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn forward(&self, x: &Tensor) -> CoreResult<Tensor> {
        let x = x.add(&self.attention.forward(&self.norm1.forward(x)?)?)?;
        x.add(&self.down.forward(&self.up.forward(&self.norm2.forward(&x)?)?.gelu()?)?)
    }
}

#[derive(Module)]
struct Vit {
    patches: Conv2d,
    class: Tensor,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Vit {
    fn new(side: usize, layers: usize, width: usize, heads: usize, device: &Device) -> CoreResult<Self> {
        let patch = 16;
        let small = |shape: &[usize]| Tensor::randn(shape, DType::F32, device)?.mul(0.02)?.detach().to_leaf();
        let block = |_| {
            Ok(Block {
                norm1: LayerNorm::new(&[width], device)?,
                attention: SelfAttention::new(width, heads, device)?,
                norm2: LayerNorm::new(&[width], device)?,
                up: Linear::new(width, 4 * width, device)?,
                down: Linear::new(4 * width, width, device)?,
            })
        };
        Ok(Self {
            patches: Conv2d::new(
                3,
                width,
                [patch; 2],
                Conv2dOptions { stride: [patch; 2], ..Conv2dOptions::default() },
                device,
            )?,
            class: small(&[1, 1, width])?,
            positions: small(&[(side / patch) * (side / patch) + 1, width])?,
            blocks: (0..layers).map(block).collect::<CoreResult<_>>()?,
            norm: LayerNorm::new(&[width], device)?,
            head: Linear::new(width, CLASSES, device)?,
        })
    }
}

/// Model to train.
trait Classifier: Module {
    fn logits(&self, x: &Tensor) -> CoreResult<Tensor>;
}

impl Classifier for ResNet {
    fn logits(&self, x: &Tensor) -> CoreResult<Tensor> {
        let window = Pool2dOptions { stride: [2; 2], padding: [1; 2], ..Pool2dOptions::new(3) };
        let x = self.stem.forward_relu(x)?.max_pool2d(window)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&x.mean(&[2, 3], false)?)
    }
}

impl Classifier for Vit {
    fn logits(&self, x: &Tensor) -> CoreResult<Tensor> {
        let x = self.patches.forward(x)?.flatten(2, -1)?.transpose(1, 2)?;
        let class = self.class.broadcast_to(&[x.shape()[0], 1, x.shape()[2]])?;
        let x = cat(&[&class.to_dtype(x.dtype())?, &x], 1)?.add(&self.positions)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&self.norm.forward(&x.select(1, 0)?)?)
    }
}

/// Prints one line for each model and variant, and profiles one eager step of each model if requested.
pub(crate) fn vision(b: &Bench<'_>) -> Result<()> {
    let (batch, side) = if b.tiny { (2, 32) } else { (64, 224) };
    bench_model(b, "resnet50_train", [batch, 3, side, side], |device| match b.tiny {
        true => ResNet::new(&[1, 1], 8, device),
        false => ResNet::new(&[3, 4, 6, 3], 64, device),
    })?;
    bench_model(b, "vit_b16_train", [batch, 3, side, side], |device| match b.tiny {
        true => Vit::new(side, 2, 32, 2, device),
        false => Vit::new(side, 12, 768, 12, device),
    })
}

fn bench_model<N: Classifier>(
    b: &Bench<'_>,
    name: &str,
    shape: [usize; 4],
    net: impl Fn(&Device) -> CoreResult<N>,
) -> Result<()> {
    let low = Some(DType::BF16);
    for (variant, low, capture) in [("f32", None, false), ("bf16", low, false), ("bf16_captured", low, true)]
    {
        // Its own pool, so that the peak belongs to this variant only.
        let device = &Device::with_config(b.device.backend().clone(), b.device.pool().config());
        device.manual_seed(1);
        let net = net(device)?;
        let mut optimizer = Sgd::new(net.parameters(), 1e-2).momentum(0.9);
        let x = Tensor::randn(&shape, DType::F32, device)?;
        let classes: Vec<i32> = (0..shape[0]).map(|k| (k * 37 % CLASSES) as i32).collect();
        let y = Tensor::from_slice(&classes, &[shape[0]], device)?;
        let mut step = || -> CoreResult<Tensor> {
            let loss = {
                let _autocast = low.map(autocast).transpose()?;
                net.logits(&x)?.cross_entropy(&y)?
            };
            loss.backward()?;
            optimizer.step()?;
            optimizer.zero_grad();
            Ok(loss.detach())
        };
        let first_loss = step()?.item()?;
        let mut captured = capture.then(|| device.capture(&mut step)).transpose()?;
        let once = || match &mut captured {
            Some(captured) => captured.replay(),
            None => step(),
        };
        let (warm_up, steps) = if b.tiny { (1, 2) } else { (4, 10) };
        let (m, last_loss) = Bench::time_steps(device, (warm_up, steps), once)?;
        let memory = device.memory();
        b.emit_line(
            name,
            &shape.map(|n| n.to_string()).join("x"),
            if low.is_some() { "bf16" } else { "f32" },
            json!({
                "variant": variant, "median_ms": m, "img_s": shape[0] as f64 * 1e3 / m,
                "first_loss": first_loss, "last_loss": last_loss,
                "peak_mem_mb": memory.peak_allocated() as f64 / f64::from(1 << 20),
            }),
        );
        if !capture {
            b.write_profile(device, &format!("{name}_{variant}"), step)?;
        }
    }
    Ok(())
}
