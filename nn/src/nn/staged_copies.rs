//! Changes that are prepared first and made together: loading a state changes everything or nothing.

use rustc_hash::FxHashSet;

use forebay_core::autograd;
use forebay_core::device::Device;
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

/// Copies into tensors that are already there. Everything that can fail happens in [`copy`](Self::copy) and
/// [`prepare`](Self::prepare): casts, transfers from other devices, and memory for them. Dropped before
/// [`commit`](PreparedCopies::commit), it has changed nothing.
#[derive(Default)]
pub(crate) struct StagedCopies {
    copies: Vec<(Tensor, Option<Tensor>)>,
}

/// Copies that need nothing more: only a lost device can stop them.
#[must_use = "nothing is changed before `commit`"]
pub(crate) struct PreparedCopies(Vec<(Tensor, Option<Tensor>)>);

impl StagedCopies {
    /// Prepares that `to` gets the elements of `from`, which may be of another type or device. Returns those, cast.
    pub(crate) fn add_copy(&mut self, to: &Tensor, from: &Tensor) -> Result<Tensor> {
        let _no_grad = autograd::no_grad();
        if to.shape() != from.shape() {
            let rule = "a tensor is loaded from one of its shape";
            return Err(Error::shape("load_state_dict", rule, &[to.shape(), from.shape()]));
        }
        let from = from.detach().to_device(to.device())?.to_dtype(to.dtype())?;
        self.copies.push((to.detach(), Some(from.clone())));
        Ok(from)
    }

    /// Prepares that `to` becomes zero.
    pub(crate) fn add_zero(&mut self, to: &Tensor) {
        self.copies.push((to.detach(), None));
    }

    /// Brings together what the copies need: all of it lies on its device behind this.
    pub(crate) fn prepare(mut self) -> Result<PreparedCopies> {
        let _no_grad = autograd::no_grad();
        let targets: FxHashSet<u64> = self.copies.iter().map(|(to, _)| to.storage_id()).collect();
        self.copies.retain(|(to, from)| from.as_ref().is_none_or(|from| !is_same_tensor(to, from)));
        let mut devices: Vec<&Device> = Vec::new();
        for (_, from) in &mut self.copies {
            // One that another copy would write before it is read here.
            if let Some(from) = from.as_mut().filter(|from| targets.contains(&from.storage_id())) {
                *from = from.copy()?;
            }
        }
        for (to, from) in &self.copies {
            if !devices.contains(&to.device()) {
                devices.push(to.device());
            }
            to.prefetch_()?;
            from.as_ref().map_or(Ok(()), Tensor::prefetch_)?;
        }
        // Casts that wait to be launched together take their memory when they are.
        devices.into_iter().try_for_each(Device::flush_fusion)?;
        Ok(PreparedCopies(self.copies))
    }
}

impl PreparedCopies {
    /// Makes the changes.
    ///
    /// # Errors
    /// The device was lost.
    pub(crate) fn commit(self) -> Result<()> {
        let _no_grad = autograd::no_grad();
        self.0.iter().try_for_each(|(to, from)| match from {
            Some(from) => from.copy_into(to),
            None => to.zero_().map(drop),
        })
    }
}

/// Reports whether two tensors are the same elements of one storage.
fn is_same_tensor(a: &Tensor, b: &Tensor) -> bool {
    TensorKey::from_tensor(a) == TensorKey::from_tensor(b)
}

/// The elements that a tensor names: equal for two tensors that are one.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TensorKey {
    storage_id: u64,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl TensorKey {
    pub(super) fn from_tensor(t: &Tensor) -> Self {
        let (shape, strides) = (t.shape().to_vec(), t.strides().to_vec());
        Self { storage_id: t.storage_id(), offset: t.layout().offset(), shape, strides }
    }
}
