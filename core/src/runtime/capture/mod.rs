//! Captured steps as the runtime sees them: the recorder of commands, the plan of their memory, and the parameters that
//! change from one replay to the next.

pub(crate) mod plan;
pub(crate) mod recorder;
pub(crate) mod replay_params;
