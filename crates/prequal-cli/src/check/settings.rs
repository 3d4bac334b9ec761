//! The settings, as Envoy passes them to the filter or to the native module.

use std::fmt::Display;

use super::codes::SETTINGS;
use super::{At, Findings};

/// Returns the path and the text of the settings in the field `key`: a string, or an object as JSON.
pub(super) fn text(config: &At<'_>, key: &str) -> Option<(String, String)> {
    let settings = config.get(key)?;
    if let Some(text) = settings.typed("StringValue") {
        return Some((format!("{}.value", text.path), text.text("value")?.to_owned()));
    }
    let object = settings.typed("Struct")?.get("value")?;
    Some((object.path, object.value.to_string()))
}

/// Returns the path of the settings in the field `key`, and the result of `parse`. Reports errors in the settings.
pub(super) fn read<T, E: Display>(
    config: &At<'_>,
    key: &str,
    parse: impl FnOnce(&str) -> Result<T, Vec<E>>,
    findings: &mut Findings,
) -> Option<(String, T)> {
    let Some((path, text)) = text(config, key) else {
        let found = format!("`{key}` is missing, or is neither StringValue nor Struct");
        findings.push(SETTINGS, &config.path, found);
        return None;
    };
    match parse(&text) {
        Ok(settings) => Some((path, settings)),
        Err(errors) => {
            errors.iter().for_each(|error| findings.push(SETTINGS, &path, error.to_string()));
            None
        }
    }
}

/// Returns whether these settings are Prequal's, judged by their content alone.
pub(super) fn are_prequals(config: &At<'_>, key: &str) -> bool {
    text(config, key).is_some_and(|(_, text)| text.contains("\"probe_cluster\""))
}
