//! Every key of the configuration: the values it accepts, and its text in the reference. The parser takes its ranges
//! from here at compile time, so that none of the texts gets into the module.

use std::ops::RangeInclusive;

use super::{MAX_CLUSTERS, MAX_NAME, MAX_ROUTES};
use crate::client::members::MAX_MEMBERS;
use crate::client::pool::{MAX_HISTORY, MAX_POOL};
use crate::client::sync_mode::{MAX_ASKED, MAX_DEADLINE_MS};

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name, as written.
    pub name: &'static str,
    /// Where the key is allowed.
    pub scope: Scope,
    /// Whether operators may want it, which applies to at most 20 keys. The others are for other rules and for experiments.
    pub everyday: bool,
    /// Another key, and the value that it must have; otherwise this key is refused.
    pub needs: Option<(&'static str, &'static str)>,
    /// Unit of the number or size; empty for other values.
    pub unit: &'static str,
    /// Accepted values.
    pub values: Values,
    /// Meaning of leaving the key out, in words; `None`: the value that [`super::Config::written`] then has.
    pub absent: Option<&'static str>,
    /// Effect of the key, in one line.
    pub meaning: &'static str,
    /// Section of the paper, or origin of the idea.
    pub source: &'static str,
}

/// Where a key is allowed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// At the top level, in both roles.
    Top,
    /// At the top level of the outbound role.
    Outbound,
    /// In a cluster.
    Cluster,
    /// In a cluster, or at the top level as a default for all.
    Both,
    /// At the top level of the inbound role.
    Inbound,
}

/// Values that a key accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// A whole number, from the lowest to the highest.
    Whole(u32, u32),
    /// A number, from the lowest to the highest.
    Number(f64, f64),
    /// A number as above, or 0 for off.
    NumberOrOff(f64, f64),
    /// `true` or `false`.
    Bool,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// A list, an object or a text, from the smallest to the largest size.
    Many(usize, usize),
    /// A form described in words.
    Form(&'static str),
}

impl Key {
    const fn new(scope: Scope, name: &'static str, unit: &'static str, values: Values) -> Self {
        Self { name, scope, everyday: true, needs: None, unit, values, absent: None, meaning: "", source: "" }
    }

    const fn needs(self, key: &'static str, value: &'static str) -> Self {
        Self { needs: Some((key, value)), ..self }
    }

    const fn absent(self, means: &'static str) -> Self {
        Self { absent: Some(means), ..self }
    }

    const fn means(self, meaning: &'static str) -> Self {
        Self { meaning, ..self }
    }

    const fn from(self, source: &'static str) -> Self {
        Self { source, ..self }
    }
}

const fn both(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key::new(Scope::Both, name, unit, values).from("ours")
}

/// A key for other rules and for experiments.
const fn seldom(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key { everyday: false, ..both(name, unit, values) }
}

const fn inbound(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key::new(Scope::Inbound, name, unit, values)
}

use Values::{Bool, Form, Many, Number, NumberOrOff, OneOf, Whole};

/// All keys, in the order of the reference.
pub const KEYS: &[Key] = &[
    Key::new(Scope::Top, "role", "", OneOf(&["outbound", "inbound"]))
        .means("where the filter runs: in the clients' Envoy, or [beside a replica](#inbound-role)"),
    Key::new(Scope::Outbound, "clusters", "clusters", Many(1, MAX_CLUSTERS))
        .absent("required")
        .means("clusters that Prequal balances; it ignores all others"),
    Key::new(Scope::Outbound, "shim", "", OneOf(&["stateful_session", "override_host"]))
        .means("built-in extension of Envoy that sends each request to the chosen replica"),
    both("profile", "", OneOf(&["default", "paper", "small", "inference"]))
        .absent("`default`")
        .means("set of defaults; see [below](#profiles)"),
    Key::new(Scope::Cluster, "cluster", "bytes", Many(1, MAX_NAME))
        .absent("required")
        .means("name of the serving cluster in Envoy"),
    Key::new(Scope::Cluster, "probe_cluster", "bytes", Many(1, MAX_NAME))
        .absent("required")
        .means("name of the cluster in Envoy that probes are sent through; it has the same endpoints as `cluster`"),
    Key::new(Scope::Cluster, "endpoints", "`ip:port`", Many(0, MAX_MEMBERS))
        .absent("learned")
        .means("fixed list of replicas, for static fleets and tests"),
    both(
        "rule",
        "",
        OneOf(&["predicted", "hcl", "rif_only", "latency_only", "linear", "c3", "peak_ewma", "zuul_choice_of_two"]),
    )
    .from("ours, `docs/adr/0008-predicted-latency.md`")
    .means("rule that chooses the best replica; see [below](#rules)"),
    both("mode", "", OneOf(&["async", "sync"]))
        .from("§4")
        .means("`async`: a request is placed at once from the pool; `sync`: it waits for its own probes"),
    both("route_modes", "routes", Many(0, MAX_ROUTES))
        .absent("none")
        .means("`{\"route name\": \"async\" or \"sync\"}`: mode of individual routes, by their names in Envoy"),
    both("sync_d", "probes", Whole(2, MAX_ASKED as u32))
        .needs("mode", "sync")
        .from("§4: 3 to 5")
        .means("number of replicas probed per request"),
    both("sync_deadline_ms", "ms", Whole(1, MAX_DEADLINE_MS))
        .needs("mode", "sync")
        .from("§4")
        .means("maximum time that a request waits for its probes; Envoy's timers add up to 4 ms"),
    both(
        "hint",
        "",
        Form("`{\"header\": NAME}`, `{\"path_segment\": N}` (1 to 64, `/1/2/3`), both together (hashed as one), `\"none\"`"),
    )
    .needs("mode", "sync")
    .absent("none")
    .from("§4")
    .means("part of the request whose hash its probes carry, so that a replica can report that it has the data cached"),
    both("max_age_ms", "ms", Whole(10, 60_000)).from("§4: 1000").means("age at which a report is dropped"),
    both("target_age_ms", "ms", Whole(1, 60_000))
        .needs("budget", "adaptive")
        .means("requests send probes while fewer than half of the reports are younger than this"),
    both("max_probes_per_query", "per request", Number(0.0, 16.0))
        .needs("budget", "adaptive")
        .means(
            "maximum number of probes per request, on average, including discovery; up to 32 unused probes are saved for \
             pauses and new replicas",
        ),
    both("verified_probes", "", Bool).from("ours, `docs/adr/0004-placement.md`").means(
        "the probe cluster writes the address that answered into `x-prequal-host`; `true` in the shipped configuration",
    ),
    both("ejection_failure_share", "share", NumberOrOff(0.02, 1.0)).from("ours, `docs/adr/0005-ejection.md`").means(
        "a replica gets only trials if the share of its recent requests that failed exceeds that of the other replicas by \
         at least this much",
    ),
    both("ejection_wait_factor", "factor", NumberOrOff(1.0, 100.0)).from("ours, `docs/adr/0005-ejection.md`").means(
        "a replica counts as unresponsive when a request has waited this many times the 90th percentile of latency (or the \
         99th percentile, if that is longer) plus 50 ms",
    ),
    both("slow_start_ms", "ms", Whole(0, 3_600_000)).from("ours, `docs/adr/0005-ejection.md`").means(
        "age at which a new replica gets its full share of requests; until then, the share grows with its age; 0: at once",
    ),
    seldom("pool_size", "entries", Whole(2, MAX_POOL as u32))
        .from("§4")
        .means(
            "maximum number of reports in the pool, one per replica, if the fleet is too large to be kept whole \
             (`scale_removal`) and requests are too rare to keep more reports fresh",
        ),
    seldom("q_rif", "quantile", Number(0.0, 1.0))
        .needs("rule", "hcl")
        .from("§4")
        .means(
            "θ is this quantile of the reported RIFs (`profile: paper`: only of those in probe replies); the value of `paper` \
             is 2^(−1/4)",
        ),
    seldom("hot", "", OneOf(&["gt", "ge"]))
        .needs("rule", "hcl")
        .from("§4, §5.3")
        .means("a replica is hot if RIF > θ (`gt`, suitable for fleets of up to 24) or if RIF ≥ θ (`ge`)"),
    seldom("rif_history", "samples", Whole(8, MAX_HISTORY as u32))
        .from("§4")
        .means("number of reported RIFs from which θ is computed"),
    seldom("delta", "", Number(0.001, 1000.0))
        .from("eq. (1)")
        .means("δ: the higher it is, the more often a report is used"),
    seldom("r_remove", "per request", Number(0.0, 16.0))
        .from("§4")
        .means("number of reports removed from the pool per request; the worst and the oldest alternate"),
    seldom("scale_removal", "", Bool).means(
        "keep a fleet of up to 64 replicas whole, and up to 128 reports of a larger one while all are younger than twice \
         `target_age_ms` and half of `max_age_ms`; remove reports only from a full pool, and no more than arrive",
    ),
    seldom("reuse_cap", "uses", Whole(1, 10_000))
        .means("maximum number of uses of one report; equation (1) is undefined for n ≤ m"),
    seldom("budget", "", OneOf(&["adaptive", "fixed"]))
        .means("number of probes: as many as the age of the reports requires, or a fixed number per request"),
    seldom("r_probe", "per request", Number(0.0, 16.0))
        .needs("budget", "fixed")
        .from("§4")
        .means("number of probes per request, on average; discovery probes are sent in addition"),
    seldom("discovery_interval_ms", "ms", Whole(10, 60_000)).means(
        "interval between discovery probes, which Envoy's own policy places and which find replicas; shorter above 20 \
         replicas and while replicas come into use, longer where requests are too few to pay for them",
    ),
    seldom("idle_probe_interval_ms", "ms", Whole(0, 3_600_000))
        .from("§4")
        .means(
            "time without requests after which one worker sends a pool's worth of probes; repeated until the saved probes (at \
             most 24) are used up; 0: never",
        ),
    seldom("probe_timeout_ms", "ms", Whole(1, 10_000))
        .from("§3: 3 or 1")
        .means("time after which an unanswered probe counts as failed"),
    seldom("piggyback", "", Bool).means(
        "use the reports on responses as well as those of probes; probes then skip replicas that reported within the last \
         tenth of `max_age_ms`",
    ),
    seldom("burst_guard", "", Bool).from("ours, `docs/adr/0003-small-fleets-and-budget.md`").means(
        "Envoy's own policy places the requests that would pile up on a few replicas while the fleet is being discovered, \
         or while requests arrive faster than reports",
    ),
    seldom("lambda", "", Number(0.0, 1.0))
        .needs("rule", "linear")
        .from("appendix A")
        .means("weight of RIF: 0 means latency alone, 1 means RIF alone"),
    seldom("alpha_ms", "ms per request in flight", Number(0.001, 60_000.0))
        .needs("rule", "linear")
        .from("appendix A")
        .means("latency equivalent of one request in flight; set it to your median latency at RIF 1 (default: the paper's)"),
    seldom("c3_clients", "clients", Whole(1, 100_000))
        .needs("rule", "c3")
        .from("C3")
        .means("total number of workers of all Envoys that send to these replicas"),
    seldom("max_in_flight", "requests", Whole(1, 100_000))
        .needs("rule", "zuul_choice_of_two")
        .from("Zuul")
        .means("number of requests in flight at which a replica counts as full"),
    seldom("orca_utilization", "", Form("`\"off\"`, `\"utilization\"`, `\"named_metrics.NAME\"`"))
        .needs("rule", "zuul_choice_of_two")
        .from("ours, [orca.md](orca.md)")
        .means(
            "which utilisation to read from ORCA reports on responses: `application_utilization`, else `cpu_utilization`; or \
             the metric of the given name",
        ),
    inbound("endpoint", "", Form("`ip:port`, port 1 to 65 535")).absent("the address that the client connected to").means(
        "address in reports, exactly as in the clients' clusters. Setting it saves a property read per request",
    ),
    inbound("serving_port", "port", Whole(1, u16::MAX as u32)).absent("the port that the client connected to").means(
        "reports name the address that the client connected to, with this port. Other ports are for probes; any other \
         request there passes and is not counted. Not allowed together with `endpoint`",
    ),
    inbound("report", "", OneOf(&["always", "probe_only"]))
        .means("where reports are sent: on responses and probe replies, or on probe replies alone"),
    inbound("orca", "", OneOf(&["off", "text", "json", "binary"]))
        .means("responses also report load [in ORCA format](orca.md), whatever the value of `report`"),
    inbound("orca_for", "", OneOf(&["all", "grpc", "http"]))
        .needs("orca", "text")
        .means("responses with an ORCA report: all, gRPC only, or all except gRPC"),
    inbound("orca_limit", "requests", Whole(1, 1_000_000)).needs("orca", "text").absent("the knee so far").means(
        "number of requests that the replica is meant to serve at once; ORCA's utilisation is relative to it while no knee \
         is known, or while the knee may be higher",
    ),
    inbound("orca_window_ms", "ms", Whole(100, 600_000))
        .needs("orca", "text")
        .means("time constant of the fading means of ORCA's rates and utilisation"),
];

/// Keys that were removed or renamed, each with its replacement.
pub(super) const REMOVED: &[(&str, &str)] = &[
    ("latency_band", "rule \"predicted\" needs no band"),
    ("cold_limit", "rule \"predicted\" needs no limit"),
    ("q_rif_small", "rule \"predicted\" needs no quantile; with \"rule\": \"hcl\" set \"q_rif\""),
    ("learning_rif", "set \"burst_guard\" to true or false"),
    ("overflow_rif", "set \"burst_guard\" to true or false"),
    ("error_aversion", "its new name is \"ejection_failure_share\""),
    ("breaker", "its new name is \"ejection_wait_factor\""),
    ("ramp_ms", "its new name is \"slow_start_ms\""),
];

/// Returns the key of this name. Only for constants, where an unknown key fails to compile.
#[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
const fn find(keys: &[Key], name: &str) -> Key {
    match keys.split_first() {
        Some((key, _)) if same(key.name.as_bytes(), name.as_bytes()) => *key,
        Some((_, rest)) => find(rest, name),
        None => panic!("no such key"),
    }
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    match (one.split_first(), other.split_first()) {
        (Some((first, one)), Some((second, other))) => *first == *second && same(one, other),
        (None, None) => true,
        _ => false,
    }
}

/// Returns the name and range of a whole number. Only for constants.
#[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
pub(super) const fn whole(name: &str) -> (&'static str, RangeInclusive<u32>) {
    let key = find(KEYS, name);
    match key.values {
        Whole(low, high) => (key.name, low..=high),
        _ => panic!("not a whole number"),
    }
}

/// Returns the name and range of a number, without 0 for off. Only for constants.
#[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
pub(super) const fn number(name: &str) -> (&'static str, RangeInclusive<f64>) {
    let key = find(KEYS, name);
    match key.values {
        Number(low, high) | NumberOrOff(low, high) => (key.name, low..=high),
        _ => panic!("not a number"),
    }
}
