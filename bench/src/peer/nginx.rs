//! nginx: worker processes, which share the counts of connections in the upstream's `zone`.

use std::process::Command;

use anyhow::Result;

use super::{MOST_CONNECTIONS, REPLY_LIMIT_S, Setup, installed};

/// A command that runs nginx with this directive as the upstream's policy.
pub(super) fn command(setup: &Setup, policy: &str) -> Result<Command> {
    let path = |name: &str| setup.folder.join(name).display().to_string();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {};\n", path(kind)))
        .concat();
    // By default, nginx leaves a replica out for 10 s after a failure. The Envoys here do not: they have no outlier
    // detection.
    let servers: String =
        setup.replicas.iter().map(|replica| format!("server {replica} max_fails=0;\n")).collect();
    // `worker_connections` counts a client's connection and that to the replica, hence the factor of two below.
    // `reuseport` spreads the clients evenly over the workers, as Envoy does by default.
    let config = format!(
        "daemon off;\nworker_processes {workers};\npid {pid};\nevents {{ worker_connections {connections}; }}\n\
         http {{\naccess_log off;\n{temporary}keepalive_requests 1000000000;\nkeepalive_timeout 1h;\n\
         upstream replicas {{\nzone replicas 1m;\n{policy};\n{servers}keepalive 1024;\nkeepalive_requests 1000000000;\n\
         keepalive_timeout 1h;\n}}\n\
         server {{\nlisten {listen} reuseport;\nlocation / {{\nproxy_pass http://replicas;\nproxy_http_version 1.1;\n\
         proxy_set_header Connection \"\";\nproxy_set_header Host $http_host;\nproxy_next_upstream off;\n\
         proxy_connect_timeout 5s;\nproxy_read_timeout {REPLY_LIMIT_S}s;\n}}\n}}\n}}\n",
        workers = setup.workers,
        pid = path("pid"),
        connections = 2 * MOST_CONNECTIONS,
        listen = setup.listen,
    );
    let file = setup.write("nginx.conf", &config)?;
    let mut command = installed("nginx")?;
    command.arg("-c").arg(file).args(["-e", "stderr"]);
    Ok(command)
}
