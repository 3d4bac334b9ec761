//! The commands `sockets`, `check`, `pin` and `unpin`, and the lookup of one socket by name.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use plb_netlink::diag::{self, Entry, Filter, States};
use plb_netlink::flowlabel::{self, Current};
use plb_netlink::holders::Holder;
use plb_netlink::pidfd::{self, Owner};
use plb_netlink::repath::{self, Verdict};
use plb_netlink::sock::{self, TxRehash};
use plb_netlink::{Error, Result};
use serde_json::{Value, json};

use super::Answer;
use super::args::{CheckArgs, SelectArgs, SocketArgs, SocketName};
use super::output::{Output, or_dash, table};

pub(crate) fn list(output: Output, args: &SelectArgs) -> Result<Answer> {
    let entries = diag::dump(&args.filter())?;
    let owners = pidfd::owners();
    let value: Vec<Value> = entries.iter().map(|entry| as_json(entry, owner(&owners, entry))).collect();
    output.print(&json!(value), || {
        let rows: Vec<[String; 9]> = entries
            .iter()
            .map(|entry| {
                let info = entry.info.unwrap_or_default();
                [
                    entry.local.to_string(),
                    entry.remote.to_string(),
                    or_dash(entry.congestion.as_ref()),
                    if info.ecn { "yes" } else { "no" }.to_owned(),
                    or_dash(ce_share(entry).map(|share| format!("{:.1} %", share * 100.0))),
                    or_dash(info.total_rto),
                    or_dash(info.rehash),
                    entry.cookie.to_string(),
                    owner(&owners, entry)
                        .map_or_else(|| "-".to_owned(), |o| format!("{}:{} {}", o.pid, o.fd, o.command)),
                ]
            })
            .collect();
        let header = ["LOCAL", "PEER", "CC", "ECN", "MARKED", "RTOS", "REHASH", "COOKIE", "PID:FD OWNER"];
        format!("{}\n{} connections", table(header, &rows), rows.len())
    });
    Ok(Answer::Good)
}

pub(crate) fn check(output: Output, args: &CheckArgs) -> Result<Answer> {
    if let Some(pid) = args.pid {
        pidfd::sockets(pid)?;
    }
    let owners = pidfd::owners();
    let mut judged = Vec::new();
    for entry in diag::dump(&args.select.filter())? {
        let owner = owner(&owners, &entry);
        if args.pid.is_some() && owner.map(|owner| owner.pid) != args.pid {
            continue;
        }
        // A socket may have closed in the meantime; that is not a finding.
        let verdict = match owner {
            None => Err("owner not found; run as root".to_owned()),
            Some(owner) => match judge(owner, entry.cookie) {
                Err(Error::Gone(_)) => continue,
                verdict => verdict.map_err(|error| error.to_string()),
            },
        };
        judged.push((entry, owner.cloned(), verdict));
    }
    let good = |verdict: &std::result::Result<Verdict, String>| match verdict {
        Ok(verdict) => {
            if args.timeouts_only {
                verdict.on_timeout()
            } else {
                verdict.on_congestion()
            }
        }
        Err(_) => false,
    };
    let bad = judged.iter().filter(|(.., verdict)| !good(verdict)).count();
    let value: Vec<Value> = judged
        .iter()
        .map(|(entry, owner, verdict)| {
            let mut value = as_json(entry, owner.as_ref());
            match verdict {
                Ok(verdict) => {
                    value["repath_on_timeout"] = json!(verdict.on_timeout());
                    value["repath_on_congestion"] = json!(verdict.on_congestion());
                    let reasons: Vec<Value> = verdict
                        .reasons
                        .iter()
                        .map(|reason| json!({"reason": reason.to_string(), "cure": reason.cure()}))
                        .collect();
                    value["reasons"] = json!(reasons);
                }
                Err(why) => value["unknown"] = json!(why),
            }
            value
        })
        .collect();
    output.print(&json!(value), || {
        let yes_no = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
        let rows: Vec<[String; 6]> = judged
            .iter()
            .map(|(entry, owner, verdict)| {
                let (timeout, congestion, why) = match verdict {
                    Ok(verdict) => {
                        let reasons: Vec<String> = verdict.reasons.iter().map(ToString::to_string).collect();
                        (yes_no(verdict.on_timeout()), yes_no(verdict.on_congestion()), reasons.join(", "))
                    }
                    Err(why) => ("?".to_owned(), "?".to_owned(), why.clone()),
                };
                let owner = or_dash(owner.as_ref().map(|o| format!("{}:{} {}", o.pid, o.fd, o.command)));
                [entry.local.to_string(), entry.remote.to_string(), owner, timeout, congestion, why]
            })
            .collect();
        let header = ["LOCAL", "PEER", "PID:FD OWNER", "ON TIMEOUT", "BY PLB", "WHY NOT"];
        let mut text = format!(
            "{}\n{} connections, {bad} cannot be repathed or could not be checked",
            table(header, &rows),
            rows.len()
        );
        let mut cures: Vec<String> = judged
            .iter()
            .filter_map(|(.., verdict)| verdict.as_ref().ok())
            .flat_map(|verdict| &verdict.reasons)
            .map(|reason| format!("  {reason}: {}", reason.cure()))
            .collect();
        cures.sort();
        cures.dedup();
        if !cures.is_empty() {
            text.push_str("\n\nWhat helps:\n");
            text.push_str(&cures.join("\n"));
        }
        text
    });
    Ok(if bad == 0 { Answer::Good } else { Answer::Bad })
}

pub(crate) fn pin(output: Output, args: &SocketArgs) -> Result<Answer> {
    let socket = open(args.socket)?;
    let label = flowlabel::current(&socket)?;
    if !output.dry_run {
        sock::set_txrehash(&socket, TxRehash::Off)?;
    }
    let what = format!("set SO_TXREHASH off on {}: its label stays ({})", name(args.socket), shown(label));
    output.changed(&what, json!({"so_txrehash": 0}));
    Ok(Answer::Good)
}

pub(crate) fn unpin(output: Output, args: &SocketArgs) -> Result<Answer> {
    let socket = open(args.socket)?;
    let label = flowlabel::current(&socket)?;
    let rehash = sock::txrehash(&socket)?;
    let mut steps = Vec::new();
    if rehash != TxRehash::On {
        steps.push("SO_TXREHASH on".to_owned());
    }
    match label {
        Current::Automatic => {}
        Current::Zero => steps.push("automatic label on".to_owned()),
        Current::Explicit(label, Some(_)) => steps.push(format!("give back label {label}")),
        Current::Explicit(label, None) => {
            return Err(Error::Unsupported {
                what: format!("the label {label} of {} was set without a lease", name(args.socket)),
                cure: "only its owner can drop it, by a new connection; `plb repath --dev` can override it"
                    .to_owned(),
            });
        }
    }
    let what = if steps.is_empty() {
        format!("nothing to change: {} is not pinned", name(args.socket))
    } else {
        format!("unpin {}: {}", name(args.socket), steps.join(", "))
    };
    if !output.dry_run {
        unpin_socket(&socket, label)?;
    }
    output.changed(&what, json!(steps));
    Ok(Answer::Good)
}

/// Allows a socket to be repathed again.
pub(crate) fn unpin_socket(socket: &OwnedFd, label: Current) -> Result<()> {
    if let Current::Explicit(label, Some(_)) = label {
        flowlabel::put(socket, label)?;
    }
    sock::set_auto_label(socket, true)?;
    sock::set_txrehash(socket, TxRehash::On)
}

/// Returns a duplicate of the named socket.
pub(crate) fn open(socket: SocketName) -> Result<OwnedFd> {
    match socket {
        SocketName::Descriptor { pid, fd } => pidfd::duplicate(pid, fd),
        SocketName::Cookie(cookie) => {
            let inode = u64::from(find(cookie)?.inode);
            let owner = pidfd::owners().remove(&inode).ok_or_else(|| {
                Error::Gone(format!("no process that may be traced owns the socket with cookie {cookie}"))
            })?;
            Holder { pid: owner.pid, fd: owner.fd }.open(cookie)
        }
    }
}

/// Returns the socket with this cookie in this namespace.
pub(crate) fn find(cookie: u64) -> Result<Entry> {
    let all = Filter { ipv4: true, states: States::Both, ..Filter::default() };
    diag::dump(&all)?.into_iter().find(|entry| entry.cookie == cookie).ok_or_else(|| {
        Error::Gone(format!(
            "no TCP socket with cookie {cookie} in this namespace (`plb sockets` lists them)"
        ))
    })
}

/// Returns the cookie of the named socket.
pub(crate) fn cookie(socket: SocketName) -> Result<u64> {
    match socket {
        SocketName::Cookie(cookie) => find(cookie).map(|entry| entry.cookie),
        SocketName::Descriptor { .. } => sock::cookie(&open(socket)?),
    }
}

pub(crate) fn name(socket: SocketName) -> String {
    match socket {
        SocketName::Descriptor { pid, fd } => format!("{pid}:{fd}"),
        SocketName::Cookie(cookie) => format!("cookie:{cookie}"),
    }
}

pub(crate) fn shown(label: Current) -> String {
    match label {
        Current::Automatic => "automatic".to_owned(),
        Current::Zero => "0, automatic labels off".to_owned(),
        Current::Explicit(label, Some(_)) => format!("{label}, leased"),
        Current::Explicit(label, None) => format!("{label}, not leased"),
    }
}

fn judge(owner: &Owner, cookie: u64) -> Result<Verdict> {
    repath::repathable(&Holder { pid: owner.pid, fd: owner.fd }.open(cookie)?)
}

fn owner<'a>(owners: &'a HashMap<u64, Owner>, entry: &Entry) -> Option<&'a Owner> {
    owners.get(&u64::from(entry.inode))
}

fn ce_share(entry: &Entry) -> Option<f64> {
    let info = entry.info?;
    let delivered = info.delivered.filter(|delivered| *delivered > 0)?;
    Some(f64::from(info.delivered_ce?) / f64::from(delivered))
}

fn as_json(entry: &Entry, owner: Option<&Owner>) -> Value {
    let info = entry.info;
    json!({
        "local": entry.local.to_string(),
        "remote": entry.remote.to_string(),
        "cookie": entry.cookie,
        "inode": entry.inode,
        "uid": entry.uid,
        "congestion_control": entry.congestion,
        "ecn": info.map(|info| info.ecn),
        "rtt_us": info.map(|info| info.rtt_us),
        "unacked": info.map(|info| info.unacked),
        "delivered": info.and_then(|info| info.delivered),
        "delivered_ce": info.and_then(|info| info.delivered_ce),
        "total_rto": info.and_then(|info| info.total_rto),
        "rehash": info.and_then(|info| info.rehash),
        "owner": owner.map(|owner| json!({"pid": owner.pid, "fd": owner.fd, "command": owner.command})),
    })
}
