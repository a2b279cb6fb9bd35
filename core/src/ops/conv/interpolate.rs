//! Interpolation (resizing) of signals, images and volumes.
//!
//! In every mode, an output element is a weighted sum of neighbours along each axis. The host builds a table
//! of the weights for each axis, in PyTorch's arithmetic, and one kernel applies the tables. Transposed
//! tables give the gradient.

use crate::ops::prelude::*;
use crate::tensor::layout::{MAX_TENSOR_NUMEL, tensor_numel};

/// Interpolation mode of [`interpolate`](Tensor::interpolate).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterpolateMode {
    /// Element at the coordinate rounded down, as in PyTorch and OpenCV; 1 to 3 axes.
    #[default]
    Nearest,
    /// Element nearest to the centre of the output element; 1 to 3 axes.
    NearestExact,
    /// Linear interpolation of signals \[batch, channels, length\].
    Linear,
    /// Linear interpolation of images \[batch, channels, height, width\] along both axes.
    Bilinear,
    /// Cubic convolution of four neighbours along both axes of images.
    Bicubic,
    /// Linear interpolation of volumes \[batch, channels, depth, height, width\] along all axes.
    Trilinear,
    /// Average of all elements that the output element covers; 1 to 3 axes.
    Area,
}

/// Options of [`interpolate`](Tensor::interpolate).
///
/// ```
/// use forebay_core::ops::{InterpolateOptions, InterpolateMode};
/// let mode = InterpolateMode::Bilinear;
/// let twice = InterpolateOptions { mode, ..InterpolateOptions::with_scale_factor(2.0) };
/// assert!(!twice.align_corners && twice.size.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InterpolateOptions {
    /// Output extents, one for each axis or one for all. Empty if `scale_factor` is set.
    pub size: Dims,
    /// Scale factors, one for each axis or one for all. Empty if `size` is set.
    pub scale_factor: SmallVec<[f64; 3]>,
    /// Interpolation mode.
    pub mode: InterpolateMode,
    /// If true, keeps the centres of corner elements in place, else their outer edges. Not for all modes.
    pub align_corners: bool,
    /// If true, coordinates are computed from the rounded extents instead of the scale factors.
    pub recompute_scale_factor: bool,
    /// If true, downsampling averages over all covered elements. For `Bilinear` and `Bicubic`.
    pub antialias: bool,
}

impl InterpolateOptions {
    /// Returns options with these output extents.
    #[must_use]
    pub fn with_size(size: impl IntoShape) -> Self {
        let extent = |&n: &isize| usize::try_from(n).unwrap_or(usize::MAX);
        Self { size: size.to_extents().iter().map(extent).collect(), ..Self::default() }
    }

    /// Returns options with one scale factor for all axes.
    #[must_use]
    pub fn with_scale_factor(factor: f64) -> Self {
        Self { scale_factor: smallvec![factor], ..Self::default() }
    }

    /// Returns the output extents, and the scale factors from which coordinates are computed.
    fn resolve_output_size(
        &self,
        from: &[usize],
        shape: &[usize],
    ) -> Result<(Dims, SmallVec<[Option<f64>; 3]>)> {
        let shape_error = |what: &str| Err(Error::shape(OP, what, &[shape]));
        let count = self.size.len().max(self.scale_factor.len());
        if self.size.is_empty() == self.scale_factor.is_empty() {
            return shape_error("takes either a size or a scale_factor");
        }
        if count != 1 && count != from.len() {
            return shape_error("takes one size or scale_factor for all axes, or one for each");
        }
        let axis = |d: usize| d.min(count - 1);
        if !self.size.is_empty() {
            if self.recompute_scale_factor {
                return shape_error("recomputes a scale_factor only where one is given");
            }
            return Ok(((0..from.len()).map(|d| self.size[axis(d)]).collect(), smallvec![None; from.len()]));
        }
        if self.scale_factor.iter().any(|&f| !(f > 0.0 && f.is_finite())) {
            return shape_error("takes scale_factors above 0");
        }
        let factors = (0..from.len()).map(|d| self.scale_factor[axis(d)]);
        let size = from.iter().zip(factors.clone()).map(|(&n, f)| (n as f64 * f).floor() as usize).collect();
        let coordinate_factors = factors.map(|f| (!self.recompute_scale_factor).then_some(f)).collect();
        Ok((size, coordinate_factors))
    }
}

const OP: &str = "interpolate";

/// Longest axis whose coordinates f32 holds.
const MAX_F32_EXTENT: usize = 1 << 24;

/// Consecutive elements with weights whose sum is one element of the other side.
#[derive(Clone, Debug, Default, PartialEq)]
struct ResampleSpan {
    first: usize,
    weights: SmallVec<[f64; 4]>,
}

impl ResampleSpan {
    /// Returns the span of one element with weight 1.
    fn unit(first: usize) -> Self {
        Self { first, weights: smallvec![1.0] }
    }

    /// Clamps the indices to the extent, and adds the weights of indices that coincide.
    fn from_clamped(first: isize, weights: &[f64], extent: usize) -> Self {
        let at = |k: usize| (first + k as isize).clamp(0, extent as isize - 1) as usize;
        let mut span = Self { first: at(0), weights: SmallVec::new() };
        for (k, &weight) in weights.iter().enumerate() {
            let index = at(k) - span.first;
            span.weights.resize(span.weights.len().max(index + 1), 0.0);
            span.weights[index] += weight;
        }
        span
    }
}

/// One resampled axis, computed in PyTorch's precision for the type.
struct ResampleAxis {
    is_f32: bool,
    input_size: usize,
    output_size: usize,
    scale_factor: Option<f64>,
    /// If true, the tensor has two spatial axes, for which PyTorch has separate kernels.
    is_image: bool,
}

impl ResampleAxis {
    /// Rounds an intermediate result to the precision of the type.
    fn round_to_precision(&self, v: f64) -> f64 {
        if self.is_f32 { f64::from(v as f32) } else { v }
    }

    /// Returns the distance between output elements, in input elements.
    fn compute_scale(&self, align_corners: bool) -> f64 {
        let scale = match self.scale_factor {
            _ if align_corners && self.output_size <= 1 => 0.0,
            _ if align_corners => (self.input_size as f64 - 1.0) / (self.output_size as f64 - 1.0),
            Some(factor) => 1.0 / factor,
            None => self.input_size as f64 / self.output_size as f64,
        };
        self.round_to_precision(scale)
    }

    /// Returns the input coordinate of output element `o`.
    fn source_index(&self, o: usize, scale: f64, align_corners: bool) -> f64 {
        if align_corners {
            return self.round_to_precision(scale * o as f64);
        }
        self.round_to_precision(self.round_to_precision(scale * (o as f64 + 0.5)) - 0.5)
    }

    fn compute_spans(&self, options: &InterpolateOptions) -> Vec<ResampleSpan> {
        (0..self.output_size).map(|o| self.compute_span(o, options)).collect()
    }

    fn compute_span(&self, o: usize, options: &InterpolateOptions) -> ResampleSpan {
        use InterpolateMode::{Area, Bicubic, Bilinear, Linear, Nearest, NearestExact, Trilinear};
        let one = |first: usize| ResampleSpan::unit(first.min(self.input_size - 1));
        let align = options.align_corners;
        // PyTorch computes nearest coordinates in f32 for every type.
        let nearest = |middle: f64| {
            let is_long = self.input_size.max(self.output_size) > MAX_F32_EXTENT;
            let round = |v: f64| if is_long { v } else { f64::from(v as f32) };
            one(round((o as f64 + middle) * round(self.compute_scale(false))).floor() as usize)
        };
        match options.mode {
            Area => {
                let first = o * self.input_size / self.output_size;
                let end = ((o + 1) * self.input_size).div_ceil(self.output_size);
                let share = self.round_to_precision(1.0 / (end - first) as f64);
                ResampleSpan { first, weights: smallvec![share; end - first] }
            }
            // PyTorch ignores the scale factor of images whose extent stays or doubles.
            Nearest if self.is_image && self.input_size == self.output_size => one(o),
            Nearest if self.is_image && self.output_size == 2 * self.input_size => one(o / 2),
            Nearest => nearest(0.0),
            NearestExact => nearest(0.5),
            // PyTorch ignores the scale factor of an axis whose extent stays.
            _ if options.antialias && self.input_size == self.output_size => one(o),
            _ if options.antialias => self.antialias_span(o, options),
            Linear | Bilinear | Trilinear if self.input_size == self.output_size => one(o),
            Linear | Bilinear | Trilinear => {
                let source = self.source_index(o, self.compute_scale(align), align).max(0.0);
                let first = (source.floor() as usize).min(self.input_size - 1);
                let t = self.round_to_precision(source - first as f64).clamp(0.0, 1.0);
                let weights = [self.round_to_precision(1.0 - t), t];
                ResampleSpan::from_clamped(first as isize, &weights, self.input_size)
            }
            Bicubic => {
                let source = self.source_index(o, self.compute_scale(align), align);
                let first = source.floor().min(self.input_size as f64 - 1.0);
                let t = self.round_to_precision(source - first).clamp(0.0, 1.0);
                let weights = [1.0 + t, t, 1.0 - t, 2.0 - t]
                    .map(|x| self.round_to_precision(cubic_convolution(x, -0.75)));
                ResampleSpan::from_clamped(first as isize - 1, &weights, self.input_size)
            }
        }
    }

    /// Returns the weights of a filter that widens with the downsampling factor.
    fn antialias_span(&self, o: usize, options: &InterpolateOptions) -> ResampleSpan {
        let is_cubic = options.mode == InterpolateMode::Bicubic;
        let scale = self.compute_scale(options.align_corners);
        let wide = scale.max(1.0);
        let support = if is_cubic { 2.0 } else { 1.0 } * wide;
        let center = scale * (o as f64 + 0.5);
        let first = ((center - support + 0.5) as isize).max(0) as usize;
        let end = ((center + support + 0.5) as usize).min(self.input_size);
        let weight = |j: usize| {
            let x = ((j as f64 - center + 0.5) / wide).abs();
            if is_cubic { cubic_convolution(x, -0.5) } else { (1.0 - x).max(0.0) }
        };
        let mut weights: SmallVec<[f64; 4]> = (first..end).map(weight).collect();
        let total: f64 = weights.iter().sum();
        if total != 0.0 {
            weights.iter_mut().for_each(|w| *w = self.round_to_precision(*w / total));
        }
        ResampleSpan { first, weights }
    }
}

/// Evaluates the cubic convolution kernel at distance `x`.
fn cubic_convolution(x: f64, a: f64) -> f64 {
    match x {
        x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        _ => 0.0,
    }
}

/// Transposes the spans: for each of `from` input elements, the output elements that it contributes to.
fn transpose_spans(spans: &[ResampleSpan], from: usize) -> Vec<ResampleSpan> {
    let mut transposed = vec![ResampleSpan::default(); from];
    for (o, span) in spans.iter().enumerate() {
        for (k, &weight) in span.weights.iter().enumerate() {
            let Some(to) = transposed.get_mut(span.first + k) else { continue };
            if to.weights.is_empty() {
                to.first = o;
            }
            to.weights.resize(o - to.first, 0.0);
            to.weights.push(weight);
        }
    }
    transposed
}

/// Largest number of terms that one thread sums. Longer sums run axis by axis, and in parts along an axis.
const MAX_SPAN_TERMS: usize = 512;

/// Splits long spans. Returns the spans of the parts, and the spans that sum the parts.
fn split_long_spans(spans: &[ResampleSpan]) -> (Vec<ResampleSpan>, Vec<ResampleSpan>) {
    let (mut parts, mut sums) = (Vec::new(), Vec::new());
    for span in spans {
        let first = parts.len();
        parts.extend(span.weights.chunks(MAX_SPAN_TERMS).enumerate().map(|(k, weights)| ResampleSpan {
            first: span.first + k * MAX_SPAN_TERMS,
            weights: weights.into(),
        }));
        sums.push(ResampleSpan { first, weights: smallvec![1.0; parts.len() - first] });
    }
    (parts, sums)
}

/// Resamples axis `d` of the last `rank` dimensions, and keeps the others.
fn resample_axis(x: &Tensor, rank: usize, d: usize, spans: Vec<ResampleSpan>) -> Result<Tensor> {
    let extents = &x.shape()[x.rank() - rank..];
    let mut axes: Vec<Vec<ResampleSpan>> =
        extents.iter().map(|&n| (0..n).map(ResampleSpan::unit).collect()).collect();
    axes[d] = spans;
    resample(x, &axes, true)
}

/// Resamples as [`resample`] does, in several passes, if the sums are too long for one thread. Intermediate
/// results are f32 or f64.
fn resample_long(x: &Tensor, axes: &[Vec<ResampleSpan>]) -> Result<Tensor> {
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut out = x.to_dtype(wide)?;
    for (d, axis) in axes.iter().enumerate() {
        let mut spans = axis.clone();
        while spans.iter().any(|span| span.weights.len() > MAX_SPAN_TERMS) {
            let (parts, sums) = split_long_spans(&spans);
            out = resample_axis(&out, axes.len(), d, parts)?;
            spans = sums;
        }
        out = resample_axis(&out, axes.len(), d, spans)?;
    }
    out.to_dtype(x.dtype())
}

/// Resamples the last dimensions of `x` by the spans of each axis, in the order of the axes.
fn resample(x: &Tensor, axes: &[Vec<ResampleSpan>], weighted: bool) -> Result<Tensor> {
    let counts =
        axes.iter().map(|spans| spans.iter().map(|span| span.weights.len()).max().unwrap_or(0).max(1));
    let terms: usize = counts.product();
    if terms > 8 * MAX_SPAN_TERMS || (terms > MAX_SPAN_TERMS && axes.len() == 1) {
        return resample_long(x, axes);
    }
    let lead = x.rank() - axes.len();
    let shape: Dims = x.shape()[..lead].iter().copied().chain(axes.iter().map(Vec::len)).collect();
    let n = numel(&shape);
    if n == 0 {
        return Tensor::zeros(&shape, x.dtype(), x.device());
    }
    let x = x.detach().contiguous()?;
    let (mut spans, mut weights, mut starts) = (Vec::new(), Vec::new(), Dims::new());
    // The kernel counts axes from the last one.
    for axis in axes.iter().rev() {
        starts.push(spans.len() / 3);
        for span in axis {
            spans.extend([span.first as u32, span.weights.len() as u32, weights.len() as u32]);
            weights.extend_from_slice(&span.weights);
        }
    }
    let out = Tensor::empty(&shape, x.dtype(), x.device())?;
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let spans = Tensor::create_constant(&spans, &[spans.len()], x.device())?;
    let spec = kernel_spec! {
        "resample", dtype: launch::shader_dtype_name(x.dtype(), x.device()), rank: axes.len(), weighted,
    };
    let reversed = |extents: &[usize]| -> [usize; 4] {
        std::array::from_fn(|k| if k < axes.len() { extents[extents.len() - 1 - k] } else { 0 })
    };
    starts.resize(4, 0);
    let params = kernel_params! {
        n, in_offset: x.layout().offset(), in_size: reversed(x.shape()), out_size: reversed(&shape),
        table: [starts[0], starts[1], starts[2], starts[3]],
    };
    let per_thread = if x.dtype().size() < 4 { 4 } else { 1 };
    let groups = n.div_ceil(per_thread * WORKGROUP_SIZE);
    // The inner loop runs once for each term; the loops around it run at most as often.
    let params = params.loop_iterations(per_thread * (3 * terms + 1));
    let weights = weighted.then(|| weight_table(&weights, x.dtype(), x.device())).transpose()?;
    launch::launch(&spec, &bindings![&x, &spans, &weights, &out], params, groups)?;
    Ok(out)
}

/// Resizes u8 images axis by axis, the last one first, with 16-bit weights and rounding to bytes after each
/// axis, as in PyTorch. The sums are integers over a power of two below 2²⁴, so f32 represents them exactly.
fn resample_bytes(x: &Tensor, axes: &[Vec<ResampleSpan>]) -> Result<Tensor> {
    let lead = x.rank() - axes.len();
    let mut out = x.to_dtype(DType::F32)?;
    for d in (0..axes.len()).rev() {
        if axes[d].len() == x.shape()[lead + d] {
            continue;
        }
        let spans = quantize_weights_to_16_bits(&axes[d]);
        out = resample_axis(&out, axes.len(), d, spans)?.add(0.5)?.floor()?.clamp(0.0, 255.0)?;
    }
    out.to_dtype(DType::U8)
}

/// Rounds weights to integers below 2¹⁵ over the largest power of two that allows this.
fn quantize_weights_to_16_bits(spans: &[ResampleSpan]) -> Vec<ResampleSpan> {
    let max_weight = spans
        .iter()
        .flat_map(|span| &span.weights)
        .fold(0.0, |max_weight: f64, &weight| max_weight.max(weight));
    let bits = (0..22).find(|&bits| 0.5 + max_weight * f64::from(2 << bits) >= 32768.0).unwrap_or(22);
    let one = f64::from(1 << bits);
    let round = |weight: &f64| (weight * one).round() / one;
    let quantize =
        |s: &ResampleSpan| ResampleSpan { first: s.first, weights: s.weights.iter().map(round).collect() };
    spans.iter().map(quantize).collect()
}

/// Uploads the weights in the type that the kernel reads.
fn weight_table(weights: &[f64], dtype: DType, device: &Device) -> Result<Tensor> {
    if dtype == DType::F64 {
        return Tensor::create_constant(weights, &[weights.len()], device);
    }
    let weights: Vec<f32> = weights.iter().map(|&w| w as f32).collect();
    Tensor::create_constant(&weights, &[weights.len()], device)
}

impl Tensor {
    /// Resizes the spatial dimensions: PyTorch's `nn.functional.interpolate`.
    ///
    /// `self` is \[batch, channels, length\], \[batch, channels, height, width\] or \[batch, channels, depth,
    /// height, width\], in f32, f64, f16, bf16 or u8.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # use forebay_core::ops::{InterpolateOptions, InterpolateMode};
    /// # let device = Device::null(Default::default());
    /// let x = Tensor::zeros(&[2, 3, 4, 5], DType::F32, &device)?;
    /// assert_eq!(x.interpolate(&InterpolateOptions::with_scale_factor(2.0))?.shape(), [2, 3, 8, 10]);
    /// let mode = InterpolateMode::Bicubic;
    /// let smooth = InterpolateOptions { mode, ..InterpolateOptions::with_size(&[6, 6]) };
    /// assert_eq!(x.interpolate(&smooth)?.shape(), [2, 3, 6, 6]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// The bilinear and bicubic modes resize u8 images as in PyTorch, with 16-bit weights and bytes between
    /// the axes. Other smooth modes, which PyTorch lacks for u8, compute in f32 and round.
    ///
    /// # Errors
    /// The mode takes another number of axes or another type, or an option does not fit the mode. Not exactly
    /// one of size and `scale_factor` is set. An extent is or becomes 0.
    #[doc(alias = "upsample")]
    #[track_caller]
    pub fn interpolate(&self, options: &InterpolateOptions) -> Result<Tensor> {
        use InterpolateMode::{Area, Bicubic, Bilinear, Linear, Nearest, NearestExact, Trilinear};
        operation!(OP);
        let ranks = match options.mode {
            Nearest | NearestExact | Area => 3..=5,
            Linear => 3..=3,
            Bilinear | Bicubic => 4..=4,
            Trilinear => 5..=5,
        };
        fail_if!(!ranks.contains(&self.rank()); shape(OP, [self]),
            "{:?} takes [batch, channels, ..] with {} to {} dimensions", options.mode, ranks.start(), ranks.end());
        let nearest = matches!(options.mode, Nearest | NearestExact);
        let image = matches!(options.mode, Bilinear | Bicubic);
        if self.dtype() == DType::U8 && !nearest && !image {
            let smooth = self.to_dtype(DType::F32)?.interpolate(options)?;
            return smooth.round()?.clamp(0.0, 255.0)?.to_dtype(DType::U8);
        }
        fail_if!(!self.dtype().is_float() && self.dtype() != DType::U8;
            dtype(OP, self.dtype()), "takes floats and u8; cast with `to_dtype`");
        launch::check_device_dtype(OP, self.dtype(), self.device())?;
        fail_if!(options.align_corners && (nearest || options.mode == Area);
            argument(OP), "{:?} takes no align_corners", options.mode);
        fail_if!(options.antialias && !image;
            argument(OP), "antialias goes with Bilinear and Bicubic, not with {:?}", options.mode);
        let from = Dims::from_slice(&self.shape()[2..]);
        let (to, factors) = options.resolve_output_size(&from, self.shape())?;
        fail_if!(from.contains(&0) || to.contains(&0);
            shape(OP, &[&from, &to]), "takes and gives extents of at least 1");
        // The host's table has an entry for each output element.
        fail_if!(to.iter().any(|&n| n > MAX_TENSOR_NUMEL) || tensor_numel(&to).is_none();
            shape(OP, &[&from, &to]), "gives less than 2^32 elements");
        if self.numel() == 0 {
            // The tables of weights have an entry for each index, and a tensor without elements may name too many.
            let shape = [&self.shape()[..2], &to].concat();
            let corner = (2..self.rank() as isize).try_fold(self.clone(), |x, d| x.narrow(d, 0, 1))?;
            return corner.broadcast_to(&shape);
        }
        let bytes = self.dtype() == DType::U8 && !nearest;
        let is_f32 = |d: usize| {
            // f32 does not hold the coordinates of longer axes, which PyTorch rounds.
            self.dtype() != DType::F64 && !bytes && from[d].max(to[d]) <= MAX_F32_EXTENT
        };
        // Area mode ignores the scale factor.
        let factor = |d: usize| factors[d].filter(|_| options.mode != Area);
        let spans = |d: usize| {
            let axis = ResampleAxis {
                is_f32: is_f32(d),
                input_size: from[d],
                output_size: to[d],
                scale_factor: factor(d),
                is_image: from.len() == 2,
            };
            axis.compute_spans(options)
        };
        let axes: Vec<Vec<ResampleSpan>> = (0..from.len()).map(spans).collect();
        if bytes {
            return resample_bytes(self, &axes);
        }
        let out = resample(self, &axes, !nearest)?;
        let axes = Arc::new(axes);
        let forward_axes = axes.clone();
        let forward = move |x: &Tensor| resample(x, &forward_axes, !nearest);
        Ok(autograd::linear_differentiable(OP, out, self, forward, move |g| {
            let transposed: Vec<_> =
                axes.iter().zip(&from).map(|(axis, &n)| transpose_spans(axis, n)).collect();
            resample(g, &transposed, true)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_of_long_axes_are_not_rounded_to_f32() {
        let n = MAX_F32_EXTENT + 4;
        let axis = ResampleAxis {
            is_f32: false,
            input_size: n,
            output_size: n,
            scale_factor: None,
            is_image: false,
        };
        for mode in [InterpolateMode::Nearest, InterpolateMode::NearestExact, InterpolateMode::Area] {
            let options = InterpolateOptions { mode, ..InterpolateOptions::default() };
            for o in [0, n - 3, n - 1] {
                assert_eq!(axis.compute_span(o, &options), ResampleSpan::unit(o), "{mode:?}");
            }
        }
    }

    #[test]
    fn weights_of_an_element_sum_to_one_and_match_their_transpose() {
        use InterpolateMode::{Area, Bicubic, Linear, Nearest, NearestExact};
        for (from, to) in [(1, 1), (1, 5), (4, 3), (5, 7), (7, 7), (4, 8), (9, 2)] {
            for mode in [Nearest, NearestExact, Linear, Bicubic, Area] {
                for antialias in [false, true] {
                    let axis = ResampleAxis {
                        is_f32: true,
                        input_size: from,
                        output_size: to,
                        scale_factor: None,
                        is_image: true,
                    };
                    let options = InterpolateOptions { mode, antialias, ..InterpolateOptions::default() };
                    let spans = axis.compute_spans(&options);
                    for span in &spans {
                        let total: f64 = span.weights.iter().sum();
                        assert!((total - 1.0).abs() < 1e-6 && span.first + span.weights.len() <= from);
                    }
                    let back = transpose_spans(&spans, from);
                    let twice_transposed = transpose_spans(&back, to);
                    assert!(twice_transposed.iter().zip(&spans).all(|(a, b)| {
                        let weight = |s: &ResampleSpan, i: usize| {
                            s.weights.get(i.wrapping_sub(s.first)).copied().unwrap_or(0.0)
                        };
                        (0..from).all(|i| weight(a, i) == weight(b, i))
                    }));
                }
            }
        }
    }
}
