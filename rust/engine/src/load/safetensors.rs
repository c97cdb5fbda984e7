//! Tensors of a safetensors file, or of several behind an index.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use slipstream_kernels::host_bytes::HostBytes;
use slipstream_kernels::{HostType, RowOrder};

use super::store::{TensorStore, TensorType};
use super::{map_file, read_limited, shown};
use crate::error::{EngineError, Result};

/// Largest header. Real ones have some 120 bytes per tensor; parsed, a header takes a few times its size.
const MAX_HEADER_BYTES: u64 = 8 << 20;
/// Largest index of shards.
const MAX_INDEX_BYTES: u64 = 16 << 20;

/// Adds the tensors of `model.safetensors` or of the shards in `model.safetensors.index.json`. `false` if the folder has
/// neither.
pub(super) fn read_folder(folder: &Path, store: &mut TensorStore<'_>) -> Result<bool> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        read_file(&single, store)?;
        return Ok(true);
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Ok(false);
    }
    read_shards(folder, &index, store)?;
    Ok(true)
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

fn read_shards(folder: &Path, index_path: &Path, store: &mut TensorStore<'_>) -> Result<()> {
    let bytes = read_limited(index_path, MAX_INDEX_BYTES)?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| {
        EngineError::model(format!("expected an index of shards: {error}")).within(index_path.display())
    })?;
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map {
        shards.entry(shard).or_default().push(tensor);
    }
    for (shard, tensors) in &mut shards {
        tensors.sort_unstable();
        let mut parts = Path::new(shard).components();
        let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
            && !shard.contains(['/', '\\', '\0']);
        if !is_plain {
            return Err(EngineError::model(format!("expected shards inside the folder, got {}", shown(shard)))
                .within(index_path.display()));
        }
        let path = folder.join(shard);
        if !path.exists() {
            return Err(EngineError::model(format!(
                "expected a shard {} with tensor {}, got no such file",
                shown(shard),
                shown(tensors.first().copied().unwrap_or_default())
            ))
            .within(index_path.display()));
        }
        read_file(&path, store)?;
        if let Some(missing) = tensors.iter().find(|tensor| !store.names_exactly(tensor)) {
            return Err(EngineError::model(format!(
                "expected a tensor {} as the index says, got none",
                shown(missing)
            ))
            .within(path.display()));
        }
    }
    Ok(())
}

fn read_file(path: &Path, store: &mut TensorStore<'_>) -> Result<()> {
    add_bytes(map_file(path)?, store).map_err(|error| error.within(path.display()))
}

/// Adds the tensors of one file.
pub(super) fn add_bytes(bytes: HostBytes, store: &mut TensorStore<'_>) -> Result<()> {
    let (data_start, metadata) = header(&bytes)?;
    let data_len = bytes.len() - data_start;
    let mut found = Vec::new();
    // In the order of their data, so that the first one past the end of a cut file is the one named.
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).ok_or_else(|| EngineError::model("expected every tensor to be described"))?;
        let (start, end) = info.data_offsets;
        if end > data_len {
            return Err(EngineError::model(format!(
                "tensor {}: expected its data at bytes {start} to {end}, got a file with {data_len} bytes of data",
                shown(&name)
            ))
            .with_hint("the file is cut short; download it again"));
        }
        if let Some(zero) = info.shape.iter().position(|dim| *dim == 0) {
            return Err(EngineError::model(format!(
                "tensor {}: expected no zero dimension, got 0 at {zero}",
                shown(&name)
            )));
        }
        let dtype = match info.dtype {
            Dtype::F32 => HostType::F32.into(),
            Dtype::F16 => HostType::F16.into(),
            Dtype::BF16 => HostType::BF16.into(),
            Dtype::I32 => TensorType::I32,
            Dtype::I64 => TensorType::I64,
            Dtype::BOOL => TensorType::Bool,
            Dtype::F64 => TensorType::Other("f64"),
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => TensorType::Other("f8"),
            Dtype::U8 | Dtype::I8 => TensorType::Other("8-bit integers"),
            _ => TensorType::Other("another type"),
        };
        found.push((name, dtype, info.shape.clone(), data_start + start..data_start + end));
    }
    let file = store.add_file(bytes);
    for (name, dtype, shape, range) in found {
        store.add(name, dtype, shape, RowOrder::AsStored, file, range)?;
    }
    Ok(())
}

/// Where the data starts, and the parsed header.
fn header(bytes: &[u8]) -> Result<(usize, Metadata)> {
    if let Some(format) = foreign(bytes) {
        return Err(EngineError::model(format!("expected a safetensors file, got {format}")));
    }
    let Some(len_bytes) = bytes.first_chunk::<8>() else {
        return Err(EngineError::model(format!(
            "expected a safetensors file of at least 8 bytes, got {} bytes",
            bytes.len()
        )));
    };
    let header_len = u64::from_le_bytes(*len_bytes);
    if header_len > MAX_HEADER_BYTES {
        return Err(EngineError::model(format!(
            "expected a header of at most {MAX_HEADER_BYTES} bytes, got {header_len}; this is not a safetensors file"
        )));
    }
    let data_start = 8 + header_len as usize;
    let Some(text) = bytes.get(8..data_start) else {
        return Err(EngineError::model(format!(
            "expected a header of {header_len} bytes, got a file of {} bytes",
            bytes.len()
        ))
        .with_hint("the file is cut short; download it again"));
    };
    let text = std::str::from_utf8(text)
        .map_err(|error| EngineError::model(format!("expected a header in UTF-8: {error}")))?;
    let metadata = serde_json::from_str(text)
        .map_err(|error| EngineError::model(format!("expected a safetensors header: {}", shown(&error.to_string()))))?;
    Ok((data_start, metadata))
}

/// Recognises what else carries such a file name.
fn foreign(bytes: &[u8]) -> Option<&'static str> {
    let start = bytes.get(..bytes.len().min(64))?;
    if start.starts_with(b"PK\x03\x04") {
        return Some("a zip archive (a pickled torch checkpoint?)");
    }
    if start.starts_with(b"\x80\x02") || start.starts_with(b"\x80\x03") || start.starts_with(b"\x80\x04") {
        // A header length never reaches these numbers below the cap unless its upper bytes are zero.
        return start.get(3..8).is_some_and(|upper| upper != [0; 5]).then_some("a Python pickle");
    }
    if start.starts_with(b"GGUF") {
        return Some("a GGUF file");
    }
    if start.starts_with(b"version https://git-lfs") {
        return Some("a Git LFS pointer; the weights were not downloaded");
    }
    let text = start.trim_ascii_start();
    if text.starts_with(b"<!") || text.starts_with(b"<html") || text.starts_with(b"<HTML") || text.starts_with(b"<?xml")
    {
        return Some("a web page");
    }
    None
}
