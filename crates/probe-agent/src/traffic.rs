//! Counters of what happens on an agent's ports below and beside its requests. Those of requests are in [`crate::load`].

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// What can happen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// A request was answered 503 because of `max_rif`.
    Shed,
    /// A connection was closed: nothing was ever sent on it.
    Silent,
    /// A head took too long.
    SlowHead,
    /// It had nothing in flight for long.
    Idle,
    /// A request was cut because nothing moved.
    BodyIdle,
    /// A stream or tunnel was cut because of its age.
    StreamAge,
}

/// A metric of events: its name, its help, its label, and the events with their values of it.
struct Family(&'static str, &'static str, &'static str, &'static [(Event, &'static str)]);

const FAMILIES: [Family; 3] = [
    Family(
        "prequal_agent_shed_total",
        "Requests answered 503 because --max-rif others were in flight.",
        "",
        &[(Event::Shed, "")],
    ),
    Family(
        "prequal_agent_closed_total",
        "Connections of clients that the agent closed, by reason.",
        "reason",
        &[(Event::Silent, "silent"), (Event::SlowHead, "slow_head"), (Event::Idle, "idle")],
    ),
    Family(
        "prequal_agent_cut_total",
        "Requests cut, by limit.",
        "reason",
        &[(Event::BodyIdle, "body_idle"), (Event::StreamAge, "stream_age")],
    ),
];

const EVENTS: usize = Event::StreamAge as usize + 1;

/// The counters of one replica.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    events: [AtomicU64; EVENTS],
}

impl Traffic {
    pub(crate) fn count(&self, event: Event) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn write(&self, out: &mut String) -> std::fmt::Result {
        for Family(name, help, label, values) in FAMILIES {
            writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter")?;
            for (event, value) in values {
                let count = self.events[*event as usize].load(Ordering::Relaxed);
                match label {
                    "" => writeln!(out, "{name} {count}")?,
                    label => writeln!(out, "{name}{{{label}=\"{value}\"}} {count}")?,
                }
            }
        }
        Ok(())
    }
}
