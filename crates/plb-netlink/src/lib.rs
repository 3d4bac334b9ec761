//! The host side of PLB (Protective Load Balancing): flow labels, the kernel's PLB knobs, repathing.
//!
//! **Nothing is built yet.** This crate holds the place that the architecture gives it; its own issue fills it. It
//! depends on none of the other crates, and none may depend on it except `probe-agent`.
#![forbid(unsafe_code)]
