//! Signals that end a program: a running training loop saves its checkpoint, and a killed one leaves no partial files.
#![cfg(all(unix, feature = "train"))]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use forebay_core::device::Device;
use forebay_core::error::Result;
use forebay_nn::data::Dataset;
use forebay_nn::nn::{Linear, Module};
use forebay_nn::optim::{Optimizer, Sgd};
use forebay_nn::train::{FitStatus, Trainer};

/// Environment variable that passes the checkpoint's path to the child program.
const CHECKPOINT: &str = "FOREBAY_TEST_CHECKPOINT";
const STEPS: u64 = 200_000;

struct ZeroDataset;

impl Dataset for ZeroDataset {
    type Input = f32;
    type Target = i64;
    fn len(&self) -> usize {
        4
    }
    fn input_shape(&self) -> &[usize] {
        &[3]
    }
    fn target_shape(&self) -> &[usize] {
        &[]
    }
    fn get(&self, _: usize, input: &mut [f32], target: &mut [i64]) -> Result<()> {
        input.fill(0.0);
        target[0] = 0;
        Ok(())
    }
}

fn trainer(net: &Linear) -> Trainer<'_, Linear, impl Optimizer + use<>> {
    Trainer::new(net, Sgd::new(net.parameters(), 0.1)).steps(STEPS).quiet()
}

#[test]
#[ignore = "the program that the other tests start and signal"]
fn trains() -> Result<()> {
    run_trainer(true)
}

#[test]
#[ignore = "the program that the other tests start and signal"]
fn trains_without_handlers() -> Result<()> {
    run_trainer(false)
}

fn run_trainer(stops_on_signals: bool) -> Result<()> {
    let device = Device::null(Default::default());
    let net = Linear::new(3, 2, &device)?;
    let file = std::env::var_os(CHECKPOINT).map(PathBuf::from).expect("the tests name a file");
    let run = trainer(&net).checkpoint(file, u64::MAX);
    let mut run = if stops_on_signals { run.stop_on_signals() } else { run };
    // One step for each line of input; free-running after the input has ended.
    let mut open = true;
    let ended = run.fit(&ZeroDataset.batches(4), |x, y| {
        if open {
            println!("step");
            open = std::io::stdin().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0);
        }
        net.forward(x)?.cross_entropy(y)
    })?;
    println!("{}", if ended == FitStatus::Interrupted { "interrupted" } else { "finished" });
    Ok(())
}

#[test]
#[ignore = "the program that the other tests start and kill"]
fn saves() -> Result<()> {
    let file = std::env::var_os(CHECKPOINT).map(PathBuf::from).expect("the tests name a file");
    loop {
        forebay_nn::io::write_atomic(&file, |out| {
            println!("step");
            (0..64).try_for_each(|_| out.write_all(&[7; 1 << 16])).expect("it can be written");
            Ok(())
        })?;
    }
}

/// Child process that runs a test of this file.
struct ChildProgram {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    file: PathBuf,
    folder: tempfile::TempDir,
}

impl ChildProgram {
    /// Starts the child through a shell that first runs `before`, and waits for its first step.
    fn spawn(before: &str) -> Self {
        Self::spawn_in(tempfile::tempdir().expect("a folder can be made"), before, "trains")
    }

    fn spawn_in(folder: tempfile::TempDir, before: &str, name: &str) -> Self {
        let file = folder.path().join("run.safetensors");
        let mut child = Command::new("sh")
            .args(["-c", &format!("{before} exec \"$0\" {name} --exact --ignored --nocapture")])
            .arg(std::env::current_exe().expect("a test has a program"))
            .env(CHECKPOINT, &file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it can be started");
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = (input.expect("piped"), BufReader::new(output.expect("piped")));
        let mut program = Self { child, input, output, file, folder };
        program.wait_for("step");
        program
    }

    fn wait_for(&mut self, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            let bytes = self.output.read_line(&mut line).expect("it can be read");
            assert!(bytes > 0, "the program ended before it printed `{what}`");
        }
    }

    fn run_step(&mut self) {
        self.input.write_all(b"\n").expect("it reads");
        self.wait_for("step");
    }

    fn send_signal(&self, name: &str) {
        let kill = format!("kill -s {name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().is_ok_and(|s| s.success()), "{name}");
    }

    /// Closes the child's input, and returns its output, its exit status and its files.
    fn wait(mut self) -> (String, ExitStatus, PathBuf, tempfile::TempDir) {
        drop(self.input);
        let mut printed = String::new();
        std::io::Read::read_to_string(&mut self.output, &mut printed).expect("it can be read");
        (printed, self.child.wait().expect("it was started"), self.file, self.folder)
    }
}

/// Reports whether this process was started with a signal ignored.
fn is_ignored(signal: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[test]
fn every_signal_that_ends_a_program_saves_a_checkpoint_first() -> Result<()> {
    for (name, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        // A program that starts with the signal ignored, as under nohup or in the background of a script, continues.
        if is_ignored(number) {
            continue;
        }
        let program = ChildProgram::spawn("");
        program.send_signal(name);
        let (printed, status, file, _folder) = program.wait();
        assert!(printed.contains("interrupted") && status.success(), "{name}: {printed} {status}");
        let net = Linear::new(3, 2, &Device::null(Default::default()))?;
        let resumed = trainer(&net).resume(&file)?;
        assert!(
            (1..STEPS).contains(&resumed.steps_done()),
            "{name}: stopped after step {}",
            resumed.steps_done()
        );
    }
    Ok(())
}

#[test]
fn a_trainer_leaves_signals_to_the_program_by_default() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let program = ChildProgram::spawn_in(folder, "", "trains_without_handlers");
    program.send_signal("TERM");
    let (printed, status, _, _folder) = program.wait();
    assert!(status.signal().is_some() && !printed.contains("interrupted"), "{printed} {status}");
}

#[test]
fn a_signal_that_the_program_was_started_to_ignore_stays_ignored() {
    let mut program = ChildProgram::spawn("trap '' HUP;");
    if std::fs::metadata("/proc/self/status").is_err() {
        // This system does not report ignored signals.
        return;
    }
    program.send_signal("HUP");
    (0..50).for_each(|_| program.run_step());
    program.send_signal("TERM");
    let (printed, status, file, _folder) = program.wait();
    assert!(printed.contains("interrupted") && status.success() && file.exists(), "{printed} {status}");
    assert_eq!(status.signal(), None);
}

#[test]
fn killed_writers_leave_complete_files() -> std::io::Result<()> {
    let mut folder = tempfile::tempdir()?;
    let file = folder.path().join("run.safetensors");
    for round in 0..10 {
        let mut program = ChildProgram::spawn_in(folder, "", "saves");
        // At various points during a save.
        (0..round % 4).for_each(|_| program.wait_for("step"));
        program.send_signal("KILL");
        let (_, status, _, kept) = program.wait();
        assert_eq!(status.signal(), Some(9));
        folder = kept;
        if let Ok(bytes) = std::fs::read(&file) {
            assert!(bytes.len() == 64 << 16 && bytes.iter().all(|b| *b == 7), "damaged");
        }
        assert!(std::fs::read_dir(folder.path())?.count() <= 2, "more than one leftover");
    }
    forebay_nn::io::write_bytes(&file, b"whole").expect("it can be written");
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
    Ok(())
}
