//! Pooling of images [N, C, H, W] or [C, H, W], and of signals [N, C, L] or [C, L]. 16-bit floats are computed in f32.

use forebay_shaders::KernelSpec;

use super::launch::{self, GROUP, Params};
use super::reduce::dense;
use crate::autograd;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::tensor::{Dims, Tensor};

/// The window of a pooling operation over `N` dimensions, in their order. `Pool2d { stride: [1, 1], ..Pool2d::new(3) }`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool<const N: usize> {
    /// Extents of the window.
    pub kernel: [usize; N],
    /// Steps from one window to the next; PyTorch's default is the kernel.
    pub stride: [usize; N],
    /// Elements added at each side, at most half the kernel.
    pub padding: [usize; N],
    /// Distance of the elements in a window; only for the maximum.
    pub dilation: [usize; N],
    /// Whether a last window may reach over the edge.
    pub ceil_mode: bool,
    /// Whether padding counts in an average.
    pub count_include_pad: bool,
    /// What an average is divided by, if not by the size of the window.
    pub divisor_override: Option<i64>,
}

/// The window of a signal's pooling.
pub type Pool1d = Pool<1>;
/// The window of an image's pooling; height and width.
pub type Pool2d = Pool<2>;
/// The window of a volume's pooling; depth, height and width.
pub type Pool3d = Pool<3>;

impl<const N: usize> Pool<N> {
    /// Windows of one extent, side by side.
    #[must_use]
    pub fn new(kernel: usize) -> Self {
        Self::with([kernel; N])
    }

    /// Windows side by side.
    #[must_use]
    pub fn with(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: [0; N],
            dilation: [1; N],
            ceil_mode: false,
            count_include_pad: true,
            divisor_override: None,
        }
    }

    /// Of some of the dimensions, and of extent 1 in the others.
    pub(super) fn part(&self, axes: [Option<usize>; 2]) -> Pool2d {
        let of = |numbers: [usize; N], rest: usize| axes.map(|axis| axis.map_or(rest, |axis| numbers[axis]));
        Pool2d {
            kernel: of(self.kernel, 1),
            stride: of(self.stride, 1),
            padding: of(self.padding, 0),
            dilation: of(self.dilation, 1),
            ceil_mode: self.ceil_mode,
            count_include_pad: self.count_include_pad,
            divisor_override: self.divisor_override,
        }
    }

    fn out(&self, op: &'static str, axis: usize, extent: usize) -> Result<usize> {
        let (k, s, p, d) = (self.kernel[axis], self.stride[axis], self.padding[axis], self.dilation[axis]);
        // So large that nothing fits, and positions would not fit the kernel's integers.
        let large = [k, s, p, d].iter().any(|&n| n > i32::MAX as usize);
        if large || k == 0 || s == 0 || d == 0 || p * 2 > k {
            return Err(Error::argument(
                op,
                format!(
                    "kernel, stride and dilation are at least 1 and padding at most half the kernel; got {self:?}"
                ),
            ));
        }
        // The last window may end so far behind the padding.
        let beyond = if self.ceil_mode { s - 1 } else { 0 };
        let (padded, reach) = (extent + 2 * p, d * (k - 1) + 1);
        if padded + beyond < reach {
            return Err(Error::argument(
                op,
                format!("a window of {reach} does not fit an extent of {padded} with padding"),
            ));
        }
        let mut n = (padded + beyond - reach) / s + 1;
        // A window that starts in the padding on the right would be empty.
        if self.ceil_mode && (n - 1) * s >= extent + p {
            n -= 1;
        }
        Ok(n)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Max,
    Avg,
    AdaptiveMax,
    AdaptiveAvg,
}

impl Kind {
    fn is_max(self) -> bool {
        matches!(self, Self::Max | Self::AdaptiveMax)
    }
    fn is_adaptive(self) -> bool {
        matches!(self, Self::AdaptiveMax | Self::AdaptiveAvg)
    }
}

/// Everything a kernel of the family needs.
#[derive(Clone)]
struct Plan {
    op: &'static str,
    kind: Kind,
    window: Pool2d,
    input: Dims,
    output: Dims,
}

impl Plan {
    fn new(
        op: &'static str,
        kind: Kind,
        x: &Tensor,
        window: Pool2d,
        outs: Option<[usize; 2]>,
    ) -> Result<Self> {
        let (&[.., h, w], 3..=4) = (x.shape(), x.rank()) else {
            return Err(Error::shape(op, "takes [N, C, H, W] or [C, H, W]", &[x.shape()]));
        };
        // Averages of integers are rounded towards zero, as in PyTorch; windows that divide a plane evenly are of floats there.
        let taken = match kind {
            Kind::Max | Kind::Avg => x.dtype() != DType::Bool,
            Kind::AdaptiveMax | Kind::AdaptiveAvg => x.dtype().is_float(),
        };
        if !taken {
            let expected = if kind.is_adaptive() { "takes floats" } else { "takes numbers" };
            return Err(Error::dtype(op, x.dtype(), format!("{expected}; cast with `to_dtype`")));
        }
        launch::check_compute(op, x.dtype(), x.device())?;
        let [oh, ow] = match outs {
            Some(_) if h * w == 0 => {
                return Err(Error::shape(op, "takes planes that are not empty", &[x.shape()]));
            }
            Some(outs) => outs,
            None => [window.out(op, 0, h)?, window.out(op, 1, w)?],
        };
        let mut output: Dims = x.shape().into();
        let rank = output.len();
        output[rank - 2] = oh;
        output[rank - 1] = ow;
        Ok(Self { op, kind, window, input: x.shape().into(), output })
    }

    fn launch(&self, pass: &'static str, from: &Tensor, to: &Tensor, places: Option<&Tensor>) -> Result<()> {
        let spec = KernelSpec::new("pool")
            .def("dtype", launch::shader_dtype(to.dtype(), to.device()))
            .def("kind", if self.kind.is_max() { "max" } else { "avg" })
            .def("adaptive", self.kind.is_adaptive())
            .def("pass", pass);
        let plane = |d: &Dims| [d[d.len() - 2], d[d.len() - 1]];
        let w = &self.window;
        let mut params = Params::new()
            .size(to.numel())
            .u32(w.count_include_pad.into())
            .f32(w.divisor_override.unwrap_or(0) as f32)
            .u32(0);
        for pair in [plane(&self.input), plane(&self.output), w.kernel, w.stride, w.padding, w.dilation] {
            params = params.size(pair[0]).size(pair[1]);
        }
        let lanes = if to.dtype().size() <= 2 { 4 } else { 1 };
        let groups = to.numel().div_ceil(lanes * GROUP);
        match places {
            Some(places) => launch::launch(&spec, &[from, to, places], params, groups),
            None => launch::launch(&spec, &[from, to], params, groups),
        }
    }

    /// The result, and where each maximum was.
    #[track_caller]
    fn run(self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let _op = memory::scope::op(self.op);
        let input = x.detach().contiguous()?;
        // Kernels number elements from the storage's start.
        let input = if input.layout().offset() == 0 { input } else { input.copy()? };
        let out = Tensor::empty(&self.output, x.dtype(), x.device())?;
        let places = match self.kind.is_max() {
            true => Some(Tensor::empty(&self.output, DType::I32, x.device())?),
            false => None,
        };
        self.launch("forward", &input, &out, places.as_ref())?;
        let kept = places.clone();
        let (op, plan) = (self.op, self.clone());
        let places_again = places.clone();
        // Which elements are the largest is settled: what takes them is linear.
        let forward = move |x: &Tensor| {
            let x = dense(x)?;
            if let Some(places) = &places_again {
                let planes: usize = plan.output[..plan.output.len() - 2].iter().product();
                let lines = x.reshape([planes, x.numel() / planes.max(1)])?;
                return lines
                    .gather(1, &places.reshape([planes, places.numel() / planes.max(1)])?)?
                    .reshape(&plan.output[..]);
            }
            let out = Tensor::empty(&plan.output, x.dtype(), x.device())?;
            plan.launch("forward", &x, &out, None)?;
            Ok(out)
        };
        let out = autograd::attach_linear(op, out, x, forward, move |g| {
            let g = dense(g)?;
            let grad = Tensor::empty(&self.input, g.dtype(), g.device())?;
            self.launch("backward", &g, &grad, kept.as_ref())?;
            Ok(grad)
        });
        Ok((out, places))
    }

    /// The result, and the place of each maximum in its plane, as i64.
    #[track_caller]
    fn run_with_indices(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let op = self.op;
        let (out, places) = self.run(x)?;
        // invariant: a maximum has places
        let places = places.ok_or_else(|| Error::argument(op, "no places were kept"))?;
        Ok((out, places.to_dtype(DType::I64)?))
    }
}

const ADAPTIVE_MAX: &str = "adaptive_max_pool2d";

impl Tensor {
    /// The largest element of each window.
    ///
    /// # Errors
    /// A window does not fit; the dtype is bool.
    #[track_caller]
    pub fn max_pool2d(&self, window: Pool2d) -> Result<Tensor> {
        Ok(Plan::new("max_pool2d", Kind::Max, self, window, None)?.run(self)?.0)
    }

    /// As [`max_pool2d`](Self::max_pool2d), with the place of each maximum in its plane, as i64.
    ///
    /// # Errors
    /// As [`max_pool2d`](Self::max_pool2d).
    #[track_caller]
    pub fn max_pool2d_with_indices(&self, window: Pool2d) -> Result<(Tensor, Tensor)> {
        Plan::new("max_pool2d", Kind::Max, self, window, None)?.run_with_indices(self)
    }

    /// The average of each window.
    ///
    /// # Errors
    /// A window does not fit; the dtype is bool.
    #[track_caller]
    pub fn avg_pool2d(&self, window: Pool2d) -> Result<Tensor> {
        if window.dilation != [1; 2] {
            return Err(Error::argument("avg_pool2d", "averages have no dilation"));
        }
        if window.divisor_override == Some(0) {
            return Err(Error::argument("avg_pool2d", "the divisor is not 0"));
        }
        Ok(Plan::new("avg_pool2d", Kind::Avg, self, window, None)?.run(self)?.0)
    }

    /// Averages of as many windows as the result has elements, which divide the plane evenly.
    ///
    /// # Errors
    /// The dtype is no float; an extent of the input is 0.
    #[track_caller]
    pub fn adaptive_avg_pool2d(&self, output: [usize; 2]) -> Result<Tensor> {
        let window = Pool2d { count_include_pad: false, ..Pool2d::new(1) };
        Ok(Plan::new("adaptive_avg_pool2d", Kind::AdaptiveAvg, self, window, Some(output))?.run(self)?.0)
    }

    /// The largest elements of as many windows as the result has elements, which divide the plane evenly; height and width.
    ///
    /// # Errors
    /// The dtype is no float; an extent of the input is 0.
    #[track_caller]
    pub fn adaptive_max_pool2d(&self, output: [usize; 2]) -> Result<Tensor> {
        Ok(Plan::new(ADAPTIVE_MAX, Kind::AdaptiveMax, self, Pool2d::new(1), Some(output))?.run(self)?.0)
    }

    /// As [`adaptive_max_pool2d`](Self::adaptive_max_pool2d), with the place of each maximum in its plane, as i64.
    ///
    /// # Errors
    /// As [`adaptive_max_pool2d`](Self::adaptive_max_pool2d).
    #[track_caller]
    pub fn adaptive_max_pool2d_with_indices(&self, output: [usize; 2]) -> Result<(Tensor, Tensor)> {
        Plan::new(ADAPTIVE_MAX, Kind::AdaptiveMax, self, Pool2d::new(1), Some(output))?.run_with_indices(self)
    }

    /// [`adaptive_max_pool2d`](Self::adaptive_max_pool2d) of signals \[N, C, L\] or \[C, L\].
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn adaptive_max_pool1d(&self, output: usize) -> Result<Tensor> {
        self.unsqueeze(-2)?.adaptive_max_pool2d([1, output])?.squeeze(-2)
    }

    /// As [`adaptive_max_pool1d`](Self::adaptive_max_pool1d), with the place of each maximum in its signal, as i64.
    ///
    /// # Errors
    /// As [`adaptive_max_pool2d`](Self::adaptive_max_pool2d).
    #[track_caller]
    pub fn adaptive_max_pool1d_with_indices(&self, output: usize) -> Result<(Tensor, Tensor)> {
        let (out, places) = self.unsqueeze(-2)?.adaptive_max_pool2d_with_indices([1, output])?;
        Ok((out.squeeze(-2)?, places.squeeze(-2)?))
    }
}
