//! Against the real kernel of this machine, in network namespaces of their own. Needs root; without it each test says
//! so in one line.

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
