//! Two-phase updates, so that loading a state changes either all tensors or none.

use rustc_hash::FxHashSet;

use crate::{Device, Result, Tensor, autograd, fail_if};

/// Copies into existing tensors. [`add_copy`](Self::add_copy) and [`prepare`](Self::prepare) do everything
/// that can fail: casts, transfers between devices, and their allocations. Dropping the copies before
/// [`commit`](PreparedCopies::commit) changes nothing.
#[derive(Default)]
pub(crate) struct StagedCopies {
    copies: Vec<(Tensor, Option<Tensor>)>,
}

/// Prepared copies, which need no further memory. Only a lost device can make them fail.
#[must_use = "nothing is changed before `commit`"]
pub(crate) struct PreparedCopies(Vec<(Tensor, Option<Tensor>)>);

impl StagedCopies {
    /// Stages a copy of `from` to `to`. Returns `from` converted to the dtype and device of `to`.
    #[track_caller]
    pub(crate) fn add_copy(&mut self, to: &Tensor, from: &Tensor) -> Result<Tensor> {
        let _no_grad = autograd::no_grad();
        fail_if!(to.shape() != from.shape(); shape("load_state_dict", [to, from]), "a tensor is loaded from one of its shape");
        let from = from.detach().to_device(to.device())?.to_dtype(to.dtype())?;
        self.copies.push((to.detach(), Some(from.clone())));
        Ok(from)
    }

    pub(crate) fn add_zero(&mut self, to: &Tensor) {
        self.copies.push((to.detach(), None));
    }

    /// Makes everything that the copies need resident on its device.
    pub(crate) fn prepare(mut self) -> Result<PreparedCopies> {
        let _no_grad = autograd::no_grad();
        let targets: FxHashSet<u64> = self.copies.iter().map(|(to, _)| to.storage_id()).collect();
        self.copies.retain(|(to, from)| {
            from.as_ref().is_none_or(|from| TensorKey::from_tensor(to) != TensorKey::from_tensor(from))
        });
        let mut devices: Vec<&Device> = Vec::new();
        for (_, from) in &mut self.copies {
            // Copies a source that another staged copy would overwrite before it is read.
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
        // Casts in a pending fusion group allocate their memory at the flush.
        devices.into_iter().try_for_each(Device::flush_fusion)?;
        Ok(PreparedCopies(self.copies))
    }
}

impl PreparedCopies {
    /// Performs the copies.
    pub(crate) fn commit(self) -> Result<()> {
        let _no_grad = autograd::no_grad();
        self.0.iter().try_for_each(|(to, from)| match from {
            Some(from) => from.copy_into(to),
            None => to.zero_().map(drop),
        })
    }
}

/// Key of a tensor's elements, equal for two tensors that view the same elements.
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
