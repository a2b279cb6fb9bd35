//! Links between two cards, over which copies go without the host.

use std::collections::HashMap;
use std::sync::Mutex;

use forebay_core::backend::{PeerCopy, SourceError};
use forebay_core::sync::LockUnpoisoned;

use crate::context::Context;
use crate::settings::bool_from_env;
use crate::virtual_memory::VirtualAddressSpace;

/// Paths of copies to one device, by the context that they come from.
#[derive(Debug, Default)]
pub(crate) struct PeerLinks {
    paths: Mutex<HashMap<u64, PeerCopy>>,
}

impl PeerLinks {
    /// Returns the path of copies that `source` enqueues to memory of `owner`. The first call for a source opens the
    /// link. `space` is the virtual memory of `owner`.
    pub(crate) fn get_or_open(
        &self,
        source: &Context,
        owner: &Context,
        space: Option<&VirtualAddressSpace>,
    ) -> Result<PeerCopy, SourceError> {
        let mut paths = self.paths.lock_unpoisoned();
        if let Some(&path) = paths.get(&source.id) {
            return Ok(path);
        }
        let path = open_link(source, owner, space)?;
        paths.insert(source.id, path);
        Ok(path)
    }
}

/// Lets `source` write memory of `owner` over the link, if there is one and the environment allows it.
fn open_link(
    source: &Context,
    owner: &Context,
    space: Option<&VirtualAddressSpace>,
) -> Result<PeerCopy, SourceError> {
    let (from, to) = (source.device, owner.device);
    // Each opened device of a card has access to all memory of the card.
    if from == to {
        return Ok(PeerCopy::Direct);
    }
    let reason = if bool_from_env("FOREBAY_CUDA_PEER") == Some(false) {
        "FOREBAY_CUDA_PEER=0 is set".to_owned()
    } else if !from.can_access(to)? {
        "the driver reports no link".to_owned()
    } else {
        // The first call is for plain allocations. Mapped memory has access rights of its own.
        let opened = source
            .enable_peer_access(owner)
            .and_then(|()| space.map_or(Ok(()), |space| space.add_peer(from)));
        match opened {
            Ok(()) => return Ok(PeerCopy::Direct),
            Err(error @ SourceError::DeviceLost(_)) => return Err(error),
            Err(error) => error.to_string(),
        }
    };
    let (from, to) = (from.pci_address()?, to.pci_address()?);
    log::warn!("copies from the card at {from} to the card at {to} go through host memory: {reason}");
    Ok(PeerCopy::Staged)
}
