//! Generation of images by two networks that compete.

use forebay::amp::autocast;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, ConvTranspose2d, ConvTranspose2dOptions, Module};
use forebay::optim::{AdamW, Optimizer};
use forebay::tensor::Tensor;

use super::Workload;

/// DCGAN's generator: transposed convolutions, from a vector to an image.
#[derive(Module)]
struct Generator {
    convs: Vec<ConvTranspose2d>,
    norms: Vec<BatchNorm2d>,
}

impl Generator {
    fn forward(&self, noise: &Tensor) -> Result<Tensor> {
        let mut x = noise.clone();
        for (conv, norm) in self.convs.iter().zip(&self.norms) {
            x = norm.forward(&conv.forward(&x)?)?.relu()?;
        }
        self.convs[self.norms.len()].forward(&x)?.tanh()
    }
}

/// DCGAN's discriminator: strided convolutions with leaky ReLU, from an image to a logit.
#[derive(Module)]
struct Discriminator {
    stem: Conv2d,
    convs: Vec<Conv2d>,
    norms: Vec<BatchNorm2d>,
    head: Conv2d,
}

impl Discriminator {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(x)?.leaky_relu(0.2)?;
        for (conv, norm) in self.convs.iter().zip(&self.norms) {
            x = norm.forward(&conv.forward(&x)?)?.leaky_relu(0.2)?;
        }
        self.head.forward(&x)?.to_dtype(DType::F32)?.flatten(0, -1)
    }
}

/// DCGAN: a step trains the discriminator on real and generated images, and then the generator.
pub(super) fn dcgan(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, side, latent, widths): (_, _, _, &[usize]) =
        if tiny { (2, 16, 4, &[4, 8]) } else { (128, 64, 100, &[64, 128, 256, 512]) };
    let options = Conv2dOptions { stride: [2; 2], padding: [1; 2], bias: false, ..Conv2dOptions::default() };
    let transposed = ConvTranspose2dOptions {
        stride: [2; 2],
        padding: [1; 2],
        bias: false,
        ..ConvTranspose2dOptions::default()
    };
    let last = widths[widths.len() - 1];
    let start = ConvTranspose2dOptions { bias: false, ..ConvTranspose2dOptions::default() };
    let mut convs = vec![ConvTranspose2d::new(latent, last, 4, start, device)?];
    let outputs: Vec<usize> = widths.iter().rev().skip(1).copied().chain([3]).collect();
    for (&from, &to) in widths.iter().rev().zip(&outputs) {
        convs.push(ConvTranspose2d::new(from, to, 4, transposed, device)?);
    }
    let norms = widths.iter().rev().map(|&w| BatchNorm2d::new(w, device)).collect::<Result<_>>()?;
    let generator = Generator { convs, norms };
    let end = Conv2dOptions { bias: false, ..Conv2dOptions::default() };
    let discriminator = Discriminator {
        stem: Conv2d::new(3, widths[0], 4, options, device)?,
        convs: widths
            .windows(2)
            .map(|w| Conv2d::new(w[0], w[1], 4, options, device))
            .collect::<Result<_>>()?,
        norms: widths[1..].iter().map(|&w| BatchNorm2d::new(w, device)).collect::<Result<_>>()?,
        head: Conv2d::new(last, 1, 4, end, device)?,
    };
    let shape = [batch, 3, side, side];
    let images = Tensor::rand(shape, DType::F32, device)?.mul(2.0)?.sub(1.0)?;
    let (real, fake) =
        (Tensor::ones([batch], DType::F32, device)?, Tensor::zeros([batch], DType::F32, device)?);
    let new_optimizer = |net: &dyn Module| AdamW::new(net.parameters(), 1e-4).low_precision_copies(true);
    let (mut train_d, mut train_g) = (new_optimizer(&discriminator), new_optimizer(&generator));
    let parameters = [generator.parameters(), discriminator.parameters()].concat();
    let step = move || {
        let (generated, loss_d) = {
            let _autocast = autocast(DType::BF16)?;
            let noise = Tensor::randn([batch, latent, 1, 1], DType::F32, images.device())?;
            let generated = generator.forward(&noise)?;
            let on_real = discriminator
                .forward(&images)?
                .binary_cross_entropy_with_logits(&real, &Default::default())?;
            let on_fake = discriminator
                .forward(&generated.detach())?
                .binary_cross_entropy_with_logits(&fake, &Default::default())?;
            (generated, on_real.add(&on_fake)?)
        };
        loss_d.backward()?;
        train_d.step()?;
        let loss_g = {
            let _autocast = autocast(DType::BF16)?;
            discriminator.forward(&generated)?.binary_cross_entropy_with_logits(&real, &Default::default())?
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
