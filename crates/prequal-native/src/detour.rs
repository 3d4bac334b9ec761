//! Requests to hosts that are not healthy: degraded hosts, and in panic mode all hosts.
//!
//! Envoy lets the policy of a dynamic module name only healthy hosts. So an HTTP filter of the listener selects the
//! requests that a built-in policy would send to other hosts. It names such a host as the *override host* of the
//! request, and Envoy then does not ask the policy. Retries have no override host.

use std::cell::RefCell;
use std::rc::Rc;

use prequal_core::shared::endpoint::Endpoint;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

thread_local! {
    /// The detours, by cluster.
    static DETOURS: RefCell<Vec<(String, DetourRef)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) type DetourRef = Rc<RefCell<Detour>>;

/// Hosts of one cluster that are in use and that its policy cannot name.
pub(crate) struct Detour {
    /// Share of the requests whose host the policy chooses.
    policys: f64,
    hosts: Vec<Endpoint>,
    /// For each host, the policy's share plus the shares of the hosts up to it.
    sums: Vec<f64>,
    rng: SmallRng,
}

/// Returns the detour of the cluster on this thread.
pub(crate) fn of(cluster: &str) -> DetourRef {
    DETOURS.with_borrow_mut(|all| {
        if let Some((_, detour)) = all.iter().find(|(name, _)| name == cluster) {
            return Rc::clone(detour);
        }
        let new = Rc::new(RefCell::new(Detour::new(SmallRng::from_os_rng())));
        all.push((cluster.to_owned(), Rc::clone(&new)));
        new
    })
}

/// Removes the detour when its policy ends, unless a new configuration of the cluster already uses it.
pub(crate) fn remove(detour: &DetourRef) {
    // The list and the ending policy hold one reference each.
    if Rc::strong_count(detour) <= 2 {
        DETOURS.with_borrow_mut(|all| all.retain(|(_, other)| !Rc::ptr_eq(other, detour)));
    }
}

/// Chooses the host of a request to the cluster; `None` leaves the choice to the policy.
pub(crate) fn choose(cluster: &[u8]) -> Option<Endpoint> {
    DETOURS.with_borrow(|all| {
        let (_, detour) = all.iter().find(|(name, _)| name.as_bytes() == cluster)?;
        detour.borrow_mut().draw()
    })
}

impl Detour {
    fn new(rng: SmallRng) -> Self {
        Self { policys: 0.0, hosts: Vec::new(), sums: Vec::new(), rng }
    }

    /// Sets the hosts with their shares, and the share of the policy.
    pub(crate) fn set(&mut self, policys: f64, hosts: &[(Endpoint, f64)]) {
        self.policys = policys;
        self.hosts = hosts.iter().map(|(host, _)| *host).collect();
        let mut sum = policys;
        let add = |(_, share): &(Endpoint, f64)| {
            sum += share;
            sum
        };
        self.sums = hosts.iter().map(add).collect();
    }

    fn draw(&mut self) -> Option<Endpoint> {
        let point = self.rng.random_range(0.0..*self.sums.last()?);
        if point < self.policys {
            return None;
        }
        self.hosts.get(self.sums.partition_point(|sum| *sum <= point)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(n: u16) -> Endpoint {
        std::net::SocketAddr::from(([10, 0, 0, 1], n)).into()
    }

    #[test]
    fn requests_are_shared_between_the_policy_and_the_other_hosts() {
        let mut detour = Detour::new(SmallRng::seed_from_u64(1));
        assert_eq!(detour.draw(), None);
        detour.set(70.0, &[(endpoint(1), 10.0), (endpoint(2), 20.0)]);
        let mut counts = [0_u32; 3];
        (0..10_000).for_each(|_| counts[detour.draw().map_or(0, |host| usize::from(host.port()))] += 1);
        let near = |(count, share): (&u32, u32)| share.abs_diff(*count) < 200;
        assert!(counts.iter().zip([7000, 1000, 2000]).all(near), "{counts:?}");
        detour.set(0.0, &[(endpoint(1), 100.0)]);
        assert!((0..100).all(|_| detour.draw() == Some(endpoint(1))));
    }

    #[test]
    fn a_new_configuration_keeps_the_detour_of_its_cluster() {
        let old = of("a");
        let new = of("a");
        new.borrow_mut().set(0.0, &[(endpoint(1), 1.0)]);
        remove(&old);
        drop(old);
        assert_eq!(choose(b"a"), Some(endpoint(1)));
        remove(&new);
        assert_eq!(choose(b"a"), None);
    }
}
