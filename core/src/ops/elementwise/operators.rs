//! Rust's operators. Each calls the method of its name and returns the method's `Result`.
//!
//! ```
//! # use forebay_core::{device::Device, dtype::DType, error::Result, tensor::Tensor};
//! # fn main() -> Result<()> {
//! # let device = Device::null(Default::default());
//! let x = Tensor::ones(&[2, 3], DType::F32, &device)?;
//! let row = Tensor::ones(&[3], DType::F32, &device)?;
//! let y = ((&x * 2.0)? + &row)?; // x.mul(2.0)?.add(&row)?
//! let z = (1.0 - (-&y)?)?;
//! assert_eq!(z.shape(), [2, 3]);
//! # Ok(())
//! # }
//! ```

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::ops::prelude::*;

macro_rules! impl_operator {
    ([$($generics:tt)*] $operator:ident $(<$right:ty>)? for $left:ty, $method:ident |$x:ident $(, $y:ident)?| $body:expr) => {
        impl $($generics)* $operator $(<$right>)? for $left {
            type Output = Result<Tensor>;
            #[track_caller]
            fn $method(self $(, $y: $right)?) -> Result<Tensor> {
                let $x = self;
                $body
            }
        }
    };
}

/// Implements operators of a tensor, owned or borrowed, with a tensor or a scalar.
macro_rules! impl_tensor_lhs_ops {
    ($($operator:ident $method:ident),*) => {$(
        impl_operator!([<'a, R: IntoOperand<'a>>] $operator<R> for &Tensor, $method |x, y| Tensor::$method(x, y));
        impl_operator!([<'a, R: IntoOperand<'a>>] $operator<R> for Tensor, $method |x, y| Tensor::$method(&x, y));
        impl_operator!([] $operator<Tensor> for &Tensor, $method |x, y| Tensor::$method(x, &y));
        impl_operator!([] $operator<Tensor> for Tensor, $method |x, y| Tensor::$method(&x, &y));
    )*};
}
impl_tensor_lhs_ops!(Add add, Sub sub, Mul mul, Div div);

/// Implements operators of a scalar with a tensor. One float and one integer type serve unsuffixed literals.
macro_rules! impl_scalar_lhs_ops {
    ($($number:ident)*) => {$(
        impl_scalar_lhs_ops!($number, Add add |n, x| x.add(n));
        impl_scalar_lhs_ops!($number, Sub sub |n, x| x.rsub(n));
        impl_scalar_lhs_ops!($number, Mul mul |n, x| x.mul(n));
        // PyTorch divides a scalar by a tensor in the same way.
        impl_scalar_lhs_ops!($number, Div div |n, x| x.reciprocal()?.mul(n));
    )*};
    ($number:ident, $operator:ident $method:ident |$n:ident, $x:ident| $body:expr) => {
        impl_operator!([] $operator<&Tensor> for $number, $method |$n, $x| $body);
        impl_operator!([] $operator<Tensor> for $number, $method |n, x| $operator::$method(n, &x));
    };
}
impl_scalar_lhs_ops!(f64 i64);

impl_operator!([] Neg for &Tensor, neg |x| Tensor::neg(x));
impl_operator!([] Neg for Tensor, neg |x| Tensor::neg(&x));
