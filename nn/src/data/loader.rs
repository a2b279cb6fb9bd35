//! Batches of samples on a device.
//!
//! The loader's thread assembles a few batches ahead on the host. The consumer's thread uploads each batch
//! through the backend's staging memory, without waiting. Device memory is therefore allocated in the same
//! order in every run, whatever the speed of the loader's thread. In a browser page, which has no threads, the consumer
//! assembles each batch itself.
//!
//! [`DataLoader`] has the settings, `BatchAssembler` runs on the loader's thread, and [`BatchIter`] is the consumer's
//! side. A new setting that changes the batches also belongs to [`DataLoader::description`], which checkpoints compare.

use std::any::Any;
use std::collections::TryReserveError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};

use serde::{Deserialize, Serialize};

use super::Dataset;
use super::shuffle::shuffled_order;
use crate::{Device, Error, Result, Tag, Tensor, fail_if, memory};
use forebay_core::future::wake_task;
use forebay_core::platform::CAN_BLOCK;
use forebay_core::sync::LockUnpoisoned;
use forebay_core::tensor::layout::{numel, tensor_numel};

/// Number of prefetched batches, unless [`DataLoader::prefetch_factor`] changes it.
const DEFAULT_PREFETCH: usize = 4;
/// Largest number of prefetched batches. The queue has a slot for each.
const MAX_PREFETCH: usize = 1 << 16;

/// Position of a loader: the next batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderCursor {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Index of the batch in the epoch, from 0.
    pub batch: u64,
}

/// Description of the batches of a data set. The batches depend only on the data, the seed, the sizes and the
/// position, never on timing or the device.
#[derive(Debug)]
pub struct DataLoader<D> {
    data: Arc<D>,
    seed: Option<u64>,
    batch_size: usize,
    drop_last: bool,
    prefetch_factor: usize,
    /// Number of epochs, or `None` without a limit.
    pub(crate) epochs: Option<u64>,
    pub(crate) start: LoaderCursor,
}

impl<D> Clone for DataLoader<D> {
    fn clone(&self) -> Self {
        Self { data: self.data.clone(), ..*self }
    }
}

impl<D: Dataset> DataLoader<D> {
    /// Creates a loader of single samples, in order, for one epoch.
    #[must_use]
    pub fn new(data: D) -> Self {
        Self {
            data: Arc::new(data),
            seed: None,
            batch_size: 1,
            drop_last: false,
            prefetch_factor: DEFAULT_PREFETCH,
            epochs: Some(1),
            start: LoaderCursor::default(),
        }
    }

    setters! {
        /// Shuffles the samples by `seed`, differently in each epoch.
        fn shuffle(seed: u64) { seed: Some(seed) }
        /// Sets the batch size.
        fn batches(n: usize) { batch_size: n }
        /// Drops the last batch of an epoch if it is incomplete.
        fn drop_last() { drop_last: true }
        /// Sets the maximum number of batches that are prefetched on the host, from 1 to 65,536.
        fn prefetch_factor(n: usize) { prefetch_factor: n.max(1) }
        /// Sets the number of epochs; one by default.
        fn epochs(n: u64) { epochs: Some(n) }
        /// Removes the limit of epochs.
        fn forever() { epochs: None }
        /// Starts at the position of another run ([`BatchIter::cursor`]). The following batches are equal.
        fn start_at(cursor: LoaderCursor) { start: cursor }
    }

    /// Returns the data set.
    #[must_use]
    pub fn dataset(&self) -> &D {
        &self.data
    }

    /// Returns the number of batches in one epoch.
    #[must_use]
    pub fn batches_per_epoch(&self) -> u64 {
        self.batches_for_samples(self.data.len())
    }

    /// Returns the number of batches in one epoch of `samples` samples.
    pub(crate) fn batches_for_samples(&self, samples: usize) -> u64 {
        let batch = self.batch_size.max(1);
        (if self.drop_last { samples / batch } else { samples.div_ceil(batch) }) as u64
    }

    /// Returns the number of batches in all epochs, or `None` without a limit.
    #[must_use]
    pub fn total_batches(&self) -> Option<u64> {
        self.epochs.map(|n| n.saturating_mul(self.batches_per_epoch()))
    }

    /// Describes the inputs that determine the batches. A cursor is valid for loaders of equal descriptions.
    #[must_use]
    pub fn description(&self) -> String {
        self.describe_for_samples(self.data.len())
    }

    pub(crate) fn describe_for_samples(&self, samples: usize) -> String {
        let order = self.seed.map_or_else(|| "in order".to_owned(), |seed| format!("shuffled by {seed}"));
        let last = if self.drop_last { ", whole batches only" } else { "" };
        format!("{} of {samples} samples {order}{last}", self.batch_size)
    }

    /// Queries the data set's sizes; a panic in its code becomes an error.
    pub(crate) fn query_sizes(&self) -> Result<DatasetSizes> {
        Ok(DatasetSizes {
            samples: catch_panic("len", || self.data.len())?,
            input: catch_panic("input_shape", || self.data.input_shape().to_vec())?,
            target: catch_panic("target_shape", || self.data.target_shape().to_vec())?,
        })
    }

    /// Starts the loader's thread; batches arrive as `(inputs, targets)` on `device`. The data set's sizes
    /// are fixed at this call. A change of its length is an error in the next epoch, and requires a new loop.
    #[must_use]
    #[track_caller]
    pub fn prefetch(&self, device: &Device) -> BatchIter<D> {
        self.iterate(device, CAN_BLOCK)
    }

    /// Returns the batches, assembled by a thread or by the consumer.
    #[track_caller]
    fn iterate(&self, device: &Device, on_thread: bool) -> BatchIter<D> {
        // The first error arrives as a batch, and names the line that asked for the batches.
        let _call = memory::scope::enter_call();
        let (ready, batches) = sync_channel(self.prefetch_factor.min(MAX_PREFETCH));
        let (recycle, used) = channel();
        let waker = Arc::<WakerSlot>::default();
        let started = self.query_sizes().and_then(|sizes| {
            self.check_sizes(&sizes)?;
            let assembler = BatchAssembler::new(self.clone(), sizes.clone(), used);
            if !on_thread {
                return Ok((sizes, None, Some(assembler)));
            }
            let sender = BatchSender { batches: ready.clone(), waker: Arc::clone(&waker) };
            let thread = thread::Builder::new().name("forebay-loader".into());
            let thread = thread.spawn(move || assembler.run(sender));
            let thread =
                thread.map_err(|e| Error::argument("prefetch", format!("no thread can be started: {e}")))?;
            Ok((sizes, Some(thread), None))
        });
        let (sizes, thread, inline) = started.unwrap_or_else(|problem| {
            // The queue has room for at least one batch.
            let _ = ready.try_send(Err(problem));
            (DatasetSizes::default(), None, None)
        });
        let per_epoch = self.batches_for_samples(sizes.samples);
        BatchIter {
            device: device.clone(),
            cursor: self.start.normalized(per_epoch),
            epochs: self.epochs,
            batches_per_epoch: per_epoch,
            sizes,
            receiver: Some(batches),
            waker,
            arrived: None,
            retry_batch: None,
            recycle,
            thread,
            inline,
        }
    }

    /// Rejects settings that would make the loop meaningless or endless.
    #[track_caller]
    pub(crate) fn check_sizes(&self, sizes: &DatasetSizes) -> Result<()> {
        let (n, batch) = (sizes.samples, self.batch_size);
        fail_if!(batch == 0; argument("batches"), "a batch has at least one sample, not 0");
        fail_if!(
            self.prefetch_factor > MAX_PREFETCH;
            argument("prefetch_factor"), "{} batches are too many to wait on the host; take at most {MAX_PREFETCH}", self.prefetch_factor
        );
        fail_if!(self.seed.is_some() && u32::try_from(n).is_err(); argument("shuffle"),
            "the data set has {n} samples; at most {} are shuffled: take them in order", u32::MAX);
        for shape in [&sizes.input, &sizes.target] {
            fail_if!(
                tensor_numel(&[&[batch.min(n)], &shape[..]].concat()).is_none();
                argument("batches"), "a batch of {batch} samples of shape {shape:?} has more elements than a tensor can"
            );
        }
        fail_if!(self.batches_for_samples(n) == 0 && (n > 0 || self.epochs.is_none());
            argument("batches"), "the data set has {n} samples, too few for one batch of {batch}");
        Ok(())
    }

    /// Fails if the data set's length has changed since the loop began.
    #[track_caller]
    fn check_same_length(&self, sizes: &DatasetSizes) -> Result<()> {
        let (before, now) = (sizes.samples, catch_panic("len", || self.data.len())?);
        fail_if!(
            before != now;
            argument("prefetch"),
            "the data set had {before} samples when the loop over its batches began, and has {now} now: begin another loop"
        );
        Ok(())
    }

    /// Writes the samples of one batch.
    fn fill_batch(
        &self,
        sizes: &DatasetSizes,
        host: &mut HostBatch<D>,
        batch: u64,
        order: Option<&[u32]>,
    ) -> Result<()> {
        let first = batch as usize * self.batch_size;
        host.samples = self.batch_size.min(sizes.samples - first);
        let (x, y) = (numel(&sizes.input), numel(&sizes.target));
        try_resize(&mut host.inputs, host.samples * x)?;
        try_resize(&mut host.targets, host.samples * y)?;
        (0..host.samples).try_for_each(|i| {
            let (input, target) = (&mut host.inputs[i * x..][..x], &mut host.targets[i * y..][..y]);
            let sample = order.map_or(first + i, |order| order[first + i] as usize);
            self.data.get(sample, input, target)
        })
    }
}

/// Assembles the batches of a loader on the host, in order.
struct BatchAssembler<D: Dataset> {
    loader: DataLoader<D>,
    sizes: DatasetSizes,
    cursor: LoaderCursor,
    /// The epoch of a shuffled order, and the order.
    order: Option<(u64, Option<Vec<u32>>)>,
    /// Batches whose memory can be used again.
    used: Receiver<HostBatch<D>>,
}

impl<D: Dataset> BatchAssembler<D> {
    fn new(loader: DataLoader<D>, sizes: DatasetSizes, used: Receiver<HostBatch<D>>) -> Self {
        let cursor = loader.start.normalized(loader.batches_for_samples(sizes.samples));
        Self { loader, sizes, cursor, order: None, used }
    }

    /// Runs the loader's thread: assembles batches until none are left or the receiver is dropped. An early
    /// end is reported to the loop as an error.
    fn run(mut self, ready: BatchSender<D>) {
        while let Some(host) = self.next_host() {
            let failed = host.is_err();
            // The receiver may have been dropped.
            if !ready.send(host) || failed {
                break;
            }
        }
        // The end is an event too: it closes the channel.
        let waker = Arc::clone(&ready.waker);
        drop(ready);
        wake(&waker);
    }

    /// Assembles the next batch; `None` after the last one. An error ends the loop.
    fn next_host(&mut self) -> Option<Result<HostBatch<D>>> {
        catch_panic("loader", || self.assemble_next()).and_then(|next| next).transpose()
    }

    fn assemble_next(&mut self) -> Result<Option<HostBatch<D>>> {
        let (loader, sizes) = (&self.loader, &self.sizes);
        let per_epoch = loader.batches_for_samples(sizes.samples);
        if self.cursor.is_finished(per_epoch, loader.epochs) {
            return Ok(None);
        }
        let epoch = self.cursor.epoch;
        let order = match &mut self.order {
            Some((of, order)) if *of == epoch => order,
            stale => {
                loader.check_same_length(sizes)?;
                &mut stale.insert((epoch, shuffled_order(sizes.samples, loader.seed, epoch)?)).1
            }
        };
        let mut host = self.used.try_recv().unwrap_or_default();
        // User code: a panic in the data set is an error of the loop, not a silent end.
        catch_panic("get", || loader.fill_batch(sizes, &mut host, self.cursor.batch, order.as_deref()))
            .and_then(|filled| filled)?;
        self.cursor = self.cursor.advance(per_epoch);
        Ok(Some(host))
    }
}

/// Sizes of a data set when a loop began.
#[derive(Clone, Debug, Default)]
pub(crate) struct DatasetSizes {
    pub(crate) samples: usize,
    input: Vec<usize>,
    target: Vec<usize>,
}

/// Resizes a list; running out of host memory is an error instead of an abort.
fn try_resize<T: bytemuck::Zeroable + Clone>(list: &mut Vec<T>, elements: usize) -> Result<()> {
    let more = elements.saturating_sub(list.len());
    list.try_reserve(more)
        .map_err(|e| host_memory_error("prefetch", format!("a batch of {elements} elements"), &e))?;
    list.resize(elements, T::zeroed());
    Ok(())
}

#[track_caller]
pub(super) fn host_memory_error(op: &'static str, what: String, error: &TryReserveError) -> Error {
    Error::argument(op, format!("{what} does not fit the host's memory: {error}"))
}

/// Calls a data set's code and turns a panic into an error that names the method.
fn catch_panic<R>(method: &str, call: impl FnOnce() -> R) -> Result<R> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| panic_error(method, &*panic))
}

#[track_caller]
fn panic_error(method: &str, panic: &(dyn Any + Send)) -> Error {
    let message =
        panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    let message = message.unwrap_or("without a message");
    Error::argument("prefetch", format!("the data set's `{method}` panicked: {message}"))
}

impl LoaderCursor {
    fn advance(self, per_epoch: u64) -> Self {
        Self { batch: self.batch.saturating_add(1), ..self }.normalized(per_epoch)
    }

    /// Reports whether all epochs are done.
    fn is_finished(self, per_epoch: u64, epochs: Option<u64>) -> bool {
        per_epoch == 0 || epochs.is_some_and(|n| self.epoch >= n)
    }

    /// Replaces the end of an epoch by the start of the next one.
    pub(crate) fn normalized(self, per_epoch: u64) -> Self {
        let ends = self.batch >= per_epoch && per_epoch > 0;
        if ends { Self { epoch: self.epoch.saturating_add(1), batch: 0 } } else { self }
    }
}

struct HostBatch<D: Dataset> {
    samples: usize,
    inputs: Vec<D::Input>,
    targets: Vec<D::Target>,
}

impl<D: Dataset> Default for HostBatch<D> {
    fn default() -> Self {
        Self { samples: 0, inputs: Vec::new(), targets: Vec::new() }
    }
}

/// Task that waits for a batch.
type WakerSlot = Mutex<Option<Waker>>;

fn wake(slot: &WakerSlot) {
    let waker = slot.lock_unpoisoned().take();
    if let Some(waker) = waker {
        wake_task(waker);
    }
}

/// Sender of the loader's thread, which wakes the task that waits for a batch.
struct BatchSender<D: Dataset> {
    batches: SyncSender<Result<HostBatch<D>>>,
    waker: Arc<WakerSlot>,
}

impl<D: Dataset> BatchSender<D> {
    /// Sends a batch; returns `false` if the receiver was dropped.
    fn send(&self, batch: Result<HostBatch<D>>) -> bool {
        let is_sent = self.batches.send(batch).is_ok();
        wake(&self.waker);
        is_sent
    }
}

/// Iterator over a loader's batches on a device. Dropping it ends the loader's thread.
pub struct BatchIter<D: Dataset> {
    device: Device,
    cursor: LoaderCursor,
    epochs: Option<u64>,
    batches_per_epoch: u64,
    sizes: DatasetSizes,
    receiver: Option<Receiver<Result<HostBatch<D>>>>,
    waker: Arc<WakerSlot>,
    /// Batch, or error, that has arrived and that no call has returned.
    arrived: Option<Result<HostBatch<D>>>,
    /// Batch whose upload failed; the next call tries again.
    retry_batch: Option<HostBatch<D>>,
    recycle: Sender<HostBatch<D>>,
    thread: Option<JoinHandle<()>>,
    /// Assembler of the batches where there is no thread.
    inline: Option<BatchAssembler<D>>,
}

impl<D: Dataset> BatchIter<D> {
    /// Returns the current position. A loader continues [from there](DataLoader::start_at) with the next
    /// batch.
    #[must_use]
    pub fn cursor(&self) -> LoaderCursor {
        self.cursor
    }

    /// Returns the number of batches in one epoch.
    #[must_use]
    pub fn batches_per_epoch(&self) -> u64 {
        self.batches_per_epoch
    }

    /// Waits until [`next`](Self::next) does not block: a batch has arrived, or none will.
    pub(crate) fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.arrived.is_some() || self.retry_batch.is_some() || self.inline.is_some() {
            return Poll::Ready(());
        }
        let Some(receiver) = &self.receiver else { return Poll::Ready(()) };
        // The waker is set before the channel is read, so that a batch which arrives later wakes the task.
        *self.waker.lock_unpoisoned() = Some(context.waker().clone());
        match receiver.try_recv() {
            Ok(batch) => self.arrived = Some(batch),
            Err(TryRecvError::Empty) => return Poll::Pending,
            Err(TryRecvError::Disconnected) => {}
        }
        Poll::Ready(())
    }

    /// Joins the loader's thread after it has ended, and returns an error if batches are missing.
    fn join_worker(&mut self) -> Option<Error> {
        self.receiver = None;
        let joined = self.thread.take().map(JoinHandle::join);
        if self.cursor.is_finished(self.batches_per_epoch, self.epochs) {
            return None;
        }
        Some(match joined {
            Some(Err(panic)) => panic_error("loader", &*panic),
            _ => Error::argument("prefetch", "the loader's thread ended before its last batch"),
        })
    }

    /// Returns the next batch on the host, or `None` after the last batch and after an error.
    fn receive_host(&mut self) -> Option<Result<HostBatch<D>>> {
        if let Some(batch) = self.arrived.take() {
            return Some(batch);
        }
        let receiver = self.receiver.as_ref()?;
        if let Some(assembler) = &mut self.inline {
            return assembler.next_host();
        }
        match receiver.recv() {
            Ok(host) => Some(host),
            Err(_) => self.join_worker().map(Err),
        }
    }

    fn upload_batch(&self, host: &HostBatch<D>) -> Result<(Tensor, Tensor)> {
        let _tag = memory::scope::enter_tag(Tag::Input);
        let batched = |shape: &[usize]| [&[host.samples], shape].concat();
        Ok((
            Tensor::from_slice(&host.inputs, batched(&self.sizes.input), &self.device)?,
            Tensor::from_slice(&host.targets, batched(&self.sizes.target), &self.device)?,
        ))
    }
}

impl<D: Dataset> Iterator for BatchIter<D> {
    type Item = Result<(Tensor, Tensor)>;

    fn next(&mut self) -> Option<Self::Item> {
        // The channel closes after the last batch and after an error.
        let host = match self.retry_batch.take() {
            Some(host) => host,
            None => match self.receive_host()? {
                Ok(host) => host,
                Err(e) => {
                    self.receiver = None;
                    return Some(Err(e));
                }
            },
        };
        let tensors = self.upload_batch(&host);
        if tensors.is_err() {
            self.retry_batch = Some(host);
        } else {
            self.cursor = self.cursor.advance(self.batches_per_epoch);
            // The loader's thread may have ended already.
            let _ = self.recycle.send(host);
        }
        Some(tensors)
    }
}

impl<D: Dataset> Drop for BatchIter<D> {
    fn drop(&mut self) {
        // Without a receiver the loader's next `send` fails, which ends its thread.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<D: Dataset> std::fmt::Debug for BatchIter<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchIter")
            .field("device", &self.device)
            .field("cursor", &self.cursor)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Numbers(usize);

    impl Dataset for Numbers {
        type Input = f32;
        type Target = i64;
        fn len(&self) -> usize {
            self.0
        }
        fn input_shape(&self) -> &[usize] {
            &[2]
        }
        fn target_shape(&self) -> &[usize] {
            &[]
        }
        fn get(&self, index: usize, input: &mut [f32], target: &mut [i64]) -> Result<()> {
            assert_ne!(index, 666, "a data set that panics");
            if index == 13 {
                return Err(Error::argument("get", "an unlucky number"));
            }
            input.fill(index as f32);
            target[0] = index as i64;
            Ok(())
        }
    }

    /// Returns the values of every batch, as the loader's thread makes them.
    fn hosts(loader: &DataLoader<Numbers>) -> Vec<Vec<i64>> {
        let (ready, batches) = sync_channel(1024);
        let (_recycle, used) = channel();
        let sizes = loader.query_sizes().expect("it does not panic");
        let sender = BatchSender { batches: ready, waker: Arc::default() };
        BatchAssembler::new(loader.clone(), sizes, used).run(sender);
        batches.into_iter().map(|host| host.map_or_else(|_| Vec::new(), |h| h.targets)).collect()
    }

    fn device() -> Device {
        Device::null(forebay_core::backend::null::CardProfile::default())
    }

    #[test]
    fn a_consumer_without_a_thread_gets_the_same_batches_and_errors() {
        let loader = DataLoader::new(Numbers(10)).shuffle(3).batches(4).epochs(2);
        let outcomes = |mut batches: BatchIter<Numbers>| {
            let shapes = batches.by_ref().map(|batch| batch.map(|(x, _)| x.shape().to_vec()));
            let shapes = shapes.map(|shape| shape.map_err(|e| e.to_string())).collect::<Vec<_>>();
            (shapes, batches.cursor(), batches.next().is_none())
        };
        let inline = outcomes(loader.iterate(&device(), false));
        assert_eq!(inline, outcomes(loader.iterate(&device(), true)));
        assert_eq!(inline.0.len(), 6);
        let faulty = DataLoader::new(Numbers(14)).batches(7);
        let inline = outcomes(faulty.iterate(&device(), false));
        assert!(inline.0[1].as_ref().is_err_and(|e| e.contains("unlucky")), "{:?}", inline.0);
        assert_eq!(inline, outcomes(faulty.iterate(&device(), true)));
    }

    #[test]
    fn an_epoch_has_every_sample_once_and_the_next_another_order() {
        let loader = DataLoader::new(Numbers(10)).shuffle(3).batches(4).epochs(2);
        let all = hosts(&loader);
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 2, 4, 4, 2]);
        let epoch = |i: usize| all[3 * i..3 * i + 3].concat();
        for e in 0..2 {
            let mut sorted = epoch(e);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..10).collect::<Vec<_>>());
        }
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(all, hosts(&loader), "the seed alone determines the order");
        assert_ne!(all, hosts(&loader.shuffle(4)));
    }

    #[test]
    fn the_order_of_a_seed_never_changes() {
        // Checkpoints of earlier releases resume with the same batches.
        let all = hosts(&DataLoader::new(Numbers(10)).shuffle(42).batches(10));
        assert_eq!(all, [[0, 6, 9, 1, 5, 7, 8, 2, 4, 3]]);
    }

    #[test]
    fn without_a_seed_samples_are_in_order_and_drop_last_works() {
        let loader = DataLoader::new(Numbers(5)).batches(2);
        assert_eq!(hosts(&loader), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(hosts(&loader.drop_last()), [vec![0, 1], vec![2, 3]]);
    }

    #[test]
    fn the_last_cursor_and_random_offset_do_not_overflow() -> Result<()> {
        let last = LoaderCursor { epoch: u64::MAX, batch: u64::MAX };
        assert_eq!(last.advance(3), LoaderCursor { epoch: u64::MAX, batch: 0 });
        assert!(hosts(&DataLoader::new(Numbers(5)).batches(2).start_at(last)).is_empty());
        let device = Device::null(forebay_core::backend::null::CardProfile::default());
        device.set_random_state(forebay_core::device::RandomState { seed: 1, offset: u64::MAX });
        forebay_core::tensor::Tensor::rand([100], forebay_core::dtype::DType::F32, &device)?;
        assert!(device.random_state().offset < 100);
        Ok(())
    }

    #[test]
    fn a_cursor_continues_where_another_loader_stopped() -> Result<()> {
        let loader = DataLoader::new(Numbers(10)).shuffle(1).batches(3).epochs(3);
        let all = hosts(&loader);
        let mut batches = loader.prefetch(&device());
        for taken in 0..all.len() {
            assert_eq!(hosts(&loader.clone().start_at(batches.cursor())), all[taken..], "after {taken}");
            let (x, y) = batches.next().ok_or_else(|| Error::argument("test", "ended"))??;
            assert_eq!((x.shape()[0], y.shape()), (all[taken].len(), &[all[taken].len()][..]));
        }
        assert!(batches.next().is_none());
        assert_eq!(batches.cursor(), LoaderCursor { epoch: 3, batch: 0 });
        Ok(())
    }

    #[test]
    fn batches_are_tagged_as_input() -> Result<()> {
        let device = device();
        let mut batches = DataLoader::new(Numbers(8)).batches(8).prefetch(&device);
        let held = batches.next().transpose()?;
        assert!(device.memory().tag(Tag::Input).current >= 8 * (2 * 4 + 8));
        drop(held);
        assert_eq!(device.memory().tag(Tag::Input).current, 0);
        Ok(())
    }

    #[test]
    fn a_failing_or_panicking_data_set_ends_the_iteration_with_an_error() {
        for (first, message) in [(10, "unlucky"), (650, "a data set that panics")] {
            let loader = DataLoader::new(Numbers(700)).start_at(LoaderCursor { epoch: 0, batch: first });
            let mut batches = loader.prefetch(&device());
            let failure = batches.find_map(Result::err).map(|e| e.message()).unwrap_or_default();
            assert!(failure.contains(message), "{failure}");
            assert!(batches.next().is_none());
        }
    }

    /// Data set that panics, fails or changes its length at a chosen call.
    struct FaultyDataset {
        calls: std::sync::atomic::AtomicUsize,
        bad: fn(usize, &str) -> usize,
        shape: [usize; 1],
    }

    impl Dataset for FaultyDataset {
        type Input = f32;
        type Target = i64;
        fn len(&self) -> usize {
            (self.bad)(self.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed), "len")
        }
        fn input_shape(&self) -> &[usize] {
            (self.bad)(0, "input_shape");
            &self.shape
        }
        fn target_shape(&self) -> &[usize] {
            (self.bad)(0, "target_shape");
            &[]
        }
        fn get(&self, index: usize, _: &mut [f32], _: &mut [i64]) -> Result<()> {
            (self.bad)(index, "get");
            Ok(())
        }
    }

    #[test]
    fn errors_name_the_mistake_of_a_data_set() {
        type Length = fn(usize, &str) -> usize;
        let cases: [(Length, usize, &str); 7] = [
            (|_, at| if at == "len" { panic!("lost") } else { 4 }, 0, "`len` panicked: lost"),
            // The caller makes the first call. The loader's thread makes the others: at the start, and at the
            // second epoch.
            (|n, at| if at == "len" && n == 1 { panic!("lost") } else { 4 }, 0, "`len` panicked: lost"),
            (|n, at| if at == "len" && n == 2 { panic!("lost") } else { 4 }, 2, "`len` panicked: lost"),
            (|n, at| if at == "len" && n == 2 { 3 } else { 4 }, 2, "had 4 samples when the loop"),
            (|_, at| if at == "input_shape" { panic!("lost") } else { 4 }, 0, "`input_shape` panicked: lost"),
            (
                |_, at| if at == "target_shape" { panic!("lost") } else { 4 },
                0,
                "`target_shape` panicked: lost",
            ),
            (|n, at| if at == "get" && n == 3 { panic!("lost") } else { 4 }, 1, "`get` panicked: lost"),
        ];
        for (bad, good, message) in cases {
            let data = FaultyDataset { calls: Default::default(), bad, shape: [2] };
            let mut batches = data.batches(2).epochs(2).prefetch(&device());
            let mut all: Vec<_> = batches.by_ref().collect();
            let last = all.pop().and_then(Result::err).map(|e| e.message()).unwrap_or_default();
            assert!(last.contains(message), "{message}: {last}");
            assert!(all.len() == good && all.iter().all(Result::is_ok), "{message}: {} batches", all.len());
            assert!(batches.next().is_none(), "{message}");
        }
    }

    #[test]
    fn a_batch_that_the_host_cannot_hold_is_an_error() {
        let data = FaultyDataset { calls: Default::default(), bad: |_, _| 1 << 40, shape: [4] };
        let first = data.batches(1 << 40).prefetch(&device()).next();
        assert!(first.is_some_and(|b| b.is_err()));
    }

    #[test]
    fn any_cursor_is_handled_without_a_panic() {
        for (epoch, batch) in [(u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX - 1, 4)] {
            for epochs in [None, Some(3)] {
                let loader = DataLoader { epochs, ..DataLoader::new(Numbers(5)) }.shuffle(1);
                let loader = loader.start_at(LoaderCursor { epoch, batch });
                let taken = loader.prefetch(&device()).take(12).filter(Result::is_ok).count();
                // The batch past the end of epoch 0 is the first of epoch 1, of three.
                let expected = if epochs.is_none() { 12 } else { 10 * usize::from(epoch == 0) };
                assert_eq!(taken, expected, "{epoch} {batch} {epochs:?}");
            }
        }
    }

    #[test]
    fn invalid_sizes_are_errors() {
        let first = |loader: DataLoader<Numbers>| match loader.prefetch(&device()).next() {
            Some(Err(e)) => e.message(),
            other => format!("{other:?}"),
        };
        assert_eq!(
            first(DataLoader::new(Numbers(5)).batches(0)),
            "batches: a batch has at least one sample, not 0"
        );
        assert_eq!(
            first(DataLoader::new(Numbers(5)).batches(6).drop_last()),
            "batches: the data set has 5 samples, too few for one batch of 6"
        );
        assert_eq!(first(DataLoader::new(Numbers(0)).batches(6)), "None");
        assert!(first(DataLoader::new(Numbers(0)).forever()).contains("has 0 samples"));
        assert_eq!(
            first(DataLoader::new(Numbers(5_000_000_000)).batches(2).shuffle(1)),
            "shuffle: the data set has 5000000000 samples; at most 4294967295 are shuffled: take them in order"
        );
        let prefetch_factor = |n| first(DataLoader::new(Numbers(5)).prefetch_factor(n).forever());
        for n in [usize::MAX, 1 << 40, (1 << 16) + 1] {
            assert_eq!(
                prefetch_factor(n),
                format!("prefetch_factor: {n} batches are too many to wait on the host; take at most 65536")
            );
        }
        assert!(
            prefetch_factor(1 << 16).starts_with("Some(Ok(") && prefetch_factor(0).starts_with("Some(Ok(")
        );
        let whole = DataLoader::new(Numbers(5_000_000_000)).batches(usize::MAX);
        assert!(first(whole).ends_with("of shape [2] has more elements than a tensor can"));
    }

    #[test]
    fn a_loop_that_stops_early_ends_the_thread() {
        let mut batches = DataLoader::new(Numbers(12)).forever().prefetch(&device());
        assert!(batches.next().is_some_and(|b| b.is_ok()));
        drop(batches); // The test would hang here if the thread continued.
    }
}
