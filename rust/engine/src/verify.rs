//! Judging a draft tree by the target's own draws.

use slipstream_kernels::Drawn;

use crate::request::TokenId;
use crate::tree::{DraftTree, NodeId};

/// What the target said about a tree.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The target's draw at every node, in node order. Empty where nothing is drawn: the prompt goes on.
    pub drawn: &'a [Drawn],
    /// Logits `[nodes, vocab_size]`, row-major; empty unless the verifier asked for them.
    pub logits: &'a [f32],
}

/// The verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    /// Accepted nodes, downwards from the root.
    pub path: Vec<NodeId>,
    /// The token that follows the path; none if nothing was drawn there.
    pub next: Option<TokenId>,
}

/// A rule of acceptance. Pure: no K/V, no streams, no clock; it cannot fail.
pub trait Verifier: Send {
    /// Whether `Evidence::logits` is needed.
    fn wants_logits(&self) -> bool;
    /// The accepted path and the next token.
    fn verify(&mut self, tree: &DraftTree, evidence: Evidence<'_>) -> Acceptance;
}

/// A node is accepted if it carries the token that the target drew at its parent. Since a draw depends on seed and
/// position alone, the output is what the target would have written without a drafter.
#[derive(Clone, Copy, Debug, Default)]
pub struct TargetMatch;

impl Verifier for TargetMatch {
    fn wants_logits(&self) -> bool {
        false
    }

    fn verify(&mut self, tree: &DraftTree, evidence: Evidence<'_>) -> Acceptance {
        let mut acceptance = Acceptance::default();
        let mut node = NodeId::ROOT;
        while let Some(Drawn::Token(token)) = evidence.drawn.get(node.index()) {
            if let Some(child) = tree.child(node, *token) {
                acceptance.path.push(child);
                node = child;
            } else {
                acceptance.next = Some(*token);
                break;
            }
        }
        acceptance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> DraftTree {
        let mut tree = DraftTree::root_only(7);
        let left = tree.push(NodeId::ROOT, 1, -0.5);
        let right = tree.push(NodeId::ROOT, 2, -1.0);
        tree.push(left, 3, -1.5);
        tree.push(right, 3, -1.25);
        tree.check();
        tree
    }

    fn verify(drawn: &[u32]) -> Acceptance {
        let drawn: Vec<Drawn> = drawn.iter().map(|token| Drawn::Token(*token)).collect();
        TargetMatch.verify(&tree(), Evidence { drawn: &drawn, logits: &[] })
    }

    #[test]
    fn hc_009_011_012_the_draw_that_no_child_carries_is_the_next_token() {
        // Draws at root, 1, 2, 1-3, 2-3.
        assert_eq!(verify(&[2, 9, 3, 9, 5]), Acceptance { path: vec![NodeId(2), NodeId(4)], next: Some(5) });
        assert_eq!(verify(&[1, 4, 3, 9, 5]), Acceptance { path: vec![NodeId(1)], next: Some(4) });
        assert_eq!(verify(&[6, 4, 3, 9, 5]), Acceptance { path: vec![], next: Some(6) });
    }

    #[test]
    fn nothing_drawn_settles_nothing() {
        assert_eq!(verify(&[]), Acceptance::default());
        let acceptance = TargetMatch.verify(&tree(), Evidence { drawn: &[Drawn::NotFinite; 5], logits: &[] });
        assert_eq!(acceptance, Acceptance::default());
    }
}
