//! Depthwise convolutions with strides of 1. A thread goes down a strip of lines, so that each element it reads serves
//! all lines of the filter.

use crate::ops::conv::{ConvGeometry, ConvKind};
use crate::ops::kernel::heuristics::VEC4_WIDTH;
use crate::ops::prelude::*;
use crate::ops::reduce::sum_first_dim;

launch::kernel_variants! {
    /// Pass of `depthwise_strips.wgsl`.
    enum Pass {
        Forward = "forward",
        Input = "input",
        Weight = "weight",
    }
}

/// Elements of a run. A filter of 7 x 7 then takes about 130 registers.
const RUN: usize = 8;
/// Threads of a workgroup.
const THREADS: usize = 64;
/// Threads that keep a card busy, with that many registers.
const TARGET_THREADS: usize = 1 << 16;
/// Most lines of a strip, which bounds the loops of one thread.
const MAX_STRIP: usize = 64;
/// Least lines of a strip for each line of the filter. A strip also reads the lines around it.
const MIN_STRIP_FACTOR: usize = 2;
/// Least width of results whose elements are read one by one.
const MIN_ODD_WIDTH: usize = 16;
/// Most strips that one thread takes for the gradient of the filters.
const MAX_GRAD_STRIPS: usize = 32;

/// Division of planes into runs of elements and strips of lines.
struct Strips {
    runs: usize,
    strips: usize,
    /// Lines of a strip.
    strip: usize,
}

impl Strips {
    fn new(geometry: &ConvGeometry, height: usize, width: usize) -> Self {
        let runs = width.div_ceil(RUN);
        let planes = geometry.batch * geometry.groups;
        let most = height.div_ceil(MIN_STRIP_FACTOR * geometry.kernel[0]);
        let strips = TARGET_THREADS.div_ceil(planes * runs).min(most).max(height.div_ceil(MAX_STRIP));
        let strip = height.div_ceil(strips);
        Self { runs, strips: height.div_ceil(strip), strip }
    }
}

impl ConvGeometry {
    /// Reports whether the kernel of strips computes this product of a depthwise convolution.
    pub(super) fn has_strips(&self, kind: ConvKind, dtype: DType) -> bool {
        let [from, to] = match kind {
            ConvKind::InputGrad => [&self.y_extents, &self.x_extents],
            ConvKind::Forward | ConvKind::WeightGrad => [&self.x_extents, &self.y_extents],
        };
        // Adjacent threads that go down different small planes share no lines of the cache. Words of two elements make
        // up for it.
        let is_coalesced = kind == ConvKind::WeightGrad
            || dtype.size() == 2 && from[1].is_multiple_of(2)
            || to[1] >= MIN_ODD_WIDTH;
        self.stride[..2] == [1, 1]
            && self.dilation[0] == 1
            && self.kernel[0] > 1
            && from[0].min(to[0]) > 1
            && is_coalesced
    }

    /// Applies the filters `w`, or their transposes, to the planes of `source`, all contiguous.
    pub(super) fn run_strips(
        &self,
        kind: ConvKind,
        source: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (pass, shape, from, to) = match kind {
            ConvKind::InputGrad => (Pass::Input, self.x_shape(), self.y_extents, self.x_extents),
            _ => (Pass::Forward, self.y_shape(), self.x_extents, self.y_extents),
        };
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let out = Tensor::empty(shape, source.dtype(), source.device())?;
        let [height, width, _] = to;
        let of = Strips::new(self, height, width);
        let n = self.batch * self.groups * of.strips * of.runs;
        let size = source.dtype().size();
        // A store of 16 bytes fills half a sector of the cache. Narrower stores of one thread write to it several
        // times.
        let widest = if size == 2 { 8 } else { VEC4_WIDTH };
        let vector = [widest, VEC4_WIDTH].into_iter().find(|&vector| width.is_multiple_of(vector));
        let vector = vector.filter(|&vector| vector == widest || size == 4);
        let mode = match vector {
            Some(_) => "vectors",
            None if (width * size).is_multiple_of(4) => "packed",
            None => "scattered",
        };
        let spec = kernel_spec! {
            "depthwise_strips", pass, dtype: source.dtype().name(), run: RUN, bias: bias.is_some(), mode,
            vector: vector.unwrap_or(0), pairs: has_pairs(source, from[1]),
            f32_division: n < 1 << 20,
        };
        let params = kernel_params! {
            n, runs: of.runs, strips: of.strips, strip: of.strip, channels: self.groups, images: self.batch,
            parts: 0u32, chunk: 0u32, source_offset: source.layout().offset(), other_offset: w.layout().offset(),
            bias_offset: bias.as_ref().map_or(0, |b| b.layout().offset()),
            source_height: from[0], source_width: from[1], height, width,
        };
        let params = params.loop_iterations(of.strip + self.kernel[0]);
        let (spec, groups) = (self.add_filter(spec), n.div_ceil(THREADS));
        launch::launch(&spec, &bindings![source, w, &bias, &out], params, groups)?;
        Ok(out)
    }

    /// Computes the gradient of the filters from those of the output and the input, all contiguous.
    pub(super) fn strips_filter_gradient(&self, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
        let [[height, width, _], [source_height, source_width, _]] = [self.y_extents, self.x_extents];
        let of = Strips::new(self, height, width);
        let total = self.batch * of.strips * of.runs;
        // All threads of a workgroup take equally many strips.
        let of_thread = (total / TARGET_THREADS.div_ceil(self.groups)).clamp(1, MAX_GRAD_STRIPS);
        let chunk = THREADS * of_thread;
        let parts = total.div_ceil(chunk);
        let shape = [parts, self.groups, self.kernel[0] * self.kernel[1]];
        let partial = empty_workspace(&shape, DType::F32, x.device())?;
        let spec = kernel_spec! {
            "depthwise_strips", pass: Pass::Weight, dtype: x.dtype().name(), run: RUN, bias: false,
            mode: "scattered", vector: 0usize,
            pairs: has_pairs(x, source_width) && has_pairs(dy, width), f32_division: total < 1 << 20,
        };
        let params = kernel_params! {
            n: 0u32, runs: of.runs, strips: of.strips, strip: of.strip, channels: self.groups, images: self.batch,
            parts, chunk, source_offset: x.layout().offset(), other_offset: dy.layout().offset(), bias_offset: 0u32,
            source_height, source_width, height, width,
        };
        let iterations = of_thread * (of.strip + self.kernel[0] + 1);
        let params = params.loop_iterations(iterations.max(THREADS));
        launch::launch(&self.add_filter(spec), &[x, dy, &partial], params, parts * self.groups)?;
        sum_first_dim(&partial, x.dtype())?.reshape(&self.w_shape()[..])
    }
}

/// Reports whether lines of this many elements consist of whole words of two elements.
fn has_pairs(t: &Tensor, width: usize) -> bool {
    t.dtype().size() == 2 && width.is_multiple_of(2) && t.layout().offset().is_multiple_of(2)
}
