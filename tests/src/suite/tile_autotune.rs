//! Choice of tiles of matrix products by timing. Every candidate computes the same bits, and choices are kept on disk.
//! Neither results, captured steps nor memory depend on them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::plan::dry_run;
use forebay::profile::Profiler;
use forebay::tensor::Tensor;

use super::{skip, tests};

tests![
    every_candidate_computes_the_same_bits,
    every_candidate_applies_epilogues,
    choices_are_timed_once_and_kept_on_disk,
    a_damaged_choice_is_made_again,
    timing_keeps_gradients_and_predicted_memory,
    captured_and_profiled_steps_are_not_timed,
];

/// Candidates of a product, at most: forced numbers count round.
const CANDIDATES: usize = 12;

/// Returns the device with its own pool, settings and choices.
fn with_own_choices(device: &Device, folder: Option<&Path>) -> Device {
    let device = Device::with_config(Arc::clone(device.backend()), device.pool().config());
    device.set_variant_choice_folder(folder);
    device
}

/// Skips devices whose library multiplies matrices.
fn uses_tiles(device: &Device) -> bool {
    !device.library_features().matmul
}

/// A folder of the test that does not exist at first, removed at the end.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-tiles-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    /// Returns the paths and the contents of all choices.
    fn choices(&self) -> Result<Vec<(PathBuf, Vec<u8>)>> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "choice") {
                let content = fs::read(&path)?;
                all.push((path, content));
            }
        }
        all.sort();
        Ok(all)
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Factor of the extents of products that are timed: a GPU has several candidates for large ones only.
fn scale(device: &Device) -> usize {
    if device.info().software { 1 } else { 16 }
}

fn random(shape: [usize; 2], dtype: DType, device: &Device) -> CoreResult<Tensor> {
    Tensor::randn(shape, DType::F32, device)?.to_dtype(dtype)
}

/// Calls `run` with each candidate forced, and compares the bytes with those of the cost model's choice.
fn compare_candidates(device: &Device, run: impl Fn() -> Result<Vec<Tensor>>) -> Result<()> {
    let bytes =
        || -> Result<Vec<Vec<u8>>> { Ok(run()?.iter().map(Tensor::to_bytes).collect::<CoreResult<_>>()?) };
    device.force_tile(None);
    let expected = bytes()?;
    for number in 0..CANDIDATES {
        device.force_tile(Some(number));
        let made = bytes();
        device.force_tile(None);
        let made = made.with_context(|| format!("candidate {number}"))?;
        ensure!(made == expected, "candidate {number}: other bits");
    }
    Ok(())
}

fn every_candidate_computes_the_same_bits(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    let device = &with_own_choices(device, None);
    // Edges of every tile, whole tiles, and a sum that several workgroups share.
    for [m, n, k] in [[75, 100, 90], [128, 256, 64], [24, 16, 2000]] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // A software driver compiles for a minute, and types differ by loads and stores, which edges show.
            if device.info().software && dtype != DType::F32 && m != 75 {
                continue;
            }
            let (a, b) = (random([m, k], dtype, device)?, random([k, n], dtype, device)?);
            let (at, bt) = (a.t()?.contiguous()?.t()?, b.t()?.contiguous()?.t()?);
            for (a, b) in [(&a, &b), (&at, &bt)] {
                compare_candidates(device, || Ok(vec![a.matmul(b)?]))
                    .with_context(|| format!("{m} x {n} x {k} {dtype}, strides {:?}", a.strides()))?;
            }
        }
    }
    Ok(())
}

fn every_candidate_applies_epilogues(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    let device = &with_own_choices(device, None);
    for dtype in [DType::F32, DType::F16] {
        let x = random([70, 64], dtype, device)?.to_leaf()?;
        let (w, b) = (random([68, 64], dtype, device)?, random([1, 68], dtype, device)?.squeeze(0)?);
        let g = random([70, 68], dtype, device)?;
        compare_candidates(device, || {
            let (w, b) = (w.to_leaf()?, b.to_leaf()?);
            // The second pass adds to the gradients of the first.
            let mut last = x.detach();
            for _ in 0..2 {
                last = x.linear(&w, Some(&b))?;
                last.backward_with(&g)?;
            }
            let grads = [&w, &b].map(|t| t.grad().context("no gradient"));
            let [dw, db] = grads;
            Ok(vec![last.detach(), dw?, db?])
        })
        .with_context(|| dtype.to_string())?;
    }
    Ok(())
}

fn choices_are_timed_once_and_kept_on_disk(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    let folder = TempFolder::new("kept");
    let first = with_own_choices(device, Some(&folder.0));
    let n = 128 * scale(device);
    let flops = Some(2 * (n * n * n) as u64);
    let (a, b) = (random([n, n], DType::F32, &first)?, random([n, n], DType::F32, &first)?);
    first.set_tile_autotune_min_flops(None);
    let expected = a.matmul(&b)?.to_bytes()?;
    ensure!(folder.choices()?.is_empty(), "a choice without timing");
    first.set_tile_autotune_min_flops(flops);
    a.narrow(0, 0, n / 2)?.matmul(&b)?;
    ensure!(folder.choices()?.is_empty(), "a product below the limit was timed");
    ensure!(a.matmul(&b)?.to_bytes()? == expected, "timing changes the result");
    let kept = folder.choices()?;
    ensure!(kept.len() == 1, "{} choices after one kind of product", kept.len());
    let text = String::from_utf8_lossy(&kept[0].1).into_owned();
    let info = first.info();
    let extents = format!("{n}x{n}x{n}x1");
    for part in [&info.name, &info.driver, "matmul dtype=f32", &extents] {
        ensure!(text.contains(part), "{part} is missing in {text:?}");
    }
    ensure!(first.describe_tile_choice().contains("1 choices in"), "{}", first.describe_tile_choice());
    // Another process reads the choice: the file would be written again otherwise.
    fs::remove_file(&kept[0].0)?;
    ensure!(
        a.matmul(&b)?.to_bytes()? == expected && folder.choices()?.is_empty(),
        "timed twice in a process"
    );
    fs::write(&kept[0].0, &kept[0].1)?;
    let second = with_own_choices(device, Some(&folder.0));
    second.set_tile_autotune_min_flops(Some(0));
    let (a, b) = (a.to_device(&second)?, b.to_device(&second)?);
    ensure!(a.matmul(&b)?.to_bytes()? == expected, "a choice from disk changes the result");
    fs::remove_file(&kept[0].0)?;
    ensure!(a.matmul(&b)?.to_bytes()? == expected && folder.choices()?.is_empty(), "the choice was not read");
    Ok(())
}

fn a_damaged_choice_is_made_again(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    let folder = TempFolder::new("damaged");
    let mut expected = None;
    for damage in [None, Some(&b"forebay"[..]), Some(&b""[..])] {
        if let Some(bytes) = damage {
            let (path, _) = folder.choices()?.pop().context("no choice")?;
            fs::write(path, bytes)?;
        }
        let device = with_own_choices(device, Some(&folder.0));
        device.set_tile_autotune_min_flops(Some(0));
        device.manual_seed(1);
        let [m, k, n] = [96, 64, 80].map(|extent| extent * scale(&device));
        let (a, b) = (random([m, k], DType::F32, &device)?, random([k, n], DType::F32, &device)?);
        let made = a.matmul(&b)?.to_bytes()?;
        ensure!(*expected.get_or_insert_with(|| made.clone()) == made, "other bits after {damage:?}");
        let kept = folder.choices()?;
        ensure!(kept.len() == 1 && kept[0].1.len() > 40, "after {damage:?}: {kept:?}");
    }
    Ok(())
}

fn timing_keeps_gradients_and_predicted_memory(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    // The weight's gradient is a long sum of few elements, which is split and accumulated.
    let step = |device: &Device| -> CoreResult<Vec<Tensor>> {
        device.manual_seed(3);
        let x = random([3000, 24], DType::F32, device)?;
        let w = random([16, 24], DType::F32, device)?.to_leaf()?;
        for _ in 0..3 {
            let y = x.linear(&w, None)?;
            y.backward_with(&y.detach())?;
        }
        Ok(w.grad().into_iter().collect())
    };
    let predicted = dry_run(&CardProfile::from_device(device), |dry| step(dry))?.peak_allocated;
    let mut expected = None;
    for min_flops in [None, Some(0)] {
        let device = with_own_choices(device, None);
        device.set_tile_autotune_min_flops(min_flops);
        let grads = step(&device)?;
        let bytes = grads.first().context("no gradient")?.to_bytes()?;
        ensure!(*expected.get_or_insert_with(|| bytes.clone()) == bytes, "timing changes a gradient");
        let peak = device.memory().peak_allocated();
        ensure!(peak == predicted, "{min_flops:?}: predicted {predicted}, measured {peak}");
    }
    Ok(())
}

fn captured_and_profiled_steps_are_not_timed(device: &Device) -> Result<()> {
    if !uses_tiles(device) {
        return skip("its library multiplies matrices");
    }
    let folder = TempFolder::new("captured");
    let device = &with_own_choices(device, Some(&folder.0));
    let [m, k, n] = [100, 64, 72].map(|extent| extent * scale(device));
    let (a, b) = (random([m, k], DType::F32, device)?, random([k, n], DType::F32, device)?);
    let step = || a.matmul(&b);
    // A recording follows an eager run.
    device.set_tile_autotune_min_flops(None);
    step()?;
    let plain = device.record_with(&[], |_| step())?.stats().commands;
    device.set_tile_autotune_min_flops(Some(0));
    let mut captured = device.record_with(&[], |_| step())?;
    ensure!(captured.stats().commands == plain, "{} commands instead of {plain}", captured.stats().commands);
    let profiler = Profiler::start(device)?;
    let expected = step()?;
    let spans = profiler.finish()?.spans.len();
    ensure!(spans == plain, "{spans} spans instead of {plain}");
    ensure!(folder.choices()?.is_empty(), "timed during a capture or a profile");
    ensure!(captured.replay()?.to_bytes()? == expected.to_bytes()?, "a replay has other bits");
    step()?;
    ensure!(folder.choices()?.len() == 1, "not timed after the capture");
    Ok(())
}
