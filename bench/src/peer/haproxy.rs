//! HAProxy: one process with threads, which share the counts of connections.

use std::process::Command;

use anyhow::Result;

use super::{MOST_CONNECTIONS, REPLY_LIMIT_S, Setup, installed};

/// A command that runs HAProxy with this argument of `balance`.
pub(super) fn command(setup: &Setup, balance: &str) -> Result<Command> {
    let servers: String = (0..)
        .zip(setup.replicas)
        .map(|(number, replica)| format!("  server replica-{number} {replica}\n"))
        .collect();
    // `idle-pool.shared off`: as with Envoy, each thread has connections of its own. Two threads that take over each
    // other's connections use two to three times the CPU time.
    // `http-reuse always`: as with Envoy, the first request of a client's connection may use an open connection too.
    // `pool-purge-delay 1h`: by default, half of the idle connections would be closed every 5 s.
    let config = format!(
        "global\n  nbthread {}\n  maxconn {MOST_CONNECTIONS}\n  tune.idle-pool.shared off\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n  timeout server {REPLY_LIMIT_S}s\n  retries 0\n  \
         http-reuse always\n  default-server pool-purge-delay 1h\n\
         frontend clients\n  bind {}\n  default_backend replicas\n\
         backend replicas\n  balance {balance}\n{servers}",
        setup.workers, setup.listen,
    );
    let file = setup.write("haproxy.cfg", &config)?;
    let mut command = installed("haproxy")?;
    command.arg("-db").arg("-f").arg(file);
    Ok(command)
}
