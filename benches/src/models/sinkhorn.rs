//! Sets of points matched by optimal transport, with the gradient through the iterations (Cuturi, 2013).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::tensor::Tensor;

use super::Workload;

/// Blur of the transport.
const BLUR: f64 = 0.05;

#[derive(Module)]
struct Features(Vec<Linear>);

impl Features {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.clone();
        for (k, layer) in self.0.iter().enumerate() {
            y = layer.forward(&y)?;
            y = if k + 1 < self.0.len() { y.relu()? } else { y };
        }
        y.to_dtype(DType::F32)?.normalize(-1, &Default::default())
    }
}

/// Transport between the features of two sets of points, by iterations on logarithms.
pub(super) fn sinkhorn(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, points, width, features, iterations] =
        if tiny { [2, 8, 8, 4, 2] } else { [32, 512, 256, 64, 20] };
    let net = Features(vec![
        Linear::new(3, width, device)?,
        Linear::new(width, width, device)?,
        Linear::new(width, features, device)?,
    ]);
    let set = || Tensor::randn([batch, points, 3], DType::F32, device);
    let (first, second) = (set()?, set()?);
    // All points have the same mass.
    let mass = -(points as f64).ln();
    Ok(Workload::new(&[batch, points], net, move |net| {
        let cost = net.forward(&first)?.cdist(&net.forward(&second)?, 2.0)?;
        let scaled = cost.div(-BLUR)?;
        let mut u = Tensor::zeros([batch, points], DType::F32, first.device())?;
        let mut v = u.clone();
        for _ in 0..iterations {
            u = scaled.add(&v.unsqueeze(1)?)?.logsumexp(2, false)?.rsub(mass)?;
            v = scaled.add(&u.unsqueeze(2)?)?.logsumexp(1, false)?.rsub(mass)?;
        }
        let plan = scaled.add(&u.unsqueeze(2)?)?.add(&v.unsqueeze(1)?)?.exp()?;
        plan.mul(&cost)?.sum([1, 2], false)?.mean_all()
    }))
}
