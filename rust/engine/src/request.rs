//! What a caller asks for, and what makes it valid.

use std::sync::Arc;

use crate::error::{EngineError, Result};

/// Id of a token in the target's vocabulary.
pub type TokenId = u32;

/// Identity of a request within one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// How a request draws and when it ends. [`SamplingParams::validate`] gives the ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to write; `None` is up to the context's end.
    pub max_tokens: Option<u32>,
    /// Fewest tokens before a stop token may be drawn or a stop string counts.
    pub min_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set with this mass; 1 is off.
    pub top_p: f32,
    /// Keep tokens with at least this share of the best one's probability; 0 is off.
    pub min_p: f32,
    /// `None` draws one from the system.
    pub seed: Option<u64>,
    /// Strings that end the text, and are left out of it.
    pub stop: Vec<String>,
    /// Tokens that end the output beside the model's own.
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past the model's end-of-text tokens.
    pub ignore_eos: bool,
    /// See [`slipstream_kernels::Controls`].
    pub repetition_penalty: f32,
    /// See [`slipstream_kernels::Controls`].
    pub presence_penalty: f32,
    /// See [`slipstream_kernels::Controls`].
    pub frequency_penalty: f32,
    /// Added to single logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Most draft nodes of this request in one step; `None` leaves it to the engine, 0 is no speculation.
    pub max_draft_nodes: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: Some(256),
            min_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            max_draft_nodes: None,
        }
    }
}

/// Most stop strings of one request, and most bytes in one.
pub const MAX_STOP_STRINGS: usize = 64;
/// See [`MAX_STOP_STRINGS`].
pub const MAX_STOP_STRING_BYTES: usize = 1024;

impl SamplingParams {
    /// Checks every field against its range, naming the first that is outside. `vocab_size` is the number of tokens
    /// that can be drawn.
    pub fn validate(&self, vocab_size: u32) -> Result<()> {
        let in_range = |name: &str, value: f32, low: f32, high: f32| {
            if value >= low && value <= high {
                return Ok(());
            }
            Err(EngineError::request(format!("expected {name} between {low} and {high}, got {value}")))
        };
        in_range("temperature", self.temperature, 0.0, 1e6)?;
        in_range("top_p", self.top_p, 0.0, 1.0)?;
        if self.top_p == 0.0 {
            return Err(EngineError::request("expected top_p above 0, got 0")
                .with_hint("temperature=0 or top_k=1 takes the most probable token"));
        }
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        if self.max_tokens == Some(0) {
            return Err(EngineError::request("expected max_tokens of at least 1, got 0"));
        }
        if let Some(max_tokens) = self.max_tokens
            && self.min_tokens > max_tokens
        {
            return Err(EngineError::request(format!(
                "expected min_tokens of at most max_tokens, got {} and {max_tokens}",
                self.min_tokens
            )));
        }
        if self.stop.len() > MAX_STOP_STRINGS {
            return Err(EngineError::request(format!(
                "expected at most {MAX_STOP_STRINGS} stop strings, got {}",
                self.stop.len()
            )));
        }
        if let Some(stop) = self.stop.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_STRING_BYTES) {
            return Err(EngineError::request(format!(
                "expected stop strings of 1 to {MAX_STOP_STRING_BYTES} bytes, got one of {}",
                stop.len()
            )));
        }
        let known = |name: &str, token: TokenId| {
            if token < vocab_size {
                return Ok(());
            }
            Err(EngineError::request(format!("expected token ids below {vocab_size} in {name}, got {token}")))
        };
        self.stop_token_ids.iter().try_for_each(|token| known("stop_token_ids", *token))?;
        for (token, bias) in &self.logit_bias {
            known("logit_bias", *token)?;
            in_range("logit_bias", *bias, -1e4, 1e4)?;
        }
        Ok(())
    }

    /// Whether a draw depends on the tokens before it other than through the logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// A request as the engine keeps it: validated, with its seed and its stop tokens settled.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its identity.
    pub id: RequestId,
    /// The prompt's tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Validated parameters.
    pub params: SamplingParams,
    /// The seed in use, so that any result can be had again.
    pub seed: u64,
    /// Tokens that end the output: `stop_token_ids`, and the model's own unless `ignore_eos`.
    pub stop_token_ids: Arc<[TokenId]>,
    /// Most tokens this request may hold, prompt included: `max_tokens` and the context's end.
    pub max_len: u32,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// Its reader went away or asked for it.
    Cancelled,
    /// It could not go on.
    Error(EngineError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hc_088_extreme_values_are_refused_by_name() {
        let base = SamplingParams::default();
        let cases: Vec<(&str, SamplingParams)> = vec![
            ("temperature", SamplingParams { temperature: f32::NAN, ..base.clone() }),
            ("temperature", SamplingParams { temperature: -0.1, ..base.clone() }),
            ("temperature", SamplingParams { temperature: f32::INFINITY, ..base.clone() }),
            ("top_p", SamplingParams { top_p: 0.0, ..base.clone() }),
            ("top_p", SamplingParams { top_p: 1.5, ..base.clone() }),
            ("min_p", SamplingParams { min_p: -1.0, ..base.clone() }),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..base.clone() }),
            ("presence_penalty", SamplingParams { presence_penalty: 1e9, ..base.clone() }),
            ("frequency_penalty", SamplingParams { frequency_penalty: f32::NAN, ..base.clone() }),
            ("max_tokens", SamplingParams { max_tokens: Some(0), ..base.clone() }),
            ("min_tokens", SamplingParams { min_tokens: 300, ..base.clone() }),
            ("stop strings", SamplingParams { stop: vec![String::new()], ..base.clone() }),
            ("stop_token_ids", SamplingParams { stop_token_ids: vec![61], ..base.clone() }),
            ("logit_bias", SamplingParams { logit_bias: vec![(61, 1.0)], ..base.clone() }),
            ("logit_bias", SamplingParams { logit_bias: vec![(1, f32::NAN)], ..base.clone() }),
        ];
        for (name, params) in cases {
            let error = params.validate(61).expect_err(name);
            assert!(matches!(error, EngineError::Request(_)), "{name}");
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(base.validate(61).is_ok());
    }
}
