//! Recurrent layers that a backend's own kernels run in one launch for all time steps.

use super::Slice;
use crate::dtype::DType;

/// Cell type of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecurrentKind {
    /// tanh of the sum.
    Tanh,
    /// relu of the sum.
    Relu,
    /// Input, forget, cell and output gates (Hochreiter and Schmidhuber, 1997; PyTorch's order).
    Lstm,
    /// Reset, update and new gates (Cho et al., 2014), in PyTorch's order, with the reset after the product.
    Gru,
}

impl RecurrentKind {
    /// Returns the rows of a weight for each hidden feature.
    #[must_use]
    pub fn gate_count(self) -> usize {
        match self {
            Self::Tanh | Self::Relu => 1,
            Self::Lstm => 4,
            Self::Gru => 3,
        }
    }
}

/// All time steps of one direction of one recurrent layer, or the gradients of the gates. All elements but the
/// lengths have one type.
///
/// All operands but the input are contiguous. The states have one slot more than there are steps: the initial state
/// comes first, or last in reverse. An LSTM has another slot for its last cell.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentCall {
    /// Cell type.
    pub kind: RecurrentKind,
    /// Element type: f16 or bf16.
    pub dtype: DType,
    /// Number of time steps.
    pub steps: u64,
    /// Number of sequences.
    pub batch: u64,
    /// Features of a state.
    pub hidden: u64,
    /// If true, the layer runs from the last step to the first.
    pub reverse: bool,
    /// Weight of the state, read: \[gates · hidden, hidden\].
    pub weight: Slice,
    /// Length of each sequence in steps, read: i32 \[batch\].
    pub lengths: Option<Slice>,
    /// Operands of the pass.
    pub pass: RecurrentPass,
}

/// Pass of a [`RecurrentCall`] with its operands.
#[derive(Clone, Copy, Debug)]
pub enum RecurrentPass {
    /// Computes the states.
    Forward {
        /// Products of the input, read: \[steps, batch, gates · hidden\]. The last dimension is contiguous.
        input: Slice,
        /// Elements from one step to the next, and from one sequence to the next.
        input_strides: [u64; 2],
        /// Bias of the state's products, read: \[gates · hidden\].
        bias: Option<Slice>,
        /// Initial state, read: \[batch, hidden\].
        h_0: Slice,
        /// Initial cell of an LSTM, read: \[batch, hidden\].
        c_0: Option<Slice>,
        /// States, written: \[slots, batch, hidden\].
        states: Slice,
        /// Gates and previous values for the backward pass, written: \[steps, batch, 5, hidden\].
        saved: Option<Slice>,
    },
    /// Computes the gradients of the gates and of the initial values.
    Backward {
        /// Gradient of the states, read: \[slots, batch, hidden\].
        grad: Slice,
        /// Values that the forward pass saved, or the states of a layer without gates, read.
        saved: Slice,
        /// Gradient of the input's products, written: \[steps, batch, gates · hidden\].
        gates: Slice,
        /// Gradient of the state's products of a GRU, written: \[steps, batch, gates · hidden\].
        inner: Option<Slice>,
        /// Gradient of the initial state, written: \[batch, hidden\].
        h_0: Slice,
        /// Gradient of an LSTM's initial cell, written: \[batch, hidden\].
        c_0: Option<Slice>,
    },
}

/// Partition of a [`RecurrentCall`] over clusters of thread blocks, and over the warps of a block.
///
/// A cluster has some of the sequences, and each of its blocks has some of the hidden features. The weight of these
/// features stays in registers and in shared memory for all steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecurrentTiling {
    /// Blocks of a cluster.
    pub cluster_blocks: u32,
    /// Hidden features of a block; even.
    pub units: u32,
    /// Sequences of a cluster: 8, 16 or 32.
    pub sequences: u32,
    /// Warps that split the rows of the product, and warps that split its sums.
    pub warps: [u32; 2],
    /// Tiles of 16 rows of a warp, and tiles of 16 terms of its sums.
    pub tiles: [u32; 2],
    /// Number of a warp's tiles of the weight that are in registers. The others are in shared memory.
    pub register_tiles: u32,
}

/// Shared memory of a block from Hopper on.
const MAX_SHARED_BYTES: u64 = 227 << 10;
const WARPS: u64 = 8;
const MAX_CLUSTER_BLOCKS: u64 = 16;
/// Tiles of the weight that the registers of a block hold. A block with more tiles gets help from a larger cluster.
const BLOCK_TILES: u64 = 256;
/// Blocks that run at once, in clusters of any size. Some of an H100's multiprocessors have no place in a cluster.
const RESIDENT_BLOCKS: u64 = 112;
/// Times that the blocks of a call may fill the card. For larger batches, products of whole steps are faster.
const MAX_WAVES: u64 = 4;
/// For fewer steps, reading the weight takes longer than the steps.
const MIN_STEPS: u64 = 4;

impl RecurrentTiling {
    /// Chooses the partition of a layer; returns `None` if its weight does not fit. Depends on no card, because dry
    /// runs need the same answer.
    #[must_use]
    pub fn new(kind: RecurrentKind, is_backward: bool, hidden: u64, batch: u64) -> Option<Self> {
        if !(1..=1 << 14).contains(&hidden) || !(1..=1 << 20).contains(&batch) {
            return None;
        }
        let gates = kind.gate_count() as u64;
        let even = hidden.next_multiple_of(2);
        let with_blocks = |blocks: u64| {
            let units = hidden.div_ceil(blocks).next_multiple_of(2);
            let (rows, depth) = if is_backward { (units, gates * even) } else { (gates * units, even) };
            (blocks, units, [rows.div_ceil(16), depth.div_ceil(16)])
        };
        let sizes = [1, 2, 4, 8, MAX_CLUSTER_BLOCKS].map(with_blocks);
        let fits = |&(_, _, [rows, depth]): &(u64, u64, [u64; 2])| rows * depth <= BLOCK_TILES;
        let (blocks, units, [rows, depth]) = sizes.into_iter().find(fits).unwrap_or(sizes[4]);
        let per_warp = |[across, along]: [u64; 2]| [rows.div_ceil(across), depth.div_ceil(along)];
        // Of equal splits, the first one reads and writes least shared memory.
        let splits = match is_backward {
            false => [[2, 4], [4, 2], [1, 8], [8, 1]],
            true => [[1, 8], [2, 4], [4, 2], [8, 1]],
        };
        let warps = splits.into_iter().min_by_key(|&warps| per_warp(warps).iter().product::<u64>())?;
        let candidate = |sequences: u64| {
            let tiles = per_warp(warps);
            // Few tiles of rows have two sums each.
            let sums = tiles[0] * sequences / if tiles[0] <= 2 { 1 } else { 2 };
            let registers = if is_backward { 152u64 } else { 160 };
            let registers = registers.saturating_sub(sequences).saturating_sub(sums);
            let tiling = Self {
                cluster_blocks: blocks as u32,
                units: units as u32,
                sequences: sequences as u32,
                warps: warps.map(|n| n as u32),
                tiles: tiles.map(|n| n as u32),
                register_tiles: (registers / 4).min(tiles[0] * tiles[1]) as u32,
            };
            (tiling.shared_bytes(gates) <= MAX_SHARED_BYTES).then_some(tiling)
        };
        let waves = |tiling: &Self, most: u64| tiling.blocks(batch) <= most * RESIDENT_BLOCKS;
        let all = || [8, 16, 32].into_iter().filter_map(candidate);
        all().find(|tiling| waves(tiling, 1)).or_else(|| all().next_back().filter(|t| waves(t, MAX_WAVES)))
    }

    /// Returns the number of blocks for a batch.
    #[must_use]
    pub fn blocks(&self, batch: u64) -> u64 {
        batch.div_ceil(self.sequences.into()) * u64::from(self.cluster_blocks)
    }

    /// Returns the bytes of shared memory of a block: the weight's tiles, two buffers of states, partial sums and
    /// the bias. Rows of states and of sums are padded so that a warp accesses all banks.
    #[must_use]
    pub fn shared_bytes(&self, gates: u64) -> u64 {
        let [across, along] = self.warps.map(u64::from);
        let [rows, depth] = self.tiles.map(u64::from);
        let sequences = u64::from(self.sequences);
        let weight = WARPS * (rows * depth - u64::from(self.register_tiles)) * 512;
        let states = 2 * sequences * (along * depth * 16 + 8) * 2;
        let sums = along * sequences * (across * rows * 16 + 4) * 4;
        weight + states + sums + gates * u64::from(self.units) * 4
    }
}

impl RecurrentCall {
    /// Reports whether kernels for Hopper support a layer of these sizes in a pass. The core allocates memory
    /// accordingly, before it knows the operands.
    #[must_use]
    pub fn fits(
        kind: RecurrentKind,
        dtype: DType,
        is_backward: bool,
        [steps, batch, hidden]: [u64; 3],
    ) -> bool {
        matches!(dtype, DType::F16 | DType::BF16)
            && (MIN_STEPS..1 << 24).contains(&steps)
            && RecurrentTiling::new(kind, is_backward, hidden, batch).is_some()
    }

    /// Returns the partition of this call; `None` if its sizes or types are not supported.
    #[must_use]
    pub fn tiling(&self) -> Option<RecurrentTiling> {
        let is_backward = matches!(self.pass, RecurrentPass::Backward { .. });
        if !Self::fits(self.kind, self.dtype, is_backward, [self.steps, self.batch, self.hidden]) {
            return None;
        }
        RecurrentTiling::new(self.kind, is_backward, self.hidden, self.batch)
    }

    /// Returns the number of floating-point operations of the state's products.
    #[must_use]
    pub fn flops(&self) -> u64 {
        2 * self.steps * self.batch * self.hidden * self.hidden * self.kind.gate_count() as u64
    }

    /// Returns the bytes read and written if each operand is accessed once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let gates = self.kind.gate_count() as u64;
        let values = match self.pass {
            RecurrentPass::Forward { saved, .. } => gates + 1 + if saved.is_some() { 5 } else { 0 },
            RecurrentPass::Backward { inner, .. } => 6 + gates * if inner.is_some() { 2 } else { 1 },
        };
        self.dtype.size() as u64
            * (self.steps * self.batch * self.hidden * values + gates * self.hidden * self.hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_SHARED_BYTES, RecurrentKind, RecurrentTiling};

    fn tiling(kind: RecurrentKind, is_backward: bool, hidden: u64, batch: u64) -> Option<RecurrentTiling> {
        RecurrentTiling::new(kind, is_backward, hidden, batch)
    }

    #[test]
    fn a_tiling_covers_the_layer_and_fits_shared_memory() {
        use RecurrentKind::{Gru, Lstm, Relu, Tanh};
        for kind in [Tanh, Relu, Lstm, Gru] {
            for (hidden, batch) in
                [1, 5, 7, 64, 127, 256, 512, 650, 1024, 2000].into_iter().zip([1, 32].repeat(5))
            {
                for is_backward in [false, true] {
                    let Some(t) = tiling(kind, is_backward, hidden, batch) else {
                        assert!(hidden > 650, "{kind:?} {hidden}");
                        continue;
                    };
                    let gates = kind.gate_count() as u64;
                    assert!(t.shared_bytes(gates) <= MAX_SHARED_BYTES, "{kind:?} {hidden} {t:?}");
                    assert!(u64::from(t.units * t.cluster_blocks) >= hidden && t.units.is_multiple_of(2));
                    let covered = [t.warps[0] * t.tiles[0] * 16, t.warps[1] * t.tiles[1] * 16];
                    let even = hidden.next_multiple_of(2);
                    let (rows, depth) = match is_backward {
                        false => (gates * u64::from(t.units), even),
                        true => (u64::from(t.units), gates * even),
                    };
                    assert!(u64::from(covered[0]) >= rows && u64::from(covered[1]) >= depth, "{t:?}");
                    assert_eq!(t.warps[0] * t.warps[1], 8);
                }
            }
        }
    }

    #[test]
    fn small_layers_take_few_blocks_and_large_batches_many_sequences() {
        let blocks = |hidden| tiling(RecurrentKind::Lstm, false, hidden, 32).map(|t| t.cluster_blocks);
        assert_eq!([64, 128, 256, 512, 650].map(blocks), [Some(1), Some(1), Some(4), Some(16), Some(16)]);
        let sequences = |batch| tiling(RecurrentKind::Gru, false, 512, batch).map(|t| t.sequences);
        assert_eq!([5, 32, 64, 128, 512].map(sequences), [Some(8), Some(8), Some(16), Some(32), Some(32)]);
        assert_eq!(sequences(4096), None);
    }
}
