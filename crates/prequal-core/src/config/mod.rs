//! Settings of the filter: turns JSON text into values that are always valid, and reports all errors at once.
//!
//! The keys of a cluster are also allowed at the top level, where they are defaults for all clusters. The inbound role
//! has its own keys.

use serde_json::{Map, Value};

use crate::client::members::MAX_MEMBERS;
use crate::client::pool::{Budget, HotRule, PoolSettings};
use crate::shared::endpoint::Endpoint;

mod choice;
mod errors;
mod fields;
mod inbound;
mod keys;
mod profile;
mod removed;
mod setting;
mod written;

use crate::client::settings::{ChoiceSettings, ClusterConfig, Mode, ProbeSettings, Shim};
use fields::{Fields, kind, shorten};
use keys::{IN_CLUSTER, INBOUND, OUTBOUND, SETTINGS};

pub use errors::{ConfigError, ConfigErrors};
pub use inbound::{InboundConfig, InboundOrca, Serving};
pub use keys::{KEYS, Key, Scope};
pub use profile::Profile;
pub use setting::Values;

/// Maximum length of a configuration, bytes.
pub const MAX_CONFIG: usize = 512 * 1024;
/// Maximum number of clusters in one configuration.
pub const MAX_CLUSTERS: usize = 256;
/// Maximum length of a cluster's name, bytes.
const MAX_NAME: usize = 256;
/// Maximum number of routes with their own mode.
const MAX_ROUTES: usize = 256;

/// Configuration of one filter, by its `role`.
#[derive(Clone, Debug, PartialEq)]
pub enum Config {
    /// At the client's Envoy: picks replicas (default).
    Outbound(FilterConfig),
    /// At the server's Envoy: reports the load of the replica behind it.
    Inbound(InboundConfig),
}

/// Settings of the outbound role.
#[derive(Clone, Debug, PartialEq)]
pub struct FilterConfig {
    /// Part of stock Envoy that honours the choice.
    pub shim: Shim,
    /// One entry per upstream cluster; at least one, with distinct names.
    pub clusters: Vec<ClusterConfig>,
}

const SHIMS: &[(&str, Shim)] =
    &[("stateful_session", Shim::StatefulSession), ("override_host", Shim::OverrideHost)];

/// Values of `budget`, and whether the number of probes per request is fixed.
const BUDGETS: &[(&str, bool)] = &[("adaptive", false), ("fixed", true)];

const HOT: &[(&str, HotRule)] = &[("gt", HotRule::Gt), ("ge", HotRule::Ge)];

impl Config {
    /// Parses and checks the configuration.
    ///
    /// # Errors
    /// All errors found, each with its field and range.
    pub fn parse(text: &str) -> Result<Self, ConfigErrors> {
        let mut errors = ConfigErrors(Vec::new());
        if text.len() > MAX_CONFIG {
            errors
                .push("configuration", format!("has {} bytes; at most {MAX_CONFIG} are allowed", text.len()));
            return Err(errors);
        }
        let root = match serde_json::from_str(text) {
            Ok(Value::Object(root)) => root,
            Ok(other) => {
                errors.push("configuration", format!("must be a JSON object, got {}", kind(&other)));
                return Err(errors);
            }
            Err(error) => {
                errors.push("configuration", format!("is not JSON: {error}"));
                return Err(errors);
            }
        };
        let mut top = Fields { object: &root, path: String::new(), errors: &mut errors };
        if top.choice("role", &[("outbound", false), ("inbound", true)]) == Some(true) {
            InboundConfig::read(&root).map(Self::Inbound)
        } else {
            FilterConfig::read(&root, errors).map(Self::Outbound)
        }
    }
}

impl FilterConfig {
    /// Parses and checks the settings of the native module: those of the outbound role, except those that a
    /// load-balancing policy cannot support, because it has to choose without waiting.
    ///
    /// # Errors
    /// All errors found, each with its field and range.
    pub fn parse_native(text: &str) -> Result<Self, ConfigErrors> {
        let mut errors = ConfigErrors(Vec::new());
        let config = match Config::parse(text)? {
            Config::Outbound(config) => config,
            Config::Inbound(_) => {
                errors.push("role", "must be \"outbound\" in a load-balancing policy".into());
                return Err(errors);
            }
        };
        for (index, ClusterConfig { choice, cluster, probe_cluster, .. }) in
            config.clusters.iter().enumerate()
        {
            if cluster == probe_cluster {
                let problem =
                    "must differ from `cluster`: the native policy cannot send a probe to a given host";
                errors.push(&format!("clusters[{index}].probe_cluster"), problem.into());
            }
            let routed = choice.route_modes.iter().any(|(_, mode)| *mode == Mode::Sync);
            for (key, sync) in [("mode", choice.mode == Mode::Sync), ("route_modes", routed)] {
                if sync {
                    let problem =
                        "\"sync\" needs the WebAssembly filter; the native module has only \"async\"";
                    errors.push(&format!("clusters[{index}].{key}"), problem.into());
                }
            }
        }
        if errors.0.is_empty() { Ok(config) } else { Err(errors) }
    }

    fn read(root: &Map<String, Value>, mut errors: ConfigErrors) -> Result<Self, ConfigErrors> {
        let mut top = Fields { object: root, path: String::new(), errors: &mut errors };
        inbound::refuse_in_outbound(&mut top);
        top.reject_unknown(&[&["role"], &outbound_keys()[..]].concat(), &INBOUND);
        let profile = top.choice("profile", Profile::NAMES).unwrap_or(Profile::Default);
        let shim = top.choice("shim", SHIMS).unwrap_or(Shim::StatefulSession);
        let defaults = top.settings(&profile.settings());
        let of_profile = |profile: Profile| {
            // Errors here have been reported above.
            let mut ignored = ConfigErrors(Vec::new());
            Fields { object: root, path: String::new(), errors: &mut ignored }.settings(&profile.settings())
        };
        let mut clusters: Vec<ClusterConfig> = Vec::new();
        match root.get("clusters") {
            Some(Value::Array(list)) if (1..=MAX_CLUSTERS).contains(&list.len()) => {
                for (index, item) in list.iter().enumerate() {
                    let path = format!("clusters[{index}]");
                    let Value::Object(object) = item else {
                        errors.push(&path, format!("must be an object, got {}", kind(item)));
                        continue;
                    };
                    let mut fields = Fields { object, path, errors: &mut errors };
                    if let Some(cluster) = fields.cluster(&defaults, &of_profile) {
                        if clusters.iter().any(|known| known.cluster == cluster.cluster) {
                            fields.fail("cluster", format!("\"{}\" is configured twice", cluster.cluster));
                        }
                        clusters.push(cluster);
                    }
                }
            }
            Some(Value::Array(list)) => {
                errors
                    .push("clusters", format!("must list 1 to {MAX_CLUSTERS} clusters, got {}", list.len()));
            }
            Some(other) => errors.push("clusters", format!("must be a list, got {}", kind(other))),
            None => errors
                .push("clusters", "is missing: list at least one {\"cluster\", \"probe_cluster\"}".into()),
        }
        let choices: Vec<&ChoiceSettings> = clusters.iter().map(|cluster| &cluster.choice).collect();
        Fields { object: root, path: String::new(), errors: &mut errors }.contradictions(&choices);
        if errors.0.is_empty() { Ok(Self { shim, clusters }) } else { Err(errors) }
    }
}

fn setting_names() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|setting| setting.name)
}

/// Keys of the outbound role at the top level, in addition to `role`.
fn outbound_keys() -> Vec<&'static str> {
    OUTBOUND.into_iter().chain(setting_names()).collect()
}

/// Settings allowed in a cluster or, as defaults, at the top level.
#[derive(Clone)]
struct Settings {
    pool: PoolSettings,
    probe: ProbeSettings,
    choice: ChoiceSettings,
}

impl Fields<'_> {
    fn settings(&mut self, base: &Settings) -> Settings {
        let mut settings = base.clone();
        // These come first, because they decide which parameters there are.
        settings.pool.budget = self.budget(base.pool.budget);
        self.choice_settings(&mut settings.choice);
        for setting in &SETTINGS {
            setting.read(self, &mut settings);
        }
        settings
    }

    fn budget(&mut self, base: Budget) -> Budget {
        let budget = match (self.choice("budget", BUDGETS), base) {
            (Some(true), Budget::Adaptive { .. }) => Budget::Fixed { r_probe: 3.0 },
            (Some(false), Budget::Fixed { .. }) => {
                Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 1.0 }
            }
            _ => base,
        };
        let needed = if matches!(budget, Budget::Fixed { .. }) { "adaptive" } else { "fixed" };
        for setting in SETTINGS.iter().filter(|setting| !setting.suits(budget)) {
            if self.object.contains_key(setting.name) {
                self.fail(setting.name, format!("needs \"budget\": \"{needed}\""));
            }
        }
        budget
    }

    fn cluster(
        &mut self,
        defaults: &Settings,
        of_profile: &dyn Fn(Profile) -> Settings,
    ) -> Option<ClusterConfig> {
        let names: Vec<&str> = IN_CLUSTER.into_iter().chain(setting_names()).collect();
        self.reject_unknown(&names, &[]);
        let profile = self.choice("profile", Profile::NAMES).map(of_profile);
        let Settings { mut pool, probe, choice } = self.settings(profile.as_ref().unwrap_or(defaults));
        self.contradictions(&[&choice]);
        self.sync_without_probes(&choice);
        choice.rule.apply(&mut pool);
        let endpoints = self.endpoints();
        // Both are read before returning, so that errors in both are reported.
        let (cluster, probe_cluster) = (self.name("cluster"), self.name("probe_cluster"));
        Some(ClusterConfig {
            cluster: cluster?,
            probe_cluster: probe_cluster?,
            pool,
            probe,
            choice,
            endpoints,
        })
    }

    fn endpoints(&mut self) -> Vec<Endpoint> {
        let list = match self.object.get("endpoints") {
            None => return Vec::new(),
            Some(Value::Array(list)) if list.len() <= MAX_MEMBERS => list,
            Some(other) => {
                let got = other.as_array().map_or(kind(other).into(), |list| list.len().to_string());
                self.fail(
                    "endpoints",
                    format!("must be a list of at most {MAX_MEMBERS} `ip:port`, got {got}"),
                );
                return Vec::new();
            }
        };
        let mut endpoints = Vec::new();
        for (index, item) in list.iter().enumerate() {
            match item.as_str().and_then(|text| text.parse().ok()) {
                Some(endpoint) => endpoints.push(endpoint),
                None => {
                    let got = shorten(item);
                    self.fail(&format!("endpoints[{index}]"), format!("must be an `ip:port`, got {got}"));
                }
            }
        }
        endpoints
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::policies::linear::Linear;
    use crate::client::settings::Rule;
    use crate::client::sync_mode::SyncSettings;
    use crate::wire::hint::HintSource;
    use proptest::prelude::*;
    use serde_json::json;

    const MINIMAL: &str = r#"{"clusters":[{"cluster":"a","probe_cluster":"b"}]}"#;

    fn parse(text: &str) -> Result<FilterConfig, ConfigErrors> {
        match Config::parse(text)? {
            Config::Outbound(config) => Ok(config),
            Config::Inbound(_) => panic!("{text}: the other role"),
        }
    }

    fn errors(text: &str) -> Vec<String> {
        match parse(text) {
            Ok(_) => Vec::new(),
            Err(errors) => errors.0.iter().map(ToString::to_string).collect(),
        }
    }

    fn with(setting: &str) -> String {
        format!(r#"{{"clusters":[{{"cluster":"a","probe_cluster":"b",{setting}}}]}}"#)
    }

    #[test]
    fn a_minimal_configuration_takes_the_defaults() {
        let config = parse(MINIMAL).unwrap();
        assert_eq!(config.shim, Shim::StatefulSession);
        assert_eq!(config.clusters[0].pool, Profile::Default.pool_settings());
    }

    #[test]
    fn the_paper_profile_has_the_papers_values() {
        let config =
            parse(r#"{"profile":"paper","clusters":[{"cluster":"a","probe_cluster":"b"}]}"#).unwrap();
        let pool = &config.clusters[0].pool;
        assert_eq!((pool.budget, pool.hot), (Budget::Fixed { r_probe: 3.0 }, HotRule::Ge));
        assert!(!config.clusters[0].probe.piggyback);
    }

    #[test]
    fn settings_at_the_top_are_defaults_for_clusters() {
        let config = parse(
            r#"{"rule":"hcl","q_rif":0.5,"max_age_ms":500,"clusters":[
                {"cluster":"a","probe_cluster":"b"},{"cluster":"c","probe_cluster":"d","q_rif":0.9}]}"#,
        )
        .unwrap();
        let seen: Vec<_> = config.clusters.iter().map(|c| (c.pool.q_rif, c.pool.max_age_ms)).collect();
        assert_eq!(seen, [(0.5, 500), (0.9, 500)]);
    }

    fn only(text: &str) -> ClusterConfig {
        parse(text).unwrap().clusters.remove(0)
    }

    #[test]
    fn rules_modes_and_hints_are_read() {
        let cluster = only(&with(
            r#""mode":"sync","sync_d":5,"sync_deadline_ms":7,"rule":"linear","lambda":0.25,"alpha_ms":10,
               "hint":{"header":"X-Session","path_segment":2},"route_modes":{"bulk":"async"}"#,
        ));
        let choice = cluster.choice;
        assert_eq!((choice.mode, choice.sync), (Mode::Sync, SyncSettings { d: 5, deadline_ms: 7 }));
        assert_eq!(choice.rule, Rule::Linear(Linear { lambda: 0.25, alpha_us: 10_000.0 }));
        assert_eq!(choice.hint, Some(HintSource { header: Some("x-session".into()), path_segment: Some(2) }));
        assert_eq!(choice.route_modes, [("bulk".to_owned(), Mode::Async)]);
    }

    #[test]
    fn rif_only_and_latency_only_set_the_quantile() {
        for (rule, q_rif) in [("rif_only", 0.0), ("latency_only", 1.0)] {
            let pool = only(&with(&format!(r#""rule":"{rule}""#))).pool;
            assert_eq!(pool.q_rif, q_rif, "{rule}");
        }
    }

    #[test]
    fn contradictions_name_the_field_and_the_remedy() {
        for (setting, field, cure) in [
            (r#""hint":{"header":"a"}"#, "hint", "\"mode\": \"sync\""),
            (r#""sync_d":3"#, "sync_d", "\"mode\": \"sync\""),
            (r#""sync_deadline_ms":3"#, "sync_deadline_ms", "\"mode\": \"sync\""),
            (r#""lambda":0.5"#, "lambda", "\"rule\": \"linear\""),
            (r#""rule":"c3","alpha_ms":5"#, "alpha_ms", "\"rule\": \"linear\""),
            (r#""c3_clients":5"#, "c3_clients", "\"rule\": \"c3\""),
            (r#""rule":"peak_ewma","max_in_flight":5"#, "max_in_flight", "zuul_choice_of_two"),
            (r#""orca_utilization":"utilization""#, "orca_utilization", "zuul_choice_of_two"),
            (
                r#""rule":"zuul_choice_of_two","orca_utilization":"cpu""#,
                "orca_utilization",
                "named_metrics.NAME",
            ),
            (
                r#""rule":"zuul_choice_of_two","orca_utilization":true"#,
                "orca_utilization",
                "named_metrics.NAME",
            ),
            (r#""rule":"rif_only","q_rif":0.5"#, "q_rif", "\"rule\": \"hcl\""),
            (r#""rule":"zuul_choice_of_two","budget":"fixed""#, "budget", "leave it out"),
            (r#""rule":"peak_ewma","mode":"sync""#, "mode", "sends probes"),
            (r#""profile":"inference","mode":"async","sync_d":4"#, "sync_d", "\"mode\": \"sync\""),
        ] {
            let found = errors(&with(setting));
            assert!(
                found.len() == 1
                    && found[0].starts_with(&format!("`clusters[0].{field}` "))
                    && found[0].contains(cure),
                "{setting}: {found:?}"
            );
        }
        for fine in [
            r#""route_modes":{"chat":"sync"},"hint":{"path_segment":1},"sync_d":8"#,
            r#""rule":"linear","lambda":1"#,
            r#""profile":"inference","hint":"none""#,
            r#""rule":"c3","mode":"sync""#,
        ] {
            assert_eq!(errors(&with(fine)), [""; 0], "{fine}");
        }
    }

    #[test]
    fn a_default_at_the_top_must_apply_to_some_cluster() {
        let both = |top: &str, cluster: &str| {
            errors(&format!(
                r#"{{{top},"clusters":[{{"cluster":"a","probe_cluster":"b"}},
                    {{"cluster":"c","probe_cluster":"d"{cluster}}}]}}"#
            ))
        };
        assert_eq!(both(r#""sync_d":4"#, r#","mode":"sync""#), [""; 0]);
        assert_eq!(both(r#""rule":"rif_only""#, r#","rule":"hcl","q_rif":0.5"#), [""; 0]);
        let found = both(r#""mode":"sync""#, r#","rule":"peak_ewma""#);
        assert!(found.len() == 1 && found[0].starts_with("`clusters[1].mode` \"sync\" sends"), "{found:?}");
        let found = both(r#""sync_d":4"#, "");
        assert!(found.len() == 1 && found[0].starts_with("`sync_d` needs"), "{found:?}");
        let found = both(r#""hint":{"header":"x-prequal-hint","x":1,"path_segment":0}"#, "");
        for field in ["`hint.header`", "`hint.x`", "`hint.path_segment`"] {
            assert!(found.iter().any(|error| error.starts_with(field)), "{field} not in {found:?}");
        }
        assert_eq!(both(r#""hint":{}"#, "").len(), 2, "an error in the form, and a contradiction");
    }

    #[test]
    fn every_profile_is_valid_and_every_value_can_be_overridden() {
        for (name, profile) in Profile::NAMES {
            let cluster = only(&with(&format!(r#""profile":"{name}""#)));
            assert_eq!(cluster.pool, profile.pool_settings());
            assert_eq!(cluster.choice, profile.settings().choice);
            let own = only(&with(&format!(r#""profile":"{name}","max_age_ms":77,"mode":"async","delta":3"#)));
            assert_eq!((own.pool.max_age_ms, own.pool.delta, own.choice.mode), (77, 3.0, Mode::Async));
        }
        let rule = r#""profile":"inference","mode":"async","rule":"zuul_choice_of_two","max_in_flight":7"#;
        assert_eq!(only(&with(rule)).choice.rule, Rule::Zuul { max_in_flight: 7 });
        // A setting at the top level overrides the profile of a cluster.
        let cluster = only(
            r#"{"max_age_ms":99,"clusters":[{"cluster":"a","probe_cluster":"b","profile":"inference"}]}"#,
        );
        assert_eq!((cluster.pool.max_age_ms, cluster.choice.mode), (99, Mode::Sync));
    }

    #[test]
    fn the_error_for_a_removed_key_names_its_replacement() {
        for (key, value, instead) in [
            ("latency_band", "1.5", "rule \"predicted\" needs no band"),
            ("cold_limit", "8", "rule \"predicted\" needs no limit"),
            ("q_rif_small", "0.9", "\"q_rif\""),
            ("learning_rif", "0", "\"burst_guard\""),
            ("overflow_rif", "4", "\"burst_guard\""),
            ("error_aversion", "0.1", "\"ejection_failure_share\""),
            ("breaker", "2", "\"ejection_wait_factor\""),
            ("ramp_ms", "0", "\"slow_start_ms\""),
        ] {
            let found = errors(&with(&format!(r#""{key}":{value}"#)));
            assert!(
                found.len() == 1
                    && found[0].starts_with(&format!("`clusters[0].{key}` is no longer a field: "))
                    && found[0].contains(instead),
                "{found:?}"
            );
            assert!(KEYS.iter().all(|known| known.name != key), "{key} is a key again");
        }
        let found = errors(&with(r#""rule":"hcl","hot":"auto""#));
        assert!(found.len() == 1 && found[0].contains("one of \"gt\", \"ge\""), "{found:?}");
    }

    #[test]
    fn an_error_names_the_key_that_was_written_and_the_length_of_a_list() {
        let native = FilterConfig::parse_native(&with(r#""route_modes":{"chat":"sync"}"#)).unwrap_err();
        let fields: Vec<String> = native.0.iter().map(ToString::to_string).collect();
        assert!(fields.len() == 1 && fields[0].starts_with("`clusters[0].route_modes`"), "{fields:?}");
        let routes: Vec<String> = (0..=MAX_ROUTES).map(|n| format!(r#""r{n}":"sync""#)).collect();
        let found = errors(&with(&format!(r#""route_modes":{{{}}}"#, routes.join(","))));
        assert!(found.len() == 1 && found[0].ends_with(&format!("got {}", routes.len())), "{found:?}");
    }

    #[test]
    fn at_most_twenty_keys_are_for_everyday_use() {
        let everyday = KEYS.iter().filter(|key| key.everyday && key.scope != Scope::Inbound);
        assert!(everyday.count() <= 20);
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let found = errors(
            r#"{"shim":"x","surprise":1,"q_rif":"NaN","clusters":[{"cluster":"","pool_size":1.5,"hot":3,
                "piggyback":"yes","endpoints":["a"]},7]}"#,
        );
        for field in [
            "`shim`",
            "`surprise`",
            "`q_rif`",
            "`clusters[0].cluster`",
            "`clusters[0].probe_cluster`",
            "`clusters[0].pool_size`",
            "`clusters[0].hot`",
            "`clusters[0].piggyback`",
            "`clusters[0].endpoints[0]`",
            "`clusters[1]`",
        ] {
            assert!(found.iter().any(|error| error.starts_with(field)), "{field} not in {found:?}");
        }
    }

    #[test]
    fn text_that_is_no_configuration_is_one_error() {
        for text in
            ["", "{}", "[]", "null", r#"{"clusters":[]}"#, r#"{"clusters":3}"#, r#"{"q_rif":NaN}"#, "{\"a\":"]
        {
            assert_eq!(errors(text).len(), 1, "{text}: {:?}", errors(text));
        }
        let large = format!(r#"{{"clusters":"{}"}}"#, "x".repeat(1 << 20));
        assert!(errors(&large)[0].contains("at most"));
        assert!(errors(&with(r#""r_probe":2"#))[0].contains("\"budget\": \"fixed\""));
        let twice =
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b"},{"cluster":"a","probe_cluster":"b"}]}"#;
        assert!(errors(twice)[0].contains("twice"));
    }

    /// Arbitrary JSON, with a bias toward values that a key accepts.
    fn json_value() -> impl Strategy<Value = Value> {
        let number = prop_oneof![
            (-2i64..100).prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            (0.0..2.0).prop_map(Value::from),
        ];
        let accepted = KEYS.iter().flat_map(|key| match key.values {
            Values::OneOf(choices) => choices.to_vec(),
            _ => vec![key.name],
        });
        let texts: Vec<&str> = accepted.chain(["10.0.0.1:80", "x-session", "header", "none"]).collect();
        let text = prop_oneof![proptest::sample::select(texts).prop_map(str::to_owned), "\\PC{0,20}"];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            number,
            text.clone().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(text.clone(), inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}") {
            let _ = Config::parse(&text);
        }

        /// The configuration is refused with a field's name, or it can be written out and read again.
        #[test]
        fn no_value_of_a_key_panics(
            settings in proptest::collection::vec((proptest::sample::select(KEYS), any::<bool>(), json_value()), 1..4),
            inbound in proptest::bool::weighted(0.2),
        ) {
            let mut config = if inbound {
                json!({"role": "inbound"})
            } else {
                json!({"clusters": [{"cluster": "a", "probe_cluster": "b"}]})
            };
            for (key, at_the_top, value) in settings {
                match config.pointer_mut("/clusters/0") {
                    Some(Value::Object(cluster)) if !at_the_top => cluster.insert(key.name.to_owned(), value),
                    _ => config.as_object_mut().unwrap().insert(key.name.to_owned(), value),
                };
            }
            match Config::parse(&config.to_string()) {
                Ok(read) => prop_assert_eq!(Config::parse(&read.written().to_string()), Ok(read)),
                Err(errors) => {
                    prop_assert!(!errors.0.is_empty());
                    for error in errors.0 {
                        let known = |name: &str| KEYS.iter().any(|key| key.name == name);
                        let key = error.field.split(['[', '.']).find(|part| known(part));
                        prop_assert!(key.is_some() && !error.problem.is_empty(), "{}", error);
                    }
                }
            }
        }
    }
}
