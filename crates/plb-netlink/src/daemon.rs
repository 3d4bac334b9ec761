//! User-space PLB: watches the sockets of a namespace, feeds each one's `tcp_info` to the detector of the paper, and
//! moves it when that says so. For sockets whose congestion control has no PLB hooks.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::detector::{Cause, Config};
use crate::diag::{self, Entry, Filter};
use crate::flowlabel::{self, Current, Label};
use crate::relabel::Relabeller;
use crate::sysctl::{self, PlbParams};
use crate::tracker::Tracker;
use crate::{Error, Result, pidfd, sock, sys};

/// How a socket is moved.
#[derive(Debug)]
pub enum Way {
    /// Any label, by a BPF program on the egress device.
    Bpf(Relabeller),
    /// Switches automatic labels of the socket off or on through its owner's descriptor: two labels, so two paths at
    /// most. Needs no BPF, but the right to trace the owner.
    SocketOptions,
}

/// What happened to one socket.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Local address.
    pub local: SocketAddr,
    /// The peer.
    pub remote: SocketAddr,
    /// `SO_COOKIE`.
    pub cookie: u64,
    /// Congestion control.
    pub congestion: String,
    /// Why.
    pub cause: Cause,
    /// What was done.
    pub outcome: Outcome,
}

/// What was done about a socket that should move.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Its packets carry this label from now on.
    Relabelled(Label),
    /// Its automatic label was switched on (`true`) or off.
    Toggled(bool),
    /// A timeout moved it already: the kernel's own doing.
    LeftToKernel,
    /// It holds an explicit label: somebody pinned it.
    Pinned(Label),
    /// It could not be moved.
    Failed(String),
}

/// One socket as [`Daemon::watched`] shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Watched {
    /// The last reading.
    pub entry: Entry,
    /// Consecutive congested rounds.
    pub congested_rounds: u8,
    /// Times it was moved.
    pub moves: u32,
    /// The label it was given and the packets that carried it.
    pub label: Option<(Label, u64)>,
}

/// Watches until dropped; dropping detaches.
#[derive(Debug)]
pub struct Daemon {
    config: Config,
    filter: Filter,
    way: Way,
    sockets: HashMap<u64, State>,
}

#[derive(Debug)]
struct State {
    tracker: Tracker,
    entry: Entry,
    moves: u32,
    /// Its automatic label was changed, by whichever way.
    label: Option<Label>,
    /// Looked up once, at the first move.
    pin: Option<Option<Label>>,
}

impl Daemon {
    /// Watches the connected IPv6 sockets that match `filter`, in the calling thread's namespace.
    pub fn new(config: Config, filter: Filter, way: Way) -> Self {
        Self { config, filter, way, sockets: HashMap::new() }
    }

    /// Reads every socket once and moves those that should. `now` runs from any origin. Call it a few times per round
    /// trip, at least every 10 ms or so.
    ///
    /// # Errors
    /// When sockets cannot be listed. What fails for one socket is its [`Outcome::Failed`].
    pub fn step(&mut self, now: Duration) -> Result<Vec<Event>> {
        let kernel_plb = PlbParams::read().is_ok_and(|params| params.enabled);
        let kernel_moves_on_timeout = sysctl::read_number("net.core.txrehash")? != Some(0);
        let mut events = Vec::new();
        let mut gone = std::mem::take(&mut self.sockets);
        for entry in diag::dump(&self.filter)? {
            if !is_ours(&entry, kernel_plb) {
                continue;
            }
            let Some(info) = entry.info else { continue };
            let cookie = entry.cookie;
            let Some(mut state) = gone.remove(&cookie).or_else(|| {
                let tracker = Tracker::new(self.config, now, &info)?;
                Some(State { tracker, entry: entry.clone(), moves: 0, label: None, pin: None })
            }) else {
                continue;
            };
            let random = random()?;
            if let Some(cause) = state.tracker.observe(now, &info, random) {
                let outcome = if cause == Cause::Timeout && kernel_moves_on_timeout && state.label.is_none() {
                    Outcome::LeftToKernel
                } else {
                    self.move_socket(&entry, &mut state)
                };
                events.push(Event {
                    local: entry.local,
                    remote: entry.remote,
                    cookie,
                    congestion: entry.congestion.clone().unwrap_or_default(),
                    cause,
                    outcome,
                });
            }
            state.entry = entry;
            self.sockets.insert(cookie, state);
        }
        if let Way::Bpf(relabeller) = &self.way {
            for (cookie, _) in gone.into_iter().filter(|(_, state)| state.label.is_some()) {
                relabeller.remove(cookie)?;
            }
        }
        Ok(events)
    }

    /// The sockets under watch, by local address.
    ///
    /// # Errors
    /// When the kernel refuses to tell how many packets were relabelled.
    pub fn watched(&self) -> Result<Vec<Watched>> {
        let mut watched = Vec::new();
        for (cookie, state) in &self.sockets {
            watched.push(Watched {
                entry: state.entry.clone(),
                congested_rounds: state.tracker.congested_rounds(),
                moves: state.moves,
                label: match &self.way {
                    Way::Bpf(relabeller) => relabeller.get(*cookie)?,
                    Way::SocketOptions => None,
                },
            });
        }
        watched.sort_by_key(|watched| (watched.entry.local, watched.entry.remote));
        Ok(watched)
    }

    fn move_socket(&self, entry: &Entry, state: &mut State) -> Outcome {
        if state.pin.is_none() {
            state.pin = Some(pinned(entry));
        }
        if let Some(Some(label)) = state.pin {
            return Outcome::Pinned(label);
        }
        let moved = match &self.way {
            Way::Bpf(relabeller) => random().and_then(|random| {
                let label = Label::random(random, state.label);
                relabeller.set(entry.cookie, label)?;
                state.label = Some(label);
                Ok(Outcome::Relabelled(label))
            }),
            Way::SocketOptions => toggle(entry).map(Outcome::Toggled),
        };
        if moved.is_ok() {
            state.moves += 1;
        }
        moved.unwrap_or_else(|error| Outcome::Failed(error.to_string()))
    }
}

/// IPv6 that leaves the host and that the kernel does not repath for congestion by itself.
fn is_ours(entry: &Entry, kernel_plb: bool) -> bool {
    let hooks = entry.congestion.as_deref().is_some_and(|name| sock::WITH_PLB_HOOKS.contains(&name));
    entry.is_ipv6()
        && entry.cookie != 0
        && !entry.remote.ip().is_loopback()
        && entry.remote.ip() != entry.local.ip()
        && !(kernel_plb && hooks)
}

/// The explicit label of a socket, if its owner can be found and looked into.
fn pinned(entry: &Entry) -> Option<Label> {
    let owner = pidfd::owners().remove(&u64::from(entry.inode))?;
    let socket = pidfd::duplicate(owner.pid, owner.fd).ok()?;
    match flowlabel::current(&socket).ok()? {
        Current::Explicit(label, _) => Some(label),
        Current::Automatic | Current::Zero => None,
    }
}

fn toggle(entry: &Entry) -> Result<bool> {
    let owner = pidfd::owners().remove(&u64::from(entry.inode)).ok_or_else(|| {
        Error::Gone(format!("nobody that may be looked into owns the socket {}", entry.local))
    })?;
    let socket = pidfd::duplicate(owner.pid, owner.fd)?;
    let on = !sock::auto_label(&socket)?;
    sock::set_auto_label(&socket, on)?;
    Ok(on)
}

fn random() -> Result<u32> {
    sys::random_u32().map_err(|source| Error::kernel("asking for random bits", "", source))
}
