//! The agent in front of a hostile backend: whatever the backend answers, the request ends, a well-formed request is
//! answered afterwards, and no request is still counted.
//!
//! The first byte decides which request is answered, over which HTTP version, and whether the rest consists of frames
//! with correct lengths.
#![no_main]

use prequal_fuzz::agent::{self, PREFACE, frame};

const REQUESTS: [&str; 4] = [
    "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello",
    "GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "HEAD / HTTP/1.0\r\n\r\n",
];

fn grpc() -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x84, 0x41, 0x01, b'a', 0x5f, 0x10];
    block.extend_from_slice(b"application/grpc");
    let mut bytes = PREFACE.to_vec();
    frame(&mut bytes, 4, 0, 0, &[]);
    frame(&mut bytes, 1, 4, 1, &block);
    frame(&mut bytes, 0, 1, 1, &[0, 0, 0, 0, 2, b'h', b'i']);
    bytes
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\nuntil the end",
        "HTTP/1.0 404 Not Found\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nbytes",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\nx-prequal-load: 1;2;10.0.0.1:80\r\n\r\nhello",
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\nnoHTTP/1.1 200 OK\r\n\r\n",
    ]
    .iter()
    .flat_map(|text| (0..2).map(move |request| [&[request], text.as_bytes()].concat()))
    .collect();
    let ok: &[u8] = &[1, 4, 1, 1, 0x88];
    let settings: &[u8] = &[4, 0, 0, 0, 4, 1, 0, 0];
    let trailers = [&[1, 5, 1, 14, 0x40, 11][..], b"grpc-status", &[1, b'0']].concat();
    for frames in [
        [settings, ok, &[0, 1, 1, 5], b"hello"].concat(),
        [settings, &[1, 5, 1, 1, 0x88]].concat(),
        [settings, ok, &[0, 0, 1, 7, 0, 0, 0, 0, 2, b'h', b'i'], &trailers].concat(),
        [settings, &[3, 0, 1, 4, 0, 0, 0, 7]].concat(),
        [settings, &[7, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0]].concat(),
        [settings, ok, &[3, 0, 1, 4, 0, 0, 0, 8]].concat(),
        [&[4, 0, 0, 6, 0, 3, 0, 0, 0, 0], &settings[4..], ok].concat(),
        [settings, &[5, 4, 1, 5, 0, 0, 0, 2, 0x82], &[6, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8], ok].concat(),
        [&[4, 0, 0, 6, 0, 4, 0, 0, 0, 0], &settings[4..], &[8, 0, 1, 4, 0, 0, 0, 3], ok].concat(),
    ] {
        for request in [0, 1, 3, 4] {
            seeds.push([&[0x10 | 0x08 | request], &frames[..]].concat());
        }
    }
    seeds
}

fn run(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    let request = match mode & 7 {
        request @ 0..=3 => REQUESTS[usize::from(request)].as_bytes().to_vec(),
        _ => grpc(),
    };
    let bytes = if mode & 0x10 == 0 { rest.to_vec() } else { agent::frames(rest) };
    agent::backend(&request, &bytes, mode & 8 != 0);
}

prequal_fuzz::target!(seeds, run);
