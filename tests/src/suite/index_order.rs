//! Orders of index tensors: sorted once for a version and a view, freed with the index, and the same in captured steps.

use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, ensure};
use forebay::autograd;
use forebay::backend::null::CardProfile;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Result as CoreResult;
use forebay::memory::Config;
use forebay::ops::ScatterReduce;
use forebay::plan::dry_run;
use forebay::profile::Profiler;
use forebay::stream::Stream;
use forebay::tensor::Tensor;

use super::host_reference::ensure_same_bits;
use super::tests;

tests![
    operations_share_the_order_of_an_index,
    every_write_to_an_index_makes_its_order_outdated,
    views_and_types_have_their_own_orders,
    a_storage_keeps_few_orders,
    new_results_equal_results_in_place,
    short_lines_are_sorted_together,
    captured_steps_do_not_sort_constant_indices,
    captured_steps_sort_indices_that_they_change_once,
    captured_steps_notice_indices_that_the_program_writes,
    orders_are_freed_with_the_index,
    a_step_takes_the_predicted_memory,
    streams_and_threads_share_orders,
    checkpoints_recompute_with_kept_orders,
];

/// More indices than the kernels that do not sort take.
const EDGES: usize = 17_000;
const NODES: usize = 300;
const WIDTH: usize = 4;

fn edges(device: &Device) -> Result<Tensor> {
    // Some indices are out of range.
    Ok(Tensor::randint(-3, NODES as i64 + 3, [EDGES], DType::I32, device)?)
}

/// Counts the launches of `work` that sort.
fn count_sorts<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<usize> {
    let profiler = Profiler::start(device)?;
    work()?;
    Ok(profiler.finish()?.spans.iter().filter(|span| span.name.starts_with("sort")).count())
}

/// Operand of each operation.
struct Operands {
    table: Tensor,
    line: Tensor,
    rows: Tensor,
    values: Tensor,
}

type Operation = (&'static str, fn(&Operands, &Tensor) -> CoreResult<Tensor>);

/// Returns the gradient of the weighted sum of `picked` for `x`.
fn gradient(x: &Tensor, picked: &Tensor, weights: &Tensor) -> CoreResult<Tensor> {
    let sum = picked.mul(weights)?.sum_all()?;
    Ok(autograd::grad(&[sum], std::slice::from_ref(x), &Default::default())?.swap_remove(0))
}

/// Operations with an index of one dimension. Those of index 0 to 3 are a graph network's.
const OPERATIONS: [Operation; 7] = [
    ("index_add", |o, index| o.table.detach().index_add(0, index, &o.rows, 1.0)),
    ("gradient of index_select", |o, index| gradient(&o.table, &o.table.index_select(0, index)?, &o.rows)),
    ("scatter_add", |o, index| o.line.detach().scatter_add(0, index, &o.values)),
    ("gradient of gather", |o, index| gradient(&o.line, &o.line.gather(0, index)?, &o.values)),
    ("gradient of embedding", |o, index| gradient(&o.table, &o.table.embedding(index, None)?, &o.rows)),
    ("scatter", |o, index| o.line.detach().scatter(0, index, &o.values)),
    ("scatter_reduce", |o, index| {
        o.line.detach().scatter_reduce(0, index, &o.values, ScatterReduce::Amax, true)
    }),
];

impl Operands {
    fn new(device: &Device) -> Result<Self> {
        let random = |shape: &[usize]| Tensor::randn(shape, DType::F32, device);
        Ok(Self {
            table: random(&[NODES, WIDTH])?.to_leaf()?,
            line: random(&[NODES])?.to_leaf()?,
            rows: random(&[EDGES, WIDTH])?,
            values: random(&[EDGES])?,
        })
    }

    /// Compares all operations with those of a copy of the index. Returns the number of launches that sort.
    fn ensure_all(&self, device: &Device, index: &Tensor) -> Result<usize> {
        let mut got = Vec::new();
        let sorts = count_sorts(device, || {
            got = OPERATIONS.iter().map(|(_, run)| run(self, index)).collect::<CoreResult<Vec<_>>>()?;
            Ok(())
        })?;
        for ((name, run), got) in OPERATIONS.iter().zip(&got) {
            ensure_same_bits(got, &run(self, &index.copy()?)?).context(*name)?;
        }
        Ok(sorts)
    }
}

fn operations_share_the_order_of_an_index(device: &Device) -> Result<()> {
    let operands = Operands::new(device)?;
    let index = edges(device)?;
    let once = count_sorts(device, || Ok(OPERATIONS[0].1(&operands, &index)?))?;
    ensure!(once > 0, "{EDGES} indices are sorted");
    let sorts = operands.ensure_all(device, &index)?;
    ensure!(sorts == 0, "{sorts} launches sort the same indices again");
    for (name, run) in OPERATIONS {
        let index = index.copy()?;
        let sorts = count_sorts(device, || Ok(run(&operands, &index)?))?;
        ensure!(sorts == once, "{name}: {sorts} launches sort, of another operation {once}");
    }
    // The sums are those of the host.
    let (targets, values) = (index.to_vec::<i32>()?, operands.values.to_vec::<f32>()?);
    let mut expected = operands.line.to_vec::<f32>()?;
    for (&target, value) in targets.iter().zip(values) {
        if let Some(sum) = usize::try_from(target).ok().and_then(|target| expected.get_mut(target)) {
            *sum += value;
        }
    }
    let got = OPERATIONS[2].1(&operands, &index)?.to_vec::<f32>()?;
    ensure!(got == expected, "the sums have other bits");
    Ok(())
}

fn every_write_to_an_index_makes_its_order_outdated(device: &Device) -> Result<()> {
    type Write = (&'static str, Box<dyn FnMut() -> Result<()>>);
    let operands = Operands::new(device)?;
    let (index, other) = (edges(device)?, edges(device)?);
    let own = |index: &Tensor| index.clone();
    let mut replayed = {
        let (index, other) = (own(&index), edges(device)?);
        device.capture(move || index.copy_(&other.add(1)?))?
    };
    let writes: Vec<Write> = vec![
        ("copy", {
            let index = own(&index);
            Box::new(move || Ok(index.copy_(&other)?))
        }),
        ("addition", {
            let index = own(&index);
            Box::new(move || Ok(index.add_(2)?))
        }),
        ("fill of a view", {
            let index = own(&index);
            Box::new(move || Ok(index.narrow(0, 100, 900)?.fill_(7)?))
        }),
        ("values of the host", {
            let (index, device) = (own(&index), device.clone());
            let values: Vec<i32> = (0..EDGES as i32).map(|k| (k * 7919) % NODES as i32).collect();
            Box::new(move || Ok(index.copy_(&Tensor::from_slice(&values, [EDGES], &device)?)?))
        }),
        ("replay", Box::new(move || Ok(replayed.replay()?))),
        ("commands of the program", {
            let index = own(&index);
            Box::new(move || {
                let pinned = index.pin_for_write()?;
                drop(pinned);
                Ok(())
            })
        }),
    ];
    for (name, mut write) in writes {
        operands.ensure_all(device, &index)?;
        let sorts = operands.ensure_all(device, &index)?;
        ensure!(sorts == 0, "before the {name}: {sorts} launches sort");
        write().context(name)?;
        let sorts = operands.ensure_all(device, &index).context(name)?;
        ensure!(sorts > 0, "{name}: the old order is used");
    }
    // While commands of the program may write the memory, no order is kept.
    let pinned = index.pin_for_write()?;
    for _ in 0..2 {
        let sorts = count_sorts(device, || Ok(OPERATIONS[0].1(&operands, &index)?))?;
        ensure!(sorts > 0, "an order of memory that the program may write is used");
    }
    drop(pinned);
    Ok(())
}

fn views_and_types_have_their_own_orders(device: &Device) -> Result<()> {
    let operands = Operands::new(device)?;
    let both = Tensor::randint(0, NODES as i64, [2, EDGES], DType::I32, device)?;
    let pairs = Tensor::randint(0, NODES as i64, [EDGES, 2], DType::I32, device)?;
    let line = edges(device)?;
    let views = [both.select(0, 0)?, both.select(0, 1)?, pairs.select(1, 0)?, pairs.select(1, 1)?];
    for _ in 0..2 {
        for (at, view) in views.iter().enumerate() {
            operands.ensure_all(device, view).with_context(|| format!("view {at}"))?;
        }
    }
    for (at, view) in views.iter().enumerate() {
        let sorts = operands.ensure_all(device, view)?;
        ensure!(sorts == 0, "view {at} is sorted again");
    }
    for dtype in [DType::I64, DType::U32] {
        let index = both.select(0, 0)?.to_dtype(dtype)?;
        operands.ensure_all(device, &index).with_context(|| dtype.to_string())?;
        let sorts = operands.ensure_all(device, &index)?;
        ensure!(sorts == 0, "{dtype}: sorted again");
    }
    // Repeated indices of rows share the order of the line, in any rank and along any dimension.
    let table = operands.table.detach();
    let expected = table.index_add(0, &line, &operands.rows, 1.0)?;
    let wide = line.unsqueeze(1)?.broadcast_to([EDGES, WIDTH])?;
    let sorts = count_sorts(device, || {
        ensure_same_bits(&table.scatter_add(0, &wide, &operands.rows)?, &expected)?;
        let turned = table.t()?.index_add(1, &line, &operands.rows.t()?, 1.0)?;
        ensure_same_bits(&turned.t()?.contiguous()?, &expected)
    })?;
    ensure!(sorts == 0, "{sorts} launches sort the line of a broadcast index");
    // Part of a line, and a line that is read backwards in steps of two.
    for (at, part) in
        [line.narrow(0, 3, EDGES - 9)?, pairs.reshape([-1])?.narrow(0, 1, EDGES)?].iter().enumerate()
    {
        let rows = operands.rows.narrow(0, 0, part.numel())?;
        let got = table.index_add(0, part, &rows, 1.0)?;
        ensure_same_bits(&got, &table.index_add(0, &part.copy()?, &rows, 1.0)?)
            .with_context(|| format!("part {at}"))?;
    }
    // Lines with indices of their own, along both dimensions.
    let x = Tensor::randn([3, NODES], DType::F32, device)?;
    let index = Tensor::randint(0, NODES as i64, [3, EDGES], DType::I32, device)?;
    let src = Tensor::randn([3, EDGES], DType::F32, device)?;
    for _ in 0..2 {
        let got = x.scatter_add(1, &index, &src)?;
        for k in 0..3 {
            let one = x.select(0, k)?.scatter_add(0, &index.select(0, k)?.copy()?, &src.select(0, k)?)?;
            ensure_same_bits(&got.select(0, k)?.contiguous()?, &one).with_context(|| format!("line {k}"))?;
        }
        let turned = x.t()?.scatter_add(0, &index.t()?, &src.t()?)?;
        ensure_same_bits(&turned.t()?.contiguous()?, &got)?;
    }
    Ok(())
}

fn a_storage_keeps_few_orders(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Config::default());
    let operands = Operands::new(device)?;
    let windows = Tensor::randint(0, NODES as i64, [2 * EDGES], DType::I32, device)?;
    let before = device.memory().allocated();
    let step = |k: usize| -> Result<()> {
        let index = windows.narrow(0, k, EDGES)?;
        drop(operands.table.detach().index_add(0, &index, &operands.rows, 1.0)?);
        Ok(())
    };
    (0..10).try_for_each(step)?;
    let (held, peak) = (device.memory().allocated(), device.memory().peak_allocated());
    ensure!(held > before, "no order is kept");
    (10..60).try_for_each(step)?;
    let later = (device.memory().allocated(), device.memory().peak_allocated());
    ensure!(later == (held, peak), "{held} bytes and a peak of {peak}, later {later:?}");
    // Outdated orders do not accumulate either.
    windows.add_(0)?;
    step(0)?;
    let few = device.memory().allocated();
    ensure!(few < held, "outdated orders take {} bytes", held - few);
    Ok(())
}

/// A new result is written row by row, and an operand in place run by run.
fn new_results_equal_results_in_place(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32] {
        if !device.supports_dtype(dtype) {
            continue;
        }
        // Runs of about 2,800, some longer and some shorter than the kernels' limits, and 2 to 8.
        for (rows, length) in [(6, EDGES), (40, EDGES), (4000, EDGES), (3, 1024), (2, 1025), (700, 4000)] {
            let x = Tensor::randn([rows, 5], DType::F32, device)?.mul(9)?.to_dtype(dtype)?;
            let src = Tensor::randn([length, 5], DType::F32, device)?.mul(9)?.to_dtype(dtype)?;
            let even = Tensor::randint(-1, rows as i64 + 1, [length], DType::I32, device)?;
            // Three of four indices are the same.
            let is_other = Tensor::randint(0, 4, [length], DType::I32, device)?.eq(0)?;
            let skewed = even.where_(&is_other, &Tensor::full([length], 1.0, DType::I32, device)?)?;
            for (name, index) in [("even", even), ("skewed", skewed)] {
                let what = || format!("{dtype}, {length} {name} indices of {rows} rows");
                let in_place = x.copy()?;
                in_place.index_add_(0, &index, &src, 1.0)?;
                let got = x.index_add(0, &index, &src, 1.0)?;
                ensure_same_bits(&got, &in_place).with_context(what)?;
                // A base and a source of other strides, along another dimension.
                let turned = x.t()?.index_add(1, &index, &src.t()?, 1.0)?;
                ensure_same_bits(&turned.t()?.contiguous()?, &in_place).with_context(what)?;
                let wide = index.unsqueeze(1)?.broadcast_to([length, 5])?;
                let in_place = x.copy()?;
                in_place.scatter_(0, &wide, &src)?;
                ensure_same_bits(&x.scatter(0, &wide, &src)?, &in_place).with_context(what)?;
                if dtype == DType::I32 {
                    continue;
                }
                // The gradient of a lookup begins with zeros, and leaves out the padding.
                let table = x.to_leaf()?;
                let got = gradient(&table, &table.embedding(&index, Some(2.min(rows - 1)))?, &src)?;
                let sums = Tensor::zeros([rows, 5], dtype, device)?;
                sums.index_add_(0, &index, &src, 1.0)?;
                sums.narrow(0, 2.min(rows - 1), 1)?.fill_(0)?;
                if length > 1 << 14 {
                    ensure_same_bits(&got, &sums).with_context(what)?;
                }
            }
        }
    }
    Ok(())
}

/// Rows with less than a tile of indices share a workgroup.
fn short_lines_are_sorted_together(device: &Device) -> Result<()> {
    for (lines, length) in [(3, 5), (100, 1), (7, 300), (2, 513), (1, 2049)] {
        let x = Tensor::zeros([lines, 11], DType::BF16, device)?;
        let rows = Tensor::arange(0.0, lines as f64, 1.0, DType::I32, device)?.reshape([lines, 1])?;
        let columns = Tensor::randint(0, 11, [lines, length], DType::I32, device)?;
        let ones = Tensor::ones([lines, length], DType::BF16, device)?;
        let got = x.index_put(&[Some(&rows), Some(&columns)], &ones, true)?;
        let mut expected = vec![0.0_f32; lines * 11];
        for (at, column) in columns.to_vec::<i32>()?.into_iter().enumerate() {
            expected[at / length * 11 + column as usize] += 1.0;
        }
        ensure!(got.to_dtype(DType::F32)?.to_vec::<f32>()? == expected, "{lines} lines of {length}");
        // The order of each line.
        let index = columns.to_dtype(DType::I64)?;
        let counts = Tensor::zeros([lines, 11], DType::F32, device)?;
        let got = counts.scatter_add(1, &index, &ones.to_dtype(DType::F32)?)?;
        ensure!(got.to_vec::<f32>()? == expected, "scatter_add of {lines} lines of {length}");
    }
    Ok(())
}

/// Graph network of two layers.
struct Graph {
    weights: [Tensor; 2],
    x: Tensor,
}

impl Graph {
    fn new(device: &Device) -> Result<Self> {
        device.manual_seed(11);
        let weight = || Tensor::randn([WIDTH, WIDTH], DType::F32, device)?.mul(0.1)?.detach().to_leaf();
        Ok(Self { weights: [weight()?, weight()?], x: Tensor::randn([NODES, WIDTH], DType::F32, device)? })
    }

    /// Runs a training step, and returns its loss.
    fn step(&self, from: &Tensor, to: &Tensor) -> CoreResult<Tensor> {
        let mut x = self.x.clone();
        for weight in &self.weights {
            let h = x.linear(weight, None)?;
            x = h.index_add(0, to, &h.index_select(0, from)?.mul(1e-2)?, 1.0)?.tanh()?;
        }
        let loss = x.square()?.mean_all()?;
        loss.backward()?;
        let _no_grad = autograd::no_grad();
        for weight in &self.weights {
            if let Some(grad) = weight.grad() {
                weight.sub_(&grad.mul(0.1)?)?;
            }
            weight.set_grad(None);
        }
        Ok(loss.detach())
    }

    fn ensure_same(&self, other: &Self, what: &str) -> Result<()> {
        let pairs = self.weights.iter().zip(&other.weights);
        pairs.into_iter().try_for_each(|(a, b)| ensure_same_bits(a, b)).with_context(|| what.to_owned())
    }
}

fn captured_steps_do_not_sort_constant_indices(device: &Device) -> Result<()> {
    let (from, to) = (edges(device)?, edges(device)?);
    for records_at_once in [false, true] {
        let (eager, captured) = (Graph::new(device)?, Graph::new(device)?);
        let (from, to) = (from.copy()?, to.copy()?);
        let run = || captured.step(&from, &to);
        let mut step =
            if records_at_once { device.record_with(&[], |_| run())? } else { device.capture(run)? };
        let runs = if records_at_once { 1 } else { 2 };
        for _ in 0..runs + 3 {
            eager.step(&from.copy()?, &to.copy()?)?;
        }
        // The second replay prepares a driver's graph, and the third runs it.
        let sorts = count_sorts(device, || Ok(step.replay()?))?;
        ensure!(sorts == 0, "{sorts} launches of a replay sort");
        step.replay()?;
        step.replay()?;
        captured.ensure_same(&eager, "replays")?;
        // The step keeps the indices.
        drop((from, to));
        step.replay()?;
    }
    Ok(())
}

fn captured_steps_sort_indices_that_they_change_once(device: &Device) -> Result<()> {
    let (from, to) = (edges(device)?, edges(device)?);
    let alone = from.copy()?;
    let operands = Operands::new(device)?;
    let once = count_sorts(device, || Ok(OPERATIONS[0].1(&operands, &alone)?))?;
    // As inputs.
    let (eager, captured) = (Graph::new(device)?, Graph::new(device)?);
    let mut step = device.capture_with(&[&from, &to], |inputs| captured.step(&inputs[0], &inputs[1]))?;
    (0..2).try_for_each(|_| eager.step(&from, &to).map(drop))?;
    for k in 0..4 {
        let inputs = [edges(device)?, edges(device)?];
        eager.step(&inputs[0], &inputs[1])?;
        let sorts = count_sorts(device, || Ok(step.run(&[&inputs[0], &inputs[1]])?))?;
        ensure!(sorts == 2 * once, "two indices take {sorts} launches, one takes {once}");
        captured.ensure_same(&eager, &format!("run {k}"))?;
    }
    drop(step);
    // Computed by the step.
    let (eager, captured) = (Graph::new(device)?, Graph::new(device)?);
    let turned = |graph: &Graph| graph.step(&from.add(1)?, &to.sub(1)?);
    let mut step = device.capture(|| turned(&captured))?;
    (0..4).try_for_each(|_| turned(&eager).map(drop))?;
    let sorts = count_sorts(device, || Ok(step.replay()?))?;
    ensure!(sorts == 2 * once, "two computed indices take {sorts} launches, one takes {once}");
    step.replay()?;
    captured.ensure_same(&eager, "computed indices")?;
    drop(step);
    // Written by the step between its uses, and after them.
    for writes_first in [false, true] {
        let (eager, captured) = (Graph::new(device)?, Graph::new(device)?);
        let state = [(from.copy()?, to.copy()?), (from.copy()?, to.copy()?)];
        let moved = |graph: &Graph, (from, to): &(Tensor, Tensor)| {
            if writes_first {
                from.add_(1)?;
            }
            let first = graph.step(from, to)?;
            from.copy_(&from.add(1)?.remainder(NODES as i64)?)?;
            let second = graph.step(from, to)?;
            to.copy_(&to.add(1)?.remainder(NODES as i64)?)?;
            first.add(&second)
        };
        let mut step = device.capture(|| moved(&captured, &state[1]))?;
        (0..2).try_for_each(|_| moved(&eager, &state[0]).map(drop))?;
        for k in 0..4 {
            ensure_same_bits(&step.replay()?, &moved(&eager, &state[0])?)
                .with_context(|| format!("replay {k}, writes first: {writes_first}"))?;
            captured.ensure_same(&eager, "written indices")?;
        }
    }
    Ok(())
}

fn captured_steps_notice_indices_that_the_program_writes(device: &Device) -> Result<()> {
    let (eager, captured) = (Graph::new(device)?, Graph::new(device)?);
    let (from, to) = (edges(device)?, edges(device)?);
    let mut step = device.capture(|| captured.step(&from, &to))?;
    (0..2).try_for_each(|_| eager.step(&from, &to).map(drop))?;
    let mut writer = {
        let (from, source) = (from.clone(), edges(device)?);
        device.capture(move || from.copy_(&source))?
    };
    for k in 0..6 {
        match k {
            0 => from.copy_(&edges(device)?)?,
            1 => to.narrow(0, 0, 50)?.fill_(1)?,
            2 => writer.replay()?,
            // An eager use sorts for the captured step too.
            3 => {
                to.copy_(&edges(device)?)?;
                drop(Operands::new(device)?.table.index_add(0, &to, &Operands::new(device)?.rows, 1.0)?);
            }
            _ => {}
        }
        let loss = eager.step(&from.copy()?, &to.copy()?)?;
        let mut got = None;
        let sorts = count_sorts(device, || {
            got = Some(step.replay()?);
            Ok(())
        })?;
        ensure!((sorts > 0) == (k < 3), "replay {k} sorts with {sorts} launches");
        ensure_same_bits(&got.context("no loss")?, &loss).with_context(|| format!("replay {k}"))?;
        captured.ensure_same(&eager, &format!("replay {k}"))?;
    }
    Ok(())
}

fn orders_are_freed_with_the_index(device: &Device) -> Result<()> {
    let device = &Device::with_config(device.backend().clone(), Config::default());
    let graph = Graph::new(device)?;
    let operands = Operands::new(device)?;
    let run = |from: &Tensor, to: &Tensor| -> Result<()> {
        graph.step(from, to)?;
        OPERATIONS.iter().try_for_each(|(_, run)| run(&operands, from).map(drop))?;
        Ok(())
    };
    run(&edges(device)?, &edges(device)?)?;
    let before = device.memory().allocated();
    let (from, to) = (edges(device)?, edges(device)?);
    let indices = device.memory().allocated();
    run(&from, &to)?;
    let kept = device.memory().allocated() - indices;
    // Keys and positions of two indices.
    ensure!((16 * EDGES as u64..=16 * EDGES as u64 + 4096).contains(&kept), "orders take {kept} bytes");
    run(&from, &to)?;
    ensure!(device.memory().allocated() - indices == kept, "a second step keeps more");
    if device.backend().supports_pinned_host() {
        to.offload_()?;
        ensure!(
            device.memory().allocated() < indices + kept / 2 + 4096,
            "an offloaded index keeps its order"
        );
        run(&from, &to)?;
    }
    let view = from.narrow(0, 0, 3)?;
    drop((from, to));
    ensure!(device.memory().allocated() > before, "a view keeps its storage");
    drop(view);
    ensure!(device.memory().allocated() == before, "orders outlive their index");
    // A captured step keeps the orders that its replays read.
    let (from, to) = (edges(device)?, edges(device)?);
    let step = device.capture(|| graph.step(&from, &to))?;
    drop((from, to));
    drop(step);
    ensure!(device.memory().allocated() == before, "orders outlive their captured step");
    // Steps with new indices.
    for _ in 0..10 {
        run(&edges(device)?, &edges(device)?)?;
    }
    let (after_ten, peak) = (device.memory().allocated(), device.memory().peak_allocated());
    for _ in 0..30 {
        run(&edges(device)?, &edges(device)?)?;
    }
    let later = (device.memory().allocated(), device.memory().peak_allocated());
    ensure!(later == (after_ten, peak), "{after_ten} and {peak} bytes, later {later:?}");
    Ok(())
}

fn a_step_takes_the_predicted_memory(device: &Device) -> Result<()> {
    let profile = CardProfile::from_device(device);
    let run = |device: &Device, captured: bool| -> CoreResult<()> {
        let ends = || Tensor::randint(0, NODES as i64, [EDGES], DType::I32, device);
        let (from, to, more) = (ends()?, ends()?, ends()?);
        let weight = || Tensor::randn([WIDTH, WIDTH], DType::F32, device)?.to_leaf();
        let graph =
            Graph { weights: [weight()?, weight()?], x: Tensor::randn([NODES, WIDTH], DType::F32, device)? };
        let once = || graph.step(&from, &to);
        let mut step = captured.then(|| device.capture(once)).transpose()?;
        for k in 0..6 {
            if k == 3 {
                from.copy_(&more)?;
            }
            match &mut step {
                Some(step) => drop(step.replay()?),
                None => drop(once()?),
            }
        }
        drop(graph.step(&ends()?, &to)?);
        Ok(())
    };
    for captured in [false, true] {
        let predicted = dry_run(&profile, |dry| run(dry, captured))?;
        let real = Device::with_config(Arc::clone(device.backend()), profile.config);
        run(&real, captured)?;
        super::plan::ensure_prediction(&predicted, &real.memory())
            .with_context(|| format!("captured: {captured}"))?;
    }
    Ok(())
}

fn streams_and_threads_share_orders(device: &Device) -> Result<()> {
    let operands = Operands::new(device)?;
    let (index, other) = (edges(device)?, edges(device)?);
    let streams = [Stream::default_stream(device), Stream::new(device), Stream::new(device)];
    for k in 0..12 {
        let results = streams.each_ref().map(|stream| {
            let _on = stream.enter();
            OPERATIONS[k % OPERATIONS.len()].1(&operands, &index)
        });
        let expected = OPERATIONS[k % OPERATIONS.len()].1(&operands, &index.copy()?)?;
        for got in results {
            ensure_same_bits(&got?, &expected).with_context(|| format!("round {k}"))?;
        }
        let _on = streams[k % streams.len()].enter();
        index.copy_(&other.add((k % 5) as i64)?)?;
    }
    let expected = OPERATIONS[0].1(&operands, &index.copy()?)?.to_vec::<f32>()?;
    let (operands, index, expected) = (&operands, &index, &expected);
    thread::scope(|scope| {
        let use_it = move || -> Result<()> {
            for _ in 0..8 {
                let got = OPERATIONS[0].1(operands, index)?.to_vec::<f32>()?;
                ensure!(&got == expected, "a thread used the unfinished order of another one");
            }
            Ok(())
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(use_it)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
        })
    })
}

fn checkpoints_recompute_with_kept_orders(device: &Device) -> Result<()> {
    let operands = Operands::new(device)?;
    let index = edges(device)?;
    let weight = operands.table.copy()?.detach().to_leaf()?;
    let body = |x: &Tensor, index: &Tensor, rows: &Tensor| {
        x.index_add(0, index, &rows.index_add(0, index, rows, 1.0)?.tanh()?, 1.0)?.tanh()
    };
    let plain = {
        let y = body(&weight, &index.copy()?, &operands.rows)?;
        gradient(&weight, &y, &operands.table.detach())?
    };
    for k in 0..2 {
        let (inner, rows) = (index.clone(), operands.rows.clone());
        let y = autograd::checkpoint(&[&weight], move |x| body(&x[0], &inner, &rows))?;
        let got = gradient(&weight, &y, &operands.table.detach())?;
        ensure_same_bits(&got, &plain).with_context(|| format!("run {k}"))?;
    }
    // The body reads the index, so a change before the recomputation is noticed as without a kept order.
    let (inner, rows) = (index.clone(), operands.rows.clone());
    let y = autograd::checkpoint(&[&weight], move |x| body(&x[0], &inner, &rows))?;
    index.add_(1)?;
    let error = gradient(&weight, &y, &operands.table.detach())
        .err()
        .context("the change of the index was not detected")?;
    ensure!(error.to_string().contains("checkpoint"), "{error}");
    Ok(())
}
