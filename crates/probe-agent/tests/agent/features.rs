//! Dependencies of a build without the default features. A service that only uses the tower layer must not pay for the
//! proxy.

use std::collections::BTreeSet;
use std::process::Command;

/// Returns the names of all crates that are linked with these features, as cargo resolves them.
fn linked(features: &[&str]) -> BTreeSet<String> {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "tree",
            "--package",
            "probe-agent",
            "--no-default-features",
            "--edges",
            "normal,no-proc-macro",
        ])
        .args(["--prefix", "none", "--format", "{p}", "--locked", "--features", &features.join(",")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).unwrap();
    names.lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
}

fn any_of<'a>(linked: &'a BTreeSet<String>, prefixes: &[&str]) -> Vec<&'a str> {
    let known = |name: &&String| prefixes.iter().any(|prefix| name.starts_with(prefix));
    linked.iter().filter(known).map(String::as_str).collect()
}

#[test]
fn the_layer_alone_stays_light() {
    let linked = linked(&[]);
    let linked: Vec<&str> = linked.iter().map(String::as_str).collect();
    // A crate that is not in this list must be added deliberately.
    assert_eq!(linked, LAYER);
}

#[test]
fn each_feature_pulls_in_only_its_own_crates() {
    let (tls, plb) = (["rustls", "ring", "tokio-rustls", "x509", "der"], ["netlink", "plb-netlink"]);
    let proxy = linked(&["proxy"]);
    assert!(proxy.contains("clap") && proxy.contains("hyper"), "{proxy:?}");
    assert_eq!(any_of(&proxy, &[&tls[..], &plb[..]].concat()), [""; 0]);
    let with_tls = linked(&["tls"]);
    assert!(with_tls.contains("rustls"), "{with_tls:?}");
    assert_eq!(any_of(&with_tls, &plb), [""; 0]);
    let with_plb = linked(&["plb"]);
    assert!(with_plb.contains("netlink-packet-route"), "{with_plb:?}");
    assert_eq!(any_of(&with_plb, &tls), [""; 0]);
    // hyper-util is only used to join hyper and tokio.
    let all = linked(&["proxy", "tls", "plb"]);
    assert_eq!(any_of(&all, &["ipnet", "percent-encoding", "system-configuration"]), [""; 0]);
}

const LAYER: &[&str] = &[
    "bytemuck",
    "bytes",
    "futures-core",
    "http",
    "http-body",
    "http-body-util",
    "itoa",
    "memchr",
    "pin-project-lite",
    "prequal-policy",
    "probe-agent",
    "rand",
    "rand_core",
    "serde_core",
    "serde_json",
    "thiserror",
    "tokio",
    "tower-layer",
    "tower-service",
    "zmij",
];
