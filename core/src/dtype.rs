//! Element types.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float. Arithmetic is done in f32.
    F16,
    /// bfloat16, the upper half of an f32. Arithmetic is done in f32.
    BF16,
    /// 64-bit float, on devices that support it.
    F64,
    /// 32-bit signed integer.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit signed integer. Arithmetic needs device support; indexing works on all devices.
    I64,
    /// 8-bit unsigned integer.
    U8,
    /// Boolean, one byte with the value 0 or 1.
    Bool,
    /// PyTorch's `float8_e4m3fn`: 4 bits of exponent, 3 of mantissa, maximum 448, NaN but no infinities.
    /// Storage only.
    F8E4M3,
    /// PyTorch's `float8_e5m2`: 5 bits of exponent, 2 of mantissa, maximum 57,344, with infinities. Storage
    /// only.
    F8E5M2,
}

impl DType {
    /// Element types that operations compute with.
    pub const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::BF16, Self::F64, Self::I32, Self::U32, Self::I64, Self::U8, Self::Bool];

    /// Storage-only types: casts, copies and [`scaled_mm`](crate::tensor::Tensor::scaled_mm) support them.
    /// Every other operation rejects them.
    pub const STORAGE_ONLY: [Self; 2] = [Self::F8E4M3, Self::F8E5M2];

    /// Reports whether this is one of [`STORAGE_ONLY`](Self::STORAGE_ONLY).
    #[must_use]
    pub const fn is_storage_only(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    /// Returns the bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 | Self::Bool | Self::F8E4M3 | Self::F8E5M2 => 1,
        }
    }

    /// Reports whether operations compute with this floating-point type, which can therefore carry gradients.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F64)
    }

    /// Reports whether this is an integer type (bool is not).
    #[must_use]
    pub const fn is_int(self) -> bool {
        matches!(self, Self::I32 | Self::U32 | Self::I64 | Self::U8)
    }

    /// Returns the short name used in safetensors files and shaders: `f32`, `bool`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F64 => "f64",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::Bool => "bool",
            Self::F8E4M3 => "f8_e4m3",
            Self::F8E5M2 => "f8_e5m2",
        }
    }

    /// Returns the result type of an operation on both types, by PyTorch's promotion rules for tensors with
    /// dimensions. Floats rank above integers, and integers above bool. Within a category the wider type
    /// wins, and f16 with bf16 gives f32. Storage-only types rank lowest, because no operation mixes them.
    #[must_use]
    pub fn promote(self, other: Self) -> Self {
        use DType::{BF16, Bool, F8E4M3, F8E5M2, F16, F32, F64, I32, I64, U8, U32};
        let rank = |d: Self| match d {
            F8E4M3 | F8E5M2 => 0,
            Bool => 1,
            U8 => 2,
            U32 => 3,
            I32 => 4,
            I64 => 5,
            F16 | BF16 => 6,
            F32 => 7,
            F64 => 8,
        };
        match (self, other) {
            (a, b) if a == b => a,
            (F16, BF16) | (BF16, F16) | (F8E4M3, F8E5M2) | (F8E5M2, F8E4M3) => F32,
            (U32, I32) | (I32, U32) => I64,
            (a, b) if rank(a) > rank(b) => a,
            (_, b) => b,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error of a text that names no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dtype: `{name}` is not an element type; expected one of {expected}")]
pub struct UnknownDType {
    /// Text that was parsed.
    pub name: String,
    /// Names of all element types.
    pub expected: String,
}

/// Parses the short name (`f32`, `bf16`, `bool`) or PyTorch's (`float32`, `torch.bfloat16`), in any case.
///
/// ```
/// # use forebay_core::dtype::DType;
/// assert_eq!("bf16".parse::<DType>()?, DType::BF16);
/// assert_eq!("torch.float8_e4m3fn".parse::<DType>()?, DType::F8E4M3);
/// assert_eq!(DType::I64.to_string(), "i64");
/// # Ok::<(), forebay_core::dtype::UnknownDType>(())
/// ```
impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let lower = name.to_ascii_lowercase();
        let short = match lower.strip_prefix("torch.").unwrap_or(&lower) {
            "float" | "float32" => "f32",
            "half" | "float16" => "f16",
            "bfloat16" => "bf16",
            "double" | "float64" => "f64",
            "int" | "int32" => "i32",
            "uint32" => "u32",
            "long" | "int64" => "i64",
            "uint8" => "u8",
            "float8_e4m3fn" => "f8_e4m3",
            "float8_e5m2" => "f8_e5m2",
            other => other,
        };
        let all = || Self::ALL.into_iter().chain(Self::STORAGE_ONLY);
        all().find(|dtype| dtype.name() == short).ok_or_else(|| {
            let names: Vec<_> = all().map(Self::name).collect();
            UnknownDType { name: name.to_owned(), expected: names.join(", ") }
        })
    }
}

/// Serializes the short name.
impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Rust type whose values a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug {
    /// Element type of a tensor of these values.
    const DTYPE: DType;
}

macro_rules! impl_element {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
impl_element!(f32 => F32, f16 => F16, bf16 => BF16, f64 => F64, i32 => I32, u32 => U32, i64 => I64, u8 => U8);

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn names_parse_and_serialize() {
        for dtype in DType::ALL.into_iter().chain(DType::STORAGE_ONLY) {
            assert_eq!(dtype.to_string().parse::<DType>().unwrap(), dtype);
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(serde_json::from_str::<DType>(&json).unwrap(), dtype);
        }
        assert_eq!("Torch.Float16".parse::<DType>().unwrap(), DType::F16);
        assert!("f33".parse::<DType>().unwrap_err().to_string().contains("expected one of f32, f16"));
    }

    #[test]
    fn promotion_is_symmetric_and_idempotent() {
        let all = || DType::ALL.into_iter().chain(DType::STORAGE_ONLY);
        for a in all() {
            assert_eq!(a.promote(a), a);
            for b in all() {
                assert_eq!(a.promote(b), b.promote(a), "{a} with {b}");
            }
        }
        assert_eq!(DType::F16.promote(DType::BF16), DType::F32);
        assert_eq!(DType::I64.promote(DType::F16), DType::F16);
    }
}
