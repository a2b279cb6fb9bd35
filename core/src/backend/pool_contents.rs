//! Contents of blocks through a backend, for tests of pools on real devices.

use super::{Backend, Slice};
use crate::memory::source::SegmentSource;
use crate::memory::testing::DeviceContents;
use crate::memory::{self, Block};

impl DeviceContents for dyn Backend {
    fn write(&self, block: &Block, data: &[u8]) -> memory::Result<()> {
        let to = Slice { segment: block.segment, offset: block.offset, bytes: block.size };
        self.upload(to, data).map_err(|error| memory::Error::Move(Box::new(error)))
    }

    fn read(&self, block: &Block, data: &mut [u8]) -> memory::Result<()> {
        let from = Slice { segment: block.segment, offset: block.offset, bytes: block.size };
        self.download(from, data).map_err(|error| memory::Error::Move(Box::new(error)))
    }

    fn source(&self) -> &dyn SegmentSource {
        self
    }
}
