//! The learned membership: which replicas exist, learned from reports, and which of them to probe next.
//!
//! Envoy's own discovery stays the source of truth. Some probes go out without an address, the probe cluster's policy
//! finds some host, and the reply names it: a *candidate*. A candidate gets one request, and Envoy's word for who
//! served that request makes it a *member*. No reply of a replica alone does, so one that invents endpoints fills a
//! small bounded list, costs one unsteered request each, and nothing else.
//!
//! Probe targets are sampled uniformly without replacement (paper §4, "Probing rate").

use rand::Rng;

use crate::endpoint::Endpoint;
use crate::pool::BlobError;
use crate::time::{Micros, Stamp};

/// Most members kept.
pub const MAX_MEMBERS: usize = 10_000;
/// Most candidates kept.
pub const MAX_CANDIDATES: usize = 64;
/// A member not heard from for this long is forgotten, milliseconds. Only a long stop: a probe addressed to a host
/// that has left is answered by another, which tells at once.
pub const MEMBER_TTL_MS: u32 = 600_000;
/// A candidate not confirmed for this long is forgotten, milliseconds.
pub const CANDIDATE_TTL_MS: u32 = 5_000;
/// Stamps are renewed at most this often, so that the blob is not rewritten for every report.
const RENEW_MS: u32 = 5_000;

/// How a replica became known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Evidence {
    /// Envoy says that it served a request, or the configuration names it.
    Confirmed,
    /// A reply to a probe names it.
    Hearsay,
}

/// Replicas of one upstream cluster.
#[derive(Clone, Debug, Default)]
pub struct Members {
    list: Vec<Member>,
}

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Member {
    endpoint: Endpoint,
    seen: Stamp,
    /// 0 where the serving port answers probes.
    probe_port: u16,
    confirmed: u16,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
    magic: u32,
    version: u16,
    record: u16,
    count: u32,
}

/// A replica to probe.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Target {
    /// Who is asked: the serving endpoint that its reply must name.
    pub replica: Endpoint,
    /// Where to ask.
    pub probe: Endpoint,
}

impl Members {
    /// Reads a blob.
    ///
    /// # Errors
    /// [`BlobError`] for anything that [`Self::encode`] of this version did not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let (header, records) = bytes
            .split_at_checked(size_of::<Header>())
            .ok_or(BlobError::Size { got: bytes.len(), want: size_of::<Header>() })?;
        let header: Header = bytemuck::pod_read_unaligned(header);
        if header.magic != MAGIC
            || header.version != VERSION
            || usize::from(header.record) != size_of::<Member>()
        {
            return Err(BlobError::Version);
        }
        let count = header.count as usize;
        let want = count.saturating_mul(size_of::<Member>());
        if count > MAX_MEMBERS + MAX_CANDIDATES {
            return Err(BlobError::Content);
        }
        if records.len() != want {
            return Err(BlobError::Size { got: records.len(), want });
        }
        let list: Vec<Member> =
            records.chunks_exact(size_of::<Member>()).map(bytemuck::pod_read_unaligned).collect();
        if !list.iter().all(|member| member.endpoint.is_valid() && member.confirmed <= 1) {
            return Err(BlobError::Content);
        }
        Ok(Self { list })
    }

    /// The blob.
    pub fn encode(&self) -> Vec<u8> {
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            record: size_of::<Member>() as u16,
            count: self.list.len() as u32,
        };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.list));
        bytes
    }

    /// Members, candidates left out.
    pub fn count(&self) -> u32 {
        self.list.iter().filter(|member| member.confirmed == 1).count() as u32
    }

    /// Whether the endpoint is a member.
    pub fn contains(&self, endpoint: Endpoint) -> bool {
        self.list.iter().any(|member| member.endpoint == endpoint && member.confirmed == 1)
    }

    /// Takes note of a replica. Returns whether the blob must be written.
    pub fn observe(
        &mut self,
        endpoint: Endpoint,
        probe: Option<Endpoint>,
        evidence: Evidence,
        now: Micros,
    ) -> bool {
        let stamp = now.stamp();
        let confirmed = u16::from(evidence == Evidence::Confirmed);
        let probe_port = probe.map_or(0, |probe| probe.port());
        if let Some(known) = self.list.iter_mut().find(|member| member.endpoint == endpoint) {
            if confirmed == 0 {
                // Hearsay neither renews nor changes what is known.
                return false;
            }
            let changed = known.confirmed == 0
                || known.probe_port != probe_port
                || stamp.distance_ms(known.seen) >= RENEW_MS;
            if changed {
                *known = Member { endpoint, seen: stamp, probe_port, confirmed };
            }
            return changed;
        }
        let limit = if confirmed == 1 { MAX_MEMBERS } else { MAX_CANDIDATES };
        let alike = self.list.iter().filter(|member| member.confirmed == confirmed).count();
        if alike >= limit {
            return false;
        }
        self.list.push(Member { endpoint, seen: stamp, probe_port, confirmed });
        true
    }

    /// Makes a member of a replica that served a request; where it answers probes is kept. Returns whether the blob must
    /// be written.
    pub fn confirm(&mut self, endpoint: Endpoint, now: Micros) -> bool {
        let known = self.list.iter().find(|member| member.endpoint == endpoint).map(Member::target);
        let probe = known.map(|target| target.probe).filter(|probe| *probe != endpoint);
        self.observe(endpoint, probe, Evidence::Confirmed, now)
    }

    /// Takes note that a member is alive. Returns whether the blob must be written.
    pub fn renew(&mut self, endpoint: Endpoint, now: Micros) -> bool {
        let stamp = now.stamp();
        let known = self.list.iter_mut().find(|member| member.endpoint == endpoint && member.confirmed == 1);
        match known {
            Some(member) if stamp.distance_ms(member.seen) >= RENEW_MS => {
                member.seen = stamp;
                true
            }
            _ => false,
        }
    }

    /// Forgets a replica that has left. Returns whether the blob must be written.
    pub fn remove(&mut self, endpoint: Endpoint) -> bool {
        let before = self.list.len();
        self.list.retain(|member| member.endpoint != endpoint);
        self.list.len() != before
    }

    /// Forgets whoever has been silent too long. Returns whether the blob must be written.
    pub fn expire(&mut self, now: Micros) -> bool {
        let stamp = now.stamp();
        let before = self.list.len();
        self.list.retain(|member| {
            let ttl = if member.confirmed == 1 { MEMBER_TTL_MS } else { CANDIDATE_TTL_MS };
            stamp.distance_ms(member.seen) < ttl
        });
        self.list.len() != before
    }

    /// Up to `count` distinct targets, uniformly, without those that `skip` names. When that leaves nobody, all
    /// are eligible.
    pub fn sample(&self, count: usize, rng: &mut impl Rng, skip: impl Fn(Endpoint) -> bool) -> Vec<Target> {
        let mut eligible: Vec<&Member> = self.list.iter().filter(|member| !skip(member.endpoint)).collect();
        if eligible.is_empty() {
            eligible = self.list.iter().collect();
        }
        let count = count.min(eligible.len());
        // Partial Fisher-Yates: the first `count` places hold a uniform sample.
        for i in 0..count {
            let other = rng.random_range(i..eligible.len());
            eligible.swap(i, other);
        }
        eligible.into_iter().take(count).map(Member::target).collect()
    }
}

impl Member {
    fn target(&self) -> Target {
        let probe = match self.probe_port {
            0 => self.endpoint,
            port => self.endpoint.with_port(port),
        };
        Target { replica: self.endpoint, probe }
    }
}

const MAGIC: u32 = 0x6d65_6d62; // "memb"
const VERSION: u16 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::SmallRng};

    fn replica(n: u16) -> Endpoint {
        format!("[2001:db8::7]:{}", 1000 + n).parse().unwrap()
    }

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    fn fleet(n: u16) -> Members {
        let mut members = Members::default();
        for i in 0..n {
            assert!(members.observe(replica(i), None, Evidence::Confirmed, ms(0)));
        }
        members
    }

    #[test]
    fn targets_are_distinct_and_uniform() {
        let members = fleet(10);
        let mut rng = SmallRng::seed_from_u64(3);
        let mut hits = [0u32; 10];
        for _ in 0..10_000 {
            let targets = members.sample(3, &mut rng, |_| false);
            assert_eq!(targets.len(), 3);
            assert!(targets[0] != targets[1] && targets[1] != targets[2] && targets[0] != targets[2]);
            for target in targets {
                hits[usize::from(target.replica.port() - 1000)] += 1;
            }
        }
        assert!(hits.iter().all(|hit| (2800..=3200).contains(hit)), "{hits:?}");
    }

    #[test]
    fn fresh_replicas_are_passed_over_unless_all_are_fresh() {
        let members = fleet(3);
        let mut rng = SmallRng::seed_from_u64(3);
        let targets = members.sample(3, &mut rng, |endpoint| endpoint != replica(2));
        assert_eq!(targets, [Target { replica: replica(2), probe: replica(2) }]);
        assert_eq!(members.sample(2, &mut rng, |_| true).len(), 2);
    }

    #[test]
    fn hearsay_makes_candidates_bounded_and_short_lived() {
        let mut members = fleet(2);
        for i in 0..10_000u16 {
            members.observe(replica(100 + i), None, Evidence::Hearsay, ms(1));
        }
        assert_eq!((members.count(), members.list.len()), (2, 2 + MAX_CANDIDATES));
        assert!(members.expire(ms(6_000)));
        assert_eq!(members.list.len(), 2);
    }

    #[test]
    fn a_candidate_that_answers_becomes_a_member() {
        let mut members = Members::default();
        members.observe(replica(1), None, Evidence::Hearsay, ms(0));
        assert_eq!(members.count(), 0);
        assert!(members.observe(replica(1), Some(replica(9)), Evidence::Confirmed, ms(1)));
        let targets = members.sample(1, &mut SmallRng::seed_from_u64(1), |_| false);
        assert_eq!(targets, [Target { replica: replica(1), probe: replica(9) }]);
    }

    #[test]
    fn the_blob_is_rewritten_for_news_only() {
        let mut members = fleet(1);
        assert!(!members.observe(replica(0), None, Evidence::Confirmed, ms(100)));
        assert!(members.observe(replica(0), None, Evidence::Confirmed, ms(5_000)));
        assert!(members.observe(replica(0), Some(replica(5)), Evidence::Confirmed, ms(5_001)));
        assert!(members.renew(replica(0), ms(20_000)) && !members.renew(replica(0), ms(20_001)));
        assert!(!members.expire(ms(600_000)));
        assert!(members.expire(ms(620_001)));
    }

    proptest! {
        #[test]
        fn blobs_round_trip_and_no_bytes_panic(n in 0u16..50, bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..1000) {
            let members = fleet(n);
            let blob = members.encode();
            let again = Members::decode(&blob).unwrap();
            prop_assert_eq!(again.encode(), blob.clone());
            let _ = Members::decode(&bytes);
            let cut = cut % (blob.len() + 1);
            if cut < blob.len() {
                prop_assert!(Members::decode(&blob[..cut]).is_err());
            }
        }
    }
}
