//! Convolutions of 16-bit floats as implicit matrix products, by native kernels for Hopper.
//!
//! The kernels are in `shaders/cuda/conv.cu`.

use std::ffi::CStr;
use std::sync::Arc;

use forebay_core::backend::{ConvolutionCall, ConvolutionProduct, Slice, SourceError};
use forebay_core::dtype::DType;

use crate::backend::slice_address;
use crate::context::{Context, CudaStream};
use crate::gelu_grad::REQUIRED_ARCH;
use crate::kernels::{KernelRegistry, SubmitStatus};
use crate::native_kernels::{LaunchPlan, NativeKernel, NativeKernels, convert_all, with_defines};
use crate::settings;
use crate::tensor_map::TensorMap;

/// Warps that multiply, warps that store tiles of [`ConvPass::Output`], and one warp that loads.
const MMA_WARPS: u32 = 8;
const EPILOGUE_WARPS: u32 = 7;
/// Positions of a tile of [`ConvPass::Output`], columns of a tile of [`ConvPass::WeightGrad`].
const TILE_COLS: u32 = 256;
/// Pixels of a stage of [`ConvPass::WeightGrad`].
const STAGE_PIXELS: u32 = 64;
/// Shared memory of a block.
const MAX_SHARED_BYTES: u32 = 227 << 10;
/// Most stages in shared memory; more do not hide more latency.
const MAX_STAGES: u32 = 8;

/// The products of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// The output, or the gradient of the input.
    Output,
    /// The gradient of the weights.
    WeightGrad,
}

/// A variant of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvKernel {
    /// The product that the kernel computes.
    pub pass: ConvPass,
    /// If true, elements are bf16, else f16.
    pub bf16: bool,
    /// Rows of a tile: 64 or 128.
    pub rows: u32,
    /// Width of a block of pixels: 16, 32 or 64.
    pub width: u32,
    /// Channels of a stage or of a panel of columns: 16, 32 or 64.
    pub depth: u32,
}

impl ConvKernel {
    fn stage_bytes(&self) -> u32 {
        match self.pass {
            ConvPass::Output => (self.rows + TILE_COLS) * self.depth * 2,
            ConvPass::WeightGrad => (self.rows + TILE_COLS) * STAGE_PIXELS * 2,
        }
    }

    /// Returns the bytes of the output tile and its barriers.
    fn tile_bytes(&self) -> u32 {
        match self.pass {
            ConvPass::Output => self.rows * (TILE_COLS * 2 + 16) + 16,
            ConvPass::WeightGrad => 0,
        }
    }

    fn stages(&self) -> u32 {
        // Each stage has two barriers.
        ((MAX_SHARED_BYTES - self.tile_bytes()) / (self.stage_bytes() + 16)).min(MAX_STAGES)
    }
}

impl NativeKernel for ConvKernel {
    const FALLBACK_MESSAGE: &'static str = "convolutions build whole column matrices, which takes longer";

    fn source(&self) -> String {
        use forebay_shaders::cuda::{CONV, PACKED_HALVES, TMA_PIPELINE, WGMMA};
        let defines = [
            ("BF16", self.bf16.into()),
            ("WEIGHT_GRAD", (self.pass == ConvPass::WeightGrad).into()),
            ("ROWS", self.rows),
            ("WIDTH", self.width),
            ("DEPTH", self.depth),
            ("STAGES", self.stages()),
        ];
        with_defines(&defines, &[TMA_PIPELINE, PACKED_HALVES, WGMMA, CONV])
    }

    fn options(&self) -> &'static [&'static str] {
        &["--gpu-architecture=sm_90a"]
    }

    fn entry(&self) -> &'static CStr {
        match self.pass {
            ConvPass::Output => c"conv",
            ConvPass::WeightGrad => c"conv_weight_grad",
        }
    }

    fn block_threads(&self) -> u32 {
        match self.pass {
            ConvPass::Output => (MMA_WARPS + EPILOGUE_WARPS + 1) * 32,
            ConvPass::WeightGrad => (MMA_WARPS + 1) * 32,
        }
    }

    fn shared_bytes(&self) -> u32 {
        self.stages() * (self.stage_bytes() + 16) + self.tile_bytes()
    }
}

/// `Params` of the kernels.
#[repr(C)]
pub(crate) struct ConvParams {
    /// Weights or the output's gradient.
    a: TensorMap,
    columns: TensorMap,
    bias: u64,
    out: u64,
    /// In order, by the thing that is measured:
    /// - filter: rows, channels, depth, height, width
    /// - taps: plane and line of the first, strides of both, steps of both
    /// - depth of the columns
    /// - output: depth, height, width, blocks of pixels along the last two, all blocks
    /// - grid: tiles of rows, all tiles, splits
    sizes: [i32; 21],
}

/// Returns the tensor map of images with the dimensions \[width, channels, height, depth, images\]. A box has a part of
/// one plane, and its lines become panels of swizzled rows.
fn image_tensor_map(
    dtype: DType,
    images: Slice,
    [count, channels]: [u64; 2],
    [depth, height, width]: [u64; 3],
    [box_channels, box_lines, box_width]: [u32; 3],
) -> Option<TensorMap> {
    let line = width * dtype.size() as u64;
    let plane = height * line;
    let sizes = [width, channels, height, depth, count];
    let steps = [depth * plane, line, plane, channels * depth * plane];
    let boxes = [box_width, box_channels, box_lines, 1, 1];
    TensorMap::new(dtype, slice_address(images), &sizes, &steps, &boxes, true)
}

/// Returns the tensor map of columns with the dimensions \[width, channels, height, filter width · depth, images\]. A
/// box has a part of one plane of one tap.
fn columns_tensor_map(call: &ConvolutionCall, box_lines: u32, kernel: &ConvKernel) -> Option<TensorMap> {
    let ([depth, height], [_, _, width]) = (call.input, call.output);
    let planes = call.kernel[2] * depth;
    let line = width * call.dtype.size() as u64;
    let plane = height * line;
    let sizes = [width, call.channels, height, planes, call.images];
    let steps = [planes * plane, line, plane, call.channels * planes * plane];
    let stride = u32::try_from(call.stride[1]).ok()?;
    // A box with a stride has every `stride`-th of its lines.
    let (boxes, strides) = ([kernel.width, kernel.depth, box_lines * stride, 1, 1], [1, 1, stride, 1, 1]);
    TensorMap::with_strides(call.dtype, slice_address(call.columns), &sizes, &steps, &boxes, strides, true)
}

/// A kernel with the sizes in its parameters and its number of blocks.
#[derive(Clone, Copy, Debug)]
struct ConvTiling {
    kernel: ConvKernel,
    sizes: [i32; 21],
    grid: u32,
}

impl ConvTiling {
    /// Chooses the kernel and the tiles of a supported call. `units` is the number of multiprocessors. Returns
    /// `None` if a size is out of range.
    fn new(call: &ConvolutionCall, units: u64) -> Option<Self> {
        let ConvolutionCall { dtype, images, channels, rows, output: [depth, height, width], .. } = *call;
        let tile_rows = ConvolutionCall::tile_rows(rows);
        let pixels = match call.product {
            ConvolutionProduct::Output { .. } => ConvolutionCall::TILE_POSITIONS,
            ConvolutionProduct::WeightGrad { .. } => ConvolutionCall::STAGE_POSITIONS,
        };
        let block = ConvolutionCall::block_width([height, width], pixels)?;
        let (blocks_y, blocks_x) = (height.div_ceil(pixels / block), width.div_ceil(block));
        let (blocks, tiles_m) = (images * depth * blocks_y * blocks_x, rows.div_ceil(tile_rows));
        let (pass, tiles, splits, grid) = match call.product {
            ConvolutionProduct::Output { .. } => {
                let tiles = tiles_m * blocks;
                (ConvPass::Output, tiles, 1, tiles.min(units))
            }
            ConvolutionProduct::WeightGrad { splits, .. } => {
                let taps = call.kernel.iter().product();
                let tiles = ConvolutionCall::weight_grad_tiles(rows, channels, taps);
                (ConvPass::WeightGrad, tiles, splits, tiles * splits)
            }
        };
        let [kernel_z, kernel_y, kernel_x] = convert_all(call.kernel)?;
        let [first_z, first_y] = convert_all(call.first_tap)?;
        let [step_z, step_y] = convert_all(call.tap_step)?;
        let [stride_z, stride_y] = convert_all(call.stride)?;
        let [rows, channels, input_depth] = convert_all([rows, channels, call.input[0]])?;
        let [depth, height, width, blocks_y, blocks_x] =
            convert_all([depth, height, width, blocks_y, blocks_x])?;
        let [blocks, tiles_m, tiles, splits] = convert_all([blocks, tiles_m, tiles, splits])?;
        let sizes = [
            rows,
            channels,
            kernel_z,
            kernel_y,
            kernel_x,
            first_z,
            first_y,
            stride_z,
            stride_y,
            step_z,
            step_y,
            input_depth,
            depth,
            height,
            width,
            blocks_y,
            blocks_x,
            blocks,
            tiles_m,
            tiles,
            splits,
        ];
        let tile = [tile_rows, block, ConvolutionCall::channel_block(call.channels)];
        let [tile_rows, block, channel_block] = convert_all(tile)?;
        let kernel = ConvKernel {
            pass,
            bf16: dtype == DType::BF16,
            rows: tile_rows,
            width: block,
            depth: channel_block,
        };
        Some(Self { kernel, sizes, grid: u32::try_from(grid).ok()? })
    }
}

/// Returns the kernel, its parameters and its grid; `None` if the kernels do not support the call.
fn plan_convolution(
    call: &ConvolutionCall,
    arch: u32,
    units: u64,
) -> Option<LaunchPlan<ConvKernel, ConvParams>> {
    if arch != REQUIRED_ARCH || settings::portable_kernels() || !call.is_supported() {
        return None;
    }
    let ConvTiling { kernel, sizes, grid } = ConvTiling::new(call, units)?;
    let ConvolutionCall { dtype, images, channels, rows, .. } = *call;
    let (a, box_lines, bias, out) = match call.product {
        ConvolutionProduct::Output { weights, bias, out } => {
            let pitch = rows.next_multiple_of(ConvolutionCall::ROW_ALIGNMENT) * dtype.size() as u64;
            let shape = [rows, channels, call.kernel.iter().product()];
            let boxes = [64, kernel.depth, 1];
            let a = TensorMap::new(
                dtype,
                slice_address(weights),
                &shape,
                &[pitch, channels * pitch],
                &boxes,
                true,
            )?;
            (a, TILE_COLS / kernel.width, bias.map_or(0, slice_address), out)
        }
        ConvolutionProduct::WeightGrad { grad, partial, .. } => {
            let boxes = [kernel.rows, STAGE_PIXELS / kernel.width, kernel.width];
            let a = image_tensor_map(dtype, grad, [images, rows], call.output, boxes)?;
            (a, 1, 0, partial)
        }
    };
    let columns = columns_tensor_map(call, box_lines, &kernel)?;
    let params = ConvParams { a, columns, bias, out: slice_address(out), sizes };
    Some((kernel, params, [grid, 1, 1]))
}

/// The convolution kernels of one device.
#[derive(Debug)]
pub(crate) struct ConvKernels {
    kernels: NativeKernels<ConvKernel>,
    /// Number of multiprocessors.
    sm_count: u64,
}

impl ConvKernels {
    pub(crate) fn new(units: u32) -> Self {
        Self { kernels: NativeKernels::default(), sm_count: units.max(1).into() }
    }

    /// Enqueues a convolution on `stream` if its kernel is compiled. Without a stream, only starts to compile the
    /// kernel. If `wait` is true, waits for the compiler.
    pub(crate) fn submit(
        &self,
        context: &Arc<Context>,
        kernels: &KernelRegistry,
        stream: Option<&CudaStream>,
        call: &ConvolutionCall,
        wait: bool,
    ) -> Result<SubmitStatus, SourceError> {
        let Some(plan) = plan_convolution(call, kernels.arch(), self.sm_count) else {
            return Ok(SubmitStatus::Declined);
        };
        // SAFETY: the kernel takes the parameters of its plan, in this layout; the core has checked that the
        // operands lie inside their segments.
        unsafe { self.kernels.submit(context, kernels, stream, plan, wait) }
    }
}

#[cfg(test)]
#[path = "convolution/tests.rs"]
mod tests;
