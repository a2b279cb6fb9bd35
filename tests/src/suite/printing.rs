//! Printing by PyTorch's rules; expected texts are PyTorch's output.

use anyhow::{Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::tensor::Tensor;
use half::{bf16, f16};

use super::tests;

tests![
    one_scale_serves_all_elements,
    every_type_prints_its_elements,
    long_tensors_print_their_edges,
    large_tensors_are_read_only_at_their_edges,
    tensors_without_elements_print_their_shape,
    gradients_are_named,
    debug_prints_the_elements_of_short_tensors,
    debug_never_fails,
];

/// Compares a printed tensor with a text, in which `D` is the device.
fn prints(x: &Tensor, expected: &str) -> Result<()> {
    let expected = expected.replace("'D'", &format!("'{}'", x.device()));
    let (display, debug) = (x.to_string(), format!("{x:?}"));
    ensure!(display == expected, "printed:\n{display}\nexpected:\n{expected}");
    let is_short = x.numel() <= 1000;
    ensure!(!is_short || debug == expected, "with debug:\n{debug}\nexpected:\n{expected}");
    Ok(())
}

fn tensor(values: &[f32], shape: &[usize], device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, shape, device)?)
}

/// Returns `0, 1, 2, ...`.
fn count(shape: &[usize], d: &Device) -> Result<Tensor> {
    let values: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
    Ok(Tensor::from_slice(&values, shape, d)?)
}

fn one_scale_serves_all_elements(d: &Device) -> Result<()> {
    prints(&tensor(&[1e-10], &[1], d)?, "tensor([1.0000e-10], device='D')")?;
    prints(&tensor(&[1e10], &[1], d)?, "tensor([1.0000e+10], device='D')")?;
    prints(&tensor(&[1e-10, 1e10], &[2], d)?, "tensor([1.0000e-10, 1.0000e+10], device='D')")?;
    prints(&tensor(&[1.0, 2.5, -3.0], &[3], d)?, "tensor([ 1.0000,  2.5000, -3.0000], device='D')")?;
    prints(&tensor(&[1.0, 20.0, -3.0], &[3], d)?, "tensor([ 1., 20., -3.], device='D')")?;
    prints(&tensor(&[1.0, 2000.0], &[2], d)?, "tensor([1.0000e+00, 2.0000e+03], device='D')")?;
    prints(&tensor(&[0.0625, 100.0], &[2], d)?, "tensor([6.2500e-02, 1.0000e+02], device='D')")?;
    prints(&tensor(&[0.2, 100.0], &[2], d)?, "tensor([  0.2000, 100.0000], device='D')")?;
    prints(&tensor(&[0.0, 0.0], &[2], d)?, "tensor([0., 0.], device='D')")?;
    prints(&tensor(&[0.5], &[], d)?, "tensor(0.5000, device='D')")?;
    prints(&tensor(&[3.0], &[], d)?, "tensor(3., device='D')")?;
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.25];
    prints(&tensor(&odd, &[2, 2], d)?, "tensor([[   nan,    inf],\n        [  -inf, 0.2500]], device='D')")?;
    let matrix = tensor(&[1.0, -2.5, 3.0, 40.0, 5.0, 6.0, 7.0, 8.0], &[2, 2, 2], d)?;
    prints(
        &matrix,
        "tensor([[[ 1.0000, -2.5000],\n         [ 3.0000, 40.0000]],\n\n        [[ 5.0000,  6.0000],\n         [ 7.0000,  8.0000]]], device='D')",
    )?;
    let exact = format!("{:.1}", tensor(&[0.25, 1.75], &[2], d)?);
    ensure!(exact.starts_with("tensor([0.2, 1.8], "), "{exact}");
    prints(
        &matrix.select(2, 1)?.t()?,
        "tensor([[-2.5000,  6.0000],\n        [40.0000,  8.0000]], device='D')",
    )
}

fn every_type_prints_its_elements(d: &Device) -> Result<()> {
    prints(
        &Tensor::from_slice(&[1i32, -20, 300], [3], d)?,
        "tensor([  1, -20, 300], device='D', dtype=i32)",
    )?;
    prints(
        &Tensor::from_slice(&[i64::MIN, i64::MAX, (1 << 53) + 1], [3], d)?,
        "tensor([-9223372036854775808,  9223372036854775807,     9007199254740993],\n       device='D')",
    )?;
    prints(&Tensor::from_slice(&[0u8, 255], [2], d)?, "tensor([  0, 255], device='D', dtype=u8)")?;
    prints(&Tensor::from_slice(&[u32::MAX], [1], d)?, "tensor([4294967295], device='D', dtype=u32)")?;
    prints(&Tensor::from_bytes(&[1, 0], [2], DType::Bool, d)?, "tensor([ True, False], device='D')")?;
    prints(&Tensor::from_bytes(&[1], [1], DType::Bool, d)?, "tensor([True], device='D')")?;
    prints(
        &Tensor::from_slice(&[bf16::from_f32(0.1), bf16::from_f32(3.0)], [2], d)?,
        "tensor([0.1001, 3.0000], device='D', dtype=bf16)",
    )?;
    if d.supports_dtype(DType::F16) {
        let f16_values = [f16::from_f32(65504.0), f16::from_f32(-1.0)];
        let text = "tensor([ 6.5504e+04, -1.0000e+00], device='D', dtype=f16)";
        prints(&Tensor::from_slice(&f16_values, [2], d)?, text)?;
    }
    if d.supports_dtype(DType::F64) {
        prints(
            &Tensor::from_slice(&[1e-300, 1.0], [2], d)?,
            "tensor([1.0000e-300,  1.0000e+00], device='D', dtype=f64)",
        )?;
    }
    Ok(())
}

fn long_tensors_print_their_edges(d: &Device) -> Result<()> {
    let values: Vec<f32> = (0..1001_u16).map(f32::from).collect();
    let x = tensor(&values, &[1001], d)?;
    // Zeros do not count for the format: 1000 / 1 is not above 1000.
    prints(&x, "tensor([   0.,    1.,    2.,  ...,  998.,  999., 1000.], device='D')")?;
    let x = count(&[1000], d)?;
    ensure!(!x.to_string().contains("..."), "a tensor of 1,000 elements is shortened");
    prints(
        &count(&[7, 200], d)?,
        "tensor([[   0,    1,    2,  ...,  197,  198,  199],\n        [ 200,  201,  202,  ...,  397,  398,  399],\n        \
         [ 400,  401,  402,  ...,  597,  598,  599],\n        ...,\n        [ 800,  801,  802,  ...,  997,  998,  999],\n        \
         [1000, 1001, 1002,  ..., 1197, 1198, 1199],\n        [1200, 1201, 1202,  ..., 1397, 1398, 1399]], device='D',\n       dtype=i32)",
    )?;
    // Only printed elements determine the format.
    let mut values = vec![1.0; 1500];
    values[700] = 1e-9;
    prints(&tensor(&values, &[1500], d)?, "tensor([1., 1., 1.,  ..., 1., 1., 1.], device='D')")
}

/// Texts equal those of tensors that are read completely.
fn large_tensors_are_read_only_at_their_edges(d: &Device) -> Result<()> {
    let x = count(&[300, 5, 50], d)?;
    let text = x.to_string();
    ensure!(text.starts_with("tensor([[[    0,     1,     2,  ...,    47,    48,    49],\n"), "{text}");
    ensure!(text.contains("[74950, 74951, 74952,  ..., 74997, 74998, 74999]]], device="), "{text}");
    ensure!(text.matches("...").count() == 6 * 5 + 1, "{text}");
    let x = count(&[100_000], d)?;
    prints(&x, "tensor([    0,     1,     2,  ..., 99997, 99998, 99999], device='D',\n       dtype=i32)")
}

fn tensors_without_elements_print_their_shape(d: &Device) -> Result<()> {
    let of = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, d);
    prints(&of(&[0], DType::F32)?, "tensor([], device='D')")?;
    prints(&of(&[0, 3], DType::F32)?, "tensor([], device='D', shape=[0, 3])")?;
    prints(&of(&[2, 0], DType::I32)?, "tensor([], device='D', shape=[2, 0], dtype=i32)")
}

fn gradients_are_named(d: &Device) -> Result<()> {
    let x = tensor(&[1.0, 2.0], &[2], d)?.to_leaf()?;
    prints(&x, "tensor([1., 2.], device='D', requires_grad=True)")?;
    prints(&x.add(1.0)?, "tensor([2., 3.], device='D', grad_fn=<add>)")?;
    prints(&x.add(1.0)?.detach(), "tensor([2., 3.], device='D')")?;
    let empty = Tensor::zeros([0], DType::F32, d)?.to_leaf()?;
    prints(&empty, "tensor([], device='D', requires_grad=True)")
}

fn debug_prints_the_elements_of_short_tensors(d: &Device) -> Result<()> {
    let pair = Some((tensor(&[1.5], &[1], d)?, 7));
    let text = format!("{pair:?}");
    ensure!(text == format!("Some((tensor([1.5000], device='{d}'), 7))"), "{text}");
    // A long tensor has its shape in place of elements, and is not read.
    let weight = Tensor::zeros([7, 200], DType::F32, d)?.to_leaf()?;
    let text = format!("{weight:?}");
    ensure!(text == format!("tensor(..., device='{d}', shape=[7, 200], requires_grad=True)"), "{text}");
    let text = format!("{:?}", count(&[7, 200], d)?);
    ensure!(text == format!("tensor(..., device='{d}', shape=[7, 200], dtype=i32)"), "{text}");
    Ok(())
}

/// Texts say so if elements cannot be read.
fn debug_never_fails(d: &Device) -> Result<()> {
    let null = Device::null(Default::default());
    let unknown = Tensor::zeros([2, 3], DType::BF16, &null)?;
    let text = format!("{unknown:?}");
    let expected = "tensor(<unknown: the null device computes no values>, device='null:0',\n       shape=[2, 3], dtype=bf16)";
    ensure!(text == expected, "{text}");
    // A capture rejects reads, but printing is not an error.
    let x = tensor(&[1.0, 2.0], &[2], d)?;
    let texts = std::cell::RefCell::new(Vec::new());
    let mut step = d.capture(|| {
        let y = x.add(1.0)?;
        texts.borrow_mut().push(format!("{y:?}"));
        Ok(y)
    })?;
    let texts = texts.into_inner();
    let recorded =
        texts.last().is_some_and(|text| text.starts_with("tensor(<error: a step is being captured"));
    ensure!(recorded && texts.len() == 2, "{texts:?}");
    prints(&step.replay()?, "tensor([2., 3.], device='D')")
}
