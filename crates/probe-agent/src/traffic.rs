//! Counters of events on an agent's ports. [`crate::load`] counts the requests themselves.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Event that is counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    /// A connection could not be accepted: no file descriptor was left.
    AcceptDescriptors,
    /// A connection could not be accepted: no memory was left.
    AcceptMemory,
    /// A connection could not be accepted for another reason.
    AcceptOther,
    /// There was no room for one more connection.
    Full,
    TlsHandshake,
    /// A request got a 503 because of `max_rif`.
    Shed,
    /// A connection was closed because nothing was ever sent on it.
    Silent,
    /// A connection was closed because a head took too long.
    SlowHead,
    /// A connection was closed because it had nothing in flight for a long time.
    Idle,
    /// A connection was closed because the client violated the protocol.
    Protocol,
    /// A request was cut because nothing moved.
    BodyIdle,
    /// A stream or tunnel was cut because of its age.
    StreamAge,
    /// A line of the access log was lost.
    AccessLost,
}

/// Metric of events: its name, its help, its label, and the events with their label values.
struct Family(&'static str, &'static str, &'static str, &'static [(Event, &'static str)]);

const FAMILIES: [Family; 7] = [
    Family(
        "prequal_agent_accept_errors_total",
        "Failures to accept a connection, by reason.",
        "reason",
        &[
            (Event::AcceptDescriptors, "descriptors"),
            (Event::AcceptMemory, "memory"),
            (Event::AcceptOther, "other"),
        ],
    ),
    Family(
        "prequal_agent_max_connections_total",
        "Times that the limit of --max-connections was reached, so that further connections wait.",
        "",
        &[(Event::Full, "")],
    ),
    Family(
        "prequal_agent_tls_handshake_errors_total",
        "Failed TLS handshakes of clients.",
        "",
        &[(Event::TlsHandshake, "")],
    ),
    Family(
        "prequal_agent_shed_total",
        "Requests answered with 503 because the --max-rif limit was reached.",
        "",
        &[(Event::Shed, "")],
    ),
    Family(
        "prequal_agent_closed_total",
        "Connections of clients that the agent closed, by reason.",
        "reason",
        &[
            (Event::Silent, "silent"),
            (Event::SlowHead, "slow_head"),
            (Event::Idle, "idle"),
            (Event::Protocol, "protocol"),
        ],
    ),
    Family(
        "prequal_agent_cut_total",
        "Requests cut, by limit.",
        "reason",
        &[(Event::BodyIdle, "body_idle"), (Event::StreamAge, "stream_age")],
    ),
    Family(
        "prequal_agent_access_log_lost_total",
        "Lines of the access log that were lost because standard output failed or was too slow.",
        "",
        &[(Event::AccessLost, "")],
    ),
];

const EVENTS: usize = Event::AccessLost as usize + 1;

/// Port that the agent listens on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Port {
    Service,
    Probe,
    Admin,
}

const PORTS: [(Port, &str); 3] = [(Port::Service, "service"), (Port::Probe, "probe"), (Port::Admin, "admin")];

/// Counters of one replica.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    events: [AtomicU64; EVENTS],
    accepted: [AtomicU64; PORTS.len()],
    closed: [AtomicU64; PORTS.len()],
    tunnels: AtomicU64,
}

impl Traffic {
    pub(crate) fn count(&self, event: Event) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection as open until the result is dropped.
    pub(crate) fn connect(this: &Arc<Self>, port: Port) -> OpenConnection {
        this.accepted[port as usize].fetch_add(1, Ordering::Relaxed);
        OpenConnection(this.clone(), port)
    }

    /// Counts a tunnel as open until the result is dropped.
    pub(crate) fn tunnel(&self) -> Tunnel<'_> {
        self.tunnels.fetch_add(1, Ordering::Relaxed);
        Tunnel(self)
    }

    pub(crate) fn write(&self, out: &mut String) -> std::fmt::Result {
        let name = "prequal_agent_connections";
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        writeln!(out, "# HELP {name} Open connections of clients, by port.\n# TYPE {name} gauge")?;
        for (port, label) in PORTS {
            // Closed connections are read first, so that none counts as closed but not as accepted.
            let closed = load(&self.closed[port as usize]);
            let open = load(&self.accepted[port as usize]).saturating_sub(closed);
            writeln!(out, "{name}{{port=\"{label}\"}} {open}")?;
        }
        let name = "prequal_agent_connections_total";
        writeln!(out, "# HELP {name} Accepted connections of clients, by port.\n# TYPE {name} counter")?;
        for (port, label) in PORTS {
            writeln!(out, "{name}{{port=\"{label}\"}} {}", load(&self.accepted[port as usize]))?;
        }
        let name = "prequal_agent_tunnels";
        writeln!(out, "# HELP {name} Open tunnels, including WebSockets.\n# TYPE {name} gauge")?;
        writeln!(out, "{name} {}", load(&self.tunnels))?;
        for Family(name, help, label, values) in FAMILIES {
            writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter")?;
            for (event, value) in values {
                let count = load(&self.events[*event as usize]);
                match label {
                    "" => writeln!(out, "{name} {count}")?,
                    label => writeln!(out, "{name}{{{label}=\"{value}\"}} {count}")?,
                }
            }
        }
        Ok(())
    }
}

/// An open connection of a client.
pub(crate) struct OpenConnection(Arc<Traffic>, Port);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.closed[self.1 as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// An open tunnel.
pub(crate) struct Tunnel<'a>(&'a Traffic);

impl Drop for Tunnel<'_> {
    fn drop(&mut self) {
        self.0.tunnels.fetch_sub(1, Ordering::Relaxed);
    }
}
