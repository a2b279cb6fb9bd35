//! Segmentation by the Lovász extension of the overlap: the errors of all pixels, sorted for each class
//! (Berman et al., 2018).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{BatchNorm2d, Conv2d, Conv2dOptions, Module};
use forebay::ops::{InterpolateMode, InterpolateOptions, cat};
use forebay::tensor::Tensor;

use super::Workload;

#[derive(Module)]
struct Segmenter {
    convs: Vec<Conv2d>,
    norms: Vec<BatchNorm2d>,
    head: Conv2d,
}

impl Segmenter {
    /// Returns logits \[batch, classes, height, width\].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.clone();
        for (conv, norm) in self.convs.iter().zip(&self.norms) {
            y = norm.forward(&conv.forward(&y)?)?.relu()?;
        }
        let size = InterpolateOptions::with_size(&x.shape()[2..]);
        self.head.forward(&y)?.interpolate(&InterpolateOptions { mode: InterpolateMode::Bilinear, ..size })
    }
}

/// Returns the mean over the classes of the loss of probabilities \[classes, pixels\], if `truth` is 1 for each pixel's
/// class.
fn lovasz_softmax(probabilities: &Tensor, truth: &Tensor) -> Result<Tensor> {
    let (errors, order) = truth.sub(probabilities)?.abs()?.sort(1, true)?;
    let truth = truth.gather(1, &order)?;
    let total = truth.sum([1], true)?;
    let intersection = total.sub(&truth.cumsum(1)?)?;
    let union = total.add(&truth.rsub(1.0)?.cumsum(1)?)?;
    let jaccard = intersection.div(&union)?.rsub(1.0)?;
    // Differences of neighbours.
    let weights = jaccard.diff(1, 1, &Default::default())?;
    let weights = cat(&[&jaccard.narrow(1, 0, 1)?, &weights], 1)?;
    errors.mul(&weights)?.sum([1], false)?.mean_all()
}

/// Small network for maps of 16 classes, with the Lovász loss.
pub(super) fn lovasz(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, width, classes] = if tiny { [2, 16, 4, 3] } else { [8, 256, 64, 16] };
    let widths = [3, width, width, 2 * width, 2 * width, 4 * width];
    let conv = |(k, w): (usize, &[usize])| {
        let options = Conv2dOptions {
            stride: [if k % 2 == 0 { 2 } else { 1 }; 2],
            padding: [1; 2],
            bias: false,
            ..Conv2dOptions::default()
        };
        Conv2d::new(w[0], w[1], 3, options, device)
    };
    let net = Segmenter {
        convs: widths.windows(2).enumerate().map(conv).collect::<Result<_>>()?,
        norms: widths[1..].iter().map(|&w| BatchNorm2d::new(w, device)).collect::<Result<_>>()?,
        head: Conv2d::new(4 * width, classes, 1, Conv2dOptions::default(), device)?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let labels = Tensor::randint(0, classes as i64, [batch, side, side], DType::I32, device)?;
    let truth = labels.flatten(0, -1)?.one_hot(classes)?.t()?.to_dtype(DType::F32)?.contiguous()?;
    Ok(Workload::new(&shape, net, move |net| {
        let probabilities = net.forward(&x)?.to_dtype(DType::F32)?.softmax(1)?;
        lovasz_softmax(&probabilities.transpose(0, 1)?.flatten(1, -1)?, &truth)
    }))
}
