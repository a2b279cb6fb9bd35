//! Values at the limits of types: indices out of range, comparisons with unrepresentable numbers, huge extents.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as ForebayResult;
use forebay::nn::{RecurrentOptions, Rnn};
use forebay::ops::{
    self, ConvolutionOptions, CrossEntropyOptions, CtcLossOptions, EmbeddingBagMode, EmbeddingBagOptions,
    Im2colOptions, InterpolateOptions, MultiMarginLossOptions, NanToNumOptions, NllLossOptions, Operand,
    PadMode, Padding, Pool2dOptions, Reduction, SearchSortedOptions, TransposedConvolutionOptions,
};
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_values};
use super::{require_dtype, tests};

tests![
    an_index_out_of_range_reads_zero_and_writes_nothing,
    a_class_out_of_range_has_no_loss,
    an_index_out_of_range_is_an_error_with_index_checks,
    lengths_out_of_range_are_errors_with_index_checks,
    a_class_out_of_range_has_no_margin_loss,
    lengths_and_labels_out_of_range_have_no_ctc_loss,
    scalars_out_of_range_compare_mathematically,
    integers_out_of_range_are_not_written,
    floats_out_of_range_are_not_written,
    shifts_by_any_distance,
    integer_division_over_the_full_range,
    divisors_out_of_range,
    integer_powers_and_sums_at_the_limits,
    diagonals_beyond_the_corners,
    counts_beyond_32_bits_are_errors,
    views_with_huge_extents_are_errors,
    products_of_extents_of_several_arguments_do_not_overflow,
    more_extremes_than_16_bits_count_share_their_gradient,
    means_of_f64_divide_by_the_whole_count,
];

/// Returns the index 1, then indices outside an extent of 3, some of which are valid in their low 32 bits.
fn out_of_range_indices(dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(match dtype {
        DType::I64 => {
            let all = [1i64, 1 << 32, (1 << 32) + 1, -1, -(1 << 32), i64::MIN, i64::MAX, 3];
            Tensor::from_slice(&all, [8], device)?
        }
        DType::I32 => Tensor::from_slice(&[1i32, -1, -3, i32::MIN, i32::MAX, 3, 4, 1 << 30], [8], device)?,
        _ => Tensor::from_slice(&[1u32, u32::MAX, 1 << 31, 3, 4, 5, 6, 7], [8], device)?,
    })
}

fn an_index_out_of_range_reads_zero_and_writes_nothing(device: &Device) -> Result<()> {
    let table = Tensor::from_slice(&[1f32, 2.0, 3.0], [3, 1], device)?;
    let line = table.reshape([3])?;
    for dtype in [DType::I64, DType::I32, DType::U32] {
        let at = out_of_range_indices(dtype, device)?;
        let first: Vec<f64> = (0..8).map(|i| if i == 0 { 2.0 } else { 0.0 }).collect();
        ensure_values(&line.index_select(0, &at)?, &first)?;
        ensure_values(&line.gather(0, &at)?, &first)?;
        ensure_values(&line.unsqueeze(0)?.index_select(1, &at)?, &first)?;
        let leaf = table.detach().to_leaf()?;
        let rows = leaf.embedding(&at, None)?;
        ensure_values(&rows, &first)?;
        rows.sum_all()?.backward()?;
        let grad = leaf.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?;
        ensure_values(&grad, &[0.0, 1.0, 0.0])?;
        let ones = Tensor::ones([8], DType::F32, device)?;
        let zeros = Tensor::zeros([3], DType::F32, device)?;
        ensure_values(&zeros.scatter_add(0, &at, &ones)?, &[0.0, 1.0, 0.0])?;
        ensure_values(&zeros.index_add(0, &at, &ones, 1.0)?, &[0.0, 1.0, 0.0])?;
        ensure_values(&zeros.scatter(0, &at, &ones)?, &[0.0, 1.0, 0.0])?;
        ensure_values(&zeros.index_fill(0, &at, 5.0)?, &[0.0, 5.0, 0.0])?;
        // Only one sample contributes to the bag.
        let bags = EmbeddingBagOptions { mode: EmbeddingBagMode::Mean, ..EmbeddingBagOptions::default() };
        ensure_values(&table.embedding_bag(&at.unsqueeze(0)?, &bags)?, &[2.0])?;
        ensure_values(&at.one_hot(3)?.to_dtype(DType::F32)?.sum([0], false)?, &[0.0, 1.0, 0.0])?;
    }
    // PyTorch documents the range -n..n for these operations.
    let at = Tensor::from_slice(&[1i64, -1, -3, -4, 3, (1 << 32) - 1, -(1 << 32), i64::MIN], [8], device)?;
    ensure_values(&line.take(&at)?, &[2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])?;
    ensure_values(&line.take_along_dim(&at, 0)?, &[2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])?;
    ensure_values(&line.index(&[Some(&at)])?, &[2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])?;
    let ones = Tensor::ones([8], DType::F32, device)?;
    ensure_values(&line.put(&at, &ones, true)?, &[2.0, 3.0, 4.0])?;
    // Bag offsets have 64 bits as well.
    let samples = Tensor::from_slice(&[0i64, 1, 2], [3], device)?;
    let offsets = Tensor::from_slice(&[0i64, 1, 1 << 32], [3], device)?;
    let bags = EmbeddingBagOptions { offsets: Some(&offsets), ..EmbeddingBagOptions::default() };
    ensure_values(
        &table.embedding_bag(&samples, &EmbeddingBagOptions { mode: EmbeddingBagMode::Sum, ..bags })?,
        &[1.0, 5.0, 0.0],
    )?;
    for padding in [3, 1 << 32, usize::MAX] {
        ensure!(table.embedding(&samples, Some(padding)).is_err(), "there is no row {padding}");
    }
    Ok(())
}

fn a_class_out_of_range_has_no_loss(device: &Device) -> Result<()> {
    let scores = Tensor::zeros([5, 2], DType::F32, device)?;
    let even = std::f64::consts::LN_2;
    let classes = [0i64, 1 << 32, (1 << 40) + 1, -(1 << 32), -100];
    let target = Tensor::from_slice(&classes, [5], device)?;
    let nan = f64::NAN;
    for (ignored, losses) in [
        (-100, [even, nan, nan, nan, 0.0]),
        (1 << 32, [even, 0.0, nan, nan, nan]),
        (0, [0.0, nan, nan, nan, nan]),
    ] {
        let options = CrossEntropyOptions {
            ignore_index: ignored,
            reduction: Reduction::None,
            ..CrossEntropyOptions::default()
        };
        let log = scores.log_softmax(1)?;
        let both = [
            scores.cross_entropy_with(&target, &options)?,
            log.nll_loss(
                &target,
                &NllLossOptions { ignore_index: ignored, reduction: Reduction::None, ..Default::default() },
            )?,
        ];
        for got in both {
            let same =
                |(a, b): (&f64, &f64)| a.is_nan() == b.is_nan() && (a.is_nan() || (a - b).abs() < 1e-6);
            let got = got.to_f64s()?;
            ensure!(got.iter().zip(&losses).all(same), "{ignored}: {got:?}, expected {losses:?}");
        }
    }
    let Err(error) = Tensor::from_slice(&[3, i64::MIN], [2], device)?.bincount(None, 0) else {
        anyhow::bail!("a negative number is counted")
    };
    ensure!(error.to_string().contains("got -9223372036854775808"), "{error}");
    ensure!(
        target.bincount(None, 0).is_err()
            && Tensor::from_slice(&[1i64 << 32], [1], device)?.bincount(None, 0).is_err()
    );
    ensure!(Tensor::from_slice(&[u32::MAX], [1], device)?.bincount(None, 0).is_err());
    Ok(())
}

fn an_index_out_of_range_is_an_error_with_index_checks(device: &Device) -> Result<()> {
    let table = Tensor::ones([3, 2], DType::F32, device)?;
    let line = table.select(1, 0)?.contiguous()?;
    let right = Tensor::from_slice(&[0i64, 2], [2], device)?;
    let wrong = Tensor::from_slice(&[0i64, 1 << 32], [2], device)?;
    let one = Tensor::from_slice(&[1f32, 1.0], [2], device)?;
    let logits = Tensor::zeros([2, 3], DType::F32, device)?;
    type Call<'a> = (&'a str, &'a dyn Fn(&Tensor) -> ForebayResult<Tensor>);
    let calls: &[Call<'_>] = &[
        ("embedding", &|at| table.embedding(at, None)),
        ("index_select", &|at| line.index_select(0, at)),
        ("gather", &|at| line.gather(0, at)),
        ("take", &|at| line.take(at)),
        ("index", &|at| line.index(&[Some(at)])),
        ("scatter_add", &|at| line.scatter_add(0, at, &one)),
        ("index_add", &|at| line.index_add(0, at, &one, 1.0)),
        ("index_fill", &|at| line.index_fill(0, at, 1.0)),
        ("put", &|at| line.put(at, &one, false)),
        ("embedding_bag", &|at| table.embedding_bag(&at.unsqueeze(0)?, &EmbeddingBagOptions::default())),
        ("cross_entropy", &|at| logits.cross_entropy(at)),
        ("nll_loss", &|at| logits.nll_loss(at, &Default::default())),
        ("one_hot", &|at| at.one_hot(3)),
        ("multi_margin_loss", &|at| logits.multi_margin_loss(at, &Default::default())),
        ("multilabel_margin_loss", &|at| {
            line.multilabel_margin_loss(&at.pad(&[0, 1], PadMode::Constant((-1).into()))?, Reduction::Mean)
        }),
        ("searchsorted", &|at| {
            line.searchsorted(
                &one,
                &SearchSortedOptions {
                    sorter: Some(&at.pad(&[1, 0], PadMode::Constant(1.0.into()))?),
                    ..Default::default()
                },
            )
        }),
    ];
    for (name, call) in calls {
        call(&wrong)?;
        let guard = ops::check_indices();
        call(&right)?;
        let Err(error) = call(&wrong) else { anyhow::bail!("{name} accepts an index of 2^32") };
        drop(guard);
        let text = error.to_string();
        let position = if *name == "searchsorted" { "number 2 " } else { "number 1 " };
        let names_all = ["index 4294967296", position, "..3", "numeric_ranges.rs:"]
            .iter()
            .all(|part| text.contains(part));
        ensure!(names_all, "{name}: {text}");
        call(&wrong)?;
    }
    Ok(())
}

fn lengths_out_of_range_are_errors_with_index_checks(device: &Device) -> Result<()> {
    let table = Tensor::ones([3, 2], DType::F32, device)?;
    let ints = |values: [i64; 2]| Tensor::from_slice(&values, [2], device);
    let log = Tensor::zeros([4, 2, 3], DType::F32, device)?.log_softmax(-1)?;
    let labels = Tensor::from_slice(&[1i64, 2, 2, 7], [2, 2], device)?;
    let (steps, counts) = (ints([4, 0])?, ints([2, 1])?);
    let rnn = Rnn::new(3, 2, RecurrentOptions::default(), device)?;
    let x = Tensor::zeros([4, 2, 3], DType::F32, device)?;
    type Call<'a> = (&'a str, [i64; 2], [i64; 2], &'a str, &'a dyn Fn(&Tensor) -> ForebayResult<Tensor>);
    let calls: &[Call<'_>] = &[
        ("ctc_loss", [4, 0], [4, 5], "length 5, number 1 of `input_lengths`, is outside 0..=4", &|n| {
            log.ctc_loss(&CtcLossOptions::new(&labels, n, &counts))
        }),
        ("ctc_loss", [2, 1], [-1, 1], "length -1, number 0 of `target_lengths`, is outside 0..=2", &|n| {
            log.ctc_loss(&CtcLossOptions::new(&labels, &steps, n))
        }),
        ("ctc_loss", [0, 1], [1, 2], "label 7, number 3 of `targets`, is outside 0..3", &|n| {
            log.ctc_loss(&CtcLossOptions::new(&labels, &steps, n))
        }),
        (
            "embedding_bag",
            [0, 2],
            [0, 1 << 32],
            "offset 4294967296, number 1 of `offsets`, is outside 0..=2",
            &|n| {
                let options = EmbeddingBagOptions { offsets: Some(n), ..EmbeddingBagOptions::default() };
                table.embedding_bag(&ints([0, 1])?, &options)
            },
        ),
        ("repeat_interleave_by", [1, 1], [1, 3], "repeat 3, number 1 of `repeats`, is outside 0..=2", &|n| {
            table.narrow(0, 0, 2)?.repeat_interleave_by(n, 0, Some(2))
        }),
        (
            "repeat_interleave_by",
            [2, 0],
            [1, 2],
            "sum 3, number 0 of the running sums, is outside 2..=2",
            &|n| table.narrow(0, 0, 2)?.repeat_interleave_by(n, 0, Some(2)),
        ),
        ("Rnn", [1, 4], [9, -1], "length 9, number 0 of the lengths, is outside 1..=4", &|n| {
            Ok(rnn.forward_lengths(&x, n, None)?.0)
        }),
    ];
    for (name, right, wrong, text, call) in calls {
        let (right, wrong) = (ints(*right)?, ints(*wrong)?);
        call(&wrong)?;
        let guard = ops::check_indices();
        call(&right)?;
        let Err(error) = call(&wrong) else { anyhow::bail!("{name} accepts values out of range") };
        drop(guard);
        let error = error.to_string();
        ensure!(error.contains(text) && error.contains("numeric_ranges.rs:"), "{name}: {error}");
    }
    Ok(())
}

fn a_class_out_of_range_has_no_margin_loss(device: &Device) -> Result<()> {
    let scores = || -> ForebayResult<Tensor> {
        Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3], device)?.to_leaf()
    };
    for outside in [1i64 << 32, 3, -1, i64::MIN, i64::MAX, (1 << 32) + 1] {
        let x = scores()?;
        let target = Tensor::from_slice(&[outside, 1], [2], device)?;
        for (p, second) in [(1, 2.0 / 3.0), (2, 4.0 / 3.0)] {
            let weight = Tensor::ones([3], DType::F32, device)?;
            for weight in [None, Some(&weight)] {
                let losses = x.multi_margin_loss(
                    &target,
                    &MultiMarginLossOptions { p, weight, reduction: Reduction::None, ..Default::default() },
                )?;
                let got = losses.to_f64s()?;
                ensure!(got[0].is_nan() && (got[1] - second).abs() < 1e-6, "{outside}: {got:?}");
            }
        }
        x.multi_margin_loss(
            &target,
            &MultiMarginLossOptions { reduction: Reduction::Sum, ..Default::default() },
        )?
        .backward()?;
        let grad = x.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?.to_f64s()?;
        ensure!(grad[..3] == [0.0; 3] && grad.iter().all(|g| g.is_finite()), "{outside}: {grad:?}");
    }
    // Negative entries end the list; what follows is not read.
    for (list, missing) in [
        ([1i64 << 32, -1, 0], true),
        ([0, (1 << 32) - 1, 0], true),
        ([0, 3, -1], true),
        ([0, i64::MAX, -1], true),
        ([0, -1, 7], false),
        ([0, i64::MIN, 1 << 32], false),
    ] {
        let x = scores()?;
        let target = Tensor::from_slice(&[list, [0, -1, -1]].concat(), [2, 3], device)?;
        let guard = ops::check_indices();
        ensure!(x.multilabel_margin_loss(&target, Reduction::None).is_err() == missing, "{list:?}");
        drop(guard);
        let losses = x.multilabel_margin_loss(&target, Reduction::None)?;
        let got = losses.to_f64s()?;
        ensure!(got[0].is_nan() == missing && (got[1] - 5.0 / 3.0).abs() < 1e-6, "{list:?}: {got:?}");
        losses.sum_all()?.backward()?;
        let grad = x.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?.to_f64s()?;
        ensure!(
            grad.iter().all(|g| g.is_finite()) && (grad[..3] == [0.0; 3]) == missing,
            "{list:?}: {grad:?}"
        );
    }
    Ok(())
}

fn lengths_and_labels_out_of_range_have_no_ctc_loss(device: &Device) -> Result<()> {
    let scores = Tensor::from_slice(&(0..24).map(|i| (i % 7) as f32).collect::<Vec<_>>(), [4, 2, 3], device)?;
    type Arguments = ([i64; 2], i64, i64);
    let run = |(labels, steps, count): Arguments,
               reduction: Reduction,
               zero_infinity: bool|
     -> Result<(Vec<f64>, Vec<f64>)> {
        let x = scores.copy()?.to_leaf()?;
        let targets = Tensor::from_slice(&[[1, 2], labels].concat(), [2, 2], device)?;
        let steps = Tensor::from_slice(&[4, steps], [2], device)?;
        let counts = Tensor::from_slice(&[2, count], [2], device)?;
        let options =
            CtcLossOptions { reduction, zero_infinity, ..CtcLossOptions::new(&targets, &steps, &counts) };
        let losses = x.log_softmax(-1)?.ctc_loss(&options)?;
        losses.sum_all()?.backward()?;
        let grad = x.grad().ok_or_else(|| anyhow::anyhow!("no gradient"))?;
        Ok((losses.to_f64s()?, grad.to_f64s()?))
    };
    // What the padding holds is not read.
    let (right, gradient) = run(([1, 7], 4, 1), Reduction::None, false)?;
    ensure!(right.iter().chain(&gradient).all(|v| v.is_finite()));
    ensure!(right == run(([1, 0], 4, 1), Reduction::None, false)?.0);
    const FAR: i64 = 1 << 32;
    let wrong: [Arguments; 14] = [
        ([1, 2], 5, 2),
        ([1, 2], FAR, 2),
        ([1, 2], -1, 2),
        ([1, 2], i64::MIN, 2),
        ([1, 2], FAR + 4, 2),
        ([1, 2], 4, 3),
        ([1, 2], 4, -2),
        ([1, 2], 4, FAR),
        ([1, 2], 4, i64::MAX),
        ([1, 2], -1, 0),
        ([1, 7], 4, 2),
        ([FAR + 2, 1], 4, 1),
        ([-1, 1], 4, 2),
        ([1, 3], 4, 2),
    ];
    for arguments in wrong {
        for zero_infinity in [false, true] {
            let (losses, grad) = run(arguments, Reduction::None, zero_infinity)?;
            ensure!(losses[1].is_nan() && losses[0] == right[0], "{arguments:?}: {losses:?}");
            for (i, (&got, &expected)) in grad.iter().zip(&gradient).enumerate() {
                // Steps hold three classes of either example in turn.
                let expected = if i / 3 % 2 == 1 { 0.0 } else { expected };
                ensure!(
                    (got - expected).abs() < 1e-6,
                    "{arguments:?}: gradient {i} is {got}, expected {expected}"
                );
            }
            for reduction in [Reduction::Mean, Reduction::Sum] {
                ensure!(run(arguments, reduction, zero_infinity)?.0[0].is_nan());
            }
        }
    }
    Ok(())
}

fn scalars_out_of_range_compare_mathematically(device: &Device) -> Result<()> {
    let mut rng = SplitMix64(7);
    let bounds = |dtype| match dtype {
        DType::U8 => (0i64, 255i64),
        DType::U32 => (0, u32::MAX.into()),
        _ => (i32::MIN.into(), i32::MAX.into()),
    };
    for dtype in [DType::U8, DType::I32, DType::U32] {
        let (min, max) = bounds(dtype);
        let elements = [min, max, 0, 1, max - 1];
        let x = match dtype {
            DType::U8 => Tensor::from_slice(&elements.map(|v| v as u8), [5], device)?,
            DType::U32 => Tensor::from_slice(&elements.map(|v| v as u32), [5], device)?,
            _ => Tensor::from_slice(&elements.map(|v| v as i32), [5], device)?,
        };
        let mut tried =
            vec![min - 1, max + 1, -1, 256, 1 << 32, -(1 << 32), (1 << 32) + 1, i64::MIN, i64::MAX, 0, max];
        tried.extend((0..6).map(|_| (rng.below(1 << 20) as i64 - (1 << 19)) << rng.below(40)));
        for n in tried {
            let compare = |f: fn(&i64, &i64) -> bool| elements.map(|e| f64::from(u8::from(f(&e, &n))));
            ensure_values(&x.lt(n)?, &compare(i64::lt))?;
            ensure_values(&x.le(n)?, &compare(i64::le))?;
            ensure_values(&x.gt(n)?, &compare(i64::gt))?;
            ensure_values(&x.ge(n)?, &compare(i64::ge))?;
            ensure_values(&x.eq(n)?, &compare(i64::eq))?;
            ensure_values(&x.ne(n)?, &compare(i64::ne))?;
        }
        ensure_values(&x.lt(usize::MAX)?, &[1.0; 5])?;
    }
    Ok(())
}

fn integers_out_of_range_are_not_written(device: &Device) -> Result<()> {
    let x = Tensor::zeros([2], DType::U8, device)?;
    let all = Tensor::ones([2], DType::Bool, device)?;
    for (dtype, n) in [
        (DType::U8, 300.0),
        (DType::U8, -1.0),
        (DType::I32, 4294967296.0),
        (DType::U32, -1.0),
        (DType::I64, 1e19),
        (DType::I32, f64::NAN),
    ] {
        let Err(error) = Tensor::full([2], n, dtype, device) else {
            anyhow::bail!("{dtype} cannot represent {n}")
        };
        ensure!(
            error.to_string().starts_with("full: ") && error.to_string().contains(dtype.name()),
            "{error}"
        );
    }
    ensure_values(&Tensor::full([2], 2.9, DType::U8, device)?, &[2.0, 2.0])?;
    let wide = Tensor::zeros([2], DType::I32, device)?;
    for (x, n) in [(&x, 300i64), (&x, -1), (&wide, 1 << 40), (&wide, i64::MIN)] {
        let Err(error) = x.where_(&all, n) else { anyhow::bail!("{n} is chosen") };
        ensure!(
            error.to_string().starts_with("where: ") && error.to_string().contains("to_dtype"),
            "{error}"
        );
    }
    ensure!(x.where_(&all, 255)?.dtype() == DType::U8 && x.where_(&all, 0.5)?.dtype() == DType::F32);
    ensure!(x.full_like(256.0).is_err() && x.fill_(256).is_err() && x.masked_fill(&all, -1).is_err());
    ensure!(Tensor::arange(0.0, 257.0, 1.0, DType::U8, device).is_err());
    let at = Tensor::from_slice(&[0i64], [1], device)?;
    ensure!(x.index_fill(0, &at, 256).is_err());
    ensure_values(&x, &[0.0, 0.0])?;
    // Bounds are compared mathematically; sums wrap, as in PyTorch.
    ensure_values(&x.clamp(-5, 300)?, &[0.0, 0.0])?;
    ensure_values(&x.maximum(300)?, &[255.0, 255.0])?;
    ensure_values(&x.add(300)?, &[44.0, 44.0])?;
    ensure!(x.pow(256).is_err());
    Ok(())
}

fn floats_out_of_range_are_not_written(device: &Device) -> Result<()> {
    let mut types = vec![(DType::F32, f64::from(f32::MAX))];
    types.extend(device.info().features.f16.then_some((DType::F16, 65504.0)));
    types.push((DType::BF16, 2f64.powi(128) - 2f64.powi(120)));
    let all = Tensor::ones([2], DType::Bool, device)?;
    let at = Tensor::from_slice(&[0i64], [1], device)?;
    for (dtype, max) in types {
        let x = Tensor::zeros([2], dtype, device)?;
        type Call<'a> = (&'a str, &'a dyn Fn(f64) -> ForebayResult<Tensor>);
        let calls: &[Call<'_>] = &[
            ("full", &|n| Tensor::full([2], n, dtype, device)),
            ("full_like", &|n| x.full_like(n)),
            ("masked_fill", &|n| x.masked_fill(&all, n)),
            ("masked_fill_", &|n| x.copy().and_then(|x| x.masked_fill_(&all, n).map(|()| x))),
            ("fill_", &|n| x.copy().and_then(|x| x.fill_(n).map(|()| x))),
            ("masked_fill", &|n| x.narrow(0, 0, 1)?.index_fill(0, &at, n)),
            ("scatter", &|n| x.narrow(0, 0, 1)?.scatter_value(0, &at, n)),
            ("pad", &|n| x.narrow(0, 0, 0)?.pad(&[1, 0], PadMode::Constant(n.into()))),
            ("threshold", &|n| x.threshold(0.0, n)),
            ("linspace", &|n| Tensor::linspace(n, n, 1, dtype, device)),
        ];
        let beyond = [max * (1.0 + 2f64.powi(-30)), max * 2.0, 1e300];
        for (name, call) in calls {
            for n in beyond.into_iter().flat_map(|n| [n, -n]) {
                let Err(error) = call(n) else { anyhow::bail!("{name}: {dtype} cannot represent {n}") };
                let text = error.to_string();
                ensure!(text.starts_with(&format!("{name}: ")) && text.contains(dtype.name()), "{text}");
            }
            for n in [max, -max, f64::INFINITY, f64::NEG_INFINITY] {
                let got = call(n)?.to_dtype(DType::F32)?.to_f64s()?;
                ensure!(got.iter().all(|&v| v == n), "{name} of {n} in {dtype}: {got:?}");
            }
        }
        ensure_values(&x, &[0.0, 0.0])?;
        // This call only crops, so it writes no constant.
        ensure!(x.pad(&[-1, 0], PadMode::Constant(1e300.into()))?.shape() == [1]);
        // Arithmetic overflows, and choosing rounds, as in PyTorch.
        let one = x.add(1.0)?;
        let infinite = [f64::INFINITY; 2];
        for overflown in [one.mul(1e300)?, one.add(1e300)?, one.where_(&x.gt(0.0)?, 1e300)?] {
            ensure_values(&overflown.to_dtype(DType::F32)?, &infinite)?;
        }
        let nan = one.mul(f64::NAN)?.nan_to_num_with(&NanToNumOptions {
            nan: 1e300,
            posinf: Some(0.0),
            neginf: Some(0.0),
        })?;
        ensure_values(&nan.to_dtype(DType::F32)?, &infinite)?;
        ensure_values(&x.clamp(-1e300, 1e300)?.to_dtype(DType::F32)?, &[0.0, 0.0])?;
    }
    for (dtype, max, infinity) in [(DType::F8E4M3, 448.0, false), (DType::F8E5M2, 57344.0, true)] {
        let full = |n: f64| Tensor::full([2], n, dtype, device);
        ensure!(full(max * 1.001).is_err() && full(-max * 1.001).is_err() && full(1e9).is_err());
        ensure_values(&full(-max)?.to_dtype(DType::F32)?, &[-max, -max])?;
        // The first of the two types has no infinities.
        ensure!(full(f64::INFINITY).is_ok() == infinity);
    }
    Ok(())
}

fn shifts_by_any_distance(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1i32, -8, 3], [3], device)?;
    for n in [1i64 << 32, (1 << 32) + 1, -(1 << 32), -1, 32, i64::MAX, i64::MIN] {
        ensure_values(&x.bitwise_left_shift(n)?, &[0.0; 3])?;
        ensure_values(&x.bitwise_right_shift(n)?, &[0.0, -1.0, 0.0])?;
    }
    let x = Tensor::from_slice(&[1u8, 200], [2], device)?;
    for n in [256i64, -256, -1, 8] {
        ensure_values(&x.bitwise_left_shift(n)?, &[0.0; 2])?;
        ensure_values(&x.bitwise_right_shift(n)?, &[0.0; 2])?;
    }
    Ok(())
}

/// Divides all pairs of edge values of an integer type, with tensors, scalars and in place.
macro_rules! ensure_divisions {
    ($t:ty, $device:expr, $edges:expr) => {{
        let edges: Vec<$t> = $edges;
        let n = edges.len();
        let (rows, columns): (Vec<$t>, Vec<$t>) =
            (edges.iter().flat_map(|&a| vec![a; n]).collect(), edges.repeat(n));
        let (x, y) =
            (Tensor::from_slice(&rows, &[n * n], $device)?, Tensor::from_slice(&columns, &[n * n], $device)?);
        let column = Tensor::from_slice(&edges, &[n], $device)?;
        type ExactFn = fn(i128, i128) -> i128;
        type Run = fn(&Tensor, Operand<'_>) -> ForebayResult<Tensor>;
        // As in WGSL, a division by zero has the dividend as its quotient and 0 as its remainder.
        let floor: ExactFn =
            |a, b| if b == 0 { a } else { a.div_euclid(b) - i128::from(b < 0 && a.rem_euclid(b) != 0) };
        let below: ExactFn = |a, b| {
            if b == 0 { 0 } else { a.rem_euclid(b) + if b < 0 && a.rem_euclid(b) != 0 { b } else { 0 } }
        };
        let calls: [(&str, Run, ExactFn); 6] = [
            ("floor_divide", |x, y| x.floor_divide(y), floor),
            ("remainder", |x, y| x.remainder(y), below),
            (
                "remainder_",
                |x, y| {
                    let x = x.copy()?;
                    x.remainder_(y)?;
                    Ok(x)
                },
                below,
            ),
            ("trunc_divide", |x, y| x.trunc_divide(y), |a, b| if b == 0 { a } else { a / b }),
            ("fmod", |x, y| x.fmod(y), |a, b| if b == 0 { 0 } else { a % b }),
            (
                "fmod_",
                |x, y| {
                    let x = x.copy()?;
                    x.fmod_(y)?;
                    Ok(x)
                },
                |a, b| if b == 0 { 0 } else { a % b },
            ),
        ];
        for (name, run, exact) in calls {
            let same = |got: &[$t], pairs: &mut dyn Iterator<Item = ($t, $t)>| -> Result<()> {
                for (&got, (a, b)) in got.iter().zip(pairs) {
                    // The only quotient outside the type, of its lowest value and -1, wraps around.
                    let want = exact(a.into(), b.into()) as $t;
                    ensure!(got == want, "{name} of {a} and {b}: {got}, expected {want}");
                }
                Ok(())
            };
            let got = run(&x, (&y).into())?;
            ensure!(got.dtype() == x.dtype());
            same(&got.to_vec::<$t>()?, &mut rows.iter().copied().zip(columns.iter().copied()))?;
            for &b in &edges {
                let got = run(&column, i64::try_from(b)?.into())?.to_vec::<$t>()?;
                same(&got, &mut edges.iter().map(|&a| (a, b)))?;
            }
        }
    }};
}

/// Edge values of an integer type in i128, and random ones of every magnitude.
fn edge_values(min: i128, max: i128) -> impl Iterator<Item = i128> {
    let mut random = SplitMix64(11);
    let mut all = vec![min, min + 1, max, max - 1, max / 2, max / 2 + 1, min / 2, min / 2 - 1];
    all.extend([
        0,
        1,
        -1,
        2,
        -2,
        3,
        -3,
        7,
        10,
        46341,
        -46341,
        65536,
        1_000_000_007,
        1_500_000_000,
        -1_500_000_000,
    ]);
    all.extend([1 << 53, (1 << 53) + 1, -(1 << 53), 1 << 31, 1 << 32, -(1 << 32)]);
    all.extend((0..12).map(|_| ((random.below(1 << 31) as i128) - (1 << 30)) << random.below(33)));
    all.into_iter().filter(move |v| (min..=max).contains(v))
}

fn integer_division_over_the_full_range(device: &Device) -> Result<()> {
    ensure_divisions!(i32, device, edge_values(i32::MIN.into(), i32::MAX.into()).map(|v| v as i32).collect());
    ensure_divisions!(u32, device, edge_values(0, u32::MAX.into()).map(|v| v as u32).collect());
    ensure_divisions!(u8, device, (0..=255).collect());
    require_dtype(device, DType::I64)?;
    ensure_divisions!(i64, device, edge_values(i64::MIN.into(), i64::MAX.into()).map(|v| v as i64).collect());
    Ok(())
}

fn divisors_out_of_range(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[5i32, -5], [2], device)?;
    let bytes = Tensor::from_slice(&[5u8, 200], [2], device)?;
    for (x, n) in
        [(&x, 1i64 << 40), (&x, -(1 << 40)), (&x, 1 << 31), (&bytes, 256), (&bytes, 300), (&bytes, -1)]
    {
        type Run = fn(&Tensor, i64) -> ForebayResult<Tensor>;
        let calls: [(&str, Run); 5] = [
            ("floor_divide", |x, n| x.floor_divide(n)),
            ("trunc_divide", |x, n| x.trunc_divide(n)),
            ("remainder", |x, n| x.remainder(n)),
            ("fmod", |x, n| x.fmod(n)),
            ("remainder", |x, n| {
                x.remainder_(n)?;
                Ok(x.clone())
            }),
        ];
        for (name, call) in calls {
            let Err(error) = call(x, n) else { anyhow::bail!("{name}: {} is divided by {n}", x.dtype()) };
            let text = error.to_string();
            ensure!(
                text.starts_with(name) && text.contains(&n.to_string()) && text.contains("to_dtype"),
                "{text}"
            );
        }
    }
    ensure_values(&x, &[5.0, -5.0])
}

fn integer_powers_and_sums_at_the_limits(device: &Device) -> Result<()> {
    // The square of the largest number is 1 modulo the type's range.
    let x = Tensor::from_slice(&[i32::MAX, -i32::MAX, 1, -1, -1, 2], [6], device)?;
    let y = Tensor::from_slice(&[-1, -3, -7, -7, i32::MIN, -1], [6], device)?;
    ensure!(x.pow(&y)?.to_vec::<i32>()? == [0, 0, 1, -1, 1, 0]);
    let x = Tensor::from_slice(&[i32::MIN, i32::MAX, 0, i32::MIN], [4], device)?;
    let y = Tensor::from_slice(&[-1i32, i32::MIN, i32::MIN, 6], [4], device)?;
    ensure!(x.gcd(&y)?.to_vec::<i32>()? == [1, 1, i32::MIN, 2]);
    let ends = Tensor::arange(2_147_483_640.0, 2_147_483_647.0, 3.0, DType::I32, device)?;
    ensure!(ends.to_vec::<i32>()? == [2_147_483_640, 2_147_483_643, 2_147_483_646]);
    let line = Tensor::linspace(f64::from(i32::MIN), f64::from(i32::MAX), 4, DType::I32, device)?;
    ensure!(
        line.to_vec::<i32>()? == [i32::MIN, -715_827_883, 715_827_882, i32::MAX],
        "{:?}",
        line.to_vec::<i32>()?
    );
    require_dtype(device, DType::I64)?;
    // Sums and products of integers are i64, as in PyTorch.
    let x = Tensor::from_slice(&[i32::MAX, i32::MAX, i32::MIN, 3], [4], device)?;
    let (max, min) = (i64::from(i32::MAX), i64::from(i32::MIN));
    ensure!(x.sum_all()?.to_vec::<i64>()? == [2 * max + min + 3]);
    ensure!(x.cumsum(0)?.to_vec::<i64>()? == [max, 2 * max, 2 * max + min, 2 * max + min + 3]);
    ensure!(x.narrow(0, 2, 2)?.prod_all()?.to_vec::<i64>()? == [3 * min]);
    Ok(())
}

fn diagonals_beyond_the_corners(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], device)?;
    for far in [isize::MAX, i32::MAX as isize, 1 << 32, 2] {
        ensure_values(&x.tril(far)?, &[1.0, 2.0, 3.0, 4.0])?;
        ensure_values(&x.triu(far)?, &[0.0; 4])?;
        ensure!(x.diagonal(far, 0, 1)?.numel() == 0);
    }
    for far in [isize::MIN, i32::MIN as isize, -(1 << 32), -2] {
        ensure_values(&x.tril(far)?, &[0.0; 4])?;
        ensure_values(&x.triu(far)?, &[1.0, 2.0, 3.0, 4.0])?;
        ensure!(x.diagonal(far, 0, 1)?.numel() == 0 && x.diag(far)?.numel() == 0);
    }
    for far in [isize::MAX, isize::MIN, 1 << 33] {
        ensure!(x.diag_embed(far, 0, 1).is_err() && x.select(0, 0)?.diag(far).is_err());
    }
    Ok(())
}

fn counts_beyond_32_bits_are_errors(device: &Device) -> Result<()> {
    require_dtype(device, DType::I64)?;
    let x = Tensor::from_slice(&[1f32, 2.0], [2], device)?;
    for repeats in [[1i64 << 32, 0], [1 << 31, 1 << 31], [i64::MAX, i64::MAX], [-(1 << 32), 1]] {
        let repeats = Tensor::from_slice(&repeats, [2], device)?;
        ensure!(x.repeat_interleave_by(&repeats, 0, None).is_err());
    }
    let one = Tensor::from_slice(&[1i64 << 31], [1], device)?;
    ensure!(x.repeat_interleave_by(&one, 0, None).is_err());
    const MANY: usize = 1 << 40;
    let empty = Tensor::zeros([0], DType::F32, device)?;
    ensure!(x.tensor_split(MANY, 0).is_err() && empty.chunk(MANY, 0).is_err() && empty.hsplit(MANY).is_err());
    let wide = x.narrow(0, 0, 1)?.broadcast_to([MANY])?;
    ensure!(
        wide.unbind(0).is_err()
            && wide.split(1, 0).is_err()
            && wide.flip([0]).is_err()
            && wide.pdist(2.0).is_err()
    );
    ensure!(x.reshape([1, 1, 2])?.pad(&[1 << 32, 0], PadMode::Constant(0.0.into())).is_err());
    ensure!(x.mvlgamma(MANY).is_err() && x.histc(MANY, 0.0, 1.0).is_err());
    ensure!(Tensor::linspace(0.0, 1.0, MANY, DType::F32, device).is_err());
    ensure!(Tensor::hann_window(MANY, true, DType::F32, device).is_err());
    Ok(())
}

fn views_with_huge_extents_are_errors(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.0], [2], device)?;
    let scalar = x.select(0, 0)?;
    ensure!(scalar.unflatten(0, [1]).is_err() && scalar.tensordot(&x, [0], [0]).is_err());
    ensure!(x.unfold(0, 1, usize::MAX)?.shape() == [1, 1]);
    ensure!(Tensor::eye(0, usize::MAX, DType::F32, device).is_err());
    ensure!(scalar.broadcast_to([usize::MAX, 2]).is_err() && scalar.broadcast_to([usize::MAX, 0]).is_err());
    ensure!(scalar.expand([1_usize << 40])?.expand([1_usize << 40, 1_usize << 40]).is_err());
    ensure!(
        x.as_strided([0], [usize::MAX], None).is_err() && x.as_strided([1], [1], Some(usize::MAX)).is_err()
    );
    // The largest extent is not mistaken for -1.
    ensure!(x.reshape([usize::MAX]).is_err() && x.reshape([usize::MAX, 1]).is_err());
    Ok(())
}

fn products_of_extents_of_several_arguments_do_not_overflow(device: &Device) -> Result<()> {
    const MOST: usize = i32::MAX as usize;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device);
    let plane = zeros(&[0, 2, (1 << 32) - 1])?;
    ensure!(plane.adaptive_avg_pool2d([(1 << 32) - 1, 0])?.shape() == [0, (1 << 32) - 1, 0]);
    // The windows of a tensor without elements are not listed.
    let window = Pool2dOptions { dilation: [1, 2], ..Pool2dOptions::new(2) };
    ensure!(zeros(&[0, 2, 1 << 40])?.max_pool2d(window)?.numel() == 0);
    let doubled = InterpolateOptions::with_size([1_usize << 31]);
    ensure!(zeros(&[0, 1, 1 << 40])?.interpolate(&doubled)?.shape() == [0, 1, 1 << 31]);
    let one = zeros(&[1, 1, 1, 1, 1])?;
    let padded = ConvolutionOptions { padding: Padding::Zeros([MOST; 3]), ..Default::default() };
    ensure!(one.conv3d(&one, None, &padded).is_err());
    let dilated = ConvolutionOptions { dilation: [MOST], ..Default::default() };
    ensure!(zeros(&[1, 1, 4])?.conv1d(&zeros(&[0, 1, 1 << 40])?, None, &dilated).is_err());
    let strided = TransposedConvolutionOptions { stride: [MOST], ..Default::default() };
    ensure!(zeros(&[0, 1, 1 << 40])?.conv_transpose1d(&zeros(&[1, 1, 1])?, None, &strided).is_err());
    let blocks = Im2colOptions { padding: [MOST; 2], ..Default::default() };
    ensure!(zeros(&[1, 1, 1])?.col2im([MOST; 2], [1, 1], &blocks).is_err());
    let unpooled = Pool2dOptions::new(usize::MAX).unpool_output_size([usize::MAX, 1]);
    ensure!(unpooled == [usize::MAX; 2], "{unpooled:?}");
    Ok(())
}

/// Fails unless the elements of ones in f16 share the gradient of what `extreme` computes.
fn ensure_shares(
    name: &str,
    shape: &[usize],
    device: &Device,
    extreme: impl FnOnce(&Tensor) -> ForebayResult<Tensor>,
) -> Result<()> {
    let x = Tensor::ones(shape, DType::F16, device)?.to_leaf()?;
    extreme(&x)?.backward()?;
    let grads = x.grad().context("no gradient")?.to_f64s()?;
    // A multiple of the smallest f16.
    let unit = 0.5f64.powi(24);
    let share = (1.0 / grads.len() as f64 / unit).round() * unit;
    ensure!(grads.iter().all(|&g| g == share), "{name}: {} is not {share}", grads[0]);
    Ok(())
}

fn more_extremes_than_16_bits_count_share_their_gradient(device: &Device) -> Result<()> {
    // From 65,520 on, a count is infinite in f16.
    let line = [65_521];
    ensure_shares("max_all", &line, device, |x| x.max_all())?;
    ensure_shares("min_all", &line, device, |x| x.min_all())?;
    ensure_shares("amax", &[200, 400], device, |x| x.amax([0, 1], false))?;
    ensure_shares("amin of inner dimensions", &[1, 200, 400], device, |x| x.amin([1, 2], false)?.sum_all())?;
    ensure_shares("aminmax", &line, device, |x| Ok(x.aminmax((), false)?.1))?;
    ensure_shares("norm", &line, device, |x| x.norm(f64::INFINITY, (), false))?;
    ensure_shares("median_all", &line, device, |x| x.median_all())?;
    // Kept dimensions lie between the reduced ones, so operations compose the gradient.
    ensure_shares("amax of separate dimensions", &[300, 1, 300], device, |x| {
        x.amax([0, 2], false)?.sum_all()
    })?;
    let x = Tensor::ones([300, 2, 300], DType::F16, device)?.to_leaf()?;
    x.amax([0, 2], false)?.sum_all()?.backward()?;
    let grads = x.grad().context("no gradient")?.to_f64s()?;
    ensure!(grads.iter().all(|&g| g == 186.0 * 0.5f64.powi(24)), "{}", grads[0]);
    Ok(())
}

fn means_of_f64_divide_by_the_whole_count(device: &Device) -> Result<()> {
    require_dtype(device, DType::F64)?;
    // f32 does not hold this count. The elements are one, repeated.
    let n = (1 << 24) + 1;
    let x = Tensor::full([1], 3.0, DType::F64, device)?.broadcast_to([n])?;
    ensure!(x.mean_all()?.item()? == 3.0, "the mean of equal elements is {}", x.mean_all()?.item()?);
    let (variance, mean) = x.var_mean((), 1.0, false)?;
    ensure!(variance.item()? == 0.0 && mean.item()? == 3.0);
    Ok(())
}
