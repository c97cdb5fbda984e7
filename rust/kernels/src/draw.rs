//! What drawing a token means.
//!
//! Every draw at sequence position `t` of a request adds Gumbel noise `g[x]` to the log-probabilities and takes the
//! argmax, which is an exact draw from them. The noise is a pure function of [`Coin`] and token id (Philox4x32-10), so a
//! draw depends on nothing else: not on the batch, the tree, the thread or the drafter. At temperature 0 there is no
//! noise: argmax, lowest id on a tie.
//!
//! Order of controls: mask (banned tokens, ids past the vocabulary); logit bias; repetition, presence and frequency
//! penalty; temperature; top-k (all ties of the k-th kept); top-p (smallest set reaching the mass, the crossing token
//! kept, ordered by probability, then id); min-p. This is Hugging Face's order.

use std::sync::Arc;

/// What decides a draw: the request's seed, the sample's index within the request, and the position of the token drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coin {
    /// The request's seed.
    pub seed: u64,
    /// Index of the sample, 0 unless a request asks for several.
    pub sample: u32,
    /// Position in the sequence of the token that is drawn.
    pub position: u32,
}

/// The sampling controls of a request. All values are finite and in range; `SamplingParams` checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct Controls {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set with this mass; 1 is off.
    pub top_p: f32,
    /// Keep tokens with at least this share of the best token's probability; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once per occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Ids at or past this are padding rows of the embedding table and are never drawn.
    pub num_tokens: u32,
}

/// How often a token came before the row, for the penalties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The token.
    pub token: u32,
    /// Whether it is in the prompt.
    pub in_prompt: bool,
    /// Its occurrences in the output, the row's own path included.
    pub num_output: u32,
}

/// One row's draw.
#[derive(Clone, Debug)]
pub struct Draw {
    /// The request's controls.
    pub controls: Arc<Controls>,
    /// What decides the draw.
    pub coin: Coin,
    /// Tokens before the row, each once; empty when all penalties are off.
    pub seen: Arc<[Seen]>,
    /// Tokens that may not be drawn at this row (stop tokens before `min_tokens`).
    pub banned: Arc<[u32]>,
}

/// The outcome of a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// The token.
    Token(u32),
    /// The row holds NaN or +inf, or nothing can be drawn: every token is masked.
    NotFinite,
}

/// One proposal of a drafter's row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// The token.
    pub token: u32,
    /// Logarithm of its estimated chance to be the target's draw: log-softmax of what it was ranked by.
    pub log_chance: f32,
}
