//! A multi-path fabric of network namespaces for tests and benchmarks.
//!
//! ```text
//!            ┌── p1 ──┐
//! h1 ── r1 ──┼── p2 ──┼── r2 ── h2
//!            ├── p3 ──┤
//!            └── p4 ──┘
//! ```
//!
//! Both routers spread flows by 4-tuple and flow label. A path can silently lose every packet ([`Fabric::black_hole`])
//! or mark every packet as congested ([`Fabric::congest`]); [`Fabric::path_bytes`] and [`Capture`] show which packets
//! go where. Needs root. Dropping the fabric removes everything.

mod capture;
mod traffic;

use std::fmt::Write as _;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use plb_netlink::bpf::{self, Assembler, Attached};
use plb_netlink::flowlabel::{self, Label};
use plb_netlink::netns::Namespace;
use plb_netlink::{link, sysctl};

pub use capture::{Capture, Packet};
pub use traffic::{Flow, Sink, eventually, flow, sink};

/// The result of every function here. The error is a text, because tests only print it.
pub type Result<T> = std::result::Result<T, String>;

/// Parallel paths between the routers, numbered from 1.
pub const PATHS: usize = 4;

/// A namespace of the fabric.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Node {
    /// The sender's host, [`H1`].
    H1,
    /// The sender's router; its devices `p1` to `p4` are the paths.
    R1,
    /// The receiver's router.
    R2,
    /// The receiver's host, [`H2`].
    H2,
}

/// Address of `h1`.
pub const H1: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 2);
/// Address of `h2`.
pub const H2: Ipv6Addr = Ipv6Addr::new(0xfd00, 2, 0, 0, 0, 0, 0, 2);

/// The namespaces; dropping the value deletes them.
#[derive(Debug)]
pub struct Fabric {
    prefix: String,
}

impl Fabric {
    /// Builds the fabric; takes about a second.
    ///
    /// # Errors
    /// Without root, `ip` or network namespaces.
    pub fn build() -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let fabric = Self { prefix: format!("lab{}n{number}", std::process::id()) };
        let [h1, r1, r2, h2] = [Node::H1, Node::R1, Node::R2, Node::H2].map(|node| fabric.name(node));
        let mut batch = String::new();
        let mut add = |line: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(batch, "{line}");
        };
        for namespace in [&h1, &r1, &r2, &h2] {
            add(format!("netns add {namespace}"));
        }
        for (host, router, net) in [(&h1, &r1, 1), (&h2, &r2, 2)] {
            add(format!("link add u0 netns {host} type veth peer name hx netns {router}"));
            add(format!("-n {host} addr add fd00:{net}::2/64 dev u0 nodad"));
            add(format!("-n {router} addr add fd00:{net}::1/64 dev hx nodad"));
        }
        for path in 1..=PATHS {
            add(format!("link add p{path} netns {r1} type veth peer name p{path} netns {r2}"));
            add(format!("-n {r1} addr add fd00:10:{path}::1/64 dev p{path} nodad"));
            add(format!("-n {r2} addr add fd00:10:{path}::2/64 dev p{path} nodad"));
        }
        // A batch of `ip` cannot change the namespace from line to line, so run one process per line.
        for line in batch.lines() {
            fabric.ip(line)?;
        }
        for (namespace, devices) in [(&h1, 0), (&h2, 0), (&r1, PATHS), (&r2, PATHS)] {
            fabric.ip(&format!("-n {namespace} link set lo up"))?;
            fabric.ip(&format!("-n {namespace} link set {} up", if devices == 0 { "u0" } else { "hx" }))?;
            for path in 1..=devices {
                fabric.ip(&format!("-n {namespace} link set p{path} up"))?;
            }
        }
        for router in [Node::R1, Node::R2] {
            fabric.set(router, "net.ipv6.conf.all.forwarding", "1")?;
            fabric.set(router, "net.ipv6.fib_multipath_hash_policy", "3")?;
            fabric.set(router, "net.ipv6.fib_multipath_hash_fields", "63")?;
        }
        fabric.ip(&format!("-n {h1} -6 route add default via fd00:1::1"))?;
        fabric.ip(&format!("-n {h2} -6 route add default via fd00:2::1"))?;
        let hops = |end: usize| -> String {
            (1..=PATHS)
                .map(|path| format!(" nexthop via fd00:10:{path}::{end} dev p{path} weight 1"))
                .collect()
        };
        fabric.ip(&format!("-n {r1} -6 route add fd00:2::/64{}", hops(2)))?;
        fabric.ip(&format!("-n {r2} -6 route add fd00:1::/64{}", hops(1)))?;
        fabric.settle()?;
        Ok(fabric)
    }

    /// Waits until every path carries packets both ways. Addresses and neighbour discovery take a moment. A SYN that is
    /// lost meanwhile costs a second and changes its label.
    fn settle(&self) -> Result<()> {
        for (from, to, address) in [(Node::H1, Node::H2, H2), (Node::H2, Node::H1, H1)] {
            let text = |error: plb_netlink::Error| error.to_string();
            let any = SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0);
            let receiver = self.within(to, || flowlabel::udp(Some(any)).map_err(text))?;
            receiver.set_nonblocking(true).map_err(|error| error.to_string())?;
            let port = receiver.local_addr().map_err(|error| error.to_string())?.port();
            let target = SocketAddrV6::new(address, port, 0, 0);
            let sender = self.within(from, || flowlabel::udp(None).map_err(text))?;
            eventually("all paths carry packets", Duration::from_secs(10), || {
                let arrived = || std::iter::from_fn(|| receiver.recv(&mut [0; 1]).ok()).count();
                arrived();
                // With this many labels, a path without any of them is very unlikely (4 * 0.75^64).
                for label in 1..=64 {
                    let Ok(label) = Label::new(label) else { return false };
                    // Fails at once while a device is not ready.
                    let _ = flowlabel::send_to(&sender, b"x", target, label);
                }
                let mut count = 0;
                eventually("64 datagrams", Duration::from_millis(200), || {
                    count += arrived();
                    count == 64
                })
                .is_ok()
            })?;
        }
        Ok(())
    }

    /// The name of a namespace, for `ip netns` and `plb --netns`.
    pub fn name(&self, node: Node) -> String {
        let node = match node {
            Node::H1 => "h1",
            Node::R1 => "r1",
            Node::R2 => "r2",
            Node::H2 => "h2",
        };
        format!("{}-{node}", self.prefix)
    }

    /// Runs `work` inside a namespace, on a separate thread.
    ///
    /// # Errors
    /// What `work` returned.
    pub fn within<T: Send>(&self, node: Node, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = Namespace::named(&self.name(node)).map_err(|error| error.to_string())?;
        namespace.within(|| Ok(work())).map_err(|error| error.to_string())?
    }

    /// Sets a kernel parameter of a namespace.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set(&self, node: Node, parameter: &str, value: &str) -> Result<()> {
        self.within(node, || sysctl::write(parameter, value).map_err(|error| error.to_string()))
    }

    /// Runs `ip` with these arguments; `{h1}` and so on are replaced by the names of the namespaces.
    ///
    /// # Errors
    /// With the output of `ip`.
    pub fn ip(&self, words: &str) -> Result<String> {
        self.tool("ip", words)
    }

    /// Runs `tc` with these arguments; `{h1}` and so on are replaced by the names of the namespaces.
    ///
    /// # Errors
    /// With the output of `tc`.
    pub fn tc(&self, words: &str) -> Result<String> {
        self.tool("tc", words)
    }

    fn tool(&self, program: &str, words: &str) -> Result<String> {
        let mut words = words.to_owned();
        for (placeholder, node) in
            [("{h1}", Node::H1), ("{r1}", Node::R1), ("{r2}", Node::R2), ("{h2}", Node::H2)]
        {
            words = words.replace(placeholder, &self.name(node));
        }
        let output = Command::new(program)
            .args(words.split_whitespace())
            .output()
            .map_err(|error| format!("cannot start `{program}` (Debian: iproute2): {error}"))?;
        output_of(&format!("{program} {words}"), &output)
    }

    /// Makes a path silently lose every packet from `h1`, by giving its next hop a wrong address.
    ///
    /// # Errors
    /// With the output of `ip`.
    pub fn black_hole(&self, path: usize) -> Result<()> {
        self.ip(&format!(
            "-n {{r1}} neigh replace fd00:10:{path}::2 lladdr 02:00:00:00:00:99 dev p{path} nud permanent"
        ))?;
        Ok(())
    }

    /// Makes the path work again.
    ///
    /// # Errors
    /// With the output of `ip`.
    pub fn heal(&self, path: usize) -> Result<()> {
        self.ip(&format!("-n {{r1}} neigh del fd00:10:{path}::2 dev p{path}"))?;
        Ok(())
    }

    /// While the guard lives, every ECN-capable packet from `h1` on these paths is marked as congested.
    ///
    /// # Errors
    /// Without tcx (Linux 6.6).
    pub fn congest(&self, paths: &[usize]) -> Result<Vec<Attached>> {
        const SET_CE: i32 = 97;
        self.within(Node::R1, || {
            let attach = |path: &usize| {
                let device = link::named(&format!("p{path}"))?;
                bpf::attach_egress(&Assembler::default().call(SET_CE).finish()?, device.index)
            };
            paths.iter().map(attach).collect::<plb_netlink::Result<_>>().map_err(|error| error.to_string())
        })
    }

    /// Bytes that `r1` has sent into each path, Ethernet headers included.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn path_bytes(&self) -> Result<[u64; PATHS]> {
        self.within(Node::R1, || {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").map_err(|e| e.to_string())?;
            let mut bytes = [0; PATHS];
            for line in text.lines() {
                let Some((device, counts)) = line.split_once(':') else { continue };
                let path = device.trim().strip_prefix('p').and_then(|path| path.parse::<usize>().ok());
                let Some(slot) = path.and_then(|path| bytes.get_mut(path.checked_sub(1)?)) else { continue };
                let sent = counts.split_whitespace().nth(8).and_then(|sent| sent.parse().ok());
                *slot = sent.ok_or_else(|| format!("unexpected line in /proc/net/dev: {line}"))?;
            }
            Ok(bytes)
        })
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        for node in [Node::H1, Node::R1, Node::R2, Node::H2] {
            let _ = Command::new("ip").args(["netns", "del", &self.name(node)]).output();
        }
    }
}

/// Standard output, or an error with the command's output.
fn output_of(command: &str, output: &Output) -> Result<String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("`{command}` failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// How unevenly bytes are spread: max over mean, minus 1. 0 is even, `PATHS - 1` is all on one path.
pub fn imbalance(bytes: &[u64; PATHS]) -> f64 {
    let total: u64 = bytes.iter().sum();
    let max = bytes.iter().max().copied().unwrap_or(0);
    if total == 0 { 0.0 } else { max as f64 * PATHS as f64 / total as f64 - 1.0 }
}

/// Why a fabric cannot be built here; `None` if it can. The attempt is made once per process.
pub fn missing() -> Option<String> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    let tried =
        || Fabric::build().err().map(|why| format!("network namespaces need root and iproute2: {why}"));
    MISSING.get_or_init(tried).clone()
}

/// Whether a test that needs a fabric can run. If not, reports what is missing in one line, which is also appended to
/// the file `PREQUAL_SKIP_LOG`. Under `CI=true` that is a failure.
///
/// # Panics
/// Under `CI=true`.
#[track_caller]
pub fn ready(test: &str) -> bool {
    let Some(why) = missing() else { return true };
    skip(test, &why);
    false
}

/// Reports that a test did not run, and why; see [`ready`].
///
/// # Panics
/// Under `CI=true`.
#[track_caller]
pub fn skip(test: &str, why: &str) {
    let line = format!("{test}: skipped: {why}");
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{line}");
    eprintln!("{line}");
    if let Some(log) = std::env::var_os("PREQUAL_SKIP_LOG") {
        use std::io::Write as _;
        let file = std::fs::OpenOptions::new().append(true).create(true).open(log);
        let written = file.and_then(|mut file| writeln!(file, "{line}"));
        written.unwrap_or_else(|error| eprintln!("PREQUAL_SKIP_LOG: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imbalance_is_0_if_even_and_3_if_one_of_four_paths_has_everything() {
        assert_eq!(imbalance(&[5, 5, 5, 5]), 0.0);
        assert_eq!(imbalance(&[0, 20, 0, 0]), 3.0);
        assert_eq!(imbalance(&[10, 10, 0, 0]), 1.0);
        assert_eq!(imbalance(&[0; PATHS]), 0.0);
    }
}
