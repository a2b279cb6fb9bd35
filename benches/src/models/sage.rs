//! Nodes of a graph by the largest or the mean feature of their neighbours (Hamilton et al., 2017).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Linear, Module};
use forebay::ops::ScatterReduce;
use forebay::tensor::Tensor;

use super::Workload;

/// Layer of GraphSAGE.
#[derive(Module)]
struct Sage {
    /// Transforms the neighbours before their maximum is taken; without it, the mean is taken.
    pool: Option<Linear>,
    own: Linear,
    neighbours: Linear,
}

impl Sage {
    fn new([inputs, outputs]: [usize; 2], pools: bool, device: &Device) -> Result<Self> {
        Ok(Self {
            pool: pools.then(|| Linear::new(inputs, inputs, device)).transpose()?,
            own: Linear::new(inputs, outputs, device)?,
            neighbours: Linear::without_bias(inputs, outputs, device)?,
        })
    }

    /// Transforms nodes \[nodes, inputs\] by the edges from the nodes `from` to the nodes `to`.
    fn forward(&self, x: &Tensor, from: &Tensor, to: &Tensor) -> Result<Tensor> {
        let (h, reduce) = match &self.pool {
            Some(pool) => (pool.forward(x)?.relu()?, ScatterReduce::Amax),
            None => (x.clone(), ScatterReduce::Mean),
        };
        let messages = h.index_select(0, from)?;
        let at = to.unsqueeze(-1)?.expand(messages.shape())?;
        let gathered = h.zeros_like()?.scatter_reduce(0, &at, &messages, reduce, false)?;
        let y = self.own.forward(x)?.add(&self.neighbours.forward(&gathered)?)?;
        y.normalize(-1, &Default::default())
    }
}

/// Classifier of the nodes of a graph by three layers of GraphSAGE.
pub(super) fn sage(tiny: bool, device: &Device) -> Result<Workload> {
    let ([nodes, edges], width, classes) =
        if tiny { ([50, 200], 8, 5) } else { ([50_000, 500_000], 128, 40) };
    let net = vec![
        Sage::new([width, width], true, device)?,
        Sage::new([width, width], false, device)?,
        Sage::new([width, width], true, device)?,
        Sage::new([width, classes], false, device)?,
    ];
    let x = Tensor::randn([nodes, width], DType::F32, device)?;
    let ends = || Tensor::randint(0, nodes as i64, [edges], DType::I32, device);
    let (from, to) = (ends()?, ends()?);
    let target = Tensor::randint(0, classes as i64, [nodes], DType::I32, device)?;
    Ok(Workload::new(&[nodes, edges, width], net, move |net| {
        let mut x = x.clone();
        for (k, layer) in net.iter().enumerate() {
            x = layer.forward(&x, &from, &to)?;
            x = if k + 1 < net.len() { x.relu()? } else { x };
        }
        x.cross_entropy(&target)
    }))
}
