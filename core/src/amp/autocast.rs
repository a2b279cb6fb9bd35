//! Autocast: the scope in which operations choose their dtypes, the lists of operations, and the cache of
//! casts of weights.
//!
//! An operation takes part by calling [`dispatch_autocast!`] at its entry. If the operation is listed, it
//! runs again on cast operands, with autocast suspended, so that all its parts run in one dtype. Operations
//! that are not listed run in the dtype of their inputs, with the usual promotion. In-place operations and
//! the backward pass are not cast either.

use std::sync::LazyLock;

use rustc_hash::FxHashMap;

use super::low_precision_copy;
use crate::autograd;
use crate::autograd::autocast_mode::{AutocastGuard, CAST_CACHE, CachedCast, RecordedCast, autocast_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scoped_local::WithCurrent;
use crate::tensor::Tensor;

/// Dtype that autocast chooses for an operation. f64, integers and bool are never cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CastPolicy {
    /// Runs in the scope's 16-bit dtype: matrix products, which dominate the time and accumulate in f32.
    LowerPrecision,
    /// Runs in f32: operations that would overflow or lose precision in 16 bits.
    Fp32,
    /// Runs in the widest dtype of the inputs.
    Promote,
}

/// Lists operations by their names.
macro_rules! operation_names {
    ($($op:ident)*) => { &[$(stringify!($op)),*] };
}

const LOWER_PRECISION_OPS: &[&str] = operation_names! {
    addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d einsum gru linear lstm matmul mm mv prelu rnn_relu rnn_tanh
    scaled_dot_product_attention
};

const FP32_OPS: &[&str] = operation_names! {
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy ctc_loss cumprod cumsum erfinv exp expm1 group_norm hinge_embedding_loss huber_loss
    kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss norm poisson_nll_loss pow prod reciprocal rsqrt sinh
    smooth_l1_loss soft_margin_loss softmax softplus sum tan triplet_margin_loss
};

const PROMOTE_OPS: &[&str] = operation_names! {
    addcdiv addcmul atan2 bilinear dot index_put inner scatter_add
};

impl CastPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::LowerPrecision, Self::Fp32, Self::Promote];

    /// Returns the policy of an operation; `None` if the operation runs in the dtype of its inputs.
    ///
    /// ```
    /// use forebay_core::amp::CastPolicy;
    /// assert_eq!(CastPolicy::for_op("matmul"), Some(CastPolicy::LowerPrecision));
    /// assert_eq!(CastPolicy::for_op("relu"), None);
    /// ```
    #[must_use]
    pub fn for_op(op: &str) -> Option<Self> {
        // Every operation under autocast looks its name up, so the lists are not searched.
        static POLICIES: LazyLock<FxHashMap<&'static str, CastPolicy>> = LazyLock::new(|| {
            let listed = |policy: CastPolicy| policy.operations().iter().map(move |&op| (op, policy));
            CastPolicy::ALL.into_iter().flat_map(listed).collect()
        });
        POLICIES.get(op).copied()
    }

    /// Returns the operations of this policy: PyTorch's lists for CUDA, without operations that this library
    /// lacks.
    #[must_use]
    pub const fn operations(self) -> &'static [&'static str] {
        match self {
            Self::LowerPrecision => LOWER_PRECISION_OPS,
            Self::Fp32 => FP32_OPS,
            Self::Promote => PROMOTE_OPS,
        }
    }
}

/// Runs the operations of this thread in mixed precision until the guard is dropped. Products and
/// convolutions run in `dtype`, and operations that need range or precision in f32 (see [`CastPolicy`]).
/// Scopes nest; [`no_autocast`] suspends them.
///
/// Use it for the forward pass and the loss. The backward pass runs each operation in the dtype that the
/// forward pass chose, inside or outside of the scope. bf16 has the range of f32. In f16, gradients below
/// 6e-8 underflow unless a `GradScaler` scales the loss.
///
/// A parameter that is used several times is cast once: casts are cached until the outermost scope ends. A
/// parameter that was written in the meantime is cast again, whether an optimiser, `load_state_dict`, `copy_`
/// or another tensor of its memory wrote it.
///
/// ```
/// use forebay_core::{amp::{autocast, no_autocast}, device::Device, dtype::DType, tensor::Tensor};
/// let device = Device::null(Default::default());
/// let (a, b) = (Tensor::ones(&[8, 8], DType::F32, &device)?, Tensor::ones(&[8, 8], DType::F32, &device)?);
/// let _autocast = autocast(DType::F16)?;
/// let c = a.matmul(&b)?;
/// assert_eq!(c.dtype(), DType::F16);
/// assert_eq!(c.softmax(-1)?.dtype(), DType::F32);
/// let _off = no_autocast();
/// assert_eq!(a.matmul(&b)?.dtype(), DType::F32);
/// # Ok::<(), forebay_core::error::Error>(())
/// ```
///
/// # Errors
/// `dtype` is neither f16 nor bf16.
#[must_use = "operations are cast only while the guard lives"]
#[track_caller]
pub fn autocast(dtype: DType) -> Result<AutocastGuard> {
    match dtype {
        DType::F16 | DType::BF16 => Ok(AutocastGuard::enter(Some(dtype))),
        other => Err(Error::dtype("autocast", other, "takes f16 and bf16; everything else is f32 already")),
    }
}

/// Runs operations in the dtypes of their inputs until the guard is dropped, even inside [`autocast`].
#[must_use = "autocast is off only while the guard lives"]
pub fn no_autocast() -> AutocastGuard {
    AutocastGuard::enter(None)
}

/// Cast of a listed operation's operands. Autocast is suspended while this value exists.
#[derive(Debug)]
pub(crate) struct OperandCast {
    dtype: DType,
    _suspended: AutocastGuard,
}

impl OperandCast {
    /// Chooses the dtype of an operation; `None` outside of autocast and for operations that are not listed.
    pub(crate) fn for_op(op: &str, operands: &[Option<DType>]) -> Option<Self> {
        let low = autocast_dtype()?;
        let to = match CastPolicy::for_op(op)? {
            CastPolicy::LowerPrecision => low,
            CastPolicy::Fp32 => DType::F32,
            CastPolicy::Promote => operands.iter().flatten().copied().fold(low, DType::promote),
        };
        Some(Self { dtype: to, _suspended: no_autocast() })
    }

    pub(crate) fn apply(&self, t: &Tensor) -> Result<Tensor> {
        let from = t.dtype();
        if !is_autocast_dtype(from) || from == self.dtype {
            return Ok(t.clone());
        }
        let shares = self.dtype.size() == 2 && autograd::compute_requires_grad(&[t]);
        let Some(edge) = t.grad_edge().filter(|_| shares) else { return self.cast_recorded(t) };
        let known = CAST_CACHE.with_current(|casts| {
            Some(casts.latest.as_ref().filter(|known| known.is_valid_for(t, self.dtype))?.cast.cast.clone())
        });
        if let Some(known) = known {
            autograd::mark_shared_cast(&known);
            return Ok(known);
        }
        // Freed first, so that the next cast can reuse the memory.
        drop(CAST_CACHE.with_current_mut(|casts| casts.latest.take()));
        let latest = RecordedCast { cast: CachedCast::from_source(t, || self.cast_recorded(t))?, edge };
        let cast = latest.cast.cast.clone();
        let replaced = CAST_CACHE.with_current_mut(|casts| casts.latest.replace(latest));
        drop(replaced);
        Ok(cast)
    }

    /// Casts a tensor and records the cast. Consumers may return the gradient in the type of the tensor.
    fn cast_recorded(&self, t: &Tensor) -> Result<Tensor> {
        Ok(autograd::differentiable_cast(self.cast_detached(t)?, t))
    }

    /// Returns the values of a tensor in the chosen dtype, without history. Casts of leaves are cached.
    pub(crate) fn cast_detached(&self, t: &Tensor) -> Result<Tensor> {
        let plain = t.detach();
        if !is_autocast_dtype(t.dtype()) || t.dtype() == self.dtype {
            return Ok(plain);
        }
        let Some(leaf) = autograd::leaf_id(t) else {
            let source = autograd::result_source(t);
            return match source.map(|source| source.compute_as(t, self.dtype)).transpose()?.flatten() {
                Some(cast) => Ok(cast),
                None => plain.to_dtype(self.dtype),
            };
        };
        if let Some(kept) = low_precision_copy::find_or_request(t, self.dtype) {
            return Ok(kept);
        }
        let key = (leaf, self.dtype);
        let known = CAST_CACHE.with_current(|casts| {
            Some(casts.leaves.get(&key).filter(|known| known.is_valid_for(&plain))?.cast.clone())
        });
        if let Some(known) = known {
            return Ok(known);
        }
        // Freed first, so that the next cast can reuse the memory.
        drop(CAST_CACHE.with_current_mut(|casts| casts.leaves.remove(&key)));
        let entry = CachedCast::from_source(&plain, || plain.to_dtype(self.dtype))?;
        let cast = entry.cast.clone();
        let replaced = CAST_CACHE.with_current_mut(|casts| casts.leaves.insert(key, entry));
        drop(replaced);
        Ok(cast)
    }
}

fn is_autocast_dtype(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Operand of [`dispatch_autocast!`]: a tensor, an optional tensor, or several tensors.
pub(crate) trait AutocastOperand {
    type Cast;
    /// Returns the widest dtype to which autocast applies.
    fn widest_float(&self) -> Option<DType>;
    /// Applies `cast` to each tensor.
    fn cast_tensors(&self, cast: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self::Cast>;
}

impl AutocastOperand for &Tensor {
    type Cast = Tensor;
    fn widest_float(&self) -> Option<DType> {
        Some(self.dtype()).filter(|&d| is_autocast_dtype(d))
    }
    fn cast_tensors(&self, cast: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        cast(self)
    }
}

impl AutocastOperand for Option<&Tensor> {
    type Cast = Option<Tensor>;
    fn widest_float(&self) -> Option<DType> {
        self.and_then(|t| t.widest_float())
    }
    fn cast_tensors(&self, cast: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Option<Tensor>> {
        self.map(cast).transpose()
    }
}

impl AutocastOperand for &[&Tensor] {
    type Cast = Vec<Tensor>;
    fn widest_float(&self) -> Option<DType> {
        self.iter().filter_map(AutocastOperand::widest_float).reduce(DType::promote)
    }
    fn cast_tensors(&self, cast: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Tensor>> {
        self.iter().map(|t| cast(t)).collect()
    }
}

/// Used at the entry of an operation. Under autocast, calls a listed operation again on cast operands and
/// returns its result.
macro_rules! dispatch_autocast {
    ($op:expr, [$($operand:expr),+], |$($name:ident),+| $again:expr) => {
        if let Some(cast) = $crate::amp::OperandCast::for_op($op, &[$($crate::amp::AutocastOperand::widest_float(&$operand)),+]) {
            $(let $name = $crate::amp::AutocastOperand::cast_tensors(&$operand, |t| cast.apply(t))?;)+
            return $again;
        }
    };
}
pub(crate) use dispatch_autocast;

/// Returns the dtype that operands promote to if it has 16 bits.
pub(crate) fn promoted_half_dtype(operands: &[Option<DType>]) -> Option<DType> {
    operands.iter().flatten().copied().reduce(DType::promote).filter(|dtype| dtype.size() == 2)
}

/// Casts a 16-bit float tensor to f32; returns other tensors unchanged.
#[track_caller]
pub(crate) fn half_to_f32(t: &Tensor) -> Result<Tensor> {
    if t.dtype().is_float() && t.dtype().size() == 2 { t.to_dtype(DType::F32) } else { Ok(t.clone()) }
}

/// Extends [`dispatch_autocast!`] for composite operations. With 16-bit operands all steps run in f32, and
/// the result is rounded once, as in PyTorch's kernels.
macro_rules! dispatch_in_f32 {
    ($op:expr, [$($operand:expr),+], |$($name:ident),+| $again:expr) => {
        $crate::amp::dispatch_autocast!($op, [$($operand),+], |$($name),+| $again);
        if let Some(half) = $crate::amp::promoted_half_dtype(&[$($crate::amp::AutocastOperand::widest_float(&$operand)),+]) {
            let _call = $crate::memory::scope::enter_call();
            $(let $name = $crate::amp::AutocastOperand::cast_tensors(&$operand, $crate::amp::half_to_f32)?;)+
            return $again?.to_dtype(half);
        }
    };
}
pub(crate) use dispatch_in_f32;
