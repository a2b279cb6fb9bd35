//! Tensors of other libraries in this process, and tensors for them, by DLPack 1.x (PyTorch, JAX, CuPy, NumPy).
//!
//! On a device whose backend has [`ForeignAccess`], both libraries use one memory. The exchange is ordered by
//! streams: the consumer names its stream, and events make one stream wait for the other. Elsewhere, contents are
//! copied through host memory.
//!
//! The structs are those of `dlpack.h`. Their layout is a stable ABI, so they are declared here and need no library.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{PinnedSlice, Tensor};
use crate::backend::{Backend, ForeignAccess};
use crate::dtype::DType;
use crate::error::{Error, Result, fail, fail_if};
use crate::runtime::device::Device;
use crate::runtime::stream::Access;
use crate::tensor::IntoShape;
use crate::tensor::layout::checked_numel;

mod capsule;
mod request;

#[doc(hidden)]
pub use capsule::refused_capsule;
pub use capsule::{CAPSULE_NAME, USED_CAPSULE_NAME};
pub use request::DlpackRequest;

/// Device type of host memory (`kDLCPU`).
pub const DL_CPU: i32 = 1;
/// Device type of CUDA devices (`kDLCUDA`).
pub const DL_CUDA: i32 = 2;
/// Flag of tensors that the consumer must not write.
pub const DL_READ_ONLY: u64 = 1;
/// Flag of tensors whose memory is a copy.
pub const DL_IS_COPIED: u64 = 2;
/// Most dimensions of a tensor, as in NumPy and PyTorch.
const MAX_DIMS: usize = 64;
/// Version of DLPack that exported tensors state. Consumers accept every minor version of a major one.
const VERSION: DlPackVersion = DlPackVersion { major: 1, minor: 0 };

/// `DLPackVersion`: version of the structs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlPackVersion {
    /// Changes with the layout of the structs.
    pub major: u32,
    /// Changes with new constants.
    pub minor: u32,
}

/// `DLDevice`: location of the memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    /// [`DL_CPU`], [`DL_CUDA`] or another constant of `dlpack.h`.
    pub device_type: i32,
    /// Index of the device.
    pub device_id: i32,
}

/// `DLDataType`: type of the elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDataType {
    /// Kind of number, such as `kDLFloat`.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Elements of a vector; 1 for scalars.
    pub lanes: u16,
}

/// `DLTensor`: memory and layout of a tensor.
#[repr(C)]
#[derive(Debug)]
pub struct DlTensor {
    /// Address of the memory.
    pub data: *mut c_void,
    /// Location of the memory.
    pub device: DlDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of the elements.
    pub dtype: DlDataType,
    /// Extents, `ndim` of them.
    pub shape: *mut i64,
    /// Strides in elements, or null for a contiguous tensor.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensorVersioned`: a tensor with its owner, since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensorVersioned {
    /// Version of this struct.
    pub version: DlPackVersion,
    /// Data of the producer.
    pub manager_ctx: *mut c_void,
    /// Function that returns the tensor to its producer.
    pub deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    /// Sum of flags such as [`DL_READ_ONLY`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DlTensor,
}

/// `DLManagedTensor`: a tensor with its owner, before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// Data of the producer.
    pub manager_ctx: *mut c_void,
    /// Function that returns the tensor to its producer.
    pub deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// A tensor in DLPack's form. Dropping it returns the memory to its producer.
#[derive(Debug)]
pub struct DlpackTensor(NonNull<DlManagedTensorVersioned>);

// SAFETY: exports of this crate own thread-safe fields. For other tensors, `from_raw` and `from_unversioned` demand a
// deleter for every thread.
unsafe impl Send for DlpackTensor {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for DlpackTensor {}

impl DlpackTensor {
    /// Takes ownership of a tensor of another library, such as the content of a `dltensor_versioned` capsule.
    ///
    /// # Safety
    /// `tensor` follows `dlpack.h`, and nothing else calls its deleter. The deleter may run on every thread.
    ///
    /// # Errors
    /// The pointer is null, or the version is another one than 1.
    pub unsafe fn from_raw(tensor: *mut DlManagedTensorVersioned) -> Result<Self> {
        let Some(tensor) = NonNull::new(tensor) else {
            fail!(argument("from_dlpack"), "the pointer is null; pass a tensor of DLPack");
        };
        let this = Self(tensor);
        // SAFETY: the caller's promise. Every version begins with the version and ends with the same deleter.
        let version = unsafe { tensor.as_ref() }.version;
        fail_if!(version.major != VERSION.major;
            argument("from_dlpack"), "the tensor has version {}.{} of DLPack; expected 1.x: ask its producer for \
            max_version=(1, 0)", version.major, version.minor);
        Ok(this)
    }

    /// Takes ownership of a tensor in the form before DLPack 1.0, such as the content of a `dltensor` capsule.
    ///
    /// # Safety
    /// As for [`from_raw`](Self::from_raw).
    ///
    /// # Errors
    /// The pointer is null.
    pub unsafe fn from_unversioned(tensor: *mut DlManagedTensor) -> Result<Self> {
        unsafe extern "C" fn delete(this: *mut DlManagedTensorVersioned) {
            // SAFETY: made by `Box::into_raw` below, and deleted once.
            let this = unsafe { Box::from_raw(this) };
            let old: *mut DlManagedTensor = this.manager_ctx.cast();
            // SAFETY: `old` is valid until its deleter runs, here and only here.
            unsafe {
                if let Some(delete) = (*old).deleter {
                    delete(old);
                }
            }
        }
        let Some(old) = NonNull::new(tensor) else {
            fail!(argument("from_dlpack"), "the pointer is null; pass a tensor of DLPack");
        };
        // SAFETY: the caller's promise. The copy shares the arrays, which live until the deleter runs.
        let dl_tensor = unsafe { ptr::read(&raw const (*old.as_ptr()).dl_tensor) };
        let this = Box::new(DlManagedTensorVersioned {
            version: VERSION,
            manager_ctx: old.as_ptr().cast(),
            deleter: Some(delete),
            flags: 0,
            dl_tensor,
        });
        Ok(Self(NonNull::from(Box::leak(this))))
    }

    /// Returns the tensor for a consumer, which has to call the deleter.
    #[must_use = "the memory leaks unless the deleter runs"]
    pub fn into_raw(self) -> *mut DlManagedTensorVersioned {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }

    /// Returns the tensor in the form before DLPack 1.0, for a consumer that has to call the deleter.
    #[must_use = "the memory leaks unless the deleter runs"]
    pub fn into_unversioned(self) -> *mut DlManagedTensor {
        unsafe extern "C" fn delete(this: *mut DlManagedTensor) {
            // SAFETY: both were made by `Box::into_raw` below, and are deleted once.
            unsafe {
                let this = Box::from_raw(this);
                drop(Box::from_raw(this.manager_ctx.cast::<DlpackTensor>()));
            }
        }
        // SAFETY: the tensor is valid while `self` lives, which the box below keeps.
        let dl_tensor = unsafe { ptr::read(&raw const (*self.0.as_ptr()).dl_tensor) };
        let manager_ctx = Box::into_raw(Box::new(self)).cast();
        Box::into_raw(Box::new(DlManagedTensor { dl_tensor, manager_ctx, deleter: Some(delete) }))
    }

    /// Returns memory and layout.
    #[must_use]
    pub fn tensor(&self) -> &DlTensor {
        // SAFETY: the tensor is valid until the deleter runs, when `self` is dropped.
        unsafe { &self.0.as_ref().dl_tensor }
    }

    /// Returns the sum of the flags.
    #[must_use]
    pub fn flags(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.0.as_ref() }.flags
    }

    /// Returns an array of `count` numbers; `None` for null.
    ///
    /// # Safety
    /// `count` is the tensor's `ndim`, and `first` is one of its arrays.
    unsafe fn numbers(&self, first: *const i64, count: usize) -> Option<&[i64]> {
        // SAFETY: by `dlpack.h`, the array has `ndim` numbers, which live as long as the tensor.
        (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first, count) })
    }

    /// Returns the extents, and the strides in elements unless the tensor is contiguous.
    #[track_caller]
    fn layout(&self) -> Result<(Vec<usize>, Option<&[i64]>)> {
        let &DlTensor { ndim, shape, strides, .. } = self.tensor();
        let Some(count) = usize::try_from(ndim).ok().filter(|&count| count <= MAX_DIMS) else {
            fail!(argument("from_dlpack"), "the tensor has {ndim} dimensions; expected 0 to {MAX_DIMS}");
        };
        // SAFETY: the counts and arrays are the tensor's.
        let (extents, strides) = unsafe { (self.numbers(shape, count), self.numbers(strides, count)) };
        fail_if!(extents.is_none() && count > 0;
            argument("from_dlpack"), "the tensor has {ndim} dimensions and no shape: its pointer is null");
        let extents = extents.unwrap_or_default();
        let shape = extents.iter().map(|&n| usize::try_from(n)).collect::<Result<Vec<_>, _>>();
        let Ok(shape) = shape else {
            fail!(
                argument("from_dlpack"),
                "the tensor has the shape {extents:?}; expected extents of at least 0"
            );
        };
        // Also for tensors without elements, whose other extents are multiplied below.
        fail_if!(checked_numel(&shape).is_none();
            argument("from_dlpack"), "the tensor has the shape {extents:?}; expected extents whose product is at most \
            2^48");
        let mut contiguous = 1;
        let strides = strides.filter(|strides| {
            // The stride of a single element means nothing.
            shape.iter().zip(*strides).rev().any(|(&extent, &stride)| {
                let differs = extent > 1 && usize::try_from(stride) != Ok(contiguous);
                contiguous *= extent;
                differs
            })
        });
        Ok((shape, strides))
    }

    /// Returns the address of the first element. Fails unless all elements of `size` bytes have one.
    fn first_address(&self, shape: &[usize], strides: Option<&[i64]>, size: usize) -> Result<usize> {
        let &DlTensor { data, byte_offset, .. } = self.tensor();
        fail_if!(data.is_null();
            argument("from_dlpack"), "the tensor has the shape {shape:?} and no memory: its pointer is null");
        let (data, size) = (data.expose_provenance(), size as i128);
        let first = data as i128 + i128::from(byte_offset);
        fail_if!(first % size != 0;
            argument("from_dlpack"), "the tensor starts at address {data:#x} and byte {byte_offset}; expected a \
            multiple of {size}, the bytes of an element");
        // Elements at both ends of the memory, relative to the first one.
        let reach = |step: i128, extent: usize| step * (extent as i128 - 1);
        let ends = match strides {
            None => (0, shape.iter().product::<usize>() as i128 - 1),
            Some(strides) => shape.iter().zip(strides).fold((0, 0), |(low, high), (&extent, &stride)| {
                let reach = reach(stride.into(), extent);
                (low + reach.min(0), high + reach.max(0))
            }),
        };
        let (low, end) = (first + ends.0 * size, first + (ends.1 + 1) * size);
        fail_if!(low <= 0 || end > isize::MAX as i128;
            argument("from_dlpack"), "the tensor has the shape {shape:?}, the strides {:?} and byte {byte_offset} of \
            address {data:#x}: some elements have no address", strides.unwrap_or_default());
        Ok(first as usize)
    }
}

impl Drop for DlpackTensor {
    fn drop(&mut self) {
        let raw = self.0.as_ptr();
        // SAFETY: `self` owns the tensor, so its deleter has not run.
        unsafe {
            if let Some(delete) = (*raw).deleter {
                delete(raw);
            }
        }
    }
}

/// Codes of `DLDataTypeCode` and sizes, by element type.
const TYPES: [(DType, u8); 11] = [
    (DType::F32, 2),
    (DType::F16, 2),
    (DType::BF16, 4),
    (DType::F64, 2),
    (DType::I32, 0),
    (DType::U32, 1),
    (DType::I64, 0),
    (DType::U8, 1),
    (DType::Bool, 6),
    (DType::F8E4M3, 10),
    (DType::F8E5M2, 12),
];

fn to_dl_type(dtype: DType) -> DlDataType {
    let code = TYPES.iter().find(|(known, _)| *known == dtype).map_or(0, |(_, code)| *code);
    DlDataType { code, bits: 8 * dtype.size() as u8, lanes: 1 }
}

#[track_caller]
fn from_dl_type(found: DlDataType) -> Result<DType> {
    let known = TYPES.iter().map(|(dtype, _)| *dtype).find(|&dtype| to_dl_type(dtype) == found);
    known.ok_or_else(|| {
        let DlDataType { code, bits, lanes } = found;
        Error::argument(
            "from_dlpack",
            format!("no element type has DLPack's code {code} with {bits} bits and {lanes} lanes; convert the tensor first"),
        )
    })
}

enum ExportOwner {
    Host {
        /// Memory of the copy.
        _words: Vec<u128>,
    },
    Device {
        pinned: PinnedSlice,
        /// Stream of the consumer; `None` if it is not known.
        stream: Option<u64>,
    },
}

/// An exported tensor with everything that it points to.
struct Export {
    managed: DlManagedTensorVersioned,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    owner: ExportOwner,
}

impl Export {
    fn publish(
        tensor: &Tensor,
        data: *mut c_void,
        device: DlDevice,
        flags: u64,
        owner: ExportOwner,
    ) -> DlpackTensor {
        unsafe extern "C" fn delete(this: *mut DlManagedTensorVersioned) {
            // SAFETY: `manager_ctx` is the export, made by `Box::into_raw` below, and deleted once.
            drop(unsafe { Box::from_raw((*this).manager_ctx.cast::<Export>()) });
        }
        let shape: Box<[i64]> = tensor.shape().iter().map(|&n| n as i64).collect();
        let mut strides: Box<[i64]> = shape.clone();
        let mut stride = 1;
        for (target, extent) in strides.iter_mut().zip(&shape).rev() {
            *target = stride;
            stride *= extent;
        }
        let dl_tensor = DlTensor {
            data,
            device,
            ndim: shape.len() as i32,
            dtype: to_dl_type(tensor.dtype()),
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = DlManagedTensorVersioned {
            version: VERSION,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags,
            dl_tensor,
        };
        let raw = Box::into_raw(Box::new(Self { managed, shape, strides, owner }));
        // SAFETY: `raw` is valid, and nothing else refers to it. The arrays do not move until the export is dropped.
        unsafe {
            (*raw).managed.manager_ctx = raw.cast();
            (*raw).managed.dl_tensor.shape = (*raw).shape.as_mut_ptr();
            (*raw).managed.dl_tensor.strides = (*raw).strides.as_mut_ptr();
            DlpackTensor(NonNull::new_unchecked(&raw mut (*raw).managed))
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let ExportOwner::Device { pinned, stream } = &self.owner else { return };
        // The memory returns to the pool, so later work must wait for the consumer's.
        let ordered = foreign_queue("to_dlpack", pinned.device()).and_then(|backend| {
            let foreign = require_foreign("to_dlpack", pinned.device(), &backend)?;
            match stream {
                // SAFETY: the exporter promised that the stream outlives the export.
                Some(stream) => unsafe { foreign.wait_for_stream(*stream) },
                None => foreign.synchronize_context(),
            }
        });
        if let Err(error) = ordered {
            // A deleter returns nothing. The device's next call reports a lost device too.
            log::error!(
                "an exported tensor was returned, and its device did not wait for the consumer: {error}"
            );
        }
    }
}

/// Returns the backend of the current queue.
fn foreign_queue(op: &'static str, device: &Device) -> Result<Arc<dyn Backend>> {
    let backend = device.queue_backend(device.current_queue())?;
    require_foreign(op, device, backend)?;
    Ok(Arc::clone(backend))
}

#[track_caller]
fn require_foreign<'a>(
    op: &'static str,
    device: &Device,
    backend: &'a Arc<dyn Backend>,
) -> Result<&'a dyn ForeignAccess> {
    match backend.foreign_access() {
        Some(access) => Ok(access),
        None => Err(Error::unsupported(
            op,
            device,
            "its buffers have no address that other libraries can use; copy through the host with \
             `to_dlpack_host`, or use a CUDA device",
        )),
    }
}

impl Device {
    /// Returns DLPack's name of the memory that tensors of this device are exported in: the device, or the host if
    /// exports are copies.
    #[must_use]
    pub fn dlpack_device(&self) -> DlDevice {
        let foreign = self.raw_backend().foreign_access().map(ForeignAccess::dlpack_device);
        let (device_type, device_id) = foreign.unwrap_or((DL_CPU, 0));
        DlDevice { device_type, device_id }
    }

    /// Returns the handle of the current stream, for a producer that makes it wait (`__dlpack__(stream=...)`).
    ///
    /// # Errors
    /// The device has no streams that other libraries can use.
    #[track_caller]
    pub fn dlpack_stream(&self) -> Result<u64> {
        self.flush()?;
        let backend = foreign_queue("dlpack_stream", self)?;
        require_foreign("dlpack_stream", self, &backend)?.stream()
    }
}

impl Tensor {
    /// Exports the tensor without a copy, for a consumer whose stream is not known. Waits until the contents are
    /// complete; returning the memory waits for all work of the consumer on the device.
    ///
    /// The memory is pinned until the consumer returns it, and the consumer may write it. Writes count as in-place
    /// operations without gradient.
    ///
    /// # Errors
    /// The tensor is not contiguous or requires a gradient, or the device has no memory that other libraries can use.
    #[track_caller]
    pub fn to_dlpack(&self) -> Result<DlpackTensor> {
        self.export(None, |foreign_device| foreign_device.synchronize())
    }

    /// Exports the tensor like [`to_dlpack`](Self::to_dlpack), without blocking: `stream` waits for the contents, and
    /// later work of this device waits for what the consumer has enqueued in `stream` when it returns the memory.
    ///
    /// # Safety
    /// `stream` is a stream of the same device and context (a `CUstream`; 1 and 2 name the default ones) that outlives
    /// the export.
    pub unsafe fn to_dlpack_on_stream(&self, stream: u64) -> Result<DlpackTensor> {
        // SAFETY: the caller's promise.
        unsafe { self.export_ordered(Some(stream)) }
    }

    fn export(&self, stream: Option<u64>, order: impl FnOnce(&Device) -> Result<()>) -> Result<DlpackTensor> {
        self.check_exportable()?;
        let backend = foreign_queue("to_dlpack", self.device())?;
        let foreign = require_foreign("to_dlpack", self.device(), &backend)?;
        let pinned = self.pin_for_write()?;
        order(self.device())?;
        let address = foreign.address(pinned.slice());
        let device = self.device().dlpack_device();
        let data = ptr::with_exposed_provenance_mut(address as usize);
        Ok(Export::publish(self, data, device, 0, ExportOwner::Device { pinned, stream }))
    }

    /// Exports a copy of the contents in host memory, on every device.
    ///
    /// # Errors
    /// The tensor requires a gradient.
    #[track_caller]
    pub fn to_dlpack_host(&self) -> Result<DlpackTensor> {
        self.check_exportable()?;
        let bytes = self.to_bytes()?;
        // Aligned for every element type.
        let mut words = vec![0u128; bytes.len().div_ceil(size_of::<u128>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
        let data = words.as_mut_ptr().cast();
        let host = DlDevice { device_type: DL_CPU, device_id: 0 };
        Ok(Export::publish(self, data, host, DL_IS_COPIED, ExportOwner::Host { _words: words }))
    }

    #[track_caller]
    fn check_exportable(&self) -> Result<()> {
        fail_if!(self.requires_grad();
            argument("to_dlpack"), "the tensor requires a gradient, which other libraries do not see; call `detach` first");
        Ok(())
    }

    /// Creates a tensor from another library's. Memory of the same device is used without a copy; contents in host
    /// memory are copied.
    ///
    /// Memory without a copy counts under [`Tag::External`](crate::memory::Tag::External). Dropping the last tensor
    /// over it waits for the device, because the producer may then reuse the memory at once.
    ///
    /// # Safety
    /// The contents are complete, or ordered before the stream of [`Device::dlpack_stream`]. Later accesses of the
    /// producer and of this device are ordered by the program. No other tensor of this device overlaps the memory.
    ///
    /// # Errors
    /// The memory is on another device, is not aligned, or is read-only. The tensor has an unknown element type, or
    /// is on a device and not contiguous. A number of dimensions, a pointer, a stride or the offset is impossible.
    pub unsafe fn from_dlpack(tensor: DlpackTensor, device: &Device) -> Result<Self> {
        let dtype = from_dl_type(tensor.tensor().dtype)?;
        let (shape, strides) = tensor.layout()?;
        // Before the contents are copied, which may be large.
        Self::check_new("from_dlpack", &shape.as_slice().to_extents(), dtype, device)?;
        let found = tensor.tensor().device;
        if found.device_type == DL_CPU {
            // SAFETY: the producer's elements are where `dlpack.h` says.
            let bytes = unsafe { gather(&tensor, &shape, strides, dtype.size()) }?;
            return Self::from_bytes(&bytes, shape.as_slice(), dtype, device);
        }
        let expected = device.dlpack_device();
        fail_if!(found != expected;
            argument("from_dlpack"), "the tensor is on DLPack's device {} of type {}; {device} takes device {} of type {}, \
            and host memory (type {DL_CPU}): move the tensor first", found.device_id, found.device_type,
            expected.device_id, expected.device_type);
        fail_if!(strides.is_some();
            argument("from_dlpack"), "the tensor has the shape {shape:?} and the strides {:?}; expected a contiguous one: \
            make it contiguous first", strides.unwrap_or_default());
        fail_if!(tensor.flags() & DL_READ_ONLY != 0;
            argument("from_dlpack"), "the tensor is read-only, and operations may write in place; copy it first");
        let bytes = (shape.iter().product::<usize>() * dtype.size()) as u64;
        if bytes == 0 {
            return Self::empty(shape.as_slice(), dtype, device);
        }
        let backend = Arc::clone(device.queue_backend(device.current_queue())?);
        let address = tensor.first_address(&shape, None, dtype.size())? as u64;
        // Kernels load whole groups of 16 bytes. Allocations are multiples of that, so the last group is inside.
        let slice =
            require_foreign("from_dlpack", device, &backend)?.slice_at(address, bytes.next_multiple_of(16));
        let alignment = backend.limits().alignment;
        fail_if!(!slice.offset.is_multiple_of(alignment);
            argument("from_dlpack"), "the tensor starts {} bytes after a multiple of {alignment}, which kernels need; \
            copy it first", slice.offset % alignment);
        let release = move || {
            // The producer may reuse the memory at once, in a stream of its own.
            if let Err(error) = backend.record_fence().and_then(|fence| backend.wait_fence(fence)) {
                log::error!(
                    "a tensor of another library is returned, and the device did not end its work: {error}"
                );
            }
            drop(tensor);
        };
        // SAFETY: the caller's promise; the release waits for all commands.
        let made =
            unsafe { Self::from_external("from_dlpack", slice, shape.as_slice(), dtype, device, release) }?;
        // The producer's work is ordered before the current queue, and other queues wait for that one.
        made.inner.storage.order_after_enqueue(Access::Write)?;
        Ok(made)
    }
}

/// Copies elements of host memory in row-major order.
///
/// # Safety
/// The tensor is in host memory, with this shape, strides and size of an element.
unsafe fn gather(
    tensor: &DlpackTensor,
    shape: &[usize],
    strides: Option<&[i64]>,
    size: usize,
) -> Result<Vec<u8>> {
    let count: usize = shape.iter().product();
    let mut bytes = Vec::new();
    if count == 0 {
        return Ok(bytes);
    }
    let first = ptr::with_exposed_provenance::<u8>(tensor.first_address(shape, strides, size)?);
    // A stride of 0 repeats elements, so the copy may be larger than the producer's memory.
    bytes.try_reserve_exact(count * size).map_err(|error| {
        Error::argument("from_dlpack", format!("{shape:?} elements do not fit the host's memory: {error}"))
    })?;
    let Some(strides) = strides else {
        // SAFETY: a contiguous tensor has its elements one after another.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(first, count * size) });
        return Ok(bytes);
    };
    let mut index = vec![0; shape.len()];
    for _ in 0..count {
        let element: i64 = index.iter().zip(strides).map(|(&i, &stride)| i as i64 * stride).sum();
        // SAFETY: the index is inside the shape, so the element is inside the producer's memory.
        bytes.extend(unsafe {
            std::slice::from_raw_parts(first.offset(element as isize * size as isize), size)
        });
        for (i, &extent) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < extent {
                break;
            }
            *i = 0;
        }
    }
    Ok(bytes)
}
