//! One netlink exchange: a request and its complete answer. A temporary failure is retried over a new socket, because
//! an answer that was not read to its end keeps the old socket busy.

use std::fmt::Debug;
use std::io;
use std::thread;
use std::time::Duration;

use netlink_packet_core::{
    DoneMessage, NLM_F_DUMP_INTR, NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

use crate::{Error, Result};

/// Content of one datagram.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    pub(crate) messages: Vec<T>,
    /// Whether the kernel marked the end of the answer.
    pub(crate) finished: bool,
}

/// Sends `request` and collects the answer until the kernel marks it complete.
///
/// `doing` and `cure` are used in error messages. The request is repeated, up to [`ATTEMPTS`] times in all, if the dump
/// changed while the kernel produced it or if the error [`is_temporary`]. A request may therefore arrive twice: send
/// only idempotent requests.
pub(crate) fn exchange<T>(
    protocol: isize,
    request: NetlinkMessage<T>,
    doing: &str,
    cure: &str,
) -> Result<Vec<T>>
where
    T: NetlinkSerializable + NetlinkDeserializable + Debug,
{
    let open = || {
        let socket = Socket::new(protocol)?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(socket)
    };
    exchange_over(open, request, doing, cure)
}

/// Carries datagrams to the kernel and back: a netlink socket, or a test double.
trait Wire {
    fn send(&mut self, datagram: &[u8]) -> io::Result<()>;
    fn receive(&mut self) -> io::Result<Vec<u8>>;
}

impl Wire for Socket {
    fn send(&mut self, datagram: &[u8]) -> io::Result<()> {
        Socket::send(self, datagram, 0).map(drop)
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        Ok(self.recv_from_full()?.0)
    }
}

fn exchange_over<T, W: Wire>(
    mut open: impl FnMut() -> io::Result<W>,
    mut request: NetlinkMessage<T>,
    doing: &str,
    cure: &str,
) -> Result<Vec<T>>
where
    T: NetlinkSerializable + NetlinkDeserializable + Debug,
{
    request.header.sequence_number = 1;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    let mut failed = Error::Kernel { doing: doing.to_owned(), reason: io::ErrorKind::Interrupted.into() };
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            thread::sleep(FIRST_PAUSE * 2_u32.pow(attempt - 1));
        }
        match once(&mut open, &bytes, doing, cure) {
            Err(error) if is_temporary(&error) => failed = error,
            outcome => return outcome,
        }
    }
    Err(failed)
}

fn once<T, W: Wire>(
    open: &mut impl FnMut() -> io::Result<W>,
    request: &[u8],
    doing: &str,
    cure: &str,
) -> Result<Vec<T>>
where
    T: NetlinkDeserializable + Debug,
{
    let kernel = |source| Error::kernel(doing, cure, source);
    let mut wire = open().map_err(kernel)?;
    wire.send(request).map_err(kernel)?;
    let mut answer = Vec::new();
    let mut interrupted = false;
    loop {
        let datagram = match wire.receive() {
            // A signal arrived. The code that waits for signals checks for it after this exchange.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            outcome => outcome.map_err(kernel)?,
        };
        let batch = parse(&datagram, doing, cure, &mut interrupted)?;
        answer.extend(batch.messages);
        if batch.finished {
            break;
        }
    }
    if interrupted {
        return Err(kernel(io::Error::from_raw_os_error(libc::EINTR)));
    }
    Ok(answer)
}

/// Returns whether the same request is likely to succeed a moment later: the list changed while it was read, the kernel
/// was busy or out of memory, or the socket's buffer was full.
pub(crate) fn is_temporary(error: &Error) -> bool {
    matches!(error.errno(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::ENOMEM))
}

/// Parses one datagram. An error message inside is returned as that error.
pub(crate) fn parse<T>(datagram: &[u8], doing: &str, cure: &str, interrupted: &mut bool) -> Result<Batch<T>>
where
    T: NetlinkDeserializable + Debug,
{
    let malformed = |why: &dyn ToString| Error::malformed("a netlink reply", why.to_string());
    let mut batch = Batch { messages: Vec::new(), finished: false };
    let mut rest = datagram;
    if rest.is_empty() {
        return Err(malformed(&"empty"));
    }
    while !rest.is_empty() {
        // The library slices by the length in the header, so that length must be checked first.
        let length = rest
            .first_chunk::<4>()
            .map(|bytes| u32::from_ne_bytes(*bytes) as usize)
            .filter(|length| *length >= HEADER && *length <= rest.len())
            .ok_or_else(|| malformed(&format!("truncated: {} bytes left", rest.len())))?;
        let message = NetlinkMessage::<T>::deserialize(&rest[..length]).map_err(|error| malformed(&error))?;
        *interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
        match message.payload {
            NetlinkPayload::InnerMessage(inner) => batch.messages.push(inner),
            NetlinkPayload::Done(DoneMessage { code: 0, .. }) => batch.finished = true,
            NetlinkPayload::Done(DoneMessage { code, .. }) => {
                return Err(Error::kernel(doing, cure, errno(code)));
            }
            NetlinkPayload::Error(error) if error.code.is_none() => batch.finished = true,
            NetlinkPayload::Error(error) => return Err(Error::kernel(doing, cure, errno(error.raw_code()))),
            // The kernel lost part of the answer.
            NetlinkPayload::Overrun(_) => return Err(Error::kernel(doing, cure, errno(-libc::ENOBUFS))),
            _ => {}
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    Ok(batch)
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code.checked_abs().unwrap_or(libc::EPROTO))
}

/// `struct nlmsghdr`.
const HEADER: usize = 16;

/// Number of times a request is sent before it fails.
const ATTEMPTS: u32 = 6;
/// Pause before the first retry; doubles with each attempt, 62 ms in all.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests;
