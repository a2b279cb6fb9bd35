//! What the copy engine (TMA, from sm_90 on) is told of tensors whose boxes it copies.

use std::ptr;

use cudarc::driver::sys;

use crate::driver::check;

/// A tensor in boxes, of up to five dimensions, the innermost first. What a box has outside of the tensor is zero.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

/// What a tensor is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorMapDtype {
    F16,
    Bf16,
    F32,
}

impl TensorMap {
    /// Of no tensor.
    pub(crate) const NONE: Self = Self(sys::CUtensorMap { opaque: [0; 16] });

    /// That of elements at `address`, which lie side by side in the innermost dimension; `steps` are bytes between those of the others.
    /// `swapped`: rows of boxes have 128 bytes, whose eight parts of 16 come swapped by the row's last three bits, as tiles in `shaders/cuda`
    /// are. `None` where the engine cannot: steps and the address are multiples of 16, and steps less than 2^40; those of a dimension of one
    /// element, which are never taken, may be anything.
    pub(crate) fn new(
        elements: TensorMapDtype,
        address: u64,
        sizes: &[u64],
        steps: &[u64],
        boxes: &[u32],
        swapped: bool,
    ) -> Option<Self> {
        use sys::{
            CUtensorMapDataType as Type, CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzle,
        };
        if sizes.len() > 5 || steps.len() + 1 != sizes.len() || boxes.len() != sizes.len() {
            return None;
        }
        let mut taken = [16; 4];
        for ((to, &size), &step) in taken.iter_mut().zip(&sizes[1..]).zip(steps) {
            if size != 1 {
                *to = step;
            }
        }
        let dtype = match elements {
            TensorMapDtype::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            TensorMapDtype::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorMapDtype::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let swizzle = match swapped {
            true => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            false => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = Self::NONE;
        // SAFETY: writes one map, of which nothing is read before; reads as many sizes, boxes and steps of elements as there are
        // dimensions, and one step less. The address is only written down.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map.0,
                dtype,
                sizes.len() as u32,
                ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?),
                sizes.as_ptr(),
                taken.as_ptr(),
                boxes.as_ptr(),
                [1; 5].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", code).is_ok().then_some(map)
    }
}
