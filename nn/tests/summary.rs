//! Summaries of models: PyTorch's `print(model)`, with the parameters counted.

use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::ops::{EmbeddingBagMode, InterpolateOptions, PadMode, PoolOptions};
use forebay_core::tensor::Tensor;
use forebay_nn::nn::{
    AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, Bilinear, Conv1d, Conv2d, ConvOptions, ConvTranspose2d,
    ConvTransposeOptions, Dropout, Embedding, EmbeddingBag, Fold, GroupNorm, Gru, GruCell, InstanceNorm1d,
    LayerNorm, LeakyRelu, Linear, Lstm, MaxPool2d, Module, ModuleDict, PixelShuffle, Prelu, RecurrentOptions,
    Relu, RmsNorm, Sequential, SpectralNorm, TrainingMode, Unfold, Upsample, WeightNorm, ZeroPad2d, init,
};

#[test]
fn layers_print_the_options_that_pytorch_prints() -> Result<()> {
    let d = &Device::null(Default::default());
    let conv = ConvOptions {
        padding: [1, 1],
        groups: 2,
        bias: false,
        padding_mode: PadMode::Reflect,
        ..Default::default()
    };
    let transposed = ConvTransposeOptions { stride: [2, 2], output_padding: [1, 1], ..Default::default() };
    let stacked = RecurrentOptions {
        num_layers: 2,
        bidirectional: true,
        dropout: 0.5,
        batch_first: true,
        ..Default::default()
    };
    let layers: Vec<(Box<dyn Module>, &str)> = vec![
        (Box::new(Linear::new(8, 4, d)?), "Linear(in_features=8, out_features=4, bias=True)"),
        (Box::new(Linear::without_bias(8, 4, d)?), "Linear(in_features=8, out_features=4, bias=False)"),
        (
            Box::new(Bilinear::new([4, 5], 3, true, d)?),
            "Bilinear(in1_features=4, in2_features=5, out_features=3, bias=True)",
        ),
        (
            Box::new(Conv1d::new(3, 8, 5, Default::default(), d)?),
            "Conv1d(3, 8, kernel_size=(5,), stride=(1,))",
        ),
        (
            Box::new(Conv2d::new(4, 8, 3, conv, d)?),
            "Conv2d(4, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=2, bias=False, padding_mode=Reflect)",
        ),
        (
            Box::new(ConvTranspose2d::new(8, 4, 3, transposed, d)?),
            "ConvTranspose2d(8, 4, kernel_size=(3, 3), stride=(2, 2), output_padding=(1, 1))",
        ),
        (Box::new(LayerNorm::new([3, 4], d)?), "LayerNorm((3, 4), eps=1e-5, bias=True)"),
        (Box::new(RmsNorm::new([4], d)?), "RmsNorm((4,), eps=None)"),
        (Box::new(GroupNorm::new(2, 6, d)?), "GroupNorm(2, 6, eps=1e-5)"),
        (
            Box::new(BatchNorm2d::new(6, d)?),
            "BatchNorm2d(6, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True)",
        ),
        (
            Box::new(InstanceNorm1d::new(6)),
            "InstanceNorm1d(6, eps=1e-5, momentum=0.1, affine=False, track_running_stats=False)",
        ),
        (Box::new(Embedding::new(10, 3, d)?), "Embedding(10, 3)"),
        (
            Box::new(Embedding::new(10, 3, d)?.with_padding_idx(0)?.with_max_norm(1.5, 2.0)),
            "Embedding(10, 3, padding_idx=0, max_norm=1.5, norm_type=2)",
        ),
        (
            Box::new(EmbeddingBag::new(10, 3, EmbeddingBagMode::Mean, None, d)?),
            "EmbeddingBag(10, 3, mode=Mean)",
        ),
        (
            Box::new(Lstm::new(4, 8, stacked, d)?),
            "Lstm(4, 8, num_layers=2, batch_first=True, dropout=0.5, bidirectional=True)",
        ),
        (Box::new(Gru::new(4, 8, Default::default(), d)?), "Gru(4, 8)"),
        (Box::new(GruCell::new(4, 8, false, d)?), "GruCell(4, 8, bias=False)"),
        (Box::new(Dropout::new(0.25)), "Dropout(p=0.25)"),
        (Box::new(Relu::default()), "Relu()"),
        (Box::new(LeakyRelu::default()), "LeakyRelu(negative_slope=0.01)"),
        (Box::new(Prelu::new(3, 0.25, d)?), "Prelu(num_parameters=3)"),
        (
            Box::new(MaxPool2d::new(2)),
            "MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)",
        ),
        (
            Box::new(AvgPool2d(PoolOptions::new(3))),
            "AvgPool2d(kernel_size=(3, 3), stride=(3, 3), padding=(0, 0))",
        ),
        (Box::new(AdaptiveAvgPool2d([1, 2])), "AdaptiveAvgPool2d(output_size=(1, 2))"),
        (Box::new(PixelShuffle(2)), "PixelShuffle(upscale_factor=2)"),
        (
            Box::new(Unfold::new([2, 3])),
            "Unfold(kernel_size=(2, 3), dilation=(1, 1), padding=(0, 0), stride=(1, 1))",
        ),
        (
            Box::new(Fold::new([4, 4], [2, 2])),
            "Fold(output_size=(4, 4), kernel_size=(2, 2), dilation=(1, 1), padding=(0, 0), stride=(1, 1))",
        ),
        (
            Box::new(Upsample::new(InterpolateOptions::with_scale_factor(2.0))),
            "Upsample(scale_factor=[2.0], mode=Nearest)",
        ),
        (Box::new(ZeroPad2d::new(1)), "ZeroPad2d([1, 1, 1, 1])"),
        (
            Box::new(WeightNorm::new(Linear::new(8, 4, d)?, Some(0))?),
            "WeightNorm(in_features=8, out_features=4, bias=True)",
        ),
        (
            Box::new(SpectralNorm::new(Linear::new(8, 4, d)?)?),
            "SpectralNorm(in_features=8, out_features=4, bias=True)",
        ),
    ];
    for (layer, expected) in layers {
        assert_eq!(format!("{:?}", layer.summary()), expected);
    }
    assert_eq!(format!("{:?}", Linear::new(8, 4, d)?), "Linear(in_features=8, out_features=4, bias=True)");
    Ok(())
}

#[derive(Module)]
#[module(crate = forebay_nn)]
enum Mixer {
    Plain(Linear),
    Gated { gate: Linear, value: Linear },
}

#[derive(Module)]
#[module(crate = forebay_nn, debug)]
struct Block {
    norm: LayerNorm,
    mixer: Mixer,
}

#[derive(Module)]
#[module(crate = forebay_nn, debug)]
struct Net {
    words: Embedding,
    scale: Tensor,
    blocks: Vec<Block>,
    heads: ModuleDict<Linear>,
    tied: Linear,
    sizes: Vec<usize>,
    causal: bool,
    #[module(skip)]
    seed: u64,
    missing: Option<Linear>,
    training: TrainingMode,
}

#[test]
fn a_model_of_the_program_is_a_tree() -> Result<()> {
    let d = &Device::null(Default::default());
    let block = |mixer| -> Result<Block> { Ok(Block { norm: LayerNorm::new([4], d)?, mixer }) };
    let words = Embedding::new(10, 4, d)?;
    let net = Net {
        tied: Linear::from_parameters(words.weight.clone(), None)?,
        words,
        scale: init::create_parameter(|| Tensor::ones([4], forebay_core::dtype::DType::F32, d))?,
        blocks: vec![
            block(Mixer::Plain(Linear::new(4, 4, d)?))?,
            block(Mixer::Plain(Linear::new(4, 4, d)?))?,
            block(Mixer::Gated { gate: Linear::new(4, 4, d)?, value: Linear::new(4, 4, d)? })?,
        ],
        heads: [("size", Linear::new(4, 1, d)?), ("colour", Linear::new(4, 300, d)?)].into_iter().collect(),
        sizes: vec![1, 300],
        causal: true,
        seed: 7,
        missing: None,
        training: TrainingMode::new(),
    };
    assert_eq!(net.seed, 7);
    net.heads.requires_grad_(false);
    let expected = "\
Net(                                                            1,653
  sizes=[1, 300], causal=True
  (words): Embedding(10, 4)                                        40
  (blocks): ModuleList(                                           104
    (0-1): 2 x Block(                                              56
      (norm): LayerNorm((4,), eps=1e-5, bias=True)                  8
      (mixer): Linear(in_features=4, out_features=4, bias=True)    20
    )
    (2): Block(                                                    48
      (norm): LayerNorm((4,), eps=1e-5, bias=True)                  8
      (mixer): Mixer(                                              40
        (gate): Linear(in_features=4, out_features=4, bias=True)   20
        (value): Linear(in_features=4, out_features=4, bias=True)  20
      )
    )
  )
  (heads): ModuleDict(                                          1,505
    (size): Linear(in_features=4, out_features=1, bias=True)        5
    (colour): Linear(in_features=4, out_features=300, bias=True)1,500
  )
  (tied): Linear(in_features=4, out_features=10, bias=False)       40
)
1,653 parameters, 148 of them trained";
    let found = net.summary().to_string();
    let without_spaces = |text: &str| text.replace(' ', "");
    assert_eq!(without_spaces(&found), without_spaces(expected), "{found}");
    let ends: Vec<usize> =
        found.lines().filter(|line| line.ends_with(|c: char| c.is_ascii_digit())).map(str::len).collect();
    assert!(
        ends.len() == 15 && ends.windows(2).all(|pair| pair[0] == pair[1]),
        "numbers are not aligned:\n{found}"
    );
    assert_eq!(net.num_parameters(), 1653);
    assert!(
        format!("{net:?}").starts_with("Net(\n  sizes=[1, 300], causal=True\n  (words): Embedding(10, 4)\n"),
        "{net:?}"
    );
    assert_eq!(net.blocks[0].summary().to_string().lines().last(), Some("28 parameters, 28 of them trained"));
    let nested = Sequential::new().add(Sequential::new().add(Relu::default()));
    assert_eq!(format!("{nested:?}"), "Sequential(\n  (0): Sequential(\n    (0): Relu()\n  )\n)");
    Ok(())
}

#[test]
fn elements_of_other_sizes_are_listed_apart() -> Result<()> {
    #[derive(Module)]
    #[module(crate = forebay_nn)]
    struct Scale {
        weight: Tensor,
    }
    let d = &Device::null(Default::default());
    let scale = |n: usize| Ok(Scale { weight: Tensor::ones([n], DType::F32, d)?.to_leaf()? });
    let text = [8, 8, 1024].map(scale).into_iter().collect::<Result<Vec<Scale>>>()?.summary().to_string();
    assert!(text.contains("(0-1): 2 x Scale()") && text.contains("(2): Scale()"), "{text}");
    assert!(text.contains("1,040") || text.contains("1040"), "{text}");
    Ok(())
}
