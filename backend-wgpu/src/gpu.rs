//! A wgpu device, its queue and its health: error scopes, polling, and what went wrong behind our back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_core::backend::SourceError;

/// Locks, also after a panic elsewhere: every structure behind our locks is valid between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One line of wgpu's indented error trees.
pub(crate) fn to_single_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "Caused by:");
    lines.collect::<Vec<_>>().join(": ")
}

/// What the device's callbacks have reported since the last look.
#[derive(Debug, Default)]
struct DeviceHealth {
    /// Set with either of the others, so that the common case costs one load.
    has_problem: AtomicBool,
    lost: Mutex<Option<String>>,
    error: Mutex<Option<String>>,
}

impl DeviceHealth {
    fn record_loss(&self, why: String) {
        lock(&self.lost).get_or_insert(why);
        self.has_problem.store(true, Ordering::Release);
    }
}

/// A device and its queue.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    health: Arc<DeviceHealth>,
}

impl Gpu {
    /// Takes the device over; from here on wgpu neither panics nor logs on its own for an error.
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        let health = Arc::new(DeviceHealth::default());
        let on_error = Arc::clone(&health);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            log::error!("wgpu: {}", to_single_line(&error));
            // The first error is the cause; those after it are its consequences.
            lock(&on_error.error).get_or_insert_with(|| to_single_line(&error));
            on_error.has_problem.store(true, Ordering::Release);
        }));
        let on_lost = Arc::clone(&health);
        device.set_device_lost_callback(move |_, message| match message.as_str() {
            "" => on_lost.record_loss("the driver gave no reason".to_owned()),
            _ => on_lost.record_loss(message),
        });
        Self { device, queue, health }
    }

    /// The error that a callback recorded, if any. A lost device stays lost; other errors are reported once.
    pub(crate) fn check_health(&self) -> Result<(), SourceError> {
        if !self.health.has_problem.load(Ordering::Acquire) {
            return Ok(());
        }
        // Cleared before the look, so that what is reported meanwhile is seen next time.
        self.health.has_problem.store(false, Ordering::Release);
        if let Some(why) = lock(&self.health.lost).clone() {
            self.health.has_problem.store(true, Ordering::Release);
            return Err(SourceError::DeviceLost(why));
        }
        match lock(&self.health.error).take() {
            Some(detail) => Err(SourceError::Driver { call: "an earlier command", detail }),
            None => Ok(()),
        }
    }

    /// Runs `create` and returns the error that it raised instead of what it made. Our errors stay on our thread.
    pub(crate) fn with_error_scopes<T>(&self, create: impl FnOnce() -> T) -> Result<T, wgpu::Error> {
        let full = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let invalid = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let made = create();
        let internal = pollster::block_on(internal.pop());
        let invalid = pollster::block_on(invalid.pop());
        let full = pollster::block_on(full.pop());
        match full.or(invalid).or(internal) {
            Some(error) => Err(error),
            None => Ok(made),
        }
    }

    /// A buffer, or why there is none.
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
        let made =
            self.with_error_scopes(|| self.device.create_buffer(&descriptor)).map_err(
                |error| match error {
                    wgpu::Error::OutOfMemory { .. } => {
                        SourceError::OutOfMemory { bytes, detail: innermost_cause(&error) }
                    }
                    other => SourceError::Driver { call: "create_buffer", detail: to_single_line(&other) },
                },
            )?;
        // A device lost by the creation raises no error in the scopes.
        self.check_health()?;
        Ok(made)
    }

    /// Lets wgpu notice what the device has finished: callbacks run, resources are freed. Never blocks.
    pub(crate) fn poll(&self) -> Result<(), SourceError> {
        self.poll_with(wgpu::PollType::Poll)
    }

    /// Blocks until the device has passed `submission`.
    pub(crate) fn wait(&self, submission: wgpu::SubmissionIndex) -> Result<(), SourceError> {
        self.poll_with(wgpu::PollType::Wait { submission_index: Some(submission), timeout: None })
    }

    fn poll_with(&self, kind: wgpu::PollType) -> Result<(), SourceError> {
        self.check_health()?;
        // wgpu panics when the device is lost while it is polled; that is an error like any other here.
        match catch_unwind(AssertUnwindSafe(|| self.device.poll(kind))) {
            Ok(Ok(_)) => self.check_health(),
            Ok(Err(error)) => Err(SourceError::Driver { call: "poll", detail: to_single_line(&error) }),
            Err(_) => {
                self.health.record_loss("it was lost while it was polled".to_owned());
                self.check_health()
            }
        }
    }
}

/// The innermost message of an out-of-memory error, whose own text says nothing.
fn innermost_cause(error: &wgpu::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    to_single_line(&innermost)
}
