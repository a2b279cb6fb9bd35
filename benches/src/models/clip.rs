//! Images and texts in one space: two transformers, whose features each batch contrasts (Radford et al., 2021).

use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result;
use forebay::nn::{Conv2d, Conv2dOptions, Embedding, LayerNorm, Linear, Module};
use forebay::ops::{AttentionOptions, NormalizeOptions, cat};
use forebay::tensor::Tensor;

use super::Workload;

/// Transformer block with norms before attention and network.
#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl Block {
    fn new(width: usize, heads: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            norm1: LayerNorm::new([width], device)?,
            qkv: Linear::new(width, 3 * width, device)?,
            proj: Linear::new(width, width, device)?,
            norm2: LayerNorm::new([width], device)?,
            up: Linear::new(width, 4 * width, device)?,
            down: Linear::new(4 * width, width, device)?,
            heads,
        })
    }

    fn forward(&self, x: &Tensor, is_causal: bool) -> Result<Tensor> {
        let (heads, features) = (self.heads, x.shape()[2] / self.heads);
        let parts = self.qkv.forward(&self.norm1.forward(x)?)?.chunk(3, -1)?;
        let part = |k: usize| parts[k].unflatten(-1, [heads, features])?.transpose(1, 2);
        let options = AttentionOptions { is_causal, ..AttentionOptions::default() };
        let y = part(0)?.scaled_dot_product_attention(&part(1)?, &part(2)?, &options)?;
        let x = x.add(&self.proj.forward(&y.transpose(1, 2)?.flatten(2, -1)?)?)?;
        let y = self.up.forward(&self.norm2.forward(&x)?)?;
        // The fast approximation of GELU.
        let y = y.mul(&y.mul(1.702)?.sigmoid()?)?;
        x.add(&self.down.forward(&y)?)
    }
}

/// Vision transformer whose first token stands for the image.
#[derive(Module)]
struct ImageTower {
    patches: Conv2d,
    class: Tensor,
    positions: Tensor,
    norm: LayerNorm,
    blocks: Vec<Block>,
    last_norm: LayerNorm,
    proj: Linear,
}

impl ImageTower {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.patches.forward(x)?.flatten(2, -1)?.transpose(1, 2)?;
        let (batch, width) = (y.shape()[0], y.shape()[2]);
        let class = self.class.to_dtype(y.dtype())?.expand([batch, 1, width])?;
        let y = cat(&[class, y], 1)?.add(&self.positions)?;
        let y = self.blocks.iter().try_fold(self.norm.forward(&y)?, |x, block| block.forward(&x, false))?;
        self.proj.forward(&self.last_norm.forward(&y.select(1, 0)?)?)
    }
}

/// Causal transformer, of which the token at the end of each text stands for the text.
#[derive(Module)]
struct TextTower {
    tokens: Embedding,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    proj: Linear,
}

impl TextTower {
    fn forward(&self, text: &Tensor) -> Result<Tensor> {
        let y = self.tokens.forward(text)?.add(&self.positions)?;
        let y = self.blocks.iter().try_fold(y, |x, block| block.forward(&x, true))?;
        // The end has the highest index of all tokens.
        let ends = text.argmax(-1, false)?;
        let rows = Tensor::arange(0.0, text.shape()[0] as f64, 1.0, DType::I32, text.device())?;
        let ends = self.norm.forward(&y)?.index(&[Some(&rows), Some(&ends)])?;
        self.proj.forward(&ends)
    }
}

#[derive(Module)]
struct Clip {
    images: ImageTower,
    texts: TextTower,
    log_scale: Tensor,
}

/// Returns a parameter with deviation 0.02.
fn small_parameter(shape: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::randn(shape, DType::F32, device)?.mul(0.02)?.detach().to_leaf()
}

/// CLIP with a vision transformer of size S, and six layers for texts of 77 tokens: 67M parameters.
pub(super) fn clip(tiny: bool, device: &Device) -> Result<Workload> {
    let [batch, side, patch, vocabulary, length, joint] =
        if tiny { [4, 16, 8, 50, 8, 8] } else { [128, 224, 16, 49_408, 77, 512] };
    let ([width, heads, layers], [text_width, text_heads, text_layers]) =
        if tiny { ([16, 2, 2], [16, 2, 1]) } else { ([384, 6, 12], [512, 8, 6]) };
    let blocks = |[width, heads, layers]: [usize; 3]| {
        (0..layers).map(|_| Block::new(width, heads, device)).collect::<Result<Vec<_>>>()
    };
    let options = Conv2dOptions { stride: [patch; 2], bias: false, ..Conv2dOptions::default() };
    let net = Clip {
        images: ImageTower {
            patches: Conv2d::new(3, width, patch, options, device)?,
            class: small_parameter(&[1, 1, width], device)?,
            positions: small_parameter(&[(side / patch).pow(2) + 1, width], device)?,
            norm: LayerNorm::new([width], device)?,
            blocks: blocks([width, heads, layers])?,
            last_norm: LayerNorm::new([width], device)?,
            proj: Linear::without_bias(width, joint, device)?,
        },
        texts: TextTower {
            tokens: Embedding::from_parameter(small_parameter(&[vocabulary, text_width], device)?),
            positions: small_parameter(&[length, text_width], device)?,
            blocks: blocks([text_width, text_heads, text_layers])?,
            norm: LayerNorm::new([text_width], device)?,
            proj: Linear::without_bias(text_width, joint, device)?,
        },
        log_scale: Tensor::full([1], (1.0f64 / 0.07).ln(), DType::F32, device)?.to_leaf()?,
    };
    let shape = [batch, 3, side, side];
    let x = Tensor::randn(shape, DType::F32, device)?;
    let text = Tensor::randint(0, vocabulary as i64, [batch, length], DType::I32, device)?;
    let labels = Tensor::arange(0.0, batch as f64, 1.0, DType::I32, device)?;
    Ok(Workload::new(&shape, net, move |net| {
        let normal = |x: Tensor| x.normalize(-1, &NormalizeOptions::default());
        let images = normal(net.images.forward(&x)?)?;
        let texts = normal(net.texts.forward(&text)?)?;
        let logits = images.matmul(&texts.t()?)?.mul(&net.log_scale.exp()?)?;
        logits.cross_entropy(&labels)?.add(&logits.t()?.cross_entropy(&labels)?)?.mul(0.5)
    }))
}
