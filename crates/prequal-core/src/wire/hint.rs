//! Query hints (paper §4): a synchronous probe describes the query, so that a replica with a warm cache can report it.
//!
//! Only a hash is sent: 64 bits in hexadecimal, whatever the client sent. It is the same in every process and version.
//! It is not a secret: two values with the same hash share their cache affinity and nothing else.

use std::fmt;

use crate::shared::fnv::{FNV_OFFSET, fnv};

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

impl fmt::Display for HintHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
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
    fn the_text_is_the_same_for_ever() {
        let hint = source(true, None).hint(Some(b"abc"), None).unwrap();
        assert_eq!(hint.to_string(), "e5f49fafdcdf1048");
    }

    #[test]
    fn what_is_absent_gives_no_hint() {
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
    fn header_and_segment_are_told_apart() {
        let both = source(true, Some(1));
        let hint = |header: &str, path: &str| both.hint(Some(header.as_bytes()), Some(path.as_bytes()));
        assert_eq!(hint("a", "/b"), hint("a", "/b/c?d"));
        assert_ne!(hint("ab", "/c"), hint("a", "/bc"));
        assert_ne!(hint("a", "/b"), hint("b", "/a"));
        assert!(hint("a", "/").is_some() && hint("", "/b").is_some());
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
