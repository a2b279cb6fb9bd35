//! Requests of consumers: the arguments of Python's `__dlpack__`, and the exports that they ask for.

use super::{DL_CPU, DL_IS_COPIED, DlDevice, DlpackTensor, VERSION, foreign_queue, require_foreign};
use crate::error::{Result, fail, fail_if};
use crate::runtime::device::Device;
use crate::tensor::Tensor;

/// Stream of a consumer that orders the work itself.
const NO_ORDER: i64 = -1;
/// CUDA's legacy default stream, which `__dlpack__` means if the consumer names no stream.
const LEGACY_STREAM: u64 = 1;

/// Arguments of `__dlpack__`, by the names of Python's array API. `None` is the default of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DlpackRequest {
    /// Stream of the consumer on a CUDA device: 1 is the legacy default stream, as is `None`, and 2 that of the thread.
    /// -1 asks for no order. Exports in host memory are complete, so there the stream has no meaning.
    pub stream: Option<i64>,
    /// Highest version of DLPack that the consumer takes. `None` is a version before 1.0.
    pub max_version: Option<(u32, u32)>,
    /// Device of the export, as type and index; `None` is the tensor's own.
    pub dl_device: Option<(i32, i32)>,
    /// If true, the consumer wants a copy. If false, it refuses copies.
    pub copy: Option<bool>,
}

impl From<(i32, i32)> for DlDevice {
    fn from((device_type, device_id): (i32, i32)) -> Self {
        Self { device_type, device_id }
    }
}

impl From<DlDevice> for (i32, i32) {
    fn from(device: DlDevice) -> Self {
        (device.device_type, device.device_id)
    }
}

impl DlpackTensor {
    fn mark_copied(self) -> Self {
        // SAFETY: the tensor is valid until the deleter runs, and `self` owns it.
        unsafe { (*self.0.as_ptr()).flags |= DL_IS_COPIED };
        self
    }
}

impl Device {
    /// Returns the arguments for the `__dlpack__` of a producer, whose `__dlpack_device__` returned `producer`.
    /// [`Tensor::from_dlpack`] takes the result on this device.
    ///
    /// A producer on this device shares its memory, and makes this device's stream wait for the contents. Any other
    /// producer is asked for host memory.
    ///
    /// # Errors
    /// The device is lost.
    #[track_caller]
    pub fn dlpack_request(&self, producer: (i32, i32)) -> Result<DlpackRequest> {
        let max_version = Some((VERSION.major, VERSION.minor));
        let mut request = DlpackRequest { max_version, ..DlpackRequest::default() };
        if producer.0 == DL_CPU {
            return Ok(request);
        }
        if DlDevice::from(producer) == self.dlpack_device() {
            // Handles are addresses, which are positive.
            request.stream = i64::try_from(self.dlpack_stream()?).ok();
        } else {
            request.dl_device = Some((DL_CPU, 0));
        }
        Ok(request)
    }
}

impl Tensor {
    /// Exports the tensor as a consumer requests: in its own memory or in the host's, as a copy or not, ordered by the
    /// consumer's stream. Without a request for either, the memory is copied only where it must be.
    ///
    /// An export without a copy is that of [`to_dlpack_on_stream`](Self::to_dlpack_on_stream).
    ///
    /// # Safety
    /// The stream of the request is -1, or a stream of the tensor's device and context that outlives the export.
    /// After -1, the consumer waits for the device before it accesses the memory.
    ///
    /// # Errors
    /// The tensor requires a gradient. The consumer takes only versions before 1.0, or refuses a copy that is
    /// necessary. It asks for a device that is neither the tensor's nor the host. The stream is 0 or below -1.
    pub unsafe fn to_dlpack_for(&self, request: DlpackRequest) -> Result<DlpackTensor> {
        const OP: &str = "to_dlpack_for";
        fail_if!(request.max_version.is_none_or(|(major, _)| major < VERSION.major);
            argument(OP), "the consumer takes only versions of DLPack before {}.{}; expected \
            max_version=({}, {}) or higher", VERSION.major, VERSION.minor, VERSION.major, VERSION.minor);
        let own = self.device().dlpack_device();
        let device = request.dl_device.map_or(own, DlDevice::from);
        if device.device_type == DL_CPU {
            fail_if!(request.copy == Some(false);
                argument(OP), "the host receives a copy of a tensor of {}, and the consumer refuses copies; pass \
                copy=None", self.device());
            return self.to_dlpack_host();
        }
        fail_if!(device != own;
            argument(OP), "the consumer asks for device {} of DLPack's type {}; the tensor is on device {} of type {}, \
            and the host (type {DL_CPU}) receives copies", device.device_id, device.device_type, own.device_id,
            own.device_type);
        let stream = match request.stream {
            None => Some(LEGACY_STREAM),
            Some(NO_ORDER) => None,
            Some(stream @ 1..) => Some(stream as u64),
            Some(stream) => fail!(
                argument(OP),
                "the consumer's stream is {stream}; expected a handle, 1 or 2 for a default stream, or -1 for no order"
            ),
        };
        self.check_exportable()?;
        if request.copy.unwrap_or(!self.is_contiguous()) {
            // SAFETY: the caller's promise.
            return Ok(unsafe { self.copy()?.export_ordered(stream) }?.mark_copied());
        }
        // SAFETY: the caller's promise.
        unsafe { self.export_ordered(stream) }
    }

    /// Exports the tensor, and makes `stream` wait for the contents; without a stream, nothing waits.
    ///
    /// # Safety
    /// As for [`to_dlpack_on_stream`](Self::to_dlpack_on_stream).
    pub(super) unsafe fn export_ordered(&self, stream: Option<u64>) -> Result<DlpackTensor> {
        self.export(stream, |device| {
            let Some(stream) = stream else { return Ok(()) };
            let backend = foreign_queue("to_dlpack", device)?;
            // SAFETY: the caller's promise.
            unsafe { require_foreign("to_dlpack", device, &backend)?.signal_stream(stream) }
        })
    }
}
