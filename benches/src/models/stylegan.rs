//! Images by a generator whose filters are scaled by a style: one filter for each sample, as a group of one convolution
//! (Karras et al., 2020).

use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Linear, Module};
use forebay::ops::{ConvolutionOptions, InterpolateMode, InterpolateOptions, cat};
use forebay::optim::{AdamW, Optimizer};
use forebay::tensor::Tensor;

use super::Workload;

/// Doubles the extents of images.
fn upsample(x: &Tensor) -> Result<Tensor> {
    let options =
        InterpolateOptions { mode: InterpolateMode::Bilinear, ..InterpolateOptions::with_scale_factor(2.0) };
    x.interpolate(&options)
}

/// Convolution whose filters a style scales, for each sample.
#[derive(Module)]
struct ModulatedConv {
    weight: Tensor,
    style: Linear,
    demodulates: bool,
}

impl ModulatedConv {
    fn new([inputs, outputs, kernel, style]: [usize; 4], demodulates: bool, device: &Device) -> Result<Self> {
        let weight = Tensor::randn([1, outputs, inputs, kernel, kernel], DType::F32, device)?;
        let weight = weight.mul(((inputs * kernel * kernel) as f64).powf(-0.5))?.detach().to_leaf()?;
        Ok(Self { weight, style: Linear::new(style, inputs, device)?, demodulates })
    }

    fn forward(&self, x: &Tensor, style: &Tensor) -> Result<Tensor> {
        let &[batch, inputs, height, width] = x.shape() else { unreachable!("images have four dimensions") };
        let (outputs, kernel) = (self.weight.shape()[1], self.weight.shape()[3]);
        let scale = self.style.forward(style)?.add(1.0)?.reshape([batch, 1, inputs, 1, 1])?;
        let mut weight = self.weight.mul(&scale)?;
        if self.demodulates {
            let size = weight.square()?.sum([2, 3, 4], true)?;
            weight = weight.mul(&size.add(1e-8)?.rsqrt()?)?;
        }
        let options =
            ConvolutionOptions { padding: (kernel / 2).into(), groups: batch, ..Default::default() };
        let weight = weight.reshape([batch * outputs, inputs, kernel, kernel])?;
        let y = x.reshape([1, batch * inputs, height, width])?.conv2d(&weight, None, &options)?;
        y.reshape([batch, outputs, height, width])
    }
}

/// Modulated convolution with noise, bias and leaky ReLU.
#[derive(Module)]
struct StyledLayer {
    conv: ModulatedConv,
    noise: Tensor,
    bias: Tensor,
}

impl StyledLayer {
    fn new([inputs, outputs, style]: [usize; 3], device: &Device) -> Result<Self> {
        Ok(Self {
            conv: ModulatedConv::new([inputs, outputs, 3, style], true, device)?,
            noise: Tensor::zeros([1], DType::F32, device)?.to_leaf()?,
            bias: Tensor::zeros([outputs, 1, 1], DType::F32, device)?.to_leaf()?,
        })
    }

    fn forward(&self, x: &Tensor, style: &Tensor) -> Result<Tensor> {
        let y = self.conv.forward(x, style)?;
        let &[batch, _, height, width] = y.shape() else { unreachable!("images have four dimensions") };
        let noise = Tensor::randn([batch, 1, height, width], y.dtype(), y.device())?;
        let y = y.add(&noise.mul(&self.noise.to_dtype(y.dtype())?)?)?;
        y.add(&self.bias.to_dtype(y.dtype())?)?.leaky_relu(0.2)?.mul(2.0_f64.sqrt())
    }
}

/// Layers of one resolution, and what they add to the image.
#[derive(Module)]
struct Level {
    layers: Vec<StyledLayer>,
    image: ModulatedConv,
    image_bias: Tensor,
}

#[derive(Module)]
struct Generator {
    mapping: Vec<Linear>,
    constant: Tensor,
    levels: Vec<Level>,
}

impl Generator {
    fn new(widths: &[usize], style: usize, device: &Device) -> Result<Self> {
        let level = |(k, &width): (usize, &usize)| {
            let below = widths[k.saturating_sub(1)];
            let mut layers = vec![StyledLayer::new([below, width, style], device)?];
            if k > 0 {
                layers.push(StyledLayer::new([width, width, style], device)?);
            }
            Ok(Level {
                layers,
                image: ModulatedConv::new([width, 3, 1, style], false, device)?,
                image_bias: Tensor::zeros([3, 1, 1], DType::F32, device)?.to_leaf()?,
            })
        };
        Ok(Self {
            mapping: (0..4).map(|_| Linear::new(style, style, device)).collect::<Result<_>>()?,
            constant: Tensor::randn([1, widths[0], 4, 4], DType::F32, device)?.to_leaf()?,
            levels: widths.iter().enumerate().map(level).collect::<Result<_>>()?,
        })
    }

    fn forward(&self, z: &Tensor) -> Result<Tensor> {
        let z = z.mul(&z.square()?.mean([1], true)?.add(1e-8)?.rsqrt()?)?;
        let style = self.mapping.iter().try_fold(z.clone(), |w, layer| layer.forward(&w)?.leaky_relu(0.2))?;
        let (batch, width) = (z.shape()[0], self.constant.shape()[1]);
        let mut x = self.constant.to_dtype(style.dtype())?.expand([batch, width, 4, 4])?;
        let mut image: Option<Tensor> = None;
        for (k, level) in self.levels.iter().enumerate() {
            x = if k > 0 { upsample(&x)? } else { x };
            for layer in &level.layers {
                x = layer.forward(&x, &style)?;
            }
            let more = level.image.forward(&x, &style)?;
            let more = more.add(&level.image_bias.to_dtype(more.dtype())?)?;
            image = Some(match image {
                Some(image) => upsample(&image)?.add(&more)?,
                None => more,
            });
        }
        image.map_or(Ok(x), Ok)
    }
}

/// Residual block that halves the extents.
#[derive(Module)]
struct Down {
    first: Conv2d,
    second: Conv2d,
    shortcut: Conv2d,
}

#[derive(Module)]
struct Discriminator {
    stem: Conv2d,
    downs: Vec<Down>,
    last: Conv2d,
    hidden: Linear,
    head: Linear,
}

impl Discriminator {
    fn new(widths: &[usize], device: &Device) -> Result<Self> {
        let conv = |inputs, outputs, kernel: usize| {
            let options = Conv2dOptions { padding: [kernel / 2; 2], ..Conv2dOptions::default() };
            Conv2d::new(inputs, outputs, kernel, options, device)
        };
        let down = |w: &[usize]| {
            Ok(Down {
                first: conv(w[1], w[1], 3)?,
                second: conv(w[1], w[0], 3)?,
                shortcut: conv(w[1], w[0], 1)?,
            })
        };
        let (first, last) = (widths[0], widths[widths.len() - 1]);
        Ok(Self {
            stem: conv(3, last, 1)?,
            downs: widths.windows(2).rev().map(down).collect::<Result<_>>()?,
            last: conv(first + 1, first, 3)?,
            hidden: Linear::new(first * 16, first, device)?,
            head: Linear::new(first, 1, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(x)?.leaky_relu(0.2)?;
        for down in &self.downs {
            let y = down.first.forward(&x)?.leaky_relu(0.2)?;
            let y = down.second.forward(&y)?.leaky_relu(0.2)?.avg_pool2d(2)?;
            x = y.add(&down.shortcut.forward(&x.avg_pool2d(2)?)?)?.mul(0.5_f64.sqrt())?;
        }
        // Deviation of each feature within groups of four samples, as one more map.
        let &[batch, channels, height, width] = x.shape() else {
            unreachable!("images have four dimensions")
        };
        let groups = batch / 4;
        let of_group = x.reshape([4, groups, channels, height, width])?.to_dtype(DType::F32)?;
        let deviation = of_group.var([0], 0.0, false)?.add(1e-8)?.sqrt()?.mean([1, 2, 3], false)?;
        let deviation = deviation.reshape([1, groups, 1, 1, 1])?.to_dtype(x.dtype())?;
        let deviation =
            deviation.expand([4, groups, 1, height, width])?.reshape([batch, 1, height, width])?;
        let x = self.last.forward(&cat(&[&x, &deviation], 1)?)?.leaky_relu(0.2)?;
        let x = self.hidden.forward(&x.flatten(1, -1)?)?.leaky_relu(0.2)?;
        self.head.forward(&x)?.to_dtype(DType::F32)
    }
}

/// StyleGAN2 of images of 64 pixels: a step trains the discriminator and then the generator.
pub(super) fn stylegan(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, style, widths): (_, _, &[usize]) =
        if tiny { (4, 8, &[8, 4]) } else { (32, 512, &[512, 512, 256, 128, 64]) };
    let side = 4 << (widths.len() - 1);
    let generator = Generator::new(widths, style, device)?;
    let discriminator = Discriminator::new(widths, device)?;
    let shape = [batch, 3, side, side];
    let images = Tensor::rand(shape, DType::F32, device)?.mul(2.0)?.sub(1.0)?;
    let new_optimizer = |net: &dyn Module| AdamW::new(net.parameters(), 1e-4).low_precision_copies(true);
    let (mut train_d, mut train_g) = (new_optimizer(&discriminator), new_optimizer(&generator));
    let parameters = [generator.parameters(), discriminator.parameters()].concat();
    let step = move || {
        let (generated, loss_d) = {
            let _autocast = autocast(DType::BF16)?;
            let z = Tensor::randn([batch, style], DType::F32, images.device())?;
            let generated = generator.forward(&z)?;
            let on_real = discriminator.forward(&images)?.neg()?.softplus(1.0, 20.0)?.mean_all()?;
            let on_fake = discriminator.forward(&generated.detach())?.softplus(1.0, 20.0)?.mean_all()?;
            (generated, on_real.add(&on_fake)?)
        };
        loss_d.backward()?;
        train_d.step()?;
        let loss_g = {
            let _autocast = autocast(DType::BF16)?;
            discriminator.forward(&generated)?.neg()?.softplus(1.0, 20.0)?.mean_all()?
        };
        loss_g.backward()?;
        train_g.step()?;
        train_g.zero_grad();
        // The generator's loss left gradients in the discriminator too.
        train_d.zero_grad();
        loss_d.detach().add(&loss_g.detach())
    };
    Ok(Workload::with_step(&shape, &parameters, Box::new(step)))
}
