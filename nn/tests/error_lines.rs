//! Errors of modules, optimisers, data and the training loop name the line of the program that made the mistake.

use std::collections::BTreeMap;
use std::panic::Location;

use forebay_core::autograd::{self, GradOptions};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::tensor::Tensor;
use forebay_core::{amp, func, ops};
use forebay_nn::data::{Dataset, TensorDataset};
use forebay_nn::nn::{
    self, BatchNorm2d, Conv2d, Embedding, GroupNorm, LayerNorm, Linear, Lstm, Module, MultiheadAttention,
    Sequential, SpectralNorm, WeightNorm,
};
use forebay_nn::optim::{AdamW, Muon, Optimizer, ParamGroup, Sgd, clip_grad_norm_, clip_grad_value_};
use forebay_nn::train::Trainer;

/// Fails unless the result is an error of the line that called this function.
#[track_caller]
fn expect_line<T>(result: Result<T>) {
    let here = Location::caller();
    let error = result.err().expect("a mistake is an error");
    let found = error.location().map(|at| (at.file(), at.line()));
    assert_eq!(found, Some((here.file(), here.line())), "{error}");
    assert!(error.to_string().contains(&format!("\n  at: {}:{}", here.file(), here.line())), "{error}");
}

fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::F32, device).unwrap()
}

#[test]
fn of_tensors_and_gradients() -> Result<()> {
    let d = &Device::null(Default::default());
    let (x, leaf) = (zeros(&[2, 3], d), zeros(&[2, 3], d).to_leaf()?);
    expect_line(x.item());
    expect_line(x.to_vec::<i32>());
    expect_line(x.view([4, 2]));
    expect_line(&x + &zeros(&[4], d));
    expect_line(leaf.add_(1.0));
    expect_line(Tensor::from_slice(&[1.0f32], [2], d));
    expect_line(Tensor::zeros([1usize << 40], DType::F32, d));
    expect_line(Tensor::cat(&[] as &[Tensor], 0));
    expect_line(ops::einsum("ij,jk->ik", &[&x, &x]));
    expect_line(x.index_select(0, &x));
    expect_line(x.backward());
    expect_line(leaf.exp()?.backward());
    let loss = leaf.exp()?.sum_all()?;
    loss.backward()?;
    expect_line(loss.backward());
    expect_line(autograd::grad(&[leaf.exp()?.sum_all()?], std::slice::from_ref(&x), &GradOptions::default()));
    expect_line(loss.backward_with(&x));
    let squares = leaf.square()?;
    let sum = squares.mul(&leaf)?.sum_all()?;
    {
        let _guard = autograd::no_grad();
        squares.add_(1.0)?;
    }
    expect_line(sum.backward());
    expect_line(func::jvp(|x| Ok(x[0].clone()), std::slice::from_ref(&x), &[]));
    expect_line(amp::autocast(DType::F32));
    expect_line(autograd::checkpoint(&[], |_| Ok(zeros(&[1], &Device::null(Default::default())))));
    expect_line(x.register_hook(|g| Ok(Some(g.clone()))));
    Ok(())
}

#[test]
fn of_modules() -> Result<()> {
    let d = &Device::null(Default::default());
    let (x, image) = (zeros(&[2, 3], d), zeros(&[1, 5, 4, 4], d));
    let net = Sequential::new().add(Linear::new(3, 4, d)?).add(Linear::new(5, 4, d)?);
    for named in [false, true] {
        if named {
            net.parameters();
        }
        expect_line(net.forward(&x));
    }
    expect_line(Linear::new(4, 3, d)?.forward(&x));
    expect_line(Linear::from_parameters(x.clone(), Some(x.clone())));
    expect_line(Conv2d::new(3, 8, 0, Default::default(), d));
    expect_line(Conv2d::new(3, 8, 3, Default::default(), d)?.forward(&image));
    expect_line(BatchNorm2d::new(3, d)?.forward(&image));
    expect_line(BatchNorm2d::new(3, d)?.forward(&x));
    expect_line(GroupNorm::new(2, 3, d));
    expect_line(LayerNorm::new([7], d)?.forward(&x));
    expect_line(Embedding::new(3, 4, d)?.forward(&x));
    expect_line(Embedding::new(3, 4, d)?.with_padding_idx(7));
    expect_line(Lstm::new(5, 4, Default::default(), d)?.forward(&x, None));
    expect_line(MultiheadAttention::new(6, 4, Default::default(), d));
    expect_line(MultiheadAttention::new(6, 3, Default::default(), d)?.forward(
        &x,
        &x,
        &x,
        &Default::default(),
    ));
    expect_line(WeightNorm::new(Linear::new(3, 4, d)?, Some(2)));
    expect_line(SpectralNorm::new(Linear::new(4, 3, d)?)?.forward(&x));
    expect_line(net.load_state_dict(&BTreeMap::new()));
    expect_line(net.load_state_dict_partial(&BTreeMap::from([("0.weight".to_owned(), x.clone())])));
    expect_line(nn::rename_keys(&net.state_dict(), |_| Some("same".to_owned())));
    expect_line(nn::init::default_dtype(DType::I32));
    Ok(())
}

/// A module of a program, whose lines are more exact than the line that calls the module.
#[derive(Module)]
#[module(crate = forebay_nn)]
struct Net {
    first: Linear,
}

impl Net {
    #[nn::forward(crate = forebay_nn)]
    fn forward(&self, x: &Tensor) -> Result<(Tensor, u32)> {
        Ok((self.first.forward(x)?, line!()))
    }
}

#[test]
fn of_a_module_of_the_program() -> Result<()> {
    let d = &Device::null(Default::default());
    let net = Net { first: Linear::new(3, 4, d)? };
    net.parameters();
    let (_, line) = net.forward(&zeros(&[2, 3], d))?;
    let error = net.forward(&zeros(&[2, 4], d)).unwrap_err();
    assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)), "{error}");
    Ok(())
}

#[test]
fn of_optimisers_data_and_training() -> Result<()> {
    let d = &Device::null(Default::default());
    let net = Linear::new(3, 4, d)?;
    let loss = || net.forward(&zeros(&[2, 3], d))?.sum_all();
    loss()?.backward()?;
    expect_line(AdamW::new(net.parameters(), f64::NAN).step());
    expect_line(Muon::new(net.parameters(), 0.1).step());
    expect_line(Sgd::new(vec![zeros(&[2], d)], 0.1).step());
    let state = BTreeMap::from([("x".to_owned(), zeros(&[2], d))]);
    expect_line(Sgd::new(net.parameters(), 0.1).load_state_dict(&state));
    expect_line(Sgd::new(net.parameters(), 0.1).add_param_group(ParamGroup::new(net.parameters())));
    expect_line(clip_grad_norm_(&net.parameters(), f64::NAN));
    expect_line(clip_grad_value_(&net.parameters(), -1.0));
    expect_line(TensorDataset::<f32, f32>::new(&zeros(&[2, 3], d), &zeros(&[3], d)));
    let few = TensorDataset::<f32, f32>::new(&zeros(&[2, 3], d), &zeros(&[2], d))?.batches(3).drop_last();
    let (mut batches, line) = (few.prefetch(d), line!());
    let error = batches.next().expect("an error").expect_err("too few samples");
    assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)), "{error}");
    let mut trainer = Trainer::new(&net, Sgd::new(net.parameters(), 0.1)).quiet();
    let nothing = TensorDataset::<f32, f32>::new(&zeros(&[0, 3], d), &zeros(&[0], d))?;
    expect_line(trainer.fit(&nothing.batches(2), |_, _| loss()));
    Ok(())
}
