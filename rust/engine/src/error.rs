//! Errors a caller can act on. Lower case; what was expected, what came; then a `hint:` line if there is a way out.

use std::fmt;

/// What was expected and what came, with a way out where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// One clear sentence.
    pub text: String,
    /// The way out.
    pub hint: Option<String>,
}

impl fmt::Display for Message {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)?;
        match &self.hint {
            Some(hint) => write!(formatter, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl<T: Into<String>> From<T> for Message {
    fn from(text: T) -> Self {
        Self { text: text.into(), hint: None }
    }
}

/// The engine's errors, one variant per thing a caller can act on. Each is an exception of its own in Python.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A setting of the engine is wrong.
    #[error("{0}")]
    Config(Message),
    /// A file or a weight is not what it should be.
    #[error("{0}")]
    Model(Message),
    /// A request cannot be served as it is.
    #[error("{0}")]
    Request(Message),
    /// Memory or K/V blocks do not suffice.
    #[error("{0}")]
    Capacity(Message),
    /// The device, or the engine itself, failed.
    #[error("{0}")]
    Device(Message),
}

impl EngineError {
    /// A wrong setting.
    pub fn config(text: impl Into<String>) -> Self {
        Self::Config(Message::from(text))
    }
    /// A file or weight that is not what it should be.
    pub fn model(text: impl Into<String>) -> Self {
        Self::Model(Message::from(text))
    }
    /// A request that cannot be served.
    pub fn request(text: impl Into<String>) -> Self {
        Self::Request(Message::from(text))
    }
    /// Not enough memory or blocks.
    pub fn capacity(text: impl Into<String>) -> Self {
        Self::Capacity(Message::from(text))
    }
    /// A failure of the device or the engine.
    pub fn device(text: impl Into<String>) -> Self {
        Self::Device(Message::from(text))
    }

    /// The same error with a way out.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.message_mut().hint = Some(hint.into());
        self
    }

    /// The same error, told of a file or tensor: `context: text`.
    #[must_use]
    pub fn within(mut self, context: impl fmt::Display) -> Self {
        let message = self.message_mut();
        message.text = format!("{context}: {}", message.text);
        self
    }

    fn message_mut(&mut self) -> &mut Message {
        match self {
            Self::Config(message)
            | Self::Model(message)
            | Self::Request(message)
            | Self::Capacity(message)
            | Self::Device(message) => message,
        }
    }
}

impl From<slipstream_kernels::DeviceError> for EngineError {
    fn from(error: slipstream_kernels::DeviceError) -> Self {
        Self::capacity(error.to_string())
    }
}

impl From<slipstream_kernels::WeightError> for EngineError {
    fn from(error: slipstream_kernels::WeightError) -> Self {
        Self::model(error.to_string())
    }
}

/// Result of everything in the engine that can fail.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_one_sentence_and_a_hint_line() {
        let error = EngineError::request("expected a prompt of at least one token, got none").with_hint("pass text");
        assert_eq!(error.to_string(), "expected a prompt of at least one token, got none\nhint: pass text");
        assert_eq!(
            error.within("chat").to_string().lines().next(),
            Some("chat: expected a prompt of at least one token, got none")
        );
    }
}
