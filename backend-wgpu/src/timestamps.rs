//! Timestamp queries, in sets that are created on demand.

use std::sync::Mutex;

use forebay_core::backend::{SourceError, TimestampId};
use forebay_core::sync::LockUnpoisoned;

use crate::gpu::{Gpu, to_single_line};
use crate::staging::ReadbackPool;

/// Queries in one set: wgpu's maximum.
const QUERIES_PER_SET: u32 = wgpu::QUERY_SET_MAX_QUERIES;
const QUERY_BYTES: u64 = wgpu::QUERY_SIZE as u64;

/// Timestamps that were recorded and not read yet.
#[derive(Debug, Default)]
pub(crate) struct Timestamps {
    state: Mutex<QuerySets>,
}

#[derive(Debug, Default)]
struct QuerySets {
    sets: Vec<wgpu::QuerySet>,
    used: u32,
}

impl Timestamps {
    /// Records a timestamp after all commands of the encoder.
    pub(crate) fn record(
        &self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<TimestampId, SourceError> {
        let state = &mut *self.state.lock_unpoisoned();
        let (set, at) = ((state.used / QUERIES_PER_SET) as usize, state.used % QUERIES_PER_SET);
        if state.sets.len() == set {
            let descriptor = wgpu::QuerySetDescriptor {
                label: Some("forebay clock"),
                ty: wgpu::QueryType::Timestamp,
                count: QUERIES_PER_SET,
            };
            let result = gpu.with_error_scopes(|| gpu.device.create_query_set(&descriptor));
            let result = result.map_err(|error| SourceError::Driver {
                call: "create_query_set",
                detail: to_single_line(&error),
            })?;
            state.sets.push(result);
        }
        encoder.write_timestamp(&state.sets[set], at);
        state.used += 1;
        Ok(TimestampId(state.used - 1))
    }

    /// Returns all timestamps in nanoseconds. `submit` records commands through its argument and submits
    /// them.
    pub(crate) fn read_all(
        &self,
        gpu: &Gpu,
        readbacks: &ReadbackPool,
        submit: impl Fn(
            &mut dyn FnMut(&mut wgpu::CommandEncoder),
        ) -> Result<Option<wgpu::SubmissionIndex>, SourceError>,
    ) -> Result<Vec<f64>, SourceError> {
        let state = std::mem::take(&mut *self.state.lock_unpoisoned());
        let period = f64::from(gpu.queue.get_timestamp_period());
        let mut times = Vec::with_capacity(state.used as usize);
        for (number, set) in state.sets.iter().enumerate() {
            let count = QUERIES_PER_SET.min(state.used - number as u32 * QUERIES_PER_SET);
            let bytes = u64::from(count) * QUERY_BYTES;
            let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
            let resolved = gpu.create_buffer("forebay clock", bytes, usage, false)?;
            let staging = readbacks.acquire(gpu, bytes)?;
            let submission = submit(&mut |encoder| {
                encoder.resolve_query_set(set, 0..count, &resolved, 0);
                encoder.copy_buffer_to_buffer(&resolved, 0, &staging, 0, bytes);
            })?;
            let mut data = vec![0; bytes as usize];
            readbacks.read_and_release(gpu, staging, submission, &mut data)?;
            let ticks = data
                .chunks_exact(QUERY_BYTES as usize)
                .map(|tick| tick.try_into().map_or(0, u64::from_le_bytes));
            times.extend(ticks.map(|tick| tick as f64 * period));
        }
        Ok(times)
    }
}
