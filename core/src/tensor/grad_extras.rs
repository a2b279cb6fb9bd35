//! By-products of a kernel (a low-precision copy, column sums), cached to save their computation.

use std::sync::{Arc, Mutex, Weak};

use super::{Tensor, TensorImpl};
use crate::dtype::DType;
use crate::runtime::stream::Access;
use crate::storage::Storage;
use crate::sync::LockUnpoisoned;

/// By-products of a tensor. Each is valid until the tensor or the by-product is written.
pub(super) struct GradExtras {
    version: u64,
    tensors: Mutex<ExtraTensors>,
}

#[derive(Default)]
struct ExtraTensors {
    low_precision: Option<(Tensor, u64)>,
    column_sums: Option<(Tensor, u64)>,
}

impl Tensor {
    /// Returns the tensor with by-products: itself in another type, and sums over all but the last dimension.
    pub(crate) fn with_grad_extras(&self, low: Option<Tensor>, column_sums: Option<Tensor>) -> Self {
        let with_version = |t: Tensor| {
            let version = t.version();
            (t, version)
        };
        let made = Mutex::new(ExtraTensors {
            low_precision: low.map(with_version),
            column_sums: column_sums.map(with_version),
        });
        let TensorImpl { storage, layout, dtype, grad_meta: meta, base, .. } = &*self.inner;
        let meta = meta.get().cloned();
        let mut inner = TensorImpl::new(storage.clone(), layout.clone(), *dtype, meta, base.clone());
        inner.grad_extras = Some(Arc::new(GradExtras { version: self.version(), tensors: made }));
        Self { inner: Arc::new(inner) }
    }

    /// Returns weak handles to the storages of the tensor and of its by-products.
    pub(crate) fn downgrade_storages(&self) -> Vec<Weak<Storage>> {
        let mut all = vec![self.downgrade_storage()];
        if let Some(extras) = &self.inner.grad_extras {
            let made = extras.tensors.lock_unpoisoned();
            all.extend(
                [&made.low_precision, &made.column_sums]
                    .into_iter()
                    .flatten()
                    .map(|(t, _)| t.downgrade_storage()),
            );
        }
        all
    }

    fn with_current_extras<R>(&self, take: impl FnOnce(&mut ExtraTensors) -> Option<R>) -> Option<R> {
        let extras = self.inner.grad_extras.as_ref().filter(|extras| extras.version == self.version())?;
        self.record_access(Access::Read);
        take(&mut extras.tensors.lock_unpoisoned())
    }

    /// Removes and returns the low-precision copy, if it is valid and has this type.
    pub(crate) fn take_low_precision(&self, dtype: DType) -> Option<Tensor> {
        let (low, version) =
            self.with_current_extras(|made| made.low_precision.take_if(|(low, _)| low.dtype() == dtype))?;
        (low.version() == version).then_some(low).inspect(Tensor::record_derived)
    }

    /// Returns the sums over all dimensions but the last, if they are valid.
    pub(crate) fn cached_column_sums(&self) -> Option<Tensor> {
        let (sums, version) = self.with_current_extras(|made| made.column_sums.clone())?;
        (sums.version() == version).then_some(sums).inspect(Tensor::record_derived)
    }
}
