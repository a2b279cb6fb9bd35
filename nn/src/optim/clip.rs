//! Gradient clipping on the device.

use forebay_shaders::KernelSpec;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::fused::{self, ELEMENTS_PER_WORKGROUP};
use crate::{DType, Device, Result, Tag, Tensor, autograd, check, fail, fail_if, memory};
use forebay_core::ops::kernel::launch::{self, KernelParams};

/// Number of elements whose squares one workgroup sums.
const ELEMENTS_PER_PARTIAL: usize = 4096;

/// Upper bound of `max_norm`. The kernel divides by at least 1e-6, and the quotient must be finite in f32.
const MAX_NORM_LIMIT: f64 = 1e32;

with_defaults! {
    /// Options of [`clip_grad_norm_with`], with PyTorch's defaults.
    ///
    /// ```
    /// # use forebay_nn::optim::ClipGradNormOptions;
    /// let largest = ClipGradNormOptions { norm_type: f64::INFINITY, ..ClipGradNormOptions::default() };
    /// assert_eq!((ClipGradNormOptions::default().norm_type, largest.error_if_nonfinite), (2.0, false));
    /// ```
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct ClipGradNormOptions {
        /// Order p of the norm (Σ |g|ᵖ)^(1/p), above 0; infinity for the largest |g|.
        pub norm_type: f64 = 2.0,
        /// If true, an infinite or NaN norm is an error, and the gradients stay unchanged. The host then waits for
        /// the device.
        pub error_if_nonfinite: bool = false,
    }
}

/// Scales the gradients of `parameters` in place so that their total norm is at most `max_norm`, and returns
/// the norm before scaling. The host does not wait for the device. Other norms: [`clip_grad_norm_with`].
///
/// Parameters may be on several devices. The norm is then computed on the device of the first parameter, as in PyTorch,
/// and [`to_device`](Tensor::to_device) copies partial sums there and the factor back.
///
/// ```no_run
/// # use forebay_core::{error::Result, tensor::Tensor};
/// # use forebay_nn::optim::clip_grad_norm_;
/// # fn step(parameters: &[Tensor]) -> Result<()> {
/// let norm = clip_grad_norm_(parameters, 1.0)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `parameters` is empty, or `max_norm` is negative or NaN. Also fails for gradients that are of f64 or do not match
/// their parameters.
#[track_caller]
pub fn clip_grad_norm_(parameters: &[Tensor], max_norm: f64) -> Result<Tensor> {
    clip_grad_norm_with(parameters, max_norm, &ClipGradNormOptions::default())
}

/// Clips like [`clip_grad_norm_`] with a norm of any order, and an optional error for a non-finite norm.
#[track_caller]
pub fn clip_grad_norm_with(
    parameters: &[Tensor],
    max_norm: f64,
    options: &ClipGradNormOptions,
) -> Result<Tensor> {
    const OP: &str = "clip_grad_norm_";
    check::non_negative_or_infinite(OP, "max_norm", max_norm)?;
    let power = options.norm_type;
    fail_if!(
        power.is_nan() || power <= 0.0;
        argument(OP), "takes a norm of an order above 0, or of infinity, not of {power}"
    );
    let kind = match power {
        1.0 => "one",
        2.0 => "two",
        f64::INFINITY => "largest",
        _ => "power",
    };
    let _op = memory::scope::enter_op(OP);
    let Some(device) = parameters.first().map(Tensor::device) else {
        fail!(argument(OP), "takes at least one parameter");
    };
    let grads = collect_grads(OP, parameters)?;
    let shares = split_by_device(device, &grads);
    let norm = Tensor::empty((), DType::F32, device)?;
    let _tag = memory::scope::enter_tag(Tag::Workspace);
    let parts = compute_norm_parts(kind, power, &shares)?;
    let count = parts.numel();
    let factor = Tensor::empty([1], DType::F32, device)?;
    let spec = KernelSpec::new("grad_norm").def("stage", "total").def("norm", kind);
    let params = KernelParams::new()
        .size(count)
        .f32(max_norm.min(MAX_NORM_LIMIT) as f32)
        .f32((1.0 / power) as f32)
        .loop_iterations(count.div_ceil(256) + 64);
    launch::launch(&spec, &[&parts, &norm, &factor], params, 1)?;
    if options.error_if_nonfinite {
        let value = norm.item()?;
        fail_if!(
            !value.is_finite();
            argument(OP),
            "the norm of order {power} of the gradients is {value}, so they cannot be clipped; look for its origin \
             (`autograd::detect_anomaly`), or leave `error_if_nonfinite` out"
        );
    }
    // An infinite bound leaves the gradients unchanged, even if the norm is infinite or NaN.
    if max_norm < f64::INFINITY {
        // Copies before it changes a gradient, because a copy may fail.
        let factors: Vec<Tensor> =
            shares.iter().map(|(device, _)| factor.to_device(device)).collect::<Result<_>>()?;
        for ((_, grads), factor) in shares.iter().zip(&factors) {
            transform_grads(grads, GradTransform::Scale(factor))?;
        }
    }
    Ok(norm)
}

type DeviceGrads<'a> = (&'a Device, Vec<Tensor>);

/// Splits gradients by device. The first share is that of `first`, even without gradients.
fn split_by_device<'a>(first: &'a Device, grads: &'a [Tensor]) -> Vec<DeviceGrads<'a>> {
    let mut shares = vec![(first, Vec::new())];
    for grad in grads {
        match shares.iter_mut().find(|(device, _)| *device == grad.device()) {
            Some((_, share)) => share.push(grad.clone()),
            None => shares.push((grad.device(), vec![grad.clone()])),
        }
    }
    shares
}

/// Sums powers of elements, one sum for each workgroup. Returns the sums of all devices on the first one.
fn compute_norm_parts(kind: &'static str, power: f64, shares: &[DeviceGrads<'_>]) -> Result<Tensor> {
    let mut all = Vec::new();
    for (device, grads) in shares {
        let count = grads.iter().map(|g| g.numel().div_ceil(ELEMENTS_PER_PARTIAL)).sum::<usize>();
        let parts = Tensor::empty([count], DType::F32, device)?;
        let mut done = 0;
        for batch in split_into_launches(grads, 1) {
            let mut params = KernelParams::new();
            if kind == "power" {
                params = params.f32(power as f32).align();
            }
            let mut tensors: SmallVec<[&Tensor; 16]> = SmallVec::from_slice(&[&parts]);
            let mut groups = 0;
            for grad in batch {
                params =
                    params.size(grad.numel()).size(groups).size(grad.layout().offset()).size(done + groups);
                groups += grad.numel().div_ceil(ELEMENTS_PER_PARTIAL);
                tensors.push(grad);
            }
            done += groups;
            let spec = KernelSpec::new("grad_norm").def("stage", "parts").def("norm", kind);
            let spec = spec.def("dtypes", &dtype_names(batch)[..]);
            launch::launch(&spec, &tensors, params, groups)?;
        }
        all.push(parts.to_device(shares[0].0)?);
    }
    if all.len() == 1 { Ok(all.remove(0)) } else { Tensor::cat(&all, 0) }
}

/// Clamps every gradient element of `parameters` to -`value`..=`value`, in place.
///
/// # Errors
/// A gradient is of f64 or does not match its parameter, or `value` is negative or NaN.
#[track_caller]
pub fn clip_grad_value_(parameters: &[Tensor], value: f64) -> Result<()> {
    const OP: &str = "clip_grad_value_";
    let _op = memory::scope::enter_op(OP);
    check::non_negative_or_infinite(OP, "clip_value", value)?;
    let grads = collect_grads(OP, parameters)?;
    if value == f64::INFINITY {
        return Ok(());
    }
    let value = value.min(f32::MAX.into()) as f32;
    transform_grads(&grads, GradTransform::Clamp([-value, value]))
}

/// Divides the gradients of `parameters` by the scale of a scaler: see [`GradTransform::Unscale`]. Gradients of other
/// devices use a copy of the scaler, whose flag returns to the scaler.
#[track_caller]
pub(crate) fn unscale_grads(
    op: &'static str,
    parameters: &[Tensor],
    scaler: &Tensor,
    flag: usize,
) -> Result<()> {
    let grads = collect_grads(op, parameters)?;
    for grad in &grads {
        fail_if!(
            grad.dtype() == DType::F16;
            dtype(op, DType::F16), "takes gradients of f32 and bf16; keep parameters in f32, autocast casts them"
        );
    }
    let shares = split_by_device(scaler.device(), &grads);
    let copies: Vec<Tensor> =
        shares.iter().map(|(device, _)| scaler.to_device(device)).collect::<Result<_>>()?;
    for ((device, grads), copy) in shares.iter().zip(&copies) {
        transform_grads(grads, GradTransform::Unscale(copy, flag))?;
        if *device != scaler.device() {
            let found_inf = copy.select(0, flag as isize)?.to_device(scaler.device())?;
            scaler.select(0, flag as isize)?.add_(&found_inf)?;
        }
    }
    Ok(())
}

/// Returns the existing gradients, each once, contiguous.
fn collect_grads(op: &'static str, parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut seen = FxHashSet::default();
    let mut grads = Vec::new();
    // Checks all gradients before it changes the first or makes the first contiguous.
    for (k, p) in parameters.iter().enumerate() {
        p.grad().map_or(Ok(()), |grad| fused::check_grad(op, k, p, &grad))?;
    }
    for p in parameters.iter().filter(|p| autograd::leaf_id(p).is_some_and(|leaf| seen.insert(leaf))) {
        if let Some(grad) = fused::make_grad_contiguous(p)?.filter(|g| g.numel() > 0) {
            fused::check_dtype(op, &grad)?;
            grads.push(grad);
        }
    }
    Ok(grads)
}

/// Splits gradients into launches that each bind `shared` further buffers.
fn split_into_launches(grads: &[Tensor], shared: usize) -> impl Iterator<Item = &[Tensor]> {
    let mut rest = grads;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let max_tensors = fused::max_tensors_per_launch(first.device(), 1, shared);
        let fits = |&count: &usize| fused::can_share_launch(first, &rest[count], count, max_tensors);
        let (batch, after) = rest.split_at(1 + (1..rest.len()).take_while(fits).count());
        rest = after;
        Some(batch)
    })
}

fn dtype_names(grads: &[Tensor]) -> SmallVec<[&'static str; 16]> {
    grads.iter().map(|g| g.dtype().name()).collect()
}

#[derive(Clone, Copy)]
enum GradTransform<'a> {
    /// Multiplication by a scalar on the device.
    Scale(&'a Tensor),
    /// Clamping between two values.
    Clamp([f32; 2]),
    /// Multiplication by a scaler's inverse scale. An infinite or NaN element sets the flag at this index.
    Unscale(&'a Tensor, usize),
}

fn transform_grads(grads: &[Tensor], how: GradTransform<'_>) -> Result<()> {
    let (name, operand, [low, high], flag) = match how {
        GradTransform::Scale(factor) => ("scale", Some(factor), [0.0; 2], 0),
        GradTransform::Clamp(bounds) => ("clamp", None, bounds, 0),
        GradTransform::Unscale(scaler, flag) => ("unscale", Some(scaler), [0.0; 2], flag),
    };
    for batch in split_into_launches(grads, usize::from(operand.is_some())) {
        let mut params = KernelParams::new().f32(low).f32(high).size(flag).align();
        let mut tensors: SmallVec<[&Tensor; 17]> = operand.into_iter().collect();
        let mut groups = 0;
        for grad in batch {
            params = params.size(grad.numel()).size(groups).size(grad.layout().offset()).u32(0);
            groups += grad.numel().div_ceil(ELEMENTS_PER_WORKGROUP);
            tensors.push(grad);
        }
        let modes: SmallVec<[&'static str; 16]> = batch.iter().map(|g| fused::write_mode(g, None)).collect();
        let spec = KernelSpec::new("grad_scale")
            .def("change", name)
            .def("dtypes", &dtype_names(batch)[..])
            .def("modes", &modes[..]);
        launch::launch(&spec, &tensors, params, groups)?;
    }
    Ok(())
}
