//! Checks whether a router's multipath hash includes the flow label. If it does not, repathing changes labels but not
//! paths.

use crate::{Result, sysctl};

/// `net.ipv6.fib_multipath_hash_policy` and `_fields` of one namespace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Hash {
    /// Policy: 0 hashes addresses and label; 1 addresses and ports; 2 like 0, but for the inner packet of a tunnel; 3
    /// the fields in `fields`.
    pub policy: u32,
    /// For policy 3: 1 source, 2 destination, 4 protocol, 8 flow label, 16 source port, 32 destination port.
    pub fields: u32,
}

impl Hash {
    /// Reads the hash of the calling thread's namespace.
    ///
    /// # Errors
    /// If there is no IPv6.
    pub fn read() -> Result<Self> {
        let Some(policy) = sysctl::read_number("net.ipv6.fib_multipath_hash_policy")? else {
            return Err(crate::flowlabel::no_ipv6());
        };
        let fields = sysctl::read_number("net.ipv6.fib_multipath_hash_fields")?.unwrap_or(7);
        Ok(Self { policy, fields })
    }

    /// Returns whether a packet's path depends on its label.
    pub fn sees_label(self) -> bool {
        match self.policy {
            0 | 2 => true,
            3 => self.fields & 8 != 0,
            _ => false,
        }
    }

    /// Returns whether a packet's path depends on its ports, as with PLB's hash of 4-tuple and label. Otherwise
    /// connections with the same label share a path if they are between the same two hosts.
    pub fn sees_ports(self) -> bool {
        match self.policy {
            1 => true,
            3 => self.fields & 48 == 48,
            _ => false,
        }
    }
}

/// The hash that PLB's paper requires of a router: the 4-tuple and the label.
pub const PLB_HASH: Hash = Hash { policy: 3, fields: 63 };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_hash_sees_the_label() {
        for (policy, fields, label, ports) in [
            (0, 7, true, false),
            (1, 63, false, true),
            (2, 7, true, false),
            (3, 7, false, false),
            (3, 8, true, false),
            (3, 63, true, true),
            (3, 55, false, true),
            (4, 63, false, false),
        ] {
            let hash = Hash { policy, fields };
            assert_eq!((hash.sees_label(), hash.sees_ports()), (label, ports), "{hash:?}");
        }
    }
}
