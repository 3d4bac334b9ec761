//! The possible mistakes, each with a stable code, its effect on users, and the cure. `docs/reference/prequal.md` has
//! the same table.

/// Severity of a mistake.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Level {
    /// Requests fail, are not balanced, or can be steered by clients.
    Error,
    /// A feature does less than it should.
    Warning,
    /// Worth knowing.
    Hint,
}

impl Level {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Hint => "hint",
        }
    }
}

/// One kind of mistake.
#[derive(Debug, PartialEq)]
pub(crate) struct Code {
    /// Stable name, for scripts.
    pub(crate) name: &'static str,
    pub(crate) level: Level,
    /// Description of the mistake.
    pub(crate) what: &'static str,
    /// Effect that users notice.
    pub(crate) effect: &'static str,
    pub(crate) cure: &'static str,
}

macro_rules! codes {
    ($($id:ident $level:ident $name:literal: $what:literal, $effect:literal, $cure:literal;)*) => {
        $(pub(crate) const $id: &Code =
            &Code { name: $name, level: Level::$level, what: $what, effect: $effect, cure: $cure };)*

        /// All codes, in the order in which a configuration is read.
        #[cfg(test)]
        pub(crate) const ALL: &[&Code] = &[$($id),*];
    };
}

codes! {
    WRONG_TYPE Error "wrong-type": "a field does not have the type that Envoy expects",
        "Envoy refuses the file; nothing else was checked", "see the field in Envoy's API reference";
    MERGE_KEY Error "merge-key": "a YAML merge key (`<<`)",
        "Envoy does not know merge keys and refuses the file; nothing else was checked",
        "write the fields out, or share whole values by anchor and alias";
    FILTER_MISSING Error "filter-missing": "no HTTP connection manager has the filter, and no cluster has the native module's policy",
        "Prequal does nothing", "add the wasm filter to `http_filters`, or the native module: docs/guide/native.md";
    STRIP_MISSING Error "strip-missing": "no `header_mutation` before Prequal's filter removes Prequal's headers",
        "clients can steer requests while the module restarts, and can read the load and addresses of replicas",
        "put `prequal-strip` of the shipped configuration before Prequal's filter";
    STRIP_INCOMPLETE Error "strip-incomplete": "the `header_mutation` filters before Prequal's filter do not remove all of Prequal's headers",
        "clients may steer requests, claim a hint, or read the load or addresses of replicas",
        "remove the listed headers, on requests and on responses";
    STRIP_ORDER Error "strip-order": "a `header_mutation` after Prequal's filter removes headers that are still needed",
        "the choice or the replicas' reports are deleted before they are read", "move it before Prequal's filter";
    SHIM_MISSING Error "shim-missing": "nothing carries out the filter's choice",
        "Envoy's own policy places every request",
        "add `stateful_session` with header x-prequal-dest after the wasm filter; with `shim: override_host`, set that policy on the serving cluster";
    SHIM_ORDER Error "shim-order": "the shim is before the wasm filter",
        "it never sees a choice: Envoy's own policy places every request",
        "use the order strip, wasm, shim, router";
    SHIM_STRICT Error "shim-strict": "`stateful_session` is strict",
        "requests fail with 503 if their replica is unhealthy or gone, instead of going elsewhere", "remove `strict`";
    ROUTER_ORDER Error "router-order": "the last HTTP filter is not the router",
        "Envoy refuses the listener", "move the router to the end";
    ROUTE_CHANGES Warning "route-changes": "a filter that is set to change the route comes after the strip",
        "Prequal chooses a replica of the cluster that the old route names, and Envoy's own policy places these requests",
        "put the filter before `prequal-strip`, which makes Envoy evaluate the route again";
    ROUTE_KEPT Warning "route-kept": "a filter before Prequal's filter is set to keep the route",
        "Envoy evaluates the route again once Prequal has chosen a replica, so headers that the filter changed may select another route",
        "put the filter after Prequal's filters, or ignore this warning if no route depends on these headers";
    UPSTREAM_STRIP Warning "upstream-strip": "nothing removes x-prequal-dest after the host is chosen",
        "replicas see the steering header",
        "remove it with `request_headers_to_remove` of the routes; with `shim: override_host`, with `upstream_http_filters` of the router: a `header_mutation` that removes it, then `upstream_codec`";
    UPSTREAM_CODEC Error "upstream-codec": "the upstream filters do not end with `upstream_codec`",
        "Envoy refuses the configuration", "add `envoy.filters.http.upstream_codec` as the last upstream filter";
    FAIL_CLOSED Error "fail-closed": "`failure_policy` is unset or FAIL_CLOSED",
        "after one crash of the module, every request on that worker is answered with 503 until Envoy restarts",
        "set `failure_policy: FAIL_RELOAD`; in Istio, set `failStrategy` to FAIL_RELOAD for a file, or to FAIL_OPEN for an image";
    FAIL_OPEN Warning "fail-open": "the module fails open",
        "after one crash, that worker runs without Prequal until Envoy restarts",
        "set `failure_policy: FAIL_RELOAD`; in Istio, with the module as a file, set `failStrategy: FAIL_RELOAD`";
    RELOAD_SLOW Warning "reload-slow": "a crashed module is reloaded only after 1 s or more",
        "until then, requests on that worker are answered with 503",
        "set `reload_config: {backoff: {base_interval: 0.1s, max_interval: 5s}}`";
    RUNTIME Error "runtime": "the runtime is not V8",
        "released Envoys have no other runtime: the filter does not load", "set `runtime: envoy.wasm.runtime.v8`";
    MODULE_INLINE Error "module-inline": "the module is in the configuration as text",
        "text cannot hold a binary module: the filter does not load", "use `code: {local: {filename: ...}}`";
    MODULE_MISSING Warning "module-missing": "the module's file is not on this machine",
        "Envoy does not start without it; relative paths start at the directory in which Envoy is started",
        "run `cargo xtask build`, or correct the path";
    MODULE_DENIED Error "module-denied": "Istio's agent could not fetch a module and replaced it with a filter that denies everything",
        "every request is answered with 403",
        "use an image that the proxy can fetch, or the module as a file: docs/guide/istio.md";
    MODULE_FETCHED Warning "module-fetched": "Istio's agent fetches the module, and the plugin does not fail open",
        "while the module cannot be fetched, every request is answered with 403, also on running proxies if `url` changes",
        "set `failStrategy: FAIL_OPEN`, or use the module as a file; for the order of a rollout see docs/guide/istio.md";
    MODULE_MOVES Warning "module-moves": "Istio's agent fetches the module by a name that may later refer to another module",
        "proxies that start later may run a module other than the one tested, or none",
        "use an image by digest (`@sha256:…`), or set `sha256` beside `url`; for the order of a rollout see docs/guide/istio.md";
    SETTINGS Error "settings": "the filter's own settings are invalid",
        "Envoy does not start; on an update the old configuration keeps serving",
        "see docs/reference/configuration.md";
    CLUSTER_ABSENT Error "cluster-absent": "the settings name a serving cluster that does not exist",
        "its requests are not balanced", "use the cluster name that the route uses";
    PROBE_CLUSTER_ABSENT Error "probe-cluster-absent": "the settings name a probe cluster that does not exist",
        "no probes are sent (`result=undispatched`), and replicas are not discovered",
        "add a cluster with the same endpoints, as shipped";
    ROUTES_ELSEWHERE Error "routes-elsewhere": "no route leads to a cluster that the settings name",
        "Prequal does nothing", "name the routes' cluster in the settings";
    ROUTE_UNNAMED Warning "route-unnamed": "a route leads to a cluster that the settings do not name",
        "Envoy's own policy places its requests, or the native module does so without load reports", "add the cluster to the settings, or ignore this warning";
    ROUTE_REMOVES_DEST Error "route-removes-dest": "`request_headers_to_remove` contains x-prequal-dest, and the shim is `override_host`",
        "the header is removed before that policy chooses the host: steering is off",
        "delete it from that list; `upstream_http_filters` of the router keep the header from replicas";
    ROUTE_REMOVES_LOAD Warning "route-removes-load": "`response_headers_to_remove` contains x-prequal-load",
        "reports on responses are lost: only probes report load",
        "delete it from that list; the strip at the front keeps the header from clients";
    PROBE_OPEN Error "probe-open": "clients can reach /prequal/probe",
        "anyone can read the replicas' load",
        "add before the other routes: `match: {path_separated_prefix: /prequal}, direct_response: {status: 404}`";
    PATH_SPELLING Warning "path-spelling": "paths are not normalised",
        "another spelling of /prequal/probe may bypass the route that closes it",
        "set `normalize_path: true` and `merge_slashes: true`";
    RETRY_SAME_HOST Warning "retry-same-host": "retries without `previous_hosts`",
        "a retry may go to the host that has just failed", "set `retry_host_predicate` as shipped";
    NATIVE_PROBER_MISSING Warning "native-prober-missing": "no bootstrap extension loads the native module",
        "no probes are sent, so only responses report load; most of the module's metrics stay at zero",
        "add `bootstrap_extensions` as in envoy-native.yaml, with the policy's `dynamic_module_config`";
    NATIVE_LOG_MISSING Error "native-log-missing": "the router has no `upstream_log` that uses the native module",
        "attempts without a whole response (failed connections, resets, timeouts) do not count against a replica, so it is not ejected",
        "set the router's `upstream_log` as in envoy-native.yaml, with the policy's `dynamic_module_config`";
    NATIVE_FILTER_MISSING Error "native-filter-missing": "the serving cluster has no upstream filter of the native module",
        "reports on responses are not read, and no outcome is attributed to a replica",
        "set the cluster's `http_filters` as in envoy-native.yaml, with the policy's `dynamic_module_config`";
    NATIVE_FILTER_PROBES Warning "native-filter-probes": "the probe cluster has the native module's upstream filter",
        "probes start on Envoy's main thread, where Envoy cannot create the filter: it logs an error for each",
        "remove the filter from the probe cluster";
    NATIVE_DETOUR_MISSING Warning "native-detour-missing": "a cluster with the native module's policy lets filters name hosts that are not healthy, but its listener has no detour filter",
        "degraded hosts get no requests, and panic mode has no effect",
        "add `prequal-detour` as in envoy-native.yaml, or delete `override_host_status`";
    NATIVE_DETOUR_STATUS Error "native-detour-status": "`override_host_status` of the cluster does not allow the hosts that the detour filter names",
        "Envoy ignores those names: hosts that are not healthy get no requests, and panic mode has no effect",
        "set `override_host_status` as in envoy-native.yaml";
    NATIVE_DETOUR_NAME Error "native-detour-name": "a listener's filter of the native module is not called `prequal_detour`, or its module is not the policy's",
        "with another module, the filter does nothing. With another name, it acts as the module's upstream filter. It may then take over the choice made for another request, and the report on that request is lost",
        "set `filter_name: prequal_detour`, and the policy's `dynamic_module_config`";
    NATIVE_DETOUR_ORDER Warning "native-detour-order": "the detour filter comes after `stateful_session`",
        "while hosts are degraded or in panic mode, some requests leave the host of their session",
        "put the detour filter first";
    ORIGINAL_DST Error "original-dst": "the type of the cluster is ORIGINAL_DST (passthrough)",
        "it has no members to choose from, and a request header may direct requests to any address",
        "use STATIC, STRICT_DNS or EDS";
    LOGICAL_DNS Error "logical-dns": "the type of the cluster is LOGICAL_DNS",
        "it has only one host: there is nothing to balance", "use STRICT_DNS";
    AGGREGATE Error "aggregate": "the type of the cluster is aggregate",
        "it has no endpoints of its own, so Envoy ignores Prequal's choices",
        "route to a cluster that has the endpoints; for fail-over, give that cluster several priorities";
    SUBSETS Error "subsets": "the serving cluster divides its endpoints into subsets",
        "Prequal chooses among all endpoints, so requests reach endpoints outside the subset that their route selects (`metadata_match`)",
        "use a cluster of its own for each subset, and name each in the settings";
    PROBE_CLUSTER_SAME Error "probe-cluster-same": "`probe_cluster` is the serving cluster, without `override_host`",
        "probes cannot be addressed: replies come from hosts that were not probed",
        "add a second cluster with the same endpoints, as shipped";
    BREAKERS_SHARED Warning "breakers-shared": "probes share the serving cluster and its circuit breakers",
        "probes take room from requests, and are not sent when a breaker is full, just when they are needed",
        "add a second cluster with the same endpoints, as shipped";
    PROBE_POLICY Error "probe-policy": "the probe cluster does not send probes to the host named in x-prequal-dest",
        "probes cannot be addressed: replies come from hosts that were not probed",
        "use `override_host` with `override_host_sources: [{header: x-prequal-dest}]`";
    PROBE_FALLBACK Hint "probe-fallback": "discovery probes, which name no replica, are not sent round robin",
        "weights are not followed, and replicas are discovered later", "set `round_robin` as `fallback_policy`";
    ENDPOINTS_DIFFER Error "endpoints-differ": "the serving and the probe cluster differ in endpoints, priorities, localities or weights",
        "some replicas are never probed, others are probed in vain, and the learned placement is wrong",
        "use the same endpoints in both (an anchor, or one EDS service name)";
    HEALTH_DIFFERS Warning "health-differs": "there are several priorities, and only the serving cluster checks health",
        "after a failover Envoy refuses most choices: its own policy does part of the balancing",
        "set the same `health_checks` in both clusters";
    LOCALITY_DIFFERS Warning "locality-differs": "only the serving cluster sets `locality_lb_config`",
        "the weights of localities are not learned", "set the same on the probe cluster, for its `fallback_policy`";
    HOST_UNVERIFIED Error "host-unverified": "`verified_probes` is set, but the probe cluster does not overwrite x-prequal-host",
        "all probes are rejected (`result=rejected_no_host`), or a replica can pose as another",
        "set `response_mutations` of the probe cluster as shipped, with OVERWRITE_IF_EXISTS_OR_ADD";
    HOST_UNUSED Warning "host-unused": "the probe cluster writes x-prequal-host, but `verified_probes` is not set",
        "priorities, localities and weights are not followed", "set `\"verified_probes\": true`";
    BREAKERS_NARROW Hint "breakers-narrow": "the serving cluster's circuit breakers are below Envoy's defaults",
        "a steered request that exceeds a limit waits for its host instead of going elsewhere", "set the limits to 1024 or more";
    STATS_TAGS Hint "stats-tags": "`stats_tags` for the filter's labels are missing",
        "labels remain part of the names of metrics", "use `stats_config` as shipped";
    UNSEEN Hint "unseen": "part of the configuration comes by discovery and is not in this file",
        "that part was not checked", "check the output of the admin's /config_dump?include_eds";
}
