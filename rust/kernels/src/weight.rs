//! Weights as they come from files: dtype, shape, bytes.

/// Element types of stored tensors. Block types are GGUF's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum HostType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
}

/// In which order the rows of a stored matrix are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As they lie.
    AsStored,
    /// GGUF's llama architecture stores the rows of a q or k head interleaved (0, n, 1, n + 1, ...) for its rotary
    /// layout; read them back as halves. The value is the head's width.
    Interleaved(usize),
}

/// A matrix `[rows, cols]` in host memory, rows one after another without gaps.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    /// The bytes, little-endian.
    pub bytes: &'a [u8],
    /// Element type.
    pub dtype: HostType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Row order.
    pub order: RowOrder,
}

/// In which type a weight is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Storage {
    /// Without loss: f32, bf16 and f16 as they are; block types expanded to f32; parts of different types as f32.
    #[default]
    Lossless,
    /// Rounded to bf16 (an approximation, only on request).
    Bf16,
}

/// A matrix that cannot be uploaded.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WeightError {
    /// The byte count does not fit the shape.
    #[error("expected {expected} bytes for a {rows} x {cols} matrix of {dtype:?}, got {got}")]
    Length {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Element type.
        dtype: HostType,
        /// Bytes needed.
        expected: usize,
        /// Bytes there.
        got: usize,
    },
    /// A block type whose block does not divide the row.
    #[error("expected rows of a multiple of {block} elements for {dtype:?}, got {cols}")]
    Block {
        /// Elements in a block.
        block: usize,
        /// Element type.
        dtype: HostType,
        /// Columns.
        cols: usize,
    },
    /// Parts with different numbers of columns, none at all, or a zero dimension.
    #[error("expected stacked matrices of one width, got {0}")]
    Parts(String),
    /// Memory for the packed weight could not be had.
    #[error("out of memory: a packed {rows} x {cols} matrix")]
    Memory {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
}
