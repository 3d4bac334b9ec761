//! Prequal's headers, and the filters that remove them.

use std::collections::BTreeSet;

use super::At;

/// Prequal's headers, which clients must neither send nor see.
pub(super) const HEADERS: [&str; 7] = [
    DEST,
    LOAD,
    "x-prequal-rif",
    "x-prequal-latency-us",
    "x-prequal-hint",
    "x-prequal-host",
    "x-prequal-failure",
];
pub(super) const DEST: &str = "x-prequal-dest";
pub(super) const LOAD: &str = "x-prequal-load";

/// Returns Prequal's headers that a `header_mutation` filter removes on one side.
pub(super) fn removed(filter: &At<'_>, side: &str) -> BTreeSet<&'static str> {
    let mutations = filter.typed("HeaderMutation").and_then(|filter| filter.get("mutations"));
    let list = mutations.map(|mutations| mutations.list(side)).unwrap_or_default();
    let removes = |mutation: &At<'_>, ours: &str| {
        let pattern = mutation.at(&["remove_on_match", "key_matcher"]);
        let matched = pattern.is_some_and(|pattern| {
            pattern.text("prefix").is_some_and(|prefix| ours.starts_with(prefix))
                || pattern.text("exact") == Some(ours)
        });
        matched || mutation.text("remove").is_some_and(|name| name.eq_ignore_ascii_case(ours))
    };
    HEADERS.into_iter().filter(|ours| list.iter().any(|mutation| removes(mutation, ours))).collect()
}
