//! Writes out a configuration: every setting in force, as an operator would configure it.

use serde_json::{Map, Value, json};

use super::choice::MODES;
use super::fields::name_of;
use super::inbound::{CLASSES, ORCA, REPORTS};
use super::keys::SETTINGS;
use super::{BUDGETS, Config, InboundConfig, Key, SHIMS, Scope, Serving, Settings};
use crate::client::pool::Budget;
use crate::client::settings::{ClusterConfig, Rule};
use crate::wire::hint::HintSource;

impl Config {
    /// Returns JSON that [`Config::parse`] reads as the same configuration, with nothing left to defaults.
    pub fn written(&self) -> Value {
        match self {
            Self::Outbound(config) => {
                let clusters: Vec<Value> = config.clusters.iter().map(cluster).collect();
                json!({"role": "outbound", "shim": name_of(config.shim, SHIMS), "clusters": clusters})
            }
            Self::Inbound(config) => inbound(config),
        }
    }
}

impl Key {
    /// Returns the value that applies if the key is left out, under a profile and with the setting that the key needs.
    /// `None` if there is no value, or if the profile excludes that setting.
    pub fn default_under(&self, profile: &str) -> Option<Value> {
        if self.name == "profile" {
            return None;
        }
        let mut settings = Map::new();
        let begins: &[_] = match self.scope {
            Scope::Inbound => &[("role", "inbound")],
            _ => &[("cluster", "a"), ("probe_cluster", "b"), ("profile", profile)],
        };
        for (key, value) in begins.iter().copied().chain(self.needs) {
            settings.insert(key.to_owned(), json!(value));
        }
        let config = match self.scope {
            Scope::Inbound => Value::Object(settings),
            _ => json!({"clusters": [settings]}),
        };
        let written = Config::parse(&config.to_string()).ok()?.written();
        let holder = match self.scope {
            Scope::Cluster | Scope::Both => written.get("clusters")?.get(0)?,
            Scope::Top | Scope::Outbound | Scope::Inbound => &written,
        };
        holder.get(self.name).cloned()
    }
}

fn cluster(config: &ClusterConfig) -> Value {
    let ClusterConfig { pool, probe, choice, .. } = config;
    let endpoints: Vec<String> = config.endpoints.iter().map(ToString::to_string).collect();
    let mut all = Map::new();
    let mut put = |key: &str, value: Value| all.insert(key.to_owned(), value);
    put("cluster", json!(config.cluster));
    put("probe_cluster", json!(config.probe_cluster));
    put("endpoints", json!(endpoints));
    if pool.theta_of_probes {
        // `theta_of_probes` has no key of its own.
        put("profile", json!("paper"));
    }

    put("rule", json!(choice.rule.name()));
    if let Rule::Zuul { .. } = choice.rule {
        let metric = choice.orca.as_ref().map_or("off".to_owned(), ToString::to_string);
        put("orca_utilization", json!(metric));
    }
    if !choice.rule.is_probe_free() {
        put("mode", json!(name_of(choice.mode, MODES)));
        let routes =
            choice.route_modes.iter().map(|(route, mode)| (route.clone(), json!(name_of(*mode, MODES))));
        put("route_modes", Value::Object(routes.collect()));
        put("budget", json!(name_of(matches!(pool.budget, Budget::Fixed { .. }), BUDGETS)));
        if choice.uses_sync() {
            put("hint", hint(choice.hint.as_ref()));
        }
    }
    let mut settings = Settings { pool: pool.clone(), probe: probe.clone(), choice: choice.clone() };
    for setting in &SETTINGS {
        if let Some(value) = setting.written(&mut settings) {
            put(setting.name, value);
        }
    }
    Value::Object(all)
}

fn hint(source: Option<&HintSource>) -> Value {
    let Some(source) = source else { return json!("none") };
    let header = source.header.as_ref().map(|name| ("header".to_owned(), json!(name)));
    let segment = source.path_segment.map(|number| ("path_segment".to_owned(), json!(number)));
    Value::Object(header.into_iter().chain(segment).collect())
}

fn inbound(config: &InboundConfig) -> Value {
    let mut all = Map::new();
    let mut put = |key: &str, value: Value| all.insert(key.to_owned(), value);
    put("role", json!("inbound"));
    match config.serving {
        Serving::Destination => {}
        Serving::Port(port) => drop(put("serving_port", json!(port))),
        Serving::Fixed(endpoint) => drop(put("endpoint", json!(endpoint.to_string()))),
    }
    put("report", json!(name_of(config.report_on_responses, REPORTS)));
    put("orca", json!(name_of(config.orca.map(|orca| orca.format), ORCA)));
    if let Some(orca) = config.orca {
        put("orca_for", json!(name_of(orca.responses, CLASSES)));
        put("orca_window_ms", json!(orca.window_ms));
        if let Some(limit) = orca.limit {
            put("orca_limit", json!(limit));
        }
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_configuration_reads_back_the_same() {
        let cluster = |more: &str| format!(r#"{{"clusters":[{{"cluster":"a","probe_cluster":"b"{more}}}]}}"#);
        let mut texts = vec![
            r#"{"role":"inbound"}"#.to_owned(),
            r#"{"role":"inbound","serving_port":80,"report":"probe_only"}"#.to_owned(),
            r#"{"role":"inbound","endpoint":"[2001:db8::1]:80"}"#.to_owned(),
            r#"{"role":"inbound","orca":"json","orca_for":"http","orca_limit":9,"orca_window_ms":700}"#.to_owned(),
            r#"{"shim":"override_host","rule":"hcl","q_rif":0.5,"clusters":[{"cluster":"a","probe_cluster":"b"},
                {"cluster":"c","probe_cluster":"d","endpoints":["10.0.0.1:80"]}]}"#
                .to_owned(),
            cluster(r#","route_modes":{"chat":"sync"},"hint":{"header":"a","path_segment":2}"#),
            cluster(r#","rule":"c3","c3_clients":7"#),
            cluster(r#","rule":"linear","lambda":0.25,"alpha_ms":10"#),
            cluster(r#","rule":"zuul_choice_of_two","max_in_flight":7,"orca_utilization":"named_metrics.kv""#),
        ];
        for profile in ["default", "paper", "small", "inference"] {
            texts.push(cluster(&format!(r#","profile":"{profile}""#)));
        }
        for rule in [
            "predicted",
            "hcl",
            "rif_only",
            "latency_only",
            "linear",
            "c3",
            "peak_ewma",
            "zuul_choice_of_two",
        ] {
            texts.push(cluster(&format!(r#","rule":"{rule}""#)));
        }
        for text in texts {
            let config = Config::parse(&text).unwrap();
            let written = config.written();
            assert_eq!(Config::parse(&written.to_string()).as_ref(), Ok(&config), "{text}\n{written:#}");
        }
    }

    #[test]
    fn every_key_is_written() {
        use crate::config::{KEYS, Scope};
        let all = [
            r#"{"role":"inbound","serving_port":80,"orca":"text","orca_limit":9}"#,
            r#"{"role":"inbound","endpoint":"10.0.0.1:80"}"#,
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b","budget":"fixed","mode":"sync"}]}"#,
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b","rule":"hcl"}]}"#,
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b","rule":"linear"}]}"#,
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b","rule":"c3"}]}"#,
            r#"{"clusters":[{"cluster":"a","probe_cluster":"b","rule":"zuul_choice_of_two"}]}"#,
        ]
        .map(|text| Config::parse(text).unwrap().written());
        for key in KEYS.iter().filter(|key| key.name != "profile") {
            let is_written = |written: &Value| match key.scope {
                Scope::Top | Scope::Outbound | Scope::Inbound => !written[key.name].is_null(),
                Scope::Cluster | Scope::Both => !written["clusters"][0][key.name].is_null(),
            };
            assert!(all.iter().any(is_written), "{}", key.name);
        }
    }
}
