//! What a record says of an operation, and what is made of it.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::tensor::Tensor;

use super::cost;

/// What an input of a case holds.
#[derive(Clone, Copy, Debug)]
pub enum InputSpec {
    /// Distinct floats in -1.5..1.5, none near 0.
    Signed(&'static [usize]),
    /// Distinct floats in 0.5..2.
    Positive(&'static [usize]),
    /// Distinct floats in -0.8..0.8.
    Bounded(&'static [usize]),
    /// Indices below a bound, repeated.
    Index(&'static [usize], usize),
    /// Truth values.
    Bool(&'static [usize]),
}

/// One operation on given inputs.
#[derive(Clone, Copy, Debug)]
pub struct OpCase {
    /// Its name, with what is special about this call.
    pub name: &'static str,
    pub(super) inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
    /// Whether every float input has a gradient; else an input that requires one is an error.
    pub has_gradient: bool,
    /// Whether finite differences say something about it.
    pub is_smooth: bool,
    /// Whether it takes 16-bit floats.
    pub supports_half: bool,
    /// Whether its result depends on no input, which only says the type and the device.
    pub is_factory: bool,
    /// Bit k is set where dimension 0 of input k is a batch, whose lines give those of the result, each by itself; 0 for none.
    pub batched_inputs: u8,
    /// Whether it goes element by element, which one family of kernels does.
    pub is_elementwise: bool,
    /// Inputs of the size at which it is measured, where it is not made of the others: see [`Case::large`].
    pub(super) bench_inputs: &'static [InputSpec],
    /// Bytes that a call has to move.
    pub(super) bytes_fn: CostFn,
    /// Floating-point operations of its products; `None` where it has none.
    pub(super) flops_fn: Option<CostFn>,
    /// Where the results of a type are not within its own tolerance of those of f32: absolute, relative, and why.
    tolerances: &'static [(DType, f64, f64, &'static str)],
}

/// Something that is counted of a call, from its inputs and its result.
pub(super) type CostFn = fn(&[Tensor], &Tensor) -> u64;

/// One rounding of numbers of about 1, on the way.
pub(super) const ONE_ROUNDING: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 1e-3, 1e-3, "made of operations that round to the type"),
    (DType::BF16, 8e-3, 1.6e-2, "made of operations that round to the type"),
];

/// One rounding of numbers of about 4, on the way.
pub(super) const ONE_ROUNDING_NEAR_4: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 4e-3, 1e-3, "the first product is rounded to the type before the second"),
    (DType::BF16, 3e-2, 1.6e-2, "the first product is rounded to the type before the second"),
];

/// PyTorch's absolute and relative tolerance of a type; f64 is held to that of f32, with whose results it is compared.
fn default_tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (1e-5, 1e-3),
        DType::BF16 => (1e-5, 1.6e-2),
        _ => (1e-5, 1.3e-6),
    }
}

impl OpCase {
    /// The inputs, floats in a type.
    pub fn inputs(&self, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
        self.inputs.iter().enumerate().map(|(k, input)| input.create(k, dtype, device)).collect()
    }

    /// The result, with the same random numbers in every run.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Tensor> {
        if let Some(first) = inputs.first() {
            first.device().manual_seed(0);
        }
        (self.call)(inputs)
    }

    /// The inputs in f64, with that type's own values, where the device and the operation take it.
    pub fn inputs_f64(&self, device: &Device) -> Result<Option<Vec<Tensor>>> {
        if !self.supports_dtype(DType::F64) || !device.supports_dtype(DType::F64) {
            return Ok(None);
        }
        self.inputs(DType::F64, device).map(Some)
    }

    /// Whether it can be called in a type: the null device knows, without a kernel. Gradients included.
    pub fn supports_dtype(&self, dtype: DType) -> bool {
        self.supports(dtype, &Device::null(Default::default()))
    }

    /// Whether it can be called on a device, the null device of a profile.
    pub fn supports_device(&self, device: &Device) -> bool {
        self.supports(DType::F32, device)
    }

    /// Whether it has products, and is limited by them.
    #[must_use]
    pub fn has_flops(&self) -> bool {
        self.flops_fn.is_some()
    }

    /// Whether there are inputs to measure it with: see [`large`](Self::large).
    #[must_use]
    pub fn has_bench_inputs(&self) -> bool {
        !self.bench_inputs.is_empty() || self.batched_inputs != 0
    }

    fn supports(&self, dtype: DType, device: &Device) -> bool {
        let leaf = |t: Tensor| {
            if self.has_gradient && t.dtype().is_float() { t.requires_grad_() } else { Ok(t) }
        };
        let made = self.inputs(dtype, device).and_then(|inputs| {
            let out = self.run(&inputs.into_iter().map(leaf).collect::<Result<Vec<_>>>()?)?;
            if out.requires_grad() { out.backward_with(&out.ones_like()?) } else { Ok(()) }
        });
        made.is_ok()
    }

    /// The operation's name, without what is special about this call.
    pub fn op_name(&self) -> &'static str {
        self.name.split(' ').next().unwrap_or(self.name)
    }

    /// Element by element.
    pub(super) const fn elementwise(self) -> Self {
        Self { is_elementwise: true, batched_inputs: 1, ..self }
    }

    /// With batches in some of the inputs.
    pub(super) const fn with_batched_inputs(self, inputs: u8) -> Self {
        Self { batched_inputs: inputs, ..self }
    }

    /// For 32 bits and more.
    pub(super) const fn without_half(self) -> Self {
        Self { supports_half: false, ..self }
    }

    /// Depends on no input.
    pub(super) const fn as_factory(self) -> Self {
        Self { is_factory: true, bytes_fn: cost::write_only_bytes, ..self }
    }

    /// Measured with these inputs.
    pub(super) const fn with_bench_inputs(self, large: &'static [InputSpec]) -> Self {
        Self { bench_inputs: large, ..self }
    }

    /// Moves as many bytes as `bytes` says, and not all of its inputs and its result.
    pub(super) const fn with_bytes(self, bytes: CostFn) -> Self {
        Self { bytes_fn: bytes, ..self }
    }

    /// Multiplies matrices.
    pub(super) const fn with_flops(self, flops: CostFn) -> Self {
        Self { flops_fn: Some(flops), ..self }
    }

    /// Less exact in some types.
    pub(super) const fn with_tolerances(
        self,
        tolerances: &'static [(DType, f64, f64, &'static str)],
    ) -> Self {
        Self { tolerances, ..self }
    }

    /// The absolute and the relative tolerance of results in a type, beside those of f32.
    #[must_use]
    pub fn tolerance(&self, dtype: DType) -> (f64, f64) {
        let own = self.tolerances.iter().find(|(of, ..)| *of == dtype);
        own.map_or_else(|| default_tolerance(dtype), |&(_, absolute, relative, _)| (absolute, relative))
    }

    /// The tolerances that are not the types': `f16 2e-3, 1e-3`.
    pub fn tolerances(&self) -> impl Iterator<Item = String> {
        self.tolerances
            .iter()
            .map(|(dtype, absolute, relative, _)| format!("{dtype} {absolute:e}, {relative:e}"))
    }

    /// Bytes that a call has to move: all inputs read and the result written once, where the record knows no better.
    #[must_use]
    pub fn bytes(&self, inputs: &[Tensor], out: &Tensor) -> u64 {
        (self.bytes_fn)(inputs, out)
    }

    /// Floating-point operations of the products in a call; `None` for what is no product, and limited by memory.
    #[must_use]
    pub fn flops(&self, inputs: &[Tensor], out: &Tensor) -> Option<u64> {
        self.flops_fn.map(|flops| flops(inputs, out))
    }

    /// Inputs to be measured with: the record's own; else of about `elements` elements, in one line for what goes element by element,
    /// or as the small ones in large batches. `None` where the record has nothing larger than what the checks run.
    pub fn create_bench_inputs(
        &self,
        elements: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Option<Vec<Tensor>>> {
        let grown = |k: usize, input: &InputSpec| -> Vec<usize> {
            let shape = input.shape();
            match self.batched_inputs >> k & 1 {
                _ if self.is_elementwise => vec![elements],
                1 => {
                    let line: usize = shape[1..].iter().product();
                    [&[(elements / line.max(1)).max(1)], &shape[1..]].concat()
                }
                _ => shape.to_vec(),
            }
        };
        if !self.has_bench_inputs() {
            return Ok(None);
        }
        let own = !self.bench_inputs.is_empty();
        let inputs = if own { self.bench_inputs } else { self.inputs };
        let made = inputs.iter().enumerate().map(|(k, input)| {
            let shape = if own { input.shape().to_vec() } else { grown(k, input) };
            input.create_with_shape(&shape, k, dtype, device)
        });
        made.collect::<Result<Vec<_>>>().map(Some)
    }
}

impl InputSpec {
    /// The shape that the checks run.
    fn shape(self) -> &'static [usize] {
        match self {
            Self::Signed(shape)
            | Self::Positive(shape)
            | Self::Bounded(shape)
            | Self::Index(shape, _)
            | Self::Bool(shape) => shape,
        }
    }

    fn create(self, k: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.create_with_shape(self.shape(), k, dtype, device)
    }

    /// As input `k`, in another shape.
    fn create_with_shape(self, shape: &[usize], k: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let unit = |shape: &[usize]| -> Vec<f32> {
            // The golden ratio's multiples: spread evenly, none twice.
            let at = |i: usize| (i as f64 * 0.618_033_988_749_895 + 0.11 + 0.37 * k as f64).fract() as f32;
            (0..shape.iter().product()).map(at).collect()
        };
        let map = |shape: &[usize], f: fn(f32) -> f32| -> Result<Tensor> {
            let values: Vec<f32> = unit(shape).into_iter().map(f).collect();
            Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)
        };
        match self {
            Self::Signed(_) => map(shape, |u| if u < 0.5 { u * 2.4 - 1.5 } else { u * 2.4 - 0.9 }),
            Self::Positive(_) => map(shape, |u| 0.5 + u * 1.5),
            Self::Bounded(_) => map(shape, |u| u * 1.6 - 0.8),
            Self::Index(_, bound) => {
                let values: Vec<i64> =
                    (0..shape.iter().product::<usize>()).map(|i| ((i * 7 + 3) % bound) as i64).collect();
                Tensor::from_slice(&values, shape, device)
            }
            Self::Bool(_) => {
                let values: Vec<bool> =
                    (0..shape.iter().product::<usize>()).map(|i| i * 7 % 3 != 1).collect();
                Tensor::from_bools(&values, shape, device)
            }
        }
    }
}

/// Smooth, with gradients, in every float type.
pub(super) const fn smooth(
    name: &'static str,
    inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> OpCase {
    OpCase {
        name,
        inputs,
        call,
        has_gradient: true,
        is_smooth: true,
        supports_half: true,
        is_factory: false,
        batched_inputs: 0,
        is_elementwise: false,
        bench_inputs: &[],
        bytes_fn: cost::read_all_write_once,
        flops_fn: None,
        tolerances: &[],
    }
}

/// As [`smooth`], with steps or kinks.
pub(super) const fn nonsmooth(
    name: &'static str,
    inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> OpCase {
    OpCase { is_smooth: false, ..smooth(name, inputs, call) }
}

/// Without a gradient.
pub(super) const fn nondifferentiable(
    name: &'static str,
    inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> OpCase {
    OpCase { has_gradient: false, is_smooth: false, ..smooth(name, inputs, call) }
}

/// Some rows of five.
pub(super) const S: &[usize] = &[3, 5];
