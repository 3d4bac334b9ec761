//! A place in a configuration: a value and the path to it. A value of an unexpected type reads as absent.

use serde_json::Value;

#[derive(Clone, Debug)]
pub(crate) struct At<'a> {
    pub(crate) path: String,
    pub(crate) value: &'a Value,
}

impl<'a> At<'a> {
    pub(crate) fn root(value: &'a Value) -> Self {
        Self { path: String::new(), value }
    }

    /// Returns the field `key`, unless it is absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<Self> {
        let value = self.value.get(key).filter(|value| !value.is_null())?;
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        Some(Self { path, value })
    }

    /// Returns the field at the end of `keys`.
    pub(crate) fn at(&self, keys: &[&str]) -> Option<Self> {
        keys.iter().try_fold(self.clone(), |place, key| place.get(key))
    }

    /// Returns the items of the list `key`.
    pub(crate) fn list(&self, key: &str) -> Vec<Self> {
        let Some(list) = self.get(key) else { return Vec::new() };
        let items = list.value.as_array().into_iter().flatten().enumerate();
        items.map(|(index, value)| Self { path: format!("{}[{index}]", list.path), value }).collect()
    }

    /// Returns the text of the field `key`.
    pub(crate) fn text(&self, key: &str) -> Option<&'a str> {
        self.value.get(key)?.as_str()
    }

    /// Returns the number in the field `key`, which may be in quotes.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        let value = self.value.get(key)?;
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    }

    /// Returns whether the field `key` is true, in any spelling that Envoy's YAML allows.
    pub(crate) fn flag(&self, key: &str) -> bool {
        match self.value.get(key) {
            Some(Value::Bool(flag)) => *flag,
            Some(Value::String(word)) => {
                matches!(word.to_ascii_lowercase().as_str(), "y" | "yes" | "on" | "true")
            }
            _ => false,
        }
    }

    /// Returns the message under `typed_config`, or this message if it has a type itself; `None` unless the type is
    /// `kind`.
    pub(crate) fn typed(&self, kind: &str) -> Option<Self> {
        let message = self.get("typed_config").unwrap_or_else(|| self.clone());
        let is = |name: &str| name.rsplit(['.', '/']).next() == Some(kind);
        let name = message.text("@type")?;
        if is(name) {
            return Some(message);
        }
        // Tools that do not know a message's type send it as a struct, with the type beside it.
        let wrapped = name.ends_with("TypedStruct") && message.text("type_url").is_some_and(is);
        if wrapped { message.get("value") } else { None }
    }
}
