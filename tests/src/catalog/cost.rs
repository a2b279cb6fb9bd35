//! Memory traffic and floating-point operations of calls, computed from inputs and results. A check of the topic
//! `op_catalog` compares them with the counts of the null device.

use forebay::tensor::Tensor;

pub(crate) fn bytes(t: &Tensor) -> u64 {
    numel(t) * t.dtype().size() as u64
}

pub(crate) fn numel(t: &Tensor) -> u64 {
    t.numel() as u64
}

pub(crate) fn extent(t: &Tensor, dim: usize) -> u64 {
    t.shape().get(dim).map_or(1, |&n| n as u64)
}

/// Returns the number of rows along the last dimension.
pub(crate) fn num_rows(t: &Tensor) -> u64 {
    numel(t) / extent(t, t.rank().saturating_sub(1)).max(1)
}

/// Memory traffic of an operation that reads all inputs and writes its result.
pub(crate) fn read_all_write_once(x: &[Tensor], y: &Tensor) -> u64 {
    x.iter().map(bytes).sum::<u64>() + bytes(y)
}

/// Memory traffic of a view.
pub(crate) fn no_bytes(_: &[Tensor], _: &Tensor) -> u64 {
    0
}

/// Memory traffic of a factory, which only writes its result.
pub(crate) fn write_only_bytes(_: &[Tensor], y: &Tensor) -> u64 {
    bytes(y)
}

/// Memory traffic of a gather: reads all indices and, from the first input, as many elements as the result has.
pub(crate) fn gather_bytes(x: &[Tensor], y: &Tensor) -> u64 {
    x[1..].iter().map(bytes).sum::<u64>() + 2 * bytes(y)
}

/// Operations of a product over the last dimension of the first input.
pub(crate) fn matmul_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * numel(y) * extent(&x[0], x[0].rank() - 1)
}

/// Operations of a convolution: each element of the result uses the weights of one output channel.
pub(crate) fn conv_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * numel(y) * numel(&x[1]) / extent(&x[1], 0)
}

/// Operations of a transposed convolution: each element of the input uses the weights of one input channel.
pub(crate) fn conv_transpose_flops(x: &[Tensor], _: &Tensor) -> u64 {
    2 * numel(&x[0]) * numel(&x[1]) / extent(&x[1], 0)
}

/// Operations of attention of every query with every key and value, masked ones included.
pub(crate) fn attention_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * extent(&x[1], x[1].rank() - 2) * (numel(&x[0]) + numel(y))
}

/// Operations of causal self-attention: every query uses the keys and values up to its own position.
pub(crate) fn causal_attention_flops(_: &[Tensor], y: &Tensor) -> u64 {
    2 * (extent(y, 1) + 1) * numel(y)
}
