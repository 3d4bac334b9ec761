//! Compares the table of keys (`config::KEYS`), from which `docs/reference/configuration.md` is generated, with the
//! parser: every key in the table is known and every known key is in the table, the parser enforces the ranges, and
//! leaving a key out has the stated effect.

use std::collections::BTreeSet;

use prequal_core::config::{Config, KEYS, Key, Scope, Values};
use serde_json::{Value, json};

const PROFILES: [&str; 4] = ["default", "paper", "small", "inference"];

/// Parses a configuration in which `key` has an effect, with `value` for it.
fn parse(key: &Key, profile: &str, value: Option<Value>) -> Result<Config, String> {
    let mut config = json!({"clusters": [{"cluster": "a", "probe_cluster": "b", "profile": profile}]});
    let object = match key.scope {
        Scope::Top | Scope::Outbound => &mut config,
        Scope::Cluster | Scope::Both => &mut config["clusters"][0],
        Scope::Inbound => {
            config = json!({"role": "inbound"});
            &mut config
        }
    };
    if let Some((other, value)) = key.needs {
        object[other] = json!(value);
    }
    if let Some(value) = value {
        object[key.name] = value;
    }
    Config::parse(&config.to_string()).map_err(|errors| errors.to_string())
}

/// Value of `key` in a configuration.
fn in_force(key: &Key, config: &Config) -> Value {
    let written = config.written();
    match key.scope {
        Scope::Cluster | Scope::Both => written["clusters"][0][key.name].clone(),
        Scope::Top | Scope::Outbound | Scope::Inbound => written[key.name].clone(),
    }
}

fn number(value: f64) -> Value {
    if value.fract() == 0.0 { json!(value as i64) } else { json!(value) }
}

#[test]
fn every_key_is_known_and_every_known_key_is_listed() {
    let known = |text: &str| -> BTreeSet<String> {
        let errors = Config::parse(text).unwrap_err().to_string();
        let list = errors.split("known: ").nth(1).unwrap();
        list.split(", ").map(|key| key.trim().to_owned()).collect()
    };
    let listed = |scopes: &[Scope]| -> BTreeSet<String> {
        let keys = KEYS.iter().filter(|key| scopes.contains(&key.scope));
        keys.map(|key| key.name.to_owned()).collect()
    };
    assert_eq!(
        known(r#"{"zzz": 1, "clusters": [{"cluster": "a", "probe_cluster": "b"}]}"#),
        listed(&[Scope::Top, Scope::Outbound, Scope::Both])
    );
    assert_eq!(
        known(r#"{"clusters": [{"cluster": "a", "probe_cluster": "b", "zzz": 1}]}"#),
        listed(&[Scope::Cluster, Scope::Both])
    );
    assert_eq!(known(r#"{"role": "inbound", "zzz": 1}"#), listed(&[Scope::Top, Scope::Inbound]));
    let names: BTreeSet<&str> = KEYS.iter().map(|key| key.name).collect();
    assert_eq!(names.len(), KEYS.len(), "a key stands twice");
    assert!(KEYS.iter().all(|key| !key.meaning.is_empty()));
}

#[test]
fn every_number_can_be_set_under_every_profile_and_its_range_is_enforced_on_both_sides() {
    for key in KEYS {
        let (low, high, off) = match key.values {
            Values::Whole(low, high) => (f64::from(low), f64::from(high), false),
            Values::Number(low, high) => (low, high, false),
            Values::NumberOrOff(low, high) => (low, high, true),
            _ => continue,
        };
        for profile in PROFILES {
            // Rules without probes are valid under a profile with synchronous mode only if the mode is overridden too.
            if (key.name, profile) == ("max_in_flight", "inference") {
                continue;
            }
            let accepted = |value: f64| parse(key, profile, Some(number(value)));
            for inside in [low, high].into_iter().chain(off.then_some(0.0)) {
                let config = accepted(inside)
                    .unwrap_or_else(|error| panic!("{} = {inside} of {profile}: {error}", key.name));
                assert_eq!(in_force(key, &config).as_f64(), Some(inside), "{} of {profile}", key.name);
            }
            let below = if off { low / 2.0 } else { low - 1.0 };
            for outside in [below, high + 1.0] {
                let error = accepted(outside).expect_err(key.name);
                assert!(error.contains(&format!("from {low} to {high}")), "{}: {error}", key.name);
            }
        }
    }
}

#[test]
fn the_listed_choices_are_the_accepted_ones() {
    for key in KEYS {
        let Values::OneOf(choices) = key.values else { continue };
        let error = parse(key, "default", Some(json!("zzz"))).expect_err(key.name);
        let listed: Vec<String> = choices.iter().map(|choice| format!("\"{choice}\"")).collect();
        assert!(
            error.contains(&format!("must be one of {}, got", listed.join(", "))),
            "{}: {error}",
            key.name
        );
    }
}

#[test]
fn a_key_that_needs_another_is_refused_without_it() {
    for key in KEYS.iter().filter(|key| key.needs.is_some()) {
        let value = match key.values {
            Values::Whole(low, _) => json!(low),
            Values::Number(low, _) => number(low),
            Values::OneOf(choices) => json!(choices[0]),
            _ if key.name == "orca_utilization" => json!("utilization"),
            _ => json!({"header": "a"}),
        };
        let mut alone = *key;
        alone.needs = match key.needs {
            Some(("budget", "adaptive")) => Some(("budget", "fixed")),
            _ => None,
        };
        assert!(parse(key, "default", Some(value.clone())).is_ok(), "{}", key.name);
        assert!(parse(&alone, "default", Some(value)).is_err(), "{}", key.name);
    }
}

#[test]
fn an_explicit_default_equals_an_absent_key() {
    let mut checked = 0;
    for key in KEYS.iter().filter(|key| key.absent.is_none()) {
        for profile in PROFILES {
            // Rules without probes are invalid under a profile with synchronous mode.
            let Ok(without) = parse(key, profile, None) else {
                assert_eq!((key.needs, profile), (Some(("rule", "zuul_choice_of_two")), "inference"));
                continue;
            };
            let default = in_force(key, &without);
            assert_eq!(key.default_under(profile).as_ref(), Some(&default), "{} of {profile}", key.name);
            assert_eq!(parse(key, profile, Some(default)), Ok(without), "{} of {profile}", key.name);
            checked += 1;
        }
    }
    assert!(checked > 120, "{checked}");
}
