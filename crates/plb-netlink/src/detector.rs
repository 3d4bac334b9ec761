//! Decides when to repath: Algorithms 1 and 2 of the PLB paper as a pure state machine.
//!
//! Algorithm 1 counts consecutive congested round trips of one connection. Algorithm 2 decides when that count, or a
//! retransmission timeout, moves the connection to another path. The caller decides which packets count as congested
//! (an echoed CE mark for TCP, a round trip over the target for Swift) and changes the path.
//!
//! This module reads no clock and draws no random numbers: callers pass `now`, measured from any origin, and random
//! bits.
//!
//! Source: Qureshi et al., "PLB: Congestion Signals are Simple and Effective for Network Load Balancing", SIGCOMM
//! '22, §3.2 to §3.4. This module settles what the pseudocode leaves open:
//! - A round in which nothing was delivered neither counts nor resets. The pseudocode's `0 >= K * 0` would count it;
//!   Linux skips it too.
//! - The count stops at N, as in Linux.
//! - M = 0 switches the idle rule off, as in Linux.
//! - A pause discards the rounds that end during it ("pausing the PLBDetection() module"), so N fresh rounds are
//!   needed afterwards. Linux keeps counting during the pause and only withholds the repath.

use std::fmt;
use std::time::Duration;

/// Parameters of a detector. They are checked on construction, so a detector cannot be misconfigured.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Config {
    k: Threshold,
    m: u8,
    n: u8,
    rto_pause: Duration,
}

impl Config {
    /// Checks and stores the four parameters.
    ///
    /// * `k`: minimum share of congested packets that makes a round congested.
    /// * `m`: consecutive congested rounds after which an idle connection is repathed, 0 to `n`; 0 switches the idle
    ///   rule off.
    /// * `n`: consecutive congested rounds after which a busy connection is repathed, 1 to 255.
    /// * `rto_pause`: expected time to repair a link. After a retransmission timeout, detection pauses for one to two
    ///   times this; zero means no pause.
    ///
    /// # Errors
    /// If `n` is 0, or if `m` is above `n` (the idle rule could then never act before the forced one).
    pub fn new(k: Threshold, m: u8, n: u8, rto_pause: Duration) -> Result<Self, ConfigError> {
        if n == 0 {
            return Err(ConfigError::ZeroN);
        }
        if m > n {
            return Err(ConfigError::MAboveN { m, n });
        }
        Ok(Self { k, m, n, rto_pause })
    }

    /// Returns K.
    pub fn k(&self) -> Threshold {
        self.k
    }

    /// Returns M, in rounds.
    pub fn m(&self) -> u8 {
        self.m
    }

    /// Returns N, in rounds.
    pub fn n(&self) -> u8 {
        self.n
    }

    /// Returns the shortest pause after a retransmission timeout; the longest is twice this.
    pub fn rto_pause(&self) -> Duration {
        self.rto_pause
    }
}

impl Default for Config {
    /// Returns the paper's K = 0.5, M = 3 and N = 12, and the pause of one to two minutes that the paper and Linux
    /// use.
    fn default() -> Self {
        Self { k: Threshold::HALF, m: 3, n: 12, rto_pause: Duration::from_secs(60) }
    }
}

/// K: a share of packets in units of 1/256, 0 to 256. The kernel uses the same unit, so both make the same decisions.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Threshold(u16);

impl Threshold {
    /// K = 0.5, the default of the paper and the kernel.
    pub const HALF: Self = Self(128);

    /// Creates a threshold from 1/256ths.
    ///
    /// # Errors
    /// If the value is above 256.
    pub fn from_256ths(value: u16) -> Result<Self, ConfigError> {
        if value > 256 { Err(ConfigError::K { got: f64::from(value) / 256.0 }) } else { Ok(Self(value)) }
    }

    /// Creates a threshold from a share of 0 to 1, rounded to the nearest 1/256.
    ///
    /// # Errors
    /// If the share is outside 0 to 1, or NaN.
    pub fn from_share(share: f64) -> Result<Self, ConfigError> {
        if !(0.0..=1.0).contains(&share) {
            return Err(ConfigError::K { got: share });
        }
        // The value is in range because of the check above.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Ok(Self((share * 256.0).round() as u16))
    }

    /// Returns the threshold in 1/256ths, 0 to 256.
    pub fn in_256ths(self) -> u16 {
        self.0
    }

    /// Returns the threshold as a share, 0 to 1.
    pub fn share(self) -> f64 {
        f64::from(self.0) / 256.0
    }

    fn reached_by(self, congested: u64, delivered: u64) -> bool {
        u128::from(congested) * 256 >= u128::from(delivered) * u128::from(self.0)
    }
}

/// Reason why a [`Config`] was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConfigError {
    /// K is not a share.
    K {
        /// The requested share.
        got: f64,
    },
    /// N is 0.
    ZeroN,
    /// M is above N.
    MAboveN {
        /// M, rounds.
        m: u8,
        /// N, rounds.
        n: u8,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::K { got } => {
                write!(f, "K must lie in 0 to 1 (0 to 256 in the kernel's 1/256ths), got {got}")
            }
            Self::ZeroN => write!(f, "N must be at least 1: with 0 every check would repath"),
            Self::MAboveN { m, n } => {
                write!(f, "M must be at most N, else the idle rule never acts: got M = {m}, N = {n}")
            }
        }
    }
}

impl std::error::Error for ConfigError {}

/// Reason why a connection is repathed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cause {
    /// M congested rounds, and nothing is in flight: no packet can be reordered.
    Idle,
    /// N congested rounds: the connection is repathed although packets are in flight.
    Forced,
    /// A retransmission timeout.
    Timeout,
}

/// State of one connection.
///
/// Call [`on_ack`](Self::on_ack) for every acknowledgement, [`on_round`](Self::on_round) once a round trip,
/// [`on_timeout`](Self::on_timeout) for every retransmission timeout, and [`before_send`](Self::before_send) before
/// each data packet (TSO frame).
#[derive(Clone, Debug)]
pub struct Detector {
    config: Config,
    delivered: u64,
    congested: u64,
    congested_rounds: u8,
    paused_until: Option<Duration>,
}

impl Detector {
    /// Creates the state of a new connection.
    pub fn new(config: Config) -> Self {
        Self { config, delivered: 0, congested: 0, congested_rounds: 0, paused_until: None }
    }

    /// Records an acknowledgement of `delivered` packets, `congested` of them marked (Algorithm 1, lines 10 to 13).
    ///
    /// If `congested` exceeds `delivered`, all delivered packets count as congested.
    pub fn on_ack(&mut self, delivered: u64, congested: u64) {
        self.delivered = self.delivered.saturating_add(delivered);
        self.congested = self.congested.saturating_add(congested.min(delivered));
    }

    /// Records the end of a round trip (Algorithm 1, lines 14 to 22).
    pub fn on_round(&mut self, now: Duration) {
        let delivered = std::mem::take(&mut self.delivered);
        let congested = std::mem::take(&mut self.congested);
        if self.is_paused(now) || delivered == 0 {
            return;
        }
        self.paused_until = None;
        self.congested_rounds = if self.config.k.reached_by(congested, delivered) {
            self.congested_rounds.saturating_add(1).min(self.config.n)
        } else {
            0
        };
    }

    /// Decides whether to repath before a data packet is sent while `in_flight` others are in flight (Algorithm 2).
    /// Returns `Some` if the connection must first get a new random flow label; the count then starts over.
    pub fn before_send(&mut self, in_flight: u64) -> Option<Cause> {
        let Config { m, n, .. } = self.config;
        let cause = if m > 0 && self.congested_rounds >= m && in_flight == 0 {
            Cause::Idle
        } else if self.congested_rounds >= n {
            Cause::Forced
        } else {
            return None;
        };
        self.congested_rounds = 0;
        Some(cause)
    }

    /// Records a retransmission timeout. It always repaths, even during a pause. It starts a pause of one to two
    /// times [`Config::rto_pause`] (§3.4); `random`, 32 uniformly random bits, selects the length.
    pub fn on_timeout(&mut self, now: Duration, random: u32) -> Cause {
        self.delivered = 0;
        self.congested = 0;
        self.congested_rounds = 0;
        let pause = self.config.rto_pause;
        let extra = pause.mul_f64(f64::from(random) / (f64::from(u32::MAX) + 1.0));
        self.paused_until = Some(now.saturating_add(pause).saturating_add(extra));
        Cause::Timeout
    }

    /// Returns the number of consecutive congested rounds so far, 0 to N.
    pub fn congested_rounds(&self) -> u8 {
        self.congested_rounds
    }

    /// Returns whether the pause after a timeout is still in effect.
    pub fn is_paused(&self, now: Duration) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn config(k: f64, m: u8, n: u8) -> Config {
        Config::new(Threshold::from_share(k).unwrap(), m, n, 60 * SECOND).unwrap()
    }

    /// One step of a scenario.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// A round of ten packets, with this many of them marked.
        Round(u64),
        /// A round in which nothing was delivered.
        Silent,
        /// A packet is sent while this many are in flight.
        Send(u64),
        /// A retransmission timeout with the shortest pause.
        Timeout,
        /// This many seconds pass.
        Wait(u64),
    }

    use Step::{Round, Send, Silent, Timeout, Wait};

    /// Plays the steps and returns the repaths, each with the index of its step.
    fn play(config: Config, steps: &[Step]) -> Vec<(usize, Cause)> {
        let mut detector = Detector::new(config);
        let mut now = Duration::ZERO;
        let mut repaths = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            let cause = match *step {
                Round(marked) => {
                    detector.on_ack(4, marked.min(4));
                    detector.on_ack(6, marked.saturating_sub(4));
                    detector.on_round(now);
                    None
                }
                Silent => {
                    detector.on_round(now);
                    None
                }
                Send(in_flight) => detector.before_send(in_flight),
                Timeout => Some(detector.on_timeout(now, 0)),
                Wait(seconds) => {
                    now += u32::try_from(seconds).unwrap() * SECOND;
                    None
                }
            };
            repaths.extend(cause.map(|cause| (index, cause)));
        }
        repaths
    }

    /// Name, parameters, steps, expected repaths.
    type Case = (&'static str, Config, &'static [Step], &'static [(usize, Cause)]);

    #[test]
    fn algorithms_one_and_two() {
        let cases: &[Case] = &[
            ("no packet marked", config(0.5, 1, 1), &[Round(0), Send(0), Send(9)], &[]),
            ("a share of exactly K counts", config(0.5, 0, 1), &[Round(5), Send(9)], &[(1, Cause::Forced)]),
            ("just below K", config(0.5, 0, 1), &[Round(4), Send(9)], &[]),
            ("K = 1 needs every packet", config(1.0, 0, 1), &[Round(9), Send(9)], &[]),
            ("K = 1, all marked", config(1.0, 0, 1), &[Round(10), Send(9)], &[(1, Cause::Forced)]),
            ("K = 0 counts every round", config(0.0, 0, 1), &[Round(0), Send(9)], &[(1, Cause::Forced)]),
            ("below M nothing moves", config(0.5, 2, 4), &[Round(10), Send(0)], &[]),
            (
                "M rounds and idle",
                config(0.5, 2, 4),
                &[Round(10), Round(10), Send(1), Send(0)],
                &[(3, Cause::Idle)],
            ),
            (
                "N rounds and busy",
                config(0.5, 2, 4),
                &[Round(10), Round(10), Round(10), Send(1), Round(10), Send(1)],
                &[(5, Cause::Forced)],
            ),
            (
                "idle is preferred at N",
                config(0.5, 2, 3),
                &[Round(10), Round(10), Round(10), Send(0)],
                &[(3, Cause::Idle)],
            ),
            ("M = 0: idle rule off", config(0.5, 0, 3), &[Round(10), Round(10), Send(0)], &[]),
            ("M = 0: N still acts on idle", config(0.5, 0, 1), &[Round(10), Send(0)], &[(1, Cause::Forced)]),
            ("M = N = 1", config(0.5, 1, 1), &[Round(10), Send(0)], &[(1, Cause::Idle)]),
            (
                "a calm round resets",
                config(0.5, 0, 3),
                &[Round(10), Round(10), Round(0), Round(10), Round(10), Send(1)],
                &[],
            ),
            (
                "a silent round neither counts nor resets",
                config(0.5, 0, 2),
                &[Round(10), Silent, Send(1), Round(10), Send(1)],
                &[(4, Cause::Forced)],
            ),
            (
                "a repath starts the count over",
                config(0.5, 0, 2),
                &[Round(10), Round(10), Send(1), Send(1), Round(10), Send(1), Round(10), Send(1)],
                &[(2, Cause::Forced), (7, Cause::Forced)],
            ),
            (
                "the count stops at N: one repath, not two",
                config(0.5, 0, 2),
                &[Round(10), Round(10), Round(10), Round(10), Send(1), Send(1)],
                &[(4, Cause::Forced)],
            ),
            (
                "a timeout repaths and pauses detection",
                config(0.5, 1, 1),
                &[Timeout, Wait(59), Round(10), Send(0), Wait(1), Round(10), Send(0)],
                &[(0, Cause::Timeout), (6, Cause::Idle)],
            ),
            (
                "a timeout in the pause repaths again and pauses anew",
                config(0.5, 1, 1),
                &[Timeout, Wait(59), Timeout, Wait(59), Round(10), Send(0)],
                &[(0, Cause::Timeout), (2, Cause::Timeout)],
            ),
            (
                "a timeout forgets what was counted",
                config(0.5, 0, 2),
                &[Round(10), Timeout, Wait(60), Round(10), Send(1)],
                &[(1, Cause::Timeout)],
            ),
            (
                "rounds in the pause are lost, not saved up",
                config(0.5, 0, 2),
                &[Timeout, Round(10), Round(10), Round(10), Wait(60), Round(10), Send(1)],
                &[(0, Cause::Timeout)],
            ),
        ];
        for (name, config, steps, expected) in cases {
            assert_eq!(play(*config, steps), *expected, "{name}");
        }
    }

    #[test]
    fn the_defaults_are_the_papers() {
        let config = Config::default();
        assert_eq!((config.k().share(), config.m(), config.n()), (0.5, 3, 12));
        let mut steps = vec![Round(5); 11];
        steps.extend([Send(1), Round(5), Send(1)]);
        assert_eq!(play(config, &steps), [(13, Cause::Forced)]);
    }

    #[test]
    fn the_pause_is_uniform_between_one_and_two_times() {
        for (random, pause_ms) in [(0, 60_000), (u32::MAX / 2 + 1, 90_000), (u32::MAX, 120_000)] {
            let mut detector = Detector::new(config(0.5, 1, 1));
            detector.on_timeout(SECOND, random);
            let end = SECOND + Duration::from_millis(pause_ms);
            assert!(detector.is_paused(end - Duration::from_millis(1)), "{random}");
            assert!(!detector.is_paused(end), "{random}");
        }
    }

    #[test]
    fn a_pause_of_zero_does_not_pause() {
        let config = Config::new(Threshold::HALF, 1, 1, Duration::ZERO).unwrap();
        assert_eq!(play(config, &[Timeout, Round(10), Send(0)]), [(0, Cause::Timeout), (2, Cause::Idle)]);
    }

    #[test]
    fn extremes_do_not_overflow() {
        let mut detector = Detector::new(config(1.0, 1, 1));
        detector.on_ack(u64::MAX, u64::MAX);
        detector.on_ack(1, u64::MAX);
        detector.on_round(Duration::MAX);
        assert_eq!(detector.before_send(0), Some(Cause::Idle));
        detector.on_timeout(Duration::MAX, u32::MAX);
        assert!(detector.is_paused(Duration::MAX - SECOND));
        // More congested rounds than the counter holds, without a packet to send.
        assert_eq!(play(config(0.5, 1, 255), &[Round(10); 256]), []);
    }

    #[test]
    fn bad_parameters_are_named() {
        let new = |m, n| Config::new(Threshold::HALF, m, n, SECOND).unwrap_err().to_string();
        assert!(new(0, 0).contains("N must be at least 1"));
        assert!(new(4, 3).contains("M = 4, N = 3"));
        assert_eq!(Threshold::from_256ths(256).unwrap().share(), 1.0);
        assert!(Threshold::from_256ths(257).unwrap_err().to_string().contains("0 to 256"));
        for share in [-0.01, 1.01, f64::NAN, f64::INFINITY] {
            assert!(Threshold::from_share(share).is_err(), "{share}");
        }
        assert_eq!(Threshold::from_share(0.5).unwrap(), Threshold::HALF);
    }
}
