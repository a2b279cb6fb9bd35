//! Reinforcement learning by a policy: advantages of a rollout, and updates of small networks (Schulman et al., 2017).

use forebay::amp::autocast;
use forebay::autograd::no_grad;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::ops::stack;
use forebay::optim::{AdamW, Optimizer, clip_grad_norm_};
use forebay::tensor::Tensor;

use super::Workload;

/// Factor of later rewards.
const DISCOUNT: f64 = 0.99;
/// Factor of later errors of the values.
const SMOOTHING: f64 = 0.95;
/// Bound of the change of a probability.
const CLIP: f64 = 0.2;

/// Network of tanh layers.
#[derive(Module)]
struct Mlp(Vec<Linear>);

impl Mlp {
    fn new(widths: &[usize], device: &Device) -> Result<Self> {
        Ok(Self(widths.windows(2).map(|w| Linear::new(w[0], w[1], device)).collect::<Result<_>>()?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.clone();
        for (k, layer) in self.0.iter().enumerate() {
            y = layer.forward(&y)?;
            y = if k + 1 < self.0.len() { y.tanh()? } else { y };
        }
        y.to_dtype(DType::F32)
    }
}

#[derive(Module)]
struct Agent {
    policy: Mlp,
    value: Mlp,
}

/// Returns the advantages of a rollout \[steps, environments\] and the values that the critic should have found.
/// `values` has one more row, and `goes_on` is 0 after the end of an episode.
fn advantages(rewards: &Tensor, values: &Tensor, goes_on: &Tensor) -> Result<(Tensor, Tensor)> {
    let steps = rewards.shape()[0];
    let mut last = rewards.select(0, 0)?.zeros_like()?;
    let mut found = Vec::with_capacity(steps);
    for t in (0..steps as isize).rev() {
        let goes_on = goes_on.select(0, t)?;
        let next = values.select(0, t + 1)?.mul(&goes_on)?.mul(DISCOUNT)?;
        let error = rewards.select(0, t)?.add(&next)?.sub(&values.select(0, t)?)?;
        last = error.add(&last.mul(&goes_on)?.mul(DISCOUNT * SMOOTHING)?)?;
        found.push(last.clone());
    }
    found.reverse();
    let advantages = stack(&found, 0)?;
    let returns = advantages.add(&values.narrow(0, 0, steps)?)?;
    Ok((advantages, returns))
}

/// Proximal policy optimisation: a rollout of 128 steps, and four minibatches of it.
pub(super) fn ppo(tiny: bool, device: &Device) -> Result<Workload> {
    let [steps, environments, observed, hidden, actions, minibatches] =
        if tiny { [4, 4, 3, 8, 2, 2] } else { [128, 64, 24, 64, 6, 4] };
    let net = Agent {
        policy: Mlp::new(&[observed, hidden, hidden, actions], device)?,
        value: Mlp::new(&[observed, hidden, hidden, 1], device)?,
    };
    let parameters = net.parameters();
    let rows = steps * environments;
    let observations = Tensor::randn([rows + environments, observed], DType::F32, device)?;
    let taken = Tensor::randint(0, actions as i64, [rows], DType::I32, device)?;
    let rewards = Tensor::randn([steps, environments], DType::F32, device)?;
    let goes_on = Tensor::rand([steps, environments], DType::F32, device)?.lt(0.99)?.to_dtype(DType::F32)?;
    let mut optimizer = AdamW::new(net.parameters(), 1e-4).low_precision_copies(true);
    let trained = parameters.clone();
    let step = move || {
        // What the networks say before the updates.
        let (before, old_values, advantages, returns) = {
            let (_no_grad, _autocast) = (no_grad(), autocast(DType::BF16)?);
            let values = net.value.forward(&observations)?.reshape([steps + 1, environments])?;
            let seen = observations.narrow(0, 0, rows)?;
            let before = net.policy.forward(&seen)?.log_softmax(-1)?;
            let before = before.gather(1, &taken.unsqueeze(1)?)?.squeeze(1)?;
            let (advantages, returns) = advantages(&rewards, &values, &goes_on)?;
            let values = values.narrow(0, 0, steps)?.flatten(0, 1)?;
            (before, values, advantages.flatten(0, 1)?, returns.flatten(0, 1)?)
        };
        let order = Tensor::randperm(rows, DType::I32, observations.device())?;
        let mut total = Tensor::zeros((), DType::F32, observations.device())?;
        for at in order.chunk(minibatches, 0)? {
            let pick = |t: &Tensor| t.index_select(0, &at);
            let loss = {
                let _autocast = autocast(DType::BF16)?;
                let seen = pick(&observations)?;
                let log_probs = net.policy.forward(&seen)?.log_softmax(-1)?;
                let values = net.value.forward(&seen)?.squeeze(1)?;
                let now = log_probs.gather(1, &pick(&taken)?.unsqueeze(1)?)?.squeeze(1)?;
                let entropy = log_probs.exp()?.mul(&log_probs)?.sum([-1], false)?.neg()?.mean_all()?;
                let gain = pick(&advantages)?;
                let gain = gain.sub(&gain.mean_all()?)?.div(&gain.std([0], 1.0, false)?.add(1e-8)?)?;
                let ratio = now.sub(&pick(&before)?)?.exp()?;
                let clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)?;
                let policy_loss = ratio.mul(&gain)?.minimum(&clipped.mul(&gain)?)?.mean_all()?.neg()?;
                let (old, goal) = (pick(&old_values)?, pick(&returns)?);
                let moved = values.sub(&old)?.clamp(-CLIP, CLIP)?.add(&old)?;
                let errors = values.sub(&goal)?.square()?.maximum(&moved.sub(&goal)?.square()?)?;
                let value_loss = errors.mean_all()?.mul(0.5)?;
                policy_loss.sub(&entropy.mul(0.01)?)?.add(&value_loss.mul(0.5)?)?
            };
            loss.backward()?;
            clip_grad_norm_(&trained, 0.5)?;
            optimizer.step()?;
            optimizer.zero_grad();
            total = total.add(&loss.detach())?;
        }
        total.div(minibatches as f64)
    };
    Ok(Workload::with_step(&[steps, environments, observed], &parameters, Box::new(step)))
}
