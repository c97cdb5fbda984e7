use half::{bf16, f16};

use super::*;
use crate::backend::{Backend, MlpWeights};
use crate::blocks::{block_bytes, block_len, dequantize};
use crate::{Storage, WeightError};

/// A stored matrix and its values.
fn stored(random: &mut Random, dtype: HostType, rows: usize, cols: usize) -> (Vec<u8>, Vec<f32>) {
    let values = random.normals(rows * cols, 0.5);
    let bytes = match dtype {
        HostType::F32 => bytes_of(&values),
        HostType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        HostType::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => {
            let count = rows * cols / block_len(dtype);
            let mut bytes: Vec<u8> = (0..count * block_bytes(dtype)).map(|_| random.bits() as u8).collect();
            for block in bytes.chunks_exact_mut(block_bytes(dtype)) {
                // Every f16 that a type may have as a scale; the other bytes may be anything.
                for at in [0, 2, 208] {
                    if at + 2 <= block.len() && (at != 2 || !matches!(dtype, HostType::Q8_0 | HostType::Q4_0)) {
                        block[at..at + 2].copy_from_slice(&f16::from_f32(random.normal(0.01)).to_le_bytes());
                    }
                }
            }
            bytes
        }
    };
    let mut exact = vec![0.0; rows * cols];
    dequantize(dtype, &bytes, &mut exact);
    (bytes, exact)
}

fn matrix(bytes: &[u8], dtype: HostType, rows: usize, cols: usize) -> HostMatrix<'_> {
    HostMatrix { bytes, dtype, rows, cols, order: RowOrder::AsStored }
}

/// Every output is the one chain `fma(w, x, sum)` over the inputs in order, plus the bias: not only close, equal.
pub(super) fn matmul_is_one_chain(isa: Isa) {
    let backends = backends(isa);
    let plain = [HostType::F32, HostType::F16, HostType::BF16];
    let blocks = [
        HostType::Q8_0,
        HostType::Q4_0,
        HostType::Q4_1,
        HostType::Q5_0,
        HostType::Q5_1,
        HostType::Q4K,
        HostType::Q5K,
        HostType::Q6K,
    ];
    let mut cases = Vec::new();
    for dtype in plain {
        for (out, cols) in [
            (1, 1),
            (7, 8),
            (8, 7),
            (9, 9),
            (15, 15),
            (16, 16),
            (17, 17),
            (35, 3),
            (63, 33),
            (64, 40),
            (67, 64),
            (130, 2100),
        ] {
            cases.push((dtype, out, cols));
        }
    }
    cases.extend(blocks.map(|dtype| (dtype, 19, 256)));
    let mut random = Random::new(1);
    for (dtype, out, cols) in cases {
        let (bytes, values) = stored(&mut random, dtype, out, cols);
        let bias = random.normals(out, 1.0);
        for (i, cpu) in backends.iter().enumerate() {
            let weight = cpu.upload(&[matrix(&bytes, dtype, out, cols)], Storage::Lossless).expect("valid");
            assert_eq!(cpu.shape(&weight), (out, cols));
            assert!(cpu.weight_bytes(&weight) >= out * cols * block_bytes(dtype) / block_len(dtype));
            for rows in [1, 2, 3, 4, 5, 6, 7, 13].into_iter().filter(|rows| cols < 1000 || rows % 6 == 1) {
                let x = random.normals(rows * cols, 1.0);
                let with_bias = (rows + i) % 2 == 0;
                let y = cpu.to_host(&cpu.matmul(
                    &weight,
                    with_bias.then_some(&cpu.vector(&bias)),
                    &cpu.from_host(&x, cols),
                ));
                for row in 0..rows {
                    for o in 0..out {
                        let (w, x) = (&values[o * cols..][..cols], &x[row * cols..][..cols]);
                        let chain = w.iter().zip(x).fold(0.0f32, |sum, (w, x)| w.mul_add(*x, sum));
                        let chain = if with_bias { chain + bias[o] } else { chain };
                        let got = y[row * out + o];
                        assert_eq!(got.to_bits(), chain.to_bits(), "{dtype:?} {out}x{cols}, row {row}, output {o}");
                        let truth: f64 = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                        let truth = if with_bias { truth + f64::from(bias[o]) } else { truth };
                        assert_close(got, truth, 2e-5 * (cols as f64).sqrt(), "matmul");
                    }
                }
            }
        }
    }
}

pub(super) fn matmul_rows_are_independent(isa: Isa) {
    let mut random = Random::new(2);
    let (out, cols, rows) = (75, 1300, 20);
    for dtype in [HostType::F32, HostType::BF16, HostType::F16] {
        let (bytes, _) = stored(&mut random, dtype, out, cols);
        let x = random.normals(rows * cols, 1.0);
        for cpu in backends(isa) {
            let weight = cpu.upload(&[matrix(&bytes, dtype, out, cols)], Storage::Lossless).expect("valid");
            let all = cpu.from_host(&x, cols);
            let together = cpu.to_host(&cpu.matmul(&weight, None, &all));
            let order = random.shuffled(rows);
            let mixed = cpu.to_host(&cpu.matmul(&weight, None, &cpu.gather(&all, &order)));
            for (place, row) in order.iter().enumerate() {
                let alone = cpu.to_host(&cpu.matmul(&weight, None, &cpu.gather(&all, &[*row])));
                assert_eq!(bits(&alone), bits(&together[*row as usize * out..][..out]));
                assert_eq!(bits(&alone), bits(&mixed[place * out..][..out]));
            }
        }
    }
}

fn norm_truth(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, weight)| f64::from(*x) * factor * f64::from(*weight)).collect()
}

pub(super) fn norms(isa: Isa) {
    let mut random = Random::new(3);
    for width in [1, 7, 8, 9, 15, 16, 17, 35, 67, 576, 900] {
        for rows in [0, 1, 3, 40] {
            let (x, weight) = (random.normals(rows * width, 2.0), random.normals(width, 1.0));
            let meaning = reference().norm(&weight, 1e-5, &reference().from_host(&x, width));
            let meaning = reference().to_host(&meaning);
            for cpu in backends(isa) {
                let got = cpu.to_host(&cpu.norm(&weight, 1e-5, &cpu.from_host(&x, width)));
                assert_eq!(bits(&got), bits(&meaning));
                for (x, got) in x.chunks_exact(width).zip(got.chunks_exact(width)) {
                    for (got, truth) in got.iter().zip(norm_truth(x, &weight, 1e-5)) {
                        assert_close(*got, truth, 1e-6, "norm");
                    }
                    assert_eq!(bits(&cpu.to_host(&cpu.norm(&weight, 1e-5, &cpu.from_host(x, width)))), bits(got));
                }
            }
        }
    }
}

pub(super) fn mlp_block(isa: Isa) {
    let mut random = Random::new(4);
    for (hidden, width) in [(8, 7), (16, 17), (33, 67), (24, 1030)] {
        let (gate_up, down) = (random.normals(2 * width * hidden, 0.3), random.normals(hidden * width, 0.3));
        let norm = random.normals(hidden, 1.0);
        let rows = 9;
        let x = random.normals(rows * hidden, 1.0);
        let run = |cpu: &Cpu, x: &[f32]| {
            let upload = |values: &[f32], rows, cols| {
                cpu.upload(&[f32_matrix(&bytes_of(values), rows, cols)], Storage::Lossless).expect("valid")
            };
            let block = MlpWeights::<Cpu> {
                norm: cpu.vector(&norm),
                gate_up: upload(&gate_up, 2 * width, hidden),
                down: upload(&down, hidden, width),
                eps: 1e-5,
            };
            let mut x = cpu.from_host(x, hidden);
            cpu.mlp(&block, &mut x);
            cpu.to_host(&x)
        };
        let meaning = run(&reference(), &x);
        for cpu in backends(isa) {
            let got = run(&cpu, &x);
            assert_eq!(bits(&got), bits(&meaning));
            assert_eq!(bits(&run(&cpu, &x[3 * hidden..4 * hidden])), bits(&got[3 * hidden..4 * hidden]));
        }
        for (x, got) in x.chunks_exact(hidden).zip(meaning.chunks_exact(hidden)) {
            let normed = norm_truth(x, &norm, 1e-5);
            let product = |w: &[f32], x: &[f64]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            let both: Vec<f64> = gate_up.chunks_exact(hidden).map(|w| product(w, &normed)).collect();
            let inner: Vec<f64> = (0..width).map(|i| both[i] / (1.0 + (-both[i]).exp()) * both[width + i]).collect();
            for (o, w) in down.chunks_exact(width).enumerate() {
                assert_close(got[o], f64::from(x[o]) + product(w, &inner), 3e-5, "mlp");
            }
        }
    }
}

pub(super) fn embeddings_come_out_of_the_panels(isa: Isa) {
    let mut random = Random::new(5);
    let cpu = Cpu::new(Some(2), Some(isa));
    for (rows, cols) in [(1, 1), (17, 8), (40, 9)] {
        for dtype in [HostType::F32, HostType::F16, HostType::BF16] {
            let (bytes, values) = stored(&mut random, dtype, rows, cols);
            let table = cpu.upload(&[matrix(&bytes, dtype, rows, cols)], Storage::Lossless).expect("valid");
            let ids: Vec<u32> = (0..50).map(|_| random.below(rows) as u32).collect();
            let expected: Vec<f32> =
                ids.iter().flat_map(|id| values[*id as usize * cols..][..cols].iter().copied()).collect();
            assert_eq!(bits(&cpu.to_host(&cpu.embed(&table, &ids))), bits(&expected));
        }
    }
}

fn rows_of(cpu: &Cpu, parts: &[HostMatrix<'_>], storage: Storage) -> Vec<f32> {
    let weight = cpu.upload(parts, storage).expect("valid");
    let ids: Vec<u32> = (0..cpu.shape(&weight).0 as u32).collect();
    cpu.to_host(&cpu.embed(&weight, &ids))
}

#[test]
fn parts_are_stacked_and_mixed_types_stay_exact() {
    let (cpu, mut random) = (Cpu::new(Some(2), None), Random::new(6));
    let types = [HostType::F32, HostType::BF16, HostType::F16, HostType::Q4K];
    let parts: Vec<_> = types.iter().map(|dtype| stored(&mut random, *dtype, 5, 256)).collect();
    let views: Vec<_> = parts.iter().zip(types).map(|((bytes, _), dtype)| matrix(bytes, dtype, 5, 256)).collect();
    let exact: Vec<f32> = parts.iter().flat_map(|(_, values)| values.iter().copied()).collect();
    assert_eq!(bits(&rows_of(&cpu, &views, Storage::Lossless)), bits(&exact));
    let rounded: Vec<f32> = exact.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    assert_eq!(bits(&rows_of(&cpu, &views, Storage::Bf16)), bits(&rounded));
    let weight = cpu.upload(&views, Storage::Bf16).expect("valid");
    assert_eq!(cpu.weight_bytes(&weight), 32 * 256 * 2);
}

#[test]
fn bf16_rounds_to_even() {
    // Half way between two bf16 values, once above an even one, once above an odd one.
    let values = [f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000)];
    let bytes = bytes_of(&values);
    let got = rows_of(&Cpu::new(Some(1), None), &[f32_matrix(&bytes, 1, 2)], Storage::Bf16);
    assert_eq!(bits(&got), [0x3f80_0000, 0x3f82_0000]);
}

#[test]
fn interleaved_heads_are_read_as_halves() {
    let (cpu, head) = (Cpu::new(Some(2), None), 6);
    let mut interleaved = vec![0.0; 4 * head];
    for h in 0..4 {
        for j in 0..2 {
            for i in 0..head / 2 {
                interleaved[h * head + 2 * i + j] = (h * head + j * head / 2 + i) as f32;
            }
        }
    }
    let bytes = bytes_of(&interleaved);
    let part = HostMatrix { order: RowOrder::Interleaved(head), ..f32_matrix(&bytes, 4 * head, 1) };
    let expected: Vec<f32> = (0..4 * head).map(|row| row as f32).collect();
    assert_eq!(rows_of(&cpu, &[part], Storage::Lossless), expected);
}

#[test]
fn bad_parts_are_refused() {
    let cpu = Cpu::new(Some(1), None);
    let upload = |parts: &[HostMatrix<'_>]| cpu.upload(parts, Storage::Lossless).err();
    let bytes = [0u8; 64];
    assert!(matches!(upload(&[]), Some(WeightError::Parts(_))));
    assert!(matches!(upload(&[f32_matrix(&bytes, 0, 4)]), Some(WeightError::Parts(_))));
    assert!(matches!(upload(&[f32_matrix(&bytes, 4, 0)]), Some(WeightError::Parts(_))));
    assert!(matches!(upload(&[f32_matrix(&bytes, 4, 4), f32_matrix(&bytes, 8, 2)]), Some(WeightError::Parts(_))));
    assert!(matches!(upload(&[f32_matrix(&bytes, 4, 5)]), Some(WeightError::Length { expected: 80, got: 64, .. })));
    assert!(matches!(upload(&[f32_matrix(&bytes, usize::MAX, 2)]), Some(WeightError::Length { .. })));
    assert!(matches!(upload(&[f32_matrix(&bytes, usize::MAX / 4 + 2, 1)]), Some(WeightError::Length { .. })));
    assert!(matches!(upload(&[matrix(&bytes, HostType::Q8_0, 1, 33)]), Some(WeightError::Block { block: 32, .. })));
    let odd = HostMatrix { order: RowOrder::Interleaved(3), ..f32_matrix(&bytes, 3, 1) };
    assert!(upload(&[odd]).is_some());
    let none = HostMatrix { order: RowOrder::Interleaved(0), ..f32_matrix(&bytes, 4, 4) };
    assert!(matches!(upload(&[none]), Some(WeightError::Parts(_))));
}

#[test]
fn activations_are_rearranged() {
    let cpu = Cpu::new(Some(2), None);
    let (a, b) = (cpu.from_host(&[1.0, 2.0, 3.0, 4.0], 2), cpu.from_host(&[5.0, 6.0], 1));
    assert_eq!(cpu.rows(&a), 2);
    assert_eq!(cpu.to_host(&cpu.concat(&[&a, &b])), [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    assert_eq!(cpu.to_host(&cpu.stack(&[&a, &a])), [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
    assert_eq!(cpu.to_host(&cpu.gather(&a, &[1, 0, 1])), [3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
}
