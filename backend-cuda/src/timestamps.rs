//! Timestamps of the device: timed events of the driver.

use std::sync::{Arc, Mutex};

use forebay_core::backend::{SourceError, TimestampId};
use forebay_core::sync::LockUnpoisoned;

use crate::context::{Context, CudaEvent, CudaStream};

/// Timestamps that were recorded and not read yet.
#[derive(Debug, Default)]
pub(crate) struct Timestamps {
    events: Mutex<Vec<CudaEvent>>,
}

impl Timestamps {
    pub(crate) fn record(
        &self,
        context: &Arc<Context>,
        stream: &CudaStream,
    ) -> Result<TimestampId, SourceError> {
        let event = CudaEvent::new_timed(context)?;
        event.record(stream)?;
        let mut events = self.events.lock_unpoisoned();
        events.push(event);
        Ok(TimestampId(events.len() as u32 - 1))
    }

    /// Returns all timestamps in nanoseconds since the first. Blocks.
    pub(crate) fn read_all(&self) -> Result<Vec<f64>, SourceError> {
        let events = std::mem::take(&mut *self.events.lock_unpoisoned());
        // With several streams, no event is the last one, so all are waited for.
        events.iter().try_for_each(CudaEvent::synchronize)?;
        events.iter().map(|event| event.elapsed_since(&events[0])).collect()
    }
}
