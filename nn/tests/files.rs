//! Loaders accept or reject arbitrary bytes: none panics, and every error has a message.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::{Compression, write::GzEncoder};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Result;
use forebay_core::memory::trace::Trace;
use forebay_core::tensor::Tensor;
use forebay_nn::io::{self, idx, safetensors};
use forebay_nn::nn::{Linear, Module, rename_keys};
use forebay_nn::optim::{Optimizer, Sgd};
use liblzma::write::XzEncoder;
use proptest::prelude::*;

fn device() -> Device {
    Device::null(Default::default())
}

fn temp_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("forebay-files-{}-{name}", std::process::id()))
}

fn safetensors_file() -> Vec<u8> {
    let header = br#"{"__metadata__":{"step":"7"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BOOL","shape":[4],"data_offsets":[24,28]},"c":{"dtype":"I64","shape":[],"data_offsets":[28,36]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header, &[1; 36]].concat()
}

fn idx_file() -> Vec<u8> {
    [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4][..], &[7; 24]].concat()
}

fn trace_file() -> Vec<u8> {
    let header =
        r#"{"workload":"w","allocator":"a","peak_requested":1536,"peak_reserved":2048,"device_allocs":1}"#;
    format!("{header}\na 1 512 0\na 2 1024 0\nf 1\nf 2\n").into_bytes()
}

fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(bytes)?;
    out.finish()
}

fn xz(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut out = XzEncoder::new(Vec::new(), 0);
    out.write_all(bytes)?;
    out.finish()
}

/// Runs every loader on these bytes.
fn parse_all(bytes: &[u8]) {
    let _ = safetensors::from_bytes(bytes, &device());
    let _ = idx::from_bytes(bytes);
    let _ = Trace::read_xz(bytes);
    let _ = Trace::read(bytes);
}

/// Names in a file cannot give commands to the terminal that shows an error.
#[test]
fn errors_quote_names_of_files_with_escapes() -> Result<()> {
    let file = |header: &str, data: &[u8]| {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    };
    let read = |bytes: &[u8]| safetensors::from_bytes(bytes, &device()).map(|(tensors, _)| tensors);
    let name = r"n\u001b[2J\u202e\n";
    let of_dtype =
        |dtype: &str| format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[2],"data_offsets":[0,2]}}}}"#);
    let mut errors = vec![
        read(&file(&of_dtype("BOOL"), &[0, 2])).map(drop),
        read(&file(&of_dtype(r"Q\u001b"), &[0, 0])).map(drop),
        read(&file(&of_dtype("F32"), &[0, 0])).map(drop),
        read(&file(&format!(r#"{{"{name}":"\u001b"}}"#), &[])).map(drop),
    ];
    let state = read(&file(&of_dtype("U8"), &[0, 1]))?;
    let net = Linear::new(2, 2, &device())?;
    errors.push(net.load_state_dict(&state));
    errors.push(Sgd::new(net.parameters(), 0.1).load_state_dict(&state));
    let pair = ["\u{1b}a", "\u{1b}b"].into_iter().zip(state.values().cycle());
    let pair = pair.map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
    errors.push(rename_keys(&pair, |_| Some("\u{1b}c".to_owned())).map(drop));
    for error in errors {
        let text = error.map_or_else(|error| error.message(), |()| "no error".to_owned());
        assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text:?}");
        assert!(text.contains(r"\u{1b}"), "{text:?}");
    }
    Ok(())
}

/// Returns a strategy for a file with changed bytes, and with its end truncated or extended.
fn corrupted(file: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let n = file.len();
    let changes = prop::collection::vec((0..n, any::<u8>()), 0..6);
    (changes, 0..2 * n, prop::collection::vec(any::<u8>(), 0..9)).prop_map(move |(changes, keep, tail)| {
        let mut bytes = file.clone();
        for (at, to) in changes {
            bytes[at] = to;
        }
        bytes.truncate(keep);
        bytes.extend(tail);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        parse_all(&bytes);
    }

    #[test]
    fn damaged_files_are_read_or_refused(
        bytes in prop_oneof![corrupted(safetensors_file()), corrupted(idx_file()), corrupted(trace_file())]
    ) {
        parse_all(&bytes);
        if let Ok(packed) = gzip(&bytes) {
            let _ = idx::from_bytes(&packed);
        }
        if let Ok(packed) = xz(&bytes) {
            let _ = Trace::read_xz(&packed[..]);
        }
    }

    #[test]
    fn damaged_packed_files_are_read_or_refused(
        bytes in prop_oneof![
            corrupted(gzip(&idx_file()).unwrap_or_default()),
            corrupted(xz(&trace_file()).unwrap_or_default()),
        ]
    ) {
        parse_all(&bytes);
    }

    #[test]
    fn any_header_is_read_or_refused(
        dtype in prop_oneof![Just("F32"), Just("BOOL"), Just("F4"), Just("U64"), Just("X")],
        shape in prop::collection::vec(prop_oneof![0..5u64, Just(1 << 32), any::<u64>()], 0..4),
        offsets in (0..9u64, prop_oneof![0..90u64, any::<u64>()]),
        data in prop::collection::vec(0..3u8, 0..90),
    ) {
        let header = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{},{}]}}}}"#, offsets.0, offsets.1);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        let _ = safetensors::from_bytes(&bytes, &device());
    }
}

#[test]
fn the_seeds_of_these_tests_are_valid() -> Result<()> {
    let (tensors, strings) = safetensors::from_bytes(&safetensors_file(), &device())?;
    assert_eq!(tensors.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!((tensors["b"].dtype(), tensors["c"].rank()), (DType::Bool, 0));
    assert_eq!(strings["step"], "7");
    assert_eq!(idx::from_bytes(&idx_file())?.shape, [2, 3, 4]);
    assert_eq!(Trace::read(&trace_file()[..]).map(|t| t.request_count()).ok(), Some(2));
    Ok(())
}

/// Builds a safetensors file from a header and its data.
fn safetensors_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn a_tensor_of_an_unknown_dtype_is_an_error_only_when_read() -> Result<()> {
    let (device, path) = (device(), temp_path("types"));
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[8,10]},"c":{"dtype":"U8","shape":[2],"data_offsets":[10,12]},"d":{"dtype":"NEW_1","shape":[9],"data_offsets":[12,15]}}"#;
    io::write_bytes(&path, safetensors_bytes(header, &[1; 15]))?;
    let mut file = safetensors::open(&path)?;
    assert_eq!(file.keys().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    assert_eq!((file.dtype("b"), file.shape("d")), (Some("F8_E8M0"), Some(&[9][..])));
    // In any order, and again after an error.
    for name in ["c", "a", "b", "a", "d", "c", "e"] {
        let found = file.get_tensor(name, &device);
        match name {
            "a" => assert_eq!(found?.dtype(), DType::F32),
            "c" => assert_eq!(found?.dtype(), DType::U8),
            _ => {
                let error = found.err().map(|e| e.to_string()).unwrap_or_default();
                assert!(error.contains(&format!("tensor `{name}`")), "{error}");
            }
        }
    }
    assert_eq!(file.get_tensors(&device, |name| "ac".contains(name))?.len(), 2);
    assert!(safetensors::load(&path, &device).is_err());
    std::fs::remove_file(&path).expect("it is there");
    Ok(())
}

#[test]
fn a_file_of_another_kind_is_named() {
    for (head, kind) in [
        (&b"PK\x03\x04\0\0\x08\x08\0\0"[..], "a zip archive"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9", "a Python pickle"),
        (b"GGUF\x03\0\0\0\x01\0\0\0", "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html>", "a web page"),
        (b"anything else", "not a safetensors file"),
    ] {
        let error = safetensors::from_bytes(head, &device()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("<bytes>: is {kind}")), "{error}");
    }
}

#[test]
fn a_huge_sparse_file_is_an_error_and_its_small_tensors_are_read() -> Result<()> {
    let (device, path) = (device(), temp_path("sparse"));
    let bytes = 137_u64 << 30;
    let header = format!(
        r#"{{"a":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{bytes}]}},"b":{{"dtype":"U8","shape":[2],"data_offsets":[{bytes},{}]}}}}"#,
        bytes / 4,
        bytes + 2
    );
    let made = std::fs::File::create(&path).and_then(|mut file| {
        file.write_all(&safetensors_bytes(&header, &[]))?;
        file.set_len(8 + header.len() as u64 + bytes + 2)
    });
    // Some file systems do not support files of this size.
    if made.is_ok() {
        let mut file = safetensors::open(&path)?;
        assert_eq!(file.get_tensor("b", &device)?.shape(), [2]);
        let error = file.get_tensor("a", &device).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("tensor `a`"), "{error}");
        assert!(safetensors::load(&path, &device).is_err());
    }
    std::fs::remove_file(&path).expect("it is there");
    Ok(())
}

#[test]
fn a_saved_file_is_loaded_and_replaces_the_old_one() -> Result<()> {
    let device = device();
    let path = temp_path("save").join("below").join("weights.safetensors");
    let tensors: BTreeMap<String, Tensor> = DType::ALL
        .into_iter()
        .chain(DType::STORAGE_ONLY)
        .filter(|d| device.supports_dtype(*d))
        .map(|d| Ok((format!("w.{d}"), Tensor::zeros([3, 5], d, &device)?)))
        .chain([
            Ok(("empty".into(), Tensor::zeros([0, 5], DType::F32, &device)?)),
            Ok(("turned".into(), Tensor::zeros([4, 5], DType::F32, &device)?.transpose(0, 1)?)),
        ])
        .collect::<Result<_>>()?;
    let strings = BTreeMap::from([("k".to_owned(), "v \"w\"".to_owned())]);
    safetensors::save(&path, &BTreeMap::new(), &BTreeMap::new())?;
    safetensors::save(&path, &tensors, &strings)?;
    let (loaded, found) = safetensors::load_with_metadata(&path, &device)?;
    let describe = |t: &BTreeMap<String, Tensor>| {
        t.iter().map(|(n, t)| (n.clone(), t.dtype(), t.shape().to_vec())).collect::<Vec<_>>()
    };
    assert_eq!(describe(&loaded), describe(&tensors));
    assert_eq!(found, strings);
    let folder = path.parent().and_then(Path::parent);
    if let Some(folder) = folder {
        assert_eq!(
            std::fs::read_dir(folder.join("below")).map(Iterator::count).ok(),
            Some(1),
            "nothing beside it"
        );
        let _ = std::fs::remove_dir_all(folder);
    }
    Ok(())
}

#[test]
fn a_write_that_fails_leaves_the_old_file() -> std::io::Result<()> {
    let path = temp_path("old");
    std::fs::write(&path, "old")?;
    let failed = io::write_atomic(&path, |out| {
        let _ = out.write_all(b"half");
        Err(forebay_core::error::Error::InvalidConfig("stopped".into()))
    });
    assert!(failed.is_err());
    assert_eq!(std::fs::read(&path)?, b"old");
    std::fs::remove_file(&path)
}

#[test]
fn messages_describe_the_error() {
    let message = |bytes: &[u8]| {
        safetensors::from_bytes(bytes, &device()).err().map(|e| e.message()).unwrap_or_default()
    };
    let whole = safetensors_file();
    let with = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[2; 4]].concat();
    let mut messages = vec![
        message(&whole[..5]),
        message(&whole[..20]),
        message(&whole[..whole.len() - 3]),
        message(&[0xff; 30]),
        message(&with(
            r#"{"t":{"dtype":"C64","shape":[0],"data_offsets":[0,0]},"u":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
        )),
        message(&with(
            r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#,
        )),
        message(&with(
            r#"{"__metadata__":{"a":"1","a":"2"},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
        )),
        message(&with(
            r#"{"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"u":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#,
        )),
        message(&with(r#"{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#)),
        message(&with(r#"{"t":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}"#)),
        message(&with(r#"{"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#)),
        message(&with("{")),
    ];
    let message = |bytes: &[u8]| idx::from_bytes(bytes).err().map(|e| e.message()).unwrap_or_default();
    let whole = idx_file();
    messages.extend([
        message(b"text"),
        message(&whole[..9]),
        message(&whole[..whole.len() - 1]),
        message(&[&whole[..], &[1]].concat()),
        message(&[0, 0, 0x0d, 1, 0, 0, 0, 1]),
        message(&[0, 0, 8, 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        message(&gzip(&whole).unwrap_or_default()[..25]),
    ]);
    insta::assert_snapshot!(messages.join("\n"));
}

#[cfg(unix)]
#[test]
fn links_are_kept_and_only_files_are_replaced() -> Result<()> {
    let (file, link) = (temp_path("target"), temp_path("link"));
    let save = |path: &Path| safetensors::save(path, &BTreeMap::new(), &BTreeMap::new());
    save(&file)?;
    std::os::unix::fs::symlink(&file, &link).expect("a link can be made");
    std::fs::write(&file, b"old").expect("it can be written");
    save(&link)?;
    let kept = std::fs::symlink_metadata(&link).is_ok_and(|there| there.file_type().is_symlink());
    let read = safetensors::load(&file, &device());
    std::fs::remove_file(&link).and(std::fs::remove_file(&file)).expect("both are there");
    assert!(kept && read?.is_empty());
    let message = |path: &str| save(Path::new(path)).map_or_else(|e| e.message(), |()| "written".to_owned());
    assert_eq!(message("/dev/null"), "/dev/null: is not a regular file, and is not replaced; name a file");
    let folder = std::fs::canonicalize(std::env::temp_dir()).expect("there is one");
    let folder = folder.display().to_string();
    assert_eq!(message(&folder), format!("{folder}: is a folder, and is not replaced; name a file"));
    Ok(())
}
