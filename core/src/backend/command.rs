//! Commands of a queue as values, so that they can run now or be recorded and run again.

use super::{
    AttentionCall, AttentionGradients, BatchedMatmulCall, ConvolutionCall, ConvolutionProduct, Epilogue,
    KernelId, Launch, MatmulCall, RecurrentCall, RecurrentPass, SegmentId, Slice,
};
use crate::error::Result;

/// Borrows the address of a slice, a matrix or another operand.
macro_rules! address {
    ($operand:expr) => {
        (&mut $operand.segment, &mut $operand.offset)
    };
}

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
    /// Batch of matrix products by the backend's own kernels.
    BatchedMatmul(&'a BatchedMatmulCall),
    /// Attention by the backend's own kernels.
    Attention(&'a AttentionCall),
    /// Convolution by the backend's own kernels.
    Convolution(&'a ConvolutionCall),
    /// Recurrent layer by the backend's own kernels.
    Recurrent(&'a RecurrentCall),
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
    /// Batch of matrix products by the backend's own kernels.
    BatchedMatmul(Box<BatchedMatmulCall>),
    /// Attention by the backend's own kernels.
    Attention(Box<AttentionCall>),
    /// Convolution by the backend's own kernels.
    Convolution(Box<ConvolutionCall>),
    /// Recurrent layer by the backend's own kernels.
    Recurrent(Box<RecurrentCall>),
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
            Command::BatchedMatmul(call) => Self::BatchedMatmul(Box::new(*call)),
            Command::Attention(call) => Self::Attention(Box::new(*call)),
            Command::Convolution(call) => Self::Convolution(Box::new(*call)),
            Command::Recurrent(call) => Self::Recurrent(Box::new(*call)),
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
            Self::BatchedMatmul(call) => Command::BatchedMatmul(call),
            Self::Attention(call) => Command::Attention(call),
            Self::Convolution(call) => Command::Convolution(call),
            Self::Recurrent(call) => Command::Recurrent(call),
        }
    }

    /// Calls `visit` with each memory operand. `written` is the bit mask of the bindings that a kernel
    /// writes.
    pub(crate) fn visit_operands(&mut self, written: u32, mut visit: impl FnMut(OperandAddress<'_>, Access)) {
        let mut slice = |slice: &mut Slice, touch| visit(address!(slice), touch);
        match self {
            Self::Launch { bindings, .. } => {
                for (at, binding) in bindings.iter_mut().enumerate() {
                    let writes = written.checked_shr(at as u32).unwrap_or(1) & 1 == 1;
                    slice(binding, if writes { Access::Write } else { Access::Read });
                }
            }
            Self::Copy { dst, src } => {
                slice(src, Access::Read);
                slice(dst, Access::Write);
            }
            Self::Fill { dst, .. } => slice(dst, Access::Write),
            Self::Matmul(call) => visit_matmul_operands(call, visit),
            Self::BatchedMatmul(call) => {
                visit(address!(call.a), Access::Read);
                visit(address!(call.b), Access::Read);
                visit(address!(call.c), Access::Write);
            }
            Self::Attention(call) => visit_attention_operands(call, visit),
            Self::Convolution(call) => visit_convolution_operands(call, visit),
            Self::Recurrent(call) => visit_recurrent_operands(call, visit),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Mutable address of a command's memory operand: segment and byte offset.
pub(crate) type OperandAddress<'a> = (&'a mut SegmentId, &'a mut u64);

/// Calls `visit` with each operand of a product and its access. An accumulated result counts as written.
fn visit_matmul_operands(call: &mut MatmulCall, mut visit: impl FnMut(OperandAddress<'_>, Access)) {
    visit(address!(call.a), Access::Read);
    visit(address!(call.b), Access::Read);
    visit(address!(call.c), Access::Write);
    match &mut call.epilogue {
        Epilogue::None => {}
        Epilogue::Bias(bias) => visit(address!(bias), Access::Read),
        Epilogue::GeluBias { bias, pre_activation: before } => {
            visit(address!(bias), Access::Read);
            visit(address!(before), Access::Write);
        }
        Epilogue::GeluGrad { x, gelu, row_block_sums: sums } => {
            visit(address!(x), Access::Read);
            visit(address!(gelu), Access::Write);
            visit(address!(sums), Access::Write);
        }
        Epilogue::RowSums(sums) => visit(address!(sums), Access::Write),
        Epilogue::Scaled { scales, bias } => {
            let all = scales.iter_mut().flatten().chain(bias);
            all.for_each(|slice| visit(address!(slice), Access::Read));
        }
    }
}

fn visit_attention_operands(call: &mut AttentionCall, mut visit: impl FnMut(OperandAddress<'_>, Access)) {
    let forward = if call.backward.is_some() { Access::Read } else { Access::Write };
    for operand in [&mut call.q, &mut call.k, &mut call.v] {
        visit(address!(operand), Access::Read);
    }
    visit(address!(call.out), forward);
    visit(address!(call.lse), forward);
    if let Some(mask) = &mut call.mask {
        visit(address!(mask), Access::Read);
    }
    if let Some(dropout) = &mut call.dropout {
        visit(address!(dropout.philox_state), Access::Read);
    }
    // Destructured without `..`: an operand that is not visited would keep its address from the recording.
    if let Some(AttentionGradients { out, q, k, v, scratch, grad_sums: sums }) = &mut call.backward {
        visit(address!(out), Access::Read);
        for operand in [q, k, v] {
            visit(address!(operand), Access::Write);
        }
        for slice in [scratch].into_iter().chain(sums) {
            visit(address!(slice), Access::Write);
        }
    }
}

fn visit_convolution_operands(call: &mut ConvolutionCall, mut visit: impl FnMut(OperandAddress<'_>, Access)) {
    visit(address!(call.columns), Access::Read);
    match &mut call.product {
        ConvolutionProduct::Output { weights, bias, out } => {
            for slice in [weights].into_iter().chain(bias) {
                visit(address!(slice), Access::Read);
            }
            visit(address!(out), Access::Write);
        }
        ConvolutionProduct::WeightGrad { grad, partial, splits: _ } => {
            visit(address!(grad), Access::Read);
            visit(address!(partial), Access::Write);
        }
    }
}

fn visit_recurrent_operands(call: &mut RecurrentCall, mut visit: impl FnMut(OperandAddress<'_>, Access)) {
    visit(address!(call.weight), Access::Read);
    if let Some(lengths) = &mut call.lengths {
        visit(address!(lengths), Access::Read);
    }
    // Destructured without `..`: an operand that is not visited would keep its address from the recording.
    match &mut call.pass {
        RecurrentPass::Forward { input, input_strides: _, bias, h_0, c_0, states, saved } => {
            for slice in [input, h_0].into_iter().chain(bias).chain(c_0) {
                visit(address!(slice), Access::Read);
            }
            for slice in [states].into_iter().chain(saved) {
                visit(address!(slice), Access::Write);
            }
        }
        RecurrentPass::Backward { grad, saved, gates, inner, h_0, c_0 } => {
            for slice in [grad, saved] {
                visit(address!(slice), Access::Read);
            }
            for slice in [gates, h_0].into_iter().chain(inner).chain(c_0) {
                visit(address!(slice), Access::Write);
            }
        }
    }
}
