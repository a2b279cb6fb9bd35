//! Knowing before running: what a step takes, and how to make it fit.
//!
//! - [`dry_run`] runs a step on the null device, through the real pool: its peak is the real one.
//! - [`Budget`] finds the fastest way to run a step within given bytes; [`segment`] marks what it may compute twice, or
//!   copy to the host meanwhile.
//! - [`CardProfile::from_card`](forebay_core::backend::null::CardProfile::card) says what real cards are, without one.
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
mod segment;

pub use budget::{Budget, Estimate, StepConfig, StepPlan};
pub use dry_run::{DryRun, MemoryPeak, dry_run};
pub use forebay_core::backend::cards::CARDS;
pub(crate) use segment::is_segment_pass_active;
pub use segment::{ActivationPolicy, SegmentGuard, segment};
