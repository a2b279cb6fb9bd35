//! Segments that grow: reserved address ranges, and physical memory mapped into them.
//!
//! Each mapping is one physical allocation. Its handle is released right after mapping: the mapping keeps the
//! memory, and unmapping frees the memory. A remap to another address retains the handle through the driver.
//! A step that fails undoes the ones before it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation};
use forebay_core::backend::{SourceError, VirtualMemory};
use forebay_core::sync::LockUnpoisoned;

use crate::context::Context;
use crate::driver::{DeviceHandle, check, check_alloc};

/// The address space of one device.
#[derive(Debug)]
pub(crate) struct VirtualAddressSpace {
    context: Arc<Context>,
    location: CUmemLocation,
    pub(crate) limits: VirtualMemory,
    /// Lengths of the reserved ranges, which the driver requires when a range is freed.
    reservations: Mutex<HashMap<u64, usize>>,
    access: Mutex<AccessState>,
}

/// Mappings of a device's memory, and the devices that may access the memory.
#[derive(Debug, Default)]
struct AccessState {
    /// Lengths of the mapped pieces by address.
    mapped: BTreeMap<u64, u64>,
    /// Other devices with access.
    peers: Vec<CUmemLocation>,
}

/// Returns properties of memory: pinned, on one device, not shared with other processes.
fn allocation_properties(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

impl VirtualAddressSpace {
    /// Returns `None` if the device has no virtual memory management.
    pub(crate) fn new(context: &Arc<Context>, total: u64) -> Result<Option<Self>, SourceError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if context.device.attribute(attribute)? == 0 {
            return Ok(None);
        }
        let location = device_location(context.device);
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: writes one size, reads one structure.
        check("cuMemGetAllocationGranularity", unsafe {
            sys::cuMemGetAllocationGranularity(&mut granularity, &allocation_properties(location), minimum)
        })?;
        let granularity = (granularity as u64).max(1);
        // PyTorch's choice: an eighth more than the device's memory, so that fragmentation of the range does
        // not exhaust it first.
        let reservation = (total + total / 8).next_multiple_of(granularity);
        Ok(Some(Self {
            context: Arc::clone(context),
            location,
            limits: VirtualMemory { granularity, reservation },
            reservations: Mutex::default(),
            access: Mutex::default(),
        }))
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<u64, SourceError> {
        self.context.make_current()?;
        let bytes = bytes.next_multiple_of(self.limits.granularity) as usize;
        let mut address = 0;
        // SAFETY: writes one address.
        check_alloc("cuMemAddressReserve", bytes as u64, unsafe {
            sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0)
        })?;
        self.reservations.lock_unpoisoned().insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn unreserve(&self, address: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        let bytes = self.reservations.lock_unpoisoned().remove(&address);
        let bytes = bytes.ok_or_else(|| SourceError::Driver {
            call: "cuMemAddressFree",
            detail: format!("{address:#x} was not reserved"),
        })?;
        // SAFETY: reserved with this length, and freed once.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(address, bytes) })
    }

    /// Maps pieces, or none of them; after an error, memory that was to move is unmapped.
    pub(crate) fn map(&self, pieces: Vec<PageMapping>) -> Result<(), SourceError> {
        match self.prepare_remap(pieces) {
            Ok(mut remap) => self.complete_remap(&mut remap),
            Err((error, pieces)) => self.unmap_sources(&pieces).and(Err(error)),
        }
    }

    /// Allocates the new memory of pieces. On failure returns the pieces; nothing has changed then.
    pub(crate) fn prepare_remap(
        &self,
        pieces: Vec<PageMapping>,
    ) -> Result<PendingRemap, (SourceError, Vec<PageMapping>)> {
        let mut new_handles = PhysicalHandles::default();
        let mut new_pieces = pieces.iter().filter(|piece| piece.from.is_none());
        let created = self
            .context
            .make_current()
            .and_then(|()| new_pieces.try_for_each(|piece| new_handles.create(self.location, piece.bytes)));
        match created {
            Ok(()) => Ok(PendingRemap { mappings: pieces, new_handles, moving_handles: None }),
            Err(error) => Err((error, pieces)),
        }
    }

    /// Maps the pieces of a remap, which no work uses any more. Can be retried after an error.
    pub(crate) fn complete_remap(&self, remap: &mut PendingRemap) -> Result<(), SourceError> {
        self.context.make_current()?;
        let PendingRemap { mappings: pieces, new_handles: new, moving_handles: moving } = remap;
        let moving = match moving {
            Some(moving) => moving,
            None => {
                let mut handles = PhysicalHandles::default();
                let mut from = pieces.iter().filter_map(|piece| piece.from);
                let retained = from.try_for_each(|from| handles.retain(from));
                // Memory that moves is unmapped from its source in any case.
                retained.and(self.unmap_sources(pieces))?;
                moving.insert(handles)
            }
        };
        let (mut moving, mut new) = (moving.0.iter(), new.0.iter());
        let mut mapped = 0;
        let done = pieces.iter().try_for_each(|piece| {
            let handle = if piece.from.is_some() { moving.next() } else { new.next() };
            let Some(&handle) = handle else { return Ok(()) };
            // SAFETY: for a range that is not reserved, or is mapped already, the driver returns an error.
            let done = unsafe { sys::cuMemMap(piece.to, piece.bytes as usize, 0, handle, 0) };
            check_alloc("cuMemMap", piece.bytes, done)?;
            mapped += 1;
            Ok(())
        });
        done.and_then(|()| self.grant_access(pieces)).inspect_err(|_| {
            // Errors of the rollback are ignored: the first error is returned.
            for piece in &pieces[..mapped] {
                let _ = self.unmap(piece.to, piece.bytes);
            }
        })
    }

    /// Maps memory a second time; of each piece, `from` stays mapped.
    pub(crate) fn map_again(&self, mappings: Vec<PageMapping>) -> Result<(), SourceError> {
        self.context.make_current()?;
        let mut handles = PhysicalHandles::default();
        mappings.iter().filter_map(|piece| piece.from).try_for_each(|from| handles.retain(from))?;
        let (new_handles, moving_handles) = (PhysicalHandles::default(), Some(handles));
        self.complete_remap(&mut PendingRemap { mappings, new_handles, moving_handles })
    }

    /// Unmaps the sources of moving memory.
    fn unmap_sources(&self, pieces: &[PageMapping]) -> Result<(), SourceError> {
        let moving = pieces.iter().filter_map(|piece| piece.from.map(|from| (from, piece.bytes)));
        moving.map(|(from, bytes)| self.unmap(from, bytes)).fold(Ok(()), Result::and)
    }

    /// Grants the device, and the devices of [`add_peer`](Self::add_peer), access to mapped pieces, with one call for
    /// each contiguous run.
    fn grant_access(&self, pieces: &[PageMapping]) -> Result<(), SourceError> {
        // The lock is held until the pieces are recorded, so that a new peer misses none of them.
        let access = &mut *self.access.lock_unpoisoned();
        for run in pieces.chunk_by(|a, b| a.to + a.bytes == b.to) {
            let (address, bytes) = (run[0].to, run.iter().map(|piece| piece.bytes).sum());
            set_access(address, bytes, &[self.location])?;
            // A missing right must not make the allocation fail: the driver can copy through host memory.
            if !access.peers.is_empty()
                && let Err(error) = set_access(address, bytes, &access.peers)
            {
                log::warn!("copies from other cards to new memory go through host memory: {error}");
                access.peers.clear();
            }
        }
        access.mapped.extend(pieces.iter().map(|piece| (piece.to, piece.bytes)));
        Ok(())
    }

    /// Lets another device access all memory, mapped now or later. Called again for each new context of the device.
    pub(crate) fn add_peer(&self, device: DeviceHandle) -> Result<(), SourceError> {
        self.context.make_current()?;
        let access = &mut *self.access.lock_unpoisoned();
        let peer = device_location(device);
        access.mapped.iter().try_for_each(|(&address, &bytes)| set_access(address, bytes, &[peer]))?;
        if access.peers.iter().all(|existing| existing.id != device.raw) {
            access.peers.push(peer);
        }
        Ok(())
    }

    pub(crate) fn unmap(&self, address: u64, bytes: u64) -> Result<(), SourceError> {
        self.context.make_current()?;
        self.access.lock_unpoisoned().mapped.remove(&address);
        // SAFETY: the pool promises that the range is one mapping and that no work uses the range any more.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }
}

fn device_location(device: DeviceHandle) -> CUmemLocation {
    CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.raw }
}

/// Grants devices access to a mapped range.
fn set_access(address: u64, bytes: u64, devices: &[CUmemLocation]) -> Result<(), SourceError> {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access: Vec<CUmemAccessDesc> =
        devices.iter().map(|&location| CUmemAccessDesc { location, flags }).collect();
    // SAFETY: reads the structures of `access`; the range is mapped.
    let done = unsafe { sys::cuMemSetAccess(address, bytes as usize, access.as_ptr(), access.len()) };
    check_alloc("cuMemSetAccess", bytes, done)
}

/// A mapping of physical memory to an address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageMapping {
    /// Target address.
    pub(crate) to: u64,
    pub(crate) bytes: u64,
    /// Address where the memory is mapped now; `None` for new memory.
    pub(crate) from: Option<u64>,
}

/// Mappings to apply, and the new memory among them.
#[derive(Debug)]
pub(crate) struct PendingRemap {
    mappings: Vec<PageMapping>,
    new_handles: PhysicalHandles,
    /// Handles of moving memory, once it is unmapped from its sources.
    moving_handles: Option<PhysicalHandles>,
}

/// Handles of physical allocations, released on drop: a mapping keeps its memory.
#[derive(Debug, Default)]
struct PhysicalHandles(Vec<sys::CUmemGenericAllocationHandle>);

impl PhysicalHandles {
    /// Allocates new memory.
    fn create(&mut self, location: CUmemLocation, bytes: u64) -> Result<(), SourceError> {
        let mut handle = 0;
        // SAFETY: writes one handle, reads one structure.
        check_alloc("cuMemCreate", bytes, unsafe {
            sys::cuMemCreate(&mut handle, bytes as usize, &allocation_properties(location), 0)
        })?;
        self.0.push(handle);
        Ok(())
    }

    /// Retains the handle of the memory that is mapped at an address.
    fn retain(&mut self, address: u64) -> Result<(), SourceError> {
        let mut handle = 0;
        // SAFETY: writes one handle; for an address where nothing is mapped, the driver returns an error.
        check("cuMemRetainAllocationHandle", unsafe {
            sys::cuMemRetainAllocationHandle(&mut handle, address as *mut std::ffi::c_void)
        })?;
        self.0.push(handle);
        Ok(())
    }
}

impl Drop for PhysicalHandles {
    fn drop(&mut self) {
        for handle in &self.0 {
            // SAFETY: retained once, released once.
            if let Err(error) = check("cuMemRelease", unsafe { sys::cuMemRelease(*handle) }) {
                log::warn!("memory may be lost: {error}");
            }
        }
    }
}
