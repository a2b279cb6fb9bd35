//! Python's capsules of DLPack tensors, over any bindings of Python's C API.

use std::ffi::CStr;

/// Name of a capsule that owns a tensor.
pub const CAPSULE_NAME: &CStr = c"dltensor_versioned";
/// Name of a capsule whose tensor a consumer has taken.
pub const USED_CAPSULE_NAME: &CStr = c"used_dltensor_versioned";

/// Defines a module with the functions `create` and `take`, which move a tensor into a Python capsule and out of it.
/// The functions call Python's C API through the bindings that the caller names, such as `pyo3::ffi`.
///
/// ```ignore
/// forebay::dlpack_capsules!(mod capsule, pyo3::ffi);
///
/// // SAFETY: this thread is attached to the interpreter, and `object` is a live object.
/// let object = unsafe { capsule::create(tensor.to_dlpack_host()?) };
/// let tensor = unsafe { capsule::take(object) }?;
/// ```
///
/// - `unsafe fn create(tensor: DlpackTensor) -> *mut PyObject` returns a new reference, or null with Python's error
///   set. A capsule that no consumer takes returns its tensor when Python frees the capsule.
/// - `unsafe fn take(capsule: *mut PyObject) -> Result<DlpackTensor>` takes the tensor out of a capsule of DLPack 1.0
///   or later. An object that is no such capsule, and a capsule whose tensor was taken before, are errors.
///
/// Both need a thread that is attached to the interpreter, and live objects.
#[macro_export]
macro_rules! dlpack_capsules {
    (mod $name:ident, $($ffi:ident)::+) => {
        mod $name {
            use $($ffi)::+ as python;
            use $crate::tensor::dlpack::{CAPSULE_NAME, DlpackTensor, USED_CAPSULE_NAME};

            /// Creates a capsule with a tensor. Null if Python has set an error.
            ///
            /// # Safety
            /// The thread is attached to the interpreter.
            pub(super) unsafe fn create(tensor: DlpackTensor) -> *mut python::PyObject {
                let raw = tensor.into_raw();
                // SAFETY: the caller's promise. Without a capsule, nothing else owns the tensor.
                unsafe {
                    let capsule = python::PyCapsule_New(raw.cast(), CAPSULE_NAME.as_ptr(), Some(delete));
                    if capsule.is_null() {
                        drop(DlpackTensor::from_raw(raw));
                    }
                    capsule
                }
            }

            /// Takes the tensor out of a capsule.
            ///
            /// # Safety
            /// The thread is attached to the interpreter, and `capsule` is a live object.
            pub(super) unsafe fn take(capsule: *mut python::PyObject) -> $crate::error::Result<DlpackTensor> {
                // SAFETY: the caller's promise. A capsule of this name owns its tensor, until it is renamed.
                unsafe {
                    if python::PyCapsule_IsValid(capsule, CAPSULE_NAME.as_ptr()) != 1 {
                        return Err($crate::tensor::dlpack::refused_capsule());
                    }
                    let raw = python::PyCapsule_GetPointer(capsule, CAPSULE_NAME.as_ptr());
                    python::PyCapsule_SetName(capsule, USED_CAPSULE_NAME.as_ptr());
                    DlpackTensor::from_raw(raw.cast())
                }
            }

            /// Returns the tensor of a capsule that no consumer has taken.
            unsafe extern "C" fn delete(capsule: *mut python::PyObject) {
                // SAFETY: Python calls this once, with a live capsule.
                drop(unsafe { take(capsule) });
            }
        }
    };
}

/// Returns the error of an object that is no capsule with a tensor.
#[doc(hidden)]
#[must_use]
pub fn refused_capsule() -> crate::error::Error {
    crate::error::Error::argument(
        "from_dlpack",
        "the object is no capsule that owns a tensor of DLPack 1.x; pass the result of __dlpack__(max_version=(1, 0)), \
         and pass it once",
    )
}
