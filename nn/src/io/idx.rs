//! Byte arrays in the idx format of MNIST and similar data sets, gzipped or not.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::open_file;
use crate::{Error, Result, fail, fail_if};

/// Maximum number of elements in an array, because a header can claim any size.
pub const MAX_ELEMENTS: usize = 1 << 30;

/// Array of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdxArray {
    /// Extents of the array.
    pub shape: Vec<usize>,
    /// Elements, row-major; as many as the shape has.
    pub data: Vec<u8>,
}

/// Reads an idx file of unsigned bytes. A gzipped file is recognised by its contents.
///
/// # Errors
/// The file cannot be read, is damaged, or holds another element type or more than [`MAX_ELEMENTS`].
pub fn load(path: impl AsRef<Path>) -> Result<IdxArray> {
    let path = path.as_ref();
    read_maybe_gzipped(BufReader::with_capacity(1 << 16, open_file(path)?), path)
}

/// Reads an array like [`load`], from the bytes of a file, which errors call `<bytes>`.
pub fn from_bytes(bytes: &[u8]) -> Result<IdxArray> {
    read_maybe_gzipped(bytes, Path::new("<bytes>"))
}

fn read_maybe_gzipped(mut file: impl BufRead, path: &Path) -> Result<IdxArray> {
    let start = file.fill_buf().map_err(|e| Error::file(path, format!("cannot be read: {e}")))?;
    let gzipped = start.starts_with(&[0x1f, 0x8b]);
    if gzipped { read_array(MultiGzDecoder::new(file), path) } else { read_array(file, path) }
}

#[track_caller]
fn read_array(mut file: impl Read, path: &Path) -> Result<IdxArray> {
    let damaged = |message: String| Error::file(path, message);
    let mut word = || {
        let mut bytes = [0; 4];
        file.read_exact(&mut bytes).map_err(|e| damaged(format!("the header cannot be read: {e}")))?;
        Ok::<_, Error>(bytes)
    };
    let [zero, also_zero, kind, rank] = word()?;
    fail_if!([zero, also_zero] != [0; 2]; file(path), "is not an idx file: it does not start with two zero bytes");
    fail_if!(kind != 8; file(path), "holds elements of type {kind:#04x}; only unsigned bytes (0x08) are read");
    let shape = (0..rank).map(|_| Ok(u32::from_be_bytes(word()?) as usize)).collect::<Result<Vec<_>>>()?;
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= MAX_ELEMENTS);
    let Some(elements) = elements else {
        fail!(file(path), "claims the shape {shape:?}, which has more than {MAX_ELEMENTS} elements");
    };
    // Grows with the data that exists, not with the size that the header claims.
    let mut data = Vec::with_capacity(elements.min(1 << 20));
    let read = file.by_ref().take(elements as u64 + 1).read_to_end(&mut data);
    read.map_err(|e| damaged(format!("cannot be read after {} of {elements} elements: {e}", data.len())))?;
    fail_if!(data.len() < elements;
        file(path), "is cut short: {elements} elements of the shape {shape:?}, {} are there", data.len());
    fail_if!(data.len() > elements;
        file(path), "has more bytes than the {elements} elements of its shape {shape:?}");
    Ok(IdxArray { shape, data })
}
