//! What clients can and cannot do: they cannot steer, report or read load, and they may abort requests.

use std::time::{Duration, Instant};

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use prequal_testbed::{Body, Client, Reply, Request};

use crate::support::{
    PROBE_PATH, SERVING, assert_all_ok, assert_no_prequal_headers, bed, counted, three_fast_and_one_slow,
    uniform_fleet,
};

#[test]
fn client_headers_neither_steer_nor_report_and_prequal_headers_do_not_leak() -> Result<()> {
    bed!();
    let (fleet, envoy) = three_fast_and_one_slow()?;
    let slow = fleet.addrs()[3].to_string();
    let encoded = STANDARD.encode(&slow);
    let before = envoy.prequal(SERVING)?;
    let answers = envoy.client().burst(300, 4, move |index| {
        // Both encodings of the steering header, and a report that makes the slow replica look good.
        Request::get("/")
            .header("x-prequal-dest", if index % 2 == 0 { &encoded } else { &slow })
            .header("x-prequal-load", &format!("0;1;{slow}"))
            .header("x-prequal-rif", "0")
            .header("x-prequal-latency-us", "1")
            .header("x-prequal-hint", "1")
            .header("x-prequal-failure", "unsent")
    });
    assert_all_ok(&answers);
    for answer in answers.into_iter().flatten() {
        assert_no_prequal_headers(&answer.headers);
    }
    let served = fleet.served();
    assert!(served[3] <= 12, "{served:?}");
    for seen in fleet.iter().flat_map(|replica| replica.backend.seen()) {
        assert_no_prequal_headers(&seen.headers);
    }
    let after = envoy.prequal(SERVING)?;
    assert!(after.steered() - before.steered() >= 290, "{after:#?}");
    assert!(
        after.reports("used") > before.reports("used"),
        "the agents' own reports still count: {after:#?}"
    );
    Ok(())
}

#[test]
fn the_probe_path_reveals_nothing_to_a_client() -> Result<()> {
    bed!();
    let (_fleet, envoy) = uniform_fleet(2, &Reply::ok())?;
    let before = envoy.prequal(SERVING)?;
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        for request in [
            Request::get(PROBE_PATH),
            Request::get(PROBE_PATH).header("accept", "application/json"),
            Request::post(PROBE_PATH, "x"),
            Request::get("//prequal//probe"),
        ] {
            let reply = client.send(request)?;
            assert_eq!(reply.status, 404);
            assert_eq!(reply.text(), "");
            assert_no_prequal_headers(&reply.headers);
            assert_no_prequal_headers(&reply.trailers);
        }
    }
    assert_eq!(envoy.stat("http.ingress.rq_direct_response")?, 8);
    // Local replies from Envoy are not picks. But with one configured cluster, the filter assumes that every request
    // goes to it, until one turns out to have gone elsewhere. That one may count as a pick.
    let after = envoy.prequal(SERVING)?;
    assert!(after.steered() + after.picks("fallback") <= before.steered() + before.picks("fallback") + 1);
    Ok(())
}

#[test]
fn a_client_that_gives_up_leaves_no_request_in_flight() -> Result<()> {
    bed!();
    let (fleet, envoy) = uniform_fleet(3, &Reply::ok())?;
    let before = envoy.prequal(SERVING)?;
    for replica in fleet.iter() {
        replica.backend.set(Reply::ok().delay(Duration::from_secs(20)));
    }
    let served = || fleet.served().iter().sum::<u64>();
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        for _ in 0..5 {
            let before = served();
            assert!(client.abandon_when(Request::get("/"), || served() > before));
        }
    }
    // The same in the middle of the response.
    let chunk = Bytes::from_static(b"x");
    for replica in fleet.iter() {
        let body = Body::Stream { chunk: chunk.clone(), count: 1000, gap: Duration::from_millis(20) };
        replica.backend.set(Reply::ok().body(body));
    }
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        let (before, start) = (served(), Instant::now());
        let begun = || served() > before && start.elapsed() > Duration::from_millis(200);
        assert!(client.abandon_when(Request::get("/"), begun));
    }
    fleet.assert_idle();
    let aborts = before.outcomes("client_abort") + 12;
    let after = counted(&envoy, "twelve ends", |now| now.outcomes("client_abort") == aborts);
    assert_eq!(after.outcomes("upstream_failure"), before.outcomes("upstream_failure"), "{after:#?}");
    assert_eq!(envoy.stat("http.ingress.downstream_rq_active")?, 0);
    Ok(())
}
