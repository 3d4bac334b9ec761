//! The commands `lint` and `envoy`.

use plb_netlink::envoy::{self, Side};
use plb_netlink::lint::{self, Host, Severity};
use plb_netlink::{Result, sock, sysctl};
use serde_json::{Value, json};

use super::Answer;
use super::args::EnvoyArgs;
use super::output::Output;

pub(crate) fn lint(output: Output) -> Result<Answer> {
    let found = lint::lint(&Host::read()?);
    let severity = |severity| match severity {
        Severity::Problem => "problem",
        Severity::Note => "note",
    };
    let value: Vec<Value> = found
        .iter()
        .map(|f| json!({"id": f.id, "severity": severity(f.severity), "what": f.what, "cure": f.cure}))
        .collect();
    let problems = found.iter().filter(|finding| finding.severity == Severity::Problem).count();
    output.print(&json!(value), || {
        let mut text = String::new();
        for finding in &found {
            text.push_str(&format!(
                "{} [{}] {}\n        cure: {}\n",
                severity(finding.severity),
                finding.id,
                finding.what,
                finding.cure
            ));
        }
        text.push_str(&format!("{problems} problems, {} notes", found.len() - problems));
        text
    });
    Ok(if problems == 0 { Answer::Good } else { Answer::Bad })
}

pub(crate) fn envoy(output: Output, args: &EnvoyArgs) -> Result<Answer> {
    let preferred = sock::WITH_PLB_HOOKS[0];
    let (congestion, mut warnings) = match &args.congestion {
        Some(name) => (Some(name.as_str()), envoy::check(name)?),
        None if sysctl::congestion_controls()?.iter().any(|name| name == preferred) => {
            (Some(preferred), envoy::check(preferred)?)
        }
        None => (
            None,
            vec![format!(
                "no {preferred} here: sockets keep the host's default, and the kernel repaths only after timeouts; \
                 `plb run` also repaths for congestion"
            )],
        ),
    };
    if sysctl::read_number("net.core.txrehash")?.is_none() {
        warnings.push(
            "this kernel has no SO_TXREHASH (it came with Linux 6.0): leave that option out".to_owned(),
        );
    }
    let cluster = (!args.listener).then(|| envoy::socket_options(Side::Cluster, congestion));
    let listener = (!args.cluster).then(|| envoy::socket_options(Side::Listener, congestion));
    let value = json!({"cluster": cluster, "listener": listener, "warnings": warnings});
    output.print(&value, || {
        let mut text = String::new();
        for line in &warnings {
            text.push_str(&format!("# Note: {line}\n"));
        }
        if let Some(yaml) = cluster {
            text.push_str(&format!("# Under each cluster:\n{yaml}"));
        }
        if let Some(yaml) = listener {
            text.push_str(&format!("# Under each listener:\n{yaml}"));
        }
        text
    });
    Ok(Answer::Good)
}
