//! Device: one backend, one memory pool, compiled kernels and the state of the random generator.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};

use forebay_shaders::reflection::ModuleInterface;
use forebay_shaders::{KernelSpec, RenderOptions};
use rustc_hash::FxHashMap;

use crate::backend::host_memory::HostSource;
use crate::backend::{Backend, Command, DeviceInfo, KernelId, KernelSource, Launch, LibraryFeatures, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::scope::{self, Scope};
use crate::memory::{Config, Pool, Stats};
use crate::platform;
use crate::runtime::capture::recorder::{self, CaptureRecorder};
use crate::runtime::capture::replay_params::PhiloxState;
use crate::runtime::flushing::FlushingBackend;
use crate::runtime::future::{DeviceFuture, WaiterThread};
use crate::runtime::observer;
use crate::runtime::options::DeviceOptions;
use crate::runtime::profile::{SpanRecorder, WorkItem};
use crate::runtime::stream::StreamSet;
use crate::runtime::variant_choices::VariantChoices;
use crate::sync::{LockUnpoisoned, RwLockUnpoisoned};
use crate::variables;

/// Handle of a device; cloning is cheap. Two handles are equal if they refer to the same opened device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<DeviceInner>,
}

struct DeviceInner {
    waiter: WaiterThread,
    // The pools are dropped before the backend that provides their segments.
    pool: Pool,
    host_pool: OnceLock<Pool>,
    /// Backend as programs get it.
    flushing_backend: OnceLock<Arc<dyn Backend>>,
    streams: Arc<StreamSet>,
    kernels: RwLock<FxHashMap<KernelSpec, CompiledKernel>>,
    kernels_by_key: RwLock<FxHashMap<Box<[u64]>, CompiledKernel>>,
    custom_kernels: RwLock<FxHashMap<CustomKernelKey, (CompiledKernel, Arc<ModuleInterface>)>>,
    /// Label and write mask of each kernel, by kernel id.
    kernel_labels: RwLock<Vec<(Arc<str>, u32)>>,
    random_state: Mutex<RandomState>,
    span_recorder: SpanRecorder,
    capture_recorder: CaptureRecorder,
    options: DeviceOptions,
    variant_choices: VariantChoices,
    name: String,
}

/// Handle that does not keep the device open.
#[derive(Clone)]
pub struct WeakDevice(Weak<DeviceInner>);

impl fmt::Debug for WeakDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakDevice({})", if self.0.strong_count() > 0 { "open" } else { "closed" })
    }
}

impl WeakDevice {
    /// Returns the device if it is still open.
    #[must_use]
    pub fn upgrade(&self) -> Option<Device> {
        self.0.upgrade().map(|inner| Device { inner })
    }
}

/// Compiled kernel with the bit mask of the bindings that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompiledKernel {
    id: KernelId,
    pub(crate) write_mask: u32,
}

/// Cache key made of the addresses of static strings; avoids building a `KernelSpec` for each lookup. One
/// spec may have several keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelKey {
    parts: [u64; Self::MAX_PARTS],
    /// Number of parts. A key with more than `MAX_PARTS` parts is never found.
    count: usize,
}

impl KernelKey {
    const MAX_PARTS: usize = 32;

    #[inline]
    pub(crate) fn new(template: &'static str) -> Self {
        let mut key = Self { parts: [0; Self::MAX_PARTS], count: 0 };
        key.push_str(template);
        key
    }

    #[inline]
    pub(crate) fn push_str(&mut self, word: &'static str) {
        // Addresses do not use the upper 16 bits, so the length goes there.
        self.push_number(word.as_ptr().addr() as u64 ^ (word.len() as u64).rotate_right(16));
    }

    /// Adds a list of strings.
    #[inline]
    pub(crate) fn push_strs(&mut self, words: &[&'static str]) {
        self.push_number(words.len() as u64);
        words.iter().for_each(|word| self.push_str(word));
    }

    #[inline]
    pub(crate) fn push_number(&mut self, number: u64) {
        if let Some(word) = self.parts.get_mut(self.count) {
            *word = number;
        }
        self.count += 1;
    }

    #[inline]
    pub(crate) fn push_flags(&mut self, flags: &[bool]) {
        self.push_number(flags.iter().fold(1, |bits, &flag| bits << 1 | u64::from(flag)));
    }

    fn as_slice(&self) -> Option<&[u64]> {
        self.parts.get(..self.count)
    }
}

/// Key of a user's kernel: its source and the bits of its overrides.
type CustomKernelKey = (&'static str, Vec<(&'static str, u64)>);

/// State of a device's Philox generator: the next draw is block `offset` under key `seed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    /// Key of the generator.
    pub seed: u64,
    /// Number of blocks drawn so far, of four 32-bit values each.
    pub offset: u64,
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}
impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.inner).hash(state);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.inner.name)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.name)
    }
}

impl Device {
    /// Creates a device over a backend, with a pool configured by the environment (see
    /// [`Config::for_device`]).
    ///
    /// Programs use `Device::best()` and `Device::open` of the facade crate.
    ///
    /// # Errors
    /// An environment variable is invalid.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        let info = backend.info();
        let config = Config::for_device(info.backend, info.index)?;
        variables::check()?;
        Ok(Self::with_config(backend, config))
    }

    /// Creates a device over a backend, with a pool of this configuration. Invalid environment variables are
    /// ignored.
    #[must_use]
    pub fn with_config(backend: Arc<dyn Backend>, config: Config) -> Self {
        let info = backend.info();
        let name = format!("{}:{}", info.backend, info.index);
        let streams = Arc::new(StreamSet::new(Arc::clone(&backend)));
        let mut pool = Pool::new(backend.clone(), config).with_device_name(name.clone());
        // Compaction waits for fences.
        if platform::CAN_BLOCK {
            pool = pool.with_mover(streams.clone());
        }
        let random = Mutex::new(RandomState { seed: 0, offset: 0 });
        let null = info.backend == "null";
        let variant_choices = VariantChoices::new(info);
        let inner = Arc::new(DeviceInner {
            waiter: WaiterThread::default(),
            pool,
            host_pool: OnceLock::new(),
            flushing_backend: OnceLock::new(),
            streams,
            kernels: RwLock::default(),
            kernels_by_key: RwLock::default(),
            custom_kernels: RwLock::default(),
            kernel_labels: RwLock::default(),
            random_state: random,
            span_recorder: SpanRecorder::default(),
            capture_recorder: CaptureRecorder::default(),
            options: DeviceOptions::from_env(),
            variant_choices,
            name,
        });
        // Set only here, so the call cannot fail.
        let _ = inner.streams.device.set(WeakDevice(Arc::downgrade(&inner)));
        let device = Self { inner };
        if null {
            device.set_fusion_min_bytes(None);
        }
        device
    }

    /// Creates a null device: shapes, memory and errors of a real device without arithmetic.
    #[must_use]
    pub fn null(profile: crate::backend::null::CardProfile) -> Self {
        let config = profile.config;
        Self::with_config(Arc::new(crate::backend::null::NullBackend::new(profile)), config)
    }

    /// Returns a handle that does not keep the device open.
    #[must_use]
    pub fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.inner))
    }

    /// Returns the description of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.raw_backend().info()
    }

    /// Returns the backend, which works with segments and kernels, not tensors. A device defers elementwise
    /// operations to fuse them. Each call of this handle that submits or waits first launches them. To wait
    /// for the device, use [`synchronize`](Self::synchronize) or [`fence`](Self::fence).
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        let inner = &self.inner;
        inner
            .flushing_backend
            .get_or_init(|| Arc::new(FlushingBackend::new(self.downgrade(), Arc::clone(self.raw_backend()))))
    }

    /// Returns the backend itself, for callers that hold the dispatch lock or do not need it.
    #[inline]
    pub(crate) fn raw_backend(&self) -> &Arc<dyn Backend> {
        &self.inner.streams.backend
    }

    /// Returns the calls that the backend's library supports; none without a library.
    #[must_use]
    pub fn library_features(&self) -> LibraryFeatures {
        self.raw_backend().library_features()
    }

    /// Returns the memory pool.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// Returns the pool of host memory that the device accesses directly (page-locked, on CUDA).
    /// [`Tensor::offload_`](crate::tensor::Tensor::offload_) moves tensors there.
    #[must_use]
    pub fn host_pool(&self) -> &Pool {
        self.inner.host_pool.get_or_init(|| {
            let source = Arc::new(HostSource(Arc::clone(self.raw_backend())));
            // Limits of device memory do not apply to host memory.
            let config =
                Config { max_memory: None, per_process_memory_fraction: 1.0, ..self.pool().config() };
            Pool::new(source, config).with_device_name(format!("{} (host)", self.inner.name))
        })
    }

    pub(crate) fn options(&self) -> &DeviceOptions {
        &self.inner.options
    }

    pub(crate) fn variant_choices(&self) -> &VariantChoices {
        &self.inner.variant_choices
    }

    pub(crate) fn stream_set(&self) -> &StreamSet {
        &self.inner.streams
    }

    pub(crate) fn span_recorder(&self) -> &SpanRecorder {
        &self.inner.span_recorder
    }

    /// Fails while a step is recorded on this device. `reason` says why `op` cannot be part of a step.
    ///
    /// # Errors
    /// Returns [`Error::Capture`](crate::error::Error::Capture) during a recording.
    #[doc(hidden)]
    pub fn check_not_recording(&self, op: &'static str, reason: &str) -> Result<()> {
        self.inner.capture_recorder.check_not_recording(op, reason)
    }

    pub(crate) fn capture_recorder(&self) -> &CaptureRecorder {
        &self.inner.capture_recorder
    }

    /// Returns an address that identifies the device while it is open.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// Returns memory statistics, which display as a table.
    #[must_use]
    pub fn memory(&self) -> Stats {
        self.inner.pool.stats()
    }

    /// Seeds the random generator.
    pub fn manual_seed(&self, seed: u64) {
        self.set_random_state(RandomState { seed, offset: 0 });
    }

    /// Returns the state of the random generator.
    #[must_use]
    pub fn random_state(&self) -> RandomState {
        *self.inner.random_state.lock_unpoisoned()
    }

    /// Restores a state of the random generator.
    pub fn set_random_state(&self, state: RandomState) {
        // On another device than the recorded one, the error makes the capture fail.
        let _other = recorder::check_device("set_random_state", self);
        self.capture_recorder().fail_capture(
            "set_random_state",
            "random numbers go on from one replay to the next; seed before the capture",
        );
        // A recomputation replays recorded draws and must not change the state.
        if !observer::current().is_some_and(|observer| observer.is_replaying()) {
            *self.inner.random_state.lock_unpoisoned() = state;
        }
    }

    /// Draws the next `blocks` Philox blocks of four values each.
    pub(crate) fn draw_random(&self, blocks: u64) -> PhiloxState {
        PhiloxState::new(self.draw_random_state(blocks))
    }

    /// Draws blocks and returns the generator's state before them.
    pub(crate) fn draw_random_state(&self, blocks: u64) -> RandomState {
        let observer = observer::current();
        if let Some(before) = observer.and_then(|observer| observer.replayed_draw(self)) {
            return before;
        }
        let taken = {
            let mut state = self.inner.random_state.lock_unpoisoned();
            let taken = *state;
            // The counter wraps around, like that of Philox.
            state.offset = state.offset.wrapping_add(blocks);
            taken
        };
        if let Some(observer) = observer {
            observer.record_draw(self, taken);
        }
        taken
    }

    /// Waits until the device has completed all work enqueued so far.
    pub fn synchronize(&self) -> Result<()> {
        self.flush_fusion()?;
        let backend = self.raw_backend();
        Ok(backend.wait_fence(backend.record_fence()?)?)
    }

    /// Waits like [`synchronize`](Self::synchronize), without blocking. Work that is enqueued after this call is
    /// not waited for.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// async fn step(device: &Device) -> forebay_core::error::Result<f64> {
    ///     let x = Tensor::ones(&[3], DType::F32, device)?;
    ///     device.synchronize_async().await?;
    ///     x.sum_all()?.item_async().await
    /// }
    /// ```
    pub fn synchronize_async(&self) -> DeviceFuture<()> {
        self.fence().map_or_else(|error| DeviceFuture::ready(Err(error)), IntoFuture::into_future)
    }

    pub(crate) fn waiter(&self) -> &WaiterThread {
        &self.inner.waiter
    }

    /// Reports whether the device supports tensors of this dtype.
    #[must_use]
    pub fn supports_dtype(&self, dtype: DType) -> bool {
        dtype != DType::F64 || self.info().features.f64
    }

    /// Reports whether this is a null device, whose tensors have no contents.
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.info().backend == "null"
    }

    /// Returns a compiled kernel of the shaders crate, compiling it at first use.
    pub(crate) fn kernel_for_spec(&self, spec: &KernelSpec) -> Result<CompiledKernel> {
        let kernels = &self.inner.kernels;
        if let Some(&kernel) = kernels.read_unpoisoned().get(spec) {
            return Ok(kernel);
        }
        let label = spec.label();
        let options = RenderOptions { stores_u16: self.info().features.i16 };
        let wgsl = forebay_shaders::render_with_options(spec, options)
            .map_err(|e| Error::KernelCompilation { label: label.clone(), message: e.to_string() })?;
        let source = KernelSource {
            label: &label,
            wgsl: &wgsl,
            entry_point: "main",
            overrides: &[],
            zero_workgroup_memory: false,
        };
        let kernel = self.compile(&source)?;
        kernels.write_unpoisoned().insert(spec.clone(), kernel);
        Ok(kernel)
    }

    /// Waits until a kernel is compiled, and returns its compile error.
    pub(crate) fn wait_compiled(&self, kernel: CompiledKernel) -> Result<()> {
        self.backend().wait_compiled(kernel.id)
    }

    /// Returns a compiled kernel by its key; `spec` is called only at the first use of the key.
    pub(crate) fn kernel_by_key(
        &self,
        key: &KernelKey,
        spec: impl FnOnce() -> KernelSpec,
    ) -> Result<CompiledKernel> {
        if let Some(kernel) = self.find_kernel_by_key(key) {
            return Ok(kernel);
        }
        let kernel = self.kernel_for_spec(&spec())?;
        if let Some(words) = key.as_slice() {
            self.inner.kernels_by_key.write_unpoisoned().insert(words.into(), kernel);
        }
        Ok(kernel)
    }

    #[inline]
    pub(crate) fn find_kernel_by_key(&self, key: &KernelKey) -> Option<CompiledKernel> {
        let known = self.inner.kernels_by_key.read_unpoisoned();
        known.get(key.as_slice()?).copied()
    }

    /// Returns a user's kernel and the bindings that it declares.
    pub(crate) fn custom_kernel(
        &self,
        label: &'static str,
        wgsl: &'static str,
        overrides: &'static [(&'static str, f64)],
    ) -> Result<(CompiledKernel, Arc<ModuleInterface>)> {
        let key = (wgsl, overrides.iter().map(|&(name, value)| (name, value.to_bits())).collect());
        let kernels = &self.inner.custom_kernels;
        if let Some(form) = kernels.read_unpoisoned().get(&key) {
            return Ok(form.clone());
        }
        // WGSL validation reports errors in WGSL terms before the backend compiles.
        let interface = forebay_shaders::reflection::reflect_module(wgsl, "main")
            .map_err(|message| crate::error::Error::KernelCompilation { label: label.to_owned(), message })?;
        let kernel = self.compile(&KernelSource {
            label,
            wgsl,
            entry_point: "main",
            overrides,
            zero_workgroup_memory: true,
        })?;
        // The wait reports compile errors where the kernel is first used.
        self.raw_backend().wait_compiled(kernel.id)?;
        let form = (kernel, Arc::new(interface));
        kernels.write_unpoisoned().insert(key, form.clone());
        Ok(form)
    }

    fn compile(&self, source: &KernelSource<'_>) -> Result<CompiledKernel> {
        let id = self.raw_backend().compile(source)?;
        let mut labels = self.inner.kernel_labels.write_unpoisoned();
        let at = id.0 as usize;
        if labels.len() <= at {
            labels.resize(at + 1, (Arc::from(""), u32::MAX));
        }
        let written = forebay_shaders::writable_bindings(source.wgsl);
        labels[at] = (source.label.into(), written);
        Ok(CompiledKernel { id, write_mask: written })
    }

    /// Enqueues a kernel on this thread's queue.
    pub(crate) fn launch(
        &self,
        kernel: CompiledKernel,
        bindings: &[Slice],
        params: &[u8],
        groups: [u32; 3],
    ) -> Result<()> {
        self.launch_on_queue(self.current_queue(), scope::current(), kernel, bindings, params, groups)
    }

    /// Enqueues a kernel on queue `queue`, attributed to `scope`.
    pub(crate) fn launch_on_queue(
        &self,
        queue: u8,
        scope: Scope,
        kernel: CompiledKernel,
        bindings: &[Slice],
        params: &[u8],
        groups: [u32; 3],
    ) -> Result<()> {
        let launch = Launch { kernel: kernel.id, bindings, params, groups };
        self.try_enqueue_on(queue, scope, || self.describe_launch(&launch), &Command::Launch(launch))
            .map(drop)
    }

    /// Describes a launch for the profiler.
    pub(crate) fn describe_launch(&self, launch: &Launch<'_>) -> WorkItem {
        let labels = self.inner.kernel_labels.read_unpoisoned();
        let name =
            labels.get(launch.kernel.0 as usize).map_or_else(|| "".into(), |(name, _)| Arc::clone(name));
        WorkItem { name, bytes: launch.bindings.iter().map(|b| b.bytes).sum(), flops: 0 }
    }

    /// Returns the bit mask of the bindings that a kernel writes.
    pub(crate) fn kernel_write_mask(&self, kernel: KernelId) -> u32 {
        let labels = self.inner.kernel_labels.read_unpoisoned();
        labels.get(kernel.0 as usize).map_or(u32::MAX, |(_, written)| *written)
    }
}
