//! Physics-informed network: a solution of Burgers' equation, whose derivatives are part of the loss
//! (Raissi et al., 2019).

use std::f64::consts::PI;

use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::ops::{Reduction, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Viscosity of the fluid.
const VISCOSITY: f64 = 0.01 / PI;

#[derive(Module)]
struct Solution(Vec<Linear>);

impl Solution {
    fn forward(&self, x: &Tensor, t: &Tensor) -> Result<Tensor> {
        let mut y = cat(&[x, t], 1)?;
        for (k, layer) in self.0.iter().enumerate() {
            y = layer.forward(&y)?;
            if k + 1 < self.0.len() {
                y = y.tanh()?;
            }
        }
        y.to_dtype(DType::F32)
    }
}

/// Returns the derivative of the sum of `y` by `x`, which has a derivative too.
fn derivative(y: &Tensor, x: &Tensor) -> Result<Tensor> {
    Ok(autograd::grad(&[y.sum_all()?], &[x], &GradOptions::create_graph())?.swap_remove(0))
}

/// Network of six layers of 256, at points inside and on the border of the domain.
pub(super) fn physics(tiny: bool, device: &Device) -> Result<Workload> {
    let [points, border, width, layers] = if tiny { [16, 8, 8, 2] } else { [65_536, 4096, 256, 6] };
    let mut net = vec![Linear::new(2, width, device)?];
    for _ in 1..layers {
        net.push(Linear::new(width, width, device)?);
    }
    net.push(Linear::new(width, 1, device)?);
    let uniform = |count: usize| Tensor::rand([count, 1], DType::F32, device);
    let (x, t) = (uniform(points)?.mul(2.0)?.sub(1.0)?, uniform(points)?);
    let x0 = uniform(border)?.mul(2.0)?.sub(1.0)?;
    let (t0, y0) = (x0.zeros_like()?, x0.mul(PI)?.sin()?.neg()?);
    Ok(Workload::new(&[points, width], Solution(net), move |net| {
        let (x, t) = (x.to_leaf()?, t.to_leaf()?);
        let y = net.forward(&x, &t)?;
        let (by_x, by_t) = (derivative(&y, &x)?, derivative(&y, &t)?);
        let residual = by_t.add(&y.mul(&by_x)?)?.sub(&derivative(&by_x, &x)?.mul(VISCOSITY)?)?;
        let start = net.forward(&x0, &t0)?.mse_loss(&y0, Reduction::Mean)?;
        residual.square()?.mean_all()?.add(&start)
    }))
}
