//! Progress of a run on standard error: a bar on a terminal, otherwise occasional lines.

use std::time::Duration;

use forebay_core::platform::Instant;

use super::MemoryPoint;

/// Number of lines that a run prints without a terminal.
#[cfg(feature = "train")]
const PLAIN_LINES: u64 = 20;

/// State of a run, shown as one line.
pub(super) struct StepStatus<'a> {
    pub(super) loss: f32,
    pub(super) accuracy: Option<f32>,
    pub(super) lr: f64,
    pub(super) memory: &'a MemoryPoint,
}

/// Work of a step of a language model.
#[derive(Clone, Copy)]
pub(super) struct TokenThroughput {
    pub(super) per_step: u64,
    /// FLOPs of a token, forward and backward.
    pub(super) flops: f64,
    /// Peak FLOP/s of the device, if known.
    pub(super) peak: Option<f64>,
}

impl TokenThroughput {
    fn format_rate(&self, steps_per_second: f64) -> String {
        let rate = self.per_step as f64 * steps_per_second;
        let mfu = self.peak.map(|peak| format!(" ({:.1} % MFU)", 100.0 * rate * self.flops / peak));
        format!("  {rate:.0} tokens/s{}", mfu.unwrap_or_default())
    }
}

impl StepStatus<'_> {
    fn format_line(&self, steps_per_second: f64, tokens: &str) -> String {
        let accuracy = self.accuracy.map(|a| format!("  accuracy {:5.1} %", 100.0 * a)).unwrap_or_default();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let MemoryPoint { allocated, reserved, peak, .. } = *self.memory;
        format!(
            "loss {:.4}{accuracy}  lr {:.1e}  {steps_per_second:.1} steps/s{tokens}  memory {:.1} allocated, {:.1} reserved, {:.1} peak MiB",
            self.loss,
            self.lr,
            mib(allocated),
            mib(reserved),
            mib(peak)
        )
    }
}

/// Progress display of a run.
pub(super) struct ProgressReporter {
    first_step: u64,
    started: Instant,
    tokens: Option<TokenThroughput>,
    /// First and last report: number of steps done, and time.
    report_points: Option<[(u64, Instant); 2]>,
    #[cfg(feature = "train")]
    display: Option<ProgressDisplay>,
}

#[cfg(feature = "train")]
struct ProgressDisplay {
    bar: indicatif::ProgressBar,
    total: Option<u64>,
    next_line: u64,
}

impl ProgressReporter {
    /// Creates the display of a run that has done `first` of `total` steps.
    pub(super) fn new(quiet: bool, first: u64, total: Option<u64>, tokens: Option<TokenThroughput>) -> Self {
        #[cfg(not(feature = "train"))]
        let _ = (quiet, total);
        Self {
            first_step: first,
            started: Instant::now(),
            tokens,
            report_points: None,
            #[cfg(feature = "train")]
            display: (!quiet).then(|| ProgressDisplay::new(first, total)),
        }
    }

    /// Advances the bar; called after every step.
    pub(super) fn set_step(&self, step: u64) {
        #[cfg(feature = "train")]
        if let Some(shown) = &self.display {
            shown.bar.set_position(step);
        }
        #[cfg(not(feature = "train"))]
        let _ = step;
    }

    /// Shows the current metrics.
    pub(super) fn report_status(&mut self, step: u64, status: &StepStatus<'_>) {
        let now = (step, Instant::now());
        let last = self.report_points.map_or((self.first_step, self.started), |[_, last]| last);
        self.report_points = Some([self.report_points.map_or(now, |[first, _]| first), now]);
        let rate = steps_per_second(last, now);
        let tokens = self.tokens.map(|tokens| tokens.format_rate(rate)).unwrap_or_default();
        let line = status.format_line(rate, &tokens);
        #[cfg(feature = "train")]
        if let Some(shown) = &mut self.display {
            shown.show_line(step, line);
        }
        #[cfg(not(feature = "train"))]
        log::info!("step {step}: {line}");
    }

    /// Runs work that is not a step and excludes its time from the rates.
    pub(super) fn exclude_time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let elapsed: Duration = start.elapsed();
        self.started += elapsed;
        for (_, at) in self.report_points.iter_mut().flatten() {
            *at += elapsed;
        }
        result
    }

    /// Prints a permanent line, or logs the line if nothing is displayed.
    pub(super) fn print_line(&self, line: &str) {
        #[cfg(feature = "train")]
        if let Some(shown) = &self.display {
            match shown.bar.is_hidden() {
                true => eprintln!("{line}"),
                false => shown.bar.println(line),
            }
            return;
        }
        log::info!("{line}");
    }

    /// Returns the rate between the first and the last report.
    pub(super) fn tokens_per_second(&self) -> Option<f64> {
        let ([first, last], tokens) = self.report_points.zip(self.tokens)?;
        (last.0 > first.0).then(|| tokens.per_step as f64 * steps_per_second(first, last))
    }

    /// Leaves the last state on the screen.
    pub(super) fn finish(&self) {
        #[cfg(feature = "train")]
        if let Some(shown) = &self.display {
            shown.bar.abandon();
        }
    }
}

/// Returns the steps per second between two reports.
fn steps_per_second(from: (u64, Instant), to: (u64, Instant)) -> f64 {
    (to.0 - from.0) as f64 / to.1.duration_since(from.1).as_secs_f64().max(1e-9)
}

#[cfg(feature = "train")]
impl ProgressDisplay {
    fn new(first: u64, total: Option<u64>) -> Self {
        use indicatif::{ProgressBar, ProgressStyle};
        let (bar, template) = match total {
            Some(total) => (ProgressBar::new(total), "{bar:24.cyan} {pos}/{len} {elapsed}<{eta}  {wide_msg}"),
            None => (ProgressBar::new_spinner(), "{spinner} {pos} {elapsed}  {wide_msg}"),
        };
        // The templates above are valid. A failure would only lose the style.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_position(first);
        bar.reset_eta();
        Self { bar, total, next_line: first }
    }

    fn show_line(&mut self, step: u64, line: String) {
        if !self.bar.is_hidden() {
            return self.bar.set_message(line);
        }
        if step >= self.next_line || self.total == Some(step) {
            let of = self.total.map(|n| format!("/{n}")).unwrap_or_default();
            eprintln!("step {step}{of}  {line}");
            self.next_line = step + self.total.map_or(100, |n| n.div_ceil(PLAIN_LINES));
        }
    }
}
