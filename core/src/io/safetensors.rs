//! Tensors by name in a file: [safetensors](https://github.com/huggingface/safetensors), which PyTorch and its
//! relatives read and write too.
//!
//! ```
//! # use std::collections::BTreeMap;
//! # use forebay_core::{device::Device, dtype::DType, io::safetensors, tensor::Tensor};
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
use std::io::{BufReader, Read, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{file_error, open, replace};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// What a header may take at most; the format's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Where the header keeps the strings that are no tensors.
const METADATA: &str = "__metadata__";

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;
/// Strings that a file carries beside its tensors.
pub type Strings = BTreeMap<String, String>;

/// Reads the tensors of a file onto a device.
///
/// # Errors
/// The file cannot be read, is damaged, or holds an element type that this crate has not; memory runs out.
pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<Tensors> {
    Ok(load_with_metadata(path, device)?.0)
}

/// As [`load`], with the strings that the file carries beside its tensors.
///
/// # Errors
/// As [`load`].
pub fn load_with_metadata(path: impl AsRef<Path>, device: &Device) -> Result<(Tensors, Strings)> {
    let path = path.as_ref();
    let file = open(path)?;
    let length = file.metadata().map_err(|e| file_error(path, format!("cannot be read: {e}")))?.len();
    read(BufReader::with_capacity(1 << 16, file), length, path, device)
}

/// As [`load_with_metadata`], from the bytes of a file.
///
/// # Errors
/// As [`load`]; the messages call the file `<bytes>`.
pub fn from_bytes(bytes: &[u8], device: &Device) -> Result<(Tensors, Strings)> {
    read(bytes, bytes.len() as u64, Path::new("<bytes>"), device)
}

fn read(mut file: impl Read, length: u64, path: &Path, device: &Device) -> Result<(Tensors, Strings)> {
    let damaged = |message: String| file_error(path, message);
    let mut take = |bytes: &mut [u8], what: &str| {
        file.read_exact(bytes).map_err(|e| damaged(format!("{what} cannot be read: {e}")))
    };
    let mut word = [0; 8];
    if length < 8 {
        return Err(damaged(format!("has {length} bytes; a safetensors file has at least 8")));
    }
    take(&mut word, "the header's length")?;
    let header = u64::from_le_bytes(word);
    if header > length - 8 || header > MAX_HEADER {
        return Err(damaged(format!(
            "is no safetensors file, or is cut short: its first word asks for a header of {header} bytes, \
             the file has {length}"
        )));
    }
    let mut bytes = vec![0; header as usize];
    take(&mut bytes, "the header")?;
    let metadata: Metadata = serde_json::from_slice(&bytes).map_err(|e| damaged(format!("header: {e}")))?;
    drop(bytes);
    let (claimed, there) = (metadata.data_len() as u64, length - 8 - header);
    if claimed != there {
        return Err(damaged(format!(
            "is cut short or too long: its tensors take {claimed} bytes, {there} follow"
        )));
    }
    let mut tensors = BTreeMap::new();
    let mut data = Vec::new();
    // In the order in which they lie in the file, without gaps: the header was checked for that.
    for name in metadata.offset_keys() {
        let Some(TensorInfo { dtype, shape, data_offsets: (start, end) }) = metadata.info(&name) else {
            continue;
        };
        let dtype = dtype_here(*dtype).ok_or_else(|| {
            damaged(format!("tensor `{name}` is {dtype}; only the dtypes of this crate are read"))
        })?;
        data.resize(end - start, 0);
        take(&mut data, &format!("tensor `{name}`"))?;
        if dtype == DType::Bool && data.iter().any(|&b| b > 1) {
            return Err(damaged(format!("tensor `{name}` is bool and holds bytes other than 0 and 1")));
        }
        let tensor = Tensor::from_bytes(&data, shape, dtype, device)
            .map_err(|e| e.at(format!("{}, tensor `{name}`", path.display())))?;
        tensors.insert(name, tensor);
    }
    let strings = metadata.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
    Ok((tensors, strings))
}

/// Writes tensors and strings to a file, which is replaced as a whole. Waits for the device.
///
/// # Errors
/// The file cannot be written; a tensor is called `__metadata__`; the device was lost.
pub fn save(path: impl AsRef<Path>, tensors: &Tensors, metadata: &Strings) -> Result<()> {
    let path = path.as_ref();
    // Wide types first keeps every tensor aligned to its element.
    let mut order: Vec<(&String, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, t)| std::cmp::Reverse(t.dtype().size()));
    let mut header = serde_json::Map::new();
    let json = |e: serde_json::Error| file_error(path, format!("header: {e}"));
    let mut start = 0;
    for (name, tensor) in &order {
        if *name == METADATA {
            return Err(file_error(path, format!("a tensor cannot be called `{METADATA}`")));
        }
        let end = start + tensor.numel() * tensor.dtype().size();
        let info = TensorInfo {
            dtype: dtype_there(tensor.dtype()),
            shape: tensor.shape().to_vec(),
            data_offsets: (start, end),
        };
        header.insert((*name).clone(), serde_json::to_value(info).map_err(json)?);
        start = end;
    }
    if !metadata.is_empty() {
        header.insert(METADATA.into(), serde_json::to_value(metadata).map_err(json)?);
    }
    let mut header = serde_json::to_vec(&header).map_err(json)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > MAX_HEADER {
        return Err(file_error(
            path,
            format!("the header takes {} bytes, more than {MAX_HEADER}", header.len()),
        ));
    }
    replace(path, |out: &mut dyn Write| {
        let mut put = |bytes: &[u8]| {
            out.write_all(bytes).map_err(|e| file_error(path, format!("cannot be written: {e}")))
        };
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        for (name, tensor) in &order {
            put(&tensor.to_bytes().map_err(|e: Error| e.at(format!("tensor `{name}`")))?)?;
        }
        Ok(())
    })
}

fn dtype_here(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F64 => DType::F64,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F8_E5M2 => DType::F8E5M2,
        _ => return None,
    })
}

fn dtype_there(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F64 => Dtype::F64,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
    }
}
