//! Slot of a leaf for its 16-bit copy, which [`amp`](crate::amp) fills and reads.

use std::sync::Weak;

use crate::dtype::DType;
use crate::storage::Storage;
use crate::tensor::Tensor;

/// State of a leaf's 16-bit copy.
#[derive(Debug, Default)]
pub(crate) enum LowPrecisionCopy {
    /// The leaf has not been cast.
    #[default]
    None,
    /// The leaf was cast, so an optimiser should write the next copy.
    Requested(DType),
    /// Copy of the leaf at the version in `source`. Optimisers have written it `unread_writes` times since it was read.
    Ready { copy: Tensor, source: CopyVersion, unread_writes: u8 },
}

/// Storage of the leaf, and the versions of the leaf and of the copy.
#[derive(Clone, Debug)]
pub(crate) struct CopyVersion {
    pub(crate) leaf_storage: Weak<Storage>,
    pub(crate) leaf_version: u64,
    pub(crate) copy_version: u64,
}

impl CopyVersion {
    pub(crate) fn read(leaf: &Tensor, copy: &Tensor) -> Self {
        Self {
            leaf_storage: leaf.downgrade_storage(),
            leaf_version: leaf.version(),
            copy_version: copy.version(),
        }
    }

    /// Reports whether neither was written since. That is unknown for a leaf in memory that the program can write.
    pub(crate) fn is_current(&self, leaf: &Tensor, copy: &Tensor) -> bool {
        leaf.storage().tracked_version() == Some(self.leaf_version)
            && self.copy_version == copy.version()
            && self.leaf_storage.ptr_eq(&leaf.downgrade_storage())
    }
}
