//! Loaders of external data, valid files for each, and mutations of files. Shared by the fuzz targets and
//! `nn/tests/fuzz.rs`.
#![allow(dead_code, reason = "each user takes a part")]

use std::collections::BTreeMap;

use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::{Error, Result};
use forebay_core::memory::{Config, Snapshot, trace::Trace};
use forebay_core::tensor::Tensor;
use forebay_nn::data::LoaderCursor;
use forebay_nn::io::{idx, safetensors};
use forebay_nn::nn::{BertOptions, Gpt, GptOptions, Linear, Module};
use forebay_nn::optim::GradScaler;
use forebay_nn::optim::{Adam, AveragedModel, Optimizer};
use forebay_nn::train::Checkpoint;

/// Loader with a valid file, and a function that reads arbitrary bytes, which may fail but must not panic.
pub(crate) struct Loader {
    pub(crate) name: &'static str,
    pub(crate) file: fn(&Device) -> Result<Vec<u8>>,
    pub(crate) read: fn(&Device, &[u8]) -> Result<()>,
}

/// All loaders of external data.
pub(crate) const LOADERS: &[Loader] = &[
    Loader {
        name: "safetensors",
        file: |_| Ok(safetensors_file()),
        read: |d, b| safetensors::from_bytes(b, d).map(drop),
    },
    Loader { name: "idx", file: |_| Ok(idx_file()), read: |_, b| idx::from_bytes(b).map(drop) },
    Loader { name: "trace", file: |_| Ok(trace_file()), read: |_, b| read_trace(b) },
    Loader { name: "snapshot", file: snapshot_file, read: |_, b| Ok(Snapshot::read(b).map(drop)?) },
    Loader { name: "checkpoint", file: checkpoint_file, read: read_checkpoint },
    Loader { name: "gpt2", file: gpt2_file, read: read_gpt2 },
    Loader { name: "states", file: states_file, read: read_states },
    Loader {
        name: "bert_config",
        file: |_| Ok(BERT.into()),
        read: |_, b| BertOptions::from_config(&text(b)).map(drop),
    },
    Loader {
        name: "alloc_conf",
        file: |_| Ok(CONF.into()),
        read: |_, b| Ok(Config::parse(&text(b)).map(drop)?),
    },
];

const BERT: &str = r#"{"vocab_size":30522,"hidden_size":384,"num_hidden_layers":6,"num_attention_heads":12,"intermediate_size":1536,
"hidden_act":"gelu","hidden_dropout_prob":0.1,"max_position_embeddings":512,"type_vocab_size":2,"layer_norm_eps":1e-12}"#;
const CONF: &str = "max_split_size_mb:200,garbage_collection_threshold:0.8,expandable_segments:True,roundup_power2_divisions:4";
const SIZES: GptOptions =
    GptOptions { vocabulary: 3, context: 2, layers: 1, heads: 1, width: 2, dropout: 0.0 };

/// Returns the loader of this name.
pub(crate) fn loader(name: &str) -> &'static Loader {
    LOADERS.iter().find(|loader| loader.name == name).expect("a loader of this file")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn safetensors_file() -> Vec<u8> {
    let header = br#"{"__metadata__":{"step":"7"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BOOL","shape":[4],"data_offsets":[24,28]},"c":{"dtype":"I8","shape":[],"data_offsets":[28,29]},"d":{"dtype":"U64","shape":[1],"data_offsets":[29,37]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header, &[1; 37]].concat()
}

fn idx_file() -> Vec<u8> {
    [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4][..], &[7; 24]].concat()
}

fn trace_file() -> Vec<u8> {
    let header =
        r#"{"workload":"w","allocator":"a","peak_requested":1536,"peak_reserved":2048,"device_allocs":1}"#;
    format!("{header}\na 1 512 0\na 2 1024 0\nf 1\nf 2\n").into_bytes()
}

fn read_trace(bytes: &[u8]) -> Result<()> {
    // As a compressed trace and as text.
    let _ = Trace::read_xz(bytes);
    Trace::read(bytes).map(drop).map_err(|e| Error::InvalidConfig(e.to_string()))
}

/// Returns the bytes that `save` writes to a file.
fn saved(save: impl FnOnce(&std::path::Path) -> Result<()>) -> Result<Vec<u8>> {
    let path = temporary();
    save(&path)?;
    let bytes = std::fs::read(&path).expect("it was written");
    std::fs::remove_file(&path).expect("it is there");
    Ok(bytes)
}

/// Returns a path that only this thread uses.
fn temporary() -> std::path::PathBuf {
    let name = format!("forebay-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
    std::env::temp_dir().join(name.replace(['(', ')'], ""))
}

fn snapshot_file(device: &Device) -> Result<Vec<u8>> {
    let _held = Tensor::zeros([4], DType::F32, device)?;
    saved(|path| Ok(device.pool().snapshot().save(path)?))
}

fn model(device: &Device) -> Result<Linear> {
    Linear::new(2, 2, device)
}

/// Returns an optimiser after one step.
fn stepped(net: &Linear) -> Result<Adam> {
    let mut optimizer = Adam::new(net.parameters(), 0.1);
    for p in net.parameters() {
        p.set_grad(Some(p.detach().copy()?));
    }
    optimizer.step()?;
    optimizer.zero_grad();
    Ok(optimizer)
}

fn checkpoint_file(device: &Device) -> Result<Vec<u8>> {
    let net = model(device)?;
    let optimizer = stepped(&net)?;
    // Without a scaler: memory of the null device has no contents, and a scale of 0 is refused.
    saved(|path| Checkpoint::new(3, LoaderCursor::default()).save(path, &net, &optimizer))
}

fn read_checkpoint(device: &Device, bytes: &[u8]) -> Result<()> {
    let path = temporary();
    std::fs::write(&path, bytes).expect("it can be written");
    let net = model(device)?;
    let mut optimizer = Adam::new(net.parameters(), 0.1);
    let resumed = Checkpoint::resume_with_scaler(&path, &net, &mut optimizer, Some(&mut GradScaler::new()));
    device.manual_seed(0);
    resumed.map(drop)
}

fn gpt2_file(device: &Device) -> Result<Vec<u8>> {
    let state = Gpt::new(&SIZES, device)?.gpt2_state_dict()?;
    saved(|path| safetensors::save(path, &state, &BTreeMap::new()))
}

fn read_gpt2(device: &Device, bytes: &[u8]) -> Result<()> {
    let (file, _) = safetensors::from_bytes(bytes, device)?;
    let _ = GptOptions::from_gpt2_state_dict(&file);
    Gpt::new(&SIZES, device)?.load_gpt2(&file)
}

fn states_file(device: &Device) -> Result<Vec<u8>> {
    let net = model(device)?;
    let mut state = net.state_dict();
    state.extend(stepped(&net)?.state_dict()?);
    state.extend(AveragedModel::ema(&net, 0.9)?.state_dict()?);
    state.extend(GradScaler::new().state_dict(device)?);
    saved(|path| safetensors::save(path, &state, &BTreeMap::new()))
}

fn read_states(device: &Device, bytes: &[u8]) -> Result<()> {
    let (state, _) = safetensors::from_bytes(bytes, device)?;
    let part = |wanted: &dyn Fn(&str) -> bool| -> BTreeMap<String, Tensor> {
        state.iter().filter(|(name, _)| wanted(name)).map(|(name, t)| (name.clone(), t.clone())).collect()
    };
    let net = model(device)?;
    let _ = net.load_state_dict_partial(&state);
    let _ = Adam::new(net.parameters(), 0.1).load_state_dict(&part(&|name| name.starts_with(['0', '1'])));
    let averages = part(&|name| name.starts_with("module.") || name == "n_averaged");
    let _ = AveragedModel::ema(&net, 0.9)?.load_state_dict(&averages);
    let _ = GradScaler::new().load_state_dict(&part(&|name| ["scale", "growth_tracker"].contains(&name)));
    net.load_state_dict(&part(&|name| ["weight", "bias"].contains(&name)))
}

/// Seeded pseudo-random generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n.max(1) as u128) >> 64) as usize
    }
}

/// Boundary values for sizes, offsets and counts.
const NUMBERS: &[&str] = &[
    "0",
    "-1",
    "1",
    "4294967296",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "-0.0",
    "0.5",
    "null",
    "\"\"",
    "[]",
    "{}",
];

/// Mutates a file: flips bits, changes bytes and numerals, and removes, duplicates or moves pieces.
pub(crate) fn mutate(file: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..=random.below(4) {
        let n = bytes.len();
        let at = random.below(n);
        let to = at + random.below((n - at).min(24) + 1);
        match random.below(9) {
            _ if n == 0 => bytes.extend(random.next().to_le_bytes()),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..to)),
            4 => {
                let piece = bytes[at..to].to_vec();
                let other = random.below(n);
                bytes.splice(other..other, piece);
            }
            5 if n >= 8 => {
                let at = random.below(n - 7);
                let number = [u64::MAX, 1 << 63, 1 << 40, 1 << 32, n as u64, 0][random.below(6)];
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
            // Replaces a numeral of the text.
            _ => {
                let starts =
                    |k: usize| bytes[k].is_ascii_digit() && (k == 0 || !bytes[k - 1].is_ascii_digit());
                let Some(first) = (at..n).chain(0..at).find(|&k| starts(k)) else { continue };
                let length = bytes[first..].iter().take_while(|b| b.is_ascii_digit()).count();
                let number = NUMBERS[random.below(NUMBERS.len())];
                bytes.splice(first..first + length, number.bytes());
            }
        }
    }
    // Corrects the header's length, so that the data after the header is read.
    if random.below(2) == 0 && bytes.len() > 9 && bytes[8] == b'{' && file.len() > 9 && file[8] == b'{' {
        let data = u64::from_le_bytes(file[..8].try_into().expect("eight bytes"));
        let tail = (file.len() as u64 - 8).saturating_sub(data);
        let header = (bytes.len() as u64 - 8).saturating_sub(tail);
        bytes[..8].copy_from_slice(&header.to_le_bytes());
    }
    bytes
}
