//! What calls have to move and to multiply, from their inputs and results. The null device counts what they do: a check of the topic
//! `records` compares.

use forebay::tensor::Tensor;

/// The bytes of a tensor's elements.
pub(super) fn bytes(t: &Tensor) -> u64 {
    numel(t) * t.dtype().size() as u64
}

/// How many elements a tensor has.
pub(super) fn numel(t: &Tensor) -> u64 {
    t.numel() as u64
}

/// One of a tensor's extents.
pub(super) fn extent(t: &Tensor, dim: usize) -> u64 {
    t.shape().get(dim).map_or(1, |&n| n as u64)
}

/// The rows of its last dimension.
pub(super) fn num_rows(t: &Tensor) -> u64 {
    numel(t) / extent(t, t.rank().saturating_sub(1)).max(1)
}

/// All inputs are read, and the result is written.
pub(super) fn read_all_write_once(x: &[Tensor], y: &Tensor) -> u64 {
    x.iter().map(bytes).sum::<u64>() + bytes(y)
}

/// The result is a view.
pub(super) fn no_bytes(_: &[Tensor], _: &Tensor) -> u64 {
    0
}

/// The result is written, and depends on no input's elements.
pub(super) fn write_only_bytes(_: &[Tensor], y: &Tensor) -> u64 {
    bytes(y)
}

/// Of the first input as many elements are read as the result has, by indices that are all read.
pub(super) fn gather_bytes(x: &[Tensor], y: &Tensor) -> u64 {
    x[1..].iter().map(bytes).sum::<u64>() + 2 * bytes(y)
}

/// A product over the last dimension of the first input.
pub(super) fn matmul_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * numel(y) * extent(&x[0], x[0].rank() - 1)
}

/// Each element of the result meets the weights of one channel.
pub(super) fn conv_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * numel(y) * numel(&x[1]) / extent(&x[1], 0)
}

/// Each element of the input meets the weights of one channel.
pub(super) fn conv_transpose_flops(x: &[Tensor], _: &Tensor) -> u64 {
    2 * numel(&x[0]) * numel(&x[1]) / extent(&x[1], 0)
}

/// Every query meets every key, and its value: what is masked is counted too.
pub(super) fn attention_flops(x: &[Tensor], y: &Tensor) -> u64 {
    2 * extent(&x[1], x[1].rank() - 2) * (numel(&x[0]) + numel(y))
}

/// Every query meets the keys up to its own, of as many and as wide, and their values.
pub(super) fn causal_attention_flops(_: &[Tensor], y: &Tensor) -> u64 {
    2 * (extent(y, 1) + 1) * numel(y)
}
