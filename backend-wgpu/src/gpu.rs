//! A wgpu device, its queue and its health: error scopes, polling, and errors that callbacks report.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_core::backend::SourceError;
use forebay_core::driver_call::call_driver;
use forebay_core::platform::{CAN_BLOCK, CANNOT_BLOCK, Instant};
use forebay_core::sync::LockUnpoisoned;

use crate::platform;

/// Converts wgpu's indented error trees to one line.
pub(crate) fn to_single_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "Caused by:");
    lines.collect::<Vec<_>>().join(": ")
}

/// Problems that the device's callbacks have reported since the last check.
#[derive(Debug, Default)]
struct DeviceHealth {
    /// Set together with either of the others, so that the common case costs one load.
    has_problem: AtomicBool,
    lost: Mutex<Option<String>>,
    error: Mutex<Option<String>>,
}

impl DeviceHealth {
    fn record_loss(&self, why: String) {
        self.lost.lock_unpoisoned().get_or_insert(why);
        self.has_problem.store(true, Ordering::Release);
    }

    /// Records an error, unless another one waits for the next check: the first error is the cause, and later errors
    /// are its consequences.
    fn record_error(&self, detail: String) {
        self.error.lock_unpoisoned().get_or_insert(detail);
        self.has_problem.store(true, Ordering::Release);
    }
}

/// Maximum bytes of parameters that are passed as immediates.
pub(crate) const MAX_IMMEDIATE_BYTES: u32 = 256;
/// Time that a waiting thread polls before it blocks. Waking a blocked thread takes longer than a small kernel.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// Start of the message with which wgpu panics if a poll finds the device lost.
const FATAL_POLL_ERROR: &str = "Error in Device::poll";

/// A device and its queue.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// If true, the device and its error callbacks belong to the program.
    pub(crate) is_shared: bool,
    health: Arc<DeviceHealth>,
}

impl Gpu {
    /// Takes ownership of the device and installs error callbacks, so that wgpu neither panics nor logs on
    /// errors.
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let health = Arc::new(DeviceHealth::default());
        let on_error = Arc::clone(&health);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            log::error!("wgpu: {}", to_single_line(&error));
            on_error.record_error(to_single_line(&error));
        }));
        let on_lost = Arc::clone(&health);
        device.set_device_lost_callback(move |_, message| match message.as_str() {
            "" => on_lost.record_loss("the driver gave no reason".to_owned()),
            _ => on_lost.record_loss(message),
        });
        Self { device, queue, is_shared: false, health }
    }

    /// Uses a device of the program, whose error callbacks stay as they are.
    pub(crate) fn shared(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        Self { device, queue, is_shared: true, health: Arc::default() }
    }

    /// Calls wgpu where callbacks of the program may run on this thread. A callback that panics ends neither the call
    /// nor the device: the panic hook has printed its message. `None` if a callback panicked, which loses the result.
    fn survive_callbacks<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(|| call_driver(call))) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        // wgpu panics if the device is lost during polling.
        if panic.downcast_ref::<String>().is_some_and(|message| message.starts_with(FATAL_POLL_ERROR)) {
            self.health.record_loss("it was lost while it was polled".to_owned());
        } else {
            log::error!("a callback of the program panicked inside a call of wgpu; the call goes on");
        }
        None
    }

    /// Submits commands. Errors are collected like those of [`collect_errors`](Self::collect_errors).
    ///
    /// wgpu refuses all commands of a submission if one is refused, such as one that uses a buffer that is mapped.
    pub(crate) fn submit(
        &self,
        commands: impl FnOnce() -> Vec<wgpu::CommandBuffer>,
    ) -> wgpu::SubmissionIndex {
        let submit = |commands| self.queue.submit(commands);
        let consequence = "; the other operations of the submission have not run either";
        let mut submitted =
            self.survive_callbacks(|| self.collect_errors_with(consequence, || submit(commands())));
        // Callbacks run after the submission. An empty one gives an index that is no earlier.
        loop {
            match submitted {
                Some(index) => return index,
                None => submitted = self.survive_callbacks(|| submit(Vec::new())),
            }
        }
    }

    /// Runs calls whose errors reach the device's callbacks. On a device of the program, error scopes collect them
    /// instead, and the next call returns them.
    pub(crate) fn collect_errors<T>(&self, call: impl FnOnce() -> T) -> T {
        self.collect_errors_with("", call)
    }

    /// Runs calls like [`collect_errors`](Self::collect_errors), and appends their consequence to the errors.
    fn collect_errors_with<T>(&self, consequence: &str, call: impl FnOnce() -> T) -> T {
        if !self.is_shared {
            return call();
        }
        let (result, error) = self.scope_errors(call);
        if let Some(error) = error {
            self.health.record_error(to_single_line(&error) + consequence);
        }
        result
    }

    /// Returns the error for a call that the driver refused because of `detail`, or because the device is lost.
    pub(crate) fn refusal(&self, call: &'static str, detail: String) -> SourceError {
        if self.is_lost() {
            self.record_shared_loss();
        }
        self.check_health().err().unwrap_or(SourceError::Driver { call, detail })
    }

    /// Reports whether the program's device is lost. Only the program's callback learns of a loss. wgpu creates buffers
    /// of a lost device without an error, but such a buffer cannot be mapped.
    fn is_lost(&self) -> bool {
        if !(self.is_shared && CAN_BLOCK) {
            return false;
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some("forebay probe"),
            size: wgpu::MAP_ALIGNMENT,
            usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: true,
        };
        // An error tells of another cause, such as a lack of memory.
        let created = self.with_error_scopes(|| self.device.create_buffer(&descriptor));
        created.is_ok_and(|buffer| buffer.get_mapped_range(..).is_err())
    }

    fn record_shared_loss(&self) {
        self.health.record_loss("the driver reset it, or the program destroyed it".to_owned());
    }

    /// Returns the error that a callback recorded, if any. A lost device stays lost; other errors are
    /// reported once.
    pub(crate) fn check_health(&self) -> Result<(), SourceError> {
        if !self.health.has_problem.load(Ordering::Acquire) {
            return Ok(());
        }
        // Cleared before reading, so that a concurrent report is seen next time.
        self.health.has_problem.store(false, Ordering::Release);
        if let Some(why) = self.health.lost.lock_unpoisoned().clone() {
            self.health.has_problem.store(true, Ordering::Release);
            return Err(SourceError::DeviceLost(why));
        }
        let Some(detail) = self.health.error.lock_unpoisoned().take() else { return Ok(()) };
        if self.is_lost() {
            self.record_shared_loss();
            return self.check_health();
        }
        Err(SourceError::Driver { call: "an earlier command", detail })
    }

    /// Runs `create` and returns the error that it raised, if any, in place of the result. Error scopes are
    /// per thread.
    pub(crate) fn with_error_scopes<T>(&self, create: impl FnOnce() -> T) -> Result<T, wgpu::Error> {
        match self.survive_callbacks(|| self.scope_errors(create)) {
            Some((result, None)) => Ok(result),
            Some((_, Some(error))) => Err(error),
            None => Err(wgpu::Error::Internal {
                source: "a callback panicked".into(),
                description: "a callback of the program panicked when the driver reported a lost device"
                    .to_owned(),
            }),
        }
    }

    /// Creates an object over a resource of the program, and returns a message if that fails. wgpu panics if the
    /// resource is one of another instance.
    pub(crate) fn create_checked<T>(&self, create: impl FnOnce() -> T) -> Result<T, String> {
        match catch_unwind(AssertUnwindSafe(|| call_driver(|| self.scope_errors(create)))) {
            Ok((created, None)) => Ok(created),
            Ok((_, Some(error))) => Err(to_single_line(&error)),
            Err(_) => Err("it belongs to another instance of wgpu".to_owned()),
        }
    }

    /// Runs a call inside error scopes. Returns its result, and the first error.
    fn scope_errors<T>(&self, call: impl FnOnce() -> T) -> (T, Option<wgpu::Error>) {
        platform::scope_errors(&self.device, call)
    }

    pub(crate) fn create_encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("forebay") })
    }

    pub(crate) fn create_buffer(
        &self,
        label: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
        mapped: bool,
    ) -> Result<wgpu::Buffer, SourceError> {
        self.check_health()?;
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size: bytes, usage, mapped_at_creation: mapped };
        let result =
            self.with_error_scopes(|| self.device.create_buffer(&descriptor)).map_err(
                |error| match error {
                    wgpu::Error::OutOfMemory { .. } => {
                        SourceError::OutOfMemory { bytes, detail: innermost_cause(&error) }
                    }
                    other => SourceError::Driver { call: "create_buffer", detail: to_single_line(&other) },
                },
            )?;
        // A device that is lost during creation raises no error in the scopes.
        self.check_health()?;
        Ok(result)
    }

    /// Lets wgpu process finished work: callbacks run, resources are freed. Never blocks.
    pub(crate) fn poll(&self) -> Result<(), SourceError> {
        self.poll_with(wgpu::PollType::Poll)
    }

    /// Returns the maximum bytes of immediates; 0 if the device has none.
    pub(crate) fn max_immediate_bytes(&self) -> u32 {
        immediate_bytes_within(self.device.features(), &self.device.limits())
    }

    /// Blocks until the device has passed `submission`. Polls for a short time first, until `is_done`.
    pub(crate) fn wait(
        &self,
        submission: wgpu::SubmissionIndex,
        mut is_done: impl FnMut() -> bool,
    ) -> Result<(), SourceError> {
        if !CAN_BLOCK {
            let detail = CANNOT_BLOCK.to_owned();
            return if is_done() { Ok(()) } else { Err(SourceError::Driver { call: "wait", detail }) };
        }
        let start = Instant::now();
        while start.elapsed() < SPIN_TIME {
            self.poll()?;
            if is_done() {
                return Ok(());
            }
        }
        self.poll_with(wgpu::PollType::Wait { submission_index: Some(submission), timeout: None })
    }

    fn poll_with(&self, kind: wgpu::PollType) -> Result<(), SourceError> {
        self.check_health()?;
        match self.survive_callbacks(|| self.device.poll(kind)) {
            Some(Err(error)) => Err(SourceError::Driver { call: "poll", detail: to_single_line(&error) }),
            // Callbacks run after the wait.
            Some(Ok(_)) | None => self.check_health(),
        }
    }
}

/// Returns the maximum bytes of immediates on a device with these features and limits; 0 if it has none.
pub(crate) fn immediate_bytes_within(features: wgpu::Features, limits: &wgpu::Limits) -> u32 {
    match features.contains(wgpu::Features::IMMEDIATES) {
        true => limits.max_immediate_size.min(MAX_IMMEDIATE_BYTES),
        false => 0,
    }
}

/// Returns the innermost cause of an out-of-memory error, whose own message has no details.
fn innermost_cause(error: &wgpu::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    to_single_line(&innermost)
}
