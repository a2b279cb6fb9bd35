//! Commands of a queue as values, so that they can run now or be recorded and run again.

use super::{
    AttentionCall, AttentionGradients, AttentionOperand, Backend, Epilogue, KernelId, Launch, MatmulCall,
    MatrixOperand, SegmentId, Slice,
};
use crate::error::Result;

/// Unit of work on the device.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// Kernel launch.
    Launch(Launch<'a>),
    /// Copy within the device.
    Copy {
        /// Destination.
        dst: Slice,
        /// Source.
        src: Slice,
    },
    /// Fill that sets every 32-bit word.
    Fill {
        /// Destination.
        dst: Slice,
        /// Value of each word.
        word: u32,
    },
    /// Matrix product by the vendor's library.
    Matmul(&'a MatmulCall),
    /// Attention by the backend's own kernels.
    Attention(&'a AttentionCall),
}

impl Command<'_> {
    /// Enqueues the command. Returns `false` if the backend declines a library command.
    #[inline]
    pub fn enqueue(&self, backend: &dyn Backend) -> Result<bool> {
        match self {
            Self::Launch(launch) => backend.launch(launch).map(|()| true),
            Self::Copy { dst, src } => backend.copy(*dst, *src).map(|()| true),
            Self::Fill { dst, word } => backend.fill(*dst, *word).map(|()| true),
            Self::Matmul(call) => backend.library().map_or(Ok(false), |library| library.matmul(call)),
            Self::Attention(call) => backend.library().map_or(Ok(false), |library| library.attention(call)),
        }
    }
}

/// [`Command`] that owns its data.
#[derive(Debug)]
pub enum OwnedCommand {
    /// Kernel launch.
    Launch {
        /// Kernel to launch.
        kernel: KernelId,
        /// Storage bindings, in order.
        bindings: Box<[Slice]>,
        /// Bytes of the uniform block.
        params: Vec<u8>,
        /// Workgroups in x, y and z.
        groups: [u32; 3],
    },
    /// Copy within the device.
    Copy {
        /// Destination.
        dst: Slice,
        /// Source.
        src: Slice,
    },
    /// Fill that sets every 32-bit word.
    Fill {
        /// Destination.
        dst: Slice,
        /// Value of each word.
        word: u32,
    },
    /// Matrix product by the vendor's library.
    Matmul(Box<MatmulCall>),
    /// Attention by the backend's own kernels.
    Attention(Box<AttentionCall>),
}

impl OwnedCommand {
    /// Copies a borrowed command.
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

    /// Borrows the command.
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

    /// Calls `visit` with each memory operand. `written` is the bit mask of the bindings that a kernel
    /// writes.
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

/// Prepared commands that are cheaper to enqueue than one by one: a driver graph, or commands looked up and
/// bound in advance.
pub trait CommandSequence: Send {
    /// Replaces the parameters of the launch at index `at` for later runs. The length must not change.
    fn set_params(&mut self, at: usize, params: &[u8]) -> Result<()>;
    /// Enqueues all commands, in order, on the queue that prepared them.
    fn enqueue(&mut self) -> Result<()>;
    /// Reports whether the driver runs the commands as one graph.
    fn is_driver_graph(&self) -> bool;
}

/// Kind of access of a command to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperandAccess {
    Read,
    Write,
}

/// Mutable address of a command's memory operand: segment and byte offset.
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

/// Calls `visit` with each operand of a product and its access. An accumulated result counts as written.
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

/// Calls `visit` with each operand of an attention call and its access.
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
    // Destructured without `..`: an operand that is not visited would keep its address from the recording.
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
