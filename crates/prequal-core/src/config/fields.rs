//! Reading one JSON object: each value by its name and range, every problem noted.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::MAX_NAME;
use super::errors::ConfigErrors;

/// One JSON object being read.
pub(super) struct Fields<'a> {
    pub(super) object: &'a Map<String, Value>,
    pub(super) path: String,
    pub(super) errors: &'a mut ConfigErrors,
}

impl Fields<'_> {
    pub(super) fn fail(&mut self, key: &str, problem: String) {
        let field = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        self.errors.push(&field, problem);
    }

    /// Refuses keys that are neither `known` nor `judged` elsewhere.
    pub(super) fn reject_unknown(&mut self, known: &[&str], judged: &[&str]) {
        let is_unknown = |key: &&String| ![known, judged].iter().any(|keys| keys.contains(&key.as_str()));
        let unknown: Vec<String> = self.object.keys().filter(is_unknown).cloned().collect();
        for key in unknown {
            // A hostile or broken key may be long; its start tells enough.
            let shown: String = key.chars().take(64).collect();
            self.fail(&shown, format!("is not a known field; known: {}", known.join(", ")));
        }
    }

    pub(super) fn number(&mut self, (key, range): (&str, RangeInclusive<f64>)) -> Option<f64> {
        let value = self.object.get(key)?;
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Some(number),
            None => {
                let got = shorten(value);
                self.fail(
                    key,
                    format!("must be a number from {} to {}, got {got}", range.start(), range.end()),
                );
                None
            }
        }
    }

    pub(super) fn rif(&mut self, (key, range): (&str, RangeInclusive<u32>)) -> Option<u16> {
        self.whole((key, range)).and_then(|rif| u16::try_from(rif).ok())
    }

    /// A number of the range, or 0 for off.
    pub(super) fn number_or_off(&mut self, (key, range): (&str, RangeInclusive<f64>)) -> Option<f64> {
        let value = self.object.get(key)?;
        let number = value.as_f64().filter(|number| *number == 0.0 || range.contains(number));
        if number.is_none() {
            let got = shorten(value);
            self.fail(
                key,
                format!("must be a number from {} to {}, or 0, got {got}", range.start(), range.end()),
            );
        }
        number
    }

    pub(super) fn whole(&mut self, (key, range): (&str, RangeInclusive<u32>)) -> Option<u32> {
        let value = self.object.get(key)?;
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        match number.filter(|number| range.contains(number)) {
            Some(number) => Some(number),
            None => {
                let got = shorten(value);
                self.fail(
                    key,
                    format!("must be a whole number from {} to {}, got {got}", range.start(), range.end()),
                );
                None
            }
        }
    }

    pub(super) fn boolean(&mut self, key: &str) -> Option<bool> {
        let value = self.object.get(key)?;
        if value.as_bool().is_none() {
            self.fail(key, format!("must be true or false, got {}", shorten(value)));
        }
        value.as_bool()
    }

    pub(super) fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let value = self.object.get(key)?;
        let found = choices.iter().find(|(name, _)| value.as_str() == Some(name)).map(|(_, choice)| *choice);
        if found.is_none() {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            self.fail(key, format!("must be one of {}, got {}", names.join(", "), shorten(value)));
        }
        found
    }

    pub(super) fn name(&mut self, key: &str) -> Option<String> {
        match self.object.get(key) {
            Some(Value::String(name)) if (1..=MAX_NAME).contains(&name.len()) => return Some(name.clone()),
            Some(other) => {
                let got = shorten(other);
                self.fail(key, format!("must be a cluster name of 1 to {MAX_NAME} bytes, got {got}"));
            }
            None => self.fail(key, "is missing: the name of a cluster in Envoy".into()),
        }
        None
    }
}

pub(super) fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

pub(super) fn shorten(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 64 { text } else { format!("{}...", text.chars().take(64).collect::<String>()) }
}
