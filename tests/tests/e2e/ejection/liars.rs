//! Replicas that report false loads.

use std::net::SocketAddr;

use anyhow::Result;
use prequal_testbed::{Backend, Envoy, EnvoyConfig, Reply};

use super::{get, good, without_retries};
use crate::support::{addrs, bed, report, stand_in, stand_ins, warm, with_load};

#[test]
fn a_failing_replica_that_always_reports_zero_load_gets_few_requests() -> Result<()> {
    bed!();
    let honest =
        || stand_ins(4, |addr| with_load(report(1, 5000, addr)), |addr| with_load(report(1, 5000, addr)));
    for status in [503u16, 200] {
        let mut backends = honest()?;
        let liar = stand_in(
            |addr| with_load(format!("0;0;{addr}")),
            move |addr| Reply::status(status).header("x-prequal-load", format!("0;0;{addr};fail=1000")),
        )?;
        backends.insert(0, liar);
        let envoy = Envoy::start(without_retries(&addrs(&backends))?)?;
        warm(&envoy, 5);
        let client = envoy.client();
        get(&client, 200);
        let before = backends[0].served();
        let answers = get(&client, 1000);
        let got = backends[0].served() - before;
        assert!(got < 100, "status {status}: {got} of 1000, probes included");
        assert!(good(&answers) >= 985, "{}", good(&answers));
    }
    Ok(())
}

#[test]
fn a_replica_that_reports_huge_values_starves_only_itself() -> Result<()> {
    bed!();
    let mut backends =
        stand_ins(3, |addr| with_load(report(1, 5000, addr)), |addr| with_load(report(1, 5000, addr)))?;
    let huge = |addr: SocketAddr| with_load(format!("1000000;3600000000;{addr};fail=1000;up=4294967295"));
    backends.push(stand_in(huge, huge)?);
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&backends))?)?;
    warm(&envoy, 4);
    let before: Vec<u64> = backends.iter().map(Backend::served).collect();
    assert_eq!(good(&get(&envoy.client(), 600)), 600);
    let served: Vec<u64> = backends.iter().zip(before).map(|(b, before)| b.served() - before).collect();
    assert!(served.iter().take(3).all(|count| *count > 100), "{served:?}");
    Ok(())
}
