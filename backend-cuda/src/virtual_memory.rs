//! Segments that grow: ranges of addresses, and physical memory mapped into them.
//!
//! Each mapping is one physical allocation, whose handle is given up right after mapping: the mapping itself keeps
//! the memory, and unmapping gives it back. Memory moves to another address by its handle, which the driver tells. A
//! step that fails undoes the ones before it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use forebay_core::backend::{SourceError, VirtualMemory};

use crate::context::Context;
use crate::driver::{Device, check, check_memory};
use crate::lock;

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
        lock(&self.reserved).insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn unreserve(&self, address: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        let bytes = lock(&self.reserved).remove(&address);
        let bytes = bytes.ok_or_else(|| SourceError::Driver {
            call: "cuMemAddressFree",
            detail: format!("{address:#x} was not reserved"),
        })?;
        // SAFETY: reserved with this length, and given back once.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address, bytes) })
    }

    /// Maps pieces: each to an address, so many bytes, of memory that is mapped at another one, or new.
    pub(crate) fn map(&self, pieces: &[(u64, u64, Option<u64>)]) -> Result<(), SourceError> {
        self.context.make_current()?;
        let mut handles = Handles(Vec::with_capacity(pieces.len()));
        let taken =
            pieces.iter().try_for_each(|&(_, bytes, from)| handles.take(self.properties, bytes, from));
        // What moves leaves its place, whatever happens.
        let left = pieces.iter().filter_map(|p| p.2.map(|from| (from, p.1)));
        let left = left.map(|(from, bytes)| self.unmap(from, bytes)).fold(Ok(()), Result::and);
        taken.and(left)?;
        let mut mapped = 0;
        let done = pieces.iter().zip(&handles.0).try_for_each(|(&(address, bytes, _), &handle)| {
            // SAFETY: a range that is not reserved, or is mapped already, is an error of the driver's.
            let done = unsafe { sys::cuMemMap(address, bytes as usize, 0, handle, 0) };
            check_memory("cuMemMap", bytes, done)?;
            mapped += 1;
            Ok(())
        });
        done.and_then(|()| self.open(pieces)).inspect_err(|_| {
            // Undone without a word: the error that is returned is the one that counts.
            for &(address, bytes, _) in &pieces[..mapped] {
                let _ = self.unmap(address, bytes);
            }
        })
    }

    /// Lets the device read and write mapped pieces, as many neighbours at once as there are.
    fn open(&self, pieces: &[(u64, u64, Option<u64>)]) -> Result<(), SourceError> {
        for run in pieces.chunk_by(|a, b| a.0 + a.1 == b.0) {
            let bytes = run.iter().map(|p| p.1).sum::<u64>();
            // SAFETY: reads one structure; the range was just mapped.
            let done = unsafe { sys::cuMemSetAccess(run[0].0, bytes as usize, &self.properties.access(), 1) };
            check_memory("cuMemSetAccess", bytes, done)?;
        }
        Ok(())
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        // SAFETY: the pool promises that the range is one mapping and that no work uses it any more.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }
}

/// Physical allocations, given up when this is dropped: a mapping keeps its memory.
struct Handles(Vec<sys::CUmemGenericAllocationHandle>);

impl Handles {
    /// That of the memory mapped at `from`, or of new memory.
    fn take(&mut self, properties: Properties, bytes: u64, from: Option<u64>) -> Result<(), SourceError> {
        let mut handle = 0;
        match from {
            // SAFETY: writes one handle; an address where nothing is mapped is an error of the driver's.
            Some(from) => check("cuMemRetainAllocationHandle", unsafe {
                sys::cuMemRetainAllocationHandle(&mut handle, from as *mut std::ffi::c_void)
            })?,
            // SAFETY: writes one handle, reads one structure.
            None => check_memory("cuMemCreate", bytes, unsafe {
                sys::cuMemCreate(&mut handle, bytes as usize, &properties.allocation(), 0)
            })?,
        }
        self.0.push(handle);
        Ok(())
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for handle in &self.0 {
            // SAFETY: taken once, given up once.
            if let Err(error) = check("cuMemRelease", unsafe { sys::cuMemRelease(*handle) }) {
                log::warn!("memory may be lost: {error}");
            }
        }
    }
}
