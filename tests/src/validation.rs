//! Counter of errors from Vulkan's validation layer, which wgpu passes to `log`.

use std::sync::atomic::{AtomicUsize, Ordering};

use log::{Level, LevelFilter, Log, Metadata, Record};

#[derive(Debug)]
pub struct ValidationErrorCounter {
    count: AtomicUsize,
}

static ERROR_COUNTER: ValidationErrorCounter = ValidationErrorCounter { count: AtomicUsize::new(0) };

impl ValidationErrorCounter {
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

impl Log for ValidationErrorCounter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // Messages of the layer come through wgpu's Vulkan instance; other errors are results of calls.
        if record.level() == Level::Error && record.target().starts_with("wgpu_hal::vulkan") {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        println!("{}: {}: {}", record.level(), record.target(), record.args());
    }

    fn flush(&self) {}
}

/// Starts counting if `FOREBAY_VALIDATION` is set; call it before the first device is opened.
pub fn install_error_counter() -> Option<&'static ValidationErrorCounter> {
    let wanted = std::env::var("FOREBAY_VALIDATION").is_ok_and(|v| !matches!(&*v, "" | "0"));
    if !wanted || log::set_logger(&ERROR_COUNTER).is_err() {
        return None;
    }
    log::set_max_level(LevelFilter::Warn);
    Some(&ERROR_COUNTER)
}
