//! Decides whether and when a healed replica gets its traffic back.

use std::time::Duration;

use crate::stats::Sample;

/// Period over which a share is measured, long enough to exclude chance.
const WINDOW: Duration = Duration::from_secs(2);
/// Resolution of the result.
const STEP: Duration = Duration::from_millis(500);
const STEPS: usize = (WINDOW.as_millis() / STEP.as_millis()) as usize;

/// The replica whose traffic must come back, and the criteria.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    pub(crate) replica: u16,
    pub(crate) within: Duration,
    /// Minimum part of its fair share for the replica to count as back.
    pub(crate) part: f64,
}

impl Watch {
    /// Time during which the replica is observed after it has healed.
    pub(crate) fn length(&self) -> Duration {
        self.within + WINDOW
    }
}

/// The return of the traffic.
#[derive(Clone, Debug)]
pub(crate) struct Recovery {
    /// Time since healing; `None` if it exceeds the limit.
    pub(crate) after: Option<Duration>,
    /// Parts of the fair share, second by second since healing.
    pub(crate) series: Vec<f64>,
}

/// Evaluates the requests that were due after `healed`.
///
/// The replica is back at the first instant from which it gets the required part over the next [`WINDOW`], over all the
/// remaining time, and over the last [`WINDOW`]. So a replica whose traffic comes and goes is not back.
pub(crate) fn of(samples: &[Sample], watch: &Watch, replicas: usize, healed: Duration) -> Recovery {
    let steps = (watch.length().as_millis() / STEP.as_millis()) as usize;
    let mut counts = vec![(0u32, 0u32); steps];
    for sample in samples {
        let Some(after) = sample.due.checked_sub(healed) else { continue };
        let Some((hits, all)) = counts.get_mut((after.as_millis() / STEP.as_millis()) as usize) else {
            continue;
        };
        *all += 1;
        *hits += u32::from(sample.replica == Some(watch.replica));
    }
    let fair = 1.0 / replicas as f64;
    let part = |counts: &[(u32, u32)]| {
        let (hits, all) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        f64::from(hits) / f64::from(all) / fair
    };
    let enough = |counts: &[(u32, u32)]| part(counts) >= watch.part;
    let last = steps.saturating_sub(STEPS);
    let back = (0..=last).find(|step| {
        enough(&counts[*step..*step + STEPS]) && enough(&counts[*step..]) && enough(&counts[last..])
    });
    Recovery { after: back.map(|step| STEP * step as u32), series: counts.chunks(2).map(part).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two replicas at 100 requests/s, one healed at 10 s. It must get half of its fair share within 4 s.
    fn recovered(gets: impl Fn(u64) -> bool) -> Recovery {
        let samples: Vec<Sample> = (0..2000)
            .map(|number| Sample {
                due: Duration::from_millis(number * 10),
                replica: Some(u16::from(!gets(number))),
                ..Sample::default()
            })
            .collect();
        let watch = Watch { replica: 0, within: Duration::from_secs(4), part: 0.5 };
        of(&samples, &watch, 2, Duration::from_secs(10))
    }

    #[test]
    fn a_replica_is_back_from_the_instant_at_which_its_share_is() {
        let recovery = recovered(|number| number >= 1250 && number % 2 == 0);
        // Its traffic returns at 12.5 s, so the two seconds from 11.5 s on are the first in which it gets half of its
        // fair share.
        assert_eq!(recovery.after, Some(Duration::from_millis(1500)));
        assert_eq!(recovery.series, [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_replica_whose_traffic_comes_and_goes_is_not_back() {
        assert_eq!(recovered(|number| (1000..1200).contains(&number)).after, None);
        assert_eq!(recovered(|_| false).after, None);
    }

    #[test]
    fn a_replica_that_never_lost_its_traffic_is_back_at_once() {
        assert_eq!(recovered(|number| number % 2 == 0).after, Some(Duration::ZERO));
    }
}
