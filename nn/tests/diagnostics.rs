//! Texts of the compiler about frequent mistakes, for programs against the crates as they were built for this test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// Returns the newest library of a crate in the folder of this test.
fn library(folder: &Path, name: &str) -> PathBuf {
    let built = std::fs::read_dir(folder).unwrap().filter_map(|entry| {
        let path = entry.unwrap().path();
        let file = path.file_name()?.to_str()?;
        let is_library = file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib");
        let built =
            std::fs::metadata(&path).and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        is_library.then_some((built, path))
    });
    built.max().expect("the crate was built for this test").1
}

/// Compiles a program and returns what the compiler prints.
fn compile(name: &str, program: &str) -> String {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let scratch = tempfile::tempdir().unwrap();
    let source = scratch.path().join(format!("{name}.rs"));
    std::fs::write(&source, program).unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--color=never"]);
    rustc.arg("--out-dir").arg(scratch.path()).arg("-L").arg(format!("dependency={}", folder.display()));
    for crate_name in ["forebay_core", "forebay_nn"] {
        rustc.arg("--extern").arg(format!("{crate_name}={}", library(&folder, crate_name).display()));
    }
    let output = rustc.arg(&source).output().expect("rustc runs");
    String::from_utf8(output.stderr).unwrap()
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn a_field_that_is_no_module_is_named_once_with_its_remedy() {
    let text = compile(
        "field",
        "use forebay_nn::nn::Module;
        pub struct Config { pub width: usize }
        #[derive(Module)]
        #[module(crate = forebay_nn)]
        pub struct Net {
            pub config: Config,
        }",
    );
    assert!(text.contains("error[E0277]: `Config` is not a module"), "{text}");
    assert!(text.contains("pub config: Config,\n") && text.contains("^^^^^^ not a module"), "{text}");
    assert!(text.contains("takes the attribute `#[module(skip)]`"), "{text}");
    assert_eq!(count(&text, "error[E"), 1, "{text}");
}

#[test]
fn a_result_as_an_operand_asks_for_a_question_mark() {
    for (name, sum) in [("operator", "a + b * 2.0"), ("method", "a.add(b.mul(2.0))")] {
        let program = format!(
            "use forebay_core::{{error::Result, tensor::Tensor}};
            pub fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {{ {sum} }}"
        );
        let text = compile(name, &program);
        assert!(text.contains("is not an operand: a reference to a tensor, or a number"), "{text}");
        assert!(text.contains("`?` gives its tensor"), "{text}");
        assert_eq!(count(&text, "error[E"), 1, "{text}");
    }
}

#[test]
fn a_probability_of_dropout_without_a_training_mode_is_a_warning() {
    let compile_net = |name: &str, fields: &str| {
        compile(
            name,
            &format!(
                "use forebay_nn::nn::{{Dropout, Module, TrainingMode}};
                pub type Mode = (TrainingMode, Dropout);
                #[derive(Module)]
                #[module(crate = forebay_nn)]
                pub struct Net {{ {fields} }}"
            ),
        )
    };
    let text = compile_net("warned", "pub attn_dropout: f64");
    assert!(text.contains("warning: use of deprecated constant"), "{text}");
    assert!(text.contains("`attn_dropout` is a probability, and the module has no training mode"), "{text}");
    assert_eq!((count(&text, "warning: use"), count(&text, "error")), (1, 0), "{text}");
    for (name, fields) in [
        ("mode", "pub dropout: f64, pub training: TrainingMode"),
        ("layer", "pub dropout: Dropout"),
        ("skipped", "#[module(skip)] pub dropout: f64"),
        ("other", "pub drop_last: bool, pub scale: f64"),
    ] {
        let text = compile_net(name, fields);
        assert_eq!(text, "", "{name}");
    }
}
