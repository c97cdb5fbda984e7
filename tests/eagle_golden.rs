//! EAGLE-2 against the published reference, step by step: the same trees, accepted lengths and tokens at temperature 0,
//! and the published sampling rule replayed from recorded uniforms. The data and its makers: `golden/README.md`.
#![expect(clippy::print_stdout, reason = "how many trees were compared is part of the result")]

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ndarray_npy::NpzReader;
use ndarray_npy::ReadableElement;
use slipstream_engine::budget::Budget;
use slipstream_engine::cycle::HostCycle;
use slipstream_engine::draft::{Eagle, EagleWeights, TreeShape};
use slipstream_engine::engine::{Engine, Limits};
use slipstream_engine::kv::KvManager;
use slipstream_engine::load::{Checkpoint, ModelFile};
use slipstream_engine::model::{Decoder, DecoderWeights, FeaturePoint};
use slipstream_engine::request::{RequestId, SamplingParams, TokenId};
use slipstream_engine::sampler::Sampler;
use slipstream_engine::scheduler::{Scheduler, SchedulerConfig};
use slipstream_engine::stream::TokenLog;
use slipstream_engine::text::TokenTable;
use slipstream_engine::tree::{DraftTree, NodeId};
use slipstream_engine::verify::{Acceptance, Evidence, TargetMatch, Verifier};
use slipstream_kernels::Storage;
use slipstream_kernels::cpu::Cpu;

/// Below this gap the recorded order of nearly equal scores is not ours to reproduce.
const LEAST_GAP: f32 = 2e-5;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// One recorded run on one prompt.
struct Trace {
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
    first_token: TokenId,
    prefix_len: Vec<i64>,
    draft_tokens: Vec<Vec<i64>>,
    parents: Vec<Vec<i64>>,
    scores: Vec<Vec<f32>>,
    accept_length: Vec<i64>,
    next_token: Vec<i64>,
    least_gap: Vec<f32>,
    uniforms: Vec<f64>,
}

fn flat<T: ReadableElement + Copy>(file: &mut NpzReader<File>, name: &str) -> Option<(Vec<T>, usize)> {
    let array: ndarray::ArrayD<T> = file.by_name(name).ok()?;
    let width = array.shape().get(1).copied().unwrap_or(1);
    Some((array.iter().copied().collect(), width))
}

fn integers(file: &mut NpzReader<File>, name: &str) -> (Vec<i64>, usize) {
    if let Some((values, width)) = flat::<i16>(file, name) {
        return (values.into_iter().map(i64::from).collect(), width);
    }
    if let Some((values, width)) = flat::<i32>(file, name) {
        return (values.into_iter().map(i64::from).collect(), width);
    }
    flat::<i64>(file, name).unwrap_or_else(|| panic!("{name} holds integers"))
}

fn table<T: Copy>((values, width): (Vec<T>, usize)) -> Vec<Vec<T>> {
    values.chunks(width).map(<[T]>::to_vec).collect()
}

fn tokens(values: &[i64]) -> Vec<TokenId> {
    values.iter().map(|value| TokenId::try_from(*value).expect("a token id")).collect()
}

impl Trace {
    fn open(path: &Path) -> Self {
        let mut file = NpzReader::new(File::open(path).expect("a trace")).expect("an npz file");
        let gaps = table(flat::<f32>(&mut file, "gaps").expect("gaps"));
        Self {
            prompt: tokens(&integers(&mut file, "prompt_ids").0),
            output: tokens(&integers(&mut file, "output_ids").0),
            first_token: tokens(&integers(&mut file, "first_token").0)[0],
            prefix_len: integers(&mut file, "prefix_len").0,
            draft_tokens: table(integers(&mut file, "draft_tokens")),
            parents: table(integers(&mut file, "parents")),
            scores: table(flat::<f32>(&mut file, "cum_logprob").expect("scores")),
            accept_length: integers(&mut file, "accept_length").0,
            next_token: integers(&mut file, "next_token").0,
            least_gap: gaps.iter().map(|gaps| gaps.iter().copied().fold(f32::INFINITY, f32::min)).collect(),
            uniforms: flat::<f64>(&mut file, "uniforms").map(|(values, _)| values).unwrap_or_default(),
        }
    }
}

/// One step as it was verified.
struct Step {
    tree: DraftTree,
    acceptance: Acceptance,
}

/// Any verifier, with a record of what it saw.
struct Recording<V> {
    inner: V,
    steps: Arc<Mutex<Vec<Step>>>,
}

impl<V: Verifier> Verifier for Recording<V> {
    fn wants_logits(&self) -> bool {
        self.inner.wants_logits()
    }

    fn verify(&mut self, tree: &DraftTree, evidence: Evidence<'_>) -> Acceptance {
        let acceptance = self.inner.verify(tree, evidence);
        tree.check();
        let step = Step { tree: tree.clone(), acceptance: acceptance.clone() };
        self.steps.lock().expect("not poisoned").push(step);
        acceptance
    }
}

/// The published rule with a drafter that takes its top k: each child is tested with its target probability, a refused
/// one is struck out; recorded uniforms decide.
struct Replay {
    uniforms: std::vec::IntoIter<f64>,
    temperature: f32,
    top_p: Option<f32>,
    top_k: Option<usize>,
}

impl Replay {
    fn uniform(&mut self) -> f64 {
        self.uniforms.next().expect("a recorded uniform for every test")
    }

    /// Temperature, then top-p, then top-k: the reference's order.
    fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        let mut scores: Vec<f32> = logits.iter().map(|logit| logit / self.temperature).collect();
        if let Some(top_p) = self.top_p {
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
            let probabilities = softmax(&scores);
            let mut below = 0.0_f32;
            for index in &order[..order.len() - 1] {
                below += probabilities[*index];
                if below <= 1.0 - top_p {
                    scores[*index] = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(top_k) = self.top_k {
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let least = sorted[top_k.min(sorted.len()) - 1];
            scores.iter_mut().filter(|score| **score < least).for_each(|score| *score = f32::NEG_INFINITY);
        }
        softmax(&scores)
    }

    fn draw(&mut self, probabilities: &[f32]) -> TokenId {
        let mut sum = 0.0_f64;
        let sums: Vec<f64> = probabilities
            .iter()
            .map(|probability| {
                sum += f64::from(*probability);
                sum
            })
            .collect();
        let at = self.uniform() * sum;
        let index = sums.iter().filter(|sum| **sum <= at).count();
        let last = probabilities.iter().rposition(|probability| *probability > 0.0).expect("something to draw");
        index.min(last) as TokenId
    }
}

fn softmax(scores: &[f32]) -> Vec<f32> {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f32 = exponentials.iter().sum();
    exponentials.into_iter().map(|value| value / sum).collect()
}

impl Verifier for Replay {
    fn wants_logits(&self) -> bool {
        true
    }

    fn verify(&mut self, tree: &DraftTree, evidence: Evidence<'_>) -> Acceptance {
        let vocab_size = evidence.logits.len() / tree.len();
        let mut acceptance = Acceptance::default();
        let mut node = NodeId::ROOT;
        'path: loop {
            let row = node.index() * vocab_size;
            let mut target_prob = self.probabilities(&evidence.logits[row..row + vocab_size]);
            for child in tree.nodes().filter(|child| tree.parent(*child) == node) {
                let token = tree.token(child) as usize;
                if self.uniform() <= f64::from(target_prob[token]) {
                    acceptance.path.push(child);
                    node = child;
                    continue 'path;
                }
                target_prob[token] = 0.0;
                let sum: f32 = target_prob.iter().sum();
                for probability in &mut target_prob {
                    *probability /= sum;
                }
            }
            acceptance.next = Some(self.draw(&target_prob));
            return acceptance;
        }
    }
}

struct Models {
    backend: Arc<Cpu>,
    target: Arc<DecoderWeights<Cpu>>,
    head: Checkpoint<'static>,
}

impl Models {
    fn open(target: &str, head: &str) -> Self {
        let backend = Arc::new(Cpu::new(Some(1), None));
        let file = ModelFile::open(&golden().join("targets").join(target)).expect("the golden target");
        let target = DecoderWeights::load(&*backend, file.spec.clone(), &file.tensors, Storage::Lossless, &|_| Ok(()));
        let head = Checkpoint::open(&golden().join("heads").join(head)).expect("the golden head");
        Self { backend, target: Arc::new(target.expect("loads")), head }
    }

    /// Runs a prompt with the published tree and records every step, until `num_tokens` are written.
    fn run(
        &self,
        prompt: &[TokenId],
        shape: TreeShape,
        verifier: impl Verifier + 'static,
        num_tokens: u32,
    ) -> (Vec<Step>, Vec<TokenId>) {
        let num_blocks = 64;
        let num_slots = num_blocks * 16;
        let head =
            EagleWeights::load(&*self.backend, &self.target, &self.head.config, &self.head.tensors, Storage::Lossless)
                .expect("the head fits");
        let drafter =
            Eagle::new(Arc::clone(&self.backend), Arc::clone(&self.target), head, shape, 0, num_slots as usize, 1)
                .expect("fits in memory");
        let decoder = Decoder::new(
            Arc::clone(&self.backend),
            Arc::clone(&self.target),
            num_slots as usize,
            vec![FeaturePoint::FinalNorm],
        );
        let steps = Arc::new(Mutex::new(Vec::new()));
        let verifier = Recording { inner: verifier, steps: Arc::clone(&steps) };
        let vocab_size = self.target.spec.vocab_size as u32;
        let cycle = HostCycle::new(
            decoder.expect("fits in memory"),
            vec![Box::new(drafter)],
            Box::new(verifier),
            Budget::UNLIMITED,
            Sampler::new(vocab_size),
        );
        let config = SchedulerConfig {
            max_batch: 1,
            max_batch_tokens: 512,
            chunk: None,
            max_draft_nodes: shape.max_nodes,
            max_in_flight: 1,
        };
        let scheduler = Scheduler::new(config, Arc::new(TokenTable::default()));
        let mut engine = Engine::new(scheduler, KvManager::new(num_blocks, 16, true), cycle);
        let limits = Limits {
            max_context: num_slots,
            num_slots,
            num_tokens: vocab_size,
            eos_token_ids: Vec::new(),
            special_tokens: HashMap::new(),
        };
        let params = SamplingParams {
            temperature: 0.0,
            // Far enough that the end does not narrow the last trees.
            max_tokens: Some(num_tokens + 200),
            ..SamplingParams::default()
        };
        let request = limits.request(RequestId(0), prompt.to_vec(), params).expect("valid");
        let (writer, mut reader) = TokenLog::open(request.max_len);
        engine.submit(request, Box::new(writer));
        let mut written = Vec::new();
        while written.len() < num_tokens as usize {
            engine.step();
            engine.check();
            written.extend(reader.read().tokens.into_iter().map(|token| token.token));
        }
        engine.cancel(RequestId(0));
        engine.step();
        drop(engine);
        let steps = Arc::into_inner(steps).expect("the engine is gone").into_inner().expect("not poisoned");
        (steps, written)
    }
}

fn shape(total_token: u16, depth: u16, top_k: u16) -> TreeShape {
    TreeShape { max_depth: depth, top_k, max_nodes: total_token - 1, noise: false, budget: Budget::UNLIMITED }
}

/// Steps whose trees were compared, and all.
#[derive(Default)]
struct Compared {
    trees: usize,
    steps: usize,
}

/// Compares the steps of a run with a trace, by the position of the root.
fn compare(trace: &Trace, steps: &[Step], name: &str, compared: &mut Compared) {
    assert_eq!(steps[0].tree.len(), 1, "nothing is drafted with the prompt");
    assert_eq!(steps[0].acceptance.next, Some(trace.first_token), "{name}: first token");
    let mut root = trace.prompt.len() as i64;
    let by_root: HashMap<i64, usize> =
        trace.prefix_len.iter().enumerate().map(|(index, prefix_len)| (*prefix_len, index)).collect();
    for step in &steps[1..] {
        if let Some(index) = by_root.get(&root).copied() {
            compared.steps += 1;
            if trace.least_gap[index] > LEAST_GAP {
                compared.trees += 1;
                let what = format!("{name}, step {index}");
                let tree = &step.tree;
                assert_eq!(tree.tokens(), tokens(&trace.draft_tokens[index]), "{what}: tokens");
                for node in tree.nodes() {
                    let parent = trace.parents[index][node.index()];
                    assert_eq!(i64::from(tree.parent(node).0), parent, "{what}: parent of {node:?}");
                    let score = trace.scores[index][node.index()];
                    assert!((tree.score(node) - score).abs() < 3e-5, "{what}: {} {score}", tree.score(node));
                }
                assert_eq!(step.acceptance.path.len() as i64, trace.accept_length[index], "{what}: accepted");
                assert_eq!(step.acceptance.next.map(i64::from), Some(trace.next_token[index]), "{what}: next");
            }
        }
        root += step.acceptance.path.len() as i64 + 1;
    }
}

fn traces(head: &str, run: &str) -> Vec<(String, Trace)> {
    let folder = golden().join("traces").join(head);
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("traces")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("plain"))
        .filter(|name| {
            name.starts_with(&format!("{run}_p")) && Path::new(name).extension().is_some_and(|end| end == "npz")
        })
        .collect();
    names.sort();
    assert!(!names.is_empty(), "{head} {run}");
    names.into_iter().map(|name| (format!("{head}/{name}"), Trace::open(&folder.join(&name)))).collect()
}

fn check_greedy(target: &str, head: &str, runs: &[(&str, u16, u16, u16)]) {
    let models = Models::open(target, head);
    for (run, total_token, depth, top_k) in runs {
        let mut compared = Compared::default();
        for (name, trace) in traces(head, run) {
            let num_tokens = trace.output.len() as u32;
            let shape = shape(*total_token, *depth, *top_k);
            let (steps, written) = models.run(&trace.prompt, shape, TargetMatch, num_tokens);
            let output: Vec<TokenId> = trace.output.clone();
            let new = output.strip_prefix(&trace.prompt[..]).unwrap_or(&output);
            assert_eq!(&written[..new.len()], new, "{name}: final tokens");
            compare(&trace, &steps, &name, &mut compared);
        }
        println!("{head} {run}: {} of {} trees compared", compared.trees, compared.steps);
        assert!(compared.trees * 10 > compared.steps * 8, "{head} {run}: most trees are clear of near ties");
    }
}

#[test]
fn greedy_trees_and_tokens_equal_the_reference_with_a_bias() {
    check_greedy(
        "target_a",
        "e2_a_bias",
        &[("greedy_17", 17, 3, 4), ("greedy_60", 60, 5, 10), ("greedy_chain", 7, 5, 1)],
    );
}

#[test]
fn greedy_trees_and_tokens_equal_the_reference_without_a_bias() {
    check_greedy(
        "target_b",
        "e2_b_nobias",
        &[("greedy_17", 17, 3, 4), ("greedy_60", 60, 5, 10), ("greedy_chain", 7, 5, 1)],
    );
}

fn check_sampled(
    target: &str,
    head: &str,
    run: &str,
    shape: TreeShape,
    temperature: f32,
    top_p: Option<f32>,
    top_k: Option<usize>,
) {
    let models = Models::open(target, head);
    let mut compared = Compared::default();
    for (name, trace) in traces(head, run) {
        let replay = Replay { uniforms: trace.uniforms.clone().into_iter(), temperature, top_p, top_k };
        let output: Vec<TokenId> = trace.output.clone();
        let new = output.strip_prefix(&trace.prompt[..]).unwrap_or(&output);
        let (steps, written) = models.run(&trace.prompt, shape, replay, new.len() as u32);
        assert_eq!(&written[..new.len()], new, "{name}: final tokens");
        compare(&trace, &steps, &name, &mut compared);
    }
    println!("{head} {run}: {} of {} trees compared", compared.trees, compared.steps);
    assert!(compared.trees * 10 > compared.steps * 8, "{head} {run}");
}

#[test]
fn sampled_traces_replay_from_their_uniforms() {
    let (wide, small) = (shape(60, 5, 10), shape(17, 3, 4));
    for (target, head) in [("target_a", "e2_a_bias"), ("target_b", "e2_b_nobias")] {
        check_sampled(target, head, "sample_t1", wide, 1.0, None, None);
        check_sampled(target, head, "sample_t07_p09", wide, 0.7, Some(0.9), None);
    }
    check_sampled("target_a", "e2_a_bias", "sample_t13_p095_k3", wide, 1.3, Some(0.95), Some(3));
    check_sampled("target_a", "e2_a_bias", "sample_17_t13", small, 1.3, None, None);
}
