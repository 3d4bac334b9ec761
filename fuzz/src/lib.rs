//! Code shared by the fuzz targets: reading a script from raw bytes, blobs that nearly decode, and shared data in
//! memory.
//!
//! Each target is a program in `fuzz_targets/`. The targets decide what is correct; this library does not.

pub mod agent;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use prequal_core::client::ejection::EjectionTable;
use prequal_core::client::members::Members;
use prequal_core::client::pool::PoolState;
use prequal_core::client::store::{Cas, SharedData};
use prequal_core::shared::blob::{Blob, BlobError};
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;

/// Folder into which a target writes its first corpus, instead of fuzzing.
pub const SEEDS: &str = "PREQUAL_FUZZ_SEEDS";

/// Writes `seeds` to the folder that [`SEEDS`] names and ends the process; does nothing if it names none.
pub fn write_seeds(seeds: impl FnOnce() -> Vec<Vec<u8>>) {
    let Some(folder) = std::env::var_os(SEEDS) else { return };
    let folder = Path::new(&folder);
    fs::create_dir_all(folder).expect("the folder of the corpus");
    for (number, seed) in seeds().iter().enumerate() {
        fs::write(folder.join(format!("seed-{number:02}")), seed).expect("a file of the corpus");
    }
    std::process::exit(0);
}

/// A fuzz target: `seeds` makes the first corpus from real values, `run` takes any bytes.
#[macro_export]
macro_rules! target {
    ($seeds:expr, $run:expr) => {
        ::libfuzzer_sys::fuzz_target!(init: $crate::write_seeds($seeds), |data: &[u8]| -> () { $run(data) });
    };
}

/// Bytes interpreted as decisions. Past their end every decision is zero.
pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// Splits off a script: the first byte is its length. The rest is the payload.
    pub fn split(data: &'a [u8]) -> (Self, &'a [u8]) {
        let Some((length, rest)) = data.split_first() else { return (Self(&[]), &[]) };
        let (script, payload) = rest.split_at(rest.len().min(usize::from(*length)));
        (Self(script), payload)
    }

    /// A script and its payload as one input.
    pub fn join(script: &[u8], payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(script.len()).expect("at most 255 bytes of script");
        [&[length], script, payload].concat()
    }

    /// Whether all decisions have been taken.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The lowest bit of the next byte.
    pub fn bit(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// The next four bytes.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// A replica of a small fleet, so that the same replicas occur repeatedly.
    pub fn replica(&mut self) -> Endpoint {
        replica(u16::from(self.byte() % 40))
    }

    /// Lets time pass: mostly a little, sometimes a lot, sometimes backwards.
    pub fn pass(&mut self, now: &mut Micros) {
        let step = self.byte();
        let amount = u64::from(step & 0x1f);
        now.0 = match step >> 5 {
            0..=3 => now.0.wrapping_add(amount * 1_000),
            4 | 5 => now.0.wrapping_add(amount * 250_000),
            6 => now.0.wrapping_add(amount << 36),
            _ => now.0.wrapping_sub(amount * 60_000_000),
        };
    }
}

/// Replica number `n` of the fleet in scripts.
pub fn replica(n: u16) -> Endpoint {
    let text = if n < 32 { format!("10.0.0.1:{}", 1000 + n) } else { format!("[2001:db8::1]:{}", 1000 + n) };
    text.parse().expect("an endpoint")
}

/// Time at which scripts begin.
pub const START: Micros = Micros::from_millis(1_000_000);

/// Decodes `bytes` as a blob after fixing what would be refused first: the tag, the size of a record and the length. A
/// fuzzer would get those right only by chance.
pub fn nearly<B: Blob>(bytes: &[u8]) -> Option<B> {
    let empty = B::default().encode().into_owned();
    let mut bytes = bytes.to_vec();
    if bytes.len() < empty.len() && empty.len() < 64 {
        bytes.resize(empty.len(), 0);
    }
    for (byte, tag) in bytes.iter_mut().zip(&empty[..6]) {
        *byte = *tag;
    }
    for _ in 0..2 {
        match B::decode(&bytes) {
            Ok(blob) => return Some(blob),
            Err(BlobError::Size { got, want }) => {
                let length = (bytes.len() + want).checked_sub(got).filter(|length| *length <= 1 << 16)?;
                bytes.resize(length, 0);
            }
            Err(_) => return None,
        }
    }
    None
}

/// The same for a blob that is a header followed by records of `record` bytes. The header contains the size of a record
/// and, if `counted`, the number of records.
pub fn nearly_records<B: Blob>(bytes: &[u8], record: usize, counted: bool) -> Option<B> {
    let empty = B::default().encode().into_owned();
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(empty.len()), 0);
    let count = (bytes.len() - empty.len()) / record;
    bytes.truncate(empty.len() + count * record);
    bytes[..8].copy_from_slice(&empty[..8]);
    if counted {
        bytes[8..12].copy_from_slice(&u32::try_from(count).ok()?.to_le_bytes());
    }
    B::decode(&bytes).ok()
}

/// Checks that a blob that was accepted, changed and written is accepted again and has the same meaning.
pub fn survives<B: Blob>(blob: &B) {
    let written = blob.encode();
    match B::decode(&written) {
        Ok(again) => assert_eq!(again.encode(), written, "the blob reads as another one"),
        Err(error) => panic!("the blob that was written is refused: {error}"),
    }
}

/// Bytes by key, each with the number of its last write, for compare-and-swap.
type Values = HashMap<String, (Vec<u8>, u32)>;

/// Shared data of one host. Every write of a balancer is checked by [`survives`].
#[derive(Clone, Default)]
pub struct Host(Rc<RefCell<Values>>);

impl Host {
    /// The store of a balancer.
    pub fn store(&self) -> Cas<Self> {
        Cas { data: self.clone(), prefix: "fuzz".into() }
    }

    /// Stores bytes under the balancer's `name`, as damage would.
    pub fn damage(&self, name: &str, bytes: &[u8]) {
        let mut values = self.0.borrow_mut();
        let number = values.values().map(|(_, number)| *number).max().unwrap_or(0) + 1;
        values.insert(format!("fuzz/{name}"), (bytes.to_vec(), number));
    }

    /// The bytes of `name`.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.0.borrow().get(&format!("fuzz/{name}")).map(|(bytes, _)| bytes.clone()).unwrap_or_default()
    }
}

impl SharedData for Host {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        self.0.borrow().get(key).map_or((None, None), |(bytes, n)| (Some(bytes.clone()), Some(*n)))
    }

    fn set(&self, key: &str, bytes: &[u8], number: Option<u32>) -> bool {
        let refused = match key {
            "fuzz/pool" => PoolState::decode(bytes).err(),
            "fuzz/members" => Members::decode(bytes).err(),
            "fuzz/ejections" => EjectionTable::decode(bytes).err(),
            _ => None,
        };
        assert_eq!(refused, None, "{key}: what the balancer wrote is refused");
        let mut values = self.0.borrow_mut();
        if number.is_some_and(|n| n != 0 && values.get(key).is_some_and(|(_, now)| *now != n)) {
            return false;
        }
        let next = values.values().map(|(_, number)| *number).max().unwrap_or(0) + 1;
        values.insert(key.into(), (bytes.into(), next));
        true
    }
}
