//! Units of measure: names, dimensions and exact factors; currencies; and counted things, which have only a name.

mod measures;

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

pub use measures::DIMENSIONS;
use measures::{INDEX, Measure, NONE, SYMBOL_PREFIXES, WORD_PREFIXES};

/// A product of powers of units: `m/s^2`, `cm^2`, `mph`, `dollars`, `apples`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Exponents of length, mass, time, current, temperature, amount, luminosity, information. All zero for radians.
    pub dimension: [i8; DIMENSIONS],
    /// The value of one such unit in the coherent units of its dimension (SI; bits; whole currency), exact.
    pub factor: RBig,
    /// Parts that nothing converts: currencies by code, temperature scales, counted things by their stem (the same in singular and plural); sorted by
    /// name, with exponents other than 0.
    pub named: Vec<(Box<str>, i8)>,
    /// Whether it is of an unnamed unit: `units`, `square units`, whose power is that of the name `unit`.
    pub placeholder: bool,
}

/// The name of the unnamed unit.
const UNNAMED: &str = "unit";

impl Unit {
    /// The unit of bare numbers.
    #[must_use]
    pub fn one() -> Self {
        Self { dimension: [0; DIMENSIONS], factor: RBig::ONE, named: Vec::new(), placeholder: false }
    }

    /// Whether both measure the same thing, so that their factors may be compared.
    #[must_use]
    pub fn commensurable(&self, other: &Self) -> bool {
        self.dimension == other.dimension && self.named == other.named
    }

    /// Whether one of both is of an unnamed unit that may stand for the unit of the other: `square units` for `cm^2`, but
    /// not for `cm` or `cubic units`; `units` for anything but a power of a length.
    #[must_use]
    pub fn stands_for(&self, other: &Self) -> bool {
        match (self.placeholder, other.placeholder) {
            (false, false) => false,
            (true, true) => self == other,
            (false, true) => other.stands_for(self),
            (true, false) => {
                let mut rest = self.named.iter().filter(|(name, _)| **name != *UNNAMED);
                let power = self.named.iter().find(|(name, _)| **name == *UNNAMED).map_or(0, |(_, power)| *power);
                let alone = rest.next().is_none() && self.dimension == NONE;
                let mut length = NONE;
                length[0] = other.dimension[0];
                let powers = other.dimension[0] != 0 && other.dimension == length && other.named.is_empty();
                alone && if powers { power == other.dimension[0] } else { power == 1 }
            }
        }
    }

    /// Something that is counted: any word, by its stem.
    #[must_use]
    pub fn counted(word: &str) -> Self {
        Self { named: vec![(singular(word).into(), 1)], ..Self::one() }
    }

    /// A currency or a temperature scale.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { named: vec![(name.into(), 1)], ..Self::one() }
    }

    /// The code of the currency that a word names in full.
    #[must_use]
    pub fn currency_code(word: &str) -> Option<&'static str> {
        let named = currency(word).filter(|unit| unit.factor.is_one())?.named;
        ["USD", "EUR", "GBP", "INR", "JPY", "CNY", "MXN", "RUB", "KRW", "CHF", "BRL", "MYR"]
            .into_iter()
            .find(|code| named.first().is_some_and(|(name, _)| **name == **code))
    }

    /// The unit that a word or a symbol names; symbols by their case, words in singular or plural.
    #[must_use]
    pub fn known(word: &str) -> Option<Self> {
        if matches!(word, "unit" | "units" | "Units" | "Unit") {
            return Some(Self { placeholder: true, ..Self::named(UNNAMED) });
        }
        // Prefix and symbol only by accident.
        if matches!(word, "pm" | "us" | "dB" | "pH" | "nd" | "PT") {
            return None;
        }
        if let Some(unit) = currency(word) {
            return Some(unit);
        }
        if let Some(measure) = INDEX.symbols.get(word) {
            return Some(measure.unit(0));
        }
        for (prefix, power) in SYMBOL_PREFIXES {
            if let Some(symbol) = word.strip_prefix(prefix)
                && let Some(measure) = INDEX.symbols.get(symbol).filter(|measure| measure.metric)
            {
                return Some(measure.unit(power));
            }
        }
        if word.len() > LONGEST_NAME || !word.is_ascii() {
            return None;
        }
        let lower = word.to_ascii_lowercase();
        let by_name = |name: &str| INDEX.names.get(name).copied();
        let singular = singular(&lower);
        if let Some(measure) = by_name(&lower).or_else(|| by_name(&singular)) {
            return Some(measure.unit(0));
        }
        WORD_PREFIXES.iter().find_map(|(prefix, power)| {
            let measure = by_name(singular.strip_prefix(prefix)?).filter(|measure| measure.metric)?;
            Some(measure.unit(*power))
        })
    }

    /// A millionth of it.
    #[must_use]
    pub fn millionth(self) -> Self {
        Self { factor: self.factor / RBig::from(1_000_000), ..self }
    }

    /// Multiply by a power of another unit; exponents saturate.
    pub fn multiply(&mut self, other: &Self, power: i8) {
        for (exponent, more) in self.dimension.iter_mut().zip(other.dimension) {
            *exponent = exponent.saturating_add(more.saturating_mul(power));
        }
        if !other.factor.is_one() {
            self.factor = &self.factor * other.factor.pow(isize::from(power.clamp(-MOST_POWER, MOST_POWER)));
        }
        for (name, exponent) in &other.named {
            let exponent = exponent.saturating_mul(power);
            match self.named.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) => *known = known.saturating_add(exponent),
                None => self.named.push((name.clone(), exponent)),
            }
        }
        self.named.retain(|(_, exponent)| *exponent != 0);
        self.named.sort();
        self.placeholder = self.named.iter().any(|(name, _)| **name == *UNNAMED);
    }
}

/// Past this a power of a unit is nonsense, and its factor is not computed in full.
const MOST_POWER: i8 = 12;
const LONGEST_NAME: usize = 32;

impl Measure {
    /// One of it with a metric prefix of 10^`prefix`.
    fn unit(&self, prefix: i8) -> Unit {
        let (top, bottom, power) = self.factor;
        let power = power + prefix;
        let ten = UBig::from(10u8).pow(usize::from(power.unsigned_abs()));
        let (top, bottom) = (UBig::from(top), UBig::from(bottom));
        let factor = if power < 0 {
            RBig::from_parts(IBig::from(top), bottom * ten)
        } else {
            RBig::from_parts(IBig::from(top * ten), bottom)
        };
        Unit { dimension: self.dimension, factor, ..Unit::one() }
    }
}

/// Currencies by name and code; hundredths under the code of the whole.
fn currency(word: &str) -> Option<Unit> {
    const CURRENCIES: [(&[&str], &str); 12] = [
        (&["dollar", "dollars", "usd", "buck", "bucks"], "USD"),
        (&["euro", "euros", "eur"], "EUR"),
        (&["gbp", "sterling"], "GBP"),
        (&["rupee", "rupees", "inr", "rs"], "INR"),
        (&["yen", "jpy"], "JPY"),
        (&["yuan", "rmb", "cny"], "CNY"),
        (&["peso", "pesos", "mxn"], "MXN"),
        (&["ruble", "rubles", "rouble", "roubles", "rub"], "RUB"),
        (&["krw"], "KRW"),
        (&["franc", "francs", "chf"], "CHF"),
        (&["brl"], "BRL"),
        (&["ringgit", "myr"], "MYR"),
    ];
    if word.len() > LONGEST_NAME {
        return None;
    }
    let word = word.to_ascii_lowercase();
    if matches!(word.as_str(), "cent" | "cents" | "pence" | "penny") {
        let code = if word.starts_with('c') { "USD" } else { "GBP" };
        let hundredth = RBig::from_parts(IBig::ONE, UBig::from(100u8));
        return Some(Unit { factor: hundredth, ..Unit::named(code) });
    }
    CURRENCIES.iter().find(|(names, _)| names.contains(&word.as_str())).map(|(_, code)| Unit::named(code))
}

/// A noun in lower case without the ending of its plural; the same stem for both numbers, not always a word.
fn singular(word: &str) -> String {
    const IRREGULAR: [(&str, &str); 7] = [
        ("people", "person"),
        ("persons", "person"),
        ("men", "man"),
        ("women", "woman"),
        ("children", "child"),
        ("inches", "inch"),
        ("feet", "feet"),
    ];
    let lower = word.to_lowercase();
    if let Some((_, one)) = IRREGULAR.iter().find(|(many, _)| *many == lower) {
        return (*one).to_owned();
    }
    let plural = ["sses", "shes", "ches", "xes", "zes"].iter().any(|ending| lower.ends_with(ending));
    let stem = if plural {
        &lower[..lower.len() - 2]
    } else {
        lower.strip_suffix('s').filter(|stem| stem.len() > 2 && !stem.ends_with(['s', 'u', 'i'])).unwrap_or(&lower)
    };
    // `cities` and `cookie` have lost what tells `-y` from `-ie`, `buses` and `houses` what tells `-s` from `-se`.
    match (stem.strip_suffix("ie"), stem.strip_suffix('e')) {
        (Some(short), _) if short.len() > 1 => format!("{short}y"),
        (_, Some(short)) if short.len() > 2 && short.ends_with(['s', 'o']) => short.to_owned(),
        _ => stem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factor(word: &str) -> RBig {
        Unit::known(word).unwrap().factor
    }

    fn ratio(top: u64, bottom: u64) -> RBig {
        RBig::from_parts(IBig::from(top), UBig::from(bottom))
    }

    #[test]
    fn factors_are_exact() {
        for (word, top, bottom) in [
            ("cm", 1, 100),
            ("km", 1000, 1),
            ("kilometers", 1000, 1),
            ("inches", 254, 10_000),
            ("feet", 3048, 10_000),
            ("mL", 1, 1_000_000),
            ("kg", 1, 1),
            ("hours", 3600, 1),
            ("mph", 1397, 3125),
            ("cents", 1, 100),
            ("kWh", 3_600_000, 1),
        ] {
            assert_eq!(factor(word), ratio(top, bottom), "{word}");
        }
        assert!(Unit::known("apples").is_none());
        assert!(Unit::known("Kg").is_none());
    }

    #[test]
    fn products_of_units() {
        let mut speed = Unit::known("km").unwrap();
        speed.multiply(&Unit::known("h").unwrap(), -1);
        assert!(speed.commensurable(&Unit::known("mph").unwrap()));
        assert_eq!(speed.factor, factor("kph"));
        let mut price = Unit::known("dollars").unwrap();
        price.multiply(&Unit::counted("Apples"), -1);
        assert_eq!(price.named, [("USD".into(), 1), ("apple".into(), -1)]);
        price.multiply(&Unit::counted("apple"), 1);
        assert_eq!(price, Unit::known("USD").unwrap());
        assert!(!Unit::known("dollar").unwrap().commensurable(&Unit::known("euro").unwrap()));
    }

    #[test]
    fn an_unnamed_unit_keeps_its_power() {
        let power = |word: &str, exponent: i8| {
            let mut unit = Unit::one();
            unit.multiply(&Unit::known(word).unwrap(), exponent);
            unit
        };
        assert!(power("units", 2).stands_for(&power("cm", 2)));
        assert!(power("km", 3).stands_for(&power("unit", 3)));
        assert!(power("units", 1).stands_for(&Unit::known("dollars").unwrap()));
        assert!(power("units", 1).stands_for(&power("units", 1)));
        for (left, right) in [(2, 3), (1, 2), (2, 1)] {
            assert!(!power("units", left).stands_for(&power("cm", right)), "{left} {right}");
            assert!(!power("units", left).stands_for(&power("units", right)), "{left} {right}");
        }
        assert!(!power("units", 2).stands_for(&Unit::known("dollars").unwrap()));
        assert!(!power("m", 2).stands_for(&power("cm", 2)));
    }

    #[test]
    fn nouns_in_the_singular() {
        for (many, one) in [
            ("cookies", "cooky"),
            ("cookie", "cooky"),
            ("houses", "hous"),
            ("house", "hous"),
            ("ways", "way"),
            ("boxes", "box"),
            ("cities", "city"),
            ("People", "person"),
            ("bus", "bus"),
            ("gas", "gas"),
        ] {
            assert_eq!(singular(many), one);
        }
    }
}
