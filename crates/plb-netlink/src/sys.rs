//! All system calls that neither std nor socket2 wraps, and all `unsafe` code of this crate.
//!
//! Each function takes and returns plain data; no pointer leaves a function.

use std::ffi::{CString, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Turns a system call's -1 into the error that it set.
fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Wraps a descriptor that a system call has just created.
fn owned(result: c_long) -> io::Result<OwnedFd> {
    let fd = c_int::try_from(checked(result)?).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the call succeeded and created a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `setsockopt` with arbitrary bytes. The kernel writes back into some options, hence `&mut`.
pub(crate) fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &mut [u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: pointer and length describe `value`, which is writable and outlives the call.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value.as_mut_ptr().cast::<c_void>(), length) };
    checked(result.into()).map(drop)
}

/// Calls `setsockopt` with an int.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set_option(fd, level, name, &mut value.to_ne_bytes())
}

/// Calls `getsockopt`, which first reads `value` and then fills it; returns how many bytes it wrote.
pub(crate) fn get_option(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: &mut [u8],
) -> io::Result<usize> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: pointer and length describe `value`, which is writable; the kernel writes no more than `length`.
    let result = unsafe {
        libc::getsockopt(fd.as_raw_fd(), level, name, value.as_mut_ptr().cast::<c_void>(), &raw mut length)
    };
    checked(result.into())?;
    Ok(value.len().min(length as usize))
}

/// Calls `getsockopt` for an int.
pub(crate) fn get_int(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut bytes = [0; 4];
    get_option(fd, level, name, &mut bytes)?;
    Ok(c_int::from_ne_bytes(bytes))
}

/// Calls `pidfd_open(2)`.
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, c_long::from(pid), 0_i64) })
}

/// Calls `pidfd_getfd(2)`: duplicates a descriptor of another process.
pub(crate) fn pidfd_getfd(pidfd: BorrowedFd<'_>, fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes three integers.
    owned(unsafe {
        libc::syscall(libc::SYS_pidfd_getfd, c_long::from(pidfd.as_raw_fd()), c_long::from(fd), 0_i64)
    })
}

/// Moves the calling thread into a network namespace.
pub(crate) fn enter_network_namespace(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes two integers.
    checked(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }.into()).map(drop)
}

/// Returns the index of a device in the calling thread's network namespace; sysfs could show another namespace.
pub(crate) fn device_index(name: &str) -> io::Result<u32> {
    let name = CString::new(name)?;
    // SAFETY: the string is valid, NUL-terminated, and outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// Returns 32 random bits from the kernel.
///
/// # Errors
/// Never on a kernel that has `getrandom(2)` and has booted.
pub fn random_u32() -> io::Result<u32> {
    let mut bytes = [0_u8; 4];
    // SAFETY: pointer and length describe `bytes`; requests of up to 256 bytes are never cut short.
    checked(unsafe { libc::getrandom(bytes.as_mut_ptr().cast::<c_void>(), bytes.len(), 0) } as c_long)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Calls `bpf(2)`. `attributes` is the union for that command, up to the last field in use.
///
/// # Safety
/// Every pointer inside `attributes` must describe memory of the size that the command reads or writes, and that
/// memory must live until the call returns.
unsafe fn bpf(command: c_int, attributes: &mut [u8]) -> io::Result<c_long> {
    // SAFETY: pointer and length describe `attributes`; the caller guarantees the pointers inside it.
    checked(unsafe {
        libc::syscall(libc::SYS_bpf, c_long::from(command), attributes.as_mut_ptr(), attributes.len())
    })
}

/// Calls `BPF_MAP_CREATE` for a hash map.
pub(crate) fn bpf_hash_map(key_size: u32, value_size: u32, capacity: u32) -> io::Result<OwnedFd> {
    const MAP_CREATE: c_int = 0;
    const TYPE_HASH: u32 = 1;
    let mut attributes = [0_u8; 20];
    for (index, value) in [TYPE_HASH, key_size, value_size, capacity, 0].into_iter().enumerate() {
        attributes[index * 4..index * 4 + 4].copy_from_slice(&value.to_ne_bytes());
    }
    // SAFETY: the attributes contain no pointer.
    owned(unsafe { bpf(MAP_CREATE, &mut attributes) }?)
}

/// Operation on one element of a map.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum MapOperation {
    /// Reads into the value.
    Lookup = 1,
    /// Writes the value.
    Update = 2,
    /// Removes the key; the value is ignored.
    Delete = 3,
}

/// Looks up, updates or deletes one element. Key and value sizes are those with which the map was created.
pub(crate) fn bpf_map_element<const K: usize, const V: usize>(
    map: BorrowedFd<'_>,
    operation: MapOperation,
    key: &[u8; K],
    value: &mut [u8; V],
) -> io::Result<()> {
    let mut attributes = [0_u8; 32];
    attributes[0..4].copy_from_slice(&map.as_raw_fd().to_ne_bytes());
    attributes[8..16].copy_from_slice(&(key.as_ptr() as u64).to_ne_bytes());
    // A delete that passes a value fails with EINVAL: fields that a command does not read must be zero.
    if operation != MapOperation::Delete {
        attributes[16..24].copy_from_slice(&(value.as_mut_ptr() as u64).to_ne_bytes());
    }
    // SAFETY: both pointers describe arrays that live until the call returns; the callers in `bpf::CookieMap` fix K
    // and V to the sizes given to `bpf_hash_map`.
    unsafe { bpf(operation as c_int, &mut attributes) }.map(drop)
}

/// Calls `BPF_PROG_LOAD` for a traffic-control program for tcx egress. `log` receives the verifier's messages on
/// failure.
pub(crate) fn bpf_load_tc(instructions: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    const PROG_LOAD: c_int = 5;
    const TYPE_SCHED_CLS: u32 = 3;
    let license = c"Apache-2.0";
    let mut attributes = [0_u8; 72];
    let mut put = |offset: usize, bytes: &[u8]| {
        attributes[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(0, &TYPE_SCHED_CLS.to_ne_bytes());
    put(4, &u32::try_from(instructions.len()).map_err(|_| io::ErrorKind::InvalidInput)?.to_ne_bytes());
    put(8, &(instructions.as_ptr() as u64).to_ne_bytes());
    put(16, &(license.as_ptr() as u64).to_ne_bytes());
    if !log.is_empty() {
        put(24, &1_u32.to_ne_bytes());
        put(28, &u32::try_from(log.len()).map_err(|_| io::ErrorKind::InvalidInput)?.to_ne_bytes());
        put(32, &(log.as_mut_ptr() as u64).to_ne_bytes());
    }
    put(68, &ATTACH_TCX_EGRESS.to_ne_bytes());
    // SAFETY: instructions, licence and log outlive the call, and their lengths are given next to them.
    owned(unsafe { bpf(PROG_LOAD, &mut attributes) }?)
}

/// Calls `BPF_LINK_CREATE`: attaches a program to the egress of a device. Closing the link detaches the program.
pub(crate) fn bpf_attach_egress(program: BorrowedFd<'_>, device: u32) -> io::Result<OwnedFd> {
    const LINK_CREATE: c_int = 28;
    let mut attributes = [0_u8; 32];
    attributes[0..4].copy_from_slice(&program.as_raw_fd().to_ne_bytes());
    attributes[4..8].copy_from_slice(&device.to_ne_bytes());
    attributes[8..12].copy_from_slice(&ATTACH_TCX_EGRESS.to_ne_bytes());
    // SAFETY: the attributes contain no pointer.
    owned(unsafe { bpf(LINK_CREATE, &mut attributes) }?)
}

const ATTACH_TCX_EGRESS: u32 = 47;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(_signal: c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Signals that request the end of a program: from the terminal, from an operator, or because the terminal closed.
const ENDINGS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Makes SIGINT, SIGTERM and SIGHUP only set [`interrupted`] to true, once each; a second signal of the same kind
/// kills the process as usual.
///
/// # Errors
/// Never for these signals.
pub fn watch_interrupts() -> io::Result<()> {
    on_endings(note_interrupt as extern "C" fn(c_int) as usize)
}

/// Ignores SIGINT, SIGTERM and SIGHUP from now on.
///
/// # Errors
/// Never for these signals.
pub fn ignore_interrupts() -> io::Result<()> {
    on_endings(libc::SIG_IGN)
}

fn on_endings(handler: libc::sighandler_t) -> io::Result<()> {
    for signal in ENDINGS {
        // SAFETY: an all-zero sigaction is valid; the handler is SIG_IGN or a function that only stores to an atomic,
        // which is async-signal-safe.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut())
        };
        checked(result.into())?;
    }
    Ok(())
}

/// Returns whether one of these signals has arrived since [`watch_interrupts`].
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Borrows the descriptor of anything that has one.
pub(crate) fn raw<F: AsFd + ?Sized>(fd: &F) -> BorrowedFd<'_> {
    fd.as_fd()
}
