//! `cargo xtask compose --check`: runs each fault in turn against its goals, and checks that nothing is left behind.
//!
//! The goals apply to the side with Prequal. The figures of the other side, which has no Prequal, are printed beside
//! them: they show that the fault took effect.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::commands::build;
use crate::commands::compose::START;
use crate::commands::compose::browser::{self, Browser};
use crate::commands::compose::engine::{ModuleForm, Project};
use crate::commands::compose::faults;
use crate::commands::compose::images;
use crate::commands::compose::page::Page;
use crate::toolchain::Choice;
use crate::{progress, run};

/// Options of one check.
#[derive(Debug, Default)]
pub(super) struct Options {
    /// Run only these faults; all if empty.
    pub(super) faults: Vec<String>,
    /// File for a picture of the page.
    pub(super) picture: Option<PathBuf>,
    /// The form in which Envoy runs Prequal.
    pub(super) module: ModuleForm,
}

/// One fault and its allowed cost.
struct Case {
    fault: &'static str,
    /// The replica that is hit; 0 if the fault targets no replica.
    replica: u64,
    /// Allowed failures, as seconds of one replica's traffic at an equal share. `in_flight` requests are added.
    seconds_lost: f64,
    in_flight: u64,
    shows: Shows,
}

/// Evidence that the fault took effect.
#[derive(Clone, Copy)]
enum Shows {
    /// The replica's reported latency rises by at least this factor.
    Latency(f64),
    /// The other side, which cannot avoid the replica, loses requests.
    BaselineFails,
    /// The other side's p99.9 reaches this many milliseconds.
    BaselineTail(f64),
    /// The agent does not answer for a while.
    AgentDown,
    /// The container of this service was restarted.
    Restarted(&'static str),
    /// Both sides send nothing to the replica.
    NoTraffic,
    /// Both sides send something to the replica.
    Traffic,
}

/// Each replica gets about 27 requests a second, with about half a request in flight on average.
const CASES: [Case; 11] = [
    Case { fault: "slow", replica: 3, seconds_lost: 0.0, in_flight: 0, shows: Shows::Latency(2.0) },
    Case { fault: "antagonist", replica: 8, seconds_lost: 0.0, in_flight: 0, shows: Shows::Latency(1.2) },
    // Half of the requests sent to the replica fail, and detection takes two seconds.
    Case { fault: "sinkhole", replica: 4, seconds_lost: 1.0, in_flight: 0, shows: Shows::BaselineFails },
    // Lost: requests in flight at the onset, plus those sent before the first request looked overdue.
    Case { fault: "hang", replica: 5, seconds_lost: 0.25, in_flight: 4, shows: Shows::BaselineFails },
    // Docker takes about a second to restart the service. A replica at which everything fails is detected at its first
    // report.
    Case {
        fault: "crash",
        replica: 6,
        seconds_lost: 0.5,
        in_flight: 4,
        shows: Shows::Restarted("service-6"),
    },
    // Refused connections are retried elsewhere; requests in flight when the agent dies are not retried.
    Case { fault: "agent-kill", replica: 2, seconds_lost: 0.0, in_flight: 4, shows: Shows::AgentDown },
    // Linux retransmits after 200 ms at the earliest.
    Case { fault: "loss", replica: 1, seconds_lost: 0.0, in_flight: 0, shows: Shows::BaselineTail(200.0) },
    Case { fault: "delay", replica: 1, seconds_lost: 0.0, in_flight: 0, shows: Shows::BaselineTail(100.0) },
    Case { fault: "endpoint-remove", replica: 2, seconds_lost: 0.0, in_flight: 0, shows: Shows::NoTraffic },
    Case { fault: "endpoint-add", replica: 9, seconds_lost: 0.0, in_flight: 0, shows: Shows::Traffic },
    // Requests to all eight replicas fail while Envoy is away.
    Case {
        fault: "envoy-restart",
        replica: 0,
        seconds_lost: 8.0 * AWAY as f64,
        in_flight: 0,
        shows: Shows::Restarted("envoy-prequal"),
    },
];

/// Longest time that a restarted Envoy may be away, seconds.
const AWAY: u64 = 4;

/// Duration of every fault that has one, seconds.
const LASTS: u64 = 15;

/// The tail must have recovered this many seconds after the onset.
const RECOVERED: u64 = 10;

/// Goal for p99, as a multiple of the calm p99.
const TAIL: f64 = 1.5;

/// Milliseconds. If the load generator's own p99 lateness in a window exceeds this, the window measures the machine,
/// not the fleet.
const BUSY_MS: f64 = 5.0;

/// Milliseconds. If the machine delays the load generator for this long, it also delays the services beyond Envoy's
/// timeout.
const STALL_MS: f64 = 500.0;

/// Number of attempts to find fifteen calm seconds.
const CALM_TRIES: u32 = 5;

/// Maximum number of attempts for one fault.
const TRIES: u32 = 3;

/// Minimum number of requests for a window's p99 to count.
const SAMPLES: u64 = 1000;

/// Maximum time until a healed replica has at least half of an equal share again, seconds. At the demo's request rate,
/// the trials of an ejected replica are 9 s apart.
const BACK: u64 = 20;

/// Replicas in rotation.
const REPLICAS: f64 = 8.0;

/// Returns an error if a goal was missed, else the goals that could not be judged.
pub(super) fn run(toolchain: Choice, options: &Options) -> Result<Vec<String>> {
    for name in &options.faults {
        ensure!(CASES.iter().any(|case| case.fault == name), "`--fault`: there is no `{name}`");
    }
    let project = Project::apart()?.with(options.module);
    build::dist(toolchain)?;
    images::prepare(&project)?;
    let started = Instant::now();
    let done = start_and_check(&project, options);
    if done.is_err() {
        eprintln!("{}", project.logs());
    }
    let down = project.down();
    let (wrong, unjudged) = done?;
    down.context("removing the demo")?;
    progress::say(format_args!(
        "started, ran the faults and removed everything in {}",
        progress::seconds(started.elapsed())
    ));
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(unjudged)
}

/// Returns the missed goals and those that could not be judged; any other failure is an error.
fn start_and_check(project: &Project, options: &Options) -> Result<(Vec<String>, Vec<String>)> {
    project.up()?;
    confined(project)?;
    let page = Page::of(project)?;
    page.wait_until_ready(START)?;
    let browser = match browser::installed() {
        Some(program) => Some(Browser::open(program, &format!("http://{}/", page.address))?),
        None => {
            progress::say("chromium is not installed: the page was not checked (apt-get install chromium)");
            None
        }
    };
    let mut check =
        FaultCheck { project, page, browser, calm: Calm::default(), wrong: Vec::new(), unjudged: Vec::new() };
    check.calm = check.calm()?;
    println!(
        "calm: p99 {:.1} ms with Prequal, {:.1} ms without; goal {:.1} ms",
        check.calm.prequal_p99,
        check.calm.baseline_p99,
        TAIL * check.calm.prequal_p99
    );
    println!(
        "{:<16} {:>7} {:>7} {:>9} {:>8} {:>8} {:>7} {:>7} {:>6} {:>6}",
        "fault", "p99", "p99 w/o", "recovered", "failed", "fail w/o", "share", "back", "judged", ""
    );
    for case in &CASES {
        if options.faults.is_empty() || options.faults.iter().any(|name| name == case.fault) {
            check.case_with_retry(case, options)?;
        }
    }
    Ok((check.wrong, check.unjudged))
}

/// Checks that no container runs as root, writes outside its volume, has a capability, or sees the engine's socket.
fn confined(project: &Project) -> Result<()> {
    let ids = run::output(project.compose().args(["ps", "--quiet"]))?;
    let inspected = run::output(run::tool("docker").arg("inspect").args(ids.split_whitespace()))?;
    let inspected: Value = serde_json::from_str(&inspected)?;
    let containers = inspected.as_array().context("`docker inspect` lists nothing")?;
    for container in containers {
        let name = container["Name"].as_str().unwrap_or_default();
        let (config, host) = (&container["Config"], &container["HostConfig"]);
        ensure!(config["User"] == "65532:65532", "{name} runs as `{}`", config["User"]);
        ensure!(host["ReadonlyRootfs"] == true, "{name} may write to its file system");
        ensure!(host["CapDrop"][0] == "ALL" && host["CapAdd"].is_null(), "{name} has capabilities");
        ensure!(host["Privileged"] == false, "{name} is privileged");
        let mounts = container["Mounts"].to_string();
        ensure!(!mounts.contains("docker.sock"), "{name} sees the engine's socket");
    }
    progress::say(format_args!(
        "{} containers: none is root, has a capability, or may write",
        containers.len()
    ));
    Ok(())
}

/// The calm values that the faults are compared with.
#[derive(Clone, Copy, Debug, Default)]
struct Calm {
    prequal_p99: f64,
    baseline_p99: f64,
}

/// Figures of one side over a window. `second` is the number of the window's last second.
#[derive(Clone, Copy, Debug)]
struct Window {
    second: u64,
    samples: u64,
    failed_now: u64,
    p99: f64,
    p999: f64,
    share: f64,
    /// Lateness of the load generator itself, p99, ms.
    lag: f64,
}

impl Window {
    /// Whether the p99 is meaningful: there were enough requests, and the load generator was on time.
    fn judged(&self) -> bool {
        self.samples >= SAMPLES && self.lag <= BUSY_MS
    }
}

struct FaultCheck<'a> {
    project: &'a Project,
    page: Page,
    browser: Option<Browser>,
    calm: Calm,
    /// Goals that were missed.
    wrong: Vec<String>,
    /// Goals that could not be judged because this machine was busy with something else.
    unjudged: Vec<String>,
}

impl FaultCheck<'_> {
    /// Medians over fifteen seconds, once pool and connections have settled. Tries several times to find fifteen
    /// seconds in which nothing else keeps the machine busy.
    fn calm(&self) -> Result<Calm> {
        let mut begin = second(&self.page.state(u64::MAX)?) + 10;
        for _ in 0..CALM_TRIES {
            self.wait_for_window(begin + 15)?;
            let state = self.page.state(begin)?;
            let [prequal, baseline] = ["prequal", "baseline"].map(|side| windows(&state, side, 0));
            let failed = [&prequal, &baseline].map(|side| side.iter().map(|w| w.failed_now).sum::<u64>());
            let median = |windows: &[Window]| {
                let mut values: Vec<f64> = windows.iter().filter(|w| w.judged()).map(|w| w.p99).collect();
                values.sort_by(f64::total_cmp);
                (values.len() >= 8).then(|| values[values.len() / 2])
            };
            if let (Some(prequal_p99), Some(baseline_p99), [0, 0]) =
                (median(&prequal), median(&baseline), failed)
            {
                return Ok(Calm { prequal_p99, baseline_p99 });
            }
            let lag = prequal.iter().map(|window| window.lag).fold(0.0, f64::max);
            progress::say(format_args!(
                "not calm: the load generator was up to {lag:.0} ms late at p99, {} and {} requests failed",
                failed[0], failed[1]
            ));
            begin += 15;
        }
        bail!("no fifteen calm seconds to compare with in {CALM_TRIES} tries")
    }

    /// Repeats the fault after a miss, or if the machine was too busy to judge it: on shared cores a single tail
    /// latency proves little. A fault fails if it misses its goals twice. Every try is printed.
    fn case_with_retry(&mut self, case: &Case, options: &Options) -> Result<()> {
        let kept = (self.wrong.len(), self.unjudged.len());
        let mut misses = 0;
        for _ in 0..TRIES {
            self.wrong.truncate(kept.0);
            self.unjudged.truncate(kept.1);
            self.case(case, options)?;
            misses += u32::from(self.wrong.len() > kept.0);
            if misses == 2 || (self.wrong.len(), self.unjudged.len()) == kept {
                return Ok(());
            }
        }
        if misses == 1 {
            // One miss is not enough to fail, and the other tries were not judged.
            self.wrong.truncate(kept.0);
            self.unjudged.push(format!("{}: one miss, and no other try could be judged", case.fault));
        }
        Ok(())
    }

    fn case(&mut self, case: &Case, options: &Options) -> Result<()> {
        let before = self.page.state(u64::MAX)?;
        let begin = second(&before);
        let (failed_before, restarts) = (failed(&before), self.restarts(case)?);
        let latency_before = replica(&before, case.replica)["latency_ms"].as_f64();
        let clicked = if case.fault == "slow" { self.click(case)? } else { false };
        if !clicked && let Err(error) = self.switch_on(case) {
            if case.fault == "delay" && format!("{error:#}").contains("no netem") {
                println!("{:<16} not on this kernel: {error}", case.fault);
                return Ok(());
            }
            return Err(error.context(format!("switching on `{}`", case.fault)));
        }

        // Watch from the onset to the end of the fault.
        let (mut agent_down, mut latency) = (false, 0.0_f64);
        let end = begin + LASTS;
        let mut looked = !clicked;
        loop {
            let state = self.page.state(u64::MAX)?;
            let about = replica(&state, case.replica);
            agent_down |= about["up"] == false;
            latency = latency.max(about["latency_ms"].as_f64().unwrap_or(0.0));
            if !looked && second(&state) >= begin + 10 {
                looked = true;
                self.look(case, options)?;
            }
            if second(&state) > end {
                break;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        let state = self.page.state(begin)?;
        let prequal = windows(&state, "prequal", case.replica);
        let baseline = windows(&state, "baseline", case.replica);
        let back = self.back(case, end)?;
        // A hanging request fails only when Envoy gives up, so failures are counted after the fault has healed.
        let after = self.page.state(u64::MAX)?;
        let lost: Vec<u64> = failed(&after).iter().zip(failed_before).map(|(now, then)| now - then).collect();

        let goal_ms = TAIL * self.calm.prequal_p99;
        let judged: Vec<&Window> = prequal.iter().filter(|window| window.judged()).collect();
        let above = judged.iter().filter(|window| window.p99 >= goal_ms).map(|window| window.second).max();
        let recovered = above.map_or(0, |second| second + 1 - begin);
        let last = prequal.last().context("no window during the fault")?;
        let other = baseline.last().context("no window during the fault")?;
        let before_this = (self.wrong.len(), self.unjudged.len());

        if !judged.iter().any(|window| window.second >= begin + RECOVERED) {
            let lag = prequal.iter().map(|window| window.lag).fold(0.0, f64::max);
            self.unjudged
                .push(format!("p99 under `{}`: the load generator was up to {lag:.0} ms late", case.fault));
        }
        if recovered > RECOVERED {
            self.fail(
                case,
                format!(
                    "p99 was {goal_ms:.1} ms or more until {recovered} s after the onset (goal {RECOVERED} s)"
                ),
            );
        }
        let rate = after["rate"].as_f64().unwrap_or(0.0);
        let may_fail = (case.seconds_lost * rate / REPLICAS).ceil() as u64 + case.in_flight;
        if let Some(stalled) = prequal.iter().find(|window| window.lag > STALL_MS) {
            let what =
                format!("failures under `{}`: the machine stalled for {:.0} ms", case.fault, stalled.lag);
            self.unjudged.push(what);
        } else if lost[0] > may_fail {
            self.fail(case, format!("{} requests failed; at most {may_fail} may", lost[0]));
        }
        if case.fault == "envoy-restart"
            && let Some(late) = prequal.iter().rfind(|w| w.failed_now > 0 && w.second > begin + AWAY)
        {
            self.fail(case, format!("requests still failed {} s after the restart", late.second - begin));
        }
        if back.is_none() {
            self.fail(case, format!("traffic had not recovered {BACK} s after the fault healed"));
        }
        let tail = baseline.iter().map(|w| w.p999).fold(0.0, f64::max);
        let (shown, what) = match case.shows {
            Shows::Latency(factor) => (
                latency >= factor * latency_before.unwrap_or(f64::INFINITY),
                format!("the replica reported {latency:.0} ms at most, {latency_before:?} before"),
            ),
            Shows::BaselineFails => (lost[1] > 0, "no request failed on the other side".to_owned()),
            Shows::BaselineTail(ms) => (
                tail >= ms,
                format!("the other side's p99.9 was {tail:.0} ms at most, {ms:.0} were expected"),
            ),
            Shows::AgentDown => (agent_down, "its agent always answered".to_owned()),
            Shows::Restarted(_) => (self.restarts(case)? > restarts, "nothing was restarted".to_owned()),
            Shows::NoTraffic => (last.share == 0.0 && other.share == 0.0, "it still had traffic".to_owned()),
            Shows::Traffic => (last.share > 0.0 && other.share > 0.0, "it had no traffic".to_owned()),
        };
        if !shown {
            self.fail(case, format!("the fault had no visible effect: {what}"));
        }
        println!(
            "{:<16} {:>7.1} {:>7.1} {:>7} s {:>8} {:>8} {:>6.1}% {:>7} {:>6} {:>6}",
            case.fault,
            last.p99,
            other.p99,
            recovered,
            format!("{}/{may_fail}", lost[0]),
            lost[1],
            100.0 * last.share,
            back.map_or("never".to_owned(), |seconds| format!("{seconds} s")),
            format!("{}/{}", judged.len(), prequal.len()),
            match (self.wrong.len() - before_this.0, self.unjudged.len() - before_this.1) {
                (0, 0) => "ok",
                (0, _) => "BUSY",
                _ => "MISSED",
            },
        );
        self.settle()
    }

    fn fail(&mut self, case: &Case, why: String) {
        self.wrong.push(format!("{}: {why}", case.fault));
    }

    fn switch_on(&self, case: &Case) -> Result<()> {
        let replica = Some(case.replica).filter(|number| *number > 0);
        faults::switch_on(self.project, &self.page, case.fault, replica, Some(LASTS)).map(drop)
    }

    /// Switches the fault on with its button in the browser; false without a browser.
    fn click(&mut self, case: &Case) -> Result<bool> {
        let Some(browser) = &mut self.browser else { return Ok(false) };
        browser.switch_on(case.fault, case.replica, LASTS)?;
        let started = Instant::now();
        while !browser.shown(case.replica)?.active.contains(case.fault) {
            let refusal = browser.refusal()?;
            ensure!(
                refusal.is_empty() && started.elapsed() < Duration::from_secs(5),
                "the button did not switch `{}` on: {refusal}",
                case.fault
            );
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(true)
    }

    /// Late in a fault that hurts one replica, checks that the page shows it and that the chart moves.
    fn look(&mut self, case: &Case, options: &Options) -> Result<()> {
        let Some(browser) = &mut self.browser else { return Ok(()) };
        let shown = browser.shown(case.replica)?;
        ensure!(
            shown.state.contains(case.fault),
            "the page shows `{}` for replica {}",
            shown.state,
            case.replica
        );
        ensure!(
            shown.share < 0.5 / REPLICAS,
            "the page shows a share of {:.1} % ten seconds after the onset",
            100.0 * shown.share
        );
        std::thread::sleep(Duration::from_millis(1500));
        ensure!(browser.shown(case.replica)?.chart != shown.chart, "the chart did not move in 1.5 s");
        if let Some(file) = &options.picture {
            browser.picture(file)?;
        }
        println!(
            "the page, in {}: share of replica {} {:.1} %, marked `{}`, the chart moves",
            browser::installed().unwrap_or_default(),
            case.replica,
            100.0 * shown.share,
            case.fault
        );
        Ok(())
    }

    /// Seconds from the end of the fault until traffic was as before; `None` if that took longer than [`BACK`].
    fn back(&mut self, case: &Case, end: u64) -> Result<Option<u64>> {
        loop {
            let state = self.page.state(u64::MAX)?;
            let now = second(&state);
            let share = replica(&state, case.replica)["share"]["prequal"].as_f64().unwrap_or(0.0);
            let as_before = match case.fault {
                "endpoint-add" => share == 0.0,
                "envoy-restart" => {
                    let balancer = &state["balancer"];
                    balancer["fallback_per_s"].as_f64() == Some(0.0)
                        && balancer["cold_per_s"].as_f64() > Some(0.0)
                }
                _ => share >= 0.5 / REPLICAS,
            };
            if as_before {
                return Ok(Some(now.saturating_sub(end)));
            }
            if now > end + BACK {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Waits until the tail latency is calm, so that the next fault does not begin in the aftermath of the last one.
    /// Gives up after fifteen seconds.
    fn settle(&self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(15) {
            let state = self.page.state(second(&self.page.state(u64::MAX)?).saturating_sub(3))?;
            let calm = |side, p99: f64| {
                windows(&state, side, 0).last().is_some_and(|window| window.p99 < TAIL * p99)
            };
            if calm("prequal", self.calm.prequal_p99) && calm("baseline", self.calm.baseline_p99) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    fn wait_for_window(&self, wanted: u64) -> Result<()> {
        let started = Instant::now();
        while second(&self.page.state(u64::MAX)?) <= wanted {
            ensure!(started.elapsed() < Duration::from_secs(60), "the load generator's clock has stopped");
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    /// How often the engine has restarted the case's container.
    fn restarts(&self, case: &Case) -> Result<u64> {
        let Shows::Restarted(service) = case.shows else { return Ok(0) };
        let container = self.project.container(service)?;
        let said =
            run::output(run::tool("docker").args(["inspect", "--format", "{{.RestartCount}}", &container]))?;
        said.trim().parse().with_context(|| format!("restarts of {service}: {said}"))
    }
}

fn second(state: &Value) -> u64 {
    state["second"].as_u64().unwrap_or(0)
}

fn failed(state: &Value) -> [u64; 2] {
    ["prequal", "baseline"].map(|side| state["sides"][side]["failed"].as_u64().unwrap_or(0))
}

fn replica(state: &Value, number: u64) -> &Value {
    &state["replicas"][(number as usize).wrapping_sub(1)]
}

/// A side's windows in `state`, with the share of one replica.
fn windows(state: &Value, side: &str, replica: u64) -> Vec<Window> {
    let windows = state["sides"][side]["windows"].as_array().into_iter().flatten();
    windows
        .map(|window| {
            let count = |key: &str| window[key].as_u64().unwrap_or(0);
            let ms = |key: &str| window[key].as_f64().unwrap_or(f64::INFINITY);
            let answered = || window["answered"].as_array().into_iter().flatten();
            let sum = |wanted: Option<u64>| -> f64 {
                answered()
                    .filter(|pair| wanted.is_none_or(|number| pair[0].as_u64() == Some(number)))
                    .filter_map(|pair| pair[1].as_f64())
                    .fold(0.0, |sum, count| sum + count)
            };
            Window {
                second: count("second"),
                samples: count("samples"),
                failed_now: count("failed_now"),
                p99: ms("p99_ms"),
                p999: ms("p999_ms"),
                lag: ms("lag_p99_ms"),
                share: sum(Some(replica)) / sum(None).max(1.0),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn windows_are_read_with_the_share_of_one_replica() {
        let window = json!({"second": 9, "samples": 1100, "failed_now": 2, "p99_ms": 60.5, "p999_ms": 90.0,
                            "lag_p99_ms": 0.5, "answered": [[1, 300], [2, 100]]});
        let state = json!({"sides": {"prequal": {"windows": [window]}}});
        let read = windows(&state, "prequal", 2);
        assert_eq!(read.len(), 1);
        assert_eq!((read[0].second, read[0].samples, read[0].failed_now), (9, 1100, 2));
        assert_eq!((read[0].p99, read[0].share), (60.5, 0.25));
        assert!(windows(&state, "baseline", 2).is_empty());
    }

    #[test]
    fn every_fault_has_a_case_once() {
        for case in &CASES {
            assert_eq!(CASES.iter().filter(|other| other.fault == case.fault).count(), 1, "{}", case.fault);
        }
    }
}
