//! Filled tensors, and copies to other devices.

use half::{bf16, f16};

use crate::autograd;
use crate::backend::{Command, Slice};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory;
use crate::ops::kernel::launch;
use crate::runtime::device::Device;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::Access;
use crate::scalar::Scalar;
use crate::tensor::shape::Extents;
use crate::tensor::{Dims, IntoShape, Layout, Tensor, float8};

impl Tensor {
    /// Creates a tensor of `shape` that holds one value everywhere. Integer types drop its fraction.
    ///
    /// # Errors
    /// The value is outside the range of the dtype (infinities of floats are allowed), or an extent is negative.
    #[track_caller]
    pub fn full(shape: impl IntoShape, value: f64, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_filled("full", shape.to_extents(), value, dtype, device)
    }

    #[track_caller]
    fn create_filled(
        name: &'static str,
        shape: Extents,
        value: f64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        // Within another operation, errors name that.
        let around = memory::scope::current().op;
        let name = if around.is_empty() { name } else { around };
        let _op = memory::scope::enter_op(name);
        let number = Scalar::Float(value).checked_cast(name, dtype)?;
        let out = Self::empty(shape, dtype, device)?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let word = match dtype {
            DType::F32 => (value as f32).to_bits(),
            DType::F16 => u32::from(f16::from_f64(value).to_bits()) * 0x1_0001,
            DType::BF16 => u32::from(bf16::from_f64(value).to_bits()) * 0x1_0001,
            DType::I32 | DType::U32 => number.saturating_cast(dtype) as u32,
            DType::U8 => number.saturating_cast(dtype) as u32 * 0x0101_0101,
            DType::Bool => u32::from(value != 0.0) * 0x0101_0101,
            DType::F8E4M3 | DType::F8E5M2 => u32::from(float8::from_f32(dtype, value as f32)) * 0x0101_0101,
            // The two words of one element differ: written element by element.
            DType::I64 => {
                return out.fill_word_pair([value as i64 as u64 as u32, ((value as i64) >> 32) as u32]);
            }
            DType::F64 => {
                return out.fill_word_pair([value.to_bits() as u32, (value.to_bits() >> 32) as u32]);
            }
        };
        out.fill_word(word)?;
        Ok(out)
    }

    /// Writes a word all over a contiguous tensor, and over what is left of its last one.
    #[doc(hidden)]
    pub fn fill_word(&self, word: u32) -> Result<()> {
        let bound = launch::bind_contiguous_bytes([(self, Access::Write)])?;
        let dst = Slice { bytes: bound[0].bytes.next_multiple_of(4), ..bound[0] };
        self.device().enqueue(|| WorkItem::without_flops("fill", dst.bytes), &Command::Fill { dst, word })
    }

    fn fill_word_pair(self, words: [u32; 2]) -> Result<Self> {
        if words[0] == words[1] {
            self.fill_word(words[0])?;
            return Ok(self);
        }
        let one = match self.dtype() {
            DType::F64 => Self::create_constant(
                &[f64::from_bits(u64::from(words[0]) | u64::from(words[1]) << 32)],
                &[1],
                self.device(),
            )?,
            _ => Self::create_constant(
                &[i64::from(words[0]) | i64::from(words[1]) << 32],
                &[1],
                self.device(),
            )?,
        };
        let shape: Dims = self.shape().into();
        one.with_layout(Layout::new(shape.clone(), Dims::from_elem(0, shape.len()), 0)).copy_into(&self)?;
        Ok(self)
    }

    /// Creates a tensor of zeros.
    ///
    /// # Errors
    /// An extent is negative, or the device lacks the dtype.
    #[track_caller]
    pub fn zeros(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_filled("zeros", shape.to_extents(), 0.0, dtype, device)
    }

    /// Creates a tensor of ones.
    ///
    /// # Errors
    /// An extent is negative, or the device lacks the dtype.
    #[track_caller]
    pub fn ones(shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_filled("ones", shape.to_extents(), 1.0, dtype, device)
    }

    /// Zeros in the shape, dtype and device of `self`.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Self> {
        Self::zeros(self.shape(), self.dtype(), self.device())
    }

    /// Ones in the shape, dtype and device of `self`.
    ///
    /// # Errors
    /// Memory runs out.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Self> {
        Self::ones(self.shape(), self.dtype(), self.device())
    }

    /// One number in the shape, dtype and device of `self`.
    ///
    /// # Errors
    /// As [`full`](Self::full).
    #[track_caller]
    pub fn full_like(&self, value: f64) -> Result<Self> {
        Self::full(self.shape(), value, self.dtype(), self.device())
    }

    /// The same values on another device; the same tensor if it is there already. Carries no history across devices.
    ///
    /// # Errors
    /// `self` requires a gradient and the devices differ; memory runs out.
    #[track_caller]
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device() == device {
            return Ok(self.clone());
        }
        autograd::check_no_grad_inputs("to_device", &[self])?;
        Self::from_bytes(&self.to_bytes()?, self.shape(), self.dtype(), device)
    }
}
