//! Requests that wait for probes of their own (`docs/adr/0006-sync-mode.md`).

use std::collections::HashMap;

use crate::sync::{Answer, Ending, Waiting};
use crate::time::Micros;

/// A request that waits.
#[derive(Debug)]
pub struct Wait<T> {
    /// When it came.
    pub began: Micros,
    /// When it has waited enough.
    pub deadline: Micros,
    /// What it has heard.
    pub waiting: Waiting,
    /// What the host needs to let it go on.
    pub host: T,
}

/// The waiting requests of one worker, by the host's numbers.
#[derive(Debug)]
pub struct Waits<T> {
    open: HashMap<u32, Wait<T>>,
    /// No deadline comes before this.
    earliest: Option<Micros>,
    /// The latest look at the clock.
    looked: Micros,
}

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Self { open: HashMap::new(), earliest: None, looked: Micros(0) }
    }
}

impl<T> Waits<T> {
    /// Whether the request waits.
    pub fn contains(&self, request: u32) -> bool {
        self.open.contains_key(&request)
    }

    /// The request has ended, or something else answers it. True if it still waited.
    pub fn forget(&mut self, request: u32) -> bool {
        self.open.remove(&request).is_some()
    }

    /// The request waits from now on.
    pub fn begin(&mut self, request: u32, wait: Wait<T>) {
        let deadline = wait.deadline;
        self.open.insert(request, wait);
        self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
    }

    /// A call of the request has ended; the wait, if that was the end of it.
    pub fn ended(&mut self, request: u32, answer: Option<Answer>) -> Option<(Wait<T>, Ending)> {
        let ending = self.open.get_mut(&request)?.waiting.ended(answer)?;
        Some((self.open.remove(&request)?, ending))
    }

    /// Those whose deadline has passed. A clock that steps back ends all waits: none may outlive its deadline.
    pub fn expired(&mut self, now: Micros) -> Vec<(u32, Wait<T>)> {
        let stepped_back = now < std::mem::replace(&mut self.looked, now);
        if !stepped_back && self.earliest.is_none_or(|earliest| now < earliest) {
            return Vec::new();
        }
        let over = |wait: &Wait<T>| stepped_back || now >= wait.deadline;
        let expired: Vec<u32> =
            self.open.iter().filter(|(_, wait)| over(wait)).map(|(request, _)| *request).collect();
        let expired = expired.iter().filter_map(|request| self.open.remove_entry(request)).collect();
        self.earliest = self.open.values().map(|wait| wait.deadline).min();
        expired
    }

    /// When somebody's deadline passes; none does before.
    pub fn earliest(&self) -> Option<Micros> {
        self.earliest
    }
}
