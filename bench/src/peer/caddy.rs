//! Caddy: one process; Go's scheduler gets as many threads as Envoy has workers.

use std::process::Command;

use anyhow::Result;
use serde_json::json;

use super::{MOST_CONNECTIONS, REPLY_LIMIT_S, Setup, installed};

/// A command that runs Caddy with its policy `least_conn`.
pub(super) fn command(setup: &Setup) -> Result<Command> {
    let upstreams: Vec<_> = setup.replicas.iter().map(|replica| json!({"dial": replica})).collect();
    let proxy = json!({
        "handler": "reverse_proxy",
        "load_balancing": {"selection_policy": {"policy": "least_conn"}},
        "transport": {
            "protocol": "http",
            "versions": ["1.1"],
            "compression": false,
            "response_header_timeout": format!("{REPLY_LIMIT_S}s"),
            "keep_alive": {"idle_timeout": "1h", "max_idle_conns_per_host": MOST_CONNECTIONS},
        },
        "upstreams": upstreams,
    });
    let server = json!({
        "listen": [setup.listen],
        "protocols": ["h1"],
        "automatic_https": {"disable": true},
        "routes": [{"handle": [proxy]}],
    });
    let config = json!({
        "admin": {"disabled": true, "config": {"persist": false}},
        "logging": {"logs": {"default": {"level": "ERROR"}}},
        "apps": {"http": {"servers": {"clients": server}}},
    });
    let file = setup.write("caddy.json", &config.to_string())?;
    let mut command = installed("caddy")?;
    command.arg("run").arg("--config").arg(file);
    command.env("GOMAXPROCS", setup.workers.to_string());
    // Caddy keeps files in its home.
    command.env("HOME", setup.folder).env_remove("XDG_DATA_HOME").env_remove("XDG_CONFIG_HOME");
    Ok(command)
}
