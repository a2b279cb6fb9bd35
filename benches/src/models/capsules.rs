//! Images by capsules, whose outputs agree on their inputs in rounds (Sabour et al., 2017).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Linear, Module};
use forebay::ops::einsum;
use forebay::tensor::Tensor;

use super::Workload;

/// Rounds of routing.
const ROUNDS: usize = 3;

/// Shortens vectors to lengths below 1.
fn squash(x: &Tensor) -> Result<Tensor> {
    let square = x.square()?.sum([-1], true)?;
    x.mul(&square.div(&square.add(1.0)?.mul(&square.add(1e-8)?.sqrt()?)?)?)
}

#[derive(Module)]
struct CapsNet {
    stem: Conv2d,
    primary: Conv2d,
    /// \[classes, capsules, outputs, inputs\].
    weight: Tensor,
    decoder: Vec<Linear>,
}

impl CapsNet {
    /// Returns vectors \[batch, classes, outputs\].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (capsules, inputs) = (self.weight.shape()[1], self.weight.shape()[3]);
        let batch = x.shape()[0];
        let y = self.primary.forward(&self.stem.forward(x)?.relu()?)?;
        let y = squash(&y.reshape([batch, inputs, capsules])?.transpose(1, 2)?)?;
        let votes = einsum("jnoi,bni->bjno", &[&self.weight, &y])?;
        let fixed = votes.detach();
        let mut logits = Tensor::zeros([batch, self.weight.shape()[0], capsules], DType::F32, x.device())?;
        for _ in 1..ROUNDS {
            let weights = logits.softmax(1)?.unsqueeze(-1)?;
            let v = squash(&weights.mul(&fixed)?.sum([2], false)?)?;
            logits = logits.add(&fixed.mul(&v.unsqueeze(2)?)?.sum([-1], false)?)?;
        }
        squash(&logits.softmax(1)?.unsqueeze(-1)?.mul(&votes)?.sum([2], false)?)
    }
}

/// Capsule network that also restores its images.
pub(super) fn capsules(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, channels, maps, classes, outputs] =
        if tiny { [2, 20, 8, 4, 3, 4] } else { [128, 28, 256, 32, 10, 16] };
    let inputs = 8;
    let small = (side - 8 - 9) / 2 + 1;
    let count = maps * small * small;
    let weight = Tensor::randn([classes, count, outputs, inputs], DType::F32, device)?;
    let widths = [classes * outputs, 512, 1024, side * side];
    let stride = Conv2dOptions { stride: [2; 2], ..Conv2dOptions::default() };
    let net = CapsNet {
        stem: Conv2d::new(1, channels, 9, Conv2dOptions::default(), device)?,
        primary: Conv2d::new(channels, inputs * maps, 9, stride, device)?,
        weight: weight.mul(0.01)?.detach().to_leaf()?,
        decoder: widths.windows(2).map(|w| Linear::new(w[0], w[1], device)).collect::<Result<_>>()?,
    };
    let shape = [batch, 1, side, side];
    let x = Tensor::rand(shape, DType::F32, device)?;
    let class = Tensor::randint(0, classes as i64, [batch], DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let v = net.forward(&x)?;
        let truth = class.one_hot(classes)?.to_dtype(DType::F32)?;
        let lengths = v.square()?.sum([-1], false)?.add(1e-8)?.sqrt()?;
        let present = lengths.rsub(0.9)?.relu()?.square()?.mul(&truth)?;
        let absent = lengths.sub(0.1)?.relu()?.square()?.mul(&truth.rsub(1.0)?)?.mul(0.5)?;
        let margin = present.add(&absent)?.sum([1], false)?.mean_all()?;
        let mut y = v.mul(&truth.unsqueeze(-1)?)?.flatten(1, -1)?;
        for (k, layer) in net.decoder.iter().enumerate() {
            y = layer.forward(&y)?;
            y = if k + 1 < net.decoder.len() { y.relu()? } else { y.to_dtype(DType::F32)?.sigmoid()? };
        }
        let error = y.sub(&x.flatten(1, -1)?)?.square()?.sum([1], false)?.mean_all()?;
        margin.add(&error.mul(0.0005)?)
    }))
}
