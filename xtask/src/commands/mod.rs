//! The commands, one file each, with an `Args` and a `run`.

pub(crate) mod ahead;
pub(crate) mod bench;
pub(crate) mod build;
pub(crate) mod chaos;
pub(crate) mod compose;
pub(crate) mod crates;
pub(crate) mod debian;
pub(crate) mod demo;
pub(crate) mod dist;
pub(crate) mod envoy;
pub(crate) mod fault;
pub(crate) mod fuzz;
pub(crate) mod gateway;
pub(crate) mod generators;
pub(crate) mod go;
pub(crate) mod guest;
pub(crate) mod helm;
pub(crate) mod native;
pub(crate) mod peers;
pub(crate) mod platform;
pub(crate) mod plb_guest;
pub(crate) mod reference;
pub(crate) mod silent;
pub(crate) mod sim;
pub(crate) mod soak;
pub(crate) mod test;
