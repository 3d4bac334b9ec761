//! Reads one JSON object, each value by its name and range, and records every error. Other modules define which keys
//! exist and how they interact.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::MAX_NAME;
use super::errors::ConfigErrors;
use super::removed::REMOVED;

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

    /// Rejects keys that are neither in `known` nor in `judged`. The keys in `judged` are checked elsewhere.
    pub(super) fn reject_unknown(&mut self, known: &[&str], judged: &[&str]) {
        let is_unknown = |key: &&String| ![known, judged].iter().any(|keys| keys.contains(&key.as_str()));
        let unknown: Vec<String> = self.object.keys().filter(is_unknown).cloned().collect();
        for key in unknown {
            // A hostile or broken key may be long, so only its start is shown.
            let shown: String = key.chars().take(64).collect();
            if let Some((_, instead)) = REMOVED.iter().find(|(removed, _)| *removed == key) {
                self.fail(&shown, format!("is no longer a field: {instead}"));
                continue;
            }
            self.fail(&shown, format!("is not a known field; known: {}", known.join(", ")));
        }
    }

    /// Converts the value of `key` with `read`, if there is one; `wanted` describes what it must be.
    fn read<T>(
        &mut self,
        key: &str,
        read: impl Fn(&Value) -> Option<T>,
        wanted: impl FnOnce() -> String,
    ) -> Option<T> {
        let value = self.object.get(key)?;
        let found = read(value);
        if found.is_none() {
            self.fail(key, format!("must be {}, got {}", wanted(), shorten(value)));
        }
        found
    }

    pub(super) fn number(&mut self, (key, range): (&str, RangeInclusive<f64>)) -> Option<f64> {
        let read = |value: &Value| value.as_f64().filter(|number| range.contains(number));
        self.read(key, read, || format!("a number from {} to {}", range.start(), range.end()))
    }

    /// Reads a number in the range, or 0 for off.
    pub(super) fn number_or_off(&mut self, (key, range): (&str, RangeInclusive<f64>)) -> Option<f64> {
        let read = |value: &Value| value.as_f64().filter(|number| *number == 0.0 || range.contains(number));
        self.read(key, read, || format!("a number from {} to {}, or 0", range.start(), range.end()))
    }

    pub(super) fn whole(&mut self, (key, range): (&str, RangeInclusive<u32>)) -> Option<u32> {
        let read = |value: &Value| {
            let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
            number.filter(|number| range.contains(number))
        };
        self.read(key, read, || format!("a whole number from {} to {}", range.start(), range.end()))
    }

    pub(super) fn boolean(&mut self, key: &str) -> Option<bool> {
        self.read(key, Value::as_bool, || "true or false".to_owned())
    }

    pub(super) fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let read = |value: &Value| {
            choices.iter().find(|(name, _)| value.as_str() == Some(name)).map(|(_, choice)| *choice)
        };
        let wanted = || {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            format!("one of {}", names.join(", "))
        };
        self.read(key, read, wanted)
    }

    pub(super) fn name(&mut self, key: &str) -> Option<String> {
        match self.object.get(key) {
            Some(Value::String(name)) if (1..=MAX_NAME).contains(&name.len()) => return Some(name.clone()),
            Some(other) => {
                let got = shorten(other);
                self.fail(key, format!("must be a cluster name of 1 to {MAX_NAME} bytes, got {got}"));
            }
            None => self.fail(key, "is missing: it must be the name of a cluster in Envoy".into()),
        }
        None
    }
}

/// Returns the name of a value.
pub(super) fn name_of<T: Copy + PartialEq>(value: T, names: &[(&'static str, T)]) -> &'static str {
    names.iter().find(|(_, named)| *named == value).map_or("", |(name, _)| name)
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
    if text.chars().count() <= 64 {
        text
    } else {
        format!("{}...", text.chars().take(64).collect::<String>())
    }
}
