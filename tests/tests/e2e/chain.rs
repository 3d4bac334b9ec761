//! The shipped configuration without the wasm filter: the effect of a steering header that another filter writes, and
//! of the filters and routes that keep clients out. The other files cover the wasm filter's behaviour.

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prequal_testbed::{
    Backend, Envoy, EnvoyConfig, FILTER_NAME, Reply, Request, assert_no_prequal_headers, bed,
};
use serde_json::json;

/// Replaces the wasm filter with one of Envoy's own, which writes `value` into every request's steering header.
fn steer_to(config: EnvoyConfig, value: &str) -> EnvoyConfig {
    let steer = json!({
        "name": "steer",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [{"append": {
                "header": {"key": "x-prequal-dest", "value": value},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }}]},
        },
    });
    config.edit(|config| {
        config.insert_before(FILTER_NAME, steer);
        config.remove_filter(FILTER_NAME);
    })
}

#[test]
fn the_chosen_replica_gets_the_request_without_the_header() -> Result<()> {
    bed!();
    let backends = (0..3)
        .map(|_| Backend::start(Reply::ok().header("x-prequal-load", "1;2;3")))
        .collect::<Result<Vec<_>>>()?;
    let addrs = backends.iter().map(Backend::addr).collect::<Vec<_>>();
    let config = EnvoyConfig::for_replicas(&addrs)?;
    let envoy = Envoy::start(steer_to(config, &STANDARD.encode(addrs[1].to_string())))?;
    let elsewhere = STANDARD.encode(addrs[0].to_string());
    for _ in 0..9 {
        let reply = envoy.client().send(Request::get("/").header("x-prequal-dest", &elsewhere))?;
        assert_eq!(reply.status, 200);
        assert_no_prequal_headers(&reply.headers);
    }
    assert_eq!(backends.iter().map(Backend::served).collect::<Vec<_>>(), [0, 9, 0]);
    for seen in backends[1].seen() {
        assert_no_prequal_headers(&seen.headers);
    }
    assert_eq!(envoy.stat("cluster.replicas.upstream_rq_200")?, 9);
    Ok(())
}

#[test]
fn no_spelling_of_the_probe_path_reaches_a_replica() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let config =
        EnvoyConfig::for_replicas(&[backend.addr()])?.edit(|config| config.remove_filter(FILTER_NAME));
    let envoy = Envoy::start(config)?;
    for path in [
        "/prequal",
        "/prequal/probe",
        "/prequal/probe?x=1",
        "//prequal/probe",
        "/a/../prequal/probe",
        "/./prequal//probe",
        "/%70requal/probe",
        "/prequal/%70robe",
    ] {
        let reply = envoy.client().get(path)?;
        assert_eq!(reply.status, 404, "{path}");
        assert_eq!(reply.text(), "", "{path}");
    }
    assert_eq!(backend.served(), 0);
    assert_eq!(envoy.client().get("/prequality")?.status, 200);
    assert_eq!(envoy.stat("http.ingress.rq_direct_response")?, 8);
    Ok(())
}
