//! Prepared commands for repeated submission: pipelines and buffers are looked up and slices bound in
//! advance.

use std::sync::{Arc, Mutex};

use forebay_core::backend::{CommandSequence, KernelId};
use forebay_core::error::{Error, Result};

use crate::backend::QueueState;
use crate::gpu::{Gpu, lock};
use crate::kernel::CompiledKernel;
use crate::recorder::Dispatch;

/// One prepared command.
#[derive(Debug)]
pub(crate) enum PreparedCommand {
    Dispatch {
        id: KernelId,
        kernel: Arc<CompiledKernel>,
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
                format!("command {at} is no launch with {} bytes", new.len()),
            )),
        }
    }

    fn enqueue(&mut self) -> Result<()> {
        self.gpu.check_health()?;
        let recorder = &mut lock(&self.state).recorder;
        for step in &self.steps {
            match step {
                PreparedCommand::Dispatch { id, kernel, storage, params, groups } => {
                    recorder.dispatch(&Dispatch {
                        kernel: *id,
                        pipeline: &kernel.pipeline,
                        param_space: kernel.params,
                        storage: storage.as_ref(),
                        params,
                        groups: *groups,
                    })?
                }
                PreparedCommand::Copy { from: (from, src), to: (to, dst), bytes } => {
                    recorder.copy_encoder().copy_buffer_to_buffer(from, *src, to, *dst, *bytes);
                }
                PreparedCommand::Clear { buffer, offset, bytes } => {
                    recorder.copy_encoder().clear_buffer(buffer, *offset, Some(*bytes));
                }
            }
        }
        Ok(self.gpu.check_health()?)
    }

    fn is_driver_graph(&self) -> bool {
        false
    }
}
