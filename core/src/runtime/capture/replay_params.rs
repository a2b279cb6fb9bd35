//! Parameters that change from one replay to the next: learning rates, step counts, random state.

use crate::runtime::device::RandomState;
use crate::runtime::kernel_params::KernelParams;

/// Replay for which parameters are computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplayCtx {
    /// Seed of the replay; `None` for an eager run.
    seed: Option<u64>,
    /// Number of random blocks drawn between the recording of the command and the replay.
    blocks_since_capture: u64,
}

impl ReplayCtx {
    /// Creates the context of a replay with random state `now`, for a recording that began at `then`.
    pub(crate) fn for_replay(then: RandomState, now: RandomState) -> Self {
        Self { seed: Some(now.seed), blocks_since_capture: now.offset.wrapping_sub(then.offset) }
    }
}

/// Random blocks that were drawn. Their position is resolved only with a [`ReplayCtx`], so that no command
/// can reuse the values of another run.
#[derive(Clone, Copy, Debug)]
pub struct PhiloxState(RandomState);

impl PhiloxState {
    pub(crate) fn new(state: RandomState) -> Self {
        Self(state)
    }

    /// Returns the words of the offset and of the seed, as kernels expect them.
    pub(crate) fn to_words(self, now: &ReplayCtx) -> [u32; 4] {
        let offset = self.0.offset.wrapping_add(now.blocks_since_capture);
        let seed = now.seed.unwrap_or(self.0.seed);
        [offset as u32, (offset >> 32) as u32, seed as u32, (seed >> 32) as u32]
    }

    /// Returns the words of [`to_words`](Self::to_words) as two fields.
    pub(crate) fn offset_and_seed(self, now: &ReplayCtx) -> ([u32; 2], [u32; 2]) {
        let [a, b, c, d] = self.to_words(now);
        ([a, b], [c, d])
    }
}

/// Function that computes a command's parameters for each run.
pub(crate) type DynamicParams = Box<dyn Fn(&ReplayCtx) -> KernelParams + Send + Sync>;
