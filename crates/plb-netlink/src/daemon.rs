//! User-space PLB: watches the sockets of a namespace, passes the `tcp_info` of each to the paper's detector, and moves
//! a socket when the detector decides to. It serves the sockets that the kernel does not move for congestion itself:
//! those whose congestion control has no PLB hooks and, while the kernel's PLB is off, all others as well.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::detector::{Cause, Config};
use crate::diag::{self, Entry, Filter};
use crate::flowlabel::{Current, Label};
use crate::guardian::{self, Guardian, Note};
use crate::holders::{Holder, Holders};
use crate::pins::{self, Decision, Pin, PinFacts};
use crate::relabel::Relabeller;
use crate::sysctl::{self, PlbParams};
use crate::tracker::Tracker;
use crate::{Error, Result, sock, sys};

/// How a socket is moved. In both cases the owner of the socket must be known and traceable, because the socket's pins
/// are read through its owner. Otherwise the socket is not moved.
#[derive(Debug)]
pub enum Way {
    /// A BPF program on the egress device can set any label.
    Bpf(Relabeller),
    /// Switches the automatic label of the socket off or on through its owner's descriptor. This gives two labels, so
    /// two paths at most. It does not need BPF. Without a guardian, labels stay switched off if this process is
    /// killed.
    SocketOptions(Option<Guardian>),
}

/// A report about one socket.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Local address.
    pub local: SocketAddr,
    /// Peer address.
    pub remote: SocketAddr,
    /// `SO_COOKIE`.
    pub cookie: u64,
    /// Congestion control.
    pub congestion: String,
    /// Why the socket should move.
    pub cause: Cause,
    /// The action taken.
    pub outcome: Outcome,
}

/// Action taken for a socket that should move.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The packets of the socket carry this label from now on.
    Relabelled(Label),
    /// The automatic label of the socket was switched on (`true`) or off.
    Toggled(bool),
    /// The kernel changes the label itself after a timeout.
    LeftToKernel,
    /// The socket is pinned and stays on its path. Not reported again until the socket moves or the outcome changes.
    Pinned(Pin),
    /// The socket stays on its path because its pins cannot be read. Not reported again until the socket moves or the
    /// outcome changes.
    Unreadable(String),
    /// The socket could not be moved. Not reported again until the socket moves or the outcome changes.
    Failed(String),
}

/// A socket as returned by [`Daemon::watched`].
#[derive(Clone, Debug, PartialEq)]
pub struct Watched {
    /// The last reading.
    pub entry: Entry,
    /// Number of consecutive congested rounds.
    pub congested_rounds: u8,
    /// Number of times the socket was moved.
    pub moves: u32,
    /// The label given to the socket and the number of packets that carried it.
    pub label: Option<(Label, u64)>,
}

/// User-space PLB for one namespace. Dropping it has the effect of `detach`.
#[derive(Debug)]
pub struct Daemon {
    config: Config,
    filter: Filter,
    way: Way,
    sockets: HashMap<u64, State>,
    holders: Holders,
    knobs: Option<(Duration, Knobs)>,
}

#[derive(Debug)]
struct State {
    tracker: Tracker,
    entry: Entry,
    moves: u32,
    /// The label given to the socket.
    label: Option<Label>,
    /// Set if the automatic label was switched on or off: its original state, and the holder of the socket.
    switched: Option<Note>,
    /// Set if the socket should move but its holder is not known yet.
    waiting: Option<Cause>,
    /// Set if a search for the holder failed: the earliest time of the next search, and the current wait.
    hidden: Option<(Duration, Duration)>,
    /// The last outcome that kept the socket on its path.
    said: Option<Outcome>,
}

/// The namespace's knobs, as far as the daemon needs them.
#[derive(Clone, Copy, Debug)]
struct Knobs {
    kernel_plb: bool,
    /// Whether a socket sends, by default, an automatic label that the kernel changes after timeouts. The owner of
    /// the socket and the daemon can change this.
    moves_on_timeout: bool,
}

impl Knobs {
    fn read() -> Self {
        let number = |name| sysctl::read_number(name).ok().flatten();
        Self {
            kernel_plb: PlbParams::read().is_ok_and(|params| params.enabled),
            moves_on_timeout: number("net.core.txrehash") != Some(0)
                && matches!(number("net.ipv6.auto_flowlabels"), Some(1 | 3)),
        }
    }
}

impl Daemon {
    /// Creates a daemon for the connected IPv6 sockets that match `filter`, in the calling thread's namespace.
    pub fn new(config: Config, filter: Filter, way: Way) -> Self {
        Self { config, filter, way, sockets: HashMap::new(), holders: Holders::default(), knobs: None }
    }

    /// Reads every socket once and moves those that should move. `now` may be measured from any origin. Call this a
    /// few times per round trip, at least every 10 ms or so.
    ///
    /// # Errors
    /// If the sockets cannot be listed. Nothing is lost then, and the next step may succeed. A failure for one socket
    /// is reported as [`Outcome::Failed`].
    pub fn step(&mut self, now: Duration) -> Result<Vec<Event>> {
        let entries = diag::dump(&self.filter)?;
        let bits = random()?;
        let knobs = self.knobs(now);
        let mut events = Vec::new();
        let mut waiting = Vec::new();
        let mut gone = std::mem::take(&mut self.sockets);
        for entry in entries {
            if !is_ours(&entry, knobs.kernel_plb) {
                continue;
            }
            let Some(info) = entry.info else { continue };
            let cookie = entry.cookie;
            let Some(mut state) = gone.remove(&cookie).or_else(|| State::new(self.config, now, &entry))
            else {
                continue;
            };
            if let Some(cause) = state.tracker.observe(now, &info, mixed(bits, cookie)) {
                if cause == Cause::Timeout && knobs.moves_on_timeout && state.is_untouched() {
                    events.push(event(&entry, cause, Outcome::LeftToKernel));
                } else if state.hidden.is_none_or(|(until, _)| now >= until) {
                    state.waiting = Some(cause);
                }
            }
            if state.waiting.is_some() {
                waiting.push(cookie);
            }
            state.entry = entry;
            self.sockets.insert(cookie, state);
        }
        self.let_go(gone);
        self.serve(now, waiting, &mut events);
        Ok(events)
    }

    fn knobs(&mut self, now: Duration) -> Knobs {
        match self.knobs {
            Some((read, knobs)) if now.saturating_sub(read) < KNOBS_EVERY => knobs,
            _ => self.knobs.insert((now, Knobs::read())).1,
        }
    }

    /// Releases sockets that were closed or that no longer match.
    fn let_go(&mut self, gone: HashMap<u64, State>) {
        match &mut self.way {
            Way::Bpf(relabeller) => {
                for (cookie, state) in gone.into_iter().filter(|(_, state)| state.label.is_some()) {
                    // Try again at the next step.
                    if relabeller.remove(cookie).is_err() {
                        self.sockets.insert(cookie, state);
                    }
                }
            }
            Way::SocketOptions(guardian) => {
                for note in gone.into_values().filter_map(|state| state.switched) {
                    // If the socket can still be reached, it may keep sending for a while, so its label is restored.
                    if let Ok(Some((_, socket))) = self.holders.open(note.inode, note.cookie) {
                        let _ = sock::set_auto_label(&socket, note.was);
                    }
                    if let Some(guardian) = guardian {
                        let _ = guardian.forget(note.cookie);
                    }
                }
            }
        }
    }

    /// Moves the waiting sockets whose holders are known. For the others, walks the processes once, or leaves them
    /// waiting until the next walk is allowed.
    fn serve(&mut self, now: Duration, waiting: Vec<u64>, events: &mut Vec<Event>) {
        let unknown: Vec<u64> = waiting.into_iter().filter(|cookie| !self.attempt(*cookie, events)).collect();
        if unknown.is_empty() || !self.holders.may_walk() {
            return;
        }
        let inode = |cookie: &u64| self.sockets.get(cookie).map(|state| u64::from(state.entry.inode));
        let missing: HashSet<u64> = unknown.iter().filter_map(inode).collect();
        let watched: HashSet<u64> = self.sockets.values().map(|state| u64::from(state.entry.inode)).collect();
        self.holders.walk(&watched, missing);
        for cookie in unknown {
            if self.attempt(cookie, events) {
                continue;
            }
            let Some(state) = self.sockets.get_mut(&cookie) else { continue };
            let wait = state.hidden.map_or(LOOK_AGAIN, |(_, wait)| (wait * 2).min(LOOK_AGAIN_AT_MOST));
            state.hidden = Some((now + wait, wait));
            let why = "no process that may be traced holds it".to_owned();
            state.settle(Outcome::Unreadable(why), events);
        }
    }

    /// Tries to move the socket. Returns whether the outcome is settled; it is not if the holder is unknown.
    fn attempt(&mut self, cookie: u64, events: &mut Vec<Event>) -> bool {
        let Some(state) = self.sockets.get_mut(&cookie) else { return true };
        let Some(cause) = state.waiting else { return true };
        let outcome = match self.holders.open(state.entry.inode.into(), cookie) {
            Ok(None) => return false,
            Err(error) => Outcome::Unreadable(error.to_string()),
            Ok(Some((holder, socket))) => {
                state.hidden = None;
                match PinFacts::read(&socket) {
                    Err(error) => Outcome::Unreadable(error.to_string()),
                    Ok(facts) => match pins::judge(facts, cause, state.label.is_some()) {
                        Decision::Stay(pin) => Outcome::Pinned(pin),
                        Decision::LeftToKernel => Outcome::LeftToKernel,
                        Decision::Move => state
                            .apply(&mut self.way, holder, &socket, facts)
                            .unwrap_or_else(|error| Outcome::Failed(error.to_string())),
                    },
                }
            }
        };
        state.settle(outcome, events);
        true
    }

    /// Returns the number of walks over all processes so far, made to find the holders of sockets to be moved.
    pub fn walks(&self) -> u64 {
        self.holders.walks()
    }

    /// Restores the original label of every socket. The program of [`Way::Bpf`] is detached when this is dropped.
    /// Returns the number of sockets that could not be switched back.
    pub fn detach(&mut self) -> usize {
        let notes: Vec<Note> = self.sockets.drain().filter_map(|(_, state)| state.switched).collect();
        let failed = guardian::switch_back(&mut self.holders, notes.iter().copied());
        if let Way::SocketOptions(Some(guardian)) = &mut self.way
            && failed == 0
        {
            for note in notes {
                let _ = guardian.forget(note.cookie);
            }
        }
        failed
    }

    /// Returns the sockets under watch, sorted by local address.
    ///
    /// # Errors
    /// If the kernel does not report how many packets were relabelled.
    pub fn watched(&self) -> Result<Vec<Watched>> {
        let mut watched = Vec::new();
        for (cookie, state) in &self.sockets {
            watched.push(Watched {
                entry: state.entry.clone(),
                congested_rounds: state.tracker.congested_rounds(),
                moves: state.moves,
                label: match &self.way {
                    Way::Bpf(relabeller) => relabeller.get(*cookie)?,
                    Way::SocketOptions(_) => None,
                },
            });
        }
        watched.sort_by_key(|watched| (watched.entry.local, watched.entry.remote));
        Ok(watched)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.detach();
    }
}

impl State {
    fn new(config: Config, now: Duration, entry: &Entry) -> Option<Self> {
        Some(Self {
            tracker: Tracker::new(config, now, entry.info.as_ref()?)?,
            entry: entry.clone(),
            moves: 0,
            label: None,
            switched: None,
            waiting: None,
            hidden: None,
            said: None,
        })
    }

    /// Returns whether the daemon has not yet changed the socket's label.
    fn is_untouched(&self) -> bool {
        self.label.is_none() && self.switched.is_none()
    }

    fn apply(&mut self, way: &mut Way, holder: Holder, socket: &OwnedFd, facts: PinFacts) -> Result<Outcome> {
        let cookie = self.entry.cookie;
        match way {
            Way::Bpf(relabeller) => {
                let label = Label::random(random()?, self.label);
                relabeller.set(cookie, label)?;
                self.label = Some(label);
                Ok(Outcome::Relabelled(label))
            }
            Way::SocketOptions(guardian) => {
                let was = facts.label == Current::Automatic;
                let note =
                    self.switched.unwrap_or(Note { holder, inode: self.entry.inode.into(), cookie, was });
                if self.switched.is_none()
                    && let Some(guardian) = guardian
                {
                    guardian.note(&note)?;
                }
                sock::set_auto_label(socket, !was)?;
                self.switched = Some(note);
                Ok(Outcome::Toggled(!was))
            }
        }
    }

    /// Ends the wait of the socket. An outcome that keeps the socket on its path is not reported again while it stays
    /// the same.
    fn settle(&mut self, outcome: Outcome, events: &mut Vec<Event>) {
        let Some(cause) = self.waiting.take() else { return };
        match outcome {
            Outcome::Relabelled(_) | Outcome::Toggled(_) => {
                self.moves += 1;
                self.said = None;
            }
            Outcome::Pinned(_) | Outcome::Unreadable(_) | Outcome::Failed(_) => {
                if self.said.as_ref() == Some(&outcome) {
                    return;
                }
                self.said = Some(outcome.clone());
            }
            Outcome::LeftToKernel => {}
        }
        events.push(event(&self.entry, cause, outcome));
    }
}

fn event(entry: &Entry, cause: Cause, outcome: Outcome) -> Event {
    Event {
        local: entry.local,
        remote: entry.remote,
        cookie: entry.cookie,
        congestion: entry.congestion.clone().unwrap_or_default(),
        cause,
        outcome,
    }
}

/// Returns whether the connection uses IPv6, leaves the host, and is not already repathed for congestion by the
/// kernel.
fn is_ours(entry: &Entry, kernel_plb: bool) -> bool {
    let hooks = entry.congestion.as_deref().is_some_and(|name| sock::WITH_PLB_HOOKS.contains(&name));
    entry.is_ipv6()
        && entry.cookie != 0
        && !entry.remote.ip().is_loopback()
        && entry.remote.ip() != entry.local.ip()
        && !(kernel_plb && hooks)
}

/// Derives separate random bits for each socket from the bits of the step.
fn mixed(bits: u32, cookie: u64) -> u32 {
    let mixed = (cookie ^ u64::from(bits) << 32 ^ u64::from(bits)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // The upper half of the product is the well-mixed one.
    (mixed >> 32) as u32
}

fn random() -> Result<u32> {
    sys::random_u32().map_err(|source| Error::kernel("reading random bits", "", source))
}

/// How often the namespace's knobs are read.
const KNOBS_EVERY: Duration = Duration::from_secs(1);
/// How long to wait before searching again for a holder that was not found; doubles each time.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const LOOK_AGAIN_AT_MOST: Duration = Duration::from_secs(60);
