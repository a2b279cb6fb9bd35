//! Text generation, token by token.

use anyhow::{Result, ensure};
use forebay::autograd::no_grad;
use forebay::nn::{Gpt, eval_mode};
use forebay::prelude::*;

use super::options::Options;

/// Continues `start` by `n` tokens, each sampled from the first `known` tokens of the vocabulary.
pub(crate) fn generate_tokens(
    net: &Gpt,
    start: &[u32],
    known: usize,
    options: &Options,
    n: usize,
) -> Result<Vec<u32>> {
    ensure!(!start.is_empty(), "nothing to continue from: pass a text with --prompt");
    let _no_grad = no_grad();
    let _eval = eval_mode(net);
    let device = net.wte.weight.device();
    let mut text: Vec<i64> = start.iter().map(|&token| token.into()).collect();
    for _ in 0..n {
        let seen = &text[text.len().saturating_sub(net.context())..];
        let scores = net.forward(&Tensor::from_slice(seen, [1, seen.len()], device)?)?;
        let last = scores.select(1, -1)?.flatten(0, -1)?.narrow(0, 0, known)?.to_vec::<f32>()?;
        // The device's generator, so that the seed determines the text.
        let random = Tensor::rand([1], DType::F32, device)?.item()?;
        text.push(sample_token(&last, options.temperature, options.top_k, random) as i64);
    }
    Ok(text[start.len()..].iter().map(|&token| token as u32).collect())
}

/// Returns the token at which the cumulative probability, likeliest token first, exceeds `random` (0 to 1).
fn sample_token(scores: &[f32], temperature: f64, top_k: usize, random: f64) -> usize {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_unstable_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(if top_k == 0 { order.len() } else { top_k });
    let best = order[0];
    if temperature <= 0.0 {
        return best;
    }
    let weight = |&token: &usize| (f64::from(scores[token] - scores[best]) / temperature).exp();
    let mut left = random * order.iter().map(weight).sum::<f64>();
    let found = order.iter().find(|token| {
        left -= weight(token);
        left < 0.0
    });
    found.copied().unwrap_or(best)
}
