//! Scalars of the host, and their conversion to the element types of tensors.

use std::fmt;

use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Number of the host: the argument of a function in place of a tensor, or the value of an element.
///
/// Functions take `impl Into<Scalar>`, so a literal or a variable of any number type is an argument. An integer keeps
/// all of its 64 bits.
///
/// ```
/// # use forebay_core::{device::Device, dtype::DType, ops::Scalar, tensor::Tensor};
/// # let device = Device::null(Default::default());
/// let large = (1i64 << 53) + 1; // not an f64
/// let x = Tensor::full([2], large, DType::I64, &device)?;
/// assert_eq!(x.eq(large)?.dtype(), DType::Bool);
/// assert_eq!(Scalar::from(large), Scalar::Int(9_007_199_254_740_993));
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Float. An integer tensor is promoted to f32.
    Float(f64),
    /// Integer, which takes the tensor's type.
    Int(i64),
    /// Bool.
    Bool(bool),
}

/// Calls a macro with the types of the host that convert to [`Scalar`].
macro_rules! for_scalar_types {
    ($then:ident) => {
        $then!(f64, f32, half::f16, half::bf16, i64, i32, i16, i8, u32, u16, u8, usize, u64, isize, bool);
    };
}
pub(crate) use for_scalar_types;

macro_rules! impl_scalar_from {
    ($variant:ident: $($t:ty),*) => {$(
        impl From<$t> for Scalar {
            fn from(value: $t) -> Self {
                Self::$variant(value.into())
            }
        }
    )*};
}
impl_scalar_from!(Float: f64, f32, f16, bf16);
impl_scalar_from!(Int: i64, i32, i16, i8, u32, u16, u8);
impl_scalar_from!(Bool: bool);

macro_rules! impl_scalar_from_wide {
    ($($t:ty),*) => {$(
        /// Converts an integer. Above the range of i64, which no tensor holds, it becomes a float.
        impl From<$t> for Scalar {
            fn from(value: $t) -> Self {
                i64::try_from(value).map_or(Self::Float(value as f64), Self::Int)
            }
        }
    )*};
}
impl_scalar_from_wide!(usize, u64, isize);

/// Writes the value as Rust does, a float with a decimal point or an exponent.
impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(v) => write!(f, "{v:?}"),
            Self::Int(v) => write!(f, "{v}"),
            Self::Bool(v) => write!(f, "{v}"),
        }
    }
}

impl Scalar {
    /// Returns the nearest f64.
    #[must_use]
    pub fn to_f64(self) -> f64 {
        match self {
            Self::Float(v) => v,
            Self::Int(v) => v as f64,
            Self::Bool(v) => f64::from(u8::from(v)),
        }
    }

    /// Returns the nearest f32, rounded once.
    pub(crate) fn to_f32(self) -> f32 {
        match self {
            Self::Int(v) => v as f32,
            other => other.to_f64() as f32,
        }
    }

    /// Returns the integer that the scalar equals. Returns `None` for fractions and values that are no i64.
    pub(crate) fn to_integer(self) -> Option<i64> {
        match self.convert_to(DType::I64) {
            ScalarConversion::Exact(Self::Int(v)) => Some(v),
            ScalarConversion::Exact(Self::Bool(v)) => Some(v.into()),
            _ => None,
        }
    }
}

/// Result of converting a scalar to an element type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ScalarConversion {
    /// The type represents the scalar, up to rounding of floats.
    Exact(Scalar),
    /// Integer part of a scalar with a fraction, for an integer type.
    Truncated(i64),
    /// The scalar is below the type's range. Minus infinity is in range if the type has infinities.
    BelowRange,
    /// The scalar is above the type's range. Infinity is in range if the type has infinities.
    AboveRange,
    /// The scalar is NaN and the type is an integer.
    NotANumber,
}

/// Returns the smallest and the largest value of an integer type.
fn integer_bounds(dtype: DType) -> Option<(i64, i64)> {
    match dtype {
        DType::U8 => Some((0, u8::MAX.into())),
        DType::I32 => Some((i32::MIN.into(), i32::MAX.into())),
        DType::U32 => Some((0, u32::MAX.into())),
        DType::I64 => Some((i64::MIN, i64::MAX)),
        _ => None,
    }
}

/// Returns the largest finite value of a float type.
fn float_max(dtype: DType) -> Option<f64> {
    match dtype {
        DType::F64 => Some(f64::MAX),
        DType::F32 => Some(f32::MAX.into()),
        DType::F16 => Some(half::f16::MAX.into()),
        DType::BF16 => Some(half::bf16::MAX.into()),
        DType::F8E4M3 => Some(448.0),
        DType::F8E5M2 => Some(57344.0),
        _ => None,
    }
}

impl Scalar {
    /// Converts the scalar to a type.
    pub(crate) fn convert_to(self, dtype: DType) -> ScalarConversion {
        if let Some(max) = float_max(dtype) {
            // As in PyTorch, a value above the largest is out of range, even if rounding would bring it back.
            let value = self.to_f64();
            let fits = value.is_infinite() && dtype != DType::F8E4M3;
            return match value {
                _ if fits => ScalarConversion::Exact(self),
                v if v > max => ScalarConversion::AboveRange,
                v if v < -max => ScalarConversion::BelowRange,
                _ => ScalarConversion::Exact(self),
            };
        }
        let Some((min, max)) = integer_bounds(dtype) else {
            // NaN converts to true.
            return ScalarConversion::Exact(if dtype == DType::Bool {
                Self::Bool(self.to_f64() != 0.0)
            } else {
                self
            });
        };
        match self {
            Self::Bool(_) => ScalarConversion::Exact(self),
            Self::Int(v) if v < min => ScalarConversion::BelowRange,
            Self::Int(v) if v > max => ScalarConversion::AboveRange,
            Self::Int(_) => ScalarConversion::Exact(self),
            Self::Float(v) if v.is_nan() => ScalarConversion::NotANumber,
            // As an f64, the upper bound is 2^63, which is not an i64.
            Self::Float(v) if v.trunc() < min as f64 => ScalarConversion::BelowRange,
            Self::Float(v) if v.trunc() >= max as f64 + 1.0 => ScalarConversion::AboveRange,
            Self::Float(v) if v == v.trunc() => ScalarConversion::Exact(Self::Int(v as i64)),
            Self::Float(v) => ScalarConversion::Truncated(v as i64),
        }
    }

    /// Returns the scalar as a value of the type, so that it does not promote a tensor. Returns `None` if the
    /// type cannot hold the scalar.
    pub(crate) fn to_exact(self, dtype: DType) -> Option<Self> {
        match self.convert_to(dtype) {
            ScalarConversion::Exact(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the scalar as an element of a type, truncated if the type is an integer.
    ///
    /// # Errors
    /// The scalar is out of the type's range.
    pub(crate) fn checked_cast(self, op: &'static str, dtype: DType) -> Result<Self> {
        match self.convert_to(dtype) {
            ScalarConversion::Exact(number) => Ok(number),
            ScalarConversion::Truncated(v) => Ok(Self::Int(v)),
            ScalarConversion::BelowRange | ScalarConversion::AboveRange | ScalarConversion::NotANumber => {
                let range = match (float_max(dtype), integer_bounds(dtype).unwrap_or_default()) {
                    (Some(max), _) => format!("{:?} to {max:?}", -max),
                    (None, (min, max)) => format!("{min} to {max}"),
                };
                Err(Error::argument(
                    op,
                    format!("{self} is not a value of {dtype}, which holds {range}; take another dtype"),
                ))
            }
        }
    }

    /// Returns the scalar as float arithmetic sees it: infinite if the type cannot hold it.
    pub(crate) fn overflow_to_infinity(self, dtype: DType) -> f64 {
        match self.convert_to(dtype) {
            ScalarConversion::BelowRange => f64::NEG_INFINITY,
            ScalarConversion::AboveRange => f64::INFINITY,
            _ => self.to_f64(),
        }
    }

    /// Returns the nearest value of an integer type.
    pub(crate) fn saturating_cast(self, dtype: DType) -> i64 {
        let (min, max) = integer_bounds(dtype).unwrap_or((i64::MIN, i64::MAX));
        match self.convert_to(dtype) {
            ScalarConversion::Exact(Self::Int(v)) | ScalarConversion::Truncated(v) => v,
            ScalarConversion::Exact(other) => other.to_f64() as i64,
            ScalarConversion::BelowRange => min,
            ScalarConversion::AboveRange => max,
            ScalarConversion::NotANumber => 0,
        }
    }

    /// Rewrites the comparison `op` of an integer tensor with a scalar that its type cannot hold. Returns an
    /// equivalent comparison and a scalar in range, or `None` if the scalar is in range.
    pub(crate) fn rewrite_comparison(self, op: &str, dtype: DType) -> Option<(&'static str, Self)> {
        let above = match self.convert_to(dtype) {
            ScalarConversion::AboveRange => true,
            ScalarConversion::BelowRange => false,
            _ => return None,
        };
        let (never, always) = if above { ("gt", "le") } else { ("lt", "ge") };
        let truth = match op {
            "lt" | "le" => above,
            "gt" | "ge" => !above,
            "eq" => false,
            "ne" => true,
            _ => return None,
        };
        Some((if truth { always } else { never }, Self::Int(self.saturating_cast(dtype))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn holds(op: &str, a: i128, b: i128) -> bool {
        match op {
            "lt" => a < b,
            "le" => a <= b,
            "gt" => a > b,
            "ge" => a >= b,
            "eq" => a == b,
            _ => a != b,
        }
    }

    proptest! {
        #[test]
        fn scalars_out_of_range_are_compared_mathematically(number in any::<i64>(), element in any::<i64>(), kind in 0usize..3, op in 0usize..6) {
            let (dtype, element) = [(DType::U8, i64::from(element as u8)), (DType::I32, i64::from(element as i32)), (DType::U32, i64::from(element as u32))][kind];
            let op = ["lt", "le", "gt", "ge", "eq", "ne"][op];
            if let Some((other, Scalar::Int(bound))) = Scalar::Int(number).rewrite_comparison(op, dtype) {
                prop_assert_eq!(holds(other, element.into(), bound.into()), holds(op, element.into(), number.into()));
                prop_assert!(matches!(Scalar::Int(bound).convert_to(dtype), ScalarConversion::Exact(_)));
            } else {
                prop_assert!(Scalar::Int(number).to_exact(dtype).is_some());
            }
        }
    }

    #[test]
    fn scalars_convert_to_dtypes() {
        for (number, dtype, fit) in [
            (Scalar::Float(255.9), DType::U8, ScalarConversion::Truncated(255)),
            (Scalar::Float(-0.5), DType::U8, ScalarConversion::Truncated(0)),
            (Scalar::Float(256.0), DType::U8, ScalarConversion::AboveRange),
            (Scalar::Float(-1.0), DType::U32, ScalarConversion::BelowRange),
            (Scalar::Float(9.3e18), DType::I64, ScalarConversion::AboveRange),
            (Scalar::Float(f64::NAN), DType::I32, ScalarConversion::NotANumber),
            (Scalar::Float(f64::NEG_INFINITY), DType::I32, ScalarConversion::BelowRange),
            (Scalar::Int(1 << 32), DType::U32, ScalarConversion::AboveRange),
            (Scalar::Int(i64::MIN), DType::I64, ScalarConversion::Exact(Scalar::Int(i64::MIN))),
            (Scalar::Int(7), DType::Bool, ScalarConversion::Exact(Scalar::Bool(true))),
            (Scalar::Float(65504.0), DType::F16, ScalarConversion::Exact(Scalar::Float(65504.0))),
            (Scalar::Float(65504.5), DType::F16, ScalarConversion::AboveRange),
            (Scalar::Int(-65505), DType::F16, ScalarConversion::BelowRange),
            (Scalar::Float(f64::INFINITY), DType::F16, ScalarConversion::Exact(Scalar::Float(f64::INFINITY))),
            (Scalar::Float(1e38), DType::BF16, ScalarConversion::Exact(Scalar::Float(1e38))),
            (Scalar::Float(3.4e38), DType::BF16, ScalarConversion::AboveRange),
            (Scalar::Float(-1e39), DType::F32, ScalarConversion::BelowRange),
            (Scalar::Float(f64::MAX), DType::F64, ScalarConversion::Exact(Scalar::Float(f64::MAX))),
            (Scalar::Float(449.0), DType::F8E4M3, ScalarConversion::AboveRange),
            // E4M3 has no infinities.
            (Scalar::Float(f64::NEG_INFINITY), DType::F8E4M3, ScalarConversion::BelowRange),
            (
                Scalar::Float(f64::NEG_INFINITY),
                DType::F8E5M2,
                ScalarConversion::Exact(Scalar::Float(f64::NEG_INFINITY)),
            ),
        ] {
            assert_eq!(number.convert_to(dtype), fit, "{number:?} in {dtype}");
        }
    }
}
