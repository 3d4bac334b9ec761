//! Reads how a request finds its replica (rule, mode, hint), and finds settings that contradict each other.

use serde_json::Value;

use super::MAX_ROUTES;
use super::fields::{Fields, kind, set, shorten};
use super::keys::SETTINGS;
use crate::client::policies::c3;
use crate::client::policies::linear::{ALPHA_US, Linear};
use crate::client::policies::zuul;
use crate::client::settings::{ChoiceSettings, Mode, Rule};
use crate::wire::hint::HintSource;
use crate::wire::orca::backend::Metric;

pub(super) const MODES: &[(&str, Mode)] = &[("async", Mode::Async), ("sync", Mode::Sync)];

/// Every rule with its defaults.
fn rules() -> [(&'static str, Rule); 8] {
    [
        Rule::Predicted,
        Rule::Hcl,
        Rule::RifOnly,
        Rule::LatencyOnly,
        Rule::Linear(Linear { lambda: 0.5, alpha_us: ALPHA_US }),
        Rule::C3 { clients: c3::DEFAULT_CLIENTS },
        Rule::PeakEwma,
        Rule::Zuul { max_in_flight: zuul::DEFAULT_MAX_IN_FLIGHT },
    ]
    .map(|rule| (rule.name(), rule))
}

impl Fields<'_> {
    /// Reads how requests find replicas, except for the parameters of rule and mode.
    pub(super) fn choice_settings(&mut self, choice: &mut ChoiceSettings) {
        // If the same rule is named again, it keeps its parameters.
        let named = self.choice("rule", &rules()).filter(|named| !named.is_like(choice.rule));
        set(&mut choice.rule, named);
        set(&mut choice.mode, self.choice("mode", MODES));
        set(&mut choice.route_modes, self.route_modes());
        set(&mut choice.hint, self.hint());
        set(&mut choice.orca, self.orca_utilization());
    }

    /// `Some(None)`: explicitly off.
    fn orca_utilization(&mut self) -> Option<Option<Metric>> {
        let value = self.object.get("orca_utilization")?;
        let metric = match value.as_str() {
            Some("off") => return Some(None),
            Some(text) => Metric::parse(text),
            None => None,
        };
        if metric.is_none() {
            let got = shorten(value);
            self.fail("orca_utilization", format!("must be \"off\", {}, got {got}", Metric::FORM));
        }
        metric.map(Some)
    }

    fn route_modes(&mut self) -> Option<Vec<(String, Mode)>> {
        let routes = match self.object.get("route_modes")? {
            Value::Object(routes) if routes.len() <= MAX_ROUTES => routes,
            other => {
                let got = other.as_object().map_or(kind(other).into(), |routes| routes.len().to_string());
                let form = "{\"route name\": \"async\" or \"sync\"}";
                self.fail(
                    "route_modes",
                    format!("must be {form} with at most {MAX_ROUTES} routes, got {got}"),
                );
                return None;
            }
        };
        let mut modes = Vec::new();
        for (name, mode) in routes {
            let mode = match mode.as_str() {
                Some("async") => Mode::Async,
                Some("sync") => Mode::Sync,
                _ => {
                    let shown: String = name.chars().take(64).collect();
                    let got = shorten(mode);
                    self.fail(
                        &format!("route_modes.{shown}"),
                        format!("must be one of \"async\", \"sync\", got {got}"),
                    );
                    continue;
                }
            };
            modes.push((name.clone(), mode));
        }
        Some(modes)
    }

    /// `Some(None)`: explicitly none.
    fn hint(&mut self) -> Option<Option<HintSource>> {
        const FORM: &str =
            "must be \"none\" or {\"header\": NAME, \"path_segment\": N} with one of the two or both";
        let object = match self.object.get("hint")? {
            Value::String(text) if text == "none" => return Some(None),
            Value::Object(object) if !object.is_empty() => object,
            other => {
                let got = shorten(other);
                self.fail("hint", format!("{FORM}, got {got}"));
                return None;
            }
        };
        let path = if self.path.is_empty() { "hint".to_owned() } else { format!("{}.hint", self.path) };
        let mut fields = Fields { object, path, errors: &mut *self.errors };
        fields.reject_unknown(&["header", "path_segment"], &[]);
        let header = object.get("header").and_then(|value| {
            let name = value.as_str().filter(|name| is_header_name(name));
            if name.is_none() {
                let got = shorten(value);
                fields.fail(
                    "header",
                    format!("must be the name of a request header, but not one of Prequal's, got {got}"),
                );
            }
            name.map(str::to_ascii_lowercase)
        });
        let path_segment = fields.whole(("path_segment", 1..=64));
        Some(Some(HintSource { header, path_segment }))
    }

    /// Reports every key of this object that has no effect with any of `choices`.
    pub(super) fn contradictions(&mut self, choices: &[&ChoiceSettings]) {
        if choices.is_empty() {
            return;
        }
        for setting in SETTINGS.iter().filter(|setting| self.object.contains_key(setting.name)) {
            if !choices.iter().any(|choice| setting.has_effect(choice)) {
                self.fail(setting.name, setting.remedy());
            }
        }
    }

    /// Reports a cluster whose mode waits for probes although its rule needs none, no matter where the two are set.
    pub(super) fn sync_without_probes(&mut self, choice: &ChoiceSettings) {
        if choice.uses_sync() && choice.rule.is_probe_free() {
            let key = if self.object.contains_key("route_modes") { "route_modes" } else { "mode" };
            let remedy =
                "\"sync\" sends probes, and this rule needs none: name another \"rule\" or use \"async\"";
            self.fail(key, remedy.into());
        }
    }
}

/// Whether the name is a token of RFC 9110 that can carry hints. Pseudo-headers cannot, and Prequal's own headers are
/// removed before the filter sees the request.
fn is_header_name(name: &str) -> bool {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (1..=256).contains(&name.len())
        && name.bytes().all(token)
        && !name.to_ascii_lowercase().starts_with("x-prequal-")
}
