//! Random programs on a device, compared with an oracle on the host in f64: values, gradients and second gradients.
//!
//! - `program` has the operations and programs as values; an elementwise function, a reduction or a scan is one row.
//! - `generate` draws programs, `oracle` runs them on the host with `hyper_dual` numbers, `execute` on a device.
//! - This module compares them, reduces a failing program and writes it as a test.
//!
//! Every compared element has its own bound, which the oracle derives from the roundings on its way.

mod execute;
mod generate;
mod hyper_dual;
mod oracle;
mod program;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use anyhow::{Context, Result};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::tensor::Tensor;
use thiserror::Error as ErrorMessage;

pub use execute::Mode;
use execute::{Check, Output, Step, source};
use hyper_dual::Bounded;
use oracle::Oracle;
use program::Program;

/// Options of a run.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ProgramOptions {
    /// Number of programs.
    #[arg(long, default_value_t = 100)]
    pub programs: u64,
    /// Seed of the programs.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Index of the first program.
    #[arg(long, default_value_t = 0)]
    pub first: u64,
}

/// Summary of a run.
#[derive(Clone, Debug, Default)]
pub struct ProgramSummary {
    /// Number of programs.
    pub programs: u64,
    /// Number of statements of all programs.
    pub statements: usize,
    /// Number of runs that were compared, in any mode.
    pub runs: usize,
    /// Number of runs that ended with an error about a tensor that was written before its gradient was computed.
    pub refused: usize,
    /// Number of elements that were compared.
    pub elements: usize,
    /// Largest part of its bound that a correct element's error took.
    pub largest_part: f64,
    /// Failing programs as Rust.
    pub failures: Vec<String>,
}

impl fmt::Display for ProgramSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} programs of {} statements, {} runs in {} modes ({} refused), {} elements within {:.2} of their bounds, \
             {} failures",
            self.programs,
            self.statements,
            self.runs,
            Mode::ALL.len(),
            self.refused,
            self.elements,
            self.largest_part,
            self.failures.len()
        )
    }
}

/// Difference between a device and the oracle.
#[derive(Debug, ErrorMessage)]
#[error("{}", .0.summary)]
struct Mismatch(Check);

/// Expected elements of the outputs, with the shapes and dtypes of variables.
struct Expected {
    outputs: HashMap<Output, Vec<Bounded>>,
    types: HashMap<Output, (Vec<usize>, DType)>,
}

impl Expected {
    /// Runs the oracle; `None` if the program is ambiguous.
    fn compute(program: &Program, round: usize, autocast: bool) -> Option<Self> {
        let mut expected = Self { outputs: HashMap::new(), types: HashMap::new() };
        let mut element = 0;
        for leaf in program.leaves() {
            let numel = program.inputs[leaf].shape.iter().product::<usize>();
            let mut parts = Vec::new();
            for _ in 0..numel {
                parts.push(Oracle::run(program, round, element, autocast)?.1.0);
                element += 1;
            }
            let column = |k: usize| parts.iter().map(|part| part[k]).collect::<Vec<_>>();
            expected.outputs.insert(Output::Loss, column(0).into_iter().take(1).collect());
            expected.outputs.insert(Output::Grad(leaf), column(1));
            expected.outputs.insert(Output::Backward(leaf), column(1));
            expected.outputs.insert(Output::Second(leaf), column(3));
        }
        let (oracle, _) = Oracle::run(program, round, 0, autocast)?;
        for variable in program.inputs.len()..oracle.variables.len() {
            let (Some(array), Some(view)) = (oracle.read(variable), oracle.view(variable)) else { continue };
            let output = Output::Variable(variable);
            expected.outputs.insert(output, array.data.iter().map(|x| x.0[0]).collect());
            expected.types.insert(output, (array.shape, view.dtype));
        }
        Some(expected)
    }

    /// Compares an output of a device. Returns the number of its elements, and the largest part of a bound.
    fn compare(
        &self,
        program: &Program,
        round: usize,
        output: Output,
        found: &Tensor,
    ) -> Result<(usize, f64)> {
        let name = match output {
            Output::Variable(v) => program.name(v),
            Output::Loss => "the loss".to_owned(),
            Output::Grad(v) => format!("the gradient of {}", program.name(v)),
            Output::Backward(v) => format!("the gradient that `backward` leaves in {}", program.name(v)),
            Output::Second(v) => format!("the second gradient of {}", program.name(v)),
        };
        let fail = |summary: String, assertion: String| {
            Err(Mismatch(Check { summary: format!("{name}: {summary}."), output, round, assertion }).into())
        };
        if let Some((shape, dtype)) = self.types.get(&output)
            && (found.shape() != shape || found.dtype() != *dtype)
        {
            let summary = format!("{} {:?}, expected {dtype} {shape:?}", found.dtype(), found.shape());
            let assertion =
                format!("assert_eq!((found.shape(), found.dtype()), (&{shape:?}[..], DType::{dtype:?}));\n");
            return fail(summary, assertion);
        }
        let expected = self.outputs.get(&output).map_or(&[][..], Vec::as_slice);
        let values = found.to_f64s()?;
        if values.len() != expected.len() {
            let lengths = format!("{} elements, expected {}", values.len(), expected.len());
            return fail(lengths, format!("assert_eq!(found.numel(), {});\n", expected.len()));
        }
        let mut largest: f64 = 0.0;
        for (k, (value, expected)) in values.iter().zip(expected).enumerate() {
            let difference = (value - expected.value).abs();
            if difference.is_nan() || difference > expected.error {
                let summary = format!(
                    "element {k} is {value:?}, expected {:?} within {:.1e}",
                    expected.value, expected.error
                );
                let assertion = format!(
                    "let found = found.to_f64s()?;\nassert!((found[{k}] - {:?}).abs() <= {:e}, \"{{found:?}}\");\n",
                    expected.value, expected.error
                );
                return fail(summary, assertion);
            }
            if expected.error > 0.0 {
                largest = largest.max(difference / expected.error);
            }
        }
        Ok((values.len(), largest))
    }
}

/// Runs a program in a mode and compares all outputs. Returns the number of elements, and the largest part of a bound.
fn check(program: &Program, mode: Mode, device: &Device) -> Result<(usize, f64)> {
    let mut expected: HashMap<usize, Expected> = HashMap::new();
    let (mut elements, mut largest) = (0, 0f64);
    Step::new(program, mode, device)?.run_rounds(|round, outputs| {
        let expected = match expected.entry(round) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let found = Expected::compute(program, round, mode == Mode::Autocast);
                new.insert(found.context("the oracle cannot decide a comparison")?)
            }
        };
        for (output, tensor) in outputs {
            let (count, part) = expected.compare(program, round, output, &tensor)?;
            (elements, largest) = (elements + count, largest.max(part));
        }
        Ok(())
    })?;
    Ok((elements, largest))
}

/// Reports whether an error is a documented one: a tensor was written before the gradient that needs it was computed.
fn is_refusal(program: &Program, error: &anyhow::Error) -> bool {
    let text = match error.downcast_ref::<Error>() {
        Some(Error::Backward { message: text, .. }) => text,
        _ => return false,
    };
    program.statements.iter().any(|s| s.op.writes())
        && ["changed in place", "overwritten"].iter().any(|part| text.contains(part))
}

/// Returns the program without a statement and all that depends on it.
fn without_statement(program: &Program, dropped: usize) -> Program {
    let inputs = program.inputs.len();
    let mut numbers: Vec<Option<usize>> = (0..inputs).map(Some).collect();
    let mut next = inputs;
    let mut shorter = Program { statements: Vec::new(), cuts: Vec::new(), ..program.clone() };
    for (k, statement) in program.statements.iter().enumerate() {
        if program.cuts.contains(&k) {
            shorter.cuts.push(shorter.statements.len());
        }
        let args: Option<Vec<usize>> = statement.args.iter().map(|&arg| numbers[arg]).collect();
        match args.filter(|_| k != dropped) {
            Some(args) => {
                shorter.statements.push(program::Statement { op: statement.op.clone(), args });
                numbers.push(Some(next));
                next += 1;
            }
            None => numbers.push(None),
        }
    }
    shorter.loss = program.loss.iter().filter_map(|&(v, factor)| Some((numbers[v]?, factor))).collect();
    shorter.cuts.retain(|&cut| cut < shorter.statements.len());
    shorter.cuts.dedup();
    shorter
}

/// Returns the program without inputs that nothing takes. One leaf stays.
fn without_unused_inputs(program: &Program) -> Program {
    let mut kept: Vec<usize> = program.used_from(0).filter(|&v| v < program.inputs.len()).collect();
    kept.extend(program.leaves().next().filter(|_| !program.leaves().any(|leaf| kept.contains(&leaf))));
    kept.sort_unstable();
    kept.dedup();
    let number = |v: usize| match v.checked_sub(program.inputs.len()) {
        Some(statement) => kept.len() + statement,
        None => kept.iter().filter(|&&k| k < v).count(),
    };
    let mut smaller = program.clone();
    smaller.inputs = kept.iter().map(|&k| program.inputs[k].clone()).collect();
    smaller.statements.iter_mut().flat_map(|s| &mut s.args).for_each(|arg| *arg = number(*arg));
    smaller.loss = program.loss.iter().map(|&(v, factor)| (number(v), number(factor))).collect();
    smaller
}

/// Drops statements, checkpoints and terms of the loss while the program fails in this mode.
fn minimize(program: &Program, mode: Mode, device: &Device) -> Program {
    let fails = |candidate: &Program| {
        !candidate.loss.is_empty()
            && Expected::compute(candidate, 0, mode == Mode::Autocast).is_some()
            && check(candidate, mode, device).is_err_and(|error| !is_refusal(candidate, &error))
    };
    let mut smallest = program.clone();
    loop {
        let mut candidates: Vec<Program> =
            (0..smallest.statements.len()).rev().map(|k| without_statement(&smallest, k)).collect();
        for k in 0..smallest.loss.len() {
            let mut candidate = smallest.clone();
            candidate.loss.remove(k);
            candidates.push(candidate);
        }
        for k in 0..smallest.cuts.len() {
            let mut candidate = smallest.clone();
            candidate.cuts.remove(k);
            candidates.push(candidate);
        }
        match candidates.into_iter().find(fails) {
            Some(candidate) => smallest = candidate,
            None => break,
        }
    }
    let pruned = without_unused_inputs(&smallest);
    if fails(&pruned) { pruned } else { smallest }
}

/// Reduces a failing program, and writes it as a test.
fn describe(program: &Program, mode: Mode, device: &Device, origin: &str) -> String {
    let smallest = minimize(program, mode, device);
    let error = match check(&smallest, mode, device) {
        Ok(_) => return format!("{origin}: the failure does not repeat"),
        Err(error) => error,
    };
    let found = match error.downcast::<Mismatch>() {
        Ok(Mismatch(check)) => check,
        Err(error) => {
            Check { summary: format!("{error:#}"), output: Output::Loss, round: 0, assertion: String::new() }
        }
    };
    let summary = format!("{origin}, {mode:?}: {}", found.summary.replace('\n', " "));
    source(&smallest, mode, device, &Check { summary, ..found })
}

/// Runs random programs in all modes on a device, and passes each failing one to `report` as Rust.
pub fn run(options: &ProgramOptions, device: &Device, mut report: impl FnMut(&str)) -> ProgramSummary {
    let mut summary = ProgramSummary::default();
    for index in options.first..options.first + options.programs {
        let program = generate::generate(options.seed, index);
        summary.programs += 1;
        summary.statements += program.statements.len();
        for mode in Mode::ALL {
            match check(&program, mode, device) {
                Ok((elements, part)) => {
                    summary.runs += 1;
                    summary.elements += elements;
                    summary.largest_part = summary.largest_part.max(part);
                }
                Err(error) if is_refusal(&program, &error) => summary.refused += 1,
                Err(_) => {
                    let origin = format!("Program {index} of seed {}", options.seed);
                    let text = describe(&program, mode, device, &origin);
                    report(&text);
                    summary.failures.push(text);
                    // Other modes would mostly report the same fault.
                    break;
                }
            }
        }
    }
    summary
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;

    #[test]
    fn a_seed_gives_the_same_programs() -> Result<()> {
        let device = Device::null(Default::default());
        let check =
            Check { summary: String::new(), output: Output::Loss, round: 0, assertion: String::new() };
        for index in 0..20 {
            let [first, second] = [(); 2].map(|()| generate::generate(7, index));
            ensure!(!first.loss.is_empty(), "program {index} has no loss");
            let [first, second] = [first, second].map(|p| source(&p, Mode::Checkpointed, &device, &check));
            ensure!(first == second && first.contains("let loss"), "program {index}: {first}");
        }
        Ok(())
    }

    #[test]
    fn programs_have_every_kind_of_statement() -> Result<()> {
        let programs: Vec<Program> = (0..300).map(|index| generate::generate(1, index)).collect();
        let statements: usize = programs.iter().map(|p| p.statements.len()).sum();
        ensure!(statements > 1500, "{statements} statements in 300 programs");
        let writes = programs.iter().filter(|p| p.statements.iter().any(|s| s.op.writes())).count();
        let cuts = programs.iter().filter(|p| !p.cuts.is_empty()).count();
        ensure!(writes > 90 && cuts > 200, "{writes} programs write, {cuts} have checkpoints");
        Ok(())
    }
}
