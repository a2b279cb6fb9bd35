//! Tensor maps: descriptors of tensors for TMA, the copy engine of sm_90 and later.

use std::ptr;

use cudarc::driver::sys;
use forebay_core::dtype::DType;

use crate::driver::check;

/// A descriptor of a tensor of up to five dimensions, the innermost first. TMA fills elements outside of the
/// tensor with zeros.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// A descriptor of no tensor.
    pub(crate) const NONE: Self = Self(sys::CUtensorMap { opaque: [0; 16] });

    /// Creates the descriptor of a tensor at `address` whose elements are contiguous in the innermost
    /// dimension. `steps` are the strides of the other dimensions in bytes. If `is_swizzled` is true, boxes have
    /// rows of 128, 64 or 32 bytes, and TMA swizzles them for the tiles in `shaders/cuda`.
    ///
    /// Returns `None` for dtypes other than f16, bf16 and f32, or if TMA cannot address the tensor. The address
    /// and the strides must be multiples of 16, and strides less than 2^40. The stride of a dimension of one
    /// element is ignored.
    pub(crate) fn new(
        elements: DType,
        address: u64,
        sizes: &[u64],
        steps: &[u64],
        boxes: &[u32],
        is_swizzled: bool,
    ) -> Option<Self> {
        Self::with_strides(elements, address, sizes, steps, boxes, [1; 5], is_swizzled)
    }

    /// Creates a descriptor as [`new`](Self::new) does, for boxes that skip elements: of each dimension they contain
    /// every `strides`-th, up to the box's extent. Strides are at most 8.
    pub(crate) fn with_strides(
        elements: DType,
        address: u64,
        sizes: &[u64],
        steps: &[u64],
        boxes: &[u32],
        strides: [u32; 5],
        is_swizzled: bool,
    ) -> Option<Self> {
        use sys::{
            CUtensorMapDataType as Type, CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzle,
        };
        if sizes.len() > 5 || steps.len() + 1 != sizes.len() || boxes.len() != sizes.len() {
            return None;
        }
        let mut byte_steps = [16; 4];
        for ((to, &size), &step) in byte_steps.iter_mut().zip(&sizes[1..]).zip(steps) {
            if size != 1 {
                *to = step;
            }
        }
        let dtype = match elements {
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            _ => return None,
        };
        let swizzle = match (is_swizzled, boxes.first()? * elements.size() as u32) {
            (false, _) => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            (true, 128) => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            (true, 64) => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            (true, 32) => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            (true, _) => return None,
        };
        let mut map = Self::NONE;
        // SAFETY: writes one map; reads one size, box extent and element stride for each dimension, and one
        // byte stride fewer. The address is only stored.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                dtype,
                sizes.len() as u32,
                ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?),
                sizes.as_ptr(),
                byte_steps.as_ptr(),
                boxes.as_ptr(),
                strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code).is_ok().then_some(map)
    }
}
