//! Named tensors in a file, in the [safetensors](https://github.com/huggingface/safetensors) format, which
//! PyTorch also reads and writes.
//!
//! ```
//! # use std::collections::BTreeMap;
//! # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
//! # use forebay_nn::io::safetensors;
//! # fn main() -> forebay_core::error::Result<()> {
//! # let device = Device::null(Default::default());
//! # let path = std::env::temp_dir().join(format!("forebay-doc-{}.safetensors", std::process::id()));
//! let weights = BTreeMap::from([("fc.weight".to_owned(), Tensor::ones(&[2, 3], DType::F32, &device)?)]);
//! safetensors::save(&path, &weights, &BTreeMap::new())?;
//! assert_eq!(safetensors::load(&path, &device)?["fc.weight"].shape(), [2, 3]);
//! # std::fs::remove_file(&path).ok();
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::write_atomic;
use crate::{DType, Device, Error, Result, Tensor, fail, fail_if};

/// Maximum size of a header, which is the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Header key of the strings that accompany the tensors.
const METADATA_KEY: &str = "__metadata__";
/// Bytes of a tensor that the host holds at a time.
const READ_CHUNK_BYTES: usize = 64 << 20;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;
/// Strings that accompany a file's tensors.
pub type Metadata = BTreeMap<String, String>;

/// Reads the tensors of a file onto a device.
///
/// A dtype that this crate does not support is converted to one that holds its values: I8, I16 and U16 to
/// i32, and U64 to i64. If no dtype here holds a tensor, read the others with [`open`].
///
/// # Errors
/// The file cannot be read, is damaged, has a duplicate name, or holds an unsupported element type.
pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Tensors> {
    Ok(load_with_metadata(path, device)?.0)
}

/// Reads tensors like [`load`], and the strings that accompany them.
pub fn load_with_metadata(path: impl AsRef<Path>, device: &Device) -> Result<(Tensors, Metadata)> {
    let mut reader = open(path)?;
    Ok((reader.get_tensors(device, |_| true)?, reader.metadata))
}

/// Reads tensors like [`load_with_metadata`], from the bytes of a file, which errors call `<bytes>`.
pub fn from_bytes(bytes: &[u8], device: &Device) -> Result<(Tensors, Metadata)> {
    let mut reader = SafetensorsReader::new(Cursor::new(bytes), bytes.len() as u64, Path::new("<bytes>"))?;
    Ok((reader.get_tensors(device, |_| true)?, reader.metadata))
}

/// Opens a file and reads only its header: Python's `safe_open`.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use forebay_core::{device::Device, dtype::DType, tensor::Tensor};
/// # use forebay_nn::io::safetensors;
/// # fn main() -> forebay_core::error::Result<()> {
/// # let device = Device::null(Default::default());
/// # let path = std::env::temp_dir().join(format!("forebay-doc-open-{}.safetensors", std::process::id()));
/// # let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
/// # let (body, head) = (zeros(&[2, 3])?, zeros(&[4, 2])?);
/// # let weights = BTreeMap::from([("body.weight".to_owned(), body), ("head.weight".to_owned(), head)]);
/// # safetensors::save(&path, &weights, &BTreeMap::new())?;
/// let mut file = safetensors::open(&path)?;
/// assert_eq!(file.keys().collect::<Vec<_>>(), ["body.weight", "head.weight"]);
/// assert_eq!((file.dtype("head.weight"), file.shape("head.weight")), (Some("F32"), Some(&[4, 2][..])));
/// let head = file.get_tensor("head.weight", &device)?;
/// let body = file.get_tensors(&device, |name| name.starts_with("body."))?;
/// # assert_eq!((head.shape(), body.len()), (&[4, 2][..], 1));
/// # std::fs::remove_file(&path).ok();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The file cannot be read, its header is damaged, or it names a tensor twice.
pub fn open(path: impl AsRef<Path>) -> Result<SafetensorsReader> {
    let path = path.as_ref();
    let file = super::open_file(path)?;
    let length = file.metadata().map_err(|e| Error::file(path, format!("cannot be read: {e}")))?.len();
    SafetensorsReader::new(BufReader::with_capacity(1 << 16, file), length, path)
}

/// File whose tensors are read on demand, returned by [`open`].
#[derive(Debug)]
pub struct SafetensorsReader<R = BufReader<File>> {
    source: R,
    path: PathBuf,
    /// Offset of the first tensor's bytes.
    data_start: u64,
    /// Current offset of the source, if known. A seek would discard its buffer.
    position: Option<u64>,
    entries: BTreeMap<String, TensorEntry>,
    metadata: Metadata,
}

impl<R: Read + Seek> SafetensorsReader<R> {
    #[track_caller]
    fn new(mut source: R, length: u64, path: &Path) -> Result<Self> {
        let damaged = |message: String| Error::file(path, message);
        let mut take = |bytes: &mut [u8], what: &str| {
            source.read_exact(bytes).map_err(|e| damaged(format!("{what} cannot be read: {e}")))
        };
        let mut word = [0; 8];
        fail_if!(length < 8; file(path), "has {length} bytes; a safetensors file has at least 8");
        take(&mut word, "the header's length")?;
        let header = u64::from_le_bytes(word);
        if header > length - 8 || header > MAX_HEADER_BYTES {
            if let Some(kind) = describe_other_kind(word) {
                fail!(file(path), "is {kind}");
            }
            fail!(
                file(path),
                "is not a safetensors file, or is cut short: its first word states a header of {header} bytes, the file has {length}"
            );
        }
        let mut bytes = vec![0; header as usize];
        take(&mut bytes, "the header")?;
        let SafetensorsHeader { metadata, entries: UniqueMap(entries) } =
            serde_json::from_slice(&bytes).map_err(|e| damaged(format!("header: {e}")))?;
        let UniqueMap(metadata) = metadata.unwrap_or_default();
        let (expected, actual) = (check_layout(&entries).map_err(damaged)?, length - 8 - header);
        fail_if!(expected != actual;
            file(path), "is cut short or too long: its tensors take {expected} bytes, {actual} follow");
        let data_start = 8 + header;
        Ok(Self { source, path: path.to_owned(), data_start, position: Some(data_start), entries, metadata })
    }

    /// Returns the names of the tensors, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the strings that accompany the tensors.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns a tensor's dtype by the name in the file, such as `BF16` or `I8`.
    pub fn dtype(&self, name: &str) -> Option<&str> {
        self.entries.get(name).map(|entry| entry.dtype.as_str())
    }

    /// Returns a tensor's shape.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// Reads one tensor onto a device. See [`load`] for the dtypes.
    ///
    /// # Errors
    /// The file has no tensor of this name, its bytes cannot be read, or its element type is not supported.
    #[track_caller]
    pub fn get_tensor(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        let Some(entry) = self.entries.get(name) else {
            fail!(file(&self.path), "has no tensor `{name}`; `keys` lists those that it has");
        };
        let damaged = |message: String| Error::file(&self.path, message);
        let (dtype, cast) = dtype_from_file(&entry.dtype).ok_or_else(|| {
            damaged(format!(
                "tensor `{name}` is {}, a dtype that this crate does not have; read the other tensors by name, with `open`",
                entry.dtype
            ))
        })?;
        let at = |e: Error| e.with_context(format!("{}, tensor `{name}`", self.path.display()));
        let cannot = |e: std::io::Error| damaged(format!("tensor `{name}` cannot be read: {e}"));
        let (start, end) = entry.data_offsets;
        if self.position.replace(self.data_start + start) != Some(self.data_start + start) {
            self.source.seek(SeekFrom::Start(self.data_start + start)).map_err(cannot)?;
        }
        let position = self.position.take();

        let elements = entry.shape.iter().product::<usize>();
        let width = (end - start).checked_div(elements as u64).unwrap_or(0) as usize;
        let mut part = |elements: usize| -> Result<Vec<u8>> {
            let mut data = vec![0; elements * width];
            self.source.read_exact(&mut data).map_err(cannot)?;
            if dtype == DType::Bool && data.iter().any(|&b| b > 1) {
                return Err(damaged(format!("tensor `{name}` is bool and holds bytes other than 0 and 1")));
            }
            cast(data).map_err(|why| damaged(format!("tensor `{name}` {why}")))
        };
        if end - start <= READ_CHUNK_BYTES as u64 {
            let data = part(elements)?;
            self.position = position.map(|at| at + end - start);
            return Tensor::from_bytes(&data, &entry.shape, dtype, device).map_err(at);
        }
        // Allocates device memory first, so that a tensor that is too large fails early. The host holds one
        // chunk.
        let tensor = Tensor::empty(&entry.shape, dtype, device).map_err(at)?;
        let flat = tensor.reshape([elements]).map_err(at)?;
        let max_elements = READ_CHUNK_BYTES / width;
        for first in (0..elements).step_by(max_elements) {
            let n = max_elements.min(elements - first);
            let data = part(n)?;
            let copied = Tensor::from_bytes(&data, [n], dtype, device)
                .and_then(|part| flat.narrow(0, first, n)?.copy_(&part));
            copied.map_err(at)?;
        }
        self.position = position.map(|at| at + end - start);
        Ok(tensor)
    }

    /// Reads the tensors for whose names `wanted` returns true, like [`get_tensor`](Self::get_tensor), in file order.
    pub fn get_tensors(&mut self, device: &Device, mut wanted: impl FnMut(&str) -> bool) -> Result<Tensors> {
        let names = self.entries.iter().filter(|(name, _)| wanted(name));
        let mut order: Vec<(u64, String)> =
            names.map(|(name, entry)| (entry.data_offsets.0, name.clone())).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, name)| Ok((name.clone(), self.get_tensor(&name, device)?))).collect()
    }
}

/// Describes a file of another kind by its first bytes, and what to do.
fn describe_other_kind(head: [u8; 8]) -> Option<&'static str> {
    Some(match &head {
        [b'P', b'K', 3, 4, ..] => {
            "a zip archive, as `torch.save` writes; write the weights with `safetensors.torch.save_file` in Python"
        }
        [0x80, 2..=5, ..] => {
            "a Python pickle; write the weights with `safetensors.torch.save_file` in Python"
        }
        [b'G', b'G', b'U', b'F', ..] => {
            "a GGUF file, which is not supported; take the model's safetensors files"
        }
        b"version " => {
            "a Git LFS pointer without the weights; run `git lfs pull`, or download the file itself"
        }
        b"<!DOCTYP" | b"<!doctyp" => "a web page without the weights; download the file itself",
        _ => return None,
    })
}

#[derive(Debug, Deserialize)]
struct TensorEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

#[derive(Deserialize)]
struct SafetensorsHeader {
    #[serde(rename = "__metadata__", default)]
    metadata: Option<UniqueMap<String>>,
    #[serde(flatten)]
    entries: UniqueMap<TensorEntry>,
}

/// Map whose keys must not repeat.
#[derive(Default)]
struct UniqueMap<V>(BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of values by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<UniqueMap<V>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, V>()? {
                    if entries.contains_key(&name) {
                        return Err(A::Error::custom(format!("`{name}` is there twice")));
                    }
                    entries.insert(name, value);
                }
                Ok(UniqueMap(entries))
            }
        }

        from.deserialize_map(Entries(PhantomData))
    }
}

/// Checks that tensors are contiguous in the file and have their shapes' sizes. Returns the total bytes.
fn check_layout(entries: &BTreeMap<String, TensorEntry>) -> std::result::Result<u64, String> {
    let mut order: Vec<(&String, &TensorEntry)> = entries.iter().collect();
    order.sort_unstable_by_key(|(_, entry)| entry.data_offsets);
    let mut at = 0;
    for (name, TensorEntry { dtype, shape, data_offsets: (start, end) }) in order {
        if *start != at || end < start {
            return Err(format!(
                "header: tensor `{name}` lies at {start}..{end}, where byte {at} comes next: tensors have no gaps and share nothing"
            ));
        }
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
        // The size of an unknown dtype cannot be checked.
        let bits =
            parse_dtype(dtype).map(|dtype| elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)));
        if bits.is_some_and(|bits| bits != (end - start).checked_mul(8)) || elements.is_none() {
            return Err(format!(
                "header: tensor `{name}` of {dtype} {shape:?} does not take the {} bytes that it has",
                end - start
            ));
        }
        at = *end;
    }
    Ok(at)
}

/// Writes tensors and strings to a file, which is replaced atomically. Waits for the device.
///
/// # Errors
/// The file cannot be written, or a tensor is called `__metadata__`.
#[track_caller]
pub fn save(path: impl AsRef<Path>, tensors: &Tensors, metadata: &Metadata) -> Result<()> {
    let path = path.as_ref();
    // Wide dtypes come first, which keeps every tensor aligned to its element size.
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| std::cmp::Reverse(t.dtype().size()));
    let mut header = serde_json::Map::new();
    let json = |e: serde_json::Error| Error::file(path, format!("header: {e}"));
    let mut start = 0;
    for (name, tensor) in &order {
        if *name == METADATA_KEY {
            fail!(file(path), "a tensor cannot be called `{METADATA_KEY}`");
        }
        let end = start + tensor.numel() * tensor.dtype().size();
        let Some(&(_, dtype)) = DTYPES.iter().find(|(dtype, _)| *dtype == tensor.dtype()) else {
            fail!(dtype("save", tensor.dtype()), "a type that safetensors has");
        };
        let info = TensorInfo { dtype, shape: tensor.shape().to_vec(), data_offsets: (start, end) };
        header.insert((*name).clone(), serde_json::to_value(info).map_err(json)?);
        start = end;
    }
    if !metadata.is_empty() {
        header.insert(METADATA_KEY.into(), serde_json::to_value(metadata).map_err(json)?);
    }
    let mut header = serde_json::to_vec(&header).map_err(json)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    fail_if!(header.len() as u64 > MAX_HEADER_BYTES;
        file(path), "the header takes {} bytes, more than {MAX_HEADER_BYTES}", header.len());
    write_atomic(path, |out: &mut dyn Write| {
        let mut write = |bytes: &[u8]| {
            out.write_all(bytes).map_err(|e| Error::file(path, format!("cannot be written: {e}")))
        };
        write(&(header.len() as u64).to_le_bytes())?;
        write(&header)?;
        for (name, tensor) in &order {
            write(&tensor.to_bytes().map_err(|e: Error| e.with_context(format!("tensor `{name}`")))?)?;
        }
        Ok(())
    })
}

/// Dtypes that files hold unchanged.
const DTYPES: [(DType, Dtype); 11] = [
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::F64, Dtype::F64),
    (DType::I32, Dtype::I32),
    (DType::U32, Dtype::U32),
    (DType::I64, Dtype::I64),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
    (DType::F8E4M3, Dtype::F8_E4M3),
    (DType::F8E5M2, Dtype::F8_E5M2),
];

/// Parses the name of a dtype in a file, unless the safetensors crate does not know it.
fn parse_dtype(name: &str) -> Option<Dtype> {
    serde_json::from_value(name.into()).ok()
}

/// Conversion of bytes from a file's dtype to this crate's.
type ConvertBytes = fn(Vec<u8>) -> std::result::Result<Vec<u8>, String>;

/// Returns the dtype that holds all values of a file's dtype, and the conversion.
fn dtype_from_file(dtype: &str) -> Option<(DType, ConvertBytes)> {
    let found = parse_dtype(dtype)?;
    if let Some((dtype, _)) = DTYPES.iter().find(|(_, name)| *name == found) {
        return Some((*dtype, Ok));
    }
    match found {
        Dtype::I8 => {
            Some((DType::I32, |data| Ok(widen_to_i32(&data, |b: [u8; 1]| i8::from_le_bytes(b).into()))))
        }
        Dtype::I16 => Some((DType::I32, |data| Ok(widen_to_i32(&data, |b| i16::from_le_bytes(b).into())))),
        Dtype::U16 => Some((DType::I32, |data| Ok(widen_to_i32(&data, |b| u16::from_le_bytes(b).into())))),
        Dtype::U64 => Some((DType::I64, |data| {
            let mut values = data.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b));
            let large = values.find(|&n| i64::try_from(n).is_err());
            large.map_or(Ok(data), |n| Err(format!("is U64 and holds {n}, which i64 does not")))
        })),
        _ => None,
    }
}

/// Converts each value of `N` bytes to an i32.
fn widen_to_i32<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> i32) -> Vec<u8> {
    data.as_chunks::<N>().0.iter().flat_map(|b| value(*b).to_le_bytes()).collect()
}
