//! Error type of the crate. Every message says what was wrong, what was expected and, if possible, what to
//! do.

use std::fmt;

use thiserror::Error;

use crate::atomic_write::FileError;
use crate::dtype::{DType, UnknownDType};
use crate::environment::InvalidVariable;
use crate::memory::scope::{self, CallSite};
use crate::memory::source::SourceError;
use crate::memory::{self, Bytes, MemoryGrowth, OutOfMemory};
use crate::printable::printable;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate. `Display` writes the message, and on a second line the call that failed:
/// [`message`](Self::message) and [`location`](Self::location). `Debug` formats as `Display` does, since Rust prints
/// the error of `fn main() -> Result<()>` by `Debug`.
#[derive(Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes do not match the rules of an operation.
    #[error("{op}: {rule}; got {}{}", join_shapes(shapes), AtLine(*location))]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Violated rule.
        rule: String,
        /// Shapes of the operands.
        shapes: Vec<Vec<usize>>,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// A tensor cannot have the requested shape.
    #[error("{op}: {rule}; got {from:?} to {to:?}{}", AtLine(*location))]
    Reshape {
        /// Name of the operation.
        op: &'static str,
        /// Violated rule.
        rule: String,
        /// Shape of the tensor.
        from: Box<[usize]>,
        /// Requested extents, -1 where one is inferred.
        to: Box<[isize]>,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// An operation does not support an element type.
    #[error("{op}: does not take {got}; {expected}{}", AtLine(*location))]
    DType {
        /// Name of the operation.
        op: &'static str,
        /// Unsupported type.
        got: DType,
        /// Supported types, and how to convert to one.
        expected: String,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// An argument is invalid.
    #[error("{op}: {message}{}", AtLine(*location))]
    Argument {
        /// Name of the operation.
        op: &'static str,
        /// Fault and expected value.
        message: String,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// Operands are on different devices.
    #[error("{op}: tensors are on {left} and {}{}", describe_other_device(left, right), AtLine(*location))]
    Device {
        /// Name of the operation.
        op: &'static str,
        /// First device.
        left: String,
        /// Second device.
        right: String,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// The device does not support the operation.
    #[error("{op}: not on {device}: {reason}{}", AtLine(*location))]
    Unsupported {
        /// Name of the operation.
        op: &'static str,
        /// Name of the device.
        device: String,
        /// Missing capability, and an alternative.
        reason: String,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// An operation without a gradient has an input that requires one.
    #[error(
        "{op}: has no gradient, but an input requires one; detach the input, or run it under `no_grad`, if none is wanted{}",
        AtLine(*location)
    )]
    NoGradient {
        /// Name of the operation.
        op: &'static str,
        /// Line of the program that called the operation.
        location: CallSite,
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
    #[error("{op}: not in a captured step: {reason}{}", AtLine(*location))]
    Capture {
        /// Name of the operation.
        op: &'static str,
        /// Reason, and an alternative.
        reason: String,
        /// Line of the program that called the operation.
        location: CallSite,
    },
    /// The backward pass failed.
    #[error("backward: {message}{}", AtLine(*location))]
    Backward {
        /// Fault, and what to do.
        message: String,
        /// Line of the program that called the backward pass.
        location: CallSite,
    },
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
    #[track_caller]
    fn from(error: memory::Error) -> Self {
        match error {
            memory::Error::OutOfMemory(report) => Self::OutOfMemory(report),
            memory::Error::MemoryGrowth(growth) => Self::MemoryGrowth(growth),
            memory::Error::Snapshot(message) => Self::Snapshot(message),
            memory::Error::Driver(error) => Self::Driver(error),
            memory::Error::File(error) => error.into(),
            memory::Error::InvalidConfig(message) => Self::InvalidConfig(message),
            memory::Error::Argument { op, message } => Self::argument(op, message),
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
    #[track_caller]
    fn from(error: UnknownDType) -> Self {
        let UnknownDType { name, expected } = error;
        let name = printable(&name);
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

/// Second line of a message, which names the call; nothing if the line is unknown.
struct AtLine(CallSite);

impl fmt::Display for AtLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, "\n  at: {}:{}", line.file(), line.line()))
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
        return Err($crate::error::Error::capture($op, format!($($reason)+)))
    };
    (backward, $($message:tt)+) => {
        return Err($crate::error::Error::backward(format!($($message)+)))
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
    #[track_caller]
    pub fn shape(op: &'static str, rule: impl Into<String>, shapes: &[&[usize]]) -> Self {
        let shapes = shapes.iter().map(|s| s.to_vec()).collect();
        Self::Shape { op, rule: rule.into(), shapes, location: scope::call_site() }
    }

    /// Creates an argument error. Like the other constructors, it records the line that called the running operation,
    /// or outside of one the line of its own caller.
    #[track_caller]
    pub fn argument(op: &'static str, message: impl Into<String>) -> Self {
        Self::Argument { op, message: message.into(), location: scope::call_site() }
    }

    /// Creates an error about a file; `message` continues the sentence that begins with the path.
    pub fn file(path: impl AsRef<std::path::Path>, message: impl AsRef<str>) -> Self {
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
            Self::Other(error) => {
                let nested = || error.downcast_ref::<Self>()?.downcast_ref();
                error.downcast_ref().or_else(nested)
            }
            Self::Context { error, .. } => error.downcast_ref(),
            _ => None,
        }
    }

    /// Returns the out-of-memory report of this error, of the error in its context, or of a source of an error of the
    /// program's own.
    ///
    /// # Errors
    /// Returns any other error unchanged.
    pub fn into_out_of_memory(self) -> Result<Box<OutOfMemory>> {
        match self {
            Self::OutOfMemory(report) => Ok(report),
            other => other.find_out_of_memory().cloned().map(Box::new).ok_or(other),
        }
    }

    fn find_out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Self::OutOfMemory(report) => Some(report),
            Self::Context { error, .. } => error.find_out_of_memory(),
            Self::Other(error) => find_source_out_of_memory(error.as_ref()),
            _ => None,
        }
    }

    /// Creates a dtype error.
    #[track_caller]
    pub fn dtype(op: &'static str, got: DType, expected: impl Into<String>) -> Self {
        Self::DType { op, got, expected: expected.into(), location: scope::call_site() }
    }

    /// Creates an error about operands of different devices.
    #[track_caller]
    pub(crate) fn device(op: &'static str, left: impl fmt::Display, right: impl fmt::Display) -> Self {
        Self::Device { op, left: left.to_string(), right: right.to_string(), location: scope::call_site() }
    }

    /// Creates an error of an operation without a gradient.
    #[track_caller]
    pub(crate) fn no_gradient(op: &'static str) -> Self {
        Self::NoGradient { op, location: scope::call_site() }
    }

    /// Creates an error about a capability that the device lacks.
    #[doc(hidden)]
    #[track_caller]
    pub fn unsupported(op: &'static str, device: impl fmt::Display, reason: impl Into<String>) -> Self {
        Self::Unsupported {
            op,
            device: device.to_string(),
            reason: reason.into(),
            location: scope::call_site(),
        }
    }

    /// Creates an error of an operation that cannot be part of a captured step.
    #[doc(hidden)]
    #[track_caller]
    pub fn capture(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Capture { op, reason: reason.into(), location: scope::call_site() }
    }

    /// Creates an error of a backward pass.
    #[track_caller]
    pub fn backward(message: impl Into<String>) -> Self {
        Self::Backward { message: message.into(), location: scope::call_site() }
    }

    /// Returns the line of the program that called the failed operation, where one is known. `Display` ends with it.
    ///
    /// ```
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros([2, 3], DType::F32, &device)?;
    /// let (error, line) = (x.mm(&x).unwrap_err(), line!());
    /// assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)));
    /// assert_eq!(error.to_string(), format!("{}\n  at: {}:{line}", error.message(), file!()));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    #[must_use]
    pub fn location(&self) -> CallSite {
        match self {
            Self::Shape { location, .. }
            | Self::Reshape { location, .. }
            | Self::DType { location, .. }
            | Self::Argument { location, .. }
            | Self::Device { location, .. }
            | Self::Unsupported { location, .. }
            | Self::NoGradient { location, .. }
            | Self::Capture { location, .. }
            | Self::Backward { location, .. } => *location,
            Self::OutOfMemory(report) => report.site,
            Self::Context { error, .. } => error.location(),
            _ => None,
        }
    }

    /// Returns the message without the line of the call, for a reader who has no source.
    #[must_use]
    pub fn message(&self) -> String {
        let mut text = self.to_string();
        // The report of a full device has the line among its own.
        if let Some(start) = text.strip_suffix(&AtLine(self.location()).to_string()) {
            text.truncate(start.len());
        }
        text
    }

    /// Creates the error of an operation that takes integers only: `rule` says what they are. For a float, the error
    /// says where it may come from, because PyTorch's type promotion makes it of an integer tensor and a float scalar.
    #[track_caller]
    pub(crate) fn not_integers(op: &'static str, got: DType, rule: &str) -> Self {
        let origin = "; an integer tensor and a float scalar give a float, so write `remainder(10)`, not \
                      `remainder(10.0)`, for integers";
        let origin = if got.is_float() { origin } else { "" };
        Self::dtype(op, got, format!("{rule}; cast with `to_dtype`{origin}"))
    }

    /// Names the operation `op` in place of one that it called. Errors that name none are unchanged.
    #[doc(hidden)]
    #[must_use]
    pub fn with_op(mut self, op: &'static str) -> Self {
        let mut innermost = &mut self;
        while let Self::Context { error, .. } = innermost {
            innermost = &mut **error;
        }
        match innermost {
            Self::Shape { op: inner, .. }
            | Self::Reshape { op: inner, .. }
            | Self::DType { op: inner, .. }
            | Self::Argument { op: inner, .. }
            | Self::Device { op: inner, .. }
            | Self::Unsupported { op: inner, .. }
            | Self::NoGradient { op: inner, .. }
            | Self::Capture { op: inner, .. } => *inner = op,
            Self::OutOfMemory(report) => report.op = op,
            _ => {}
        }
        self
    }

    /// Names the line that called `op`, in an error of `op` itself, which may be found by code that does not know the
    /// line. An error of another operation, such as one whose gradient failed in `backward`, keeps its line.
    #[doc(hidden)]
    #[must_use]
    pub fn with_call_of(mut self, op: &str, call: CallSite) -> Self {
        let mut innermost = &mut self;
        while let Self::Context { error, .. } = innermost {
            innermost = &mut **error;
        }
        match innermost {
            Self::Backward { location, .. } if op == "backward" => *location = call,
            Self::Shape { op: of, location, .. }
            | Self::DType { op: of, location, .. }
            | Self::Argument { op: of, location, .. }
            | Self::Device { op: of, location, .. }
                if *of == op =>
            {
                *location = call;
            }
            _ => {}
        }
        self
    }

    /// Adds context to the error, such as a name from a file.
    #[must_use]
    pub fn with_context(self, context: impl Into<String>) -> Self {
        let context = printable(&context.into()).into_owned();
        Self::Context { context, error: Box::new(self) }
    }

    /// Reports whether this error has an out-of-memory report: see [`into_out_of_memory`](Self::into_out_of_memory).
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.find_out_of_memory().is_some()
    }
}

/// Searches an error of the program and its sources. A box, an `Arc` and an I/O error report only the sources of the
/// error that they hold, so they are looked into.
fn find_source_out_of_memory<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a OutOfMemory> {
    let mut sources = std::iter::successors(Some(error), |error| error.source());
    sources.find_map(|source| {
        if let Some(held) = source.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            return find_source_out_of_memory(held);
        }
        let error: Option<&'a Error> = (source.downcast_ref::<Error>())
            .or_else(|| source.downcast_ref::<Box<Error>>().map(AsRef::as_ref))
            .or_else(|| source.downcast_ref::<std::sync::Arc<Error>>().map(AsRef::as_ref));
        match (error, source.downcast_ref::<memory::Error>()) {
            (Some(error), _) => error.find_out_of_memory(),
            (None, Some(memory::Error::OutOfMemory(report))) => Some(report),
            _ => source.downcast_ref::<OutOfMemory>(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::runtime::device::Device;
    use crate::tensor::Tensor;

    /// An error of a program that has another one as its source.
    #[derive(Debug, Error)]
    #[error("batch 3")]
    struct BatchError(#[source] Box<dyn std::error::Error + Send + Sync>);

    fn full_device() -> Error {
        let device = Device::null(Default::default());
        device.pool().set_limit(Some(1 << 20));
        Tensor::zeros(1 << 30, DType::F32, &device).unwrap_err()
    }

    #[test]
    fn out_of_memory_is_found_in_errors_of_the_program() {
        let report = || full_device().into_out_of_memory().unwrap();
        for error in [
            full_device(),
            full_device().with_context("step 1"),
            Error::other(full_device()),
            Error::other(full_device().with_context("fc1")).with_context("step 1"),
            Error::other(Error::other(full_device())),
            Error::other(Box::new(full_device())),
            Error::other(std::sync::Arc::new(full_device())),
            Error::other(*report()),
            Error::other(memory::Error::OutOfMemory(report())),
            Error::other(BatchError(Box::new(full_device()))),
            Error::other(BatchError(Box::new(BatchError(Box::new(Error::other(*report())))))),
            Error::other(std::io::Error::other(full_device())),
        ] {
            assert!(error.is_out_of_memory(), "{error}");
            assert_eq!(error.into_out_of_memory().unwrap().requested, 4 << 30);
        }
    }

    #[test]
    fn other_errors_are_no_out_of_memory_and_stay_as_they_are() {
        let io = || std::io::Error::other("a disk");
        for error in
            [Error::argument("add", "x"), Error::other("text"), Error::other(BatchError(Box::new(io())))]
        {
            let text = error.to_string();
            assert!(!error.is_out_of_memory(), "{text}");
            assert_eq!(error.into_out_of_memory().unwrap_err().to_string(), text);
        }
        let nested = Error::other(Error::other(io()).with_context("sample 3"));
        assert!(nested.downcast_ref::<std::io::Error>().is_some());
        assert!(nested.downcast_ref::<BatchError>().is_none());
    }

    #[test]
    fn the_name_of_an_operation_is_replaced_within_contexts() {
        let error = Error::argument("cat", "no tensors").with_context("fc1").with_op("stack");
        assert_eq!(error.message(), "in fc1: stack: no tensors");
        assert_eq!(Error::backward("x").with_op("stack").message(), "backward: x");
        assert!(full_device().with_op("eye").to_string().contains("eye asked for"));
    }
}
