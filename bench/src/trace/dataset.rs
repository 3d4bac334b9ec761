//! The trace: arrivals and sizes as recorded (`bench/data/README.md`), and sessions, which are not in it.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::backends::{EngineSpec, Tokens};
use crate::load::{Due, Keys, drawer};

const CSV: &str = include_str!("../../data/azure-llm-2023-code.csv");
/// Every request gets one of these sessions at random, independent of its size. This is an assumption: the trace does
/// not say which requests belong together. The requests of a real session come in runs and are of similar length, so
/// their prefixes hit more often.
pub(crate) const SESSIONS: Keys = Keys { count: 256, exponent: 0.8 };
const SESSIONS_SEED: u64 = 1;

/// Requests in order of arrival, from the start of the trace.
pub(crate) struct Trace {
    requests: Vec<Due>,
    span: Duration,
}

impl Trace {
    /// Reads the trace that is part of this program.
    pub(crate) fn read() -> Result<Self> {
        Self::parse(CSV)
    }

    fn parse(csv: &str) -> Result<Self> {
        let mut session = drawer(SESSIONS, SmallRng::seed_from_u64(SESSIONS_SEED));
        let mut requests: Vec<Due> = Vec::new();
        for (number, line) in csv.lines().enumerate().skip(1) {
            let mut request = row(line).with_context(|| format!("line {}: {line:?}", number + 1))?;
            request.key = Some(session());
            ensure!(
                requests.last().is_none_or(|last| last.at <= request.at),
                "line {}: not in order",
                number + 1
            );
            requests.push(request);
        }
        let span = requests.last().context("the trace is empty")?.at + Duration::from_millis(1);
        Ok(Self { requests, span })
    }

    /// Returns the requests that arrive within `window`. Their due times count from its start and are divided by
    /// `times`. The trace repeats.
    pub(crate) fn part(&self, window: &Range<Duration>, times: f64) -> Vec<Due> {
        let first = window.start.as_millis() / self.span.as_millis();
        let rounds = (first as u32..).map(|round| self.span * round).take_while(|start| *start < window.end);
        rounds
            .flat_map(|start| self.requests.iter().map(move |request| (start + request.at, request)))
            .filter(|(at, _)| window.contains(at))
            .map(|(at, request)| Due { at: (at - window.start).div_f64(times), ..*request })
            .collect()
    }
}

fn row(line: &str) -> Result<Due> {
    let fields: Vec<u32> =
        line.split(',').map(str::parse).collect::<Result<_, _>>().context("a field is not a number")?;
    let [ms, context, generated] = fields[..] else { bail!("{} fields instead of 3", fields.len()) };
    let tokens = Tokens { context, generated };
    Ok(Due { target: 0, at: Duration::from_millis(ms.into()), key: None, tokens: Some(tokens) })
}

/// The engine time that requests take up in full batches without prefix hits, as a share of what `replicas` have: over
/// all of `length`, and in its busiest part of length `busiest`.
pub(crate) fn load(
    requests: &[Due],
    engine: EngineSpec,
    replicas: usize,
    length: Duration,
    busiest: Duration,
) -> (f64, f64) {
    let parts = length.as_secs_f64() / busiest.as_secs_f64();
    let mut work = vec![0.0; parts.ceil() as usize];
    for request in requests {
        let part = (request.at.as_secs_f64() / busiest.as_secs_f64()) as usize;
        if let (Some(work), Some(tokens)) = (work.get_mut(part), request.tokens) {
            *work += engine.share(tokens).as_secs_f64();
        }
    }
    let of = |work: f64, time: Duration| work / (replicas as f64 * time.as_secs_f64());
    (of(work.iter().sum(), length), of(work.iter().copied().fold(0.0, f64::max), busiest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_trace_is_complete_and_its_sessions_are_fixed() {
        let trace = Trace::read().unwrap();
        assert_eq!(trace.requests.len(), 8819);
        let context: u64 =
            trace.requests.iter().filter_map(|due| due.tokens).map(|t| u64::from(t.context)).sum();
        assert_eq!(context / 8819, 2047);
        assert_eq!(trace.span, Duration::from_millis(3_435_949));
        let keys = |trace: &Trace| trace.requests.iter().map(|due| due.key).collect::<Vec<_>>();
        assert_eq!(keys(&trace), keys(&Trace::read().unwrap()));
    }

    #[test]
    fn a_part_is_faster_than_the_trace_and_begins_again_after_its_end() {
        let trace = Trace::parse("head\n0,1,1\n4000,2,1\n7999,3,1\n").unwrap();
        let part = |from: u32, to: u32, times| {
            let part = trace.part(&(SECOND * from..SECOND * to), times);
            let seen = |due: &Due| (due.at.as_millis(), due.tokens.map(|tokens| tokens.context));
            part.iter().map(seen).collect::<Vec<_>>()
        };
        assert_eq!(part(0, 8, 1.0), [(0, Some(1)), (4000, Some(2)), (7999, Some(3))]);
        assert_eq!(part(3, 13, 4.0), [(250, Some(2)), (1249, Some(3)), (1250, Some(1)), (2250, Some(2))]);
        assert_eq!(part(20, 24, 1.0), [(0, Some(2)), (3999, Some(3))]);
    }

    #[test]
    fn errors_name_the_line() {
        for (csv, reason) in [
            ("head\n", "empty"),
            ("head\n1,2,3\n1,2\n", "line 3: \"1,2\": 2 fields instead of 3"),
            ("head\n1,2,x\n", "line 2: \"1,2,x\": a field is not a number"),
            ("head\n5,2,3\n4,2,3\n", "line 3: not in order"),
        ] {
            let error = format!("{:#}", Trace::parse(csv).map(|_| ()).unwrap_err());
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn load_is_work_over_capacity() {
        let engine = EngineSpec { prefill_us: 1000.0, sequence_us: 0.0, ..EngineSpec::LLAMA2_70B };
        let due = |at: u32, context| Due {
            target: 0,
            at: SECOND * at,
            key: None,
            tokens: Some(Tokens { context, generated: 0 }),
        };
        // 3 s of work for two replicas. There are five parts of 2 s, and most of the work is in part 2.
        let (mean, busiest) =
            load(&[due(1, 500), due(2, 1000), due(3, 1500)], engine, 2, SECOND * 10, SECOND * 2);
        assert!((mean - 0.15).abs() < 1e-9 && (busiest - 0.625).abs() < 1e-9, "{mean} {busiest}");
    }
}
