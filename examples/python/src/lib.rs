//! A Python module that shares tensors with PyTorch and NumPy by DLPack.

use std::ffi::CStr;
use std::sync::LazyLock;

use forebay::prelude::{Device, OpenDevice};
use forebay::tensor::dlpack::{DL_CPU, DlpackTensor};
use pyo3::{exceptions::PyBufferError, ffi, prelude::*, types::PyDict};

/// Names of a capsule with a tensor, and after a consumer has taken it.
const NAME: &CStr = c"dltensor_versioned";
const USED_NAME: &CStr = c"used_dltensor_versioned";

static DEVICE: LazyLock<forebay::error::Result<Device>> = LazyLock::new(Device::best);

fn to_python(error: impl std::fmt::Display) -> PyErr {
    PyBufferError::new_err(error.to_string())
}

#[pyclass(frozen)]
struct Tensor(forebay::tensor::Tensor);

#[pymethods]
impl Tensor {
    fn add_(&self, value: f64) -> PyResult<()> {
        self.0.add_(value).map(drop).map_err(to_python)
    }

    fn __repr__(&self) -> String {
        self.0.to_string()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = self.0.device().dlpack_device();
        (device.device_type, device.device_id)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self, py: Python<'py>, stream: Option<i64>, max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>, copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if max_version.is_none_or(|(major, _)| major < 1) {
            return Err(to_python("expected a consumer of DLPack 1.0 or newer (max_version)"));
        }
        let on_host = dl_device.unwrap_or(self.__dlpack_device__()).0 == DL_CPU;
        let exported = match (on_host, stream, copy) {
            (true, _, Some(false)) => return Err(to_python("memory of this device reaches the host as a copy only")),
            (true, ..) => self.0.to_dlpack_host(),
            (false, _, Some(true)) => self.0.copy().and_then(|copy| copy.to_dlpack()),
            // SAFETY: Python's protocol passes a live stream; without one, the legacy default stream is meant.
            (false, stream, _) => unsafe { self.0.to_dlpack_on_stream(stream.map_or(1, |s| s.max(1) as u64)) },
        };
        let raw = exported.map_err(to_python)?.into_raw().cast();
        // SAFETY: the capsule owns the tensor until a consumer renames it.
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(raw, NAME.as_ptr(), Some(drop_capsule))) }
    }
}

/// Takes the tensor out of a capsule, which holds none afterwards.
unsafe fn take(capsule: *mut ffi::PyObject) -> PyResult<DlpackTensor> {
    // SAFETY: the capsule is alive, and its name says what it holds. Null is refused.
    unsafe {
        let raw = match ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) {
            1 => ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()),
            _ => std::ptr::null_mut(),
        };
        ffi::PyCapsule_SetName(capsule, USED_NAME.as_ptr());
        DlpackTensor::from_raw(raw.cast()).map_err(to_python)
    }
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this once, with a live capsule. A consumed one holds no tensor.
    drop(unsafe { take(capsule) });
}

/// Creates a tensor from one of another library, without a copy if both are on one device.
#[pyfunction]
fn from_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let device = DEVICE.as_ref().map_err(to_python)?;
    let (device_type, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let arguments = PyDict::new(object.py());
    arguments.set_item("max_version", (1, 0))?;
    if device_type != DL_CPU {
        // The producer makes this stream wait for its own.
        arguments.set_item("stream", device.dlpack_stream().map_err(to_python)?)?;
    }
    let capsule = object.call_method("__dlpack__", (), Some(&arguments))?;
    // SAFETY: the capsule is alive, and the producer ordered its work as asked.
    let tensor = unsafe { forebay::tensor::Tensor::from_dlpack(take(capsule.as_ptr())?, device) };
    tensor.map(Tensor).map_err(to_python)
}

#[pymodule]
fn forebay_python(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Tensor>()?;
    module.add_function(wrap_pyfunction!(from_dlpack, module)?)
}
