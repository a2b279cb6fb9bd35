//! Sums, means and maxima over bags of table rows, without a gathered copy of the rows.

use crate::ops::index::embedding::{check_padding_idx, inverse_frequencies};
use crate::ops::index::{IndexedElements, gather_backward, index_dtype_name, select_rows_backward};
use crate::ops::kernel::index_check::check_lengths;
use crate::ops::prelude::*;

/// Reduction of the rows of a bag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingBagMode {
    /// Sum.
    Sum,
    /// Mean.
    #[default]
    Mean,
    /// Maximum of each column.
    Max,
}

/// Options of [`embedding_bag`](Tensor::embedding_bag), named after PyTorch's arguments.
///
/// ```
/// use forebay_core::ops::{EmbeddingBagMode, EmbeddingBagOptions};
/// let mode = EmbeddingBagMode::Sum;
/// let sums = EmbeddingBagOptions { mode, padding_idx: Some(0), ..Default::default() };
/// assert!(sums.offsets.is_none());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbeddingBagOptions<'a> {
    /// Start of each bag in a one-dimensional index, the first at 0. Not for a two-dimensional index.
    pub offsets: Option<&'a Tensor>,
    /// Reduction of a bag's rows; by default the mean.
    pub mode: EmbeddingBagMode,
    /// Weight of each sample, in the shape of the index and the type of the table. For sums only.
    pub per_sample_weights: Option<&'a Tensor>,
    /// If true, `offsets` ends with the number of samples.
    pub include_last_offset: bool,
    /// Index of a row that is excluded from every bag and gets no gradient.
    pub padding_idx: Option<usize>,
    /// If true, divides a row's gradient by the row's number of occurrences in the index. Not for maxima.
    pub scale_grad_by_freq: bool,
}

const OP: &str = "embedding_bag";

/// Largest number of samples of a bag that one thread reduces.
const MAX_SEQUENTIAL_SAMPLES: usize = 4096;

struct EmbeddingBagOutput {
    out: Tensor,
    /// Bag of each sample, or the number of bags if the sample belongs to none.
    offset2bag: Tensor,
    /// Number of samples of each bag for means, or the row that gave each element for maxima.
    bag_sizes_or_max_indices: Option<Tensor>,
}

/// Returns the number of bags, and the number of samples of each bag if the bags are rows of the index.
fn bag_count_and_length(
    table: &Tensor,
    index: &Tensor,
    bags: &EmbeddingBagOptions<'_>,
) -> Result<(usize, usize)> {
    match (index.shape(), bags.offsets) {
        (&[rows, length], None) => Ok((rows, length)),
        (&[_], Some(offsets)) if offsets.rank() == 1 => {
            let last = usize::from(bags.include_last_offset);
            offsets.numel().checked_sub(last).map(|n| (n, 0)).ok_or_else(|| {
                Error::argument(OP, "include_last_offset takes offsets that end with the number of samples")
            })
        }
        _ => fail!(
            shape(OP, &[table.shape(), index.shape(), bags.offsets.map_or(&[][..], Tensor::shape)]),
            "takes an index of one dimension with offsets of one, or an index of two dimensions without"
        ),
    }
}

fn run_embedding_bag(
    table: &Tensor,
    index: &Tensor,
    factors: Option<&Tensor>,
    bags: &EmbeddingBagOptions<'_>,
    (count, length): (usize, usize),
) -> Result<EmbeddingBagOutput> {
    let (entries, width) = (table.shape()[0], table.shape()[1]);
    let (dtype, device) = (table.dtype(), table.device());
    let samples = index.numel();
    let out = Tensor::empty([count, width], dtype, device)?;
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let more = match bags.mode {
        EmbeddingBagMode::Sum => None,
        EmbeddingBagMode::Mean => Some(Tensor::empty([count], wide, device)?),
        EmbeddingBagMode::Max => Some(Tensor::empty([count, width], DType::I32, device)?),
    };
    // Samples before the first bag or after the last belong to no bag.
    let bag_of = Tensor::full([samples], count as f64, DType::I32, device)?;
    let offsets = bags.offsets.map(Tensor::contiguous).transpose()?;
    let index_name = index_dtype_name(OP, index)?;
    let offsets_name = offsets.as_ref().map_or(Ok("none"), |offsets| index_dtype_name(OP, offsets))?;
    let mode = match bags.mode {
        EmbeddingBagMode::Sum => "sum",
        EmbeddingBagMode::Mean => "mean",
        EmbeddingBagMode::Max => "max",
    };
    let spec = |stage: &'static str| {
        kernel_spec! {
            "embedding_bag", dtype: launch::shader_dtype_name(dtype, device), index: index_name,
            offsets: offsets_name, scaled: factors.is_some(), mode, stage,
        }
    };
    // With offsets, only the device knows the lengths of bags.
    let longest = if offsets.is_some() { samples } else { length };
    let chunk = (longest.isqrt() / 2).next_power_of_two().max(512);
    let start = |t: Option<&Tensor>| t.map_or(0, |t| t.layout().offset());
    let params = kernel_params! {
        bags: count, width, samples, entries, length, offset_count: offsets.as_ref().map_or(0, Tensor::numel),
        skip: bags.padding_idx.map_or(u32::MAX, |skip| skip as u32), weight_offset: table.layout().offset(),
        index_offset: index.layout().offset(), bag_offset: start(offsets.as_ref()),
        scale_offset: start(factors), chunk, long: MAX_SEQUENTIAL_SAMPLES,
    };
    let per_thread = if dtype.size() == 2 { 4 } else { 1 };
    let groups = (count * width).div_ceil(per_thread * WORKGROUP_SIZE);
    if longest <= MAX_SEQUENTIAL_SAMPLES {
        let params = params.loop_iterations(per_thread * (longest + 2));
        let tensors = bindings![table, index, &offsets, factors, &out, &bag_of, &more];
        launch::launch(&spec("whole"), &tensors, params, groups)?;
    } else {
        let chunks = samples / chunk;
        let dtype = if bags.mode == EmbeddingBagMode::Max { DType::U32 } else { wide };
        let columns = width + usize::from(bags.mode == EmbeddingBagMode::Mean);
        let parts = empty_workspace(&[(chunks * columns).max(1)], dtype, device)?;
        let part_tensors = bindings![table, index, &offsets, factors, &bag_of, &parts];
        let params_of_parts = params.clone().loop_iterations(chunk + 64);
        let part_groups = (chunks * width).div_ceil(WORKGROUP_SIZE);
        launch::launch(&spec("parts"), &part_tensors, params_of_parts, part_groups)?;
        let joined = bindings![table, index, &offsets, factors, &parts, &out, &bag_of, &more];
        let params = params.loop_iterations(per_thread * (2 * chunk + longest / chunk));
        launch::launch(&spec("joined"), &joined, params, groups)?;
    }
    Ok(EmbeddingBagOutput { out, offset2bag: bag_of, bag_sizes_or_max_indices: more })
}

impl Tensor {
    /// Reduces each bag of rows of the table `self` \[entries, width\] to one row: PyTorch's
    /// `nn.functional.embedding_bag`. Returns \[bags, width\].
    ///
    /// The bags are the rows of a two-dimensional index, or the ranges between `offsets` of a one-dimensional
    /// index. An empty bag gives zeros. Indices are i64, i32 or u32.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # use forebay_core::ops::{EmbeddingBagMode, EmbeddingBagOptions};
    /// # let device = Device::null(Default::default());
    /// let table = Tensor::zeros(&[10, 4], DType::F32, &device)?;
    /// let words = Tensor::from_slice(&[1i32, 5, 5, 2], &[4], &device)?;
    /// let starts = Tensor::from_slice(&[0i32, 3], &[2], &device)?;
    /// let offsets = Some(&starts);
    /// let bags = EmbeddingBagOptions { offsets, mode: EmbeddingBagMode::Sum, ..Default::default() };
    /// assert_eq!(table.embedding_bag(&words, &bags)?.shape(), [2, 4]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// An index out of range is no sample: see [`check_indices`](crate::ops::check_indices).
    ///
    /// # Errors
    /// The table does not have two dimensions or is not of floats. Index and offsets do not fit. Weights have
    /// another shape or type, or the mode is not the sum. `scale_grad_by_freq` is set for maxima.
    #[track_caller]
    pub fn embedding_bag(&self, index: &Tensor, bags: &EmbeddingBagOptions<'_>) -> Result<Tensor> {
        operation!(OP);
        let [entries, width] = check_table(self, bags)?;
        let counts = bag_count_and_length(self, index, bags)?;
        for t in [Some(index), bags.offsets, bags.per_sample_weights].into_iter().flatten() {
            self.check_same_device(OP, t)?;
        }
        if let Some(weights) = bags.per_sample_weights {
            check_sample_weights(self, index, weights, bags.mode)?;
        }
        let factors = bags.per_sample_weights.map(|f| f.reshape([-1])).transpose()?;
        check_in_range(OP, index, IndexRange::from_dim(self, 0))?;
        if let Some(offsets) = bags.offsets {
            check_lengths(OP, ("offset", "`offsets`"), offsets, 0..=index.numel())?;
        }
        let flat = index.detach().reshape([index.numel()])?.contiguous()?;
        let table = self.detach().contiguous()?;
        let detached_factors = factors.as_ref().map(Tensor::detach).map(|f| f.contiguous()).transpose()?;
        let EmbeddingBagOutput { out, offset2bag: bag_of, bag_sizes_or_max_indices: more } =
            run_embedding_bag(&table, &flat, detached_factors.as_ref(), bags, counts)?;
        let inputs: SmallVec<[&Tensor; 2]> = [self].into_iter().chain(factors.as_ref()).collect();
        // Only the gradient of the weights needs the table.
        let saved_table =
            factors.as_ref().filter(|f| f.requires_grad()).map(|_| SavedTensor::substitute(&table, self));
        let saved_factors = detached_factors
            .zip(factors.as_ref())
            .map(|(detached, factors)| SavedTensor::substitute(&detached, factors));
        drop(table);
        let scaled = bags.scale_grad_by_freq && autograd::compute_requires_grad(&[self]);
        let shares = scaled.then(|| inverse_frequencies(&flat, entries, self.dtype())).transpose()?;
        let flat = SavedTensor::input(&flat);
        let (mode, skip) = (bags.mode, bags.padding_idx);
        let shape = Dims::from_slice(self.shape());
        Ok(autograd::differentiable(OP, out, &inputs, move |g, ctx| {
            let factors = saved_factors.as_ref().map(|factors| factors.unpack(ctx)).transpose()?;
            let flat = flat.unpack(ctx)?;
            let table_grad = match (&more, ctx.needs_input_grad[0]) {
                (_, false) => None,
                (Some(row_indices), true) if mode == EmbeddingBagMode::Max => {
                    Some(gather_backward(&IndexedElements::new(OP, 0, row_indices), g, &shape, None)?)
                }
                (counts, true) => {
                    // Multiply by the factors in f32, so that terms are not rounded before the sum.
                    let computes_in_f32 = counts.is_some() || factors.is_some() || shares.is_some();
                    let mut rows = if computes_in_f32 { amp::half_to_f32(g)? } else { g.clone() };
                    if let Some(counts) = counts {
                        rows = rows.div(&counts.to_dtype(rows.dtype())?.reshape([-1isize, 1])?)?;
                    }
                    rows = rows.index_select(0, &bag_of)?;
                    let row_factors = factors.as_ref().map(|f| f.unsqueeze(1)).transpose()?;
                    for factor in row_factors.iter().chain(&shares) {
                        rows = rows.mul(factor)?;
                    }
                    let is_same_dtype = rows.dtype() == g.dtype();
                    let sum = if is_same_dtype { ctx.leaf_grad_to_accumulate(0) } else { None };
                    let at = IndexedElements::rows(OP, 0, &flat, rows.shape());
                    Some(select_rows_backward(&at, &rows, &shape, skip, sum)?.to_dtype(g.dtype())?)
                }
            };
            let others = match &saved_table {
                Some(table) if ctx.needs_input_grad.get(1) == Some(&true) => {
                    let table = table.unpack(ctx)?;
                    // In f32, because 16-bit products would be rounded before the sum.
                    let wide = if g.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
                    let rows = g.index_select(0, &bag_of)?.to_dtype(wide)?;
                    let products = rows.mul(&table.index_select(0, &flat)?.to_dtype(wide)?)?;
                    Some(products.reshape([flat.numel(), width])?.sum([1], false)?.to_dtype(g.dtype())?)
                }
                _ => None,
            };
            Ok([Some(table_grad), factors.as_ref().map(|_| others)].into_iter().flatten().collect())
        }))
    }
}

/// Fails unless the table is a matrix of floats that suits the options. Returns its entries and width.
fn check_table(table: &Tensor, bags: &EmbeddingBagOptions<'_>) -> Result<[usize; 2]> {
    let &[entries, width] = table.shape() else { fail!(shape(OP, [table]), "the table is [entries, width]") };
    fail_if!(!table.dtype().is_float();
        dtype(OP, table.dtype()), "takes a table of floats; cast with `to_dtype`");
    launch::check_device_dtype(OP, table.dtype(), table.device())?;
    fail_if!(bags.scale_grad_by_freq && bags.mode == EmbeddingBagMode::Max;
        argument(OP), "scale_grad_by_freq goes with the modes Sum and Mean");
    check_padding_idx(OP, bags.padding_idx, entries)?;
    Ok([entries, width])
}

/// Fails unless there is one weight of the table's type for each index.
fn check_sample_weights(
    table: &Tensor,
    index: &Tensor,
    weights: &Tensor,
    mode: EmbeddingBagMode,
) -> Result<()> {
    fail_if!(mode != EmbeddingBagMode::Sum;
        argument(OP), "per_sample_weights go with the mode Sum");
    fail_if!(weights.shape() != index.shape();
        shape(OP, [index, weights]), "per_sample_weights have the shape of the index");
    fail_if!(weights.dtype() != table.dtype();
        dtype(OP, weights.dtype()), "the table is {}; cast one with `to_dtype`", table.dtype());
    Ok(())
}
