//! GPT-2's weights in the format of the published Python files.
//!
//! The files use the names of [`Gpt`], with three differences. Weights of layers are \[in, out\] instead of
//! \[out, in\]. Loading and saving transpose them by name, because the shape of a square weight does not show
//! its order. Names may begin with `transformer.`. Files may hold tensors that are not parameters: masks, and
//! the weight of the last layer, a copy of the token embedding.

use std::collections::{BTreeMap, BTreeSet};

use super::{Gpt, GptOptions, Module, rename_keys};
use crate::{Result, Tensor, fail, fail_if};

/// Features of a head in all models of this family.
const HEAD_DIM: usize = 64;

/// Reports whether files hold this weight transposed.
fn is_transposed(name: &str) -> bool {
    [".c_attn.weight", ".c_fc.weight", ".c_proj.weight"].iter().any(|end| name.ends_with(end))
}

/// Removes the prefix that files of a whole language model have.
fn strip_transformer_prefix(name: &str) -> &str {
    name.strip_prefix("transformer.").unwrap_or(name)
}

impl GptOptions {
    /// Infers the sizes of the model from the embeddings and norms in its file, without dropout. Each head
    /// has 64 features.
    ///
    /// ```
    /// # use std::collections::BTreeMap;
    /// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
    /// # use forebay_nn::nn::GptOptions;
    /// # let device = Device::null(Default::default());
    /// let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    /// let file = BTreeMap::from([
    ///     ("wte.weight".to_owned(), tensor(&[50_257, 768])?),
    ///     ("wpe.weight".to_owned(), tensor(&[1024, 768])?),
    ///     ("h.0.ln_1.weight".to_owned(), tensor(&[768])?),
    /// ]);
    /// let sizes = GptOptions::from_gpt2_state_dict(&file)?;
    /// assert_eq!((sizes.layers, sizes.heads, sizes.context), (1, 12, 1024));
    /// # Ok::<(), forebay_core::error::Error>(())
    /// ```
    ///
    /// # Errors
    /// The file has no matrix `wte.weight` or `wpe.weight`, or a matrix without elements. Their widths differ. The
    /// blocks are not numbered from 0 without gaps, or there is none.
    #[track_caller]
    pub fn from_gpt2_state_dict(file: &BTreeMap<String, Tensor>) -> Result<Self> {
        const OP: &str = "from_gpt2_state_dict";
        let table = |name: &str| match file
            .iter()
            .find(|(own, _)| strip_transformer_prefix(own) == name)
            .map(|(_, t)| t.shape())
        {
            Some(&[rows, width]) if rows > 0 && width > 0 => Ok([rows, width]),
            Some(shape) => {
                fail!(argument(OP), "`{name}` has the shape {shape:?}; expected a matrix with elements")
            }
            None => fail!(argument(OP), "no matrix `{name}`: this is not a file of GPT-2's weights"),
        };
        let ([vocabulary, width], [context, positions_width]) = (table("wte.weight")?, table("wpe.weight")?);
        fail_if!(positions_width != width; argument(OP),
            "`wte.weight` has the width {width}, and `wpe.weight` {positions_width}; expected one width");
        let blocks: BTreeSet<usize> = file.keys().filter_map(|name| block_number(name)).collect();
        let layers = blocks.last().map_or(0, |&last| last.saturating_add(1));
        fail_if!(layers == 0; argument(OP), "no `h.0.ln_1.weight`: this is not a file of GPT-2's weights");
        fail_if!(blocks.len() != layers; argument(OP),
            "the file has {} of {layers} blocks; expected `h.N.ln_1.weight` for every N below {layers}", blocks.len());
        Ok(Self { vocabulary, context, layers, heads: (width / HEAD_DIM).max(1), width, dropout: 0.0 })
    }
}

/// Returns the number of the block whose first norm has this name.
fn block_number(name: &str) -> Option<usize> {
    strip_transformer_prefix(name).strip_prefix("h.")?.strip_suffix(".ln_1.weight")?.parse().ok()
}

impl Gpt {
    /// Copies the weights of a GPT-2 file ([`safetensors::load`](crate::io::safetensors::load)) into the model by
    /// [`load_state_dict`](Module::load_state_dict). Names may begin with `transformer.`, and weights of layers are
    /// \[in, out\]. Positions beyond the model's context are ignored.
    ///
    /// # Errors
    /// The weight of the last layer differs from the token embedding, because this model shares the two.
    #[track_caller]
    pub fn load_gpt2(&self, file: &BTreeMap<String, Tensor>) -> Result<()> {
        let (mut state, mut head) = (BTreeMap::new(), None);
        let file = rename_keys(file, |name| Some(strip_transformer_prefix(name).to_owned()))?;
        for (name, tensor) in &file {
            let name = name.as_str();
            // Old files hold attention masks next to the weights.
            if name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") {
                continue;
            }
            let tensor = tensor.detach();
            let tensor = match name {
                "lm_head.weight" => {
                    head = Some(tensor);
                    continue;
                }
                "wpe.weight" if tensor.rank() == 2 && tensor.shape()[0] > self.context() => {
                    tensor.narrow(0, 0, self.context())?
                }
                _ if is_transposed(name) && tensor.rank() == 2 => tensor.t()?,
                _ => tensor,
            };
            state.insert(name.to_owned(), tensor);
        }
        if let (Some(head), Some(tokens)) = (head, state.get("wte.weight")) {
            fail_if!(
                head.shape() != tokens.shape() || head.to_bytes()? != tokens.to_bytes()?;
                argument("load_gpt2"), "`lm_head.weight` is not `wte.weight`: the model shares them, and cannot hold this file"
            );
        }
        self.load_state_dict(&state)
    }

    /// Returns the weights in the format of GPT-2's files, to be [saved](crate::io::safetensors::save):
    /// [`state_dict`](Module::state_dict) with the weights of layers as \[in, out\].
    #[track_caller]
    pub fn gpt2_state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let transpose_linear = |(name, t): (String, Tensor)| {
            let t = if is_transposed(&name) { t.t()? } else { t };
            Ok((name, t))
        };
        self.state_dict().into_iter().map(transpose_linear).collect()
    }
}
