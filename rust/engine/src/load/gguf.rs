//! GGUF files, versions 2 and 3, little-endian: metadata, then descriptions of tensors, then their data.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use slipstream_kernels::HostType;

use super::gguf_value::{Cursor, Metadata, Value};
use super::shown;
use super::store::TensorType;
use crate::error::{EngineError, Result};

/// Most keys and most tensors: far above every real file, and few enough that their descriptions stay small.
const MAX_KEYS: u64 = 1 << 16;
/// See [`MAX_KEYS`].
const MAX_TENSORS: u64 = 1 << 16;
/// Most dimensions of a tensor, as in ggml.
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: u64 = 1 << 16;

/// Where a tensor lies and what it is.
#[derive(Debug)]
pub(super) struct TensorInfo {
    /// As written in the file.
    pub(super) name: String,
    pub(super) dtype: TensorType,
    /// Rows first: the reverse of the file's order.
    pub(super) shape: Vec<usize>,
    /// Bytes of the file.
    pub(super) range: Range<usize>,
}

/// A parsed file.
#[derive(Debug)]
pub(super) struct Gguf<'a> {
    pub(super) metadata: Metadata<'a>,
    pub(super) tensors: Vec<TensorInfo>,
}

/// How a type of the file is stored: elements in a block, bytes of a block, and what we make of it.
fn layout(type_id: u32) -> Option<(usize, usize, TensorType)> {
    use TensorType::Other;
    Some(match type_id {
        0 => (1, 4, HostType::F32.into()),
        1 => (1, 2, HostType::F16.into()),
        2 => (32, 18, HostType::Q4_0.into()),
        3 => (32, 20, HostType::Q4_1.into()),
        6 => (32, 22, HostType::Q5_0.into()),
        7 => (32, 24, HostType::Q5_1.into()),
        8 => (32, 34, HostType::Q8_0.into()),
        9 => (32, 36, Other("q8_1")),
        10 => (256, 84, Other("q2_k")),
        11 => (256, 110, Other("q3_k")),
        12 => (256, 144, HostType::Q4K.into()),
        13 => (256, 176, HostType::Q5K.into()),
        14 => (256, 210, HostType::Q6K.into()),
        15 => (256, 292, Other("q8_k")),
        16 => (256, 66, Other("iq2_xxs")),
        17 => (256, 74, Other("iq2_xs")),
        18 => (256, 98, Other("iq3_xxs")),
        19 => (256, 50, Other("iq1_s")),
        20 => (32, 18, Other("iq4_nl")),
        21 => (256, 110, Other("iq3_s")),
        22 => (256, 82, Other("iq2_s")),
        23 => (256, 136, Other("iq4_xs")),
        24 => (1, 1, Other("8-bit integers")),
        25 => (1, 2, Other("16-bit integers")),
        26 => (1, 4, TensorType::I32),
        27 => (1, 8, TensorType::I64),
        28 => (1, 8, Other("f64")),
        29 => (256, 56, Other("iq1_m")),
        30 => (1, 2, HostType::BF16.into()),
        34 => (256, 54, Other("tq1_0")),
        35 => (256, 66, Other("tq2_0")),
        39 => (32, 17, Other("mxfp4")),
        40 => (64, 36, Other("nvfp4")),
        _ => return None,
    })
}

/// Parses a whole file.
pub(super) fn parse(bytes: &[u8]) -> Result<Gguf<'_>> {
    let mut cursor = Cursor::new(bytes);
    let (num_tensors, num_keys) = header(&mut cursor)?;
    let metadata = Metadata { bytes, values: keys(&mut cursor, num_keys)? };
    let alignment = alignment(&metadata)?;

    let mut names = HashSet::new();
    let mut described = Vec::new();
    for index in 0..num_tensors {
        let name = cursor.name(&format!("the name of tensor {index}"))?;
        if !names.insert(name) {
            return Err(EngineError::model(format!("expected every tensor once, got {} twice", shown(name))));
        }
        let tensor = describe(&mut cursor).map_err(|error| error.within(format_args!("tensor {}", shown(name))))?;
        described.push((name, tensor));
    }
    let data_start = cursor.position.next_multiple_of(alignment);
    let data_len = bytes.len().saturating_sub(data_start);
    let tensors = described
        .into_iter()
        .map(|(name, tensor)| place(name, tensor, alignment, data_start, data_len))
        .collect::<Result<_>>()?;
    Ok(Gguf { metadata, tensors })
}

/// Magic, version and the two counts.
fn header(cursor: &mut Cursor<'_>) -> Result<(u64, u64)> {
    let magic = cursor.u32("the file's mark")?;
    if magic != u32::from_le_bytes(*b"GGUF") {
        return Err(EngineError::model("expected a file that begins with GGUF, got another format"));
    }
    let version = cursor.u32("the version")?;
    if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
        return Err(EngineError::model("expected a little-endian GGUF file, got a big-endian one"));
    }
    if version != 2 && version != 3 {
        return Err(EngineError::model(format!("expected GGUF version 2 or 3, got {version}")));
    }
    let num_tensors = cursor.u64("the number of tensors")?;
    if num_tensors > MAX_TENSORS {
        return Err(EngineError::model(format!(
            "expected a number of tensors of at most {MAX_TENSORS}, got {num_tensors}"
        )));
    }
    let num_keys = cursor.u64("the number of keys")?;
    if num_keys > MAX_KEYS {
        return Err(EngineError::model(format!("expected a number of keys of at most {MAX_KEYS}, got {num_keys}")));
    }
    Ok((num_tensors, num_keys))
}

fn keys(cursor: &mut Cursor<'_>, num_keys: u64) -> Result<HashMap<String, Value>> {
    let mut values = HashMap::new();
    for index in 0..num_keys {
        let key = cursor.name(&format!("the name of key {index}"))?;
        if key.chars().any(char::is_control) {
            return Err(EngineError::model(format!("expected a key of printable characters, got {}", shown(key))));
        }
        let value = cursor.value(key)?;
        if values.insert(key.to_owned(), value).is_some() {
            return Err(EngineError::model(format!("expected every key once, got {} twice", shown(key))));
        }
    }
    Ok(values)
}

fn alignment(metadata: &Metadata<'_>) -> Result<usize> {
    let key = "general.alignment";
    match metadata.count(key)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(value) if (8..=MAX_ALIGNMENT).contains(&value) && value.is_power_of_two() => Ok(value as usize),
        Some(value) => Err(EngineError::model(format!(
            "key {key}: expected a power of two from 8 to {MAX_ALIGNMENT}, got {value}"
        ))),
    }
}

struct Described {
    dtype: TensorType,
    shape: Vec<usize>,
    len: usize,
    offset: u64,
}

fn describe(cursor: &mut Cursor<'_>) -> Result<Described> {
    let num_dims = cursor.u32("the number of dimensions")?;
    if num_dims == 0 || num_dims > MAX_DIMS {
        return Err(EngineError::model(format!("expected 1 to {MAX_DIMS} dimensions, got {num_dims}")));
    }
    let mut shape = Vec::new();
    let mut elements = 1usize;
    for axis in 0..num_dims {
        let dim = cursor.u64("a dimension")?;
        if dim == 0 {
            return Err(EngineError::model(format!("expected no zero dimension, got 0 at {axis}")));
        }
        let product = usize::try_from(dim).ok().and_then(|dim| elements.checked_mul(dim));
        elements = product
            .ok_or_else(|| EngineError::model(format!("expected dimensions that fit memory, got {dim} at {axis}")))?;
        shape.push(dim as usize);
    }
    let type_id = cursor.u32("the element type")?;
    let offset = cursor.u64("the offset")?;
    let (block_len, block_bytes, dtype) =
        layout(type_id).ok_or_else(|| EngineError::model(format!("expected a known element type, got {type_id}")))?;
    let row = shape.first().copied().unwrap_or(1);
    if !row.is_multiple_of(block_len) {
        return Err(EngineError::model(format!(
            "expected rows of a multiple of {block_len} elements for {dtype:?}, got {row}"
        )));
    }
    let len = (elements / block_len)
        .checked_mul(block_bytes)
        .ok_or_else(|| EngineError::model(format!("expected dimensions that fit memory, got {shape:?}")))?;
    // Dimensions of one beyond the second say nothing.
    while shape.len() > 2 && shape.last() == Some(&1) {
        shape.pop();
    }
    shape.reverse();
    Ok(Described { dtype, shape, len, offset })
}

fn place(name: &str, tensor: Described, alignment: usize, data_start: usize, data_len: usize) -> Result<TensorInfo> {
    let Described { dtype, shape, len, offset } = tensor;
    if !offset.is_multiple_of(alignment as u64) {
        return Err(EngineError::model(format!(
            "tensor {}: expected an offset that is a multiple of {alignment}, got {offset}",
            shown(name)
        )));
    }
    let range = usize::try_from(offset).ok().and_then(|offset| {
        let end = offset.checked_add(len).filter(|end| *end <= data_len)?;
        Some(data_start + offset..data_start + end)
    });
    let range = range.ok_or_else(|| {
        EngineError::model(format!(
            "tensor {}: expected {len} bytes of data at offset {offset}, got a file with {data_len} bytes of data",
            shown(name)
        ))
        .with_hint("the file is cut short or damaged; download it again")
    })?;
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, range })
}
