//! A network that loses packets, has little bandwidth, or does not reach an agent. All traffic uses the loopback of
//! this program's namespace.

use std::time::Duration;

use crate::bed::Bed;
use crate::fault::{Fault, Goal, Scope};
use crate::network::{has, run};

const HOLD: Duration = Duration::from_secs(5);

pub(super) const FAULTS: &[Fault] = &[
    Fault {
        name: "packet-loss",
        what: "1 % of all packets are lost, on every link",
        scope: Scope::Machine,
        hold: HOLD,
        goal: Goal::within(10),
        begin: |_| {
            run(
                "iptables",
                &[
                    "-w",
                    "-A",
                    "INPUT",
                    "-i",
                    "lo",
                    "-p",
                    "tcp",
                    "-m",
                    "statistic",
                    "--mode",
                    "random",
                    "--probability",
                    "0.01",
                    "-j",
                    "DROP",
                ],
            )
        },
        end: |_| run("iptables", &["-w", "-F", "INPUT"]),
        missing: no_iptables,
    },
    Fault {
        name: "agent-unreachable",
        what: "no packet reaches an agent for 5 s",
        scope: Scope::Machine,
        hold: HOLD,
        goal: Goal::within(5),
        begin: |site| {
            let port = site.bed.pods[site.replica()].addr().port().to_string();
            run("iptables", &["-w", "-A", "INPUT", "-i", "lo", "-p", "tcp", "--dport", &port, "-j", "DROP"])
        },
        end: |_| run("iptables", &["-w", "-F", "INPUT"]),
        missing: no_iptables,
    },
    Fault {
        name: "narrow-network",
        what: "all links together carry 150 Mbit/s, about the rate that is sent: packets queue",
        scope: Scope::Machine,
        hold: HOLD,
        goal: Goal::within(10),
        begin: |_| {
            run("tc", &["qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1"])?;
            run(
                "tc",
                &["class", "add", "dev", "lo", "parent", "1:", "classid", "1:1", "htb", "rate", "150mbit"],
            )
        },
        end: |_| run("tc", &["qdisc", "del", "dev", "lo", "root"]),
        missing: |_| (!has("tc", "-V")).then(|| "no tc".to_owned()),
    },
];

fn no_iptables(_: &Bed) -> Option<String> {
    (!has("iptables", "-V")).then(|| "no iptables".to_owned())
}
