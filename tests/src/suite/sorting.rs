//! Sorting, selection of the first elements and search, compared with plain loops on the host.

use std::cmp::Ordering;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::{Error, Result as ForebayResult};
use forebay::ops::{Interpolation, ScatterReduce, SearchSortedOptions};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_message, ensure_same_bits, ensure_values, iota};
use super::{skip, tests};

tests![
    every_type_and_size_sorts,
    any_dimension_and_strides_sort,
    nan_sorts_last,
    sixty_four_bit_types_sort_by_all_bits,
    topk_equals_a_sort,
    selections_equal_a_sort,
    selections_find_neighbours_of_one_thread,
    selections_of_many_chunks,
    a_million_elements_sort,
    more_rows_than_a_grid_has,
    searchsorted_finds_positions,
    captured_steps_sort,
    empty_and_zero_dimensional_tensors,
    invalid_arguments_are_errors,
];

/// Orders NaN after all numbers.
fn ascending(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// Returns the stable sorted order of a row.
fn order(line: &[f64], descending: bool) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..line.len()).collect();
    indices
        .sort_by(|&a, &b| if descending { ascending(line[b], line[a]) } else { ascending(line[a], line[b]) });
    indices
}

/// Returns values with repetitions, some of them negative for signed types.
pub(super) fn mixed(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut rng = SplitMix64(shape.iter().sum::<usize>() as u64);
    let signed = !matches!(dtype, DType::U8 | DType::U32 | DType::Bool);
    let values: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|_| {
            let v = rng.below(200) as f32;
            if signed { (v - 100.0) / if dtype.is_float() { 4.0 } else { 1.0 } } else { v }
        })
        .collect();
    Ok(Tensor::from_slice(&values, shape, device)?.to_dtype(dtype)?)
}

/// Compares a sort of rows in the last dimension with the host's.
fn check(x: &Tensor, descending: bool) -> Result<()> {
    let n = x.shape().last().copied().unwrap_or(1);
    let (value, index) = x.sort(-1, descending)?;
    ensure!(value.shape() == x.shape() && index.shape() == x.shape() && index.dtype() == DType::I64);
    let (all, values, indices) = (x.to_f64s()?, value.to_f64s()?, index.to_vec::<i64>()?);
    for (r, line) in all.chunks(n).enumerate() {
        let expected = order(line, descending);
        for (i, &at) in expected.iter().enumerate() {
            let (v, p) = (values[r * n + i], indices[r * n + i]);
            ensure!(p == at as i64, "line {r}, index {i} is {p}, expected {at}");
            let good = v.to_bits() == line[at].to_bits() || (v.is_nan() && line[at].is_nan());
            ensure!(good, "line {r}, value {i} is {v}, expected {}", line[at]);
        }
    }
    ensure!(x.argsort(-1, descending)?.to_vec::<i64>()? == indices, "argsort differs");
    Ok(())
}

fn every_type_and_size_sorts(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        for n in [1, 2, 3, 7, 8, 255, 257, 600, 1024, 1025, 2049] {
            for descending in [false, true] {
                let x = mixed(&[3, n], dtype, device)?;
                check(&x, descending).with_context(|| format!("{dtype}, {n} elements, {descending}"))?;
            }
        }
    }
    for n in [2048, 4096, 4097, 10_000] {
        check(&mixed(&[2, n], DType::F32, device)?, false).with_context(|| format!("{n} elements"))?;
        check(&mixed(&[n], DType::BF16, device)?, true).with_context(|| format!("{n} elements"))?;
    }
    check(&mixed(&[1000, 5], DType::I32, device)?, false)
}

fn any_dimension_and_strides_sort(device: &Device) -> Result<()> {
    let x = mixed(&[4, 6, 5], DType::F32, device)?;
    for view in [x.clone(), x.transpose(0, 2)?, x.narrow(1, 2, 3)?, x.narrow(1, 1, 1)?.expand([-1, 7, -1])?] {
        for dim in -3..3isize {
            let (value, index) = view.sort(dim, true)?;
            let line = |t: &Tensor| -> Result<Tensor> { Ok(t.transpose(dim, -1)?.copy()?) };
            let (values, indices) = line(&view)?.sort(-1, true)?;
            ensure_same_bits(&line(&value)?, &values)
                .with_context(|| format!("{:?} along {dim}", view.shape()))?;
            ensure_same_bits(&line(&index)?, &indices)
                .with_context(|| format!("{:?} along {dim}", view.shape()))?;
        }
    }
    let bytes = mixed(&[23], DType::U8, device)?;
    for start in 0..5 {
        check(&bytes.narrow(0, start, 17)?, false)?;
    }
    check(&mixed(&[70, 3000], DType::F16, device)?.t()?.narrow(1, 3, 2)?.t()?, false)
}

fn nan_sorts_last(device: &Device) -> Result<()> {
    let nan = f32::from_bits(0xffc0_0001);
    let odd = [f32::NAN, 1.0, -0.0, f32::INFINITY, 0.0, nan, -1.0, f32::NEG_INFINITY, -0.0, f32::MAX, 1.0];
    let tiny = [f32::MIN_POSITIVE, -f32::MIN_POSITIVE];
    let line: Vec<f32> = odd.into_iter().chain(tiny).collect();
    let long: Vec<f32> = (0..5000).map(|i| line[i * 7 % line.len()]).collect();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        for values in [&line, &long] {
            let x = Tensor::from_slice(values, [values.len()], device)?.to_dtype(dtype)?;
            check(&x, false).with_context(|| format!("{dtype}"))?;
            check(&x, true).with_context(|| format!("{dtype}, descending"))?;
        }
    }
    Ok(())
}

fn sixty_four_bit_types_sort_by_all_bits(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(64);
    let mut values: Vec<i64> = (0..2500).map(|_| rng.next() as i64).collect();
    values.extend([0, -1, 1, i64::MAX, i64::MIN, 1 << 32, -(1 << 32), (1 << 32) + 1]);
    let x = Tensor::from_slice(&values, [values.len()], device)?;
    let (sorted, index) = x.sort(0, false)?;
    let at = index.to_vec::<i64>()?;
    values.sort_unstable();
    ensure!(sorted.to_vec::<i64>()? == values);
    ensure!(x.gather(0, &index)?.to_vec::<i64>()? == values && at.len() == values.len());
    let high = Tensor::from_slice(&[0i64, 1 << 40, 0, -(1 << 33)], [4], device)?;
    ensure_values(&high.nonzero()?, &[1.0, 3.0])?;
    let found = sorted.searchsorted(&Tensor::from_slice(&[1i64 << 32], [1], device)?, &Default::default())?;
    let expected = values.iter().filter(|&&v| v < 1 << 32).count();
    ensure_values(&found, &[expected as f64])
}

fn topk_equals_a_sort(device: &Device) -> Result<()> {
    for (n, k) in [(9, 4), (9, 9), (9, 0), (300, 1), (5000, 7), (5000, 3000), (20_000, 50)] {
        for largest in [false, true] {
            let x = mixed(&[2, n], DType::F32, device)?;
            let (value, index) = x.topk(k, 1, largest)?;
            let (sorted, indices) = x.sort(1, largest)?;
            ensure_same_bits(&value, &sorted.narrow(1, 0, k)?.copy()?)
                .with_context(|| format!("{k} of {n}"))?;
            ensure_same_bits(&index, &indices.narrow(1, 0, k)?.copy()?)
                .with_context(|| format!("{k} of {n}"))?;
        }
    }
    let columns = mixed(&[50, 3], DType::I32, device)?;
    ensure_same_bits(&columns.topk(5, 0, true)?.0, &columns.sort(0, true)?.0.narrow(0, 0, 5)?.copy()?)
}

/// Compares the first `k` elements along `dim` and the k-th smallest with a sort.
fn check_selection(x: &Tensor, k: usize, dim: isize) -> Result<()> {
    let copy =
        |t: &Tensor, start: usize, n: usize| -> Result<Tensor> { Ok(t.narrow(dim, start, n)?.copy()?) };
    for largest in [false, true] {
        let (value, index) = x.topk(k, dim, largest)?;
        let (sorted, indices) = x.sort(dim, largest)?;
        ensure_same_bits(&value, &copy(&sorted, 0, k)?).with_context(|| format!("{k}, largest {largest}"))?;
        ensure_same_bits(&index, &copy(&indices, 0, k)?)
            .with_context(|| format!("{k}, largest {largest}"))?;
        if !largest {
            let (value, index) = x.kthvalue(k, dim, true)?;
            ensure_same_bits(&value, &copy(&sorted, k - 1, 1)?).with_context(|| format!("number {k}"))?;
            ensure_same_bits(&index, &copy(&indices, k - 1, 1)?).with_context(|| format!("number {k}"))?;
        }
    }
    Ok(())
}

fn selections_equal_a_sort(device: &Device) -> Result<()> {
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d)) {
        for (rows, n, k) in [(70, 9, 1), (5, 100, 4), (3, 1024, 20), (3, 1000, 7), (2, 2300, 128)] {
            let x = mixed(&[rows, n], dtype, device)?;
            check_selection(&x, k, 1).with_context(|| format!("{dtype}, {k} of {n}"))?;
        }
    }
    for x in [
        mixed(&[4, 130, 6], DType::F32, device)?,
        mixed(&[130, 6, 4], DType::BF16, device)?.narrow(0, 1, 97)?,
    ] {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let view = x.permute(order)?;
            let dim = (0..3).max_by_key(|&d| view.shape()[d]).unwrap_or(0) as isize;
            check_selection(&view, 5, dim).with_context(|| format!("{:?}", view.shape()))?;
            check_selection(&view.select(dim, 3)?.unsqueeze(0)?.expand([90, -1, -1])?, 11, 0)?;
        }
    }
    let odd = [f32::NAN, -0.0, f32::INFINITY, 0.0, f32::from_bits(0xffc0_0001), f32::NEG_INFINITY, 1.0, -1.0];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let values: Vec<f32> = (0..1200).map(|i| odd[i * 5 % odd.len()]).collect();
        if device.supports_dtype(dtype) {
            let x = Tensor::from_slice(&values, [1200], device)?.to_dtype(dtype)?;
            for k in [1, 60, 128] {
                check_selection(&x, k, 0).with_context(|| format!("{dtype} with NaN"))?;
            }
            check_selection(&x.mul(f64::NAN)?, 30, 0).with_context(|| format!("{dtype}, all NaN"))?;
        }
    }
    let mut rng = SplitMix64(65);
    let words: Vec<i64> = (0..1500).map(|i| (rng.next() as i64) >> [0, 20, 40, 60][i % 4]).collect();
    check_selection(&Tensor::from_slice(&words, [1500], device)?, 40, 0)?;
    check_selection(&Tensor::full([1500], u32::MAX, DType::U32, device)?, 40, 0)
}

fn selections_find_neighbours_of_one_thread(device: &Device) -> Result<()> {
    // Elements of one thread lie 8 to 256 positions from each other.
    for (n, k) in [(1024usize, 20usize), (1024, 100), (4096, 40), (200, 4), (9000, 100)] {
        for step in [8, 16, 32, 64, 128, 256] {
            let values: Vec<i32> =
                (0..n as i32).map(|i| if i % step == 5 { -i } else { i * 7 % 100 }).collect();
            let x = Tensor::from_slice(&values, [n], device)?;
            check_selection(&x, k, 0).with_context(|| format!("{k} of {n}, each {step}"))?;
        }
        for x in [Tensor::zeros([n], DType::F32, device)?, iota(&[n], DType::F32, device)?] {
            check_selection(&x, k, 0).with_context(|| format!("{k} of {n}"))?;
        }
    }
    Ok(())
}

fn selections_of_many_chunks(device: &Device) -> Result<()> {
    for (rows, n, k) in [(3, 30_001, 50), (1, 131_072, 128), (2, 8193, 3)] {
        check_selection(&mixed(&[rows, n], DType::F32, device)?, k, 1)
            .with_context(|| format!("{k} of {n}"))?;
        check_selection(&mixed(&[n, rows], DType::I64, device)?, k, 0)
            .with_context(|| format!("{k} of {n} in columns"))?;
    }
    Ok(())
}

fn a_million_elements_sort(device: &Device) -> Result<()> {
    let n = (1 << 20) + 7;
    let mut rng = SplitMix64(20);
    let values: Vec<f32> = (0..n).map(|_| (rng.below(1 << 19) as f32) - 1e5).collect();
    let x = Tensor::from_slice(&values, [n], device)?;
    let (sorted, index) = x.sort(0, false)?;
    let (sorted, index) = (sorted.to_vec::<f32>()?, index.to_vec::<i64>()?);
    for i in 0..n {
        ensure!(sorted[i].to_bits() == values[index[i] as usize].to_bits(), "element {i}");
        let rises = i == 0 || sorted[i - 1] < sorted[i] || index[i - 1] < index[i];
        ensure!(rises && (i == 0 || sorted[i - 1] <= sorted[i]), "elements {i} and the one before it");
    }
    let few = x.topk(20, 0, true)?.0.to_vec::<f32>()?;
    ensure!(few.iter().eq(sorted.iter().rev().take(20)), "{few:?}");
    let (least, at) = x.topk(100, 0, false)?;
    ensure!(least.to_vec::<f32>()? == sorted[..100] && at.to_vec::<i64>()? == index[..100], "{least:?}");
    let middle = x.median(0, false)?.0.to_vec::<f32>()?;
    ensure!(middle == [sorted[(n - 1) / 2]], "{middle:?}");
    let chosen = x.masked_select(&x.gt(0.0)?)?.to_vec::<f32>()?;
    ensure!(values.iter().filter(|&&v| v > 0.0).eq(&chosen), "{} elements are above zero", chosen.len());
    Ok(())
}

fn more_rows_than_a_grid_has(device: &Device) -> Result<()> {
    if device.info().software {
        return skip("most of a minute on a processor");
    }
    // 128 rows of up to four elements a workgroup, 65,535 workgroups a dimension.
    let rows = (128 << 16) + 1;
    let x = Tensor::from_slice(&[3u8, 9, 5], [3], device)?.broadcast_to([rows, 3])?;
    let index = x.topk(1, 1, true)?.1.to_vec::<i64>()?;
    ensure!(index.len() == rows && index.iter().all(|&p| p == 1), "all lines are one");
    Ok(())
}

fn searchsorted_finds_positions(device: &Device) -> Result<()> {
    // Comparisons with NaN are false, so the search continues to the right.
    let line = Tensor::from_slice(&[1.0f32, f32::NAN], [2], device)?;
    let wanted = Tensor::from_slice(&[f32::NAN, 2.0, 0.5], [3], device)?;
    ensure_values(
        &line.searchsorted(&wanted, &SearchSortedOptions { out_int32: true, ..Default::default() })?,
        &[2.0, 2.0, 2.0],
    )?;
    for dtype in DType::ALL.into_iter().filter(|&d| device.supports_dtype(d) && d != DType::Bool) {
        let (x, values) = (mixed(&[3, 40], dtype, device)?, mixed(&[3, 9], dtype, device)?);
        let (sorted, sorter) = x.sort(1, false)?;
        let (all, seen) = (x.to_f64s()?, values.to_f64s()?);
        for right in [false, true] {
            let expected: Vec<f64> = (0..27)
                .map(|i| {
                    let line = &all[i / 9 * 40..][..40];
                    line.iter().filter(|&&v| v < seen[i] || (right && v == seen[i])).count() as f64
                })
                .collect();
            let found = sorted.searchsorted(&values, &SearchSortedOptions { right, ..Default::default() })?;
            ensure_values(&found, &expected).with_context(|| format!("{dtype}, {right}"))?;
            let found = x.searchsorted(
                &values.t()?.copy()?.t()?,
                &SearchSortedOptions { out_int32: true, right, sorter: Some(&sorter) },
            )?;
            ensure!(found.dtype() == DType::I32);
            ensure_values(&found, &expected).with_context(|| format!("{dtype}, {right}, by a sorter"))?;
        }
    }
    let limits = Tensor::from_slice(&[1.0f32, 3.0, 5.0], [3], device)?;
    let x = Tensor::from_slice(&[3.0f32, f32::NAN, -7.0, 9.0], [2, 2], device)?;
    ensure_values(&x.bucketize(&limits, &Default::default())?, &[1.0, 3.0, 0.0, 3.0])?;
    ensure_values(
        &x.bucketize(&limits, &SearchSortedOptions { right: true, ..Default::default() })?,
        &[2.0, 3.0, 0.0, 3.0],
    )?;
    ensure_values(
        &x.bucketize(
            &limits.narrow(0, 0, 0)?,
            &SearchSortedOptions { out_int32: true, right: true, ..Default::default() },
        )?,
        &[0.0; 4],
    )
}

fn captured_steps_sort(device: &Device) -> Result<()> {
    let x = mixed(&[2, 5000], DType::F32, device)?;
    let at = Tensor::from_slice(&(0..5000).map(|i| i % 7).collect::<Vec<i32>>(), [5000], device)?;
    let once = || {
        let (value, index) = x.sort(1, true)?;
        let middle = x.quantile(0.3, 1, true, Interpolation::Linear)?;
        let sums = x.index_put(&[None, Some(&at)], &value, true)?;
        ForebayResult::Ok((value.sub(&middle)?, index, sums))
    };
    let mut step = device.capture(once)?;
    for seed in [1, 2] {
        x.copy_(&mixed(&[2 * seed, 5000], DType::F32, device)?.narrow(0, 0, 2)?)?;
        let (replayed, eager) = (step.replay()?, once()?);
        ensure_same_bits(&replayed.0, &eager.0)?;
        ensure_same_bits(&replayed.1, &eager.1)?;
        ensure_same_bits(&replayed.2, &eager.2)?;
    }
    let mask = x.gt(0.0)?;
    for result in [device.capture(|| x.masked_select(&mask)).err(), device.capture(|| mask.nonzero()).err()] {
        ensure!(matches!(result, Some(Error::Capture { .. })), "the host reads a number: {result:?}");
    }
    Ok(())
}

fn empty_and_zero_dimensional_tensors(device: &Device) -> Result<()> {
    let none = Tensor::empty([0], DType::F32, device)?;
    ensure!(none.median_all()?.item()?.is_nan() && none.nanmedian_all()?.item()?.is_nan());
    let bytes = Tensor::empty([0], DType::U8, device)?;
    ensure!(Tensor::ones([5], DType::F32, device)?.gather(0, &bytes)?.shape() == [0]);
    let none = Tensor::zeros([2, 0, 3], DType::F32, device)?;
    for dim in -3..3 {
        ensure!(none.sort(dim, false)?.0.shape() == [2, 0, 3] && none.argsort(dim, true)?.numel() == 0);
    }
    ensure!(none.topk(0, 1, true)?.1.shape() == [2, 0, 3] && none.topk(2, 2, true)?.0.shape() == [2, 0, 2]);
    ensure!(none.median(0, false)?.0.shape() == [0, 3] && none.nonzero()?.shape() == [0, 3]);
    ensure!(none.masked_select(&none.to_dtype(DType::Bool)?)?.shape() == [0]);
    let index = Tensor::zeros([2, 0, 3], DType::I64, device)?;
    ensure!(none.scatter_reduce(1, &index, &none, ScatterReduce::Mean, true)?.numel() == 0);
    let one = Tensor::full((), 4.0, DType::F32, device)?;
    let (value, position) = one.sort(0, true)?;
    ensure!(value.rank() == 0 && value.item()? == 4.0 && position.item()? == 0.0);
    ensure!(one.topk(1, -1, false)?.0.rank() == 0 && one.kthvalue(1, 0, false)?.0.item()? == 4.0);
    ensure!(one.median(0, true)?.1.rank() == 0 && one.median_all()?.item()? == 4.0);
    ensure!(one.quantile(0.7, 0, true, Interpolation::Linear)?.rank() == 0);
    ensure!(one.nonzero()?.shape() == [1, 0] && one.nonzero_tuple()?.len() == 1);
    ensure_values(&one.masked_select(&one.gt(3.0)?)?, &[4.0])?;
    ensure_values(&Tensor::zeros([9], DType::Bool, device)?.nonzero()?, &[])
}

fn invalid_arguments_are_errors(device: &Device) -> Result<()> {
    let x = Tensor::ones([2, 3], DType::F32, device)?;
    ensure_message(x.topk(4, 1, true), "topk: asks for 4 of 3 elements along dimension 1")?;
    ensure_message(
        x.kthvalue(0, 1, true),
        "kthvalue: asks for number 0, counted from 1, of 3 elements along dimension 1",
    )?;
    ensure_message(
        x.narrow(1, 0, 0)?.median(1, false),
        "median: dimension 1 has no elements to choose from; got [2, 0]",
    )?;
    ensure_message(
        x.quantile(1.5, (), false, Interpolation::Linear),
        "quantile: 1.5 is not a quantile; they lie between 0 and 1",
    )?;
    for (op, made) in [
        ("masked_select", x.masked_select(&x)),
        ("masked_fill", x.masked_fill(&x, 1.0)),
        ("masked_fill_", x.masked_fill_(&x, 1.0).map(|()| x.clone())),
        ("where", x.where_(&x, 1.0)),
    ] {
        ensure_message(
            made,
            &format!("{op}: does not take f32; the mask is bool; compare, or cast with `to_dtype`"),
        )?;
    }
    let short = Tensor::ones([4], DType::F32, device)?;
    ensure_message(
        x.searchsorted(&short, &Default::default()),
        "searchsorted: the sorted sequence has one dimension, or all but the last agree with those of the values; got \
         [2, 3] and [4]",
    )?;
    ensure_message(
        x.index_put(&[None, None, None], &short, true),
        "index_put: 3 indices for 2 dimensions; it takes one at least, and no more than there are",
    )?;
    let mask = Tensor::zeros([3], DType::Bool, device)?;
    ensure_message(
        x.index(&[Some(&mask)]),
        "index: a mask has the extents of the dimensions that it stands for, here from 0 on; got [2, 3] and [3]",
    )?;
    let index = Tensor::zeros([2, 4], DType::I64, device)?;
    ensure_message(
        x.scatter_reduce(1, &index, &x, ScatterReduce::Sum, true),
        "scatter_reduce: the source is at least as large as the index; got [2, 3] and [2, 4]",
    )?;
    let leaf = x.to_leaf()?;
    for result in [leaf.argsort(0, false)?, leaf.nonzero()?, leaf.bucketize(&short, &Default::default())?] {
        ensure!(!result.requires_grad(), "{result:?} has a history");
    }
    Ok(())
}
