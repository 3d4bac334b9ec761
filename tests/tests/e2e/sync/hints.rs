//! Query hints: a request's probes carry a hash, and the replicas' answers to it decide.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{AgentOptions, Backend, Envoy, EnvoyConfig, Replica, Reply, Request};
use serde_json::json;

use super::{MS, assert_no_crash, start, sync_config};
use crate::support::{
    PROBE_PATH, addrs, assert_all_ok, bed, counted, is_probe, report, set, stand_ins, with_load,
};

/// The answer to a raw request with these header bytes.
fn raw(addr: SocketAddr, path: &str, headers: &[u8]) -> Result<String> {
    let mut socket = TcpStream::connect(addr)?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    socket.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n").as_bytes())?;
    socket.write_all(headers)?;
    socket.write_all(b"\r\n")?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
}

#[test]
fn any_hint_is_sent_as_a_hash() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    // Only the probes of requests and of discovery.
    let hint = json!({"header": "x-session", "path_segment": 2});
    let settings = json!({"hint": hint, "budget": "fixed", "r_probe": 0, "idle_probe_interval_ms": 0});
    let config = sync_config(&addrs(&fleet), settings)?
        .edit(|config| config.http_mut()["max_request_headers_kb"] = json!(96));
    let envoy = Envoy::start(config)?;
    // The hints of all probes and of all requests since the last call.
    let hints = || {
        let seen: Vec<_> = fleet.iter().flat_map(Backend::seen).collect();
        fleet.iter().for_each(Backend::clear);
        let of = |probes: bool| -> BTreeSet<Option<String>> {
            let kind = seen.iter().filter(|seen| is_probe(seen) == probes);
            kind.map(|seen| seen.header("x-prequal-hint").map(str::to_owned)).collect()
        };
        (of(true), of(false))
    };
    let long = [b"x-session: ".to_vec(), vec![b'x'; 64 << 10], b"\r\n".to_vec()].concat();
    let mut all = BTreeSet::new();
    for (path, headers) in [
        ("/", &b"x-session: abc\r\n"[..]),
        ("/a/model", b""),
        ("/a/model/b?c", b"x-session: abc\r\n"),
        ("/", b"x-session: \xff\xfe\x80 \x01binary\r\n"),
        ("/", b"x-session: \xff\xfe\x80\r\n"),
        ("/", &long),
    ] {
        let answer = raw(envoy.addr(), path, headers)?;
        let shown = String::from_utf8_lossy(&headers[..headers.len().min(40)]);
        if !answer.starts_with("HTTP/1.1 200") {
            // Envoy refuses control characters in header values.
            assert!(answer.starts_with("HTTP/1.1 400") && shown.contains('\u{1}'), "{answer}: {shown}");
            continue;
        }
        let (mut probes, requests) = hints();
        probes.remove(&None);
        // A request does not wait for all its probes: one of the previous request may arrive only now.
        probes.retain(|hint| hint.as_ref().is_none_or(|hint| !all.contains(hint)));
        assert_eq!(probes, requests, "the request carries the hint of its probes: {shown}");
        let [Some(hint)] = &*probes.into_iter().collect::<Vec<_>>() else { panic!("not one hint: {shown}") };
        assert!(hint.len() == 16 && hint.bytes().all(|b| b.is_ascii_hexdigit()), "{hint}");
        assert!(all.insert(hint.clone()), "{shown} has the same hint as another");
    }
    assert_eq!(all.len(), 5);
    // No hint, and a hint that the client forged.
    for headers in [&b""[..], b"x-prequal-hint: 0123456789abcdef\r\n"] {
        assert_eq!(raw(envoy.addr(), "/", headers)?, "HTTP/1.1 200 OK");
        let (mut probes, requests) = hints();
        // A probe of a previous request may arrive late.
        probes.retain(|hint| hint.as_ref().is_none_or(|hint| !all.contains(hint)));
        assert_eq!((probes, requests), (BTreeSet::from([None]), BTreeSet::from([None])));
    }
    assert_no_crash(&envoy);
    Ok(())
}

#[test]
fn a_hint_leads_to_the_replica_that_served_it_before() -> Result<()> {
    bed!();
    let options = AgentOptions { args: vec!["--hint-cache".into(), "100".into()], ..Default::default() };
    let replica = || Replica::start_with(Reply::ok().delay(MS(10)), &options);
    let fleet = [replica()?, replica()?];
    // With two replicas both are probed, and both must answer.
    let envoy = start(&[fleet[0].addr(), fleet[1].addr()], json!({"hint": {"header": "x-session"}}))?;
    let client = envoy.client();
    let get = |session: &str| {
        assert_all_ok(&[client.send(Request::get("/").header("x-session", session))]);
    };
    // A replica without a latency estimate would be tried whatever load the other replica reports, so give both an
    // estimate first.
    (0..20).for_each(|number| get(&format!("before {number}")));
    for session in (0..8).map(|number| format!("session {number}")) {
        (0..10).for_each(|_| get(&session));
        let served = fleet.each_ref().map(|replica| {
            let seen = replica.backend.seen();
            seen.iter().filter(|seen| seen.header("x-session") == Some(&session)).count()
        });
        // By chance alone it would be five each.
        assert!(served.iter().any(|served| *served >= 9), "{session}: {served:?}");
    }
    Ok(())
}

#[test]
fn a_hint_has_the_same_home_in_every_envoy() -> Result<()> {
    bed!();
    let fleet = stand_ins(6, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    let settings = json!({"hint": {"header": "x-session"}});
    let envoys = [start(&addrs(&fleet), settings.clone())?, start(&addrs(&fleet), settings)?];
    let mut homes = BTreeSet::new();
    for session in (0..20).map(|number| format!("session {number}")) {
        for envoy in &envoys {
            let client = envoy.client();
            let send = |_| client.send(Request::get("/").header("x-session", &session));
            assert_all_ok(&(0..5).map(send).collect::<Vec<_>>());
        }
        let is_ours = |backend: &Backend| {
            backend.seen().iter().any(|seen| seen.header("x-session") == Some(&session) && !is_probe(seen))
        };
        let served: Vec<usize> = (0..fleet.len()).filter(|index| is_ours(&fleet[*index])).collect();
        assert_eq!(served.len(), 1, "{session}: {served:?}");
        homes.extend(served);
    }
    assert!(homes.len() > 1, "all sessions have the same home");
    Ok(())
}

#[test]
fn a_client_cannot_inject_a_hint() -> Result<()> {
    bed!();
    let fleet = stand_ins(3, |addr| with_load(report(1, 2000, addr)), |_| Reply::ok())?;
    for mode in ["async", "sync"] {
        let envoy = Envoy::start(set(EnvoyConfig::for_replicas(&addrs(&fleet))?, "mode", mode))?;
        fleet.iter().for_each(Backend::clear);
        assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/").header("x-prequal-hint", "abc")));
        for seen in fleet.iter().flat_map(Backend::seen) {
            assert!(seen.header("x-prequal-hint").is_none(), "{mode}: {seen:?}");
        }
    }
    Ok(())
}

#[test]
fn hinted_loads_do_not_enter_the_pool() -> Result<()> {
    bed!();
    // Each replica claims to be idle in reply to hinted probes. The only other probes are those of discovery, from
    // which the filter learns names.
    let fleet = stand_ins(3, |addr| with_load(report(0, 100, addr)), |_| Reply::ok())?;
    let settings = json!({"hint": {"header": "x-session"}, "piggyback": false, "idle_probe_interval_ms": 0,
        "budget": "fixed", "r_probe": 0, "verified_probes": false});
    let envoy = start(&addrs(&fleet), settings)?;
    assert_all_ok(&envoy.client().burst(30, 2, |_| Request::get("/").header("x-session", "s")));
    let hinted = counted(&envoy, "all probes", |now| now.probes("used") >= 90);
    assert_eq!((hinted.picks("sync"), hinted.other("prequal_pool_occupancy")), (30, 0), "{hinted:#?}");
    assert_all_ok(&envoy.client().burst(5, 1, |_| Request::get("/")));
    counted(&envoy, "a pool of three", |now| now.other("prequal_pool_occupancy") == 3);
    assert!(fleet[0].seen().iter().any(|seen| seen.path == PROBE_PATH));
    Ok(())
}
