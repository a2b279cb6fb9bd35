//! Trains the network of `cargo xtask train` in a browser page, through WebGPU. `cargo xtask browser` builds and serves
//! the page.
//!
//! A page cannot wait: the page's script awaits each step, and draws between the steps.

#[path = "../../train_images/net.rs"]
mod net;

use forebay::autograd::no_grad;
use forebay::data::BatchIter;
use forebay::nn::eval_mode;
use forebay::optim::schedule::OneCycle;
use forebay::prelude::*;
use forebay::train;
use net::Net;
use wasm_bindgen::prelude::*;

/// Options of `train_images` on a software driver.
const SEED: u64 = 42;
const WIDTH: usize = 8;
const BATCH: usize = 32;
const MAX_LR: f64 = 3e-3;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console, js_name = error)]
    fn log_error(message: &str);
}

/// Writes panics to the browser's console.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| log_error(&panic.to_string())));
}

/// Training run: the network, its optimiser and the position in the data.
#[wasm_bindgen]
pub struct Training {
    device: Device,
    net: Net,
    optimizer: AdamW,
    schedule: OneCycle,
    batches: BatchIter<FashionMnist>,
    steps_done: u64,
}

/// Measurements of one step.
#[wasm_bindgen]
pub struct StepReport {
    /// Loss of the batch.
    pub loss: f64,
    /// Fraction of the batch that was classified correctly.
    pub accuracy: f64,
    /// Bytes of the tensors after the step.
    pub allocated: f64,
    /// Bytes that the pool holds.
    pub reserved: f64,
}

#[wasm_bindgen]
impl Training {
    /// Opens the browser's device and creates a network; the learning rate follows a schedule of `steps` steps.
    pub async fn open(steps: u32) -> Result<Self, JsError> {
        let device = Device::best_async().await?;
        device.manual_seed(SEED);
        let net = Net::new(WIDTH, &device)?;
        let optimizer = AdamW::new(net.parameters(), MAX_LR);
        let images = FashionMnist::train()?.with_image_shape();
        let batches = images.shuffle(SEED).batches(BATCH).drop_last().forever().prefetch(&device);
        let schedule = OneCycle::new(MAX_LR, steps.into());
        Ok(Self { device, net, optimizer, schedule, batches, steps_done: 0 })
    }

    /// Returns the name and the driver of the device.
    pub fn device(&self) -> String {
        self.device.info().to_string()
    }

    /// Returns the names of the classes.
    pub fn classes() -> Vec<String> {
        FashionMnist::CLASSES.map(str::to_owned).to_vec()
    }

    /// Trains one step.
    pub async fn step(&mut self) -> Result<StepReport, JsError> {
        let Some(batch) = self.batches.next() else { return Err(JsError::new("the data set has no images")) };
        let (x, y) = batch?;
        self.optimizer.set_lr(self.schedule.lr(self.steps_done));
        let logits = self.net.forward(&x)?;
        let loss = logits.cross_entropy(&y)?;
        let accuracy = train::accuracy(&logits, &y)?.item_async();
        let loss_value = loss.item_async();
        loss.backward()?;
        self.optimizer.step()?;
        self.optimizer.zero_grad();
        drop((x, y, logits, loss));
        self.steps_done += 1;
        let (loss, accuracy) = (loss_value.await?, accuracy.await?);
        let stats = self.device.pool().stats();
        Ok(StepReport {
            loss,
            accuracy,
            allocated: stats.allocated() as f64,
            reserved: stats.reserved() as f64,
        })
    }

    /// Returns the probability of each class for an image of 28 x 28 values from 0 to 1.
    pub async fn classify(&self, pixels: Vec<f32>) -> Result<Vec<f32>, JsError> {
        let normalized = pixels.iter().map(|pixel| (pixel - FashionMnist::MEAN) / FashionMnist::STD);
        let normalized = normalized.collect::<Vec<_>>();
        let probabilities = {
            let _no_grad = no_grad();
            let _eval = eval_mode(&self.net);
            let image = Tensor::from_slice(&normalized, [1, 1, 28, 28], &self.device)?;
            self.net.forward(&image)?.softmax(-1)?.to_vec_async::<f32>()
        };
        Ok(probabilities.await?)
    }
}
