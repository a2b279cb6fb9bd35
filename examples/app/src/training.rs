//! Training between the frames of a window. Nothing waits for the device.
//!
//! Steps are enqueued in bursts. A burst takes a slice of a frame's time on the device, and its loss arrives as a
//! future. The device wakes the window when the burst is done. Then the window draws a frame and enqueues the next
//! burst.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use eframe::egui;
use forebay::future::DeviceFuture;
use forebay::prelude::*;

use crate::network::Classifier;

/// Time of a burst: half a frame at 60 frames per second.
const SLICE: Duration = Duration::from_millis(8);
const MAX_BURST: u32 = 64;
/// Number of losses that the window draws.
const MAX_LOSSES: usize = 400;

/// Progress of a training run.
pub(crate) struct Training {
    /// Steps that the device has finished.
    pub(crate) steps: u64,
    /// Loss at the end of each burst, the oldest first.
    pub(crate) losses: Vec<f64>,
    running: Option<Burst>,
    /// Steps of the next burst.
    next_steps: u32,
}

/// Steps that were enqueued together.
struct Burst {
    steps: u32,
    started: Instant,
    loss: DeviceFuture<f64>,
    burst_waker: Arc<BurstWaker>,
}

/// Waker of a burst: notes the time and wakes the window.
struct BurstWaker {
    time: OnceLock<Instant>,
    window: egui::Context,
}

impl Wake for BurstWaker {
    fn wake(self: Arc<Self>) {
        self.time.get_or_init(Instant::now);
        self.window.request_repaint();
    }
}

impl Training {
    pub(crate) fn new() -> Self {
        Self { steps: 0, losses: Vec::new(), running: None, next_steps: 1 }
    }

    /// Enqueues the next burst if the device has finished the last one; returns false if it has not.
    pub(crate) fn advance(&mut self, classifier: &mut Classifier, window: &egui::Context) -> Result<bool> {
        self.poll_burst()?;
        if self.running.is_some() {
            return Ok(false);
        }
        let (steps, started) = (self.next_steps, Instant::now());
        let loss = classifier.train(steps)?;
        let burst_waker = Arc::new(BurstWaker { time: OnceLock::new(), window: window.clone() });
        self.running = Some(Burst { steps, started, loss, burst_waker });
        self.poll_burst()?;
        if self.running.is_none() {
            window.request_repaint();
        }
        Ok(true)
    }

    /// Takes the loss of the burst if it has arrived. Otherwise registers the waker.
    fn poll_burst(&mut self) -> Result<()> {
        let Some(burst) = &mut self.running else { return Ok(()) };
        let waker = Waker::from(Arc::clone(&burst.burst_waker));
        let polled = Pin::new(&mut burst.loss).poll(&mut Context::from_waker(&waker));
        let Poll::Ready(loss) = polled else { return Ok(()) };
        let end = *burst.burst_waker.time.get_or_init(Instant::now);
        let fitting = f64::from(burst.steps) * SLICE.as_secs_f64() / (end - burst.started).as_secs_f64();
        self.next_steps = (fitting as u32).clamp(1, (2 * burst.steps).min(MAX_BURST));
        self.steps += u64::from(burst.steps);
        self.running = None;
        self.losses.push(loss?);
        let surplus = self.losses.len().saturating_sub(MAX_LOSSES);
        self.losses.drain(..surplus);
        Ok(())
    }
}
