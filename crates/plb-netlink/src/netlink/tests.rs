//! Temporary failures are retried, others are not; one of the failures comes from the real kernel.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::{TcpListener, TcpStream};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::*;

/// A datagram, or an errno.
type Read = std::result::Result<Vec<u8>, i32>;

/// The events of one attempt.
struct Script(VecDeque<Read>);

impl Wire for Script {
    fn send(&mut self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn receive(&mut self) -> io::Result<Vec<u8>> {
        self.0.pop_front().expect("no more is read than was sent").map_err(io::Error::from_raw_os_error)
    }
}

fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(16 + payload.len()).unwrap();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend([kind.to_ne_bytes(), flags.to_ne_bytes()].concat());
    bytes.extend([1_u32.to_ne_bytes(), 0_u32.to_ne_bytes()].concat());
    bytes.extend(payload);
    bytes
}

fn done(flags: u16) -> Vec<u8> {
    message(3, flags, &0_i32.to_ne_bytes())
}

fn refused(errno: i32) -> Vec<u8> {
    let request = message(20, NLM_F_REQUEST | NLM_F_DUMP, &[]);
    message(2, 0, &[&(-errno).to_ne_bytes()[..], &request[..]].concat())
}

fn request() -> NetlinkMessage<SockDiagMessage> {
    let mut request = NetlinkMessage::from(SockDiagMessage::InetRequest(InetRequest {
        family: 10,
        protocol: 6,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::ESTABLISHED,
        socket_id: SocketId::new_v6(),
    }));
    request.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    request
}

#[test]
fn temporary_failures_are_retried_and_others_are_not() {
    let good = || Ok(done(0));
    /// Name, events of each attempt, errno of the returned error, number of attempts.
    type Case = (&'static str, Vec<Vec<Read>>, Option<i32>, usize);
    let cases: [Case; 9] = [
        ("a signal", vec![vec![Err(libc::EINTR), good()]], None, 1),
        ("no room", vec![vec![Err(libc::ENOBUFS)], vec![good()]], None, 2),
        ("no memory", vec![vec![Err(libc::ENOMEM)], vec![Err(libc::ENOMEM)], vec![good()]], None, 3),
        ("busy", vec![vec![Ok(refused(libc::EBUSY))], vec![good()]], None, 2),
        ("changed meanwhile", vec![vec![Ok(done(NLM_F_DUMP_INTR))], vec![good()]], None, 2),
        ("part lost", vec![vec![Ok(message(4, 0, &[]))], vec![good()]], None, 2),
        ("ended early", vec![vec![Ok(message(3, 0, &(-libc::EINTR).to_ne_bytes()))], vec![good()]], None, 2),
        ("permanent", vec![vec![Ok(refused(libc::ENOENT))]], Some(libc::ENOENT), 1),
        ("always", (0..10).map(|_| vec![Err(libc::ENOBUFS)]).collect(), Some(libc::ENOBUFS), 6),
    ];
    for (name, script, expected, attempts) in cases {
        let mut script: VecDeque<_> = script.into_iter().map(|one| Script(one.into())).collect();
        let opened = Cell::new(0);
        let open = || {
            opened.set(opened.get() + 1);
            Ok(script.pop_front().expect("no more attempts than scripts"))
        };
        let outcome = exchange_over(open, request(), "testing", "");
        assert_eq!(outcome.err().map(|error| error.errno().unwrap()), expected, "{name}");
        assert_eq!(opened.get(), attempts, "{name}");
    }
}

#[test]
fn a_socket_cannot_be_opened_for_a_moment() {
    let mut failures = [libc::ENOBUFS, libc::ENOMEM].into_iter();
    let open = || match failures.next() {
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Ok(Script([Ok(done(0))].into())),
    };
    assert!(exchange_over(open, request(), "testing", "").unwrap().is_empty());
}

/// A dump that is not read to its end keeps its socket busy: the kernel answers a second one with EBUSY.
#[test]
fn a_request_to_a_busy_kernel_is_retried() {
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        return eprintln!("a_request_to_a_busy_kernel_is_retried: skipped: no IPv6 on loopback");
    };
    let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    // More than fits into a few datagrams, so that the dump is not complete at once.
    let streams: Vec<_> = (0..200).map(|_| (connect(), listener.accept().unwrap())).collect();
    let mut bytes = {
        let mut request = request();
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        bytes
    };
    // A different sequence number, so that its answer is not mistaken for that of the request under test.
    bytes[8] = 7;
    let mut opened = 0;
    let open = || {
        opened += 1;
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.connect(&SocketAddr::new(0, 0))?;
        if opened == 1 {
            Wire::send(&mut socket, &bytes)?;
            let refusal = Wire::send(&mut socket, &bytes).and_then(|()| {
                let mut answers = Vec::new();
                for _ in 0..2 {
                    answers.push(socket.receive()?);
                }
                Ok(answers)
            })?;
            assert!(
                refusal.iter().any(|answer| answer[4] == 2 && answer[16..20] == (-libc::EBUSY).to_ne_bytes())
            );
        }
        Ok(socket)
    };
    let found = exchange_over(open, request(), "testing", "").unwrap();
    assert!(found.len() >= streams.len());
    assert_eq!(opened, 2);
}
