//! Every key of the configuration: what is accepted, and what the reference says of it. The parser takes its ranges from
//! here, at compile time, so that none of the texts gets into the module.

use std::ops::RangeInclusive;

use super::{MAX_CLUSTERS, MAX_NAME, MAX_ROUTES};
use crate::members::MAX_MEMBERS;
use crate::pool::{MAX_HISTORY, MAX_POOL};
use crate::sync::{MAX_ASKED, MAX_DEADLINE_MS};

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// As it is written.
    pub name: &'static str,
    /// Where it stands.
    pub place: Place,
    /// Operators may want it: at most 20 are. The others are for other rules and for experiments.
    pub everyday: bool,
    /// Another key and the value of it without which this one is refused.
    pub needs: Option<(&'static str, &'static str)>,
    /// What a number counts; empty for what is no number.
    pub unit: &'static str,
    /// What is accepted.
    pub values: Values,
    /// What leaving it out means, in words; `None`: the value that [`super::Config::written`] has then.
    pub absent: Option<&'static str>,
    /// What it does, in a line.
    pub meaning: &'static str,
    /// Section of the paper, or whose idea it is.
    pub source: &'static str,
}

/// Where a key stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
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

/// What a key accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// A whole number, lowest and highest.
    Whole(u32, u32),
    /// A number, lowest and highest.
    Number(f64, f64),
    /// The same, or 0 for off.
    NumberOrOff(f64, f64),
    /// `true` or `false`.
    Bool,
    /// One of these.
    OneOf(&'static [&'static str]),
    /// A list, an object or a text of so many.
    Many(usize, usize),
    /// What the words say.
    Form(&'static str),
}

impl Key {
    const fn new(place: Place, name: &'static str, unit: &'static str, values: Values) -> Self {
        Self { name, place, everyday: true, needs: None, unit, values, absent: None, meaning: "", source: "" }
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
    Key::new(Place::Both, name, unit, values).from("ours")
}

/// For other rules and for experiments.
const fn seldom(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key { everyday: false, ..both(name, unit, values) }
}

const fn inbound(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key::new(Place::Inbound, name, unit, values)
}

use Values::{Bool, Form, Many, Number, NumberOrOff, OneOf, Whole};

/// All keys, in the order of the reference.
pub const KEYS: &[Key] = &[
    Key::new(Place::Top, "role", "", OneOf(&["outbound", "inbound"]))
        .means("where the filter stands: at the clients' Envoy, or [beside a replica](#inbound-role)"),
    Key::new(Place::Outbound, "clusters", "clusters", Many(1, MAX_CLUSTERS))
        .absent("required")
        .means("clusters that Prequal balances; it leaves others alone"),
    Key::new(Place::Outbound, "shim", "", OneOf(&["stateful_session", "override_host"]))
        .means("stock part of Envoy that sends a request to the chosen replica"),
    both("profile", "", OneOf(&["default", "paper", "small", "inference"]))
        .absent("`default`")
        .means("a set of defaults: [below](#profiles)"),
    Key::new(Place::Cluster, "cluster", "bytes", Many(1, MAX_NAME))
        .absent("required")
        .means("name of the serving cluster in Envoy"),
    Key::new(Place::Cluster, "probe_cluster", "bytes", Many(1, MAX_NAME))
        .absent("required")
        .means("name of the cluster with the same endpoints that probes are sent through"),
    Key::new(Place::Cluster, "endpoints", "`ip:port`", Many(0, MAX_MEMBERS))
        .absent("learned")
        .means("replicas named by hand, for static fleets and tests"),
    both(
        "rule",
        "",
        OneOf(&["predicted", "hcl", "rif_only", "latency_only", "linear", "c3", "peak_ewma", "zuul_choice_of_two"]),
    )
    .from("ours, `docs/adr/0008-predicted-latency.md`")
    .means("how the best replica is found: [below](#rules)"),
    both("mode", "", OneOf(&["async", "sync"]))
        .from("§4")
        .means("a request is placed at once from the pool, or waits for probes of its own"),
    both("route_modes", "routes", Many(0, MAX_ROUTES))
        .absent("none")
        .means("`{\"route name\": \"async\" or \"sync\"}`: the mode of single routes, by their names in Envoy"),
    both("sync_d", "probes", Whole(2, MAX_ASKED as u32))
        .needs("mode", "sync")
        .from("§4: 3 to 5")
        .means("number of replicas probed per request"),
    both("sync_deadline_ms", "ms", Whole(1, MAX_DEADLINE_MS))
        .needs("mode", "sync")
        .from("§4")
        .means("longest wait of a request for its probes; Envoy's timers add up to 4 ms"),
    both(
        "hint",
        "",
        Form("`{\"header\": NAME}`, `{\"path_segment\": N}` (1 to 64, `/1/2/3`), both together (hashed as one), `\"none\"`"),
    )
    .needs("mode", "sync")
    .absent("none")
    .from("§4")
    .means("part of the request whose hash its probes carry, so that a replica can say that it has it in its cache"),
    both("max_age_ms", "ms", Whole(10, 60_000)).from("§4: 1000").means("age at which a report is dropped"),
    both("target_age_ms", "ms", Whole(1, 60_000))
        .needs("budget", "adaptive")
        .means("requests send probes while less than half of the reports are younger than this"),
    both("max_probes_per_query", "per request", Number(0.0, 16.0))
        .needs("budget", "adaptive")
        .means(
            "most probes that a request sends, on average, discovery included; up to 32 that are not needed are saved for \
             pauses and new replicas",
        ),
    both("verified_probes", "", Bool).from("ours, `docs/adr/0004-placement.md`").means(
        "the probe cluster writes who answered into `x-prequal-host`; true in the shipped configuration",
    ),
    both("ejection_failure_share", "share", NumberOrOff(0.02, 1.0)).from("ours, `docs/adr/0005-ejection.md`").means(
        "a replica that fails this share of its recent requests, beyond the share that the others fail, gets only trials",
    ),
    both("ejection_wait_factor", "factor", NumberOrOff(1.0, 100.0)).from("ours, the same").means(
        "a replica counts as unresponsive when a request has waited this many times the 90th percentile of latency, \
         or its 99th if that is longer, and 50 ms",
    ),
    both("slow_start_ms", "ms", Whole(0, 3_600_000)).from("ours, the same").means(
        "age at which a new replica takes its full share; before, the share grows with its age; 0: at once",
    ),
    seldom("pool_size", "entries", Whole(2, MAX_POOL as u32))
        .from("§4")
        .means("maximum number of reports in the pool, one per replica, if the fleet is too large to be kept whole (`scale_removal`)"),
    seldom("q_rif", "quantile", Number(0.0, 1.0))
        .needs("rule", "hcl")
        .from("§4")
        .means(
            "θ is this quantile of the RIFs reported, with `profile: paper` of those on replies to probes alone; \
             `paper`: 2^(−1/4)",
        ),
    seldom("hot", "", OneOf(&["gt", "ge"]))
        .needs("rule", "hcl")
        .from("§4, §5.3")
        .means("a replica is hot if RIF > θ (`gt`, which suits fleets of up to 24) or if RIF ≥ θ (`ge`)"),
    seldom("rif_history", "samples", Whole(8, MAX_HISTORY as u32))
        .from("§4")
        .means("number of reported RIFs that θ is taken from"),
    seldom("delta", "", Number(0.001, 1000.0))
        .from("eq. (1)")
        .means("δ: the higher, the more often a report is used"),
    seldom("r_remove", "per request", Number(0.0, 16.0))
        .from("§4")
        .means("reports that a request removes from the pool, the worst and the oldest by turns"),
    seldom("scale_removal", "", Bool).means(
        "keep a fleet of up to 64 replicas whole; in a larger one remove reports only from a full pool, and no more than arrive",
    ),
    seldom("reuse_cap", "uses", Whole(1, 10_000))
        .means("most uses of one report: equation (1) has no value for n ≤ m"),
    seldom("budget", "", OneOf(&["adaptive", "fixed"]))
        .means("number of probes: as many as the age of the reports asks for, or a fixed number per request"),
    seldom("r_probe", "per request", Number(0.0, 16.0))
        .needs("budget", "fixed")
        .from("§4")
        .means("probes that a request sends, on average; those of discovery are sent besides"),
    seldom("discovery_interval_ms", "ms", Whole(10, 60_000)).means(
        "time between two probes that Envoy's own policy places, which find replicas; shorter above 20 replicas and while \
         replicas come into use, longer where requests are too few to pay for them",
    ),
    seldom("idle_probe_interval_ms", "ms", Whole(0, 3_600_000))
        .from("§4")
        .means(
            "time without requests after which one worker sends a pool's worth of probes; repeated until the saved probes, at \
             most 24, are sent; 0: never",
        ),
    seldom("probe_timeout_ms", "ms", Whole(1, 10_000)).from("§3: 3 or 1").means("time after which a probe has failed"),
    seldom("piggyback", "", Bool).means(
        "reports on responses count, not only those of probes; probes then pass over replicas heard of in the last tenth \
         of `max_age_ms`",
    ),
    seldom("burst_guard", "", Bool).from("ours, `docs/adr/0003-small-fleets-and-budget.md`").means(
        "Envoy's own policy places what would pile up on few replicas: while the fleet is being learned, and while requests \
         come faster than reports",
    ),
    seldom("lambda", "", Number(0.0, 1.0))
        .needs("rule", "linear")
        .from("appendix A")
        .means("weight of RIF: 0 is latency alone, 1 is RIF alone"),
    seldom("alpha_ms", "ms per request in flight", Number(0.001, 60_000.0))
        .needs("rule", "linear")
        .from("appendix A")
        .means("latency that one request in flight is worth: the paper's median latency at RIF 1; take yours"),
    seldom("c3_clients", "clients", Whole(1, 100_000))
        .needs("rule", "c3")
        .from("C3")
        .means("number of workers, of all Envoys that send to these replicas"),
    seldom("max_in_flight", "requests", Whole(1, 100_000))
        .needs("rule", "zuul_choice_of_two")
        .from("Zuul")
        .means("requests in flight at which a replica counts as full"),
    seldom("orca_utilization", "", Form("`\"off\"`, `\"utilization\"`, `\"named_metrics.NAME\"`"))
        .needs("rule", "zuul_choice_of_two")
        .from("ours, [orca.md](orca.md)")
        .means(
            "read what replicas say of their utilisation on responses in the format of ORCA: its `application_utilization`, else \
             `cpu_utilization`, or the metric named so",
        ),
    inbound("endpoint", "", Form("`ip:port`, port 1 to 65 535")).absent("the address that the client connected to").means(
        "address that reports name: exactly what clients' clusters name. Saves a property read per request",
    ),
    inbound("serving_port", "port", Whole(1, u16::MAX as u32)).absent("the same").means(
        "reports name the client's address at this port. What comes in at another port is for probes: other requests there \
         pass and are not counted. Not beside `endpoint`",
    ),
    inbound("report", "", OneOf(&["always", "probe_only"]))
        .means("reports stand on responses and on replies to probes, or on replies to probes alone"),
    inbound("orca", "", OneOf(&["off", "text", "json"]))
        .means("responses carry load [in the format of ORCA](orca.md) too, whatever `report` says"),
    inbound("orca_for", "", OneOf(&["all", "grpc", "http"]))
        .needs("orca", "text")
        .means("on which responses: all, those of gRPC, or all others"),
    inbound("orca_limit", "requests", Whole(1, 1_000_000)).needs("orca", "text").absent("the knee so far").means(
        "how many requests the replica is meant to serve at once: ORCA's utilisation is relative to this while no knee is \
         known, or while it may be higher",
    ),
    inbound("orca_window_ms", "ms", Whole(100, 600_000))
        .needs("orca", "text")
        .means("time constant of ORCA's rates and utilisation, which are fading means"),
];

/// Keys that were removed or renamed, and what replaced each.
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

/// The key of this name. Only for constants: what is no key does not compile there.
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

/// Name and range of a whole number; only for constants.
#[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
pub(super) const fn whole(name: &str) -> (&'static str, RangeInclusive<u32>) {
    let key = find(KEYS, name);
    match key.values {
        Whole(low, high) => (key.name, low..=high),
        _ => panic!("not a whole number"),
    }
}

/// Name and range of a number, 0 for off apart; only for constants.
#[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
pub(super) const fn number(name: &str) -> (&'static str, RangeInclusive<f64>) {
    let key = find(KEYS, name);
    match key.values {
        Number(low, high) | NumberOrOff(low, high) => (key.name, low..=high),
        _ => panic!("not a number"),
    }
}
