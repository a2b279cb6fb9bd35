//! Options of a device that its operations read: sizes from which work is fused, or done through scratch memory.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::environment;
use crate::runtime::device::Device;

/// Smaller results use single kernels, because compiling a chain's kernel costs more than it saves.
const DEFAULT_FUSION_MIN_BYTES: u64 = 256 << 10;
/// Default limit of im2col buffers on devices with a library for matrix products.
const DEFAULT_IM2COL_MAX_BYTES: u64 = 256 << 20;
/// Smaller products keep the tile of the cost model: they take less time than the choice would save.
const DEFAULT_AUTOTUNE_MIN_FLOPS: u64 = 1 << 30;
/// Value of an option that is off (fusion) or that depends on the device (im2col, tiles).
const UNSET: u64 = u64::MAX;
/// Value of an option that is off, where unset is another state.
const OFF: u64 = u64::MAX - 1;
/// Environment variable that enables or disables the choice of tiles by timing.
const TILE_AUTOTUNE: &str = "FOREBAY_TILE_AUTOTUNE";

/// Options of one device. Each can be changed at any time.
#[derive(Debug)]
pub(crate) struct DeviceOptions {
    fusion_min_bytes: AtomicU64,
    im2col_max_bytes: AtomicU64,
    tile_autotune_min_flops: AtomicU64,
    /// Candidate that tests force, or `usize::MAX`.
    forced_tile: AtomicUsize,
}

impl DeviceOptions {
    /// Reads the environment. Invalid variables are ignored; [`variables::check`](crate::variables::check)
    /// reports them.
    pub(crate) fn from_env() -> Self {
        let im2col = environment::read_bytes("FOREBAY_IM2COL_BYTES").ok().flatten();
        let autotune = match environment::read_switch(TILE_AUTOTUNE).ok().flatten() {
            Some(true) => DEFAULT_AUTOTUNE_MIN_FLOPS,
            Some(false) => OFF,
            None => UNSET,
        };
        Self {
            fusion_min_bytes: AtomicU64::new(default_fusion_min_bytes().unwrap_or(UNSET)),
            im2col_max_bytes: AtomicU64::new(im2col.unwrap_or(UNSET)),
            tile_autotune_min_flops: AtomicU64::new(autotune),
            forced_tile: AtomicUsize::new(usize::MAX),
        }
    }
}

/// Returns the smallest fused result in bytes on a device with kernels: from the environment, or the default. `None`
/// disables fusion.
pub(crate) fn default_fusion_min_bytes() -> Option<u64> {
    let configured = environment::read_bytes_or_off("FOREBAY_FUSION_MIN_BYTES").ok().flatten();
    configured.unwrap_or(Some(DEFAULT_FUSION_MIN_BYTES))
}

impl Device {
    /// Returns the smallest result, in bytes, for which chains of elementwise operations run as one kernel on
    /// this device. `None` if fusion is off. See [`set_fusion_min_bytes`](Self::set_fusion_min_bytes).
    #[must_use]
    #[inline]
    pub fn fusion_min_bytes(&self) -> Option<u64> {
        let min_bytes = self.options().fusion_min_bytes.load(Ordering::Relaxed);
        (min_bytes != UNSET).then_some(min_bytes)
    }

    /// Runs chains of elementwise operations as one kernel if each result has at least `min_bytes` bytes: `Some(0)`
    /// fuses chains of every size, and `None` disables fusion. Results are identical to the bit with and without
    /// fusion. So is memory use, but for products with an activation: with fusion they compute the activation again in
    /// the backward pass instead of saving it.
    ///
    /// The default is 256 KiB, or `FOREBAY_FUSION_MIN_BYTES`: a number with the same meaning, or `off` for `None`. The
    /// null device does not fuse by default.
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, profile::Profiler, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// device.set_fusion_min_bytes(Some(0));
    /// let [a, b, c] = [1.0, 2.0, 3.0].map(|v| Tensor::full(&[1024], v, DType::F32, &device));
    /// let (a, b, c) = (a?, b?, c?);
    /// let profiler = Profiler::start(&device)?;
    /// let y = a.mul(&b)?.add(&c)?.gelu()?;
    /// let profile = profiler.finish()?;
    /// assert_eq!(profile.spans.len(), 1);
    /// assert_eq!(&*profile.spans[0].name, "mul add gelu f32");
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn set_fusion_min_bytes(&self, min_bytes: Option<u64>) {
        self.options().fusion_min_bytes.store(min_bytes.unwrap_or(UNSET), Ordering::Relaxed);
    }

    /// Returns the largest size of a column matrix in bytes, or 0 if convolutions build none. See
    /// [`set_im2col_max_bytes`](Self::set_im2col_max_bytes).
    #[must_use]
    pub fn im2col_max_bytes(&self) -> u64 {
        match self.options().im2col_max_bytes.load(Ordering::Relaxed) {
            // A software driver gains nothing from a copy.
            UNSET if self.info().software => 0,
            UNSET => DEFAULT_IM2COL_MAX_BYTES,
            configured => configured,
        }
    }

    /// Sets the largest size in bytes of the scratch memory for convolutions' column matrices (im2col).
    ///
    /// A column matrix holds at least one image. With 0, convolutions gather their operands without scratch
    /// memory. The order of the sums, and therefore rounding, differs between both algorithms.
    ///
    /// `None` restores the default: 256 MiB on a GPU, and 0 on a software driver. The variable
    /// `FOREBAY_IM2COL_BYTES` sets the initial value. Small groups (fewer than 4 output channels or 16 rows
    /// of columns) and f64 never use im2col. A dry run needs the same setting as the device.
    ///
    /// ```
    /// use forebay_core::{device::Device, dtype::DType, ops::ConvolutionOptions, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// device.set_im2col_max_bytes(Some(1 << 20));
    /// let x = Tensor::zeros(&[1, 8, 32, 32], DType::F32, &device)?;
    /// let w = Tensor::zeros(&[8, 8, 3, 3], DType::F32, &device)?;
    /// x.conv2d(&w, None, &ConvolutionOptions { padding: 1.into(), ..Default::default() })?;
    /// assert!(device.memory().peak_allocated() > 9 * 4 * x.numel() as u64);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    pub fn set_im2col_max_bytes(&self, bytes: Option<u64>) {
        self.options().im2col_max_bytes.store(bytes.unwrap_or(UNSET), Ordering::Relaxed);
    }

    /// Returns the smallest matrix product, in floating-point operations, whose tile timing chooses. `None` if the
    /// cost model chooses all tiles. See [`set_tile_autotune_min_flops`](Self::set_tile_autotune_min_flops).
    #[must_use]
    pub fn tile_autotune_min_flops(&self) -> Option<u64> {
        match self.options().tile_autotune_min_flops.load(Ordering::Relaxed) {
            OFF => None,
            UNSET => (!self.info().software && !self.is_null()).then_some(DEFAULT_AUTOTUNE_MIN_FLOPS),
            configured => Some(configured),
        }
    }

    /// Chooses tiles of this crate's matrix products by timing, for products of at least so many floating-point
    /// operations. `None` leaves all tiles to the cost model.
    ///
    /// The first product of a kind, by kernel and bucket of extents, runs a few tiles several times and waits. The
    /// choice is kept in the cache folder for later processes, by device and driver. Tiles that may be chosen split
    /// sums alike: results have the same bits with any of them, and memory use is the same. Nothing is timed while a
    /// step is captured, while a profiler runs, in a browser, or on the null device. Vendors' libraries choose for
    /// themselves.
    ///
    /// The default is 2^30 operations on a GPU, and `None` on a software driver. The variable
    /// `FOREBAY_TILE_AUTOTUNE` (0 or 1) sets the initial value.
    pub fn set_tile_autotune_min_flops(&self, min_flops: Option<u64>) {
        let min_flops = min_flops.map_or(OFF, |flops| flops.min(OFF - 1));
        self.options().tile_autotune_min_flops.store(min_flops, Ordering::Relaxed);
    }

    /// Returns the candidate that each product takes.
    pub(crate) fn forced_tile(&self) -> Option<usize> {
        Some(self.options().forced_tile.load(Ordering::Relaxed)).filter(|&number| number != usize::MAX)
    }

    /// Makes each product take its candidate of this number, counted round, in place of the fastest. For tests.
    #[doc(hidden)]
    pub fn force_tile(&self, candidate: Option<usize>) {
        self.options().forced_tile.store(candidate.unwrap_or(usize::MAX), Ordering::Relaxed);
    }
}
