//! A Python module that shares tensors with PyTorch and NumPy by DLPack.

#[pyo3::pymodule]
mod forebay_python {
    use forebay::{device::Device, tensor::Tensor, tensor::dlpack::DlpackRequest};
    use pyo3::{exceptions::PyBufferError, prelude::*, types::IntoPyDict};
    use std::sync::LazyLock;

    static DEVICE: LazyLock<forebay::error::Result<Device>> = LazyLock::new(forebay::best_device);

    forebay::dlpack_capsules!(mod capsule, pyo3::ffi);

    fn to_python(error: impl std::fmt::Display) -> PyErr {
        PyBufferError::new_err(error.to_string())
    }

    #[pyclass(frozen, name = "Tensor")]
    struct PyTensor(Tensor);

    #[pymethods]
    impl PyTensor {
        fn add_(&self, value: f64) -> PyResult<()> {
            self.0.add_(value).map_err(to_python)
        }

        fn __dlpack_device__(&self) -> (i32, i32) {
            self.0.device().dlpack_device().into()
        }

        #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
        fn __dlpack__<'py>(
            &self,
            py: Python<'py>,
            stream: Option<i64>,
            max_version: Option<(u32, u32)>,
            dl_device: Option<(i32, i32)>,
            copy: Option<bool>,
        ) -> PyResult<Bound<'py, PyAny>> {
            let request = DlpackRequest { stream, max_version, dl_device, copy };
            // SAFETY: by Python's protocol, the stream lives as long as the consumer's tensor.
            let tensor = unsafe { self.0.to_dlpack_for(request) }.map_err(to_python)?;
            // SAFETY: the result is a new reference, or null with Python's error set.
            unsafe { Bound::from_owned_ptr_or_err(py, capsule::create(tensor)) }
        }
    }

    /// Creates a tensor from one of another library, without a copy if both are on one device.
    #[pyfunction]
    fn from_dlpack(object: &Bound<'_, PyAny>) -> PyResult<PyTensor> {
        let device = DEVICE.as_ref().map_err(to_python)?;
        let producer = object.call_method0("__dlpack_device__")?.extract()?;
        let DlpackRequest { stream, dl_device, .. } = device.dlpack_request(producer).map_err(to_python)?;
        let request = [("max_version", Some((1, 0))), ("dl_device", dl_device)].into_py_dict(object.py())?;
        request.set_item("stream", stream)?;
        let result = object.call_method("__dlpack__", (), Some(&request))?;
        // SAFETY: the object is alive, and the producer ordered its work before the stream of the request.
        let tensor = unsafe { capsule::take(result.as_ptr()).and_then(|t| Tensor::from_dlpack(t, device)) };
        tensor.map(PyTensor).map_err(to_python)
    }
}
