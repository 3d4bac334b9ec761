//! Query hints (paper §4): a synchronous probe describes the query, so that a replica that has the query's data cached
//! can report this.
//!
//! Only a hash is sent: 64 bits in hexadecimal, whatever the client sent. It is the same in every process and version.
//! It is not a secret. Two values with the same hash share their cache affinity, but nothing else.
//!
//! A hint also ranks the replicas (rendezvous hashing), and the first [`HOMES`] of them are the hint's *homes*. Every
//! proxy with the same membership finds the same order, and when a replica joins or leaves, homes change only for
//! the hints that it is a home of. A request with a hint sends up to `d` probes: at most `d` − 1 to homes of the hint,
//! and the others to other replicas ([`crate::client::Balancer::ask`]).

use std::fmt;

use crate::shared::endpoint::Endpoint;
use crate::shared::fnv::{FNV_OFFSET, fnv};

/// Number of replicas that are homes of a hint. The second one takes the requests that the first has no room for, so
/// that the next requests with this hint find their data there too.
pub const HOMES: usize = 2;

/// Source of a request's hint: at least one of the two. If both are set, they are hashed together.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HintSource {
    /// Name of a request header, in lower case.
    pub header: Option<String>,
    /// Number of a path segment, from 1 (`/1/2/3?query`) to 64.
    pub path_segment: Option<u32>,
}

impl HintSource {
    /// Returns the hint for the header's value and the path; `None` if the request has neither.
    pub fn hint(&self, header: Option<&[u8]>, path: Option<&[u8]>) -> Option<HintHash> {
        let header = header.filter(|value| self.header.is_some() && !value.is_empty());
        let segment = self.path_segment.and_then(|number| segment(path?, number));
        if header.is_none() && segment.is_none() {
            return None;
        }
        let hash = fnv(FNV_OFFSET, header.unwrap_or_default());
        // The length distinguishes "ab" + "c" from "a" + "bc".
        let hash = fnv(hash, &(header.map_or(0, <[u8]>::len) as u64).to_le_bytes());
        Some(HintHash(fnv(hash, segment.unwrap_or_default())))
    }
}

/// Hash of the data that a query will touch. Its text form is 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct HintHash(u64);

impl HintHash {
    /// Rank of `replica` for this hint, highest first.
    pub(crate) fn rank(self, replica: Endpoint) -> u64 {
        bytemuck::bytes_of(&replica).chunks(size_of::<u64>()).fold(self.0, |hash, bytes| {
            let mut word = [0; size_of::<u64>()];
            word.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
            mixed(hash ^ u64::from_le_bytes(word))
        })
    }
}

impl fmt::Display for HintHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The output function of SplitMix64: each bit of the result depends on every bit of `word`.
fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn segment(path: &[u8], number: u32) -> Option<&[u8]> {
    let path = path.split(|byte| matches!(byte, b'?' | b'#')).next()?;
    let segment = path.split(|byte| *byte == b'/').nth(number as usize)?;
    (!segment.is_empty()).then_some(segment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(header: bool, path_segment: Option<u32>) -> HintSource {
        HintSource { header: header.then(|| "x-session".into()), path_segment }
    }

    #[test]
    fn the_hash_of_a_hint_never_changes() {
        let hint = source(true, None).hint(Some(b"abc"), None).unwrap();
        assert_eq!(hint.to_string(), "e5f49fafdcdf1048");
    }

    #[test]
    fn a_missing_part_gives_no_hint() {
        for (source, header, path) in [
            (source(true, None), None, Some("/a/b")),
            (source(true, None), Some(""), None),
            (source(false, Some(3)), Some("x"), Some("/a/b?c/d")),
            (source(false, Some(1)), None, None),
            (source(false, Some(1)), None, Some("//b")),
            (source(true, Some(2)), None, Some("/a")),
        ] {
            assert_eq!(
                source.hint(header.map(str::as_bytes), path.map(str::as_bytes)),
                None,
                "{source:?} {path:?}"
            );
        }
    }

    #[test]
    fn header_and_segment_are_hashed_separately() {
        let both = source(true, Some(1));
        let hint = |header: &str, path: &str| both.hint(Some(header.as_bytes()), Some(path.as_bytes()));
        assert_eq!(hint("a", "/b"), hint("a", "/b/c?d"));
        assert_ne!(hint("ab", "/c"), hint("a", "/bc"));
        assert_ne!(hint("a", "/b"), hint("b", "/a"));
        assert!(hint("a", "/").is_some() && hint("", "/b").is_some());
    }

    /// The number of the replica that ranks first for hint `n`, among `replicas` replicas.
    fn first(n: u64, replicas: u16) -> u16 {
        let replica = |port: u16| format!("10.0.0.1:{}", 1000 + port).parse().unwrap();
        (0..replicas).max_by_key(|port| HintHash(n).rank(replica(*port))).unwrap()
    }

    #[test]
    fn replicas_rank_first_equally_often_and_a_new_one_moves_only_its_own_hints() {
        let mut counts = [0; 10];
        let mut moved = 0;
        for n in 0..10_000 {
            let (before, after) = (first(n, 10), first(n, 11));
            counts[usize::from(before)] += 1;
            if after != before {
                assert_eq!(after, 10);
                moved += 1;
            }
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
        assert!((800..1020).contains(&moved), "{moved}");
    }

    #[test]
    fn the_rank_of_replicas_never_changes() {
        let firsts: Vec<u16> = (0..8).map(|n| first(n, 100)).collect();
        assert_eq!(firsts, [35, 97, 65, 90, 67, 83, 85, 61]);
    }

    proptest! {
        #[test]
        fn no_value_panics_and_the_text_is_bounded(header: Vec<u8>, path: Vec<u8>, number in 0u32..70) {
            if let Some(hint) = source(true, Some(number)).hint(Some(&header), Some(&path)) {
                prop_assert_eq!(hint.to_string().len(), 16);
            }
        }
    }
}
