//! Clouds of points: features of nearest neighbours, and a field that a network represents.

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{BatchNorm1d, BatchNorm2d, Conv1d, Conv1dOptions, Conv2d, Conv2dOptions, Linear, Module};
use forebay::ops::cat;
use forebay::tensor::Tensor;

use super::Workload;

/// Layer of DGCNN: a network over each point and its nearest neighbours, of which the maxima remain.
#[derive(Module)]
struct EdgeConv {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl EdgeConv {
    /// Transforms points \[batch, points, channels\]. `starts` has the index of each cloud's first point.
    fn forward(&self, x: &Tensor, starts: &Tensor, neighbours: usize) -> Result<Tensor> {
        let &[batch, points, channels] = x.shape() else { unreachable!("clouds have three dimensions") };
        let (_, nearest) = x.cdist(x, 2.0)?.topk(neighbours, -1, false)?;
        let rows = nearest.to_dtype(DType::I32)?.add(starts)?.flatten(0, -1)?;
        let shape = [batch, points, neighbours, channels];
        let near = x.flatten(0, 1)?.index_select(0, &rows)?.reshape(shape)?;
        let own = x.unsqueeze(2)?.expand(shape)?;
        let edges = cat(&[&near.sub(&own)?, &own], -1)?.permute([0, 3, 1, 2])?;
        let y = self.norm.forward(&self.conv.forward(&edges)?)?.leaky_relu(0.2)?;
        y.amax([-1], false)?.transpose(1, 2)
    }
}

#[derive(Module)]
struct Points {
    edges: Vec<EdgeConv>,
    join: Conv1d,
    join_norm: BatchNorm1d,
    head: Vec<Linear>,
    head_norms: Vec<BatchNorm1d>,
}

/// Classifier of clouds of points by their nearest neighbours (DGCNN).
pub(super) fn points(tiny: bool, device: &Device) -> Result<Workload> {
    let (batch, count, neighbours, widths, joined, hidden): (_, _, _, &[usize], usize, &[usize]) = match tiny
    {
        true => (2, 16, 4, &[4, 8], 8, &[8]),
        false => (16, 1024, 20, &[64, 64, 128, 256], 1024, &[512, 256]),
    };
    let inputs = [&[3], widths].concat();
    let edge = |w: &[usize]| {
        let options = Conv2dOptions { bias: false, ..Conv2dOptions::default() };
        let norm = BatchNorm2d::new(w[1], device)?;
        Ok(EdgeConv { conv: Conv2d::new(2 * w[0], w[1], 1, options, device)?, norm })
    };
    let point = Conv1dOptions { bias: false, ..Conv1dOptions::default() };
    let head = [&[2 * joined], hidden, &[40]].concat();
    let net = Points {
        edges: inputs.windows(2).map(edge).collect::<Result<_>>()?,
        join: Conv1d::new(widths.iter().sum(), joined, 1, point, device)?,
        join_norm: BatchNorm1d::new(joined, device)?,
        head: head.windows(2).map(|w| Linear::new(w[0], w[1], device)).collect::<Result<_>>()?,
        head_norms: hidden.iter().map(|&w| BatchNorm1d::new(w, device)).collect::<Result<_>>()?,
    };
    let x = Tensor::randn([batch, count, 3], DType::F32, device)?;
    let starts: Vec<i32> = (0..batch).map(|k| (k * count) as i32).collect();
    let starts = Tensor::from_slice(&starts, [batch, 1, 1], device)?;
    let target = Tensor::randint(0, 40, [batch], DType::I32, device)?;
    Ok(Workload::new(&[batch, count], net, move |net| {
        let (mut x, mut parts) = (x.clone(), Vec::new());
        for edge in &net.edges {
            x = edge.forward(&x, &starts, neighbours)?;
            parts.push(x.clone());
        }
        let x = net.join.forward(&cat(&parts, -1)?.transpose(1, 2)?)?;
        let x = net.join_norm.forward(&x)?.leaky_relu(0.2)?;
        let mut x = cat(&[x.amax([-1], false)?, x.mean([-1], false)?], 1)?;
        for (layer, norm) in net.head.iter().zip(&net.head_norms) {
            x = norm.forward(&layer.forward(&x)?)?.leaky_relu(0.2)?;
        }
        net.head[net.head_norms.len()].forward(&x)?.cross_entropy(&target)
    }))
}
