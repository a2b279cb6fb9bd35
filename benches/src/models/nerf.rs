//! Radiance field: a network of encoded points, whose densities and colours a ray sums (Mildenhall et al., 2020).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::ops::{Reduction, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Layer whose input includes the encoded point again.
const SKIP: usize = 5;
/// Distances from a ray's origin between which its samples lie.
const NEAR_AND_FAR: [f64; 2] = [2.0, 6.0];

/// Returns the values, and the sines and cosines of their products with the powers of two, in the last dimension.
fn encode(x: &Tensor, powers: &Tensor) -> Result<Tensor> {
    let angles = x.unsqueeze(-1)?.mul(powers)?.flatten(-2, -1)?;
    cat(&[x, &angles.sin()?, &angles.cos()?], -1)
}

#[derive(Module)]
struct Field {
    layers: Vec<Linear>,
    density: Linear,
    features: Linear,
    view: Linear,
    colour: Linear,
}

impl Field {
    fn new(width: usize, points: usize, views: usize, device: &Device) -> Result<Self> {
        let inputs = |k| match k {
            0 => points,
            SKIP => points + width,
            _ => width,
        };
        Ok(Self {
            layers: (0..8).map(|k| Linear::new(inputs(k), width, device)).collect::<Result<_>>()?,
            density: Linear::new(width, 1, device)?,
            features: Linear::new(width, width, device)?,
            view: Linear::new(width + views, width / 2, device)?,
            colour: Linear::new(width / 2, 3, device)?,
        })
    }

    /// Returns the density of each point \[rays, samples\], and its colour.
    fn forward(&self, points: &Tensor, views: &Tensor) -> Result<(Tensor, Tensor)> {
        let mut x = points.clone();
        for (k, layer) in self.layers.iter().enumerate() {
            if k == SKIP {
                x = cat(&[points, &x.to_dtype(points.dtype())?], -1)?;
            }
            x = layer.forward(&x)?.relu()?;
        }
        let density = self.density.forward(&x)?.squeeze(-1)?.to_dtype(DType::F32)?;
        let features = self.features.forward(&x)?;
        let y = cat(&[&features, &views.to_dtype(features.dtype())?], -1)?;
        let colour = self.colour.forward(&self.view.forward(&y)?.relu()?)?.to_dtype(DType::F32)?;
        Ok((density.relu()?, colour.sigmoid()?))
    }
}

/// Radiance field of 8 layers of 256, with 64 samples along each ray.
pub(super) fn nerf(tiny: bool, device: &Device) -> Result<Workload> {
    let [rays, samples, width] = if tiny { [4, 8, 16] } else { [2048, 64, 256] };
    let powers = |count: usize| {
        let powers: Vec<f32> = (0..count).map(|k| (1 << k) as f32).collect();
        Tensor::from_slice(&powers, [count], device)
    };
    let (point_powers, view_powers) = (powers(10)?, powers(4)?);
    let net = Field::new(width, 3 + 2 * 3 * 10, 3 + 2 * 3 * 4, device)?;
    let origins = Tensor::randn([rays, 1, 3], DType::F32, device)?;
    let directions = Tensor::randn([rays, 1, 3], DType::F32, device)?;
    let directions = directions.div(&directions.square()?.sum([-1], true)?.sqrt()?)?;
    let target = Tensor::rand([rays, 3], DType::F32, device)?;
    let places: Vec<f32> = (0..samples).map(|k| k as f32).collect();
    let places = Tensor::from_slice(&places, [samples], device)?;
    let [near, far] = NEAR_AND_FAR;
    Ok(Workload::new(&[rays, samples], net, move |net| {
        let device = places.device();
        // One random sample in each of equal ranges.
        let offsets = Tensor::rand([rays, samples], DType::F32, device)?;
        let depths = offsets.add(&places)?.mul((far - near) / samples as f64)?.add(near)?;
        let points = origins.add(&directions.mul(&depths.unsqueeze(-1)?)?)?;
        let views = encode(&directions, &view_powers)?;
        let views = views.expand([rays, samples, views.shape()[2]])?;
        let (density, colour) = net.forward(&encode(&points, &point_powers)?, &views)?;
        let gaps = depths.narrow(1, 1, samples - 1)?.sub(&depths.narrow(1, 0, samples - 1)?)?;
        let gaps = cat(&[gaps, Tensor::full([rays, 1], 1e10, DType::F32, device)?], 1)?;
        let alpha = density.mul(&gaps)?.neg()?.exp()?.rsub(1.0)?;
        let passed = alpha.rsub(1.0)?.add(1e-10)?;
        let passed = cat(&[Tensor::ones([rays, 1], DType::F32, device)?, passed], 1)?.cumprod(1)?;
        let weights = alpha.mul(&passed.narrow(1, 0, samples)?)?;
        let pixels = weights.unsqueeze(-1)?.mul(&colour)?.sum([1], false)?;
        pixels.mse_loss(&target, Reduction::Mean)
    }))
}
