//! Views, strides, broadcasting, in-place changes.

use anyhow::{Context, Result, ensure};
use forebay::OpenDevice;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::ops::{PadMode, cat, stack};
use forebay::tensor::Tensor;

use super::host_reference::{
    all_indices, broadcast_offset, ensure_equal, ensure_same_bits, ensure_values, iota,
};
use super::{compute_dtypes, tests};

tests![
    views_have_hand_computed_values,
    views_read_elements_by_their_layout,
    odd_offsets_of_small_types,
    a_part_that_ends_within_a_word_keeps_the_rest_of_the_word,
    rounding_rounds_every_float,
    broadcasting_follows_the_rule,
    operators_are_methods,
    in_place_changes_only_its_view,
    in_place_equals_out_of_place,
    wide_integers_are_filled,
    a_tensor_may_be_added_to_its_transpose,
    overlapping_copies_read_before_they_write,
    expanded_tensors_refuse_changes,
    tensors_without_elements,
    rank_zero,
    eight_dimensions,
    cat_undoes_split,
    rows_of_whole_vectors_are_concatenated,
    padding_has_hand_computed_values,
    roundtrips_of_every_type,
    clones_share_and_copies_do_not,
    operations_that_copy_have_memory_of_their_own,
    host_values_become_tensors,
    tensors_become_host_values,
    lists_of_tensors_are_owned_or_borrowed,
    devices_and_dtypes_are_keys,
    transposed_copies_have_every_element,
    copies_into_slices_leave_what_is_between,
    neighbouring_elements_of_small_types_are_written_by_different_kernels,
    large_copies_of_scattered_elements_have_every_element,
    ranges_are_computed_in_f64,
];

type ViewFn = fn(&Tensor) -> forebay::error::Result<Tensor>;

/// Views of a tensor of shape [4, 3, 6].
const VIEWS: &[(&str, ViewFn)] = &[
    ("itself", |x| Ok(x.clone())),
    ("transposed", |x| x.transpose(0, 2)),
    ("permuted", |x| x.permute([1, 2, 0])),
    ("narrowed", |x| x.narrow(2, 1, 4)),
    ("narrowed in front", |x| x.narrow(0, 1, 3)),
    ("stepped", |x| x.slice_dim(2, 1, 6, 2)),
    ("selected", |x| x.select(1, -1)),
    ("diagonal", |x| x.diagonal(1, 0, 2)),
    ("expanded", |x| x.narrow(1, 2, 1)?.expand([-1, 5, -1])),
    ("expanded in front", |x| x.select(0, 2)?.expand([2, -1, -1])),
    ("transposed part", |x| x.narrow(2, 2, 3)?.transpose(1, 2)?.narrow(0, 1, 2)),
    ("one element", |x| x.select(0, 3)?.select(0, 1)?.select(0, 5)),
    ("nothing", |x| x.narrow(1, 3, 0)),
];

fn views_have_hand_computed_values(device: &Device) -> Result<()> {
    let x = iota(&[2, 3], DType::F32, device)?;
    ensure_values(&x.t()?, &[0., 3., 1., 4., 2., 5.])?;
    ensure_values(&x.narrow(1, 1, 2)?, &[1., 2., 4., 5.])?;
    ensure_values(&x.select(0, -1)?, &[3., 4., 5.])?;
    ensure_values(&x.slice_dim(1, 0, 3, 2)?, &[0., 2., 3., 5.])?;
    ensure_values(&x.reshape([3, -1])?.t()?, &[0., 2., 4., 1., 3., 5.])?;
    ensure_values(&x.t()?.reshape([6])?, &[0., 3., 1., 4., 2., 5.])?;
    ensure_values(&x.select(0, 0)?.expand([2, 3])?, &[0., 1., 2., 0., 1., 2.])?;
    ensure_values(&x.diagonal(1, 0, 1)?, &[1., 5.])?;
    ensure_values(&x.diagonal(-1, 0, 1)?, &[3.])?;
    ensure!(x.t()?.view([6]).is_err(), "a view of a transpose as a vector needs a copy");
    ensure!(x.unsqueeze(-1)?.shape() == [2, 3, 1] && x.unsqueeze(0)?.squeeze_all()?.shape() == [2, 3]);
    ensure!(x.flatten(0, -1)?.shape() == [6] && x.unflatten(1, [3, -1])?.shape() == [2, 3, 1]);
    Ok(())
}

fn views_read_elements_by_their_layout(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        let x = iota(&[4, 3, 6], dtype, device)?;
        let all = x.to_f64s()?;
        for (name, view) in VIEWS {
            let y = view(&x)?;
            let at = |index: &Vec<usize>| {
                y.layout().offset() + index.iter().zip(y.strides()).map(|(i, s)| i * s).sum::<usize>()
            };
            let expected: Vec<f64> = all_indices(y.shape()).iter().map(|index| all[at(index)]).collect();
            ensure_values(&y, &expected).with_context(|| format!("{dtype} {name}"))?;
            ensure_values(&y.contiguous()?, &expected)
                .with_context(|| format!("{dtype} {name}, contiguous"))?;
            ensure!(y.copy()?.is_contiguous() && y.shares_storage(&x), "{dtype} {name}");
        }
    }
    Ok(())
}

fn odd_offsets_of_small_types(device: &Device) -> Result<()> {
    for dtype in [DType::U8, DType::Bool, DType::F16, DType::BF16] {
        let x = iota(&[23], dtype, device)?;
        let all = x.to_f64s()?;
        for start in 0..9 {
            for length in 0..9 {
                let part = x.narrow(0, start, length)?;
                let describe = || format!("{dtype} {start}..{}", start + length);
                ensure_values(&part, &all[start..start + length]).with_context(describe)?;
                ensure_same_bits(&part.copy()?, &part).with_context(describe)?;
            }
        }
    }
    Ok(())
}

fn a_part_that_ends_within_a_word_keeps_the_rest_of_the_word(device: &Device) -> Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::U8, DType::Bool, DType::F32] {
        for n in 1..7 {
            let whole = Tensor::ones([1, 8], dtype, device)?;
            whole.narrow(1, 0, n)?.copy_(&Tensor::zeros([1, n], dtype, device)?)?;
            let expected: Vec<f64> = (0..8).map(|i| f64::from(u8::from(i >= n))).collect();
            let got = whole.to_f64s()?;
            ensure!(got == expected, "{dtype}, {n} of 8: {got:?}");
        }
    }
    Ok(())
}

/// Rounds as Rust does, ties to even; integers are unchanged.
fn rounding_rounds_every_float(device: &Device) -> Result<()> {
    let values = [-2.5f32, -1.75, -1.0, -0.25, 0.5, 1.5, 2.25, 1e6];
    let round = |f: fn(f32) -> f32| values.map(|v| f64::from(f(v)));
    for dtype in compute_dtypes(device).filter(|dtype| dtype.is_float() && *dtype != DType::F16) {
        let x = Tensor::from_slice(&values, [values.len()], device)?.to_dtype(dtype)?;
        let half = Tensor::from_slice(&[0.5f32], [1], device)?.to_dtype(dtype)?;
        let exact = x.to_f64s()?;
        let divided = |f: fn(f64) -> f64| exact.iter().map(|v| f(v / 0.5)).collect::<Vec<f64>>();
        for (name, got, expected) in [
            ("floor", x.floor()?, round(f32::floor).to_vec()),
            ("ceil", x.ceil()?, round(f32::ceil).to_vec()),
            ("trunc", x.trunc()?, round(f32::trunc).to_vec()),
            ("round", x.round()?, round(f32::round_ties_even).to_vec()),
            ("trunc_divide", x.trunc_divide(&half)?, divided(f64::trunc)),
            ("floor_divide", x.floor_divide(&half)?, divided(f64::floor)),
        ] {
            // bf16 cannot represent a million, so the last value is not compared.
            let (got, n) =
                (got.to_f64s()?, if dtype == DType::BF16 { values.len() - 1 } else { values.len() });
            ensure!(got[..n] == expected[..n], "{name} of {dtype}: {got:?}, not {expected:?}");
        }
    }
    Ok(())
}

fn broadcasting_follows_the_rule(device: &Device) -> Result<()> {
    let pairs: &[(&[usize], &[usize])] = &[
        (&[3, 1, 5], &[4, 1]),
        (&[4], &[2, 3, 4]),
        (&[], &[3, 2]),
        (&[1], &[]),
        (&[2, 1, 3, 1], &[5, 1, 4]),
        (&[7, 1], &[1, 7]),
        (&[0, 3], &[1, 3]),
        (&[1, 1, 1, 6], &[2, 3, 4, 1]),
    ];
    for (a, b) in pairs {
        let (x, y) = (iota(a, DType::F32, device)?, iota(b, DType::F32, device)?);
        let z = x.mul(100.0)?.add(&y)?;
        let expected: Vec<f64> = all_indices(z.shape())
            .iter()
            .map(|i| (broadcast_offset(i, a) * 100 + broadcast_offset(i, b)) as f64)
            .collect();
        ensure_values(&z, &expected).with_context(|| format!("{a:?} with {b:?}"))?;
    }
    // Operands with different layouts.
    let x = iota(&[6, 4, 3], DType::F32, device)?.transpose(0, 2)?;
    let y = iota(&[9], DType::F32, device)?.slice_dim(0, 1, 9, 2)?.unsqueeze(1)?;
    let z = x.add(&y)?;
    let (a, b) = (x.to_f64s()?, y.to_f64s()?);
    let expected: Vec<f64> = (0..72).map(|i| a[i] + b[i / 6 % 4]).collect();
    ensure_values(&z, &expected)
}

fn operators_are_methods(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1f32, -2.0, 4.0], [3], device)?;
    let y = Tensor::from_slice(&[0.5f32], [1], device)?;
    ensure_values(&(&x + &y)?, &[1.5, -1.5, 4.5])?;
    ensure_values(&(&x - 1)?, &[0.0, -3.0, 3.0])?;
    ensure_values(&(((&x * 2.0)? / &y)? - x.clone().neg()?)?, &[5.0, -10.0, 20.0])?;
    ensure_values(&(1.0 - &x)?, &[0.0, 3.0, -3.0])?;
    ensure_values(&(2 / (-&x)?)?, &[-2.0, 1.0, -0.5])?;
    ensure_values(&(3 + (0.5 * x.clone())?)?, &[3.5, 2.0, 5.0])?;
    let wrong = (&x + &Tensor::ones([2], DType::F32, device)?).err().context("[3] and [2] broadcast")?;
    ensure!(wrong.to_string().starts_with("add: "), "{wrong}");
    Ok(())
}

fn in_place_changes_only_its_view(device: &Device) -> Result<()> {
    for dtype in compute_dtypes(device).filter(|&d| d != DType::Bool) {
        for (name, view) in VIEWS {
            let x = iota(&[4, 3, 6], dtype, device)?;
            let before = x.to_f64s()?;
            let y = view(&x)?;
            if y.layout().has_internal_overlap() {
                continue;
            }
            y.add_(3)?;
            let mut expected = before;
            for index in all_indices(y.shape()) {
                let at = index.iter().zip(y.strides()).map(|(i, s)| i * s).sum::<usize>();
                expected[y.layout().offset() + at] += 3.0;
            }
            ensure_values(&x, &expected).with_context(|| format!("{dtype} {name}"))?;
            y.copy_(&Tensor::full((), 7.0, DType::F32, device)?)?;
            for index in all_indices(y.shape()) {
                let at = index.iter().zip(y.strides()).map(|(i, s)| i * s).sum::<usize>();
                expected[y.layout().offset() + at] = 7.0;
            }
            ensure_values(&x, &expected).with_context(|| format!("{dtype} {name}, copied into"))?;
        }
    }
    Ok(())
}

fn in_place_equals_out_of_place(device: &Device) -> Result<()> {
    let x = iota(&[5, 7], DType::F32, device)?.mul(0.37)?.sub(3.0)?;
    let y = iota(&[7], DType::F32, device)?.add(0.5)?;
    type OpPair = (
        fn(&Tensor, &Tensor) -> forebay::error::Result<Tensor>,
        fn(&Tensor, &Tensor) -> forebay::error::Result<()>,
    );
    let pairs: &[OpPair] = &[
        (|a, b| a.add(b), |a, b| a.add_(b)),
        (|a, b| a.sub(b), |a, b| a.sub_(b)),
        (|a, b| a.mul(b), |a, b| a.mul_(b)),
        (|a, b| a.div(b), |a, b| a.div_(b)),
    ];
    for (i, (out, inplace)) in pairs.iter().enumerate() {
        let z = x.copy()?;
        inplace(&z, &y)?;
        ensure_same_bits(&z, &out(&x, &y)?).with_context(|| format!("pair {i}"))?;
        let z = x.copy()?;
        inplace(&z, &z)?;
        ensure_same_bits(&z, &out(&x, &x)?).with_context(|| format!("pair {i} with itself"))?;
    }
    Ok(())
}

fn a_tensor_may_be_added_to_its_transpose(device: &Device) -> Result<()> {
    for n in [1, 2, 5, 33, 100] {
        let x = iota(&[n, n], DType::F32, device)?;
        let before = x.to_f64s()?;
        x.add_(&x.t()?)?;
        let expected: Vec<f64> = (0..n * n).map(|i| before[i] + before[i % n * n + i / n]).collect();
        ensure_values(&x, &expected).with_context(|| format!("{n} rows"))?;
    }
    Ok(())
}

fn overlapping_copies_read_before_they_write(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::U8, DType::BF16] {
        let x = iota(&[100], dtype, device)?;
        let before = x.to_f64s()?;
        x.narrow(0, 1, 99)?.copy_(&x.narrow(0, 0, 99)?)?;
        let mut expected = vec![0.0];
        expected.extend(&before[..99]);
        ensure_values(&x, &expected).with_context(|| dtype.to_string())?;
    }
    let x = iota(&[9, 9], DType::F32, device)?;
    let transposed = x.t()?.to_f64s()?;
    x.copy_(&x.t()?)?;
    ensure_values(&x, &transposed)
}

fn expanded_tensors_refuse_changes(device: &Device) -> Result<()> {
    let x = Tensor::zeros([1, 4], DType::F32, device)?.expand([3, 4])?;
    let Err(Error::Argument { op: "add_" | "add", .. }) = x.add_(1.0) else {
        anyhow::bail!("adding to a tensor that repeats elements must be refused");
    };
    ensure!(x.copy_(&Tensor::ones([3, 4], DType::F32, device)?).is_err(), "so must copying into it");
    Ok(())
}

fn tensors_without_elements(device: &Device) -> Result<()> {
    for dtype in compute_dtypes(device) {
        let x = Tensor::zeros([3, 0, 2], dtype, device)?;
        ensure!(x.numel() == 0 && x.to_bytes()?.is_empty() && x.add(&x)?.shape() == [3, 0, 2]);
        ensure!(x.t().is_err() && x.transpose(0, 1)?.copy()?.shape() == [0, 3, 2]);
        ensure!(x.eq(&x)?.shape() == [3, 0, 2] && x.to_dtype(DType::F32)?.shape() == [3, 0, 2]);
        ensure!(x.reshape([0, 6])?.shape() == [0, 6] && x.reshape([0, -1]).is_err());
        x.copy_(&Tensor::zeros([2], dtype, device)?)?;
    }
    let x = Tensor::zeros([0, 4], DType::F32, device)?;
    let y = Tensor::zeros([4, 3], DType::F32, device)?;
    ensure!(x.matmul(&y)?.shape() == [0, 3]);
    // An empty sum is 0.
    let z = y.t()?.narrow(1, 0, 0)?.matmul(&y.narrow(0, 0, 0)?)?;
    ensure_values(&z, &[0.0; 9])?;
    let joined = cat(&[&x, &Tensor::ones([1, 4], DType::F32, device)?, &x], 0)?;
    ensure_values(&joined, &[1.0; 4])?;
    let w = x.to_leaf()?;
    let y = w.exp()?;
    y.backward_with(&y.ones_like()?)?;
    ensure!(w.grad().is_some_and(|g| g.shape() == [0, 4]), "the gradient of nothing is nothing, not absent");
    Ok(())
}

fn rank_zero(device: &Device) -> Result<()> {
    let x = Tensor::full((), 3.0, DType::F32, device)?;
    ensure!(x.rank() == 0 && x.numel() == 1 && x.item()? == 3.0);
    ensure!(x.exp()?.shape().is_empty() && x.add(&x)?.item()? == 6.0);
    ensure!(x.reshape([1, 1])?.shape() == [1, 1] && x.unsqueeze(0)?.shape() == [1]);
    ensure!(
        x.expand([2, 2])?.to_f64s()? == [3.0; 4] && x.t()?.rank() == 0 && x.flatten(0, -1)?.shape() == [1]
    );
    x.mul_(2.0)?;
    ensure!(x.item()? == 6.0 && stack(&[&x, &x], 0)?.to_f64s()? == [6.0, 6.0]);
    ensure!(x.select(0, 0).is_err() && x.narrow(0, 0, 1).is_err());
    Ok(())
}

fn eight_dimensions(device: &Device) -> Result<()> {
    let shape = [2, 3, 2, 2, 3, 2, 2, 2];
    let x = iota(&shape, DType::F32, device)?;
    let all = x.to_f64s()?;
    let y = x.permute([7, 0, 6, 1, 5, 2, 4, 3])?;
    let expected: Vec<f64> = all_indices(y.shape())
        .iter()
        .map(|i| all[i.iter().zip(y.strides()).map(|(i, s)| i * s).sum::<usize>()])
        .collect();
    ensure_values(&y, &expected)?;
    let doubled: Vec<f64> = expected.iter().map(|v| v + v).collect();
    ensure_values(&y.add(&y.copy()?)?, &doubled)?;
    // Nine dimensions that can be merged into one.
    let z = iota(&[2, 1, 3, 2, 1, 2, 2, 2, 2], DType::F32, device)?;
    ensure_equal(&z.add(1.0)?.to_f64s()?, &z.to_f64s()?.iter().map(|v| v + 1.0).collect::<Vec<_>>())
}

fn cat_undoes_split(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        let x = iota(&[5, 7, 3], dtype, device)?;
        for dim in 0..3 {
            let parts = x.split(2, dim)?;
            let joined = cat(&parts, dim)?;
            ensure_same_bits(&joined, &x).with_context(|| format!("{dtype}, parts of dimension {dim}"))?;
            let slices = x.unbind(dim)?;
            let stacked = stack(&slices, dim)?;
            ensure_same_bits(&stacked, &x).with_context(|| format!("{dtype}, slices of dimension {dim}"))?;
        }
        ensure_same_bits(&x.flip([0, 2])?.flip([2, 0])?, &x)?;
        ensure_same_bits(&x.roll(4, 1)?.roll(-4, 1)?, &x)?;
        ensure_same_bits(&x.roll([2, -4, 2], [0, 1, 2])?, &x.roll(2, 0)?.roll(-4, 1)?.roll(2, 2)?)?;
        ensure_same_bits(&x.roll([1, 2, 5], [1, -2, 0])?, &x.roll(3, 1)?)?;
        ensure_same_bits(&x.roll(10, ())?, &x.reshape([-1])?.roll(10, 0)?.reshape([5, 7, 3])?)?;
        ensure_same_bits(&x.repeat([2, 1, 1])?.narrow(0, 5, 5)?, &x)?;
    }
    Ok(())
}

fn rows_of_whole_vectors_are_concatenated(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        let unit = 16 / dtype.size();
        // One tensor more than a launch reads, an empty part, and parts of different widths.
        let widths: Vec<usize> = (0..10).map(|k| if k == 4 { 0 } else { unit * (1 + k % 3) }).collect();
        let wide = widths.iter().sum::<usize>();
        let x = iota(&[3, wide, 2], dtype, device)?;
        let parts = x.split_with_sizes(&widths, 1)?;
        // Parts of one tensor, copies, and parts of different tensors.
        let copies = parts.iter().map(Tensor::copy).collect::<Result<Vec<_>, _>>()?;
        let mixed: Vec<&Tensor> = (0..10).map(|k| if k % 2 == 0 { &parts[k] } else { &copies[k] }).collect();
        ensure_same_bits(&cat(&parts, 1)?, &x).with_context(|| format!("{dtype}, parts"))?;
        ensure_same_bits(&cat(&copies, 1)?, &x).with_context(|| format!("{dtype}, copies"))?;
        ensure_same_bits(&cat(&mixed, 1)?, &x).with_context(|| format!("{dtype}, mixed"))?;
        // Along the first dimension, in another order, with a row that is repeated.
        let row = x.narrow(0, 1, 1)?;
        let rows = cat(&[&x.narrow(0, 2, 1)?, &row.expand([2, -1, -1])?, &x], 0)?;
        let index = Tensor::from_slice(&[2i32, 1, 1, 0, 1, 2], [6], device)?;
        ensure_same_bits(&rows, &x.index_select(0, &index)?).with_context(|| format!("{dtype}, rows"))?;
    }
    Ok(())
}

fn padding_has_hand_computed_values(device: &Device) -> Result<()> {
    let x = iota(&[2, 3], DType::F32, device)?;
    ensure_values(
        &x.pad(&[1, 2], PadMode::Constant(9.0.into()))?,
        &[9., 0., 1., 2., 9., 9., 9., 3., 4., 5., 9., 9.],
    )?;
    ensure_values(
        &x.pad(&[0, 0, 1, 0], PadMode::Constant(0.0.into()))?,
        &[0., 0., 0., 0., 1., 2., 3., 4., 5.],
    )?;
    ensure_values(&x.pad(&[-1, 0], PadMode::Constant(0.0.into()))?, &[1., 2., 4., 5.])
}

fn roundtrips_of_every_type(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        for n in (0..10).chain([63, 64, 65, 1023, 4097]) {
            let mut bytes: Vec<u8> = (0..n * dtype.size()).map(|i| (i * 7 + 3) as u8).collect();
            if dtype == DType::Bool {
                bytes.iter_mut().for_each(|b| *b &= 1);
            }
            let x = Tensor::from_bytes(&bytes, [n], dtype, device)?;
            ensure!(x.to_bytes()? == bytes, "{n} elements of {dtype}");
            ensure!(x.copy()?.to_bytes()? == bytes, "a copy of {n} elements of {dtype}");
        }
        let x = Tensor::full([37], 1.0, dtype, device)?;
        ensure_values(&x, &[1.0; 37]).with_context(|| format!("full {dtype}"))?;
    }
    Ok(())
}

/// In PyTorch their results can be written, and their inputs do not change.
fn operations_that_copy_have_memory_of_their_own(device: &Device) -> Result<()> {
    let x = iota(&[3, 1], DType::F32, device)?;
    let scalar = Tensor::full((), 2.0, DType::F32, device)?;
    let copies = [
        ("repeat", &x, x.repeat([1, 1])?),
        ("repeat of an extent of 1", &x, x.repeat([1, 2])?),
        ("repeat with a new dimension", &x, x.repeat([2, 1, 1])?),
        ("tile", &x, x.tile(1)?),
        ("repeat_interleave", &x, x.repeat_interleave(1, 0)?),
        ("repeat_interleave of an extent of 1", &x, x.repeat_interleave(2, 1)?),
        ("flip", &x, x.flip(())?),
        ("flip of a scalar", &scalar, scalar.flip(())?),
        ("roll", &x, x.roll(3, 0)?),
        ("pad", &x, x.pad(&[0, 0], PadMode::Constant(0.0.into()))?),
        ("rot90", &x, x.rot90(0, [0, 1])?),
        ("cat", &x, cat(&[&x], 0)?),
        ("tril", &x, x.tril(0)?),
    ];
    for (name, input, copy) in copies {
        let before = input.to_f64s()?;
        ensure!(!copy.shares_storage(input), "the result of {name} shares the memory of its input");
        copy.fill_(7.0).context(name)?;
        ensure_values(input, &before).context(name)?;
        ensure_values(&copy, &vec![7.0; copy.numel()]).context(name)?;
    }
    Ok(())
}

fn clones_share_and_copies_do_not(device: &Device) -> Result<()> {
    let x = Tensor::zeros([3], DType::F32, device)?;
    let (clone, view, copy) = (x.clone(), x.detach(), x.copy()?);
    x.add_(1.0)?;
    ensure!(clone.shares_storage(&x) && view.shares_storage(&x) && !copy.shares_storage(&x));
    ensure_values(&clone, &[1.0; 3])?;
    ensure_values(&view, &[1.0; 3])?;
    ensure_values(&copy, &[0.0; 3])
}

/// Also on devices without i64 arithmetic.
fn wide_integers_are_filled(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1i64, 2, 3, 4, 5, 6], [2, 3], device)?;
    x.narrow(1, 1, 1)?.fill_(1i64 << 40)?;
    x.narrow(1, 2, 1)?.zero_()?;
    ensure!(x.to_vec::<i64>()? == [1, 1 << 40, 0, 4, 1 << 40, 0], "{:?}", x.to_vec::<i64>()?);
    Ok(())
}

fn host_values_become_tensors(device: &Device) -> Result<()> {
    let same = |t: Tensor, shape: &[usize], dtype: DType, values: &[f64]| -> Result<()> {
        ensure!(t.shape() == shape && t.dtype() == dtype, "{t:?}, not {shape:?} of {dtype}");
        ensure_values(&t, values)
    };
    same(Tensor::new(-0.5, device)?, &[], DType::F32, &[-0.5])?;
    same(Tensor::new([1, -2], device)?, &[2], DType::I32, &[1.0, -2.0])?;
    same(Tensor::new([[true, false]; 2], device)?, &[2, 2], DType::Bool, &[1.0, 0.0, 1.0, 0.0])?;
    same(Tensor::new(vec![[1u8], [255]], device)?, &[2, 1], DType::U8, &[1.0, 255.0])?;
    same(Tensor::new(&vec![vec![1i64 << 40]][..], device)?, &[1, 1], DType::I64, &[(1u64 << 40) as f64])?;
    same(Tensor::new([[[half::f16::ONE; 2]]], device)?, &[1, 1, 2], DType::F16, &[1.0; 2])?;
    same(Tensor::new([[0.0f32; 0]; 3], device)?, &[3, 0], DType::F32, &[])?;
    same(Tensor::new(Vec::<Vec<u32>>::new(), device)?, &[0, 0], DType::U32, &[])?;
    let ragged = Tensor::new(vec![vec![1, 2], vec![3]], device).err().context("lists of two lengths")?;
    ensure!(ragged.to_string().contains("have 2 and 1 entries"), "{ragged}");
    Ok(())
}

fn tensors_become_host_values(device: &Device) -> Result<()> {
    let x = iota(&[2, 3], DType::F32, device)?;
    ensure!(Vec::<Vec<f32>>::try_from(&x.t()?)? == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]);
    ensure!(Vec::<f32>::try_from(&x.select(1, -1)?)? == [2.0, 5.0]);
    ensure!(Vec::<Vec<Vec<f32>>>::try_from(&x.unsqueeze(1)?)? == [[[0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0]]]);
    ensure!(f32::try_from(&x.select(0, 1)?.select(0, 0)?)? == 3.0);
    ensure!(Vec::<Vec<f32>>::try_from(&x.narrow(1, 3, 0)?)? == [[0.0f32; 0]; 2]);
    ensure!(i64::try_from(&Tensor::new(-7i64, device)?)? == -7);
    ensure!(Vec::<f32>::try_from(&x).is_err() && f32::try_from(&x).is_err(), "the rank differs");
    ensure!(Vec::<Vec<i32>>::try_from(&x).is_err(), "the dtype differs");
    Ok(())
}

fn lists_of_tensors_are_owned_or_borrowed(device: &Device) -> Result<()> {
    let (a, b) = (Tensor::new([1.0, 2.0], device)?, Tensor::new([3.0], device)?);
    ensure_values(&cat(&[&a, &b], 0)?, &[1.0, 2.0, 3.0])?;
    ensure_values(&cat(&[b.clone(), a.clone()], 0)?, &[3.0, 1.0, 2.0])?;
    let rows: Vec<Tensor> = a.unbind(0)?;
    ensure_values(&stack(&rows, 0)?, &[1.0, 2.0])?;
    let borrowed: Vec<&Tensor> = rows.iter().rev().collect();
    ensure_values(&stack(&borrowed, 0)?, &[2.0, 1.0])
}

#[allow(clippy::mutable_key_type, reason = "a device is hashed and compared by identity")]
fn devices_and_dtypes_are_keys(device: &Device) -> Result<()> {
    let mut names = std::collections::HashMap::from([(device.clone(), "own")]);
    names.insert(Device::null(Default::default()), "other");
    ensure!(names.len() == 2 && names[device] == "own", "clones of a device are one key");
    ensure!(matches!(Device::open("null:x"), Err(Error::NoDevice { .. })), "an index that is not a number");
    for dtype in DType::ALL {
        ensure!(dtype.to_string().parse::<DType>()? == dtype, "{dtype}");
        ensure!(serde_json::from_str::<DType>(&serde_json::to_string(&dtype)?)? == dtype, "{dtype}");
    }
    ensure!("torch.bfloat16".parse::<DType>()? == DType::BF16 && "f33".parse::<DType>().is_err());
    Ok(())
}

/// Copies whose adjacent elements change places go through tiles, for elements of 16 and 32 bits. The expected values
/// come from the indices.
fn transposed_copies_have_every_element(device: &Device) -> Result<()> {
    // Shape, order of the dimensions, and elements that are cut off from the start of the last dimension.
    let cases: [(&[usize], &[isize], usize); 11] = [
        (&[64, 128], &[1, 0], 0),
        (&[70, 33], &[1, 0], 0),
        (&[3, 40, 65], &[0, 2, 1], 1),
        (&[2, 16, 5, 18], &[0, 3, 1, 2], 2),
        (&[18, 3, 20, 2], &[1, 3, 2, 0], 0),
        (&[2, 34, 3, 16, 2], &[3, 0, 2, 4, 1], 0),
        (&[17, 130], &[1, 0], 0),
        // Two dimensions that follow each other in the source, neither of which is long or both of which are.
        (&[70, 20, 9], &[2, 1, 0], 0),
        (&[18, 5, 7], &[2, 1, 0], 0),
        (&[2, 34, 6, 3], &[0, 3, 2, 1], 0),
        (&[3, 16, 40, 15], &[3, 0, 2, 1], 0),
    ];
    for (shape, order, cut) in cases {
        for dtype in [DType::I32, DType::F32, DType::BF16, DType::F16] {
            ensure_permuted_copy(shape, order, cut, dtype, device)?;
        }
    }
    Ok(())
}

/// A copy between two layouts: its shape, the source's strides and offset, and those of the target.
type StridedCopy = (&'static [usize], (&'static [usize], usize), (&'static [usize], usize));

/// Copies into part of a buffer: elements that share a word with elements of others, targets whose adjacent elements
/// are along any dimension, and sources that repeat or overlap elements. The expected memory is computed on the host.
fn copies_into_slices_leave_what_is_between(device: &Device) -> Result<()> {
    let cases: [StridedCopy; 16] = [
        // Lines of odd widths, at odd offsets.
        (&[3, 5], (&[5, 1], 0), (&[7, 1], 1)),
        (&[33, 3], (&[3, 1], 1), (&[6, 1], 0)),
        (&[33, 3], (&[1, 33], 0), (&[6, 1], 3)),
        (&[9, 1027], (&[1027, 1], 0), (&[1029, 1], 1)),
        // Every second and third element.
        (&[70, 41], (&[82, 2], 1), (&[123, 3], 2)),
        (&[5, 2], (&[2, 1], 0), (&[4, 2], 1)),
        // Repeated and overlapping sources.
        (&[4, 6, 5], (&[5, 0, 1], 2), (&[50, 7, 1], 1)),
        (&[50, 8], (&[1, 1], 1), (&[9, 1], 1)),
        // Tiles: rows of even and odd offsets and strides, and rows that are repeated.
        (&[20, 34], (&[1, 20], 0), (&[70, 1], 6)),
        (&[20, 34], (&[1, 21], 3), (&[70, 1], 7)),
        (&[20, 34], (&[1, 20], 0), (&[71, 1], 0)),
        (&[2, 18, 3, 66], (&[1188, 1, 0, 18], 0), (&[7260, 400, 132, 1], 66)),
        (&[20, 35], (&[1, 20], 0), (&[36, 1], 2)),
        // Targets whose adjacent elements are not along the last dimension.
        (&[34, 20], (&[20, 1], 0), (&[1, 40], 2)),
        (&[34, 20], (&[1, 34], 0), (&[1, 36], 1)),
        (
            &[2, 3, 4, 5, 2, 3, 2, 3],
            (&[1, 2, 6, 24, 120, 240, 720, 1440], 0),
            (&[4320, 1440, 360, 72, 36, 12, 6, 1], 5),
        ),
    ];
    let dtypes = compute_dtypes(device).filter(|dtype| !matches!(dtype, DType::Bool | DType::F64));
    for dtype in dtypes {
        for case in cases {
            ensure_strided_copy(case, dtype, device)?;
        }
        for n in 1..=5 {
            for offset in 0..4 {
                let x = iota(&[2, n], dtype, device)?;
                let into = Tensor::full([2, n + 4], 100.0, dtype, device)?;
                x.copy_into(&into.narrow(1, offset, n)?)?;
                let expected: Vec<f64> = (0..2 * (n + 4))
                    .map(|at| match (at / (n + 4), (at % (n + 4)).checked_sub(offset)) {
                        (row, Some(column)) if column < n => x.to_f64s().map(|x| x[row * n + column]),
                        _ => Ok(100.0),
                    })
                    .collect::<forebay::error::Result<_>>()?;
                ensure_values(&into, &expected).with_context(|| format!("{dtype}: {n} at {offset}"))?;
            }
        }
    }
    Ok(())
}

fn ensure_strided_copy(
    (shape, (from, from_start), (to, to_start)): StridedCopy,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let at = |index: &[usize], strides: &[usize], start: usize| {
        start + index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>()
    };
    let last: Vec<usize> = shape.iter().map(|n| n - 1).collect();
    let values: Vec<i32> = (0..=at(&last, from, from_start)).map(|i| (i % 97) as i32).collect();
    let source = Tensor::from_slice(&values, [values.len()], device)?.to_dtype(dtype)?;
    // Elements after the last one share words with it.
    let len = at(&last, to, to_start) + 4;
    let memory = Tensor::full([len], 100.0, dtype, device)?;
    let target = memory.as_strided(shape, to, Some(to_start))?;
    source.as_strided(shape, from, Some(from_start))?.copy_into(&target)?;
    let mut expected = vec![100.0; len];
    for index in all_indices(shape) {
        expected[at(&index, to, to_start)] = f64::from(values[at(&index, from, from_start)]);
    }
    ensure_values(&memory, &expected)
        .with_context(|| format!("{dtype}: {shape:?} from {from:?} at {from_start} to {to:?} at {to_start}"))
}

/// Even and odd elements of one buffer are written by kernels of their own, which must not change each other's half of
/// a word: by a copy, an operation in place, indices that are distinct and indices that repeat.
fn neighbouring_elements_of_small_types_are_written_by_different_kernels(device: &Device) -> Result<()> {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let n = 2051;
        let memory = Tensor::full([n, 2], 1.0, dtype, device)?;
        let [even, odd] = [memory.narrow(1, 0, 1)?, memory.narrow(1, 1, 1)?];
        let values: Vec<f32> = (0..n).map(|i| (i % 89) as f32).collect();
        let x = Tensor::from_slice(&values, [n, 1], device)?.to_dtype(dtype)?;
        even.copy_(&x)?;
        odd.add_(&x)?;
        let rows: Vec<i32> = (0..n as i32).rev().collect();
        let index = Tensor::from_slice(&rows, [n, 1], device)?;
        even.scatter_(0, &index, &x)?;
        odd.scatter_add_(0, &index, &x)?;
        let reversed = |i: usize| f64::from(values[n - 1 - i]);
        let expected: Vec<f64> =
            (0..n).flat_map(|i| [reversed(i), 1.0 + f64::from(values[i]) + reversed(i)]).collect();
        ensure_values(&memory, &expected).with_context(|| dtype.to_string())?;
    }
    Ok(())
}

/// Copies whose adjacent elements are far apart, in dimensions that are too short for tiles.
fn large_copies_of_scattered_elements_have_every_element(device: &Device) -> Result<()> {
    // Pixel shuffling, its inverse, and many short dimensions.
    let cases: [(&[usize], &[isize]); 3] = [
        (&[2, 32, 2, 2, 16, 20], &[0, 1, 4, 2, 5, 3]),
        (&[2, 32, 16, 2, 20, 2], &[0, 1, 3, 5, 2, 4]),
        (&[2, 3, 4, 5, 2, 6, 7, 16], &[7, 1, 5, 3, 4, 2, 6, 0]),
    ];
    for (shape, order) in cases {
        for dtype in [DType::U8, DType::BF16, DType::F32, DType::I64] {
            ensure_permuted_copy(shape, order, 0, dtype, device)?;
        }
    }
    let values: Vec<i32> = (0..3 << 16).collect();
    let every_third = Tensor::from_slice(&values, [1 << 16, 3], device)?.narrow(1, 1, 1)?.contiguous()?;
    let expected: Vec<i32> = values.into_iter().skip(1).step_by(3).collect();
    ensure!(every_third.to_vec::<i32>()? == expected, "every third element");
    Ok(())
}

/// Compares the copy of a permuted tensor with values computed from the indices. The first `cut` elements of the last
/// dimension are cut off before.
fn ensure_permuted_copy(
    shape: &[usize],
    order: &[isize],
    cut: usize,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let n: usize = shape.iter().product();
    let values: Vec<i32> = (0..n).map(|i| (i % 251) as i32).collect();
    let last = shape.len() - 1;
    let x = Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)?;
    let x = x.narrow(last as isize, cut, shape[last] - cut)?;
    let y = x.permute(order)?.contiguous()?;
    let index_in_x = |mut at: usize| {
        let mut index = vec![0; shape.len()];
        for (d, &from) in order.iter().enumerate().rev() {
            index[from as usize] = at % y.shape()[d];
            at /= y.shape()[d];
        }
        index[last] += cut;
        index.iter().zip(shape).fold(0, |all, (i, n)| all * n + i)
    };
    let expected: Vec<f64> = (0..y.numel()).map(|at| f64::from(values[index_in_x(at)])).collect();
    ensure!(y.to_f64s()? == expected, "{shape:?} in the order {order:?}, {dtype}");
    Ok(())
}

/// Values and their number are PyTorch's: `start + i * step` in f64, rounded once.
fn ranges_are_computed_in_f64(device: &Device) -> Result<()> {
    for (start, end, step, count) in [
        (0.0, 1.0, 0.1, 10),
        (0.0, 0.3, 0.1, 3),
        (1.0, 2.5, 0.5, 3),
        (1.0, 1.3, 0.1, 4),
        (5.0, 5.0, 1.0, 0),
        (1.0, -1.0, -0.3, 7),
        (9_999_000.0, 1e7, 0.1, 10_000),
        (16_777_210.0, 16_777_220.0, 0.25, 40),
        (1e-3, 0.1, 1e-3, 99),
    ] {
        let found = Tensor::arange(start, end, step, DType::F32, device)?.to_vec::<f32>()?;
        ensure!(found.len() == count, "{start}..{end} by {step}: {} values", found.len());
        for (k, value) in found.iter().enumerate() {
            let expected = (start + k as f64 * step) as f32;
            ensure!(
                value.to_bits() == expected.to_bits(),
                "{start} + {k} * {step} is {value}, not {expected}"
            );
        }
    }
    // A step away from the end is an error also where its product with the distance underflows.
    ensure!(Tensor::arange(0.0, 1e-200, -1e-200, DType::F32, device).is_err());
    ensure!(Tensor::arange(0.0, f64::INFINITY, 1.0, DType::F32, device).is_err());
    Ok(())
}
