//! Removes exports from a WebAssembly module, because Envoy calls every callback that a module exports, even those that
//! do nothing. The code behind them stays in the module. `toolchain.rs` decides which exports are removed.

use anyhow::{Context as _, Result, ensure};

/// Number of the section that lists the module's exports.
const EXPORTS: u8 = 7;
/// Length of the magic number and version.
const HEADER: usize = 8;

/// The module without the named exports.
pub(crate) fn without(module: &[u8], names: &[&str]) -> Result<Vec<u8>> {
    let (header, mut rest) = module.split_at_checked(HEADER).context("the module has no header")?;
    let mut kept = header.to_vec();
    while let [id, after @ ..] = rest {
        let mut after = after;
        let size = number(&mut after)?;
        let section = take(&mut after, size)?;
        rest = after;
        let section = if *id == EXPORTS { drop_from(section, names)? } else { section.to_vec() };
        kept.push(*id);
        append(&mut kept, section.len());
        kept.extend(section);
    }
    Ok(kept)
}

fn drop_from(mut section: &[u8], names: &[&str]) -> Result<Vec<u8>> {
    let count = number(&mut section)?;
    let (mut left, mut kept) = (0, Vec::new());
    for _ in 0..count {
        let begin = section;
        let size = number(&mut section)?;
        let name = take(&mut section, size)?;
        // The kind of export, and its index.
        take(&mut section, 1)?;
        number(&mut section)?;
        if !names.iter().any(|dropped| dropped.as_bytes() == name) {
            left += 1;
            kept.extend_from_slice(&begin[..begin.len() - section.len()]);
        }
    }
    ensure!(count - left == names.len(), "the module does not export all of {names:?}");
    let mut section = Vec::new();
    append(&mut section, left);
    section.extend(kept);
    Ok(section)
}

fn take<'a>(bytes: &mut &'a [u8], size: usize) -> Result<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(size).context("the module is truncated")?;
    *bytes = rest;
    Ok(taken)
}

/// Reads an LEB128 number.
fn number(bytes: &mut &[u8]) -> Result<usize> {
    let mut number = 0;
    for shift in (0..usize::BITS).step_by(7) {
        let byte = take(bytes, 1)?[0];
        number |= usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    Ok(number)
}

fn append(bytes: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(exports: &[u8]) -> Vec<u8> {
        let long = [&[0, 0x80, 1][..], &[7; 128]].concat();
        [b"\0asm\x01\0\0\0", &long[..], &[EXPORTS, exports.len() as u8], exports, &[11, 1, 0]].concat()
    }

    #[test]
    fn only_the_named_exports_are_removed() {
        let whole = module(b"\x03\x02ab\x00\x05\x01a\x00\x80\x01\x03abc\x02\x00");
        assert_eq!(without(&whole, &["a"]).unwrap(), module(b"\x02\x02ab\x00\x05\x03abc\x02\x00"));
        assert!(without(&whole, &["b"]).is_err(), "there is no such export");
        assert!(without(&whole[..whole.len() - 1], &["a"]).is_err(), "it is truncated");
    }
}
