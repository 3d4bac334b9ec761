//! Discovery: the file of endpoints that both Envoys watch.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Port on which the agents listen.
pub(crate) const SERVICE_PORT: u16 = 8080;

/// All replicas, their addresses, and which of them discovery lists now.
#[derive(Debug)]
pub(crate) struct Endpoints {
    pub(crate) replicas: u16,
    file: PathBuf,
    addresses: BTreeMap<u16, IpAddr>,
    taken_out: BTreeMap<u16, Instant>,
    spare_until: Option<Instant>,
    version: u64,
    written: Vec<u16>,
}

impl Endpoints {
    /// The endpoints of `replicas` replicas, of which the last one is a spare. No address is known yet.
    pub(crate) fn new(replicas: u16, file: PathBuf) -> Self {
        Self {
            replicas,
            file,
            addresses: BTreeMap::new(),
            taken_out: BTreeMap::new(),
            spare_until: None,
            version: 0,
            written: Vec::new(),
        }
    }

    pub(crate) fn take_out(&mut self, replica: u16, until: Instant) {
        self.taken_out.insert(replica, until);
    }

    pub(crate) fn bring_in(&mut self, until: Instant) {
        self.spare_until = Some(until);
    }

    /// Records the address of a replica. Returns true if it is new.
    pub(crate) fn found(&mut self, replica: u16, address: SocketAddr) -> bool {
        self.addresses.insert(replica, address.ip()) != Some(address.ip())
    }

    pub(crate) fn address(&self, replica: u16) -> Option<IpAddr> {
        self.addresses.get(&replica).copied()
    }

    /// Replicas that discovery lists at `now`.
    pub(crate) fn in_rotation(&self, now: Instant) -> Vec<u16> {
        self.addresses
            .keys()
            .copied()
            .filter(|number| *number != self.replicas || self.spare_until.is_some_and(|end| now < end))
            .filter(|number| self.taken_out.get(number).is_none_or(|end| now >= *end))
            .collect()
    }

    /// Whether the file differs from what is valid at `now`.
    pub(crate) fn stale(&self, now: Instant) -> bool {
        self.in_rotation(now) != self.written
    }

    /// Writes the complete file and then moves it into place, as Envoy requires.
    pub(crate) fn write(&mut self) -> Result<()> {
        let now = self.in_rotation(Instant::now());
        self.version += 1;
        let scratch = self.file.with_extension("new");
        std::fs::write(&scratch, self.assignment(&now).to_string())
            .and_then(|()| std::fs::rename(&scratch, &self.file))
            .with_context(|| format!("writing {}", self.file.display()))?;
        self.written = now;
        Ok(())
    }

    fn assignment(&self, replicas: &[u16]) -> Value {
        let endpoints: Vec<Value> = replicas
            .iter()
            .filter_map(|number| self.addresses.get(number))
            .map(|ip| {
                let address = json!({"address": ip.to_string(), "port_value": SERVICE_PORT});
                json!({"endpoint": {"address": {"socket_address": address}}})
            })
            .collect();
        json!({
            "version_info": self.version.to_string(),
            "resources": [{
                "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": "replicas",
                "endpoints": [{"lb_endpoints": endpoints}],
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn spare_and_removed_replicas_come_and_go_by_themselves() {
        let mut endpoints = Endpoints::new(4, PathBuf::from("unused"));
        for number in 1..=4 {
            assert!(endpoints.found(number, SocketAddr::from(([10, 0, 0, number as u8], 80))));
        }
        let now = Instant::now();
        let soon = now + Duration::from_secs(5);
        assert_eq!(endpoints.in_rotation(now), [1, 2, 3]);
        endpoints.bring_in(soon);
        endpoints.take_out(2, soon);
        assert_eq!(endpoints.in_rotation(now), [1, 3, 4]);
        assert_eq!(endpoints.in_rotation(soon), [1, 2, 3]);
        let text = endpoints.assignment(&[1, 3]).to_string();
        assert!(
            text.contains("10.0.0.1") && text.contains("10.0.0.3") && !text.contains("10.0.0.2"),
            "{text}"
        );
    }
}
