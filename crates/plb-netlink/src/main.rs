//! `plb`: the operator's command.
fn main() {}
