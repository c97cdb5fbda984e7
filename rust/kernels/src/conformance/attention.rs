use super::*;
use crate::Storage;
use crate::backend::{AttentionPlan, AttentionWeights, Backend, Rope, Slot, SlotMove, Visible};

/// Sizes of a small stack of attention blocks, and whether it has every optional part.
#[derive(Clone, Copy)]
struct Shape {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotated: usize,
    full: bool,
}

const SHAPES: [Shape; 4] = [
    Shape { hidden: 24, heads: 4, kv_heads: 2, head_dim: 16, rotated: 8, full: true },
    Shape { hidden: 17, heads: 3, kv_heads: 1, head_dim: 8, rotated: 4, full: false },
    Shape { hidden: 16, heads: 3, kv_heads: 3, head_dim: 12, rotated: 2, full: true },
    Shape { hidden: 32, heads: 2, kv_heads: 1, head_dim: 80, rotated: 40, full: false },
];

struct Values {
    norm: Vec<f32>,
    qkv: Vec<f32>,
    bias: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    out: Vec<f32>,
}

impl Shape {
    fn values(self, random: &mut Random) -> Values {
        let (width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Values {
            norm: random.normals(self.hidden, 1.0),
            qkv: random.normals((width + 2 * kv_width) * self.hidden, 0.2),
            bias: random.normals(width + 2 * kv_width, 0.4),
            q_norm: random.normals(self.head_dim, 1.0),
            k_norm: random.normals(self.head_dim, 1.0),
            out: random.normals(self.hidden * width, 0.2),
        }
    }

    fn block(self, cpu: &Cpu, values: &Values) -> AttentionWeights<Cpu> {
        let upload = |values: &[f32], cols: usize| {
            let bytes = bytes_of(values);
            cpu.upload(&[f32_matrix(&bytes, values.len() / cols, cols)], Storage::Lossless).expect("valid")
        };
        AttentionWeights {
            norm: self.full.then(|| cpu.vector(&values.norm)),
            qkv: upload(&values.qkv, self.hidden),
            qkv_bias: self.full.then(|| cpu.vector(&values.bias)),
            q_norm: self.full.then(|| cpu.vector(&values.q_norm)),
            k_norm: self.full.then(|| cpu.vector(&values.k_norm)),
            out: upload(&values.out, self.heads * self.head_dim),
            num_heads: self.heads,
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            eps: 1e-5,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    fn rope(self) -> Rope {
        let inv_freq = (0..self.rotated).map(|i| 10_000f32.powf(-(i as f32) / self.rotated as f32)).collect();
        Rope { inv_freq, amplitude: if self.full { 1.0 } else { 1.1 } }
    }
}

/// A stack of blocks with its cache.
struct Stack<'a> {
    cpu: &'a Cpu,
    shape: Shape,
    blocks: Vec<AttentionWeights<Cpu>>,
    cache: <Cpu as Backend>::Cache,
}

const LAYERS: usize = 2;

impl<'a> Stack<'a> {
    fn new(cpu: &'a Cpu, shape: Shape, values: &[Values], num_slots: usize) -> Stack<'a> {
        let blocks = values.iter().map(|values| shape.block(cpu, values)).collect();
        let cache = cpu.cache(LAYERS, num_slots, shape.kv_heads * shape.head_dim).expect("small");
        Stack { cpu, shape, blocks, cache }
    }

    fn forward(&mut self, x: &[f32], positions: &[u32], slots: &[Slot], attention: &AttentionPlan) -> Vec<f32> {
        let plan = self.cpu.plan(positions, slots, attention, &self.shape.rope());
        let mut x = self.cpu.from_host(x, self.shape.hidden);
        for (layer, block) in self.blocks.iter().enumerate() {
            let queries = self.cpu.qkv_store(block, &x, &plan, &mut self.cache, layer);
            self.cpu.attend_out(block, &queries, &plan, &self.cache, layer, &mut x);
        }
        self.cpu.to_host(&x)
    }

    /// Rows `from..` of a plain sequence whose token `i` lies in `slots[i]`, seeing at most `window` tokens.
    fn sequence(&mut self, x: &[f32], from: usize, slots: &[Slot], window: usize) -> Vec<f32> {
        let rows = x.len() / self.shape.hidden;
        let visible = |i: usize| {
            let first = (i + 1).saturating_sub(window) as u32;
            Visible { first_position: first, context: first..i as u32 + 1, tail: 0..0 }
        };
        let attention = AttentionPlan { slots: slots.to_vec(), rows: (from..from + rows).map(visible).collect() };
        let positions: Vec<u32> = (from..from + rows).map(|i| i as u32).collect();
        self.forward(x, &positions, &slots[from..from + rows], &attention)
    }
}

fn slots(random: &mut Random, len: usize) -> Vec<Slot> {
    random.shuffled(len).into_iter().map(Slot).collect()
}

/// Two layers over a sequence, in f64, every token at once.
fn truth(shape: Shape, values: &[Values], x: &[f32], window: usize) -> Vec<f64> {
    let (d, hidden) = (shape.head_dim, shape.hidden);
    let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let rope = shape.rope();
    let norm = |x: &[f64], weight: &[f32]| -> Vec<f64> {
        let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(weight).map(|(x, w)| x * factor * f64::from(*w)).collect()
    };
    let product = |w: &[f32], x: &[f64]| -> Vec<f64> {
        w.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
    };
    for values in values {
        let len = x.len() / hidden;
        let all: Vec<Vec<Vec<f64>>> = (0..len)
            .map(|t| {
                let row = &x[t * hidden..][..hidden];
                let row = if shape.full { norm(row, &values.norm) } else { row.to_vec() };
                let mut all = product(&values.qkv, &row);
                if shape.full {
                    all.iter_mut().zip(&values.bias).for_each(|(x, b)| *x += f64::from(*b));
                }
                let head = |(h, head): (usize, &[f64])| {
                    let mut head = head.to_vec();
                    if h >= shape.heads + shape.kv_heads {
                        return head;
                    }
                    if shape.full {
                        head = norm(&head, if h < shape.heads { &values.q_norm } else { &values.k_norm });
                    }
                    for (i, frequency) in rope.inv_freq.iter().enumerate() {
                        let (sin, cos) = (t as f64 * f64::from(*frequency)).sin_cos();
                        let (sin, cos) = (sin * f64::from(rope.amplitude), cos * f64::from(rope.amplitude));
                        let (a, b) = (head[i], head[i + shape.rotated]);
                        head[i] = a * cos - b * sin;
                        head[i + shape.rotated] = b * cos + a * sin;
                    }
                    head
                };
                all.chunks_exact(d).enumerate().map(head).collect()
            })
            .collect();
        for t in 0..len {
            let mut attended = Vec::new();
            for h in 0..shape.heads {
                let kv = shape.heads + h * shape.kv_heads / shape.heads;
                let from = (t + 1).saturating_sub(window);
                let score = |s: usize| {
                    let dot: f64 = all[t][h].iter().zip(&all[s][kv]).map(|(a, b)| a * b).sum();
                    dot / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (from..=t).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let scores: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = scores.iter().sum();
                for i in 0..d {
                    let value = |(s, score): (usize, &f64)| score / sum * all[from + s][kv + shape.kv_heads][i];
                    attended.push(scores.iter().enumerate().map(value).sum::<f64>());
                }
            }
            for (x, y) in x[t * hidden..][..hidden].iter_mut().zip(product(&values.out, &attended)) {
                *x += y;
            }
        }
    }
    x
}

pub(super) fn blocks_match_the_truth(isa: Isa) {
    let mut random = Random::new(10);
    for shape in SHAPES {
        let values: Vec<_> = (0..LAYERS).map(|_| shape.values(&mut random)).collect();
        for (len, window) in [(1, 99), (8, 99), (33, 99), (75, 99), (75, 12)] {
            let x = random.normals(len * shape.hidden, 1.0);
            let exact = truth(shape, &values, &x, window);
            let slots = slots(&mut random, len);
            for cpu in backends(isa) {
                let got = Stack::new(&cpu, shape, &values, len).sequence(&x, 0, &slots, window);
                for (got, exact) in got.iter().zip(&exact) {
                    assert_close(*got, *exact, 2e-4, "attention");
                }
            }
        }
    }
}

/// Every node of a random tree gets the bits of its path decoded token by token, on the meaning's instruction set.
pub(super) fn trees_are_sequences(isa: Isa) {
    let mut random = Random::new(11);
    for (shape, context, window) in
        [(0, 0, 99), (0, 1, 99), (1, 30, 99), (0, 31, 99), (2, 32, 99), (3, 33, 99), (1, 70, 99), (0, 70, 40)]
            .map(|(shape, context, window)| (SHAPES[shape], context, window))
    {
        let values: Vec<_> = (0..LAYERS).map(|_| shape.values(&mut random)).collect();
        let hidden = shape.hidden;
        let nodes = 9;
        let parents: Vec<Option<usize>> = (0..nodes).map(|i| (i > 0).then(|| random.below(i))).collect();
        let path = |node: usize| {
            let mut path = vec![node];
            while let Some(parent) = parents[path[path.len() - 1]] {
                path.push(parent);
            }
            path.reverse();
            path
        };
        let prompt = random.normals(context * hidden, 1.0);
        let x = random.normals(nodes * hidden, 1.0);
        let slots = slots(&mut random, context + nodes);
        let reference = reference();
        for cpu in backends(isa) {
            let mut tree = Stack::new(&cpu, shape, &values, context + nodes);
            if context > 0 {
                // In two uneven chunks.
                let cut = context / 3 * hidden;
                if cut > 0 {
                    tree.sequence(&prompt[..cut], 0, &slots, window);
                }
                tree.sequence(&prompt[cut..], cut / hidden, &slots, window);
            }
            let mut plan = AttentionPlan { slots: slots[..context].to_vec(), rows: Vec::new() };
            let mut positions = Vec::new();
            for node in 0..nodes {
                let path = path(node);
                let position = context + path.len() - 1;
                let first = (position + 1).saturating_sub(window);
                let start = plan.slots.len() as u32;
                plan.slots.extend(path.iter().map(|node| slots[context + node]));
                positions.push(position as u32);
                plan.rows.push(Visible {
                    first_position: first as u32,
                    context: first as u32..context as u32,
                    tail: start..start + path.len() as u32,
                });
            }
            let got = tree.forward(&x, &positions, &slots[context..], &plan);
            for node in 0..nodes {
                let path = path(node);
                let mut plain = Stack::new(&reference, shape, &values, context + nodes);
                let in_order: Vec<Slot> = (0..(context + nodes) as u32).map(Slot).collect();
                for i in 0..context {
                    plain.sequence(&prompt[i * hidden..][..hidden], i, &in_order, window);
                }
                let mut last = Vec::new();
                for (i, node) in path.iter().enumerate() {
                    last = plain.sequence(&x[node * hidden..][..hidden], context + i, &in_order, window);
                }
                assert_eq!(bits(&last), bits(&got[node * hidden..][..hidden]), "node {node} after {context}");
            }
        }
    }
}

pub(super) fn moved_slots_stay_the_same(isa: Isa) {
    let (mut random, shape) = (Random::new(12), SHAPES[0]);
    let values: Vec<_> = (0..LAYERS).map(|_| shape.values(&mut random)).collect();
    let x = random.normals(4 * shape.hidden, 1.0);
    let (before, last) = x.split_at(3 * shape.hidden);
    let cpu = Cpu::new(Some(2), Some(isa));
    let at = |ids: [u32; 4]| ids.map(Slot);
    let mut plain = Stack::new(&cpu, shape, &values, 8);
    plain.sequence(before, 0, &at([5, 6, 7, 0]), 99);
    let expected = plain.sequence(last, 3, &at([5, 6, 7, 0]), 99);
    let mut moved = Stack::new(&cpu, shape, &values, 8);
    moved.sequence(before, 0, &at([5, 6, 7, 0]), 99);
    // In order: the second move reads what the first wrote.
    let moves = [(5, 1), (1, 2), (6, 1), (7, 3)].map(|(from, to)| SlotMove { from: Slot(from), to: Slot(to) });
    cpu.move_kv(&mut moved.cache, &moves);
    assert_eq!(bits(&moved.sequence(last, 3, &at([2, 1, 3, 0]), 99)), bits(&expected));
}
