//! The `label ...` commands.

use std::net::UdpSocket;
use std::time::Duration;

use plb_netlink::flowlabel::{self, Current, Label, Terms};
use plb_netlink::{Error, Result, interrupted, watch_interrupts};
use serde_json::{Value, json};

use super::Answer;
use super::args::{LabelArgs, LabelCommand, LeaseArgs};
use super::output::{Output, or_dash, table};
use super::sockets;

pub(crate) fn run(output: Output, args: &LabelArgs) -> Result<Answer> {
    match &args.command {
        LabelCommand::List => list(output),
        LabelCommand::Show(args) => {
            let label = flowlabel::current(&sockets::open(args.socket)?)?;
            let value = match label {
                Current::Automatic => json!({"kind": "automatic"}),
                Current::Zero => json!({"kind": "zero"}),
                Current::Explicit(label, lease) => {
                    json!({"kind": "explicit", "label": label.get(), "leased": lease.is_some()})
                }
            };
            output.print(&value, || sockets::shown(label));
            Ok(Answer::Good)
        }
        LabelCommand::Lease(args) => lease(output, args),
        LabelCommand::Put(args) => {
            let socket = sockets::open(args.socket.socket)?;
            let label = match (args.label, flowlabel::current(&socket)?) {
                (Some(label), _) | (None, Current::Explicit(label, Some(_))) => label,
                _ => {
                    return Err(Error::Gone(
                        "this socket holds no lease that is in use; name the label".to_owned(),
                    ));
                }
            };
            if !output.dry_run {
                flowlabel::put(&socket, label)?;
            }
            let what = format!("give back label {label} of {}", sockets::name(args.socket.socket));
            output.changed(&what, json!({"label": label.get()}));
            Ok(Answer::Good)
        }
        LabelCommand::Renew(args) => {
            let socket = sockets::open(args.socket.socket)?;
            if !output.dry_run {
                flowlabel::renew(&socket, args.label, args.linger, args.expires)?;
            }
            let what = format!("renew label {} of {}", args.label, sockets::name(args.socket.socket));
            output.changed(
                &what,
                json!({"label": args.label.get(), "linger_s": args.linger, "expires_s": args.expires}),
            );
            Ok(Answer::Good)
        }
    }
}

fn list(output: Output) -> Result<Answer> {
    let listed = flowlabel::list()?;
    let value: Vec<Value> = listed
        .iter()
        .map(|l| {
            json!({
                "label": l.label.get(), "share": l.share.map(|share| share.to_string()), "owner": l.owner,
                "users": l.users, "linger_s": l.linger_s, "expires_s": l.expires_s,
                "destination": l.destination.to_string(),
            })
        })
        .collect();
    output.print(&json!(value), || {
        let rows: Vec<[String; 7]> = listed
            .iter()
            .map(|l| {
                [
                    l.label.to_string(),
                    or_dash(l.share),
                    l.owner.to_string(),
                    l.users.to_string(),
                    format!("{} s", l.linger_s),
                    format!("{} s", l.expires_s),
                    l.destination.to_string(),
                ]
            })
            .collect();
        let header = ["LABEL", "SHARE", "OWNER", "USERS", "LINGER", "EXPIRES", "DESTINATION"];
        format!("{}\n{} leases", table(header, &rows), rows.len())
    });
    Ok(Answer::Good)
}

fn lease(output: Output, args: &LeaseArgs) -> Result<Answer> {
    let terms = Terms {
        label: args.label.filter(|label| label.get() != 0),
        destination: args.destination,
        share: args.share.into(),
        fresh: args.fresh,
        linger_s: args.linger,
        expires_s: args.expires,
    };
    if output.dry_run {
        let label =
            terms.label.map_or_else(|| "a label of the kernel's choice".to_owned(), |l| l.to_string());
        output.changed(
            &format!("lease {label}, share {}", terms.share),
            json!({"share": terms.share.to_string()}),
        );
        return Ok(Answer::Good);
    }
    let socket: UdpSocket = flowlabel::udp(None)?;
    let label: Label = flowlabel::lease(&socket, &terms)?;
    let what = format!("leased {label}, share {}; held until interrupted", terms.share);
    output.changed(&what, json!({"label": label.get(), "share": terms.share.to_string()}));
    watch_interrupts()
        .map_err(|reason| Error::Kernel { doing: "watching for signals".to_owned(), reason })?;
    while !interrupted() {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(Answer::Good)
}
