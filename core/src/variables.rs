//! Variables of the environment that the project knows: their names and the kinds of their values.
//!
//! Opening a device checks all of them, so that a misspelt or invalid variable is an error that names it.

use std::ffi::OsStr;

use crate::environment::{
    EXPECTED_BYTES, EXPECTED_BYTES_OR_OFF, EXPECTED_SWITCH, parse_bytes_or_off, parse_value,
};
use crate::error::{Error, Result};
use crate::memory::Config;
use crate::platform;

/// Kind of value that a variable may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueKind {
    /// `0` or `1`.
    Switch,
    /// A number of bytes.
    Bytes,
    /// A number of bytes, or `off`.
    BytesOrOff,
    /// A whole number.
    Number,
    /// A path, or text with its own validation.
    Text,
    /// A device: a backend and an index.
    Device,
    /// Settings of a pool.
    AllocatorConfig,
    /// Words of [`REQUIREMENTS`], separated by commas.
    Requirements,
}

/// Words that `FOREBAY_REQUIRE` may contain.
const REQUIREMENTS: [&str; 4] = ["wgpu", "cuda", "nvrtc", "browser"];

/// All variables of the project with the kinds of their values. docs/src/reference/environment.md explains them.
const KNOWN_VARIABLES: [(&str, ValueKind); 27] = [
    ("FOREBAY_ALLOC_CONF", ValueKind::AllocatorConfig),
    ("FOREBAY_BOUNDS_CHECKS", ValueKind::Switch),
    ("FOREBAY_CACHE_DIR", ValueKind::Text),
    ("FOREBAY_CHECK_INDICES", ValueKind::Switch),
    ("FOREBAY_CUBLASLT_AUTOTUNE", ValueKind::Switch),
    ("FOREBAY_CUDA_BATCHED_MATMUL", ValueKind::Switch),
    ("FOREBAY_CUDA_LAUNCH_THREAD", ValueKind::Switch),
    ("FOREBAY_CUDA_PDL", ValueKind::Switch),
    ("FOREBAY_CUDA_PEER", ValueKind::Switch),
    ("FOREBAY_CUDA_RECURRENT", ValueKind::Switch),
    ("FOREBAY_CUDA_VMM", ValueKind::Switch),
    ("FOREBAY_DATA", ValueKind::Text),
    ("FOREBAY_DEVICE", ValueKind::Device),
    ("FOREBAY_DUMP", ValueKind::Text),
    ("FOREBAY_FUSION_MIN_BYTES", ValueKind::BytesOrOff),
    ("FOREBAY_FUZZ_ROUNDS", ValueKind::Number),
    ("FOREBAY_FUZZ_SEED", ValueKind::Number),
    ("FOREBAY_GOLDEN", ValueKind::Text),
    ("FOREBAY_IM2COL_BYTES", ValueKind::Bytes),
    ("FOREBAY_MATRIX_UNITS", ValueKind::Switch),
    ("FOREBAY_MINILM", ValueKind::Text),
    ("FOREBAY_NVTX", ValueKind::Switch),
    ("FOREBAY_PORTABLE_KERNELS", ValueKind::Switch),
    ("FOREBAY_REQUIRE", ValueKind::Requirements),
    ("FOREBAY_TILE_AUTOTUNE", ValueKind::Switch),
    ("FOREBAY_TRACES", ValueKind::Text),
    ("FOREBAY_VALIDATION", ValueKind::Switch),
];
/// Variables of earlier versions and their new names.
const RENAMED_VARIABLES: [(&str, &str); 6] = [
    ("FOREBAY_CUDA_BATCH_LAUNCHES", "FOREBAY_CUDA_LAUNCH_THREAD"),
    ("FOREBAY_CUDA_EARLY", "FOREBAY_CUDA_PDL"),
    ("FOREBAY_CUDA_LINES", "FOREBAY_CUDA_LAUNCH_THREAD"),
    ("FOREBAY_FUSE", "FOREBAY_FUSION_MIN_BYTES"),
    ("FOREBAY_TUNE", "FOREBAY_CUBLASLT_AUTOTUNE"),
    ("FOREBAY_WINDOWS", "FOREBAY_IM2COL_BYTES"),
];
/// Prefix of variables reserved for tests.
const TEST_PREFIX: &str = "FOREBAY_TEST_";
/// Prefix of the settings of one device, followed by a backend and an index.
const DEVICE_CONFIG_PREFIX: &str = "FOREBAY_ALLOC_CONF_";

/// Checks the names and values of all variables whose names begin with `FOREBAY_`, and of the variables that
/// configure the pool. Opening any device calls this, and so does every dry run.
///
/// # Errors
/// A variable has an unknown name or an invalid value.
pub fn check() -> Result<()> {
    let variables =
        platform::variables().filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value)));
    variables
        .filter(|(name, _)| name.starts_with("FOREBAY_"))
        .try_for_each(|(name, value)| check_variable(&name, &value))?;
    Ok(Config::from_env().map(drop)?)
}

fn check_variable(name: &str, value: &OsStr) -> Result<()> {
    if name.starts_with(TEST_PREFIX) {
        return Ok(());
    }
    let of_device = name.strip_prefix(DEVICE_CONFIG_PREFIX).and_then(|rest| rest.rsplit_once('_'));
    let of_device = of_device.is_some_and(|(backend, index)| {
        !backend.is_empty() && index.parse::<usize>().is_ok_and(|n| n.to_string() == index)
    });
    let known = KNOWN_VARIABLES.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
    let Some(kind) = known.or(of_device.then_some(ValueKind::AllocatorConfig)) else {
        return Err(Error::InvalidConfig(unknown_variable_message(name)));
    };
    let understood = |expected, parse: &dyn Fn(&str) -> bool| {
        Ok(parse_value(name, value, expected, |text| parse(text).then_some(())).map(drop)?)
    };
    match kind {
        ValueKind::Switch => understood(EXPECTED_SWITCH, &|text| matches!(text, "0" | "1")),
        ValueKind::Bytes => understood(EXPECTED_BYTES, &|text| text.parse::<u64>().is_ok()),
        ValueKind::BytesOrOff => {
            understood(EXPECTED_BYTES_OR_OFF, &|text| parse_bytes_or_off(text).is_some())
        }
        ValueKind::Number => understood("a whole number", &|text| text.parse::<u64>().is_ok()),
        ValueKind::Text => understood("text in Unicode", &|_| true),
        ValueKind::Device => {
            understood("a backend and a number, such as cuda:0, wgpu:1, wgpu or null", &|text| {
                let (backend, index) = text.split_once(':').unwrap_or((text, "0"));
                !backend.is_empty() && index.parse::<usize>().is_ok()
            })
        }
        ValueKind::AllocatorConfig => {
            understood("text in Unicode", &|_| true)?;
            let text = value.to_string_lossy();
            Config::from_env()?
                .with_settings(&text)
                .map(drop)
                .map_err(|e| Error::InvalidConfig(format!("{name}: {e}")))
        }
        ValueKind::Requirements => {
            understood("some of wgpu, cuda, nvrtc and browser, with commas", &|text| {
                text.split(',').all(|word| word.trim().is_empty() || REQUIREMENTS.contains(&word.trim()))
            })
        }
    }
}

/// Builds the message for an unknown name: suggests the name that replaced it, or the nearest one.
fn unknown_variable_message(name: &str) -> String {
    if let Some((_, new)) = RENAMED_VARIABLES.iter().find(|(old, _)| *old == name) {
        return format!("{name} is called {new} now; set {new} instead, and unset {name}");
    }
    let nearest = KNOWN_VARIABLES.iter().map(|(known, _)| (edit_distance(name, known), *known)).min();
    let hint =
        nearest.filter(|(distance, _)| *distance <= 3).map(|(_, known)| format!(" (did you mean {known}?)"));
    let mut names: Vec<&str> = KNOWN_VARIABLES.iter().map(|(known, _)| *known).collect();
    names.push("FOREBAY_ALLOC_CONF_<BACKEND>_<NUMBER>");
    format!(
        "{name}: there is no such variable{}; correct its name, or unset it. Expected one of {}",
        hint.unwrap_or_default(),
        names.join(", ")
    )
}

/// Returns the Levenshtein distance: the number of insertions, removals and replacements between two texts.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(name: &str, value: &str) -> String {
        check_variable(name, OsStr::new(value)).map_or_else(|e| e.to_string(), |()| "accepted".to_owned())
    }

    #[test]
    fn invalid_values_are_named() {
        let number = |text: &str| {
            let name = "FOREBAY_FUSION_MIN_BYTES";
            let of = parse_value(name, OsStr::new(text), EXPECTED_BYTES_OR_OFF, parse_bytes_or_off);
            of.map_err(|e| e.to_string())
        };
        assert_eq!(number(" 0 "), Ok(Some(Some(0))));
        assert_eq!(number("off"), Ok(Some(None)));
        assert_eq!(number(""), Ok(None));
        let wrong = "FOREBAY_FUSION_MIN_BYTES=no: expected a number of bytes, such as 262144, or off; correct it, or unset it";
        assert_eq!(number("no"), Err(wrong.to_owned()));
        assert!(number("-1").is_err() && number("99999999999999999999").is_err());
    }

    #[test]
    fn each_variable_takes_its_values_and_refuses_others() {
        for (name, kind) in KNOWN_VARIABLES {
            let (good, bad) = match kind {
                ValueKind::Switch => ("1", Some("yes")),
                ValueKind::Bytes | ValueKind::BytesOrOff | ValueKind::Number => ("4096", Some("4 KiB")),
                ValueKind::Text => ("anything", None),
                ValueKind::Device => ("wgpu:1", Some("wgpu:one")),
                ValueKind::AllocatorConfig => ("max_memory_mb:7", Some("nonsense:1")),
                ValueKind::Requirements => ("wgpu,cuda", Some("wgpu,opengl")),
            };
            assert_eq!(checked(name, good), "accepted", "{name}={good}");
            assert_eq!(checked(name, ""), "accepted", "{name} is empty");
            if let Some(bad) = bad {
                let message = checked(name, bad);
                assert!(
                    message.starts_with(name) && message.contains(bad.split(':').next().unwrap_or(bad)),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        let message = checked("FOREBAY_VALIDATOIN", "0");
        assert!(
            message.starts_with(
                "FOREBAY_VALIDATOIN: there is no such variable (did you mean FOREBAY_VALIDATION?)"
            ),
            "{message}"
        );
        for (old, new) in RENAMED_VARIABLES {
            assert!(checked(old, "0").starts_with(&format!("{old} is called {new} now")), "{old}");
            assert!(KNOWN_VARIABLES.iter().any(|(known, _)| *known == new), "{new}");
        }
        assert!(checked("FOREBAY_SOMETHING_ELSE", "1").contains("Expected one of FOREBAY_ALLOC_CONF, "));
        assert_eq!(checked("FOREBAY_TEST_ANYTHING", "1"), "accepted");
        assert_eq!(checked("FOREBAY_ALLOC_CONF_CUDA_0", "max_memory_mb:8"), "accepted");
        let of_device = checked("FOREBAY_ALLOC_CONF_WGPU_1", "max_memory_mb:x");
        assert!(of_device.starts_with("FOREBAY_ALLOC_CONF_WGPU_1: `max_memory_mb:x`"), "{of_device}");
        for wrong in ["FOREBAY_ALLOC_CONF_CUDA", "FOREBAY_ALLOC_CONF_CUDA_X", "FOREBAY_ALLOC_CONF_CUDA_00"] {
            assert!(checked(wrong, "max_memory_mb:8").contains("there is no such variable"), "{wrong}");
        }
    }

    /// Checks that the list has every variable named in code or documents, so that no device rejects one.
    #[test]
    fn the_list_contains_every_variable_of_the_repository() -> std::io::Result<()> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folders = [
            "backend-cuda",
            "backend-wgpu",
            "cli",
            "core",
            "derive",
            "docs",
            "examples",
            "shaders",
            "src",
            "tests",
            "xtask",
        ];
        let mut waiting: Vec<_> = folders.iter().map(|folder| root.join(folder)).collect();
        let mut found = std::collections::BTreeSet::new();
        while let Some(path) = waiting.pop() {
            if path.is_dir() {
                let skipped = path.file_name().is_some_and(|name| name == "target");
                for entry in std::fs::read_dir(&path)?.filter(|_| !skipped) {
                    waiting.push(entry?.path());
                }
            } else if path.extension().is_some_and(|e| e == "rs" || e == "md")
                && !path.ends_with("variables.rs")
                && !path.ends_with("environment.rs")
            {
                let text = std::fs::read_to_string(&path)?;
                for part in text.split("FOREBAY_").skip(1) {
                    let end = part.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
                    found.insert(format!("FOREBAY_{}", &part[..end.unwrap_or(part.len())]));
                }
            }
        }
        let known = |name: &str| {
            if name.starts_with(TEST_PREFIX) || name.starts_with(DEVICE_CONFIG_PREFIX) {
                return true;
            }
            let name = name.trim_end_matches('_');
            name == "FOREBAY"
                || KNOWN_VARIABLES.iter().any(|(known, _)| *known == name)
                || RENAMED_VARIABLES.iter().any(|(old, _)| *old == name)
        };
        found.retain(|name| !known(name));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [""; 0]);
        Ok(())
    }
}
