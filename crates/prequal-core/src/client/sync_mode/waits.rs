//! Requests that wait for their own probes (`docs/design/adr/0006-sync-mode.md`).

use std::collections::HashMap;

use super::{Answer, Ending, Waiting};
use crate::shared::time::Micros;

/// A request that waits.
#[derive(Debug)]
pub struct Wait<T> {
    /// Time at which the request arrived.
    pub began: Micros,
    /// Time at which the wait ends at the latest.
    pub deadline: Micros,
    /// The answers received.
    pub waiting: Waiting,
    /// The embedder's data for resuming the request.
    pub host: T,
}

/// The waiting requests of one worker, by the number that the embedder gave each.
#[derive(Debug)]
pub struct Waits<T> {
    open: HashMap<u32, Wait<T>>,
    /// Time before which no deadline passes.
    earliest: Option<Micros>,
    /// Time of the last check.
    looked: Micros,
}

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Self { open: HashMap::new(), earliest: None, looked: Micros(0) }
    }
}

impl<T> Waits<T> {
    /// Whether the request is waiting.
    pub fn contains(&self, request: u32) -> bool {
        self.open.contains_key(&request)
    }

    /// Drops a request that has ended or no longer needs to wait. Returns true if it was still waiting.
    pub fn forget(&mut self, request: u32) -> bool {
        self.open.remove(&request).is_some()
    }

    /// Adds a request that waits from now on.
    pub fn begin(&mut self, request: u32, wait: Wait<T>) {
        let deadline = wait.deadline;
        self.open.insert(request, wait);
        self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
    }

    /// Records that a probe of the request has ended. Returns the wait if that ends it.
    pub fn ended(&mut self, request: u32, answer: Option<Answer>) -> Option<(Wait<T>, Ending)> {
        let ending = self.open.get_mut(&request)?.waiting.ended(answer)?;
        Some((self.open.remove(&request)?, ending))
    }

    /// Removes and returns the requests whose deadline has passed. A clock that steps back ends all waits, as none may
    /// outlive its deadline.
    pub fn expired(&mut self, now: Micros) -> Vec<(u32, Wait<T>)> {
        let stepped_back = now < std::mem::replace(&mut self.looked, now);
        if !stepped_back && self.earliest.is_none_or(|earliest| now < earliest) {
            return Vec::new();
        }
        let over = |wait: &Wait<T>| stepped_back || now >= wait.deadline;
        let mut expired: Vec<u32> =
            self.open.iter().filter(|(_, wait)| over(wait)).map(|(request, _)| *request).collect();
        // The order of a map is random, and decisions must be repeatable.
        expired.sort_unstable();
        let expired = expired.iter().filter_map(|request| self.open.remove_entry(request)).collect();
        self.earliest = self.open.values().map(|wait| wait.deadline).min();
        expired
    }

    /// Returns a time before which no deadline passes; `None` if there is no deadline.
    pub fn earliest(&self) -> Option<Micros> {
        self.earliest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_expire_together_are_returned_in_the_order_of_their_numbers() {
        let mut waits = Waits::default();
        for request in (0..50).rev() {
            let (began, deadline, waiting) = (Micros(1), Micros(1000), Waiting::new(3, 3));
            waits.begin(request, Wait { began, deadline, waiting, host: () });
        }
        let expired: Vec<u32> = waits.expired(Micros(1000)).into_iter().map(|(request, _)| request).collect();
        assert!(expired.is_sorted() && expired.len() == 50, "{expired:?}");
    }
}
