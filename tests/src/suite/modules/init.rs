//! Initial values of parameters, and random numbers of dropout.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::nn::init::{self, FanMode, Nonlinearity};
use forebay::nn::{
    AlphaDropout, Bilinear, Conv3d, ConvOptions, Dropout1d, Embedding, FeatureAlphaDropout, Gru, Module,
    MultiheadAttention, MultiheadAttentionOptions, RecurrentOptions, Rrelu, Transformer, TransformerOptions,
};
use forebay::ops::ConvolutionOptions;
use forebay::tensor::Tensor;

use super::super::host_reference::ensure_close;

/// Checks that uniform values are within these bounds and nearly reach them.
fn uniform_within(t: &Tensor, bound: f64, what: &str) -> Result<()> {
    let values = t.to_f64s()?;
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), &v| (l.min(v), h.max(v)));
    ensure!(low >= -bound && high <= bound, "{what}: {low}..{high} is not within {bound}");
    ensure!(low < -0.8 * bound && high > 0.8 * bound, "{what}: {low}..{high} does not reach {bound}");
    Ok(())
}

fn deviation(t: &Tensor, mean: f64, std: f64, what: &str) -> Result<()> {
    let values = t.to_f64s()?;
    let n = values.len() as f64;
    let m = values.iter().sum::<f64>() / n;
    let s = (values.iter().map(|v| (v - m) * (v - m)).sum::<f64>() / n).sqrt();
    ensure!(
        (m - mean).abs() < 5.0 * std / n.sqrt() && (s / std - 1.0).abs() < 5.0 / n.sqrt(),
        "{what}: {m} ± {s}"
    );
    Ok(())
}

/// Default initialisation of PyTorch's modules.
pub(super) fn initial_values(device: &Device) -> Result<()> {
    let attention = MultiheadAttention::new(
        32,
        4,
        MultiheadAttentionOptions { add_bias_kv: true, ..Default::default() },
        device,
    )?;
    for (name, t) in attention.state_dict() {
        match name.as_str() {
            "in_proj_weight" => uniform_within(&t, (6.0 / 128f64).sqrt(), &name)?,
            "out_proj.weight" => uniform_within(&t, 1.0 / 32f64.sqrt(), &name)?,
            "bias_k" | "bias_v" => ensure!(t.to_f64s()?.iter().any(|v| *v != 0.0), "{name}"),
            _ => ensure!(t.to_f64s()?.iter().all(|v| *v == 0.0), "{name} is not zero"),
        }
    }
    for (name, t) in Gru::new(9, 16, RecurrentOptions::default(), device)?.state_dict() {
        uniform_within(&t, 0.25, &name)?;
    }
    let options = TransformerOptions { feedforward: 48, ..Default::default() };
    for (name, t) in Transformer::new(16, 2, [1, 1], options, device)?.state_dict() {
        match (name.as_str(), t.shape()) {
            (_, &[rows, columns]) => uniform_within(&t, (6.0 / (rows + columns) as f64).sqrt(), &name)?,
            (n, _) if n.contains("norm") && n.ends_with("weight") => {
                ensure!(t.to_f64s()? == vec![1.0; 16], "{name}")
            }
            (n, _) if n.contains("linear1") => uniform_within(&t, 0.25, &name)?,
            _ => {}
        }
    }
    for t in Bilinear::new([9, 20], 6, true, device)?.parameters().iter().take(1) {
        uniform_within(t, 1.0 / 3.0, "bilinear")?;
    }
    let conv = Conv3d::new(4, 12, [3, 2, 2], ConvOptions { groups: 2, ..Default::default() }, device)?;
    uniform_within(&conv.weight, 1.0 / 24f64.sqrt(), "conv3d")?;
    let table = Embedding::new(300, 8, device)?.with_padding_idx(7)?;
    ensure!(table.weight.select(0, 7)?.to_f64s()? == vec![0.0; 8], "the row of padding");
    deviation(&table.weight.narrow(0, 8, 292)?, 0.0, 1.0, "embedding")
}

/// Initialisation by the functions of `nn::init`.
pub(super) fn initial_values_by_name(device: &Device) -> Result<()> {
    let empty = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    for (rows, columns) in [(5, 9), (9, 5)] {
        let t = empty(&[rows, columns])?;
        init::orthogonal_(&t, 2.0)?;
        let (short, product) =
            if rows < columns { (rows, t.matmul(&t.t()?)?) } else { (columns, t.t()?.matmul(&t)?) };
        let expected = Tensor::eye(short, short, DType::F32, device)?.mul(4.0)?.to_f64s()?;
        ensure_close(&product.to_f64s()?, &expected, 0.0, 1e-5)?;
    }
    let t = empty(&[60, 50])?;
    init::trunc_normal_(&t, 1.0, 2.0, -1.0, 5.0)?;
    // Mean and deviation of a normal distribution truncated to -1 to 2 deviations.
    deviation(&t, 1.0 + 2.0 * 0.229_637, 2.0 * 0.720_1, "trunc_normal_")?;
    let values = t.to_f64s()?;
    ensure!(values.iter().all(|v| (-1.0..=5.0).contains(v)), "outside of the bounds");
    init::kaiming_normal_with_mode_(&t, FanMode::FanOut, Nonlinearity::LeakyRelu(0.5))?;
    deviation(&t, 0.0, (1.6f64 / 60.0).sqrt(), "kaiming_normal_for_")?;
    init::kaiming_uniform_with_mode_(&t, FanMode::FanIn, Nonlinearity::Tanh)?;
    uniform_within(&t, 5.0 / 3.0 * (3.0 / 50f64).sqrt(), "kaiming_uniform_for_")?;
    init::sparse_(&t, 0.29, 0.5)?;
    let zeros = t.eq(0.0)?.to_dtype(DType::F32)?.sum([0], false)?.to_f64s()?;
    ensure!(zeros == vec![18.0; 50], "zeros of columns: {zeros:?}");
    init::eye_(&t)?;
    ensure!(
        t.sum_all()?.item()? == 50.0 && t.trace().is_ok_and(|t| t.item().is_ok_and(|v| v == 50.0)),
        "eye_"
    );
    let kernel = empty(&[4, 2, 3, 3])?;
    init::dirac_(&kernel, 2)?;
    let x = super::randn(&[1, 4, 5, 5], device)?;
    let passed =
        x.conv2d(&kernel, None, &ConvolutionOptions { padding: 1.into(), groups: 2, ..Default::default() })?;
    ensure!(passed.to_f64s()? == x.to_f64s()?, "a dirac kernel passes its channels on");
    let parameters = [empty(&[2, 3])?.to_leaf()?, empty(&[4])?.to_leaf()?];
    let vector = Tensor::arange(0.0, 10.0, 1.0, DType::F32, device)?;
    init::vector_to_parameters(&vector, &parameters)?;
    ensure!(parameters[1].to_f64s()? == [6.0, 7.0, 8.0, 9.0], "vector_to_parameters");
    let again = init::parameters_to_vector(&parameters)?;
    ensure!(again.to_f64s()? == vector.to_f64s()? && again.requires_grad(), "parameters_to_vector");
    Ok(())
}

/// Dropout of whole channels, alpha dropout and random slopes; none of them in evaluation mode.
pub(super) fn dropout_masks_are_drawn(device: &Device) -> Result<()> {
    let x = Tensor::ones([40, 30, 4], DType::F32, device)?.to_leaf()?;
    let layer = Dropout1d::new(0.25);
    let y = layer.forward(&x)?;
    y.sum_all()?.backward()?;
    let values = y.to_f64s()?;
    let dropped = values.chunks(4).filter(|c| **c == [0.0; 4]).count();
    ensure!(values.chunks(4).all(|c| c.iter().all(|v| *v == c[0])), "a channel is dropped in part");
    ensure!((220..380).contains(&dropped), "{dropped} of 1200 channels");
    ensure!(x.grad().is_some_and(|g| g.to_f64s().is_ok_and(|g| g == values)), "the gradient drops others");
    layer.eval();
    ensure!(layer.forward(&x)?.to_f64s()? == vec![1.0; 4800], "evaluation drops");
    for (alone, y) in [
        (true, AlphaDropout::new(0.3).forward(&super::randn(&[200, 50], device)?)?),
        (false, FeatureAlphaDropout::new(0.3).forward(&super::randn(&[200, 50, 2], device)?)?),
    ] {
        let values = y.to_f64s()?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let var = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
        ensure!(mean.abs() < 0.05 && (var - 1.0).abs() < 0.06, "{alone}: mean {mean}, variance {var}");
    }
    let x = super::randn(&[1000], device)?.sub(5.0)?.to_leaf()?;
    let layer = Rrelu::default();
    let slopes = layer.forward(&x)?.div(&x)?.to_f64s()?;
    ensure!(slopes.iter().all(|s| (0.1249..0.3334).contains(s)), "slopes outside of 1/8 to 1/3");
    ensure!(
        slopes.iter().any(|s| *s < 0.14) && slopes.iter().any(|s| *s > 0.32),
        "slopes do not reach the bounds"
    );
    Ok(())
}
