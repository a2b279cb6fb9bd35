//! Parameters that are other ones at each run of a command: learning rates, counts of steps, random numbers.

use crate::ops::kernel::launch::KernelParams;
use crate::runtime::device::RandomState;

/// The run of a command that its parameters are made for.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplayCtx {
    /// The seed of the replay; `None` for a run that is no replay.
    seed: Option<u64>,
    /// Blocks of random numbers that were drawn from when the command was recorded to the replay.
    blocks_since_capture: u64,
}

impl ReplayCtx {
    /// A replay that begins at `now` of what was recorded from `then` on.
    pub(crate) fn for_replay(then: RandomState, now: RandomState) -> Self {
        Self { seed: Some(now.seed), blocks_since_capture: now.offset.wrapping_sub(then.offset) }
    }
}

/// Random numbers that were drawn. Only the run of a command tells where they stand, so that no command can keep those of
/// another run.
#[derive(Clone, Copy, Debug)]
pub struct PhiloxState(RandomState);

impl PhiloxState {
    pub(crate) fn new(state: RandomState) -> Self {
        Self(state)
    }

    /// The words of the offset and those of the seed, as kernels take them.
    pub(crate) fn to_words(self, now: &ReplayCtx) -> [u32; 4] {
        let offset = self.0.offset.wrapping_add(now.blocks_since_capture);
        let seed = now.seed.unwrap_or(self.0.seed);
        [offset as u32, (offset >> 32) as u32, seed as u32, (seed >> 32) as u32]
    }
}

/// Makes the parameters of a command, once for each of its runs.
pub(crate) type DynamicParams = Box<dyn Fn(&ReplayCtx) -> KernelParams + Send + Sync>;
