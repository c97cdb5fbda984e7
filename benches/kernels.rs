//! Speed of the CPU kernels at the shapes of SmolLM2-135M: matrix products by number of rows and weight type, against
//! a plain streaming read of memory in the same run; then draws.
//!
//! `cargo bench --bench kernels [-- --json]`. Every result is checked before it is timed.

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::Instant;

use slipstream_kernels::cpu::{Cpu, CpuWeight, Isa, ReadLoop};
use slipstream_kernels::math::philox;
use slipstream_kernels::{Backend, Coin, Controls, Draw, HostMatrix, HostType, RowOrder, Storage};

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const QKV: usize = (9 + 2 * 3) * 64;
const LAYERS: usize = 30;
const VOCAB: usize = 49_152;
const ROUNDS: usize = 9;
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

fn normals(len: usize, seed: u32) -> Vec<f32> {
    let uniform = |word: u32| word as f32 / 4_294_967_296.0 - 0.5;
    (0..len as u32).map(|i| philox([i, 1, 2, 3], [seed, 0]).map(uniform).iter().sum::<f32>() * 1.7).collect()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// All matrices that one token passes.
struct Model {
    weights: Vec<CpuWeight>,
}

impl Model {
    fn new(cpu: &Cpu, dtype: HostType) -> Model {
        let mut weights = Vec::new();
        let shapes = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)];
        let layers = (0..LAYERS).flat_map(|_| shapes).chain([(VOCAB, HIDDEN)]);
        let values = normals(1 << 20, 5);
        for (rows, cols) in layers {
            let bytes: Vec<u8> = match dtype {
                HostType::F32 => values.iter().cycle().take(rows * cols).flat_map(|x| x.to_le_bytes()).collect(),
                HostType::BF16 => values
                    .iter()
                    .cycle()
                    .take(rows * cols)
                    .flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes())
                    .collect(),
                _ => values
                    .iter()
                    .cycle()
                    .take(rows * cols)
                    .flat_map(|x| half::f16::from_f32(*x).to_le_bytes())
                    .collect(),
            };
            let matrix = HostMatrix { bytes: &bytes, dtype, rows, cols, order: RowOrder::AsStored };
            weights.push(cpu.upload(&[matrix], Storage::Lossless).expect("sizes agree"));
        }
        Model { weights }
    }

    fn bytes(&self, cpu: &Cpu) -> usize {
        self.weights.iter().map(|weight| cpu.weight_bytes(weight)).sum()
    }

    fn pass(&self, cpu: &Cpu, inputs: &[<Cpu as Backend>::Activations; 2]) {
        for weight in &self.weights {
            let input = usize::from(cpu.shape(weight).1 == INTERMEDIATE);
            std::hint::black_box(cpu.matmul(weight, None, &inputs[input]));
        }
    }

    /// Every output against the one chain of fused multiply-adds that defines it.
    fn check(&self, cpu: &Cpu) {
        let rows = 5;
        let reference = Cpu::new(Some(1), Some(Isa::Scalar));
        for weight in &self.weights[..4] {
            let (out, cols) = cpu.shape(weight);
            let x = normals(rows * cols, 6);
            let y = cpu.to_host(&cpu.matmul(weight, None, &cpu.from_host(&x, cols)));
            let ids = [0, 1, out as u32 / 2, out as u32 - 1];
            let table = reference.to_host(&reference.embed(weight, &ids));
            for (id, w) in ids.iter().zip(table.chunks_exact(cols)) {
                for (row, x) in x.chunks_exact(cols).enumerate() {
                    let chain = w.iter().zip(x).fold(0.0f32, |sum, (w, x)| w.mul_add(*x, sum));
                    assert_eq!(y[row * out + *id as usize].to_bits(), chain.to_bits());
                }
            }
        }
    }
}

fn controls(temperature: f32, top_p: f32) -> Controls {
    Controls {
        temperature,
        top_k: 0,
        top_p,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        num_tokens: VOCAB as u32,
    }
}

/// Seconds per row of draws: one row, and eight rows of one position.
fn draws(cpu: &Cpu) -> Vec<(&'static str, usize, f64)> {
    let logits: Vec<f32> = normals(8 * VOCAB, 8).iter().map(|x| x * 3.0).collect();
    let reference = Cpu::new(Some(1), Some(Isa::Scalar));
    let cases =
        [("greedy", controls(0.0, 1.0)), ("T=0.7", controls(0.7, 1.0)), ("T=0.7 top-p 0.9", controls(0.7, 0.9))];
    let mut results = Vec::new();
    for rows in [1, 8] {
        let x = cpu.from_host(&logits[..rows * VOCAB], VOCAB);
        let y = reference.from_host(&logits[..rows * VOCAB], VOCAB);
        for (name, controls) in &cases {
            let controls = Arc::new(controls.clone());
            let of = |position| {
                let coin = Coin { seed: 11, sample: 0, position };
                vec![Draw { controls: Arc::clone(&controls), coin, seen: Arc::new([]), banned: Arc::new([]) }; rows]
            };
            assert_eq!(cpu.draw(&x, &of(1)), reference.draw(&y, &of(1)));
            let times = (0..101)
                .map(|position| {
                    let draws = of(position);
                    seconds(|| drop(std::hint::black_box(cpu.draw(&x, &draws))))
                })
                .collect();
            results.push((*name, rows, median(times) / rows as f64));
        }
    }
    results
}

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let cpu = Cpu::new(None, None);
    println!("{} threads, {}", cpu.threads(), cpu.isa().name());
    let stream = ReadLoop::new().expect("half a gibibyte");
    let types = [("f32", HostType::F32), ("bf16", HostType::BF16), ("f16", HostType::F16)];
    let models: Vec<Model> = types
        .iter()
        .map(|(_, dtype)| {
            let model = Model::new(&cpu, *dtype);
            model.check(&cpu);
            model
        })
        .collect();
    let inputs: Vec<_> = ROWS
        .iter()
        .map(|rows| [HIDDEN, INTERMEDIATE].map(|cols| cpu.from_host(&normals(rows * cols, 7), cols)))
        .collect();

    let mut stream_rates = Vec::new();
    let mut times = vec![vec![Vec::new(); ROWS.len()]; types.len()];
    stream.bytes_per_second(&cpu);
    for _ in 0..ROUNDS {
        stream_rates.push(stream.bytes_per_second(&cpu));
        for (model, times) in models.iter().zip(&mut times) {
            for (inputs, times) in inputs.iter().zip(times) {
                times.push(seconds(|| model.pass(&cpu, inputs)));
            }
        }
    }
    let stream_rate = median(stream_rates);
    println!("plain streaming read: {:.1} GB/s", stream_rate / 1e9);
    println!("\nall matrices of SmolLM2-135M, medians of {ROUNDS} rounds");
    println!("type  rows      ms    GB/s  share of stream  ratio to 1 row  GFLOP/s");
    let mut products = Vec::new();
    for (((name, _), model), times) in types.iter().zip(&models).zip(times) {
        let bytes = model.bytes(&cpu) as f64;
        let multiplies: usize = model.weights.iter().map(|weight| cpu.shape(weight).0 * cpu.shape(weight).1).sum();
        let mut one = 0.0;
        for (rows, times) in ROWS.iter().zip(times) {
            let time = median(times);
            if *rows == 1 {
                one = time;
            }
            let (rate, ratio) = (bytes / time, time / one);
            let flops = 2.0 * (rows * multiplies) as f64 / time;
            println!(
                "{name:<5} {rows:>4} {:>7.2} {:>7.2} {:>16.2} {ratio:>15.2} {:>8.1}",
                time * 1e3,
                rate / 1e9,
                rate / stream_rate,
                flops / 1e9
            );
            products.push(format!(
                r#"{{"type":"{name}","rows":{rows},"seconds":{time:.6},"bytes_per_second":{rate:.0},"share":{:.4},"ratio":{ratio:.4}}}"#,
                rate / stream_rate
            ));
        }
    }
    println!("\ndraws of {VOCAB} tokens\ncontrols          rows   µs per row");
    let mut drawn = Vec::new();
    for (name, rows, time) in draws(&cpu) {
        println!("{name:<17} {rows:>4} {:>12.1}", time * 1e6);
        drawn.push(format!(r#"{{"controls":"{name}","rows":{rows},"seconds_per_row":{time:.9}}}"#));
    }
    if json {
        println!(
            r#"{{"threads":{},"isa":"{}","stream_bytes_per_second":{stream_rate:.0},"products":[{}],"draws":[{}]}}"#,
            cpu.threads(),
            cpu.isa().name(),
            products.join(","),
            drawn.join(",")
        );
    }
}
