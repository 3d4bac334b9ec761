//! Replicas without an agent beside others that report.

use super::*;
use crate::client::balancer::agentless::Chooser;
use crate::client::pool::Branch;

/// A balancer that knows replicas 0 to `n` - 1 by their reports, and the next `agentless` replicas by responses without
/// a report.
fn mixed(n: u16, agentless: u16) -> Balancer<Memory, Counts> {
    let mut balancer = balancer(config(Profile::Default, n), &Memory);
    probe_all(&mut balancer, n, 0);
    for bare in n..n + agentless {
        placed_by_proxy(&mut balancer, 1, bare);
    }
    balancer
}

/// Handles a response without a report to a request that the proxy's own policy placed.
fn placed_by_proxy(balancer: &mut Balancer<Memory, Counts>, at: u64, n: u16) {
    let proxy = Proxy(at, Some(replica(n)), Class::Answer, 1);
    let mut request = Request::default();
    balancer.response(ms(at), &mut request, false, None, &proxy);
    balancer.ended(request, true, false, &proxy);
}

/// Sends a request, which its replica answers at once. The answer has a report if the replica's number is below
/// `reporting`.
fn send(balancer: &mut Balancer<Memory, Counts>, at: u64, reporting: u16, rng: &mut SmallRng) -> Option<u16> {
    let mut request = balancer.begin(ms(at), &[], true, rng);
    let Some(chosen) = request.pick.replica.map(number) else {
        balancer.ended(request, true, false, &Proxy(at, None, Class::Answer, 1));
        return None;
    };
    let proxy = Proxy(at, Some(replica(chosen)), Class::Answer, 1);
    let report = (chosen < reporting).then(|| Ok(report(chosen, 1, 10)));
    balancer.response(ms(at), &mut request, false, report, &proxy);
    balancer.ended(request, true, false, &proxy);
    Some(chosen)
}

#[test]
fn replicas_without_an_agent_get_their_share() {
    let (mut balancer, mut rng) = (mixed(6, 2), rng());
    let mut hits = [0; 8];
    for at in 2..4002 {
        let n = send(&mut balancer, at, 6, &mut rng).expect("steered");
        hits[usize::from(n)] += 1;
    }
    assert!(hits[6..].iter().all(|hits| (420..580).contains(hits)), "{hits:?}");
    assert_eq!(balancer.counters().of(Count::Pick(Branch::Agentless)), hits[6] + hits[7]);
    assert!(hits[..6].iter().all(|hits| *hits > 100), "the others keep theirs: {hits:?}");
}

#[test]
fn among_them_the_one_with_the_fewest_requests_in_flight_is_chosen() {
    let (mut balancer, mut rng) = (mixed(6, 3), rng());
    let mut held = Vec::new();
    while held.len() < 9 {
        let request = balancer.begin(ms(2), &[], true, &mut rng);
        if request.pick.branch == Branch::Agentless {
            held.push(request);
        }
    }
    for n in 6..9 {
        assert_eq!(held.iter().filter(|request| request.pick.replica == Some(replica(n))).count(), 3);
    }
    let proxy = Proxy(3, Some(replica(7)), Class::Answer, 1);
    for request in held.extract_if(.., |request| request.pick.replica == Some(replica(7))) {
        balancer.ended(request, true, false, &proxy);
    }
    let members = balancer.membership.members().clone();
    let chosen: Vec<Chooser> =
        (0..100).map(|_| balancer.agentless.chooser(&members, false, ms(4), |_| true, &mut rng)).collect();
    assert!(chosen.contains(&Chooser::Agentless(replica(7))));
    let only = [Chooser::Pool, Chooser::Agentless(replica(7))];
    assert!(chosen.iter().all(|chooser| only.contains(chooser)), "{chosen:?}");
    let ejected = (0..100)
        .map(|_| balancer.agentless.chooser(&members, false, ms(4), |other| other != replica(7), &mut rng));
    assert!(!ejected.collect::<Vec<_>>().contains(&Chooser::Agentless(replica(7))));
}

#[test]
fn a_majority_without_agents_leaves_all_requests_to_the_proxy() {
    let (mut balancer, mut rng) = (mixed(3, 4), rng());
    assert!((2..200).all(|at| send(&mut balancer, at, 3, &mut rng).is_none()));
    // One replica gets an agent. Now at least half of the fleet reports.
    let first_report = report(3, 0, 10);
    let proxy = Proxy(200, Some(replica(3)), Class::Answer, 1);
    let mut request = Request::default();
    balancer.response(ms(200), &mut request, false, Some(Ok(first_report)), &proxy);
    assert!((201..300).all(|at| send(&mut balancer, at, 4, &mut rng).is_some()));
    assert_eq!(balancer.membership.members().agentless(), 3);
}

#[test]
fn a_replica_that_has_reported_is_not_agentless() {
    let mut balancer = mixed(4, 0);
    (0..4).for_each(|n| placed_by_proxy(&mut balancer, 1, n));
    assert_eq!(balancer.membership.members().agentless(), 0, "an agent may report only on replies to probes");
    // A request that failed, or was steered, is no evidence.
    let proxy = Proxy(2, Some(replica(9)), Class::Answer, 1);
    balancer.response(ms(2), &mut Request::default(), true, None, &proxy);
    assert_eq!(balancer.membership.members().agentless(), 0);
}

#[test]
fn an_agentless_replica_that_left_is_forgotten() {
    let (mut balancer, mut rng) = (mixed(4, 1), rng());
    let mut request = (2..200)
        .map(|at| balancer.begin(ms(at), &[], true, &mut rng))
        .find(|request| request.pick.branch == Branch::Agentless)
        .unwrap();
    let proxy = Proxy(200, Some(replica(1)), Class::Answer, 1);
    balancer.response(ms(200), &mut request, false, None, &proxy);
    assert_eq!(balancer.membership.members().agentless(), 0);
}

/// Number of requests out of 1000, a millisecond apart, that the proxy's own policy placed.
fn unsteered(balancer: &mut Balancer<Memory, Counts>, from: u64, rng: &mut SmallRng) -> usize {
    probe_all(balancer, 4, from);
    (from..from + 1000).filter(|at| send(balancer, *at, 4, rng).is_none()).count()
}

#[test]
fn unanswered_probes_leave_ever_fewer_requests_to_the_proxy() {
    let (mut balancer, mut rng) = (mixed(4, 0), rng());
    assert_eq!(unsteered(&mut balancer, 10_000, &mut rng), 0);
    let mut explored = Vec::new();
    for second in 11..75 {
        balancer.replied(ms(second * 1000), None, false, Err(ProbeEnd::Timeout));
        if unsteered(&mut balancer, second * 1000, &mut rng) > 0 {
            explored.push(second);
        }
    }
    assert_eq!(explored, [11, 12, 13, 15, 19, 27, 43]);
    assert_eq!(unsteered(&mut balancer, 103_000, &mut rng), 1, "one was still due");
    assert_eq!(unsteered(&mut balancer, 300_000, &mut rng), 0, "no probe has failed since");
}

/// Whether an unanswered probe leaves one of the next requests to the proxy's own policy. `n` is the replica that was
/// probed; `None` for a probe without an address.
fn explores(balancer: &mut Balancer<Memory, Counts>, at: u64, n: Option<u16>, rng: &mut SmallRng) -> bool {
    balancer.replied(ms(at), n.map(target), false, Err(ProbeEnd::Timeout));
    unsteered(balancer, at, rng) > 0
}

/// Returns a balancer with a replica that has left a request unanswered for 5 s, until 5005 ms, and the replica's
/// number.
fn silent(end: Class, rng: &mut SmallRng) -> (Balancer<Memory, Counts>, u16) {
    let mut balancer = mixed(4, 0);
    let mut held = balancer.begin(ms(5), &[], true, rng);
    let hung = held.pick.replica.unwrap();
    let proxy = Proxy(5005, Some(hung), end, 1);
    if end == Class::UpstreamFailure {
        // The proxy's own 504.
        balancer.response(ms(5005), &mut held, true, None, &proxy);
    }
    balancer.ended(held, true, false, &proxy);
    (balancer, number(hung))
}

#[test]
fn unanswered_probes_of_a_replica_that_answers_no_requests_leave_none_to_the_proxy() {
    for end in [Class::ClientAbort, Class::UpstreamFailure] {
        let mut rng = rng();
        let (mut balancer, hung) = silent(end, &mut rng);
        assert!(!explores(&mut balancer, 10_000, Some(hung), &mut rng), "{end:?}");
        // The replica has answered requests since, so this probe is unexplained.
        assert!(explores(&mut balancer, 12_000, Some(hung), &mut rng), "{end:?}");
    }
}

#[test]
fn a_replica_that_answers_probes_does_not_explain_unanswered_ones() {
    let mut rng = rng();
    let (mut balancer, hung) = silent(Class::ClientAbort, &mut rng);
    let reply = Reply { report: Ok(report(hung, 1, 10)), host: Some(replica(hung)) };
    balancer.replied(ms(5600), Some(target(hung)), false, Ok(reply));
    assert!(explores(&mut balancer, 10_000, None, &mut rng));
}

#[test]
fn silence_does_not_explain_a_probe_that_was_answered_without_a_report() {
    let mut rng = rng();
    let (mut balancer, _) = silent(Class::ClientAbort, &mut rng);
    balancer.config.pool.verified_probes = false;
    let reply = Reply { report: Err(ProbeEnd::NoReport), host: None };
    balancer.replied(ms(10_000), None, false, Ok(reply));
    assert!(unsteered(&mut balancer, 10_000, &mut rng) > 0);
}

#[test]
fn a_response_that_its_client_ends_is_no_silence() {
    let (mut balancer, mut rng) = (mixed(4, 0), rng());
    let mut held = balancer.begin(ms(5), &[], true, &mut rng);
    let proxy = Proxy(5005, held.pick.replica, Class::ClientAbort, 1);
    balancer.response(ms(6), &mut held, false, None, &proxy);
    balancer.ended(held, false, false, &proxy);
    assert!(explores(&mut balancer, 10_000, None, &mut rng));
}

#[test]
fn no_second_request_is_left_to_the_proxy_before_the_first_is_answered() {
    for times_out in [false, true] {
        let (mut balancer, mut rng) = (mixed(4, 0), rng());
        probe_all(&mut balancer, 4, 10_000);
        balancer.replied(ms(10_000), None, false, Err(ProbeEnd::Timeout));
        let mut explorer = (10_000..11_000)
            .map(|at| balancer.begin(ms(at), &[], true, &mut rng))
            .find(|request| request.pick.replica.is_none())
            .unwrap();
        assert!(!explores(&mut balancer, 11_000, None, &mut rng));
        // It went to a replica that does not answer, which explains the silence for a minute.
        let proxy = Proxy(15_000, Some(replica(9)), Class::UpstreamFailure, 1);
        if times_out {
            balancer.response(ms(15_000), &mut explorer, true, None, &proxy);
        }
        balancer.ended(explorer, times_out, false, &proxy);
        assert!(!explores(&mut balancer, 15_000, None, &mut rng));
        assert!(!explores(&mut balancer, 40_000, Some(9), &mut rng));
        assert!(explores(&mut balancer, 45_000, Some(8), &mut rng));
        assert!(explores(&mut balancer, 75_000, None, &mut rng));
    }
}

#[test]
fn a_host_that_answers_a_probe_without_a_report_is_agentless() {
    for (verified, end, agentless) in
        [(true, ProbeEnd::NoReport, 1), (true, ProbeEnd::Status, 1), (false, ProbeEnd::Status, 0)]
    {
        let mut config = config(Profile::Default, 4);
        config.pool.verified_probes = verified;
        let mut balancer = balancer(config, &Memory);
        let reply = Reply { report: Err(end), host: Some(replica(7)) };
        balancer.replied(ms(1), None, false, Ok(reply));
        assert_eq!(balancer.membership.members().agentless(), agentless);
    }
}
