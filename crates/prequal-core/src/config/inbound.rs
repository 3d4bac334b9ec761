//! The inbound role: which endpoint a replica's own Envoy names in its reports, and which responses carry reports.

use serde_json::Value;

use super::ConfigErrors;
use super::fields::{Fields, shorten};
use super::keys::{INBOUND, whole};
use crate::server::rates::DEFAULT_WINDOW_US;
use crate::shared::endpoint::Endpoint;
use crate::wire::orca::{Format, ResponseKind};

/// Settings of the filter at the server's Envoy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InboundConfig {
    /// Replica that a request or probe is for.
    pub serving: Serving,
    /// Whether responses carry reports (default), or only replies to probes.
    pub report_on_responses: bool,
    /// Reports in the format of ORCA on responses, regardless of `report_on_responses`. `None` (default): none.
    pub orca: Option<InboundOrca>,
}

/// Reports in the format of ORCA, on responses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InboundOrca {
    /// Format of the reports.
    pub format: Format,
    /// Responses that carry them.
    pub responses: ResponseKind,
    /// Number of requests that the replica is meant to serve at once; `None`: utilisation is relative to the knee known
    /// so far.
    pub limit: Option<u32>,
    /// Time constant of rates and utilisation, milliseconds.
    pub window_ms: u32,
}

/// How a replica's endpoint is found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Serving {
    /// The address that the client connected to (default).
    Destination,
    /// The host of that address, at this port. Traffic at another port is for probes only and is not counted.
    Port(u16),
    /// This endpoint, whatever the client connected to.
    Fixed(Endpoint),
}

/// Values of `report`, and whether responses carry reports.
pub(super) const REPORTS: &[(&str, bool)] = &[("always", true), ("probe_only", false)];

/// Values of `orca`, and their formats.
pub(super) const ORCA: &[(&str, Option<Format>)] = &[
    ("off", None),
    ("text", Some(Format::Text)),
    ("json", Some(Format::Json)),
    ("binary", Some(Format::Binary)),
];

/// Values of `orca_for`, and their classes of responses.
pub(super) const CLASSES: &[(&str, ResponseKind)] =
    &[("all", ResponseKind::All), ("grpc", ResponseKind::Grpc), ("http", ResponseKind::Http)];

impl InboundConfig {
    pub(super) fn read(object: &serde_json::Map<String, Value>) -> Result<Self, ConfigErrors> {
        let mut errors = ConfigErrors(Vec::new());
        let mut fields = Fields { object, path: String::new(), errors: &mut errors };
        let others = super::outbound_keys();
        for key in others.iter().filter(|key| object.contains_key(**key)) {
            fields.fail(key, "has no effect with \"role\": \"inbound\"; leave it out".into());
        }
        fields.reject_unknown(&[&["role"], &INBOUND[..]].concat(), &others);
        let fixed = fields.endpoint();
        let port = fields.whole(const { whole("serving_port") });
        if object.contains_key("endpoint") && object.contains_key("serving_port") {
            fields.fail(
                "serving_port",
                "has no effect together with \"endpoint\", which includes a port".into(),
            );
        }
        let report = fields.choice("report", REPORTS);
        let orca = fields.orca();
        let serving = match (fixed, port.and_then(|port| u16::try_from(port).ok())) {
            (Some(endpoint), _) => Serving::Fixed(endpoint),
            (None, Some(port)) => Serving::Port(port),
            (None, None) => Serving::Destination,
        };
        let config = Self { serving, report_on_responses: report.unwrap_or(true), orca };
        if errors.0.is_empty() { Ok(config) } else { Err(errors) }
    }
}

impl Fields<'_> {
    fn orca(&mut self) -> Option<InboundOrca> {
        let format = self.choice("orca", ORCA);
        let class = self.choice("orca_for", CLASSES);
        let limit = self.whole(const { whole("orca_limit") });
        let window_ms = self.whole(const { whole("orca_window_ms") });
        // An invalid `orca` is already reported, and that is enough.
        if format.is_none() && self.object.contains_key("orca") {
            return None;
        }
        let Some(format) = format.flatten() else {
            for key in ["orca_for", "orca_limit", "orca_window_ms"] {
                if self.object.contains_key(key) {
                    self.fail(key, "has no effect without \"orca\": \"text\", \"json\" or \"binary\"".into());
                }
            }
            return None;
        };
        let window_ms = window_ms.unwrap_or((DEFAULT_WINDOW_US / 1000) as u32);
        Some(InboundOrca { format, responses: class.unwrap_or_default(), limit, window_ms })
    }

    fn endpoint(&mut self) -> Option<Endpoint> {
        let value = self.object.get("endpoint")?;
        let endpoint = value.as_str().and_then(|text| text.parse().ok());
        if endpoint.is_none() {
            let got = shorten(value);
            self.fail("endpoint", format!("must be an `ip:port` with a port of 1 to 65535, got {got}"));
        }
        endpoint
    }
}

/// Refuses keys that only the inbound role knows.
pub(super) fn refuse_in_outbound(fields: &mut Fields<'_>) {
    for key in INBOUND.iter().filter(|key| fields.object.contains_key(**key)) {
        fields.errors.push(key, "needs \"role\": \"inbound\"".into());
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> Result<InboundConfig, Vec<String>> {
        match Config::parse(text) {
            Ok(Config::Inbound(config)) => Ok(config),
            Ok(Config::Outbound(_)) => panic!("{text}: the other role"),
            Err(errors) => Err(errors.0.iter().map(ToString::to_string).collect()),
        }
    }

    #[test]
    fn every_key_is_read() {
        let serving = |text: &str| parse(text).unwrap().serving;
        assert_eq!(serving(r#"{"role":"inbound"}"#), Serving::Destination);
        for port in [1, 8080, 65535] {
            assert_eq!(
                serving(&format!(r#"{{"role":"inbound","serving_port":{port}}}"#)),
                Serving::Port(port)
            );
        }
        for endpoint in ["10.0.0.1:80", "[2001:db8::1]:65535"] {
            let text = format!(r#"{{"role":"inbound","endpoint":"{endpoint}"}}"#);
            assert_eq!(serving(&text), Serving::Fixed(endpoint.parse().unwrap()));
        }
        for (report, expected) in
            [("", true), (r#","report":"always""#, true), (r#","report":"probe_only""#, false)]
        {
            let text = format!(r#"{{"role":"inbound"{report}}}"#);
            assert_eq!(parse(&text).unwrap().report_on_responses, expected, "{text}");
        }
    }

    #[test]
    fn orca_is_off_by_default() {
        let plain =
            InboundOrca { format: Format::Text, responses: ResponseKind::All, limit: None, window_ms: 5000 };
        let all = InboundOrca {
            format: Format::Json,
            responses: ResponseKind::Grpc,
            limit: Some(7),
            window_ms: 100,
        };
        for (settings, orca) in [
            ("", None),
            (r#","orca":"off""#, None),
            (r#","orca":"text""#, Some(plain)),
            (r#","orca":"binary""#, Some(InboundOrca { format: Format::Binary, ..plain })),
            (
                r#","orca":"text","orca_for":"http""#,
                Some(InboundOrca { responses: ResponseKind::Http, ..plain }),
            ),
            (r#","orca":"json","orca_for":"grpc","orca_limit":7,"orca_window_ms":100"#, Some(all)),
        ] {
            let config = parse(&format!(r#"{{"role":"inbound"{settings}}}"#)).unwrap();
            assert_eq!(config.orca, orca, "{settings}");
        }
    }

    #[test]
    fn errors_name_the_field_and_its_range() {
        for (setting, field, cure) in [
            (r#""endpoint":"somewhere:80""#, "endpoint", "`ip:port`"),
            (r#""endpoint":"10.0.0.1:0""#, "endpoint", "1 to 65535"),
            (r#""endpoint":8080"#, "endpoint", "`ip:port`"),
            (r#""serving_port":0"#, "serving_port", "from 1 to 65535"),
            (r#""serving_port":65536"#, "serving_port", "from 1 to 65535"),
            (r#""serving_port":"80""#, "serving_port", "from 1 to 65535"),
            (r#""serving_port":80,"endpoint":"10.0.0.1:80""#, "serving_port", "no effect together with"),
            (r#""report":"never""#, "report", "\"probe_only\""),
            (r#""orca":"proto""#, "orca", "\"binary\""),
            (r#""orca":"text","orca_limit":0"#, "orca_limit", "from 1 to 1000000"),
            (r#""orca":"text","orca_for":"tcp""#, "orca_for", "\"grpc\""),
            (r#""orca":"text","orca_window_ms":99"#, "orca_window_ms", "from 100 to 600000"),
            (r#""orca_limit":5"#, "orca_limit", "has no effect without"),
            (r#""orca":"off","orca_for":"all""#, "orca_for", "has no effect without"),
            (r#""orca_window_ms":5000"#, "orca_window_ms", "has no effect without"),
            (r#""clusters":[]"#, "clusters", "no effect with \"role\": \"inbound\""),
            (r#""shim":"override_host""#, "shim", "no effect with \"role\": \"inbound\""),
            (r#""pool_size":16"#, "pool_size", "no effect with \"role\": \"inbound\""),
            (r#""hint":{"header":"a"}"#, "hint", "no effect with \"role\": \"inbound\""),
            (r#""servingport":80"#, "servingport", "known: role, endpoint, serving_port, report, orca"),
        ] {
            let found = parse(&format!(r#"{{"role":"inbound",{setting}}}"#)).unwrap_err();
            assert!(
                found.len() == 1 && found[0].starts_with(&format!("`{field}` ")) && found[0].contains(cure),
                "{setting}: {found:?}"
            );
        }
        let all = r#"{"role":"inbound","endpoint":1,"serving_port":0,"report":2,"surprise":3,"q_rif":4}"#;
        assert_eq!(parse(all).unwrap_err().len(), 6);
    }

    #[test]
    fn the_role_is_outbound_by_default() {
        let clusters = r#""clusters":[{"cluster":"a","probe_cluster":"b"}]"#;
        for text in [format!("{{{clusters}}}"), format!(r#"{{"role":"outbound",{clusters}}}"#)] {
            assert!(matches!(Config::parse(&text), Ok(Config::Outbound(_))), "{text}");
        }
        for (setting, field, cure) in [
            (r#""role":"sidecar""#, "role", "must be one of \"outbound\", \"inbound\""),
            (r#""endpoint":"10.0.0.1:80""#, "endpoint", "needs \"role\": \"inbound\""),
            (r#""serving_port":80"#, "serving_port", "needs \"role\": \"inbound\""),
            (r#""report":"always""#, "report", "needs \"role\": \"inbound\""),
            (r#""orca":"text""#, "orca", "needs \"role\": \"inbound\""),
        ] {
            let found = parse(&format!("{{{setting},{clusters}}}")).unwrap_err();
            assert!(
                found.len() == 1 && found[0].starts_with(&format!("`{field}` ")) && found[0].contains(cure),
                "{setting}: {found:?}"
            );
        }
    }
}
