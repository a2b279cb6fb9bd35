//! Selection by indices and masks, and scatter reductions, compared with plain loops on the host.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::ScatterReduce;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_message, ensure_values, iota};
use super::{compute_dtypes, tests};

tests![
    nonzero_finds_indices,
    every_scatter_reduction_combines_elements,
    reductions_of_rows_and_their_gradients,
    long_scatters_are_summed_in_order,
    indices_and_masks_select,
    values_are_put_by_a_mask,
];

fn nonzero_finds_indices(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        let x = iota(&[5, 7, 3], dtype, device)?.transpose(0, 1)?.narrow(2, 1, 2)?;
        let all = x.to_f64s()?;
        let expected: Vec<f64> = (0..all.len())
            .filter(|&i| all[i] != 0.0)
            .flat_map(|i| [i / 10, i / 2 % 5, i % 2].map(|c| c as f64))
            .collect();
        ensure_values(&x.nonzero()?, &expected).with_context(|| format!("{dtype}"))?;
        let columns = x.nonzero_tuple()?;
        ensure!(columns.len() == 3 && columns[1].numel() * 3 == expected.len());
    }
    let odd = Tensor::from_slice(&[0.0f32, -0.0, f32::NAN, 1e-30], [4], device)?;
    ensure_values(&odd.argwhere()?, &[2.0, 3.0])?;
    for n in [1, 2047, 2048, 2049, 600_000] {
        let flags: Vec<bool> = (0..n).map(|i| i % 3 == 1 || i + 1 == n).collect();
        let mask = Tensor::from_bools(&flags, [n], device)?;
        let expected: Vec<f64> = (0..n).filter(|&i| flags[i]).map(|i| i as f64).collect();
        ensure_values(&mask.nonzero()?, &expected).with_context(|| format!("{n} elements"))?;
        let x = Tensor::arange(0.0, n as f64, 1.0, DType::F32, device)?;
        ensure_values(&x.masked_select(&mask)?, &expected).with_context(|| format!("{n} elements"))?;
    }
    // Both broadcast, and every type moves.
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        let x = iota(&[3, 1], dtype, device)?;
        let mask = Tensor::from_bools(&[true, false, true], [3], device)?;
        let all = x.to_f64s()?;
        ensure_values(&x.masked_select(&mask)?, &[all[0], all[0], all[1], all[1], all[2], all[2]])
            .with_context(|| format!("{dtype}"))?;
    }
    Ok(())
}

fn every_scatter_reduction_combines_elements(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::F64].into_iter().filter(|&d| device.supports_dtype(d)) {
        let odd = Tensor::from_slice(&[f32::NAN, 3.0], [2], device)?.to_dtype(dtype)?;
        let (position, x) = (Tensor::zeros([2], DType::I32, device)?, Tensor::full([1], 2.0, dtype, device)?);
        for how in [ScatterReduce::Amax, ScatterReduce::Amin] {
            for odd in [odd.clone(), odd.flip([0])?] {
                ensure!(x.scatter_reduce(0, &position, &odd, how, true)?.item()?.is_nan(), "{dtype} {how:?}");
            }
        }
    }
    // Integers that f32 cannot represent.
    let many = Tensor::arange(0.0, 100_000.0, 1.0, DType::I32, device)?;
    for index in [many.narrow(0, 7, 3)?, many.clone()] {
        let put = many.scatter_value(0, &index, 16_777_217.0)?;
        ensure!(put.narrow(0, 9, 1)?.to_vec::<i32>()? == [16_777_217]);
        ensure!(put.narrow(0, 10, 1)?.item()? == if index.numel() == 3 { 10.0 } else { 16_777_217.0 });
    }
    let (zeros, one) =
        (Tensor::zeros([3], DType::I32, device)?, Tensor::from_slice(&[1i32, 5], [2], device)?);
    let index = Tensor::from_slice(&[0i32, 2], [2], device)?;
    ensure_values(&zeros.index_add(0, &index, &one, 2.0)?, &[2.0, 0.0, 10.0])?;
    ensure_message(
        zeros.index_add(0, &index, &one, 0.5),
        "index_add: alpha is a whole number where the tensor is i32; got 0.5",
    )?;
    ensure_message(
        zeros.index_add(0, &index, &one.to_dtype(DType::F32)?, 1.0),
        "index_add: does not take f32; the source has the type of the tensor, i32",
    )?;
    use ScatterReduce::{Amax, Amin, Mean, Prod, Sum};
    let index = [2usize, 0, 2, 3, 0, 2];
    for dtype in compute_dtypes(device).filter(|&d| d != DType::Bool) {
        let own = [3.0, 7.0, 1.0, 2.0];
        let src = [2.0, 4.0, 3.0, 5.0, 1.0, 6.0];
        let x = Tensor::from_slice(&own.map(|v| v as f32), [4], device)?.to_dtype(dtype)?;
        let y = Tensor::from_slice(&src.map(|v| v as f32), [6], device)?.to_dtype(dtype)?;
        let at = Tensor::from_slice(&index.map(|i| i as i64), [6], device)?;
        for how in [Sum, Prod, Mean, Amax, Amin] {
            for include in [true, false] {
                let expected: Vec<f64> = (0..4)
                    .map(|p| {
                        let met = (0..6).filter(|&i| index[i] == p).map(|i| src[i]);
                        let mine = (include || !index.contains(&p)).then_some(own[p]);
                        let all: Vec<f64> = mine.into_iter().chain(met).collect();
                        let sum: f64 = all.iter().sum();
                        match how {
                            Sum => sum,
                            Prod => all.iter().product(),
                            Mean if dtype.is_float() => sum / all.len() as f64,
                            Mean => (sum / all.len() as f64).floor(),
                            Amax => all.iter().copied().fold(f64::MIN, f64::max),
                            Amin => all.iter().copied().fold(f64::MAX, f64::min),
                        }
                    })
                    .collect();
                let got = x.scatter_reduce(0, &at, &y, how, include)?.to_f64s()?;
                let digits = if dtype.size() == 2 { 1e-2 } else { 1e-6 };
                ensure_close(&got, &expected, digits, 0.0)
                    .with_context(|| format!("{dtype}, {how:?}, {include}"))?;
            }
        }
    }
    // Zero factors have PyTorch's gradients.
    let x = Tensor::from_slice(&[2.0f32, 0.0], [2], device)?.to_leaf()?;
    let y = Tensor::from_slice(&[0.0f32, 3.0, 4.0, 5.0], [4], device)?.to_leaf()?;
    let at = Tensor::from_slice(&[0i32, 0, 1, 1], [4], device)?;
    let out = x.scatter_reduce(0, &at, &y, Prod, true)?;
    out.backward_with(&out.ones_like()?)?;
    ensure_values(&x.grad().context("no gradient")?, &[0.0, 20.0])?;
    ensure_values(&y.grad().context("no gradient")?, &[6.0, 0.0, 0.0, 0.0])
}

/// Rows with one index each: rows without elements, with few, and with so many that several threads or a workgroup
/// combine them. Indices out of range are skipped.
fn reductions_of_rows_and_their_gradients(device: &Device) -> Result<()> {
    use ScatterReduce::{Amax, Amin, Mean, Sum};
    let (n, extent) = (20_000, 60);
    let mut rng = SplitMix64(17);
    let index: Vec<i64> = (0..n)
        .map(|k| match k % 4 {
            0 | 1 => 7,
            2 if k < 6000 => 9,
            _ => rng.below(extent + 4) as i64 - 2,
        })
        // A row without elements.
        .map(|row| if row == 30 { 31 } else { row })
        .collect();
    let at = Tensor::from_slice(&index, [n], device)?;
    let row_of = |k: usize| usize::try_from(index[k]).ok().filter(|&row| row < extent);
    for (dtype, width) in [(DType::F32, 8), (DType::BF16, 8), (DType::F16, 5), (DType::BF16, 12)] {
        let mut whole =
            |count: usize| -> Vec<f32> { (0..count).map(|_| rng.below(9) as f32 - 4.0).collect() };
        let (own, values, seed) = (whole(extent * width), whole(n * width), whole(extent * width));
        for (how, include) in [Sum, Mean, Amax, Amin].into_iter().flat_map(|how| [(how, true), (how, false)])
        {
            let leaf = |data: &[f32], rows: usize| {
                Tensor::from_slice(data, [rows, width], device)?.to_dtype(dtype)?.to_leaf()
            };
            let (x, y) = (leaf(&own, extent)?, leaf(&values, n)?);
            let rows = at.unsqueeze(1)?.expand([n, width])?;
            let out = x.scatter_reduce(0, &rows, &y, how, include)?;
            out.backward_with(&Tensor::from_slice(&seed, [extent, width], device)?.to_dtype(dtype)?)?;
            // Terms of each element, and the same of the old values.
            let mut terms: Vec<Vec<f32>> = vec![Vec::new(); extent * width];
            for k in 0..n * width {
                let Some(row) = row_of(k / width) else { continue };
                terms[row * width + k % width].push(values[k]);
            }
            let is_named: Vec<bool> = terms.iter().map(|terms| !terms.is_empty()).collect();
            let keeps = |e: usize| include || !is_named[e];
            let reduced: Vec<f64> = (0..extent * width)
                .map(|e| {
                    let all = terms[e].iter().copied().chain(keeps(e).then_some(own[e])).map(f64::from);
                    let count = terms[e].len() + usize::from(keeps(e));
                    match how {
                        Amax => all.fold(f64::MIN, f64::max),
                        Amin => all.fold(f64::MAX, f64::min),
                        Mean => all.sum::<f64>() / count as f64,
                        _ => all.sum(),
                    }
                })
                .collect();
            // The gradient of each term, or of each extreme.
            let share_of = |e: usize| {
                let is_tie = |v: &f32| f64::from(*v) == reduced[e];
                let ties = terms[e].iter().filter(|v| is_tie(v)).count() + usize::from(is_tie(&own[e]));
                let terms = terms[e].len() + usize::from(keeps(e));
                f64::from(seed[e])
                    / match how {
                        Sum => 1.0,
                        Mean => terms as f64,
                        _ => ties as f64,
                    }
            };
            let shares: Vec<f64> = (0..extent * width).map(share_of).collect();
            let grad = |e: usize, value: f32| match how {
                Amax | Amin if f64::from(value) != reduced[e] => 0.0,
                _ => shares[e],
            };
            let own_grad: Vec<f64> =
                (0..extent * width).map(|e| if keeps(e) { grad(e, own[e]) } else { 0.0 }).collect();
            let value_grad: Vec<f64> = (0..n * width)
                .map(|k| row_of(k / width).map_or(0.0, |row| grad(row * width + k % width, values[k])))
                .collect();
            // Whole numbers up to 256 are exact in bf16, and longer sums are rounded once.
            let digits = if dtype.size() == 2 { 5e-3 } else { 1e-6 };
            let case = || format!("{dtype}, {width} wide, {how:?}, {include}");
            ensure_close(&out.to_f64s()?, &reduced, digits, 0.0).with_context(case)?;
            let grad_of =
                |t: &Tensor| -> Result<Vec<f64>> { Ok(t.grad().context("no gradient")?.to_f64s()?) };
            ensure_close(&grad_of(&x)?, &own_grad, digits, 0.0).with_context(|| format!("x, {}", case()))?;
            ensure_close(&grad_of(&y)?, &value_grad, digits, 0.0)
                .with_context(|| format!("y, {}", case()))?;
        }
    }
    Ok(())
}

fn long_scatters_are_summed_in_order(device: &Device) -> Result<()> {
    // Few rows with many indices, some of them negative or out of range.
    let (n, extent) = (50_000, 300);
    let mut rng = SplitMix64(3);
    let index: Vec<i64> = (0..n).map(|_| rng.below(2 * extent + 2) as i64 - extent as i64).collect();
    let values: Vec<f32> = (0..2 * n).map(|_| rng.below(1000) as f32 / 7.0 - 60.0).collect();
    let at = Tensor::from_slice(&index, [n, 1], device)?;
    let src = Tensor::from_slice(&values, [n, 2], device)?;
    let mut expected = vec![1.0f32; 2 * extent];
    let mut last = expected.clone();
    // `index_put` counts negative indices from the end, as PyTorch documents; elsewhere they are ignored.
    let mut wrapped = expected.clone();
    for (i, &to) in index.iter().enumerate() {
        for k in 0..2 {
            let value = values[2 * i + k];
            if (0..extent as i64).contains(&to) {
                expected[2 * to as usize + k] += value;
                last[2 * to as usize + k] = value;
            }
            let to = if to < 0 { to + extent as i64 } else { to } as usize;
            if let Some(sum) = wrapped.get_mut(2 * to + k) {
                *sum += value;
            }
        }
    }
    let x = Tensor::ones([extent, 2], DType::F32, device)?;
    for at in [at.broadcast_to([n, 2])?, at.broadcast_to([n, 2])?.copy()?] {
        ensure!(x.scatter_add(0, &at, &src)?.to_vec::<f32>()? == expected, "sums are made in order");
        ensure!(x.scatter(0, &at, &src)?.to_vec::<f32>()? == last, "the last one stays");
    }
    let flat = at.reshape([-1])?;
    ensure!(x.index_put(&[Some(&flat)], &src, true)?.to_vec::<f32>()? == wrapped, "index_put");
    for dtype in compute_dtypes(device).filter(|&d| d != DType::F32) {
        // Sums small enough for every type.
        let (x, one) = (Tensor::zeros([70_000], dtype, device)?, Tensor::ones([70_000], dtype, device)?);
        let at = Tensor::arange(0.0, 70_000.0, 1.0, DType::I32, device)?.floor_divide(2)?;
        let sum = x.scatter_add(0, &at, &one)?.to_f64s()?;
        let two = if dtype == DType::Bool { 1.0 } else { 2.0 };
        ensure!(sum.iter().enumerate().all(|(i, &s)| s == if i < 35_000 { two } else { 0.0 }), "{dtype}");
    }
    Ok(())
}

fn indices_and_masks_select(device: &Device) -> Result<()> {
    let x = iota(&[3, 4, 5], DType::F32, device)?;
    let (i, j) =
        (Tensor::from_slice(&[2i64, -1, 0], [3], device)?, Tensor::from_slice(&[1i32, 4], [2, 1], device)?);
    let got = x.index(&[None, None, Some(&j)])?;
    ensure!(got.shape() == [3, 4, 2, 1]);
    ensure_values(&got.select(0, 1)?.select(0, 2)?, &[31.0, 34.0])?;
    // Adjacent indices put their dimensions in the place of the indexed ones, otherwise in front.
    let got = x.index(&[Some(&i), Some(&j)])?;
    ensure!(got.shape() == [2, 3, 5]);
    let got = x.index(&[Some(&i), None, Some(&j)])?;
    ensure!(got.shape() == [2, 3, 4]);
    ensure_values(&got.select(0, 1)?.select(0, 0)?, &[44.0, 49.0, 54.0, 59.0])?;
    let mask = x.select(2, 0)?.gt(20.0)?;
    ensure!(x.index(&[Some(&mask)])?.shape() == [7, 5]);
    let repeats = Tensor::from_slice(&[2i64, 0, 3, 1], [4], device)?;
    for size in [None, Some(6)] {
        let got = x.select(0, 0)?.select(1, 1)?.repeat_interleave_by(&repeats, -1, size)?;
        ensure_values(&got, &[1.0, 1.0, 11.0, 11.0, 11.0, 16.0])?;
    }
    ensure!(x.repeat_interleave_by(&repeats.narrow(0, 0, 1)?, 2, None)?.shape() == [3, 4, 10]);
    ensure_message(
        x.repeat_interleave_by(&Tensor::from_slice(&[2i64, -3, 0, 1], [4], device)?, 1, None),
        "repeat_interleave_by: -3 is not a number of repeats; none is negative",
    )?;
    for accumulate in [false, true] {
        let one = Tensor::full((), 100.0, DType::F32, device)?;
        let put = x.index_put(&[None, Some(&i)], &one, accumulate)?;
        let expected: Vec<f64> = (0..60)
            .map(|k| match k / 5 % 4 {
                1 => f64::from(k),
                2 | 3 | 0 if accumulate => f64::from(k) + 100.0,
                _ => 100.0,
            })
            .collect();
        ensure_values(&put, &expected)?;
        let put = x.index_put(&[Some(&mask)], &one, accumulate)?;
        ensure!(put.to_f64s()?[24] == 24.0 && put.to_f64s()?[25] == if accumulate { 125.0 } else { 100.0 });
    }
    Ok(())
}

fn values_are_put_by_a_mask(device: &Device) -> Result<()> {
    let x = Tensor::arange(0.0, 24.0, 1.0, DType::F32, device)?.reshape([2, 3, 4])?;
    let mask = Tensor::from_slice(&[1u8, 0, 1], [3], device)?.to_dtype(DType::Bool)?;
    let flags = [true, false, true];
    let row = |k: usize| k / 4 % 3;
    for accumulate in [false, true] {
        let base = |k: usize| if accumulate { k as f64 } else { 0.0 };
        // A value for each selected row, in order; and one for all of them.
        for (rows, shape) in [(2usize, vec![2, 1]), (1, vec![1, 1]), (1, vec![4]), (2, vec![2, 2, 4])] {
            let n: usize = shape.iter().product();
            let values = Tensor::arange(100.0, 100.0 + n as f64, 1.0, DType::F32, device)?
                .reshape(shape.iter().map(|&n| n as isize).collect::<Vec<_>>())?;
            let whole = values.broadcast_to([2, rows, 4])?.to_f64s()?;
            let expected: Vec<f64> = (0..24)
                .map(|k| match (flags[row(k)], rows) {
                    (false, _) => k as f64,
                    (true, 1) => base(k) + whole[k / 12 * 4 + k % 4],
                    (true, _) => base(k) + whole[k / 12 * 8 + row(k) / 2 * 4 + k % 4],
                })
                .collect();
            let (leaf, source) = (x.to_leaf()?, values.to_leaf()?);
            let put = leaf.index_put(&[None, Some(&mask)], &source, accumulate)?;
            ensure_values(&put.detach(), &expected).with_context(|| format!("{shape:?}"))?;
            put.sum_all()?.backward()?;
            let own = leaf.grad().context("a gradient")?.to_f64s()?;
            let kept = (0..24).map(|k| f64::from(u8::from(accumulate || !flags[row(k)]))).collect::<Vec<_>>();
            ensure!(own == kept, "{own:?}");
            let share = source.grad().context("a gradient")?.to_f64s()?;
            ensure!(share == vec![16.0 / n as f64; n], "{share:?}");
        }
    }
    // Any other number of values than the mask selects is an error.
    let line = Tensor::zeros([3], DType::I32, device)?;
    let updates = |n: i32| Tensor::arange(1.0, f64::from(n + 1), 1.0, DType::I32, device);
    let put = |n: i32| line.index_put(&[Some(&mask)], &updates(n)?, false);
    ensure!(put(2)?.to_vec::<i32>()? == [1, 0, 2] && put(1)?.to_vec::<i32>()? == [1, 0, 1]);
    ensure!(put(3).is_err() && put(0).is_err(), "three values, or none, for two elements");
    Ok(())
}
