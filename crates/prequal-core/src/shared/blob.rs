//! Blobs: state that the workers of an Envoy share, encoded as bytes in its shared data.
//!
//! A blob begins with a [`Tag`]. Bytes that do not decode are ignored, and the caller starts with the initial state.

use std::borrow::Cow;

use bytemuck::{Pod, Zeroable};

/// State that workers share, either as bytes or as values in common memory. The default is the initial state.
pub trait Blob: Default + Send + Sync + 'static {
    /// Tag at the beginning of the encoded bytes.
    const TAG: Tag;

    /// Decodes a blob.
    ///
    /// # Errors
    /// [`BlobError`] for anything that [`Self::encode`] of this version did not write.
    fn decode(bytes: &[u8]) -> Result<Self, BlobError>;

    /// Encodes the blob.
    fn encode(&self) -> Cow<'_, [u8]>;
}

/// Kind of a blob, and its version.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct Tag([u8; 6]);

impl Tag {
    pub(crate) const fn new(magic: u32, version: u16) -> Self {
        let [a, b, c, d] = magic.to_le_bytes();
        let [e, f] = version.to_le_bytes();
        Self([a, b, c, d, e, f])
    }

    /// Returns the tag of `version`. In a build that simulates another release, it is the tag of the next version.
    pub(crate) const fn of_release(magic: u32, version: u16) -> Self {
        Self::new(magic, if cfg!(feature = "next-blob") { version + 1 } else { version })
    }

    /// Version number, which is part of the blob's key.
    pub const fn version(self) -> u16 {
        let [.., e, f] = self.0;
        u16::from_le_bytes([e, f])
    }

    pub(crate) fn check(&self, bytes: &[u8]) -> Result<(), BlobError> {
        if bytes.starts_with(&self.0) { Ok(()) } else { Err(BlobError::Version) }
    }
}

/// Reason why a blob was not read.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum BlobError {
    /// The size is not that of this version.
    #[error("blob has {got} bytes, this version has {want}")]
    Size {
        /// Bytes found.
        got: usize,
        /// Bytes expected.
        want: usize,
    },
    /// The magic number or the version differs.
    #[error("blob was written by another version")]
    Version,
    /// A count or rate is out of range.
    #[error("blob holds a value out of range")]
    Content,
}

/// Reads a blob whose bytes are those of the value itself. Its content is not checked.
pub(crate) fn read_plain<B: Blob + Pod>(bytes: &[u8]) -> Result<B, BlobError> {
    if bytes.len() != size_of::<B>() {
        return Err(BlobError::Size { got: bytes.len(), want: size_of::<B>() });
    }
    B::TAG.check(bytes)?;
    Ok(bytemuck::pod_read_unaligned(bytes))
}
