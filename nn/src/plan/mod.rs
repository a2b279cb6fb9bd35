//! Planning before running: the memory and time that a step needs, and configurations that fit a budget.
//!
//! - [`dry_run`] runs a step on the null device, through the real pool, so its peak is exact.
//! - [`Budget`] finds the fastest configuration of a step within a memory budget. [`segment`] marks parts
//!   that the plan may recompute or offload.
//! - [`CardProfile::from_card`](forebay_core::backend::null::CardProfile::from_card) returns profiles of real cards,
//!   without the hardware.
//!
//! ```
//! use forebay_core::backend::null::CardProfile;
//! use forebay_nn::nn::{Linear, Module};
//! use forebay_nn::optim::{AdamW, Optimizer};
//! use forebay_nn::plan::dry_run;
//! use forebay_core::{dtype::DType, tensor::Tensor};
//!
//! let run = dry_run(&CardProfile::from_card("rtx4090")?, |device| {
//!     let net = Linear::new(46_000, 46_000, device)?;
//!     let mut optimizer = AdamW::new(net.parameters(), 1e-3);
//!     net.forward(&Tensor::zeros(&[8, 46_000], DType::F32, device)?)?.mean_all()?.backward()?;
//!     optimizer.step()
//! })?;
//! assert!(run.out_of_memory.is_some(), "8.5 GB of weights four times: with gradients and two moments");
//! println!("{run}");
//! # Ok::<(), forebay_core::error::Error>(())
//! ```

mod budget;
mod dry_run;

pub use crate::nn::segment::{ActivationPolicy, SegmentGuard, segment};
pub use budget::{Budget, Estimate, StepConfig, StepPlan};
pub use dry_run::{DryRun, MemoryPeak, dry_run};
pub use forebay_core::backend::cards::CARDS;
