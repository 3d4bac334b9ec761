//! A trace: the events of one server with their times, written as lines that every library's conformance server plays.

use std::fmt;

/// Address of the server in all traces.
pub(crate) const ENDPOINT: &str = "10.0.0.7:8080";

/// The setup of a server, and its events.
pub(crate) struct Trace {
    pub(crate) name: &'static str,
    /// Microseconds.
    pub(crate) begin: u64,
    pub(crate) json: bool,
    /// Number of requests that the server should serve at once; 0 if unknown.
    pub(crate) limit: u32,
    pub(crate) window_us: u64,
    pub(crate) events: Vec<Event>,
}

/// One event, with its time in microseconds on the server's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) at: u64,
    pub(crate) what: What,
}

/// What happens. Requests are identified by numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    /// A request arrives.
    Start(u32),
    /// Its response headers are sent, which gives a line with their reports.
    Head(u32, Kind),
    /// It starts to wait for its client.
    Wait(u32),
    /// It stops waiting for its client.
    Back(u32),
    /// Its response is complete.
    Finish(u32),
    /// Its client is gone.
    Abort(u32),
    /// The server is probed, which gives a line with its report.
    Probe,
}

/// The kind of a response, known from its headers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Ok,
    /// A response with status 500.
    Fail,
    /// An event stream.
    Stream,
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { begin, limit, window_us, .. } = self;
        let format = if self.json { "json" } else { "text" };
        writeln!(f, "{begin} begin {format} {limit} {window_us} {ENDPOINT}")?;
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match self.what {
            What::Start(id) => write!(f, "start {id}"),
            What::Head(id, Kind::Ok) => write!(f, "head {id} ok"),
            What::Head(id, Kind::Fail) => write!(f, "head {id} fail"),
            What::Head(id, Kind::Stream) => write!(f, "head {id} stream"),
            What::Wait(id) => write!(f, "wait {id}"),
            What::Back(id) => write!(f, "back {id}"),
            What::Finish(id) => write!(f, "finish {id}"),
            What::Abort(id) => write!(f, "abort {id}"),
            What::Probe => f.write_str("probe"),
        }
    }
}
