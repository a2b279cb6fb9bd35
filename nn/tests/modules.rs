//! Modules and optimisers without arithmetic, on the null device: names, sharing, messages, tags, memory.

use std::collections::BTreeMap;
use std::sync::Mutex;

use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::Tag;
use forebay_core::tensor::Tensor;
use forebay_nn::nn::{
    BatchNorm2d, Bert, BertOptions, Dropout, Embedding, Gpt, GptOptions, Gru, LayerNorm, Linear, Lstm,
    Module, ModuleEntry, ModuleScope, MultiheadAttention, RecurrentOptions, Rnn, RotaryEmbedding,
    SelfAttention, Sequential, SinusoidalEmbedding, TransformerDecoder, TransformerEncoder,
    TransformerOptions, init,
};
use forebay_nn::optim::{Adam, AdamW, Optimizer, RmsProp, Sgd, clip_grad_norm_};

fn device() -> Device {
    Device::null(Default::default())
}

#[derive(Module)]
#[module(crate = forebay_nn)]
struct Block<N> {
    ln: N,
    attn: SelfAttention,
    drop: Option<Dropout>,
    width: usize,
    #[module(skip)]
    _calls: Mutex<u32>,
    scope: ModuleScope,
}

#[derive(Module)]
#[module(crate = forebay_nn)]
enum Head {
    Tied(Tensor),
    Own { fc: Linear, r#type: String },
}

#[derive(Module)]
#[module(crate = forebay_nn)]
struct Net {
    wte: Embedding,
    blocks: Vec<Block<LayerNorm>>,
    pair: (Linear, [f64; 2]),
    head: Head,
    named: BTreeMap<String, BatchNorm2d>,
}

fn block(device: &Device) -> Result<Block<LayerNorm>> {
    Ok(Block {
        ln: LayerNorm::new([8], device)?,
        attn: SelfAttention::new(8, 2, device)?.causal(),
        drop: Some(Dropout::new(0.1)),
        width: 8,
        _calls: Mutex::new(0),
        scope: ModuleScope::new(),
    })
}

fn net(device: &Device) -> Result<Net> {
    let wte = Embedding::new(5, 8, device)?;
    let tied = wte.weight.clone();
    Ok(Net {
        wte,
        blocks: vec![block(device)?, block(device)?],
        pair: (Linear::without_bias(8, 8, device)?, [0.0; 2]),
        head: Head::Tied(tied),
        named: BTreeMap::from([("bn".to_owned(), BatchNorm2d::new(3, device)?)]),
    })
}

#[test]
fn names_are_paths_of_fields() -> Result<()> {
    let net = net(&device())?;
    assert_eq!((net.blocks[0].width, net.pair.1), (8, [0.0; 2]));
    let names: Vec<String> = net.state_dict().into_keys().collect();
    let expected = "blocks.0.attn.proj.bias blocks.0.attn.proj.weight blocks.0.attn.qkv.bias \
                    blocks.0.attn.qkv.weight blocks.0.ln.bias blocks.0.ln.weight blocks.1.attn.proj.bias \
                    blocks.1.attn.proj.weight blocks.1.attn.qkv.bias blocks.1.attn.qkv.weight blocks.1.ln.bias \
                    blocks.1.ln.weight head named.bn.bias named.bn.num_batches_tracked named.bn.running_mean \
                    named.bn.running_var named.bn.weight pair.0.weight wte.weight";
    assert_eq!(names.join(" "), expected);
    Ok(())
}

#[test]
fn a_shared_parameter_is_trained_once_and_saved_under_both_names() -> Result<()> {
    let net = net(&device())?;
    let parameters = net.named_parameters();
    assert_eq!(parameters.iter().filter(|(name, _)| name == "wte.weight").count(), 1);
    assert!(parameters.iter().all(|(name, _)| name != "head"));
    let state = net.state_dict();
    assert!(state["head"].shares_storage(&state["wte.weight"]));
    let error = AdamW::new(vec![net.wte.weight.clone(), net.wte.weight.clone()], 1e-3).step().err();
    assert!(error.is_some_and(|e| e.to_string().contains("is in the list twice")));
    Ok(())
}

#[test]
fn an_enum_visits_its_variant() -> Result<()> {
    let device = device();
    let own = Head::Own { fc: Linear::new(2, 3, &device)?, r#type: "own".into() };
    assert_eq!(own.state_dict().into_keys().collect::<Vec<_>>(), ["fc.bias", "fc.weight"]);
    let tied = Head::Tied(Tensor::ones([2], DType::F32, &device)?);
    let mut slots = Vec::new();
    tied.visit("head", &mut |name, slot| {
        slots.push((name.to_owned(), matches!(slot, ModuleEntry::Buffer(_))))
    });
    assert_eq!(slots, [("head".to_owned(), true)]);
    Ok(())
}

#[test]
fn a_field_may_have_another_name_in_files() -> Result<()> {
    #[derive(Module)]
    #[module(crate = forebay_nn)]
    struct Renamed {
        #[module(name = "self")]
        inner: Linear,
        #[module(name = "LayerNorm")]
        norm: LayerNorm,
    }
    let device = device();
    let model = Renamed { inner: Linear::new(2, 3, &device)?, norm: LayerNorm::new([3], &device)? };
    let names: Vec<String> = model.state_dict().into_keys().collect();
    assert_eq!(names, ["LayerNorm.bias", "LayerNorm.weight", "self.bias", "self.weight"]);
    Ok(())
}

#[test]
fn modules_learn_the_longest_path() -> Result<()> {
    let net = net(&device())?;
    let _ = net.blocks[1].parameters();
    assert!(net.blocks[1].scope.path().is_root());
    let _ = net.parameters();
    let _ = net.blocks[1].parameters();
    assert_eq!(net.blocks[1].scope.path().to_string(), "blocks.1");
    let _scope = net.blocks[1].scope.enter();
    assert_eq!(forebay_core::memory::scope::current().module.to_string(), "blocks.1");
    assert_eq!(forebay_core::memory::scope::current().tag, Tag::Activation);
    Ok(())
}

#[test]
fn an_error_names_the_layer() -> Result<()> {
    let device = device();
    let net = net(&device)?;
    let _ = net.parameters();
    let x = Tensor::ones([1, 4, 7], DType::F32, &device)?;
    let error = net.blocks[0].attn.forward(&x).expect_err("7 features are not 8");
    assert_eq!(
        error.message(),
        "in blocks.0.attn.qkv: linear: the weight takes 8 features, the last extent of x is 7; got [1, 4, 7] and [24, 8]"
    );
    Ok(())
}

#[test]
fn a_mismatched_state_changes_nothing_and_lists_all_errors() -> Result<()> {
    let device = device();
    let net = Sequential::new().add(Linear::new(2, 3, &device)?).add_fn(Tensor::relu);
    let mut state = net.state_dict();
    state.remove("0.bias");
    state.insert("1.weight".into(), Tensor::ones([1], DType::F32, &device)?);
    state.insert("0.weight".into(), Tensor::ones([2, 2], DType::F32, &device)?);
    let error = net.load_state_dict(&state).expect_err("nothing fits");
    assert_eq!(
        error.message(),
        "load_state_dict: missing: 0.bias; unexpected: 1.weight; does not fit: 0.weight is f32 [3, 2], the state has f32 [2, 2]; rename or leave out tensors with `rename_keys`, or load the names of both sides with `load_state_dict_partial`"
    );
    let error = net.load_state_dict_partial(&state).expect_err("a shape differs");
    assert_eq!(
        error.message(),
        "load_state_dict: does not fit: 0.weight is f32 [3, 2], the state has f32 [2, 2]; leave these names out with `rename_keys`"
    );
    Ok(())
}

#[test]
fn parameters_and_states_are_tagged() -> Result<()> {
    let device = device();
    let net = Linear::new(256, 256, &device)?;
    let by_tag = |tag: Tag| device.memory().tag(tag).current;
    let parameters = by_tag(Tag::Parameter);
    assert!(parameters >= 256 * 257 * 4, "{parameters}");
    let mut opt = AdamW::new(net.parameters(), 1e-3);
    assert_eq!(by_tag(Tag::OptimizerState), 0);
    for _ in 0..3 {
        for p in opt.parameters() {
            p.set_grad(Some(p.detach().ones_like()?));
        }
        opt.step()?;
        opt.zero_grad();
    }
    let states = by_tag(Tag::OptimizerState);
    assert!((2 * 256 * 257 * 4..2 * 256 * 257 * 4 + 4096).contains(&states), "{states}");
    assert_eq!(by_tag(Tag::Parameter), parameters);
    Ok(())
}

#[test]
fn steps_leak_no_memory() -> Result<()> {
    let device = device();
    let w = Linear::new(64, 64, &device)?;
    type OptimizerCtor = fn(Vec<Tensor>) -> Box<dyn Optimizer>;
    let makers: [OptimizerCtor; 4] = [
        |p| Box::new(Sgd::new(p, 0.1).momentum(0.9)),
        |p| Box::new(Adam::new(p, 0.1)),
        |p| Box::new(AdamW::new(p, 0.1).amsgrad(true)),
        |p| Box::new(RmsProp::new(p, 0.1).centered(true)),
    ];
    for make in makers {
        let mut opt = make(w.parameters());
        let mut after = Vec::new();
        for _ in 0..1000 {
            let x = Tensor::ones([8, 64], DType::F32, &device)?;
            w.forward(&x)?.sum_all()?.backward()?;
            clip_grad_norm_(opt.parameters(), 1.0)?;
            opt.step()?;
            opt.zero_grad();
            after.push(device.memory().allocated());
        }
        assert_eq!(after[9], after[999]);
    }
    Ok(())
}

#[test]
fn f64_is_refused_with_a_reason() -> Result<()> {
    let device = device();
    let p = Tensor::ones([4], DType::F64, &device)?.to_leaf()?;
    let error = Sgd::new(vec![p], 0.1).step().expect_err("no f64");
    assert_eq!(error.message(), "step: does not take f64; takes parameters of f32, f16 and bf16");
    Ok(())
}

#[test]
fn modes_reach_every_layer() -> Result<()> {
    let net = net(&device())?;
    let modes = |net: &Net| {
        let mut modes = Vec::new();
        net.visit("", &mut |_, slot| {
            if let ModuleEntry::Training(on) = slot {
                modes.push(on.load(std::sync::atomic::Ordering::Relaxed));
            }
        });
        modes
    };
    assert!(modes(&net).iter().all(|&on| on) && modes(&net).len() == 5, "{:?}", modes(&net));
    net.eval();
    assert!(modes(&net).iter().all(|&on| !on));
    Ok(())
}

#[test]
fn a_sequence_allocates_at_the_line_of_its_caller() -> Result<()> {
    let device = device();
    let net = Sequential::new().add(Linear::new(8, 8, &device)?).add_fn(Tensor::tanh);
    let x = Tensor::zeros([2, 8], DType::F32, &device)?;
    device.pool().set_limit(Some(device.memory().reserved()));
    // Takes all memory of the pool except room for the layer's result.
    let mut rest = Vec::new();
    while let Ok(block) = Tensor::zeros([128], DType::F32, &device) {
        rest.push(block);
    }
    rest.pop();
    let line = line!() + 1;
    let result = net.forward(&x);
    let Err(Error::OutOfMemory(error)) = result else { panic!("there is no room: {result:?}") };
    assert_eq!((error.op, error.site.map(|site| site.line())), ("tanh", Some(line)));
    Ok(())
}

#[test]
fn invalid_sizes_are_errors_before_any_allocation() -> Result<()> {
    let device = device();
    let before = device.memory().allocated();
    let options = |num_layers| RecurrentOptions { num_layers, ..RecurrentOptions::default() };
    let transformer = TransformerOptions::default;
    let bert = |n: usize| BertOptions { num_hidden_layers: n, ..BertOptions::default() };
    let gpt =
        |layers: usize| GptOptions { vocabulary: 9, context: 4, layers, heads: 2, width: 4, dropout: 0.0 };
    for n in [usize::MAX, 99_999_999_999, 70_000] {
        let made: [(&str, Option<Error>); 7] = [
            ("Lstm", Lstm::new(4, 4, options(n), &device).err()),
            ("Rnn", Rnn::new(4, 4, options(n), &device).err()),
            ("Gru", Gru::new(4, 4, options(n), &device).err()),
            ("TransformerEncoder", TransformerEncoder::new(4, 2, n, transformer(), &device).err()),
            ("TransformerDecoder", TransformerDecoder::new(4, 2, n, transformer(), &device).err()),
            ("Gpt", Gpt::new(&gpt(n), &device).err()),
            ("Bert", Bert::new(&bert(n), &device).err()),
        ];
        for (name, error) in made {
            let text = error.map(|e| e.message()).unwrap_or_default();
            assert_eq!(text, format!("{name}: a model has at most 65536 layers, not {n}"));
        }
    }
    for [positions, features] in
        [[usize::MAX, 4], [1 << 47, 4], [usize::MAX, 0], [1 << 40, 0], [0, 4], [4, usize::MAX - 1]]
    {
        let rotary = RotaryEmbedding::new(positions, features, &device);
        assert!(rotary.is_err_and(|e| e.to_string().contains("no table holds")), "{positions} {features}");
        assert!(SinusoidalEmbedding::new(positions, features, &device).is_err());
    }
    for base in [-1.0, 0.0, f64::NAN, f64::INFINITY] {
        let rotary = RotaryEmbedding::with_base(4, 4, base, &device);
        assert!(rotary.is_err_and(|e| e.to_string().contains("it must be above 0 and finite")));
    }
    let rotary = RotaryEmbedding::new(4, 4, &device)?;
    let x = Tensor::zeros([2, 4], DType::F32, &device)?;
    assert!(rotary.forward_at(&x, usize::MAX).is_err() && rotary.forward_at(&x, 2).is_ok());
    let error = MultiheadAttention::new(0, 1, Default::default(), &device).err().map(|e| e.message());
    assert_eq!(error.as_deref(), Some("MultiheadAttention: 0 features do not divide by 1 heads"));
    drop((rotary, x));
    assert_eq!(device.memory().allocated(), before);
    // Weights of no inputs are drawn from a finite range.
    let empty = Tensor::zeros([0, 0], DType::F32, &device)?;
    init::xavier_uniform_(&empty, 1.0)?;
    init::kaiming_uniform_(&empty, 0.0)
}

#[test]
fn sequences_nest_up_to_the_limit() -> Result<()> {
    let run = || -> Result<()> {
        let device = device();
        let x = Tensor::ones([2, 4], DType::F32, &device)?;
        let mut net = Sequential::new().add(Linear::new(4, 4, &device)?);
        for _ in 0..500 {
            net = Sequential::new().add(net);
        }
        assert_eq!((net.forward(&x)?.shape(), net.parameters().len()), (x.shape(), 2));
        Ok(())
    };
    std::thread::scope(|threads| {
        let thread = std::thread::Builder::new().stack_size(2 << 20).spawn_scoped(threads, run);
        thread.map_err(|e| Error::argument("test", e.to_string()))?.join().expect("no panic")
    })
}

#[test]
fn modules_in_16_bits_take_half_the_memory_of_f32_while_they_are_made() -> Result<()> {
    use forebay_nn::nn::{Bilinear, Conv2d, Conv2dOptions, Prelu};
    type Make = fn(&Device) -> Result<Box<dyn Module>>;
    let makers: [(&str, Make); 9] = [
        ("Linear", |d| Ok(Box::new(Linear::new(256, 512, d)?))),
        ("Bilinear", |d| Ok(Box::new(Bilinear::new([32, 64], 128, true, d)?))),
        ("Conv2d", |d| Ok(Box::new(Conv2d::new(64, 128, 3, Conv2dOptions::default(), d)?))),
        ("Embedding", |d| Ok(Box::new(Embedding::new(1000, 256, d)?))),
        ("LayerNorm", |d| Ok(Box::new(LayerNorm::new(4096, d)?))),
        ("Prelu", |d| Ok(Box::new(Prelu::new(4096, 0.25, d)?))),
        ("Lstm", |d| Ok(Box::new(Lstm::new(128, 256, RecurrentOptions::default(), d)?))),
        ("MultiheadAttention", |d| Ok(Box::new(MultiheadAttention::new(256, 4, Default::default(), d)?))),
        ("Gpt", |d| {
            let options =
                GptOptions { vocabulary: 500, context: 64, layers: 2, heads: 2, width: 128, dropout: 0.0 };
            Ok(Box::new(Gpt::new(&options, d)?))
        }),
    ];
    let peak = |make: Make, dtype| -> Result<u64> {
        let device = device();
        let _dtype = init::default_dtype(dtype)?;
        let module = make(&device)?;
        assert!(module.parameters().iter().all(|p| p.dtype() == dtype));
        Ok(device.memory().requested_bytes.all.peak)
    };
    for (name, make) in makers {
        let full = peak(make, DType::F32)?;
        for dtype in [DType::F16, DType::BF16] {
            assert_eq!(2 * peak(make, dtype)?, full, "{name} in {dtype}");
        }
    }
    Ok(())
}

#[test]
fn initial_values_in_16_bits_take_no_f32_copies() -> Result<()> {
    type Fill = fn(&Tensor) -> Result<()>;
    const BYTES: u64 = 2 * 256 * 512;
    // The values, and for samples that need the precision of f32 one f32 tensor.
    let fills: [(&str, Fill, u64); 10] = [
        ("uniform_", |t| init::uniform_(t, -1.0, 1.0), BYTES),
        ("normal_", |t| init::normal_(t, 0.0, 1.0), BYTES),
        ("constant_", |t| init::constant_(t, 0.5), BYTES),
        ("kaiming_uniform_", |t| init::kaiming_uniform_(t, 1.0), BYTES),
        ("kaiming_normal_", |t| init::kaiming_normal_(t, 1.0), BYTES),
        ("xavier_uniform_", |t| init::xavier_uniform_(t, 1.0), BYTES),
        ("xavier_normal_", |t| init::xavier_normal_(t, 1.0), BYTES),
        ("eye_", init::eye_, BYTES),
        ("trunc_normal_", |t| init::trunc_normal_(t, 0.0, 1.0, -2.0, 2.0), 3 * BYTES),
        ("orthogonal_", |t| init::orthogonal_(t, 1.0), 3 * BYTES),
    ];
    for (name, fill, scratch) in fills {
        let device = device();
        let t = Tensor::empty([256, 512], DType::F16, &device)?;
        fill(&t)?;
        let peak = device.memory().requested_bytes.all.peak;
        assert!(peak <= BYTES + scratch + 1024, "{name} takes {peak} bytes");
    }
    Ok(())
}
