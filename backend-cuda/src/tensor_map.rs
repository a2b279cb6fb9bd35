//! What the copy engine (TMA, from sm_90 on) is told of tensors whose boxes it copies.

use std::ptr;

use cudarc::driver::sys;

use crate::driver::check;

/// A tensor of 16-bit floats in four dimensions, in boxes of 64 rows of 64 elements, which come as rows of 128 bytes whose parts of 16 are
/// swapped, as `shaders/cuda/attention.cu` has its tiles. What a box has outside of the tensor is zero.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Of no tensor.
    pub(crate) const NONE: Self = Self(sys::CUtensorMap { opaque: [0; 16] });

    /// That of elements at `address`, the innermost dimension first, whose elements lie side by side; `steps` are bytes between those of the
    /// other three. `None` where the engine cannot: steps and the address are multiples of 16, and steps less than 2^40.
    pub(crate) fn new(bf16: bool, address: u64, sizes: [u64; 4], steps: [u64; 3]) -> Option<Self> {
        use sys::{CUtensorMapDataType as Type, CUtensorMapL2promotion as Promotion};
        let mut map = Self::NONE;
        let dtype =
            if bf16 { Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 } else { Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
        // SAFETY: writes one map, of which nothing is read before; reads four sizes, boxes and steps of elements, and three steps. The
        // address is only written down.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                dtype,
                4,
                ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?),
                sizes.as_ptr(),
                steps.as_ptr(),
                [64, 64, 1, 1].as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code).is_ok().then_some(map)
    }
}
