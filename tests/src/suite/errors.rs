//! Error messages: their exact text, and that the program can continue.

use anyhow::{Context, Result, ensure};
use forebay::OpenDevice;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::memory::{Bytes, Config, Tag, scope};
use forebay::nn::init::{FanMode, Nonlinearity};
use forebay::nn::{Conv2d, Conv2dOptions, Embedding, Linear, Lstm, RecurrentOptions, SelfAttention, init};
use forebay::ops::{
    AttentionOptions, ConvolutionOptions, EmbeddingBagOptions, Im2colOptions, InterpolateOptions, PadMode,
    Pool2dOptions, RreluOptions, block_diag, broadcast_tensors, cartesian_prod, column_stack, dstack, einsum,
    hstack, meshgrid, multi_dot, vstack,
};
use forebay::optim::{AdamW, Optimizer};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_message, ensure_values, message};
use super::tests;

tests![
    operations_without_a_gradient,
    wrong_shapes,
    wrong_types,
    floats_of_integer_remainders_are_explained,
    in_place_operations_report_their_own_name,
    the_largest_usize_is_not_minus_one,
    wrong_arguments,
    huge_arguments_are_errors,
    invalid_values_are_errors,
    messages_name_the_tensors_and_the_next_step,
    messages_name_the_function_that_was_called,
    reports_name_the_function_that_was_called,
    wrong_devices,
    backward_that_cannot_run,
    devices_that_are_not_there,
    a_full_device_of_known_size,
    a_full_device_recovers,
];

fn operations_without_a_gradient(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    let (turned, angles) = (Tensor::ones([3, 2], DType::F32, device)?, x.unsqueeze(1)?);
    ensure_message(
        turned.rotary_embedding(&angles, &angles, false),
        "rotary_embedding: has no gradient, but an input requires one; detach the input, or run it under `no_grad`, if none \
         is wanted",
    )?;
    // Results of type bool and integer have no gradients: as in PyTorch, they have no history.
    for result in [x.gt(0.5)?, x.isnan()?, x.argmax((), false)?, x.argsort(0, false)?, x.nonzero()?] {
        ensure!(!result.requires_grad(), "{result:?} has a history");
    }
    // Both ways that the error suggests work.
    turned.rotary_embedding(&angles.detach(), &angles.detach(), false)?;
    let _guard = forebay::autograd::no_grad();
    turned.rotary_embedding(&angles, &angles, false)?;
    ensure_values(&x.gt(0.5)?, &[1.0; 3])
}

fn wrong_shapes(device: &Device) -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F32, device)?;
    let y = Tensor::ones([4], DType::F32, device)?;
    ensure_message(
        x.add(&y),
        "add: shapes do not broadcast: extents 3 and 4 at dimension 0 differ and neither is 1; got [2, 3] and [4]",
    )?;
    ensure_message(x.reshape([4, 2]), "reshape: 6 elements do not fit 8; got [2, 3] to [4, 2]")?;
    ensure_message(x.item(), "item: takes a tensor of one element; got [2, 3]")?;
    ensure_message(
        x.t()?.view([6]),
        "view: strides do not allow this without a copy; use `reshape`; got [3, 2] and [6]",
    )?;
    ensure!(matches!(x.matmul(&x), Err(Error::Shape { op: "matmul", .. })));
    let text = message(x.matmul(&x))?;
    ensure!(text.contains("[2, 3] and [2, 3]"), "{text}");
    ensure_message(x.trace()?.trace(), "trace: takes a matrix; got []")?;
    ensure_message(
        x.cross(&y.narrow(0, 0, 2)?.unsqueeze(1)?, 0),
        "cross: takes vectors of three elements along the dimension; got [2, 3] and [2, 1]",
    )?;
    ensure_message(x.cdist(&x.t()?, 2.0), "cdist: rows of both have one width; got [2, 3] and [3, 2]")?;
    ensure_message(
        x.interpolate(&InterpolateOptions::with_scale_factor(2.0)),
        "interpolate: Nearest takes [batch, channels, ..] with 3 to 5 dimensions; got [2, 3]",
    )?;
    ensure_message(
        x.unsqueeze(0)?.im2col(4, &Im2colOptions::default()),
        "im2col: a block reaches over 4 of axis 0, the padded image has 2; got [1, 2, 3]",
    )?;
    ensure_message(
        x.col2im(2, 2, &Im2colOptions::default()),
        "col2im: takes [batch, channels · 4, 1], the blocks of images of [2, 2]; got [2, 3]",
    )?;
    ensure_message(
        x.embedding_bag(&Tensor::from_slice(&[0i32], [1], device)?, &EmbeddingBagOptions::default()),
        "embedding_bag: takes an index of one dimension with offsets of one, or an index of two dimensions without; got \
         [2, 3] and [1] and []",
    )?;
    // The tensor is still usable.
    ensure_values(&x.add(&x)?, &[2.0; 6])
}

fn wrong_types(device: &Device) -> Result<()> {
    let flag = Tensor::from_bools(&[true, false], [2], device)?;
    let float = Tensor::ones([2], DType::F32, device)?;
    ensure_message(
        flag.sub(&flag),
        "sub: does not take bool; takes integers and floats; cast with `to_dtype`",
    )?;
    ensure_message(
        float.bitwise_and(&float),
        "bitwise_and: does not take f32; takes integers and bools; cast with `to_dtype`; an integer tensor and a float \
         scalar give a float, so write `remainder(10)`, not `remainder(10.0)`, for integers",
    )?;
    ensure_message(float.to_vec::<i32>(), "to_vec: does not take f32; requested as i32; cast first")?;
    let int = Tensor::zeros([2], DType::I32, device)?;
    ensure_message(int.to_leaf(), "to_leaf: does not take i32; only floats carry gradients; cast first")?;
    ensure_message(
        int.add_(0.5),
        "add_: does not take i32; the result is a float and does not fit in place; a float scalar, as in \
         `remainder_(10.0)`, makes floats of integers, and `remainder_(10)` does not",
    )?;
    if !device.info().features.f64 {
        ensure_message(
            Tensor::zeros([2], DType::F64, device),
            &format!("zeros: not on {device}: the adapter has no f64; use f32"),
        )?;
    }
    if !device.info().features.i64 {
        let wide = Tensor::zeros([2], DType::I64, device)?;
        ensure_message(
            wide.pow(2),
            &format!("pow: not on {device}: the adapter has no 64-bit integers; cast to i32"),
        )?;
    }
    ensure_values(&flag.logical_not()?, &[0.0, 1.0])
}

fn floats_of_integer_remainders_are_explained(device: &Device) -> Result<()> {
    let ids = Tensor::from_slice(&[3i32, 14, 25, 7], [4], device)?;
    let floats = ids.remainder(10.0)?;
    ensure!(floats.dtype() == DType::F32 && ids.remainder(10)?.dtype() == DType::I32);
    let logits = Tensor::zeros([4, 10], DType::F32, device)?;
    for result in [
        floats.one_hot(10),
        floats.gcd(&ids),
        floats.bincount(None, 0),
        logits.nll_loss(&floats, &Default::default()),
        logits.multi_margin_loss(&floats, &Default::default()),
        logits.cross_entropy(&floats),
        logits.index_select(0, &floats),
        logits.gather(1, &floats.unsqueeze(1)?),
        logits.embedding(&floats, None),
        logits.scatter_value(1, &floats.unsqueeze(1)?, 1.0),
        logits.repeat_interleave_by(&floats, 0, None),
    ] {
        let text = message(result)?;
        ensure!(text.contains("does not take f32") && text.contains("write `remainder(10)`"), "{text}");
    }
    let text = message(logits.cross_entropy(&floats))?;
    ensure!(text.contains("are labels, which are integers"), "{text}");
    let text = message(logits.cross_entropy(&logits.narrow(1, 0, 3)?))?;
    ensure!(text.contains("labels are integers"), "{text}");
    // Other types have no such origin.
    let text = message(ids.gt(3)?.one_hot(2))?;
    ensure!(text.contains("does not take bool") && !text.contains("remainder"), "{text}");
    Ok(())
}

fn in_place_operations_report_their_own_name(device: &Device) -> Result<()> {
    let leaf = Tensor::full([2, 3], 0.5, DType::F32, device)?.to_leaf()?;
    let (other, index) = (leaf.detach(), Tensor::zeros([2, 3], DType::I32, device)?);
    let mask = Tensor::from_bools(&[true], 1, device)?;
    for (name, result) in [
        ("add_", leaf.add_(1.0)),
        ("mul_", leaf.mul_(&other)),
        ("exp_", leaf.exp_()),
        ("leaky_relu_", leaf.leaky_relu_(0.1)),
        ("clamp_", leaf.clamp_(0.0, 1.0)),
        ("lerp_", leaf.lerp_(&other, 0.5)),
        ("addcmul_", leaf.addcmul_(&other, &other, 1.0)),
        ("fill_", leaf.fill_(1.0)),
        ("zero_", leaf.zero_()),
        ("masked_fill_", leaf.masked_fill_(&mask, 1.0)),
        ("copy_", leaf.copy_(&other)),
        ("cumsum_", leaf.cumsum_(0)),
        ("scatter_add_", leaf.scatter_add_(0, &index, &other)),
        ("uniform_", leaf.uniform_(0.0, 1.0)),
        ("add_", other.add_(&Tensor::zeros([4], DType::F32, device)?)),
        ("bitwise_and_", other.bitwise_and_(&other)),
        ("cumsum_", other.cumsum_(5)),
        ("scatter_add_", other.scatter_add_(7, &index, &other)),
        ("index_fill_", other.index_fill_(0, &other, 1.0)),
        ("mul_", other.mul_(&Tensor::zeros([2, 2, 3], DType::F32, device)?)),
    ] {
        let text = message(result)?;
        ensure!(text.starts_with(&format!("{name}: ")), "{name} reports: {text}");
    }
    Ok(())
}

fn the_largest_usize_is_not_minus_one(device: &Device) -> Result<()> {
    let x = Tensor::zeros([4, 3], DType::F32, device)?;
    let rows = 4usize;
    for result in [
        x.view([rows, usize::MAX]),
        x.reshape([rows, usize::MAX]),
        x.reshape([usize::MAX, rows]),
        x.reshape([rows, usize::MAX - 1]),
        x.unflatten(0, [2, usize::MAX]),
        x.expand([rows, usize::MAX]),
    ] {
        let text = message(result)?;
        ensure!(text.contains("`usize::MAX` is not -1") && text.contains("`[b as isize, -1]`"), "{text}");
    }
    let text = message(x.sum(usize::MAX, false))?;
    ensure!(text.contains("`usize::MAX` is not -1"), "{text}");
    ensure!(x.view([rows as isize, -1])?.shape() == [4, 3]);
    Ok(())
}

fn wrong_arguments(device: &Device) -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F32, device)?;
    ensure_message(
        Tensor::from_slice(&[1.0f32; 5], [2, 3], device),
        "from_slice: shape [2, 3] of f32 takes 6 elements, the data has 5",
    )?;
    let hint = "literals without a suffix are i32 and may wrap, so write `1usize << 31`";
    ensure_message(
        Tensor::zeros([2, 1 << 31], DType::F32, device),
        &format!("zeros: shape [2, -2147483648] has a negative extent; {hint}"),
    )?;
    ensure_message(Tensor::ones([-1, 2], DType::F32, device), "ones: shape [-1, 2] has a negative extent")?;
    ensure_message(
        Tensor::zeros([1usize << 40], DType::F32, device),
        "zeros: shape [1099511627776] has more than 4,294,967,295 elements, the most a tensor can have",
    )?;
    ensure!(Tensor::zeros([usize::MAX], DType::F32, device).is_err(), "an extent beyond isize");
    let wrapped = message(x.reshape([1 << 31, 3]))?;
    ensure!(wrapped.contains(hint), "{wrapped}");
    ensure_message(x.softshrink(-0.5), "softshrink: takes a lambda of at least 0")?;
    ensure_message(x.hardtanh(1.0, -1.0), "hardtanh: takes a min_val that is not above max_val")?;
    ensure_message(x.hardtanh_(1.0, -1.0), "hardtanh_: takes a min_val that is not above max_val")?;
    ensure_message(x.celu(0.0), "celu: takes an alpha that is not 0")?;
    ensure_message(
        x.rrelu(&RreluOptions { lower: 0.5, upper: 0.1, ..Default::default() }),
        "rrelu: takes a lower bound that is not above 0.1, got 0.5",
    )?;
    ensure_message(x.trace()?.roll(1, 0), "roll: takes at least one dimension; got []")?;
    ensure_message(x.sum_all()?.narrow(0, 0, 0), "narrow: 0..0 leaves dimension 0 of extent 0")?;
    ensure_message(x.narrow(1, 2, 2), "narrow: 2..4 leaves dimension 1 of extent 3")?;
    ensure_message(x.select(0, 2), "select: index 2 leaves dimension 0 of extent 2")?;
    // The rank is that of the tensor, not that of the result.
    ensure_message(
        x.unsqueeze(3),
        "unsqueeze: dimension 3 is out of range; a tensor of rank 2 takes -3 to 2",
    )?;
    ensure!(x.unsqueeze(-4).is_err() && x.unsqueeze(isize::MIN).is_err() && x.unsqueeze(isize::MAX).is_err());
    ensure!(x.unsqueeze(2)?.shape() == [2, 3, 1] && x.unsqueeze(-3)?.shape() == [1, 2, 3]);
    ensure_message(
        x.as_strided([2, 2], [3, 3], Some(1)),
        "as_strided: shape [2, 2] with strides [3, 3] from 1 on leaves the storage of 6 elements",
    )?;
    ensure_message(
        x.unfold(1, 4, 1),
        "unfold: windows of 4, 1 apart, do not fit dimension 1 of extent 3; the step is at least 1",
    )?;
    ensure_message(x.tensor_split(0, 0), "tensor_split: takes at least one section")?;
    ensure_message(
        x.as_strided([2, 2], [1, 1], None)?.add_(1.0),
        "add_: the tensor repeats elements (it was expanded); copy it first",
    )?;
    ensure_message(x.permute([0, 0]), "permute: [0, 0] is not a permutation of 2 dimensions")?;
    ensure_message(x.dropout(1.5, true), "dropout: 1.5 is not a probability")?;
    ensure_message(
        x.to_leaf()?.add_(1.0),
        "add_: a leaf that requires a gradient cannot be changed in place; do it under `no_grad`",
    )?;
    let text = message(x.transpose(0, 2))?;
    ensure!(text.starts_with("transpose: dimension 2 "), "{text}");
    Ok(())
}

/// Sums and products of extents do not overflow.
fn huge_arguments_are_errors(device: &Device) -> Result<()> {
    const MOST: usize = usize::MAX;
    let vector = Tensor::ones([5], DType::F32, device)?;
    let image = Tensor::ones([1, 4, 3, 3], DType::F32, device)?;
    let filter = Tensor::ones([2, 4, 1, 1], DType::F32, device)?;
    let wide = Pool2dOptions { padding: [MOST; 2], ..Pool2dOptions::new(2) };
    ensure!(Tensor::zeros([0, 1_usize << 40, 2], DType::F32, device)?.numel() == 0);
    for refused in [
        // As in PyTorch, extents are multiplied even if one is 0.
        Tensor::zeros([0, MOST, 2], DType::F32, device),
        Tensor::zeros([MOST, 2], DType::F32, device),
        Tensor::from_slice(&[1f32], [MOST, 2], device),
        vector.reshape([isize::MAX, 4]),
        vector.unflatten(0, [isize::MAX, isize::MAX]),
        vector.repeat([MOST, MOST]),
        vector.tile([1_usize << 62, 4]),
        vector.repeat_interleave(MOST, 0),
        vector.pad(&[isize::MAX, isize::MAX], PadMode::Replicate),
        vector.pad(&[isize::MIN, 0], PadMode::Constant(0.0.into())),
        vector.combinations(MOST, true),
        cartesian_prod(&[&vector; 29]),
        vector.broadcast_to([1_usize << 62, 8, 5]).and_then(|t| t.contiguous()),
        image.pixel_shuffle(1 << 32),
        vector.polygamma(MOST),
        image.conv2d(&filter, None, &ConvolutionOptions { padding: (1 << 62).into(), ..Default::default() }),
        image.conv2d(&filter, None, &ConvolutionOptions { stride: [MOST, MOST], ..Default::default() }),
        image.max_pool2d(wide),
        image.interpolate(&InterpolateOptions::with_size([MOST, MOST])),
        image.interpolate(&InterpolateOptions::with_scale_factor(1e30)),
        Lstm::new(4, MOST / 2, RecurrentOptions::default(), device).map(|_| vector.clone()),
        SelfAttention::new(MOST, 1, device).map(|_| vector.clone()),
    ] {
        message(refused)?;
    }
    ensure_message(
        vector.split_with_sizes(&[MOST, 6], 0),
        "split_with_sizes: [18446744073709551615, 6] does not add up to the extent 5 of dimension 0",
    )?;
    // A view with more elements than kernels can count is an error, not a partial sum.
    let view = vector.broadcast_to([1 << 20, 1 << 20, 5])?;
    ensure_message(
        view.sum_all(),
        "sum: a view of it repeats elements 2^32 times or more, and kernels count in 32 bits: go through it in parts",
    )?;
    ensure_values(&vector.slice_dim(0, 1, 5, MOST)?, &[1.0])
}

fn messages_name_the_tensors_and_the_next_step(device: &Device) -> Result<()> {
    let image = Tensor::ones([1, 3, 8, 8], DType::F32, device)?;
    let weight = Tensor::ones([6, 4, 3, 3], DType::F32, device)?;
    ensure_message(
        image.conv2d(&weight, None, &Default::default()),
        "conv2d: the input has 3 channels, and the weight takes 4 for each of 1 groups (input [batch, channels, ..], weight [out, \
         channels of a group, ..]); give the layer the channels of the input, or change `groups`; got [1, 3, 8, 8] and [6, 4, 3, 3]",
    )?;
    let q = Tensor::ones([1, 8, 4, 16], DType::F32, device)?;
    let k = Tensor::ones([1, 2, 4, 16], DType::F32, device)?;
    ensure_message(
        q.scaled_dot_product_attention(&k, &k, &AttentionOptions::default()),
        "scaled_dot_product_attention: q has 8 heads, and k has 2; for each head of k and v to serve several of q, set \
         `enable_gqa`; got [1, 8, 4, 16] and [1, 2, 4, 16] and [1, 2, 4, 16]",
    )?;
    // Rust prints the error of `main` by `Debug`.
    let error = q.matmul(&k.narrow(-1, 0, 3)?).err().context("it must fail")?.with_context("step 1");
    let text = error.to_string();
    ensure!(text.starts_with("in step 1: matmul: "), "{text}");
    ensure!(format!("{error:?}") == text, "{error:?}");
    let layer = Linear::new(4, 2, device)?;
    if device.supports_dtype(DType::F64) {
        ensure_message(
            layer.forward(&Tensor::ones([3, 4], DType::F64, device)?),
            "linear: does not take f64; the weight [2, 4] is f32, the input [3, 4] is not; cast the input to f32 with `to_dtype`",
        )?;
    }
    Ok(())
}

/// Functions that create, join or fill tensors name themselves, not a function that they call.
fn messages_name_the_function_that_was_called(device: &Device) -> Result<()> {
    let (f32, none) = (DType::F32, [] as [&Tensor; 0]);
    let many = [1usize << 20, 1 << 20];
    let (x, image) = (Tensor::ones([4], f32, device)?, Tensor::ones([1, 3, 8, 8], f32, device)?);
    let (cube, other) = (Tensor::ones([2, 2, 2], f32, device)?, Tensor::ones([3, 5, 3], f32, device)?);
    let (classes, row) = (Tensor::zeros([2], DType::I32, device)?, Tensor::ones([2, 2], f32, device)?);
    let leaf = x.copy()?.to_leaf()?;
    let created = [
        ("zeros", Tensor::zeros(many, f32, device)),
        ("ones", Tensor::ones(-1, f32, device)),
        ("full", Tensor::full(many, 2.0, f32, device)),
        ("full", Tensor::full(2, 1e300, f32, device)),
        ("full_like", x.full_like(1e300)),
        ("empty", Tensor::empty([-1, 2], f32, device)),
        ("new", Tensor::new(vec![vec![1.0], vec![2.0, 3.0]], device)),
        ("from_slice", Tensor::from_slice(&[1.0f32], 2, device)),
        ("from_slice", Tensor::from_slice(&[1.0f32], [-1, 2], device)),
        ("from_bools", Tensor::from_bools(&[true], 2, device)),
        ("from_bools", Tensor::from_bools(&[true], [-1, -1], device)),
        ("from_bytes", Tensor::from_bytes(&[1, 2, 3], 1, f32, device)),
        ("from_bytes", Tensor::from_bytes(&[2], -2, DType::Bool, device)),
        ("arange", Tensor::arange(0.0, 1.0, 0.0, f32, device)),
        ("arange", Tensor::arange(0.0, 300.0, 1.0, DType::U8, device)),
        ("linspace", Tensor::linspace(0.0, 1.0, 1 << 40, f32, device)),
        ("linspace", Tensor::linspace(0.0, 300.0, 3, DType::U8, device)),
        ("logspace", Tensor::logspace(0.0, 1.0, 1 << 40, 2.0, f32, device)),
        ("eye", Tensor::eye(1 << 20, 1 << 20, f32, device)),
        ("one_hot", x.one_hot(3)),
        ("one_hot", classes.one_hot(1 << 40)),
        ("tril", x.tril(0)),
        ("triu", x.triu(0)),
        ("tril_indices", Tensor::tril_indices(1 << 20, 1 << 20, 0, device)),
        ("triu_indices", Tensor::triu_indices(1 << 20, 1 << 20, 0, device)),
        ("hann_window", Tensor::hann_window(4, true, DType::I32, device)),
        ("hamming_window", Tensor::hamming_window(1 << 40, true, f32, device)),
        ("blackman_window", Tensor::blackman_window(1 << 40, true, f32, device)),
        ("bartlett_window", Tensor::bartlett_window(1 << 40, true, f32, device)),
        ("kaiser_window", Tensor::kaiser_window(4, true, -1.0, f32, device)),
        ("gaussian_window", Tensor::gaussian_window(4, 0.0, true, f32, device)),
        ("general_cosine_window", Tensor::general_cosine_window(4, &[], true, f32, device)),
        ("rand", Tensor::rand(many, f32, device)),
        ("rand", Tensor::rand(2, DType::I32, device)),
        ("rand_like", classes.rand_like()),
        ("randn", Tensor::randn(-1, f32, device)),
        ("randn_like", classes.randn_like()),
        ("uniform", Tensor::uniform(2, 1.0, 0.0, f32, device)),
        ("uniform", Tensor::uniform(many, 0.0, 1.0, f32, device)),
        ("normal", Tensor::normal(2, 0.0, -1.0, f32, device)),
        ("normal", Tensor::normal([-1], 0.0, 1.0, f32, device)),
        ("randint", Tensor::randint(2, 1, 2, DType::I32, device)),
        ("randint", Tensor::randint(0, 9, many, DType::I32, device)),
        ("randint_like", classes.randint_like(2, 1)),
        ("randperm", Tensor::randperm(300, DType::U8, device)),
        ("bernoulli", Tensor::bernoulli(2, 2.0, f32, device)),
        ("bernoulli", Tensor::bernoulli(many, 0.5, f32, device)),
        ("sample_bernoulli", classes.sample_bernoulli()),
        ("multinomial", cube.multinomial(1, true)),
        ("cat", Tensor::cat(&[&x, &cube], 0)),
        ("stack", Tensor::stack(&none, 0)),
        ("stack", Tensor::stack(&[&x, &x], 5)),
        ("hstack", hstack(&[&cube, &other])),
        ("hstack", hstack(&none)),
        ("vstack", vstack(&[&cube, &other])),
        ("dstack", dstack(&[&cube, &other])),
        ("column_stack", column_stack(&[&cube, &other])),
        ("block_diag", block_diag(&[&cube])),
        ("meshgrid", meshgrid(&[&cube], false).map(|_| cube.clone())),
        ("broadcast_tensors", broadcast_tensors(&[&x, &cube]).map(|_| cube.clone())),
        ("cartesian_prod", cartesian_prod(&[&cube])),
        ("einsum", einsum("ij,jk", &[&cube])),
        ("multi_dot", multi_dot(&none)),
        ("expand", image.expand([2, 3, 8, 8, 9])),
        ("slice_dim", image.slice_dim(4, 0, 1, 1)),
        ("slice_dim", image.slice_dim(0, 0, 1, 0)),
        ("init::default_dtype", init::default_dtype(DType::I64).map(|_| image.clone())),
        ("parameters_to_vector", init::parameters_to_vector(&[])),
    ];
    let filled = [
        ("copy_", image.narrow(1, 0, 1)?.copy_(&image)),
        ("uniform_", x.uniform_(1.0, 0.0)),
        ("uniform_", leaf.uniform_(0.0, 1.0)),
        ("normal_", x.normal_(0.0, -1.0)),
        ("normal_", leaf.normal_(0.0, 1.0)),
        ("random_", classes.random_(2, 1)),
        ("random_", leaf.random_(0, 2)),
        ("bernoulli_", x.bernoulli_(2.0)),
        ("bernoulli_", x.bernoulli_(&cube)),
        ("bernoulli_", leaf.bernoulli_(0.5)),
        ("exponential_", x.exponential_(0.0)),
        ("exponential_", leaf.exponential_(1.0)),
        ("geometric_", x.geometric_(0.0)),
        ("geometric_", leaf.geometric_(0.5)),
        ("cauchy_", x.cauchy_(0.0, 0.0)),
        ("cauchy_", leaf.cauchy_(0.0, 1.0)),
        ("log_normal_", classes.log_normal_(0.0, 1.0)),
        ("log_normal_", leaf.log_normal_(0.0, 1.0)),
        ("uniform_", init::uniform_(&x, 1.0, 0.0)),
        ("normal_", init::normal_(&classes, 0.0, 1.0)),
        ("constant_", init::constant_(&x, 1e300)),
        ("kaiming_uniform_", init::kaiming_uniform_(&x, 0.0)),
        ("kaiming_normal_", init::kaiming_normal_(&row, f64::NAN)),
        ("xavier_uniform_", init::xavier_uniform_(&x, 1.0)),
        ("xavier_normal_", init::xavier_normal_(&row, -1.0)),
        (
            "kaiming_uniform_with_mode_",
            init::kaiming_uniform_with_mode_(&x, FanMode::FanIn, Nonlinearity::Tanh),
        ),
        (
            "kaiming_normal_with_mode_",
            init::kaiming_normal_with_mode_(&x, FanMode::FanIn, Nonlinearity::Tanh),
        ),
        ("trunc_normal_", init::trunc_normal_(&x, 0.0, 1.0, 1.0, 0.0)),
        ("orthogonal_", init::orthogonal_(&x, 1.0)),
        ("eye_", init::eye_(&x)),
        ("dirac_", init::dirac_(&x, 1)),
        ("sparse_", init::sparse_(&x, 0.5, 1.0)),
        ("sparse_", init::sparse_(&row, 0.5, -1.0)),
        ("vector_to_parameters", init::vector_to_parameters(&x, &[])),
    ];
    let filled = filled.into_iter().map(|(name, result)| (name, result.map(|()| x.clone())));
    for (name, result) in created.into_iter().chain(filled) {
        let text = message(result).context(name)?;
        ensure!(text.starts_with(&format!("{name}: ")), "{name} says {text}");
    }
    Ok(())
}

/// A report of a full device names the function that was called. The null device has the same text everywhere.
fn reports_name_the_function_that_was_called(_: &Device) -> Result<()> {
    let device = &Device::null(Default::default());
    let (f32, n) = (DType::F32, 8 << 20);
    let (x, classes) = (Tensor::ones(n, f32, device)?, Tensor::zeros(n, DType::I32, device)?);
    let (floats, bools) = (vec![0f32; n], vec![true; 4 * n]);
    device.pool().set_limit(Some(device.memory().reserved()));
    for (name, result) in [
        ("zeros", Tensor::zeros(n, f32, device)),
        ("zeros_like", x.zeros_like()),
        ("ones_like", x.ones_like()),
        ("full", Tensor::full(n, 2.0, f32, device)),
        ("full_like", x.full_like(2.0)),
        ("from_slice", Tensor::from_slice(&floats, n, device)),
        ("from_bools", Tensor::from_bools(&bools, 4 * n, device)),
        ("new", Tensor::new(&floats[..], device)),
        ("arange", Tensor::arange(0.0, n as f64, 1.0, f32, device)),
        ("linspace", Tensor::linspace(0.0, 1.0, n, f32, device)),
        ("eye", Tensor::eye(1 << 12, 1 << 12, f32, device)),
        ("one_hot", classes.one_hot(10)),
        ("tril_indices", Tensor::tril_indices(1 << 12, 1 << 12, 0, device)),
        ("hann_window", Tensor::hann_window(n, true, f32, device)),
        ("rand", Tensor::rand(n, f32, device)),
        ("rand_like", x.rand_like()),
        ("uniform", Tensor::uniform(n, 0.0, 1.0, f32, device)),
        ("normal", Tensor::normal(n, 0.0, 1.0, f32, device)),
        ("randint_like", classes.randint_like(0, 9)),
        ("randperm", Tensor::randperm(n, DType::I32, device)),
        ("bernoulli", Tensor::bernoulli(n, 0.5, f32, device)),
        ("hstack", hstack(&[&x, &x])),
        ("uniform_", x.uniform_(0.0, 1.0).map(|()| x.clone())),
    ] {
        let text = message(result).context(name)?;
        ensure!(
            text.starts_with(&format!("out of memory on null:0: {name} asked for ")),
            "{name} says {text}"
        );
    }
    Ok(())
}

/// Arguments that PyTorch rejects as well.
fn invalid_values_are_errors(device: &Device) -> Result<()> {
    let x = Tensor::ones([4, 4], DType::F32, device)?;
    ensure_message(
        Tensor::uniform([2], 1.0, 0.0, DType::F32, device),
        "uniform: 1..0 is not a range of numbers",
    )?;
    ensure_message(
        Tensor::normal([2], 0.0, -1.0, DType::F32, device),
        "normal: a standard deviation is 0 or more, not -1",
    )?;
    ensure_message(
        Tensor::randint(0, 300, [2], DType::U8, device),
        "randint: 0..300 are not all numbers of u8",
    )?;
    ensure_message(
        Tensor::from_bytes(&[1, 7], [2], DType::Bool, device),
        "from_bytes: the bytes of a bool tensor are 0 and 1; compare others with `ne(0)`",
    )?;
    ensure_message(x.flip([0, -2]), "flip: [0, -2] names a dimension twice")?;
    ensure_message(
        Embedding::new(4, 4, device)?.with_padding_idx(9),
        "Embedding: padding_idx 9 is none of the 4 rows",
    )?;
    ensure_message(
        Conv2d::new(4, 4, [3, 0], Conv2dOptions::default(), device),
        "Conv2d: kernel_size is [3, 0]; it must be at least 1",
    )?;
    for lr in [f64::NAN, f64::INFINITY, -0.1] {
        let w = x.copy()?.to_leaf()?;
        w.set_grad(Some(w.ones_like()?));
        let got = message(AdamW::new(vec![w.clone()], lr).step())?;
        ensure!(got == format!("step: `lr` is {lr}, expected a finite number of 0 or more, in f32"), "{got}");
        ensure_values(&w, &[1.0; 16])?;
    }
    Ok(())
}

fn wrong_devices(device: &Device) -> Result<()> {
    let here = Tensor::ones([2], DType::F32, device)?;
    let there = Tensor::ones([2], DType::F32, &Device::null(Default::default()))?;
    ensure_message(
        here.add(&there),
        &format!("add: tensors are on {device} and null:0; move one with `to_device`"),
    )?;
    let again = Device::with_config(device.backend().clone(), Config::default());
    ensure_message(
        here.add(&Tensor::ones([2], DType::F32, &again)?),
        &format!(
            "add: tensors are on {device} and on {device} that was opened again, which is another device with a pool of its own; \
             open it once and clone the handle, or move one with `to_device`"
        ),
    )?;
    ensure_message(
        here.matmul(&there),
        &format!("matmul: tensors are on {device} and null:0; move one with `to_device`"),
    )?;
    ensure_values(&here.add(&there.to_device(device)?)?, &[1.0; 2])
}

fn backward_that_cannot_run(device: &Device) -> Result<()> {
    let x = Tensor::ones([2], DType::F32, device)?.to_leaf()?;
    ensure_message(
        x.detach().dot(&x.detach())?.backward(),
        "backward: the tensor does not require a gradient: no input required one, or it was computed under \
         `no_grad` or from a detached tensor",
    )?;
    let y = x.exp()?;
    ensure_message(
        y.backward(),
        "backward: a tensor of shape [2] is not a scalar; reduce it (`mean`, `sum`) or give its gradient to \
         `backward_with`",
    )?;
    y.backward_with(&y.ones_like()?)?;
    ensure_message(
        y.backward_with(&y.ones_like()?),
        "backward: `exp` has already run backward, and its saved tensors are freed; every pass but the last one needs \
         `retain_graph` of `GradOptions`, and the last one comes after the others",
    )
}

fn devices_that_are_not_there(device: &Device) -> Result<()> {
    ensure_message(Device::open("tpu:0"), "no device `tpu:0`: backends are cuda, wgpu, null")?;
    ensure_message(
        Device::open("cuda:first"),
        "no device `cuda:first`: an id is a backend and a number, such as `cuda:0` or `wgpu:1`",
    )?;
    for id in ["cuda:99", "wgpu:99", "null:1"] {
        let text = message(Device::open(id))?;
        ensure!(text.starts_with(&format!("no device `{id}`: ")), "{text}");
        ensure!(!text.contains('\n'), "one line says what is missing: {text}");
    }
    let (backend, index) = (device.info().backend, device.info().index);
    ensure!(Device::device_count("tpu") == 0);
    // A backend of another crate has no ids.
    if ["cuda", "wgpu"].contains(&backend) {
        ensure!(Device::device_count(backend) > index);
        ensure!(Device::open(&format!("{backend}:{}", Device::device_count(backend))).is_err());
    }
    Ok(())
}

/// Uses the sizes of the null device; the text is equal on all devices.
fn a_full_device_of_known_size(_: &Device) -> Result<()> {
    let device = Device::null(Default::default());
    device.pool().set_limit(Some(64 << 20));
    let _held = {
        let _tag = scope::enter_tag(Tag::Parameter);
        Tensor::zeros([8 << 20], DType::F32, &device)?
    };
    let _module = scope::enter_module("encoder");
    let _tag = scope::enter_tag(Tag::Activation);
    let (result, line) = (Tensor::zeros([16 << 20], DType::F32, &device), line!());
    let expected = format!(
        "out of memory on null:0: zeros in encoder asked for 64.0 MiB (activation)\n  \
         at: {}:{line}\n  \
         device: 80.0 GiB free of 80.0 GiB; the pool may take 64.0 MiB\n  \
         pool: 32.0 MiB allocated + 0 B pending + 0 B cached = 32.0 MiB reserved\n  \
         largest free block: 0 B (fragmentation 0 %)\n  \
         held by: parameter 32.0 MiB\n  \
         try: the limit stopped this, not the device, which has 80.0 GiB free: raise max_memory_mb or \
         per_process_memory_fraction\n  \
         try: parameters and gradients hold the most: a smaller model, or a 16-bit one",
        file!()
    );
    ensure_message(result, &expected)?;
    Tensor::zeros([1 << 20], DType::F32, &device)?;
    Ok(())
}

fn a_full_device_recovers(device: &Device) -> Result<()> {
    let x = Tensor::ones([1 << 20], DType::F32, device)?;
    device.pool().empty_cache()?;
    let limit = device.pool().limit();
    let reserved = device.memory().reserved();
    device.pool().set_limit(Some(reserved));
    let bytes = (reserved + 1).next_multiple_of(4 << 20);
    let result = {
        let _tag = scope::enter_tag(Tag::Activation);
        Tensor::zeros([bytes as usize / 4], DType::F32, device)
    };
    device.pool().set_limit(limit);
    let Err(Error::OutOfMemory(error)) = result else {
        anyhow::bail!("{bytes} bytes do not fit into {reserved}");
    };
    ensure!(error.requested == bytes && error.tag == Tag::Activation && error.op == "zeros", "{error}");
    ensure!(error.allocated >= 4 << 20 && error.limit == Some(reserved), "{error}");
    let expected = format!("out of memory on {device}: zeros asked for {} (activation)", Bytes(bytes));
    ensure!(error.to_string().starts_with(&expected), "{error}");
    // Existing tensors are intact, and kernels run.
    ensure!(x.add(1.0)?.to_vec::<f32>()?.iter().all(|&v| v == 2.0));
    Ok(())
}
