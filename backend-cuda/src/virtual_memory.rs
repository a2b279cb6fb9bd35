//! Segments that grow: ranges of addresses, and physical memory mapped into them.
//!
//! Each mapping is one physical allocation, whose handle is given up right after mapping: the mapping itself keeps
//! the memory, and unmapping gives it back. A step that fails undoes the ones before it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use forebay_core::backend::{SourceError, VirtualMemory};

use crate::context::Context;
use crate::driver::{Device, check, check_memory};

/// The address space of one device.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    context: Arc<Context>,
    properties: Properties,
    pub(crate) limits: VirtualMemory,
    /// Lengths of the reserved ranges, which the driver wants to hear when it gets them back.
    reserved: Mutex<HashMap<u64, usize>>,
}

/// What the memory is: pinned, on one device, not shared with other processes.
#[derive(Clone, Copy, Debug)]
struct Properties {
    location: CUmemLocation,
}

impl Properties {
    fn of(device: Device) -> Self {
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        Self { location: CUmemLocation { type_, id: device.raw } }
    }

    fn allocation(self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    fn access(self) -> CUmemAccessDesc {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemAccessDesc { location: self.location, flags }
    }
}

impl AddressSpace {
    /// `None` where the device has no virtual memory management.
    pub(crate) fn new(context: &Arc<Context>, total: u64) -> Result<Option<Self>, SourceError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if context.device.attribute(attribute)? == 0 {
            return Ok(None);
        }
        let properties = Properties::of(context.device);
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: writes one size, reads one structure.
        check("cuMemGetAllocationGranularity", unsafe {
            sys::cuMemGetAllocationGranularity(&mut granularity, &properties.allocation(), minimum)
        })?;
        let granularity = (granularity as u64).max(1);
        // PyTorch's choice: an eighth more than there is, so that fragments of the range do not run out first.
        let reservation = (total + total / 8).next_multiple_of(granularity);
        Ok(Some(Self {
            context: Arc::clone(context),
            properties,
            limits: VirtualMemory { granularity, reservation },
            reserved: Mutex::default(),
        }))
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<u64, SourceError> {
        self.context.make_current()?;
        let bytes = bytes.next_multiple_of(self.limits.granularity) as usize;
        let mut address = 0;
        // SAFETY: writes one address.
        check_memory("cuMemAddressReserve", bytes as u64, unsafe {
            sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0)
        })?;
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner).insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn unreserve(&self, address: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        let bytes = self.reserved.lock().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let bytes = bytes.ok_or_else(|| SourceError::Driver {
            call: "cuMemAddressFree",
            detail: format!("{address:#x} was not reserved"),
        })?;
        // SAFETY: reserved with this length, and given back once.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address, bytes) })
    }

    pub(crate) fn map(&self, address: u64, bytes: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        let size = bytes as usize;
        let mut handle = 0;
        // SAFETY: writes one handle, reads one structure.
        check_memory("cuMemCreate", bytes, unsafe {
            sys::cuMemCreate(&mut handle, size, &self.properties.allocation(), 0)
        })?;
        // SAFETY: a range that is not reserved, or is mapped already, is an error of the driver's.
        let mapped = check_memory("cuMemMap", bytes, unsafe { sys::cuMemMap(address, size, 0, handle, 0) });
        // SAFETY: the handle was just made and is not used again; a mapping keeps the memory.
        let released = check("cuMemRelease", unsafe { sys::cuMemRelease(handle) });
        mapped?;
        // SAFETY: reads one structure; the range was just mapped.
        let access = check_memory("cuMemSetAccess", bytes, unsafe {
            sys::cuMemSetAccess(address, size, &self.properties.access(), 1)
        });
        released.and(access).inspect_err(|_| {
            // Undone without a word: the error that is returned is the one that counts.
            let _ = self.unmap(address, bytes);
        })
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: the pool promises that the range is one mapping and that no work uses it any more.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }
}
