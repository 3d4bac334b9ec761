//! The command under test, and shortcuts.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use netlab::{Fabric, Flow, Node, Sink};
use plb_netlink::Result;
use plb_netlink::bpf::Attached;
use serde_json::Value;

/// Runs `plb --netns NODE args...` to completion.
pub(crate) fn plb(fabric: &Fabric, node: Node, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plb"))
        .args(["--netns", &fabric.name(node)])
        .args(args)
        .output()
        .expect("starting plb")
}

/// Runs `plb` and returns its standard output as JSON; the command must succeed.
pub(crate) fn plb_json(fabric: &Fabric, node: Node, args: &[&str]) -> Value {
    let output = plb(fabric, node, &[args, &["--json"]].concat());
    assert!(output.status.success(), "plb {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Returns the exit code and the standard error.
pub(crate) fn failure(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Runs `work` inside a namespace.
pub(crate) fn within<T: Send>(
    fabric: &Fabric,
    node: Node,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    plb_netlink::netns::Namespace::named(&fabric.name(node))?.within(work)
}

/// A `plb run` in `h1` and its lines of JSON. It is killed if the test ends first.
pub(crate) struct Run {
    pub(crate) child: Child,
    pub(crate) lines: Receiver<Value>,
    /// Obstacles that it reported at the start.
    pub(crate) warnings: Vec<String>,
}

impl Run {
    pub(crate) fn start(fabric: &Fabric, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plb"));
        command.args(["--netns", &fabric.name(Node::H1)]);
        Self::spawn(command, args)
    }

    /// Starts such a run through another program, which then executes `plb`; `words` precede `plb` on the command line.
    pub(crate) fn under(fabric: &Fabric, words: &[&str], plb: &str, args: &[&str]) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &fabric.name(Node::H1)]).args(words).arg(plb);
        Self::spawn(command, args)
    }

    fn spawn(mut command: Command, args: &[&str]) -> Self {
        let mut child = command
            .args(["--json", "run", "--n", "3", "--m", "1"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(std::result::Result::ok) {
                // Once the receiver is gone, this thread closes the pipe.
                if send.send(serde_json::from_str(&line).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut run = Self { child, lines, warnings: Vec::new() };
        let first = run.next();
        assert_eq!(first["watching"], true);
        let said = first["warnings"].as_array().unwrap().iter();
        run.warnings = said.map(|warning| warning.as_str().unwrap().to_owned()).collect();
        run
    }

    pub(crate) fn next(&self) -> Value {
        self.lines.recv_timeout(Duration::from_secs(20)).expect("a line of plb run")
    }

    /// Returns the action of the next event.
    pub(crate) fn done(&self) -> String {
        let value = self.next();
        value["done"].as_str().unwrap_or_else(|| panic!("no event: {value}")).to_owned()
    }

    /// Checks that nothing is reported for a period in which a connection that is not pinned moves several times.
    pub(crate) fn quiet(&self) {
        let event = self.lines.recv_timeout(Duration::from_millis(700));
        assert!(event.is_err(), "{event:?}");
    }

    /// Stops reading: the next lines have no reader.
    pub(crate) fn hang_up(&mut self) {
        self.lines = std::sync::mpsc::channel().1;
    }

    /// Stops the run as an operator would, and returns its last line.
    pub(crate) fn stop(mut self) -> Value {
        signal(&self.child, "TERM");
        assert!(self.child.wait().unwrap().success());
        // The channel stays open until the reader has seen the end.
        std::iter::from_fn(|| self.lines.recv().ok()).last().unwrap()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(child: &Child, name: &str) {
    let killed = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
}

pub(crate) const SLOWLY: Duration = Duration::from_millis(2);

/// Builds a fabric whose four paths all mark packets, until the returned programs are dropped.
pub(crate) fn congested_fabric() -> (Fabric, Vec<Attached>) {
    let fabric = Fabric::build().unwrap();
    let congested = fabric.congest(&[1, 2, 3, 4]).unwrap();
    (fabric, congested)
}

/// Sets up ECN on both sides, a sink, and this many flows.
pub(crate) fn traffic(fabric: &Fabric, flows: usize) -> (Sink, Vec<Flow>) {
    for node in [Node::H1, Node::H2] {
        fabric.set(node, "net.ipv4.tcp_ecn", "1").unwrap();
    }
    let sink = netlab::sink(fabric).unwrap();
    let flow = |_| netlab::flow(fabric, sink.addr, 3000, SLOWLY, |_| Ok(())).unwrap();
    let flows = (0..flows).map(flow).collect();
    (sink, flows)
}
