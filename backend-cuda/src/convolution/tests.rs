//! Models of the kernels on the host: boxes of TMA, operands of `wgmma` and the kernels' own index arithmetic,
//! compared with plain convolutions.

use forebay_core::backend::{ConvolutionCall, ConvolutionProduct, SegmentId, Slice};
use forebay_core::dtype::DType;

use super::{ConvKernel, ConvPass, ConvTiling, STAGE_PIXELS, TILE_COLS, plan_convolution};
use crate::gelu_grad::REQUIRED_ARCH;
use crate::native_kernels::NativeKernel;

const SLICE: Slice = Slice { segment: SegmentId(1 << 20), offset: 0, bytes: 1 << 30 };
const OUTPUT: ConvolutionProduct = ConvolutionProduct::Output { weights: SLICE, bias: None, out: SLICE };

fn weight_grad(splits: u64) -> ConvolutionProduct {
    ConvolutionProduct::WeightGrad { grad: SLICE, partial: SLICE, splits }
}

/// Padding, dilation and stride of every dimension; the padding of planar images is that of their lines and pixels.
#[derive(Clone, Copy, Debug)]
struct Steps {
    padding: [u64; 3],
    dilation: u64,
    stride: u64,
}

impl Steps {
    fn planar(padding: u64, dilation: u64) -> Self {
        Self { padding: [0, padding, padding], dilation, stride: 1 }
    }

    /// Returns the place that a tap reads for a position, in every dimension.
    fn place(&self, position: [i64; 3], tap: [i64; 3]) -> [i64; 3] {
        std::array::from_fn(|d| {
            position[d] * self.stride as i64 + tap[d] * self.dilation as i64 - self.padding[d] as i64
        })
    }
}

fn call(
    product: ConvolutionProduct,
    [images, channels, rows]: [u64; 3],
    input: [u64; 3],
    kernel: [u64; 3],
    steps: Steps,
) -> ConvolutionCall {
    let Steps { padding, dilation, stride } = steps;
    let span = |d: usize| input[d] + 2 * padding[d] - dilation * (kernel[d] - 1) - 1;
    ConvolutionCall {
        dtype: DType::BF16,
        images,
        channels,
        input: [input[0], input[1]],
        rows,
        output: [0, 1, 2].map(|d| span(d) / stride + 1),
        kernel,
        stride: [stride; 2],
        first_tap: [0, 1].map(|d| -(padding[d] as i64)),
        tap_step: [dilation as i64; 2],
        columns: SLICE,
        product,
    }
}

/// Returns the product of the other direction: mirrored taps, and x of this size in the place of y.
fn mirrored(c: ConvolutionCall, input: [u64; 3]) -> ConvolutionCall {
    ConvolutionCall {
        channels: c.rows,
        rows: c.channels,
        input: [c.output[0], c.output[1]],
        output: input,
        first_tap: c.first_tap.map(|first| -first),
        tap_step: c.tap_step.map(|step| -step),
        ..c
    }
}

/// Returns a small integer for an index.
fn value(seed: usize, index: [usize; 5]) -> f32 {
    let hash = index.iter().fold(seed, |hash, &i| (hash * 31 + i * 7 + 3) % 1009);
    (hash % 7) as f32 - 3.0
}

/// Images, or weights as images, of which TMA reads zeros outside.
struct Images {
    seed: usize,
    /// Images, channels, depth, height and width.
    shape: [usize; 5],
}

impl Images {
    fn new(seed: usize, images: u64, channels: u64, [depth, height, width]: [u64; 3]) -> Self {
        Self { seed, shape: [images, channels, depth, height, width].map(|n| n as usize) }
    }

    fn at(&self, index: [i64; 5]) -> f32 {
        let inside = index.iter().zip(&self.shape).all(|(&i, &n)| (0..n as i64).contains(&i));
        if inside { value(self.seed, index.map(|i| i as usize)) } else { 0.0 }
    }
}

/// Columns along the width of images, of which TMA reads zeros outside.
struct Columns<'a> {
    images: &'a Images,
    width: i64,
    /// Distance between pixels, pixel of the first tap for pixel 0, and the distance to the next tap.
    stride: i64,
    first_x: i64,
    step: i64,
}

impl<'a> Columns<'a> {
    fn new(call: &ConvolutionCall, images: &'a Images) -> Self {
        // The tests pad, dilate and stride height and width alike.
        let [stride, first_x, step] = [call.stride[1] as i64, call.first_tap[1], call.tap_step[1]];
        Self { images, width: call.output[2] as i64, stride, first_x, step }
    }

    /// Returns a pixel by image, channel, the index of tap and plane, line and pixel of the line.
    fn at(&self, [image, channel, plane, y, x]: [i64; 5]) -> f32 {
        let depth = self.images.shape[2] as i64;
        let (tap, z) = (plane.div_euclid(depth), plane.rem_euclid(depth));
        let is_inside = (0..self.width).contains(&x) && plane >= 0;
        let from = [image, channel, z, y, x * self.stride + self.first_x + tap * self.step];
        if is_inside { self.images.at(from) } else { 0.0 }
    }
}

/// Shared memory of 16-bit elements, by address.
struct SharedMemory(Vec<f32>);

/// Swizzles an address: XORs the number of a 16-byte part with that of the row of 128 bytes.
fn swizzle(address: usize, span: usize) -> usize {
    address ^ ((address >> 7 & (span / 16 - 1)) << 4)
}

impl SharedMemory {
    fn new() -> Self {
        // Elements that no call has written are NaN.
        Self(vec![f32::NAN; (super::MAX_SHARED_BYTES / 2) as usize])
    }

    /// Loads a box whose dimensions are \[width, channels, lines\] from the first element on.
    fn load_box(&mut self, to: usize, boxes: [usize; 3], from: impl Fn([i64; 3]) -> f32) {
        let [width, channels, lines] = boxes;
        assert_eq!(to % (8 * width * 2), 0, "the swizzle repeats after eight rows");
        for at in 0..width * channels * lines {
            let index = [at % width, at / width % channels, at / width / channels].map(|i| i as i64);
            self.0[swizzle(to + at * 2, width * 2) / 2] = from(index);
        }
    }

    /// Returns element `k` of 16 of a line of an operand.
    fn operand(&self, descriptor: u64, is_mn_major: bool, line: usize, k: usize) -> f32 {
        let field = |at: u32| (descriptor >> at & 0x3fff) as usize * 16;
        let (start, panel, eight_lines) = (field(0), field(16), field(32));
        let span = [0, 128, 64, 32][(descriptor >> 62) as usize];
        let address = match is_mn_major {
            true => {
                let per_panel = span / 2;
                start + line / per_panel * panel + line % per_panel * 2 + k / 8 * eight_lines + k % 8 * span
            }
            false => start + line / 8 * eight_lines + line % 8 * span + k * 2,
        };
        self.0[swizzle(address, span) / 2]
    }

    /// Adds the product of 64 x 16 and 16 x 128 elements to sums.
    fn wgmma(&self, sums: &mut [[f32; 128]; 64], [a, b]: [u64; 2], mn_major: bool) {
        let lines = |descriptor: u64, count: usize| -> Vec<[f32; 16]> {
            let elements = |line| std::array::from_fn(|k| self.operand(descriptor, mn_major, line, k));
            (0..count).map(elements).collect()
        };
        let (a, b) = (lines(a, 64), lines(b, 128));
        for (a, sums) in a.iter().zip(sums) {
            for (b, sum) in b.iter().zip(sums) {
                *sum += a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            }
        }
    }
}

/// Returns `make_descriptor(descriptor_low_word(at, panel) + step)` of the kernels.
fn descriptor(at: usize, panel: usize, step: usize, span: usize) -> u64 {
    let high = (span / 2) | ([(128, 1), (64, 2), (32, 3)].iter().find(|(s, _)| *s == span).unwrap().1 << 30);
    ((at >> 4) + (panel >> 4 << 16) + step) as u64 | (high as u64) << 32
}

/// Sizes of a tiling under the names of the kernels.
struct Sizes {
    rows: usize,
    channels: usize,
    taps: [usize; 3],
    /// Of planes and lines.
    first: [i64; 2],
    strides: [i64; 2],
    steps: [i64; 2],
    input_depth: i64,
    output: [usize; 3],
    blocks_y: usize,
    blocks_x: usize,
    blocks: usize,
    tiles_m: usize,
    tiles: usize,
    splits: usize,
}

impl Sizes {
    fn new(tiling: &ConvTiling) -> Self {
        let at = |i: usize| tiling.sizes[i] as usize;
        Self {
            rows: at(0),
            channels: at(1),
            taps: [at(2), at(3), at(4)],
            first: [5, 6].map(|i| tiling.sizes[i].into()),
            strides: [7, 8].map(|i| tiling.sizes[i].into()),
            steps: [9, 10].map(|i| tiling.sizes[i].into()),
            input_depth: tiling.sizes[11].into(),
            output: [at(12), at(13), at(14)],
            blocks_y: at(15),
            blocks_x: at(16),
            blocks: at(17),
            tiles_m: at(18),
            tiles: at(19),
            splits: at(20),
        }
    }

    /// Returns the first pixel of a block, x, y and z, and its image.
    fn origin(&self, block: usize, width: usize, lines: usize) -> [i64; 4] {
        let (line, depth) = (block / self.blocks_x, self.output[0]);
        let plane = line / self.blocks_y;
        let at = [block % self.blocks_x * width, line % self.blocks_y * lines, plane % depth, plane / depth];
        at.map(|n| n as i64)
    }

    fn plane(&self, z: i64, tap: usize) -> i64 {
        z * self.strides[0] + self.first[0] + tap as i64 * self.steps[0]
    }

    fn has_plane(&self, plane: i64) -> bool {
        (0..self.input_depth).contains(&plane)
    }

    fn columns_plane(&self, plane: i64, tap_x: usize) -> i64 {
        if self.has_plane(plane) { tap_x as i64 * self.input_depth + plane } else { -1 }
    }

    fn line(&self, y: i64, tap: usize) -> i64 {
        y * self.strides[1] + self.first[1] + tap as i64 * self.steps[1]
    }

    /// Returns the taps along the depth for the positions in a plane.
    fn depth_taps(&self, z: i64) -> std::ops::Range<usize> {
        let mut taps = 0..self.taps[0];
        while taps.len() > 1 && !self.has_plane(self.plane(z, taps.start)) {
            taps.start += 1;
        }
        while taps.len() > 1 && !self.has_plane(self.plane(z, taps.end - 1)) {
            taps.end -= 1;
        }
        taps
    }

    /// Returns a tap's numbers along depth, height and width.
    fn split_tap(&self, tap: usize) -> [usize; 3] {
        let [_, height, width] = self.taps;
        [tap / width / height, tap / width % height, tap % width]
    }
}

/// Runs `conv` on the host. Returns \[images, rows, height, width\].
fn run_output(call: &ConvolutionCall, x: &Images, weights: impl Fn([usize; 3]) -> f32) -> Vec<f32> {
    let (tiling, columns) = (ConvTiling::new(call, 132).unwrap(), Columns::new(call, x));
    let (p, ConvKernel { rows: tile_rows, width, depth, .. }) = (Sizes::new(&tiling), tiling.kernel);
    let [tile_rows, width, depth] = [tile_rows, width, depth].map(|n| n as usize);
    let (cols, lines, span) = (TILE_COLS as usize, TILE_COLS as usize / width, width * 2);
    let (panel_a, panel_b) = (depth * 128, depth * span);
    let bytes_a = tile_rows / 64 * panel_a;
    let [depths, height, out_width] = p.output;
    let mut out = vec![f32::NAN; call.images as usize * p.rows * depths * height * out_width];
    for tile in 0..p.tiles {
        let [x0, y0, z, image] = p.origin(tile / p.tiles_m, width, lines);
        let (taps, taps_of_plane) = (p.depth_taps(z), p.taps[1] * p.taps[2]);
        let row0 = tile % p.tiles_m * tile_rows;
        let group_cols = if tile_rows == 128 { cols } else { cols / 2 };
        let mut sums = vec![vec![[[0.0; 128]; 64]; group_cols / 128]; 2];
        for channel in (0..p.channels).step_by(depth) {
            for tap in taps.start * taps_of_plane..taps.end * taps_of_plane {
                let mut memory = SharedMemory::new();
                for panel in 0..tile_rows / 64 {
                    memory.load_box(panel * panel_a, [64, depth, 1], |[row, c, _]| {
                        let (row, c) = (row0 + panel * 64 + row as usize, channel + c as usize);
                        if row < p.rows && c < p.channels { weights([tap, c, row]) } else { 0.0 }
                    });
                }
                let [kz, ky, kx] = p.split_tap(tap);
                let plane = p.columns_plane(p.plane(z, kz), kx);
                memory.load_box(bytes_a, [width, depth, lines], |[dx, c, dy]| {
                    let y = p.line(y0, ky) + dy * p.strides[1];
                    columns.at([image, channel as i64 + c, plane, y, x0 + dx])
                });
                for (group, sums) in sums.iter_mut().enumerate() {
                    let group_a = if tile_rows == 128 { group * panel_a } else { 0 };
                    let group_col = if tile_rows == 128 { 0 } else { group * group_cols };
                    for k in 0..depth / 16 {
                        for (half, sums) in sums.iter_mut().enumerate() {
                            let a = descriptor(group_a, panel_a, k * 128, 128);
                            let b = bytes_a + group_col * depth * 2;
                            let b = descriptor(b, panel_b, k * span + half * depth * 16, span);
                            memory.wgmma(sums, [a, b], true);
                        }
                    }
                }
            }
        }
        // The tile in shared memory, then its rows.
        let tile_at = |row: usize, col: usize| {
            let (group, col) = if tile_rows == 128 { (row / 64, col) } else { (col / 128, col % 128) };
            sums[group][col / 128][row % 64][col % 128]
        };
        for row in 0..tile_rows.min(p.rows - row0) {
            for col in 0..cols {
                let (y, x) = (y0 as usize + col / width, x0 as usize + col % width);
                if y < height && x < out_width {
                    let plane = (image as usize * p.rows + row0 + row) * depths + z as usize;
                    let at = (plane * height + y) * out_width + x;
                    assert!(out[at].is_nan(), "written once");
                    out[at] = tile_at(row, col);
                }
            }
        }
    }
    out
}

/// Runs `conv_weight_grad` on the host. Returns the sum of the splits, \[rows, taps, channels\].
fn run_weight_grad(call: &ConvolutionCall, grad: &Images, x: &Images) -> Vec<f32> {
    let (tiling, columns) = (ConvTiling::new(call, 132).unwrap(), Columns::new(call, x));
    let (p, ConvKernel { rows: tile_rows, width, depth, .. }) = (Sizes::new(&tiling), tiling.kernel);
    let [tile_rows, width, depth] = [tile_rows, width, depth].map(|n| n as usize);
    let (cols, pixels, span) = (TILE_COLS as usize, STAGE_PIXELS as usize, width * 2);
    let (lines, bytes_a, taps) = (pixels / width, tile_rows * pixels * 2, p.taps.iter().product::<usize>());
    let panels_of_tap = p.channels.div_ceil(depth);
    let group_cols = if tile_rows == 128 { cols } else { cols / 2 };
    let mut partial = vec![f32::NAN; p.splits * p.rows * taps * p.channels];
    for block_index in 0..tiling.grid as usize {
        let (split, tile) = (block_index / p.tiles, block_index % p.tiles);
        let (row0, first_panel) = (tile % p.tiles_m * tile_rows, tile / p.tiles_m * (cols / depth));
        let panels = (cols / depth).min(panels_of_tap * taps - first_panel);
        let mut sums = vec![vec![[[0.0; 128]; 64]; group_cols / 128]; 2];
        for block in p.blocks * split / p.splits..p.blocks * (split + 1) / p.splits {
            let [x0, y0, z, image] = p.origin(block, width, lines);
            let mut memory = SharedMemory::new();
            memory.load_box(0, [width, tile_rows, lines], |[dx, row, dy]| {
                grad.at([image, row0 as i64 + row, z, y0 + dy, x0 + dx])
            });
            for panel in 0..panels {
                let (tap, channel) =
                    ((first_panel + panel) / panels_of_tap, (first_panel + panel) % panels_of_tap * depth);
                let [kz, ky, kx] = p.split_tap(tap);
                let plane = p.columns_plane(p.plane(z, kz), kx);
                for line in 0..lines {
                    let to = bytes_a + (line * cols + panel * depth) * span;
                    memory.load_box(to, [width, depth, 1], |[dx, c, _]| {
                        let y = p.line(y0, ky) + line as i64 * p.strides[1];
                        columns.at([image, channel as i64 + c, plane, y, x0 + dx])
                    });
                }
            }
            for (group, sums) in sums.iter_mut().enumerate() {
                let group_a = if tile_rows == 128 { group * 64 * span } else { 0 };
                let group_col = if tile_rows == 128 { 0 } else { group * group_cols };
                for k in 0..pixels / 16 {
                    let (line, part) = (k * 16 / width, k * 16 % width * 2);
                    for (half, sums) in sums.iter_mut().enumerate() {
                        let a = descriptor(group_a, 16, (line * tile_rows * span + part) / 16, span);
                        let step = (line * cols * span + half * 128 * span + part) / 16;
                        let b = descriptor(bytes_a + group_col * span, 16, step, span);
                        memory.wgmma(sums, [a, b], false);
                    }
                }
            }
        }
        for (row, col) in (0..tile_rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let panel = first_panel + col / depth;
            let (tap, channel) = (panel / panels_of_tap, panel % panels_of_tap * depth + col % depth);
            if tap < taps && channel < p.channels && row0 + row < p.rows {
                let (group, col) = if tile_rows == 128 { (row / 64, col) } else { (col / 128, col % 128) };
                let at = ((split * p.rows + row0 + row) * taps + tap) * p.channels + channel;
                assert!(partial[at].is_nan(), "written once");
                partial[at] = sums[group][col / 128][row % 64][col % 128];
            }
        }
    }
    let count = partial.len() / p.splits;
    (0..count).map(|at| partial.iter().skip(at).step_by(count).sum()).collect()
}

/// Checks the output, the gradient of the input for a stride of 1, and that of the weights, of a convolution with y
/// channels `rows`.
fn check_all(shape: [u64; 3], input: [u64; 3], kernel: [u64; 3], steps: Steps, splits: u64) {
    let forward = call(OUTPUT, shape, input, kernel, steps);
    let [images, channels, rows] = shape;
    let (x, dy) = (Images::new(1, images, channels, input), Images::new(2, images, rows, forward.output));
    let weight = |row: usize, channel: usize, tap: usize| value(3, [row, channel, tap, 0, 0]);
    let taps = kernel.iter().product::<u64>() as usize;
    let tap_of = |tap: usize| {
        let [_, height, width] = kernel.map(|n| n as usize);
        [tap / width / height, tap / width % height, tap % width].map(|k| k as i64)
    };
    let indices = |of: &Images| {
        let shape = of.shape;
        (0..shape.iter().product()).map(move |mut at: usize| {
            let mut index = [0; 5];
            for d in (0..5).rev() {
                (index[d], at) = ((at % shape[d]) as i64, at / shape[d]);
            }
            index
        })
    };

    assert!(forward.is_supported(), "{forward:?}");
    let out = run_output(&forward, &x, |[tap, c, row]| weight(row, c, tap));
    for (made, [n, row, pz, py, px]) in out.iter().zip(indices(&dy)) {
        let terms = (0..taps).flat_map(|tap| (0..channels as usize).map(move |c| (tap, c)));
        let expected: f32 = terms
            .map(|(tap, c)| {
                let [z, y, from] = steps.place([pz, py, px], tap_of(tap));
                weight(row as usize, c, tap) * x.at([n, c as i64, z, y, from])
            })
            .sum();
        assert_eq!(*made, expected, "output {forward:?} {:?}", [n, row, pz, py, px]);
    }

    if steps.stride == 1 {
        let backward = mirrored(forward, input);
        assert!(backward.is_supported(), "{backward:?}");
        let out = run_output(&backward, &dy, |[tap, c, row]| weight(c, row, tap));
        for (made, [n, channel, pz, py, px]) in out.iter().zip(indices(&x)) {
            let terms = (0..taps).flat_map(|tap| (0..rows as usize).map(move |row| (tap, row)));
            let expected: f32 = terms
                .map(|(tap, row)| {
                    let [z, y, from] = steps.place([0; 3], tap_of(tap));
                    let y = dy.at([n, row as i64, pz - z, py - y, px - from]);
                    weight(row, channel as usize, tap) * y
                })
                .sum();
            assert_eq!(*made, expected, "input's gradient {forward:?} {:?}", [n, channel, pz, py, px]);
        }
    }

    let of_weights = ConvolutionCall { product: weight_grad(splits), ..forward };
    assert!(of_weights.is_supported(), "{of_weights:?}");
    let sums = run_weight_grad(&of_weights, &dy, &x);
    for (at, made) in sums.iter().enumerate() {
        let (row, tap, channel) =
            (at / (taps * channels as usize), at / channels as usize % taps, at % channels as usize);
        let positions = indices(&dy).filter(|index| index[1] == row as i64);
        let expected: f32 = positions
            .map(|[n, row, pz, py, px]| {
                let [z, y, from] = steps.place([pz, py, px], tap_of(tap));
                dy.at([n, row, pz, py, px]) * x.at([n, channel as i64, z, y, from])
            })
            .sum();
        assert_eq!(*made, expected, "weights' gradient {forward:?} {:?}", [row, tap, channel]);
    }
}

#[test]
fn wide_images_are_convolved() {
    check_all([1, 3, 5], [1, 8, 64], [1, 3, 3], Steps::planar(1, 1), 2);
    check_all([1, 17, 70], [1, 14, 56], [1, 1, 3], Steps::planar(1, 1), 1);
}

#[test]
fn images_of_width_32_are_convolved() {
    check_all([1, 20, 130], [1, 8, 32], [1, 2, 1], Steps::planar(0, 1), 3);
    check_all([1, 33, 3], [1, 8, 32], [1, 3, 3], Steps::planar(1, 1), 2);
    check_all([1, 64, 32], [1, 8, 32], [1, 3, 3], Steps::planar(1, 1), 2);
}

#[test]
fn narrow_images_are_convolved() {
    check_all([2, 3, 8], [1, 16, 16], [1, 5, 5], Steps::planar(2, 1), 1);
    check_all([1, 80, 12], [1, 16, 48], [1, 1, 1], Steps::planar(0, 1), 4);
}

#[test]
fn dilated_filters_are_convolved() {
    check_all([1, 3, 5], [1, 16, 32], [1, 3, 3], Steps::planar(2, 2), 2);
    // Most taps lie outside of the image.
    check_all([1, 17, 66], [1, 8, 32], [1, 3, 3], Steps::planar(12, 12), 1);
    check_all([2, 4, 3], [1, 24, 24], [1, 3, 3], Steps::planar(0, 4), 1);
}

#[test]
fn volumes_are_convolved() {
    let steps = |padding: u64| Steps { padding: [padding; 3], dilation: 1, stride: 1 };
    check_all([2, 3, 5], [2, 8, 32], [3, 3, 3], steps(1), 2);
    check_all([1, 17, 66], [2, 16, 16], [2, 1, 1], steps(0), 1);
    // Some positions have no plane of the image.
    check_all([1, 4, 3], [2, 16, 16], [2, 1, 1], Steps { padding: [3, 0, 0], ..steps(0) }, 3);
    check_all([1, 3, 4], [5, 8, 32], [3, 1, 1], Steps { padding: [2, 0, 0], dilation: 2, stride: 1 }, 2);
}

#[test]
fn strided_filters_are_convolved() {
    let steps = |padding: [u64; 3], stride: u64| Steps { padding, dilation: 1, stride };
    check_all([2, 3, 5], [1, 16, 64], [1, 3, 3], steps([0, 1, 1], 2), 2);
    check_all([1, 20, 66], [1, 64, 64], [1, 2, 2], steps([0; 3], 4), 1);
    check_all([1, 3, 5], [4, 16, 64], [3, 3, 3], steps([1; 3], 2), 2);
    check_all([1, 3, 5], [5, 33, 33], [2, 3, 3], Steps { dilation: 2, ..steps([0, 1, 1], 2) }, 1);
}

#[test]
fn unsupported_calls_are_declined() {
    let good = call(OUTPUT, [4, 64, 64], [1, 32, 32], [1, 3, 3], Steps::planar(1, 1));
    let declined = |call: ConvolutionCall| plan_convolution(&call, REQUIRED_ARCH, 132).is_none();
    assert!(good.is_supported());
    assert!(plan_convolution(&good, 80, 132).is_none() && plan_convolution(&good, 100, 132).is_none());
    assert!(declined(ConvolutionCall { dtype: DType::F32, ..good }));
    assert!(declined(ConvolutionCall { output: [1, 32, 30], ..good }));
    assert!(declined(ConvolutionCall { kernel: [1, 9, 3], ..good }));
    assert!(declined(ConvolutionCall { tap_step: [1, 0], ..good }));
    assert!(declined(ConvolutionCall { tap_step: [1 << 16, 1], ..good }));
    assert!(declined(ConvolutionCall { stride: [1, 9], ..good }));
    assert!(declined(ConvolutionCall { stride: [0, 1], ..good }));
    assert!(declined(ConvolutionCall { images: 1 << 40, ..good }));
    assert!(declined(ConvolutionCall { columns: Slice { offset: 8, ..SLICE }, ..good }));
    assert!(declined(ConvolutionCall { product: weight_grad(1 << 12), ..good }));
}

#[test]
fn every_variant_fits_in_shared_memory() {
    for pass in [ConvPass::Output, ConvPass::WeightGrad] {
        for (rows, depth) in [(64, 16), (64, 32), (64, 64), (128, 16), (128, 32), (128, 64)] {
            let kernel = ConvKernel { pass, bf16: true, rows, width: 64, depth };
            assert!(kernel.stages() >= 3 && kernel.shared_bytes() <= 227 << 10, "{kernel:?}");
        }
    }
}
