//! The draft tree: proposed continuations of one sequence that share prefixes.

use crate::request::TokenId;

/// A node of a [`DraftTree`]; 0 is the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u16);

impl NodeId {
    /// The root: the last settled token.
    pub const ROOT: Self = Self(0);

    /// The node's index in the tree's order.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Three parallel arrays in topological order: node 0 is the root, parents come before children, siblings differ in
/// token, no child scores above its parent (invariant I5).
#[derive(Clone, Debug, PartialEq)]
pub struct DraftTree {
    tokens: Vec<TokenId>,
    parents: Vec<NodeId>,
    /// Cumulative log of the estimated chance that the path down to the node is accepted; 0 at the root.
    scores: Vec<f32>,
}

impl DraftTree {
    /// A tree that proposes nothing: plain decoding.
    pub fn root_only(token: TokenId) -> Self {
        Self { tokens: vec![token], parents: vec![NodeId::ROOT], scores: vec![0.0] }
    }

    /// Adds a child, or finds the one with this token and gives it the better score. `score` is cumulative; one above
    /// the parent's (a rounding error of the drafter) is lowered to it.
    pub fn push(&mut self, parent: NodeId, token: TokenId, score: f32) -> NodeId {
        if let Some(child) = self.child(parent, token) {
            let score = self.bounded(parent, score);
            self.scores[child.index()] = self.scores[child.index()].max(score);
            return child;
        }
        self.push_new(parent, token, score)
    }

    /// Like [`DraftTree::push`] for a token that is known to be new below `parent`.
    pub fn push_new(&mut self, parent: NodeId, token: TokenId, score: f32) -> NodeId {
        let score = self.bounded(parent, score);
        let node = NodeId(u16::try_from(self.tokens.len()).expect("a draft budget fits 16 bits"));
        self.tokens.push(token);
        self.parents.push(parent);
        self.scores.push(score);
        node
    }

    fn bounded(&self, parent: NodeId, score: f32) -> f32 {
        if score.is_nan() { f32::NEG_INFINITY } else { score.min(self.score(parent)) }
    }

    /// Adds all paths of another tree with the same root.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.tokens[0], other.tokens[0], "merged trees hang below the same root");
        let mut here = vec![NodeId::ROOT; other.len()];
        for index in 1..other.len() {
            let parent = here[other.parents[index].index()];
            here[index] = self.push(parent, other.tokens[index], other.scores[index]);
        }
    }

    /// Keeps the best `budget` nodes below the root: EAGLE-2's rerank. Ties go to the earlier node, so a child never
    /// outlives its parent and the order of the nodes stays.
    pub fn keep_best(&mut self, budget: u16) {
        if self.num_nodes() <= budget as usize {
            return;
        }
        let mut order: Vec<usize> = (1..self.len()).collect();
        order.sort_by(|a, b| self.scores[*b].total_cmp(&self.scores[*a]).then(a.cmp(b)));
        let mut kept = vec![false; self.len()];
        kept[0] = true;
        for index in order.into_iter().take(budget as usize) {
            kept[index] = true;
        }
        self.retain(&kept);
    }

    /// Keeps the nodes whose score is at least `threshold`.
    pub fn keep_above(&mut self, threshold: f32) {
        if self.scores[1..].iter().all(|score| *score >= threshold) {
            return;
        }
        let mut kept: Vec<bool> = self.scores.iter().map(|score| *score >= threshold).collect();
        kept[0] = true;
        self.retain(&kept);
    }

    /// `kept` is closed upwards: it holds the parent of every node in it.
    fn retain(&mut self, kept: &[bool]) {
        let mut renamed = vec![NodeId::ROOT; self.len()];
        let mut next = 0;
        for index in 0..self.len() {
            if !kept[index] {
                continue;
            }
            let parent = self.parents[index];
            assert!(kept[parent.index()], "a kept node's parent is kept");
            renamed[index] = NodeId(next as u16);
            self.tokens[next] = self.tokens[index];
            self.scores[next] = self.scores[index];
            self.parents[next] = renamed[parent.index()];
            next += 1;
        }
        self.tokens.truncate(next);
        self.scores.truncate(next);
        self.parents.truncate(next);
    }

    /// The child of `node` that carries `token`.
    pub fn child(&self, node: NodeId, token: TokenId) -> Option<NodeId> {
        // Parents come first, so the search starts just below the node.
        (node.index() + 1..self.len())
            .find(|index| self.parents[*index] == node && self.tokens[*index] == token)
            .map(|index| NodeId(index as u16))
    }

    /// Nodes, the root included.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Never: there is always a root.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Nodes below the root.
    pub fn num_nodes(&self) -> usize {
        self.len() - 1
    }

    /// Tokens of all nodes, root first.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// A node's token.
    pub fn token(&self, node: NodeId) -> TokenId {
        self.tokens[node.index()]
    }

    /// A node's parent; the root is its own.
    pub fn parent(&self, node: NodeId) -> NodeId {
        self.parents[node.index()]
    }

    /// A node's cumulative score.
    pub fn score(&self, node: NodeId) -> f32 {
        self.scores[node.index()]
    }

    /// Every node below the root, in order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        (1..self.len() as u16).map(NodeId)
    }

    /// The node, its parent, and so on up to the node below the root.
    pub fn ancestors(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(node), |node| Some(self.parent(*node))).take_while(|node| *node != NodeId::ROOT)
    }

    /// The nodes from below the root down to `node`.
    pub fn path(&self, node: NodeId) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = self.ancestors(node).collect();
        path.reverse();
        path
    }

    /// Steps below the root.
    pub fn depth(&self, node: NodeId) -> u16 {
        self.ancestors(node).count() as u16
    }

    /// Depth of the deepest node.
    pub fn max_depth(&self) -> u16 {
        self.nodes().map(|node| self.depth(node)).max().unwrap_or(0)
    }

    /// Asserts invariant I5.
    pub fn check(&self) {
        assert_eq!(self.tokens.len(), self.parents.len());
        assert_eq!(self.tokens.len(), self.scores.len());
        assert!(!self.tokens.is_empty(), "a tree has a root");
        assert_eq!(self.scores[0], 0.0, "the root is certain");
        for node in self.nodes() {
            assert!(self.parent(node) < node, "parents come first");
            assert!(self.score(node) <= self.score(self.parent(node)), "no child scores above its parent");
            assert_eq!(self.child(self.parent(node), self.token(node)), Some(node), "siblings differ in token");
        }
    }
}
