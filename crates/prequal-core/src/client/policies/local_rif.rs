//! Client-local RIF: how many of one client's own requests each replica is serving.

/// Number of this client's requests in flight, per replica.
#[derive(Clone, Debug)]
pub struct LocalRif(Vec<u32>);

impl LocalRif {
    /// Creates the counts of `replicas` replicas, at least one.
    pub fn new(replicas: usize) -> Self {
        Self(vec![0; replicas.max(1)])
    }

    /// Creates counts without any replica.
    pub fn empty() -> Self {
        Self(Vec::new())
    }

    /// Adds a replica under the next number.
    pub fn join(&mut self) {
        self.0.push(0);
    }

    /// Removes a replica; the last one takes its number.
    pub fn leave(&mut self, replica: usize) {
        if replica < self.0.len() {
            self.0.swap_remove(replica);
        }
    }

    /// Returns the count of a replica; 0 if there is no such replica.
    pub fn of(&self, replica: usize) -> u32 {
        self.0.get(replica).copied().unwrap_or(0)
    }

    /// Counts a request that is sent to the replica.
    pub fn start(&mut self, replica: usize) {
        if let Some(count) = self.0.get_mut(replica) {
            *count += 1;
        }
    }

    /// Counts down when a request to the replica has ended.
    pub fn end(&mut self, replica: usize) {
        if let Some(count) = self.0.get_mut(replica) {
            *count = count.saturating_sub(1);
        }
    }

    /// Returns the number of replicas.
    pub fn replicas(&self) -> usize {
        self.0.len()
    }
}
