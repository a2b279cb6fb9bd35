//! Creation of tensors, and copies of their contents to the host.

use std::sync::Arc;

use half::{bf16, f16};

use super::layout::checked_numel;
use super::shape::{infer_shape, new_shape};
use super::{IntoShape, Tensor, float8};
use crate::backend::{Backend, Slice};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, fail, fail_if};
use crate::memory::{self, Tag};
use crate::runtime::device::Device;
use crate::runtime::future::DeviceFuture;
use crate::runtime::profile::WorkItem;
use crate::runtime::stream::Access;
use crate::scalar::Scalar;

/// Note of a captured step: a constant that replays read, which must stay alive.
pub(crate) struct CapturedConstant(pub(crate) Tensor);

impl Tensor {
    /// Creates a tensor of `shape` from row-major elements. One extent may be -1.
    ///
    /// # Errors
    /// `data` has another number of elements than `shape`.
    #[doc(alias = "tensor")]
    #[doc(alias = "as_tensor")]
    #[doc(alias = "asarray")]
    #[doc(alias = "new_tensor")]
    #[doc(alias = "from_numpy")]
    #[doc(alias = "frombuffer")]
    #[track_caller]
    pub fn from_slice<T: Element>(data: &[T], shape: impl IntoShape, device: &Device) -> Result<Self> {
        Self::create_from_bytes(
            "from_slice",
            bytemuck::cast_slice(data),
            &shape.to_extents(),
            T::DTYPE,
            device,
        )
    }

    /// Creates a boolean tensor of `shape` from row-major elements. One extent may be -1.
    #[track_caller]
    pub fn from_bools(data: &[bool], shape: impl IntoShape, device: &Device) -> Result<Self> {
        let bytes: Vec<u8> = data.iter().map(|&b| u8::from(b)).collect();
        Self::create_from_bytes("from_bools", &bytes, &shape.to_extents(), DType::Bool, device)
    }

    /// Creates a tensor of `shape` from the little-endian bytes of its row-major elements. One extent may be -1.
    ///
    /// # Errors
    /// `data` has another length than shape and dtype say, or a bool has a byte other than 0 and 1.
    #[track_caller]
    pub fn from_bytes(data: &[u8], shape: impl IntoShape, dtype: DType, device: &Device) -> Result<Self> {
        Self::create_from_bytes("from_bytes", data, &shape.to_extents(), dtype, device)
    }

    /// Creates a tensor of bytes for the function `name`, unless an operation around it is running.
    #[track_caller]
    pub(super) fn create_from_bytes(
        name: &'static str,
        data: &[u8],
        extents: &[isize],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let op = memory::scope::current_op_or(name);
        let _op = memory::scope::enter_op(op);
        let shape = match extents.contains(&-1) {
            true => infer_shape(op, &[data.len() / dtype.size()], extents)?,
            false => new_shape(op, extents)?,
        };
        let elements = checked_numel(&shape);
        if elements.and_then(|n| n.checked_mul(dtype.size())) != Some(data.len()) {
            let takes = elements.map_or_else(|| "more than 2^64".to_owned(), |n| n.to_string());
            fail!(
                argument(op),
                "shape {shape:?} of {dtype} takes {takes} elements, the data has {}",
                data.len() / dtype.size()
            );
        }
        fail_if!(dtype == DType::Bool && data.iter().any(|&byte| byte > 1);
            argument(op), "the bytes of a bool tensor are 0 and 1; compare others with `ne(0)`");
        let out = Self::empty(&shape, dtype, device)?;
        out.upload_bytes(data)?;
        Ok(out)
    }

    /// Creates a constant that an operation computes. An active capture keeps it for its replays.
    #[track_caller]
    pub(crate) fn create_constant<T: Element>(data: &[T], shape: &[usize], device: &Device) -> Result<Self> {
        let recorder = device.capture_recorder();
        if !recorder.is_recording_here() {
            return Self::from_slice(data, shape, device);
        }
        let kept = recorder.run_unrecorded(|| Self::from_slice(data, shape, device))?;
        recorder.add_note(|| CapturedConstant(kept.clone()), |_| false);
        // Copy, because the captured step may change its operand.
        kept.copy()
    }

    pub(super) fn upload_bytes(&self, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        self.device().capture_recorder().check_not_recording(
            "upload",
            "values from the host would be the same at each replay; create the tensor before the capture, and fill it with `copy_`",
        )?;
        let send = |dst: Slice, data: &[u8]| {
            self.device().enqueue_transfer(
                || WorkItem::without_flops("upload", dst.bytes),
                |queue| queue.upload(dst, data),
            )
        };
        self.with_pinned_bytes(Access::Write, |mut dst| {
            if data.len().is_multiple_of(4) {
                return send(dst, data);
            }
            dst.bytes = dst.bytes.next_multiple_of(4);
            let mut padded = data.to_vec();
            padded.resize(dst.bytes as usize, 0);
            send(dst, &padded)
        })
    }

    /// Returns a contiguous tensor of the elements, which starts at a word boundary, for a copy to the host.
    pub(super) fn prepare_read(&self) -> Result<Tensor> {
        self.device().capture_recorder().check_not_recording(
            "read",
            "the host would wait for values that a replay has not computed; return the tensor, and read it after the replay",
        )?;
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let aligned = (self.layout().offset() * self.dtype().size()).is_multiple_of(4);
        if self.is_contiguous() && aligned { Ok(self.detach()) } else { self.detach().copy() }
    }

    /// Enqueues a copy of a tensor's bytes, in whole words, to the host.
    fn enqueue_read(
        &self,
        bytes: usize,
        read: impl FnOnce(&Arc<dyn Backend>, Slice) -> Result<()>,
    ) -> Result<()> {
        let bytes = bytes as u64;
        let work = || WorkItem::without_flops("download", bytes);
        self.with_pinned_bytes(Access::Read, |src| {
            self.device().enqueue_transfer(work, |queue| read(queue, Slice { bytes, ..src }))
        })
    }

    /// Returns the bytes of the elements in row-major order. Waits for the device.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let length = self.numel() * self.dtype().size();
        if length == 0 {
            return Ok(Vec::new());
        }
        let mut data = vec![0; length.next_multiple_of(4)];
        self.prepare_read()?.enqueue_read(data.len(), |queue, src| queue.download(src, &mut data))?;
        Ok(trim_words(data, length, self.dtype()))
    }

    /// Returns the bytes like [`to_bytes`](Self::to_bytes), without blocking. The copy is enqueued by this call, so
    /// later writes to the tensor do not change the result. The future needs no runtime.
    #[track_caller]
    pub fn to_bytes_async(&self) -> DeviceFuture<Vec<u8>> {
        self.read_async(Ok)
    }

    #[track_caller]
    fn read_async<R: Send + 'static>(
        &self,
        decode: impl FnOnce(Vec<u8>) -> Result<R> + Send + 'static,
    ) -> DeviceFuture<R> {
        let dtype = self.dtype();
        let length = self.numel() * dtype.size();
        if length == 0 {
            return DeviceFuture::ready(decode(Vec::new()));
        }
        let words = length.next_multiple_of(4);
        let mut started = None;
        let enqueued = self.prepare_read().and_then(|source| {
            source.enqueue_read(words, |backend, src| {
                started = Some(backend.start_download(src)?);
                Ok(())
            })
        });
        match (enqueued, started) {
            (Ok(()), Some(download)) => self.device().waiter().run(move |done| {
                let decode = move |words: Vec<u8>| decode(trim_words(words, length, dtype));
                download.finish_then(words, Box::new(|data| done.complete(data.and_then(decode))));
            }),
            (Err(error), _) => DeviceFuture::ready(Err(error)),
            (Ok(()), None) => DeviceFuture::ready(decode(Vec::new())),
        }
    }

    /// Returns the elements in row-major order. Waits for the device.
    ///
    /// # Errors
    /// `T` is not the element type.
    #[doc(alias = "numpy")]
    #[doc(alias = "tolist")]
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check_element::<T>()?;
        Ok(bytemuck::pod_collect_to_vec(&self.to_bytes()?))
    }

    /// Returns the elements like [`to_vec`](Self::to_vec), without blocking: see
    /// [`to_bytes_async`](Self::to_bytes_async).
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor};
    /// async fn rows(device: &Device) -> forebay_core::error::Result<Vec<f32>> {
    ///     let x = Tensor::new([[1.0, 2.0], [3.0, 4.0]], device)?;
    ///     let values = x.square()?.to_vec_async::<f32>(); // enqueued here
    ///     // The program does other things, and waits when it needs the values.
    ///     values.await
    /// }
    /// ```
    #[track_caller]
    pub fn to_vec_async<T: Element>(&self) -> DeviceFuture<Vec<T>> {
        match self.check_element::<T>() {
            Ok(()) => self.read_async(|bytes| Ok(bytemuck::pod_collect_to_vec(&bytes))),
            Err(error) => DeviceFuture::ready(Err(error)),
        }
    }

    #[track_caller]
    fn check_element<T: Element>(&self) -> Result<()> {
        fail_if!(T::DTYPE != self.dtype();
            dtype("to_vec", self.dtype()), "requested as {}; cast first", T::DTYPE);
        Ok(())
    }

    /// Returns the elements of a bool tensor in row-major order. Waits for the device.
    #[track_caller]
    pub fn to_bools(&self) -> Result<Vec<bool>> {
        fail_if!(self.dtype() != DType::Bool; dtype("to_bools", self.dtype()), "takes a bool tensor");
        Ok(self.to_bytes()?.iter().map(|&b| b != 0).collect())
    }

    /// Returns the elements of any type as f64. Waits for the device.
    ///
    /// An i64 that is not an f64 becomes the nearest one. [`to_vec`](Self::to_vec) reads all integers exactly.
    #[doc(alias = "numpy")]
    #[doc(alias = "tolist")]
    #[track_caller]
    pub fn to_f64s(&self) -> Result<Vec<f64>> {
        Ok(decode_f64s(&self.to_bytes()?, self.dtype()))
    }

    /// Returns the elements like [`to_f64s`](Self::to_f64s), without blocking: see
    /// [`to_bytes_async`](Self::to_bytes_async).
    #[track_caller]
    pub fn to_f64s_async(&self) -> DeviceFuture<Vec<f64>> {
        let dtype = self.dtype();
        self.read_async(move |bytes| Ok(decode_f64s(&bytes, dtype)))
    }

    /// Returns the value of a tensor with one element as f64. Waits for the device.
    ///
    /// # Errors
    /// The tensor does not have exactly one element, or its value is an i64 that is not an f64. [`to_scalar`]
    /// reads that one.
    ///
    /// [`to_scalar`]: Self::to_scalar
    #[doc(alias = "is_nonzero")]
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        self.check_scalar("item")?;
        decode_item(&self.to_bytes()?, self.dtype())
    }

    /// Returns the value of a tensor with one element, in the kind of its type: PyTorch's `item`. Waits for the
    /// device.
    ///
    /// ```
    /// # use forebay_core::{device::Device, ops::Scalar, tensor::Tensor};
    /// # fn read(device: &Device) -> forebay_core::error::Result<()> {
    /// let x = Tensor::new(i64::MAX, device)?;
    /// assert_eq!(x.to_scalar()?, Scalar::Int(i64::MAX));
    /// assert!(x.item().is_err()); // not an f64
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The tensor does not have exactly one element.
    #[track_caller]
    pub fn to_scalar(&self) -> Result<Scalar> {
        self.check_scalar("to_scalar")?;
        Ok(decode_scalar(&self.to_bytes()?, self.dtype()))
    }

    /// Returns the value like [`item`](Self::item), without blocking: see
    /// [`to_bytes_async`](Self::to_bytes_async).
    ///
    /// # Errors
    /// See [`item`](Self::item).
    #[track_caller]
    pub fn item_async(&self) -> DeviceFuture<f64> {
        let dtype = self.dtype();
        match self.check_scalar("item") {
            Ok(()) => self.read_async(move |bytes| decode_item(&bytes, dtype)),
            Err(error) => DeviceFuture::ready(Err(error)),
        }
    }

    /// Returns the elements of an integer tensor. Waits for the device.
    #[track_caller]
    pub(crate) fn to_integers(&self) -> Result<Vec<i64>> {
        let integers = decode_integers(&self.detach().to_bytes()?, self.dtype());
        integers
            .ok_or_else(|| Error::dtype("to_integers", self.dtype(), "takes integers; cast with `to_dtype`"))
    }

    #[track_caller]
    fn check_scalar(&self, op: &'static str) -> Result<()> {
        fail_if!(self.numel() != 1; shape(op, [self]), "takes a tensor of one element");
        Ok(())
    }
}

/// Returns the bytes of elements out of the words that were read. Memory of bools that nothing has written yet holds
/// any bytes, and reads as true where they are not 0.
fn trim_words(mut words: Vec<u8>, length: usize, dtype: DType) -> Vec<u8> {
    words.truncate(length);
    if dtype == DType::Bool {
        words.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    words
}

/// Reads the first element.
fn decode_scalar(bytes: &[u8], dtype: DType) -> Scalar {
    match decode_integers(bytes, dtype) {
        Some(values) if dtype == DType::Bool => Scalar::Bool(values[0] != 0),
        Some(values) => Scalar::Int(values[0]),
        None => Scalar::Float(decode_f64s(bytes, dtype)[0]),
    }
}

/// Reads the first element for [`Tensor::item`].
fn decode_item(bytes: &[u8], dtype: DType) -> Result<f64> {
    let value = decode_scalar(bytes, dtype);
    if let Scalar::Int(exact) = value {
        // As i128, because i64::MAX as f64 is 2^63.
        fail_if!(exact as f64 as i128 != i128::from(exact);
            argument("item"), "{exact} is not a value of f64; read it with `to_scalar`");
    }
    Ok(value.to_f64())
}

/// Converts elements of any type to f64.
pub(super) fn decode_f64s(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F32 => decode(bytes, |x: f32| x.into()),
        DType::F16 => decode(bytes, |x: f16| x.into()),
        DType::BF16 => decode(bytes, |x: bf16| x.into()),
        DType::F64 => decode(bytes, |x: f64| x),
        DType::I32 => decode(bytes, |x: i32| x.into()),
        DType::U32 => decode(bytes, |x: u32| x.into()),
        DType::I64 => decode(bytes, |x: i64| x as f64),
        DType::U8 | DType::Bool => decode(bytes, |x: u8| x.into()),
        DType::F8E4M3 | DType::F8E5M2 => decode(bytes, |x: u8| float8::to_f32(dtype, x).into()),
    }
}

/// Converts integers and bools to i64. Returns `None` for floats.
pub(super) fn decode_integers(bytes: &[u8], dtype: DType) -> Option<Vec<i64>> {
    match dtype {
        DType::I32 => Some(decode(bytes, |x: i32| x.into())),
        DType::U32 => Some(decode(bytes, |x: u32| x.into())),
        DType::I64 => Some(decode(bytes, |x: i64| x)),
        DType::U8 | DType::Bool => Some(decode(bytes, |x: u8| x.into())),
        _ => None,
    }
}

fn decode<T: bytemuck::Pod, R>(bytes: &[u8], convert: impl Fn(T) -> R) -> Vec<R> {
    bytemuck::pod_collect_to_vec::<u8, T>(bytes).into_iter().map(convert).collect()
}
