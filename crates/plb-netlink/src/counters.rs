//! Counters of the calling thread's namespace, from `/proc/net/netstat`.

use std::fs;

use crate::{Error, Result};

/// The counters that are relevant to repathing. `None`: this kernel does not have the counter.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counters {
    /// `TCPPLBRehash`: number of times PLB wanted another label. It also rises if the label cannot change
    /// (`SO_TXREHASH` off, an explicit label), so it does not prove that a connection moved.
    pub plb_rehash: Option<u64>,
    /// `TcpTimeoutRehash`: number of times a timeout wanted another label. The same caveat applies.
    pub timeout_rehash: Option<u64>,
    /// `TcpDuplicateDataRehash`: number of times a receiver saw the same data again and changed the label of its
    /// ACKs.
    pub duplicate_data_rehash: Option<u64>,
    /// `TCPDeliveredCE`: packets delivered with CE echoed.
    pub delivered_ce: Option<u64>,
    /// `TCPDelivered`: packets delivered.
    pub delivered: Option<u64>,
    /// `TCPTimeouts`: retransmission timeouts.
    pub timeouts: Option<u64>,
}

impl Counters {
    /// Reads the counters.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/thread-self/net/netstat")
            .map_err(|source| Error::kernel("reading /proc/net/netstat", "mount /proc", source))?;
        Self::parse(&text)
    }

    /// Parses `/proc/net/netstat`: pairs of lines, first names, then values, each starting with the name of the
    /// group.
    ///
    /// # Errors
    /// If names and values do not pair up.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::malformed("/proc/net/netstat", why);
        let mut lines = text.lines();
        let mut counters = None;
        while let Some(names) = lines.next() {
            let Some(names) = names.strip_prefix("TcpExt: ") else { continue };
            let values = lines
                .next()
                .and_then(|line| line.strip_prefix("TcpExt: "))
                .ok_or_else(|| bad("no values"))?;
            let names: Vec<&str> = names.split_whitespace().collect();
            let values: Vec<&str> = values.split_whitespace().collect();
            if names.len() != values.len() {
                return Err(bad("the numbers of names and values differ"));
            }
            let value = |name: &str| {
                let Some(index) = names.iter().position(|n| *n == name) else { return Ok(None) };
                values[index].parse().map(Some).map_err(|_| bad("a value is not a number"))
            };
            counters = Some(Self {
                plb_rehash: value("TCPPLBRehash")?,
                timeout_rehash: value("TcpTimeoutRehash")?,
                duplicate_data_rehash: value("TcpDuplicateDataRehash")?,
                delivered_ce: value("TCPDeliveredCE")?,
                delivered: value("TCPDelivered")?,
                timeouts: value("TCPTimeouts")?,
            });
        }
        counters.ok_or_else(|| bad("no TcpExt"))
    }

    /// Returns name and value of each counter, with the kernel's names.
    pub fn values(&self) -> [(&'static str, Option<u64>); 6] {
        [
            ("TCPPLBRehash", self.plb_rehash),
            ("TcpTimeoutRehash", self.timeout_rehash),
            ("TcpDuplicateDataRehash", self.duplicate_data_rehash),
            ("TCPDeliveredCE", self.delivered_ce),
            ("TCPDelivered", self.delivered),
            ("TCPTimeouts", self.timeouts),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shortened output of Linux 6.18; a kernel before 6.2 has no `TCPPLBRehash`.
    const NETSTAT: &str = "\
TcpExt: SyncookiesSent TCPTimeouts TCPDelivered TCPDeliveredCE TcpTimeoutRehash TcpDuplicateDataRehash TCPPLBRehash
TcpExt: 0 5 70000 159 3 1 18446744073709551615
IpExt: InNoRoutes InTruncatedPkts
IpExt: 0 0
";

    #[test]
    fn counters_are_found_by_name() {
        let counters = Counters::parse(NETSTAT).unwrap();
        assert_eq!(
            counters.values().map(|(_, value)| value),
            [Some(u64::MAX), Some(3), Some(1), Some(159), Some(70000), Some(5)]
        );
        let old = NETSTAT.replace(" TCPPLBRehash", "").replace(" 18446744073709551615", "");
        assert_eq!(Counters::parse(&old).unwrap().plb_rehash, None);
    }

    #[test]
    fn unpaired_names_and_values_are_an_error() {
        for text in [
            "".to_owned(),
            "IpExt: A\nIpExt: 1\n".to_owned(),
            NETSTAT.lines().next().unwrap().to_owned(),
            NETSTAT.replace(" 159", ""),
            NETSTAT.replace("18446744073709551615", "18446744073709551616"),
            NETSTAT.replace(" 3 ", " -3 "),
        ] {
            assert!(Counters::parse(&text).is_err(), "{text}");
        }
        let values_end = NETSTAT.find("IpExt").unwrap() - 1;
        let values_start = NETSTAT.find("\nTcpExt").unwrap();
        // A cut inside the last number is indistinguishable from a smaller number.
        for length in 0..values_end - "18446744073709551615".len() {
            assert!(Counters::parse(&NETSTAT[..length]).is_err(), "{length} of {values_start}");
        }
    }
}
