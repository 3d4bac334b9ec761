//! The kernel's knobs in the calling thread's network namespace.
//!
//! PLB's five knobs are available from Linux 6.2 on. The kernel refuses an out-of-range value with EINVAL, which a
//! buffered writer can swallow, so every value is read back after it is written.

use std::fmt;
use std::fs;
use std::io;
use std::time::Duration;

use crate::detector::{Config, Threshold};
use crate::error::NET_ADMIN;
use crate::{Error, Result};

/// A number of consecutive congested rounds, 0 to 31.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Rounds(u8);

impl Rounds {
    /// The kernel's maximum.
    pub const MAX: u8 = 31;

    /// Creates a number of rounds.
    ///
    /// # Errors
    /// If the number is above 31.
    pub fn new(rounds: u8) -> Result<Self> {
        if rounds > Self::MAX {
            return Err(Error::Invalid(format!("rounds must lie in 0 to {}, got {rounds}", Self::MAX)));
        }
        Ok(Self(rounds))
    }

    /// Returns the number of rounds.
    pub fn get(self) -> u8 {
        self.0
    }
}

/// PLB's five knobs, `net.ipv4.tcp_plb_*`. The kernel reads them at every acknowledgement, so a change acts on live
/// connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PlbParams {
    /// `tcp_plb_enabled`. Works only with a congestion control that has PLB hooks (upstream: dctcp). Kernel default:
    /// off.
    pub enabled: bool,
    /// `tcp_plb_cong_thresh`, the paper's K, in 1/256. Kernel default: 128.
    pub k: Threshold,
    /// `tcp_plb_idle_rehash_rounds`, the paper's M; 0 switches idle repathing off. Kernel default: 3.
    pub m: Rounds,
    /// `tcp_plb_rehash_rounds`, the paper's N. 0 would repath at every check. Kernel default: 12.
    pub n: Rounds,
    /// `tcp_plb_suspend_rto_sec`, seconds: after a timeout PLB pauses for one to two times this. Set it to the time
    /// it takes to repair a link. Kernel default: 60.
    pub suspend_s: u8,
}

impl Default for PlbParams {
    /// Returns the kernel's defaults: the paper's parameters, with PLB switched off.
    fn default() -> Self {
        Self { enabled: false, k: Threshold::HALF, m: Rounds(3), n: Rounds(12), suspend_s: 60 }
    }
}

/// Names of the five knobs, in the order of [`PlbParams`]' fields.
pub const PLB_KNOBS: [&str; 5] = [
    "net.ipv4.tcp_plb_enabled",
    "net.ipv4.tcp_plb_cong_thresh",
    "net.ipv4.tcp_plb_idle_rehash_rounds",
    "net.ipv4.tcp_plb_rehash_rounds",
    "net.ipv4.tcp_plb_suspend_rto_sec",
];

impl PlbParams {
    /// Reads the knobs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before Linux 6.2.
    pub fn read() -> Result<Self> {
        Self::read_from(&Proc)
    }

    /// Checks the parameters, writes those that differ, and reads all knobs back. On any failure the old values are
    /// restored.
    ///
    /// # Errors
    /// N of 0, M above N, missing rights, an old kernel; [`Error::HalfApplied`] if restoring failed too.
    pub fn write(&self) -> Result<()> {
        self.write_to(&Proc)
    }

    /// Returns these parameters for the user-space detector.
    ///
    /// # Errors
    /// If N is 0 or M is above N. The kernel accepts both, but neither has the effect that it suggests.
    pub fn detector(&self) -> Result<Config> {
        Config::new(self.k, self.m.0, self.n.0, Duration::from_secs(self.suspend_s.into()))
            .map_err(|error| Error::Invalid(error.to_string()))
    }

    /// Returns name and value of each knob, in the kernel's units.
    pub fn values(&self) -> [(&'static str, u16); 5] {
        let values = [
            self.enabled.into(),
            self.k.in_256ths(),
            self.m.0.into(),
            self.n.0.into(),
            self.suspend_s.into(),
        ];
        std::array::from_fn(|index| (PLB_KNOBS[index], values[index]))
    }

    fn read_from(store: &impl Store) -> Result<Self> {
        let mut values = [0_u16; 5];
        for (name, value) in PLB_KNOBS.into_iter().zip(&mut values) {
            let text = store.read(name).map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => Error::Unsupported {
                    what: format!("there is no {name} on kernel {}", kernel_release()),
                    cure:
                        "PLB needs Linux 6.2 or later with CONFIG_INET; user-space PLB (`plb run`) does not"
                            .to_owned(),
                },
                _ => Error::kernel(format!("reading {name}"), NET_ADMIN, source),
            })?;
            *value = text.trim().parse().map_err(|_| malformed(&text))?;
        }
        let [enabled, k, m, n, suspend] = values;
        let small = |value: u16| u8::try_from(value).map_err(|_| malformed(value));
        Ok(Self {
            enabled: enabled != 0,
            k: Threshold::from_256ths(k).map_err(malformed)?,
            m: Rounds::new(small(m)?)?,
            n: Rounds::new(small(n)?)?,
            suspend_s: small(suspend)?,
        })
    }

    fn write_to(&self, store: &impl Store) -> Result<()> {
        self.detector()?;
        let before = Self::read_from(store)?;
        let outcome = before.change(self, store).and_then(|()| {
            let found = Self::read_from(store)?;
            if found == *self {
                return Ok(());
            }
            Err(Error::Malformed {
                what: "PLB's knobs",
                why: format!("wrote {self}, read back {found}; is something else setting them?"),
            })
        });
        let Err(why) = outcome else { return Ok(()) };
        // The values read back below show whether this worked.
        let _ = Self::read_from(store).and_then(|now| now.change(&before, store));
        match Self::read_from(store) {
            Ok(now) if now == before => Err(why),
            now => Err(Error::HalfApplied {
                doing: "setting PLB's knobs".to_owned(),
                left: now.map_or_else(
                    |error| format!("unknown, reading back failed: {error}"),
                    |now| now.to_string(),
                ),
                source: Box::new(why),
            }),
        }
    }

    /// Writes the knobs in which `wanted` differs from `self`.
    fn change(&self, wanted: &Self, store: &impl Store) -> Result<()> {
        for ((name, old), (_, new)) in self.values().into_iter().zip(wanted.values()) {
            if old != new {
                store
                    .write(name, &new.to_string())
                    .map_err(|source| Error::kernel(format!("setting {name} to {new}"), NET_ADMIN, source))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for PlbParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, K = {}/256, M = {}, N = {}, pause {} s",
            if self.enabled { "on" } else { "off" },
            self.k.in_256ths(),
            self.m.0,
            self.n.0,
            self.suspend_s
        )
    }
}

/// Reads the value of one knob, for instance `net.ipv4.tcp_ecn`. `None`: this kernel has no such knob.
///
/// # Errors
/// If the knob exists but cannot be read.
pub fn read(name: &str) -> Result<Option<String>> {
    match Proc.read(name) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::kernel(format!("reading {name}"), NET_ADMIN, source)),
    }
}

/// Reads the value of one numeric knob; see [`read`].
///
/// # Errors
/// Same as [`read`]; also if the value is not a number.
pub fn read_number(name: &str) -> Result<Option<u32>> {
    read(name)?.map(|text| text.parse().map_err(|_| malformed(&text))).transpose()
}

/// Writes one knob and reads it back.
///
/// # Errors
/// [`Error::Unsupported`] if the kernel has no such knob, [`Error::Invalid`] if it refuses the value.
pub fn write(name: &str, value: &str) -> Result<()> {
    let doing = format!("setting {name} to {value}");
    Proc.write(name, value).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) if matches!(Proc.read(name), Err(e) if e.kind() == io::ErrorKind::NotFound) => {
            Error::Unsupported {
                what: format!("there is no {name}"),
                cure: "a newer kernel has it".to_owned(),
            }
        }
        Some(libc::EINVAL | libc::ERANGE | libc::ENOENT) => {
            Error::Invalid(format!("{doing}: out of range for this kernel, the old value stays"))
        }
        _ => Error::kernel(&doing, NET_ADMIN, source),
    })?;
    match read(name)? {
        Some(found) if found == value => Ok(()),
        found => Err(Error::Malformed {
            what: "a kernel knob",
            why: format!("{doing}: read back {}", found.unwrap_or_default()),
        }),
    }
}

/// Returns the available congestion controls, from `net.ipv4.tcp_available_congestion_control`.
///
/// A module that is not loaded is not listed. Selecting its congestion control by name loads it, if the caller has the
/// right to.
///
/// # Errors
/// If the list cannot be read.
pub fn congestion_controls() -> Result<Vec<String>> {
    Ok(words(&read("net.ipv4.tcp_available_congestion_control")?.unwrap_or_default()))
}

/// Returns the congestion controls that need no special rights, from `net.ipv4.tcp_allowed_congestion_control`.
///
/// # Errors
/// If the list cannot be read.
pub fn unrestricted_congestion_controls() -> Result<Vec<String>> {
    Ok(words(&read("net.ipv4.tcp_allowed_congestion_control")?.unwrap_or_default()))
}

/// Returns the kernel release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn malformed(value: impl fmt::Display) -> Error {
    Error::malformed("a kernel knob", format_args!("`{value}`").to_string().trim())
}

/// Storage of the knobs; tests use a substitute.
trait Store {
    fn read(&self, name: &str) -> io::Result<String>;
    fn write(&self, name: &str, value: &str) -> io::Result<()>;
}

struct Proc;

impl Proc {
    fn path(name: &str) -> String {
        format!("/proc/sys/{}", name.replace('.', "/"))
    }
}

impl Store for Proc {
    fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(Self::path(name))
    }

    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        // Not `fs::write`: it would try to create the file, and report EACCES for a knob that does not exist.
        use std::io::Write as _;
        fs::OpenOptions::new().write(true).open(Self::path(name))?.write_all(value.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    /// Knobs in memory; writes can be made to fail.
    struct Fake {
        knobs: RefCell<BTreeMap<String, String>>,
        refuses: Option<(&'static str, i32)>,
        /// Number of writes that succeed; after that, every write fails.
        patience: Cell<u32>,
    }

    impl Fake {
        fn new() -> Self {
            let knobs =
                PlbParams::default().values().map(|(name, value)| (name.to_owned(), value.to_string()));
            Self { knobs: RefCell::new(knobs.into()), refuses: None, patience: Cell::new(u32::MAX) }
        }
    }

    impl Store for Fake {
        fn read(&self, name: &str) -> io::Result<String> {
            self.knobs.borrow().get(name).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
        }

        fn write(&self, name: &str, value: &str) -> io::Result<()> {
            if self.patience.get() == 0 {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            self.patience.set(self.patience.get() - 1);
            if let Some((refused, errno)) = self.refuses
                && refused == name
            {
                return Err(io::Error::from_raw_os_error(errno));
            }
            self.knobs.borrow_mut().insert(name.to_owned(), format!("{value}\n"));
            Ok(())
        }
    }

    fn wanted() -> PlbParams {
        PlbParams {
            enabled: true,
            k: Threshold::from_256ths(64).unwrap(),
            m: Rounds(2),
            n: Rounds(5),
            suspend_s: 7,
        }
    }

    #[test]
    fn written_values_are_read_back() {
        let fake = Fake::new();
        wanted().write_to(&fake).unwrap();
        assert_eq!(PlbParams::read_from(&fake).unwrap(), wanted());
    }

    #[test]
    fn if_one_knob_is_refused_all_keep_their_old_values() {
        for name in PLB_KNOBS {
            let fake = Fake { refuses: Some((name, libc::EPERM)), ..Fake::new() };
            let error = wanted().write_to(&fake).unwrap_err();
            assert!(matches!(&error, Error::NotPermitted { doing, cure }
                if doing.contains(name) && cure.contains("CAP_NET_ADMIN")));
            assert_eq!(PlbParams::read_from(&fake).unwrap(), PlbParams::default(), "{name}");
        }
    }

    #[test]
    fn a_half_applied_change_is_reported() {
        let fake = Fake { patience: Cell::new(2), ..Fake::new() };
        let error = wanted().write_to(&fake).unwrap_err();
        let Error::HalfApplied { left, .. } = error else { panic!("{error}") };
        assert_eq!(left, "on, K = 64/256, M = 3, N = 12, pause 60 s");
    }

    #[test]
    fn senseless_parameters_are_refused_before_anything_is_written() {
        let fake = Fake { patience: Cell::new(0), ..Fake::new() };
        for (params, says) in [
            (PlbParams { n: Rounds(0), ..wanted() }, "N must be at least 1"),
            (PlbParams { m: Rounds(6), ..wanted() }, "M = 6, N = 5"),
        ] {
            let error = params.write_to(&fake).unwrap_err();
            assert!(matches!(&error, Error::Invalid(why) if why.contains(says)), "{error}");
        }
        assert!(Rounds::new(32).unwrap_err().to_string().contains("0 to 31, got 32"));
    }

    #[test]
    fn an_old_kernel_is_named() {
        let fake = Fake::new();
        fake.knobs.borrow_mut().remove(PLB_KNOBS[3]);
        let error = PlbParams::read_from(&fake).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, cure }
            if what.contains(PLB_KNOBS[3]) && cure.contains("6.2")));
    }

    #[test]
    fn garbage_in_a_knob_is_an_error() {
        for garbage in ["", "x", "-1", "300", "257", "99999999999"] {
            let fake = Fake::new();
            for name in PLB_KNOBS {
                fake.knobs.borrow_mut().insert(name.to_owned(), garbage.to_owned());
            }
            assert!(PlbParams::read_from(&fake).is_err(), "{garbage}");
        }
    }
}
