//! What a record says of an operation, and what is made of it.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::tensor::Tensor;

use super::cost;

/// What an input of a case holds.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// Distinct floats in -1.5..1.5, none near 0.
    Signed(&'static [usize]),
    /// Distinct floats in 0.5..2.
    Positive(&'static [usize]),
    /// Distinct floats in -0.8..0.8.
    Small(&'static [usize]),
    /// Indices below a bound, repeated.
    Index(&'static [usize], usize),
    /// Truth values.
    Flags(&'static [usize]),
}

/// One operation on given inputs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name, with what is special about this call.
    pub name: &'static str,
    pub(super) inputs: &'static [Input],
    call: fn(&[Tensor]) -> Result<Tensor>,
    /// Whether every float input has a gradient; else an input that requires one is an error.
    pub gradient: bool,
    /// Whether finite differences say something about it.
    pub smooth: bool,
    /// Whether it takes 16-bit floats.
    pub halves: bool,
    /// Whether its result depends on no input, which only says the type and the device.
    pub made: bool,
    /// Bit k is set where dimension 0 of input k is a batch, whose lines give those of the result, each by itself; 0 for none.
    pub batched: u8,
    /// Whether it goes element by element, which one family of kernels does.
    pub elementwise: bool,
    /// Inputs of the size at which it is measured, where it is not made of the others: see [`Case::large`].
    pub(super) large: &'static [Input],
    /// Bytes that a call has to move.
    pub(super) bytes: Count,
    /// Floating-point operations of its products; `None` where it has none.
    pub(super) flops: Option<Count>,
    /// Where the results of a type are not within its own tolerance of those of f32: absolute, relative, and why.
    tolerances: &'static [(DType, f64, f64, &'static str)],
}

/// Something that is counted of a call, from its inputs and its result.
pub(super) type Count = fn(&[Tensor], &Tensor) -> u64;

/// One rounding of numbers of about 1, on the way.
pub(super) const ROUNDED: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 1e-3, 1e-3, "made of operations that round to the type"),
    (DType::BF16, 8e-3, 1.6e-2, "made of operations that round to the type"),
];

/// One rounding of numbers of about 4, on the way.
pub(super) const ROUNDED_WIDE: &[(DType, f64, f64, &str)] = &[
    (DType::F16, 4e-3, 1e-3, "the first product is rounded to the type before the second"),
    (DType::BF16, 3e-2, 1.6e-2, "the first product is rounded to the type before the second"),
];

/// PyTorch's absolute and relative tolerance of a type; f64 is held to that of f32, with whose results it is compared.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (1e-5, 1e-3),
        DType::BF16 => (1e-5, 1.6e-2),
        _ => (1e-5, 1.3e-6),
    }
}

impl Case {
    /// The inputs, floats in a type.
    pub fn inputs(&self, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
        self.inputs.iter().enumerate().map(|(k, input)| input.tensor(k, dtype, device)).collect()
    }

    /// The result, with the same random numbers in every run.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Tensor> {
        if let Some(first) = inputs.first() {
            first.device().manual_seed(0);
        }
        (self.call)(inputs)
    }

    /// The inputs in f64, with that type's own values, where the device and the operation take it.
    pub fn in_doubles(&self, device: &Device) -> Result<Option<Vec<Tensor>>> {
        if !self.takes(DType::F64) || !device.supports(DType::F64) {
            return Ok(None);
        }
        self.inputs(DType::F64, device).map(Some)
    }

    /// Whether it can be called in a type: the null device knows, without a kernel. Gradients included.
    pub fn takes(&self, dtype: DType) -> bool {
        self.can_run(dtype, &Device::null(Default::default()))
    }

    /// Whether it can be called on a device, the null device of a profile.
    pub fn runs_on(&self, device: &Device) -> bool {
        self.can_run(DType::F32, device)
    }

    /// Whether it has products, and is limited by them.
    #[must_use]
    pub fn multiplies(&self) -> bool {
        self.flops.is_some()
    }

    /// Whether there are inputs to measure it with: see [`large`](Self::large).
    #[must_use]
    pub fn is_measured(&self) -> bool {
        !self.large.is_empty() || self.batched != 0
    }

    fn can_run(&self, dtype: DType, device: &Device) -> bool {
        let leaf = |t: Tensor| {
            if self.gradient && t.dtype().is_float() { t.requires_grad_() } else { Ok(t) }
        };
        let made = self.inputs(dtype, device).and_then(|inputs| {
            let out = self.run(&inputs.into_iter().map(leaf).collect::<Result<Vec<_>>>()?)?;
            if out.requires_grad() { out.backward_with(&out.ones_like()?) } else { Ok(()) }
        });
        made.is_ok()
    }

    /// The operation's name, without what is special about this call.
    pub fn operation(&self) -> &'static str {
        self.name.split(' ').next().unwrap_or(self.name)
    }

    /// Element by element.
    pub(super) const fn elementwise(self) -> Self {
        Self { elementwise: true, batched: 1, ..self }
    }

    /// With batches in some of the inputs.
    pub(super) const fn batched(self, inputs: u8) -> Self {
        Self { batched: inputs, ..self }
    }

    /// For 32 bits and more.
    pub(super) const fn wide(self) -> Self {
        Self { halves: false, ..self }
    }

    /// Depends on no input.
    pub(super) const fn made(self) -> Self {
        Self { made: true, bytes: cost::written, ..self }
    }

    /// Measured with these inputs.
    pub(super) const fn measured(self, large: &'static [Input]) -> Self {
        Self { large, ..self }
    }

    /// Moves as many bytes as `bytes` says, and not all of its inputs and its result.
    pub(super) const fn moving(self, bytes: Count) -> Self {
        Self { bytes, ..self }
    }

    /// Multiplies matrices.
    pub(super) const fn multiplying(self, flops: Count) -> Self {
        Self { flops: Some(flops), ..self }
    }

    /// Less exact in some types.
    pub(super) const fn within(self, tolerances: &'static [(DType, f64, f64, &'static str)]) -> Self {
        Self { tolerances, ..self }
    }

    /// The absolute and the relative tolerance of results in a type, beside those of f32.
    #[must_use]
    pub fn tolerance(&self, dtype: DType) -> (f64, f64) {
        let own = self.tolerances.iter().find(|(of, ..)| *of == dtype);
        own.map_or_else(|| tolerance(dtype), |&(_, absolute, relative, _)| (absolute, relative))
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
        (self.bytes)(inputs, out)
    }

    /// Floating-point operations of the products in a call; `None` for what is no product, and limited by memory.
    #[must_use]
    pub fn flops(&self, inputs: &[Tensor], out: &Tensor) -> Option<u64> {
        self.flops.map(|flops| flops(inputs, out))
    }

    /// Inputs to be measured with: the record's own; else of about `elements` elements, in one line for what goes element by element,
    /// or as the small ones in large batches. `None` where the record has nothing larger than what the checks run.
    pub fn large(&self, elements: usize, dtype: DType, device: &Device) -> Result<Option<Vec<Tensor>>> {
        let grown = |k: usize, input: &Input| -> Vec<usize> {
            let shape = input.shape();
            match self.batched >> k & 1 {
                _ if self.elementwise => vec![elements],
                1 => {
                    let line: usize = shape[1..].iter().product();
                    [&[(elements / line.max(1)).max(1)], &shape[1..]].concat()
                }
                _ => shape.to_vec(),
            }
        };
        if !self.is_measured() {
            return Ok(None);
        }
        let own = !self.large.is_empty();
        let inputs = if own { self.large } else { self.inputs };
        let made = inputs.iter().enumerate().map(|(k, input)| {
            let shape = if own { input.shape().to_vec() } else { grown(k, input) };
            input.of_shape(&shape, k, dtype, device)
        });
        made.collect::<Result<Vec<_>>>().map(Some)
    }
}

impl Input {
    /// The shape that the checks run.
    fn shape(self) -> &'static [usize] {
        match self {
            Self::Signed(shape)
            | Self::Positive(shape)
            | Self::Small(shape)
            | Self::Index(shape, _)
            | Self::Flags(shape) => shape,
        }
    }

    fn tensor(self, k: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.of_shape(self.shape(), k, dtype, device)
    }

    /// As input `k`, in another shape.
    fn of_shape(self, shape: &[usize], k: usize, dtype: DType, device: &Device) -> Result<Tensor> {
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
            Self::Small(_) => map(shape, |u| u * 1.6 - 0.8),
            Self::Index(_, bound) => {
                let values: Vec<i64> =
                    (0..shape.iter().product::<usize>()).map(|i| ((i * 7 + 3) % bound) as i64).collect();
                Tensor::from_slice(&values, shape, device)
            }
            Self::Flags(_) => {
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
    inputs: &'static [Input],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> Case {
    Case {
        name,
        inputs,
        call,
        gradient: true,
        smooth: true,
        halves: true,
        made: false,
        batched: 0,
        elementwise: false,
        large: &[],
        bytes: cost::once,
        flops: None,
        tolerances: &[],
    }
}

/// As [`smooth`], with steps or kinks.
pub(super) const fn rough(
    name: &'static str,
    inputs: &'static [Input],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> Case {
    Case { smooth: false, ..smooth(name, inputs, call) }
}

/// Without a gradient.
pub(super) const fn flat(
    name: &'static str,
    inputs: &'static [Input],
    call: fn(&[Tensor]) -> Result<Tensor>,
) -> Case {
    Case { gradient: false, smooth: false, ..smooth(name, inputs, call) }
}

/// Some rows of five.
pub(super) const S: &[usize] = &[3, 5];
