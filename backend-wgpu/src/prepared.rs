//! Prepared commands for repeated submission: pipelines and buffers are looked up and slices bound in
//! advance.

use std::sync::{Arc, Mutex};

use forebay_core::backend::{CommandSequence, KernelId, SourceError};
use forebay_core::error::{Error, Result};
use forebay_core::sync::LockUnpoisoned;

use crate::backend::QueueState;
use crate::gpu::Gpu;
use crate::kernel::KernelPipeline;
use crate::recorder::{CommandRecorder, Dispatch};

#[derive(Debug)]
pub(crate) enum PreparedCommand {
    Dispatch {
        id: KernelId,
        kernel: Arc<KernelPipeline>,
        storage: Option<wgpu::BindGroup>,
        params: Vec<u8>,
        groups: [u32; 3],
    },
    Copy {
        from: (wgpu::Buffer, u64),
        to: (wgpu::Buffer, u64),
        bytes: u64,
    },
    Clear {
        buffer: wgpu::Buffer,
        offset: u64,
        bytes: u64,
    },
}

impl PreparedCommand {
    /// Reports whether the command can be recorded without waiting for the compiler.
    pub(crate) fn is_compiled(&self) -> bool {
        match self {
            Self::Dispatch { kernel, .. } => kernel.pipeline.get().is_some(),
            Self::Copy { .. } | Self::Clear { .. } => true,
        }
    }

    /// Records the command. Waits until its kernel is compiled.
    pub(crate) fn record(&self, recorder: &mut CommandRecorder) -> Result<(), SourceError> {
        match self {
            Self::Dispatch { id, kernel, storage, params, groups } => {
                let pipeline = kernel.pipeline.wait().map_err(|error| SourceError::Driver {
                    call: "create_compute_pipeline",
                    detail: format!("`{}`: {error}", kernel.label),
                })?;
                recorder.dispatch(&Dispatch {
                    kernel: *id,
                    pipeline,
                    param_space: kernel.params,
                    storage: storage.as_ref(),
                    params,
                    groups: *groups,
                })
            }
            Self::Copy { from: (from, src), to: (to, dst), bytes } => {
                recorder.copy_encoder().copy_buffer_to_buffer(from, *src, to, *dst, *bytes);
                Ok(())
            }
            Self::Clear { buffer, offset, bytes } => {
                recorder.copy_encoder().clear_buffer(buffer, *offset, Some(*bytes));
                Ok(())
            }
        }
    }
}

/// Prepared commands, ready to be recorded.
#[derive(Debug)]
pub(crate) struct PreparedCommands {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) state: Arc<Mutex<QueueState>>,
    pub(crate) steps: Vec<PreparedCommand>,
}

impl CommandSequence for PreparedCommands {
    fn set_params(&mut self, at: usize, new: &[u8]) -> Result<()> {
        match self.steps.get_mut(at) {
            Some(PreparedCommand::Dispatch { params, .. }) if params.len() == new.len() => {
                params.copy_from_slice(new);
                Ok(())
            }
            _ => Err(Error::argument(
                "set_params",
                format!("command {at} is not a launch with {} bytes", new.len()),
            )),
        }
    }

    fn enqueue(&mut self) -> Result<()> {
        self.gpu.check_health()?;
        let state = &mut *self.state.lock_unpoisoned();
        let recorder = state.drained_recorder()?;
        for step in &self.steps {
            step.record(recorder)?;
        }
        Ok(self.gpu.check_health()?)
    }

    fn is_driver_graph(&self) -> bool {
        false
    }
}
