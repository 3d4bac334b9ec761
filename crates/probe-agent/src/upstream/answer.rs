//! Reads the backend's first answer on a connection opened as HTTP/2, and how many streams the backend allows.
//!
//! hyper does not distinguish a late answer from a wrong one, and does not say when the first `SETTINGS` frame has
//! arrived. So this module reads the bytes as they pass.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

/// Terms that the backend sets for a connection as a whole.
pub(super) struct Terms {
    max_streams: AtomicU32,
    extended_connect: AtomicBool,
    /// Number of the last stream that the backend accepted before it sent GOAWAY; `u32::MAX` until then.
    last_stream: AtomicU32,
    /// Number of empty DATA frames that did not end their stream.
    empty_frames: AtomicU32,
}

impl Default for Terms {
    fn default() -> Self {
        // Without the setting there is no limit (RFC 9113 §6.5.2).
        Self {
            max_streams: AtomicU32::new(u32::MAX),
            extended_connect: AtomicBool::new(false),
            last_stream: AtomicU32::new(u32::MAX),
            empty_frames: AtomicU32::new(0),
        }
    }
}

impl Terms {
    /// Returns the maximum number of concurrent streams.
    pub(super) fn max_streams(&self) -> u32 {
        self.max_streams.load(Ordering::Relaxed)
    }

    /// Returns whether requests may switch to another protocol (RFC 8441).
    pub(super) fn extended_connect(&self) -> bool {
        self.extended_connect.load(Ordering::Relaxed)
    }

    /// Returns whether new streams are refused.
    pub(super) fn leaving(&self) -> bool {
        self.accepted().is_some()
    }

    /// Returns the number of requests that the backend accepted before it sent GOAWAY, or `None` if it has not.
    pub(super) fn accepted(&self) -> Option<u32> {
        match self.last_stream.load(Ordering::Relaxed) {
            u32::MAX => None,
            // A client's streams have odd numbers.
            last => Some(last.div_ceil(2)),
        }
    }

    /// Returns whether the connection should get no more requests, because h2 ends a connection after 100 empty DATA
    /// frames that do not end their stream, and breaks off every request on it. No setting of h2 changes this limit.
    pub(super) fn worn(&self) -> bool {
        self.empty_frames.load(Ordering::Relaxed) >= MAX_EMPTY_FRAMES
    }

    fn leave(&self, last_stream: u32) {
        self.last_stream.store(last_stream, Ordering::Relaxed);
    }

    fn set(&self, id: u16, value: u32) {
        match id {
            MAX_CONCURRENT_STREAMS => self.max_streams.store(value, Ordering::Relaxed),
            ENABLE_CONNECT_PROTOCOL => self.extended_connect.store(value == 1, Ordering::Relaxed),
            _ => {}
        }
    }
}

/// Resolves to whether the backend answered in HTTP/2. Fails if the connection ended without an answer.
pub(super) type Answer = oneshot::Receiver<bool>;

/// Connection whose incoming frames are followed, to find the backend's first answer and its terms.
pub(super) struct Listened<T> {
    io: T,
    frames: Frames,
}

impl<T> Listened<T> {
    pub(super) fn new(io: T, terms: Arc<Terms>) -> (Self, Answer) {
        let (answer, answered) = oneshot::channel();
        (
            Self {
                io,
                frames: Frames { answer: Some(answer), terms, part: Part::default(), left: 0, kind: 0 },
            },
            answered,
        )
    }
}

/// Follows the frames, wherever reads split them.
struct Frames {
    /// Set until the answer is known.
    answer: Option<oneshot::Sender<bool>>,
    terms: Arc<Terms>,
    part: Part,
    /// Number of bytes of the frame that are still to come, and its type.
    left: usize,
    kind: u8,
}

/// Start of a frame header, or of a setting.
#[derive(Default)]
struct Part {
    bytes: [u8; HEAD],
    have: usize,
}

impl Part {
    /// Takes bytes from `data` until there are `want` bytes. Returns whether there are.
    fn fill(&mut self, data: &mut &[u8], want: usize) -> bool {
        let n = (want - self.have).min(data.len());
        self.bytes[self.have..self.have + n].copy_from_slice(&data[..n]);
        self.have += n;
        *data = &data[n..];
        self.have == want
    }
}

impl Frames {
    /// Fails if the first bytes are not those of HTTP/2.
    fn follow(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            if self.left == 0 {
                let whole = self.part.fill(&mut data, HEAD);
                // `HTTP/1.1 ...` already differs in its first byte: the length of a `SETTINGS` frame starts with 0.
                if self.answer.is_some() && !is_first(&self.part.bytes[..self.part.have]) {
                    self.answered(false);
                    return Err(io::ErrorKind::InvalidData.into());
                }
                if whole {
                    self.begin();
                }
            } else if self.kind == SETTINGS && self.left >= SETTING {
                if self.part.fill(&mut data, SETTING) {
                    let [a, b, c, d, e, f, ..] = self.part.bytes;
                    self.terms.set(u16::from_be_bytes([a, b]), u32::from_be_bytes([c, d, e, f]));
                    self.part.have = 0;
                    self.left -= SETTING;
                    self.settle();
                }
            } else if self.kind == GOAWAY && self.left >= LAST_STREAM {
                if self.part.fill(&mut data, LAST_STREAM) {
                    let [a, b, c, d, ..] = self.part.bytes;
                    self.terms.leave(u32::from_be_bytes([a, b, c, d]) & !RESERVED);
                    self.part.have = 0;
                    self.left -= LAST_STREAM;
                    // The rest is the reason.
                    self.kind = DATA;
                }
            } else {
                let n = self.left.min(data.len());
                self.left -= n;
                data = &data[n..];
            }
        }
        Ok(())
    }

    fn begin(&mut self) {
        let [a, b, c, kind, flags, ..] = self.part.bytes;
        self.left = u32::from_be_bytes([0, a, b, c]) as usize;
        if kind == DATA && self.left == 0 && flags & END_STREAM == 0 {
            self.terms.empty_frames.fetch_add(1, Ordering::Relaxed);
        }
        self.kind = kind;
        self.part.have = 0;
        self.settle();
    }

    /// Reports the answer once the first frame is complete.
    fn settle(&mut self) {
        if self.left == 0 {
            self.answered(true);
        }
    }

    fn answered(&mut self, http2: bool) {
        if let Some(answer) = self.answer.take() {
            let _ = answer.send(http2);
        }
    }
}

/// Returns whether `head` can be the start of a connection's first frame: `SETTINGS`, no flags, stream 0.
fn is_first(head: &[u8]) -> bool {
    head.iter()
        .zip([Some(0), None, None, Some(SETTINGS), Some(0), Some(0), Some(0), Some(0), Some(0)])
        .all(|(byte, expected)| expected.is_none_or(|expected| *byte == expected))
}

const HEAD: usize = 9;
const SETTING: usize = 6;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// DATA, whose payload is not read.
const DATA: u8 = 0;
const END_STREAM: u8 = 1;
/// Half of h2's limit, so that the requests in flight can end.
const MAX_EMPTY_FRAMES: u32 = 50;
/// Length of a GOAWAY's first field, bytes, and the reserved bit in that field.
const LAST_STREAM: usize = 4;
const RESERVED: u32 = 1 << 31;
const MAX_CONCURRENT_STREAMS: u16 = 3;
const ENABLE_CONNECT_PROTOCOL: u16 = 8;

impl<T: AsyncRead + Unpin> AsyncRead for Listened<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        Poll::Ready(self.frames.follow(&buf.filled()[before..]))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Listened<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 0], payload].concat()
    }

    /// Reads `bytes` in pieces and returns the answer, if there is one, and the terms.
    fn read(bytes: &[u8], piece: usize) -> (Option<bool>, Arc<Terms>) {
        let terms = Arc::new(Terms::default());
        let (mut listened, mut answer) = Listened::new((), terms.clone());
        let _ = bytes.chunks(piece).try_for_each(|piece| listened.frames.follow(piece));
        (answer.try_recv().ok(), terms)
    }

    #[test]
    fn settings_and_goaway_are_read_across_any_split() {
        let settings = frame(SETTINGS, &[0, 4, 0, 1, 0, 0, 0, 3, 0, 0, 0, 7, 0, 8, 0, 0, 0, 1]);
        // Data that looks like settings, then a change of the settings.
        let data = frame(0, &settings);
        let change = frame(SETTINGS, &[0, 3, 0, 0, 1, 0]);
        for piece in 1..60 {
            let (answer, terms) = read(&settings, piece);
            assert_eq!((answer, terms.max_streams(), terms.extended_connect()), (Some(true), 7, true));
            let (_, terms) = read(&[&settings[..], &data, &change, &data].concat(), piece);
            assert_eq!((terms.max_streams(), terms.leaving()), (256, false), "{piece}");
            for (last_stream, accepted) in [(0, 0), (1, 1), (39, 20), (0x7fff_ffff, 1 << 30)] {
                let goaway = frame(GOAWAY, &[u32::to_be_bytes(last_stream), [0; 4], *b"why?"].concat());
                let (_, terms) = read(&[&settings[..], &data, &goaway, &change].concat(), piece);
                assert_eq!((terms.accepted(), terms.max_streams()), (Some(accepted), 256));
            }
        }
        let (answer, terms) = read(&frame(SETTINGS, &[]), 100);
        assert_eq!((answer, terms.max_streams()), (Some(true), u32::MAX));
    }

    #[test]
    fn a_connection_is_worn_by_empty_frames_that_end_no_stream() {
        let settings = frame(SETTINGS, &[]);
        let mut last = frame(DATA, b"");
        last[4] = END_STREAM;
        for (bytes, worn) in [
            (frame(DATA, b"").repeat(49), false),
            (frame(DATA, b"").repeat(50), true),
            (last.repeat(50), false),
            (frame(DATA, b"x").repeat(50), false),
            (frame(SETTINGS, b"").repeat(50), false),
        ] {
            let (_, terms) = read(&[settings.clone(), bytes].concat(), 7);
            assert_eq!(terms.worn(), worn);
        }
    }

    #[test]
    fn only_a_complete_frame_is_an_answer_and_only_other_bytes_are_a_refusal() {
        let settings = frame(SETTINGS, &[0, 3, 0, 0, 1, 0]);
        for (bytes, answer) in [
            (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], Some(false)),
            (b"?", Some(false)),
            (b"\x15\x03\x01\0\x02", Some(false)),
            (&frame(0, b"data"), Some(false)),
            (b"", None),
            (&settings[..8], None),
            (&settings[..settings.len() - 1], None),
            (&settings, Some(true)),
        ] {
            assert_eq!(read(bytes, 3).0, answer, "{bytes:?}");
        }
    }
}
