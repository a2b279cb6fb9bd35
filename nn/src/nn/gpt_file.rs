//! Files of GPT-2's weights, as they were published for Python.
//!
//! Names are those of a [`Gpt`]. Three things are different. The weights of layers are \[in, out\], not \[out, in\]: they are
//! transposed on the way in and on the way out (a square one too, so nothing can be told from shapes). Names may begin with
//! `transformer.`. And files may hold what is no parameter: masks, and the last layer's weight, which is the table of tokens again.

use std::collections::BTreeMap;

use super::{Gpt, GptOptions, Module, rename_keys};
use forebay_core::error::{Error, Result};
use forebay_core::tensor::Tensor;

const LOAD_GPT2_OP: &str = "load_gpt2";
/// Features of a head in all models of that family.
const HEAD_DIM: usize = 64;

/// Whether a file holds this the other way round.
fn is_transposed(name: &str) -> bool {
    [".c_attn.weight", ".c_fc.weight", ".c_proj.weight"].iter().any(|end| name.ends_with(end))
}

/// The name without the prefix that files of a whole language model have.
fn strip_transformer_prefix(name: &str) -> &str {
    name.strip_prefix("transformer.").unwrap_or(name)
}

impl GptOptions {
    /// The sizes of the model whose file this is, without dropout. Heads have 64 features, as all of that family have.
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
    /// The tables of tokens and positions are not there.
    pub fn from_gpt2_state_dict(file: &BTreeMap<String, Tensor>) -> Result<Self> {
        let table = |name: &str| {
            let found =
                file.iter().find(|(n, _)| strip_transformer_prefix(n) == name).map(|(_, t)| t.shape());
            match found {
                Some(&[rows, width]) => Ok((rows, width)),
                _ => Err(Error::argument(
                    "of_gpt2",
                    format!("no matrix `{name}`: this is no file of GPT-2's weights"),
                )),
            }
        };
        let ((vocabulary, width), (context, _)) = (table("wte.weight")?, table("wpe.weight")?);
        let norms = |name: &&String| {
            strip_transformer_prefix(name).starts_with("h.") && name.ends_with(".ln_1.weight")
        };
        let layers = file.keys().filter(norms).count();
        Ok(Self { vocabulary, context, layers, heads: (width / HEAD_DIM).max(1), width, dropout: 0.0 })
    }
}

impl Gpt {
    /// Copies the weights of a file of GPT-2 ([`safetensors::load`](crate::io::safetensors::load)) into the model: names with or without
    /// `transformer.`, layers' weights of \[in, out\]. Positions beyond the model's context are left out.
    ///
    /// # Errors
    /// As [`load_state_dict`](Module::load_state_dict); the file has a last layer whose weight is not the table of tokens, which this
    /// model cannot have.
    pub fn load_gpt2(&self, file: &BTreeMap<String, Tensor>) -> Result<()> {
        let (mut state, mut head) = (BTreeMap::new(), None);
        let file = rename_keys(file, |name| Some(strip_transformer_prefix(name).to_owned()))?;
        for (name, tensor) in &file {
            let name = name.as_str();
            // Masks, which old files hold beside the weights.
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
        if let (Some(head), Some(tokens)) = (head, state.get("wte.weight"))
            && (head.shape() != tokens.shape() || head.to_bytes()? != tokens.to_bytes()?)
        {
            let why =
                "`lm_head.weight` is not `wte.weight`: the model shares them, and cannot hold this file";
            return Err(Error::argument(LOAD_GPT2_OP, why));
        }
        self.load_state_dict(&state)
    }

    /// The weights as files of GPT-2 hold them, to be [saved](crate::io::safetensors::save): [`state_dict`](Module::state_dict) with layers'
    /// weights of \[in, out\].
    ///
    /// # Errors
    /// None for a model that [`new`](Self::new) made.
    pub fn gpt2_state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let turn = |(name, t): (String, Tensor)| {
            let t = if is_transposed(&name) { t.t()? } else { t };
            Ok((name, t))
        };
        self.state_dict().into_iter().map(turn).collect()
    }
}
