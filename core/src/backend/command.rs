//! What a queue is told to do, as a value: run now, or kept and run again.

use super::{
    AttentionCall, AttentionGradients, AttentionOperand, Backend, Epilogue, KernelId, Launch, MatmulCall,
    MatrixOperand, SegmentId, Slice,
};
use crate::error::Result;

/// One piece of work on the device.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// A kernel.
    Launch(Launch<'a>),
    /// A copy on the device.
    Copy {
        /// To here.
        dst: Slice,
        /// From here.
        src: Slice,
    },
    /// Setting every 32-bit word.
    Fill {
        /// Where.
        dst: Slice,
        /// To what.
        word: u32,
    },
    /// A product of the vendor's library.
    Matmul(&'a MatmulCall),
    /// Attention by the backend's own kernels.
    Attention(&'a AttentionCall),
}

impl Command<'_> {
    /// Enqueues it; `false` if it is a library's, and the backend declines it.
    #[inline]
    pub fn enqueue(&self, backend: &dyn Backend) -> Result<bool> {
        match self {
            Self::Launch(launch) => backend.launch(launch).map(|()| true),
            Self::Copy { dst, src } => backend.copy(*dst, *src).map(|()| true),
            Self::Fill { dst, word } => backend.fill(*dst, *word).map(|()| true),
            Self::Matmul(call) => backend.matmul(call),
            Self::Attention(call) => backend.attention(call),
        }
    }
}

/// A [`Command`] with all that it names.
#[derive(Debug)]
pub enum Owned {
    /// A kernel.
    Launch {
        /// Which.
        kernel: KernelId,
        /// What it binds.
        bindings: Box<[Slice]>,
        /// Its parameters.
        params: Vec<u8>,
        /// Workgroups.
        groups: [u32; 3],
    },
    /// A copy on the device.
    Copy {
        /// To here.
        dst: Slice,
        /// From here.
        src: Slice,
    },
    /// Setting every 32-bit word.
    Fill {
        /// Where.
        dst: Slice,
        /// To what.
        word: u32,
    },
    /// A product of the vendor's library.
    Matmul(Box<MatmulCall>),
    /// Attention by the backend's own kernels.
    Attention(Box<AttentionCall>),
}

impl Owned {
    /// The same command, to keep.
    #[must_use]
    pub fn new(command: &Command<'_>) -> Self {
        match *command {
            Command::Launch(Launch { kernel, bindings, params, groups }) => {
                Self::Launch { kernel, bindings: bindings.into(), params: params.into(), groups }
            }
            Command::Copy { dst, src } => Self::Copy { dst, src },
            Command::Fill { dst, word } => Self::Fill { dst, word },
            Command::Matmul(call) => Self::Matmul(Box::new(*call)),
            Command::Attention(call) => Self::Attention(Box::new(*call)),
        }
    }

    /// The command, to give.
    #[must_use]
    pub fn command(&self) -> Command<'_> {
        match self {
            Self::Launch { kernel, bindings, params, groups } => {
                Command::Launch(Launch { kernel: *kernel, bindings, params, groups: *groups })
            }
            Self::Copy { dst, src } => Command::Copy { dst: *dst, src: *src },
            Self::Fill { dst, word } => Command::Fill { dst: *dst, word: *word },
            Self::Matmul(call) => Command::Matmul(call),
            Self::Attention(call) => Command::Attention(call),
        }
    }

    /// Calls `visit` with each place that it names. `written` are the bindings that a kernel writes.
    pub(crate) fn places(&mut self, written: u32, mut visit: impl FnMut(Place<'_>, Touch)) {
        let mut slice = |slice: &mut Slice, touch| visit((&mut slice.segment, &mut slice.offset), touch);
        match self {
            Self::Launch { bindings, .. } => {
                for (at, binding) in bindings.iter_mut().enumerate() {
                    let writes = written.checked_shr(at as u32).unwrap_or(1) & 1 == 1;
                    slice(binding, if writes { Touch::Write } else { Touch::Read });
                }
            }
            Self::Copy { dst, src } => {
                slice(src, Touch::Read);
                slice(dst, Touch::Write);
            }
            Self::Fill { dst, .. } => slice(dst, Touch::Write),
            Self::Matmul(call) => of_product(call, visit),
            Self::Attention(call) => of_heads(call, visit),
        }
    }
}

/// Commands in a form that is quicker to enqueue than one by one: a graph of the driver, or looked up and bound ahead.
pub trait Prepared: Send {
    /// Changes the parameters of a launch, by its place among the commands, for the runs that follow. As many bytes as before.
    fn set_params(&mut self, at: usize, params: &[u8]) -> Result<()>;
    /// Enqueues all commands, in order, on the queue they were prepared for.
    fn enqueue(&mut self) -> Result<()>;
    /// Whether the driver runs them as one graph.
    fn is_graph(&self) -> bool;
}

/// Whether memory is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Read,
    Write,
}

/// A place in memory that is named by a command, to look at or to change.
pub(crate) type Place<'a> = (&'a mut SegmentId, &'a mut u64);

fn of_slice(slice: &mut Slice) -> Place<'_> {
    (&mut slice.segment, &mut slice.offset)
}

fn of_matrix(operand: &mut MatrixOperand) -> Place<'_> {
    (&mut operand.segment, &mut operand.offset)
}

fn of_attention(operand: &mut AttentionOperand) -> Place<'_> {
    (&mut operand.segment, &mut operand.offset)
}

/// Calls `visit` with each operand of a product, and whether it is written. What is added to is read as well.
fn of_product(call: &mut MatmulCall, mut visit: impl FnMut(Place<'_>, Touch)) {
    visit(of_matrix(&mut call.a), Touch::Read);
    visit(of_matrix(&mut call.b), Touch::Read);
    visit(of_matrix(&mut call.c), Touch::Write);
    match &mut call.epilogue {
        Epilogue::None => {}
        Epilogue::Bias(bias) => visit(of_slice(bias), Touch::Read),
        Epilogue::GeluBias { bias, before } => {
            visit(of_slice(bias), Touch::Read);
            visit(of_matrix(before), Touch::Write);
        }
        Epilogue::GeluGrad { x, gelu, sums } => {
            visit(of_matrix(x), Touch::Read);
            visit(of_matrix(gelu), Touch::Write);
            visit(of_slice(sums), Touch::Write);
        }
        Epilogue::RowSums(sums) => visit(of_slice(sums), Touch::Write),
        Epilogue::Scaled { scales, bias } => {
            let all = scales.iter_mut().flatten().chain(bias);
            all.for_each(|slice| visit(of_slice(slice), Touch::Read));
        }
    }
}

/// The same for attention.
fn of_heads(call: &mut AttentionCall, mut visit: impl FnMut(Place<'_>, Touch)) {
    let forward = if call.backward.is_some() { Touch::Read } else { Touch::Write };
    for operand in [&mut call.q, &mut call.k, &mut call.v] {
        visit(of_attention(operand), Touch::Read);
    }
    visit(of_attention(&mut call.out), forward);
    visit(of_slice(&mut call.lse), forward);
    if let Some(mask) = &mut call.mask {
        visit((&mut mask.segment, &mut mask.offset), Touch::Read);
    }
    if let Some(dropout) = &mut call.dropout {
        visit(of_slice(&mut dropout.words), Touch::Read);
    }
    // Each by name: memory that is not visited would stay where it was when a step was recorded.
    if let Some(AttentionGradients { out, q, k, v, scratch, sums }) = &mut call.backward {
        visit(of_attention(out), Touch::Read);
        for operand in [q, k, v] {
            visit(of_attention(operand), Touch::Write);
        }
        for slice in [scratch].into_iter().chain(sums) {
            visit(of_slice(slice), Touch::Write);
        }
    }
}
