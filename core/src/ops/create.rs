//! Filled tensors, and copies to other devices.

use half::{bf16, f16};

use crate::backend::{Command, Slice};
use crate::ops::prelude::*;
use crate::tensor::float8;
use crate::tensor::shape::Extents;

impl Tensor {
    /// Creates a tensor of `shape` that holds one value everywhere. Integer types drop its fraction.
    ///
    /// # Errors
    /// The value is outside the range of the dtype (infinities of floats are allowed), or an extent is negative.
    #[doc(alias = "new_full")]
    #[track_caller]
    pub fn full(
        shape: impl IntoShape,
        value: impl Into<Scalar>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::create_filled("full", shape.to_extents(), value.into(), dtype, device)
    }

    #[track_caller]
    fn create_filled(
        name: &'static str,
        shape: Extents,
        value: Scalar,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let name = memory::scope::current_op_or(name);
        operation!(name);
        let element = value.checked_cast(name, dtype)?;
        let (float, integer) = (element.to_f64(), element.saturating_cast(dtype));
        let out = Self::empty(shape, dtype, device)?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let word = match dtype {
            DType::F32 => element.to_f32().to_bits(),
            DType::F16 => u32::from(f16::from_f64(float).to_bits()) * 0x1_0001,
            DType::BF16 => u32::from(bf16::from_f64(float).to_bits()) * 0x1_0001,
            DType::I32 | DType::U32 => integer as u32,
            DType::U8 => integer as u32 * 0x0101_0101,
            DType::Bool => u32::from(float != 0.0) * 0x0101_0101,
            DType::F8E4M3 | DType::F8E5M2 => {
                u32::from(float8::from_f32(dtype, element.to_f32())) * 0x0101_0101
            }
            // The two words of an element differ, so a single word cannot fill the memory.
            DType::I64 => return out.fill_word_pair(integer as u64),
            DType::F64 => return out.fill_word_pair(float.to_bits()),
        };
        out.fill_word(word)?;
        Ok(out)
    }

    /// Fills a contiguous tensor with a 32-bit word, including the padding of the last word.
    #[doc(hidden)]
    pub fn fill_word(&self, word: u32) -> Result<()> {
        let bound = launch::bind_contiguous_bytes([(self, Access::Write)])?;
        let dst = Slice { bytes: bound[0].bytes.next_multiple_of(4), ..bound[0] };
        self.device().enqueue(|| WorkItem::without_flops("fill", dst.bytes), &Command::Fill { dst, word })
    }

    fn fill_word_pair(self, bits: u64) -> Result<Self> {
        if bits as u32 == (bits >> 32) as u32 {
            self.fill_word(bits as u32)?;
            return Ok(self);
        }
        let one = match self.dtype() {
            DType::F64 => Self::create_constant(&[f64::from_bits(bits)], &[1], self.device())?,
            _ => Self::create_constant(&[bits as i64], &[1], self.device())?,
        };
        let shape = Dims::from_slice(self.shape());
        one.with_layout(Layout::new(shape.clone(), Dims::from_elem(0, shape.len()), 0)).copy_into(&self)?;
        Ok(self)
    }

    /// Creates a tensor of zeros.
    #[doc(alias = "new_zeros")]
    #[track_caller]
    pub fn zeros(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_filled("zeros", shape.to_extents(), 0.0.into(), dtype, device)
    }

    /// Creates a tensor of ones.
    #[doc(alias = "new_ones")]
    #[track_caller]
    pub fn ones(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_filled("ones", shape.to_extents(), 1.0.into(), dtype, device)
    }

    /// Creates zeros with the shape, dtype and device of `self`.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Self> {
        Self::create_filled("zeros_like", self.shape().to_extents(), 0.0.into(), self.dtype(), self.device())
    }

    /// Creates ones with the shape, dtype and device of `self`.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Self> {
        Self::create_filled("ones_like", self.shape().to_extents(), 1.0.into(), self.dtype(), self.device())
    }

    /// Creates a tensor filled with one value, with the shape, dtype and device of `self`.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Self> {
        let extents = self.shape().to_extents();
        Self::create_filled("full_like", extents, value.into(), self.dtype(), self.device())
    }

    /// Copies the tensor to another device, with its gradient: PyTorch's `x.to(device)`. Returns `self` if it is there
    /// already.
    ///
    /// The backward pass copies the gradient back, so the layers of a model may be on several devices. Between two CUDA
    /// cards the copy goes over the link, or the driver leads it through host memory. The host does not wait. Between
    /// other devices the copy goes through host memory, and this call waits for the device of `self`.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let (first, second) = (Device::null(Default::default()), Device::null(Default::default()));
    /// let x = Tensor::ones([2, 3], DType::F32, &first)?.to_leaf()?;
    /// let y = x.exp()?.to_device(&second)?;
    /// y.square()?.sum_all()?.backward()?;
    /// assert_eq!(x.grad().expect("x is a leaf").device(), &first);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The other device does not support the dtype, or one of the devices records a captured step.
    #[doc(alias = "to")]
    #[doc(alias = "cpu")]
    #[doc(alias = "cuda")]
    #[doc(alias = "xpu")]
    #[track_caller]
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device() == device {
            return Ok(self.clone());
        }
        operation!(OP = "to_device");
        let out = self.detach().copy_to_other_device(device)?;
        let moves = |from: &Device, to: &Device| {
            let (from, to) = (from.clone(), to.clone());
            move |x: &Self| x.move_between(&from, &to)
        };
        let (there, back) = (moves(self.device(), device), moves(device, self.device()));
        Ok(autograd::linear_differentiable(OP, out, self, there, back))
    }

    /// Copies a tensor of device `from` to device `to`. A gradient of another device is an error of its operation.
    fn move_between(&self, from: &Device, to: &Device) -> Result<Self> {
        if self.device() != from {
            return Err(Error::device("to_device", from, self.device()));
        }
        self.copy_to_other_device(to)
    }
}
