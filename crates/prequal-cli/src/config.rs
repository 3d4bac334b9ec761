//! `prequal config`: renders a complete Envoy configuration from a few flags or a short YAML file.
//!
//! The output is one of the two shipped configurations (one with the filter, one with the native module) with
//! addresses, clusters and settings replaced. These two files are the only description of what an Envoy with Prequal
//! needs.

mod render;
mod spec;

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use crate::read;
use spec::Spec;

/// Render a complete Envoy configuration with Prequal
///
/// Prints the shipped configuration (envoy-configs/static/envoy.yaml, or envoy-native.yaml with --native) with
/// addresses, clusters and settings replaced. If there are mistakes, reports all of them at once and renders nothing.
#[derive(clap::Args)]
#[command(after_long_help = "\
Examples:
  prequal config --cluster api=10.0.0.1:8080,10.0.0.2:8080 > envoy.yaml
  prequal config --cluster api=api.internal:8080 --probe-port 9000 --listen 0.0.0.0:80
  prequal config --cluster chat=10.0.0.1:8080,10.0.0.2:8080 --profile inference --hint header:x-session-id
  prequal config --native --detour --cluster api=10.0.0.1:8080,10.0.0.2:8080 > envoy.yaml
  prequal config --cluster web=10.0.0.1:80,10.0.0.2:80 --cluster api=10.0.1.1:80,10.0.1.2:80 --route /api=api

The same from a file (prequal config spec.yaml), which has more options; flags override it:
  listen: 0.0.0.0:80
  settings: {profile: small}          # Prequal's, for all clusters (docs/reference/configuration.md)
  tls: {certificate: cert.pem, key: key.pem}
  clusters:
  - {name: web, hosts: ['10.0.0.1:80', '10.0.0.2:80']}
  - name: api
    hosts: ['api.internal:8080']
    prefix: /api
    probe_port: 9000
    settings: {mode: sync, hint: {header: x-session-id}}")]
pub(crate) struct Args {
    /// YAML or JSON file with the same content as the flags, and more; `-` for standard input
    spec: Option<PathBuf>,
    /// Name of a cluster and addresses of its agents: `ip:port` each, or `name:port`, which DNS resolves to all
    /// replicas
    #[arg(long = "cluster", value_name = "NAME=HOST:PORT[,...]")]
    clusters: Vec<String>,
    /// Path prefix that is routed to a cluster [default: all paths go to the first cluster]
    #[arg(long = "route", value_name = "PREFIX=CLUSTER")]
    routes: Vec<String>,
    /// Address that clients connect to [default: 127.0.0.1:10000]
    #[arg(long, value_name = "IP:PORT")]
    listen: Option<String>,
    /// Address of Envoy's admin interface, which can stop Envoy: keep it on loopback [default: 127.0.0.1:9901]
    #[arg(long, value_name = "IP:PORT")]
    admin: Option<String>,
    /// Use the native module instead of the WebAssembly filter (docs/guide/native.md)
    #[arg(long, conflicts_with_all = ["wasm", "shim"])]
    native: bool,
    /// With the native module: use degraded hosts, and in panic mode all hosts, as Envoy's own policies do
    #[arg(long)]
    detour: bool,
    /// Path of the filter's module, as Envoy will find it [default: target/dist/prequal_filter.wasm]
    #[arg(long, value_name = "FILE")]
    wasm: Option<String>,
    /// Part of Envoy that carries out the choice: `stateful_session` or `override_host` [default: stateful_session]
    #[arg(long)]
    shim: Option<String>,
    /// Settings profile: `default`, `paper`, `small` or `inference`
    #[arg(long)]
    profile: Option<String>,
    /// Probing mode: `async` or `sync`
    #[arg(long)]
    mode: Option<String>,
    /// Where synchronous requests carry a hint: `header:NAME` or `path_segment:N`
    #[arg(long, value_name = "WHERE")]
    hint: Option<String>,
    /// Port on which agents answer probes [default: the same as for requests]
    #[arg(long, value_name = "PORT")]
    probe_port: Option<u64>,
    /// Certificate chain for TLS on the listener, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<String>,
    /// Private key for TLS on the listener, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<String>,
}

/// All mistakes found; there is at least one.
#[derive(Debug)]
struct Mistakes(Vec<String>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing is rendered:")?;
        self.0.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
    }
}

impl std::error::Error for Mistakes {}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let file = match &args.spec {
        Some(path) => {
            let root = read::file(path)?;
            Spec::read(root).with_context(|| format!("{}", path.display()))?
        }
        None => Spec::default(),
    };
    let text = rendered(file, args)?;
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn rendered(mut spec: Spec, args: &Args) -> Result<String, Mistakes> {
    let mut mistakes = Vec::new();
    spec.take_flags(args, &mut mistakes);
    match spec.plan(&mut mistakes) {
        Some(plan) if mistakes.is_empty() => Ok(render::render(&plan)),
        _ => Err(Mistakes(mistakes)),
    }
}

#[cfg(test)]
mod tests;
