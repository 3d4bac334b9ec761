//! Tests of the module in a fake Envoy.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prequal_core::wire::report::{HEADER_DEST, HEADER_LOAD};
use proxy_wasm::types::Action;

use fake::*;

mod fake;

/// Starts a worker that knows three replicas, with additional settings.
fn start_with(settings: &str) {
    let endpoints = r#"["10.0.0.1:80","10.0.0.2:80","10.0.0.3:80"]"#;
    let cluster =
        format!(r#"{{"cluster":"service","probe_cluster":"probes","endpoints":{endpoints}{settings}}}"#);
    assert!(start(&format!(r#"{{"clusters":[{cluster}]}}"#)), "{:?}", log());
}

fn outcome(class: &str) -> i64 {
    metric(&format!("prequal_outcomes_total.cluster=service.class={class}"))
}

fn probes(result: &str) -> i64 {
    metric(&format!("prequal_probes_total.cluster=service.result={result}"))
}

/// Sends a request to the cluster.
fn get(id: u32) -> Stream {
    set_property(id, "xds.cluster_name", "service");
    let (stream, action) = Stream::begin(id, &[(":path", "/")]);
    assert!(action == Action::Continue);
    stream
}

/// Returns the replica that the request is steered to.
fn dest(stream: &Stream) -> Option<String> {
    let value = stream.request_header(HEADER_DEST)?;
    Some(String::from_utf8(STANDARD.decode(value).unwrap()).unwrap())
}

/// Sends requests until replicas have reported their load.
fn warm() {
    for id in 1000..1020 {
        get(id).end();
        // The rounds together outlast the period for which the fleet counts as new.
        pass(200_000);
        for call in calls() {
            if call.header(HEADER_DEST).is_some() {
                call.answer(0, 10_000);
            } else {
                call.reply(&[(":status", "504")]);
            }
        }
    }
    tick();
    assert!(metric("prequal_pool_occupancy") >= 2);
    log();
}

/// Makes the chosen replica answer a request successfully.
fn answer(stream: &Stream) {
    let replica = dest(stream).unwrap();
    stream.headers(&[(":status", "200"), (HEADER_LOAD, &format!("1;10000;{replica}"))], false);
    stream.body(true);
}

#[test]
fn a_request_costs_one_write_one_read_of_headers_and_no_property() {
    start_with("");
    warm();
    for id in [1, 2] {
        // The first transaction after a tick checks whether another worker has written.
        let stream = get(id);
        answer(&stream);
        stream.end();
    }
    calls();
    // A request for which a probe is due costs more.
    let stream = (10..100).find_map(|id| {
        log();
        let stream = get(id);
        if calls().is_empty() {
            return Some(stream);
        }
        stream.end();
        None
    });
    let stream = stream.unwrap();
    assert_eq!(log(), ["time", "write pool", "set request x-prequal-dest"]);
    answer(&stream);
    assert_eq!(log(), ["all response", "time"]);
    stream.end();
    assert_eq!(log(), [""; 0]);
    assert_eq!(outcome("answer"), 3, "counts reach Envoy at the tick");
    // If requests are far apart, the report is written at once: other workers must not wait for the next request.
    pass(5_000);
    let stream = get(5);
    log();
    answer(&stream);
    assert_eq!(log(), ["all response", "time", "read pool", "write pool"]);
    stream.end();
    // Another worker writes: the guessed version is refused, and the value is read.
    touch("pool");
    log();
    get(4).end();
    assert_eq!(log()[1..4], ["write pool", "read pool", "write pool"]);
}

#[test]
fn an_idle_cluster_soon_sends_no_probes_and_reads_no_shared_data() {
    start_with("");
    let ticks = |times: usize| {
        (0..times).for_each(|_| {
            pass(250_000);
            tick();
            for call in calls().iter().filter(|call| call.header(HEADER_DEST).is_some()) {
                call.answer(0, 10_000);
            }
        });
        log().into_iter().filter(|entry| !matches!(&**entry, "time" | "tick in 250 ms")).collect::<Vec<_>>()
    };
    log();
    ticks(100);
    let sent = probes("sent");
    assert!((12..=24).contains(&sent), "{sent}");
    assert_eq!(ticks(100), Vec::<String>::new());
    assert_eq!((probes("sent"), metric("prequal_pool_occupancy")), (sent, 0));
    // One request makes the cluster active again.
    get(1).end();
    assert!(!ticks(10).is_empty() && probes("sent") > sent);
}

#[test]
fn a_steering_header_from_a_client_is_removed() {
    start_with("");
    let (stream, _) = Stream::begin(1, &[(HEADER_DEST, "evil")]);
    assert_eq!(stream.request_header(HEADER_DEST), None, "no replica is known yet, so none is chosen");
    stream.end();
    assert!(log().contains(&"remove request x-prequal-dest".into()));
}

#[test]
fn the_headers_of_a_request_without_a_choice_are_not_changed() {
    start_with("");
    let stream = get(1);
    assert_eq!(dest(&stream), None, "no replica is known yet");
    let changes = log().into_iter().filter(|call| call.starts_with("set ") || call.starts_with("remove "));
    assert_eq!(changes.collect::<Vec<_>>(), [""; 0]);
    stream.end();
}

#[test]
fn replies_to_probes_count_after_the_request_has_ended() {
    start_with("");
    let stream = get(1);
    let sent = calls();
    assert!(!sent.is_empty());
    stream.end();
    for call in &sent {
        match call.header(HEADER_DEST) {
            Some(_) => call.answer(0, 5000),
            None => call.reply(&[(":status", "504")]),
        }
    }
    assert_eq!(probes("sent"), sent.len() as i64);
    assert_eq!(probes("used") + probes("timeout"), probes("sent"));
}

#[test]
fn invalid_replies_to_probes_are_counted_and_not_used() {
    start_with("");
    let replies: &[(&[(&str, &str)], &str)] = &[
        // A reply without headers was cut off. The SDK panics if it is asked for a header of such a reply.
        (&[], "refused"),
        (&[(":status", "503")], "refused"),
        (&[(":status", "200")], "rejected_no_report"),
        (&[(":status", "404"), (HEADER_LOAD, "0;1;10.0.0.1:80")], "rejected_status"),
        (&[(":status", "200"), (HEADER_LOAD, "x;1;10.0.0.1:80")], "rejected_bad_rif"),
        (&[(":status", "200"), (HEADER_LOAD, "0;1;10.9.9.9:80")], "rejected_wrong_endpoint"),
        (
            &[(":status", "200"), (HEADER_LOAD, "0;1;10.0.0.1:80"), (HEADER_LOAD, "9;1;10.0.0.1:80")],
            "rejected_duplicate",
        ),
    ];
    for (id, (reply, result)) in (1..).zip(replies) {
        let mut sent = Vec::new();
        while !sent.iter().any(|call: &Call| call.header(HEADER_DEST).is_some()) {
            get(id).end();
            pass(300_000);
            sent = calls();
        }
        let before = probes(result);
        sent.iter().find(|call| call.header(HEADER_DEST).is_some()).unwrap().reply(reply);
        assert_eq!(probes(result), before + 1, "{result}");
    }
    assert_eq!(probes("used"), 0);
}

/// Makes Envoy send the request to a replica other than `chosen`, and returns that replica's name.
fn served_by_other(stream: &Stream, chosen: &str) -> &'static str {
    let other = if chosen == "10.0.0.1:80" { "10.0.0.2:80" } else { "10.0.0.1:80" };
    stream.property("upstream.address", other);
    other
}

#[test]
fn a_replica_that_envoy_did_not_use_is_not_chosen_for_a_second() {
    start_with("");
    warm();
    let stream = get(1);
    let chosen = dest(&stream).unwrap();
    let other = served_by_other(&stream, &chosen);
    stream.property("response.code_details", "via_upstream");
    stream.headers(&[(":status", "200"), (HEADER_LOAD, &format!("1;10000;{other}"))], true);
    stream.end();
    assert_eq!(metric("prequal_diverted_total"), 1);
    assert_eq!((outcome("answer"), metric("prequal_reports_total.cluster=service.result=used")), (1, 1));
    // Envoy did not use the chosen replica, so the filter does not choose it again for one second.
    for id in 2..20 {
        let stream = get(id);
        assert_ne!(dest(&stream), Some(chosen.clone()));
        stream.end();
    }
}

#[test]
fn an_error_in_trailers_is_a_failure_only_for_grpc() {
    start_with("");
    warm();
    for (id, content_type, failures) in [(1, "text/plain", 0), (2, "application/grpc", 1)] {
        let before = outcome("upstream_failure");
        let stream = get(id);
        let replica = dest(&stream).unwrap();
        let load = format!("1;10000;{replica}");
        stream.headers(&[(":status", "200"), ("content-type", content_type), (HEADER_LOAD, &load)], false);
        stream.trailers(&[("grpc-status", "14")]);
        stream.end();
        assert_eq!(outcome("upstream_failure") - before, failures, "{content_type}");
    }
}

#[test]
fn an_idle_timeout_is_the_replicas_failure_only_between_the_whole_request_and_the_response() {
    start_with("");
    set_property(1, "xds.cluster_name", "service");
    for (uploaded, begun, class) in
        [(true, false, "upstream_failure"), (false, false, "local"), (true, true, "local")]
    {
        let before = outcome(class);
        let (stream, _) = Stream::upload(1, &[], false);
        stream.property("upstream.address", "10.0.0.1:80");
        stream.property("response.code_details", "stream_idle_timeout");
        if uploaded {
            stream.uploaded();
        }
        if begun {
            stream.headers(&[(":status", "200")], false);
        }
        stream.end();
        assert_eq!(outcome(class), before + 1, "{uploaded} {begun}");
    }
}

#[test]
fn a_failure_rescued_by_a_retry_counts_once_at_the_response_headers() {
    start_with("");
    warm();
    let stream = get(1);
    let chosen = dest(&stream).unwrap();
    let other = served_by_other(&stream, &chosen);
    set_number(1, "upstream.request_attempt_count", 2);
    stream.headers(&[(":status", "200"), (HEADER_LOAD, &format!("1;10000;{other}"))], false);
    let next = get(2);
    assert_ne!(dest(&next), Some(chosen), "not chosen, although the response has not ended");
    stream.body(true);
    log();
    stream.property("response.code_details", "via_upstream");
    stream.end();
    assert!(!log().contains(&"property upstream.address".into()), "the property is read once");
    next.end();
    assert_eq!((metric("prequal_diverted_total"), outcome("answer")), (1, 1));
}

#[test]
fn a_request_to_another_cluster_is_not_counted_and_enables_the_lookup() {
    start_with("");
    warm();
    let classes = || ["answer", "upstream_failure", "client_abort", "local"].map(outcome);
    let before = classes();
    let stream = get(1);
    stream.property("xds.cluster_name", "elsewhere");
    stream.property("upstream.address", "10.9.9.9:80");
    stream.headers(&[(":status", "200"), (HEADER_LOAD, "1;10000;10.9.9.9:80")], true);
    stream.end();
    assert_eq!(classes(), before);
    tick();
    assert_eq!((metric("prequal_members"), metric("prequal_diverted_total")), (3, 0));
    set_property(2, "xds.cluster_name", "elsewhere");
    let (stream, _) = Stream::begin(2, &[(HEADER_DEST, "evil")]);
    assert_eq!(stream.request_header(HEADER_DEST), None, "looked up before it is steered");
    assert!(dest(&get(3)).is_some());
}

#[test]
fn a_request_whose_route_changes_after_the_lookup_is_not_counted() {
    start_with("");
    warm();
    set_property(1, "xds.cluster_name", "elsewhere");
    Stream::begin(1, &[]).0.headers(&[(":status", "200")], true);
    let classes = || ["answer", "upstream_failure", "client_abort", "local"].map(outcome);
    let before = classes();
    for id in 2..4 {
        let stream = get(id);
        assert!(log().contains(&"property xds.cluster_name".into()), "the lookup is on");
        stream.property("xds.cluster_name", "elsewhere");
        stream.property("upstream.address", "10.9.9.9:80");
        stream.headers(&[(":status", "200"), (HEADER_LOAD, "1;10000;10.9.9.9:80")], true);
        stream.end();
    }
    assert_eq!(classes(), before);
    assert_eq!((metric("prequal_members"), metric("prequal_diverted_total")), (3, 0));
}

#[test]
fn requests_to_another_cluster_with_the_same_replicas_enable_the_lookup() {
    start_with("");
    warm();
    let steered = (1..=20).filter(|id| {
        set_property(*id, "xds.cluster_name", "elsewhere");
        let (stream, _) = Stream::begin(*id, &[]);
        let chosen = stream.request_header(HEADER_DEST);
        if let Some(chosen) = &chosen {
            stream.headers(&[(":status", "200"), (HEADER_LOAD, &format!("1;10000;{chosen}"))], true);
        }
        stream.end();
        chosen.is_some()
    });
    assert!((1..=16).contains(&steered.count()));
    assert!(dest(&get(30)).is_some(), "the configured cluster is still steered");
}

const SYNC: &str = r#","mode":"sync","sync_d":3,"sync_deadline_ms":50"#;

#[test]
fn a_request_waits_for_its_probes_and_resumes_once() {
    start_with(SYNC);
    let (stream, action) = Stream::begin(7, &[(":path", "/")]);
    assert!(action == Action::Pause);
    let sent = calls();
    assert_eq!((sent.len(), sent[0].timeout_ms), (3, 60));
    log();
    sent[0].answer(5, 90_000);
    let said = log();
    assert!(!said.iter().any(|call| call.starts_with("resume")), "one answer leaves nothing to compare");
    assert!(!said.contains(&"write pool".into()), "the request's pick will write");
    sent[1].answer(0, 1000);
    let said = log();
    let order = ["as 7", "set request x-prequal-dest", "resume 7", "as 1"];
    let placing = said.iter().position(|said| said == order[0]).unwrap();
    let placing = said[placing..].iter().filter(|said| order.contains(&said.as_str()));
    assert!(placing.eq(order), "{said:?}");
    assert_eq!(dest(&stream).as_deref(), sent[1].header(HEADER_DEST));
    pass(5_000);
    sent[2].answer(0, 1);
    let said = log();
    assert!(!said.iter().any(|call| call.starts_with("resume")), "already resumed");
    assert!(said.contains(&"write pool".into()), "no request waits for this reply any longer");
    answer(&stream);
    stream.end();
    assert_eq!((outcome("answer"), metric("prequal_sync_waits_total.cluster=service.end=enough")), (1, 1));
}

#[test]
fn the_replies_of_a_long_wait_are_written_at_once() {
    start_with(r#","mode":"sync","sync_d":3,"sync_deadline_ms":500"#);
    let (stream, action) = Stream::begin(7, &[(":path", "/")]);
    assert!(action == Action::Pause);
    let sent = calls();
    log();
    sent[0].answer(5, 90_000);
    let said = log();
    assert!(!said.iter().any(|call| call.starts_with("resume")), "{said:?}");
    assert!(said.contains(&"write pool".into()), "{said:?}");
    stream.end();
}

#[test]
fn other_workers_learn_of_a_reply_at_once() {
    start_with(r#","budget":"fixed","r_probe":3"#);
    warm();
    let stream = get(7);
    // The next pick is not imminent.
    pass(5_000);
    let sent = calls();
    let call = sent.iter().find(|call| call.header(HEADER_DEST).is_some()).unwrap();
    log();
    call.answer(0, 10_000);
    let said = log();
    assert!(said.contains(&"write pool".into()), "{said:?}");
    stream.end();
}

#[test]
fn a_request_that_ends_while_it_waits_is_never_resumed() {
    start_with(SYNC);
    let (stream, _) = Stream::begin(7, &[]);
    let sent = calls();
    stream.end();
    log();
    sent.iter().for_each(|call| call.answer(0, 1000));
    pass(1_000_000);
    tick();
    assert!(!log().iter().any(|call| call.starts_with("resume")));
    assert_eq!(metric("prequal_sync_waits_total.cluster=service.end=aborted"), 1);
}

#[test]
fn a_tick_ends_a_wait_at_its_deadline() {
    start_with(SYNC);
    let (stream, _) = Stream::begin(7, &[]);
    assert!(log().contains(&"tick in 50 ms".into()));
    pass(49_000);
    tick();
    assert!(!log().contains(&"resume 7".into()));
    pass(1000);
    tick();
    assert!(log().contains(&"resume 7".into()));
    stream.end();
    assert_eq!(metric("prequal_sync_waits_total.cluster=service.end=deadline"), 1);
}

#[test]
fn a_request_whose_probes_cannot_be_sent_does_not_wait() {
    start_with(SYNC);
    refuse_calls(true);
    let (stream, action) = Stream::begin(7, &[]);
    assert!(action == Action::Continue);
    stream.end();
    assert_eq!(metric("prequal_sync_waits_total.cluster=service.end=unasked"), 1);
    assert_eq!(probes("sent"), 0);
}

#[test]
fn an_invalid_configuration_is_refused_with_the_reasons() {
    assert!(!start(r#"{"clusters":[{"cluster":"a"}],"sync_d":99}"#));
    let said = log().concat();
    assert!(said.contains("probe_cluster") && said.contains("sync_d"), "{said}");
}

/// Answer of a replica without an agent: its headers and its trailers.
type Answer<'a> = (&'a [(&'a str, &'a str)], &'a [(&'a str, &'a str)]);

#[test]
fn orca_reports_are_read_in_every_format_and_in_trailers() {
    const TEXT: &str = "endpoint-load-metrics";
    const BIN: &str = "endpoint-load-metrics-bin";
    const LESS: (&str, &str) = (TEXT, "TEXT cpu_utilization=0.125");
    // cpu_utilization 0.25.
    const QUARTER: &str = "CQAAAAAAANA/";
    let status = (":status", "200");
    let answers: [(Answer<'_>, [i64; 2]); 11] = [
        ((&[status, (TEXT, "TEXT cpu_utilization=0.25")], &[]), [1, 0]),
        ((&[status, (TEXT, "BIN CQAAAAAAANA/")], &[]), [1, 0]),
        ((&[status, (BIN, QUARTER)], &[]), [1, 0]),
        ((&[status], &[("grpc-status", "0"), (BIN, QUARTER)]), [1, 0]),
        ((&[status], &[(TEXT, "TEXT cpu_utilization=0.25")]), [1, 0]),
        ((&[status], &[("grpc-status", "0")]), [0, 0]),
        ((&[status], &[(BIN, "CQ")]), [0, 1]),
        ((&[status, LESS, (BIN, QUARTER)], &[]), [0, 1]),
        ((&[status, (BIN, QUARTER)], &[LESS, LESS]), [1, 0]),
        ((&[status], &[LESS, LESS]), [0, 1]),
        ((&[status, (TEXT, "TEXT")], &[(BIN, QUARTER)]), [1, 1]),
    ];
    start_with(r#","rule":"zuul_choice_of_two","orca_utilization":"utilization""#);
    let counted = || {
        pass(250_000);
        tick();
        ["used", "bad_orca"]
            .map(|result| metric(&format!("prequal_reports_total.cluster=service.result={result}")))
    };
    for (id, ((headers, trailers), [used, bad])) in (1..).zip(answers) {
        let before = counted();
        let stream = get(id);
        stream.headers(headers, false);
        stream.body(false);
        stream.trailers(trailers);
        stream.end();
        let after = counted();
        assert_eq!([after[0] - before[0], after[1] - before[1]], [used, bad], "{headers:?}, {trailers:?}");
    }
}

/// Returns how many times the filter reads the trailers of a response.
fn reads_of_trailers(settings: &str) -> usize {
    start_with(settings);
    let stream = get(1);
    stream.headers(&[(":status", "200")], false);
    log();
    stream.trailers(&[("endpoint-load-metrics", "TEXT cpu_utilization=0.5")]);
    let reads = log().iter().filter(|entry| entry.starts_with("all ")).count();
    stream.end();
    reads
}

#[test]
fn trailers_are_not_read_by_default() {
    assert_eq!(reads_of_trailers(r#","rule":"zuul_choice_of_two""#), 0);
}

#[test]
fn trailers_are_read_once_if_they_may_contain_utilisation() {
    let settings = r#","rule":"zuul_choice_of_two","orca_utilization":"utilization""#;
    assert_eq!(reads_of_trailers(settings), 1);
}

#[test]
fn the_inbound_role_counts_grpc_calls_with_several_messages_as_streams() {
    const OK: &[u8] = b"\0\0\0\0\x02ok";
    const TRAILERS: &[u8] = b"\x80\0\0\0\x0fgrpc-status:0\r\n";
    let both = |one: &[u8], other: &[u8]| [one, other].concat();
    assert!(start(r#"{"role":"inbound"}"#), "{:?}", log());
    let calls: [(&str, &[&[u8]], &str); 8] = [
        ("application/grpc", &[OK], "success"),
        ("application/grpc", &[OK, OK], "streaming"),
        ("application/grpc", &[&both(OK, OK)], "streaming"),
        // Over HTTP/1.1, gRPC-Web's trailers are the last part of the body.
        ("application/grpc-web+proto", &[&both(OK, TRAILERS)], "success"),
        ("application/grpc-web+proto", &[OK, TRAILERS], "success"),
        ("application/grpc-web+proto", &[OK, &TRAILERS[..1], &TRAILERS[1..]], "success"),
        ("application/grpc-web+proto", &[&both(OK, OK), TRAILERS], "streaming"),
        // The same in base64.
        ("application/grpc-web-text+proto", &[b"AAAAAAJvaw==", b"gAAAAA9ncnBjLXN0YXR1czowDQo="], "success"),
    ];
    for (id, (content_type, parts, outcome)) in (2..).zip(calls) {
        let ended =
            || metric(&format!("prequal_inbound_requests_total.endpoint=10_0_0_1_80.result={outcome}"));
        let before = ended();
        set_property(id, "destination.address", "10.0.0.1:80");
        let (stream, _) = Stream::begin(id, &[(":path", "/")]);
        stream.property("response.code_details", "via_upstream");
        stream.headers(&[(":status", "200"), ("content-type", content_type)], false);
        parts.iter().for_each(|part| stream.data(part, false));
        stream.data(b"", true);
        stream.end();
        assert_eq!(ended(), before + 1, "{content_type} {parts:?}");
    }
}
