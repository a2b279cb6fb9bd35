//! A Python module that shares tensors with PyTorch and NumPy by DLPack.

use forebay::prelude::{Device, OpenDevice};
use forebay::tensor::dlpack::{DL_CPU, DlpackTensor};
use pyo3::types::{IntoPyDict, PyCapsule, PyCapsuleMethods};
use pyo3::{exceptions::PyBufferError, ffi, prelude::*};
use std::{ffi::CStr, ptr::NonNull, sync::LazyLock};

/// Names of a capsule with a tensor, and of one whose tensor a consumer has taken.
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

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = self.0.device().dlpack_device();
        (device.device_type, device.device_id)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let is_on_host = dl_device.unwrap_or(self.__dlpack_device__()).0 == DL_CPU;
        let exported = match (is_on_host, copy) {
            _ if max_version.is_none_or(|version| version.0 < 1) => {
                return Err(to_python("DLPack 1.0 is needed"));
            }
            (true, Some(false)) => return Err(to_python("the host receives copies only")),
            (true, _) => self.0.to_dlpack_host(),
            (false, Some(true)) => self.0.copy().and_then(|copy| copy.to_dlpack()),
            // SAFETY: Python's protocol passes a live stream; without one, the legacy default stream is meant.
            (false, _) => unsafe { self.0.to_dlpack_on_stream(stream.map_or(1, |s| s.max(1) as u64)) },
        };
        let raw =
            NonNull::new(exported.map_err(to_python)?.into_raw().cast()).expect("an export is not null");
        // SAFETY: the capsule owns the tensor until a consumer renames it.
        unsafe { PyCapsule::new_with_pointer_and_destructor(py, raw, NAME, Some(drop_capsule)) }
    }
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this once, with a live capsule. One with this name still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            drop(DlpackTensor::from_raw(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast()));
        }
    }
}

/// Creates a tensor from one of another library, without a copy if both are on one device.
#[pyfunction]
fn from_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let device = DEVICE.as_ref().map_err(to_python)?;
    let (device_type, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let options = [("max_version", (1, 0))].into_py_dict(object.py())?;
    if device_type != DL_CPU {
        // The producer makes this stream wait for its own.
        options.set_item("stream", device.dlpack_stream().map_err(to_python)?)?;
    }
    let capsule = object.call_method("__dlpack__", (), Some(&options))?;
    let raw = capsule.cast::<PyCapsule>()?.pointer_checked(Some(NAME))?;
    // SAFETY: the renamed capsule no longer owns the tensor, and the producer ordered its work as asked.
    unsafe {
        ffi::PyCapsule_SetName(capsule.as_ptr(), USED_NAME.as_ptr());
        let taken = DlpackTensor::from_raw(raw.as_ptr().cast()).map_err(to_python)?;
        forebay::tensor::Tensor::from_dlpack(taken, device).map(Tensor).map_err(to_python)
    }
}

#[pymodule]
fn forebay_python(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Tensor>()?;
    module.add_function(wrap_pyfunction!(from_dlpack, module)?)
}
