//! Decodes and encodes `xds.data.orca.v3.OrcaLoadReport` in base64. It implements only as much of both encodings as
//! this message needs, so that the module for Envoy needs no protobuf library.

use std::collections::BTreeMap;

/// Fields of the message that are kept. Absent fields are 0.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Message<'a> {
    pub(super) cpu: f64,
    pub(super) memory: f64,
    pub(super) application: f64,
    pub(super) named: BTreeMap<&'a str, f64>,
}

impl<'a> Message<'a> {
    /// Returns `None` if the bytes are not such a message.
    pub(super) fn decode(mut bytes: &'a [u8]) -> Option<Self> {
        let mut message = Self::default();
        while !bytes.is_empty() {
            match field(&mut bytes)? {
                (1, value) => message.cpu = value.double()?,
                (2, value) => message.memory = value.double()?,
                (9, value) => message.application = value.double()?,
                (8, FieldValue::Bytes(entry)) => {
                    let (name, value) = named(entry)?;
                    message.named.insert(name, value);
                }
                (8, _) => return None,
                _ => {}
            }
        }
        Some(message)
    }
}

/// Decodes one entry of the map of named metrics.
fn named(mut entry: &[u8]) -> Option<(&str, f64)> {
    let (mut name, mut amount) = ("", 0.0);
    while !entry.is_empty() {
        match field(&mut entry)? {
            (1, FieldValue::Bytes(text)) => name = std::str::from_utf8(text).ok()?,
            (1, _) => return None,
            (2, value) => amount = value.double()?,
            _ => {}
        }
    }
    Some((name, amount))
}

enum FieldValue<'a> {
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
    /// A varint or 32 bits; no field that is read has such a type.
    Other,
}

impl FieldValue<'_> {
    fn double(self) -> Option<f64> {
        if let Self::Fixed64(bytes) = self { Some(f64::from_le_bytes(bytes)) } else { None }
    }
}

/// Takes the next field off `bytes` and returns its number and value.
fn field<'a>(bytes: &mut &'a [u8]) -> Option<(u64, FieldValue<'a>)> {
    let tag = varint(bytes)?;
    let value = match tag & 7 {
        0 => varint(bytes).map(|_| FieldValue::Other)?,
        1 => FieldValue::Fixed64(take(bytes, 8)?.try_into().ok()?),
        2 => {
            let length = usize::try_from(varint(bytes)?).ok()?;
            FieldValue::Bytes(take(bytes, length)?)
        }
        5 => take(bytes, 4).map(|_| FieldValue::Other)?,
        // Groups are long obsolete, and wire types 6 and 7 do not exist.
        _ => return None,
    };
    (tag >> 3 > 0).then_some((tag >> 3, value))
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let [byte] = *take(bytes, 1)? else { return None };
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Decodes base64. gRPC writes it without padding; others write it with padding.
pub(super) fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let bare = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    if bare.len() % 4 == 1 || (bare.len() < text.len() && !text.len().is_multiple_of(4)) {
        return None;
    }
    let mut decoded = Vec::with_capacity(bare.len() / 4 * 3 + 2);
    let (mut bits, mut count) = (0_u32, 0);
    for digit in bare {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            decoded.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    (bits == 0).then_some(decoded)
}

/// A message that is being encoded.
#[derive(Default)]
pub(in crate::wire::orca) struct Encoded(Vec<u8>);

impl Encoded {
    /// Appends a field of type `double`.
    pub(in crate::wire::orca) fn double(&mut self, number: u8, value: f64) {
        self.0.push(number << 3 | 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends an entry of the map of named metrics.
    pub(in crate::wire::orca) fn named(&mut self, name: &str, value: f64) {
        let mut entry = Self(vec![1 << 3 | 2]);
        entry.length(name.len());
        entry.0.extend_from_slice(name.as_bytes());
        entry.double(2, value);
        self.0.push(8 << 3 | 2);
        self.length(entry.0.len());
        self.0.append(&mut entry.0);
    }

    fn length(&mut self, mut length: usize) {
        while length >= 0x80 {
            self.0.push(length as u8 | 0x80);
            length >>= 7;
        }
        self.0.push(length as u8);
    }

    /// Returns the message in base64, with padding.
    pub(in crate::wire::orca) fn base64(&self) -> String {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::with_capacity(self.0.len().div_ceil(3) * 4);
        for part in self.0.chunks(3) {
            let bits =
                part.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
            for digit in 0..4 {
                let value = bits >> (18 - 6 * digit) & 0x3f;
                let written = DIGITS.get(value as usize).filter(|_| digit <= part.len());
                text.push(written.map_or('=', |digit| char::from(*digit)));
            }
        }
        text
    }
}
