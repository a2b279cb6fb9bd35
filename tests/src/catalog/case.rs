//! Records of the catalog, and inputs created from them.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::tensor::Tensor;

use super::cost;

/// Contents of an input.
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
    /// Booleans.
    Bool(&'static [usize]),
}

/// Record of the catalog: an operation with one set of inputs.
#[derive(Clone, Copy, Debug)]
pub struct OpCase {
    /// Name of the operation, followed by a description of this call.
    pub name: &'static str,
    pub(crate) inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
    /// True if every float input has a gradient; otherwise an input that requires one is an error.
    pub has_gradient: bool,
    /// True if finite differences approximate the gradients.
    pub is_smooth: bool,
    /// True if the operation takes 16-bit floats.
    pub supports_half: bool,
    /// True for a factory: inputs only determine the type and the device.
    pub is_factory: bool,
    /// Bit k is set if dimension 0 of input k is a batch: rows of the result depend only on its rows. 0 for none.
    pub batched_inputs: u8,
    /// True for an elementwise operation.
    pub is_elementwise: bool,
    /// Benchmark inputs, if they cannot be scaled up from `inputs`: see
    /// [`create_bench_inputs`](OpCase::create_bench_inputs).
    pub(crate) bench_inputs: &'static [InputSpec],
    /// Minimum memory traffic of a call in bytes.
    pub(crate) bytes_fn: CostFn,
    /// Floating-point operations of matrix products; `None` if there are none.
    pub(crate) flops_fn: Option<CostFn>,
    /// Tolerances that are wider than the type's default: type, absolute, relative, and the reason.
    tolerances: &'static [(DType, f64, f64, &'static str)],
}

/// Cost of a call, computed from its inputs and its result.
pub(crate) type CostFn = fn(&[Tensor], &Tensor) -> u64;

/// One intermediate rounding of values near 1.
pub(crate) const ONE_ROUNDING: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 1e-3, 1e-3, "made of operations that round to the type"),
    (DType::BF16, 8e-3, 1.6e-2, "made of operations that round to the type"),
];

/// One intermediate rounding of values near 4.
pub(crate) const ONE_ROUNDING_NEAR_4: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 4e-3, 1e-3, "the first product is rounded to the type before the second"),
    (DType::BF16, 3e-2, 1.6e-2, "the first product is rounded to the type before the second"),
];

/// Returns PyTorch's absolute and relative tolerance of a type. f64 has that of f32, with whose results it is compared.
fn default_tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (1e-5, 1e-3),
        DType::BF16 => (1e-5, 1.6e-2),
        _ => (1e-5, 1.3e-6),
    }
}

impl OpCase {
    /// Creates the inputs, with floats of type `dtype`.
    pub fn inputs(&self, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
        self.inputs.iter().enumerate().map(|(k, input)| input.create(k, dtype, device)).collect()
    }

    /// Runs the operation with a fixed random seed.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Tensor> {
        if let Some(first) = inputs.first() {
            first.device().manual_seed(0);
        }
        (self.call)(inputs)
    }

    /// Creates the inputs in f64, if the device and the operation support f64.
    pub fn inputs_f64(&self, device: &Device) -> Result<Option<Vec<Tensor>>> {
        if !self.supports_dtype(DType::F64) || !device.supports_dtype(DType::F64) {
            return Ok(None);
        }
        self.inputs(DType::F64, device).map(Some)
    }

    /// Reports whether the operation and its gradient support a type, by a call on the null device.
    pub fn supports_dtype(&self, dtype: DType) -> bool {
        self.supports(dtype, &Device::null(Default::default()))
    }

    /// Reports whether the operation runs on a device; `device` is the null device with its profile.
    pub fn supports_device(&self, device: &Device) -> bool {
        self.supports(DType::F32, device)
    }

    #[must_use]
    pub fn has_flops(&self) -> bool {
        self.flops_fn.is_some()
    }

    /// Reports whether [`create_bench_inputs`](Self::create_bench_inputs) returns inputs.
    #[must_use]
    pub fn has_bench_inputs(&self) -> bool {
        !self.bench_inputs.is_empty() || self.batched_inputs != 0
    }

    fn supports(&self, dtype: DType, device: &Device) -> bool {
        let leaf = |t: Tensor| {
            if self.has_gradient && t.dtype().is_float() { t.to_leaf() } else { Ok(t) }
        };
        let made = self.inputs(dtype, device).and_then(|inputs| {
            let out = self.run(&inputs.into_iter().map(leaf).collect::<Result<Vec<_>>>()?)?;
            if out.requires_grad() { out.backward_with(&out.ones_like()?) } else { Ok(()) }
        });
        made.is_ok()
    }

    /// Returns the operation's name, without the description of this call.
    pub fn op_name(&self) -> &'static str {
        self.name.split(' ').next().unwrap_or(self.name)
    }

    pub(crate) const fn elementwise(self) -> Self {
        Self { is_elementwise: true, batched_inputs: 1, ..self }
    }

    pub(crate) const fn with_batched_inputs(self, inputs: u8) -> Self {
        Self { batched_inputs: inputs, ..self }
    }

    pub(crate) const fn without_half(self) -> Self {
        Self { supports_half: false, ..self }
    }

    /// Marks an operation that depends on no input.
    pub(crate) const fn as_factory(self) -> Self {
        Self { is_factory: true, bytes_fn: cost::write_only_bytes, ..self }
    }

    /// Sets the inputs for benchmarks.
    pub(crate) const fn with_bench_inputs(self, large: &'static [InputSpec]) -> Self {
        Self { bench_inputs: large, ..self }
    }

    /// Replaces the default memory traffic, which is all inputs and the result.
    pub(crate) const fn with_bytes(self, bytes: CostFn) -> Self {
        Self { bytes_fn: bytes, ..self }
    }

    /// Sets the floating-point operations of matrix products.
    pub(crate) const fn with_flops(self, flops: CostFn) -> Self {
        Self { flops_fn: Some(flops), ..self }
    }

    pub(crate) const fn with_tolerances(
        self,
        tolerances: &'static [(DType, f64, f64, &'static str)],
    ) -> Self {
        Self { tolerances, ..self }
    }

    /// Returns the absolute and the relative tolerance of results in a type, compared with f32 results.
    #[must_use]
    pub fn tolerance(&self, dtype: DType) -> (f64, f64) {
        let own = self.tolerances.iter().find(|(of, ..)| *of == dtype);
        own.map_or_else(|| default_tolerance(dtype), |&(_, absolute, relative, _)| (absolute, relative))
    }

    /// Formats the tolerances that differ from the types' defaults: `f16 2e-3, 1e-3`.
    pub fn tolerances(&self) -> impl Iterator<Item = String> {
        self.tolerances
            .iter()
            .map(|(dtype, absolute, relative, _)| format!("{dtype} {absolute:e}, {relative:e}"))
    }

    /// Returns the minimum memory traffic of a call in bytes: by default all inputs read and the result written once.
    #[must_use]
    pub fn bytes(&self, inputs: &[Tensor], out: &Tensor) -> u64 {
        (self.bytes_fn)(inputs, out)
    }

    /// Returns the floating-point operations of a call's matrix products; `None` if memory limits the call.
    #[must_use]
    pub fn flops(&self, inputs: &[Tensor], out: &Tensor) -> Option<u64> {
        self.flops_fn.map(|flops| flops(inputs, out))
    }

    /// Creates inputs for benchmarks: the record's own, or else inputs of about `elements` elements. Elementwise
    /// operations get one long row, batched ones the usual rows in large batches. Returns `None` if the record has no
    /// larger inputs than those of the checks.
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
    /// Returns the shape for the checks.
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

    /// Creates input `k` with another shape.
    fn create_with_shape(self, shape: &[usize], k: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let unit = |shape: &[usize]| -> Vec<f32> {
            // Multiples of the golden ratio: evenly distributed, without repetitions.
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

/// Record of a smooth, differentiable operation that supports every float type.
pub(crate) const fn smooth(
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

/// Record like [`smooth`], for operations with steps or kinks.
pub(crate) const fn nonsmooth(
    name: &'static str,
    inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> OpCase {
    OpCase { is_smooth: false, ..smooth(name, inputs, call) }
}

/// Record of an operation without a gradient.
pub(crate) const fn nondifferentiable(
    name: &'static str,
    inputs: &'static [InputSpec],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> OpCase {
    OpCase { has_gradient: false, is_smooth: false, ..smooth(name, inputs, call) }
}

/// Shape of most inputs.
pub(crate) const S: &[usize] = &[3, 5];
