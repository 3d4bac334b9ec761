//! What users copy for Istio, Envoy Gateway and Kubernetes: checked against the published schemas, put together as the control plane
//! would do it, and run on a real Envoy.
//!
//! One program, so that it links once; one module for each theme.

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
