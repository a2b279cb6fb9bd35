//! Data set of two tensors in host memory.

use super::Dataset;
use crate::{Result, Tensor, fail_if};
use forebay_core::dtype::Element;

/// Samples along the first dimension of two tensors: PyTorch's `TensorDataset`.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, error::Result, tensor::Tensor};
/// # use forebay_nn::data::{Dataset, TensorDataset};
/// # fn main() -> Result<()> {
/// # let device = Device::null(Default::default());
/// let x = Tensor::randn([100, 8], DType::F32, &device)?;
/// let y = Tensor::zeros([100], DType::I64, &device)?;
/// for batch in TensorDataset::<f32, i64>::new(&x, &y)?.shuffle(1).batches(32).prefetch(&device) {
///     let (x, y) = batch?;
///     // ...
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TensorDataset<I, T> {
    inputs: Vec<I>,
    targets: Vec<T>,
    len: usize,
    input_shape: Vec<usize>,
    target_shape: Vec<usize>,
}

impl<I: Element, T: Element> TensorDataset<I, T> {
    /// Copies the tensors to the host. Waits for the device.
    ///
    /// # Errors
    /// A tensor has no dimension, or the first dimensions differ. `I` or `T` is not the element type.
    #[track_caller]
    pub fn new(inputs: &Tensor, targets: &Tensor) -> Result<Self> {
        let (x, y) = (inputs.shape(), targets.shape());
        fail_if!(
            x.is_empty() || y.is_empty() || x[0] != y[0];
            argument("TensorDataset"), "inputs of shape {x:?} and targets of shape {y:?} need an equal first dimension, the samples"
        );
        Ok(Self {
            len: x[0],
            input_shape: x[1..].to_vec(),
            target_shape: y[1..].to_vec(),
            inputs: inputs.to_vec()?,
            targets: targets.to_vec()?,
        })
    }
}

impl<I: Element, T: Element> Dataset for TensorDataset<I, T> {
    type Input = I;
    type Target = T;

    fn len(&self) -> usize {
        self.len
    }

    fn input_shape(&self) -> &[usize] {
        &self.input_shape
    }

    fn target_shape(&self) -> &[usize] {
        &self.target_shape
    }

    fn get(&self, index: usize, input: &mut [I], target: &mut [T]) -> Result<()> {
        input.copy_from_slice(&self.inputs[index * input.len()..][..input.len()]);
        target.copy_from_slice(&self.targets[index * target.len()..][..target.len()]);
        Ok(())
    }
}
