//! The files of `wgsl/math/`: each states its dependencies, and is valid WGSL with exactly those.

use std::collections::BTreeSet;

use forebay_shaders::TEMPLATES;
use naga::valid::{Capabilities, ValidationFlags, Validator};

fn math_files() -> impl Iterator<Item = (&'static str, &'static str)> {
    TEMPLATES.iter().filter_map(|(name, text)| Some((name.strip_prefix("math/")?, *text)))
}

/// Returns the names after `// needs:` on the first line.
fn declared_needs(text: &'static str) -> Vec<&'static str> {
    let line = text.lines().next().and_then(|l| l.strip_prefix("// needs: "));
    let line = line.unwrap_or_else(|| panic!("the first line must say `// needs: ...`:\n{text}"));
    if line == "none" { Vec::new() } else { line.split(", ").collect() }
}

/// Returns the concatenated texts of some files.
fn texts(names: &[&str]) -> String {
    names
        .iter()
        .map(|n| math_files().find(|(f, _)| f == n).unwrap_or_else(|| panic!("no file math/{n}")).1)
        .collect()
}

#[test]
fn every_file_is_valid_with_exactly_its_listed_needs() {
    assert!(math_files().count() >= 11);
    for (file, text) in math_files() {
        let mut names = declared_needs(text);
        names.push(file);
        let wgsl = texts(&names);
        let module = naga::front::wgsl::parse_str(&wgsl)
            .unwrap_or_else(|e| panic!("{file}: {}", e.emit_to_string(&wgsl)));
        // The files must work on the smallest device. Exceptions are f64 and f16 conversions; every driver
        // that wgpu accepts supports the latter.
        let needed = match file {
            _ if file.starts_with("f64") => Capabilities::FLOAT64,
            "packed_halves" => Capabilities::SHADER_FLOAT16_IN_FLOAT32,
            _ => Capabilities::empty(),
        };
        Validator::new(ValidationFlags::all(), needed)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{file}: {}", e.emit_to_string(&wgsl)));
        for left_out in 0..names.len() - 1 {
            let mut fewer = names.clone();
            let needless = fewer.remove(left_out);
            assert!(
                naga::front::wgsl::parse_str(&texts(&fewer)).is_err(),
                "{file} lists {needless} and does not need it"
            );
        }
    }
}

#[test]
fn files_pass_the_preprocessor_unchanged_and_have_no_conflicts() {
    let mut names = BTreeSet::new();
    for (file, text) in math_files() {
        for tag in ["{{", "{%", "{#"] {
            assert!(!text.contains(tag), "{file} contains `{tag}`");
        }
        for name in text.lines().filter_map(|l| l.strip_prefix("fn ")?.split('(').next()) {
            assert!(name.starts_with("m_"), "{file}: `{name}` lacks the prefix m_");
            assert!(names.insert(name), "{file}: `{name}` is defined twice");
        }
    }
}

#[test]
fn accuracy_does_not_depend_on_a_drivers_functions() {
    // Builtins whose results differ between drivers, or that request a fused operation that may not be fused.
    let banned = [
        "exp",
        "exp2",
        "log",
        "log2",
        "pow",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "inverseSqrt",
        "fma",
        "ldexp",
        "frexp",
        "sign",
        "fract",
    ];
    for (file, text) in math_files() {
        // Functions named `near` may use the device's approximations.
        for line in text.lines().filter(|line| !line.starts_with("fn m_approx_")) {
            let code = line.split("//").next().unwrap_or_default();
            let words = code.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_');
            for call in words.filter_map(|w| w.strip_suffix('(')) {
                assert!(!banned.contains(&call), "{file} calls the builtin `{call}`: {line}");
            }
        }
    }
}

/// `&&` and `||` are branches. Many inlined copies of a function with several branches took compilers minutes
/// and gigabytes. Conditions without side effects are therefore joined by `&` and `|`.
#[test]
fn conditions_do_not_branch() {
    for (file, text) in math_files() {
        for line in text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_start()) {
            let branches = line.contains("&&") || line.contains("||");
            assert!(!branches || line.starts_with("if ") || line.starts_with("while "), "{file}: {line}");
        }
    }
}
