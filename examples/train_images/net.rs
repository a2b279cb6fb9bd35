//! The network.

use forebay::prelude::*;

/// Two convolutions and two linear layers. A browser page (`examples/browser`) trains it too.
#[derive(Module)]
pub(crate) struct Net {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    dropout: Dropout,
    fc2: Linear,
}

impl Net {
    pub(crate) fn new(width: usize, device: &Device) -> Result<Self> {
        let same = Conv2dOptions { padding: [1, 1], ..Default::default() };
        Ok(Self {
            conv1: Conv2d::new(1, width, [3, 3], same, device)?,
            conv2: Conv2d::new(width, 2 * width, [3, 3], same, device)?,
            fc1: Linear::new(2 * width * 7 * 7, 128, device)?,
            dropout: Dropout::new(0.25),
            fc2: Linear::new(128, 10, device)?,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.conv1.forward(x)?.relu()?.max_pool2d(2)?;
        let x = self.conv2.forward(&x)?.relu()?.max_pool2d(2)?;
        let x = self.fc1.forward(&x.flatten(1, -1)?)?.relu()?;
        self.fc2.forward(&self.dropout.forward(&x)?)
    }
}
