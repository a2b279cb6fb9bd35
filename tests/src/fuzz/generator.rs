//! Random arguments: small ones that often fit, and extreme values of their types.

use std::fmt::{Debug, Write};

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::ops::{
    AttentionOptions, BatchNormOptions, CrossEntropyOptions, EmbeddingBagMode, EmbeddingBagOptions,
    EmbeddingOptions, GridMode, GridPadding, Im2colOptions, InterpolateMode, InterpolateOptions,
    Interpolation, MatrixNorm, Operand, PadMode, Padding, PoolOptions, Reduction, Scalar, ScatterReduce,
};
use forebay::tensor::Tensor;

const EDGE_INTS: &[isize] = &[
    isize::MIN,
    isize::MIN + 1,
    isize::MAX,
    isize::MAX - 1,
    1 << 32,
    1 << 40,
    -(1 << 32),
    -(1 << 40),
    1 << 31,
    -(1 << 31),
    (1 << 32) - 1,
    1 << 62,
    1 << 16,
    1 << 20,
    -(1 << 20),
    100,
    -100,
];
const EDGE_COUNTS: &[usize] = &[
    usize::MAX,
    usize::MAX - 1,
    usize::MAX / 2,
    usize::MAX / 2 + 1,
    1 << 63,
    1 << 62,
    1 << 32,
    (1 << 32) - 1,
    1 << 31,
    1 << 40,
    (1 << 31) - 1,
    1 << 47,
    1 << 16,
    1 << 20,
    1 << 24,
    100,
    4097,
];
/// Extents of tensors without elements.
const HUGE_EXTENTS: &[usize] = &[(1 << 32) - 1, 1 << 31, 1 << 24, 1 << 40, 1, 2, 3];
const EDGE_FLOATS: &[f64] = &[
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::MAX,
    f64::MIN,
    f64::MIN_POSITIVE,
    1e300,
    -1e300,
    1e18,
    -1e18,
    1e10,
    -1e10,
    4294967296.0,
    1e-300,
];

const PAD_MODES: &[PadMode] =
    &[PadMode::Constant(Scalar::Float(1.0)), PadMode::Reflect, PadMode::Replicate, PadMode::Circular];
pub(crate) const REDUCTIONS: &[Reduction] =
    &[Reduction::None, Reduction::Mean, Reduction::Sum, Reduction::BatchMean];
const INTERPOLATE_MODES: &[InterpolateMode] = &[
    InterpolateMode::Nearest,
    InterpolateMode::NearestExact,
    InterpolateMode::Linear,
    InterpolateMode::Bilinear,
    InterpolateMode::Bicubic,
    InterpolateMode::Trilinear,
];

/// Generator that records the arguments it draws.
pub(crate) struct ArgGenerator {
    state: u64,
    log: String,
}

impl ArgGenerator {
    pub(crate) fn new(seed: u64, name: &str, round: u64) -> Self {
        let mixed = name
            .bytes()
            .fold(seed ^ 0x9e37_79b9_7f4a_7c15, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut draw =
            Self { state: mixed ^ round.wrapping_mul(0xd134_2543_de82_ef95) | 1, log: String::new() };
        (0..4).for_each(|_| _ = draw.next());
        draw
    }

    /// Returns the arguments, and the seed and round that repeat this call.
    pub(crate) fn describe_call(&self, seed: u64, round: u64) -> String {
        format!("arguments{} (seed {seed}, round {round})", self.log)
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn log_value<T: Debug>(&mut self, value: T) -> T {
        let _ = write!(self.log, " {value:?}");
        value
    }

    fn any_int(&mut self) -> isize {
        match self.below(8) {
            0 | 1 => self.pick(EDGE_INTS),
            2 => -(self.below(6) as isize),
            _ => self.below(5) as isize - 1,
        }
    }

    fn any_count(&mut self) -> usize {
        if self.one_in(4) { self.pick(EDGE_COUNTS) } else { self.below(6) }
    }

    fn any_float(&mut self) -> f64 {
        if self.one_in(4) {
            self.pick(EDGE_FLOATS)
        } else {
            self.pick(&[0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 0.1, -0.25, 5.0])
        }
    }

    pub(crate) fn int(&mut self) -> isize {
        let n = self.any_int();
        self.log_value(n)
    }

    pub(crate) fn int32(&mut self) -> i32 {
        let n = self.any_int();
        self.log_value(n.clamp(i32::MIN as isize, i32::MAX as isize) as i32)
    }

    pub(crate) fn int64(&mut self) -> i64 {
        self.int() as i64
    }

    pub(crate) fn count(&mut self) -> usize {
        let n = self.any_count();
        self.log_value(n)
    }

    pub(crate) fn float(&mut self) -> f64 {
        let v = self.any_float();
        self.log_value(v)
    }

    pub(crate) fn flag(&mut self) -> bool {
        let b = self.one_in(2);
        self.log_value(b)
    }

    pub(crate) fn maybe<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.one_in(2) { Some(make(self)) } else { None }
    }

    pub(crate) fn ints(&mut self) -> Vec<isize> {
        let n = self.below(5);
        let all = (0..n).map(|_| self.any_int()).collect();
        self.log_value(all)
    }

    pub(crate) fn counts(&mut self) -> Vec<usize> {
        let n = self.below(5);
        let all = (0..n).map(|_| self.any_count()).collect();
        self.log_value(all)
    }

    pub(crate) fn floats(&mut self) -> Vec<f64> {
        let n = self.below(4);
        let all = (0..n).map(|_| self.any_float()).collect();
        self.log_value(all)
    }

    pub(crate) fn int_array<const N: usize>(&mut self) -> [isize; N] {
        let all = std::array::from_fn(|_| self.any_int());
        self.log_value(all)
    }

    pub(crate) fn count_array<const N: usize>(&mut self) -> [usize; N] {
        let all = std::array::from_fn(|_| self.any_count());
        self.log_value(all)
    }

    pub(crate) fn dtype(&mut self) -> DType {
        let dtype = self.pick(&DType::ALL);
        self.log_value(dtype)
    }

    pub(crate) fn equation(&mut self) -> &'static str {
        let equation = self.pick(&[
            "ij,jk->ik",
            "ii->i",
            "i,j->ij",
            "bij,bjk->bik",
            "...i,...i->...",
            "ij->",
            "i",
            "",
            "->",
            "ij,ij",
            "a...b->b...a",
        ]);
        self.log_value(equation)
    }

    /// Draws a tensor or a scalar operand.
    pub(crate) fn operand<'a>(&mut self, tensor: &'a Tensor) -> Operand<'a> {
        match self.below(4) {
            0 => Operand::Scalar(Scalar::Int(self.int64())),
            1 => Operand::Scalar(Scalar::Float(self.float())),
            2 if self.one_in(4) => Operand::Scalar(Scalar::Bool(self.flag())),
            _ => {
                self.log_value("tensor");
                Operand::Tensor(tensor)
            }
        }
    }

    fn random_shape(&mut self) -> Vec<usize> {
        let rank = self.pick(&[0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5]);
        let even = self.one_in(3);
        let extent = self.pick(&[1, 2, 3, 5]);
        (0..rank).map(|_| if even { extent } else { self.pick(&[0, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5]) }).collect()
    }

    /// Draws the tensors of a call: the first has any shape and type, the others often match it.
    pub(crate) fn inputs(&mut self, device: &Device) -> Result<Vec<Tensor>> {
        let shape = self.random_shape();
        let dtype = if self.one_in(2) { DType::F32 } else { self.pick(&DType::ALL) };
        let (mut made, mut shapes) = (Vec::new(), vec![shape.clone()]);
        let of_index = self.one_in(4);
        for k in 0..5 {
            let other = match self.below(8) {
                _ if k == 0 => shape.clone(),
                0..=2 => shape.clone(),
                3 => shape.iter().map(|&n| if self.one_in(2) { 1 } else { n }).collect(),
                4 => shape.iter().rev().copied().collect(),
                5 => shape.last().map(|&n| vec![n]).unwrap_or_default(),
                6 => shape.iter().skip(1).copied().collect(),
                _ => self.random_shape(),
            };
            let kind = match self.below(8) {
                _ if k == 0 => dtype,
                _ if k == 1 && of_index => DType::I64,
                0..=4 => dtype,
                5 => self.pick(&[DType::I64, DType::I32, DType::U32]),
                6 => DType::Bool,
                _ => self.pick(&DType::ALL),
            };
            let x = self.create_with_random_layout(&other, kind, device)?;
            let _ = write!(
                self.log,
                "{} {kind} {:?} {:?}",
                if k == 0 { " of" } else { "," },
                x.shape(),
                x.strides()
            );
            shapes.push(other);
            made.push(if kind.is_float() && self.one_in(2) { x.to_leaf().unwrap_or(x) } else { x });
        }
        self.log.push_str(" with");
        Ok(made)
    }

    /// Creates a tensor of this shape: contiguous, transposed, part of a larger one, or with overlapping elements.
    fn create_with_random_layout(
        &mut self,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        match self.below(8) {
            0 => {
                let turned: Vec<usize> = shape.iter().rev().copied().collect();
                let order: Vec<isize> = (0..shape.len() as isize).rev().collect();
                Tensor::empty(&turned, dtype, device)?.permute(&order)
            }
            1 if !shape.is_empty() => {
                let mut larger = shape.to_vec();
                larger[0] += 2;
                Tensor::empty(&larger, dtype, device)?.narrow(0, 1, shape[0])
            }
            2 if self.one_in(3) => {
                let mut shape = shape.to_vec();
                if let Some(n) = shape.first_mut() {
                    *n = self.pick(&[1 << 20, 1 << 31, 1 << 33, 1 << 45, 1 << 60, usize::MAX]);
                }
                Tensor::empty((), dtype, device)?.broadcast_to(&shape)
            }
            3 => Tensor::empty((), dtype, device)?.broadcast_to(shape),
            4 if self.one_in(3) && !shape.is_empty() => {
                // Without elements: the other extents are unusual, and often too many for a tensor.
                let mut shape: Vec<usize> = shape.iter().map(|_| self.pick(HUGE_EXTENTS)).collect();
                let at = self.below(shape.len());
                shape[at] = 0;
                Tensor::empty(&shape, dtype, device).or_else(|_| Tensor::empty([0], dtype, device))
            }
            _ => Tensor::empty(shape, dtype, device),
        }
    }
}

/// Arguments of types that one or a few operations take.
impl ArgGenerator {
    pub(crate) fn reduction(&mut self) -> Reduction {
        self.pick(REDUCTIONS)
    }

    pub(crate) fn pad_mode(&mut self) -> PadMode {
        self.pick(PAD_MODES)
    }

    pub(crate) fn interpolation(&mut self) -> Interpolation {
        self.pick(&[
            Interpolation::Linear,
            Interpolation::Lower,
            Interpolation::Nearest,
            Interpolation::Midpoint,
        ])
    }

    pub(crate) fn scatter(&mut self) -> ScatterReduce {
        self.pick(&[ScatterReduce::Sum, ScatterReduce::Prod, ScatterReduce::Mean, ScatterReduce::Amax])
    }

    pub(crate) fn grid_mode(&mut self) -> GridMode {
        self.pick(&[GridMode::Bilinear, GridMode::Nearest, GridMode::Bicubic])
    }

    pub(crate) fn grid_padding(&mut self) -> GridPadding {
        self.pick(&[GridPadding::Zeros, GridPadding::Border, GridPadding::Reflection])
    }

    pub(crate) fn pool<const N: usize>(&mut self) -> PoolOptions<N> {
        PoolOptions {
            kernel: self.count_array(),
            stride: self.count_array(),
            padding: self.count_array(),
            dilation: self.count_array(),
            ceil_mode: self.flag(),
            count_include_pad: self.flag(),
            divisor_override: self.maybe(Self::int64),
        }
    }

    pub(crate) fn padding<const N: usize>(&mut self) -> Padding<N> {
        match self.below(4) {
            0 => Padding::Same,
            1 => Padding::Valid,
            _ => Padding::Zeros(self.count_array()),
        }
    }

    pub(crate) fn matrix_norm(&mut self) -> MatrixNorm {
        match self.below(3) {
            0 => MatrixNorm::Fro,
            1 => MatrixNorm::Nuc,
            _ => MatrixNorm::Order(self.pick(&[1.0, 2.0, -1.0, -2.0, f64::INFINITY, f64::NAN, 3.0])),
        }
    }

    pub(crate) fn interpolate(&mut self) -> InterpolateOptions {
        let size = if self.flag() { self.counts().into() } else { Default::default() };
        let scale_factor = if self.flag() { self.floats().into() } else { Default::default() };
        InterpolateOptions {
            size,
            scale_factor,
            mode: self.pick(INTERPOLATE_MODES),
            align_corners: self.flag(),
            recompute_scale_factor: self.flag(),
            antialias: self.flag(),
        }
    }

    pub(crate) fn im2col(&mut self) -> Im2colOptions {
        Im2colOptions {
            dilation: self.count_array(),
            padding: self.count_array(),
            stride: self.count_array(),
        }
    }

    pub(crate) fn lookup(&mut self) -> EmbeddingOptions {
        EmbeddingOptions { padding_idx: self.maybe(Self::count), scale_grad_by_freq: self.flag() }
    }

    pub(crate) fn batch_norm<'a>(&mut self, t: &'a [Tensor]) -> BatchNormOptions<'a> {
        BatchNormOptions {
            running: self.maybe(|_| (&t[3], &t[4])),
            weight: self.maybe(|_| &t[1]),
            bias: self.maybe(|_| &t[2]),
            training: self.flag(),
            num_batches_tracked: self.maybe(|_| &t[4]),
            momentum: self.float(),
            eps: self.float(),
        }
    }

    pub(crate) fn attention<'a>(&mut self, t: &'a [Tensor]) -> AttentionOptions<'a> {
        AttentionOptions {
            attn_mask: self.maybe(|_| &t[3]),
            dropout_p: self.float(),
            is_causal: self.flag(),
            scale: self.maybe(Self::float),
            enable_gqa: self.flag(),
            window: self.maybe(|r| r.count_array::<2>()),
        }
    }

    pub(crate) fn bags<'a>(&mut self, t: &'a [Tensor]) -> EmbeddingBagOptions<'a> {
        EmbeddingBagOptions {
            offsets: self.maybe(|_| &t[2]),
            mode: self.pick(&[EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max]),
            per_sample_weights: self.maybe(|_| &t[3]),
            include_last_offset: self.flag(),
            padding_idx: self.maybe(Self::count),
            scale_grad_by_freq: self.flag(),
        }
    }

    pub(crate) fn cross_entropy<'a>(&mut self, t: &'a [Tensor]) -> CrossEntropyOptions<'a> {
        CrossEntropyOptions {
            weight: self.maybe(|_| &t[3]),
            ignore_index: self.int64(),
            reduction: self.reduction(),
            label_smoothing: self.float(),
            in_place: self.flag(),
        }
    }

    pub(crate) fn tensor_list<'a>(&mut self, t: &'a [Tensor]) -> Vec<&'a Tensor> {
        let n = self.below(4);
        t.iter().take(n).collect()
    }

    pub(crate) fn index_list<'a>(&mut self, t: &'a [Tensor]) -> Vec<Option<&'a Tensor>> {
        let n = self.below(4);
        t.iter().skip(1).take(n).map(|t| self.maybe(|_| t)).collect()
    }
}
