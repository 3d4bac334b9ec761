//! The commands `show` and `set`.

use plb_netlink::counters::Counters;
use plb_netlink::detector::Threshold;
use plb_netlink::fabric::Hash;
use plb_netlink::sysctl::{self, PlbParams, Rounds};
use plb_netlink::{Error, Result};
use serde_json::{Map, Value, json};

use super::Answer;
use super::args::{OnOff, SetArgs};
use super::output::{Output, or_dash, table};

pub(crate) fn show(output: Output) -> Result<Answer> {
    let plb = match PlbParams::read() {
        Ok(params) => Some(params),
        Err(Error::Unsupported { .. }) => None,
        Err(error) => return Err(error),
    };
    let mut related = Vec::new();
    for (name, meaning) in RELATED {
        related.push((name, sysctl::read(name)?, meaning));
    }
    let hash = Hash::read().ok();
    let counters = Counters::read()?;

    let value = json!({
        "kernel": sysctl::kernel_release(),
        "plb": plb.map(|params| params.values().into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect::<Map<_, _>>()),
        "related": related.iter().map(|(name, value, _)| ((*name).to_owned(), json!(value))).collect::<Map<_, _>>(),
        "multipath_hash": hash.map(|hash| json!({
            "policy": hash.policy, "fields": hash.fields,
            "sees_label": hash.sees_label(), "sees_ports": hash.sees_ports(),
        })),
        "counters": counters.values().into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect::<Map<_, _>>(),
    });
    output.print(&value, || {
        let mut rows = Vec::new();
        match plb {
            Some(params) => {
                for ((name, value), meaning) in params.values().into_iter().zip(MEANINGS) {
                    rows.push([name.to_owned(), value.to_string(), meaning.to_owned()]);
                }
            }
            None => rows.push([
                "net.ipv4.tcp_plb_*".to_owned(),
                "-".to_owned(),
                format!("kernel {} has no PLB (it needs Linux 6.2 or later)", sysctl::kernel_release()),
            ]),
        }
        for (name, value, meaning) in &related {
            rows.push([(*name).to_owned(), or_dash(value.as_ref()), (*meaning).to_owned()]);
        }
        let knobs = table(["KNOB", "VALUE", "MEANING"], &rows);
        let hash = hash.map_or_else(String::new, |hash| {
            format!(
                "\n\nAs a router, this namespace spreads flows by {}.",
                match (hash.sees_label(), hash.sees_ports()) {
                    (true, true) => "the label and the ports",
                    (true, false) => "the label but NOT the ports",
                    (false, true) => "the ports but NOT the label",
                    (false, false) => "neither the label nor the ports",
                }
            )
        });
        let counts: Vec<[String; 3]> = counters
            .values()
            .into_iter()
            .zip(COUNTED)
            .map(|((name, value), meaning)| [name.to_owned(), or_dash(value), meaning.to_owned()])
            .collect();
        format!("{knobs}{hash}\n\n{}", table(["COUNTER", "VALUE", "MEANING"], &counts))
    });
    Ok(Answer::Good)
}

pub(crate) fn set(output: Output, args: &SetArgs) -> Result<Answer> {
    let before = PlbParams::read()?;
    let wanted = PlbParams {
        enabled: args.enabled.map_or(before.enabled, |value| value == OnOff::On),
        k: args.k.as_deref().map(threshold).transpose()?.unwrap_or(before.k),
        m: rounds("--m", args.m)?.unwrap_or(before.m),
        n: rounds("--n", args.n)?.unwrap_or(before.n),
        suspend_s: args.suspend.unwrap_or(before.suspend_s),
    };
    wanted.detector()?;
    if !output.dry_run {
        wanted.write()?;
    }
    let changes: Vec<(&str, u16, u16)> = before
        .values()
        .into_iter()
        .zip(wanted.values())
        .filter(|((_, old), (_, new))| old != new)
        .map(|((name, old), (_, new))| (name, old, new))
        .collect();
    let what = if changes.is_empty() {
        format!("nothing to change: {before}")
    } else {
        let changes: Vec<String> =
            changes.iter().map(|(name, old, new)| format!("{name}: {old} -> {new}")).collect();
        format!("set {}", changes.join(", "))
    };
    let details: Vec<Value> =
        changes.iter().map(|(name, old, new)| json!({"knob": name, "from": old, "to": new})).collect();
    output.changed(&what, json!(details));
    Ok(Answer::Good)
}

/// Parses a share of 0 to 1, or `x/256` in the kernel's unit.
pub(crate) fn threshold(text: &str) -> Result<Threshold> {
    let bad = || Error::Invalid(format!("--k: `{text}` is not a share: 0 to 1, or 0/256 to 256/256"));
    match text.split_once('/') {
        Some((parts, "256")) => Threshold::from_256ths(parts.parse().map_err(|_| bad())?),
        Some(_) => return Err(bad()),
        None => Threshold::from_share(text.parse().map_err(|_| bad())?),
    }
    .map_err(|_| bad())
}

pub(crate) fn rounds(flag: &str, value: Option<u8>) -> Result<Option<Rounds>> {
    value
        .map(|value| Rounds::new(value).map_err(|error| Error::Invalid(format!("{flag}: {error}"))))
        .transpose()
}

const MEANINGS: [&str; 5] = [
    "1: repath for congestion (needs DCTCP and ECN)",
    "K in 1/256: share of marked packets that makes a round congested",
    "M: congested rounds before an idle connection moves (0: never)",
    "N: congested rounds before a busy connection moves",
    "pause after a timeout, seconds; the actual pause is 1 to 2 times this",
];

const RELATED: [(&str, &str); 6] = [
    ("net.ipv4.tcp_congestion_control", "default of new sockets; PLB acts for dctcp only"),
    ("net.ipv4.tcp_available_congestion_control", "congestion controls that are loaded"),
    ("net.ipv4.tcp_allowed_congestion_control", "congestion controls that need no privileges"),
    ("net.ipv4.tcp_ecn", "1: request ECN; 2: only accept it"),
    ("net.core.txrehash", "1: labels of new sockets may change"),
    ("net.ipv6.auto_flowlabels", "1: sockets have automatic labels"),
];

const COUNTED: [&str; 6] = [
    "PLB requested another label; it may not have changed",
    "a timeout requested another label; it may not have changed",
    "duplicate data made a receiver change the label of its ACKs",
    "packets delivered with a congestion mark",
    "packets delivered",
    "retransmission timeouts",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k_is_a_share_or_256ths() {
        for (text, expected) in [
            ("0.5", Some(128)),
            ("1", Some(256)),
            ("0", Some(0)),
            ("64/256", Some(64)),
            ("256/256", Some(256)),
        ] {
            assert_eq!(threshold(text).ok().map(Threshold::in_256ths), expected, "{text}");
        }
        for text in ["", "128", "1.1", "-0.1", "nan", "257/256", "1/2", "x/256"] {
            assert!(threshold(text).unwrap_err().to_string().contains("--k"), "{text}");
        }
    }
}
