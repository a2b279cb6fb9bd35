//! Devices, buffers and textures that a program shares with Forebay.
//!
//! Both submit to one queue, so commands run in the order of the submissions. Forebay records operations and submits
//! them in batches: [`Device::flush`] submits what is recorded, and so does each function of this module that hands
//! memory to the program.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use forebay_core::backend::{Backend, Slice};
use forebay_core::device::{Device, WeakDevice};
use forebay_core::driver_call::check_not_in_callback;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::Config;
use forebay_core::sync::LockUnpoisoned;
use forebay_core::tensor::{IntoShape, PinnedSlice, Tensor};
use forebay_core::{fail, fail_if};

use crate::adapter;
use crate::backend::{RefusedBuffer, SEGMENT_USAGES, WgpuBackend};
use crate::identity;

/// Options of [`WgpuDeviceExt::from_wgpu_with`].
#[derive(Clone, Debug)]
pub struct WgpuOptions {
    /// Usages of tensors' buffers in addition to storage and copies, for the program's passes. The default is
    /// `VERTEX | INDEX`; `INDIRECT` makes buffers slower to create.
    pub buffer_usages: wgpu::BufferUsages,
    /// Configuration of the memory pool; `None` is that of the environment.
    pub memory: Option<Config>,
}

impl Default for WgpuOptions {
    fn default() -> Self {
        Self { buffer_usages: wgpu::BufferUsages::VERTEX | wgpu::BufferUsages::INDEX, memory: None }
    }
}

/// Devices that were registered and may still be open.
static SHARED_DEVICES: Mutex<Vec<WeakDevice>> = Mutex::new(Vec::new());

/// wgpu's side of a [`Device`].
pub trait WgpuDeviceExt: Sized {
    /// Uses a device that the program opened, with the features and limits that it has. WebGPU's minimum
    /// (`wgpu::Limits::default()`, no features) suffices; more features make kernels faster.
    /// [`request_wgpu_device`](crate::request_wgpu_device) and
    /// [`wgpu_device_descriptor`](crate::wgpu_device_descriptor) request all that make a difference.
    ///
    /// Registering a device again returns the same [`Device`] while it is open. The program's error callbacks stay as
    /// they are; Forebay's errors are returned by its own calls. Forebay frees its own buffers when the last tensor
    /// and the last handle are dropped, and never destroys the program's objects.
    ///
    /// Forebay polls the device. Callbacks of the program may therefore run inside of Forebay's calls. They may drop
    /// tensors and slices there. Operations, reads and waits are errors there, because the call around them may hold
    /// locks: let another thread or a later call do them. A callback that panics there ends neither the call nor the
    /// device.
    ///
    /// # Errors
    /// The limits are below WebGPU's minimum. The queue is another device's; Metal and browsers do not tell.
    fn from_wgpu(adapter: &wgpu::Adapter, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Self> {
        Self::from_wgpu_with(adapter, device, queue, WgpuOptions::default())
    }

    /// Uses a device like [`from_wgpu`](Self::from_wgpu), with options. The options of a device that is registered
    /// already do not change.
    ///
    /// # Errors
    /// The limits are below WebGPU's minimum. The queue is another device's; Metal and browsers do not tell.
    fn from_wgpu_with(
        adapter: &wgpu::Adapter,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        options: WgpuOptions,
    ) -> Result<Self>;

    /// Returns wgpu's device and queue.
    ///
    /// # Errors
    /// The device is not a wgpu device.
    fn to_wgpu(&self) -> Result<(wgpu::Device, wgpu::Queue)>;
}

impl WgpuDeviceExt for Device {
    fn from_wgpu_with(
        adapter: &wgpu::Adapter,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        options: WgpuOptions,
    ) -> Result<Self> {
        check_not_in_callback("from_wgpu")?;
        fail_if!(!identity::is_queue_of(queue, device);
            argument("from_wgpu"), "the queue is another device's; pass the queue that was requested with the device");
        // The lock is held while the device is tested, so that two threads get one device.
        let mut shared = SHARED_DEVICES.lock_unpoisoned();
        shared.retain(|weak| weak.upgrade().is_some());
        for open in shared.iter().filter_map(WeakDevice::upgrade) {
            let is_same = with_backend("from_wgpu", &open, |backend| {
                Ok(identity::is_same_device(backend.wgpu_device(), device))
            })?;
            if is_same {
                return Ok(open);
            }
        }
        let backend: Arc<dyn Backend> =
            Arc::new(adapter::share(adapter, device, queue, options.buffer_usages)?);
        let opened = match options.memory {
            Some(config) => Self::with_config(backend, config),
            None => Self::new(backend)?,
        };
        shared.push(opened.downgrade());
        Ok(opened)
    }

    fn to_wgpu(&self) -> Result<(wgpu::Device, wgpu::Queue)> {
        with_backend("to_wgpu", self, |backend| {
            Ok((backend.wgpu_device().clone(), backend.wgpu_queue().clone()))
        })
    }
}

/// Returns the bytes of a tensor's elements. [`Tensor::from_external`] refuses negative extents and overflows.
fn tensor_bytes(shape: &impl IntoShape, dtype: DType) -> u64 {
    let extents = shape.to_extents();
    let numel = extents.iter().fold(1u64, |numel, &n| numel.saturating_mul(u64::try_from(n).unwrap_or(0)));
    numel.saturating_mul(dtype.size() as u64)
}

/// Calls a function with the device's backend, which must be this crate's.
#[track_caller]
fn with_backend<R>(
    op: &'static str,
    device: &Device,
    call: impl FnOnce(&WgpuBackend) -> Result<R>,
) -> Result<R> {
    match device.backend().as_any().and_then(|backend| backend.downcast_ref()) {
        Some(backend) => call(backend),
        None => Err(Error::unsupported(
            op,
            device,
            "it is not a wgpu device; open one with `Device::open(\"wgpu:0\")` or `Device::from_wgpu`",
        )),
    }
}

/// Calls `call` with the backend of a device that shares the program's wgpu device. wgpu's handles are valid only in
/// the instance that they come from.
fn with_shared_backend<R>(
    op: &'static str,
    device: &Device,
    call: impl FnOnce(&WgpuBackend) -> Result<R>,
) -> Result<R> {
    with_backend(op, device, |backend| {
        fail_if!(!backend.is_shared();
            argument(op), "{device} opened its own wgpu device, which has no buffers and textures of the program; \
            register the program's with `Device::from_wgpu`");
        call(backend)
    })
}

/// Memory of a tensor for the program's own commands: a range of a buffer.
///
/// Everything enqueued before is submitted. Until the guard is dropped, the memory neither moves nor returns to the
/// pool. Keep the guard until the commands that use the buffer are submitted.
#[derive(Debug)]
#[must_use = "the memory may move when the guard is dropped"]
pub struct WgpuSlice {
    buffer: wgpu::Buffer,
    pinned: PinnedSlice,
}

impl WgpuSlice {
    fn new(op: &'static str, pinned: PinnedSlice) -> Result<Self> {
        fail_if!(pinned.slice().bytes == 0; argument(op), "the tensor has no elements, and so no memory");
        let segment = pinned.slice().segment;
        let buffer = with_backend(op, pinned.device(), |backend| backend.buffer(segment))?;
        Ok(Self { buffer, pinned })
    }

    /// Returns the buffer, which holds other tensors too.
    #[must_use]
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Returns the offset of the first element, in bytes. Unless the tensor is a view, the offset is a multiple of
    /// 256 and of the device's storage alignment.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.pinned.slice().offset
    }

    /// Returns the size of the elements, in bytes. Bindings and copies take multiples of 4. The bytes up to the next
    /// multiple exist; in a view, they can be other elements of the tensor.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.pinned.slice().bytes
    }

    /// Returns the range of the elements in the buffer.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset()..self.offset() + self.size()
    }

    /// Returns the elements as a vertex or index buffer.
    #[must_use]
    pub fn as_slice(&self) -> wgpu::BufferSlice<'_> {
        self.buffer.slice(self.range())
    }

    /// Returns the elements as a binding, whose size is rounded up to a multiple of 4 bytes. wgpu refuses a binding
    /// whose [`offset`](Self::offset) is not aligned: copy such a view first.
    #[must_use]
    pub fn as_binding(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.buffer,
            offset: self.offset(),
            size: wgpu::BufferSize::new(self.size().next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT)),
        })
    }
}

/// wgpu's side of a [`Tensor`].
pub trait WgpuTensorExt: Sized {
    /// Creates a tensor over a buffer of the program, from byte `offset`, without a copy. The contents are those that
    /// the queue has written when an operation runs. Submit the program's first writes before operations that read
    /// them. For later writes, take [`wgpu_slice_mut`](Self::wgpu_slice_mut). Bools are bytes: this call overwrites
    /// those other than 0 by 1, so submit their first writes before it.
    ///
    /// The buffer must be one of the device that was registered. wgpu notices another device of the same instance. It
    /// may mistake a buffer of another instance for one of this instance.
    ///
    /// wgpu refuses a whole submission if one of its buffers is mapped or destroyed: unmap the buffer before operations
    /// use the tensor. Otherwise, the next call returns the error, and all operations of the submission have not run.
    ///
    /// `offset` is a multiple of the device's `min_storage_buffer_offset_alignment`, and of 256. From there the buffer
    /// has the tensor's bytes, rounded up to a multiple of 16, because kernels load 16 bytes at once.
    ///
    /// The memory counts under [`Tag::External`](forebay_core::memory::Tag::External). The buffer is never destroyed;
    /// its handle is dropped with the last tensor over it. A tensor without elements uses no memory of the buffer.
    ///
    /// # Errors
    /// The buffer lacks the usages `STORAGE | COPY_SRC | COPY_DST`, is destroyed, is too short, or belongs to a tensor.
    /// The offset is not aligned. The bytes overlap another tensor over the buffer: take a view of that tensor.
    fn from_wgpu_buffer(
        buffer: &wgpu::Buffer,
        offset: u64,
        shape: impl IntoShape,
        dtype: DType,
        device: &Device,
    ) -> Result<Self>;

    /// Returns the memory for commands that read it, such as a render pass.
    ///
    /// # Errors
    /// The tensor is empty, not contiguous, or not on a wgpu device. A step is being recorded.
    fn wgpu_slice(&self) -> Result<WgpuSlice>;

    /// Returns the memory for commands that write it, in the pool or in a buffer of the program. Drop the guard after
    /// the commands are submitted, and take a new one for the next commands.
    ///
    /// Dropping the guard overwrites bytes of bools other than 0 by 1. Do not drop it in a callback of wgpu if the
    /// tensor has bools: operations that follow at once may find other bytes.
    ///
    /// The writes count as in-place operations without gradient: a backward pass that needs the old contents fails.
    /// Writes without this guard go unnoticed. A backward pass then computes with the new contents, and casts that
    /// the runtime keeps have the old ones.
    ///
    /// # Errors
    /// The tensor is empty, not contiguous, or not on a wgpu device. A step is being recorded.
    fn wgpu_slice_mut(&self) -> Result<WgpuSlice>;

    /// Copies a texture's first mip level and layer to a tensor of shape height, width, channels. The dtype is u8
    /// for 8-bit formats, f16 or f32 for float formats, and u32 for 32-bit unsigned formats. The elements are the
    /// texture's own: sRGB values stay encoded, and the channels of Bgra formats begin with blue.
    ///
    /// # Errors
    /// The format has no such type, or the texture lacks the usage `COPY_SRC`.
    fn from_wgpu_texture(texture: &wgpu::Texture, device: &Device) -> Result<Self>;

    /// Copies a tensor of shape height, width, channels to a texture's first mip level and layer.
    ///
    /// # Errors
    /// Shape or type differ from the texture's, or the texture lacks the usage `COPY_DST`.
    fn copy_to_wgpu_texture(&self, texture: &wgpu::Texture) -> Result<()>;
}

impl WgpuTensorExt for Tensor {
    fn from_wgpu_buffer(
        buffer: &wgpu::Buffer,
        offset: u64,
        shape: impl IntoShape,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        const OP: &str = "from_wgpu_buffer";
        check_not_in_callback(OP)?;
        let usage = buffer.usage();
        fail_if!(!usage.contains(SEGMENT_USAGES);
            argument(OP), "the buffer has the usages {usage:?}; create it with {SEGMENT_USAGES:?} too");
        let size = buffer.size();
        let Some(bytes) = size.checked_sub(offset) else {
            fail!(argument(OP), "offset {offset} is past the end of the buffer, which has {size} bytes");
        };
        with_shared_backend(OP, device, |_| Ok(()))?;
        let tensor_bytes = tensor_bytes(&shape, dtype);
        if tensor_bytes == 0 {
            return Self::empty(shape, dtype, device);
        }
        let range = offset..offset.saturating_add(tensor_bytes);
        let segment =
            with_shared_backend(OP, device, |backend| match backend.adopt_buffer(buffer, range.clone()) {
                Ok(segment) => Ok(segment),
                Err(RefusedBuffer::Unusable(detail)) => {
                    fail!(
                        argument(OP),
                        "{device} cannot use the buffer; it must be a buffer of the device that was \
                    registered, and not destroyed: {detail}"
                    )
                }
                Err(RefusedBuffer::HoldsTensors) => {
                    fail!(argument(OP), "the buffer holds tensors of {device}; use the tensor itself")
                }
                Err(RefusedBuffer::Overlaps(taken)) => fail!(
                    argument(OP),
                    "bytes {range:?} of the buffer overlap a tensor over its bytes {taken:?}; take a view \
                of that tensor (`narrow`, `view`), or drop the tensor first"
                ),
            })?;
        let open = device.downgrade();
        let release = move || {
            // A closed device has dropped its handles.
            if let Some(device) = open.upgrade() {
                let _ = with_backend(OP, &device, |backend| {
                    backend.release_buffer(segment, &range);
                    Ok(())
                });
            }
        };
        let slice = Slice { segment, offset, bytes: bytes / 4 * 4 };
        // SAFETY: wgpu checks the range, and keeps the memory for all commands that were recorded. Every
        // pattern of bits is an element of every type, or a bool of any byte.
        unsafe { Self::from_external(OP, slice, shape, dtype, device, release) }
    }

    fn wgpu_slice(&self) -> Result<WgpuSlice> {
        WgpuSlice::new("wgpu_slice", self.pin_for_read()?)
    }

    fn wgpu_slice_mut(&self) -> Result<WgpuSlice> {
        WgpuSlice::new("wgpu_slice_mut", self.pin_for_write()?)
    }

    fn from_wgpu_texture(texture: &wgpu::Texture, device: &Device) -> Result<Self> {
        const OP: &str = "from_wgpu_texture";
        let image = ImageLayout::new(OP, texture, wgpu::TextureUsages::COPY_SRC)?;
        with_shared_backend(OP, device, |_| Ok(()))?;
        let rows = Self::empty([image.height, image.row_elements, image.channels], image.dtype, device)?;
        let pinned = rows.wgpu_slice_mut()?;
        with_shared_backend(OP, device, |backend| {
            backend.submit_copy(|encoder| {
                encoder.copy_texture_to_buffer(
                    texture.as_image_copy(),
                    image.buffer_copy(&pinned),
                    image.extent(),
                );
            })
        })?;
        drop(pinned);
        rows.narrow(1, 0, image.width)?.contiguous()
    }

    fn copy_to_wgpu_texture(&self, texture: &wgpu::Texture) -> Result<()> {
        const OP: &str = "copy_to_wgpu_texture";
        let image = ImageLayout::new(OP, texture, wgpu::TextureUsages::COPY_DST)?;
        let expected = [image.height, image.width, image.channels];
        fail_if!(self.shape() != expected || self.dtype() != image.dtype;
            argument(OP), "a texture of format {:?} takes a tensor {expected:?} of {}, got {:?} of {}",
            texture.format(), image.dtype, self.shape(), self.dtype());
        with_shared_backend(OP, self.device(), |_| Ok(()))?;
        let source = self.detach();
        let rows = match image.row_elements == image.width {
            true => source.contiguous()?,
            false => {
                let padded = Self::empty(
                    [image.height, image.row_elements, image.channels],
                    image.dtype,
                    self.device(),
                )?;
                padded.narrow(1, 0, image.width)?.copy_(&source)?;
                padded
            }
        };
        let pinned = rows.wgpu_slice()?;
        with_shared_backend(OP, self.device(), |backend| {
            backend.submit_copy(|encoder| {
                encoder.copy_buffer_to_texture(
                    image.buffer_copy(&pinned),
                    texture.as_image_copy(),
                    image.extent(),
                );
            })
        })
    }
}

/// Layout of a texture's elements in a buffer.
struct ImageLayout {
    height: usize,
    width: usize,
    channels: usize,
    dtype: DType,
    /// Elements of a row in the buffer, where rows are padded to whole multiples of 256 bytes.
    row_elements: usize,
}

impl ImageLayout {
    fn new(op: &'static str, texture: &wgpu::Texture, usage: wgpu::TextureUsages) -> Result<Self> {
        use wgpu::TextureFormat as F;
        let format = texture.format();
        let (channels, dtype) = match format {
            F::R8Unorm | F::R8Uint => (1, DType::U8),
            F::Rg8Unorm | F::Rg8Uint => (2, DType::U8),
            F::Rgba8Unorm | F::Rgba8UnormSrgb | F::Rgba8Uint | F::Bgra8Unorm | F::Bgra8UnormSrgb => {
                (4, DType::U8)
            }
            F::R16Float => (1, DType::F16),
            F::Rg16Float => (2, DType::F16),
            F::Rgba16Float => (4, DType::F16),
            F::R32Float => (1, DType::F32),
            F::Rg32Float => (2, DType::F32),
            F::Rgba32Float => (4, DType::F32),
            F::R32Uint => (1, DType::U32),
            F::Rg32Uint => (2, DType::U32),
            F::Rgba32Uint => (4, DType::U32),
            other => fail!(
                argument(op),
                "format {other:?} has no element type; expected R, Rg or Rgba of 8Unorm, 8Uint, \
                16Float, 32Float or 32Uint, or Bgra8Unorm"
            ),
        };
        fail_if!(texture.dimension() != wgpu::TextureDimension::D2 || texture.sample_count() != 1;
            argument(op), "expected a 2D texture of one sample, got {:?} of {} samples",
            texture.dimension(), texture.sample_count());
        fail_if!(!texture.usage().contains(usage);
            argument(op), "the texture has the usages {:?}; create it with {usage:?} too", texture.usage());
        let (width, height) = (texture.width() as usize, texture.height() as usize);
        let pixel = channels * dtype.size();
        let row_elements =
            (width * pixel).next_multiple_of(wgpu::COPY_BYTES_PER_ROW_ALIGNMENT as usize) / pixel;
        Ok(Self { height, width, channels, dtype, row_elements })
    }

    fn extent(&self) -> wgpu::Extent3d {
        wgpu::Extent3d { width: self.width as u32, height: self.height as u32, depth_or_array_layers: 1 }
    }

    fn buffer_copy<'a>(&self, slice: &'a WgpuSlice) -> wgpu::TexelCopyBufferInfo<'a> {
        let row = self.row_elements * self.channels * self.dtype.size();
        wgpu::TexelCopyBufferInfo {
            buffer: slice.buffer(),
            layout: wgpu::TexelCopyBufferLayout {
                offset: slice.offset(),
                bytes_per_row: Some(row as u32),
                rows_per_image: None,
            },
        }
    }
}
