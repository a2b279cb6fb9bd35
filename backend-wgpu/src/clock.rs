//! Readings of the device's clock: timestamp queries, in sets that are made as they are needed.

use std::sync::Mutex;

use forebay_core::backend::{SourceError, Stamp};

use crate::gpu::{Gpu, lock, one_line};
use crate::staging::Readbacks;

/// Readings in one set; more are not allowed.
const SET: u32 = wgpu::QUERY_SET_MAX_QUERIES;
/// Bytes of one reading.
const READING: u64 = wgpu::QUERY_SIZE as u64;

/// The readings that were asked for and not read yet.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sets: Vec<wgpu::QuerySet>,
    taken: u32,
}

impl Clock {
    /// Records a reading, after everything that the encoder holds.
    pub(crate) fn stamp(&self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) -> Result<Stamp, SourceError> {
        let state = &mut *lock(&self.state);
        let (set, at) = ((state.taken / SET) as usize, state.taken % SET);
        if state.sets.len() == set {
            let descriptor = wgpu::QuerySetDescriptor {
                label: Some("forebay clock"),
                ty: wgpu::QueryType::Timestamp,
                count: SET,
            };
            let made = gpu.scoped(|| gpu.device.create_query_set(&descriptor));
            let made = made.map_err(|error| SourceError::Driver {
                call: "create_query_set",
                detail: one_line(&error),
            })?;
            state.sets.push(made);
        }
        encoder.write_timestamp(&state.sets[set], at);
        state.taken += 1;
        Ok(Stamp(state.taken - 1))
    }

    /// All readings, in nanoseconds. `submit` records what it is given, and hands it to the device.
    pub(crate) fn read(
        &self,
        gpu: &Gpu,
        readbacks: &Readbacks,
        submit: impl Fn(
            &mut dyn FnMut(&mut wgpu::CommandEncoder),
        ) -> Result<Option<wgpu::SubmissionIndex>, SourceError>,
    ) -> Result<Vec<f64>, SourceError> {
        let state = std::mem::take(&mut *lock(&self.state));
        let period = f64::from(gpu.queue.get_timestamp_period());
        let mut times = Vec::with_capacity(state.taken as usize);
        for (number, set) in state.sets.iter().enumerate() {
            let count = SET.min(state.taken - number as u32 * SET);
            let bytes = u64::from(count) * READING;
            let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
            let resolved = gpu.buffer("forebay clock", bytes, usage, false)?;
            let staging = readbacks.take(gpu, bytes)?;
            let submission = submit(&mut |encoder| {
                encoder.resolve_query_set(set, 0..count, &resolved, 0);
                encoder.copy_buffer_to_buffer(&resolved, 0, &staging, 0, bytes);
            })?;
            let mut data = vec![0; bytes as usize];
            readbacks.read(gpu, staging, submission, &mut data)?;
            let ticks =
                data.chunks_exact(READING as usize).map(|tick| tick.try_into().map_or(0, u64::from_le_bytes));
            times.extend(ticks.map(|tick| tick as f64 * period));
        }
        Ok(times)
    }
}
