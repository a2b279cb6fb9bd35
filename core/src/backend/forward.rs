//! Forwarding of a backend's methods, for backends that wrap another one.

/// Implements methods of [`SegmentSource`](crate::backend::SegmentSource) or
/// [`Backend`](crate::backend::Backend) by the methods of the same names of `self.$to()`. The types of
/// [`backend`](crate::backend) and [`Result`](crate::error::Result) are in scope at the call.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_backend {
    ($to:ident: $($method:ident)+) => { $($crate::forward_backend!(@$method $to);)+ };
    (@fn $to:ident $method:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        fn $method(&self, $($arg: $ty),*) -> $out {
            self.$to().$method($($arg),*)
        }
    };
    (@limits $to:ident) => { $crate::forward_backend!(@fn $to limits() -> SourceLimits); };
    (@device_memory $to:ident) => { $crate::forward_backend!(@fn $to device_memory() -> DeviceMemory); };
    (@library_bytes $to:ident) => { $crate::forward_backend!(@fn $to library_bytes() -> u64); };
    (@is_device_memory $to:ident) => { $crate::forward_backend!(@fn $to is_device_memory() -> bool); };
    (@processes $to:ident) => { $crate::forward_backend!(@fn $to processes() -> Vec<DeviceProcess>); };
    (@alloc_segment $to:ident) => { $crate::forward_backend!(@fn $to alloc_segment(bytes: u64) -> Result<SegmentId, SourceError>); };
    (@free_segment $to:ident) => { $crate::forward_backend!(@fn $to free_segment(segment: SegmentId) -> Result<(), SourceError>); };
    (@reserve_addresses $to:ident) => { $crate::forward_backend!(@fn $to reserve_addresses(bytes: u64) -> Result<SegmentId, SourceError>); };
    (@free_addresses $to:ident) => { $crate::forward_backend!(@fn $to free_addresses(segment: SegmentId) -> Result<(), SourceError>); };
    (@unmap $to:ident) => { $crate::forward_backend!(@fn $to unmap(segment: SegmentId, offset: u64, pieces: &[u64]) -> Result<(), SourceError>); };
    (@remap $to:ident) => { $crate::forward_backend!(@fn $to remap(pieces: &[PageRemap]) -> Result<(), SourceError>); };
    (@remap_after_submitted $to:ident) => { $crate::forward_backend!(@fn $to remap_after_submitted(pieces: &[PageRemap]) -> Result<(), SourceError>); };
    (@map_again $to:ident) => { $crate::forward_backend!(@fn $to map_again(pieces: &[PageRemap]) -> Result<(), SourceError>); };
    (@unmap_again $to:ident) => { $crate::forward_backend!(@fn $to unmap_again(segment: SegmentId, pieces: &[u64]) -> Result<(), SourceError>); };
    (@has_deferred_work $to:ident) => { $crate::forward_backend!(@fn $to has_deferred_work() -> bool); };
    (@queue_count $to:ident) => { $crate::forward_backend!(@fn $to queue_count() -> u8); };
    (@record_event $to:ident) => { $crate::forward_backend!(@fn $to record_event(queue: u8) -> Result<Event, SourceError>); };
    (@wait_event $to:ident) => { $crate::forward_backend!(@fn $to wait_event(queue: u8, event: Event) -> Result<(), SourceError>); };
    (@record_fence $to:ident) => { $crate::forward_backend!(@fn $to record_fence() -> Result<Fence, SourceError>); };
    (@is_fence_signaled $to:ident) => { $crate::forward_backend!(@fn $to is_fence_signaled(fence: Fence) -> Result<bool, SourceError>); };
    (@wait_fence $to:ident) => { $crate::forward_backend!(@fn $to wait_fence(fence: Fence) -> Result<(), SourceError>); };
    (@info $to:ident) => { $crate::forward_backend!(@fn $to info() -> &DeviceInfo); };
    (@compile $to:ident) => { $crate::forward_backend!(@fn $to compile(source: &KernelSource<'_>) -> Result<KernelId>); };
    (@wait_compiled $to:ident) => { $crate::forward_backend!(@fn $to wait_compiled(kernel: KernelId) -> Result<()>); };
    (@enqueue $to:ident) => { $crate::forward_backend!(@fn $to enqueue(command: &Command<'_>) -> Result<bool>); };
    (@upload $to:ident) => { $crate::forward_backend!(@fn $to upload(dst: Slice, data: &[u8]) -> Result<()>); };
    (@download $to:ident) => { $crate::forward_backend!(@fn $to download(src: Slice, data: &mut [u8]) -> Result<()>); };
    (@start_download $to:ident) => { $crate::forward_backend!(@fn $to start_download(src: Slice) -> Result<Box<dyn PendingDownload>>); };
    (@as_any $to:ident) => { $crate::forward_backend!(@fn $to as_any() -> Option<&dyn std::any::Any>); };
    (@copy_from_peer $to:ident) => { $crate::forward_backend!(@fn $to copy_from_peer(dst: Slice, source: &dyn Backend, src: Slice) -> Result<$crate::backend::PeerCopy>); };
    (@flush $to:ident) => { $crate::forward_backend!(@fn $to flush() -> Result<()>); };
    (@record_timestamp $to:ident) => { $crate::forward_backend!(@fn $to record_timestamp() -> Result<Option<TimestampId>>); };
    (@read_timestamps $to:ident) => { $crate::forward_backend!(@fn $to read_timestamps() -> Result<Vec<f64>>); };
    (@supports_pinned_host $to:ident) => { $crate::forward_backend!(@fn $to supports_pinned_host() -> bool); };
    (@alloc_host $to:ident) => { $crate::forward_backend!(@fn $to alloc_host(bytes: u64) -> Result<SegmentId, SourceError>); };
    (@free_host $to:ident) => { $crate::forward_backend!(@fn $to free_host(segment: SegmentId) -> Result<(), SourceError>); };
    (@prepare_commands $to:ident) => { $crate::forward_backend!(@fn $to prepare_commands(commands: &[Command<'_>]) -> Result<Option<Box<dyn CommandSequence>>>); };
    (@foreign_access $to:ident) => { $crate::forward_backend!(@fn $to foreign_access() -> Option<&dyn $crate::backend::ForeignAccess>); };
    (@library_features $to:ident) => { $crate::forward_backend!(@fn $to library_features() -> LibraryFeatures); };
}
