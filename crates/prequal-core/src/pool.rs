//! The probe pool: recent load reports of replicas, and the rule that picks one (paper §4).
//!
//! [`PoolState`] *is* the blob that the workers of an Envoy share: fixed layout, fixed arrays, plain bytes. Picking
//! and recording never allocate.
//!
//! - **Select** (hot/cold lexicographic): an entry is *hot* when its RIF exceeds ([`HotRule::Gt`], §4) or reaches
//!   ([`HotRule::Ge`], §5.3) θ, the `q_rif` quantile of the RIFs reported lately. Any cold entry: the lowest latency
//!   among the cold, where those within [`PoolSettings::latency_band`] of it count as equal and their RIF decides.
//!   None: the lowest RIF. Fewer than two entries: no choice, the caller's own policy serves.
//! - **Unknown latency**: an idle replica that knows nothing ranks first, and picking it raises its RIF in the pool,
//!   so it gets one request and then, as a *busy* unknown, ranks last until it has answered. This is what brings
//!   traffic back to a healed replica (`docs/adr/0002-unknown-latency.md`).
//! - **An entry leaves** when older than `max_age_ms`, used up ([`crate::reuse`]), replaced by a newer report of the
//!   same replica, pushed out (oldest) by another's, or removed: `r_remove` a pick, the oldest and the worst in turn.
//! - **Envoy's own placement** stays in force ([`crate::members`]): an entry leaves as well once the policy's samples do
//!   not meet its replica any more. Where weights differ, RIF counts relative to the weight, and within the latency band
//!   the choice goes by weighted RIF and chance, so that equal replicas share by weight at any load and a slow one is
//!   still avoided. When Envoy refuses most choices (it knows of failures
//!   that the probe cluster's policy does not), steering pauses: a request that Envoy places tells where to go on.
//! - **Probes due** are decided in the same step ([`Budget`]).

use std::cmp::Ordering;

use bytemuck::Zeroable;
use rand::Rng;

use crate::endpoint::Endpoint;
use crate::members::Standing;
use crate::reuse::{reuse_budget, round_randomly};
use crate::time::{Micros, Stamp};

/// Most entries a pool can hold.
pub const MAX_POOL: usize = 24;
/// Most RIFs that θ looks back on.
pub const MAX_HISTORY: usize = 128;
/// Replicas that can be barred at once.
const MAX_BARRED: usize = 8;

/// When an entry counts as hot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum HotRule {
    /// [`Self::Gt`] up to 24 replicas, [`Self::Ge`] above, with hysteresis.
    Auto,
    /// RIF > θ (paper §4). Small fleets: most RIFs tie with θ.
    Gt,
    /// RIF ≥ θ (paper §5.3).
    Ge,
}

/// How many probes a request triggers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// `r_probe` a request, fractions accumulate (the paper's rule).
    Fixed {
        /// Probes per request, 0 to 16.
        r_probe: f64,
    },
    /// Only as many as keep half of the pool younger than the target. Responses tell only of replicas that were chosen:
    /// the others are explored by the probes of discovery, or, where Envoy does not vouch for those, by one pool's worth
    /// of addressed probes per `max_age_ms`.
    Adaptive {
        /// Target for the median age of the pool, milliseconds.
        target_age_ms: u32,
        /// Upper bound, 0 to 16.
        max_probes_per_query: f64,
    },
}

/// Checked settings of a pool; ranges are those of [`crate::config`].
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Entries, 2 to [`MAX_POOL`].
    pub pool_size: usize,
    /// Age from receipt at which a report stops counting, milliseconds.
    pub max_age_ms: u32,
    /// Quantile for θ, 0 (RIF only) to 1 (latency only).
    pub q_rif: f64,
    /// The same for small fleets (while [`HotRule::Auto`] reads `>`). With RIFs of 1 to 3 a short stall lifts all fast
    /// replicas over a lower quantile at once, and the slow one is the only cold one left.
    pub q_rif_small: f64,
    /// Which reading of "hot".
    pub hot: HotRule,
    /// Cold entries within this factor of the lowest latency count as equally fast, and the lower RIF wins among them, 1
    /// (the paper's rule) to 10. Estimates are noisy: without a band every client sends to the replica that was
    /// lucky last.
    pub latency_band: f64,
    /// δ of equation (1).
    pub delta: f64,
    /// Removals per pick.
    pub r_remove: f64,
    /// Never remove more than new entries arrive, never below two entries, and nothing while the whole fleet fits the
    /// pool (then there is no selection bias to undo). The paper has no such bounds.
    pub scale_removal: bool,
    /// Upper bound of equation (1).
    pub reuse_cap: u32,
    /// How many probes.
    pub budget: Budget,
    /// One probe without an address this often, milliseconds, so that the cluster's policy is sampled and newcomers are
    /// found. More often in large fleets (n/4 a second, at most 250), and while replicas come into use (80 a second
    /// or 6n, at most 1000).
    pub discovery_interval_ms: u32,
    /// Envoy vouches for the replica that answered a probe, so a probe without an address tells load too, and
    /// exploration needs no other.
    pub verified_probes: bool,
    /// RIFs kept for θ, 8 to [`MAX_HISTORY`].
    pub rif_history: usize,
}

impl PoolSettings {
    /// Entries that a pool over `n` replicas can have; `n` = 0 means that nothing has been learned yet.
    fn attainable(&self, n: u32) -> usize {
        if n == 0 { self.pool_size } else { self.pool_size.min(n as usize) }
    }
}

/// Which rule chose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Branch {
    /// The lowest latency among the cold.
    Cold,
    /// All were hot: the lowest RIF.
    Hot,
    /// Fewer than two entries.
    Fallback,
}

/// What a replica reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Load {
    /// Requests in flight; counted up to 65 535.
    pub rif: u32,
    /// Median latency at that RIF, microseconds, if known.
    pub latency_us: Option<u32>,
}

/// The answer to one request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pick {
    /// The replica, or `None` to fall back.
    pub replica: Option<Endpoint>,
    /// Which rule chose it.
    pub branch: Branch,
    /// The replica is not a member yet: its first request shows whether Envoy knows it.
    pub verify: bool,
    /// What the pool knows of the replica's placement; its report on the response is recorded with it.
    pub standing: Standing,
    /// Probes to send now.
    pub probes: ProbesDue,
}

/// Probes to send.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ProbesDue {
    /// To distinct sampled replicas.
    pub addressed: u32,
    /// To whomever the probe cluster's policy finds.
    pub discovery: u32,
}

impl ProbesDue {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.addressed == 0 && self.discovery == 0
    }
}

/// Pool, RIF history, credits and rates of one upstream cluster; the bytes of the shared blob.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PoolState {
    magic: u32,
    version: u16,
    entry_count: u16,
    history_count: u16,
    history_next: u16,
    /// 1 when the next removal takes the worst, 0 the oldest.
    remove_worst: u16,
    /// 1 while [`HotRule::Auto`] reads `≥`.
    auto_ge: u16,
    probe_credit: f32,
    remove_credit: f32,
    /// Moving averages per pick.
    reports_per_pick: f32,
    new_per_pick: f32,
    reports_since_pick: u32,
    new_since_pick: u32,
    members: u32,
    /// Samples of the policy so far, see [`crate::members`].
    samples: u32,
    /// Moving average: choices that Envoy refused, per pick.
    refusals_per_pick: f32,
    /// 1 while steering pauses, since `paused_at`.
    paused: u32,
    paused_at: Stamp,
    last_pick: Stamp,
    idle_probed: Stamp,
    discovery_sent: Stamp,
    members_changed: Stamp,
    barred_count: u32,
    entries: [Entry; MAX_POOL],
    barred: [Barred; MAX_BARRED],
    history_at: [Stamp; MAX_HISTORY],
    history_rif: [u16; MAX_HISTORY],
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Entry {
    endpoint: Endpoint,
    latency_us: u32,
    received: Stamp,
    /// Of its [`Standing`].
    sampled: u32,
    weight: u16,
    rif: u16,
    uses_left: u16,
    /// 1 for a candidate that no request has reached yet.
    unproven: u16,
}

impl Entry {
    fn standing(&self) -> Standing {
        Standing { sampled: self.sampled, weight: self.weight }
    }

    /// RIF for a replica of average weight.
    fn load(&self) -> u32 {
        relative_load(self.rif, self.weight)
    }

    /// RIF and chance relative to the weight: the exponential alone draws in proportion to the weights, RIF alone is
    /// weighted least request.
    fn draw(&self, rng: &mut impl Rng) -> u32 {
        let chance = -2.0 * (1.0 - rng.random::<f32>()).ln();
        ((f32::from(self.rif) + chance) * 256.0 / f32::from(self.weight.max(1))) as u32
    }
}

fn relative_load(rif: u16, weight: u16) -> u32 {
    // Rounded up: a busy replica never looks idle.
    (u32::from(rif) * u32::from(Standing::UNIT)).div_ceil(u32::from(weight.max(1)))
}

/// A replica to choose from, as it reported itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Which replica.
    pub endpoint: Endpoint,
    /// Requests in flight: as reported, plus what was sent there since.
    pub rif: u32,
    /// Its latency estimate, microseconds; `None` when it knows nothing.
    pub latency_us: Option<u32>,
    /// Milliseconds since its report was received.
    pub age_ms: u32,
}

impl Entry {
    fn candidate(&self, now: Stamp) -> Candidate {
        Candidate {
            endpoint: self.endpoint,
            rif: u32::from(self.rif),
            latency_us: (self.latency_us != UNKNOWN).then_some(self.latency_us),
            age_ms: now.distance_ms(self.received),
        }
    }
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Barred {
    endpoint: Endpoint,
    at: Stamp,
    for_ms: u32,
}

/// How the pool looks, for metrics and tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolView {
    /// Entries now.
    pub occupancy: usize,
    /// θ; `None` with an empty history or at `q_rif` 0 or 1.
    pub theta: Option<u16>,
    /// Replicas known.
    pub members: u32,
    /// Median age of the entries, milliseconds; `None` without any.
    pub median_age_ms: Option<u32>,
}

enum Theta {
    AllHot,
    NoneHot,
    At(u32, bool),
}

impl Theta {
    fn is_hot(&self, rif: u32) -> bool {
        match *self {
            Self::AllHot => true,
            Self::NoneHot => false,
            Self::At(theta, or_equal) => rif > theta || (or_equal && rif == theta),
        }
    }

    fn rank(&self, entry: &Entry) -> Rank {
        self.rank_load(entry.load(), entry.latency_us)
    }

    /// Where a replica stands, lowest first; see the module's head.
    fn rank_load(&self, rif: u32, latency_us: u32) -> Rank {
        let unknown = latency_us == UNKNOWN;
        // Under RIF-only control (`q_rif` = 0) latency, known or not, only breaks ties.
        if unknown && rif > 0 && !matches!(self, Self::AllHot) {
            return (Tier::Probation, rif, 0);
        }
        let latency = if unknown { 0 } else { latency_us };
        if self.is_hot(rif) { (Tier::Hot, rif, latency) } else { (Tier::Cold, latency, rif) }
    }
}

/// Tier, first and second criterion.
type Rank = (Tier, u32, u32);

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Tier {
    Cold,
    Hot,
    /// Busy and unknown.
    Probation,
}

impl Tier {
    fn branch(self) -> Branch {
        if self == Self::Cold { Branch::Cold } else { Branch::Hot }
    }
}

/// A score as a rank.
#[derive(Clone, Copy, Debug)]
struct Score(f64);

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Score {}

/// Index and rank of the lowest of `items`; ties are broken at random.
fn lowest<T, R: Ord, G: Rng>(items: &[T], rank: impl Fn(&T, &mut G) -> R, rng: &mut G) -> Option<(usize, R)> {
    let mut best: Option<(usize, R)> = None;
    let mut ties = 1;
    for (index, item) in items.iter().enumerate() {
        let rank = rank(item, rng);
        match &best {
            Some((_, least)) if rank > *least => {}
            Some((_, least)) if rank == *least => {
                ties += 1;
                if rng.random_range(0..ties) == 0 {
                    best = Some((index, rank));
                }
            }
            _ => {
                ties = 1;
                best = Some((index, rank));
            }
        }
    }
    best
}

impl Default for PoolState {
    fn default() -> Self {
        Self::new()
    }
}

impl PoolState {
    /// An empty pool.
    pub fn new() -> Self {
        Self { magic: MAGIC, version: VERSION, reports_per_pick: 1.0, ..Self::zeroed() }
    }

    /// Reads a blob.
    ///
    /// # Errors
    /// [`BlobError`] for anything that [`Self::as_bytes`] of this version did not write; the caller starts anew.
    pub fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        if bytes.len() != size_of::<Self>() {
            return Err(BlobError::Size { got: bytes.len(), want: size_of::<Self>() });
        }
        let state: Self = bytemuck::pod_read_unaligned(bytes);
        if state.magic != MAGIC || state.version != VERSION {
            return Err(BlobError::Version);
        }
        let finite = [
            state.probe_credit,
            state.remove_credit,
            state.reports_per_pick,
            state.new_per_pick,
            state.refusals_per_pick,
        ]
        .iter()
        .all(|rate| (0.0..=1e6).contains(rate));
        let bounded = usize::from(state.entry_count) <= MAX_POOL
            && usize::from(state.history_count) <= MAX_HISTORY
            && usize::from(state.history_next) < MAX_HISTORY
            && state.barred_count as usize <= MAX_BARRED
            && state.remove_worst <= 1
            && state.auto_ge <= 1;
        if !finite || !bounded || !state.entries().iter().all(|entry| entry.endpoint.is_valid()) {
            return Err(BlobError::Content);
        }
        Ok(state)
    }

    /// The blob.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }

    /// Chooses a replica for one request and says how many probes to send.
    pub fn pick<G: Rng>(&mut self, settings: &PoolSettings, now: Micros, rng: &mut G) -> Pick {
        let probes = self.begin_pick(settings, now.stamp());
        let theta = self.theta(settings, now.stamp());
        let known = self.entries().iter().filter(|e| e.latency_us != UNKNOWN && !theta.is_hot(e.load()));
        let lowest = known.map(|entry| entry.latency_us).min().unwrap_or(0);
        let band = lowest..=(f64::from(lowest) * settings.latency_band) as u32;
        let weight = self.entries().first().map_or(Standing::UNIT, |first| first.weight);
        let uneven = self.entries().iter().any(|entry| entry.weight != weight);
        let rank = |entry: &Entry, rng: &mut G| match theta.rank(entry) {
            (Tier::Cold, latency, load) if band.contains(&latency) => {
                (Tier::Cold, lowest, if uneven { entry.draw(rng) } else { load })
            }
            (Tier::Hot, _, latency) if uneven => (Tier::Hot, entry.draw(rng), latency),
            rank => rank,
        };
        self.pick_ranked(settings, now, rng, probes, rank, |(tier, ..)| tier.branch())
    }

    /// [`Self::pick`] under another ranking: the lowest `score` is chosen, the highest is the worst. Scores must not
    /// be NaN. All of the pool's other rules stay as they are (paper §5.2: Linear and C3 on Prequal's probing).
    pub fn pick_scored<G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        rng: &mut G,
        score: impl Fn(&Candidate) -> f64,
    ) -> Pick {
        let stamp = now.stamp();
        let probes = self.begin_pick(settings, stamp);
        let rank = |entry: &Entry, _: &mut G| Score(score(&entry.candidate(stamp)));
        self.pick_ranked(settings, now, rng, probes, rank, |_| Branch::Cold)
    }

    /// Chooses among `answers` instead of the pool, by the same rule; remembers their RIFs for θ (synchronous mode,
    /// see [`crate::sync`]). `None` without answers.
    pub fn choose<G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        answers: &[Candidate],
        rng: &mut G,
    ) -> Option<(Endpoint, Branch)> {
        let stamp = now.stamp();
        for answer in answers {
            self.remember_rif(settings, stamp, answer.rif);
        }
        let theta = self.theta(settings, stamp);
        let rank =
            |answer: &Candidate, _: &mut G| theta.rank_load(answer.rif, answer.latency_us.unwrap_or(UNKNOWN));
        let (index, (tier, ..)) = lowest(answers, rank, rng)?;
        Some((answers.get(index)?.endpoint, tier.branch()))
    }

    /// What every pick begins with.
    fn begin_pick(&mut self, settings: &PoolSettings, stamp: Stamp) -> ProbesDue {
        self.expire(settings, stamp);
        self.update_rates();
        let probes = self.probes_due(settings, stamp);
        self.last_pick = stamp;
        probes
    }

    fn pick_ranked<R: Ord, G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        rng: &mut G,
        probes: ProbesDue,
        rank: impl Fn(&Entry, &mut G) -> R,
        branch: impl Fn(R) -> Branch,
    ) -> Pick {
        let stamp = now.stamp();
        let standing = Standing::even(self.samples);
        let mut pick = Pick { replica: None, branch: Branch::Fallback, verify: false, standing, probes };
        if self.entry_count >= 2
            && !self.is_paused(stamp)
            && let Some((index, least)) = lowest(self.entries(), &rank, rng)
            && let Some(entry) = self.entries.get_mut(index)
        {
            pick.replica = Some(entry.endpoint);
            pick.branch = branch(least);
            pick.verify = entry.unproven == 1;
            pick.standing = entry.standing();
            // RIF compensation (§4): our own request is on its way there.
            entry.rif = entry.rif.saturating_add(1);
            entry.uses_left = entry.uses_left.saturating_sub(1);
            let (chosen, used_up) = (entry.endpoint, entry.uses_left == 0);
            if pick.verify {
                // One request until its answer tells, however often probes bring the name up again.
                self.bar(chosen, now, VERIFY_MS);
            } else if used_up {
                self.remove(index);
            }
        }
        self.remove_some(settings, rng, rank);
        pick
    }

    /// Takes in a report of `endpoint`; the caller has established that it may speak for that replica. `standing` is what
    /// the membership, or the pick that led to the report, said of its placement.
    pub fn record(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        endpoint: Endpoint,
        load: Load,
        standing: Standing,
        rng: &mut impl Rng,
    ) {
        let stamp = now.stamp();
        self.reports_since_pick = self.reports_since_pick.saturating_add(1).min(MAX_RATE);
        // An answer to a request sent long ago must not make the replica's placement older than it is.
        let known = self.entries().iter().find(|entry| entry.endpoint == endpoint).map(Entry::standing);
        let standing = known.filter(|known| self.newer(known, &standing)).unwrap_or(standing);
        let rif = u16::try_from(load.rif).unwrap_or(u16::MAX);
        self.remember_rif(settings, stamp, relative_load(rif, standing.weight));
        if self.is_barred(endpoint, stamp) || !standing.is_in_use(self.samples, self.members) {
            return;
        }
        let b_reuse = reuse_budget(
            settings.pool_size as f64,
            f64::from(self.members),
            f64::from(self.reports_per_pick),
            self.removal_rate(settings),
            settings.delta,
            f64::from(settings.reuse_cap),
        );
        let entry = Entry {
            endpoint,
            latency_us: load.latency_us.map_or(UNKNOWN, |latency| latency.min(UNKNOWN - 1)),
            received: stamp,
            sampled: standing.sampled,
            weight: standing.weight,
            rif,
            uses_left: u16::try_from(round_randomly(b_reuse, rng)).unwrap_or(u16::MAX).max(1),
            unproven: 0,
        };
        self.insert(settings, stamp, entry);
    }

    /// Lets a candidate have one request: what it reports is not believed yet.
    pub fn introduce(&mut self, settings: &PoolSettings, now: Micros, endpoint: Endpoint) {
        let stamp = now.stamp();
        if self.is_barred(endpoint, stamp) || self.replicas().any(|replica| replica == endpoint) {
            return;
        }
        let entry = Entry {
            endpoint,
            latency_us: UNKNOWN,
            received: stamp,
            sampled: self.samples,
            weight: Standing::UNIT,
            rif: 0,
            uses_left: 1,
            unproven: 1,
        };
        self.insert(settings, stamp, entry);
    }

    fn insert(&mut self, settings: &PoolSettings, stamp: Stamp, entry: Entry) {
        let endpoint = entry.endpoint;
        if let Some(old) = self.entries_mut().iter_mut().find(|old| old.endpoint == endpoint) {
            *old = entry;
            return;
        }
        self.new_since_pick = self.new_since_pick.saturating_add(1).min(MAX_RATE);
        self.expire(settings, stamp);
        while usize::from(self.entry_count) >= settings.pool_size.min(MAX_POOL) {
            let Some(oldest) = self.oldest(stamp) else { break };
            self.remove(oldest);
        }
        if let Some(slot) = self.entries.get_mut(usize::from(self.entry_count)) {
            *slot = entry;
            self.entry_count += 1;
        }
    }

    /// Drops what is known of a replica that has left.
    pub fn forget(&mut self, endpoint: Endpoint) {
        if let Some(index) = self.entries().iter().position(|entry| entry.endpoint == endpoint) {
            self.remove(index);
        }
    }

    /// Envoy would not use the replica when asked to: it is barred for `for_ms`. When most choices are refused, steering
    /// pauses.
    pub fn refused(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.bar(endpoint, now, for_ms);
        self.refusals_per_pick += REFUSAL_WEIGHT;
        if self.refusals_per_pick > 0.5 {
            (self.paused, self.paused_at, self.refusals_per_pick) = (1, now.stamp(), 0.0);
        }
    }

    /// Forgets a replica and ignores its reports for `for_ms`: it failed.
    pub fn bar(&mut self, endpoint: Endpoint, now: Micros, for_ms: u32) {
        self.forget(endpoint);
        let stamp = now.stamp();
        let count = self.barred_count as usize;
        let known = self.barred.iter().take(count).position(|barred| barred.endpoint == endpoint);
        // A full table gives up its oldest ban: forgetting a ban costs one diverted request.
        let index = known.unwrap_or_else(|| {
            if count < MAX_BARRED {
                self.barred_count += 1;
                return count;
            }
            let age = |barred: &Barred| stamp.distance_ms(barred.at);
            self.barred.iter().enumerate().max_by_key(|(_, barred)| age(barred)).map_or(0, |(index, _)| index)
        });
        if let Some(slot) = self.barred.get_mut(index) {
            *slot = Barred { endpoint, at: stamp, for_ms };
        }
    }

    /// Lifts a bar: the replica has proved itself.
    pub fn unbar(&mut self, endpoint: Endpoint) {
        let count = self.barred_count as usize;
        if let Some(index) = self.barred.iter().take(count).position(|barred| barred.endpoint == endpoint) {
            self.barred.swap(index, count - 1);
            self.barred_count -= 1;
        }
    }

    /// Tells the pool how many replicas are in use and how many samples of the policy were taken.
    pub fn set_members(&mut self, members: u32, samples: u32, now: Micros) {
        if members > self.members {
            self.members_changed = now.stamp();
        }
        (self.members, self.samples) = (members, samples);
        // Hysteresis around 24: a fleet that breathes does not flip the rule at every step.
        if members > 26 {
            self.auto_ge = 1;
        } else if members < 23 {
            self.auto_ge = 0;
        }
    }

    /// Probes to send because no request came for `interval_ms`, or to keep the adaptive budget's target between requests
    /// until ten seconds after the last; none unless this caller took the lease.
    ///
    /// The caller writes the state back with compare-and-swap, so that one of several workers acts per interval.
    pub fn idle_probes(&mut self, settings: &PoolSettings, now: Micros, interval_ms: u32) -> ProbesDue {
        let stamp = now.stamp();
        let since_pick = stamp.distance_ms(self.last_pick);
        if since_pick < REFRESH_FOR_MS {
            let due = self.refresh(settings, stamp);
            if !due.is_empty() {
                return due;
            }
        }
        if since_pick < interval_ms || stamp.distance_ms(self.idle_probed) < interval_ms {
            return ProbesDue::default();
        }
        self.idle_probed = stamp;
        let pool = settings.attainable(self.members) as u32;
        if settings.verified_probes {
            ProbesDue { addressed: 0, discovery: pool }
        } else {
            ProbesDue { addressed: pool, discovery: 1 }
        }
    }

    /// Probes that the adaptive budget is due between requests: at low rates those that requests trigger come too seldom to
    /// keep the target. As many as bring half of the pool below it, asked for a little before they are missed.
    fn refresh(&mut self, settings: &PoolSettings, now: Stamp) -> ProbesDue {
        let Budget::Adaptive { target_age_ms, max_probes_per_query } = settings.budget else {
            return ProbesDue::default();
        };
        // The last round's answers may still be on their way.
        if max_probes_per_query <= 0.0 || now.distance_ms(self.idle_probed) < target_age_ms / 8 {
            return ProbesDue::default();
        }
        let young = self.entries().iter().filter(|e| now.distance_ms(e.received) < target_age_ms / 2).count();
        let missing = settings.attainable(self.members).div_ceil(2).saturating_sub(young);
        if missing > 0 {
            self.idle_probed = now;
        }
        ProbesDue { addressed: missing as u32, discovery: 0 }
    }

    /// Whether the replica has a report younger than `age_ms`: probing it would tell little.
    pub fn heard_within(&self, endpoint: Endpoint, now: Micros, age_ms: u32) -> bool {
        let stamp = now.stamp();
        self.entries().iter().any(|e| e.endpoint == endpoint && stamp.distance_ms(e.received) < age_ms)
    }

    /// How the pool looks now.
    pub fn view(&self, settings: &PoolSettings, now: Micros) -> PoolView {
        let theta = match self.theta(settings, now.stamp()) {
            Theta::At(theta, _) => u16::try_from(theta).ok(),
            Theta::AllHot | Theta::NoneHot => None,
        };
        let mut ages = [0; MAX_POOL];
        for (age, entry) in ages.iter_mut().zip(self.entries()) {
            *age = now.stamp().distance_ms(entry.received);
        }
        let ages = ages.get_mut(..usize::from(self.entry_count)).unwrap_or_default();
        ages.sort_unstable();
        let median_age_ms = ages.get(ages.len() / 2).copied();
        PoolView { occupancy: usize::from(self.entry_count), theta, members: self.members, median_age_ms }
    }

    /// Replicas in the pool.
    pub fn replicas(&self) -> impl Iterator<Item = Endpoint> + '_ {
        self.entries().iter().map(|entry| entry.endpoint)
    }

    fn entries(&self) -> &[Entry] {
        self.entries.get(..usize::from(self.entry_count)).unwrap_or_default()
    }

    fn entries_mut(&mut self) -> &mut [Entry] {
        self.entries.get_mut(..usize::from(self.entry_count)).unwrap_or_default()
    }

    fn remove(&mut self, index: usize) {
        let Some(last) = usize::from(self.entry_count).checked_sub(1) else { return };
        if index <= last {
            self.entries.swap(index, last);
            self.entry_count -= 1;
        }
    }

    fn expire(&mut self, settings: &PoolSettings, now: Stamp) {
        let mut index = 0;
        while let Some(entry) = self.entries().get(index) {
            if now.distance_ms(entry.received) >= settings.max_age_ms
                || !entry.standing().is_in_use(self.samples, self.members)
            {
                self.remove(index);
            } else {
                index += 1;
            }
        }
    }

    fn oldest(&self, now: Stamp) -> Option<usize> {
        let age = |entry: &Entry| now.distance_ms(entry.received);
        self.entries().iter().enumerate().max_by_key(|(_, entry)| age(entry)).map(|(index, _)| index)
    }

    fn is_barred(&self, endpoint: Endpoint, now: Stamp) -> bool {
        self.barred
            .iter()
            .take(self.barred_count as usize)
            .any(|barred| barred.endpoint == endpoint && now.distance_ms(barred.at) < barred.for_ms)
    }

    fn newer(&self, one: &Standing, other: &Standing) -> bool {
        let age = |standing: &Standing| self.samples.wrapping_sub(standing.sampled) as i32;
        age(one) < age(other)
    }

    fn is_paused(&mut self, now: Stamp) -> bool {
        if self.paused == 1 && now.distance_ms(self.paused_at) >= PAUSE_MS {
            self.paused = 0;
        }
        self.paused == 1
    }

    /// The same ranking in reverse.
    fn worst<R: Ord, G: Rng>(&self, rng: &mut G, rank: impl Fn(&Entry, &mut G) -> R) -> Option<usize> {
        self.entries().iter().enumerate().max_by_key(|(_, entry)| rank(entry, rng)).map(|(index, _)| index)
    }

    fn remove_some<R: Ord, G: Rng>(
        &mut self,
        settings: &PoolSettings,
        rng: &mut G,
        rank: impl Fn(&Entry, &mut G) -> R,
    ) {
        self.remove_credit += self.removal_rate(settings) as f32;
        while self.remove_credit >= 1.0 {
            self.remove_credit -= 1.0;
            if settings.scale_removal && self.entry_count <= 2 {
                continue;
            }
            let victim =
                if self.remove_worst == 1 { self.worst(rng, &rank) } else { self.oldest(self.last_pick) };
            self.remove_worst ^= 1;
            if let Some(victim) = victim {
                self.remove(victim);
            }
        }
    }

    fn removal_rate(&self, settings: &PoolSettings) -> f64 {
        if settings.scale_removal && (1..=settings.pool_size).contains(&(self.members as usize)) {
            0.0
        } else if settings.scale_removal {
            settings.r_remove.min(f64::from(self.new_per_pick))
        } else {
            settings.r_remove
        }
    }

    fn update_rates(&mut self) {
        const WEIGHT: f32 = 1.0 / 64.0;
        self.reports_per_pick += (self.reports_since_pick as f32 - self.reports_per_pick) * WEIGHT;
        self.new_per_pick += (self.new_since_pick as f32 - self.new_per_pick) * WEIGHT;
        self.reports_since_pick = 0;
        self.new_since_pick = 0;
        self.refusals_per_pick -= self.refusals_per_pick * REFUSAL_WEIGHT;
    }

    fn probes_due(&mut self, settings: &PoolSettings, now: Stamp) -> ProbesDue {
        let credit = match settings.budget {
            Budget::Fixed { r_probe } => r_probe,
            Budget::Adaptive { target_age_ms, max_probes_per_query } => {
                let size = settings.attainable(self.members);
                let young =
                    self.entries().iter().filter(|e| now.distance_ms(e.received) <= target_age_ms).count();
                if young * 2 < size {
                    max_probes_per_query
                } else if settings.verified_probes {
                    0.0
                } else {
                    let elapsed = now.distance_ms(self.last_pick).min(settings.max_age_ms);
                    let explore = f64::from(elapsed) * size as f64 / f64::from(settings.max_age_ms.max(1));
                    explore.min(max_probes_per_query)
                }
            }
        };
        // Rounded deterministically (§4, footnote 7); the bound only matters after a configuration change.
        self.probe_credit = (self.probe_credit + credit as f32).min(32.0);
        let due = self.probe_credit.floor();
        self.probe_credit -= due;
        ProbesDue { addressed: due as u32, discovery: self.discovery_due(settings, now) }
    }

    fn discovery_due(&mut self, settings: &PoolSettings, now: Stamp) -> u32 {
        if matches!(settings.budget, Budget::Fixed { r_probe } if r_probe <= 0.0) {
            return 0;
        }
        let growing = self.members == 0 || now.distance_ms(self.members_changed) < GROWING_MS;
        let members = f64::from(self.members);
        let rate = if growing {
            (members * 6.0).clamp(80.0, 1000.0)
        } else {
            (1000.0 / f64::from(settings.discovery_interval_ms.max(1))).max((members / 4.0).min(250.0))
        };
        let elapsed = f64::from(now.distance_ms(self.discovery_sent));
        let due = (elapsed * rate / 1000.0).min(MAX_DISCOVERY);
        if due < 1.0 {
            return 0;
        }
        self.discovery_sent = now;
        due as u32
    }

    fn remember_rif(&mut self, settings: &PoolSettings, now: Stamp, load: u32) {
        let size = settings.rif_history.clamp(1, MAX_HISTORY);
        let next = usize::from(self.history_next) % size;
        if let (Some(slot), Some(at)) = (self.history_rif.get_mut(next), self.history_at.get_mut(next)) {
            *slot = u16::try_from(load).unwrap_or(u16::MAX);
            *at = now;
        }
        self.history_next = ((next + 1) % size) as u16;
        self.history_count = (usize::from(self.history_count) + 1).min(size) as u16;
    }

    /// θ by nearest rank over the reports younger than `max_age_ms`.
    fn theta(&self, settings: &PoolSettings, now: Stamp) -> Theta {
        let small = settings.hot == HotRule::Auto && self.auto_ge == 0;
        let q_rif = if small { settings.q_rif_small } else { settings.q_rif };
        if q_rif >= 1.0 {
            return Theta::NoneHot;
        }
        if q_rif <= 0.0 {
            return Theta::AllHot;
        }
        // Counting beats sorting: RIFs are small numbers nearly always.
        let mut counts = [0u8; SMALL_RIF];
        let mut large = [0u16; MAX_HISTORY];
        let (mut total, mut large_count) = (0usize, 0usize);
        let samples = self.history_rif.iter().zip(&self.history_at).take(usize::from(self.history_count));
        for (rif, at) in samples {
            if now.distance_ms(*at) >= settings.max_age_ms {
                continue;
            }
            total += 1;
            if let Some(count) = counts.get_mut(usize::from(*rif)) {
                *count += 1;
            } else if let Some(slot) = large.get_mut(large_count) {
                *slot = *rif;
                large_count += 1;
            }
        }
        if total == 0 {
            return Theta::NoneHot;
        }
        let rank = ((q_rif * total as f64).ceil() as usize).clamp(1, total);
        let mut seen = 0;
        let small = counts.iter().position(|count| {
            seen += usize::from(*count);
            seen >= rank
        });
        let theta = match small {
            Some(rif) => rif as u32,
            None => {
                let index = rank - (total - large_count) - 1;
                large.get_mut(..large_count).map_or(u32::MAX, |large| {
                    large.sort_unstable();
                    large.get(index).map_or(u32::MAX, |rif| u32::from(*rif))
                })
            }
        };
        let or_equal = match settings.hot {
            HotRule::Ge => true,
            HotRule::Gt => false,
            HotRule::Auto => self.auto_ge == 1,
        };
        Theta::At(theta, or_equal)
    }
}

/// Why a blob was not read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BlobError {
    /// Not the size of this version.
    #[error("blob has {got} bytes, this version has {want}")]
    Size {
        /// Bytes found.
        got: usize,
        /// Bytes expected.
        want: usize,
    },
    /// Another magic number or version.
    #[error("blob was written by another version")]
    Version,
    /// A count or rate out of range.
    #[error("blob holds a value out of range")]
    Content,
}

const MAGIC: u32 = 0x7072_6571; // "preq"
const VERSION: u16 = 2;
const UNKNOWN: u32 = u32::MAX;
/// How long a candidate's first request may take before it gets another.
const VERIFY_MS: u32 = 5000;
/// The policy is sampled eagerly until no replica has come into use for this long.
const GROWING_MS: u32 = 2000;
/// Most probes of discovery that one pick sends.
const MAX_DISCOVERY: f64 = 8.0;
/// Weight of one pick in the share of refused choices: some eleven refusals in a row pause steering.
const REFUSAL_WEIGHT: f32 = 1.0 / 16.0;
/// How long steering pauses.
const PAUSE_MS: u32 = 1000;
/// How long after a request the adaptive budget goes on keeping its target.
const REFRESH_FOR_MS: u32 = 10_000;
const SMALL_RIF: usize = 64;
/// Bounds the counters between two picks; an average over more is not believable.
const MAX_RATE: u32 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Profile;
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    fn replica(n: u16) -> Endpoint {
        format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
    }

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(100_000 + ms)
    }

    /// No probes, no removal, unlimited reuse: what is left is the selection rule.
    fn plain() -> PoolSettings {
        PoolSettings {
            pool_size: 16,
            r_remove: 0.0,
            delta: 1000.0,
            hot: HotRule::Gt,
            latency_band: 1.0,
            budget: Budget::Fixed { r_probe: 0.0 },
            ..Profile::Default.pool_settings()
        }
    }

    struct Scene {
        settings: PoolSettings,
        pool: PoolState,
        rng: SmallRng,
    }

    impl Scene {
        fn new(settings: PoolSettings) -> Self {
            let mut pool = PoolState::new();
            pool.set_members(100, 0, ms(0));
            Self { settings, pool, rng: SmallRng::seed_from_u64(7) }
        }
        fn report(&mut self, at: u64, n: u16, rif: u32, latency_ms: Option<u32>) {
            self.pool.record(
                &self.settings,
                ms(at),
                replica(n),
                Load { rif, latency_us: latency_ms.map(|l| l * 1000) },
                Standing::even(0),
                &mut self.rng,
            );
        }
        fn pick(&mut self, at: u64) -> Pick {
            self.pool.pick(&self.settings, ms(at), &mut self.rng)
        }
    }

    #[test]
    fn the_blob_is_below_two_kib() {
        assert!(size_of::<PoolState>() <= 2048, "{}", size_of::<PoolState>());
    }

    #[test]
    fn a_hot_replica_is_avoided_even_when_it_is_fastest() {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.5, ..plain() });
        scene.report(0, 1, 2, Some(40));
        scene.report(0, 2, 90, Some(5));
        scene.report(0, 3, 3, Some(60));
        let pick = scene.pick(10);
        assert_eq!((pick.replica, pick.branch), (Some(replica(1)), Branch::Cold));
    }

    #[test]
    fn within_the_band_the_lower_rif_wins_and_beyond_it_the_lower_latency() {
        for (latency_band, expected) in [(1.0, 1), (1.5, 2), (3.0, 3)] {
            let mut scene = Scene::new(PoolSettings { latency_band, q_rif: 1.0, ..plain() });
            for (n, rif, latency) in [(1, 5, 40), (2, 4, 55), (3, 0, 100)] {
                scene.report(0, n, rif, Some(latency));
            }
            assert_eq!(scene.pick(1).replica, Some(replica(expected)), "band {latency_band}");
        }
    }

    #[test]
    fn when_all_are_hot_the_lowest_rif_wins() {
        // Many low RIFs in the history, then only loaded replicas in the pool.
        let mut scene = Scene::new(PoolSettings { q_rif: 0.5, pool_size: 2, ..plain() });
        for n in 0..10 {
            scene.report(0, n, 1, Some(10));
        }
        scene.report(1, 20, 9, Some(5));
        scene.report(1, 21, 8, Some(500));
        let pick = scene.pick(2);
        assert_eq!((pick.replica, pick.branch), (Some(replica(21)), Branch::Hot));
    }

    #[test]
    fn the_two_readings_of_hot_differ_at_a_tie() {
        for (hot, expected) in
            [(HotRule::Gt, (replica(2), Branch::Cold)), (HotRule::Ge, (replica(1), Branch::Cold))]
        {
            let mut scene = Scene::new(PoolSettings { q_rif: 0.99, hot, ..plain() });
            scene.report(0, 1, 1, Some(50));
            scene.report(0, 2, 5, Some(10)); // ties with θ = 5
            let pick = scene.pick(1);
            assert_eq!((pick.replica.unwrap(), pick.branch), expected, "{hot:?}");
        }
    }

    #[test]
    fn the_ends_of_q_are_rif_only_and_latency_only() {
        for (q_rif, expected) in [(0.0, replica(1)), (1.0, replica(2))] {
            let mut scene = Scene::new(PoolSettings { q_rif, ..plain() });
            scene.report(0, 1, 1, Some(50));
            scene.report(0, 2, 500, Some(10));
            assert_eq!(scene.pick(1).replica, Some(expected), "Q = {q_rif}");
        }
    }

    #[test]
    fn theta_comes_from_a_history_not_from_the_pool() {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.75, pool_size: 2, ..plain() });
        for (n, rif) in [1, 2, 3, 100, 200, 300, 400, 500].into_iter().enumerate() {
            scene.report(0, n as u16, rif, Some(1));
        }
        assert_eq!(
            scene.pool.view(&scene.settings, ms(0)).theta,
            Some(300),
            "nearest rank, above the small counts"
        );
        assert_eq!(scene.pool.view(&scene.settings, ms(1000)).theta, None, "the history is bounded in time");
    }

    #[test]
    fn fewer_than_two_entries_fall_back() {
        let mut scene = Scene::new(plain());
        assert_eq!(scene.pick(0).branch, Branch::Fallback);
        scene.report(0, 1, 0, Some(1));
        assert_eq!(scene.pick(0).replica, None);
        scene.report(0, 2, 0, Some(1));
        assert!(scene.pick(0).replica.is_some());
    }

    #[test]
    fn reports_expire_by_receipt_age() {
        let mut scene = Scene::new(plain());
        scene.report(0, 1, 0, Some(1));
        scene.report(500, 2, 0, Some(1));
        assert_eq!(scene.pick(999).branch, Branch::Cold);
        assert_eq!(scene.pick(1000).branch, Branch::Fallback);
    }

    #[test]
    fn picking_compensates_rif() {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.0, ..plain() });
        scene.report(0, 1, 3, Some(1));
        scene.report(0, 2, 5, Some(1));
        let picks: Vec<_> = (0..4).map(|_| scene.pick(1).replica.unwrap()).collect();
        assert_eq!(&picks[..2], &[replica(1), replica(1)]);
        assert!(picks[2..].contains(&replica(2)), "{picks:?}: at RIF 5 both tie");
    }

    #[test]
    fn the_newest_report_of_a_replica_wins_and_a_full_pool_drops_the_oldest() {
        let mut scene = Scene::new(PoolSettings { pool_size: 3, ..plain() });
        for (at, n) in [(0, 1), (1, 2), (2, 3), (3, 1), (4, 4)] {
            scene.report(at, n, 0, Some(1));
        }
        let mut left: Vec<_> = scene.pool.replicas().collect();
        left.sort_by_key(Endpoint::port);
        assert_eq!(left, [replica(1), replica(3), replica(4)]);
    }

    #[test]
    fn removal_alternates_oldest_and_worst() {
        let mut scene =
            Scene::new(PoolSettings { r_remove: 1.0, scale_removal: false, q_rif: 1.0, ..plain() });
        for (n, latency) in [(1, 30), (2, 10), (3, 90), (4, 20), (5, 25)] {
            scene.report(u64::from(n), n, 0, Some(latency));
        }
        scene.pick(10); // the oldest: 1
        assert!(!scene.pool.replicas().any(|r| r == replica(1)));
        scene.pick(10); // the slowest: 3
        assert!(!scene.pool.replicas().any(|r| r == replica(3)));
        assert_eq!(scene.pool.replicas().count(), 3);
    }

    #[test]
    fn fractional_rates_are_kept_in_the_mean() {
        for r_probe in [0.25, 0.7, 1.0, 2.5] {
            let mut scene = Scene::new(PoolSettings { budget: Budget::Fixed { r_probe }, ..plain() });
            let sent: u32 = (0..1000).map(|at| scene.pick(at).probes.addressed).sum();
            assert!((f64::from(sent) - 1000.0 * r_probe).abs() <= 1.0, "{r_probe}: {sent}");
        }
    }

    #[test]
    fn the_adaptive_budget_probes_a_cold_pool_and_rests_on_a_warm_one() {
        let budget = Budget::Adaptive { target_age_ms: 100, max_probes_per_query: 1.0 };
        let mut scene = Scene::new(PoolSettings { budget, ..plain() });
        let cold: u32 = (0..50).map(|at| scene.pick(at).probes.addressed).sum();
        assert_eq!(cold, 50);
        let mut warm = 0;
        for at in 50..1050 {
            scene.report(at, (at % 16) as u16, 0, Some(1));
            warm += scene.pick(at).probes.addressed;
        }
        assert!((14..=40).contains(&warm), "one pool's worth of exploration a second, got {warm}");
    }

    #[test]
    fn an_idle_unknown_gets_one_request_and_then_waits_for_its_answer() {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.9, ..plain() });
        scene.report(0, 1, 3, Some(50));
        scene.report(0, 2, 3, Some(60));
        scene.report(0, 3, 0, None);
        assert_eq!(scene.pick(1).replica, Some(replica(3)));
        for _ in 0..5 {
            assert_ne!(scene.pick(1).replica, Some(replica(3)));
        }
        scene.report(5, 3, 1, None);
        assert_ne!(scene.pick(6).replica, Some(replica(3)), "a probe still says busy and unknown");
    }

    #[test]
    fn a_barred_replica_stays_out_and_comes_back() {
        let mut scene = Scene::new(PoolSettings { q_rif: 1.0, ..plain() });
        for n in 1..=3 {
            scene.report(0, n, 0, Some(u32::from(n)));
        }
        scene.pool.bar(replica(1), ms(0), 500);
        assert_eq!(scene.pick(1).replica, Some(replica(2)));
        scene.report(100, 1, 0, Some(1));
        assert_eq!(scene.pick(101).replica, Some(replica(2)));
        scene.report(500, 1, 0, Some(1));
        assert_eq!(scene.pick(501).replica, Some(replica(1)));
    }

    #[test]
    fn one_worker_takes_the_idle_lease() {
        let mut scene = Scene::new(plain());
        scene.pick(0);
        assert!(scene.pool.idle_probes(&scene.settings, ms(500), 1000).is_empty(), "a request came lately");
        assert_eq!(scene.pool.idle_probes(&scene.settings, ms(1000), 1000).addressed, 16);
        assert!(scene.pool.idle_probes(&scene.settings, ms(1001), 1000).is_empty(), "taken");
    }

    #[test]
    fn a_candidate_gets_one_request_to_be_verified_and_no_more() {
        let mut scene = Scene::new(plain());
        scene.report(0, 1, 1, Some(10));
        scene.report(0, 2, 1, Some(10));
        scene.pool.introduce(&scene.settings, ms(0), replica(3));
        let first = scene.pick(1);
        assert_eq!((first.replica, first.verify), (Some(replica(3)), true));
        for _ in 0..4 {
            let next = scene.pick(1);
            assert!(next.replica != Some(replica(3)) && !next.verify);
        }
        scene.pool.introduce(&scene.settings, ms(1), replica(3));
        assert_ne!(scene.pick(1).replica, Some(replica(3)), "its first request has not come back");
        scene.pool.unbar(replica(3));
        scene.report(2, 3, 0, Some(1));
        let known = scene.pick(3);
        assert_eq!((known.replica, known.verify), (Some(replica(3)), false));
    }

    #[test]
    fn discovery_goes_on_whatever_the_budget_says_and_hurries_while_names_are_new() {
        let budget = Budget::Adaptive { target_age_ms: 100, max_probes_per_query: 0.0 };
        let mut scene = Scene::new(PoolSettings { budget, ..plain() });
        scene.pool.set_members(8, 0, ms(0));
        scene.pool.set_members(9, 0, ms(0));
        let count = |scene: &mut Scene, range: std::ops::Range<u64>| -> u32 {
            range.map(|at| scene.pick(at).probes.discovery).sum()
        };
        let growing = count(&mut scene, 0..1000);
        count(&mut scene, 2500..3000);
        let settled = count(&mut scene, 3000..4000);
        assert!((75..=90).contains(&growing) && (4..=5).contains(&settled), "{growing} then {settled}");
    }

    #[test]
    fn while_the_fleet_fits_the_pool_nothing_is_removed() {
        let mut scene = Scene::new(PoolSettings { r_remove: 1.0, ..plain() });
        scene.pool.set_members(4, 0, ms(0));
        for n in 0..4 {
            scene.report(0, n, 0, Some(10));
        }
        for at in 0..50 {
            scene.pick(at);
        }
        assert_eq!(scene.pool.replicas().count(), 4);
    }

    /// What the membership says of a replica last met at sample `sampled` with `weight` times the mean share.
    fn standing(sampled: u32, weight: f64) -> Standing {
        Standing { sampled, weight: (weight * f64::from(Standing::UNIT)) as u16 }
    }

    fn placed(scene: &mut Scene, at: u64, n: u16, rif: u32, latency_ms: u32, standing: Standing) {
        let load = Load { rif, latency_us: Some(latency_ms * 1000) };
        scene.pool.record(&scene.settings, ms(at), replica(n), load, standing, &mut scene.rng);
    }

    #[test]
    fn a_replica_that_the_policy_does_not_meet_any_more_is_not_steered_to() {
        let mut scene = Scene::new(plain());
        scene.pool.set_members(4, 100, ms(0));
        for n in 0..4 {
            // The first is the fastest.
            placed(&mut scene, 0, n, 0, 10 + u32::from(n), standing(100, 1.0));
        }
        scene.pool.set_members(4, 140, ms(1));
        assert_eq!(scene.pick(1).replica, Some(replica(0)));
        // A report on a response renews the load, not the placement.
        let kept = scene.pick(1).standing;
        placed(&mut scene, 1, 0, 0, 1, kept);
        for n in 1..4 {
            placed(&mut scene, 1, n, 0, 10 + u32::from(n), standing(141, 1.0));
        }
        scene.pool.set_members(4, 141, ms(2));
        assert_eq!(scene.pick(2).replica, Some(replica(1)));
        placed(&mut scene, 3, 0, 0, 1, kept);
        assert_ne!(scene.pick(3).replica, Some(replica(0)));
        placed(&mut scene, 3, 0, 0, 1, standing(141, 1.0));
        assert_eq!(scene.pick(3).replica, Some(replica(0)), "met again");
    }

    #[test]
    fn equal_replicas_share_by_weight_and_a_slow_heavy_one_is_avoided() {
        let mut scene = Scene::new(PoolSettings { latency_band: 1.5, ..plain() });
        let mut picks = [0u32; 8];
        for round in 0..4000 {
            scene.pool = PoolState::new();
            scene.pool.set_members(8, 0, ms(round));
            for n in 0..8 {
                let latency = scene.rng.random_range(20..30);
                placed(&mut scene, round, n, 0, latency, standing(0, if n < 4 { 1.5 } else { 0.5 }));
            }
            picks[usize::from(scene.pick(round).replica.unwrap().port() - 1000)] += 1;
        }
        let share = |picks: &[u32]| f64::from(picks.iter().sum::<u32>());
        let ratio = share(&picks[..4]) / share(&picks[4..]);
        assert!((2.6..=3.8).contains(&ratio), "{ratio:.2}, not 3: {picks:?}");

        for _ in 0..1000 {
            for n in 0..8 {
                let latency = if n == 0 { 800 } else { 10 };
                placed(&mut scene, 4001, n, 0, latency, standing(0, if n < 4 { 1.5 } else { 0.5 }));
            }
            assert_ne!(scene.pick(4001).replica, Some(replica(0)));
        }
    }

    #[test]
    fn rif_counts_relative_to_the_weight() {
        let mut scene = Scene::new(PoolSettings { q_rif: 0.0, ..plain() });
        placed(&mut scene, 0, 1, 3, 10, standing(0, 3.0));
        placed(&mut scene, 0, 2, 2, 10, standing(0, 3.0));
        placed(&mut scene, 0, 3, 1, 10, standing(0, 0.5));
        // 1, 1 (of 2/3, rounded up) and 2: the light one waits until the others reach 2 (of 4/3) too.
        for _ in 0..3 {
            assert_ne!(scene.pick(1).replica, Some(replica(3)));
        }
    }

    #[test]
    fn when_most_choices_are_refused_steering_pauses_for_a_second() {
        let mut scene = Scene::new(plain());
        let mut refused = 0;
        let mut at = 0;
        while scene.pool.paused == 0 {
            for n in 0..16 {
                scene.report(at, n, 0, Some(1));
            }
            let chosen = scene.pick(at).replica.expect("not paused");
            scene.pool.refused(chosen, ms(at), 10);
            refused += 1;
            at += 20;
            assert!(refused < 20);
        }
        assert!(refused > 8, "{refused}: a few may be refused without harm");
        for n in 0..16 {
            scene.report(at + 500, n, 0, Some(1));
        }
        assert_eq!(scene.pick(at + 500).branch, Branch::Fallback);
        assert_eq!(scene.pick(at + 1000).branch, Branch::Cold);
        // One in four is no reason.
        for round in 0..100u64 {
            for n in 0..16 {
                scene.report(at + 1000 + round, n, 0, Some(1));
            }
            let chosen = scene.pick(at + 1000 + round).replica.expect("not paused");
            if round % 4 == 0 {
                scene.pool.refused(chosen, ms(at + 1000 + round), 10);
            }
        }
    }

    #[test]
    fn where_envoy_vouches_exploration_needs_no_address() {
        for (verified_probes, addressed) in [(true, 0), (false, 15)] {
            let budget = Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 1.0 };
            let mut scene = Scene::new(PoolSettings { budget, verified_probes, ..plain() });
            let mut due = ProbesDue::default();
            for at in 3000..4000 {
                scene.report(at, (at % 16) as u16, 0, Some(1));
                let probes = scene.pick(at).probes;
                // The first is due a burst.
                if at < 3010 {
                    continue;
                }
                due.addressed += probes.addressed;
                due.discovery += probes.discovery;
            }
            assert!(due.addressed.abs_diff(addressed) <= 10, "{due:?}");
            assert!((20..=27).contains(&due.discovery), "a quarter of the fleet a second: {due:?}");
            let idle = scene.pool.idle_probes(&scene.settings, ms(20_000), 1000);
            assert_eq!((idle.addressed == 0, idle.discovery >= 16), (verified_probes, verified_probes));
        }
    }

    #[test]
    fn a_foreign_blob_is_refused() {
        let good = PoolState::new();
        assert!(PoolState::decode(good.as_bytes()).is_ok());
        assert!(matches!(PoolState::decode(&[]), Err(BlobError::Size { .. })));
        let mut other = good;
        other.version = 9;
        assert_eq!(PoolState::decode(other.as_bytes()).err(), Some(BlobError::Version));
        let mut other = good;
        other.probe_credit = f32::NAN;
        assert_eq!(PoolState::decode(other.as_bytes()).err(), Some(BlobError::Content));
        let mut other = good;
        other.entry_count = 1; // its endpoint is all zero
        assert_eq!(PoolState::decode(other.as_bytes()).err(), Some(BlobError::Content));
    }

    #[derive(Clone, Debug)]
    enum Op {
        Report(u16, u32, Option<u32>),
        Pick,
        Wait(u64),
        Bar(u16),
        Refused(u16),
        Forget(u16),
        Introduce(u16),
        Members(u32),
        Idle,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0u16..40, 0u32..200_000, proptest::option::of(0u32..u32::MAX))
                .prop_map(|(n, r, l)| Op::Report(n, r, l)),
            Just(Op::Pick),
            (0u64..700).prop_map(Op::Wait),
            (0u16..40).prop_map(Op::Bar),
            (0u16..40).prop_map(Op::Refused),
            (0u16..40).prop_map(Op::Forget),
            (0u32..200).prop_map(Op::Members),
            (0u16..40).prop_map(Op::Introduce),
            Just(Op::Idle),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_the_pool_keeps_its_invariants(
            ops in proptest::collection::vec(op(), 0..300),
            paper in any::<bool>(), q_rif in 0.0f64..=1.0, seed in any::<u64>(),
        ) {
            let profile = if paper { Profile::Paper } else { Profile::Default };
            let settings = PoolSettings { q_rif, q_rif_small: q_rif, ..profile.pool_settings() };
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut pool = PoolState::new();
            let mut now = ms(0);
            for op in ops {
                match op {
                    Op::Report(n, rif, latency) => pool.record(&settings, now, replica(n), Load { rif, latency_us: latency }, Standing::even(0), &mut rng),
                    Op::Pick => {
                        let before: Vec<_> = pool.replicas().collect();
                        let pick = pool.pick(&settings, now, &mut rng);
                        if let Some(chosen) = pick.replica {
                            prop_assert!(before.contains(&chosen));
                        }
                        prop_assert!(pick.probes.addressed <= 32 && pick.probes.discovery <= 8);
                    }
                    Op::Wait(step) => now = now.plus(step * 1000),
                    Op::Bar(n) => pool.bar(replica(n), now, 500),
                    Op::Refused(n) => pool.refused(replica(n), now, 500),
                    Op::Forget(n) => pool.forget(replica(n)),
                    Op::Introduce(n) => pool.introduce(&settings, now, replica(n)),
                    Op::Members(n) => pool.set_members(n, 0, now),
                    Op::Idle => { pool.idle_probes(&settings, now, 1000); }
                }
                let replicas: Vec<_> = pool.replicas().collect();
                prop_assert!(replicas.len() <= settings.pool_size);
                let distinct: std::collections::HashSet<_> = replicas.iter().collect();
                prop_assert_eq!(distinct.len(), replicas.len(), "one entry per replica");
                prop_assert!(PoolState::decode(pool.as_bytes()).is_ok());
            }
        }

        #[test]
        fn no_bytes_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..2100), splice in 0usize..2000, seed in any::<u64>()) {
            let _ = PoolState::decode(&bytes);
            // Damage a valid blob; if it still decodes, it must work.
            let mut blob = PoolState::new().as_bytes().to_vec();
            let at = splice % blob.len();
            bytes.truncate(blob.len() - at);
            blob[at..at + bytes.len()].copy_from_slice(&bytes);
            if let Ok(mut pool) = PoolState::decode(&blob) {
                let settings = Profile::Default.pool_settings();
                let mut rng = SmallRng::seed_from_u64(seed);
                for n in 0..40 {
                    let load = Load { rif: 3, latency_us: Some(1) };
                    pool.record(&settings, ms(1), replica(n), load, Standing::even(0), &mut rng);
                    pool.pick(&settings, ms(2), &mut rng);
                }
            }
        }
    }
}
