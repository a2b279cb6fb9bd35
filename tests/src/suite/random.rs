//! Random numbers: bits equal to a host implementation of Philox, on every device.

use anyhow::{Context, Result, ensure};
use forebay::device::{Device, RandomState};
use forebay::dtype::DType;
use forebay::nn::init;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, ensure_close, ensure_same_bits};
use super::{compute_dtypes, tests};

tests![
    philox_gives_the_known_answers,
    integers_are_philox_itself,
    uniform_values_are_the_upper_bits_of_philox,
    normal_values_follow_the_integer_algorithm,
    moments_of_normal_values,
    sixteen_bit_draws_round_the_draws_of_f32,
    the_counter_carries,
    random_states_are_replayed,
    dropout_keeps_and_scales,
    classes_are_drawn_in_proportion_to_their_weights,
    uniform_values_lie_in_their_range,
    ranges_that_a_type_does_not_have_are_errors,
    integers_of_float_types_lie_in_their_range,
    truncated_normal_values_lie_in_their_range,
    probabilities_of_zero_and_one_are_certain,
    classes_without_weight_are_never_drawn,
    classes_of_rows_of_any_length_are_drawn_by_their_weights,
    invalid_weights_count_as_zero,
    permutations_sort_sixty_four_bits,
];

/// Philox4x32-10, as in the paper.
fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = 0xd251_1f53 * u64::from(c[0]);
        let p1 = 0xcd9e_8d57 * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

/// Returns the first `n` random words from a state.
fn stream(state: RandomState, n: usize) -> Vec<u32> {
    let blocks = (0..n.div_ceil(4) as u64).flat_map(|i| {
        let at = state.offset.wrapping_add(i);
        philox([at as u32, (at >> 32) as u32, 0, 0], [state.seed as u32, (state.seed >> 32) as u32])
    });
    blocks.take(n).collect()
}

/// Reads the table from the shader's source, so that both sides share it.
fn table() -> Vec<i32> {
    let wgsl = forebay_shaders::template_source("math/normal").unwrap_or_default();
    // Each row of the shader's switch, from octave 31 down, has two vectors of four values.
    let vectors = wgsl.split("= vec4<i32>(").skip(1).filter_map(|v| v.split_once(')'));
    let values: Vec<i32> = vectors
        .flat_map(|(list, _)| list.split(','))
        .filter_map(|n| n.trim().trim_end_matches('i').parse().ok())
        .collect();
    values.chunks(8).rev().flatten().copied().collect()
}

/// Converts 32 bits to a normal value, as the shader does.
fn normal(x: u32, table: &[i32]) -> f32 {
    let odd = ((x & 0x7fff_ffff) << 1) | 1;
    let octave = 31 - odd.leading_zeros();
    let t = (odd << (31 - octave)) & 0x7fff_ffff;
    let row = &table[octave as usize * 8..][..8];
    let sum = row[..7].iter().rev().fold(row[7], |sum, coefficient| {
        let scaled = ((u64::from(sum.unsigned_abs()) * u64::from(t)) >> 31) as i32;
        (if sum < 0 { -scaled } else { scaled }) + coefficient
    });
    let magnitude = sum.max(0) as u32;
    let shift = 8 - magnitude.leading_zeros().min(8);
    let z = ((magnitude >> shift) << shift) as f32 / 268_435_456.0;
    if x >> 31 == 1 { -z } else { z }
}

fn philox_gives_the_known_answers(device: &Device) -> Result<()> {
    ensure!(philox([0; 4], [0; 2]) == [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    ensure!(philox([u32::MAX; 4], [u32::MAX; 2]) == [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    device.manual_seed(0);
    let bits = Tensor::randint(0, 1 << 31, [4], DType::I32, device)?.to_vec::<i32>()?;
    ensure!(
        bits == [0x6627_e8d5u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8].map(|x| (x >> 1) as i32),
        "{bits:x?}"
    );
    Ok(())
}

fn integers_are_philox_itself(device: &Device) -> Result<()> {
    for seed in [0, 1, 42, 0x1234_5678_9abc_def0] {
        for n in [1, 3, 4, 5, 1000, 4097] {
            device.manual_seed(seed);
            let expected = stream(device.random_state(), n);
            let bits = Tensor::randint(0, 1 << 31, [n], DType::I32, device)?.to_vec::<i32>()?;
            ensure!(bits.iter().zip(&expected).all(|(a, b)| *a as u32 == b >> 1), "seed {seed}, {n} values");
            ensure!(device.random_state().offset == n.div_ceil(4) as u64);
        }
    }
    device.manual_seed(3);
    let expected = stream(device.random_state(), 999);
    let small = Tensor::randint(-5, 6, [999], DType::I32, device)?.to_vec::<i32>()?;
    let range = |x: u32| ((u64::from(x) * 11) >> 32) as i32 - 5;
    ensure!(small.iter().zip(expected).all(|(a, b)| *a == range(b)), "-5..6");
    let error = Tensor::randint(i64::from(i32::MIN), i64::from(i32::MAX) + 1, [1], DType::I32, device);
    ensure!(error.is_err(), "a range of 2^32 does not fit the multiplication");
    Ok(())
}

fn uniform_values_are_the_upper_bits_of_philox(device: &Device) -> Result<()> {
    device.manual_seed(11);
    let state = device.random_state();
    let got = Tensor::rand([10_001], DType::F32, device)?.to_vec::<f32>()?;
    let unit = |x: u32| (x >> 8) as f32 / 16_777_216.0;
    ensure!(got.iter().zip(stream(state, 10_001)).all(|(a, x)| *a == unit(x)), "rand");
    let state = device.random_state();
    let got = Tensor::uniform([1001], -2.5, 7.0, DType::F32, device)?.to_vec::<f32>()?;
    ensure!(got.iter().zip(stream(state, 1001)).all(|(a, x)| *a == unit(x) * 9.5 - 2.5), "uniform");
    Ok(())
}

fn normal_values_follow_the_integer_algorithm(device: &Device) -> Result<()> {
    let table = table();
    ensure!(table.len() == 256, "the table was not found in the shader");
    device.manual_seed(5);
    let state = device.random_state();
    let got = Tensor::randn([100_003], DType::F32, device)?.to_vec::<f32>()?;
    for (i, (a, x)) in got.iter().zip(stream(state, got.len())).enumerate() {
        let b = normal(x, &table);
        ensure!(a.to_bits() == b.to_bits(), "number {i} is {a:?}, expected {b:?}");
    }
    let state = device.random_state();
    let got = Tensor::normal([1001], 3.0, 0.5, DType::F32, device)?.to_vec::<f32>()?;
    let good = got.iter().zip(stream(state, 1001)).all(|(a, x)| *a == normal(x, &table) * 0.5 + 3.0);
    ensure!(good, "mean and deviation are one product and one sum, each rounded");
    Ok(())
}

fn moments_of_normal_values(device: &Device) -> Result<()> {
    device.manual_seed(1);
    let n = 1_000_000;
    let z = Tensor::randn([n], DType::F32, device)?.to_f64s()?;
    let moment = |k: i32| z.iter().map(|x| x.powi(k)).sum::<f64>() / n as f64;
    // Tolerance: five standard deviations of each estimate.
    ensure_close(&[moment(1), moment(2), moment(3), moment(4)], &[0.0, 1.0, 0.0, 3.0], 0.0, 0.05)?;
    let beyond = z.iter().filter(|x| x.abs() > 3.0).count() as f64 / n as f64;
    ensure_close(&[beyond], &[0.0027], 0.0, 0.0003)
}

fn sixteen_bit_draws_round_the_draws_of_f32(device: &Device) -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        device.manual_seed(9);
        let wide = Tensor::randn([1003], DType::F32, device)?;
        device.manual_seed(9);
        ensure_same_bits(&Tensor::randn([1003], dtype, device)?, &wide.to_dtype(dtype)?)
            .with_context(|| dtype.to_string())?;
    }
    Ok(())
}

fn the_counter_carries(device: &Device) -> Result<()> {
    let state = RandomState { seed: u64::MAX - 3, offset: u64::from(u32::MAX) - 10 };
    device.set_random_state(state);
    let got = Tensor::randint(0, 1 << 31, [200], DType::I32, device)?.to_vec::<i32>()?;
    ensure!(got.iter().zip(stream(state, 200)).all(|(a, b)| *a as u32 == b >> 1), "across 2^32 blocks");
    Ok(())
}

fn random_states_are_replayed(device: &Device) -> Result<()> {
    device.manual_seed(2);
    Tensor::rand([7], DType::F32, device)?;
    let state = device.random_state();
    let first = Tensor::randn([33], DType::F32, device)?;
    let second = Tensor::randn([33], DType::F32, device)?;
    ensure!(first.to_bytes()? != second.to_bytes()?, "two draws differ");
    device.set_random_state(state);
    ensure_same_bits(&Tensor::randn([33], DType::F32, device)?, &first)?;
    ensure_same_bits(&Tensor::randn([33], DType::F32, device)?, &second)
}

fn dropout_keeps_and_scales(device: &Device) -> Result<()> {
    let (n, p) = (50_000, 0.3);
    let x = Tensor::ones([n], DType::F32, device)?.to_leaf()?;
    device.manual_seed(4);
    let state = device.random_state();
    let y = x.dropout(p, true)?;
    let scale = (1.0 / (1.0 - p)) as f32;
    let bound = (p * 4_294_967_296.0).round() as u32;
    let expected: Vec<f32> = stream(state, n).iter().map(|&u| if u < bound { 0.0 } else { scale }).collect();
    ensure!(y.to_vec::<f32>()? == expected, "the mask is not that of the random values");
    y.backward_with(&Tensor::ones([n], DType::F32, device)?)?;
    let grad = x.grad().context("no gradient")?;
    ensure!(grad.to_vec::<f32>()? == expected, "the gradient has another mask");
    // The kernel for whole quads of elements draws the same mask as the one for other lengths and offsets.
    for (from, count) in [(0, n - 1), (1, n - 1), (4, n - 4), (3, 5)] {
        for dtype in float_types(device) {
            let part = Tensor::ones([n], dtype, device)?.narrow(0, from, count)?;
            device.set_random_state(state);
            let kept = part.dropout(p, true)?.to_f64s()?;
            let same = kept.iter().zip(&expected).all(|(&got, &mask)| (got == 0.0) == (mask == 0.0));
            ensure!(same && kept.len() == count, "{count} elements of {dtype} from {from} on");
        }
    }
    // Values depend on the logical index, not on strides.
    let z = Tensor::ones([100, 500], DType::F32, device)?.t()?;
    device.set_random_state(state);
    ensure!(z.dropout(p, true)?.to_vec::<f32>()? == expected, "of a transpose");
    ensure_same_bits(&z.dropout(p, false)?, &z)
}

fn classes_are_drawn_in_proportion_to_their_weights(device: &Device) -> Result<()> {
    const DRAWS: usize = 4000;
    let weights = Tensor::from_slice(&[0.0f32, 1.0, 0.0, 3.0, 0.0, 2.0, 2.0, 0.0], [2, 4], device)?;
    let drawn = weights.multinomial(DRAWS, true)?.to_f64s()?;
    let of =
        |row: usize, class: f64| drawn[row * DRAWS..][..DRAWS].iter().filter(|&&c| c == class).count() as f64;
    for (row, class, share) in [(0, 1.0, 0.25), (0, 3.0, 0.75), (1, 1.0, 0.5), (1, 2.0, 0.5)] {
        let got = of(row, class) / DRAWS as f64;
        // Tolerance: five standard deviations of the largest estimate.
        ensure!((got - share).abs() < 0.04, "class {class} of row {row}: {got} of the draws, not {share}");
    }
    ensure!(of(0, 0.0) + of(0, 2.0) + of(1, 0.0) + of(1, 3.0) == 0.0, "a class without weight was drawn");
    // Without replacement, all classes of nonzero weight are drawn once.
    let mut both = weights.multinomial(2, false)?.to_f64s()?;
    both[..2].sort_by(f64::total_cmp);
    both[2..].sort_by(f64::total_cmp);
    ensure!(both == [1.0, 3.0, 1.0, 2.0], "{both:?}");
    // The frequency of the first draw is proportional to the weight.
    let rows = weights.narrow(0, 0, 1)?.broadcast_to([DRAWS, 4])?;
    let first = rows.multinomial(1, false)?.to_f64s()?;
    let share = first.iter().filter(|&&c| c == 3.0).count() as f64 / DRAWS as f64;
    ensure!((share - 0.75).abs() < 0.04, "the heavier class came first in {share} of the races");
    Ok(())
}

/// Returns the float types in which the device computes.
fn float_types(device: &Device) -> impl Iterator<Item = DType> {
    compute_dtypes(device).filter(|dtype| dtype.is_float() && dtype.size() > 1)
}

fn within(values: &[f64], low: f64, high: f64) -> Result<()> {
    match values.iter().find(|&&x| !(low <= x && x < high)) {
        Some(x) => anyhow::bail!("{x:e} is not in {low:e} <= x < {high:e}"),
        None => Ok(()),
    }
}

fn uniform_values_lie_in_their_range(device: &Device) -> Result<()> {
    device.manual_seed(21);
    for dtype in float_types(device) {
        let many = [(0.0, 1.0), (-1.0, 1.0), (100.0, 101.0)];
        let wide = f64::from(f32::MAX);
        let huge = if dtype == DType::F16 { (-65_504.0, 65_504.0) } else { (-0.9 * wide, 0.9 * wide) };
        let few =
            [(0.0, 1e-40), (-1e-40, 0.0), (2e-40, 1e-38), (-1e-3, 1e-30), (0.1, 0.7), (-0.7, -0.1), huge];
        let mut rng = SplitMix64(5);
        let random = (0..20).map(|_| {
            // Bounds of any magnitude, with widths from a tenth of them to a few representable values.
            let mut unit = || rng.next() as f64 / u64::MAX as f64;
            let low = (unit() - 0.5) * 10f64.powf(unit() * 8.0 - 4.0);
            (low, low + low.abs() * 10f64.powf(-1.0 - unit()))
        });
        // f16 has no values in the tiny intervals near 0.
        let few = few
            .into_iter()
            .filter(|&(low, _)| dtype != DType::F16 || low == 0.0 || low.abs() > 1e-4)
            .chain(random);
        for (low, high, n) in
            many.map(|(a, b)| (a, b, 1_000_000)).into_iter().chain(few.map(|(a, b)| (a, b, 20_000)))
        {
            let drawn = Tensor::uniform([n], low, high, dtype, device)?.to_f64s()?;
            within(&drawn, low, high).with_context(|| format!("{dtype}"))?;
            if n > 20_000 && low < 1.0 {
                let mean = drawn.iter().sum::<f64>() / n as f64;
                ensure_close(&[mean], &[f64::midpoint(low, high)], 0.0, 3e-3 * (high - low))?;
            }
        }
        // In a range too wide for an f32 difference, half of the values are on each side.
        let drawn = Tensor::uniform([10_000], huge.0, huge.1, dtype, device)?.to_f64s()?;
        let below = drawn.iter().filter(|&&x| x < 0.0).count();
        ensure!((4_700..5_300).contains(&below), "{below} of 10,000 {dtype} are below the middle");
    }
    Ok(())
}

fn ranges_that_a_type_does_not_have_are_errors(device: &Device) -> Result<()> {
    let uniform = |low, high, dtype| Tensor::uniform([4], low, high, dtype, device);
    ensure!(uniform(1.001, 1.002, DType::BF16).is_err(), "a range between two bf16 values was accepted");
    ensure!(uniform(0.0, 1e6, DType::F16).is_err(), "a range beyond f16 was accepted");
    ensure!(uniform(0.0, 1e39, DType::F32).is_err(), "a range beyond f32 was accepted");
    ensure!(uniform(0.0, f64::INFINITY, DType::F32).is_err() && uniform(f64::NAN, 1.0, DType::F32).is_err());
    ensure!(uniform(1.5, 1.5, DType::F32)?.to_vec::<f32>()? == [1.5; 4], "a range of one number");
    ensure!(Tensor::randint(0, 100_000, [4], DType::F16, device).is_err(), "integers beyond f16");
    ensure!(Tensor::randperm(300, DType::U8, device).is_err(), "u8 ends at 255");
    ensure!(Tensor::randperm(3000, DType::F16, device).is_err(), "f16 has gaps from 2048 on");
    Ok(())
}

fn integers_of_float_types_lie_in_their_range(device: &Device) -> Result<()> {
    device.manual_seed(22);
    for dtype in float_types(device) {
        for (low, high) in
            [(0, 8191), (-8191, 4095), (0, i64::from(i32::MAX)), (i64::from(i32::MIN), -5), (7, 8)]
        {
            if dtype == DType::F16 && high - low > 65_504 {
                continue;
            }
            let drawn = Tensor::randint(low, high, [100_000], dtype, device)?.to_f64s()?;
            within(&drawn, low as f64, high as f64).with_context(|| format!("{dtype}"))?;
            ensure!(drawn.iter().all(|x| x.fract() == 0.0), "{dtype} has other than integers");
        }
    }
    Ok(())
}

fn truncated_normal_values_lie_in_their_range(device: &Device) -> Result<()> {
    device.manual_seed(23);
    for dtype in float_types(device) {
        for (low, high) in [(-2.0, 2.0), (0.1, 0.3), (-0.3, -0.1), (5.0, 9.0), (8.0, f64::INFINITY)] {
            let t = Tensor::zeros([20_000], dtype, device)?;
            init::trunc_normal_(&t, 0.0, 1.0, low, high)?;
            let drawn = t.to_f64s()?;
            let good = drawn.iter().all(|&x| low <= x && x <= high && x.is_finite());
            ensure!(good, "{dtype} leaves {low}..{high}");
        }
    }
    Ok(())
}

fn probabilities_of_zero_and_one_are_certain(device: &Device) -> Result<()> {
    for (p, expected) in [(0.0, 0.0), (1.0, 1.0)] {
        let drawn = Tensor::bernoulli([100_000], p, DType::F32, device)?.to_f64s()?;
        ensure!(drawn.iter().all(|&x| x == expected), "a probability of {p}");
    }
    let x = Tensor::from_slice(&[1.0f32, -2.0, f32::INFINITY, f32::NAN], [4], device)?.to_leaf()?;
    let y = x.dropout(1.0, true)?;
    ensure!(y.to_vec::<f32>()? == [0.0; 4], "all elements are dropped, {:?}", y.to_vec::<f32>()?);
    y.sum_all()?.backward()?;
    ensure!(
        x.grad().context("no gradient")?.to_vec::<f32>()? == [0.0; 4],
        "dropped elements have a gradient"
    );
    let z = Tensor::ones([1000], DType::F32, device)?;
    ensure!(z.dropout(0.0, true)?.to_vec::<f32>()? == [1.0; 1000], "dropout of probability 0 drops elements");
    let scores = Tensor::zeros([100_000, 2], DType::F32, device)?;
    ensure!(
        scores.gumbel_softmax(1e-3, false, -1)?.to_f64s()?.iter().all(|p| p.is_finite()),
        "noise is finite"
    );
    Ok(())
}

fn classes_without_weight_are_never_drawn(device: &Device) -> Result<()> {
    device.manual_seed(24);
    let mut rng = SplitMix64(1);
    // Every third class (a former failure), then very different weights, then few of many classes.
    let third: Vec<f32> = (0..600).map(|k| if k % 3 == 0 { (k + 1) as f32 / 7.0 } else { 0.0 }).collect();
    let mixed: Vec<f32> = (0..20_000)
        .map(|_| if rng.below(2) == 0 { 0.0 } else { 10f32.powi(rng.below(70) as i32 - 35) })
        .collect();
    let few: Vec<f32> =
        (0..70_000).map(|k| if k % 10_007 == 10_000 { 0.1 + rng.below(9) as f32 } else { 0.0 }).collect();
    for (weights, draws) in [(third, 2_000_000), (mixed, 500_000), (few, 500_000)] {
        let t = Tensor::from_slice(&weights, [weights.len()], device)?;
        let drawn = t.multinomial(draws, true)?.to_vec::<i64>()?;
        let wrong = drawn.iter().filter(|&&c| weights.get(c as usize).is_none_or(|&w| w <= 0.0)).count();
        ensure!(wrong == 0, "{wrong} draws of {} classes have no weight", weights.len());
        // Without replacement, classes of nonzero weight are drawn first, once each.
        let some = weights.iter().filter(|&&w| w > 0.0).count();
        let drawn = t.multinomial((some + 5).min(weights.len()), false)?.to_vec::<i64>()?;
        let mut first = drawn[..some].to_vec();
        first.sort_unstable();
        first.dedup();
        let good = first.len() == some && first.iter().all(|&c| weights[c as usize] > 0.0);
        ensure!(good, "{} classes: those with a weight come first", weights.len());
        ensure!(drawn[some..].is_sorted() && drawn[some..].iter().all(|&c| weights[c as usize] == 0.0));
    }
    Ok(())
}

fn classes_of_rows_of_any_length_are_drawn_by_their_weights(device: &Device) -> Result<()> {
    device.manual_seed(26);
    // Rows for one thread, rows with one and with two classes for each thread, the longest row of one workgroup, and
    // longer rows.
    for classes in [5, 256, 257, 3000, 8192, 8193] {
        // The extreme scales have infinite sums of weights, or infinite reciprocals.
        for scale in [1.0f32, 1e-37, 1e34] {
            let weights: Vec<f32> =
                (0..2 * classes).map(|k| if k % 7 == 3 { 0.0 } else { (k % 5 + 1) as f32 * scale }).collect();
            let t = Tensor::from_slice(&weights, [2, classes], device)?;
            let draws = 40_000;
            let drawn = t.multinomial(draws, true)?.to_vec::<i64>()?;
            for (row, drawn) in drawn.chunks(draws).enumerate() {
                let weights = &weights[row * classes..][..classes];
                let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
                // Groups of neighbouring classes, of which each should come as often as it weighs.
                let each = classes.div_ceil(16);
                let mut counts = vec![0.0f64; classes.div_ceil(each)];
                for &class in drawn {
                    ensure!(
                        weights.get(class as usize).is_some_and(|&w| w > 0.0),
                        "class {class} of {classes}"
                    );
                    counts[class as usize / each] += 1.0;
                }
                for (group, count) in weights.chunks(each).zip(counts) {
                    let part = group.iter().map(|&w| f64::from(w)).sum::<f64>() / total;
                    let (mean, spread) = (part * draws as f64, (part * (1.0 - part) * draws as f64).sqrt());
                    ensure!((count - mean).abs() <= 5.0 * spread, "{classes}, {scale}: {count}, not {mean}");
                }
            }
        }
    }
    Ok(())
}

fn invalid_weights_count_as_zero(device: &Device) -> Result<()> {
    let weights = [f32::NAN, 1.0, f32::INFINITY, -3.0, 2.0, f32::NEG_INFINITY, f32::MAX, f32::MAX, f32::NAN];
    let t = Tensor::from_slice(&weights, [9], device)?;
    for (count, replacement) in [(10_000, true), (4, false)] {
        let drawn = t.multinomial(count, replacement)?.to_vec::<i64>()?;
        ensure!(drawn.iter().all(|c| [1, 4, 6, 7].contains(c)), "a class without a weight was drawn");
    }
    let none = Tensor::from_slice(&[f32::NAN, 0.0, -1.0, f32::INFINITY], [2, 2], device)?;
    ensure!(
        none.multinomial(50, true)?.to_vec::<i64>()? == [0; 100],
        "rows without weights give another class than 0"
    );
    ensure!(
        none.multinomial(2, false)?.to_vec::<i64>()? == [0, 1, 0, 1],
        "rows without weights give other classes than the first ones"
    );
    Ok(())
}

fn permutations_sort_sixty_four_bits(device: &Device) -> Result<()> {
    device.manual_seed(25);
    let (n, state) = (100_001, device.random_state());
    let got = Tensor::randperm(n, DType::I32, device)?.to_vec::<i32>()?;
    let words = |third: u32| -> Vec<u32> {
        let blocks = (0..n.div_ceil(4) as u64).flat_map(|i| {
            let at = state.offset + i;
            philox([at as u32, (at >> 32) as u32, third, 0], [state.seed as u32, (state.seed >> 32) as u32])
        });
        blocks.take(n).collect()
    };
    // The upper key takes every value but the largest; the lower key breaks ties.
    let upper: Vec<u32> =
        words(0).into_iter().map(|x| ((u64::from(x) * u64::from(u32::MAX)) >> 32) as u32).collect();
    let lower = words(1);
    let mut expected: Vec<i32> = (0..n as i32).collect();
    expected.sort_by_key(|&i| (upper[i as usize], lower[i as usize]));
    ensure!(got == expected, "the permutation is not the order of its keys");
    Ok(())
}
