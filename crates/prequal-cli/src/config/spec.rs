//! The user's request, and the plan that results if all of it is valid.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::Result;
use prequal_core::client::settings::Shim;
use prequal_core::config::{Config, FilterConfig};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Args;

/// Content of the short YAML file, or of the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Spec {
    listen: Option<String>,
    admin: Option<String>,
    native: bool,
    detour: bool,
    wasm: Option<String>,
    shim: Option<String>,
    tls: Option<Tls>,
    /// Settings of Prequal for all clusters.
    settings: Map<String, Value>,
    probe_port: Option<u64>,
    clusters: Vec<ClusterSpec>,
}

/// TLS of the listener, as PEM files.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tls {
    pub(super) certificate: String,
    pub(super) key: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterSpec {
    name: String,
    hosts: Vec<String>,
    prefix: Option<String>,
    probe_port: Option<u64>,
    #[serde(default)]
    settings: Map<String, Value>,
}

/// Validated values that `render` puts in place of the shipped values. `None` keeps the shipped value.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) listen: Option<SocketAddr>,
    pub(super) admin: Option<SocketAddr>,
    /// Whether the native module balances instead of the filter.
    pub(super) native: bool,
    /// Whether the native module's filter names hosts that are not healthy.
    pub(super) detour: bool,
    pub(super) wasm: Option<String>,
    pub(super) shim: Shim,
    pub(super) tls: Option<Tls>,
    /// Settings of Prequal, accepted by its own parser.
    pub(super) settings: Value,
    /// The clusters; there is at least one.
    pub(super) clusters: Vec<PlannedCluster>,
}

#[derive(Debug)]
pub(super) struct PlannedCluster {
    pub(super) name: String,
    pub(super) prefix: String,
    pub(super) hosts: Vec<HostPort>,
    /// Whether DNS resolves the replicas.
    pub(super) dns: bool,
    /// Cluster for probes; `None` if the cluster's `rule` needs no probes.
    pub(super) probe: Option<Probe>,
}

#[derive(Debug)]
pub(super) struct Probe {
    pub(super) cluster: String,
    /// Port of the probes; `None` if it is the same as for requests.
    pub(super) port: Option<u16>,
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct HostPort {
    /// IP address or name.
    pub(super) address: String,
    pub(super) port: u16,
}

impl Spec {
    /// Reads a file.
    ///
    /// # Errors
    /// If a field has a wrong type or an unknown name; only the first such field is reported.
    pub(super) fn read(root: Value) -> Result<Self> {
        Ok(serde_json::from_value(root)?)
    }

    /// Applies the flags, which override the file.
    pub(super) fn take_flags(&mut self, args: &Args, mistakes: &mut Vec<String>) {
        for (mine, flag) in [
            (&mut self.listen, &args.listen),
            (&mut self.admin, &args.admin),
            (&mut self.wasm, &args.wasm),
            (&mut self.shim, &args.shim),
        ] {
            if flag.is_some() {
                mine.clone_from(flag);
            }
        }
        self.native |= args.native;
        self.detour |= args.detour;
        self.probe_port = args.probe_port.or(self.probe_port);
        if let (Some(certificate), Some(key)) = (args.tls_cert.clone(), args.tls_key.clone()) {
            self.tls = Some(Tls { certificate, key });
        }
        for (key, flag) in [("profile", &args.profile), ("mode", &args.mode)] {
            if let Some(value) = flag {
                self.settings.insert(key.into(), json!(value));
            }
        }
        if let Some(text) = &args.hint {
            match hint(text) {
                Some(hint) => drop(self.settings.insert("hint".into(), hint)),
                None => {
                    mistakes.push(format!("--hint must be `header:NAME` or `path_segment:N`, got `{text}`"))
                }
            }
        }
        for flag in &args.clusters {
            let Some((name, hosts)) = flag.split_once('=') else {
                mistakes.push(format!("--cluster must be `NAME=HOST:PORT[,HOST:PORT...]`, got `{flag}`"));
                continue;
            };
            self.clusters.push(ClusterSpec {
                name: name.into(),
                hosts: hosts.split(',').map(Into::into).collect(),
                prefix: None,
                probe_port: None,
                settings: Map::new(),
            });
        }
        for flag in &args.routes {
            let found = flag.rsplit_once('=').and_then(|(prefix, name)| {
                Some((prefix, self.clusters.iter_mut().find(|cluster| cluster.name == name)?))
            });
            match found {
                Some((prefix, cluster)) => cluster.prefix = Some(prefix.into()),
                None => mistakes
                    .push(format!("--route must be `PREFIX=CLUSTER` with one of the clusters, got `{flag}`")),
            }
        }
    }

    /// Returns the plan to render. Without mistakes, there is always a plan.
    pub(super) fn plan(self, mistakes: &mut Vec<String>) -> Option<Plan> {
        let listen = self.listen.as_deref().and_then(|text| socket("listen", text, mistakes));
        let admin = self.admin.as_deref().and_then(|text| socket("admin", text, mistakes));
        if listen.is_some_and(|listen| listen.port() != 0) && listen == admin {
            mistakes.push("`listen` and `admin` are the same address".into());
        }
        if self.wasm.as_deref() == Some("") {
            mistakes.push("`wasm` must name a file".into());
        }
        for (key, value) in [("wasm", &self.wasm), ("shim", &self.shim)] {
            if self.native && value.is_some() {
                mistakes.push(format!("`{key}` belongs to the filter, and has no meaning with `native`"));
            }
        }
        if self.detour && !self.native {
            mistakes
                .push("`detour` belongs to the native module, and has no meaning without `native`".into());
        }
        if self.clusters.is_empty() {
            mistakes
                .push("no cluster: give `--cluster NAME=HOST:PORT[,...]`, or `clusters` in the file".into());
        }
        let (mut names, mut prefixes) = (BTreeSet::new(), BTreeSet::new());
        let mut clusters = Vec::new();
        let mut entries = Vec::new();
        for (index, spec) in self.clusters.into_iter().enumerate() {
            let path = format!("clusters[{index}]");
            let probe_cluster = format!("{}-agent", spec.name);
            for name in [&spec.name, &probe_cluster] {
                if !names.insert(name.clone()) {
                    mistakes.push(format!("`{path}.name` would create a second cluster `{name}`"));
                }
            }
            let prefix = spec.prefix.or_else(|| (index == 0).then(|| "/".into()));
            match &prefix {
                None => mistakes.push(format!("`{path}` needs a `prefix` (--route): no route leads to it")),
                Some(prefix) => {
                    if !prefix.starts_with('/') {
                        mistakes.push(format!("`{path}.prefix` must begin with /, got `{prefix}`"));
                    }
                    if !prefixes.insert(prefix.clone()) {
                        mistakes.push(format!("`{path}.prefix` `{prefix}` leads to two clusters"));
                    }
                }
            }
            // A missing prefix is a mistake, and with a mistake nothing is rendered. So the value does not matter.
            let prefix = prefix.unwrap_or_default();
            let port = spec.probe_port.or(self.probe_port).and_then(|port| probe_port(&path, port, mistakes));
            let hosts = hosts(&path, &spec.hosts, mistakes);
            let dns = hosts.iter().any(|host| host.address.parse::<IpAddr>().is_err());
            let mut entry = spec.settings;
            for (key, value) in [("cluster", &spec.name), ("probe_cluster", &probe_cluster)] {
                if entry.insert(key.into(), json!(value)).is_some() {
                    mistakes.push(format!(
                        "`{path}.settings.{key}` must not be set: it is generated from `name`"
                    ));
                }
            }
            entries.push(entry);
            let probe = Some(Probe { cluster: probe_cluster, port });
            clusters.push(PlannedCluster { name: spec.name, prefix, hosts, dns, probe });
        }
        let mut settings = self.settings;
        if !self.native {
            settings.insert("shim".into(), json!(self.shim.as_deref().unwrap_or("stateful_session")));
        }
        if settings.insert("clusters".into(), json!(entries)).is_some() {
            mistakes.push("`settings.clusters` must not be set: it is generated from `clusters`".into());
        }
        if entries.is_empty() {
            return None;
        }
        let shim = accept(self.native, &mut settings, &mut clusters, mistakes)?;
        let Self { native, detour, wasm, tls, .. } = self;
        let settings = Value::Object(settings);
        Some(Plan { listen, admin, native, detour, wasm, shim, tls, settings, clusters })
    }
}

/// Validates the settings with Prequal's own parser, and sets `verified_probes` for every cluster that is probed, so
/// that Envoy verifies which host answers.
fn accept(
    native: bool,
    settings: &mut Map<String, Value>,
    clusters: &mut [PlannedCluster],
    mistakes: &mut Vec<String>,
) -> Option<Shim> {
    let text = Value::Object(settings.clone()).to_string();
    let parsed = if native {
        FilterConfig::parse_native(&text).map_err(|errors| errors.0.iter().map(ToString::to_string).collect())
    } else {
        filter_settings(&text)
    };
    let parsed = match parsed {
        Ok(parsed) => parsed,
        Err(errors) => {
            mistakes.extend(errors.iter().map(|error| format!("settings: {error}")));
            return None;
        }
    };
    let entries = settings.get_mut("clusters").and_then(Value::as_array_mut)?;
    for ((entry, cluster), checked) in entries.iter_mut().zip(clusters).zip(&parsed.clusters) {
        if checked.choice.rule.is_probe_free() {
            cluster.probe = None;
        } else if let Some(entry) = entry.as_object_mut() {
            entry.insert("verified_probes".into(), json!(true));
        }
    }
    Some(parsed.shim)
}

fn filter_settings(text: &str) -> Result<FilterConfig, Vec<String>> {
    match Config::parse(text) {
        Ok(Config::Outbound(parsed)) => Ok(parsed),
        Ok(Config::Inbound(_)) => {
            Err(vec!["`role`: for the inbound role copy envoy-configs/static/envoy-inbound.yaml".into()])
        }
        Err(errors) => Err(errors.0.iter().map(ToString::to_string).collect()),
    }
}

fn socket(key: &str, text: &str, mistakes: &mut Vec<String>) -> Option<SocketAddr> {
    let address = text.parse().ok();
    if address.is_none() {
        mistakes.push(format!("`{key}` must be `ip:port`, got `{text}`"));
    }
    address
}

/// Returns the value of the setting `hint` that the flag specifies.
fn hint(text: &str) -> Option<Value> {
    match text.split_once(':')? {
        ("header", name) => Some(json!({ "header": name })),
        ("path_segment", number) => Some(json!({ "path_segment": number.parse::<u32>().ok()? })),
        _ => None,
    }
}

fn probe_port(path: &str, port: u64, mistakes: &mut Vec<String>) -> Option<u16> {
    let usable = u16::try_from(port).ok().filter(|port| *port > 0);
    if usable.is_none() {
        mistakes.push(format!("`{path}.probe_port` must be a port from 1 to 65535, got {port}"));
    }
    usable
}

fn hosts(path: &str, texts: &[String], mistakes: &mut Vec<String>) -> Vec<HostPort> {
    let mut hosts = BTreeSet::new();
    if texts.is_empty() {
        mistakes.push(format!("`{path}.hosts` is empty"));
    }
    for text in texts {
        match host(text) {
            Some(host) if !hosts.insert(host.clone()) => {
                mistakes.push(format!("`{path}.hosts` names `{text}` twice"));
            }
            Some(_) => {}
            None => mistakes.push(format!("`{path}.hosts` must be `ip:port` or `name:port`, got `{text}`")),
        }
    }
    hosts.into_iter().collect()
}

fn host(text: &str) -> Option<HostPort> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        let usable = address.port() > 0 && !address.ip().is_unspecified();
        return usable.then(|| HostPort { address: address.ip().to_string(), port: address.port() });
    }
    let (name, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_name = (1..=253).contains(&name.len())
        && name.chars().all(plain)
        // A name of digits and dots alone is a mistyped IP address.
        && name.chars().any(|c| c.is_ascii_alphabetic());
    is_name.then(|| HostPort { address: name.to_owned(), port })
}
