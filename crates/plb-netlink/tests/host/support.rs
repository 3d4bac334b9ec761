//! The command under test, and short forms.

use std::process::{Command, Output};

use netlab::{Fabric, Node};
use plb_netlink::Result;

/// Runs `plb --netns NODE args...` to its end.
pub(crate) fn plb(fabric: &Fabric, node: Node, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plb"))
        .args(["--netns", &fabric.name(node)])
        .args(args)
        .output()
        .expect("starting plb")
}

/// Its standard output as JSON; it must have ended well.
pub(crate) fn plb_json(fabric: &Fabric, node: Node, args: &[&str]) -> serde_json::Value {
    let output = plb(fabric, node, &[args, &["--json"]].concat());
    assert!(output.status.success(), "plb {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Exit code and what it said on standard error.
pub(crate) fn failure(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Runs inside a namespace.
pub(crate) fn within<T: Send>(
    fabric: &Fabric,
    node: Node,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    plb_netlink::netns::Namespace::named(&fabric.name(node))?.within(work)
}
