//! Service times of a replica: their distributions, and how these are written on a command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use rand::Rng;
use rand_distr::{Distribution, Exp1, StandardNormal};
use serde::{Deserialize, Serialize};

/// The accepted forms of service times.
const FORMS: &str =
    "exact:MS, exp:MEAN, lognormal:MEAN,SIGMA or mix:LOW-HIGH,LOW-HIGH,SHARE (of the second range)";
/// Longest allowed mean: the generator counts a request as failed after 10 s.
const LONGEST_MS: f64 = 10_000.0;

/// A distribution of service times.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Times {
    Exactly {
        ms: f64,
    },
    Exponential {
        mean_ms: f64,
    },
    /// The logarithm is normally distributed with the standard deviation `sigma`.
    LogNormal {
        mean_ms: f64,
        sigma: f64,
    },
    /// Uniform between two bounds, and for a share of the requests between two others.
    Mix {
        usual: [f64; 2],
        other: [f64; 2],
        other_share: f64,
    },
}

impl Times {
    pub(crate) fn mean_ms(self) -> f64 {
        let middle = |[low, high]: [f64; 2]| f64::midpoint(low, high);
        match self {
            Self::Exactly { ms } => ms,
            Self::Exponential { mean_ms } | Self::LogNormal { mean_ms, .. } => mean_ms,
            Self::Mix { usual, other, other_share } => {
                middle(usual) * (1.0 - other_share) + middle(other) * other_share
            }
        }
    }

    pub(crate) fn sample(self, rng: &mut impl Rng) -> Duration {
        let ms = match self {
            Self::Exactly { ms } => ms,
            Self::Exponential { mean_ms } => {
                let drawn: f64 = Exp1.sample(rng);
                drawn * mean_ms
            }
            Self::LogNormal { mean_ms, sigma } => {
                let drawn: f64 = StandardNormal.sample(rng);
                // The mean is e^(σ²/2) times the median.
                mean_ms * (sigma * drawn - sigma * sigma / 2.0).exp()
            }
            Self::Mix { usual, other, other_share } => {
                let [low, high] = if rng.random::<f64>() < other_share { other } else { usual };
                rng.random_range(low..=high)
            }
        };
        Duration::from_secs_f64(ms / 1e3)
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly { ms } => write!(f, "exactly {ms} ms"),
            Self::Exponential { mean_ms } => write!(f, "exponential {mean_ms} ms"),
            Self::LogNormal { mean_ms, sigma } => write!(f, "lognormal {mean_ms} ms, sigma {sigma}"),
            Self::Mix { usual: [low, high], other: [from, to], other_share } => {
                write!(f, "{low}–{high} ms, {:.0} % {from}–{to} ms", other_share * 100.0)
            }
        }
    }
}

impl FromStr for Times {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // On one line, because clap shows only the outermost message.
        Self::read(text).map_err(|reason| anyhow!("{reason:#}; service times are {FORMS}"))
    }
}

impl Times {
    fn read(text: &str) -> Result<Self> {
        let (kind, rest) = text.split_once(':').context("there is no `:`")?;
        let parts: Vec<&str> = rest.split(',').collect();
        Ok(match (kind, parts.as_slice()) {
            ("exact", [ms]) => Self::Exactly { ms: milliseconds(ms)? },
            ("exp", [mean]) => Self::Exponential { mean_ms: milliseconds(mean)? },
            ("lognormal", [mean, sigma]) => {
                let sigma = number(sigma)?;
                ensure!(sigma > 0.0 && sigma <= 3.0, "sigma is above 0 and at most 3, not {sigma}");
                Self::LogNormal { mean_ms: milliseconds(mean)?, sigma }
            }
            ("mix", [usual, other, share]) => {
                let other_share = number(share)?;
                ensure!((0.0..=1.0).contains(&other_share), "a share is from 0 to 1, not {other_share}");
                Self::Mix { usual: bounds(usual)?, other: bounds(other)?, other_share }
            }
            ("exact" | "exp" | "lognormal" | "mix", _) => {
                bail!("{kind} with {} values", parts.len())
            }
            _ => bail!("unknown distribution `{kind}`"),
        })
    }
}

fn number(text: &str) -> Result<f64> {
    text.trim().parse().map_err(|_| anyhow!("`{text}` is not a number"))
}

fn milliseconds(text: &str) -> Result<f64> {
    let ms = number(text)?;
    ensure!(ms > 0.0 && ms <= LONGEST_MS, "a time is above 0 and at most {LONGEST_MS} ms, not {ms}");
    Ok(ms)
}

fn bounds(text: &str) -> Result<[f64; 2]> {
    let (low, high) = text.split_once('-').with_context(|| format!("`{text}` is not LOW-HIGH"))?;
    let (low, high) = (milliseconds(low)?, milliseconds(high)?);
    ensure!(low <= high, "{low} is above {high}");
    Ok([low, high])
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    const COUNT: usize = 100_000;

    /// Sorted draws in ms, and their mean.
    fn drawn(spec: &str) -> (Vec<f64>, f64) {
        let times: Times = spec.parse().unwrap();
        let mut rng = SmallRng::seed_from_u64(7);
        let mut all: Vec<f64> = (0..COUNT).map(|_| times.sample(&mut rng).as_secs_f64() * 1e3).collect();
        all.sort_by(f64::total_cmp);
        let mean = all.iter().sum::<f64>() / COUNT as f64;
        assert!((mean / times.mean_ms() - 1.0).abs() < 0.02, "{spec}: mean {mean}");
        (all, mean)
    }

    #[track_caller]
    fn assert_quantile(drawn: &[f64], q: f64, expected: f64) {
        let found = drawn[(q * COUNT as f64) as usize];
        assert!((found / expected - 1.0).abs() < 0.03, "quantile {q}: {found}, not {expected}");
    }

    #[test]
    fn exponential_times_have_mean_and_quantiles() {
        let (all, mean) = drawn("exp:40");
        assert!((mean - 40.0).abs() < 0.8);
        assert_quantile(&all, 0.5, 40.0 * 2f64.ln());
        assert_quantile(&all, 0.99, 40.0 * 100f64.ln());
    }

    #[test]
    fn the_parameter_of_lognormal_times_is_the_mean_not_the_median() {
        let (all, mean) = drawn("lognormal:20,1.0");
        assert!((mean - 20.0).abs() < 0.4);
        assert_quantile(&all, 0.5, 20.0 * (-0.5f64).exp());
        assert_quantile(&all, 0.8413, 20.0 * 0.5f64.exp());
    }

    #[test]
    fn a_mix_has_both_parts() {
        let (all, mean) = drawn("mix:5-15,100-300,0.1");
        assert!((mean - 29.0).abs() < 0.6, "{mean}");
        assert_quantile(&all, 0.45, 10.0);
        assert_quantile(&all, 0.95, 200.0);
        assert!(all[0] >= 5.0 && all[COUNT - 1] <= 300.0);
        assert!(!all.iter().any(|ms| *ms > 15.0 && *ms < 100.0));
    }

    #[test]
    fn exact_times_are_exact() {
        let (all, _) = drawn("exact:40");
        assert!(all.iter().all(|ms| *ms == 40.0));
    }

    #[test]
    fn the_seed_fixes_the_times() {
        let draw = |seed| {
            let mut rng = SmallRng::seed_from_u64(seed);
            [(); 5].map(|()| Times::Exponential { mean_ms: 40.0 }.sample(&mut rng))
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn every_form_is_parsed_and_described() {
        for (spec, description) in [
            ("exact:40", "exactly 40 ms"),
            ("exp:2.5", "exponential 2.5 ms"),
            ("lognormal:20,1.5", "lognormal 20 ms, sigma 1.5"),
            ("mix:5-15,100-300,0.1", "5–15 ms, 10 % 100–300 ms"),
        ] {
            assert_eq!(spec.parse::<Times>().unwrap().to_string(), description);
        }
    }

    #[test]
    fn invalid_times_are_refused_with_the_reason() {
        for (spec, reason) in [
            ("40", "no `:`"),
            ("gamma:40", "unknown distribution `gamma`"),
            ("exp:fast", "`fast` is not a number"),
            ("exp:0", "above 0"),
            ("exp:NaN", "above 0"),
            ("exact:20000", "at most 10000 ms"),
            ("exp:40,1", "exp with 2 values"),
            ("lognormal:20", "lognormal with 1 values"),
            ("lognormal:20,9", "sigma is above 0 and at most 3"),
            ("mix:5-15,100,0.1", "`100` is not LOW-HIGH"),
            ("mix:15-5,100-300,0.1", "15 is above 5"),
            ("mix:5-15,100-300,10", "a share is from 0 to 1"),
        ] {
            let error = spec.parse::<Times>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(FORMS), "{spec}: {error}");
        }
    }
}
