//! Adaptive softmax for many classes with skewed frequencies (Grave et al., 2017).

use super::{Linear, Module, ModuleScope, Sequential};
use crate::{Device, Result, Tensor, fail_if};

/// Softmax over classes sorted by falling frequency, PyTorch's module of the same name. The head scores the
/// frequent classes and the clusters. Each cluster scores its rarer classes from fewer features, and only for
/// rows whose target is in the cluster.
///
/// The host reads the number of rows of each cluster, so a step with this module cannot be captured.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::nn::AdaptiveLogSoftmaxWithLoss;
/// # let device = Device::null(Default::default());
/// let softmax = AdaptiveLogSoftmaxWithLoss::new(16, 1000, &[100, 400], 4.0, false, &device)?;
/// let x = Tensor::zeros(&[8, 16], DType::F32, &device)?;
/// assert_eq!(softmax.log_prob(&x)?.shape(), [8, 1000]);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Module)]
#[module(debug)]
pub struct AdaptiveLogSoftmaxWithLoss {
    /// Scores of the frequent classes and of the clusters.
    pub head: Linear,
    /// Two layers for each cluster: features to fewer features, then to the cluster's classes.
    pub tail: Vec<Sequential>,
    /// First class of each cluster, then the number of classes.
    cutoffs: Vec<usize>,
    scope: ModuleScope,
}

impl AdaptiveLogSoftmaxWithLoss {
    /// Creates a softmax over `classes` classes, with clusters that begin at `cutoffs`. The k-th cluster has
    /// features / `div_value`ᵏ⁺¹ features. PyTorch's default for `div_value` is 4, for `head_bias` false.
    ///
    /// # Errors
    /// The cutoffs are not strictly increasing between 0 and `classes`, or `div_value` is not a positive
    /// number.
    #[track_caller]
    pub fn new(
        features: usize,
        classes: usize,
        cutoffs: &[usize],
        div_value: f64,
        head_bias: bool,
        device: &Device,
    ) -> Result<Self> {
        let cutoffs = [cutoffs, &[classes]].concat();
        fail_if!(
            cutoffs.len() < 2 || cutoffs[0] == 0 || cutoffs.windows(2).any(|pair| pair[0] >= pair[1]);
            argument("AdaptiveLogSoftmaxWithLoss"),
            "cutoffs rise, are above 0 and below the {classes} classes; got {:?}", &cutoffs[..cutoffs.len() - 1]
        );
        fail_if!(!(div_value.is_finite() && div_value > 0.0);
            argument("AdaptiveLogSoftmaxWithLoss"), "div_value is a number above 0, not {div_value}");
        let head = Linear::uniform(features, cutoffs[0] + cutoffs.len() - 1, head_bias, device)?;
        let tail = cutoffs.windows(2).enumerate().map(|(k, pair)| {
            let inner = (features as f64 / div_value.powi(k as i32 + 1)).floor() as usize;
            Ok(Sequential::new()
                .add(Linear::without_bias(features, inner, device)?)
                .add(Linear::without_bias(inner, pair[1] - pair[0], device)?))
        });
        let tail = tail.collect::<Result<_>>()?;
        Ok(Self { head, tail, cutoffs, scope: ModuleScope::new() })
    }

    /// Returns the log-probability of each row's target, \[rows\], and the loss, which is the mean of the
    /// negated log-probabilities. `x` is \[rows, features\] with integer targets \[rows\], or a single row of each.
    ///
    /// # Errors
    /// A target is not below the number of classes, or a step is being captured.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, target: &Tensor) -> Result<(Tensor, Tensor)> {
        self.scope.run(|| {
            const OP: &str = "AdaptiveLogSoftmaxWithLoss";
            fail_if!(!target.dtype().is_int(); dtype(OP, target.dtype()), "targets are integers, the classes");
            if x.rank() == 1 && target.rank() == 0 {
                let (out, loss) = self.forward_batch(OP, &x.unsqueeze(0)?, &target.unsqueeze(0)?)?;
                return Ok((out.squeeze(0)?, loss));
            }
            self.forward_batch(OP, x, target)
        })
    }

    #[track_caller]
    fn forward_batch(&self, op: &'static str, x: &Tensor, target: &Tensor) -> Result<(Tensor, Tensor)> {
        fail_if!(
            x.rank() != 2 || target.shape() != &x.shape()[..1];
            shape(op, [x, target]), "takes inputs of [rows, features] and targets of [rows], or one row of each"
        );
        let target = forebay_core::ops::cast_index_to_i32(op, target, None)?;
        let classes = self.cutoffs[self.cutoffs.len() - 1];
        let mut of_head = target.clone();
        let mut parts: Vec<(Tensor, Tensor)> = Vec::new();
        let mut valid_count =
            target.ge(0)?.logical_and(&target.lt(self.cutoffs[0] as i64)?)?.count_nonzero(())?.item()?;
        for (k, (pair, tail)) in self.cutoffs.windows(2).zip(&self.tail).enumerate() {
            let inside = target.ge(pair[0] as i64)?.logical_and(&target.lt(pair[1] as i64)?)?;
            of_head = of_head.masked_fill(&inside, (self.cutoffs[0] + k) as i64)?;
            let rows = inside.nonzero()?.flatten(0, -1)?;
            valid_count += rows.numel() as f64;
            if rows.numel() > 0 {
                let scores = tail.forward(&x.index_select(0, &rows)?)?.log_softmax(-1)?;
                let own = target.index_select(0, &rows)?.sub(pair[0] as i64)?;
                parts.push((rows, scores.gather(1, &own.unsqueeze(1)?)?.squeeze(1)?));
            }
        }
        fail_if!(valid_count != target.numel() as f64;
            argument(op), "targets are at least 0 and below the {classes} classes; some are not");
        let scores = self.head.forward(x)?.log_softmax(-1)?;
        let mut out = scores.gather(1, &of_head.unsqueeze(1)?)?.squeeze(1)?;
        for (rows, part) in parts {
            out = out.index_add(0, &rows, &part, 1.0)?;
        }
        let loss = out.mean_all()?.neg()?;
        Ok((out, loss))
    }

    /// Returns the log-probabilities of all classes: \[rows, features\] to \[rows, classes\].
    #[track_caller]
    pub fn log_prob(&self, x: &Tensor) -> Result<Tensor> {
        self.scope.run(|| {
            let first = self.cutoffs[0];
            let scores = self.head.forward(x)?.log_softmax(-1)?;
            let mut parts = vec![scores.narrow(-1, 0, first)?];
            for (k, tail) in self.tail.iter().enumerate() {
                parts.push(tail.forward(x)?.log_softmax(-1)?.add(&scores.narrow(-1, first + k, 1)?)?);
            }
            forebay_core::ops::cat(&parts, -1)
        })
    }

    /// Returns the likeliest classes by [`log_prob`](Self::log_prob): \[rows, features\] to i64 \[rows\].
    #[track_caller]
    pub fn predict(&self, x: &Tensor) -> Result<Tensor> {
        self.log_prob(x)?.argmax(-1, false)
    }
}
