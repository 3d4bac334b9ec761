//! Configuration files, read as Envoy reads them.
//!
//! Verified on Envoy 1.40: anchors are expanded, but merge keys (`<<`) are not. A key tagged `!ignore` is dropped
//! with its value. If a key occurs twice, the last one counts. Only the first document of a file is read. Fields may
//! be written in camelCase.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess as _,
    Visitor,
};
use serde_json::{Map, Value};

/// Maximum size of a file, bytes. A dump of a large mesh has about ten million bytes.
const MAX_BYTES: u64 = 32 << 20;

/// Maximum number of values in a YAML file with its aliases expanded: a few lines of aliases can expand to any number.
const MAX_VALUES: usize = 4 << 20;

/// Reads the configuration in the file `path`, or from standard input for `-`.
pub(crate) fn file(path: &Path) -> Result<Value> {
    text(&source(path)?).with_context(|| format!("cannot read {}", path.display()))
}

/// Reads the text of the file `path`, or of standard input for `-`.
pub(crate) fn source(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().take(MAX_BYTES + 1).read_to_end(&mut bytes)
    } else {
        File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
    };
    read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(bytes.len() as u64 <= MAX_BYTES, "{} has more than {} MiB", path.display(), MAX_BYTES >> 20);
    String::from_utf8(bytes).with_context(|| format!("{} is not text", path.display()))
}

/// Parses a configuration in YAML or JSON.
pub(crate) fn text(text: &str) -> Result<Value> {
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(snake(value));
    }
    refuse_deep_flow(text)?;
    let document = yaml_serde::Deserializer::from_str(text).next().context("it is empty")?;
    let room = Cell::new(MAX_VALUES);
    let value = Tree(&room).deserialize(document).context("it cannot be read as YAML or JSON")?;
    ensure!(!value.is_null(), "it is empty");
    Ok(snake(value))
}

/// Parses every document of a Kubernetes file, with the spelling of fields unchanged. Empty documents are left out.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>> {
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(vec![value]);
    }
    refuse_deep_flow(text)?;
    let room = Cell::new(MAX_VALUES);
    let mut documents = Vec::new();
    for (index, document) in yaml_serde::Deserializer::from_str(text).enumerate() {
        let value = Tree(&room).deserialize(document);
        let value =
            value.with_context(|| format!("document {} cannot be read as YAML or JSON", index + 1))?;
        if !value.is_null() {
            documents.push(value);
        }
    }
    Ok(documents)
}

/// Limits the depth of open brackets before the YAML scanner runs: its work grows with the square of the depth.
///
/// Brackets inside quotes are counted too. They usually balance; a file in which they do not may be refused.
fn refuse_deep_flow(text: &str) -> Result<()> {
    const MOST: usize = 1000;
    let (mut depth, mut line) = (0_usize, 1_usize);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'\n' => line += 1,
            _ => {}
        }
        ensure!(depth <= MOST, "line {line}: more than {MOST} brackets are open");
    }
    Ok(())
}

/// Converts any YAML to JSON; holds the number of further values allowed.
#[derive(Clone, Copy)]
struct Tree<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let Some(left) = self.0.get().checked_sub(1) else {
            return Err(de::Error::custom(format!("more than {MAX_VALUES} values")));
        };
        self.0.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    /// Accepts a file that contains only comments.
    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(EntryKey(key)) = entries.next_key()? {
            let value = entries.next_value_seed(self)?;
            if let Some(key) = key {
                object.insert(key, value);
            }
        }
        Ok(Value::Object(object))
    }

    /// Ignores the tag of a value, as Envoy does.
    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Value, A::Error> {
        let (_, content) = tagged.variant::<String>()?;
        content.newtype_variant_seed(self)
    }
}

/// Key of an entry; `None` if the entry is to be dropped.
struct EntryKey(Option<String>);

impl<'de> Deserialize<'de> for EntryKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = EntryKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E>(self, key: &str) -> Result<EntryKey, E> {
                Ok(EntryKey(Some(key.to_owned())))
            }

            fn visit_bool<E>(self, key: bool) -> Result<EntryKey, E> {
                Ok(EntryKey(Some(key.to_string())))
            }

            fn visit_i64<E>(self, key: i64) -> Result<EntryKey, E> {
                Ok(EntryKey(Some(key.to_string())))
            }

            fn visit_u64<E>(self, key: u64) -> Result<EntryKey, E> {
                Ok(EntryKey(Some(key.to_string())))
            }

            fn visit_f64<E>(self, key: f64) -> Result<EntryKey, E> {
                Ok(EntryKey(Some(key.to_string())))
            }

            fn visit_unit<E>(self) -> Result<EntryKey, E> {
                Ok(EntryKey(Some("null".to_owned())))
            }

            fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<EntryKey, A::Error> {
                let (tag, content) = tagged.variant::<String>()?;
                let EntryKey(key) = content.newtype_variant::<EntryKey>()?;
                Ok(EntryKey(key.filter(|_| tag.trim_start_matches('!') != "ignore")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<EntryKey, A::Error> {
                Err(de::Error::custom("a list cannot be a key"))
            }
        }

        deserializer.deserialize_any(KeyVisitor)
    }
}

/// Converts camelCase field names to snake_case, the form that the checks look for.
///
/// The recursion is bounded: both parsers stop at 128 levels.
fn snake(value: Value) -> Value {
    match value {
        Value::Array(list) => list.into_iter().map(snake).collect(),
        Value::Object(object) => {
            // The names in a free-form value are the user's own, so they are kept.
            let free = object
                .get("@type")
                .and_then(Value::as_str)
                .is_some_and(|kind| kind.ends_with("google.protobuf.Struct"));
            if free {
                return Value::Object(object);
            }
            object.into_iter().map(|(key, value)| (snake_key(key), snake(value))).collect()
        }
        other => other,
    }
}

fn snake_key(key: String) -> String {
    let camel = key.starts_with(|c: char| c.is_ascii_lowercase())
        && key.chars().all(|c| c.is_ascii_alphanumeric())
        && key.chars().any(|c| c.is_ascii_uppercase());
    if !camel {
        return key;
    }
    let mut snake = String::with_capacity(key.len() + 4);
    for c in key.chars() {
        if c.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use std::time::{Duration, Instant};

    #[test]
    fn yaml_is_read_as_envoy_reads_it() {
        for (text, expected) in [
            ("a: &x {b: 1}\nc: *x", json!({"a": {"b": 1}, "c": {"b": 1}})),
            ("!ignore a: &x {b: 1}\nc: *x", json!({"c": {"b": 1}})),
            ("a: !ignore 1\nb:", json!({"a": 1, "b": null})),
            ("<<: {a: 1}\nb: 2", json!({"<<": {"a": 1}, "b": 2})),
            ("a: 1\na: 2", json!({"a": 2})),
            ("a: 1\n---\na: 2", json!({"a": 1})),
            (
                "connectTimeout: 1\nx.y.HttpOptions: 2\nX: 3",
                json!({"connect_timeout": 1, "x.y.HttpOptions": 2, "X": 3}),
            ),
            ("{\"maxRetries\": 1}", json!({"max_retries": 1})),
            ("1: a\ntrue: b", json!({"1": "a", "true": "b"})),
            (
                "c: {'@type': x/google.protobuf.Struct, value: {aB: 1}}",
                json!({"c": {"@type": "x/google.protobuf.Struct", "value": {"aB": 1}}}),
            ),
        ] {
            assert_eq!(crate::read::text(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn unreadable_text_fails_soon_with_a_reason() {
        let bomb = (0..30).fold("a0: &a0 [x, x]\n".to_owned(), |text, i| {
            format!("{text}a{}: &a{} [*a{i}, *a{i}, *a{i}]\n", i + 1, i + 1)
        });
        // Few enough repetitions for the parser, but too many values.
        let wide = format!("a: &a [{}]\nb: [{}]\n", "x, ".repeat(60_000), "*a, ".repeat(90));
        let deep_blocks: String = (0..300).map(|i| format!("{}a:\n", " ".repeat(i))).collect();
        for text in [
            String::new(),
            "a: [".into(),
            "a: *nobody".into(),
            "[a]: b".into(),
            "\t- x: :".into(),
            "[".repeat(1 << 20),
            "{a: ".repeat(1 << 18),
            "[\n".repeat(1 << 18),
            "- ".repeat(1 << 18),
            "? ".repeat(1 << 18),
            format!("{}1{}", "[".repeat(900), "]".repeat(900)),
            format!("{}1{}", "[".repeat(1 << 19), "]".repeat(1 << 19)),
            format!("{}1{}", "{\"a\":".repeat(900), "}".repeat(900)),
            deep_blocks,
            bomb,
            wide,
        ] {
            let started = Instant::now();
            let error = crate::read::text(&text);
            let head: String = text.chars().take(20).collect();
            assert!(error.is_err(), "{head:?}: {error:?}");
            assert!(started.elapsed() < Duration::from_secs(60), "{head:?} took {:?}", started.elapsed());
        }
    }
}
