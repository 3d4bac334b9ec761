//! A multi-path fabric of network namespaces for tests and benchmarks.
