//! Replaces `tls.rs` in a build without the Cargo feature `tls`. The types have the same names but no values. Settings
//! that ask for TLS are refused.

use std::future::Pending;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::config::AgentConfig;
use crate::load::Load;
use crate::log::Log;
use crate::socket::Socket;

/// Reason why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// The library was built without TLS.
    #[error("this program was built without the Cargo feature `tls`")]
    Missing,
}

pub(crate) enum Acceptor {}

impl Acceptor {
    pub(crate) fn new(config: &AgentConfig) -> Result<Option<Self>, TlsError> {
        if config.tls.is_some() || config.tls_clients.is_some() { Err(TlsError::Missing) } else { Ok(None) }
    }

    pub(crate) async fn accept(&self, _: Socket) -> io::Result<ClientTls> {
        match *self {}
    }

    pub(crate) fn watch(&self, _: Duration, _: Load, _: Log) -> Pending<()> {
        match *self {}
    }
}

#[derive(Clone)]
pub(crate) enum Connector {}

impl Connector {
    pub(crate) fn new(_: Option<PathBuf>, _: &str) -> Result<Self, TlsError> {
        Err(TlsError::Missing)
    }

    pub(crate) async fn connect(&self, _: bool, _: Socket) -> io::Result<BackendTls> {
        match *self {}
    }

    pub(crate) fn watch(&self, _: Duration, _: Load, _: Log) -> Pending<()> {
        match *self {}
    }
}

pub(crate) enum Never {}

pub(crate) type ClientTls = Never;
pub(crate) type BackendTls = Never;

pub(crate) fn accepted_http2(stream: &ClientTls) -> Option<bool> {
    match *stream {}
}

pub(crate) fn connected_http2(stream: &BackendTls) -> bool {
    match *stream {}
}

pub(crate) fn refused_protocol(_: &io::Error) -> bool {
    false
}

impl AsyncRead for Never {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match *self.get_mut() {}
    }
}

impl AsyncWrite for Never {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self.get_mut() {}
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self.get_mut() {}
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self.get_mut() {}
    }
}
