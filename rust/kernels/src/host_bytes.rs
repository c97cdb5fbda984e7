//! Bytes of a weight file behind one safe owner.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// Read-only bytes that stay where they are for as long as their owner lives: a mapped file or a vector.
#[derive(Debug)]
pub struct HostBytes(Source);

#[derive(Debug)]
enum Source {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl HostBytes {
    /// Maps a whole file. An empty file gives an empty slice.
    pub fn map(path: &Path) -> io::Result<HostBytes> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(HostBytes::owned(Vec::new()));
        }
        // SAFETY: the mapping is private and read-only, and its bytes are only read as plain bytes. As with every
        // mapper, a process that truncates the file while it is mapped makes later reads fault; that ends this process
        // and is the operator's to avoid.
        let mapped = unsafe { Mmap::map(&file)? };
        Ok(HostBytes(Source::Mapped(mapped)))
    }

    /// Takes over bytes that are already in memory.
    pub fn owned(bytes: Vec<u8>) -> HostBytes {
        HostBytes(Source::Owned(bytes))
    }
}

impl Deref for HostBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Source::Mapped(mapped) => mapped,
            Source::Owned(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_files_and_owns_vectors() -> io::Result<()> {
        let directory = std::env::temp_dir().join(format!("slipstream-host-bytes-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let path = directory.join("bytes");
        for content in [&b"some bytes"[..], b""] {
            std::fs::write(&path, content)?;
            assert_eq!(&*HostBytes::map(&path)?, content);
            assert_eq!(&*HostBytes::owned(content.to_vec()), content);
        }
        assert!(HostBytes::map(&directory.join("missing")).is_err());
        std::fs::remove_dir_all(&directory)
    }

    #[test]
    fn crosses_threads() {
        fn check<T: Send + Sync>() {}
        check::<HostBytes>();
    }
}
