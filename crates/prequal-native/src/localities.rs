//! Which of a priority's localities a host belongs to.
//!
//! Envoy numbers the localities. It shows the weight of each by number, and the number of each healthy host's locality.
//! It does not show the number of any other host's locality.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the number of each host's locality. `names` has the name of each host's locality. `numbered` has, by number,
/// the name of each locality that has a healthy host.
///
/// Envoy numbers localities in the order of their names, except that its own locality comes first. So the names without
/// a number belong, in order, to the numbers without a name. This may be wrong if Envoy's own locality and another one
/// have no healthy host.
pub(crate) fn numbers<N: Copy + Ord>(names: &[N], numbered: &[Option<N>]) -> Vec<usize> {
    let named = numbered.iter().enumerate().filter_map(|(number, name)| Some(((*name)?, number)));
    let mut numbers: BTreeMap<N, usize> = named.collect();
    let left: BTreeSet<N> = names.iter().copied().filter(|name| !numbers.contains_key(name)).collect();
    let unnamed = numbered.iter().enumerate().filter(|(_, name)| name.is_none()).map(|(number, _)| number);
    numbers.extend(left.into_iter().zip(unnamed));
    names.iter().map(|name| numbers.get(name).copied().unwrap_or(usize::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn localities_without_healthy_hosts_are_numbered_by_name() {
        assert_eq!(numbers(&["b", "a", "b"], &[Some("a"), Some("b")]), [1, 0, 1]);
        // "c" is Envoy's own locality.
        assert_eq!(numbers(&["a", "b", "c", "d"], &[Some("c"), None, Some("b"), None]), [1, 2, 0, 3]);
        assert_eq!(numbers(&["b", "a"], &[None, None]), [1, 0]);
        assert_eq!(numbers(&["a", "b"], &[Some("a")]), [0, usize::MAX]);
    }
}
