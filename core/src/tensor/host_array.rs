//! Conversions between tensors and host values: scalars, nested arrays and vectors.

use half::{bf16, f16};

use super::{Dims, IntoShape, Tensor};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, fail_if};
use crate::runtime::device::Device;

/// Host type of one element of [`Tensor::new`], with the dtype that it becomes.
pub trait HostElement: Copy {
    /// Value as it is stored.
    type Stored: bytemuck::NoUninit;
    /// Element type of the tensor.
    const DTYPE: DType;
    /// Converts a value.
    fn to_stored(self) -> Self::Stored;
}

/// Host values of [`Tensor::new`]: a scalar, or nested arrays, slices and vectors of scalars.
#[diagnostic::on_unimplemented(
    message = "`{Self}` holds no values of a tensor",
    note = "take a number, a bool, or nested arrays, slices or vectors of one of these types"
)]
pub trait HostArray {
    /// Type of one element.
    type Item: HostElement;
    /// Number of dimensions.
    const RANK: usize;
    /// Returns the extents. Lists that are empty have extents of 0 below them.
    fn extents(&self) -> Dims;
    /// Appends the elements in row-major order.
    ///
    /// # Errors
    /// A list within has other extents than `extents`.
    fn append_to(
        &self,
        extents: &[usize],
        values: &mut Vec<<Self::Item as HostElement>::Stored>,
    ) -> Result<()>;
}

macro_rules! impl_host_element {
    ($($t:ty => $stored:ty, $dtype:ident, |$v:ident| $convert:expr;)*) => {$(
        impl HostElement for $t {
            type Stored = $stored;
            const DTYPE: DType = DType::$dtype;
            fn to_stored(self) -> $stored { let $v = self; $convert }
        }
        impl HostArray for $t {
            type Item = $t;
            const RANK: usize = 0;
            fn extents(&self) -> Dims { Dims::new() }
            fn append_to(&self, _: &[usize], values: &mut Vec<$stored>) -> Result<()> {
                values.push(self.to_stored());
                Ok(())
            }
        }
    )*};
}
impl_host_element! {
    f32 => f32, F32, |v| v;
    f64 => f32, F32, |v| v as f32;
    f16 => f16, F16, |v| v;
    bf16 => bf16, BF16, |v| v;
    i32 => i32, I32, |v| v;
    u32 => u32, U32, |v| v;
    i64 => i64, I64, |v| v;
    u8 => u8, U8, |v| v;
    bool => u8, Bool, |v| v.into();
}

impl<A: HostArray> HostArray for [A] {
    type Item = A::Item;
    const RANK: usize = A::RANK + 1;

    fn extents(&self) -> Dims {
        let mut extents = self.first().map_or_else(|| Dims::from_elem(0, A::RANK), HostArray::extents);
        extents.insert(0, self.len());
        extents
    }

    #[track_caller]
    fn append_to(&self, extents: &[usize], values: &mut Vec<<A::Item as HostElement>::Stored>) -> Result<()> {
        fail_if!(extents.first() != Some(&self.len());
            argument("new"), "lists of one dimension have {} and {} entries, expected equal lengths",
            extents.first().copied().unwrap_or_default(), self.len());
        self.iter().try_for_each(|part| part.append_to(&extents[1..], values))
    }
}

macro_rules! impl_host_array {
    ($([$($generic:tt)*] $t:ty => $inner:ty;)*) => {$(
        impl<$($generic)*> HostArray for $t {
            type Item = <$inner as HostArray>::Item;
            const RANK: usize = <$inner as HostArray>::RANK;
            fn extents(&self) -> Dims { <$inner>::extents(self) }
            fn append_to(
                &self,
                extents: &[usize],
                values: &mut Vec<<Self::Item as HostElement>::Stored>,
            ) -> Result<()> {
                <$inner>::append_to(self, extents, values)
            }
        }
    )*};
}
impl_host_array! {
    [A: HostArray, const N: usize] [A; N] => [A];
    [A: HostArray] Vec<A> => [A];
    [A: HostArray + ?Sized] &A => A;
}

impl Tensor {
    /// Creates a tensor of host values: a scalar, or nested arrays, slices and vectors. Each level is a
    /// dimension. f64 values, such as literals without a suffix, become f32, PyTorch's default;
    /// [`from_slice`](Self::from_slice) makes f64 tensors.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::new([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &device)?;
    /// assert_eq!((x.shape(), x.dtype()), (&[2, 3][..], DType::F32));
    /// assert_eq!(Tensor::new(vec![vec![1i64, 2], vec![3, 4]], &device)?.dtype(), DType::I64);
    /// assert_eq!(Tensor::new(0.5, &device)?.rank(), 0);
    /// assert!(Tensor::new(vec![vec![1], vec![2, 3]], &device).is_err());
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// Lists of one dimension have different lengths.
    #[track_caller]
    pub fn new(values: impl HostArray, device: &Device) -> Result<Self> {
        Self::from_host_array(&values, device)
    }

    #[track_caller]
    fn from_host_array<A: HostArray>(values: &A, device: &Device) -> Result<Self> {
        let shape = values.extents();
        let mut stored = Vec::with_capacity(shape.iter().product());
        values.append_to(&shape, &mut stored)?;
        let extents = shape.to_extents();
        Self::create_from_bytes("new", bytemuck::cast_slice(&stored), &extents, A::Item::DTYPE, device)
    }
}

impl AsRef<Tensor> for Tensor {
    fn as_ref(&self) -> &Tensor {
        self
    }
}

/// Implements conversions of tensors with a number of dimensions: `[generics] type, rank, |tensor| value;`.
macro_rules! impl_from_tensor {
    ($($(#[$doc:meta])* [$($generics:tt)*] $t:ty, $rank:literal, |$x:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        impl $($generics)* TryFrom<&Tensor> for $t {
            type Error = Error;

            #[track_caller]
            fn try_from($x: &Tensor) -> Result<Self> {
                fail_if!($x.rank() != $rank;
                    shape("try_from", [$x]), "takes a tensor of {} dimensions for this type", $rank);
                $value
            }
        }
    )*};
}

macro_rules! impl_scalar_from_tensor {
    ($($t:ty),*) => {impl_from_tensor! {$(
        /// Reads the value of a tensor with one element of this type. Waits for the device.
        [] $t, 0, |t| Ok(t.to_vec::<$t>()?[0]);
    )*}};
}
impl_scalar_from_tensor!(f32, f64, f16, bf16, i32, u32, i64, u8);

impl_from_tensor! {
    /// Reads the elements of a vector. Waits for the device.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor};
    /// # fn main() -> forebay_core::error::Result<()> {
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::new([[1.0, 2.0], [3.0, 4.0]], &device)?;
    /// let rows: Vec<Vec<f32>> = (&x).try_into()?;
    /// assert_eq!((rows.len(), rows[0].len()), (2, 2));
    /// let flat = Vec::<f32>::try_from(&x.reshape([-1])?)?;
    /// assert_eq!(flat.len(), 4);
    /// # Ok(())
    /// # }
    /// ```
    [<T: Element>] Vec<T>, 1, |t| t.to_vec();
    /// Reads the rows of a matrix. Waits for the device.
    [<T: Element>] Vec<Vec<T>>, 2, |t| Ok(split_rows(&t.to_vec()?, t.shape()[0], t.shape()[1]));
    /// Reads the matrices of a tensor of three dimensions. Waits for the device.
    [<T: Element>] Vec<Vec<Vec<T>>>, 3, |t| {
        let [n, rows, columns] = [t.shape()[0], t.shape()[1], t.shape()[2]];
        let all = split_rows(&t.to_vec()?, n, rows * columns);
        Ok(all.iter().map(|matrix| split_rows(matrix, rows, columns)).collect())
    };
}

/// Splits values into rows, which may be empty.
fn split_rows<T: Element>(values: &[T], rows: usize, columns: usize) -> Vec<Vec<T>> {
    (0..rows).map(|row| values[row * columns..(row + 1) * columns].to_vec()).collect()
}

#[cfg(feature = "ndarray")]
impl Tensor {
    /// Creates a tensor of the values of an array, in its shape and element type.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor};
    /// # fn main() -> forebay_core::error::Result<()> {
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::from_ndarray(&ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0]]).t(), &device)?;
    /// let back = ndarray::ArrayD::<f32>::try_from(&x)?;
    /// assert_eq!(back.shape(), [2, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "tensor")]
    #[doc(alias = "as_tensor")]
    #[doc(alias = "asarray")]
    #[doc(alias = "new_tensor")]
    #[doc(alias = "from_numpy")]
    #[doc(alias = "frombuffer")]
    #[track_caller]
    pub fn from_ndarray<T, S, D>(array: &ndarray::ArrayBase<S, D>, device: &Device) -> Result<Self>
    where
        T: Element,
        S: ndarray::Data<Elem = T>,
        D: ndarray::Dimension,
    {
        Self::from_slice(array.as_standard_layout().as_slice().unwrap_or_default(), array.shape(), device)
    }
}

/// Reads the elements into an array of the tensor's shape. Waits for the device.
#[cfg(feature = "ndarray")]
impl<T: Element> TryFrom<&Tensor> for ndarray::ArrayD<T> {
    type Error = Error;

    #[track_caller]
    fn try_from(t: &Tensor) -> Result<Self> {
        Self::from_shape_vec(t.shape(), t.to_vec()?).map_err(|e| Error::argument("try_from", e.to_string()))
    }
}
