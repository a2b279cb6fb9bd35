//! In-place operations: equal values and gradients, PyTorch's rules for leaves and views, savings of memory.

use std::slice::from_ref;

use anyhow::{Context, Result, ensure};
use forebay::amp::autocast;
use forebay::autograd::{self, GradOptions};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::ops::{AddmmOptions, ScatterReduce};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_close, ensure_values};
use super::tests;

tests![
    filling_takes_every_type_on_every_device,
    forms_in_place_equal_the_others,
    leaves_and_their_views_are_refused,
    a_view_writes_into_its_base,
    parts_of_a_buffer_are_written,
    views_of_an_overwritten_tensor_have_its_history,
    saved_tensors_that_were_overwritten_are_refused,
    second_gradients_flow_through_operations_in_place,
    an_activation_in_place_saves_memory,
    products_keep_their_type_under_autocast,
    integers_keep_their_type_in_running_totals,
    bools_refuse_numbers,
    scatters_take_no_memory_of_the_size_of_the_tensor,
    scatters_read_their_inputs_before_they_write,
    scatters_of_16_bits_round_once,
    scatters_count_as_writes,
];

type InplaceFn = fn(&Tensor, &Tensor) -> CoreResult<()>;
type OutOfPlaceFn = fn(&Tensor, &Tensor) -> CoreResult<Tensor>;

/// In-place and out-of-place forms, for values between 0.5 and 2.
const FORMS: &[(&str, InplaceFn, OutOfPlaceFn)] = &[
    ("add_", |x, y| x.add_(y), |x, y| x.add(y)),
    ("sub_", |x, y| x.sub_(y), |x, y| x.sub(y)),
    ("mul_", |x, y| x.mul_(y), |x, y| x.mul(y)),
    ("mul_ by itself", |x, _| x.mul_(x), |x, _| x.mul(x)),
    ("div_", |x, y| x.div_(y), |x, y| x.div(y)),
    ("pow_", |x, y| x.pow_(y), |x, y| x.pow(y)),
    ("copy_", |x, y| x.copy_(y), |x, y| x.mul(0.0)?.add(y)),
    ("fill_", |x, _| x.fill_(3.0), |x, _| x.mul(0.0)?.add(3.0)),
    ("zero_", |x, _| x.zero_(), |x, _| x.mul(0.0)),
    (
        "masked_fill_",
        |x, y| x.masked_fill_(&y.detach().gt(1.0)?, 4.0),
        |x, y| x.masked_fill(&y.detach().gt(1.0)?, 4.0),
    ),
    ("clamp_", |x, y| x.clamp_(0.7, y), |x, y| x.clamp(0.7, y)),
    ("addcmul_", |x, y| x.addcmul_(y, y, 0.5), |x, y| x.addcmul(y, y, 0.5)),
    ("addcdiv_", |x, y| x.addcdiv_(1.0, y, 0.5), |x, y| x.addcdiv(1.0, y, 0.5)),
    ("lerp_", |x, y| x.lerp_(y, 0.3), |x, y| x.lerp(y, 0.3)),
    ("relu_", |x, _| x.relu_(), |x, _| x.relu()),
    ("leaky_relu_", |x, _| x.leaky_relu_(0.1), |x, _| x.leaky_relu(0.1)),
    ("silu_", |x, _| x.silu_(), |x, _| x.silu()),
    ("sigmoid_", |x, _| x.sigmoid_(), |x, _| x.sigmoid()),
    ("tanh_", |x, _| x.tanh_(), |x, _| x.tanh()),
    ("exp_", |x, _| x.exp_(), |x, _| x.exp()),
    ("log_", |x, _| x.log_(), |x, _| x.log()),
    ("sqrt_", |x, _| x.sqrt_(), |x, _| x.sqrt()),
    ("neg_", |x, _| x.neg_(), |x, _| x.neg()),
    ("floor_", |x, _| x.floor_(), |x, _| x.floor()),
    ("square_", |x, _| x.square_(), |x, _| x.square()),
    ("hypot_", |x, y| x.hypot_(y), |x, y| x.hypot(y)),
    ("cumprod_", |x, _| x.cumprod_(1), |x, _| x.cumprod(1)),
    ("tril_", |x, _| x.tril_(0), |x, _| x.tril(0)),
];

/// Also for types without arithmetic on the device: filling only copies.
fn filling_takes_every_type_on_every_device(device: &Device) -> Result<()> {
    for dtype in
        [DType::I64, DType::F64, DType::I32, DType::U32, DType::U8, DType::Bool, DType::F16, DType::BF16]
    {
        if !device.supports_dtype(dtype) {
            continue;
        }
        let t = Tensor::zeros([3, 4], dtype, device)?;
        t.fill_(1)?;
        t.narrow(1, 1, 2)?.t()?.zero_()?;
        ensure_values(&t, &[1.0, 0.0, 0.0, 1.0].repeat(3)).with_context(|| dtype.to_string())?;
    }
    let t = Tensor::zeros([2], DType::I64, device)?;
    t.fill_(-(1i64 << 40) - 1)?;
    ensure!(t.to_vec::<i64>()? == [-(1i64 << 40) - 1; 2], "{:?}", t.to_vec::<i64>()?);
    // u32 values above i32's range are not taken for negative.
    if device.info().features.i64 {
        let t = Tensor::from_slice(&[3_000_000_000u32, u32::MAX, 7], [3], device)?;
        ensure_values(&t.to_dtype(DType::I64)?, &[3e9, f64::from(u32::MAX), 7.0])?;
        ensure_values(
            &t.to_dtype(DType::I64)?.add(3_000_000_000i64)?,
            &[6e9, 7_294_967_295.0, 3_000_000_007.0],
        )?;
    }
    if device.supports_dtype(DType::F64) {
        let t = Tensor::zeros([2], DType::F64, device)?;
        t.fill_(0.1)?;
        ensure!(t.to_vec::<f64>()? == [0.1; 2], "{:?}", t.to_vec::<f64>()?);
    }
    Ok(())
}

fn operands(device: &Device) -> Result<[Tensor; 2]> {
    let at = |i: usize, by: f32| 0.5 + 1.5 * ((i as f32 * 0.618_034 + by).fract());
    let x: Vec<f32> = (0..15).map(|i| at(i, 0.11)).collect();
    let y: Vec<f32> = (0..5).map(|i| at(i, 0.48)).collect();
    Ok([Tensor::from_slice(&x, [3, 5], device)?, Tensor::from_slice(&y, [5], device)?])
}

fn forms_in_place_equal_the_others(device: &Device) -> Result<()> {
    let [x, y] = operands(device)?;
    let weights = x.cos()?;
    for (name, inplace, out) in FORMS {
        let run = |overwrite: bool| -> Result<[Tensor; 3]> {
            let (x, y) = (x.copy()?.to_leaf()?, y.copy()?.to_leaf()?);
            let made = x.mul(1.0)?;
            let made = match overwrite {
                true => {
                    let handle = made.clone();
                    inplace(&made, &y)?;
                    ensure!(handle.requires_grad() && !handle.is_leaf(), "a clone is the same tensor");
                    handle
                }
                false => out(&made, &y)?,
            };
            made.mul(&weights)?.sum_all()?.backward()?;
            let grad = |t: &Tensor| t.grad().map_or_else(|| t.zeros_like(), Ok);
            Ok([made.detach(), grad(&x)?, grad(&y)?])
        };
        let (got, expected) = (run(true)?, run(false).with_context(|| format!("{name}, not in place"))?);
        for (what, (a, b)) in
            ["value", "gradient", "gradient of the operand"].iter().zip(got.iter().zip(&expected))
        {
            ensure_close(&a.to_f64s()?, &b.to_f64s()?, 1e-6, 1e-6)
                .with_context(|| format!("{name}: the {what}"))?;
        }
        // Under `no_grad`, leaves may change as well.
        let x = x.copy()?.to_leaf()?;
        let before = x.to_f64s()?;
        let _no_grad = autograd::no_grad();
        inplace(&x, &y).with_context(|| format!("{name} of a leaf"))?;
        ensure!(x.is_leaf() && x.requires_grad(), "{name}: it is a leaf no more");
        ensure!(*name == "relu_" || *name == "leaky_relu_" || x.to_f64s()? != before, "{name} did nothing");
    }
    Ok(())
}

fn leaves_and_their_views_are_refused(device: &Device) -> Result<()> {
    let w = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    let error = w.mul_(2.0).err().context("a leaf was changed")?.message();
    ensure!(
        error == "mul_: a leaf that requires a gradient cannot be changed in place; do it under `no_grad`",
        "{error}"
    );
    for changed in [w.narrow(0, 1, 2)?.zero_(), w.reshape([2, 2])?.t()?.copy_(&w.reshape([2, 2])?)] {
        let error = changed.err().context("a view of a leaf was changed")?.to_string();
        ensure!(
            error.contains("a view of a leaf that requires a gradient cannot be changed in place"),
            "{error}"
        );
    }
    ensure_values(&w, &[1.0; 4])
}

fn a_view_writes_into_its_base(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], [2, 2], device)?.to_leaf()?;
    let w = Tensor::from_slice(&[10.0f32, 20.0], [2], device)?.to_leaf()?;
    let base = x.mul(1.0)?;
    let column = base.t()?.select(0, 1)?;
    column.mul_(&w)?;
    ensure_values(&base, &[1.0, 20.0, 3.0, 80.0])?;
    let c = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], [2, 2], device)?;
    // Base and view share the history.
    base.mul(&c)?.sum_all()?.add(&column.sum_all()?)?.backward()?;
    ensure_values(&x.grad().context("no gradient of x")?, &[1.0, 30.0, 3.0, 100.0])?;
    ensure_values(&w.grad().context("no gradient of w")?, &[6.0, 20.0])
}

fn parts_of_a_buffer_are_written(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0], [2], device)?.to_leaf()?;
    let buffer = Tensor::zeros([3, 2], DType::F32, device)?;
    buffer.select(0, 0)?.copy_(&x)?;
    buffer.select(0, 2)?.copy_(&x.mul(&x)?)?;
    ensure!(buffer.requires_grad() && !buffer.is_leaf());
    ensure_values(&buffer, &[1.0, 2.0, 0.0, 0.0, 1.0, 4.0])?;
    buffer.mul(3.0)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[9.0, 15.0])?;
    // An overwritten part passes its gradient only to the last write.
    x.set_grad(None);
    let buffer = Tensor::zeros([2], DType::F32, device)?;
    buffer.copy_(&x)?;
    buffer.narrow(0, 0, 1)?.fill_(7.0)?;
    buffer.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[0.0, 1.0])
}

fn views_of_an_overwritten_tensor_have_its_history(device: &Device) -> Result<()> {
    let x = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    let base = x.mul(1.0)?;
    let early = base.narrow(0, 0, 2)?;
    let of_early = early.unsqueeze(0)?;
    base.mul_(3.0)?;
    early.mul(&early)?.sum_all()?.add(&of_early.sum_all()?)?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[21.0, 21.0, 0.0, 0.0])?;
    // A view without a history gets one with the memory's first recorded write, and can then write into the base.
    x.set_grad(None);
    let plain = Tensor::zeros([4], DType::F32, device)?;
    let (written, beside) = (plain.narrow(0, 0, 2)?, plain.narrow(0, 1, 2)?);
    let apart = plain.detach();
    written.copy_(&x.narrow(0, 0, 2)?)?;
    ensure!(beside.requires_grad() && !apart.requires_grad(), "the detached tensor has a history");
    // A detached tensor is a constant in recorded operations.
    apart.mul(&x)?.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[1.0, 1.0, 0.0, 0.0])?;
    x.set_grad(None);
    beside.add_(&beside.copy()?.mul(&x.narrow(0, 2, 2)?)?)?;
    plain.sum_all()?.add(&written.sum_all()?)?.backward()?;
    // plain is x0, x1 + x1 x2, 0, 0; `written` is its first two elements.
    ensure_values(&x.grad().context("no gradient")?, &[2.0, 4.0, 2.0, 0.0])?;
    // After the base is dropped, other views cannot find their new history.
    let plain = Tensor::zeros([4], DType::F32, device)?;
    let (written, beside) = (plain.narrow(0, 0, 2)?, plain.narrow(0, 0, 2)?);
    drop(plain);
    written.copy_(&x.narrow(0, 0, 2)?)?;
    let refused = beside.mul(&x.narrow(0, 2, 2)?)?.sum_all()?.backward();
    let error = refused.err().context("the view used its stale history")?.to_string();
    ensure!(error.contains("whose memory was overwritten by a recorded operation"), "{error}");
    Ok(())
}

fn saved_tensors_that_were_overwritten_are_refused(device: &Device) -> Result<()> {
    let x = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
    // `exp` saves its result.
    let y = x.exp()?;
    y.mul_(2.0)?;
    let error = y.sum_all()?.backward().err().context("a changed tensor was used")?.to_string();
    ensure!(error.contains("`exp`") && error.contains("changed in place since"), "{error}");
    // A sum saves nothing.
    let y = x.add(1.0)?;
    y.mul_(2.0)?;
    y.sum_all()?.backward()?;
    ensure_values(&x.grad().context("no gradient")?, &[2.0; 4])
}

fn second_gradients_flow_through_operations_in_place(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, 2.0], [2], device)?.to_leaf()?;
    let y = x.mul(&x)?;
    // x⁴ at index 1, x² at index 0.
    y.narrow(0, 1, 1)?.square_()?;
    let first = autograd::grad(&[y.sum_all()?], from_ref(&x), &GradOptions::create_graph())?;
    ensure_values(&first[0], &[2.0, 32.0])?;
    let second = autograd::grad(&[first[0].sum_all()?], from_ref(&x), &GradOptions::default())?;
    ensure_values(&second[0], &[2.0, 48.0])
}

fn an_activation_in_place_saves_memory(device: &Device) -> Result<()> {
    const N: usize = 1 << 12;
    let kept = |inplace: bool| -> Result<(u64, Vec<f64>)> {
        let x = Tensor::ones([8, N / 8], DType::F32, device)?.to_leaf()?;
        let before = device.memory().allocated();
        let mut y = x.mul(2.0)?;
        for _ in 0..4 {
            let z = y.add(0.5)?;
            y = match inplace {
                true => {
                    z.relu_()?;
                    z
                }
                false => z.relu()?,
            };
        }
        let kept = device.memory().allocated() - before;
        y.sum_all()?.backward()?;
        Ok((kept, x.grad().context("no gradient")?.to_f64s()?))
    };
    let ((plain, expected), (inplace, got)) = (kept(false)?, kept(true)?);
    ensure!(got == expected);
    // Both forms save the result of `relu`; in place, the input has the same memory.
    ensure!(inplace <= plain, "{inplace} bytes are kept in place, {plain} otherwise");
    let peak = |inplace: bool| -> Result<u64> {
        let x = Tensor::ones([N], DType::F32, device)?.to_leaf()?;
        let z = x.mul(2.0)?;
        device.pool().reset_peak_stats();
        let before = device.memory().allocated();
        let y = if inplace { z.relu_().map(|()| z.clone()) } else { z.relu() }?;
        y.sum_all()?.backward()?;
        Ok(device.memory().peak_allocated() - before)
    };
    let (plain, inplace) = (peak(false)?, peak(true)?);
    ensure!(
        plain >= inplace + 4 * N as u64,
        "peaks of {plain} and {inplace} bytes over the input of the activation"
    );
    Ok(())
}

/// f16 rounds 4097 to 4096, and 70000 to infinity.
fn products_keep_their_type_under_autocast(device: &Device) -> Result<()> {
    let values = [4097.0f32, 70_000.0];
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    let options = AddmmOptions::default();
    let _autocast = autocast(DType::F16)?;
    for (name, shape) in [
        ("addmm_", &[1, 2][..]),
        ("addmv_", &[2]),
        ("addr_", &[1, 2]),
        ("baddbmm_", &[1, 1, 2]),
        ("addbmm_", &[1, 2]),
    ] {
        let x = Tensor::from_slice(&values, shape, device)?;
        match name {
            "addmm_" => x.addmm_(&zeros(&[1, 3])?, &zeros(&[3, 2])?, &options),
            "addmv_" => x.addmv_(&zeros(&[2, 3])?, &zeros(&[3])?, &options),
            "addr_" => x.addr_(&zeros(&[1])?, &zeros(&[2])?, &options),
            "baddbmm_" => x.baddbmm_(&zeros(&[1, 1, 3])?, &zeros(&[1, 3, 2])?, &options),
            _ => x.addbmm_(&zeros(&[1, 1, 3])?, &zeros(&[1, 3, 2])?, &options),
        }?;
        ensure_values(&x, &[4097.0, 70_000.0]).with_context(|| name.to_owned())?;
    }
    Ok(())
}

fn integers_keep_their_type_in_running_totals(device: &Device) -> Result<()> {
    for dtype in [DType::I32, DType::U32] {
        let x = Tensor::new([[1i32, 2, 3], [4, 5, 6]], device)?.to_dtype(dtype)?;
        x.cumsum_(1)?;
        ensure_values(&x, &[1.0, 3.0, 6.0, 4.0, 9.0, 15.0]).with_context(|| dtype.to_string())?;
        x.cumprod_(0)?;
        ensure_values(&x, &[1.0, 3.0, 6.0, 4.0, 27.0, 90.0]).with_context(|| dtype.to_string())?;
    }
    let x = Tensor::new([200u8, 100, 1], device)?;
    x.cumsum_(0)?;
    ensure_values(&x, &[200.0, 44.0, 45.0])
}

fn bools_refuse_numbers(device: &Device) -> Result<()> {
    let x = Tensor::new([1i32, 0, 1], device)?.to_dtype(DType::Bool)?;
    let index = Tensor::new([1i32], device)?;
    let two = Tensor::new(2i32, device)?;
    for (name, result) in [
        ("bitwise_and_", x.bitwise_and_(2)),
        ("bitwise_or_ of a tensor", x.bitwise_or_(&two)),
        ("bitwise_left_shift_", x.bitwise_left_shift_(2)),
        ("add_", x.add_(2)),
        ("square_", x.square_()),
        ("cumsum_", x.cumsum_(0)),
        ("cumprod_", x.cumprod_(0)),
    ] {
        let error = result.err().with_context(|| format!("{name} wrote a number"))?.to_string();
        ensure!(error.contains("does not fit in place; cast the tensor with `to_dtype`"), "{name}: {error}");
    }
    ensure_values(&x, &[1.0, 0.0, 1.0])?;
    // A fill converts its value.
    x.index_fill_(0, &index, 2)?;
    ensure_values(&x, &[1.0, 1.0, 1.0])?;
    x.fill_(&Tensor::new(0i32, device)?)?;
    ensure_values(&x, &[0.0, 0.0, 0.0])?;
    x.index_fill_(0, &index, &two)?;
    ensure_values(&x, &[0.0, 1.0, 0.0])?;
    x.masked_fill_(&x.logical_not()?, &two)?;
    ensure_values(&x, &[1.0, 1.0, 1.0])?;
    x.bitwise_and_(false)?;
    ensure_values(&x, &[0.0, 0.0, 0.0])
}

/// Inputs of scatters: four rows, their positions, a mask and a value.
struct ScatterInputs {
    rows: Tensor,
    columns: Tensor,
    index: Tensor,
    row_index: Tensor,
    mask: Tensor,
    one: Tensor,
}

impl ScatterInputs {
    fn new(shape: [usize; 2], dtype: DType, device: &Device) -> Result<Self> {
        let [height, width] = shape;
        let count = |n: usize| Tensor::arange(1.0, n as f64 + 1.0, 1.0, DType::F32, device)?.remainder(7.0);
        // Two of the indices are equal.
        let index = Tensor::new([2i32, 0, 3, 2], device)?;
        Ok(Self {
            rows: count(4 * width)?.reshape([4, width])?.to_dtype(dtype)?,
            columns: count(4 * height)?.reshape([height, 4])?.to_dtype(dtype)?,
            row_index: index.unsqueeze(1)?.broadcast_to([4, width])?,
            mask: count(height * width)?.gt(4.0)?.reshape(shape)?,
            one: Tensor::ones([1], dtype, device)?,
            index,
        })
    }
}

type ScatterFn = fn(&Tensor, &ScatterInputs) -> CoreResult<()>;
type CopyingScatterFn = fn(&Tensor, &ScatterInputs) -> CoreResult<Tensor>;

/// Scatters in place, and their forms that make a tensor.
const SCATTERS: &[(&str, ScatterFn, CopyingScatterFn)] = &[
    ("index_copy_", |x, i| x.index_copy_(0, &i.index, &i.rows), |x, i| x.index_copy(0, &i.index, &i.rows)),
    (
        "index_add_",
        |x, i| x.index_add_(0, &i.index, &i.rows, 2.0),
        |x, i| x.index_add(0, &i.index, &i.rows, 2.0),
    ),
    ("index_fill_", |x, i| x.index_fill_(1, &i.index, 5), |x, i| x.index_fill(1, &i.index, 5)),
    ("scatter_", |x, i| x.scatter_(0, &i.row_index, &i.rows), |x, i| x.scatter(0, &i.row_index, &i.rows)),
    (
        "scatter_value_",
        |x, i| x.scatter_value_(0, &i.row_index, 5.0),
        |x, i| x.scatter_value(0, &i.row_index, 5.0),
    ),
    (
        "scatter_add_",
        |x, i| x.scatter_add_(0, &i.row_index, &i.rows),
        |x, i| x.scatter_add(0, &i.row_index, &i.rows),
    ),
    (
        "scatter_reduce_",
        |x, i| x.scatter_reduce_(0, &i.row_index, &i.rows, ScatterReduce::Prod, true),
        |x, i| x.scatter_reduce(0, &i.row_index, &i.rows, ScatterReduce::Prod, true),
    ),
    (
        "index_reduce_",
        |x, i| x.index_reduce_(0, &i.index, &i.rows, ScatterReduce::Amax, true),
        |x, i| x.index_reduce(0, &i.index, &i.rows, ScatterReduce::Amax, true),
    ),
    (
        "index_put_",
        |x, i| x.index_put_(&[Some(&i.index)], &i.rows, false),
        |x, i| x.index_put(&[Some(&i.index)], &i.rows, false),
    ),
    (
        "index_put_ of sums",
        |x, i| x.index_put_(&[Some(&i.index)], &i.rows, true),
        |x, i| x.index_put(&[Some(&i.index)], &i.rows, true),
    ),
    (
        "index_put_ of columns",
        |x, i| x.index_put_(&[None, Some(&i.index)], &i.columns, true),
        |x, i| x.index_put(&[None, Some(&i.index)], &i.columns, true),
    ),
    (
        "index_put_ of a mask",
        |x, i| x.index_put_(&[Some(&i.mask)], &i.one, false),
        |x, i| x.index_put(&[Some(&i.mask)], &i.one, false),
    ),
    (
        "index_put_ of sums of a mask",
        |x, i| x.index_put_(&[Some(&i.mask)], &i.one, true),
        |x, i| x.index_put(&[Some(&i.mask)], &i.one, true),
    ),
    (
        "put_",
        |x, i| x.put_(&i.index, &i.rows.select(1, 0)?, false),
        |x, i| x.put(&i.index, &i.rows.select(1, 0)?, false),
    ),
    (
        "put_ of sums",
        |x, i| x.put_(&i.index, &i.rows.select(1, 0)?, true),
        |x, i| x.put(&i.index, &i.rows.select(1, 0)?, true),
    ),
];

fn scatters_take_no_memory_of_the_size_of_the_tensor(device: &Device) -> Result<()> {
    const SHAPE: [usize; 2] = [256, 128];
    let inputs = ScatterInputs::new(SHAPE, DType::F32, device)?;
    let start = Tensor::full(SHAPE, 3.0, DType::F32, device)?;
    let size = 4 * start.numel() as u64;
    for (name, scatter, copying) in SCATTERS {
        let expected = copying(&start, &inputs)?.to_f64s()?;
        for is_leaf in [false, true] {
            let x = if is_leaf { start.copy()?.to_leaf()? } else { start.copy()? };
            let _no_grad = is_leaf.then(autograd::no_grad);
            device.pool().reset_peak_stats();
            let before = device.memory().allocated();
            scatter(&x, &inputs).with_context(|| name.to_string())?;
            let peak = device.memory().peak_allocated() - before;
            ensure!(peak < size / 2, "{name} takes {peak} bytes, and the tensor {size}");
            ensure_close(&x.detach().to_f64s()?, &expected, 0.0, 0.0).with_context(|| name.to_string())?;
        }
    }
    Ok(())
}

fn scatters_read_their_inputs_before_they_write(device: &Device) -> Result<()> {
    // Types whose elements share words, and views whose neighbours must stay.
    for dtype in [DType::F32, DType::F16, DType::U8, DType::I32] {
        let inputs = ScatterInputs::new([6, 5], dtype, device)?;
        let whole = Tensor::arange(0.0, 80.0, 1.0, DType::F32, device)?.to_dtype(dtype)?;
        for (name, scatter, copying) in SCATTERS {
            for layout in ["contiguous", "offset", "transposed", "narrow"] {
                let memory = whole.copy()?;
                let x = match layout {
                    "contiguous" => memory.narrow(0, 0, 30)?.reshape([6, 5])?,
                    "offset" => memory.narrow(0, 11, 30)?.reshape([6, 5])?,
                    "transposed" => memory.narrow(0, 0, 30)?.reshape([5, 6])?.t()?,
                    _ => memory.reshape([8, 10])?.narrow(0, 1, 6)?.narrow(1, 3, 5)?,
                };
                let expected = copying(&x, &inputs)?.to_f64s()?;
                let others = whole.copy()?;
                let place = others.as_strided(x.shape(), x.strides(), Some(x.layout().offset()))?;
                place.copy_(&copying(&x, &inputs)?)?;
                scatter(&x, &inputs).with_context(|| format!("{name} of {dtype}, {layout}"))?;
                ensure_close(&x.to_f64s()?, &expected, 1e-3, 0.0)
                    .and_then(|()| ensure_close(&memory.to_f64s()?, &others.to_f64s()?, 1e-3, 0.0))
                    .with_context(|| format!("{name} of {dtype}, {layout}"))?;
            }
        }
    }
    // Sources and indices in the memory that is written.
    let index = Tensor::new([2i32, 0], device)?;
    let make = || Tensor::new([[0.0f32, 1.0], [2.0, 3.0], [4.0, 5.0]], device);
    let x = make()?;
    x.index_copy_(0, &index, &x.narrow(0, 0, 2)?)?;
    ensure_values(&x, &[2.0, 3.0, 2.0, 3.0, 0.0, 1.0])?;
    let x = make()?;
    x.index_put_(&[Some(&index)], &x.narrow(0, 0, 2)?, true)?;
    ensure_values(&x, &[2.0, 4.0, 2.0, 3.0, 4.0, 6.0])?;
    let x = make()?;
    x.index_fill_(0, &index, &x.select(0, 0)?.select(0, 1)?)?;
    ensure_values(&x, &[1.0, 1.0, 2.0, 3.0, 1.0, 1.0])?;
    let x = Tensor::new([2i32, 0, 1, 1], device)?;
    x.scatter_(0, &x, &x)?;
    ensure_values(&x, &[0.0, 1.0, 2.0, 1.0])?;
    // Indexed dimensions that are not adjacent.
    let x = Tensor::zeros([2, 3, 2], DType::F32, device)?;
    let ends = Tensor::new([0i32, 1], device)?;
    let values = Tensor::new([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]], device)?;
    x.index_put_(&[Some(&ends), None, Some(&ends)], &values, false)?;
    ensure_values(&x, &[1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 0.0, 4.0, 0.0, 5.0, 0.0, 6.0])?;
    // Tensors without dimensions, and without elements.
    let x = Tensor::new(3.0f32, device)?;
    x.index_copy_(0, &Tensor::new([0i32], device)?, &Tensor::new(4.0f32, device)?)?;
    ensure_values(&x, &[4.0])?;
    let none = Tensor::zeros([0], DType::I32, device)?;
    x.index_fill_(0, &none, 9.0)?;
    ensure_values(&x, &[4.0])?;
    let x = Tensor::zeros([0, 3], DType::F32, device)?;
    x.index_add_(0, &none, &Tensor::zeros([0, 3], DType::F32, device)?, 1.0)?;
    Ok(())
}

fn scatters_of_16_bits_round_once(device: &Device) -> Result<()> {
    let x = Tensor::new([2048.0f32, 1.0], device)?.to_dtype(DType::F16)?;
    let index = Tensor::zeros([8], DType::I32, device)?;
    // In f16, 2048 + 1 is 2048.
    x.index_put_(&[Some(&index)], &Tensor::ones([8], DType::F16, device)?, true)?;
    ensure_values(&x, &[2056.0, 1.0])
}

fn scatters_count_as_writes(device: &Device) -> Result<()> {
    let index = Tensor::new([1i32], device)?;
    for (name, _, _) in &SCATTERS[..3] {
        let x = Tensor::ones([4], DType::F32, device)?.to_leaf()?;
        let y = x.exp()?;
        {
            let _no_grad = autograd::no_grad();
            match *name {
                "index_copy_" => y.index_copy_(0, &index, &Tensor::ones([1], DType::F32, device)?)?,
                "index_add_" => y.index_add_(0, &index, &Tensor::ones([1], DType::F32, device)?, 1.0)?,
                _ => y.index_fill_(0, &index, 7.0)?,
            }
        }
        let error = y.sum_all()?.backward().err().context("a changed tensor was used")?.to_string();
        ensure!(error.contains("`exp`") && error.contains("changed in place since"), "{name}: {error}");
    }
    Ok(())
}
