//! The agent against a hostile client: whatever the client sends, a well-formed request is answered afterwards, and no
//! request is still counted.
//!
//! The first byte decides how the rest is sent (as it is, after the preface of HTTP/2, or as frames with correct
//! lengths), in how many pieces, and which HTTP version the backend speaks.
#![no_main]

use prequal_fuzz::agent::{self, PREFACE, frame};

/// `:method: GET`, `:scheme: http`, `:path: /`, `:authority: a`.
const GET: &[u8] = &[0x82, 0x86, 0x84, 0x41, 0x01, b'a'];
/// The same with POST and `content-type: application/grpc`.
const GRPC: &[u8] = &[
    0x83, 0x86, 0x84, 0x41, 0x01, b'a', 0x5f, 0x10, b'a', b'p', b'p', b'l', b'i', b'c', b'a', b't', b'i',
    b'o', b'n', b'/', b'g', b'r', b'p', b'c', 0x40, 0x02, b't', b'e', 0x08, b't', b'r', b'a', b'i', b'l',
    b'e', b'r', b's',
];

const RAW: u8 = 0;
const AFTER_PREFACE: u8 = 1;
const FRAMES: u8 = 2;

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        "POST /x?y HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nhost: a\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nt: u\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n",
        "PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
        "GET http://b/ HTTP/1.1\r\nhost: a\r\nconnection: close, x-y\r\nx-y: z\r\n\r\n",
        "CONNECT a:22 HTTP/1.1\r\nhost: a:22\r\n\r\n",
        "OPTIONS * HTTP/1.0\r\n\r\n",
        "GET /prequal/probe HTTP/1.1\r\nhost: a\r\nx-prequal-hint: k\r\n\r\n",
        "HEAD / HTTP/1.1\r\nhost: a\r\nx-prequal-load: 1;2;10.0.0.1:80\r\nte: trailers\r\n\r\n",
    ]
    .map(|text| [&[RAW], text.as_bytes()].concat())
    .to_vec();
    let mut get = Vec::new();
    frame(&mut get, 4, 0, 0, &[0, 3, 0, 0, 0, 100]);
    frame(&mut get, 1, 5, 1, GET);
    seeds.push([&[AFTER_PREFACE], &get[..]].concat());
    seeds.push([&[AFTER_PREFACE | 8], &get[..]].concat());
    // Scripts of frames: SETTINGS, then a request, and what can go wrong with it.
    let settings: &[u8] = &[4, 0, 0, 0];
    let head = |flags: u8, stream: u8, block: &[u8]| [&[1, flags, stream, block.len() as u8], block].concat();
    for frames in [
        [settings, &head(5, 1, GET)].concat(),
        [settings, &head(4, 1, GRPC), &[0, 1, 1, 7, 0, 0, 0, 0, 2, b'h', b'i']].concat(),
        [settings, &head(5, 1, GET), &[3, 0, 1, 4, 0, 0, 0, 8], &head(5, 3, GET)].concat(),
        [settings, &head(1, 1, &GET[..2]), &[9, 4, 1, 4], &GET[2..]].concat(),
        [settings, &[6, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8], &[8, 0, 0, 4, 0, 0, 16, 0], &head(5, 1, GET)]
            .concat(),
        [&[4, 0, 0, 6, 0, 4, 0, 0, 0, 0], &head(5, 1, GET)[..], &[8, 0, 1, 4, 0, 0, 0, 1]].concat(),
        [settings, &head(0x25, 1, &[&[0x80, 0, 0, 3, 255], GET].concat()), &[2, 0, 1, 5, 0, 0, 0, 3, 1]]
            .concat(),
        [settings, &[7, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0], &head(5, 1, GET)].concat(),
        [settings, &head(4, 1, GET), &[0, 9, 1, 4, 2, b'x', 0, 0], &[4, 1, 0, 0]].concat(),
    ] {
        for mode in [FRAMES, FRAMES | 8] {
            seeds.push([&[mode], &frames[..]].concat());
        }
    }
    seeds
}

fn run(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    let (pieces, http2) = (1 + usize::from(mode >> 4 & 3), mode & 8 != 0);
    let bytes = match mode & 3 {
        RAW | 3 => rest.to_vec(),
        AFTER_PREFACE => [PREFACE, rest].concat(),
        _ => [PREFACE, &agent::frames(rest)].concat(),
    };
    agent::client(&bytes, pieces, http2);
}

prequal_fuzz::target!(seeds, run);
