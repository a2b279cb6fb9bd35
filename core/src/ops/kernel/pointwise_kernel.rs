//! Launch of an elementwise kernel from an expression, its operands and an output.

use forebay_shaders::KernelSpec;
use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};

use crate::dtype::DType;
use crate::error::{Result, fail_if};
use crate::ops::elementwise::fusion;
use crate::ops::elementwise::pointwise::{Operand, TypeRule};
use crate::ops::elementwise::wide_integers::word_expression;
use crate::ops::kernel::heuristics::{find_tiled_dim, has_vector_lines};
use crate::ops::kernel::launch::{self, KernelParams, MAX_RANK, WORKGROUP_SIZE, kernel_spec};
use crate::runtime::device::{CompiledKernel, Device, KernelKey};
use crate::scalar::Scalar;
use crate::tensor::layout::{collapse_dims, is_row_major, numel};
use crate::tensor::{Dims, Layout, Tensor};

/// Encodes a scalar as two words of the uniform block, for the type that the kernel computes in. 16-bit
/// kernels compute in f32, so the scalar keeps its f32 precision. Only a scalar that is `compared` with
/// 16-bit elements is rounded to their type.
fn encode_scalar(s: Scalar, compute: DType, compared: bool, outside: OutOfRangeRule) -> [u32; 2] {
    let float = s.to_f64();
    let int = match (outside, compute) {
        (OutOfRangeRule::Saturate, _) => s.saturating_cast(compute),
        (OutOfRangeRule::ShiftOut, DType::U8 | DType::U32 | DType::I32) if s.to_exact(compute).is_none() => {
            Scalar::Int(i64::MAX).saturating_cast(compute)
        }
        _ => s.saturating_cast(DType::I64),
    };
    match compute {
        // No kernel computes in a storage-only type.
        DType::F32 | DType::F8E4M3 | DType::F8E5M2 => [s.to_f32().to_bits(), 0],
        DType::F16 | DType::BF16 if !compared => [s.to_f32().to_bits(), 0],
        DType::F16 => [f16::from_f64(float).to_f32().to_bits(), 0],
        DType::BF16 => [bf16::from_f64(float).to_f32().to_bits(), 0],
        DType::F64 => [(float.to_bits() >> 32) as u32, float.to_bits() as u32],
        DType::I64 => [(int >> 32) as u32, int as u32],
        DType::I32 | DType::U32 => [int as u32, 0],
        DType::U8 => [u32::from(int as u8), 0],
        DType::Bool => [u32::from(float != 0.0), 0],
    }
}

/// Treatment of a scalar that the integer type of an operation does not represent.
#[derive(Clone, Copy)]
enum OutOfRangeRule {
    /// Saturates to the nearest value of the type, for bounds.
    Saturate,
    /// Shifts all bits out.
    ShiftOut,
    /// Wraps modulo the range of the type, as in PyTorch.
    Wrap,
}

pub(crate) struct PointwiseInput<'a> {
    pub(crate) name: &'static str,
    pub(crate) operand: Operand<'a>,
}

/// Description of an elementwise operation with its operands.
pub(crate) struct PointwiseSpec<'a> {
    pub(crate) op: &'static str,
    pub(crate) expr: &'static str,
    pub(crate) math_files: &'static [&'static str],
    pub(crate) type_rule: TypeRule,
    pub(crate) compute: DType,
    pub(crate) result: DType,
    pub(crate) inputs: SmallVec<[PointwiseInput<'a>; 6]>,
    /// If true, the launch may also join a fusion group with which it shares only an input, or in place.
    pub(crate) is_grad: bool,
}

/// Largest number of scalars of a kernel.
const MAX_SCALARS: usize = 4;
/// Words of the uniform block: sizes, scalars, and eight lists of extents, offsets and strides.
const PARAM_WORDS: usize = 4 + 2 * MAX_SCALARS + 8 * MAX_RANK;

/// Operation with the types and layouts of its operands: all that a launch needs except memory.
pub(crate) struct PointwiseLaunch {
    pub(crate) op: &'static str,
    pub(crate) expr: &'static str,
    pub(crate) math_files: &'static [&'static str],
    /// Names of the tensors in the expression, and their dtypes.
    pub(crate) input_names: SmallVec<[&'static str; 4]>,
    pub(crate) input_dtypes: SmallVec<[&'static str; 4]>,
    /// Layouts of the result and of the tensors, broadcast to its shape.
    pub(crate) layouts: SmallVec<[Layout; 4]>,
    /// Names of the scalars, and their words.
    pub(crate) scalars: SmallVec<[(&'static str, [u32; 2]); MAX_SCALARS]>,
    /// Dtype of the result.
    pub(crate) out_dtype: &'static str,
    /// True if the expression computes in f32, f16 or bf16 and returns that type.
    pub(crate) is_float_math: bool,
    compute: &'static str,
    result: &'static str,
    pub(crate) inplace: bool,
    /// See [`PointwiseSpec::is_grad`].
    pub(crate) is_grad: bool,
    /// Elements of a 16-byte vector, or 0 if a type has no vectors.
    vector_width: usize,
    /// Cache key of all the fields above.
    kernel_key: KernelKey,
}

/// Access pattern of a kernel, determined by the layouts.
#[derive(Clone, Copy)]
struct AccessPattern {
    /// All tensors are row-major.
    dense: bool,
    /// Elements are accessed as vectors: of whole tensors if they are dense, else of lines.
    vectorized: bool,
    /// Workgroups have tiles of the last two dimensions.
    tiled: bool,
    /// Inputs with one element for each line, by bit.
    repeated: u8,
    /// The result owns its memory from the first byte on.
    packed: bool,
}

impl AccessPattern {
    /// Returns the pattern for row-major tensors.
    fn for_dense(n: usize, vector: usize, mut offsets: impl Iterator<Item = usize>, packed: bool) -> Self {
        let is_whole_vectors = vector > 0 && n > 1 && n.is_multiple_of(vector);
        let vectorized = is_whole_vectors && offsets.all(|offset| offset.is_multiple_of(vector));
        Self { dense: true, vectorized, tiled: false, repeated: 0, packed }
    }

    /// Returns the pattern for these layouts, with their common shape and their strides, the result's first. Vectors
    /// lie along the last dimension, if it consists of whole ones in the result and in every input that it does not
    /// repeat.
    fn for_strided(
        vector: usize,
        extent: Option<&usize>,
        layouts: &[Layout],
        strides: &[Dims],
        packed: bool,
    ) -> Self {
        let last = |strides: &Dims| strides.last().copied();
        let is_whole =
            |(layout, strides): (&Layout, &Dims)| has_vector_lines(layout.offset(), strides, vector);
        let repeated = strides[1..].iter().map(|strides| last(strides) == Some(0));
        let vectorized = vector > 0
            && extent.is_some_and(|n| n.is_multiple_of(vector))
            && is_whole((&layouts[0], &strides[0]))
            && repeated
                .clone()
                .zip(layouts.iter().zip(strides).skip(1))
                .all(|(rep, input)| rep || is_whole(input));
        let bits = repeated.enumerate().map(|(k, repeated)| u8::from(repeated) << k).sum();
        Self { dense: false, vectorized, tiled: false, repeated: if vectorized { bits } else { 0 }, packed }
    }

    fn elements_per_thread(self, vector: usize) -> usize {
        if self.vectorized { vector } else { 4 }
    }

    fn extend_key(self, mut key: KernelKey) -> KernelKey {
        let Self { dense, vectorized: vectors, tiled, repeated, packed } = self;
        let flags = [dense, vectors, packed, tiled].map(u64::from);
        let flags = flags[0] | flags[1] << 1 | flags[2] << 2 | flags[3] << 3;
        key.push_number(flags | u64::from(repeated) << 4);
        key
    }
}

/// Rows and columns of a tile in `pointwise.wgsl`.
const TILE_EXTENT: usize = 32;

/// Returns the rows of tiles for the first input that is read through tiles.
fn find_tile_rows(shape: &[usize], input_strides: &[Dims]) -> Option<usize> {
    shape.last()?.is_multiple_of(4).then(|| input_strides.iter().find_map(|s| find_tiled_dim(shape, s)))?
}

impl PointwiseLaunch {
    /// Returns the kernel, its parameters and its number of workgroups.
    pub(crate) fn resolve_kernel(&self, device: &Device) -> Result<(CompiledKernel, KernelParams, usize)> {
        let layouts = &self.layouts;
        let target = &layouts[0];
        let n = target.numel();
        let packed = !self.inplace && target.is_contiguous() && target.offset() == 0;
        let (form, shape, strides) = if layouts.iter().all(|l| is_row_major(target.shape(), l.strides())) {
            let form =
                AccessPattern::for_dense(n, self.vector_width, layouts.iter().map(Layout::offset), packed);
            (form, if n > 1 { smallvec![n] } else { Dims::new() }, SmallVec::new())
        } else {
            let strides: SmallVec<[&[usize]; 6]> = layouts.iter().map(Layout::strides).collect();
            let (mut shape, mut strides) = collapse_dims(target.shape(), &strides);
            let mut form =
                AccessPattern::for_strided(self.vector_width, shape.last(), layouts, &strides, packed);
            if let Some(row) = find_tile_rows(&shape, &strides[1..]).filter(|_| packed && !form.vectorized) {
                form.tiled = true;
                // The rows of tiles are the last dimension but one.
                let last = shape.len() - 1;
                for extents in strides.iter_mut().chain([&mut shape]) {
                    extents[row..last].rotate_left(1);
                }
            }
            (form, shape, strides)
        };
        launch::check_rank(self.op, shape.len())?;
        let kernel = device.kernel_by_key(&form.extend_key(self.kernel_key), || self.kernel_spec(form))?;
        let mut params = KernelParams::new().size(n).size(shape.len()).u32(0).u32(0);
        let words = self.scalars.iter().flat_map(|(_, words)| *words);
        for word in words.chain(std::iter::repeat(0)).take(2 * MAX_SCALARS) {
            params = params.u32(word);
        }
        params = params.dims(&shape);
        params = params.dims(&layouts.iter().map(Layout::offset).collect::<SmallVec<[usize; 8]>>());
        for k in 0..6 {
            params = params.dims(strides.get(k).map_or(&[], |s| &s[..]));
        }
        let workgroups = match (form.tiled, &shape[..]) {
            (true, [outer @ .., rows, columns]) => {
                numel(outer) * rows.div_ceil(TILE_EXTENT) * columns.div_ceil(TILE_EXTENT)
            }
            _ => n.div_ceil(form.elements_per_thread(self.vector_width) * WORKGROUP_SIZE),
        };
        Ok((kernel, params, workgroups))
    }

    fn kernel_spec(&self, form: AccessPattern) -> KernelSpec {
        let scalars: SmallVec<[&'static str; MAX_SCALARS]> =
            self.scalars.iter().map(|(name, _)| *name).collect();
        let layout = match (form.vectorized, form.dense) {
            _ if form.tiled => "tiled",
            (true, true) => "vec4",
            (true, false) => "lines",
            (false, true) => "dense",
            (false, false) => "strided",
        };
        let repeated: SmallVec<[u8; 6]> =
            (0..self.input_names.len()).map(|k| form.repeated >> k & 1).collect();
        kernel_spec! {
            "pointwise", expr: self.expr, names: &self.input_names[..], inputs: &self.input_dtypes[..],
            compute: self.compute, result: self.result, out: self.out_dtype, math: self.math_files,
            scalars: &scalars[..], layout, repeated: &repeated[..], width: form.elements_per_thread(self.vector_width),
            mode: if form.packed { "packed" } else { "scattered" }, inplace: self.inplace,
        }
    }
}

impl PointwiseSpec<'_> {
    fn tensors(&self) -> impl Iterator<Item = &Tensor> + Clone {
        self.inputs.iter().filter_map(|input| input.operand.as_tensor())
    }

    fn encode_input(&self, s: Scalar) -> [u32; 2] {
        let outside = match self.op {
            "maximum" | "minimum" | "fmax" | "fmin" | "clamp" => OutOfRangeRule::Saturate,
            "bitwise_left_shift" | "bitwise_right_shift" => OutOfRangeRule::ShiftOut,
            _ => OutOfRangeRule::Wrap,
        };
        encode_scalar(s, self.compute, self.result == DType::Bool, outside)
    }

    /// Returns the key of the kernel without its [`AccessPattern`].
    fn kernel_key(&self, out: &Tensor, inplace: bool) -> KernelKey {
        let mut key = KernelKey::new("pointwise");
        key.push_str(self.expr);
        key.push_strs(self.math_files);
        let dtypes = [self.compute, self.result, out.dtype()].map(|dtype| dtype as u64);
        key.push_number(
            dtypes[0]
                | dtypes[1] << 8
                | dtypes[2] << 16
                | (self.type_rule as u64) << 24
                | u64::from(inplace) << 32,
        );
        for input in &self.inputs {
            key.push_str(input.name);
            key.push_number(input.operand.as_tensor().map_or(u64::MAX, |t| t.dtype() as u64));
        }
        key
    }

    /// Returns the elements of a 16-byte vector: four, or eight if a type has 16 bits, or 0 for other types.
    fn vector_width(&self, out: &Tensor) -> usize {
        self.tensors().chain([out]).fold(4, |vector, t| match t.dtype() {
            DType::F32 | DType::I32 | DType::U32 => vector,
            DType::F16 | DType::BF16 if vector > 0 => 8,
            _ => 0,
        })
    }

    /// Runs the operation if all tensors are row-major and the kernel is cached. This is the fast path of
    /// most calls: it merges no layouts and allocates nothing. Returns false if nothing was run.
    fn try_run_dense(&self, vector: usize, out: &Tensor, inplace: bool) -> Result<bool> {
        let (n, shape) = (out.numel(), out.shape());
        let mut tensors: SmallVec<[&Tensor; 6]> = SmallVec::new();
        self.tensors().for_each(|t| tensors.push(t));
        tensors.push(out);
        // Parameters are 32-bit, so the last element's index must fit 32 bits.
        let is_dense = |t: &&Tensor| {
            t.shape() == shape
                && is_row_major(shape, t.layout().strides())
                && t.layout().offset() <= u32::MAX as usize
        };
        if n > u32::MAX as usize || !tensors.iter().all(is_dense) {
            return Ok(false);
        }
        let offset = |t: &&Tensor| t.layout().offset();
        let packed = !inplace && out.is_contiguous() && out.layout().offset() == 0;
        let form = AccessPattern::for_dense(n, vector, tensors.iter().map(offset), packed);
        let device = out.device();
        let key = form.extend_key(self.kernel_key(out, inplace));
        let Some(kernel) = device.find_kernel_by_key(&key) else { return Ok(false) };
        let mut words = [0; PARAM_WORDS];
        words[0] = n as u32;
        if n > 1 {
            (words[1], words[4 + 2 * MAX_SCALARS]) = (1, n as u32);
        }
        let scalars = self.inputs.iter().filter_map(|input| match input.operand {
            Operand::Scalar(s) => Some(self.encode_input(s)),
            Operand::Tensor(_) => None,
        });
        words[4..].iter_mut().zip(scalars.flatten()).for_each(|(to, word)| *to = word);
        // The result's offset comes first.
        let at = 4 + 2 * MAX_SCALARS + MAX_RANK;
        words[at] = offset(&out) as u32;
        let inputs = tensors[..tensors.len() - 1].iter().map(offset);
        words[at + 1..].iter_mut().zip(inputs).for_each(|(to, offset)| *to = offset as u32);
        let groups = n.div_ceil(form.elements_per_thread(vector) * WORKGROUP_SIZE);
        // In place, the first input is the result.
        launch::enqueue_words(kernel, &tensors[usize::from(inplace)..], &words, [groups, 1, 1]).map(|()| true)
    }
}

/// Returns the shader type to compute in. A bool computes as u32 if the expression is arithmetic.
fn compute_dtype_name(op: TypeRule, compute: DType, out: &Tensor) -> &'static str {
    match (op, compute) {
        (TypeRule::Any | TypeRule::Compare | TypeRule::Bits, DType::Bool) => "u32",
        _ => launch::shader_dtype_name(compute, out.device()),
    }
}

/// Runs an operation. In place, `out` is its first input; otherwise it is a new tensor.
pub(crate) fn run(spec: &PointwiseSpec<'_>, out: &Tensor, inplace: bool) -> Result<()> {
    if out.numel() == 0 {
        return Ok(());
    }
    let device = out.device();
    spec.tensors().try_for_each(|t| t.check_same_device(spec.op, out))?;
    let vector = spec.vector_width(out);
    let waits = (!inplace || spec.is_grad) && fusion::reaches_min_bytes(out);
    if !waits && spec.try_run_dense(vector, out, inplace)? {
        return Ok(());
    }
    let needs_words = spec.compute == DType::I64 && !device.info().features.i64;
    let expr = match needs_words.then(|| word_expression(spec.expr)).flatten() {
        Some(words) => words,
        None => {
            launch::check_device_dtype(spec.op, spec.compute, device)?;
            spec.expr
        }
    };
    let is_bool = matches!(spec.type_rule, TypeRule::Compare | TypeRule::Predicate | TypeRule::Logic);
    let compute = compute_dtype_name(spec.type_rule, spec.compute, out);
    let mut tensors: SmallVec<[&Tensor; 6]> = SmallVec::new();
    let mut call = PointwiseLaunch {
        op: spec.op,
        expr,
        math_files: spec.math_files,
        input_names: SmallVec::new(),
        input_dtypes: SmallVec::new(),
        layouts: smallvec![out.layout().clone()],
        scalars: SmallVec::new(),
        out_dtype: launch::shader_dtype_name(out.dtype(), device),
        is_float_math: !is_bool
            && spec.result == spec.compute
            && matches!(spec.compute, DType::F32 | DType::F16 | DType::BF16),
        compute,
        result: if is_bool {
            // The expression is a bool, for every operand type.
            "bool"
        } else if spec.result == spec.compute {
            compute
        } else {
            launch::shader_dtype_name(spec.result, device)
        },
        inplace,
        is_grad: spec.is_grad,
        vector_width: vector,
        kernel_key: spec.kernel_key(out, inplace),
    };
    for input in &spec.inputs {
        match input.operand {
            Operand::Tensor(t) => {
                call.input_names.push(input.name);
                call.input_dtypes.push(launch::shader_dtype_name(t.dtype(), device));
                call.layouts.push(t.layout().broadcast_to(spec.op, out.shape())?);
                tensors.push(t);
            }
            Operand::Scalar(s) => {
                fail_if!(call.scalars.len() >= MAX_SCALARS;
                    argument(spec.op), "takes at most four scalars");
                call.scalars.push((input.name, spec.encode_input(s)));
            }
        }
    }
    if waits && fusion::can_defer(&call, &tensors, out) {
        match fusion::try_defer(call, &tensors, out)? {
            None => return Ok(()),
            Some(alone) => call = alone,
        }
    }
    let (kernel, params, groups) = call.resolve_kernel(device)?;
    if inplace {
        tensors.remove(0);
    }
    tensors.push(out);
    launch::enqueue(kernel, &tensors, params, [groups, 1, 1])
}
