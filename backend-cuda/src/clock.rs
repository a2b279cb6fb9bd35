//! Readings of the device's clock: the driver's events, with their times.

use std::sync::{Arc, Mutex};

use forebay_core::backend::{SourceError, Stamp};

use crate::context::{Context, Event, Stream};
use crate::lock;

/// The readings that were asked for and not read yet.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    events: Mutex<Vec<Event>>,
}

impl Clock {
    /// Enqueues a reading.
    pub(crate) fn stamp(&self, context: &Arc<Context>, stream: &Stream) -> Result<Stamp, SourceError> {
        let event = Event::timed(context)?;
        event.record(stream)?;
        let mut events = lock(&self.events);
        events.push(event);
        Ok(Stamp(events.len() as u32 - 1))
    }

    /// All readings, in nanoseconds since the first. Blocking.
    pub(crate) fn read(&self) -> Result<Vec<f64>, SourceError> {
        let events = std::mem::take(&mut *lock(&self.events));
        // Of several streams no event is the last one.
        events.iter().try_for_each(Event::wait)?;
        events.iter().map(|event| event.since(&events[0])).collect()
    }
}
