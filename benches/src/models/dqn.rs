//! Reinforcement learning by values of actions, from a memory of images (Mnih et al., 2015).

use forebay::amp::autocast;
use forebay::autograd::no_grad;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Linear, Module};
use forebay::ops::Reduction;
use forebay::optim::{AdamW, Optimizer, clip_grad_norm_};
use forebay::tensor::Tensor;

use super::Workload;

/// Factor of later rewards.
const DISCOUNT: f64 = 0.99;
/// Part of the target network that a step replaces.
const RATE: f64 = 0.005;

/// Values of actions in states \[batch, frames, height, width\] of 8-bit pixels.
#[derive(Module)]
struct Values {
    convs: Vec<Conv2d>,
    hidden: Linear,
    head: Linear,
}

impl Values {
    fn new(side: usize, [frames, actions, hidden]: [usize; 3], device: &Device) -> Result<Self> {
        let conv = |inputs, outputs, kernel, stride| {
            let options = Conv2dOptions { stride: [stride; 2], ..Conv2dOptions::default() };
            Conv2d::new(inputs, outputs, kernel, options, device)
        };
        let last = ((side - 8) / 4 - 3) / 2 - 1;
        Ok(Self {
            convs: vec![conv(frames, 32, 8, 4)?, conv(32, 64, 4, 2)?, conv(64, 64, 3, 1)?],
            hidden: Linear::new(64 * last * last, hidden, device)?,
            head: Linear::new(hidden, actions, device)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::F32)?.div(255.0)?;
        let x = self.convs.iter().try_fold(x, |x, conv| conv.forward(&x)?.relu())?;
        self.head.forward(&self.hidden.forward(&x.flatten(1, -1)?)?.relu()?)?.to_dtype(DType::F32)
    }
}

/// Double DQN with a target network that follows slowly.
pub(super) fn dqn(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, stored, frames, actions, hidden] =
        if tiny { [4, 36, 20, 2, 3, 16] } else { [512, 84, 20_000, 4, 18, 512] };
    let new_net = || Values::new(side, [frames, actions, hidden], device);
    let (net, target) = (new_net()?, new_net()?);
    target.requires_grad_(false);
    let parameters = net.parameters();
    let (followed, followers) = (net.parameters(), target.parameters());
    let images = Tensor::randint(0, 256, [stored, frames, side, side], DType::U8, device)?;
    let done = Tensor::randint(0, 2, [stored], DType::I32, device)?.to_dtype(DType::F32)?;
    let taken = Tensor::randint(0, actions as i64, [stored], DType::I32, device)?;
    let rewards = Tensor::randn([stored], DType::F32, device)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-4).low_precision_copies(true);
    let step = move || {
        let at = Tensor::randint(0, stored as i64 - 1, [batch], DType::I32, images.device())?;
        let (now, next) = (images.index_select(0, &at)?, images.index_select(0, &at.add(1)?)?);
        let value = {
            let (_no_grad, _autocast) = (no_grad(), autocast(DType::BF16)?);
            let best = net.forward(&next)?.argmax(1, true)?;
            target.forward(&next)?.gather(1, &best)?.squeeze(1)?
        };
        let future = value.mul(&done.index_select(0, &at)?.rsub(1.0)?)?.mul(DISCOUNT)?;
        let goal = rewards.index_select(0, &at)?.add(&future)?;
        let loss = {
            let _autocast = autocast(DType::BF16)?;
            let taken = taken.index_select(0, &at)?.unsqueeze(1)?;
            let values = net.forward(&now)?.gather(1, &taken)?.squeeze(1)?;
            values.smooth_l1_loss(&goal, 1.0, Reduction::Mean)?
        };
        loss.backward()?;
        clip_grad_norm_(&followed, 10.0)?;
        optimizer.step()?;
        optimizer.zero_grad();
        let _no_grad = no_grad();
        for (follower, followed) in followers.iter().zip(&followed) {
            follower.lerp_(followed, RATE)?;
        }
        Ok(loss.detach())
    };
    Ok(Workload::with_step(&[batch, frames, side, side], &parameters, Box::new(step)))
}
