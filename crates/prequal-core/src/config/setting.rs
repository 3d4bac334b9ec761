//! Reads and writes one setting as `keys.rs` declares it, and decides whether it has an effect.

use serde_json::{Value, json};

use super::fields::{Fields, name_of};
use super::{HOT, Settings};
use crate::client::pool::{Budget, HotRule};
use crate::client::settings::ChoiceSettings;

/// Values that a key accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// A whole number, from the lowest to the highest.
    Whole(u32, u32),
    /// A number, from the lowest to the highest.
    Number(f64, f64),
    /// A number as above, or 0 for off.
    NumberOrOff(f64, f64),
    /// `true` or `false`.
    Bool,
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// A list, an object or a text, from the smallest to the largest size.
    Many(usize, usize),
    /// A form described in words.
    Form(&'static str),
}

/// Where the value of a setting is stored. The function returns `None` if other settings leave no room for the value,
/// such as a rule without this parameter.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field {
    /// The value has a form of its own, which other code reads and writes.
    Special,
    U32(fn(&mut Settings) -> Option<&mut u32>),
    U64(fn(&mut Settings) -> Option<&mut u64>),
    Usize(fn(&mut Settings) -> Option<&mut usize>),
    F64(fn(&mut Settings) -> Option<&mut f64>),
    /// Set in milliseconds, stored in microseconds.
    MsAsUs(fn(&mut Settings) -> Option<&mut f64>),
    Flag(fn(&mut Settings) -> Option<&mut bool>),
    Hot(fn(&mut Settings) -> Option<&mut HotRule>),
}

/// One setting of a cluster: the parts of a key that are needed to read and write it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) name: &'static str,
    values: Values,
    needs: Option<(&'static str, &'static str)>,
    with_probes: bool,
    field: Field,
}

impl Setting {
    /// Fills a table before its settings are known.
    pub(super) const NONE: Self =
        Self { name: "", values: Values::Bool, needs: None, with_probes: false, field: Field::Special };

    /// Only for constants, where values that do not fit their field fail to compile.
    #[expect(clippy::panic, reason = "in constants it is the compiler that panics")]
    pub(super) const fn new(
        name: &'static str,
        values: Values,
        needs: Option<(&'static str, &'static str)>,
        with_probes: bool,
        field: Field,
    ) -> Self {
        match (field, values) {
            (Field::Special, _)
            | (Field::U32(_) | Field::U64(_) | Field::Usize(_), Values::Whole(..))
            | (Field::F64(_) | Field::MsAsUs(_), Values::Number(..) | Values::NumberOrOff(..))
            | (Field::Flag(_), Values::Bool)
            | (Field::Hot(_), Values::OneOf(_)) => {}
            _ => panic!("the field cannot hold these values"),
        }
        Self { name, values, needs, with_probes, field }
    }

    /// Reads the setting, if the object has it, and stores it.
    pub(super) fn read(&self, fields: &mut Fields<'_>, settings: &mut Settings) {
        match self.field {
            Field::Special => {}
            Field::U32(at) => store(at(settings), self.whole(fields)),
            Field::U64(at) => store(at(settings), self.whole(fields).map(u64::from)),
            Field::Usize(at) => store(at(settings), self.whole(fields).map(|whole| whole as usize)),
            Field::F64(at) => store(at(settings), self.number(fields)),
            Field::MsAsUs(at) => store(at(settings), self.number(fields).map(|ms| ms * 1000.0)),
            Field::Flag(at) => store(at(settings), fields.boolean(self.name)),
            Field::Hot(at) => store(at(settings), fields.choice(self.name, HOT)),
        }
    }

    /// Returns the value as an operator would write it; `None` if it has no effect.
    pub(super) fn written(&self, settings: &mut Settings) -> Option<Value> {
        if !self.has_effect(&settings.choice) {
            return None;
        }
        Some(match self.field {
            Field::Special => return None,
            Field::U32(at) => json!(at(settings)?),
            Field::U64(at) => json!(at(settings)?),
            Field::Usize(at) => json!(at(settings)?),
            Field::F64(at) => json!(at(settings)?),
            Field::MsAsUs(at) => json!(*at(settings)? / 1000.0),
            Field::Flag(at) => json!(at(settings)?),
            Field::Hot(at) => json!(name_of(*at(settings)?, HOT)),
        })
    }

    fn whole(&self, fields: &mut Fields<'_>) -> Option<u32> {
        let Values::Whole(low, high) = self.values else { return None };
        fields.whole((self.name, low..=high))
    }

    fn number(&self, fields: &mut Fields<'_>) -> Option<f64> {
        match self.values {
            Values::Number(low, high) => fields.number((self.name, low..=high)),
            Values::NumberOrOff(low, high) => fields.number_or_off((self.name, low..=high)),
            _ => None,
        }
    }

    /// Whether the setting has an effect with this rule and these modes.
    pub(super) fn has_effect(&self, choice: &ChoiceSettings) -> bool {
        let has_what_it_needs = match self.needs {
            Some(("rule", rule)) => choice.rule.name() == rule,
            Some(("mode", _)) => choice.uses_sync(),
            _ => true,
        };
        has_what_it_needs && !(self.with_probes && choice.rule.is_probe_free())
    }

    /// Whether the setting has an effect with this budget.
    pub(super) fn suits(&self, budget: Budget) -> bool {
        match self.needs {
            Some(("budget", needed)) => (needed == "fixed") == matches!(budget, Budget::Fixed { .. }),
            _ => true,
        }
    }

    /// Returns what to do about a setting without an effect.
    pub(super) fn remedy(&self) -> String {
        match self.needs {
            Some(("mode", _)) => {
                "needs \"mode\": \"sync\", or a route with \"sync\" in \"route_modes\"".to_owned()
            }
            Some((key @ "rule", value)) => format!("needs \"{key}\": \"{value}\""),
            _ => "has no effect with a rule that needs no probes (\"peak_ewma\", \"zuul_choice_of_two\"): leave it out"
                .to_owned(),
        }
    }
}

/// Stores a value if there is one and there is room for it.
fn store<T>(place: Option<&mut T>, value: Option<T>) {
    if let (Some(place), Some(value)) = (place, value) {
        *place = value;
    }
}
