//! Command-line errors: invalid environment variables, and files of the wrong kind.

use std::process::Command;

/// Runs the program, which must fail, and returns its message.
fn run_failing(arguments: &[&str], variable: Option<(&str, &str)>) -> std::io::Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let output = command.args(arguments).envs(variable).env_remove("RUST_BACKTRACE").output()?;
    assert!(!output.status.success(), "{arguments:?} with {variable:?}");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn invalid_variables_end_every_command() -> std::io::Result<()> {
    let wrong = [
        ("FOREBAY_ALLOC_CONF", "nonsense:1", "unrecognized key `nonsense`"),
        ("FOREBAY_ALLOC_CONF_NULL_0", "max_memory_mb:x", "expected a whole number"),
        ("FOREBAY_CUDA_VMM", "maybe", "expected 0 (off) or 1 (on)"),
        ("FOREBAY_FUSE", "0", "FOREBAY_FUSE is called FOREBAY_FUSION_MIN_BYTES now"),
        ("FOREBAY_VALIDATOIN", "0", "did you mean FOREBAY_VALIDATION?"),
    ];
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/traces/gnn_varsize.trace.xz");
    for (name, value, reason) in wrong {
        for arguments in [&["plan", "--quick"][..], &["replay", trace]] {
            let message = run_failing(arguments, Some((name, value)))?;
            assert!(message.contains(name) && message.contains(reason), "{arguments:?}: {message}");
        }
    }
    Ok(())
}

#[test]
fn a_report_of_another_file_names_its_kind() -> std::io::Result<()> {
    let folder = std::env::temp_dir().join(format!("forebay-kinds-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("x.pickle");
    std::fs::write(&path, b"\x80\x02}(X\x08\0\0\0segments")?;
    let pickle = run_failing(&["memory", "report", &path.to_string_lossy()], None);
    std::fs::write(&path, b"{\"workload\": \"w\"}\n")?;
    let trace = run_failing(&["memory", "view", &path.to_string_lossy()], None);
    std::fs::remove_dir_all(&folder)?;
    let pickle = pickle?;
    assert!(pickle.contains("x.pickle: no snapshot of memory: it is a Python pickle"), "{pickle}");
    assert!(pickle.contains("`snapshot.save(\"memory.json\")`"), "{pickle}");
    assert!(trace?.contains("`forebay replay` takes traces"));
    Ok(())
}
