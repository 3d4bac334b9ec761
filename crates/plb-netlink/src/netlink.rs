//! One netlink exchange: a request, and all of its answer.

use std::fmt::Debug;

use netlink_packet_core::{
    DoneMessage, NLM_F_DUMP_INTR, NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

use crate::{Error, Result};

/// What one datagram held.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    pub(crate) messages: Vec<T>,
    /// The kernel said that this was all.
    pub(crate) finished: bool,
}

/// Sends `request` and collects the answer until the kernel says that it is complete.
///
/// `doing` and `cure` are for messages. A dump that changed under the kernel's hands is asked for again, thrice at most.
pub(crate) fn exchange<T>(
    protocol: isize,
    mut request: NetlinkMessage<T>,
    doing: &str,
    cure: &str,
) -> Result<Vec<T>>
where
    T: NetlinkSerializable + NetlinkDeserializable + Debug,
{
    let kernel = |source| Error::kernel(doing, cure, source);
    let socket = Socket::new(protocol).map_err(kernel)?;
    socket.connect(&SocketAddr::new(0, 0)).map_err(kernel)?;
    request.header.sequence_number = 1;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);
    for _attempt in 0..3 {
        socket.send(&bytes, 0).map_err(kernel)?;
        let mut answer = Vec::new();
        let mut interrupted = false;
        loop {
            let (datagram, _) = socket.recv_from_full().map_err(kernel)?;
            let batch = parse(&datagram, doing, cure, &mut interrupted)?;
            answer.extend(batch.messages);
            if batch.finished {
                break;
            }
        }
        if !interrupted {
            return Ok(answer);
        }
    }
    Err(Error::malformed(
        "a netlink dump",
        format_args!("{doing}: the list changed during each of three dumps"),
    ))
}

/// Parses one datagram. An error message inside becomes that error.
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
        // The library slices by the length in the header: it must be right first.
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
            NetlinkPayload::Overrun(_) => return Err(malformed(&"the kernel lost part of it")),
            _ => {}
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    Ok(batch)
}

fn errno(code: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(code.checked_abs().unwrap_or(libc::EPROTO))
}

/// `struct nlmsghdr`.
const HEADER: usize = 16;
