//! Steps of a program that a pool observes: for growth, and for the memory that a batch takes.

use crate::error::{Error, Result};
use crate::memory::{MemoryGrowth, Pool};

/// Ends the measured step when dropped, on success, error and panic.
struct BatchGuard<'a> {
    pool: &'a Pool,
    succeeded: bool,
}

impl Drop for BatchGuard<'_> {
    fn drop(&mut self) {
        self.pool.end_batch(self.succeeded);
    }
}

impl Pool {
    /// Runs `step` twice to warm up, then `steps` times, and fails if memory has grown in between. The error
    /// names the tags, modules, operations and lines that hold it.
    ///
    /// ```
    /// use forebay_core::{device::Device, memory::Request};
    /// let device = Device::null(Default::default());
    /// let pool = device.pool();
    /// let mut kept = Vec::new();
    /// let leak = pool.assert_no_growth(10, || {
    ///     kept.push(pool.alloc(Request::new(1000).op("log_loss"))?);
    ///     Ok(())
    /// });
    /// assert!(leak.unwrap_err().to_string().contains("log_loss"));
    /// ```
    ///
    /// # Errors
    /// [`Error::MemoryGrowth`], and errors of `step`.
    pub fn assert_no_growth(&self, steps: u64, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        step()?;
        step()?;
        // Lines are known only for blocks allocated while the pool records; blocks in use need no events.
        let recorded_before = self.is_recording();
        if !recorded_before {
            self.start_recording(1);
        }
        let before = self.snapshot();
        let outcome = (0..steps).try_for_each(|_| step());
        let after = self.snapshot();
        if !recorded_before {
            self.stop_recording();
        }
        outcome?;
        let diff = before.diff(&after);
        if diff.bytes() > 0 {
            Err(Error::MemoryGrowth(Box::new(MemoryGrowth { steps, diff })))
        } else {
            Ok(())
        }
    }

    /// Runs a step, forward and backward, that has `rows` rows of a batch on the device at once. If the step
    /// runs out of memory, [`OutOfMemory::fitting_batch_size`](crate::memory::OutOfMemory::fitting_batch_size) gives
    /// a batch size that would fit. That size is computed from what the step had reached, and more precisely
    /// from earlier steps that completed. `forebay_nn`'s `Trainer` runs its steps this way.
    ///
    /// Of nested calls, only the outermost one measures.
    ///
    /// # Errors
    /// Errors of `step`.
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    ///
    /// let device = Device::null(Default::default());
    /// device.pool().set_limit(Some(64 << 20));
    /// let step = |rows: usize| Tensor::zeros(&[rows, 1 << 20], DType::F32, &device)?.exp();
    /// let error = device.pool().with_batch_size(16, || step(16)).unwrap_err().into_out_of_memory()?;
    /// let fits = error.fitting_batch_size().map_or(1, |fits| fits.batch_size);
    /// assert_eq!(fits, 8);
    /// device.pool().with_batch_size(fits, || step(fits))?;
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn with_batch_size<T>(&self, rows: usize, step: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.begin_batch(rows.max(1)) {
            return step();
        }
        let mut ending = BatchGuard { pool: self, succeeded: false };
        let result = step();
        ending.succeeded = result.is_ok();
        result
    }
}
