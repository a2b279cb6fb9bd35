//! Memory tags of operations in user-defined modules.

use anyhow::{Context, Result, ensure};
use forebay::autograd::no_grad;
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::{Config, Tag};
use forebay::nn::{self, Linear, Module};
use forebay::plan::dry_run;
use forebay::tensor::Tensor;

super::tests![
    saved_results_are_tagged_as_activations,
    out_of_memory_in_a_custom_forward_names_activations_and_the_module,
    a_dry_run_counts_results_of_plain_operations_as_activations,
];

fn with_own_pool(device: &Device, config: Config) -> Device {
    Device::with_config(device.backend().clone(), config)
}

/// Block with plain operations between its layers.
#[derive(Module)]
struct Block {
    up: Linear,
    inner: Vec<Linear>,
}

impl Block {
    /// Saves the result of each of its own operations.
    #[nn::forward]
    fn forward(&self, x: &Tensor, times: usize) -> CoreResult<Tensor> {
        let mut x = self.up.forward(x)?;
        for _ in 0..times {
            x = x.mul(&x.sigmoid()?)?;
        }
        self.inner.iter().try_fold(x, |x, layer| layer.forward(&x))
    }

    fn forward_untagged(&self, x: &Tensor, times: usize) -> CoreResult<Tensor> {
        let mut x = self.up.forward(x)?;
        for _ in 0..times {
            x = x.mul(&x.sigmoid()?)?;
        }
        Ok(x)
    }
}

#[derive(Module)]
enum FirstModule {
    Block(Block),
    #[allow(dead_code, reason = "the derive visits both variants, and one is enough to make")]
    Layer(Linear),
}

#[derive(Module)]
struct Net {
    first: FirstModule,
    rest: (Linear, Option<Box<Block>>),
}

fn block(device: &Device) -> Result<Block> {
    Ok(Block { up: Linear::new(16, 64, device)?, inner: vec![Linear::new(64, 16, device)?] })
}

fn held(device: &Device, tag: Tag) -> u64 {
    device.memory().tags[tag as usize].current
}

fn saved_results_are_tagged_as_activations(device: &Device) -> Result<()> {
    let device = with_own_pool(device, Config::default());
    let bytes = 4 * 4096;
    // Results that autograd does not record are not activations.
    let x = Tensor::ones([4096], DType::F32, &device)?.mul(2.0)?;
    let w = x.add(1.0)?.to_leaf()?;
    ensure!(held(&device, Tag::Activation) == 0, "an operation that nothing records is an activation");
    let other = held(&device, Tag::Other);
    let kept = x.mul(&w)?;
    ensure!(held(&device, Tag::Activation) == bytes && held(&device, Tag::Other) == other, "not tagged");
    let more = kept.exp()?.reshape([64, 64])?;
    ensure!(held(&device, Tag::Activation) == 2 * bytes, "a view is counted, or the result of `exp` is not");
    // Views of a leaf are no activations, and an explicit tag takes precedence.
    let view = w.reshape([64, 64])?;
    let input = {
        let _tag = forebay::memory::scope::enter_tag(Tag::Input);
        w.mul(3.0)?
    };
    ensure!(held(&device, Tag::Activation) == 2 * bytes && held(&device, Tag::Input) == bytes, "retagged");
    let plain = {
        let _no_grad = no_grad();
        w.mul(3.0)?
    };
    ensure!(held(&device, Tag::Activation) == 2 * bytes, "a result without a history is an activation");
    ensure!(held(&device, Tag::Other) == other + bytes, "the result without a history is not tagged `other`");
    drop((kept, more, view, input, plain));
    ensure!(held(&device, Tag::Activation) == 0, "freed memory is still counted");
    ensure!(held(&device, Tag::Other) == other, "bytes of other tensors are left");
    Ok(())
}

fn out_of_memory_in_a_custom_forward_names_activations_and_the_module(device: &Device) -> Result<()> {
    let limited = with_own_pool(device, Config { max_memory: Some(24 << 20), ..Config::default() });
    let net = Net {
        first: FirstModule::Block(block(&limited)?),
        rest: (Linear::new(64, 16, &limited)?, Some(Box::new(block(&limited)?))),
    };
    ensure!(nn::Module::module_path(&net).is_root(), "the module has a path before the first visit");
    net.parameters();
    let FirstModule::Block(first) = &net.first else { anyhow::bail!("the first module is not a block") };
    let last = net.rest.1.as_ref().context("no block")?;
    let x = Tensor::ones([8192, 16], DType::F32, &limited)?;
    for (block, name) in [(first, "first"), (&**last, "rest.1")] {
        ensure!(block.module_path().to_string() == name, "{} is not {name}", block.module_path());
        let error = block.forward(&x, 100).err().context("the step did not run out of memory")?.to_string();
        let names = format!("modules: {name} ");
        for part in ["held by: activation ", "activations hold the most", &names] {
            ensure!(error.contains(part), "no `{part}` in: {error}");
        }
        // Without the attribute, tag and advice are still present.
        let error =
            block.forward_untagged(&x, 100).err().context("the step did not run out of memory")?.to_string();
        for part in ["held by: activation ", "activations hold the most"] {
            ensure!(error.contains(part), "no `{part}` in: {error}");
        }
    }
    Ok(())
}

fn a_dry_run_counts_results_of_plain_operations_as_activations(device: &Device) -> Result<()> {
    let step = |device: &Device| -> CoreResult<()> {
        let w = Tensor::ones([1024, 64], DType::F32, device)?.to_leaf()?;
        let mut x = w.mul(2.0)?;
        for _ in 0..8 {
            x = x.tanh()?;
        }
        x.sum_all()?.backward()
    };
    let run = dry_run(&CardProfile::from_device(device), step)?;
    let size = 4 * 1024 * 64;
    let of = |tag: Tag| run.peak_by_tag[tag as usize];
    ensure!(of(Tag::Activation) >= 8 * size, "{run}");
    ensure!(of(Tag::Other) < 2 * size, "the leaf, and what is not tagged: {run}");
    let at_peak = run.peak.by_tag.first().context("nothing held")?;
    ensure!(at_peak.0 == Tag::Activation && at_peak.1 >= 8 * size, "{run}");
    let real = with_own_pool(device, CardProfile::from_device(device).config);
    step(&real)?;
    let measured = Tag::ALL.map(|tag| real.memory().tag(tag).peak);
    ensure!(measured == run.peak_by_tag, "{measured:?}, predicted {:?}", run.peak_by_tag);
    Ok(())
}
