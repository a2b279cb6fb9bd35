//! Runtime side of captured steps: the recorder of commands, the memory plan, and the parameters that change
//! from one replay to the next.

pub(crate) mod plan;
pub(crate) mod recorder;
pub(crate) mod replay_params;
