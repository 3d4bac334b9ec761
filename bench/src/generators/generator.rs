//! The generators by name.

use anyhow::Result;
use clap::ValueEnum;

use super::order::{self, Order};
use super::{fortio, h2load, oha, vegeta};
use crate::process;
use crate::stats::Sample;

/// A load generator.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Generator {
    /// This program's own (`load.rs`): an open loop that counts its own lateness.
    #[value(skip)]
    Ours,
    /// An open loop
    Vegeta,
    /// Connections, each at its own pace
    Fortio,
    /// Connections, each at its own pace
    H2load,
    /// An open loop
    Oha,
}

impl Generator {
    pub(super) const OTHERS: [Self; 4] = [Self::Vegeta, Self::Fortio, Self::H2load, Self::Oha];

    /// The name, which is also the program's.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Vegeta => "vegeta",
            Self::Fortio => "fortio",
            Self::H2load => "h2load",
            Self::Oha => "oha",
        }
    }

    /// What delays a request: nothing (`open`), or the previous one on its connection (`paced`).
    pub(super) fn pacing(self) -> &'static str {
        match self {
            Self::Ours | Self::Vegeta | Self::Oha => "open",
            Self::Fortio | Self::H2load => "paced",
        }
    }

    /// Whether its program is installed.
    pub(super) fn is_installed(self) -> bool {
        process::find(self.name()).is_some()
    }

    /// Runs the program. Blocks.
    ///
    /// # Panics
    /// If it is our own generator, which is not a program.
    pub(super) fn send(self, order: &Order) -> Result<Vec<Sample>> {
        let records = match self {
            Self::Ours => panic!("our own generator is not a program"),
            Self::Vegeta => vegeta::send(order),
            Self::Fortio => fortio::send(order),
            Self::H2load => h2load::send(order),
            Self::Oha => oha::send(order),
        };
        Ok(order::samples(&records?))
    }
}
