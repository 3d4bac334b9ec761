//! The files that users copy for Istio, Envoy Gateway and Kubernetes: checked against the published schemas, combined
//! as the control plane would do it, and run on a real Envoy.
//!
//! All tests are in one program, so that it is linked only once, with one module for each theme.

mod chart;
mod envoy_gateway;
mod headless;
mod helm;
mod istio;
mod kubernetes;
mod merge;
mod plb;
mod proxy;
mod schemas;
mod trouble;
mod values;
