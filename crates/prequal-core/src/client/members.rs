//! The learned membership: which replicas exist, which of them Envoy's own policy uses now and in which proportion, and
//! which to probe next.
//!
//! Envoy's own discovery and placement (priorities, localities, endpoint weights) stay the source of truth. Some probes
//! go out without an address. The policy of the probe cluster, which has the endpoints of the serving cluster, then
//! chooses a host. Where Envoy vouches for the host that answered (`verified_probes`), each such probe is a *sample* of
//! the policy:
//!
//! - A replica that no sample has met for [`CYCLES`] rounds is *out of use* (a lower priority, another locality) until
//!   a sample meets it again.
//! - The replicas' shares of the samples are their weights ([`Placement`]).
//!
//! A replica that serves a request and has never reported is *agentless*. Until it reports, it is not probed and does
//! not count as in use; it is chosen by its number of requests in flight (`balancer/agentless.rs`).
//!
//! Time alone does not change a placement: without samples, it stays as it is. Where Envoy does not vouch, a reply to a
//! probe makes the replica that it names at most a *candidate*. The candidate gets one request, and becomes a member if
//! Envoy confirms that it served the request. A replica that invents endpoints therefore fills a small bounded list and
//! costs one unsteered request for each endpoint, but does no other harm.
//!
//! Probe targets are sampled uniformly without replacement (paper §4, "Probing rate").
//!
//! Members are found by binary search, and passes over all of them are rare, so an event costs no more in a large
//! fleet. The exceptions are requests with a hint, and all requests while some replicas are agentless. Reading and
//! writing the blob costs more too, so each worker keeps a copy and shares its notes at its tick ([`View`]).

use std::borrow::Cow;

use rand::Rng;
use rand::seq::SliceRandom;

use crate::shared::blob::{Blob, BlobError, Tag};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};
use crate::wire::hint::{HOMES, HintHash};

mod view;

pub use view::{Lost, Note, View};

/// Maximum number of members. Further replicas are refused, and counted ([`View::take_lost`]), until a member is
/// forgotten.
pub const MAX_MEMBERS: usize = 10_000;
/// Maximum number of candidates.
pub const MAX_CANDIDATES: usize = 64;
/// Time without news after which a member is forgotten, milliseconds. This is only a last resort: when a host has left,
/// another host answers the probe addressed to it, which reveals the departure at once.
pub const MEMBER_TTL_MS: u32 = 600_000;
/// Time without news of any member after which the cluster counts as idle, milliseconds. No member ages meanwhile,
/// because idleness is not evidence that a replica has left.
const QUIET_MS: u32 = 60_000;
/// Time without confirmation after which a candidate is forgotten, milliseconds.
pub const CANDIDATE_TTL_MS: u32 = 5_000;
/// A replica that no sample has met for this many rounds is out of use. A round is as many samples as there are
/// replicas in use, and more for replicas of low weight. A policy that draws at random misses a replica for that long
/// with probability e^-10.
pub const CYCLES: u32 = 10;
/// Minimum time between renewals of a stamp, milliseconds, so that the blob is not rewritten for every report.
const RENEW_MS: u32 = 5_000;
/// Number of rounds of samples in which a replica's weight counts as average. When a proxy starts, the first samples of a
/// replica are answered together, once its connection is open. The first replicas to answer would seem to have a high
/// weight, and would be out of use after a few samples of the others.
const LEAST_ROUNDS: u32 = 4;
/// Number of rounds after which a replica's count is halved.
const MOST_ROUNDS: u32 = 96;
/// Unit of [`Members::rounds`].
const ROUND: u32 = 1 << 20;
/// Number of searches, per round of samples, for replicas that have gone out of use. Fleets up to this size are
/// searched at every sample.
const LOOKS_PER_ROUND: u32 = 32;

/// How a replica became known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Evidence {
    /// Envoy's own policy chose it.
    Placed,
    /// Envoy confirms that it served a request steered to it, or the configuration names it.
    Served,
    /// A reply to a probe names it.
    Hearsay,
}

/// Placement of a replica by Envoy's own policy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Placement {
    /// Number of the last sample that met the replica.
    pub(crate) sampled: u32,
    /// Share of the samples relative to the mean, in units of 1/16; 1 to 4096.
    pub(crate) weight: u16,
}

impl Placement {
    /// The weight of an average replica.
    pub(crate) const UNIT: u16 = 16;

    /// Returns the placement of a replica of average weight, as of sample number `sampled`.
    pub const fn even(sampled: u32) -> Self {
        Self { sampled, weight: Self::UNIT }
    }

    /// Whether the replica is in use after `samples` samples in all, over `in_use` replicas. Counts wrap; a count in
    /// the future is as suspect as an old one.
    pub(crate) fn is_in_use(&self, samples: u32, in_use: u32) -> bool {
        let missed = u64::from((samples.wrapping_sub(self.sampled) as i32).unsigned_abs());
        let rounds = u64::from(CYCLES) * u64::from(in_use.max(1));
        missed * u64::from(self.weight) <= rounds * u64::from(Self::UNIT)
    }
}

/// Replicas of one upstream cluster.
#[derive(Clone, Debug, Default)]
pub struct Members {
    /// Sorted by endpoint.
    list: Vec<Member>,
    /// Number of samples of the policy so far, modulo 2^32.
    samples: u32,
    /// Number of rounds so far, in units of 1 / [`ROUND`], modulo 2^32. A round is one sample per replica in use.
    rounds: u32,
    tally: Tally,
}

/// Counts that would otherwise have to be computed at every event.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Tally {
    candidates: usize,
    in_use: u32,
    agentless: u32,
    /// Number of members, in use or not, that have not reported yet.
    awaiting: u32,
}

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Member {
    endpoint: Endpoint,
    seen: Stamp,
    sampled: u32,
    /// [`Members::rounds`] when it came into use, moved up whenever `hits` are halved. A replica of average weight has as
    /// many hits as there have been rounds since then.
    since: u32,
    /// Number of samples that have met it since it came into use, halved occasionally; see [`MOST_ROUNDS`].
    hits: u16,
    /// 0 if the serving port answers probes.
    probe_port: u16,
    /// Weight at the last sample that met it. While no sample meets the replica, its weight must not decrease: with a
    /// lower weight, the replica would count as in use for longer.
    weight: u16,
    rank: u8,
    /// 1 once the replica has reported its load.
    reported: u8,
}

/// Values of `Member::rank`.
const CANDIDATE: u8 = 0;
const OUT_OF_USE: u8 = 1;
const IN_USE: u8 = 2;
const AGENTLESS: u8 = 3;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct MembersHeader {
    tag: Tag,
    record: u16,
    count: u32,
    samples: u32,
    rounds: u32,
}

/// A replica to probe.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Target {
    /// The serving endpoint, which the reply must name.
    pub replica: Endpoint,
    /// The endpoint to send the probe to.
    pub probe: Endpoint,
}

impl Members {
    /// Number of members in use.
    pub fn count(&self) -> u32 {
        self.tally.in_use
    }

    /// Number of agentless replicas.
    pub fn agentless(&self) -> u32 {
        self.tally.agentless
    }

    /// The agentless replicas, each with its weight in units of 1/16.
    pub fn without_agent(&self) -> impl Iterator<Item = (Endpoint, u16)> + '_ {
        self.list
            .iter()
            .filter(|member| member.rank == AGENTLESS)
            .map(|member| (member.endpoint, member.weight))
    }

    /// Number of samples of the policy so far, modulo 2^32.
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Whether the endpoint is a member, in use or not.
    pub fn contains(&self, endpoint: Endpoint) -> bool {
        self.get(endpoint).is_some_and(|member| member.rank != CANDIDATE)
    }

    /// Returns the member that answers probes at `probe`.
    pub fn answering_at(&self, probe: Endpoint) -> Option<Endpoint> {
        let first = self.list.partition_point(|member| member.endpoint < probe.with_port(0));
        let host =
            self.list.iter().skip(first).take_while(|member| member.endpoint <= probe.with_port(u16::MAX));
        let mut members = host.filter(|member| member.rank != CANDIDATE).map(Member::target);
        members.find(|target| target.probe == probe).map(|target| target.replica)
    }

    /// Returns the replica's placement by Envoy's policy.
    pub fn placement(&self, endpoint: Endpoint) -> Placement {
        self.get(endpoint).map_or(Placement::even(self.samples), Member::placement)
    }

    fn position(&self, endpoint: Endpoint) -> Result<usize, usize> {
        self.list.binary_search_by_key(&endpoint, |member| member.endpoint)
    }

    fn get(&self, endpoint: Endpoint) -> Option<&Member> {
        self.list.get(self.position(endpoint).ok()?)
    }

    fn get_mut(&mut self, endpoint: Endpoint) -> Option<&mut Member> {
        let index = self.position(endpoint).ok()?;
        self.list.get_mut(index)
    }

    /// Records evidence of a replica. Returns whether the blob must be written.
    pub fn observe(
        &mut self,
        endpoint: Endpoint,
        probe: Option<Endpoint>,
        evidence: Evidence,
        now: Micros,
    ) -> bool {
        let stamp = now.stamp();
        let probe_port = probe.map_or(0, |probe| probe.port());
        let (samples, rounds) = (self.samples, self.rounds);
        let position = self.position(endpoint);
        let known = position.ok().and_then(|index| self.list.get_mut(index));
        match (known, evidence) {
            // A probe reply, from this replica or from another, says that this replica has an agent now.
            (Some(known), Evidence::Hearsay) if known.rank == AGENTLESS => {
                if self.tally.candidates >= MAX_CANDIDATES {
                    return false;
                }
                self.tally.remove(known);
                (known.seen, known.rank, known.probe_port) = (stamp, CANDIDATE, probe_port);
                self.tally.add(known);
                true
            }
            // Otherwise hearsay neither renews nor changes a known replica.
            (Some(_), Evidence::Hearsay) => false,
            (Some(known), _) => {
                let placed = evidence == Evidence::Placed;
                let joins =
                    matches!(known.rank, CANDIDATE | AGENTLESS) || (placed && known.rank == OUT_OF_USE);
                let changed = joins
                    || (placed && known.sampled != samples)
                    || known.probe_port != probe_port
                    || stamp.distance_ms(known.seen) >= RENEW_MS;
                if changed {
                    (known.seen, known.probe_port) = (stamp, probe_port);
                }
                if joins || placed {
                    known.sampled = samples;
                }
                if joins {
                    self.tally.remove(known);
                    // The replica counts as average until samples show its weight.
                    (known.rank, known.weight) = (IN_USE, Placement::UNIT);
                    (known.hits, known.since) = (0, rounds);
                    self.tally.add(known);
                }
                changed
            }
            (None, _) => {
                let rank = if evidence == Evidence::Hearsay { CANDIDATE } else { IN_USE };
                let (alike, limit) = match rank {
                    CANDIDATE => (self.tally.candidates, MAX_CANDIDATES),
                    _ => (self.list.len() - self.tally.candidates, MAX_MEMBERS),
                };
                if alike >= limit {
                    return false;
                }
                let weight = Placement::UNIT;
                let member = Member {
                    endpoint,
                    seen: stamp,
                    sampled: samples,
                    since: rounds,
                    hits: 0,
                    probe_port,
                    weight,
                    rank,
                    reported: 0,
                };
                self.tally.add(&member);
                self.list.insert(position.unwrap_or_else(|place| place), member);
                true
            }
        }
    }

    /// Records that Envoy used a replica whose response had no report. If the replica has never reported, or Envoy's
    /// policy had stopped using it, it is agentless from now on. Returns whether the blob must be written.
    pub fn served_unreported(&mut self, endpoint: Endpoint, now: Micros) -> bool {
        let (stamp, sampled, since) = (now.stamp(), self.samples, self.rounds);
        let position = self.position(endpoint);
        let Some(known) = position.ok().and_then(|index| self.list.get_mut(index)) else {
            if self.list.len() - self.tally.candidates >= MAX_MEMBERS {
                return false;
            }
            let (hits, probe_port, weight, rank, reported) = (0, 0, Placement::UNIT, AGENTLESS, 0);
            let seen = stamp;
            let member = Member { endpoint, seen, sampled, since, hits, probe_port, weight, rank, reported };
            self.tally.add(&member);
            self.list.insert(position.unwrap_or_else(|place| place), member);
            return true;
        };
        let reports = known.rank == IN_USE && known.reported == 1;
        let changed = !reports && (known.rank != AGENTLESS || stamp.distance_ms(known.seen) >= RENEW_MS);
        if changed {
            self.tally.remove(known);
            (known.seen, known.rank, known.reported) = (stamp, AGENTLESS, 0);
            self.tally.add(known);
        }
        changed
    }

    /// Number of members that have not reported yet, not counting the agentless ones.
    pub fn unheard(&self) -> u32 {
        self.tally.awaiting.saturating_sub(self.tally.agentless)
    }

    /// Whether the replica is a member that has not reported yet.
    pub fn awaits_report(&self, endpoint: Endpoint) -> bool {
        self.tally.awaiting > 0
            && self.get(endpoint).is_some_and(|member| member.rank != CANDIDATE && member.reported == 0)
    }

    /// Records that a member has reported. Returns whether the blob must be written.
    pub fn has_reported(&mut self, endpoint: Endpoint, now: Micros) -> bool {
        if !self.awaits_report(endpoint) {
            return false;
        }
        let (samples, rounds) = (self.samples, self.rounds);
        let position = self.position(endpoint);
        if let Some(member) = position.ok().and_then(|index| self.list.get_mut(index)) {
            self.tally.remove(member);
            member.reported = 1;
            if member.rank == AGENTLESS {
                (member.seen, member.sampled) = (now.stamp(), samples);
                (member.rank, member.hits, member.since) = (IN_USE, 0, rounds);
            }
            self.tally.add(member);
        }
        true
    }

    /// Records one sample: Envoy's policy chose `endpoint` for a probe without an address, and Envoy vouches for it.
    pub fn sample_met(&mut self, endpoint: Endpoint, probe: Option<Endpoint>, now: Micros) {
        self.samples = self.samples.wrapping_add(1);
        self.rounds = self.rounds.wrapping_add(ROUND / self.tally.in_use.max(1));
        let was_in_use = self.get(endpoint).is_some_and(|member| member.rank == IN_USE);
        self.observe(endpoint, probe, Evidence::Placed, now);
        let rounds = self.rounds;
        // The sample that brings a replica into use says nothing about its weight.
        if was_in_use && let Some(member) = self.get_mut(endpoint) {
            member.hits = member.hits.saturating_add(1);
            member.weight = weight(member.hits, member.rounds(rounds));
        }
        if self.samples.is_multiple_of((self.tally.in_use / LOOKS_PER_ROUND).max(1)) {
            self.look_for_the_unmet();
        }
    }

    fn look_for_the_unmet(&mut self) {
        let (samples, in_use, now) = (self.samples, self.tally.in_use, self.rounds);
        for member in self.list.iter_mut().filter(|member| member.rank == IN_USE) {
            if !member.placement().is_in_use(samples, in_use) {
                member.rank = OUT_OF_USE;
            }
            if member.rounds(now) > MOST_ROUNDS {
                member.hits /= 2;
                member.since = now.wrapping_sub(now.wrapping_sub(member.since) / 2);
            }
        }
        self.tally = Tally::of(&self.list);
        if self.tally.in_use < in_use {
            self.scale_rounds();
        }
    }

    /// Scales the rounds of the members in use so that their hits per round are 1 on average. Replicas that have just gone
    /// out of use made the rounds of the others too long, so the others had more than one hit per round.
    fn scale_rounds(&mut self) {
        let now = self.rounds;
        let elapsed = |member: &Member| f64::from(now.wrapping_sub(member.since));
        let (mut hits, mut rounds) = (0.0, 0.0);
        for member in self.list.iter().filter(|member| member.rank == IN_USE) {
            hits += f64::from(member.hits) * f64::from(ROUND);
            rounds += elapsed(member);
        }
        if hits == 0.0 || rounds == 0.0 {
            return;
        }
        for member in self.list.iter_mut().filter(|member| member.rank == IN_USE) {
            member.since = now.wrapping_sub((elapsed(member) * hits / rounds) as u32);
        }
    }

    /// Makes a replica that served a request a member, and keeps its known probe port. Returns whether the blob must be
    /// written.
    pub fn confirm(&mut self, endpoint: Endpoint, evidence: Evidence, now: Micros) -> bool {
        let known = self.get(endpoint).map(Member::target);
        let probe = known.map(|target| target.probe).filter(|probe| *probe != endpoint);
        self.observe(endpoint, probe, evidence, now)
    }

    /// Replaces the members with `fleet`, each with its weight in units of 1/16 of the mean, and forgets all others.
    /// This is for a proxy that provides its host set, and needs no samples. `fleet` must be sorted by endpoint and
    /// free of duplicates. Returns the previous membership, or `None` if nothing changes and the blob need not be
    /// written.
    pub fn assign(&mut self, fleet: &[(Endpoint, u16)], now: Micros) -> Option<Self> {
        let stamp = now.stamp();
        let stale = |member: &Member| stamp.distance_ms(member.seen) >= MEMBER_TTL_MS / 2;
        let same = self.list.len() == fleet.len().min(MAX_MEMBERS)
            && self.list.iter().zip(fleet).all(|(member, (endpoint, weight))| {
                (member.endpoint, member.weight) == (*endpoint, *weight)
                    && matches!(member.rank, IN_USE | AGENTLESS)
                    && !stale(member)
            });
        if same {
            return None;
        }
        let old = std::mem::take(self);
        let known = |endpoint| old.get(endpoint).copied();
        let member = |&(endpoint, weight): &(Endpoint, u16)| Member {
            endpoint,
            seen: stamp,
            sampled: old.samples,
            since: old.rounds,
            hits: 0,
            probe_port: known(endpoint).map_or(0, |member| member.probe_port),
            weight: weight.max(1),
            rank: known(endpoint).map_or(IN_USE, |member| member.rank.max(IN_USE)),
            reported: known(endpoint).map_or(0, |member| member.reported),
        };
        self.list = fleet.iter().take(MAX_MEMBERS).map(member).collect();
        (self.samples, self.rounds) = (old.samples, old.rounds);
        self.tally = Tally::of(&self.list);
        Some(old)
    }

    /// Records that a member is alive. Returns whether the blob must be written.
    pub fn renew(&mut self, endpoint: Endpoint, now: Micros) -> bool {
        let stamp = now.stamp();
        match self.get_mut(endpoint).filter(|member| member.rank != CANDIDATE) {
            Some(member) if stamp.distance_ms(member.seen) >= RENEW_MS => {
                member.seen = stamp;
                true
            }
            _ => false,
        }
    }

    /// Forgets a replica that has left. Returns whether the blob must be written.
    pub fn remove(&mut self, endpoint: Endpoint) -> bool {
        let Ok(index) = self.position(endpoint) else { return false };
        self.list.remove(index);
        self.tally = Tally::of(&self.list);
        true
    }

    /// Whether [`Self::expire`] would change anything.
    pub fn is_expired(&self, now: Micros) -> bool {
        let (stamp, sampled) = (now.stamp(), self.samples > 0);
        self.list.iter().any(|member| member.is_expired(stamp, sampled)) || self.is_quiet(stamp)
    }

    /// Forgets replicas that have not been heard from for too long while others were heard from. Returns whether the
    /// blob must be written.
    pub fn expire(&mut self, now: Micros) -> bool {
        let (excused, before) = (self.excuse(now), self.list.len());
        let (stamp, sampled) = (now.stamp(), self.samples > 0);
        self.list.retain(|member| !member.is_expired(stamp, sampled));
        self.tally = Tally::of(&self.list);
        excused || self.list.len() != before
    }

    /// If no member has been heard from recently, treats all members as just heard from. Returns whether the blob must
    /// be written.
    fn excuse(&mut self, now: Micros) -> bool {
        let quiet = self.is_quiet(now.stamp());
        if quiet {
            self.list.iter_mut().filter(|m| m.rank != CANDIDATE).for_each(|member| member.seen = now.stamp());
        }
        quiet
    }

    /// Whether there are members, and none has been heard from recently.
    fn is_quiet(&self, now: Stamp) -> bool {
        let mut members = self.list.iter().filter(|member| member.rank != CANDIDATE).peekable();
        members.peek().is_some() && members.all(|member| now.distance_ms(member.seen) >= QUIET_MS)
    }

    /// Returns up to `count` distinct targets, drawn uniformly from the candidates and the members in use that `skip`
    /// does not exclude. If none is left, all but the agentless ones are eligible.
    pub fn sample(&self, count: usize, rng: &mut impl Rng, skip: impl Fn(Endpoint) -> bool) -> Vec<Target> {
        let eligible = |member: &Member| matches!(member.rank, CANDIDATE | IN_USE) && !skip(member.endpoint);
        let wanted = self.draw(count, rng, eligible);
        match wanted.is_empty() {
            true => self.draw(count, rng, |member| member.rank != AGENTLESS),
            false => wanted,
        }
    }

    /// Returns up to `count` distinct targets, drawn uniformly from the members in use that `skip` does not exclude,
    /// for a request that waits.
    pub fn sample_in_use(
        &self,
        count: usize,
        rng: &mut impl Rng,
        skip: impl Fn(Endpoint) -> bool,
    ) -> Vec<Target> {
        self.draw(count, rng, |member| member.rank == IN_USE && !skip(member.endpoint))
    }

    /// Returns the homes of `hint`, in order, among the members in use that `skip` does not exclude. This takes a few
    /// nanoseconds per member.
    pub fn homes(&self, hint: HintHash, skip: impl Fn(Endpoint) -> bool) -> [Option<Target>; HOMES] {
        let mut homes: [Option<(u64, &Member)>; HOMES] = [None; HOMES];
        for member in self.list.iter().filter(|member| member.rank == IN_USE && !skip(member.endpoint)) {
            let mut next = Some((hint.rank(member.endpoint), member));
            for home in &mut homes {
                if home.is_none_or(|(rank, _)| next.is_some_and(|(other, _)| other > rank)) {
                    std::mem::swap(home, &mut next);
                }
            }
        }
        homes.map(|home| home.map(|(_, member)| member.target()))
    }

    /// Returns up to `count` distinct eligible targets, drawn uniformly. The time does not grow with the fleet, unless
    /// almost no member is eligible.
    fn draw(&self, count: usize, rng: &mut impl Rng, eligible: impl Fn(&Member) -> bool) -> Vec<Target> {
        let mut drawn: Vec<Target> = Vec::with_capacity(count.min(self.list.len()));
        if self.list.len() > 4 * count {
            // A draw rarely repeats a target here, and rejecting repeated ones keeps the sample uniform.
            for _ in 0..16 * count {
                if drawn.len() == count {
                    return drawn;
                }
                let member = self.list.get(rng.random_range(0..self.list.len()));
                let target = member.filter(|member| eligible(member)).map(Member::target);
                drawn.extend(target.filter(|target| !drawn.contains(target)));
            }
            drawn.clear();
        }
        let mut all: Vec<Target> =
            self.list.iter().filter(|member| eligible(member)).map(Member::target).collect();
        let count = count.min(all.len());
        let (sample, _) = all.partial_shuffle(rng, count);
        drawn.extend_from_slice(sample);
        drawn
    }

    /// The members in use.
    pub fn endpoints_in_use(&self) -> impl Iterator<Item = Endpoint> + '_ {
        self.list.iter().filter(|member| member.rank == IN_USE).map(|member| member.endpoint)
    }
}

impl Tally {
    fn of(list: &[Member]) -> Self {
        let mut tally = Self::default();
        list.iter().for_each(|member| tally.add(member));
        tally
    }

    fn add(&mut self, member: &Member) {
        self.awaiting += u32::from(member.rank != CANDIDATE && member.reported == 0);
        match member.rank {
            CANDIDATE => self.candidates += 1,
            IN_USE => self.in_use += 1,
            AGENTLESS => self.agentless += 1,
            _ => {}
        }
    }

    fn remove(&mut self, member: &Member) {
        self.awaiting -= u32::from(member.rank != CANDIDATE && member.reported == 0);
        match member.rank {
            CANDIDATE => self.candidates -= 1,
            IN_USE => self.in_use -= 1,
            AGENTLESS => self.agentless -= 1,
            _ => {}
        }
    }
}

/// Weight of a replica that `hits` samples met in so many rounds. A difference of up to two standard deviations of a
/// random policy counts as chance, and gives the average weight. A round-robin policy varies far less.
fn weight(hits: u16, rounds: u32) -> u16 {
    let hits = u32::from(hits);
    let deviation = hits.abs_diff(rounds);
    if rounds < LEAST_ROUNDS || deviation.saturating_mul(deviation) <= 4 * rounds {
        return Placement::UNIT;
    }
    (hits * u32::from(Placement::UNIT) / rounds).clamp(1, 4096) as u16
}

impl Member {
    /// Whether the member has been silent for too long. Where the policy is `sampled`, time alone does not expire a
    /// member in use, because with rare samples many members are silent for a long time.
    fn is_expired(&self, now: Stamp, sampled: bool) -> bool {
        let ttl = if self.rank == CANDIDATE { CANDIDATE_TTL_MS } else { MEMBER_TTL_MS };
        !(sampled && self.rank == IN_USE) && now.distance_ms(self.seen) >= ttl
    }

    /// Whether a blob may hold this member.
    fn is_valid(&self) -> bool {
        let reported = if self.rank == AGENTLESS { 0 } else { 1 };
        self.endpoint.is_valid() && self.rank <= AGENTLESS && self.reported <= reported
    }

    fn placement(&self) -> Placement {
        Placement { sampled: self.sampled, weight: self.weight }
    }

    /// Number of rounds since it came into use, halved as often as its hits.
    fn rounds(&self, now: u32) -> u32 {
        now.wrapping_sub(self.since) / ROUND
    }

    fn target(&self) -> Target {
        let probe = match self.probe_port {
            0 => self.endpoint,
            port => self.endpoint.with_port(port),
        };
        Target { replica: self.endpoint, probe }
    }
}

impl Blob for Members {
    const TAG: Tag = Tag::of_release(0x6d65_6d62, 5); // "memb"

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let (header, records) = bytes
            .split_at_checked(size_of::<MembersHeader>())
            .ok_or(BlobError::Size { got: bytes.len(), want: size_of::<MembersHeader>() })?;
        let header: MembersHeader = bytemuck::pod_read_unaligned(header);
        Self::TAG.check(bytes)?;
        if usize::from(header.record) != size_of::<Member>() {
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
        let ordered = list.is_sorted_by(|one, next| one.endpoint < next.endpoint);
        if !(ordered && list.iter().all(Member::is_valid)) {
            return Err(BlobError::Content);
        }
        let tally = Tally::of(&list);
        Ok(Self { list, samples: header.samples, rounds: header.rounds, tally })
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        let header = MembersHeader {
            tag: Self::TAG,
            record: size_of::<Member>() as u16,
            count: self.list.len() as u32,
            samples: self.samples,
            rounds: self.rounds,
        };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.list));
        bytes.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::hint::HintSource;
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    fn replica(n: u16) -> Endpoint {
        format!("[2001:db8::7]:{}", 1000 + n).parse().unwrap()
    }

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    fn fleet(n: u16) -> Members {
        let mut members = Members::default();
        for i in 0..n {
            assert!(members.observe(replica(i), None, Evidence::Served, ms(0)));
        }
        members
    }

    #[test]
    fn agentless_replicas_survive_the_blob_and_join_once_they_report() {
        let mut members = fleet(2);
        assert!(members.has_reported(replica(0), ms(0)) && members.has_reported(replica(1), ms(0)));
        assert!(members.served_unreported(replica(2), ms(0)));
        assert!(!members.served_unreported(replica(2), ms(1)), "nothing new");
        assert!(!members.served_unreported(replica(0), ms(1)), "it has reported");
        let mut members = Members::decode(&members.encode()).unwrap();
        assert_eq!((members.count(), members.agentless(), members.unheard()), (2, 1, 0));
        let mut rng = SmallRng::seed_from_u64(5);
        let targets = members.sample(3, &mut rng, |_| false);
        assert!(targets.iter().all(|target| target.replica != replica(2)), "it is not probed: {targets:?}");
        assert!(members.has_reported(replica(2), ms(2)));
        assert_eq!((members.count(), members.agentless(), members.unheard()), (3, 0, 0));

        let mut contradiction = fleet(1);
        contradiction.served_unreported(replica(0), ms(0));
        contradiction.list[0].reported = 1;
        assert_eq!(Members::decode(&contradiction.encode()).err(), Some(BlobError::Content));
    }

    #[test]
    fn an_assigned_fleet_replaces_what_was_learned_and_keeps_probe_ports() {
        let mut members = fleet(3);
        members.observe(replica(1), Some(replica(1).with_port(9)), Evidence::Served, ms(0));
        members.observe(replica(8), None, Evidence::Hearsay, ms(0));
        let wanted = [(replica(1), 16), (replica(2), 48), (replica(5), 0)];
        assert!(members.assign(&wanted, ms(10)).is_some_and(|before| before.contains(replica(0))));
        assert_eq!((members.count(), members.contains(replica(0))), (3, false));
        assert_eq!(members.answering_at(replica(1).with_port(9)), Some(replica(1)));
        let weights = [1, 2, 5].map(|n| members.placement(replica(n)).weight);
        assert_eq!(weights, [16, 48, 1], "a weight is at least 1");
        assert!([1, 2, 5].iter().all(|n| members.placement(replica(*n)).is_in_use(members.samples(), 3)));
        // The same fleet needs no write, until its stamps are about to expire.
        let wanted = [(replica(1), 16), (replica(2), 48), (replica(5), 1)];
        assert!(members.assign(&wanted, ms(20)).is_none());
        assert!(members.assign(&wanted, ms(10 + u64::from(MEMBER_TTL_MS) / 2)).is_some());
        members.expire(ms(u64::from(MEMBER_TTL_MS)));
        assert_eq!(members.count(), 3);
        assert!(members.assign(&[], ms(30)).is_some() && members.count() == 0);
        let too_many: Vec<_> = (0..=MAX_MEMBERS as u16).map(|n| (replica(n), 16)).collect();
        assert!(members.assign(&too_many, ms(40)).is_some());
        assert_eq!(members.count() as usize, MAX_MEMBERS);
        assert!(members.assign(&too_many, ms(50)).is_none(), "what has no room is not tried again and again");
    }

    #[test]
    fn targets_of_synchronous_probes_are_in_use_distinct_and_uniform() {
        let mut rng = SmallRng::seed_from_u64(4);
        for n in [2, 3, 5, 12, 13, 40] {
            let mut members = fleet(n);
            members.observe(replica(n), None, Evidence::Hearsay, ms(0));
            let mut hits = vec![0u32; usize::from(n)];
            for _ in 0..6000 {
                let targets = members.sample_in_use(3, &mut rng, |_| false);
                assert_eq!(targets.len(), 3.min(usize::from(n)));
                for (i, target) in targets.iter().enumerate() {
                    assert!(!targets[..i].contains(target));
                    hits[usize::from(target.replica.port() - 1000)] += 1;
                }
            }
            let mean = f64::from(6000 * 3.min(u32::from(n))) / f64::from(n);
            let chi2: f64 = hits.iter().map(|hit| (f64::from(*hit) - mean).powi(2) / mean).sum();
            assert!(chi2 < 3.0 * f64::from(n) + 10.0, "n = {n}: {chi2} {hits:?}");
            for _ in 0..100 {
                let targets = members.sample_in_use(3, &mut rng, |skipped| skipped == replica(0));
                assert_eq!(targets.len(), 3.min(usize::from(n) - 1));
                assert!(targets.iter().all(|target| target.replica != replica(0)));
            }
        }
        assert!(Members::default().sample_in_use(3, &mut rng, |_| false).is_empty());
    }

    #[test]
    fn homes_are_the_highest_ranked_replicas_in_use() {
        let mut members = fleet(20);
        // A candidate cannot be a home.
        members.observe(replica(20), None, Evidence::Hearsay, ms(0));
        let source = HintSource { header: Some("x-session".into()), path_segment: None };
        for session in 0..200u8 {
            let hint = source.hint(Some(&[session]), None).unwrap();
            let mut order: Vec<Endpoint> = (0..20).map(replica).collect();
            order.sort_by_key(|replica| std::cmp::Reverse(hint.rank(*replica)));
            let homes = |gone: Option<Endpoint>| {
                members.homes(hint, |skipped| gone == Some(skipped)).map(|home| home.unwrap().replica)
            };
            assert_eq!(homes(None)[..], order[..2]);
            assert_eq!(homes(Some(order[0]))[..], order[1..3]);
        }
        let hint = source.hint(Some(b"a"), None).unwrap();
        assert_eq!(fleet(1).homes(hint, |_| false).map(|home| home.is_some()), [true, false]);
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
    fn fresh_replicas_are_skipped_unless_all_are_fresh() {
        let members = fleet(3);
        let mut rng = SmallRng::seed_from_u64(3);
        let targets = members.sample(3, &mut rng, |endpoint| endpoint != replica(2));
        assert_eq!(targets, [Target { replica: replica(2), probe: replica(2) }]);
        assert_eq!(members.sample(2, &mut rng, |_| true).len(), 2);
    }

    #[test]
    fn unverified_names_become_few_short_lived_candidates() {
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
        assert!(members.observe(replica(1), Some(replica(9)), Evidence::Served, ms(1)));
        let targets = members.sample(1, &mut SmallRng::seed_from_u64(1), |_| false);
        assert_eq!(targets, [Target { replica: replica(1), probe: replica(9) }]);
    }

    #[test]
    fn the_blob_is_rewritten_for_updates_only() {
        let mut members = fleet(1);
        assert!(!members.observe(replica(0), None, Evidence::Served, ms(100)));
        assert!(members.observe(replica(0), None, Evidence::Served, ms(5_000)));
        assert!(members.observe(replica(0), Some(replica(5)), Evidence::Served, ms(5_001)));
        assert!(members.renew(replica(0), ms(20_000)) && !members.renew(replica(0), ms(20_001)));
        assert!(!members.expire(ms(60_000)));
    }

    #[test]
    fn a_silent_member_is_forgotten_while_others_are_heard_but_none_in_an_idle_hour() {
        let mut members = fleet(2);
        for minute in 1..60 {
            assert!(members.expire(ms(minute * 60_000)));
            assert!(!members.expire(ms(minute * 60_000 + 1)));
        }
        for second in 59 * 60..=59 * 60 + 600 {
            assert_eq!(members.count(), 2);
            members.renew(replica(1), ms(second * 1000));
            members.expire(ms(second * 1000));
        }
        assert_eq!((members.count(), members.contains(replica(1))), (1, true));
    }

    #[test]
    fn a_large_fleet_drops_unsampled_members_at_most_part_of_a_round_later() {
        let mut members = Members::default();
        sampled(&mut members, 200, |i| i as u16 % 200);
        sampled(&mut members, 2000 - 100, |i| i as u16 % 100);
        assert_eq!(members.count(), 200);
        sampled(&mut members, 100 + 200 / LOOKS_PER_ROUND, |i| i as u16 % 100);
        assert_eq!(members.count(), 100);
    }

    /// Samples the policy: `samples` probes go to the replicas that `policy` draws.
    fn sampled(members: &mut Members, samples: u32, mut policy: impl FnMut(u32) -> u16) {
        for i in 0..samples {
            members.sample_met(replica(policy(i)), None, ms(u64::from(i)));
        }
    }

    #[test]
    fn members_that_the_policy_never_picks_go_out_of_use_until_it_does() {
        let mut members = Members::default();
        sampled(&mut members, 8, |i| i as u16 % 4);
        assert_eq!(members.count(), 4);
        let placement = members.placement(replica(3));
        sampled(&mut members, 38, |i| i as u16 % 2);
        assert_eq!(members.count(), 4, "chance may have missed two");
        assert!(placement.is_in_use(members.samples(), 4));
        sampled(&mut members, 10, |i| i as u16 % 2);
        assert_eq!(members.count(), 2);
        assert!(!placement.is_in_use(members.samples(), 4));
        assert!(members.contains(replica(3)), "it is still a member");
        let mut rng = SmallRng::seed_from_u64(3);
        assert!(members.sample(4, &mut rng, |_| false).iter().all(|t| t.replica.port() < 1002));
        sampled(&mut members, 1, |_| 3);
        assert_eq!(members.count(), 3);
        assert_eq!(members.placement(replica(3)).weight, Placement::UNIT, "average until more is known");
    }

    #[test]
    fn requests_placed_by_the_policy_keep_a_member_in_use_steered_ones_do_not() {
        for (evidence, count) in [(Evidence::Placed, 2), (Evidence::Served, 1)] {
            let mut members = fleet(2);
            for _ in 0..30 {
                sampled(&mut members, 2, |_| 0);
                members.observe(replica(1), None, evidence, ms(0));
            }
            assert_eq!(members.count(), count, "{evidence:?}");
        }
    }

    #[test]
    fn without_samples_all_members_are_in_use_with_equal_weight() {
        let mut members = fleet(3);
        for at in 0..10_000 {
            members.observe(replica(0), None, Evidence::Placed, ms(at));
        }
        assert_eq!(members.count(), 3);
        assert!((0..3).all(|n| members.placement(replica(n)).weight == Placement::UNIT));
    }

    #[test]
    fn weights_are_the_shares_of_the_samples() {
        for (weights, rounds) in [(vec![3u16, 3, 1, 1], 12), (vec![2, 2, 1, 1], 30), (vec![1, 1, 1, 9], 20)] {
            let turn: Vec<u16> =
                (0..).zip(&weights).flat_map(|(n, w)| std::iter::repeat_n(n, usize::from(*w))).collect();
            let mut members = Members::default();
            for n in 0..4 {
                members.observe(replica(n), None, Evidence::Served, ms(0));
            }
            let mean = f64::from(weights.iter().sum::<u16>()) / 4.0;
            for _ in 0..3 {
                sampled(&mut members, rounds * turn.len() as u32, |i| turn[i as usize % turn.len()]);
                for (n, weight) in (0..).zip(&weights) {
                    let got = f64::from(members.placement(replica(n)).weight) / 16.0;
                    let want = f64::from(*weight) / mean;
                    assert!((got / want - 1.0).abs() < 0.2, "{weights:?}: {n} has {got:.2}, not {want:.2}");
                }
                assert_eq!(members.count(), 4);
            }
        }
    }

    #[test]
    fn a_canary_shows_its_weight_by_its_third_turn() {
        // Round robin with weights comes to the canary last.
        let mut members = Members::default();
        sampled(&mut members, 3 * 91, |i| if i % 91 == 90 { 9 } else { (i % 91 % 9) as u16 });
        let weights: Vec<u16> = (0..10).map(|n| members.placement(replica(n)).weight).collect();
        assert!(weights[9] <= 2, "a tenth of 16: {weights:?}");
        assert!(weights[..9].iter().all(|weight| (16..=18).contains(weight)), "{weights:?}");
    }

    #[test]
    fn a_fail_over_leaves_no_weights() {
        let mut members = Members::default();
        sampled(&mut members, 80, |i| (i % 4) as u16);
        sampled(&mut members, 90, |i| 4 + (i % 4) as u16);
        assert_eq!(members.count(), 4, "the others are in use, the first four no longer are");
        for round in 0..30 {
            // A ninth joins them.
            sampled(&mut members, 5, |i| 4 + i as u16);
            let weights: Vec<u16> = (4..9).map(|n| members.placement(replica(n)).weight).collect();
            assert_eq!(weights, [Placement::UNIT; 5], "round {round}");
        }
    }

    #[test]
    fn first_samples_that_arrive_in_bursts_show_no_weights() {
        let mut members = fleet(6);
        for n in 0..6 {
            sampled(&mut members, 5, |_| n);
            let weights: Vec<u16> = (0..6).map(|n| members.placement(replica(n)).weight).collect();
            assert_eq!((members.count(), weights), (6, vec![Placement::UNIT; 6]), "after replica {n}");
        }
    }

    #[test]
    fn chance_rarely_looks_like_a_weight() {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut members = Members::default();
        let mut off = 0;
        for _ in 0..100 {
            sampled(&mut members, 160, |_| rng.random_range(0..16));
            off += (0..16).filter(|n| members.placement(replica(*n)).weight != Placement::UNIT).count();
            assert_eq!(members.count(), 16);
        }
        assert!(off < 160, "{off} of 1600 were read as weights");
    }

    #[test]
    fn only_members_are_found_by_probe_port() {
        let mut members = fleet(1);
        members.observe(replica(1), Some(replica(9)), Evidence::Served, ms(0));
        members.observe(replica(2), Some(replica(8)), Evidence::Hearsay, ms(0));
        let answering = [0, 1, 9, 8].map(|n| members.answering_at(replica(n)));
        assert_eq!(answering, [Some(replica(0)), None, Some(replica(1)), None]);
    }

    proptest! {
        /// The stored counts equal those of a walk over the whole list. The bytes decode again, which requires sorted
        /// members. Every probe endpoint leads to its first member.
        #[test]
        fn cached_counts_agree_with_the_list(
            events in proptest::collection::vec((0u8..7, 0u16..12, 0u64..4_000), 0..300),
        ) {
            let (mut members, mut now) = (Members::default(), 0);
            for (kind, number, later) in events {
                now += later;
                let (one, probe) = (replica(number), (number % 3 == 0).then(|| replica(100 + number)));
                match kind {
                    0 => members.remove(one),
                    1 => members.expire(ms(now)),
                    2 => members.observe(one, probe, Evidence::Hearsay, ms(now)),
                    3 => members.confirm(one, Evidence::Served, ms(now)),
                    // Mostly a few replicas, so that the others go out of use.
                    _ => {
                        members.sample_met(replica(number % 4), None, ms(now));
                        true
                    }
                };
                prop_assert_eq!(members.tally, Tally::of(&members.list));
                prop_assert_eq!(Members::decode(&members.encode()).unwrap().list.len(), members.list.len());
                for member in &members.list {
                    let alike = members.list.iter().filter(|m| m.target().probe == member.target().probe);
                    let first = alike.filter(|m| m.rank != CANDIDATE).map(|m| m.endpoint).next();
                    prop_assert_eq!(members.answering_at(member.target().probe), first);
                }
            }
        }
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
