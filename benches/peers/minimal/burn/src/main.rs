//! Trains a perceptron of two layers with burn.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::{Distribution, activation::relu};

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self { hidden: LinearConfig::new(2, 64).init(device), output: LinearConfig::new(64, 1).init(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(x)))
    }
}

fn main() {
    let device = Device::default().autodiff();
    let mut net = Mlp::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<2>::random([256, 2], Distribution::Normal(0.0, 1.0), &device);
    let y = x.clone().square().sum_dim(1);
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = (net.forward(x.clone()) - y.clone()).square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-2, net, gradients);
        losses.push(loss.into_scalar::<f32>());
    }
    println!("loss {:.4} to {:.4}", losses[0], losses[19]);
    assert!(losses[19] < losses[0]);
}
