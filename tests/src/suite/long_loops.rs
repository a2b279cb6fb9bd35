//! Rows and runs longer than the loop limit of kernels: drivers may stop loops after 65,535 iterations.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::{EmbeddingBagMode, EmbeddingBagOptions, ScatterReduce};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_values};
use super::tests;

tests![
    cumulative_sums_of_millions,
    cumulative_sums_along_strided_dimensions,
    cumulative_extremes_and_products_of_long_rows,
    cumulative_sums_at_the_boundaries_of_chunks,
    one_index_a_hundred_thousand_times,
    indices_of_any_distribution_are_summed,
    runs_of_any_length_and_position_are_summed_once,
    every_reduction_of_long_runs,
    long_runs_are_deterministic,
    values_are_filled_and_put_at_long_indices,
    values_of_any_frequency_are_counted,
    bags_of_any_length,
];

fn random_ints(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = SplitMix64(seed);
    (0..n).map(|_| rng.below(5) as f32 - 2.0).collect()
}

/// Returns running sums of rows.
fn running(values: &[f32], row: usize) -> Vec<f64> {
    let rows = values.chunks(row).flat_map(|row| {
        row.iter().scan(0.0, |sum, &v| {
            *sum += f64::from(v);
            Some(*sum)
        })
    });
    rows.collect()
}

fn cumulative_sums_of_millions(device: &Device) -> Result<()> {
    // So many elements that partial sums of chunks need two further levels.
    let n = 4096 * 2049 + 77;
    let values = random_ints(n, 1);
    let x = Tensor::from_slice(&values, [n], device)?.to_leaf()?;
    let sums = x.cumsum(0)?;
    ensure_values(&sums, &running(&values, n)).context("one row")?;
    // Each gradient is the number of later elements.
    sums.sum_all()?.backward()?;
    let grad = x.grad().context("no gradient")?.to_f64s()?;
    ensure!(grad.iter().enumerate().all(|(i, &g)| g == (n - i) as f64), "the gradient of one row");
    let n = 100_003;
    ensure_values(
        &x.detach().narrow(0, 5, 3 * n)?.reshape([3, n])?.cumsum(1)?,
        &running(&values[5..5 + 3 * n], n),
    )
    .context("three rows")
}

fn cumulative_sums_along_strided_dimensions(device: &Device) -> Result<()> {
    let (n, width) = (3001, 40);
    let values = random_ints(2 * n * width, 2);
    let x = Tensor::from_slice(&values, [2, n, width], device)?;
    let turned = |t: &Tensor| -> Result<Tensor> { Ok(t.transpose(1, 2)?.contiguous()?) };
    let sideways = turned(&x)?;
    let expected = running(&sideways.to_vec::<f32>()?, n);
    ensure_values(&turned(&x.cumsum(1)?)?, &expected)?;
    // Views are read with their strides.
    ensure_values(&turned(&sideways.transpose(1, 2)?.cumsum(1)?)?, &expected)
}

fn cumulative_extremes_and_products_of_long_rows(device: &Device) -> Result<()> {
    let n = 70_001;
    let mut rng = SplitMix64(3);
    let mut values: Vec<f32> = (0..n).map(|i| (rng.below(1000) + i / 10) as f32).collect();
    values[69_000] = f32::NAN;
    let x = Tensor::from_slice(&values, [n], device)?.to_leaf()?;
    let (value, index) = x.cummax(0)?;
    let (mut best, mut expected, mut indices) = (0, vec![], vec![]);
    for (i, v) in values.iter().enumerate() {
        if v.is_nan() || v >= &values[best] {
            best = i;
        }
        expected.push(f64::from(values[best]));
        indices.push(best as i64);
    }
    ensure_values(&value, &expected)?;
    ensure!(index.to_vec::<i64>()? == indices, "the indices of the largest so far");
    // Each element's gradient counts how long it remains the maximum.
    value.sum_all()?.backward()?;
    let mut counts = vec![0.0; n];
    indices.iter().for_each(|&at| counts[at as usize] += 1.0);
    ensure_values(&x.grad().context("no gradient")?, &counts)?;

    // Factors of ±1, and two zeros in different chunks: the gradient must not divide.
    let mut factors: Vec<f32> = (0..n).map(|_| if rng.below(2) == 0 { 1.0 } else { -1.0 }).collect();
    factors[66_000] = 0.0;
    let x = Tensor::from_slice(&factors, [n], device)?.to_leaf()?;
    let product = x.cumprod(0)?;
    let running: Vec<f64> = factors
        .iter()
        .scan(1.0, |p, &v| {
            *p *= f64::from(v);
            Some(*p + 0.0)
        })
        .collect();
    let got: Vec<f64> = product.to_f64s()?.into_iter().map(|p| p + 0.0).collect();
    ensure!(got == running, "running products");
    product.sum_all()?.backward()?;
    let grad = x.grad().context("no gradient")?.to_f64s()?;
    // d sum / d x[i] = (product before i) times (sum over k from i on of the products of x[i + 1] to x[k]).
    let mut after = 0.0;
    let mut tail = vec![0.0; n];
    for i in (0..n).rev() {
        after = 1.0 + factors.get(i + 1).map_or(0.0, |&v| f64::from(v) * after);
        tail[i] = after;
    }
    let mut before = 1.0;
    for i in 0..n {
        ensure!(grad[i] == before * tail[i], "gradient {i} is {}, expected {}", grad[i], before * tail[i]);
        before *= f64::from(factors[i]);
    }
    Ok(())
}

fn cumulative_sums_at_the_boundaries_of_chunks(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(4);
    for n in [8191, 8192, 8193, 12_287, 12_288, 12_289] {
        let values = random_ints(n, rng.next());
        let x = Tensor::from_slice(&values, [n], device)?;
        ensure_values(&x.cumsum(0)?, &running(&values, n)).with_context(|| format!("{n} elements"))?;
    }
    // Running sums of integers, through `unique_consecutive`.
    let n = 20_001;
    let values: Vec<i32> = (0..n).map(|i| i * i / 3000 % 7).collect();
    let found = Tensor::from_slice(&values, [n as usize], device)?.unique_consecutive()?;
    let mut number = 0;
    let steps = values.windows(2).map(|pair| {
        number += i64::from(pair[0] != pair[1]);
        number
    });
    let expected: Vec<i64> = std::iter::once(0).chain(steps).collect();
    ensure!(found.inverse_indices.to_vec::<i64>()? == expected, "the number of each run");
    Ok(())
}

fn one_index_a_hundred_thousand_times(device: &Device) -> Result<()> {
    let (n, width) = (100_003, 3);
    let values = random_ints(n * width, 5);
    let mut sums = vec![0.0; width];
    values.chunks(width).for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, &v)| *sum += f64::from(v)));
    let expected: Vec<f64> =
        (0..4 * width).map(|i| if i / width == 2 { sums[i % width] } else { 0.0 }).collect();
    let g = Tensor::from_slice(&values, [n, width], device)?;
    let index = Tensor::full([n], 2.0, DType::I32, device)?;
    let table = Tensor::zeros([4, width], DType::F32, device)?;
    ensure_values(&table.index_add(0, &index, &g, 1.0)?, &expected).context("index_add")?;
    ensure_values(&table.index_put(&[Some(&index)], &g, true)?, &expected).context("index_put")?;
    let whole_index = index.unsqueeze(1)?.broadcast_to([n, width])?;
    ensure_values(&table.scatter_add(0, &whole_index, &g)?, &expected).context("scatter_add")?;
    let gradient = |pick: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<Tensor> {
        let leaf = table.detach().to_leaf()?;
        let picked = pick(&leaf)?;
        picked.backward_with(&g.narrow(0, 0, picked.shape()[0])?.reshape(picked.shape())?)?;
        leaf.grad().context("no gradient")
    };
    ensure_values(&gradient(&|t| Ok(t.embedding(&index, None)?))?, &expected).context("embedding")?;
    ensure_values(&gradient(&|t| Ok(t.index_select(0, &index)?))?, &expected).context("index_select")?;
    ensure_values(&gradient(&|t| Ok(t.gather(0, &whole_index)?))?, &expected).context("gather")?;
    // Scatter of a single row into one element.
    let (line, one) = (g.reshape([-1])?, Tensor::zeros([1], DType::F32, device)?);
    let total: f64 = values.iter().map(|&v| f64::from(v)).sum();
    let zeros = Tensor::zeros([n * width], DType::I32, device)?;
    ensure_values(&one.scatter_add(0, &zeros, &line)?, &[total]).context("one index")?;
    let leaf = one.detach().to_leaf()?;
    leaf.take(&zeros)?.backward_with(&line)?;
    ensure_values(&leaf.grad().context("no gradient")?, &[total]).context("take")
}

/// Returns indices of several distributions.
fn distributions(n: usize, extent: usize, rng: &mut SplitMix64) -> Vec<(&'static str, Vec<i32>)> {
    let random: Vec<i32> = (0..n).map(|_| rng.below(extent) as i32).collect();
    let mut sorted = random.clone();
    sorted.sort_unstable();
    let zipf = |u: usize| ((extent as f64).powf(u as f64 / 1e6) - 1.0) as i32;
    vec![
        ("equal", vec![(extent - 1) as i32; n]),
        ("different", (0..n).map(|i| (i % extent) as i32).collect()),
        ("Zipf's", (0..n).map(|_| zipf(rng.below(1_000_000))).collect()),
        ("reversed", sorted.iter().rev().copied().collect()),
        ("sorted", sorted),
        ("random", random),
    ]
}

fn indices_of_any_distribution_are_summed(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(6);
    // Lengths around chunks of 128, chunks of partial results, and the limit of the sequential path.
    for n in [2049, 2177, 16_384, 16_385, 70_001] {
        for extent in [1, 5, 3000] {
            for (name, index) in distributions(n, extent, &mut rng) {
                let values: Vec<i32> = (0..n).map(|_| rng.below(1 << 20) as i32).collect();
                let mut expected: Vec<i32> = (0..extent as i32).collect();
                index.iter().zip(&values).for_each(|(&to, &v)| {
                    expected[to as usize] = expected[to as usize].wrapping_add(v);
                });
                let out = Tensor::arange(0.0, extent as f64, 1.0, DType::I32, device)?;
                let at = Tensor::from_slice(&index, [n], device)?;
                let got = out.index_add(0, &at, &Tensor::from_slice(&values, [n], device)?, 1.0)?;
                ensure!(got.to_vec::<i32>()? == expected, "{n} {name} indices of {extent}");
            }
        }
    }
    Ok(())
}

fn runs_of_any_length_and_position_are_summed_once(device: &Device) -> Result<()> {
    // Around the longest run of one thread (512), chunks of 128, and as many chunks (64) as one thread combines.
    let lengths = [512, 513, 511, 1024, 1, 1025, 640, 8192, 514, 8193, 127, 1536, 40_000, 513];
    let width = 2;
    for lead in [1usize, 127, 128, 129, 511, 512, 513, 900] {
        let index: Vec<i32> = std::iter::once(lead)
            .chain(lengths)
            .enumerate()
            .flat_map(|(position, n)| std::iter::repeat_n(position as i32, n))
            .collect();
        let n = index.len();
        // In an order that puts neighbours far apart.
        let step = 7919;
        let mixed: Vec<i32> = (0..n).map(|i| index[i * step % n]).collect();
        ensure!(!n.is_multiple_of(step));
        let mut expected = vec![0.0; (lengths.len() + 1) * width];
        let values: Vec<i32> = (0..n * width).map(|i| (i * 31 % 1009) as i32).collect();
        for (row, &to) in values.chunks(width).zip(&mixed) {
            row.iter().enumerate().for_each(|(k, &v)| expected[to as usize * width + k] += f64::from(v));
        }
        let at = Tensor::from_slice(&mixed, [n], device)?;
        let src = Tensor::from_slice(&values, [n, width], device)?;
        let out = Tensor::zeros([lengths.len() + 1, width], DType::I32, device)?;
        ensure_values(&out.index_add(0, &at, &src, 1.0)?, &expected)
            .with_context(|| format!("after {lead}"))?;
    }
    Ok(())
}

fn every_reduction_of_long_runs(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    let (n, extent, width) = (5000, 7, 3);
    for (name, index) in distributions(n, extent, &mut rng) {
        // Values of ±1, so that products are exact; some indices are out of range.
        let values: Vec<f32> = (0..n * width).map(|_| [1.0, -1.0, 1.0, -1.0][rng.below(4)]).collect();
        let at = Tensor::from_slice(&index, [n, 1], device)?.broadcast_to([n, width])?;
        let src = Tensor::from_slice(&values, [n, width], device)?;
        let before: Vec<f32> = (0..extent * width).map(|i| i as f32 / 8.0 - 1.0).collect();
        let out = Tensor::from_slice(&before, [extent, width], device)?;
        type CombineFn = fn(f64, f64) -> f64;
        let ways: [(ScatterReduce, CombineFn); 4] = [
            (ScatterReduce::Sum, |a, b| a + b),
            (ScatterReduce::Prod, |a, b| a * b),
            (ScatterReduce::Amax, f64::max),
            (ScatterReduce::Amin, f64::min),
        ];
        for (how, both) in ways {
            let mut expected: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
            for (row, &to) in values.chunks(width).zip(&index) {
                for (k, &v) in row.iter().enumerate() {
                    let position = &mut expected[to as usize * width + k];
                    *position = both(*position, f64::from(v));
                }
            }
            ensure_values(&out.scatter_reduce(0, &at, &src, how, true)?, &expected)
                .with_context(|| format!("{how:?} of {name} indices"))?;
        }
        // For `scatter`, the last write wins.
        let mut expected = before.clone();
        values.chunks(width).zip(&index).for_each(|(row, &to)| {
            expected[to as usize * width..][..width].copy_from_slice(row);
        });
        ensure!(out.scatter(0, &at, &src)?.to_vec::<f32>()? == expected, "set of {name} indices");
    }
    Ok(())
}

fn long_runs_are_deterministic(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(8);
    let n = 70_001;
    let values: Vec<f32> = (0..n).map(|_| rng.below(1000) as f32 / 7.0 - 70.0).collect();
    let index: Vec<i64> = (0..n).map(|_| [0, 0, 0, 3, 5][rng.below(5)]).collect();
    let (src, at) = (Tensor::from_slice(&values, [n], device)?, Tensor::from_slice(&index, [n], device)?);
    let out = Tensor::zeros([6], DType::F32, device)?;
    let first = out.index_add(0, &at, &src, 1.0)?.to_vec::<f32>()?;
    let mut exact = [0.0; 6];
    index.iter().zip(&values).for_each(|(&to, &v)| exact[to as usize] += f64::from(v));
    for (got, exact) in first.iter().zip(exact) {
        // A sum of parts is more exact than a sequential one; the bound follows from the depth of the parts.
        ensure!((f64::from(*got) - exact).abs() <= 0.2, "{got} is not {exact}");
    }
    for _ in 0..3 {
        ensure!(out.index_add(0, &at, &src, 1.0)?.to_vec::<f32>()? == first, "the bits differ");
    }
    Ok(())
}

fn values_are_filled_and_put_at_long_indices(device: &Device) -> Result<()> {
    let n = 100_001;
    let index = Tensor::full([n], 3.0, DType::I64, device)?;
    for dtype in [DType::F32, DType::BF16, DType::U8] {
        let x = Tensor::ones([5], dtype, device)?;
        ensure_values(&x.index_fill(0, &index, 7.0)?, &[1.0, 1.0, 1.0, 7.0, 1.0])
            .with_context(|| format!("{dtype}"))?;
        ensure_values(&x.scatter_value(0, &index, 9.0)?, &[1.0, 1.0, 1.0, 9.0, 1.0])
            .with_context(|| format!("{dtype}"))?;
    }
    Ok(())
}

fn values_of_any_frequency_are_counted(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(9);
    // As many bins as fit into workgroup memory, and more.
    for (n, extent) in [(100_001, 3), (100_001, 2048), (70_000, 2049), (5000, 60_000)] {
        for (name, line) in distributions(n, extent, &mut rng) {
            let mut expected = vec![0i64; extent];
            line.iter().for_each(|&v| expected[v as usize] += 1);
            let x = Tensor::from_slice(&line, [n], device)?;
            ensure!(x.bincount(None, extent)?.to_vec::<i64>()? == expected, "{n} {name} values of {extent}");
            if extent == 3 {
                let weights = random_ints(n, rng.next());
                let mut sums = vec![0.0; extent];
                line.iter().zip(&weights).for_each(|(&v, &w)| sums[v as usize] += f64::from(w));
                let weights = Tensor::from_slice(&weights, [n], device)?;
                ensure_values(&x.bincount(Some(&weights), extent)?, &sums).context("weights")?;
                // Values outside the bounds, and on the upper bound.
                let counts = x.to_dtype(DType::F32)?.histc(2, 0.0, 1.0)?;
                ensure_values(&counts, &[expected[0] as f64, expected[1] as f64]).context("histc")?;
            }
        }
    }
    let every = Tensor::from_slice(&[0i32, 9, 1, 9, 1, 9, 5, 9], [4, 2], device)?.select(1, 0)?;
    ensure!(every.bincount(None, 0)?.to_vec::<i64>()? == [1, 2, 0, 0, 0, 1], "a line with gaps");
    Ok(())
}

fn bags_of_any_length(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(10);
    let (entries, width) = (50, 3);
    let lengths = [3, 0, 4096, 4097, 0, 70_001, 512, 5000, 1];
    // Three samples precede the first bag.
    let starts: Vec<i64> = lengths
        .iter()
        .scan(3, |at, &n| {
            let start = *at;
            *at += n;
            Some(start)
        })
        .collect();
    let n = 3 + lengths.iter().sum::<i64>() as usize;
    let index: Vec<i32> = (0..n).map(|_| rng.below(entries) as i32).collect();
    let rows = random_ints(entries * width, 11);
    let table = Tensor::from_slice(&rows, [entries, width], device)?;
    let factors = random_ints(n, 12);
    let at = Tensor::from_slice(&index, [n], device)?;
    let offsets = Tensor::from_slice(&starts, [starts.len()], device)?;
    let skip = 7;
    let check = |index: &Tensor,
                 given: &EmbeddingBagOptions<'_>,
                 ranges: &[(usize, usize)],
                 flat: &[i32]|
     -> Result<()> {
        let mut expected = vec![];
        for &(start, end) in ranges {
            for k in 0..width {
                let taken = (start..end).filter(|&i| flat[i] != skip);
                let of = |i: usize| f64::from(rows[flat[i] as usize * width + k]);
                let count = taken.clone().count().max(1) as f64;
                // In Rust, an empty sum is -0.
                expected.push(
                    0.0 + match given.mode {
                        EmbeddingBagMode::Sum if given.per_sample_weights.is_some() => {
                            taken.map(|i| of(i) * f64::from(factors[i])).sum()
                        }
                        EmbeddingBagMode::Sum => taken.map(of).sum(),
                        EmbeddingBagMode::Mean => f64::from((taken.map(of).sum::<f64>() / count) as f32),
                        EmbeddingBagMode::Max => taken.map(of).reduce(f64::max).unwrap_or(0.0),
                    },
                );
            }
        }
        let found = table.embedding_bag(index, given)?;
        match given.mode {
            // Vulkan allows an error of 2.5 units in the last place for divisions.
            EmbeddingBagMode::Mean => ensure_close(&found.to_f64s()?, &expected, 3e-7, 0.0),
            _ => ensure_values(&found, &expected),
        }
    };
    let ranges: Vec<(usize, usize)> =
        starts.iter().zip(lengths).map(|(&start, n)| (start as usize, (start + n) as usize)).collect();
    let weights = Tensor::from_slice(&factors, [n], device)?;
    for (mode, weights) in [
        (EmbeddingBagMode::Sum, None),
        (EmbeddingBagMode::Sum, Some(&weights)),
        (EmbeddingBagMode::Mean, None),
        (EmbeddingBagMode::Max, None),
    ] {
        let bags = EmbeddingBagOptions {
            offsets: Some(&offsets),
            mode,
            per_sample_weights: weights,
            padding_idx: Some(skip as usize),
            ..EmbeddingBagOptions::default()
        };
        check(&at, &bags, &ranges, &index).with_context(|| format!("{mode:?}"))?;
    }
    // Bags of equal length; the gradient of their sum counts the uses of each row.
    let even = at.narrow(0, 0, 10_000)?.reshape([2, 5000])?;
    let bags = EmbeddingBagOptions {
        mode: EmbeddingBagMode::Sum,
        padding_idx: Some(skip as usize),
        ..EmbeddingBagOptions::default()
    };
    check(&even, &bags, &[(0, 5000), (5000, 10_000)], &index).context("bags of one length")?;
    let leaf = table.detach().to_leaf()?;
    let bags = EmbeddingBagOptions { offsets: Some(&offsets), ..bags };
    leaf.embedding_bag(&at, &bags)?.sum_all()?.backward()?;
    let mut counts = vec![0.0; entries * width];
    for &row in index[3..].iter().filter(|&&row| row != skip) {
        counts[row as usize * width..][..width].iter_mut().for_each(|count| *count += 1.0);
    }
    ensure_values(&leaf.grad().context("no gradient")?, &counts).context("the gradient")?;
    // In 16-bit types, one thread computes four elements.
    let low = table.to_dtype(DType::BF16)?.embedding_bag(
        &even,
        &EmbeddingBagOptions { mode: EmbeddingBagMode::Max, ..EmbeddingBagOptions::default() },
    )?;
    let wide = table.embedding_bag(
        &even,
        &EmbeddingBagOptions { mode: EmbeddingBagMode::Max, ..EmbeddingBagOptions::default() },
    )?;
    ensure_values(&low, &wide.to_f64s()?).context("bf16")
}
