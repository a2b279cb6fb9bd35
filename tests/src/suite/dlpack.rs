//! Tensors that other libraries of the process share by DLPack, and conversions of ndarray's arrays.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::memory::Tag;
use forebay::tensor::Tensor;
use forebay::tensor::dlpack::{
    DL_CPU, DL_CUDA, DL_IS_COPIED, DlDataType, DlDevice, DlManagedTensorVersioned, DlPackVersion, DlTensor,
    DlpackRequest, DlpackTensor,
};

use super::host_reference::ensure_values;
use super::{skip, tests};

tests![
    contents_pass_through_host_memory_in_every_type,
    tensors_before_version_one_are_converted_both_ways,
    strided_host_memory_is_gathered_and_returned_once,
    memory_is_shared_without_a_copy,
    memory_of_the_program_is_used_and_returned,
    unsuitable_tensors_are_refused,
    consumers_get_the_export_that_they_request,
    requests_that_cannot_be_met_are_refused,
    producers_are_asked_for_memory_that_the_device_takes,
    capsules_return_their_tensor_once,
    ndarrays_convert_in_both_directions,
];

/// Imports a tensor whose contents are complete.
fn import(tensor: DlpackTensor, device: &Device) -> Result<Tensor> {
    // SAFETY: exports of the tests are complete, and no other library uses the memory.
    Ok(unsafe { Tensor::from_dlpack(tensor, device) }?)
}

/// A producer of this test: host memory with a deleter that counts its calls.
struct Producer {
    managed: DlManagedTensorVersioned,
    values: Vec<f32>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    returned: &'static AtomicUsize,
}

impl Producer {
    /// Makes a tensor over `values` from `byte_offset` on. `returned` counts the calls of the deleter.
    fn publish(
        values: &[f32],
        shape: &[i64],
        strides: &[i64],
        byte_offset: u64,
        returned: &'static AtomicUsize,
    ) -> *mut DlManagedTensorVersioned {
        unsafe extern "C" fn delete(this: *mut DlManagedTensorVersioned) {
            // SAFETY: `manager_ctx` is the producer, made by `Box::into_raw` below.
            let this = unsafe { Box::from_raw((*this).manager_ctx.cast::<Producer>()) };
            this.returned.fetch_add(1, Ordering::Relaxed);
        }
        let dl_tensor = DlTensor {
            data: ptr::null_mut(),
            device: DlDevice { device_type: DL_CPU, device_id: 0 },
            ndim: shape.len() as i32,
            dtype: DlDataType { code: 2, bits: 32, lanes: 1 },
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            byte_offset,
        };
        let managed = DlManagedTensorVersioned {
            version: DlPackVersion { major: 1, minor: 3 },
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags: 0,
            dl_tensor,
        };
        let this = Self {
            managed,
            values: values.to_vec(),
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            returned,
        };
        let this = Box::leak(Box::new(this));
        this.managed.dl_tensor.data = this.values.as_mut_ptr().cast();
        this.managed.dl_tensor.shape = this.shape.as_mut_ptr();
        if !this.strides.is_empty() {
            this.managed.dl_tensor.strides = this.strides.as_mut_ptr();
        }
        let raw: *mut Self = this;
        // SAFETY: `raw` is valid, and nothing else refers to it.
        unsafe {
            (*raw).managed.manager_ctx = raw.cast::<c_void>();
            &raw mut (*raw).managed
        }
    }
}

fn contents_pass_through_host_memory_in_every_type(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&dtype| device.supports_dtype(dtype)) {
        let x = Tensor::from_slice(&[1.0f32, 0.0, 1.0, 1.0, 0.0, 1.0], [2, 3], device)?.to_dtype(dtype)?;
        let exported = x.to_dlpack_host()?;
        let tensor = exported.tensor();
        ensure!(tensor.device == DlDevice { device_type: DL_CPU, device_id: 0 }, "{tensor:?}");
        ensure!(exported.flags() == DL_IS_COPIED, "{dtype}: flags {}", exported.flags());
        ensure!(usize::from(tensor.dtype.bits) == 8 * dtype.size() && tensor.dtype.lanes == 1, "{tensor:?}");
        let back = import(exported, device)?;
        ensure!(back.dtype() == dtype && back.shape() == [2, 3], "{:?} of {}", back.shape(), back.dtype());
        ensure!(back.to_bytes()? == x.to_bytes()?, "{dtype}: the contents differ");
    }
    let scalar = import(Tensor::from_slice(&[7.0f32], (), device)?.to_dlpack_host()?, device)?;
    ensure!(scalar.rank() == 0 && scalar.item()? == 7.0, "{scalar:?}");
    let empty = import(Tensor::empty([0, 3], DType::F32, device)?.to_dlpack_host()?, device)?;
    ensure!(empty.shape() == [0, 3], "{:?}", empty.shape());
    // A view is exported in its own order.
    let turned = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], [2, 2], device)?.t()?;
    ensure!(import(turned.to_dlpack_host()?, device)?.to_vec::<f32>()? == [1.0, 3.0, 2.0, 4.0], "the view");
    Ok(())
}

fn tensors_before_version_one_are_converted_both_ways(device: &Device) -> Result<()> {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    let raw = Producer::publish(&[1.0, 2.0, 3.0], &[3], &[], 0, &RETURNED);
    // SAFETY: the producer follows `dlpack.h`, and each form is consumed once.
    let twice = unsafe { DlpackTensor::from_unversioned(DlpackTensor::from_raw(raw)?.into_unversioned()) }?;
    ensure!(
        RETURNED.load(Ordering::Relaxed) == 0,
        "the tensor was returned before its last handle was dropped"
    );
    ensure!(import(twice, device)?.to_vec::<f32>()? == [1.0, 2.0, 3.0], "the contents differ");
    ensure!(RETURNED.load(Ordering::Relaxed) == 1, "returned {RETURNED:?} times");
    Ok(())
}

fn strided_host_memory_is_gathered_and_returned_once(device: &Device) -> Result<()> {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    let values = [9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
    for (shape, strides, expected) in [
        ([3, 2], [1, 3], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
        ([2, 3], [3, 1], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        ([2, 3], [0, 1], [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]),
    ] {
        let before = RETURNED.load(Ordering::Relaxed);
        let raw = Producer::publish(&values, &shape, &strides, 4, &RETURNED);
        // SAFETY: the producer follows `dlpack.h`.
        let tensor = import(unsafe { DlpackTensor::from_raw(raw) }?, device)?;
        ensure!(tensor.to_vec::<f32>()? == expected, "{shape:?} {strides:?}: {tensor:?}");
        ensure!(RETURNED.load(Ordering::Relaxed) == before + 1, "the memory was not returned");
    }
    Ok(())
}

fn memory_is_shared_without_a_copy(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], [4], device)?;
    if device.dlpack_device().device_type == DL_CPU {
        let error = x.to_dlpack().err();
        ensure!(matches!(&error, Some(Error::Unsupported { .. })), "{error:?}");
        ensure!(
            error.is_some_and(|e| e.to_string().contains("to_dlpack_host")),
            "the error names no alternative"
        );
        return Ok(());
    }
    let external = || device.memory().tags[Tag::External as usize].current;
    let before = external();
    // SAFETY: the device's own stream outlives the export.
    let exported = unsafe { x.to_dlpack_on_stream(device.dlpack_stream()?) }?;
    let address = exported.tensor().data;
    let y = import(exported, device)?;
    ensure!(external() == before + 16, "{} bytes are external", external() - before);
    y.add_(10)?;
    ensure!(x.to_vec::<f32>()? == [11.0, 12.0, 13.0, 14.0], "the exported tensor did not change");
    drop(y);
    ensure!(external() == before, "the memory was not returned");
    // Waiting in place of streams.
    let again = x.to_dlpack()?;
    ensure!(again.tensor().data == address, "the tensor moved");
    let y = import(again, device)?;
    ensure!(y.to_vec::<f32>()? == [11.0, 12.0, 13.0, 14.0], "the contents differ");
    Ok(())
}

fn memory_of_the_program_is_used_and_returned(device: &Device) -> Result<()> {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    if device.dlpack_device().device_type != DL_CUDA {
        return skip("its memory has no address for other libraries");
    }
    let memory = Tensor::from_slice(&[1.0f32; 64], [64], device)?;
    let exported = memory.to_dlpack()?;
    let raw = Producer::publish(&[], &[64], &[], 0, &RETURNED);
    // SAFETY: the memory is that of `exported`, which lives longer.
    let foreign = unsafe {
        (*raw).dl_tensor.data = exported.tensor().data;
        (*raw).dl_tensor.device = device.dlpack_device();
        DlpackTensor::from_raw(raw)
    }?;
    let x = import(foreign, device)?;
    let y = x.mul(3)?;
    drop(x);
    ensure!(RETURNED.load(Ordering::Relaxed) == 1, "the memory was not returned");
    ensure!(y.to_vec::<f32>()? == [3.0; 64], "{y:?}");
    Ok(())
}

/// Overwrites the extents and strides of a producer's tensor of two dimensions.
fn set_layout(tensor: &mut DlManagedTensorVersioned, shape: [i64; 2], strides: [i64; 2]) {
    // SAFETY: a producer with strides has two arrays of two numbers.
    unsafe {
        tensor.dl_tensor.shape.copy_from(shape.as_ptr(), 2);
        tensor.dl_tensor.strides.copy_from(strides.as_ptr(), 2);
    }
}

fn unsuitable_tensors_are_refused(device: &Device) -> Result<()> {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    let leaf = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    ensure!(leaf.to_dlpack_host().is_err_and(|e| e.to_string().contains("detach")), "a leaf was exported");
    type Change = fn(&mut DlManagedTensorVersioned);
    let changes: [(Change, &str); 21] = [
        (|t| t.version.major = 2, "version 2.3"),
        (|t| t.dl_tensor.dtype.bits = 128, "128 bits"),
        (|t| t.dl_tensor.dtype.lanes = 4, "4 lanes"),
        (|t| t.dl_tensor.device = DlDevice { device_type: 10, device_id: 3 }, "device 3 of type 10"),
        // SAFETY: the array has two extents.
        (|t| unsafe { *t.dl_tensor.shape = -1 }, "[-1, 2]"),
        // Extents whose product no integer holds, also of a tensor without elements.
        // SAFETY: the array has two extents.
        (|t| unsafe { *t.dl_tensor.shape = i64::MAX }, "at most 2^48"),
        // SAFETY: both arrays have two numbers.
        (|t| unsafe { t.dl_tensor.shape.copy_from(&[0, i64::MAX] as *const i64, 2) }, "at most 2^48"),
        (|t| t.dl_tensor.ndim = -1, "-1 dimensions; expected 0 to 64"),
        (|t| t.dl_tensor.ndim = i32::MIN, "-2147483648 dimensions"),
        (|t| t.dl_tensor.ndim = i32::MAX, "2147483647 dimensions"),
        (|t| t.dl_tensor.shape = ptr::null_mut(), "2 dimensions and no shape"),
        (|t| t.dl_tensor.data = ptr::null_mut(), "no memory: its pointer is null"),
        (|t| t.dl_tensor.data = ptr::without_provenance_mut(7), "address 0x7"),
        (|t| t.dl_tensor.byte_offset = 2, "byte 2; expected a multiple of 4"),
        (|t| t.dl_tensor.byte_offset = u64::MAX - 3, "some elements have no address"),
        (|t| t.dl_tensor.byte_offset = 1 << 63, "some elements have no address"),
        (|t| t.dl_tensor.dtype.bits = 0, "0 bits"),
        (|t| t.dl_tensor.dtype.lanes = 0, "0 lanes"),
        // Repeats one element more often than a tensor has elements.
        (|t| set_layout(t, [1 << 47, 2], [0, 0]), "4,294,967,295 elements"),
        (|t| set_layout(t, [2, 2], [i64::MAX, 1]), "some elements have no address"),
        (|t| set_layout(t, [2, 2], [i64::MIN, 1]), "some elements have no address"),
    ];
    for (at, (change, expected)) in changes.into_iter().enumerate() {
        let raw = Producer::publish(&[1.0; 4], &[2, 2], &[2, 1], 0, &RETURNED);
        // SAFETY: the producer follows `dlpack.h`; what is changed is refused before the memory is read.
        let taken = unsafe {
            change(&mut *raw);
            DlpackTensor::from_raw(raw)
        };
        let error = taken.map_err(Into::into).and_then(|tensor| import(tensor, device)).err();
        let message = error.map(|e| e.to_string()).unwrap_or_default();
        ensure!(message.contains(expected), "expected `{expected}`, got `{message}`");
        ensure!(RETURNED.load(Ordering::Relaxed) == at + 1, "a refused tensor was not returned");
    }
    // SAFETY: null is refused.
    ensure!(unsafe { DlpackTensor::from_raw(ptr::null_mut()) }.is_err(), "a null pointer was accepted");
    Ok(())
}

/// Request of a consumer of DLPack 1.0.
fn request() -> DlpackRequest {
    DlpackRequest { max_version: Some((1, 0)), ..DlpackRequest::default() }
}

fn consumers_get_the_export_that_they_request(device: &Device) -> Result<()> {
    let own = device.dlpack_device();
    let values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let x = Tensor::from_slice(&values, [2, 3], device)?;
    let host = Some((DL_CPU, 0));
    let (refused, wanted) = (Some(false), Some(true));
    let is_on_host = own.device_type == DL_CPU;
    // Device of the request, wish for a copy, and whether a copy comes.
    for (dl_device, copy, is_copied) in [
        (host, None, true),
        (host, wanted, true),
        (None, wanted, true),
        (None, None, is_on_host),
        (Some(own.into()), None, is_on_host),
        (None, refused, false),
    ] {
        if is_on_host && copy == refused {
            continue;
        }
        let stream = if is_on_host { None } else { Some(device.dlpack_stream()?.try_into()?) };
        let wish = DlpackRequest { stream, dl_device, copy, ..request() };
        // SAFETY: the stream is the device's own.
        let exported = unsafe { x.to_dlpack_for(wish) }?;
        let expected = dl_device.map_or(own, DlDevice::from);
        ensure!(exported.tensor().device == expected, "{wish:?}: {:?}", exported.tensor().device);
        ensure!((exported.flags() & DL_IS_COPIED != 0) == is_copied, "{wish:?}: flags {}", exported.flags());
        let back = import(exported, device)?;
        back.mul_(2.0)?;
        let is_shared = x.to_vec::<f32>()? != values;
        ensure!(is_shared != is_copied, "{wish:?}: the memory is shared: {is_shared}");
        back.mul_(0.5)?;
        ensure!(
            back.to_vec::<f32>()? == values && x.to_vec::<f32>()? == values,
            "{wish:?}: the contents differ"
        );
    }
    // A view in another order is copied, unless the consumer refuses.
    // SAFETY: no stream is named, and the export is complete when the test reads it.
    let turned = unsafe { x.t()?.to_dlpack_for(request()) }?;
    ensure!(turned.flags() & DL_IS_COPIED != 0, "a view was exported as it is");
    device.synchronize()?;
    ensure!(import(turned, device)?.to_vec::<f32>()? == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0], "the view");
    Ok(())
}

fn requests_that_cannot_be_met_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F32, device)?;
    let check = |x: &Tensor, wish: DlpackRequest, expected: &str| -> Result<()> {
        // SAFETY: the request is refused before a stream is used.
        let error = unsafe { x.to_dlpack_for(wish) }.err();
        let message = error.with_context(|| format!("{wish:?} was met"))?.to_string();
        ensure!(message.contains(expected), "{wish:?}: expected `{expected}`, got `{message}`");
        Ok(())
    };
    check(&x, DlpackRequest::default(), "max_version=(1, 0)")?;
    check(&x, DlpackRequest { max_version: Some((0, 8)), ..request() }, "max_version=(1, 0)")?;
    check(&x, DlpackRequest { dl_device: Some((10, 3)), ..request() }, "device 3 of DLPack's type 10")?;
    let copy = Some(false);
    check(&x, DlpackRequest { dl_device: Some((DL_CPU, 0)), copy, ..request() }, "refuses copies")?;
    check(&Tensor::ones([4], DType::F32, device)?.to_leaf()?, request(), "detach")?;
    if device.dlpack_device().device_type == DL_CPU {
        return Ok(());
    }
    check(&x, DlpackRequest { stream: Some(0), ..request() }, "stream is 0")?;
    check(&x, DlpackRequest { stream: Some(-2), ..request() }, "stream is -2")?;
    check(&x.t()?, DlpackRequest { copy, ..request() }, "contiguous")
}

fn producers_are_asked_for_memory_that_the_device_takes(device: &Device) -> Result<()> {
    let own = device.dlpack_device();
    ensure!(device.dlpack_request((DL_CPU, 0))? == request(), "host memory needs no request");
    let elsewhere = DlpackRequest { dl_device: Some((DL_CPU, 0)), ..request() };
    ensure!(device.dlpack_request((10, 3))? == elsewhere, "another device's memory");
    if own.device_type != DL_CPU {
        let stream = Some(i64::try_from(device.dlpack_stream()?)?);
        ensure!(device.dlpack_request(own.into())? == DlpackRequest { stream, ..request() }, "own memory");
    }
    // A producer that meets the request gives a tensor that the device takes.
    let x = Tensor::from_slice(&[1.0f32, 2.0], [2], device)?;
    // SAFETY: the stream is the device's own.
    let exported = unsafe { x.to_dlpack_for(device.dlpack_request(own.into())?) }?;
    ensure!(import(exported, device)?.to_vec::<f32>()? == [1.0, 2.0], "the contents differ");
    Ok(())
}

/// Python's functions of capsules, without Python.
#[allow(non_snake_case, reason = "the names are those of Python's C API")]
mod fake_python {
    use std::ffi::{CStr, c_char, c_int, c_void};
    use std::ptr;

    type Destructor = unsafe extern "C" fn(*mut PyObject);

    pub(super) struct PyObject {
        pointer: *mut c_void,
        name: *const c_char,
        destructor: Option<Destructor>,
    }

    pub(super) unsafe extern "C" fn PyCapsule_New(
        pointer: *mut c_void,
        name: *const c_char,
        destructor: Option<Destructor>,
    ) -> *mut PyObject {
        Box::into_raw(Box::new(PyObject { pointer, name, destructor }))
    }

    pub(super) unsafe extern "C" fn PyCapsule_IsValid(object: *mut PyObject, name: *const c_char) -> c_int {
        // SAFETY: the object is alive, and both names are strings.
        unsafe { (CStr::from_ptr((*object).name) == CStr::from_ptr(name)).into() }
    }

    pub(super) unsafe extern "C" fn PyCapsule_GetPointer(
        object: *mut PyObject,
        name: *const c_char,
    ) -> *mut c_void {
        // SAFETY: as above.
        unsafe {
            match PyCapsule_IsValid(object, name) {
                1 => (*object).pointer,
                _ => ptr::null_mut(),
            }
        }
    }

    pub(super) unsafe extern "C" fn PyCapsule_SetName(object: *mut PyObject, name: *const c_char) -> c_int {
        // SAFETY: as above.
        unsafe { (*object).name = name };
        0
    }

    /// Frees an object, as Python does when the last reference is dropped.
    pub(super) unsafe fn free(object: *mut PyObject) {
        // SAFETY: the object is alive, and its destructor runs once.
        unsafe {
            if let Some(destructor) = (*object).destructor {
                destructor(object);
            }
            drop(Box::from_raw(object));
        }
    }
}

forebay::dlpack_capsules!(mod capsule, super::fake_python);

fn capsules_return_their_tensor_once(device: &Device) -> Result<()> {
    static RETURNED: AtomicUsize = AtomicUsize::new(0);
    let create = || -> Result<*mut fake_python::PyObject> {
        let raw = Producer::publish(&[1.0, 2.0], &[2], &[], 0, &RETURNED);
        // SAFETY: the producer follows `dlpack.h`, and the capsule owns its tensor.
        Ok(unsafe { capsule::create(DlpackTensor::from_raw(raw)?) })
    };
    let returned = || RETURNED.load(Ordering::Relaxed);
    // SAFETY: each object is alive until it is freed.
    unsafe {
        let unused = create()?;
        ensure!(returned() == 0, "an unused capsule returned its tensor early");
        fake_python::free(unused);
        ensure!(returned() == 1, "an unused capsule returned its tensor {} times", returned());

        let used = create()?;
        let tensor = capsule::take(used)?;
        let again = capsule::take(used).err().context("a tensor was taken twice")?.to_string();
        ensure!(again.contains("pass it once"), "{again}");
        fake_python::free(used);
        ensure!(returned() == 1, "a used capsule returned its tensor");
        ensure!(import(tensor, device)?.to_vec::<f32>()? == [1.0, 2.0], "the contents differ");
        ensure!(returned() == 2, "the tensor was returned {} times", returned());
    }
    Ok(())
}

/// Transposed, reversed and stepped arrays, arrays without elements, and arrays of other element types.
fn ndarrays_convert_in_both_directions(device: &Device) -> Result<()> {
    use ndarray::{ArrayD, arr0, arr2, s};
    let array = arr2(&[[0.0f32, 1.0, 2.0], [3.0, 4.0, 5.0]]);
    let columns = Tensor::from_ndarray(&array.t(), device)?;
    ensure!(columns.shape() == [3, 2] && columns.dtype() == DType::F32);
    ensure_values(&columns, &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0])?;
    ensure_values(&Tensor::from_ndarray(&array.slice(s![..;-1, ..;2]), device)?, &[3.0, 5.0, 0.0, 2.0])?;
    ensure!(Tensor::from_ndarray(&array.slice(s![.., 3..]), device)?.shape() == [2, 0]);
    ensure!(Tensor::from_ndarray(&arr0(-3i64), device)?.to_vec::<i64>()? == [-3]);
    ensure!(ArrayD::<f32>::try_from(&columns.t()?)? == array.clone().into_dyn());
    ensure!(
        ArrayD::<f32>::try_from(&columns.slice_dim(0, 0, 3, 2)?)?
            == arr2(&[[0.0, 3.0], [2.0, 5.0]]).into_dyn()
    );
    ensure!(ArrayD::<f32>::try_from(&columns.narrow(0, 0, 0)?)?.shape() == [0, 2]);
    let wrong = ArrayD::<i32>::try_from(&columns).err().context("i32 of f32")?;
    ensure!(wrong.to_string().contains("f32"), "{wrong}");
    Ok(())
}
