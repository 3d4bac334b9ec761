//! Tests against the real kernel of this machine, in separate network namespaces. They need root; without it each
//! test is skipped with a one-line message.

mod daemon;
mod envoy;
mod knobs;
mod labels;
mod leaving;
mod mass;
mod pins;
mod repath;
mod rights;
mod support;
