//! From a request's parameters to the draw of each row: its coin, its controls, and what came before on its own path.

use std::collections::HashMap;
use std::sync::Arc;

use slipstream_kernels::{Coin, Controls, Draw, Seen};

use crate::request::{Request, RequestId, TokenId};

/// What every live request has said, and how it draws.
#[derive(Debug)]
pub struct Sampler {
    tracks: HashMap<RequestId, Track>,
    num_tokens: u32,
    nothing: Arc<[u32]>,
    unseen: Arc<[Seen]>,
}

#[derive(Debug)]
struct Track {
    request: Arc<Request>,
    controls: Arc<Controls>,
    tokens: Vec<TokenId>,
    /// Empty unless the request has penalties.
    seen: HashMap<TokenId, Seen>,
}

impl Sampler {
    /// A sampler over a vocabulary of which the first `num_tokens` ids can be drawn.
    pub fn new(num_tokens: u32) -> Self {
        Self { tracks: HashMap::new(), num_tokens, nothing: Arc::new([]), unseen: Arc::new([]) }
    }

    /// Begins to follow a request; does nothing if it is followed already.
    pub fn admit(&mut self, request: &Arc<Request>) {
        let num_tokens = self.num_tokens;
        self.tracks.entry(request.id).or_insert_with(|| Track::new(request, num_tokens));
    }

    /// Ends it.
    pub fn forget(&mut self, request: RequestId) {
        self.tracks.remove(&request);
    }

    /// Prompt and settled tokens of a request.
    pub fn tokens(&self, request: RequestId) -> &[TokenId] {
        &self.track(request).tokens
    }

    /// Appends settled tokens.
    pub fn settle(&mut self, request: RequestId, token_ids: &[TokenId]) {
        let track = self.tracks.get_mut(&request).expect("a request is admitted before it settles");
        track.tokens.extend_from_slice(token_ids);
        if track.request.params.has_penalties() {
            for token in token_ids {
                count(&mut track.seen, *token);
            }
        }
    }

    /// The draw of the token that follows the request's tokens and then `depth` draft nodes below the root, whose tokens
    /// `path` gives in any order.
    pub fn draw(&self, request: RequestId, depth: u16, path: impl Iterator<Item = TokenId>) -> Draw {
        let track = self.track(request);
        let position = track.tokens.len() as u32 + u32::from(depth);
        let num_output = position - track.request.prompt.len() as u32;
        let banned = if num_output < track.request.params.min_tokens {
            Arc::clone(&track.request.stop_token_ids)
        } else {
            Arc::clone(&self.nothing)
        };
        let seen = if track.request.params.has_penalties() {
            let mut seen = track.seen.clone();
            for token in path {
                count(&mut seen, token);
            }
            seen.into_values().collect()
        } else {
            Arc::clone(&self.unseen)
        };
        let coin = Coin { seed: track.request.seed, sample: 0, position };
        Draw { controls: Arc::clone(&track.controls), coin, seen, banned }
    }

    fn track(&self, request: RequestId) -> &Track {
        self.tracks.get(&request).expect("a request is admitted before it draws")
    }
}

impl Track {
    fn new(request: &Arc<Request>, num_tokens: u32) -> Self {
        let params = &request.params;
        let controls = Controls {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.clone(),
            num_tokens,
        };
        let mut seen = HashMap::new();
        if params.has_penalties() {
            for token in &request.prompt {
                seen.insert(*token, Seen { token: *token, in_prompt: true, num_output: 0 });
            }
        }
        Self { request: Arc::clone(request), controls: Arc::new(controls), tokens: request.prompt.clone(), seen }
    }
}

fn count(seen: &mut HashMap<TokenId, Seen>, token: TokenId) {
    seen.entry(token).or_insert(Seen { token, in_prompt: false, num_output: 0 }).num_output += 1;
}
