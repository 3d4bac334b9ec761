//! The commands that run until interrupted: `repath --dev`, `run`, `watch`.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plb_netlink::counters::Counters;
use plb_netlink::daemon::{Daemon, Event, Outcome, Watched, Way};
use plb_netlink::detector::{Cause, Config};
use plb_netlink::diag::{self, Entry};
use plb_netlink::flowlabel::{self, Current, Label};
use plb_netlink::guardian::{self, Guardian};
use plb_netlink::link::{self, Device};
use plb_netlink::relabel::Relabeller;
use plb_netlink::rights;
use plb_netlink::sysctl::PlbParams;
use plb_netlink::{Error, Result, ignore_interrupts, interrupted, random_u32, sock, watch_interrupts};
use serde_json::json;

use super::Answer;
use super::args::{RepathArgs, RunArgs, WatchArgs, WayArg};
use super::knobs;
use super::output::{Output, line, or_dash, table};
use super::sockets;

pub(crate) fn repath(output: Output, args: &RepathArgs) -> Result<Answer> {
    let socket = args.socket.socket;
    let name = sockets::name(socket);
    if args.dev.is_empty() {
        let fd = sockets::open(socket)?;
        let label = flowlabel::current(&fd)?;
        let what = match label {
            Current::Explicit(label, Some(_)) => {
                format!("{name}: drop explicit label {label} for an automatic one")
            }
            Current::Explicit(label, None) => {
                return Err(Error::Unsupported {
                    what: format!(
                        "the label {label} of {name} was set without a lease: only its owner can drop it"
                    ),
                    cure: "override it with --dev DEVICE".to_owned(),
                });
            }
            Current::Automatic => {
                format!("{name}: automatic label off (label 0); run the command again to switch it on")
            }
            Current::Zero => format!("{name}: automatic label on"),
        };
        if !output.dry_run {
            match label {
                Current::Explicit(..) => sockets::unpin_socket(&fd, label)?,
                Current::Automatic => sock::set_auto_label(&fd, false)?,
                Current::Zero => sock::set_auto_label(&fd, true)?,
            }
        }
        output.changed(&what, json!({"socket": name}));
        return Ok(Answer::Good);
    }
    let cookie = sockets::cookie(socket)?;
    let devices: Vec<Device> = args.dev.iter().map(|dev| link::named(dev)).collect::<Result<_>>()?;
    let label = match args.label {
        Some(label) => label,
        None => Label::random(random()?, None),
    };
    let what =
        format!("{name}: label {label} on the egress of {}; held until interrupted", args.dev.join(", "));
    if output.dry_run {
        output.changed(&what, json!({"cookie": cookie, "label": label.get()}));
        return Ok(Answer::Good);
    }
    let relabeller = Relabeller::attach(&devices)?;
    relabeller.set(cookie, label)?;
    output.changed(&what, json!({"cookie": cookie, "label": label.get()}));
    watch()?;
    while !interrupted() && sockets::find(cookie).is_ok() {
        thread::sleep(Duration::from_millis(200));
    }
    let packets = relabeller.get(cookie)?.map_or(0, |(_, packets)| packets);
    let ended = json!({"ended": true, "cookie": cookie, "packets": packets});
    emit(output, &ended, || format!("{packets} packets went out with label {label}; detached"));
    Ok(Answer::Good)
}

pub(crate) fn run(output: Output, args: &RunArgs) -> Result<Answer> {
    let config = config(args)?;
    let devices = devices(args)?;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let parameters = format!(
        "K = {:.3}, M = {}, N = {}, pause {} s",
        config.k().share(),
        config.m(),
        config.n(),
        config.rto_pause().as_secs()
    );
    if output.dry_run {
        let what = format!("watch connections ({parameters}), relabel on the egress of {}", names.join(", "));
        output.changed(&what, json!({"devices": names, "parameters": parameters}));
        return Ok(Answer::Good);
    }
    let (way, how) = match args.way {
        WayArg::Sockopt => (by_options()?, "by socket options: two labels only".to_owned()),
        WayArg::Bpf | WayArg::Auto => match Relabeller::attach(&devices) {
            Ok(relabeller) => (Way::Bpf(relabeller), format!("on the egress of {}", names.join(", "))),
            Err(error @ (Error::NotPermitted { .. } | Error::Unsupported { .. }))
                if args.way == WayArg::Auto =>
            {
                (by_options()?, format!("by socket options, two labels only ({error})"))
            }
            Err(error) => return Err(error),
        },
    };
    // From here on, the first signal only ends the loop. The daemon undoes its changes when it is dropped, if not
    // earlier.
    watch()?;
    let warnings = rights::obstacles();
    emit(
        output,
        &json!({"watching": true, "parameters": parameters, "way": how, "warnings": warnings}),
        || {
            let warnings: String = warnings.iter().map(|warning| format!("\nwarning: {warning}")).collect();
            format!("watching: {parameters}; moving {how}{warnings}")
        },
    );
    let mut daemon = Daemon::new(config, args.select.filter(), way);
    let started = Instant::now();
    let mut moves = 0_u64;
    let mut failing = None;
    while !interrupted() && args.duration.is_none_or(|limit| started.elapsed() < Duration::from_secs(limit)) {
        let began = Instant::now();
        match daemon.step(started.elapsed()) {
            Ok(events) => {
                failing = None;
                for event in events {
                    moves += u64::from(matches!(event.outcome, Outcome::Relabelled(_) | Outcome::Toggled(_)));
                    report(output, started.elapsed(), &event);
                }
            }
            Err(error) => survive(output, error, &mut failing)?,
        }
        // With very many connections a step takes long; this pause limits the daemon to half a core.
        pause(Duration::from_millis(args.interval_ms).max(began.elapsed()));
    }
    // If the number of relabelled packets cannot be read, the run still ends cleanly.
    let watched = daemon.watched().unwrap_or_default();
    let left = daemon.detach();
    let walks = daemon.walks();
    drop(daemon);
    summary(output, moves, walks, left, &watched);
    Ok(Answer::Good)
}

/// Moves connections by socket options. Starts a companion process: if this process ends without restoring the labels,
/// the companion restores them.
fn by_options() -> Result<Way> {
    // Not the program's path, which may name another program by now.
    let mut command = Command::new("/proc/self/exe");
    Guardian::start(command.arg("restore")).map(|guardian| Way::SocketOptions(Some(guardian)))
}

/// Runs the companion process.
pub(crate) fn restore() -> Result<Answer> {
    ignore_interrupts().map_err(|reason| Error::Kernel { doing: "ignoring signals".to_owned(), reason })?;
    let left = guardian::attend(std::io::stdin().lock());
    Ok(if left == 0 { Answer::Good } else { Answer::Bad })
}

/// Tolerates a failed listing for half a minute: it is repeated at the next step.
fn survive(output: Output, error: Error, failing: &mut Option<Instant>) -> Result<()> {
    if matches!(error, Error::NotPermitted { .. } | Error::Unsupported { .. } | Error::Invalid(_)) {
        return Err(error);
    }
    match failing {
        Some(since) if since.elapsed() > PATIENCE => return Err(error),
        Some(_) => {}
        None => {
            *failing = Some(Instant::now());
            emit(output, &json!({"failing": error.to_string()}), || {
                format!("cannot list the sockets, trying again: {error}")
            });
        }
    }
    Ok(())
}

/// Builds the configuration. Parameters that are not given come from the kernel's knobs, so that `plb run` and the
/// kernel behave alike.
fn config(args: &RunArgs) -> Result<Config> {
    let kernel = PlbParams::read().unwrap_or_default();
    PlbParams {
        enabled: true,
        k: args.k.as_deref().map(knobs::threshold).transpose()?.unwrap_or(kernel.k),
        m: knobs::rounds("--m", args.m)?.unwrap_or(kernel.m),
        n: knobs::rounds("--n", args.n)?.unwrap_or(kernel.n),
        suspend_s: args.suspend.unwrap_or(kernel.suspend_s),
    }
    .detector()
}

fn devices(args: &RunArgs) -> Result<Vec<Device>> {
    if !args.dev.is_empty() {
        return args.dev.iter().map(|dev| link::named(dev)).collect();
    }
    let devices: Vec<Device> =
        link::list()?.into_iter().filter(|device| device.up && !device.loopback).collect();
    if devices.is_empty() {
        return Err(Error::Gone("no device but lo is up in this network namespace".to_owned()));
    }
    Ok(devices)
}

fn report(output: Output, at: Duration, event: &Event) {
    let cause = match event.cause {
        Cause::Idle => "congested, idle",
        Cause::Forced => "congested, busy",
        Cause::Timeout => "timeout",
    };
    let (done, label) = match &event.outcome {
        Outcome::Relabelled(label) => (format!("new label {label}"), Some(label.get())),
        Outcome::Toggled(on) => (format!("automatic label {}", if *on { "on" } else { "off" }), None),
        Outcome::LeftToKernel => ("left to the kernel".to_owned(), None),
        Outcome::Pinned(pin) => (format!("left alone: {pin}"), None),
        Outcome::Unreadable(why) => (format!("left alone: cannot read whether it is pinned: {why}"), None),
        Outcome::Failed(why) => (format!("not moved: {why}"), None),
    };
    let value = json!({
        "at_s": at.as_secs_f64(), "local": event.local.to_string(), "remote": event.remote.to_string(),
        "cookie": event.cookie, "congestion_control": event.congestion, "cause": cause, "done": done, "label": label,
    });
    emit(output, &value, || {
        format!(
            "{:9.3} s  {} -> {} ({})  {cause}: {done}",
            at.as_secs_f64(),
            event.local,
            event.remote,
            event.congestion
        )
    });
}

fn summary(output: Output, moves: u64, walks: u64, left: usize, watched: &[Watched]) {
    let packets: u64 = watched.iter().filter_map(|w| Some(w.label?.1)).sum();
    let value = json!({
        "ended": true, "moves": moves, "connections": watched.len(), "relabelled_packets": packets,
        "process_walks": walks, "left_behind": left,
    });
    emit(output, &value, || {
        let rows: Vec<[String; 5]> = watched
            .iter()
            .filter(|w| w.moves > 0)
            .map(|w| {
                [
                    w.entry.local.to_string(),
                    w.entry.remote.to_string(),
                    w.moves.to_string(),
                    or_dash(w.label.map(|(label, _)| label)),
                    or_dash(w.label.map(|(_, packets)| packets)),
                ]
            })
            .collect();
        let moved = if rows.is_empty() {
            String::new()
        } else {
            format!("\n{}", table(["LOCAL", "PEER", "MOVES", "LABEL", "PACKETS WITH IT"], &rows))
        };
        let left = if left == 0 { String::new() } else { format!("; {left} could not be switched back") };
        format!("{moves} moves among {} connections; detached{left}{moved}", watched.len())
    });
}

pub(crate) fn watch_table(output: Output, args: &WatchArgs) -> Result<Answer> {
    watch()?;
    let filter = args.select.filter();
    let clear = std::io::stdout().is_terminal() && !output.json;
    let mut before = (Counters::read()?, by_cookie(diag::dump(&filter)?));
    let mut shown = 0;
    while !interrupted() && args.count.is_none_or(|count| shown < count) {
        pause(Duration::from_millis(args.interval_ms));
        let now = (Counters::read()?, by_cookie(diag::dump(&filter)?));
        let deltas: Vec<(&str, Option<u64>)> = now
            .0
            .values()
            .into_iter()
            .zip(before.0.values())
            .map(|((name, now), (_, before))| {
                (name, now.zip(before).map(|(now, before)| now.wrapping_sub(before)))
            })
            .collect();
        let mut rows: Vec<Row> =
            now.1.values().map(|entry| Row::new(entry, before.1.get(&entry.cookie))).collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.rehashes, row.marked, row.delivered)));
        let value = json!({
            "counters": deltas.iter().map(|(name, delta)| ((*name).to_owned(), json!(delta))).collect::<serde_json::Map<_, _>>(),
            "connections": rows.iter().map(|row| json!({
                "local": row.local, "remote": row.remote, "delivered": row.delivered, "marked": row.marked,
                "rehashes": row.rehashes,
            })).collect::<Vec<_>>(),
        });
        emit(output, &value, || {
            let counters: Vec<String> =
                deltas.iter().map(|(name, delta)| format!("{name} +{}", or_dash(*delta))).collect();
            let busiest: Vec<[String; 6]> = rows.iter().take(20).map(Row::cells).collect();
            let header = ["LOCAL", "PEER", "CC", "DELIVERED", "MARKED", "REHASH"];
            let home = if clear { "\x1b[2J\x1b[H" } else { "" };
            format!(
                "{home}{}\n{}\n{} connections; REHASH counts requests for another label; `plb check` shows whether labels \
                 can change",
                counters.join("  "),
                table(header, &busiest),
                rows.len()
            )
        });
        before = now;
        shown += 1;
    }
    Ok(Answer::Good)
}

/// Changes of one connection between two readings.
struct Row {
    local: String,
    remote: String,
    congestion: String,
    delivered: u32,
    marked: u32,
    rehashes: u32,
}

impl Row {
    fn new(entry: &Entry, before: Option<&Entry>) -> Self {
        let now = entry.info.unwrap_or_default();
        let old = before.and_then(|entry| entry.info).unwrap_or_default();
        let delta = |now: Option<u32>, old: Option<u32>| now.unwrap_or(0).wrapping_sub(old.unwrap_or(0));
        Self {
            local: entry.local.to_string(),
            remote: entry.remote.to_string(),
            congestion: entry.congestion.clone().unwrap_or_default(),
            delivered: delta(now.delivered, old.delivered),
            marked: delta(now.delivered_ce, old.delivered_ce),
            rehashes: delta(now.rehash, old.rehash),
        }
    }

    fn cells(&self) -> [String; 6] {
        [
            self.local.clone(),
            self.remote.clone(),
            self.congestion.clone(),
            self.delivered.to_string(),
            self.marked.to_string(),
            self.rehashes.to_string(),
        ]
    }
}

fn by_cookie(entries: Vec<Entry>) -> HashMap<u64, Entry> {
    entries.into_iter().map(|entry| (entry.cookie, entry)).collect()
}

/// Prints one line of JSON or of text.
fn emit(output: Output, value: &serde_json::Value, human: impl FnOnce() -> String) {
    if output.json { line(&value.to_string()) } else { line(&human()) }
}

/// Sleeps, but wakes up on a signal.
fn pause(duration: Duration) {
    let end = Instant::now() + duration;
    while !interrupted() && Instant::now() < end {
        thread::sleep(Duration::from_millis(20).min(duration));
    }
}

fn watch() -> Result<()> {
    watch_interrupts().map_err(|reason| Error::Kernel { doing: "watching for signals".to_owned(), reason })
}

fn random() -> Result<u32> {
    random_u32().map_err(|reason| Error::Kernel { doing: "reading random bits".to_owned(), reason })
}

/// Maximum time for which listings may keep failing.
const PATIENCE: Duration = Duration::from_secs(30);
