//! Which of a priority's localities a host belongs to.
//!
//! Envoy shows the weights of localities by number, and the numbers of healthy hosts. It does not show the numbers of others.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the number of each host's locality. `names` has the name of each host's locality, and `numbered` that of each locality
/// with a healthy host, by number.
///
/// Envoy numbers localities by name, except that its own comes first. So the names that are left belong to the numbers that are
/// left, in order. This may be wrong if Envoy's own locality and another have no healthy host.
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
        // "c" is Envoy's own.
        assert_eq!(numbers(&["a", "b", "c", "d"], &[Some("c"), None, Some("b"), None]), [1, 2, 0, 3]);
        assert_eq!(numbers(&["b", "a"], &[None, None]), [1, 0]);
        assert_eq!(numbers(&["a", "b"], &[Some("a")]), [0, usize::MAX]);
    }
}
