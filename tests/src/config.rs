//! The shipped static configuration, with only the changes that a test needs: ports, endpoints, the path of the module,
//! and the feature under test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Name of the wasm filter in the shipped configuration.
pub const FILTER_NAME: &str = "prequal";
/// Name of the filter that sends a request to the host in the steering header.
pub const SHIM_NAME: &str = "prequal-shim";

/// The folder of dynamic modules in a [`crate::MinimalRoot`].
pub(crate) const MODULES: &str = "/modules";

/// Name of the serving cluster in the shipped configuration.
const SERVING: &str = "replicas";
/// Name of the only cluster in the shipped configuration for the inbound role.
const REPLICA: &str = "replica";
/// Name of the probe cluster in the shipped configuration.
const PROBING: &str = "replicas-agent";
/// Name of the filter that removes Prequal's headers from clients' requests.
const STRIP_NAME: &str = "prequal-strip";

/// The root of the workspace.
pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent").to_owned()
}

/// The folder of the built agent and module: `$PREQUAL_DIST`, else `target/dist`.
pub fn dist_dir() -> PathBuf {
    std::env::var_os("PREQUAL_DIST").map_or_else(|| target_dir().join("dist"), PathBuf::from)
}

/// The built filter.
pub fn wasm_module() -> PathBuf {
    dist_dir().join("prequal_filter.wasm")
}

/// The filter built to panic on requests with the header `x-crash-prequal`. It stores its shared data under another
/// version, as another release would.
pub fn crash_module() -> PathBuf {
    target_dir().join("dist-test/prequal_filter_crash.wasm")
}

/// Path of Envoy: `$ENVOY`, else the path of the pinned version, which `cargo xtask envoy` fetches.
pub fn envoy_binary() -> PathBuf {
    std::env::var_os("ENVOY").map_or_else(|| target_dir().join("envoy/1.40.0/envoy"), PathBuf::from)
}

/// Whether [`envoy_binary`] loads the native module: version 1.38 or later.
pub fn envoy_loads_native_modules() -> Result<bool> {
    let version = envoy_version()?;
    let minor = version.split("/1.").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    Ok(minor.with_context(|| format!("which version is {version}?"))? >= 38)
}

/// Whether [`envoy_binary`] runs WebAssembly. 1.38.3 was released without V8.
pub fn envoy_runs_wasm() -> Result<bool> {
    Ok(!envoy_version()?.contains("/1.38.3/"))
}

fn envoy_version() -> Result<String> {
    let version = Command::new(envoy_binary()).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&version.stdout).into_owned())
}

/// The folder for caches and outputs of `cargo xtask`. `CARGO_TARGET_DIR` does not move it.
pub fn target_dir() -> PathBuf {
    workspace_root().join("target")
}

/// One of Envoy's own load balancing policies, for the serving cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Policy {
    /// Each host in turn.
    RoundRobin,
    /// The less busy of two hosts drawn at random.
    LeastRequest,
    /// The least busy of all hosts.
    LeastRequestFullScan,
    /// A random host.
    Random,
    /// By weights from the load reports on responses (ORCA). A report takes effect within a second.
    ClientSideWeighted,
}

/// A configuration for [`crate::Envoy`], usually one of those in `envoy-configs/static/`, changed for a test.
#[derive(Clone, Debug)]
pub struct EnvoyConfig {
    root: Value,
    pub(crate) concurrency: u32,
    pub(crate) dynamic_listener: bool,
    pub(crate) eds: Vec<String>,
    pub(crate) log_level: String,
    /// Folder of dynamic modules.
    pub(crate) modules: PathBuf,
    /// Envoy's root folder, if not this machine's.
    pub(crate) root_folder: Option<PathBuf>,
}

impl EnvoyConfig {
    /// The shipped configuration with ports chosen by the system, the built module, and one worker.
    pub fn shipped() -> Result<Self> {
        Self::of_file("envoy.yaml")
    }

    /// The shipped configuration with the native module (`envoy-configs/static/envoy-native.yaml`), with the same
    /// changes.
    pub fn native() -> Result<Self> {
        Self::of_file("envoy-native.yaml")
    }

    /// `native` with the given replicas in both clusters: they get requests and probes.
    pub fn native_for_replicas(addrs: &[SocketAddr]) -> Result<Self> {
        Ok(Self::native()?.endpoints(SERVING, addrs).endpoints(PROBING, addrs))
    }

    /// The shipped configuration of an Envoy beside one replica (`envoy-configs/static/envoy-inbound.yaml`), with the
    /// same changes, in front of `replica`.
    pub fn inbound(replica: SocketAddr) -> Result<Self> {
        Ok(Self::of_file("envoy-inbound.yaml")?.endpoints(REPLICA, &[replica]))
    }

    fn of_file(name: &str) -> Result<Self> {
        let path = workspace_root().join("envoy-configs/static").join(name);
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self::read(&text)
            .with_context(|| format!("{} is not YAML", path.display()))?
            .edit(|config| {
                config.root["admin"]["address"]["socket_address"]["port_value"] = json!(0);
                config.listener_mut()["address"]["socket_address"]["port_value"] = json!(0);
            })
            .module(&wasm_module()))
    }

    /// [`Self::from_root`] for YAML.
    pub fn read(text: &str) -> Result<Self> {
        Ok(Self::from_root(yaml_serde::from_str(text)?))
    }

    /// Any configuration, with one worker. Clients connect to its first listener.
    pub fn from_root(root: Value) -> Self {
        Self {
            root,
            concurrency: 1,
            dynamic_listener: false,
            eds: Vec::new(),
            log_level: "warning".into(),
            modules: dist_dir(),
            root_folder: None,
        }
    }

    /// `shipped` with the given replicas in both clusters: they get requests and probes.
    pub fn for_replicas(addrs: &[SocketAddr]) -> Result<Self> {
        Ok(Self::shipped()?.endpoints(SERVING, addrs).endpoints(PROBING, addrs))
    }

    /// Sets the endpoints of `cluster`, all with equal weight in one locality.
    #[must_use]
    pub fn endpoints(self, cluster: &str, addrs: &[SocketAddr]) -> Self {
        self.localities(
            cluster,
            json!([{ "lb_endpoints": addrs.iter().map(lb_endpoint).collect::<Vec<_>>() }]),
        )
    }

    /// Sets the endpoints of `cluster` to the given list `endpoints` of a `ClusterLoadAssignment`.
    #[must_use]
    pub fn localities(self, cluster: &str, endpoints: Value) -> Self {
        let cluster = cluster.to_owned();
        self.edit(|config| config.cluster_mut(&cluster)["load_assignment"]["endpoints"] = endpoints)
    }

    /// Number of Envoy's workers (`--concurrency`).
    #[must_use]
    pub fn concurrency(mut self, workers: u32) -> Self {
        self.concurrency = workers;
        self
    }

    /// Level of Envoy's log (`--log-level`, and `--component-log-level` if there is a colon).
    #[must_use]
    pub fn log_level(mut self, level: &str) -> Self {
        self.log_level = level.into();
        self
    }

    /// Envoy's own policy for the serving cluster.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        let (name, mut settings) = match policy {
            Policy::RoundRobin => ("round_robin.v3.RoundRobin", json!({})),
            Policy::LeastRequest => ("least_request.v3.LeastRequest", json!({})),
            Policy::LeastRequestFullScan => {
                ("least_request.v3.LeastRequest", json!({"selection_method": "FULL_SCAN"}))
            }
            Policy::Random => ("random.v3.Random", json!({})),
            // If the penalty is not set, it is 0, although the documentation says 1.
            Policy::ClientSideWeighted => (
                "client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
                json!({"blackout_period": "1s", "error_utilization_penalty": 1.0}),
            ),
        };
        let package = format!("envoy.extensions.load_balancing_policies.{name}");
        settings["@type"] = json!(format!("type.googleapis.com/{package}"));
        self.edit(|config| {
            let cluster = config.cluster_mut(SERVING);
            remove(cluster, "lb_policy");
            cluster["load_balancing_policy"] = json!({"policies": [
                {"typed_extension_config": {"name": package, "typed_config": settings}}
            ]});
        })
    }

    /// Removes everything that belongs to Prequal: filter, shim, strip, the headers that the routes remove, the probe
    /// cluster. The result is the same Envoy with its own policy, the baseline of every comparison.
    #[must_use]
    pub fn without_prequal(self) -> Self {
        self.edit(|config| {
            for name in [STRIP_NAME, FILTER_NAME, SHIM_NAME] {
                config.remove_filter(name);
            }
            remove(&mut config.http_mut()["route_config"], "request_headers_to_remove");
            let clusters = config.root["static_resources"]["clusters"].as_array_mut();
            clusters.expect("clusters").retain(|cluster| cluster["name"] != PROBING);
        })
    }

    /// Uses the other shim: Envoy's `override_host` policy instead of `stateful_session`. That policy reads the
    /// steering header later, so an upstream filter has to remove the header.
    #[must_use]
    pub fn override_host(self) -> Self {
        self.filter_settings(|settings| settings["shim"] = json!("override_host")).edit(|config| {
            config.remove_filter(SHIM_NAME);
            let policy = config.cluster_mut(PROBING)["load_balancing_policy"].clone();
            let serving = config.cluster_mut(SERVING);
            remove(serving, "lb_policy");
            serving["load_balancing_policy"] = policy;
            remove(&mut config.http_mut()["route_config"], "request_headers_to_remove");
            let package = "type.googleapis.com/envoy.extensions.filters.http";
            config.router_mut()["typed_config"]["upstream_http_filters"] = json!([
                {"name": "prequal-strip-upstream", "typed_config": {
                    "@type": format!("{package}.header_mutation.v3.HeaderMutation"),
                    "mutations": {"request_mutations": [{"remove": "x-prequal-dest"}]},
                }},
                {"name": "envoy.filters.http.upstream_codec", "typed_config": {
                    "@type": format!("{package}.upstream_codec.v3.UpstreamCodec"),
                }},
            ]);
        })
    }

    /// Sets the module that the filter runs.
    #[must_use]
    pub fn module(self, path: &Path) -> Self {
        let path = path.to_string_lossy().into_owned();
        self.edit(|config| {
            if let Some(filter) = config.filter_mut(FILTER_NAME) {
                filter["typed_config"]["config"]["vm_config"]["code"]["local"]["filename"] = json!(path);
            }
        })
    }

    /// Sets the file of the native module, `lib<name>.so`.
    #[must_use]
    pub fn native_module(mut self, path: &Path) -> Self {
        let name =
            path.file_stem().and_then(|name| name.to_str()?.strip_prefix("lib")).expect("lib<name>.so");
        rename_modules(&mut self.root, name);
        self.modules = path.parent().expect("a file in a folder").to_owned();
        self
    }

    /// Runs Envoy with the folder `root` of a [`crate::MinimalRoot`] as its root folder, and with the dynamic modules
    /// there.
    #[must_use]
    pub fn inside(mut self, root: &Path) -> Self {
        self.root_folder = Some(root.to_owned());
        self.modules = MODULES.into();
        self
    }

    /// Changes the filter's own settings (the JSON in its configuration).
    ///
    /// The shipped settings have one entry in `clusters`. To set a value there:
    /// `settings["clusters"][0]["idle_probe_interval_ms"] = json!(0)`.
    #[must_use]
    pub fn filter_settings(self, change: impl FnOnce(&mut Value)) -> Self {
        self.edit(|config| {
            let text = config.filter_text_mut();
            let mut settings =
                serde_json::from_str(text.as_str().expect("a text")).expect("the shipped settings are JSON");
            change(&mut settings);
            *text = json!(settings.to_string());
        })
    }

    /// Replaces the filter's settings with arbitrary text.
    #[must_use]
    pub fn filter_text(self, text: &str) -> Self {
        self.edit(|config| *config.filter_text_mut() = json!(text))
    }

    /// Adds a listener `name` that is otherwise a copy of the current first one.
    #[must_use]
    pub fn add_listener(self, name: &str) -> Self {
        self.edit(|config| {
            let mut copy = config.listener_mut().clone();
            copy["name"] = json!(name);
            copy["address"]["socket_address"]["port_value"] = json!(0);
            config.root["static_resources"]["listeners"].as_array_mut().expect("listeners").push(copy);
        })
    }

    /// Makes Envoy read its listener from a file, for [`crate::Envoy::update_listener`].
    #[must_use]
    pub fn dynamic_listener(mut self) -> Self {
        self.dynamic_listener = true;
        self
    }

    /// Makes Envoy read the endpoints of `clusters` from files (EDS), for
    /// [`crate::Envoy::set_endpoints`].
    #[must_use]
    pub fn eds(mut self, clusters: &[&str]) -> Self {
        self.eds = clusters.iter().map(ToString::to_string).collect();
        self
    }

    /// Makes any other change.
    #[must_use]
    pub fn edit(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The whole configuration.
    pub fn root_mut(&mut self) -> &mut Value {
        &mut self.root
    }

    /// The listener.
    pub fn listener_mut(&mut self) -> &mut Value {
        &mut self.root["static_resources"]["listeners"][0]
    }

    /// The HTTP connection manager.
    pub fn http_mut(&mut self) -> &mut Value {
        &mut self.listener_mut()["filter_chains"][0]["filters"][0]["typed_config"]
    }

    /// The route to the replicas (its `route` object).
    pub fn route_mut(&mut self) -> &mut Value {
        &mut self.routes_mut().last_mut().expect("a route")["route"]
    }

    /// All routes of the only virtual host.
    pub fn routes_mut(&mut self) -> &mut Vec<Value> {
        self.http_mut()["route_config"]["virtual_hosts"][0]["routes"].as_array_mut().expect("routes")
    }

    /// All HTTP filters in order.
    pub fn filters_mut(&mut self) -> &mut Vec<Value> {
        self.http_mut()["http_filters"].as_array_mut().expect("filters")
    }

    /// The HTTP filter `name`.
    pub fn filter_mut(&mut self, name: &str) -> Option<&mut Value> {
        self.filters_mut().iter_mut().find(|filter| filter["name"] == name)
    }

    /// Removes the HTTP filter `name`.
    pub fn remove_filter(&mut self, name: &str) {
        self.filters_mut().retain(|filter| filter["name"] != name);
    }

    /// Puts `filter` before the HTTP filter `name`.
    pub fn insert_before(&mut self, name: &str, filter: Value) {
        let filters = self.filters_mut();
        let at = filters.iter().position(|filter| filter["name"] == name).expect("such a filter");
        filters.insert(at, filter);
    }

    /// The router filter.
    pub fn router_mut(&mut self) -> &mut Value {
        self.filters_mut().last_mut().expect("a router")
    }

    /// The cluster `name`.
    pub fn cluster_mut(&mut self, name: &str) -> &mut Value {
        let clusters = self.root["static_resources"]["clusters"].as_array_mut().expect("clusters");
        clusters.iter_mut().find(|cluster| cluster["name"] == name).expect("such a cluster")
    }

    /// Adds the serving cluster `name` and its probe cluster `<name>-agent`, copies of the shipped ones, and routes
    /// everything under `prefix` there. The filter's settings stay as they are.
    #[must_use]
    pub fn add_cluster(self, name: &str, prefix: &str, addrs: &[SocketAddr]) -> Self {
        let (serving, probing) = (name.to_owned(), format!("{name}-agent"));
        self.edit(|config| {
            for (from, to) in [(SERVING, &serving), (PROBING, &probing)] {
                let mut copy = config.cluster_mut(from).clone();
                copy["name"] = json!(to);
                copy["load_assignment"]["cluster_name"] = json!(to);
                config.root["static_resources"]["clusters"].as_array_mut().expect("clusters").push(copy);
            }
            let mut route = config.routes_mut().last().expect("a route").clone();
            route["match"] = json!({ "prefix": prefix });
            route["route"]["cluster"] = json!(serving);
            let routes = config.routes_mut();
            routes.insert(routes.len() - 1, route);
        })
        .endpoints(name, addrs)
        .endpoints(&format!("{name}-agent"), addrs)
    }

    fn filter_text_mut(&mut self) -> &mut Value {
        let settings = if self.filter_mut(FILTER_NAME).is_some() {
            let filter = self.filter_mut(FILTER_NAME).expect("found above");
            &mut filter["typed_config"]["config"]["configuration"]
        } else {
            // With the native module, the settings are in the policy.
            let policy = &mut self.cluster_mut(SERVING)["load_balancing_policy"]["policies"][0];
            &mut policy["typed_extension_config"]["typed_config"]["lb_policy_config"]
        };
        &mut settings["value"]
    }
}

fn rename_modules(value: &mut Value, name: &str) {
    match value {
        Value::Object(object) => {
            if let Some(module) = object.get_mut("dynamic_module_config") {
                module["name"] = json!(name);
            }
            object.values_mut().for_each(|value| rename_modules(value, name));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| rename_modules(value, name)),
        _ => {}
    }
}

/// One element of `lb_endpoints`.
pub fn lb_endpoint(addr: &SocketAddr) -> Value {
    json!({"endpoint": {"address": {"socket_address": {
        "address": addr.ip().to_string(), "port_value": addr.port()
    }}}})
}

fn remove(object: &mut Value, key: &str) {
    if let Some(object) = object.as_object_mut() {
        object.remove(key);
    }
}
