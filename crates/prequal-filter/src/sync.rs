//! Synchronous mode: requests that wait for their own probes (`docs/design/adr/0006-sync-mode.md`).
//!
//! A stream leaves an [`Ask`] for the root, and wakes the root. If the root begins a wait, the stream pauses. The root
//! owns the probes and the waits. When a wait is over, the root places the request (chooses its replica) and resumes
//! it. A stream that ends first removes its wait, so a dead stream is never resumed. If the probes of a request cannot
//! be sent, no wait begins, so no request is left hanging.

use prequal_core::client::sync_mode::{Answer, Ending, Wait};
use prequal_core::shared::time::Micros;
use proxy_wasm::hostcalls;

use crate::filter::{Ask, Filter, Waiter};
use crate::metrics::WaitEnd;
use crate::probes::{Call, Probes};
use crate::steer::steer;

/// Margin by which a probe's timeout exceeds the deadline: Envoy's timers are off by up to 4 ms in either direction.
const TIMER_SLACK_MS: u64 = 10;

/// Sends the probes of a request that asks to wait. Returns true if the request waits. No wait begins if fewer than two
/// replicas are known or no probe could be sent; the stream then continues at once.
pub(crate) fn ask(probes: &mut Probes, filter: &Filter, ask: Ask) -> bool {
    let Some(cluster) = filter.clusters.get(ask.waiter.cluster) else { return false };
    let hint = ask.waiter.hint;
    let asked = cluster.balancer.borrow_mut().ask(hint, &mut *filter.rng.borrow_mut());
    let (targets, mut waiting) = asked;
    let (settings, timeout_ms) = {
        let balancer = cluster.balancer.borrow();
        (balancer.config().choice.sync, balancer.config().probe.timeout_ms)
    };
    let timeout_ms = timeout_ms.max(u64::from(settings.deadline_ms) + TIMER_SLACK_MS);
    let mut unsent = targets.len() < 2;
    if !unsent {
        for target in targets {
            let call = Call { target: Some(target), waiter: Some(ask.stream), hint, timeout_ms };
            if !probes.dispatch(ask.waiter.cluster, cluster, call) {
                unsent = waiting.ended(None).is_some();
            }
        }
    }
    if unsent {
        cluster.metrics.waited(WaitEnd::Unasked);
        return false;
    }
    let deadline = ask.began.plus(u64::from(settings.deadline_ms) * 1000);
    let wait = Wait { began: ask.began, deadline, waiting, host: ask.waiter };
    filter.waits.borrow_mut().begin(ask.stream, wait);
    true
}

/// Handles the end of a probe of a waiting request.
pub(crate) fn probe_ended(
    probes: &mut Probes,
    filter: &Filter,
    stream: u32,
    answer: Option<Answer>,
    now: Micros,
) {
    let ended = filter.waits.borrow_mut().ended(stream, answer);
    if let Some((wait, ending)) = ended {
        place(probes, filter, stream, wait, ending, now);
    }
}

/// Places the requests whose deadline has passed.
pub(crate) fn expire(probes: &mut Probes, filter: &Filter, now: Micros) {
    let expired = filter.waits.borrow_mut().expired(now);
    for (stream, wait) in expired {
        place(probes, filter, stream, wait, Ending::Deadline, now);
    }
}

/// Chooses a replica for a request that has waited, and resumes the request.
fn place(probes: &mut Probes, filter: &Filter, stream: u32, wait: Wait<Waiter>, ending: Ending, now: Micros) {
    let Waiter { cluster: index, hint, whole, placed } = wait.host;
    let Some(cluster) = filter.clusters.get(index) else { return };
    // A stream that ends removes its wait. If the host nevertheless does not know the stream, there is nothing to
    // resume.
    if hostcalls::set_effective_context(stream).is_err() {
        return;
    }
    let answers = wait.waiting.answers();
    let request = filter.begin(cluster, now, answers, whole);
    cluster.metrics.waited(WaitEnd::Decided(ending));
    cluster.metrics.sync_answers.add(answers.len() as u32);
    cluster.metrics.sync_wait.record(now.saturating_since(wait.began));
    let mut due = request.pick.probes;
    steer(filter.shim, &request);
    placed.set(Some(request));
    let _ = hostcalls::resume_http_request();
    let _ = hostcalls::set_effective_context(filter.root_id);
    if hint.is_none() {
        // Answers to probes without a hint are in the pool, so no addressed probes are needed.
        due.addressed = 0;
    }
    probes.send(filter, index, due, now);
}
