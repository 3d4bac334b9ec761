//! The faults of the demo.
//!
//! Most faults are requested from the page, which passes the request to the right program. Faults that need the
//! container engine are carried out only here: no container has the engine's socket.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::commands::compose::engine::Project;
use crate::commands::compose::images::NETFAULT;
use crate::commands::compose::page::{Order, Page};
use crate::run;

/// Switches a fault on, through the page or directly.
pub(crate) fn switch_on(
    project: &Project,
    page: &Page,
    name: &str,
    replica: Option<u64>,
    seconds: Option<u64>,
) -> Result<Order> {
    let order = page.switch_on(name, replica, seconds)?;
    if order.by_host
        && let Err(error) = act(project, &order)
    {
        page.failed(order.id, &error.to_string())?;
        return Err(error);
    }
    Ok(order)
}

/// Carries out a fault that only the engine can cause. The end of the fault is scheduled before this function returns,
/// and happens even if this program exits.
pub(crate) fn act(project: &Project, order: &Order) -> Result<()> {
    let seconds = order.seconds;
    match order.name.as_str() {
        "agent-kill" => {
            let agent = project.container(&format!("agent-{}", order.replica))?;
            run::output(run::tool("docker").args(["kill", &agent]))?;
            detached(&format!("sleep {seconds}; docker start {agent}"))
        }
        "loss" => net_fault(project, order, "iptables -A INPUT", "iptables -D INPUT", LOSS),
        "delay" => net_fault(project, order, "tc qdisc add", "tc qdisc del", DELAY).map_err(|error| {
            if format!("{error:#}").contains("kind is unknown") {
                error.context("this kernel has no netem (sch_netem); `loss` works without it")
            } else {
                error
            }
        }),
        other => bail!("`{other}` is not a fault that the host carries out"),
    }
}

/// Runs a command in the replica's network namespace. The command runs in a container of [`NETFAULT`] with only the
/// capabilities that it needs.
fn net_fault(project: &Project, order: &Order, begin: &str, end: &str, rule: &str) -> Result<()> {
    let replica = project.container(&format!("replica-{}", order.replica))?;
    let enter = || {
        let mut command = run::tool("docker");
        command
            .args([
                "run",
                "--rm",
                "--network",
                &format!("container:{replica}"),
                "--label",
                &project.fault_label(),
            ])
            .args(["--cap-drop", "ALL", "--cap-add", "NET_ADMIN", "--cap-add", "NET_RAW"]);
        command
    };
    let begun = run::output(enter().args([NETFAULT, "sh", "-c", &format!("{begin} {rule}")]));
    begun.with_context(|| format!("cannot change the network of replica {}", order.replica))?;
    let undo = format!("sleep {}; {end} {rule}", order.seconds);
    run::output(enter().args(["--detach", NETFAULT, "sh", "-c", &undo]))?;
    Ok(())
}

/// Starts a script that keeps running when this program ends, however it ends.
fn detached(script: &str) -> Result<()> {
    Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot start `sh`")?;
    Ok(())
}

/// Applies to packets from outside; loopback is exempt, so the service and its agent stay connected.
const LOSS: &str = "-i eth0 -m statistic --mode random --probability 0.03 -j DROP";

const DELAY: &str = "dev eth0 root netem delay 50ms";
