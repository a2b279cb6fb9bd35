//! Softmax and log-softmax: one kernel forward, one backward, for any strides.

use forebay_shaders::KernelSpec;
use smallvec::{SmallVec, smallvec};

use super::launch::{self, GROUP, Params};
use super::spread::{Held, QUAD, has_quads};
use crate::amp::recast;
use crate::autograd::{self, SavedTensor};
use crate::device::Identity;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::layout::{collapse_one, normalize_dim};
use crate::tensor::{Dims, Tensor};

/// The rows of a tensor along one dimension, and how threads share them.
pub(super) struct Rows {
    /// Number of rows.
    pub(super) rows: usize,
    /// Elements of a row.
    pub(super) extent: usize,
    /// Elements of the dimensions after that of the rows.
    pub(super) inner: usize,
    /// Whether neighbouring threads hold neighbouring rows.
    pub(super) across: bool,
    stride: usize,
    shape: Dims,
    strides: Dims,
}

impl Rows {
    #[track_caller]
    pub(super) fn new(op: &'static str, x: &Tensor, dim: isize) -> Result<Self> {
        let d = normalize_dim(op, dim, x.rank())?;
        let extent = x.shape().get(d).copied().unwrap_or(1);
        let inner: usize = x.shape().iter().skip(d + 1).product();
        let dims = x.shape().iter().copied().zip(x.strides().iter().copied()).enumerate();
        let (shape, strides) = collapse_one(dims.filter(|(k, _)| *k != d).map(|(_, dim)| dim));
        launch::check_rank(op, shape.len())?;
        let across = inner > 1;
        Ok(Self {
            rows: x.numel() / extent.max(1),
            extent,
            inner,
            across,
            stride: x.strides().get(d).copied().unwrap_or(1),
            shape,
            strides,
        })
    }

    /// The parameters that say where rows lie: eight words, the last two those of `more`, then shape and strides.
    pub(super) fn params(&self, x: &Tensor, more: [usize; 2]) -> Params {
        let params = Params::new().size(self.rows).size(self.extent).size(self.inner).size(self.shape.len());
        let params = params.size(x.layout().offset()).size(self.stride).size(more[0]).size(more[1]);
        params.dims(&self.shape).dims(&self.strides)
    }

    /// How threads hold a row of `x`, at most `most` steps of four each.
    pub(super) fn held(&self, x: &Tensor, most: usize) -> Held {
        let quads = has_quads(x.dtype()) && self.in_quads(x) && self.extent.is_multiple_of(QUAD);
        if self.across { Held::across(self.extent) } else { Held::along(self.extent, quads, most) }
    }

    /// Whether every row of `x` starts at a multiple of four elements, which lie side by side.
    pub(super) fn in_quads(&self, x: &Tensor) -> bool {
        let aligned = |n: &usize| n.is_multiple_of(QUAD);
        self.stride == 1 && aligned(&x.layout().offset()) && self.strides.iter().all(aligned)
    }
}

/// Threads that share a row of `extent` elements.
pub(super) fn lanes(extent: usize, across: bool) -> usize {
    match extent {
        0..=8 => 1,
        9..=64 => 8,
        65..=1024 => 32,
        _ if across => 32,
        _ => GROUP,
    }
}

/// Floats of at most 32 bits.
#[track_caller]
pub(super) fn check_float(op: &'static str, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(Error::dtype(op, other, "takes f32, f16 and bf16; cast with `to_dtype`")),
    }
}

/// The floats that softmax takes.
#[track_caller]
fn check(op: &'static str, x: &Tensor) -> Result<()> {
    if x.dtype() == DType::F64 {
        launch::check_compute(op, DType::F64, x.device())
    } else {
        check_float(op, x)
    }
}

fn run(op: &'static str, input: &Tensor, y: Option<&Tensor>, dim: isize) -> Result<Tensor> {
    let out = Tensor::empty(input.shape(), input.dtype(), input.device())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let rows = Rows::new(op, input, dim)?;
    let held = rows.held(input, if y.is_some() { 8 } else { 16 });
    let (dtype, log) = (launch::shader_dtype(input.dtype(), input.device()), op == "log_softmax");
    let mut identity = Identity::new("softmax");
    identity.word(dtype);
    identity.flags(&[y.is_some(), log, rows.across]);
    identity.number(held.lanes | held.width << 16 | held.hold << 32);
    let spec = || {
        KernelSpec::new("softmax")
            .def("pass", if y.is_some() { "backward" } else { "forward" })
            .def("log", log)
            .def("dtype", dtype)
            .def("lanes", held.lanes)
            .def("across", rows.across)
            .def("width", held.width)
            .def("hold", held.hold)
    };
    let mut tensors: SmallVec<[&Tensor; 3]> = smallvec![input];
    if let Some(y) = y {
        tensors.push(y);
    }
    tensors.push(&out);
    launch::launch_of(&identity, spec, &tensors, rows.params(input, [0, 0]), held.groups(rows.rows))?;
    drop(tensors);
    Ok(out)
}

#[track_caller]
fn softmax(op: &'static str, x: &Tensor, dim: isize) -> Result<Tensor> {
    let _op = memory::scope::op(op);
    check(op, x)?;
    normalize_dim(op, dim, x.rank())?;
    let out = run(op, x, None, dim)?;
    if !autograd::wanted(&[x]) {
        return Ok(out);
    }
    let y = SavedTensor::result(&out);
    Ok(autograd::attach_twice(op, out, &[x], move |g, wants| {
        let y = y.get(wants)?;
        if !wants.again() {
            return Ok(smallvec![Some(run(op, g, Some(&y), dim)?)]);
        }
        // Rounded to the type at the end, as the kernel does.
        let wide = if g.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let (given, y) = (g.to_dtype(wide)?, y.to_dtype(wide)?);
        let grad = match op {
            "softmax" => y.mul(&given.sub(&given.mul(&y)?.sum(&[dim], true)?)?)?,
            _ => given.sub(&y.exp()?.mul(&given.sum(&[dim], true)?)?)?,
        };
        Ok(smallvec![Some(grad.to_dtype(g.dtype())?)])
    }))
}

impl Tensor {
    /// Exponentials along `dim`, divided by their sum. A row of nothing but -inf is NaN, as in PyTorch.
    ///
    /// ```
    /// # use forebay_core::{device::Device, tensor::Tensor, dtype::DType};
    /// # let device = Device::null(Default::default());
    /// let logits = Tensor::zeros(&[2, 10], DType::F32, &device)?;
    /// assert_eq!(logits.softmax(-1)?.shape(), [2, 10]);
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// `dim` is out of range; the dtype is no float, or f64 on a device without it; memory runs out.
    #[track_caller]
    pub fn softmax(&self, dim: isize) -> Result<Tensor> {
        recast!("softmax", [self], |x| x.softmax(dim));
        softmax("softmax", self, dim)
    }

    /// The logarithm of [`softmax`](Self::softmax), without its loss of digits.
    ///
    /// # Errors
    /// As [`softmax`](Self::softmax).
    #[track_caller]
    pub fn log_softmax(&self, dim: isize) -> Result<Tensor> {
        recast!("log_softmax", [self], |x| x.log_softmax(dim));
        softmax("log_softmax", self, dim)
    }

    /// [`softmax`](Self::softmax) of the values cast to `dtype`: halves lose less on the way in f32.
    ///
    /// # Errors
    /// As [`softmax`](Self::softmax).
    #[track_caller]
    pub fn softmax_with_dtype(&self, dim: isize, dtype: DType) -> Result<Tensor> {
        softmax("softmax", &self.to_dtype(dtype)?, dim)
    }

    /// [`log_softmax`](Self::log_softmax) of the values cast to `dtype`.
    ///
    /// # Errors
    /// As [`softmax`](Self::softmax).
    #[track_caller]
    pub fn log_softmax_with_dtype(&self, dim: isize, dtype: DType) -> Result<Tensor> {
        softmax("log_softmax", &self.to_dtype(dtype)?, dim)
    }
}
