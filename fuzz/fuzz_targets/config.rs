//! The filter's configuration: any text is refused with reasons, or its clusters serve requests.
#![no_main]

use prequal_core::client::ProbeEnd;
use prequal_core::client::members::Target;
use prequal_core::client::reply::Reply;
use prequal_core::client::settings::{ClusterConfig, Shim};
use prequal_core::client::store::Memory;
use prequal_core::client::{Balancer, Class, Witness};
use prequal_core::config::Config;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::report::LoadReport;
use prequal_fuzz::{START, replica};
use rand::SeedableRng;
use rand::rngs::SmallRng;

struct Proxy(Micros, Option<Endpoint>);

impl Witness for Proxy {
    fn now(&self) -> Micros {
        self.0
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn served_by(&self) -> Option<Endpoint> {
        self.1
    }

    fn class(&self) -> Class {
        Class::Answer
    }

    fn attempts(&self) -> u64 {
        1
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let clusters = r#""clusters":[{"cluster":"a","probe_cluster":"b""#;
    let mut seeds: Vec<String> = [
        r#""rule":"predicted","burst_guard":false"#,
        r#""rule":"hcl","q_rif":0.9,"hot":"gt""#,
        r#""rule":"linear","linear_lambda":0.5"#,
        r#""rule":"c3","c3_clients":4"#,
        r#""rule":"peak_ewma""#,
        r#""rule":"zuul_choice_of_two","max_in_flight":100"#,
        r#""mode":"sync","sync_d":3,"sync_deadline_ms":20,"hint":{"header":"x-key"}"#,
        r#""pool_size":16,"max_age_ms":1000,"r_probe":3,"reuse_cap":8,"verified_probes":true"#,
        r#""endpoints":["10.0.0.1:80","[::1]:8080"],"slow_start_ms":0"#,
    ]
    .map(|settings| format!("{{{clusters},{settings}}}]}}"))
    .to_vec();
    for profile in ["default", "paper", "small", "inference"] {
        seeds.push(format!("{{\"profile\":\"{profile}\",{clusters}}}]}}"));
    }
    seeds.push(r#"{"role":"inbound","serving_port":8080,"report":"probe_only"}"#.into());
    seeds.push(r#"{"role":"inbound","endpoint":"10.0.0.1:80"}"#.into());
    seeds.push(r#"{"shim":"override_host","role":"outbound","clusters":[],"surprise":1}"#.into());
    // The shipped settings and the rest of their paragraph of YAML. Because of that rest, they are refused.
    let shipped = include_str!("../../envoy-configs/static/envoy.yaml");
    if let Some((_, rest)) = shipped.split_once("\"clusters\"") {
        seeds.push(format!("{{\"clusters\"{}", rest.split("\n\n").next().unwrap_or_default()));
    }
    seeds.into_iter().map(String::into_bytes).collect()
}

fn serve(config: ClusterConfig, shim: Shim) {
    let (mut now, mut rng) = (START, SmallRng::seed_from_u64(1));
    let mut balancer = Balancer::new(config, shim, &Memory, (), now);
    for n in 0..6 {
        let at = replica(n % 3);
        let report =
            LoadReport::parse(format!("{n};20000;{at};base=9000;knee=3")).map_err(ProbeEnd::BadReport);
        let reply = Reply { report, host: Some(at) };
        balancer.replied(now, Some(Target { replica: at, probe: at }), false, Ok(reply));
        let mut request = balancer.begin(now, &[], true, &mut rng);
        now = now.plus(40_000);
        let proxy = Proxy(now, request.pick.replica);
        balancer.response(now, &mut request, n == 2, None, &proxy);
        balancer.ended(request, true, n == 2, &proxy);
        balancer.tick(now, &mut rng);
    }
}

fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::parse(text) {
        Ok(Config::Outbound(config)) => {
            assert!(!config.clusters.is_empty(), "a filter for nothing");
            config.clusters.into_iter().take(2).for_each(|cluster| serve(cluster, config.shim));
        }
        Ok(Config::Inbound(_)) => {}
        Err(errors) => {
            assert!(!errors.0.is_empty(), "refused without a reason");
            assert!(errors.0.iter().all(|error| !error.to_string().is_empty()));
        }
    }
}

prequal_fuzz::target!(seeds, run);
