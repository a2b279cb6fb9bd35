//! What a kernel has made on its way besides a tensor, of the same numbers: who wants that next need not read them again.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::storage::Storage;
use super::{Inner, Tensor};
use crate::autograd;
use crate::dtype::DType;
use crate::stream::Access;

/// Good for as long as nobody writes to the tensor, and each by-product for as long as nobody writes to it.
pub(super) struct GradExtras {
    version: u64,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    low: Option<(Tensor, u64)>,
    column_sums: Option<(Tensor, u64)>,
}

impl Tensor {
    /// The same tensor with what was made besides: itself in another type, and the sums over all dimensions but the last.
    pub(crate) fn with_beside(&self, low: Option<Tensor>, column_sums: Option<Tensor>) -> Self {
        let noted = |t: Tensor| {
            let version = t.version();
            (t, version)
        };
        let made = Mutex::new(Made { low: low.map(noted), column_sums: column_sums.map(noted) });
        let Inner { storage, layout, dtype, meta, base, .. } = &*self.inner;
        let mut inner = Inner::new(storage.clone(), layout.clone(), *dtype, meta.clone(), base.clone());
        inner.grad_extras = Some(Arc::new(GradExtras { version: self.version(), made }));
        Self { inner: Arc::new(inner) }
    }

    /// Memory of the tensor and of its by-products, which live as long as it does.
    pub(crate) fn memories(&self) -> Vec<Weak<Storage>> {
        let mut all = vec![self.downgrade_storage()];
        if let Some(beside) = &self.inner.grad_extras {
            let made = beside.made.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(
                [&made.low, &made.column_sums].into_iter().flatten().map(|(t, _)| t.downgrade_storage()),
            );
        }
        all
    }

    fn beside<R>(&self, take: impl FnOnce(&mut Made) -> Option<R>) -> Option<R> {
        let beside = self.inner.grad_extras.as_ref().filter(|beside| beside.version == self.version())?;
        autograd::touched(self, Access::Read);
        take(&mut beside.made.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The tensor in another type, if it was made besides; it is given once.
    pub(crate) fn take_low(&self, dtype: DType) -> Option<Tensor> {
        let (low, version) = self.beside(|made| made.low.take_if(|(low, _)| low.dtype() == dtype))?;
        (low.version() == version).then_some(low)
    }

    /// The sums over all dimensions but the last, if they were made besides.
    pub(crate) fn column_sums_beside(&self) -> Option<Tensor> {
        let (sums, version) = self.beside(|made| made.column_sums.clone())?;
        (sums.version() == version).then_some(sums)
    }
}
