//! Damaged and hostile safetensors files and indexes (HC-104, HC-105).

#[path = "load_counting.rs"]
mod counting;

use std::path::{Path, PathBuf};

use counting::peak_of;
use proptest::prelude::*;
use slipstream_engine::error::EngineError;
use slipstream_engine::load::Checkpoint;

/// A folder of its own for a test, gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("slipstream-load-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        let folder = Self(path);
        folder.write("config.json", b"{\"model_type\": \"llama\"}");
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("a file");
    }

    fn open(&self) -> Result<Checkpoint<'static>, EngineError> {
        Checkpoint::open(&self.0)
    }

    fn refused(&self, bytes: &[u8], expected: &str) {
        self.write("model.safetensors", bytes);
        let (result, peak) = peak_of(|| self.open());
        let error = result.expect_err(expected);
        assert!(matches!(error, EngineError::Model(_)), "{error:?}");
        assert!(error.to_string().contains(expected), "expected {expected:?} in {error}");
        assert!(peak < bytes.len() as isize + (4 << 20), "{expected}: {peak} bytes");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.0));
    }
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

const HEADER: &str = r#"{"a":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},"b":{"dtype":"BF16","shape":[8],"data_offsets":[128,144]},"c":{"dtype":"I64","shape":[2],"data_offsets":[144,160]}}"#;

#[test]
fn hc_104_safetensors_header_limits_and_foreign_files() {
    let folder = Folder::new("hc104");
    let valid = safetensors(HEADER, 160);
    let size = valid.len() as u64;
    for (len, expected) in [
        (0, "expected a safetensors header"),
        (1, "expected a safetensors header"),
        (size, "expected a header of"),
        (size + 1, "expected a header of"),
        (8 << 20, "expected a header of"),
        ((8 << 20) + 1, "at most 8388608 bytes"),
        (1 << 63, "at most 8388608 bytes"),
        (u64::MAX, "at most 8388608 bytes"),
    ] {
        let bytes = [&len.to_le_bytes()[..], &valid[8..]].concat();
        folder.refused(&bytes, expected);
    }
    folder.refused(b"", "at least 8 bytes, got 0");
    folder.refused(b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00", "zip archive");
    folder.refused(b"\x80\x04\x95\x21\x00\x00\x00\x00\x00\x00\x00\x8c", "pickle");
    folder.refused(b"<!DOCTYPE html><html><body>Not found</body></html>", "a web page");
    folder.refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer");
    folder.refused(b"GGUF\x03\0\0\0\0\0\0\0", "a GGUF file");
    folder.refused(&safetensors("{\"a\u{0}", 0), "expected a safetensors header");
    folder.refused(&[&4u64.to_le_bytes()[..], b"\xff\xfe\xfd\xfc"].concat(), "UTF-8");
    folder.refused(&safetensors(&"[".repeat(10_000), 0), "expected a safetensors header");
    folder.refused(&safetensors(&format!("{{\"a\":{}", "{\"a\":".repeat(10_000)), 0), "expected a safetensors header");
    let overflow = HEADER.replace("[4,8]", "[9223372036854775807,4]");
    folder.refused(&safetensors(&overflow, 160), "expected a safetensors header");
    folder.refused(&safetensors(&HEADER.replace("[0,128]", "[0,64]"), 160), "expected a safetensors header");
    folder.refused(&safetensors(&HEADER.replace("\"BF16\"", "\"Q9\""), 160), "expected a safetensors header");
    let zero = r#"{"z":{"dtype":"F32","shape":[4,0],"data_offsets":[0,0]}}"#;
    folder.refused(&safetensors(zero, 0), "tensor z: expected no zero dimension");
}

#[test]
fn hc_105_truncated_tensor_data_names_the_first_tensor() {
    let folder = Folder::new("hc105");
    let valid = safetensors(HEADER, 160);
    let start = valid.len() - 160;
    for (cut, expected) in
        [(40, "tensor a"), (80, "tensor a"), (127, "tensor a"), (130, "tensor b"), (158, "tensor c"), (159, "tensor c")]
    {
        folder.refused(&valid[..start + cut], expected);
    }
    for len in 0..valid.len() {
        folder.write("model.safetensors", &valid[..len]);
        assert!(folder.open().is_err(), "{len} bytes");
    }
    folder.write("model.safetensors", &valid);
    let checkpoint = folder.open().expect("a checkpoint");
    assert_eq!(checkpoint.tensors.names(), ["a", "b", "c"]);
    assert_eq!(checkpoint.tensors.integers("c").expect("integers"), [0, 0]);
    assert_eq!(checkpoint.tensors.vector("b").expect("a vector"), [0.0; 8]);
    assert!(checkpoint.tensors.tensor("b").expect_err("a vector").to_string().contains("two dimensions, got [8]"));
    assert!(checkpoint.tensors.vector("c").expect_err("integers").to_string().contains("tensor c: expected weights"));
}

#[test]
fn hc_105_shards_that_are_missing_cut_or_elsewhere_are_named() {
    let folder = Folder::new("shards");
    let shard = |name: &str, data| {
        safetensors(&format!(r#"{{"{name}":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}}}"#), data)
    };
    let index = |second: &str, file: &str| {
        format!(r#"{{"metadata":{{}},"weight_map":{{"a":"one.safetensors","{second}":"{file}"}}}}"#).into_bytes()
    };
    folder.write("one.safetensors", &shard("a", 16));
    let refused = |expected: &[&str]| {
        let error = folder.open().expect_err("a refusal").to_string();
        assert!(expected.iter().all(|expected| error.contains(expected)), "expected {expected:?} in {error}");
    };
    folder.write("model.safetensors.index.json", &index("b", "two.safetensors"));
    refused(&["two.safetensors", "tensor b", "no such file"]);
    folder.write("two.safetensors", &shard("b", 15));
    refused(&["two.safetensors", "tensor b", "cut short"]);
    folder.write("two.safetensors", &shard("b", 16));
    assert_eq!(folder.open().expect("a checkpoint").tensors.names(), ["a", "b"]);
    folder.write("model.safetensors.index.json", &index("c", "two.safetensors"));
    refused(&["two.safetensors", "tensor c", "got none"]);
    folder.write("two.safetensors", &shard("a", 16));
    refused(&["a twice"]);
    for outside in ["../two.safetensors", "/etc/passwd", "x/two.safetensors", "..", ".", "", "a\\\\b"] {
        folder.write("model.safetensors.index.json", &index("b", outside));
        refused(&["inside the folder"]);
    }
    for broken in [&b""[..], b"{}", b"[]", b"{\"weight_map\": []}", b"\xff"] {
        folder.write("model.safetensors.index.json", broken);
        refused(&["index of shards"]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn hc_104_flipped_bytes_never_panic(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut bytes = safetensors(HEADER, 160);
        for (index, byte) in flips {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        let folder = Folder::new("flips");
        folder.write("model.safetensors", &bytes);
        let (result, peak) = peak_of(|| folder.open());
        if let Ok(checkpoint) = result {
            for name in checkpoint.tensors.names() {
                let _ = (checkpoint.tensors.tensor(name).is_ok(), checkpoint.tensors.vector(name).is_ok());
            }
        }
        prop_assert!(peak < 64 << 20);
    }
}
