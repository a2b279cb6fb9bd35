//! Captured steps, which the driver runs as one graph.

use std::sync::Arc;

use forebay_core::backend::{Command, CommandSequence, KernelId, Launch, Slice};
use forebay_core::error::{Error, Result};

use super::{CudaBackend, CudaDevice, CudaQueue};
use crate::graph::{CudaGraph, GraphCapture, GraphNode};
use crate::kernels::SubmitStatus;

/// A kernel launch recorded in a graph.
struct RecordedLaunch {
    kernel: KernelId,
    bindings: Vec<Slice>,
    groups: [u32; 3],
}

/// A captured step: one graph.
pub(super) struct PreparedGraph {
    graph: CudaGraph,
    /// Indexed like the commands of the step.
    launches: Vec<Option<(GraphNode, RecordedLaunch)>>,
    queue: Arc<CudaQueue>,
    device: Arc<CudaDevice>,
}

impl CommandSequence for PreparedGraph {
    fn set_params(&mut self, at: usize, params: &[u8]) -> Result<()> {
        let Some(Some((node, recorded))) = self.launches.get(at) else {
            return Err(Error::argument("set_params", format!("command {at} is not a launch")));
        };
        let launch =
            Launch { kernel: recorded.kernel, bindings: &recorded.bindings, params, groups: recorded.groups };
        self.device.kernels.set_node_params(&self.graph, *node, &launch)
    }

    fn enqueue(&mut self) -> Result<()> {
        self.queue.drain_deferred(&self.device, true)?;
        self.graph.launch(self.queue.stream.flushed_handle()?)?;
        self.device.fences.mark_enqueued();
        Ok(())
    }

    fn is_driver_graph(&self) -> bool {
        true
    }
}

impl Drop for PreparedGraph {
    fn drop(&mut self) {
        // The driver may still run the graph. An error means that the device is lost, and nothing runs.
        let _ = self.queue.stream.synchronize();
    }
}

impl CudaBackend {
    /// Captures commands in a graph; `None` if one of the commands, or the driver, declines.
    pub(super) fn capture_graph(&self, commands: &[Command<'_>]) -> Result<Option<PreparedGraph>> {
        let Some(capture) = GraphCapture::begin(&self.device.context)? else { return Ok(None) };
        let stream = capture.stream();
        let mut launches = Vec::with_capacity(commands.len());
        for command in commands {
            if self.queue.try_enqueue(&self.device, stream, command, true)? == SubmitStatus::Declined {
                return Ok(None);
            }
            launches.push(match *command {
                Command::Launch(Launch { kernel, bindings, groups, .. }) => {
                    let launch = RecordedLaunch { kernel, bindings: bindings.to_vec(), groups };
                    Some((capture.last_node()?, launch))
                }
                _ => None,
            });
        }
        let graph = capture.finish()?;
        let (queue, device) = (Arc::clone(&self.queue), Arc::clone(&self.device));
        Ok(Some(PreparedGraph { graph, launches, queue, device }))
    }
}
