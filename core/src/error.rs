//! The one error type. Every message names what was wrong, what was expected and, where it can, what to do.

use thiserror::Error;

use crate::dtype::DType;
use crate::memory::source::SourceError;
use crate::memory::{Bytes, MemoryGrowth, OutOfMemory};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not fit an operation.
    #[error("{op}: {rule}; got {shapes}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The rule that was broken.
        rule: String,
        /// The shapes, written out.
        shapes: String,
    },
    /// An element type that an operation does not take.
    #[error("{op}: does not take {got}; {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The type that was given.
        got: DType,
        /// What it takes, and how to get there.
        expected: String,
    },
    /// An argument out of its range.
    #[error("{op}: {message}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What was wrong and what was expected.
        message: String,
    },
    /// Tensors of different devices met.
    #[error("{op}: tensors are on {left} and {}", describe_other_device(left, right))]
    Device {
        /// The operation.
        op: &'static str,
        /// One device.
        left: String,
        /// The other.
        right: String,
    },
    /// The device cannot do this.
    #[error("{op}: not on {device}: {reason}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
        /// What it lacks, and what to do instead.
        reason: String,
    },
    /// An operation without a gradient met an input that requires one.
    #[error(
        "{op}: has no gradient, but an input requires one; detach the input, or run it under `no_grad`, if none is wanted"
    )]
    NoGradient {
        /// The operation.
        op: &'static str,
    },
    /// A gradient of gradients came to an operation whose gradient has none.
    #[error(
        "{op}: its gradient has no gradient of its own, and one was asked for (`create_graph`) of {place}; compose it of \
         other operations, or detach what needs none"
    )]
    NoSecondGradient {
        /// The operation.
        op: &'static str,
        /// The operation of the forward pass, its module, and the line that asked for it.
        place: String,
    },
    /// [`detect_anomaly`](crate::autograd::detect_anomaly) has found what it looks for.
    #[error("anomaly: {0}")]
    Anomaly(String),
    /// What cannot be part of a captured step.
    #[error("{op}: not in a captured step: {reason}")]
    Capture {
        /// The operation.
        op: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// `backward` could not run.
    #[error("backward: {0}")]
    Backward(String),
    /// The memory pool could not serve a request.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// Steps left memory behind.
    #[error(transparent)]
    MemoryGrowth(#[from] Box<MemoryGrowth>),
    /// A snapshot of memory that cannot be read.
    #[error("{0}")]
    Snapshot(String),
    /// No way to run a step fits the bytes that were given.
    #[error(
        "no way to run this step fits {} on {card}; the smallest budget that would do is {} ({needed} bytes): {choice}",
        Bytes(*budget), Bytes(*needed)
    )]
    BudgetTooSmall {
        /// The card's name.
        card: String,
        /// The bytes that were given.
        budget: u64,
        /// The bytes that would do.
        needed: u64,
        /// The way to run the step then.
        choice: String,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] SourceError),
    /// A device that could not be opened.
    #[error("no device `{requested}`: {reason}")]
    NoDevice {
        /// What was asked for.
        requested: String,
        /// What was found instead, and what is missing.
        reason: String,
    },
    /// A kernel that does not compile.
    #[error("kernel `{label}` does not compile: {message}")]
    KernelCompilation {
        /// The kernel.
        label: String,
        /// The compiler's message.
        message: String,
    },
    /// A file that could not be read or written, or is damaged.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: String,
        /// What was wrong with it.
        message: String,
    },
    /// A configuration string that could not be understood.
    #[error("{0}")]
    InvalidConfig(String),
    /// Another error, with where it happened in front of it: a module's path, usually.
    #[error("in {place}: {error}")]
    Context {
        /// The module path or the step.
        place: String,
        /// The error: a part of the message, so it is not named again as its source.
        error: Box<Error>,
    },
}

/// What is said of the second device, which has the name of the first where it was opened twice.
fn describe_other_device(left: &str, right: &str) -> String {
    if left != right {
        return format!("{right}; move one with `to_device`");
    }
    format!(
        "on {right} that was opened again, which is another device with a pool of its own; open it once and clone the handle, \
         or move one with `to_device`"
    )
}

impl Error {
    /// A shape error; `shapes` are written as `[2, 3] and [4]`.
    pub fn shape(op: &'static str, rule: impl Into<String>, shapes: &[&[usize]]) -> Self {
        let shapes = shapes.iter().map(|s| format!("{s:?}")).collect::<Vec<_>>().join(" and ");
        Self::Shape { op, rule: rule.into(), shapes }
    }

    /// An argument error.
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into() }
    }

    /// An error about a file; `message` continues the sentence that begins with the path.
    pub fn file(path: impl AsRef<std::path::Path>, message: impl Into<String>) -> Self {
        Self::File { path: path.as_ref().display().to_string(), message: message.into() }
    }

    /// Returns the report of an out-of-memory error, also from within [`Error::Context`].
    ///
    /// # Errors
    /// The error itself, if it is another one.
    pub fn into_out_of_memory(self) -> Result<Box<OutOfMemory>> {
        if !self.is_out_of_memory() {
            return Err(self);
        }
        match self {
            Self::OutOfMemory(report) => Ok(report),
            Self::Context { error, .. } => error.into_out_of_memory(),
            other => Err(other),
        }
    }

    /// A dtype error.
    pub fn dtype(op: &'static str, got: DType, expected: impl Into<String>) -> Self {
        Self::DType { op, got, expected: expected.into() }
    }

    /// Puts a place in front of the error.
    #[must_use]
    pub fn with_context(self, place: impl Into<String>) -> Self {
        Self::Context { place: place.into(), error: Box::new(self) }
    }

    /// Whether memory ran out, here or in a place below.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Context { error, .. } => error.is_out_of_memory(),
            _ => false,
        }
    }
}
