//! The rights granted by `plb.service` are sufficient, and each of them is necessary; systemd accepts the unit.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use netlab::{Capture, Fabric, Node, eventually, ready, skip};
use plb_netlink::sock::{self, TxRehash};

use crate::support::{Run, SLOWLY, congested_fabric, traffic};

/// A copy of the command that any user may run; it exists for the duration of a test.
struct Copy(PathBuf);

impl Copy {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("plb-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_plb"), folder.join("plb")).unwrap();
        Self(folder)
    }

    fn path(&self) -> String {
        self.0.join("plb").display().to_string()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../envoy-configs/plb/plb.service");
    fs::read_to_string(path).unwrap()
}

/// Returns the value of one setting of the unit.
fn setting(unit: &str, name: &str) -> String {
    let line = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    line.unwrap_or_else(|| panic!("no {name}=")).to_owned()
}

/// Returns the unit's capabilities, by their `setpriv` names.
fn capabilities() -> Vec<String> {
    let unit = unit();
    let granted = setting(&unit, "AmbientCapabilities");
    assert_eq!(granted, setting(&unit, "CapabilityBoundingSet"));
    granted.split_whitespace().map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase()).collect()
}

/// Returns the command prefix that runs another program as a separate user with these capabilities, as the unit does.
fn as_user(capabilities: &[String]) -> Vec<String> {
    let added: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let sets = ["bounding-set", "inh-caps", "ambient-caps"].map(|set| format!("--{set}=-all{added}"));
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"];
    user.map(str::to_owned).into_iter().chain(sets).collect()
}

/// Returns the corresponding prefix for root, as in the DaemonSet: root has the capabilities that the bounding set
/// leaves.
fn as_root(capabilities: &[String]) -> Vec<String> {
    let added: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let sets = ["bounding-set", "inh-caps"].map(|set| format!("--{set}=-all{added}"));
    ["setpriv", "--no-new-privs"].map(str::to_owned).into_iter().chain(sets).collect()
}

fn under(fabric: &Fabric, words: &[String], plb: &str) -> Run {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Run::under(fabric, &words, plb, &["--way", "bpf"])
}

#[test]
fn the_rights_of_the_unit_are_enough() {
    if !ready("the_rights_of_the_unit_are_enough") {
        return;
    }
    let (copy, capabilities) = (Copy::new("enough"), capabilities());
    for words in [as_user(&capabilities), as_root(&capabilities)] {
        let (fabric, _congested) = congested_fabric();
        let (_sink, flows) = traffic(&fabric, 1);
        let run = under(&fabric, &words, &copy.path());
        assert!(run.done().starts_with("new label"), "{words:?}");
        let capture = Capture::start(&fabric, Node::H1).unwrap();
        eventually("two labels", Duration::from_secs(5), || capture.labels(flows[0].port()).len() >= 2)
            .unwrap();
        assert_eq!(run.warnings, [] as [String; 0]);
    }
}

#[test]
fn every_right_of_the_unit_is_necessary() {
    if !ready("every_right_of_the_unit_is_necessary") {
        return;
    }
    let (copy, all) = (Copy::new("exact"), capabilities());
    let (fabric, _congested) = congested_fabric();
    let (_sink, flows) = traffic(&fabric, 1);
    let capture = Capture::start(&fabric, Node::H1).unwrap();
    assert_eq!(all.len(), 4);
    for missing in &all {
        let rest: Vec<String> = all.iter().filter(|name| *name != missing).cloned().collect();
        if missing == "bpf" || missing == "net_admin" {
            let output = Command::new("ip")
                .args(["netns", "exec", &fabric.name(Node::H1)])
                .args(as_user(&rest))
                .args([&copy.path(), "run", "--way", "bpf", "--duration", "1"])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "without {missing}: {said}");
            assert!(said.contains("CAP_BPF and CAP_NET_ADMIN"), "{said}");
        } else {
            let run = under(&fabric, &as_user(&rest), &copy.path());
            let name = format!("CAP_{}", missing.to_uppercase());
            assert!(run.warnings[0].contains(&name), "{:?}", run.warnings);
            let done = run.done();
            assert!(done.starts_with("left alone: cannot read whether it is pinned"), "{missing}: {done}");
            run.quiet();
        }
    }
    assert_eq!(capture.labels(flows[0].port()).len(), 1);
}

#[test]
fn connections_with_unreadable_pins_are_not_moved() {
    if !ready("connections_with_unreadable_pins_are_not_moved") {
        return;
    }
    let copy = Copy::new("pins");
    let no_tracing = as_user(&["bpf".to_owned(), "net_admin".to_owned()]);
    let other_pids =
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"].map(str::to_owned).to_vec();
    for (words, warning) in [(no_tracing, "CAP_SYS_PTRACE"), (other_pids, "PID namespace")] {
        let (fabric, _congested) = congested_fabric();
        let (sink, _none) = traffic(&fabric, 0);
        let off = |socket: &socket2::Socket| sock::set_txrehash(socket, TxRehash::Off);
        let pinned = netlab::flow(&fabric, sink.addr, 3000, SLOWLY, off).unwrap();
        let capture = Capture::start(&fabric, Node::H1).unwrap();
        let run = under(&fabric, &words, &copy.path());
        assert!(run.warnings.iter().any(|said| said.contains(warning)), "{:?}", run.warnings);
        let done = run.done();
        assert!(done.starts_with("left alone: cannot read whether it is pinned"), "{words:?}: {done}");
        run.quiet();
        assert_eq!(capture.labels(pinned.port()).len(), 1, "{words:?}");
    }
}

#[test]
fn systemd_accepts_the_unit() {
    let name = "systemd_accepts_the_unit";
    let copy = Copy::new("unit");
    let verify = |text: &str| {
        let path = copy.0.join("plb.service");
        fs::write(&path, text).unwrap();
        Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(path).output()
    };
    let unit = unit().replace("/usr/local/bin/plb", &copy.path());
    let Ok(output) = verify(&unit) else {
        return skip(name, "no `systemd-analyze` here (Debian: systemd)");
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    // systemd reports mistakes in the unit, except a capability that does not exist. The tests above cover that case,
    // because they run with the unit's capabilities.
    for (good, bad) in [("/plb run", "/plp run"), ("NoNewPrivileges", "NoNewPrivilege"), ("=exec", "=exek")] {
        let output = verify(&unit.replacen(good, bad, 1)).unwrap();
        assert!(!output.stderr.is_empty(), "{bad}");
    }
    // `plb` accepts the command line.
    let command = setting(&unit, "ExecStart");
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).args(["--dry-run", "--dev", "lo"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
