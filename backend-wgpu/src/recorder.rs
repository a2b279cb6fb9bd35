//! Command recorder: tracks commands that are not submitted, and submissions that the device has not passed.
//!
//! Launches share one compute pass until a copy ends it. A batch is submitted when it is long enough, when
//! its parameters or staging memory are full, or on request. An idle device gets the first launch at once, so
//! that it starts early. Then batches double in length, so that a stream of small kernels needs few submissions.
//!
//! The number of submissions in flight is bounded: the host waits for the oldest. So neither staging memory nor
//! the driver's bookkeeping grows with the length of a run. A browser page cannot wait: it returns to its event loop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_core::backend::{Fence, KernelId, SourceError};
use forebay_core::platform::CAN_BLOCK;

use crate::gpu::{Gpu, MAX_IMMEDIATE_BYTES};
use crate::kernel::ParamSpace;
use crate::params::{ParamPage, ParamRing};
use crate::staging::StagingBelt;

/// Maximum number of launches in one submission.
const MAX_BATCH_LAUNCHES: u32 = 64;
/// Maximum number of submissions in flight.
const MAX_IN_FLIGHT: usize = 6;

/// A submission that the device may not have passed.
#[derive(Debug)]
struct Submission {
    number: u64,
    index: wgpu::SubmissionIndex,
    page: Option<ParamPage>,
}

/// Marks a submission as completed when it is dropped. If a callback of the program panics, wgpu drops the other
/// callbacks of completed work without calling them.
struct PassedSubmission {
    number: u64,
    completed: Arc<AtomicU64>,
}

impl Drop for PassedSubmission {
    fn drop(&mut self) {
        self.completed.fetch_max(self.number, Ordering::AcqRel);
    }
}

/// One launch, looked up and checked.
pub(crate) struct Dispatch<'a> {
    pub(crate) kernel: KernelId,
    pub(crate) pipeline: &'a wgpu::ComputePipeline,
    pub(crate) param_space: ParamSpace,
    pub(crate) storage: Option<&'a wgpu::BindGroup>,
    pub(crate) params: &'a [u8],
    pub(crate) groups: [u32; 3],
}

/// Records commands and submits them; the module's documentation has the policy.
#[derive(Debug)]
pub(crate) struct CommandRecorder {
    gpu: Arc<Gpu>,
    // Declared before the encoder: a pass must end before its encoder is dropped.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    /// The pipeline that is set in the pass.
    bound_kernel: Option<KernelId>,
    launches: u32,
    /// Number of launches after which an idle device gets a submission.
    idle_batch: u32,
    params: ParamRing,
    belt: StagingBelt,
    submitted: u64,
    completed: Arc<AtomicU64>,
    in_flight: VecDeque<Submission>,
}

impl CommandRecorder {
    pub(crate) fn new(gpu: Arc<Gpu>, params: ParamRing, completed: Arc<AtomicU64>) -> Self {
        Self {
            gpu,
            pass: None,
            encoder: None,
            bound_kernel: None,
            launches: 0,
            idle_batch: 1,
            params,
            belt: StagingBelt::default(),
            submitted: 0,
            completed,
            in_flight: VecDeque::new(),
        }
    }

    pub(crate) fn dispatch(&mut self, dispatch: &Dispatch<'_>) -> Result<(), SourceError> {
        let uniform = match dispatch.param_space {
            ParamSpace::Uniform => {
                if !self.params.has_room(dispatch.params.len()) {
                    self.submit()?;
                }
                Some(self.params.push(&self.gpu, dispatch.params)?)
            }
            ParamSpace::None | ParamSpace::Immediate(_) => None,
        };
        let pass = match &mut self.pass {
            Some(pass) => pass,
            none => {
                let encoder = get_or_create_encoder(&mut self.encoder, &self.gpu);
                self.bound_kernel = None;
                // The pass is stored next to its encoder, and ends before the encoder is used again.
                none.insert(
                    encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()).forget_lifetime(),
                )
            }
        };
        if self.bound_kernel != Some(dispatch.kernel) {
            pass.set_pipeline(dispatch.pipeline);
            self.bound_kernel = Some(dispatch.kernel);
        }
        if let Some(storage) = dispatch.storage {
            pass.set_bind_group(0, storage, &[]);
        }
        if let Some((group, offset)) = uniform {
            pass.set_bind_group(1, group, &[offset]);
        }
        if let ParamSpace::Immediate(size) = dispatch.param_space {
            // wgpu refuses a dispatch unless the whole block is set.
            let mut block = [0; MAX_IMMEDIATE_BYTES as usize];
            let used = dispatch.params.len().min(size as usize);
            block[..used].copy_from_slice(&dispatch.params[..used]);
            pass.set_immediates(0, &block[..size as usize]);
        }
        let [x, y, z] = dispatch.groups;
        pass.dispatch_workgroups(x, y, z);
        self.launches += 1;
        if self.launches >= MAX_BATCH_LAUNCHES || self.is_due()? { self.submit().map(drop) } else { Ok(()) }
    }

    /// Reports whether the device is idle and the batch long enough for it. If so, doubles the next batch.
    fn is_due(&mut self) -> Result<bool, SourceError> {
        if self.launches < self.idle_batch || !self.launches.is_power_of_two() {
            return Ok(false);
        }
        // Completion is known after a poll only.
        self.gpu.poll()?;
        let idle = self.completed.load(Ordering::Acquire) == self.submitted;
        if idle {
            self.idle_batch = (2 * self.idle_batch).min(MAX_BATCH_LAUNCHES);
        }
        Ok(idle)
    }

    /// Records copies from the host, through staging memory, after everything recorded so far.
    pub(crate) fn upload(
        &mut self,
        dst: &wgpu::Buffer,
        mut offset: u64,
        mut data: &[u8],
    ) -> Result<(), SourceError> {
        if !CAN_BLOCK {
            // The browser has staging memory of its own, which its queue fills at once.
            self.submit()?;
            self.gpu.collect_errors(|| self.gpu.queue.write_buffer(dst, offset, data));
            return self.gpu.check_health();
        }
        while !data.is_empty() {
            while !self.belt.ensure_space(&self.gpu)? {
                self.submit()?;
                if !self.retire_oldest()? {
                    self.belt.wait_for_buffer(&self.gpu)?;
                }
            }
            self.pass = None;
            let encoder = get_or_create_encoder(&mut self.encoder, &self.gpu);
            let taken = self.belt.write(&self.gpu, encoder, dst, offset, data)?;
            offset += taken as u64;
            data = &data[taken..];
        }
        Ok(())
    }

    /// Returns the encoder for copies; ends the current pass.
    pub(crate) fn copy_encoder(&mut self) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        get_or_create_encoder(&mut self.encoder, &self.gpu)
    }

    /// Reports whether a copy would end a pass.
    pub(crate) fn is_in_pass(&self) -> bool {
        self.pass.is_some()
    }

    /// Submits what was recorded, if anything was. Returns the fence of everything submitted so far.
    pub(crate) fn submit(&mut self) -> Result<Fence, SourceError> {
        self.pass = None;
        self.launches = 0;
        let Some(encoder) = self.encoder.take() else {
            return self.gpu.check_health().map(|()| Fence(self.submitted));
        };
        while CAN_BLOCK && self.in_flight.len() >= MAX_IN_FLIGHT {
            self.retire_oldest()?;
        }
        let (page, upload) = self.upload_params()?;
        self.belt.unmap_for_submit(&self.gpu);
        let index = self.gpu.submit(|| upload.into_iter().chain([encoder.finish()]).collect());
        self.submitted += 1;
        let number = self.submitted;
        let passed = PassedSubmission { number, completed: Arc::clone(&self.completed) };
        self.gpu.queue.on_submitted_work_done(move || drop(passed));
        self.belt.map_after_submit(&self.gpu);
        self.in_flight.push_back(Submission { number, index, page });
        // wgpu frees resources only when polled.
        self.gpu.poll()?;
        self.retire_completed();
        Ok(Fence(number))
    }

    /// Copies the recorded parameters to their page, by commands that run before the recorded ones. Returns the
    /// page and the commands.
    ///
    /// Parameters pass through the belt, which keeps its memory: `Queue::write_buffer` allocates from the driver each
    /// time.
    fn upload_params(&mut self) -> Result<(Option<ParamPage>, Option<wgpu::CommandBuffer>), SourceError> {
        let Some((page, bytes)) = self.params.take_page() else { return Ok((None, None)) };
        let upload = if CAN_BLOCK
            && self.belt.ensure_space(&self.gpu)?
            && self.belt.open_bytes() >= bytes.len() as u64
        {
            let mut encoder = self.gpu.create_encoder();
            self.belt.write(&self.gpu, &mut encoder, page.buffer(), 0, bytes)?;
            Some(encoder.finish())
        } else {
            self.gpu.collect_errors(|| self.gpu.queue.write_buffer(page.buffer(), 0, bytes));
            None
        };
        self.params.clear();
        Ok((Some(page), upload))
    }

    /// Returns the submission to wait for so that the device has passed `fence`; `None` if it has.
    pub(crate) fn pending_submission(&mut self, fence: Fence) -> Option<(Fence, wgpu::SubmissionIndex)> {
        // A host that waits leaves the device idle afterwards.
        self.idle_batch = 1;
        self.retire_completed();
        let submission = self.in_flight.iter().find(|submission| submission.number >= fence.0)?;
        Some((Fence(submission.number), submission.index.clone()))
    }

    /// Recycles the resources of submissions that the device has passed.
    fn retire_completed(&mut self) {
        let completed = self.completed.load(Ordering::Acquire);
        let passed = self.in_flight.iter().take_while(|submission| submission.number <= completed).count();
        for submission in self.in_flight.drain(..passed) {
            if let Some(page) = submission.page {
                self.params.recycle(page);
            }
        }
    }

    /// Waits for the oldest submission; returns `false` if there is none.
    fn retire_oldest(&mut self) -> Result<bool, SourceError> {
        let Some(oldest) = self.in_flight.front() else { return Ok(false) };
        let completed = Arc::clone(&self.completed);
        self.gpu.wait(oldest.index.clone(), || completed.load(Ordering::Acquire) >= oldest.number)?;
        self.completed.fetch_max(oldest.number, Ordering::AcqRel);
        self.retire_completed();
        Ok(true)
    }
}

fn get_or_create_encoder<'a>(
    slot: &'a mut Option<wgpu::CommandEncoder>,
    gpu: &Gpu,
) -> &'a mut wgpu::CommandEncoder {
    slot.get_or_insert_with(|| gpu.create_encoder())
}
