//! The admin port: `/metrics` in Prometheus text, `/healthz`, `/readyz`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header};
use prequal_core::shared::capacity::Capacity;
use prequal_core::shared::outcome::Outcome;

use crate::exposition;
use crate::load::{BACKEND_SAYS, BACKEND_STREAM_ENDS, HINTS, LATENCY_BOUNDS_US, Load};
use crate::probe::plain;
use crate::process;
use crate::ready::Checker;
use crate::traffic::Traffic;

/// State that the admin port shows.
pub(crate) struct Page {
    /// Replicas on the page. The agent's own is first.
    pub(crate) replicas: Vec<Replica>,
    pub(crate) draining: AtomicBool,
}

/// One replica on the page.
#[derive(Clone)]
pub(crate) struct Replica {
    /// Address that the replica listens on.
    pub(crate) name: String,
    pub(crate) checker: Arc<Checker>,
    pub(crate) traffic: Arc<Traffic>,
}

impl Page {
    pub(crate) async fn answer(&self, method: &Method, path: &str) -> Response<Bytes> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD only\n");
        }
        match path {
            "/healthz" | "/readyz" if self.draining.load(Ordering::Relaxed) => {
                plain(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
            }
            "/healthz" => plain(StatusCode::OK, "ok\n"),
            "/readyz" => self.readyz().await,
            "/metrics" => {
                let mut response = Response::new(self.metrics().into());
                response.headers_mut().insert(
                    header::CONTENT_TYPE,
                    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
                );
                response
            }
            _ => plain(StatusCode::NOT_FOUND, "not found\n"),
        }
    }

    /// Checks all replicas: each must be ready.
    async fn readyz(&self) -> Response<Bytes> {
        for replica in &self.replicas {
            if let Err(reason) = replica.checker.check().await {
                let which =
                    if self.replicas.len() > 1 { format!(" of {}", replica.name) } else { String::new() };
                let mut response = plain(StatusCode::SERVICE_UNAVAILABLE, "");
                *response.body_mut() = format!("backend{which}: {reason}\n").into();
                return response;
            }
        }
        plain(StatusCode::OK, "ok\n")
    }

    fn metrics(&self) -> String {
        let page = |replica: &Replica| {
            let mut text = String::with_capacity(8192);
            // Writing to a String cannot fail.
            let _ = write_metrics(&mut text, &replica.checker.load)
                .and_then(|()| replica.traffic.write(&mut text));
            (replica.name.clone(), text)
        };
        let mut text = exposition::join(self.replicas.iter().map(page).collect());
        let _ = process::write(&mut text);
        text
    }
}

fn write_metrics(out: &mut String, load: &Load) -> std::fmt::Result {
    let counters = load.counters();
    head(out, "prequal_agent_rif", "gauge", "Requests in flight.")?;
    writeln!(out, "prequal_agent_rif {}", load.rif())?;
    if let Some(us) = load.latency_us() {
        head(
            out,
            "prequal_agent_latency_median_seconds",
            "gauge",
            "Median latency at the current load, as probe replies report it; absent while unknown.",
        )?;
        writeln!(out, "prequal_agent_latency_median_seconds {}", seconds(u64::from(us)))?;
    }
    if let Some(Capacity { base_us, knee, open, steady, rse_percent }) = load.capacity() {
        let name = "prequal_agent_base_latency_seconds";
        head(
            out,
            name,
            "gauge",
            "How long a request takes while none waits; absent until a request has been served.",
        )?;
        writeln!(out, "{name} {}", seconds(base_us.into()))?;
        head(
            out,
            "prequal_agent_knee",
            "gauge",
            "Requests in flight beyond which further requests only wait; absent until a request has been served.",
        )?;
        writeln!(out, "prequal_agent_knee {knee}")?;
        let name = "prequal_agent_knee_open";
        head(
            out,
            name,
            "gauge",
            "1 while requests beyond the estimated knee do not wait, so the true knee may be higher.",
        )?;
        writeln!(out, "{name} {}", u8::from(open))?;
        let name = "prequal_agent_latency_steady";
        head(out, name, "gauge", "1 while requests that need not wait take almost the same time.")?;
        writeln!(out, "{name} {}", u8::from(steady))?;
        let name = "prequal_agent_base_latency_error_ratio";
        head(out, name, "gauge", "Relative standard error of the base latency, 0 to 2.55.")?;
        writeln!(out, "{name} {}", f64::from(rse_percent) / 100.0)?;
    }
    head(
        out,
        "prequal_agent_failing_ratio",
        "gauge",
        "Share of recent requests that the replica failed, as probe replies report it, 0 to 1.",
    )?;
    writeln!(out, "prequal_agent_failing_ratio {}", f64::from(load.failing()) / 1e3)?;
    head(
        out,
        "prequal_agent_up_seconds",
        "gauge",
        "Seconds since the backend last became reachable; 0 while it refuses connections.",
    )?;
    writeln!(out, "prequal_agent_up_seconds {}", load.up_s())?;
    head(
        out,
        "prequal_agent_backend_ready",
        "gauge",
        "1 if the backend is ready; 0 while it refuses connections or fails the check.",
    )?;
    writeln!(out, "prequal_agent_backend_ready {}", u8::from(load.is_ready()))?;
    head(out, "prequal_agent_requests_total", "counter", "Requests that ended, by how they ended.")?;
    for (class, outcome) in [
        ("success", Outcome::Success),
        ("failure", Outcome::Failure),
        ("aborted", Outcome::Aborted),
        ("streaming", Outcome::Streaming),
    ] {
        writeln!(out, "prequal_agent_requests_total{{class=\"{class}\"}} {}", counters.ended(outcome))?;
    }
    head(out, "prequal_agent_rejected_total", "counter", "Malformed requests refused with 400.")?;
    writeln!(out, "prequal_agent_rejected_total {}", counters.rejected())?;
    head(out, "prequal_agent_probes_total", "counter", "Probes answered, by port.")?;
    let [on_service, on_probe] = counters.probes();
    writeln!(out, "prequal_agent_probes_total{{port=\"service\"}} {on_service}")?;
    writeln!(out, "prequal_agent_probes_total{{port=\"probe\"}} {on_probe}")?;
    head(out, "prequal_agent_hints_total", "counter", "Query hints, by result.")?;
    for (result, seen) in HINTS {
        writeln!(out, "prequal_agent_hints_total{{result=\"{result}\"}} {}", counters.hints(seen))?;
    }
    let name = "prequal_agent_orca_reports_total";
    head(out, name, "counter", "Load reports in ORCA format, by how they were sent.")?;
    let [on_responses, out_of_band] = counters.orca_reports();
    writeln!(out, "{name}{{way=\"response\"}} {on_responses}")?;
    writeln!(out, "{name}{{way=\"stream\"}} {out_of_band}")?;
    head(out, "prequal_agent_orca_streams", "gauge", "Open streams of ORCA load reports.")?;
    writeln!(out, "prequal_agent_orca_streams {}", counters.orca_streams())?;
    let name = "prequal_agent_orca_refused_total";
    head(out, name, "counter", "Refused streams of ORCA load reports.")?;
    writeln!(out, "{name} {}", counters.orca_refused())?;
    let name = "prequal_agent_backend_reports_total";
    head(out, name, "counter", "Load reports in ORCA format from the backend, by result.")?;
    for (label, result) in BACKEND_SAYS {
        writeln!(out, "{name}{{result=\"{label}\"}} {}", counters.backend_reports(result))?;
    }
    let name = "prequal_agent_backend_streams_total";
    head(out, name, "counter", "Streams of load reports from the backend that ended, by how they ended.")?;
    for (how, end) in BACKEND_STREAM_ENDS {
        writeln!(out, "{name}{{end=\"{how}\"}} {}", counters.backend_streams(end))?;
    }
    if let Some(micro) = load.backend_utilization_micro() {
        let name = "prequal_agent_backend_utilization_ratio";
        head(out, name, "gauge", "The backend's utilisation in its last report.")?;
        writeln!(out, "{name} {}", micro as f64 / 1e6)?;
    }
    head(
        out,
        "prequal_agent_upstream_errors_total",
        "counter",
        "Failures of the backend other than a 5xx status.",
    )?;
    for (reason, count) in counters.upstream_errors() {
        writeln!(out, "prequal_agent_upstream_errors_total{{reason=\"{reason}\"}} {count}")?;
    }
    head(out, "prequal_agent_upstream_connections_total", "counter", "Connections opened to the backend.")?;
    writeln!(out, "prequal_agent_upstream_connections_total {}", counters.upstream_connections())?;
    head(
        out,
        "prequal_agent_upstream_refused_total",
        "counter",
        "Times that the backend refused an HTTP/2 request unprocessed; usually the agent sends it again.",
    )?;
    writeln!(out, "prequal_agent_upstream_refused_total {}", counters.refused())?;
    head(
        out,
        "prequal_agent_upstream_resent_total",
        "counter",
        "Idempotent requests sent a second time because the backend closed a reused HTTP/1.1 connection.",
    )?;
    writeln!(out, "prequal_agent_upstream_resent_total {}", counters.resent())?;

    head(out, "prequal_agent_tls_reloads_total", "counter", "Changes of certificate files, by result.")?;
    let [failed, used] = counters.tls_reloads();
    writeln!(out, "prequal_agent_tls_reloads_total{{result=\"ok\"}} {used}")?;
    writeln!(out, "prequal_agent_tls_reloads_total{{result=\"failed\"}} {failed}")?;
    if let Some(at) = counters.certificate_expiry() {
        let name = "prequal_agent_certificate_expiry_timestamp_seconds";
        head(
            out,
            name,
            "gauge",
            "Earliest expiry of a certificate in the chain, seconds since the epoch; absent without TLS.",
        )?;
        writeln!(out, "{name} {at}")?;
    }

    let name = "prequal_agent_request_duration_seconds";
    head(out, name, "histogram", "Time from the arrival to the end of successful requests.")?;
    let buckets = counters.latency_buckets();
    let mut below = 0;
    for (bound, count) in LATENCY_BOUNDS_US.iter().zip(buckets) {
        below += count;
        writeln!(out, "{name}_bucket{{le=\"{}\"}} {below}", seconds(*bound))?;
    }
    let count = counters.ended(Outcome::Success).max(below);
    writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}")?;
    writeln!(out, "{name}_sum {}", seconds(counters.latency_sum_us()))?;
    writeln!(out, "{name}_count {count}")?;

    let name = "prequal_agent_latency_quantile_seconds";
    head(out, name, "gauge", "Latency quantiles since start: upper bounds of the histogram's buckets.")?;
    for (label, per_mille) in [("0.5", 500), ("0.9", 900), ("0.99", 990), ("0.999", 999)] {
        if let Some(us) = quantile_us(&buckets, count, per_mille) {
            writeln!(out, "{name}{{quantile=\"{label}\"}} {}", seconds(us))?;
        }
    }
    Ok(())
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) -> std::fmt::Result {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// Returns `None` without samples, or if the quantile is past the last bound.
fn quantile_us(buckets: &[u64], count: u64, per_mille: u64) -> Option<u64> {
    if count == 0 {
        return None;
    }
    let rank = (count * per_mille).div_ceil(1000).max(1);
    let mut below = 0;
    buckets.iter().zip(LATENCY_BOUNDS_US).find_map(|(n, bound)| {
        below += n;
        (below >= rank).then_some(bound)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use prequal_core::server::tracker::TrackerConfig;
    use prequal_core::shared::time::Micros;
    use std::net::SocketAddr;
    use std::time::Duration;

    use crate::config::ReadyCheck;
    use crate::traffic::Event;

    fn page(load: Load) -> Page {
        let checker = Checker {
            check: ReadyCheck::Tcp,
            target: SocketAddr::from(([127, 0, 0, 1], 1)).into(),
            tls: None,
            http2: false,
            timeout: Duration::from_secs(1),
            load,
        };
        let replica =
            Replica { name: "here".to_owned(), checker: Arc::new(checker), traffic: Arc::default() };
        Page { replicas: vec![replica], draining: AtomicBool::new(false) }
    }

    #[test]
    fn the_metrics_page_shows_counters_and_gauges() {
        let load = Load::with_clock(TrackerConfig::default(), || Micros(0));
        let _open = load.start();
        load.start().finish(Outcome::Success);
        load.start().finish(Outcome::Failure);
        load.counters().count_probe(true);
        load.counters().count_upstream_error("connect");
        let page = page(load);
        page.replicas[0].traffic.count(Event::Idle);
        let text = page.metrics();
        for line in [
            "prequal_agent_rif 1",
            "prequal_agent_failing_ratio 0.25",
            "prequal_agent_up_seconds 0",
            "prequal_agent_backend_ready 1",
            "prequal_agent_requests_total{class=\"success\"} 1",
            "prequal_agent_requests_total{class=\"failure\"} 1",
            "prequal_agent_probes_total{port=\"probe\"} 1",
            "prequal_agent_upstream_errors_total{reason=\"connect\"} 1",
            "prequal_agent_request_duration_seconds_bucket{le=\"+Inf\"} 1",
            "prequal_agent_request_duration_seconds_bucket{le=\"0.0001\"} 1",
            "prequal_agent_latency_quantile_seconds{quantile=\"0.5\"} 0.0001",
            "prequal_agent_closed_total{reason=\"idle\"} 1",
            "prequal_agent_shed_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} not in\n{text}");
        }
    }

    #[test]
    fn quantiles_are_bucket_bounds() {
        assert_eq!(quantile_us(&[], 0, 500), None);
        assert_eq!(quantile_us(&[9, 1], 10, 900), Some(100));
        assert_eq!(quantile_us(&[9, 1], 10, 990), Some(200));
        assert_eq!(quantile_us(&[0; 19], 1, 500), None, "slower than every bound");
    }

    #[tokio::test]
    async fn health_checks_fail_while_draining() {
        let page = page(Load::new(TrackerConfig::default()));
        let answer = async |method, path, draining| {
            page.draining.store(draining, Ordering::Relaxed);
            page.answer(&method, path).await.status()
        };
        assert_eq!(answer(Method::GET, "/healthz", false).await, 200);
        assert_eq!(answer(Method::GET, "/healthz", true).await, 503);
        assert_eq!(answer(Method::GET, "/", false).await, 404);
        assert_eq!(answer(Method::POST, "/metrics", false).await, 405);
    }
}
