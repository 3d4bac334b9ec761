//! Errors in a configuration.

use std::fmt;

/// One error: the field, and what it must be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ConfigError {
    /// Path of the field, such as `clusters[0].q_rif`.
    pub field: String,
    /// What is wrong and which values are accepted.
    pub problem: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.field, self.problem)
    }
}

/// All errors in one configuration, never empty.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl ConfigErrors {
    pub(super) fn push(&mut self, field: &str, problem: String) {
        self.0.push(ConfigError { field: field.to_owned(), problem });
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
