//! A minimal BPF toolkit to rewrite a header field: an assembler for a dozen instructions, loading, tcx egress
//! attachment.
//!
//! It needs no compiler and no library at run time. It needs CAP_BPF and CAP_NET_ADMIN, and Linux 6.6 for tcx.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use crate::{Error, Result, sys};

/// Encodes one instruction: opcode, registers, offset, immediate.
fn instruction(opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
    let registers =
        if cfg!(target_endian = "little") { destination | source << 4 } else { destination << 4 | source };
    let [o0, o1] = offset.to_ne_bytes();
    let [i0, i1, i2, i3] = immediate.to_ne_bytes();
    u64::from_ne_bytes([opcode, registers, o0, o1, i0, i1, i2, i3])
}

/// A program under construction. Registers: 0 result, 1 to 5 arguments, 6 to 9 preserved across calls, 10 frame.
#[derive(Debug, Default)]
pub struct Assembler {
    instructions: Vec<u64>,
    /// Jumps to the end of the program, patched once its position is known.
    exits: Vec<(usize, u8, u8, i32)>,
}

impl Assembler {
    fn push(&mut self, opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> &mut Self {
        self.instructions.push(instruction(opcode, destination, source, offset, immediate));
        self
    }

    /// `to = value`
    pub fn set(&mut self, to: u8, value: i32) -> &mut Self {
        self.push(0xb7, to, 0, 0, value)
    }

    /// `to = from`
    pub fn copy(&mut self, to: u8, from: u8) -> &mut Self {
        self.push(0xbf, to, from, 0, 0)
    }

    /// `to += value`
    pub fn add(&mut self, to: u8, value: i32) -> &mut Self {
        self.push(0x07, to, 0, 0, value)
    }

    /// `to &= value`, 32 bits
    pub fn and32(&mut self, to: u8, value: u32) -> &mut Self {
        self.push(0x54, to, 0, 0, value.cast_signed())
    }

    /// `to |= from`, 32 bits
    pub fn or32(&mut self, to: u8, from: u8) -> &mut Self {
        self.push(0x4c, to, from, 0, 0)
    }

    /// `to = *(u32 *)(from + offset)`
    pub fn load32(&mut self, to: u8, from: u8, offset: i16) -> &mut Self {
        self.push(0x61, to, from, offset, 0)
    }

    /// `*(u32 *)(to + offset) = from`
    pub fn store32(&mut self, to: u8, offset: i16, from: u8) -> &mut Self {
        self.push(0x63, to, from, offset, 0)
    }

    /// `*(u64 *)(to + offset) = from`
    pub fn store64(&mut self, to: u8, offset: i16, from: u8) -> &mut Self {
        self.push(0x7b, to, from, offset, 0)
    }

    /// `*(u64 *)(to + offset) += from`, atomically
    pub fn atomic_add64(&mut self, to: u8, offset: i16, from: u8) -> &mut Self {
        self.push(0xdb, to, from, offset, 0)
    }

    /// `to = map`
    fn load_map(&mut self, to: u8, map: i32) -> &mut Self {
        const PSEUDO_MAP_FD: u8 = 1;
        self.push(0x18, to, PSEUDO_MAP_FD, 0, map).push(0, 0, 0, 0, 0)
    }

    /// Calls a kernel helper by number.
    pub fn call(&mut self, helper: i32) -> &mut Self {
        self.push(0x85, 0, 0, 0, helper)
    }

    /// Ends the program if `register == value`.
    pub fn end_if_equal(&mut self, register: u8, value: i32) -> &mut Self {
        self.end_if(0x15, register, value)
    }

    /// Ends the program if `register != value`.
    pub fn end_unless_equal(&mut self, register: u8, value: i32) -> &mut Self {
        self.end_if(0x55, register, value)
    }

    fn end_if(&mut self, opcode: u8, register: u8, value: i32) -> &mut Self {
        self.exits.push((self.instructions.len(), opcode, register, value));
        self.push(0, 0, 0, 0, 0)
    }

    /// Returns the finished program. At its end it passes every packet on to the next program (TCX_NEXT).
    pub fn finish(&mut self) -> Result<Vec<u64>> {
        let end = self.instructions.len();
        for &(at, opcode, register, value) in &self.exits {
            let distance = i16::try_from(end - at - 1)
                .map_err(|_| Error::Invalid("a BPF program of more than 32767 instructions".to_owned()))?;
            self.instructions[at] = instruction(opcode, register, 0, distance, value);
        }
        self.set(0, -1).push(0x95, 0, 0, 0, 0);
        Ok(std::mem::take(&mut self.instructions))
    }
}

/// A program attached to the egress of a device. It is detached when this is dropped. The kernel also detaches it
/// however the process ends, because nothing is pinned in the BPF file system.
#[derive(Debug)]
pub struct Attached {
    _link: OwnedFd,
}

/// Loads a program and attaches it to the egress of the device with this index in the calling thread's namespace.
///
/// # Errors
/// Missing rights, a kernel before 6.6, or a program that the verifier refuses (the error includes its message).
pub fn attach_egress(program: &[u64], device: u32) -> Result<Attached> {
    let program = load(program)?;
    let link =
        sys::bpf_attach_egress(program.as_fd(), device).map_err(|source| match source.raw_os_error() {
            Some(libc::EINVAL) => no_tcx(),
            Some(libc::ENODEV) => {
                Error::Gone(format!("no device with index {device} in this network namespace"))
            }
            _ => Error::kernel("attaching a BPF program to a device", RIGHTS, source),
        })?;
    Ok(Attached { _link: link })
}

fn load(program: &[u64]) -> Result<OwnedFd> {
    let refused = match sys::bpf_load_tc(program, &mut []) {
        Ok(program) => return Ok(program),
        Err(source) => source,
    };
    match refused.raw_os_error() {
        // EINVAL without a message from the verifier means that the attach type is unknown.
        Some(libc::EACCES | libc::EINVAL) => {
            let mut log = vec![0; 1 << 16];
            let outcome = sys::bpf_load_tc(program, &mut log);
            let said = String::from_utf8_lossy(&log);
            let said = said.trim_matches(['\0', '\n']).trim();
            match outcome {
                Ok(program) => Ok(program),
                Err(source) if said.is_empty() && source.raw_os_error() == Some(libc::EINVAL) => {
                    Err(no_tcx())
                }
                Err(source) => Err(Error::kernel(
                    format!("loading a BPF program: {}", said.lines().last().unwrap_or_default()),
                    RIGHTS,
                    source,
                )),
            }
        }
        _ => Err(Error::kernel("loading a BPF program", RIGHTS, refused)),
    }
}

fn no_tcx() -> Error {
    Error::Unsupported {
        what: format!("kernel {} cannot attach BPF programs by tcx", crate::sysctl::kernel_release()),
        cure: "Linux 6.6 or later can; until then use `--way sockopt`".to_owned(),
    }
}

/// A map from socket cookie to 16 bytes.
#[derive(Debug)]
pub struct CookieMap {
    map: OwnedFd,
}

impl CookieMap {
    /// Creates an empty map for `capacity` sockets.
    ///
    /// # Errors
    /// Missing rights or memory.
    pub fn new(capacity: u32) -> Result<Self> {
        sys::bpf_hash_map(8, 16, capacity)
            .map(|map| Self { map })
            .map_err(|source| Error::kernel("creating a BPF map", RIGHTS, source))
    }

    /// Sets the value of a socket.
    ///
    /// # Errors
    /// If the map is full.
    pub fn set(&self, cookie: u64, mut value: [u8; 16]) -> Result<()> {
        self.element(sys::MapOperation::Update, cookie, &mut value).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::E2BIG) => Error::Unsupported {
                    what: "the table of relabelled sockets is full".to_owned(),
                    cure: "narrow down which sockets to watch (--remote-port, --local-port)".to_owned(),
                },
                _ => Error::kernel("writing to a BPF map", RIGHTS, source),
            }
        })
    }

    /// Returns the value of a socket.
    ///
    /// # Errors
    /// If the lookup fails for a reason other than the absence of the socket.
    pub fn get(&self, cookie: u64) -> Result<Option<[u8; 16]>> {
        let mut value = [0; 16];
        absent_is_fine(self.element(sys::MapOperation::Lookup, cookie, &mut value), "reading a BPF map")
            .map(|present| present.then_some(value))
    }

    /// Removes a socket; returns whether it was present.
    ///
    /// # Errors
    /// If the removal fails for a reason other than the absence of the socket.
    pub fn remove(&self, cookie: u64) -> Result<bool> {
        absent_is_fine(
            self.element(sys::MapOperation::Delete, cookie, &mut [0; 16]),
            "deleting from a BPF map",
        )
    }

    /// Assembles `register = this map`.
    pub fn load_into<'a>(&self, register: u8, program: &'a mut Assembler) -> &'a mut Assembler {
        use std::os::fd::AsRawFd as _;
        program.load_map(register, self.map.as_raw_fd())
    }

    fn element(&self, operation: sys::MapOperation, cookie: u64, value: &mut [u8; 16]) -> io::Result<()> {
        sys::bpf_map_element(self.map.as_fd(), operation, &cookie.to_ne_bytes(), value)
    }
}

fn absent_is_fine(outcome: io::Result<()>, doing: &str) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(source) if source.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(source) => Err(Error::kernel(doing, RIGHTS, source)),
    }
}

const RIGHTS: &str = "run as root or with CAP_BPF and CAP_NET_ADMIN, or use `--way sockopt`";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn instructions_are_laid_out_as_the_kernel_reads_them() {
        // `r2 = *(u32 *)(r1 + 16)`: opcode, source:destination, offset, immediate.
        let mut program = Assembler::default();
        let program = program.load32(2, 1, 16).end_if_equal(2, 7).set(3, 1).finish().unwrap();
        let bytes: Vec<[u8; 8]> = program.iter().map(|i| i.to_ne_bytes()).collect();
        assert_eq!(
            bytes,
            [
                [0x61, 0x12, 16, 0, 0, 0, 0, 0],
                [0x15, 0x02, 1, 0, 7, 0, 0, 0], // if equal, skips the next instruction
                [0xb7, 0x03, 0, 0, 1, 0, 0, 0],
                [0xb7, 0x00, 0, 0, 0xff, 0xff, 0xff, 0xff], // r0 = TCX_NEXT
                [0x95, 0, 0, 0, 0, 0, 0, 0],                // exit
            ]
        );
    }
}
