//! What can be wrong: each with a stable code, what it does to users, and the cure. `docs/prequal.md` holds the same table.

/// How bad it is.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Level {
    /// Requests fail, go unbalanced, or can be steered by strangers.
    Error,
    /// Something does less than it should.
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
    /// Stable, for scripts.
    pub(crate) name: &'static str,
    pub(crate) level: Level,
    /// What is wrong.
    pub(crate) what: &'static str,
    /// What users notice.
    pub(crate) effect: &'static str,
    pub(crate) cure: &'static str,
}

macro_rules! codes {
    ($($id:ident $level:ident $name:literal: $what:literal, $effect:literal, $cure:literal;)*) => {
        $(pub(crate) const $id: &Code =
            &Code { name: $name, level: Level::$level, what: $what, effect: $effect, cure: $cure };)*

        /// All of them, in the order in which a configuration is read.
        #[cfg(test)]
        pub(crate) const ALL: &[&Code] = &[$($id),*];
    };
}

codes! {
    WRONG_TYPE Error "wrong-type": "a field has another type than Envoy expects",
        "Envoy refuses the file; nothing else was checked", "see the field's reference";
    MERGE_KEY Error "merge-key": "a YAML merge key (`<<`)",
        "Envoy does not know merge keys and refuses the file; nothing else was checked",
        "write the fields out, or share whole values by anchor and alias";
    FILTER_MISSING Error "filter-missing": "no HTTP connection manager has the filter",
        "Prequal does nothing", "put the wasm filter into `http_filters`";
    STRIP_MISSING Error "strip-missing": "no `header_mutation` before the wasm filter removes our headers",
        "clients can steer while the module restarts, and read load and addresses of replicas",
        "put `prequal-strip` of the shipped configuration first";
    STRIP_INCOMPLETE Error "strip-incomplete": "the strip before the wasm filter leaves some of our headers",
        "a client may steer or claim a hint, or learns load or addresses of replicas",
        "remove the headers named, on requests and on responses";
    STRIP_ORDER Error "strip-order": "a strip stands between the wasm filter and those that need its headers",
        "the choice, or the replicas' reports, are deleted before anybody reads them", "move it before the wasm filter";
    SHIM_MISSING Error "shim-missing": "nothing carries out the filter's choice",
        "every request goes by Envoy's own policy",
        "`stateful_session` with header x-prequal-dest after the wasm filter; with `shim: override_host` that policy on the serving cluster";
    SHIM_ORDER Error "shim-order": "the shim stands before the wasm filter",
        "it never sees a choice: every request goes by Envoy's own policy",
        "order: strip, wasm, shim, router";
    SHIM_STRICT Error "shim-strict": "`stateful_session` is strict",
        "requests whose replica is unhealthy or gone fail with 503 instead of going elsewhere", "leave out `strict`";
    ROUTER_ORDER Error "router-order": "the last HTTP filter is not the router",
        "Envoy refuses the listener", "move the router to the end";
    UPSTREAM_STRIP Warning "upstream-strip": "nothing removes x-prequal-dest after the host is chosen",
        "replicas see the steering header",
        "`request_headers_to_remove` of the routes; with `shim: override_host` instead `upstream_http_filters` of the router: a `header_mutation` that removes it, then `upstream_codec`";
    UPSTREAM_CODEC Error "upstream-codec": "upstream filters do not end with `upstream_codec`",
        "Envoy refuses the configuration", "add `envoy.filters.http.upstream_codec` as the last one";
    FAIL_CLOSED Error "fail-closed": "`failure_policy` is unset or FAIL_CLOSED",
        "after one crash of the module every request on that worker is answered 503, until Envoy restarts",
        "`failure_policy: FAIL_RELOAD`; Istio's `failStrategy`: FAIL_RELOAD for a file, FAIL_OPEN for an image";
    FAIL_OPEN Warning "fail-open": "the module fails open",
        "after one crash that worker goes without Prequal until Envoy restarts",
        "`failure_policy: FAIL_RELOAD`; Istio, with the module as a file: `failStrategy: FAIL_RELOAD`";
    RELOAD_SLOW Warning "reload-slow": "a crashed module is started again after 1 s or more",
        "until then requests on that worker are answered 503",
        "`reload_config: {backoff: {base_interval: 0.1s, max_interval: 5s}}`";
    RUNTIME Error "runtime": "another runtime than V8",
        "released Envoys have no other: the filter does not load", "`runtime: envoy.wasm.runtime.v8`";
    MODULE_INLINE Error "module-inline": "the module stands in the configuration as text",
        "a binary cannot: the filter does not load", "`code: {local: {filename: ...}}`";
    MODULE_MISSING Warning "module-missing": "the module's file is not on this machine",
        "without it Envoy does not start; relative names count from where Envoy is started",
        "`cargo xtask build`, or the right path";
    MODULE_DENIED Error "module-denied": "Istio's agent could not fetch a module and put a filter that denies everything in its place",
        "every request is answered 403",
        "an image that the proxy can fetch, or the module as a file: docs/istio.md";
    MODULE_FETCHED Warning "module-fetched": "Istio's agent fetches the module, and the plugin does not fail open",
        "while it cannot be fetched every request is answered 403, on running proxies too if `url` changes",
        "`failStrategy: FAIL_OPEN`, or the module as a file; the order of a rollout: docs/istio.md";
    MODULE_MOVES Warning "module-moves": "Istio's agent fetches the module by a name that may lead to another one",
        "proxies that start later may run another module than the one tested, or none",
        "an image by digest (`@sha256:…`), or `sha256` beside `url`; the order of a rollout: docs/istio.md";
    SETTINGS Error "settings": "the filter's own settings are invalid",
        "Envoy does not start; on an update the old configuration keeps serving",
        "docs/configuration.md of the filter";
    CLUSTER_ABSENT Error "cluster-absent": "the settings name a serving cluster that does not exist",
        "its requests are not balanced", "name the cluster as the route does";
    PROBE_CLUSTER_ABSENT Error "probe-cluster-absent": "the settings name a probe cluster that does not exist",
        "no probe is sent (`result=undispatched`); replicas are not found",
        "add a cluster over the same endpoints, as shipped";
    ROUTES_ELSEWHERE Error "routes-elsewhere": "no route leads to a cluster that the settings name",
        "Prequal does nothing", "name the routes' cluster in the settings";
    ROUTE_UNNAMED Warning "route-unnamed": "a route leads to a cluster that the settings do not name",
        "its requests go by Envoy's own policy", "add the cluster to the settings, or ignore this";
    ROUTE_REMOVES_DEST Error "route-removes-dest": "`request_headers_to_remove` has x-prequal-dest, and the shim is `override_host`",
        "it takes effect before that policy chooses the host: steering is off",
        "remove it there; `upstream_http_filters` of the router keep the header from replicas";
    ROUTE_REMOVES_LOAD Warning "route-removes-load": "`response_headers_to_remove` has x-prequal-load",
        "reports on responses are lost: only probes tell load", "remove it there; the front strip keeps it from clients";
    PROBE_OPEN Error "probe-open": "clients reach /prequal/probe",
        "anybody can read the replicas' load",
        "before other routes: `match: {path_separated_prefix: /prequal}, direct_response: {status: 404}`";
    PATH_SPELLING Warning "path-spelling": "paths are not normalised",
        "another spelling of /prequal/probe may pass the route that closes it",
        "`normalize_path: true` and `merge_slashes: true`";
    RETRY_SAME_HOST Warning "retry-same-host": "retries without `previous_hosts`",
        "a retry may go to the host that just failed", "`retry_host_predicate` as shipped";
    ORIGINAL_DST Error "original-dst": "an ORIGINAL_DST (passthrough) cluster",
        "it has no members to choose from, and may let a header reach any address",
        "STATIC, STRICT_DNS or EDS";
    LOGICAL_DNS Error "logical-dns": "a LOGICAL_DNS cluster",
        "it has one host: there is nothing to balance", "STRICT_DNS";
    PROBE_CLUSTER_SAME Error "probe-cluster-same": "`probe_cluster` is the serving cluster, without `override_host`",
        "probes cannot be addressed: replies come from hosts that were not asked",
        "a second cluster over the same endpoints, as shipped";
    BREAKERS_SHARED Warning "breakers-shared": "probes share the serving cluster and its circuit breakers",
        "probes take the room of requests, and are not sent when it is full, just when they are needed",
        "a second cluster over the same endpoints, as shipped";
    PROBE_POLICY Error "probe-policy": "the probe cluster does not send probes where x-prequal-dest says",
        "probes cannot be addressed: replies come from hosts that were not asked",
        "`override_host` with `override_host_sources: [{header: x-prequal-dest}]`";
    PROBE_FALLBACK Hint "probe-fallback": "unaddressed probes do not go in turn",
        "weights are not followed, and replicas are found later", "`round_robin` as `fallback_policy`";
    ENDPOINTS_DIFFER Error "endpoints-differ": "serving and probe cluster differ in endpoints, priorities, localities or weights",
        "some replicas are never probed, others probed in vain; placement is learned wrongly",
        "the same endpoints in both (an anchor, or one EDS service name)";
    HEALTH_DIFFERS Warning "health-differs": "several priorities, and only the serving cluster checks health",
        "after a fail-over Envoy refuses most choices: balancing is partly its own", "the same `health_checks` in both clusters";
    LOCALITY_DIFFERS Warning "locality-differs": "only the serving cluster sets `locality_lb_config`",
        "the weights of localities are not learned", "the same on the probe cluster, for its `fallback_policy`";
    HOST_UNVERIFIED Error "host-unverified": "`verified_probes` is set, but the probe cluster does not overwrite x-prequal-host",
        "all probes are rejected (`result=rejected_no_host`), or a replica can answer for another",
        "`response_mutations` of the probe cluster as shipped, with OVERWRITE_IF_EXISTS_OR_ADD";
    HOST_UNUSED Warning "host-unused": "the probe cluster writes x-prequal-host, but `verified_probes` is not set",
        "priorities, localities and weights are not followed", "`\"verified_probes\": true`";
    BREAKERS_NARROW Hint "breakers-narrow": "the serving cluster's circuit breakers are below Envoy's defaults",
        "a steered request over a limit waits for its host instead of going elsewhere", "1024 and more";
    STATS_TAGS Hint "stats-tags": "`stats_tags` for the filter's labels are missing",
        "metrics keep their labels in their names", "`stats_config` as shipped";
    UNSEEN Hint "unseen": "part of the configuration comes by discovery and is not here",
        "it was not checked", "check the admin's /config_dump?include_eds";
}
