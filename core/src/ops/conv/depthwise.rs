//! Depthwise convolutions: each channel has a filter of its own, so there is too little to multiply for a matrix
//! product. One kernel computes runs of a line from elements in registers.

use crate::ops::conv::{ConvGeometry, ConvKind};
use crate::ops::kernel::heuristics::VEC4_WIDTH;
use crate::ops::prelude::*;
use crate::ops::reduce::sum_first_dim;

/// Largest extent of a filter, largest length of one with a single line, and largest number of source elements that a
/// run reads from one line. All are limits on registers.
const MAX_KERNEL: usize = 7;
const MAX_LINE_KERNEL: usize = 32;
const MAX_SOURCES: usize = 40;
/// Elements of a run, where the filter's stride is 1.
const RUN: usize = 8;
/// Least width of results whose runs may contain the end of a line. Such a run is computed twice, which costs more than
/// it saves if most runs are.
const MIN_STRADDLED_WIDTH: usize = 64;
/// Threads of a workgroup, and workgroups that keep a card busy, for the gradient of the filters.
const GRAD_THREADS: usize = 64;
const GRAD_WORKGROUPS: usize = 1024;
/// Fewest and most runs of a thread for the gradient of the filters.
const MIN_GRAD_RUNS: usize = 4;
const MAX_GRAD_RUNS: usize = 1024;

launch::kernel_variants! {
    /// Pass of `depthwise.wgsl`.
    enum Pass {
        Forward = "forward",
        Input = "input",
        Weight = "weight",
    }
}

impl ConvGeometry {
    /// Reports whether the kernel of depthwise convolutions computes this one.
    pub(super) fn is_depthwise(&self, dtype: DType) -> bool {
        let [rows, columns, _] = self.kernel;
        let (stride, reach) = (self.stride[1], self.dilation[1] * columns.saturating_sub(1));
        matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
            && self.rank == 2
            && self.groups > 1
            && self.groups == self.x_channels
            && self.groups == self.y_channels
            && (rows.max(columns) <= MAX_KERNEL || (rows == 1 && columns <= MAX_LINE_KERNEL))
            && matches!(stride, 1 | 2 | 4)
            && (RUN / stride - 1) * stride + reach < MAX_SOURCES
            && self.padding[1] < MAX_SOURCES
            && self.x_extents.iter().chain(&self.y_extents).all(|&extent| extent > 0)
            && self.batch > 0
    }

    /// Computes one of the products from its operands in the order of [`ConvKind`], plus an optional bias.
    pub(super) fn run_depthwise(
        &self,
        kind: ConvKind,
        a: &Tensor,
        b: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (a, b) = (a.contiguous()?, b.contiguous()?);
        match (kind, self.has_strips(kind, a.dtype())) {
            (ConvKind::WeightGrad, true) => self.strips_filter_gradient(&a, &b),
            (_, true) => self.run_strips(kind, &a, &b, bias),
            (ConvKind::Forward, false) => self.run_filters(Pass::Forward, &a, &b, bias),
            (ConvKind::InputGrad, false) => self.run_filters(Pass::Input, &a, &b, bias),
            (ConvKind::WeightGrad, false) => self.filter_gradient(&a, &b),
        }
    }

    /// Applies the filters `w`, or their transposes, to the planes of `source`.
    fn run_filters(&self, pass: Pass, source: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (shape, from, to) = match pass {
            Pass::Input => (self.x_shape(), self.y_extents, self.x_extents),
            _ => (self.y_shape(), self.x_extents, self.y_extents),
        };
        let bias = bias.map(Tensor::contiguous).transpose()?;
        let out = Tensor::empty(shape, source.dtype(), source.device())?;
        let [height, width, _] = to;
        let run = if pass == Pass::Input { RUN } else { RUN / self.stride[1] };
        let (lines, runs) = (self.batch * self.groups * height, width.div_ceil(run));
        let total = lines * width;
        let is_whole = width.is_multiple_of(run);
        // The gradient of x divides positions by the stride, which takes no positions before the line.
        let can_straddle = width >= MIN_STRADDLED_WIDTH && (pass == Pass::Forward || self.stride[1] == 1);
        // A store of 16 bytes fills half a sector of the cache. Narrower stores of one thread write to it several
        // times.
        let most = if source.dtype().size() == 2 { 8 } else { VEC4_WIDTH };
        let vector = [most, VEC4_WIDTH]
            .into_iter()
            .find(|&n| run.is_multiple_of(n) && total.is_multiple_of(n) && (is_whole || can_straddle));
        let has_whole_words =
            run.is_multiple_of(VEC4_WIDTH) && (width * source.dtype().size()).is_multiple_of(4);
        let mode = match (vector, has_whole_words) {
            (Some(_), _) => "vectors",
            (_, true) => "packed",
            _ => "scattered",
        };
        let n = if vector.is_some() { total.div_ceil(run) } else { lines * runs };
        let spec = kernel_spec! {
            "depthwise", pass, dtype: source.dtype().name(), run, bias: bias.is_some(), mode,
            vector: vector.unwrap_or(0), straddles: vector.is_some() && !is_whole,
            f32_division: lines < 1 << 20 && n * run < 1 << 31,
        };
        let params = kernel_params! {
            n, runs, channels: self.groups, images: self.batch, parts: 0u32, chunk: 0u32,
            source_offset: source.layout().offset(), other_offset: w.layout().offset(),
            bias_offset: bias.as_ref().map_or(0, |b| b.layout().offset()),
            source_height: from[0], source_width: from[1], height, width, lines, total,
        };
        // A run that straddles contains the end of one line.
        let params = params.loop_iterations(2 * (self.kernel[0] + 1));
        let (spec, groups) = (self.add_filter(spec), n.div_ceil(WORKGROUP_SIZE));
        launch::launch(&spec, &bindings![source, w, &bias, &out], params, groups)?;
        Ok(out)
    }

    /// Computes the gradient of the filters from those of the output and the input.
    fn filter_gradient(&self, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
        let [[height, width, _], [source_height, source_width, _]] = [self.y_extents, self.x_extents];
        let run = RUN / self.stride[1];
        let runs = width.div_ceil(run);
        let total = self.batch * height * runs;
        let most = total.div_ceil(GRAD_THREADS * MIN_GRAD_RUNS);
        let fewest = total.div_ceil(GRAD_THREADS * MAX_GRAD_RUNS);
        let parts = GRAD_WORKGROUPS.div_ceil(self.groups).min(most).max(fewest);
        let chunk = total.div_ceil(parts);
        let shape = [parts, self.groups, self.kernel[0] * self.kernel[1]];
        let partial = empty_workspace(&shape, DType::F32, x.device())?;
        let spec = kernel_spec! {
            "depthwise", pass: Pass::Weight, dtype: x.dtype().name(), run, bias: false, mode: "scattered",
            vector: 0usize, straddles: false, f32_division: self.batch.max(height) < 1 << 20 && total < 1 << 31,
        };
        let params = kernel_params! {
            n: 0u32, runs, channels: self.groups, images: self.batch, parts, chunk,
            source_offset: x.layout().offset(), other_offset: dy.layout().offset(), bias_offset: 0u32,
            source_height, source_width, height, width, lines: 0u32, total: 0u32,
        };
        let params = params.loop_iterations(chunk.div_ceil(GRAD_THREADS).max(GRAD_THREADS));
        launch::launch(&self.add_filter(spec), &[x, dy, &partial], params, parts * self.groups)?;
        sum_first_dim(&partial, x.dtype())?.reshape(&self.w_shape()[..])
    }

    pub(super) fn add_filter(&self, spec: forebay_shaders::KernelSpec) -> forebay_shaders::KernelSpec {
        let sizes = [
            (["kernel_y", "kernel_x"], self.kernel),
            (["stride_y", "stride_x"], self.stride),
            (["dilation_y", "dilation_x"], self.dilation),
            (["padding_y", "padding_x"], self.padding),
        ];
        let definitions = sizes.into_iter().flat_map(|(names, values)| names.into_iter().zip(values));
        definitions.fold(spec, |spec, (name, value)| spec.def(name, value))
    }
}
