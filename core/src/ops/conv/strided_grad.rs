//! Gradient of the input of strided convolutions, and transposed convolutions, as a convolution with stride 1.
//!
//! With stride s, the elements s·q + r of the input for one r are a phase. Each phase is a convolution of the output's
//! gradient with every s-th tap, and all phases read the same elements of it. So one convolution computes them as
//! channels, and a copy interleaves the phases: the sub-pixel convolution of Shi et al. (2016, "Is the deconvolution
//! layer the same as a convolutional layer?"). Taps that a phase does not have are zero. The column matrix
//! ([`im2col`](super::im2col)) of the output's gradient has its type; that of the input would be summed in f32.

use crate::ops::conv::{ConvGeometry, ConvKind, spatial_numel};
use crate::ops::prelude::*;
use crate::ops::shape::pad::PadMode;

/// Largest ratio of the multiplications to those of the convolution: 64 / 27 for a 3 x 3 x 3 filter with stride 2.
const MAX_WASTE: usize = 3;

/// Convolution with stride 1 whose input has the phases as channels.
struct PhaseConvolution {
    geometry: ConvGeometry,
    /// Zeros before the first tap, for each spatial dimension.
    before: [usize; 3],
}

impl ConvGeometry {
    /// Returns the convolution whose input gradient has the phases of this one's, unless the phases have different
    /// extents or the filter reaches only zeros at an edge.
    fn phases(&self) -> Option<PhaseConvolution> {
        let supported = |d: usize| {
            self.dilation[d] == 1
                && self.padding[d] < self.kernel[d]
                && self.x_extents[d].is_multiple_of(self.stride[d])
        };
        if self.groups != 1 || self.has_unit_stride() || !(0..self.rank).all(supported) {
            return None;
        }
        let x_channels = self.x_channels * spatial_numel(&self.stride);
        let mut geometry = Self { x_channels, stride: [1; 3], ..*self };
        let mut before = [0; 3];
        for (d, before) in before.iter_mut().enumerate().take(self.rank) {
            let (taps, stride, padding) = (self.kernel[d], self.stride[d], self.padding[d]);
            // Element q of phase r is the sum over m of dy[q + last - m] times tap m · stride + r, counted from the
            // `before` zeros in front of the first tap.
            let last = padding.div_ceil(stride);
            geometry.padding[d] = last;
            geometry.kernel[d] = last + (taps - 1 - padding) / stride + 1;
            geometry.x_extents[d] = self.x_extents[d] / stride;
            *before = stride * last - padding;
        }
        Some(PhaseConvolution { geometry, before })
    }

    /// Computes the gradient of the input by phases. Returns `None` where other ways are faster.
    pub(super) fn try_phases(
        &self,
        dy: &Tensor,
        w: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(phases) = self.phases().filter(|phases| phases.is_faster(self, dy)) else { return Ok(None) };
        let count = spatial_numel(&self.stride);
        let weights = phases.arrange_weights(self, w)?;
        let expand = |bias: &Tensor| bias.unsqueeze(1)?.expand([self.x_channels, count])?.reshape([-1]);
        let bias = bias.map(expand).transpose()?;
        let made = phases.geometry.multiply(ConvKind::InputGrad, dy, &weights, bias.as_ref())?;
        // From [images, channels, phases.., elements..] to [images, channels, (elements, phases)..].
        let rank = self.rank;
        let extents = &phases.geometry.x_extents[..rank];
        let phases = &self.stride[..rank];
        let shape: Dims =
            [self.batch, self.x_channels].iter().chain(phases).chain(extents).copied().collect();
        let places = (0..rank).flat_map(|d| [2 + rank + d, 2 + d]);
        let order: SmallVec<[isize; 8]> = [0, 1].into_iter().chain(places).map(|d| d as isize).collect();
        made.reshape(&shape[..])?.permute(&order[..])?.reshape(&self.x_shape()[..]).map(Some)
    }
}

impl PhaseConvolution {
    /// Reports whether the phases of `g` are faster than the sum over a column matrix. Multiplications with zeros cost
    /// less than its memory only in a backend's own kernels.
    fn is_faster(&self, g: &ConvGeometry, dy: &Tensor) -> bool {
        let taps = spatial_numel(&g.kernel);
        let with_zeros = spatial_numel(&self.geometry.kernel) * spatial_numel(&g.stride);
        let is_cheap = with_zeros == taps
            || (with_zeros <= MAX_WASTE * taps && self.geometry.uses_implicit(ConvKind::InputGrad, dy));
        is_cheap && self.geometry.uses_im2col(dy)
    }

    /// Arranges weights \[y channels, x channels, taps..\] as \[y channels, (x channels, phases), taps..\].
    fn arrange_weights(&self, g: &ConvGeometry, w: &Tensor) -> Result<Tensor> {
        let _tag = memory::scope::enter_tag(Tag::Workspace);
        let (rank, taps) = (g.rank, &self.geometry.kernel);
        let after = |d: usize| g.stride[d] * taps[d] - g.kernel[d] - self.before[d];
        let pads = (0..rank).rev().flat_map(|d| [self.before[d], after(d)]);
        let pads: SmallVec<[isize; 6]> = pads.map(|n| n as isize).collect();
        let padded = if pads.iter().all(|&n| n == 0) {
            w.clone()
        } else {
            w.pad(&pads, PadMode::Constant(0.0.into()))?
        };
        let places = (0..rank).flat_map(|d| [taps[d], g.stride[d]]);
        let shape: Dims = [g.y_channels, g.x_channels].into_iter().chain(places).collect();
        let (phases, taps) = ((0..rank).map(|d| 3 + 2 * d), (0..rank).map(|d| 2 + 2 * d));
        let order: SmallVec<[isize; 8]> =
            [0, 1].into_iter().chain(phases).chain(taps).map(|d| d as isize).collect();
        padded.reshape(&shape[..])?.permute(&order[..])?.reshape(&self.geometry.w_shape()[..])
    }
}
