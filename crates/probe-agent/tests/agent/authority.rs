//! Names in Istio's form. In SNI and authority, Istio names its clusters `outbound_.PORT_._.HOST` or
//! `outbound|PORT||HOST`.

use crate::common::{agent, backend, frame, raw, read_frame, text, within};
use http_body_util::BodyExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const NAMES: [&str; 2] =
    ["outbound_.8081_._.replicas.demo.svc.cluster.local", "outbound|8081||replicas.demo.svc.cluster.local"];

async fn running() -> crate::common::Running {
    let addr = backend(|req| async {
        let _ = req.into_body().collect().await;
        text("hello")
    })
    .await;
    agent(addr, |_| {})
}

#[tokio::test]
async fn istio_names_are_accepted_over_http1() {
    let agent = running().await;
    for name in NAMES {
        for path in ["/", "/prequal/probe"] {
            let request = format!("GET {path} HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n");
            let reply = within(raw(agent.addr, &request)).await;
            assert!(reply.starts_with("HTTP/1.1 200"), "{name} {path}: {reply}");
        }
    }
}

/// The frames are written by hand, because a client library would refuse to send some of these names.
#[tokio::test]
async fn over_http2_no_name_ends_a_connection_and_those_without_a_bar_are_answered() {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    let agent = running().await;
    let mut tcp = TcpStream::connect(agent.addr).await.unwrap();
    tcp.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    tcp.write_all(&frame(4, 0, 0, &[])).await.unwrap();
    let [plain, bar] = NAMES;
    for (stream, name, answer) in
        [(1, plain, HEADERS), (3, bar, RST_STREAM), (5, "prequal", HEADERS), (7, plain, HEADERS)]
    {
        tcp.write_all(&frame(HEADERS, 0x5, stream, &probe(name))).await.unwrap();
        let (kind, payload) = within(reply(&mut tcp, stream)).await;
        assert_eq!(kind, answer, "{name}: {payload:?}");
        // `:status: 200` is entry 8 of HPACK's static table.
        assert!(kind != HEADERS || payload[0] == 0x88, "{name}: {payload:?}");
    }
}

/// Returns the head of a probe in HPACK, with every field as a literal.
fn probe(authority: &str) -> Vec<u8> {
    let fields =
        [(":method", "GET"), (":scheme", "http"), (":path", "/prequal/probe"), (":authority", authority)];
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

/// Returns the first frame that shows the result of `stream`.
async fn reply(tcp: &mut TcpStream, stream: u32) -> (u8, Vec<u8>) {
    loop {
        let frame = read_frame(tcp).await.expect("the connection goes on");
        assert_ne!(frame.kind, 7, "the agent sends GOAWAY: {:?}", frame.payload);
        if frame.stream == stream && matches!(frame.kind, 1 | 3) {
            return (frame.kind, frame.payload);
        }
    }
}
