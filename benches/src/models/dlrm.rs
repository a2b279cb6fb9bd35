//! Click prediction with large tables and bags of unequal lengths (Naumov et al., 2019).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{EmbeddingBag, EmbeddingBagInputs, Linear, Module};
use forebay::ops::{EmbeddingBagMode, cat, stack};
use forebay::tensor::Tensor;

use super::Workload;

/// Samples of one table: the row of each sample, and the start of each bag.
struct Bags {
    index: Tensor,
    offsets: Tensor,
}

impl Bags {
    /// Creates bags of 1 to 10 samples.
    fn new(table: usize, entries: usize, batch: usize, device: &Device) -> Result<Self> {
        let ends = (0..batch).scan(0, |end, k| {
            *end += (k * 7 + table * 3) % 10 + 1;
            Some(*end as i32)
        });
        let mut offsets: Vec<i32> = [0].into_iter().chain(ends).collect();
        let samples = offsets.pop().unwrap_or(0) as usize;
        Ok(Self {
            index: Tensor::randint(0, entries as i64, [samples], DType::I32, device)?,
            offsets: Tensor::from_slice(&offsets, [batch], device)?,
        })
    }
}

#[derive(Module)]
struct Dlrm {
    tables: Vec<EmbeddingBag>,
    bottom: Vec<Linear>,
    top: Vec<Linear>,
}

fn run_layers(layers: &[Linear], x: Tensor) -> Result<Tensor> {
    layers.iter().enumerate().try_fold(x, |x, (k, layer)| {
        let y = layer.forward(&x)?;
        if k + 1 < layers.len() { y.relu() } else { Ok(y) }
    })
}

/// Click prediction: means of the rows of 26 tables, their pairwise products, and two networks. 167M parameters.
pub(super) fn dlrm(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, tables, entries, width] = if tiny { [4, 3, 20, 8] } else { [4096, 26, 100_000, 64] };
    let layers = |widths: &[usize]| {
        widths.windows(2).map(|w| Linear::new(w[0], w[1], device)).collect::<Result<Vec<_>>>()
    };
    let table = |_| EmbeddingBag::new(entries, width, EmbeddingBagMode::Mean, None, device);
    let net = Dlrm {
        tables: (0..tables).map(table).collect::<Result<_>>()?,
        bottom: layers(&[13, 512, 256, width])?,
        top: layers(&[width + (tables + 1) * tables / 2, 512, 512, 256, 1])?,
    };
    let dense = Tensor::rand([batch, 13], DType::F32, device)?;
    let bags =
        (0..tables).map(|table| Bags::new(table, entries, batch, device)).collect::<Result<Vec<_>>>()?;
    let clicked = Tensor::randint(0, 2, [batch, 1], DType::I32, device)?.to_dtype(DType::F32)?;
    let below = Tensor::tril_indices(tables + 1, tables + 1, -1, device)?;
    let (rows, columns) = (below.select(0, 0)?, below.select(0, 1)?);
    Ok(Workload::new(&[batch, tables, entries], net, move |net| {
        let x = run_layers(&net.bottom, dense.clone())?.relu()?;
        let mut features = vec![x.clone()];
        for (table, bags) in net.tables.iter().zip(&bags) {
            let inputs = EmbeddingBagInputs { offsets: Some(&bags.offsets), per_sample_weights: None };
            features.push(table.forward(&bags.index, &inputs)?.to_dtype(x.dtype())?);
        }
        let features = stack(&features, 1)?;
        let products = features.matmul(&features.transpose(1, 2)?)?;
        let products = products.index(&[None, Some(&rows), Some(&columns)])?;
        let logits = run_layers(&net.top, cat(&[x, products], 1)?)?;
        logits.to_dtype(DType::F32)?.binary_cross_entropy_with_logits(&clicked, &Default::default())
    }))
}
