//! Error type of the crate. Every message says what was wrong, what was expected and, if possible, what to
//! do.

use std::fmt;

use thiserror::Error;

use crate::atomic_write::FileError;
use crate::dtype::{DType, UnknownDType};
use crate::environment::InvalidVariable;
use crate::memory::source::SourceError;
use crate::memory::{self, Bytes, MemoryGrowth, OutOfMemory};

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate. `Debug` formats the message as `Display` does, since Rust prints the error of
/// `fn main() -> Result<()>` by `Debug`.
#[derive(Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes do not match the rules of an operation.
    #[error("{op}: {rule}; got {}", join_shapes(shapes))]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Violated rule.
        rule: String,
        /// Shapes of the operands.
        shapes: Vec<Vec<usize>>,
    },
    /// A tensor cannot have the requested shape.
    #[error("{op}: {rule}; got {from:?} to {to:?}")]
    Reshape {
        /// Name of the operation.
        op: &'static str,
        /// Violated rule.
        rule: String,
        /// Shape of the tensor.
        from: Box<[usize]>,
        /// Requested extents, -1 where one is inferred.
        to: Box<[isize]>,
    },
    /// An operation does not support an element type.
    #[error("{op}: does not take {got}; {expected}")]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Unsupported type.
        got: DType,
        /// Supported types, and how to convert to one.
        expected: String,
    },
    /// An argument is invalid.
    #[error("{op}: {message}")]
    Argument {
        /// Name of the operation.
        op: &'static str,
        /// Fault and expected value.
        message: String,
    },
    /// Operands are on different devices.
    #[error("{op}: tensors are on {left} and {}", describe_other_device(left, right))]
    Device {
        /// Name of the operation.
        op: &'static str,
        /// First device.
        left: String,
        /// Second device.
        right: String,
    },
    /// The device does not support the operation.
    #[error("{op}: not on {device}: {reason}")]
    Unsupported {
        /// Name of the operation.
        op: &'static str,
        /// Name of the device.
        device: String,
        /// Missing capability, and an alternative.
        reason: String,
    },
    /// An operation without a gradient has an input that requires one.
    #[error(
        "{op}: has no gradient, but an input requires one; detach the input, or run it under `no_grad`, if none is wanted"
    )]
    NoGradient {
        /// Name of the operation.
        op: &'static str,
    },
    /// A second gradient was requested of an operation that is only once differentiable.
    #[error(
        "{op}: its gradient has no gradient of its own, and one was asked for (`create_graph`) of {operation}; compose it of \
         other operations, or detach what needs none"
    )]
    NoSecondGradient {
        /// Name of the operation.
        op: &'static str,
        /// Operation of the forward pass, with its module and call site.
        operation: String,
    },
    /// [`detect_anomaly`](crate::autograd::detect_anomaly) found a non-finite value.
    #[error("anomaly: {0}")]
    Anomaly(String),
    /// The operation cannot be part of a captured step.
    #[error("{op}: not in a captured step: {reason}")]
    Capture {
        /// Name of the operation.
        op: &'static str,
        /// Reason, and an alternative.
        reason: String,
    },
    /// The backward pass failed.
    #[error("backward: {0}")]
    Backward(String),
    /// The memory pool could not serve a request.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// Allocated memory grows from step to step.
    #[error(transparent)]
    MemoryGrowth(#[from] Box<MemoryGrowth>),
    /// A memory snapshot cannot be read.
    #[error("{0}")]
    Snapshot(String),
    /// No configuration of the step fits the memory budget.
    #[error(
        "no configuration of this step fits {} on {card}; the smallest budget that would do is {} ({needed} bytes): {choice}",
        Bytes(*budget), Bytes(*needed)
    )]
    BudgetTooSmall {
        /// Name of the card.
        card: String,
        /// Memory budget in bytes.
        budget: u64,
        /// Smallest sufficient budget in bytes.
        needed: u64,
        /// Configuration of the step for that budget.
        choice: String,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] SourceError),
    /// A device could not be opened.
    #[error("no device `{requested}`: {reason}")]
    NoDevice {
        /// Requested device.
        requested: String,
        /// Devices that were found, and missing components.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("kernel `{label}` does not compile: {message}")]
    KernelCompilation {
        /// Label of the kernel.
        label: String,
        /// Message of the compiler.
        message: String,
    },
    /// A file is damaged, or could not be read or written.
    #[error("{path}: {message}")]
    File {
        /// Path of the file.
        path: String,
        /// Fault of the file.
        message: String,
    },
    /// A configuration string is invalid.
    #[error("{0}")]
    InvalidConfig(String),
    /// An error of the program's own, from a data set, a loss function or a hook.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// Another error with its context, usually a module's path.
    #[error("in {context}: {error}")]
    Context {
        /// Module path or step.
        context: String,
        /// Underlying error, not reported as the source because the message includes it.
        error: Box<Error>,
    },
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Self {
        match error {
            memory::Error::OutOfMemory(report) => Self::OutOfMemory(report),
            memory::Error::MemoryGrowth(growth) => Self::MemoryGrowth(growth),
            memory::Error::Snapshot(message) => Self::Snapshot(message),
            memory::Error::Driver(error) => Self::Driver(error),
            memory::Error::File(error) => error.into(),
            memory::Error::InvalidConfig(message) => Self::InvalidConfig(message),
            memory::Error::Argument { op, message } => Self::Argument { op, message },
            // Blocks are moved by the device, whose errors are of this type.
            memory::Error::Move(error) => match error.downcast() {
                Ok(error) => *error,
                Err(other) => Self::argument("compact", other.to_string()),
            },
        }
    }
}

impl From<FileError> for Error {
    fn from(FileError { path, message }: FileError) -> Self {
        Self::File { path, message }
    }
}

impl From<UnknownDType> for Error {
    fn from(error: UnknownDType) -> Self {
        let UnknownDType { name, expected } = error;
        Self::argument("dtype", format!("`{name}` is not an element type; expected one of {expected}"))
    }
}

impl From<InvalidVariable> for Error {
    fn from(error: InvalidVariable) -> Self {
        Self::InvalidConfig(error.0)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Formats shapes as `[2, 3] and [4]`.
fn join_shapes(shapes: &[Vec<usize>]) -> String {
    shapes.iter().map(|s| format!("{s:?}")).collect::<Vec<_>>().join(" and ")
}

/// Describes the second device, which has the same name as the first if one device was opened twice.
fn describe_other_device(left: &str, right: &str) -> String {
    if left != right {
        return format!("{right}; move one with `to_device`");
    }
    format!(
        "on {right} that was opened again, which is another device with a pool of its own; open it once and clone the handle, \
         or move one with `to_device`"
    )
}

/// Returns an error from the function: `fail!(shape(op, [a, b]), "the rule")`, `fail!(argument(op), "the fault")`,
/// `fail!(dtype(op, got), "the types expected")`, `fail!(capture(op), "the reason")` or `fail!(backward, "the fault")`.
/// The text takes the arguments of `format!`.
#[doc(hidden)]
#[macro_export]
macro_rules! fail {
    (shape($op:expr, [$($t:expr),+]), $($rule:tt)+) => {
        return Err($crate::error::Error::shape($op, format!($($rule)+), &[$($t.shape()),+]))
    };
    (shape($op:expr, $shapes:expr), $($rule:tt)+) => {
        return Err($crate::error::Error::shape($op, format!($($rule)+), $shapes))
    };
    (argument($op:expr), $($message:tt)+) => {
        return Err($crate::error::Error::argument($op, format!($($message)+)))
    };
    (dtype($op:expr, $got:expr), $($expected:tt)+) => {
        return Err($crate::error::Error::dtype($op, $got, format!($($expected)+)))
    };
    (file($path:expr), $($message:tt)+) => {
        return Err($crate::error::Error::file($path, format!($($message)+)))
    };
    (capture($op:expr), $($reason:tt)+) => {
        return Err($crate::error::Error::Capture { op: $op, reason: format!($($reason)+) })
    };
    (backward, $($message:tt)+) => {
        return Err($crate::error::Error::Backward(format!($($message)+)))
    };
}
pub(crate) use fail;

/// Returns an error from the function if a condition holds: `fail_if!(a.rank() != 2; shape(op, [a]), "a matrix")`.
#[doc(hidden)]
#[macro_export]
macro_rules! fail_if {
    ($condition:expr; $($error:tt)+) => {
        if $condition {
            $crate::fail!($($error)+);
        }
    };
}
pub(crate) use fail_if;

impl Error {
    /// Creates a shape error; the message ends with the shapes, as in `[2, 3] and [4]`.
    pub fn shape(op: &'static str, rule: impl Into<String>, shapes: &[&[usize]]) -> Self {
        Self::Shape { op, rule: rule.into(), shapes: shapes.iter().map(|s| s.to_vec()).collect() }
    }

    /// Creates an argument error.
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into() }
    }

    /// Creates an error about a file; `message` continues the sentence that begins with the path.
    pub fn file(path: impl AsRef<std::path::Path>, message: impl Into<String>) -> Self {
        FileError::new(path, message).into()
    }

    /// Creates an error of the program's own: for a [`Result`] of a data set, a loss function or a hook.
    ///
    /// ```
    /// # use forebay_core::error::{Error, Result};
    /// fn read_sample(path: &str) -> Result<Vec<u8>> {
    ///     let bytes = std::fs::read(path).map_err(Error::other)?;
    ///     if bytes.is_empty() { Err(Error::other(format!("{path} has no pixels"))) } else { Ok(bytes) }
    /// }
    /// let error = read_sample("missing.png").unwrap_err().with_context("sample 3");
    /// assert!(error.downcast_ref::<std::io::Error>().is_some());
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Returns the error passed to [`other`](Self::other), also from within a context, if it has this type.
    #[must_use]
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Other(error) => error.downcast_ref(),
            Self::Context { error, .. } => error.downcast_ref(),
            _ => None,
        }
    }

    /// Returns the out-of-memory report, also from within a context.
    ///
    /// # Errors
    /// Returns any other error unchanged.
    pub fn into_out_of_memory(self) -> Result<Box<OutOfMemory>> {
        match self {
            Self::OutOfMemory(report) => Ok(report),
            Self::Context { context, error } => {
                error.into_out_of_memory().map_err(|e| e.with_context(context))
            }
            other => Err(other),
        }
    }

    /// Creates a dtype error.
    pub fn dtype(op: &'static str, got: DType, expected: impl Into<String>) -> Self {
        Self::DType { op, got, expected: expected.into() }
    }

    /// Adds context to the error.
    #[must_use]
    pub fn with_context(self, context: impl Into<String>) -> Self {
        Self::Context { context: context.into(), error: Box::new(self) }
    }

    /// Reports whether this error, or the error in its context, is an out-of-memory error.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Context { error, .. } => error.is_out_of_memory(),
            _ => false,
        }
    }
}
