//! Tensors by name, wherever their bytes lie: in mapped files or in memory that a caller lends.

use std::collections::HashMap;
use std::ops::Range;

use half::{bf16, f16};
use slipstream_kernels::blocks::{block_bytes, block_len};
use slipstream_kernels::host_bytes::HostBytes;
use slipstream_kernels::{HostMatrix, HostType, RowOrder};

use super::shown;
use crate::error::{EngineError, Result};

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// A weight type that the kernels read.
    Weight(HostType),
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
    /// One byte per truth value.
    Bool,
    /// Any other type, by name. Its tensors can be listed, not read.
    Other(&'static str),
}

impl From<HostType> for TensorType {
    fn from(dtype: HostType) -> Self {
        Self::Weight(dtype)
    }
}

impl TensorType {
    /// Bytes of a tensor of this shape; `None` for an unknown size or one past all bounds.
    fn bytes(self, shape: &[usize]) -> Option<usize> {
        let elements = shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
        let (len, size) = match self {
            Self::Weight(dtype) => (block_len(dtype), block_bytes(dtype)),
            Self::I32 => (1, 4),
            Self::I64 => (1, 8),
            Self::Bool => (1, 1),
            Self::Other(_) => return None,
        };
        if len > 1 && !shape.last().copied().unwrap_or(1).is_multiple_of(len) {
            return None;
        }
        (elements / len).checked_mul(size)
    }
}

#[derive(Debug)]
enum Place<'a> {
    Mapped { file: usize, range: Range<usize> },
    Lent(&'a [u8]),
}

/// A tensor as it lies.
#[derive(Debug)]
struct Stored<'a> {
    dtype: TensorType,
    /// Rows first, as in torch.
    shape: Vec<usize>,
    order: RowOrder,
    place: Place<'a>,
}

/// Tensors by name. A name is found with or without a leading `model.`.
#[derive(Debug, Default)]
pub struct TensorStore<'a> {
    files: Vec<HostBytes>,
    tensors: HashMap<String, Stored<'a>>,
}

/// Tensors that a caller lends: name, element type, shape (rows first), bytes.
pub type LentTensors<'a> = Vec<(String, TensorType, Vec<usize>, &'a [u8])>;

impl<'a> TensorStore<'a> {
    /// A store over lent tensors.
    pub fn lent(tensors: LentTensors<'a>) -> Result<Self> {
        let mut store = Self::default();
        for (name, dtype, shape, bytes) in tensors {
            if !matches!(dtype, TensorType::Other(_)) && dtype.bytes(&shape) != Some(bytes.len()) {
                return Err(EngineError::model(format!(
                    "tensor {}: expected the bytes of {dtype:?} of shape {shape:?}, got {} bytes",
                    shown(&name),
                    bytes.len()
                )));
            }
            store.insert(name, Stored { dtype, shape, order: RowOrder::AsStored, place: Place::Lent(bytes) })?;
        }
        Ok(store)
    }

    /// Takes over a mapped file; [`TensorStore::add`] names its tensors.
    pub(super) fn add_file(&mut self, file: HostBytes) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Adds a tensor of a mapped file. The range was checked against the file and the shape.
    pub(super) fn add(
        &mut self,
        name: String,
        dtype: TensorType,
        shape: Vec<usize>,
        order: RowOrder,
        file: usize,
        range: Range<usize>,
    ) -> Result<()> {
        self.insert(name, Stored { dtype, shape, order, place: Place::Mapped { file, range } })
    }

    fn insert(&mut self, name: String, stored: Stored<'a>) -> Result<()> {
        if self.tensors.contains_key(&name) {
            return Err(EngineError::model(format!("expected every tensor once, got {} twice", shown(&name))));
        }
        self.tensors.insert(name, stored);
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&Stored<'a>> {
        self.tensors.get(name).or_else(|| match name.strip_prefix("model.") {
            Some(short) => self.tensors.get(short),
            None => self.tensors.get(&format!("model.{name}")),
        })
    }

    fn required(&self, name: &str) -> Result<&Stored<'a>> {
        self.find(name).ok_or_else(|| EngineError::model(format!("expected a tensor {}, got none", shown(name))))
    }

    fn bytes<'s>(&'s self, stored: &'s Stored<'a>) -> &'s [u8] {
        match &stored.place {
            Place::Mapped { file, range } => {
                self.files.get(*file).and_then(|file| file.get(range.clone())).unwrap_or_default()
            }
            Place::Lent(bytes) => bytes,
        }
    }

    /// Whether a tensor of exactly this name is there.
    pub(super) fn names_exactly(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether a tensor is there.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The stored names, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tensors.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Shape of a tensor, rows first.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|stored| stored.shape.as_slice())
    }

    /// A matrix of weights.
    pub fn tensor(&self, name: &str) -> Result<HostMatrix<'_>> {
        let stored = self.required(name)?;
        let dtype = weight_type(name, stored)?;
        let [rows, cols] = stored.shape[..] else {
            return Err(wrong_shape(name, "two dimensions", &stored.shape));
        };
        Ok(HostMatrix { bytes: self.bytes(stored), dtype, rows, cols, order: stored.order })
    }

    /// A matrix of weights of exactly this shape.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<HostMatrix<'_>> {
        let matrix = self.tensor(name)?;
        if (matrix.rows, matrix.cols) != (rows, cols) {
            return Err(wrong_shape(name, &format!("[{rows}, {cols}]"), &[matrix.rows, matrix.cols]));
        }
        Ok(matrix)
    }

    /// A vector of weights, widened to f32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>> {
        let stored = self.required(name)?;
        if stored.shape.len() != 1 {
            return Err(wrong_shape(name, "one dimension", &stored.shape));
        }
        let bytes = self.bytes(stored);
        match weight_type(name, stored)? {
            HostType::F32 => Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
            HostType::F16 => Ok(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()),
            HostType::BF16 => Ok(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()),
            other => Err(EngineError::model(format!(
                "tensor {}: expected a vector of f32, f16 or bf16, got {other:?}",
                shown(name)
            ))),
        }
    }

    /// A vector of integers or truth values.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>> {
        let stored = self.required(name)?;
        if stored.shape.len() != 1 {
            return Err(wrong_shape(name, "one dimension", &stored.shape));
        }
        let bytes = self.bytes(stored);
        match stored.dtype {
            TensorType::I64 => Ok(bytes
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
                .collect()),
            TensorType::I32 => {
                Ok(bytes.chunks_exact(4).map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect())
            }
            TensorType::Bool => Ok(bytes.iter().map(|byte| i64::from(*byte != 0)).collect()),
            other => Err(EngineError::model(format!("tensor {}: expected integers, got {other:?}", shown(name)))),
        }
    }
}

fn weight_type(name: &str, stored: &Stored<'_>) -> Result<HostType> {
    match stored.dtype {
        TensorType::Weight(dtype) => Ok(dtype),
        TensorType::Other(other) => Err(EngineError::model(format!(
            "tensor {}: expected weights of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or q6_k, got \
             {other}, which is not supported yet",
            shown(name)
        ))),
        other => Err(EngineError::model(format!("tensor {}: expected weights, got {other:?}", shown(name)))),
    }
}

fn wrong_shape(name: &str, expected: &str, got: &[usize]) -> EngineError {
    EngineError::model(format!("tensor {}: expected shape {expected}, got {got:?}", shown(name)))
}
