//! What is counted, and how.
//!
//! A *step* of a request is one target pass that settled at least one of its tokens. *Drafted* are the nodes verified
//! below the root; *accepted* are those on the accepted path. Emitted tokens = steps + accepted − tokens cut off by a
//! stop or limit. *Acceptance length* counts the next token: tokens settled per step, at least 1. *Acceptance rate* is
//! accepted ÷ drafted.

/// Counts of one request; of an engine, their sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Prompt tokens.
    pub num_prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub num_cached_tokens: u64,
    /// Tokens emitted.
    pub num_tokens: u64,
    /// Tokens that were settled and then cut off by a stop or a limit.
    pub num_cut: u64,
    /// Steps.
    pub num_steps: u64,
    /// Draft nodes verified.
    pub num_drafted: u64,
    /// Draft nodes accepted.
    pub num_accepted: u64,
    /// `[d]`: steps whose accepted path reached depth `d + 1`.
    pub accepted_per_depth: Vec<u64>,
    /// `[d]`: steps whose tree reached depth `d + 1`.
    pub drafted_per_depth: Vec<u64>,
    /// Times the request's blocks were taken away.
    pub num_preemptions: u64,
}

impl Counts {
    /// Counts one step that settled `num_accepted` draft tokens and a next token, `num_cut` of them not emitted.
    pub fn count_step(&mut self, num_accepted: u16, num_drafted: u16, tree_depth: u16, num_cut: u64) {
        self.num_steps += 1;
        self.num_tokens += u64::from(num_accepted) + 1 - num_cut;
        self.num_cut += num_cut;
        self.num_drafted += u64::from(num_drafted);
        self.num_accepted += u64::from(num_accepted);
        raise_to(&mut self.accepted_per_depth, num_accepted);
        raise_to(&mut self.drafted_per_depth, tree_depth);
    }

    /// Adds the counts of another request.
    pub fn add(&mut self, other: &Self) {
        self.num_prompt_tokens += other.num_prompt_tokens;
        self.num_cached_tokens += other.num_cached_tokens;
        self.num_tokens += other.num_tokens;
        self.num_cut += other.num_cut;
        self.num_steps += other.num_steps;
        self.num_drafted += other.num_drafted;
        self.num_accepted += other.num_accepted;
        self.num_preemptions += other.num_preemptions;
        add_each(&mut self.accepted_per_depth, &other.accepted_per_depth);
        add_each(&mut self.drafted_per_depth, &other.drafted_per_depth);
    }

    /// Tokens settled per step, the next token included; 1 before the first step.
    pub fn acceptance_length(&self) -> f64 {
        if self.num_steps == 0 {
            return 1.0;
        }
        (self.num_steps + self.num_accepted) as f64 / self.num_steps as f64
    }

    /// Accepted ÷ drafted; 0 where nothing was drafted.
    pub fn acceptance_rate(&self) -> f64 {
        if self.num_drafted == 0 {
            return 0.0;
        }
        self.num_accepted as f64 / self.num_drafted as f64
    }
}

fn raise_to(per_depth: &mut Vec<u64>, depth: u16) {
    let depth = usize::from(depth);
    if per_depth.len() < depth {
        per_depth.resize(depth, 0);
    }
    per_depth[..depth].iter_mut().for_each(|count| *count += 1);
}

fn add_each(to: &mut Vec<u64>, from: &[u64]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hc_092_093_counts_add_up() {
        let mut counts = Counts::default();
        counts.count_step(2, 5, 3, 0);
        counts.count_step(0, 4, 2, 0);
        counts.count_step(3, 3, 3, 2);
        assert_eq!(counts.num_tokens, 3 + 1 + 4 - 2);
        assert_eq!(counts.num_tokens, counts.num_steps + counts.num_accepted - counts.num_cut);
        assert_eq!(counts.accepted_per_depth, [2, 2, 1]);
        assert_eq!(counts.drafted_per_depth, [3, 3, 2]);
        assert!((counts.acceptance_length() - 8.0 / 3.0).abs() < 1e-12);
        let mut total = Counts::default();
        total.add(&counts);
        total.add(&counts);
        assert_eq!(total.num_accepted, 10);
        assert_eq!(total.accepted_per_depth, [4, 4, 2]);
    }
}
