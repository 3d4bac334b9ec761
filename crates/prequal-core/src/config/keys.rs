//! Every key of the configuration, declared once: where it is allowed, what it needs, the values that it accepts, where
//! its value is stored, and its text in the reference. The parser and the writer use tables that the compiler derives
//! from this one, so that the module for Envoy contains none of the texts. Defaults depend on the profile
//! (`profile.rs`).

use std::ops::RangeInclusive;

use super::setting::{Field, Setting, Values};
use super::{MAX_CLUSTERS, MAX_NAME, MAX_ROUTES, Settings};
use crate::client::members::MAX_MEMBERS;
use crate::client::policies::linear::Linear;
use crate::client::pool::Budget;
use crate::client::pool::{MAX_HISTORY, MAX_POOL};
use crate::client::settings::Rule;
use crate::client::sync_mode::{MAX_ASKED, MAX_DEADLINE_MS};

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name, as written.
    pub name: &'static str,
    /// Where the key is allowed.
    pub scope: Scope,
    /// Whether operators may need this key in ordinary use: at most 20 keys of the outbound role (a test counts them),
    /// and all keys of the inbound role. The others are for rules other than the default and for experiments.
    pub everyday: bool,
    /// Another key, and the value that it must have; otherwise this key is refused. `orca` = `text` stands for every
    /// format, and `mode` = `sync` is also met by `route_modes`.
    pub needs: Option<(&'static str, &'static str)>,
    /// Unit of the number or size; empty for other values.
    pub unit: &'static str,
    /// Accepted values.
    pub values: Values,
    /// What applies if the key is left out, in words; `None`: the value that [`Self::default_under`] returns.
    pub absent: Option<&'static str>,
    /// Effect of the key, in one line.
    pub meaning: &'static str,
    /// Section of the paper, or other origin.
    pub source: &'static str,
    /// Whether the key has an effect only with rules that use probes.
    pub(super) with_probes: bool,
    /// Where the value is stored.
    pub(super) field: Field,
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

impl Key {
    const fn new(scope: Scope, name: &'static str, unit: &'static str, values: Values) -> Self {
        Self {
            name,
            scope,
            everyday: true,
            needs: None,
            unit,
            values,
            absent: None,
            meaning: "",
            source: "",
            with_probes: false,
            field: Field::Special,
        }
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

    const fn with_probes(self) -> Self {
        Self { with_probes: true, ..self }
    }

    const fn at(self, field: Field) -> Self {
        Self { field, ..self }
    }
}

const fn both(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key::new(Scope::Both, name, unit, values).from("this project")
}

/// A key for other rules and for experiments.
const fn advanced(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key { everyday: false, ..both(name, unit, values) }
}

const fn inbound(name: &'static str, unit: &'static str, values: Values) -> Key {
    Key::new(Scope::Inbound, name, unit, values)
}

use Field::{F64, Flag, Hot, MsAsUs, U32, U64, Usize};
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
    .from("this project, `docs/design/adr/0008-predicted-latency.md`")
    .means("rule that chooses the best replica; see [below](#rules)"),
    both("mode", "", OneOf(&["async", "sync"]))
        .from("§4")
        .means("`async`: a request is placed at once from the pool; `sync`: it waits for its own probes"),
    both("route_modes", "routes", Many(0, MAX_ROUTES))
        .absent("none")
        .means("`{\"route name\": \"async\" or \"sync\"}`: mode of individual routes, by their names in Envoy"),
    both("sync_d", "probes", Whole(2, MAX_ASKED as u32))
        .at(Usize(|s| Some(&mut s.choice.sync.d)))
        .needs("mode", "sync")
        .from("§4: 3 to 5")
        .means("number of replicas probed per request"),
    both("sync_deadline_ms", "ms", Whole(1, MAX_DEADLINE_MS))
        .at(U32(|s| Some(&mut s.choice.sync.deadline_ms)))
        .needs("mode", "sync")
        .from("§4")
        .means("maximum time that a request waits for its probes; Envoy's timers are off by up to 4 ms"),
    both(
        "hint",
        "",
        Form("`{\"header\": NAME}`, `{\"path_segment\": N}` (1 to 64, `/1/2/3`), both together (hashed as one), `\"none\"`"),
    )
    .needs("mode", "sync")
    .absent("none")
    .from("§4")
        .means(
            "part of the request; probes carry its hash, so that a replica can report that it has the data cached. Two of \
             the probed replicas (one if `sync_d` is 2) are the homes of the hash and are preferred; see [below](#hints)",
        ),
    both("max_age_ms", "ms", Whole(10, 60_000))
        .at(U32(|s| Some(&mut s.pool.max_age_ms)))
        .with_probes()
        .from("§4: 1000")
        .means(
            "age at which a report is dropped. Where requests are rare and `budget` is `adaptive`, a report is kept for \
             the time in which four requests per replica arrive, but for at most ten times this age",
        ),
    both("target_age_ms", "ms", Whole(1, 60_000))
        .at(U32(target_age_ms))
        .with_probes()
        .needs("budget", "adaptive")
        .means(
            "target for the median age of the reports; requests send probes while the reports are older, or while every \
             replica with a report is saturated and others have none",
        ),
    both("max_probes_per_query", "per request", Number(0.0, 16.0))
        .at(F64(max_probes_per_query))
        .with_probes()
        .needs("budget", "adaptive")
        .means(
            "maximum number of probes per request, on average, including discovery probes. The part of this allowance that \
             requests do not use is kept for pauses and new replicas, up to 32 probes",
        ),
    both("verified_probes", "", Bool)
        .at(Flag(|s| Some(&mut s.pool.verified_probes)))
        .with_probes()
        .from("this project, `docs/design/adr/0004-placement.md`")
        .means(
            "set it to `true` if the probe cluster writes the address that answered into `x-prequal-host`, as in the \
             shipped configuration",
        ),
    both("ejection_failure_share", "share", NumberOrOff(0.02, 1.0))
        .at(F64(|s| Some(&mut s.pool.ejection.failure_share)))
        .with_probes()
        .from("this project, `docs/design/adr/0005-ejection.md`")
        .means(
            "a replica is ejected, and gets only trials, if the share of its recent requests that failed exceeds that of the \
             other replicas by at least this much",
        ),
    both("ejection_wait_factor", "factor", NumberOrOff(1.0, 100.0))
        .at(F64(|s| Some(&mut s.pool.ejection.wait_factor)))
        .with_probes()
        .from("this project, `docs/design/adr/0005-ejection.md`")
        .means(
            "a replica counts as unresponsive when a request has waited for 50 ms plus the longer of two times: this \
             many times the 90th percentile of latency, or the 99th percentile itself",
        ),
    both("slow_start_ms", "ms", Whole(0, 3_600_000))
        .at(U32(|s| Some(&mut s.pool.slow_start_ms)))
        .with_probes()
        .from("this project, `docs/design/adr/0005-ejection.md`")
        .means(
            "age at which a new replica gets its full share of requests; until then, the share grows with its age, unless at \
             least half of the replicas are new; 0: at once",
        ),
    advanced("pool_size", "entries", Whole(2, MAX_POOL as u32))
        .at(Usize(|s| Some(&mut s.pool.pool_size)))
        .with_probes()
        .from("§4")
        .means(
            "maximum number of reports in the pool, one per replica. `scale_removal` allows more in a fleet of up to 64 \
             replicas, and while all reports are fresh",
        ),
    advanced("q_rif", "quantile", Number(0.0, 1.0))
        .at(F64(|s| Some(&mut s.pool.q_rif)))
        .needs("rule", "hcl")
        .from("§4")
        .means(
            "θ is this quantile of the reported RIFs, the numbers of requests in flight (`profile: paper`: only of those in \
             probe replies); the value of `paper` is 2^(−1/4)",
        ),
    advanced("hot", "", OneOf(&["gt", "ge"]))
        .at(Hot(|s| Some(&mut s.pool.hot)))
        .needs("rule", "hcl")
        .from("§4, §5.3")
        .means("a replica is hot if RIF > θ (`gt`, suitable for fleets of up to 24) or if RIF ≥ θ (`ge`)"),
    advanced("rif_history", "samples", Whole(8, MAX_HISTORY as u32))
        .at(Usize(|s| Some(&mut s.pool.rif_history)))
        .with_probes()
        .from("§4")
        .means("number of reported RIFs from which θ is computed"),
    advanced("delta", "", Number(0.001, 1000.0))
        .at(F64(|s| Some(&mut s.pool.delta)))
        .with_probes()
        .from("eq. (1)")
        .means("δ: the higher it is, the more often a report is used"),
    advanced("r_remove", "per request", Number(0.0, 16.0))
        .at(F64(|s| Some(&mut s.pool.r_remove)))
        .with_probes()
        .from("§4")
        .means("number of reports removed from the pool per request: in turn, the worst report and the oldest one"),
    advanced("scale_removal", "", Bool)
        .at(Flag(|s| Some(&mut s.pool.scale_removal)))
        .with_probes()
        .means(
            "keep a report of every replica in a fleet of up to 64, and up to 128 reports of a larger one while all are \
             younger than twice `target_age_ms` and half of `max_age_ms`; remove reports only from a full pool, and no more \
             than arrive",
        ),
    advanced("reuse_cap", "uses", Whole(1, 10_000))
        .at(U32(|s| Some(&mut s.pool.reuse_cap)))
        .with_probes()
        .means(
            "maximum number of uses of one report. It is also the number of uses where the paper's equation (1) has no value, \
             for example if all n replicas fit into a pool of m reports (n ≤ m)",
        ),
    advanced("budget", "", OneOf(&["adaptive", "fixed"]))
        .with_probes()
        .means("number of probes: as many as the age of the reports requires, or a fixed number per request"),
    advanced("r_probe", "per request", Number(0.0, 16.0))
        .at(F64(r_probe))
        .with_probes()
        .needs("budget", "fixed")
        .from("§4")
        .means("number of probes per request, on average; discovery probes are sent in addition"),
    advanced("discovery_interval_ms", "ms", Whole(10, 60_000))
        .at(U32(|s| Some(&mut s.pool.discovery_interval_ms)))
        .means(
            "interval between discovery probes. They name no replica; the probe cluster's policy chooses one, which is \
             how the filter finds new replicas. In a fleet of n replicas the interval is at most 4 s / n, but at most \
             105 discovery probes a second are sent. It is shorter while replicas come into use, and longer where \
             requests are so few that `max_probes_per_query` does not allow as many probes",
        ),
    advanced("idle_probe_interval_ms", "ms", Whole(0, 3_600_000))
        .at(U32(|s| Some(&mut s.probe.idle_interval_ms)))
        .with_probes()
        .from("§4")
        .means(
            "time without requests after which one worker sends `pool_size` probes (fewer in a smaller fleet). This repeats \
             until the saved allowance is used up, after at most 24 probes; 0: never",
        ),
    advanced("probe_timeout_ms", "ms", Whole(1, 10_000))
        .at(U64(|s| Some(&mut s.probe.timeout_ms)))
        .with_probes()
        .from("§3: 3 or 1")
        .means("time after which an unanswered probe counts as failed"),
    advanced("piggyback", "", Bool)
        .at(Flag(|s| Some(&mut s.probe.piggyback)))
        .with_probes()
        .means(
            "use the reports on responses as well as those of probes. Then a request does not probe the replica that it goes \
             to. When replicas to probe are drawn at random, 15 of 16 draws skip those that reported less than a tenth of \
             `max_age_ms` ago",
        ),
    advanced("burst_guard", "", Bool)
        .at(Flag(|s| Some(&mut s.pool.burst_guard)))
        .with_probes()
        .from("this project, `docs/design/adr/0003-small-fleets-and-budget.md`")
        .means(
            "Envoy's own policy places the requests that would pile up on a few replicas while the fleet is being discovered, \
             or while requests arrive faster than reports",
        ),
    advanced("lambda", "", Number(0.0, 1.0))
        .at(F64(|s| linear(s).map(|linear| &mut linear.lambda)))
        .needs("rule", "linear")
        .from("appendix A")
        .means("weight of RIF: 0 means latency alone, 1 means RIF alone"),
    advanced("alpha_ms", "ms per request in flight", Number(0.001, 60_000.0))
        .at(MsAsUs(|s| linear(s).map(|linear| &mut linear.alpha_us)))
        .needs("rule", "linear")
        .from("appendix A")
        .means("latency equivalent of one request in flight; set it to your median latency at RIF 1 (default: the paper's)"),
    advanced("c3_clients", "clients", Whole(1, 100_000))
        .at(U32(c3_clients))
        .needs("rule", "c3")
        .from("C3")
        .means("total number of workers of all Envoys that send to these replicas"),
    advanced("max_in_flight", "requests", Whole(1, 100_000))
        .at(U32(max_in_flight))
        .needs("rule", "zuul_choice_of_two")
        .from("Zuul")
        .means("number of requests in flight at which a replica counts as full"),
    advanced("orca_utilization", "", Form("`\"off\"`, `\"utilization\"`, `\"named_metrics.NAME\"`"))
        .needs("rule", "zuul_choice_of_two")
        .from("this project, [orca.md](../guide/orca.md)")
        .means(
            "which utilisation to read from ORCA reports on responses: `application_utilization`, else `cpu_utilization`; or \
             the metric of the given name",
        ),
    advanced("healthy_panic_threshold", "%", Whole(0, 100))
        .at(U32(|s| Some(&mut s.choice.healthy_panic_threshold)))
        .from("Envoy")
        .means(
            "only in the [native module](../guide/native.md), which cannot read the cluster's setting of this name: share of healthy \
             and degraded hosts below which all hosts of a priority are used; 0: never",
        ),
    advanced("locality_weighted", "", Bool)
        .at(Flag(|s| Some(&mut s.choice.locality_weighted)))
        .from("Envoy")
        .means(
            "only in the [native module](../guide/native.md): share requests by the weights of localities, as \
             `locality_weighted_lb_config` does in Envoy's policies",
        ),
    inbound("endpoint", "", Form("`ip:port`, port 1 to 65 535"))
        .absent("the address that the client connected to")
        .means(
            "address in reports, exactly as in the clients' clusters. Setting it saves a property read per request",
        ),
    inbound("serving_port", "port", Whole(1, u16::MAX as u32))
        .absent("the port that the client connected to")
        .means(
            "reports name the address that the client connected to, with this port. Other ports are for probes; any other \
             request there passes and is not counted. Not allowed together with `endpoint`",
        ),
    inbound("report", "", OneOf(&["always", "probe_only"]))
        .means("where reports are sent: on responses and probe replies, or on probe replies alone"),
    inbound("orca", "", OneOf(&["off", "text", "json", "binary"]))
        .means("responses also report load [in ORCA format](../guide/orca.md), whatever the value of `report`"),
    inbound("orca_for", "", OneOf(&["all", "grpc", "http"]))
        .needs("orca", "text")
        .means("responses with an ORCA report: all, gRPC only, or all except gRPC"),
    inbound("orca_limit", "requests", Whole(1, 1_000_000))
        .needs("orca", "text")
        .absent("the estimated knee")
        .means(
            "number of requests that the replica is meant to serve at once. While no knee is known, ORCA's utilisation is \
             relative to this number. While the knee may be higher than estimated, it is relative to the larger of the two",
        ),
    inbound("orca_window_ms", "ms", Whole(100, 600_000))
        .needs("orca", "text")
        .means("time constant of the moving averages of ORCA's rates and utilisation"),
];

fn target_age_ms(settings: &mut Settings) -> Option<&mut u32> {
    match &mut settings.pool.budget {
        Budget::Adaptive { target_age_ms, .. } => Some(target_age_ms),
        Budget::Fixed { .. } => None,
    }
}

fn max_probes_per_query(settings: &mut Settings) -> Option<&mut f64> {
    match &mut settings.pool.budget {
        Budget::Adaptive { max_probes_per_query, .. } => Some(max_probes_per_query),
        Budget::Fixed { .. } => None,
    }
}

fn r_probe(settings: &mut Settings) -> Option<&mut f64> {
    match &mut settings.pool.budget {
        Budget::Fixed { r_probe } => Some(r_probe),
        Budget::Adaptive { .. } => None,
    }
}

fn linear(settings: &mut Settings) -> Option<&mut Linear> {
    match &mut settings.choice.rule {
        Rule::Linear(linear) => Some(linear),
        _ => None,
    }
}

fn c3_clients(settings: &mut Settings) -> Option<&mut u32> {
    match &mut settings.choice.rule {
        Rule::C3 { clients } => Some(clients),
        _ => None,
    }
}

fn max_in_flight(settings: &mut Settings) -> Option<&mut u32> {
    match &mut settings.choice.rule {
        Rule::Zuul { max_in_flight } => Some(max_in_flight),
        _ => None,
    }
}

/// The keys allowed in a cluster or, as defaults, at the top level.
pub(super) static SETTINGS: [Setting; count(Scope::Both)] = settings();
/// Names of the keys that are allowed only in a cluster.
pub(super) static IN_CLUSTER: [&str; count(Scope::Cluster)] = names(Scope::Cluster);
/// Names of the keys that are allowed only at the top level of the outbound role.
pub(super) static OUTBOUND: [&str; count(Scope::Outbound)] = names(Scope::Outbound);
/// Names of the keys of the inbound role.
pub(super) static INBOUND: [&str; count(Scope::Inbound)] = names(Scope::Inbound);

const fn count(scope: Scope) -> usize {
    let (mut keys, mut count) = (KEYS, 0);
    while let Some((key, rest)) = keys.split_first() {
        count += (key.scope as u8 == scope as u8) as usize;
        keys = rest;
    }
    count
}

#[expect(clippy::indexing_slicing, reason = "in constants the compiler checks the index")]
const fn names<const N: usize>(scope: Scope) -> [&'static str; N] {
    let (mut keys, mut names, mut next) = (KEYS, [""; N], 0);
    while let Some((key, rest)) = keys.split_first() {
        if key.scope as u8 == scope as u8 {
            names[next] = key.name;
            next += 1;
        }
        keys = rest;
    }
    names
}

#[expect(clippy::indexing_slicing, reason = "in constants the compiler checks the index")]
const fn settings<const N: usize>() -> [Setting; N] {
    let (mut keys, mut settings, mut next) = (KEYS, [Setting::NONE; N], 0);
    while let Some((key, rest)) = keys.split_first() {
        if key.scope as u8 == Scope::Both as u8 {
            settings[next] = Setting::new(key.name, key.values, key.needs, key.with_probes, key.field);
            next += 1;
        }
        keys = rest;
    }
    settings
}

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
