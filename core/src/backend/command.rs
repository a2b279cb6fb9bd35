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
pub enum OwnedCommand {
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

impl OwnedCommand {
    /// The same command, to keep.
    #[must_use]
    pub fn from_command(command: &Command<'_>) -> Self {
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
    pub fn as_command(&self) -> Command<'_> {
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
    pub(crate) fn visit_operands(
        &mut self,
        written: u32,
        mut visit: impl FnMut(OperandAddress<'_>, OperandAccess),
    ) {
        let mut slice = |slice: &mut Slice, touch| visit((&mut slice.segment, &mut slice.offset), touch);
        match self {
            Self::Launch { bindings, .. } => {
                for (at, binding) in bindings.iter_mut().enumerate() {
                    let writes = written.checked_shr(at as u32).unwrap_or(1) & 1 == 1;
                    slice(binding, if writes { OperandAccess::Write } else { OperandAccess::Read });
                }
            }
            Self::Copy { dst, src } => {
                slice(src, OperandAccess::Read);
                slice(dst, OperandAccess::Write);
            }
            Self::Fill { dst, .. } => slice(dst, OperandAccess::Write),
            Self::Matmul(call) => visit_matmul_operands(call, visit),
            Self::Attention(call) => visit_attention_operands(call, visit),
        }
    }
}

/// Commands in a form that is quicker to enqueue than one by one: a graph of the driver, or looked up and bound ahead.
pub trait CommandSequence: Send {
    /// Changes the parameters of a launch, by its place among the commands, for the runs that follow. As many bytes as before.
    fn set_params(&mut self, at: usize, params: &[u8]) -> Result<()>;
    /// Enqueues all commands, in order, on the queue they were prepared for.
    fn enqueue(&mut self) -> Result<()>;
    /// Whether the driver runs them as one graph.
    fn is_driver_graph(&self) -> bool;
}

/// Whether memory is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperandAccess {
    Read,
    Write,
}

/// A place in memory that is named by a command, to look at or to change.
pub(crate) type OperandAddress<'a> = (&'a mut SegmentId, &'a mut u64);

fn slice_address(slice: &mut Slice) -> OperandAddress<'_> {
    (&mut slice.segment, &mut slice.offset)
}

fn matrix_address(operand: &mut MatrixOperand) -> OperandAddress<'_> {
    (&mut operand.segment, &mut operand.offset)
}

fn attention_address(operand: &mut AttentionOperand) -> OperandAddress<'_> {
    (&mut operand.segment, &mut operand.offset)
}

/// Calls `visit` with each operand of a product, and whether it is written. What is added to is read as well.
fn visit_matmul_operands(call: &mut MatmulCall, mut visit: impl FnMut(OperandAddress<'_>, OperandAccess)) {
    visit(matrix_address(&mut call.a), OperandAccess::Read);
    visit(matrix_address(&mut call.b), OperandAccess::Read);
    visit(matrix_address(&mut call.c), OperandAccess::Write);
    match &mut call.epilogue {
        Epilogue::None => {}
        Epilogue::Bias(bias) => visit(slice_address(bias), OperandAccess::Read),
        Epilogue::GeluBias { bias, pre_activation: before } => {
            visit(slice_address(bias), OperandAccess::Read);
            visit(matrix_address(before), OperandAccess::Write);
        }
        Epilogue::GeluGrad { x, gelu, row_block_sums: sums } => {
            visit(matrix_address(x), OperandAccess::Read);
            visit(matrix_address(gelu), OperandAccess::Write);
            visit(slice_address(sums), OperandAccess::Write);
        }
        Epilogue::RowSums(sums) => visit(slice_address(sums), OperandAccess::Write),
        Epilogue::Scaled { scales, bias } => {
            let all = scales.iter_mut().flatten().chain(bias);
            all.for_each(|slice| visit(slice_address(slice), OperandAccess::Read));
        }
    }
}

/// The same for attention.
fn visit_attention_operands(
    call: &mut AttentionCall,
    mut visit: impl FnMut(OperandAddress<'_>, OperandAccess),
) {
    let forward = if call.backward.is_some() { OperandAccess::Read } else { OperandAccess::Write };
    for operand in [&mut call.q, &mut call.k, &mut call.v] {
        visit(attention_address(operand), OperandAccess::Read);
    }
    visit(attention_address(&mut call.out), forward);
    visit(slice_address(&mut call.lse), forward);
    if let Some(mask) = &mut call.mask {
        visit((&mut mask.segment, &mut mask.offset), OperandAccess::Read);
    }
    if let Some(dropout) = &mut call.dropout {
        visit(slice_address(&mut dropout.philox_state), OperandAccess::Read);
    }
    // Each by name: memory that is not visited would stay where it was when a step was recorded.
    if let Some(AttentionGradients { out, q, k, v, scratch, grad_sums: sums }) = &mut call.backward {
        visit(attention_address(out), OperandAccess::Read);
        for operand in [q, k, v] {
            visit(attention_address(operand), OperandAccess::Write);
        }
        for slice in [scratch].into_iter().chain(sums) {
            visit(slice_address(slice), OperandAccess::Write);
        }
    }
}
