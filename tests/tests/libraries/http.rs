//! A hand-written HTTP/1.1 client with one request per connection, for responses that are read only in part and for
//! clients that disconnect.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_core::wire::report::LoadReport;

/// Maximum time to wait for bytes.
const PATIENCE: Duration = Duration::from_secs(10);

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    fields: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    /// The only field of that name.
    pub(crate) fn field(&self, name: &str) -> Result<&str> {
        let mut all = self.fields.iter().filter(|(known, _)| known == name);
        let (_, value) = all.next().with_context(|| format!("no {name}: {self:?}"))?;
        ensure!(all.next().is_none(), "{name} twice: {self:?}");
        Ok(value)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|(known, _)| known == name)
    }

    pub(crate) fn report(&self) -> Result<LoadReport> {
        Ok(LoadReport::parse(self.field("x-prequal-load")?)?)
    }
}

/// Sends one request on a new connection.
pub(crate) fn exchange(
    addr: SocketAddr,
    method: &str,
    path: &str,
    fields: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer> {
    let mut tcp = send(addr, method, path, fields, body)?;
    let mut bytes = Vec::new();
    tcp.read_to_end(&mut bytes)?;
    parsed(&bytes)
}

/// A whole response, or the part of it that arrived.
pub(crate) fn parsed(bytes: &[u8]) -> Result<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?.parse()?;
    let fields: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let chunked = fields.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let body = if chunked { unchunked(body) } else { body.to_owned() };
    Ok(Answer { status, fields, body })
}

/// Decodes chunks as far as they arrived.
fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n")
        && let Ok(length @ 1..) = usize::from_str_radix(length, 16)
        && let Some(chunk) = rest.get(..length)
    {
        whole.push_str(chunk);
        body = rest.get(length + 2..).unwrap_or_default();
    }
    whole
}

/// Sends a request without reading its response.
pub(crate) fn send(
    addr: SocketAddr,
    method: &str,
    path: &str,
    fields: &[(&str, &str)],
    body: &[u8],
) -> Result<TcpStream> {
    let mut tcp = TcpStream::connect(addr)?;
    tcp.set_read_timeout(Some(PATIENCE))?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: app.test\r\nconnection: close\r\n");
    head.push_str(&format!("content-length: {}\r\n", body.len()));
    for (name, value) in fields {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    tcp.write_all(format!("{head}\r\n").as_bytes())?;
    tcp.write_all(body)?;
    Ok(tcp)
}

/// Reads the headers of a response and leaves its body.
pub(crate) fn head_of(tcp: &mut TcpStream) -> Result<Answer> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") {
        tcp.read_exact(&mut byte)?;
        bytes.extend_from_slice(&byte);
    }
    parsed(&bytes)
}
