//! FNV-1a: a hash that is the same in every process and version. It does not protect against chosen collisions; the
//! cost of a collision is documented where the hash is used.

use std::hash::Hasher;

/// Initial value of a hash.
pub(crate) const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// Continues `hash` over `bytes`. Not inlined: for keys of a fixed length, inlining would generate one step per byte.
#[inline(never)]
pub(crate) fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A hasher for maps whose keys clients cannot choose. It needs far less code than that of the standard library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(FNV_OFFSET)
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = fnv(self.0, bytes);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_test_vectors_match() {
        assert_eq!(fnv(FNV_OFFSET, b"foobar"), 0x8594_4171_f739_67e8, "FNV's published vector");
    }
}
