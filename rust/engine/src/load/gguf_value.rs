//! Reading GGUF's metadata: every length is checked against the bytes that are left before it is used, and arrays stay in
//! the file until they are asked for.

use std::collections::HashMap;
use std::ops::Range;

use super::shown;
use crate::error::{EngineError, Result};

/// Arrays of arrays beyond this depth are refused.
const MAX_NESTING: u32 = 4;
/// Longest key and tensor name.
const MAX_NAME_BYTES: usize = 1024;

/// Value types, as numbered in the file.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// A position in a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pub(super) position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8]> {
        let range = self.skip(len, what)?;
        self.bytes.get(range).ok_or_else(|| EngineError::model(format!("expected {what}")))
    }

    /// Steps over `len` bytes that must be there.
    fn skip(&mut self, len: usize, what: &str) -> Result<Range<usize>> {
        let start = self.position;
        let left = self.bytes.len() - start;
        if len > left {
            return Err(EngineError::model(format!(
                "expected {len} bytes for {what} at byte {start}, got {left} before the end of the file"
            ))
            .with_hint("the file is cut short or damaged; download it again"));
        }
        self.position += len;
        Ok(start..self.position)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.take(N, what)?;
        bytes.first_chunk::<N>().copied().ok_or_else(|| EngineError::model(format!("expected {what}")))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length that must not pass the bytes that are left, each element taking at least `each` bytes.
    fn length(&mut self, each: usize, what: &str) -> Result<usize> {
        let count = self.u64(what)?;
        let left = (self.bytes.len() - self.position) / each;
        usize::try_from(count).ok().filter(|count| *count <= left).ok_or_else(|| {
            EngineError::model(format!("expected {what} of at most the {left} that the file has room for, got {count}"))
        })
    }

    /// A key or a tensor's name.
    pub(super) fn name(&mut self, what: &str) -> Result<&'a str> {
        let len = self.length(1, &format!("a length of {what}"))?;
        if len == 0 || len > MAX_NAME_BYTES {
            return Err(EngineError::model(format!("expected {what} of 1 to {MAX_NAME_BYTES} bytes, got {len}")));
        }
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| {
            EngineError::model(format!("expected {what} in UTF-8, got {}", shown(&String::from_utf8_lossy(bytes))))
        })
    }

    fn string(&mut self, what: &str) -> Result<Range<usize>> {
        let len = self.length(1, &format!("a text length in {what}"))?;
        self.skip(len, what)
    }

    /// Reads the value of a key.
    pub(super) fn value(&mut self, key: &str) -> Result<Value> {
        let type_id = self.u32(key)?;
        Ok(match type_id {
            kind::U8 => Value::Unsigned(u64::from(self.array::<1>(key)?[0])),
            kind::I8 => Value::Signed(i64::from(i8::from_le_bytes(self.array(key)?))),
            kind::U16 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(key)?))),
            kind::I16 => Value::Signed(i64::from(i16::from_le_bytes(self.array(key)?))),
            kind::U32 => Value::Unsigned(u64::from(self.u32(key)?)),
            kind::I32 => Value::Signed(i64::from(i32::from_le_bytes(self.array(key)?))),
            kind::F32 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            kind::BOOL => match self.array::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    return Err(EngineError::model(format!(
                        "key {key}: expected a truth value of 0 or 1, got {other}"
                    )));
                }
            },
            kind::STRING => {
                let range = self.string(key)?;
                let bytes = self.bytes.get(range.clone()).unwrap_or_default();
                if std::str::from_utf8(bytes).is_err() {
                    return Err(EngineError::model(format!("key {key}: expected a text in UTF-8")));
                }
                Value::Text(range)
            }
            kind::ARRAY => self.array_value(key)?,
            kind::U64 => Value::Unsigned(self.u64(key)?),
            kind::I64 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            kind::F64 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => {
                return Err(EngineError::model(format!("key {key}: expected a value type of 0 to 12, got {other}")));
            }
        })
    }

    fn array_value(&mut self, key: &str) -> Result<Value> {
        let element = self.u32(key)?;
        let count = self.length(smallest(element, key)?, &format!("an array length of key {key}"))?;
        let start = self.position;
        self.skip_elements(element, count, key, 0)?;
        Ok(Value::Array(Array { element, count, range: start..self.position }))
    }

    fn skip_elements(&mut self, element: u32, count: usize, key: &str, depth: u32) -> Result<()> {
        match element {
            kind::STRING => {
                for _ in 0..count {
                    self.string(key)?;
                }
            }
            kind::ARRAY => {
                if depth >= MAX_NESTING {
                    return Err(EngineError::model(format!(
                        "key {key}: expected arrays nested at most {MAX_NESTING} deep, got more"
                    )));
                }
                for _ in 0..count {
                    let inner = self.u32(key)?;
                    let inner_count = self.length(smallest(inner, key)?, &format!("an array length of key {key}"))?;
                    self.skip_elements(inner, inner_count, key, depth + 1)?;
                }
            }
            _ => {
                let len = smallest(element, key)?.saturating_mul(count);
                self.skip(len, key)?;
            }
        }
        Ok(())
    }
}

/// Fewest bytes of an element.
fn smallest(element: u32, key: &str) -> Result<usize> {
    Ok(match element {
        kind::U8 | kind::I8 | kind::BOOL => 1,
        kind::U16 | kind::I16 => 2,
        kind::U32 | kind::I32 | kind::F32 => 4,
        kind::U64 | kind::I64 | kind::F64 | kind::STRING => 8,
        kind::ARRAY => 12,
        other => {
            return Err(EngineError::model(format!("key {key}: expected an element type of 0 to 12, got {other}")));
        }
    })
}

/// An array's elements, still in the file.
#[derive(Clone, Debug)]
pub(super) struct Array {
    element: u32,
    count: usize,
    range: Range<usize>,
}

/// A metadata value. Texts and arrays are ranges of the file.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array(Array),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned number",
            Self::Signed(_) => "a signed number",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a truth value",
            Self::Text(_) => "a text",
            Self::Array(_) => "an array",
        }
    }
}

/// The metadata of a file, by key.
#[derive(Debug)]
pub(super) struct Metadata<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) values: HashMap<String, Value>,
}

impl<'a> Metadata<'a> {
    fn wrong(key: &str, expected: &str, got: &Value) -> EngineError {
        EngineError::model(format!("key {key}: expected {expected}, got {}", got.kind()))
    }

    /// A whole number. Writers disagree on signedness, so both are taken.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(count)) => Ok(Some(*count)),
            Some(Value::Signed(count)) => u64::try_from(*count)
                .map(Some)
                .map_err(|_| EngineError::model(format!("key {key}: expected a number of at least 0, got {count}"))),
            Some(other) => Err(Self::wrong(key, "a whole number", other)),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(Value::Unsigned(number)) => Ok(Some(*number as f64)),
            Some(Value::Signed(number)) => Ok(Some(*number as f64)),
            Some(other) => Err(Self::wrong(key, "a number", other)),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(Self::wrong(key, "a truth value", other)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(range)) => {
                let bytes = self.bytes.get(range.clone()).unwrap_or_default();
                std::str::from_utf8(bytes)
                    .map(Some)
                    .map_err(|_| EngineError::model(format!("key {key}: expected a text in UTF-8")))
            }
            Some(other) => Err(Self::wrong(key, "a text", other)),
        }
    }

    /// An array of texts.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(array) = self.array(key, &[kind::STRING], "an array of texts")? else {
            return Ok(None);
        };
        let mut cursor = Cursor { bytes: self.bytes, position: array.range.start };
        (0..array.count)
            .map(|index| {
                let range = cursor.string(key)?;
                let bytes = self.bytes.get(range).unwrap_or_default();
                std::str::from_utf8(bytes).map_err(|_| {
                    EngineError::model(format!(
                        "key {key}: expected texts in UTF-8, got {} at {index}",
                        shown(&String::from_utf8_lossy(bytes))
                    ))
                })
            })
            .collect::<Result<Vec<_>>>()
            .map(Some)
    }

    /// An array of 32-bit integers, or one number for all.
    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        if let Some(count) = self.values.get(key).filter(|value| !matches!(value, Value::Array(_))) {
            return match count {
                Value::Unsigned(number) => Ok(i64::try_from(*number).ok().map(|number| vec![number])),
                Value::Signed(number) => Ok(Some(vec![*number])),
                other => Err(Self::wrong(key, "whole numbers", other)),
            };
        }
        let Some(array) = self.array(key, &[kind::I32, kind::U32], "an array of whole numbers")? else {
            return Ok(None);
        };
        let bytes = self.bytes.get(array.range.clone()).unwrap_or_default();
        let is_signed = array.element == kind::I32;
        Ok(Some(
            bytes
                .chunks_exact(4)
                .map(|b| {
                    let unsigned = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                    if is_signed { i64::from(unsigned.cast_signed()) } else { i64::from(unsigned) }
                })
                .collect(),
        ))
    }

    fn array(&self, key: &str, elements: &[u32], expected: &str) -> Result<Option<&Array>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) if elements.contains(&array.element) => Ok(Some(array)),
            Some(Value::Array(array)) => Err(EngineError::model(format!(
                "key {key}: expected {expected}, got elements of type {}",
                array.element
            ))),
            Some(other) => Err(Self::wrong(key, expected, other)),
        }
    }
}
