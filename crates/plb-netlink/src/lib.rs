//! The host side of PLB (Protective Load Balancing): flow labels, the kernel's PLB knobs, repathing.
//!
//! Depends on none of the other crates, and none may depend on it except `probe-agent` and the simulator.

pub mod detector;
