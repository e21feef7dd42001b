//! Number literals: digits with marks, decimals, repeating parts and exponents, to exact rationals under a size cap.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::ast::NumberForm;
use crate::error::ParseError;

/// The largest decimal exponent, and with it about the largest number: 10^19000 has 63 kbit.
pub const LARGEST_EXPONENT: usize = 19_000;

/// The value of a number token.
///
/// # Errors
/// [`ParseError::Undecided`] for an exponent past [`LARGEST_EXPONENT`], [`ParseError::Unparseable`] without digits.
pub fn value(raw: &str) -> Result<(RBig, NumberForm), ParseError> {
    if raw.len() < 19 && raw.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok((RBig::from(small(raw)), NumberForm::Integer));
    }
    let mut parts = Parts::default();
    let exponent = parts.read(raw)?;
    let form = match (parts.repeating.is_empty(), exponent) {
        (false, _) => NumberForm::Repeating,
        (true, Some(_)) => NumberForm::Scientific,
        (true, None) if parts.point => {
            NumberForm::Decimal { places: u16::try_from(parts.places).map_err(|_| ParseError::Undecided)? }
        }
        (true, None) => NumberForm::Integer,
    };
    let whole = integer(&parts.digits)?;
    let value = if parts.repeating.is_empty() {
        scaled(IBig::from(whole), exponent.unwrap_or(0) - parts.places as i64)?
    } else {
        // 0.a(b) = (ab - a) / (10^|a| (10^|b| - 1))
        let length = parts.repeating.len();
        let all = integer(&[parts.digits.as_str(), parts.repeating.as_str()].concat())?;
        let nines = power_of_ten(length)? - UBig::ONE;
        RBig::from_parts(IBig::from(all) - IBig::from(whole), nines * power_of_ten(parts.places)?)
    };
    Ok((value, form))
}

/// Whole and decimal digits, and those that repeat.
#[derive(Default)]
struct Parts {
    digits: String,
    repeating: String,
    places: usize,
    point: bool,
}

impl Parts {
    /// Sort the digits; the exponent where there is one.
    fn read(&mut self, raw: &str) -> Result<Option<i64>, ParseError> {
        let bytes = raw.as_bytes();
        let mut inside = false;
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            match byte {
                b'0'..=b'9' if inside => self.repeating.push(char::from(byte)),
                b'0'..=b'9' => {
                    self.digits.push(char::from(byte));
                    self.places += usize::from(self.point);
                }
                b'.' if !self.point => self.point = true,
                b'.' => return self.go_on(),
                b'e' | b'E' => return exponent(&raw[at + 1..]).map(Some),
                b'(' => inside = true,
                b'\\' if raw[at..].starts_with("\\dot") => {
                    return self.dotted(&raw[at..]).map(|()| None);
                }
                b'\\' => {
                    let name = bytes[at + 1..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
                    if raw[at + 1..at + 1 + name].ends_with("dots") {
                        return self.go_on();
                    }
                    inside |= name > 1;
                    at += name;
                }
                _ => {}
            }
            at += 1;
        }
        if self.digits.is_empty() && self.repeating.is_empty() { Err(ParseError::Unparseable) } else { Ok(None) }
    }

    /// `0.333...`: the block that fills the end of the decimals, three times if it is a single digit, else twice;
    /// without one the decimals stand as they are.
    fn go_on(&mut self) -> Result<Option<i64>, ParseError> {
        const LONGEST: usize = 24;
        let decimals = &self.digits.as_bytes()[self.digits.len() - self.places..];
        let period = (1..=LONGEST.min(decimals.len() / 2)).find(|period| {
            let tail = decimals.len().checked_sub(if *period == 1 { 3 } else { 2 * period });
            tail.is_some_and(|tail| decimals[tail..].iter().zip(&decimals[tail + period..]).all(|(a, b)| a == b))
        });
        if let Some(period) = period {
            self.repeating = self.digits.split_off(self.digits.len() - period);
            self.places -= period;
        }
        Ok(None)
    }

    /// `\dot{1}42\dot{8}`: from the first dot to the last.
    fn dotted(&mut self, raw: &str) -> Result<(), ParseError> {
        self.repeating = raw.chars().filter(char::is_ascii_digit).collect();
        if self.repeating.is_empty() { Err(ParseError::Unparseable) } else { Ok(()) }
    }
}

fn exponent(raw: &str) -> Result<i64, ParseError> {
    raw.parse::<i64>()
        .ok()
        .filter(|exponent| exponent.unsigned_abs() <= LARGEST_EXPONENT as u64)
        .ok_or(ParseError::Undecided)
}

fn small(digits: &str) -> u64 {
    digits.bytes().fold(0, |value, digit| value * 10 + u64::from(digit - b'0'))
}

/// The value of plain digits.
pub fn integer(digits: &str) -> Result<UBig, ParseError> {
    if digits.len() < 19 {
        return Ok(UBig::from(small(digits)));
    }
    if digits.len() > LARGEST_EXPONENT {
        return Err(ParseError::Undecided);
    }
    UBig::from_str_radix(digits, 10).map_err(|_| ParseError::Unparseable)
}

fn power_of_ten(exponent: usize) -> Result<UBig, ParseError> {
    if exponent > LARGEST_EXPONENT { Err(ParseError::Undecided) } else { Ok(UBig::from(10u8).pow(exponent)) }
}

/// `value · 10^exponent`.
///
/// # Errors
/// [`ParseError::Undecided`] for an exponent past [`LARGEST_EXPONENT`].
pub fn scaled(value: IBig, exponent: i64) -> Result<RBig, ParseError> {
    let power = power_of_ten(usize::try_from(exponent.unsigned_abs()).map_err(|_| ParseError::Undecided)?)?;
    Ok(if exponent < 0 { RBig::from_parts(value, power) } else { RBig::from(value * IBig::from(power)) })
}

/// The value of digits in a base, with or without a point; `None` for a digit that the base does not have.
#[must_use]
pub fn in_base(digits: &str, base: u8) -> Option<RBig> {
    if !(2..=36).contains(&base) {
        return None;
    }
    let (whole, places) = match digits.split_once('.') {
        Some((whole, decimals)) => ([whole, decimals].concat(), decimals.len()),
        None => (digits.to_owned(), 0),
    };
    if whole.is_empty() || whole.len() > LARGEST_EXPONENT / 2 || !whole.chars().all(|c| c.is_digit(u32::from(base))) {
        return None;
    }
    let value = UBig::from_str_radix(&whole.to_ascii_lowercase(), u32::from(base)).ok()?;
    Some(RBig::from_parts(IBig::from(value), UBig::from(base).pow(places)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(top: i64, bottom: u64) -> RBig {
        RBig::from_parts(IBig::from(top), UBig::from(bottom))
    }

    #[test]
    fn values_are_exact() {
        for (raw, top, bottom, form) in [
            ("42", 42, 1, NumberForm::Integer),
            ("1,234", 1234, 1, NumberForm::Integer),
            ("1{,}234", 1234, 1, NumberForm::Integer),
            ("1\\,234", 1234, 1, NumberForm::Integer),
            ("1,\\!234", 1234, 1, NumberForm::Integer),
            ("0.50", 1, 2, NumberForm::Decimal { places: 2 }),
            (".5", 1, 2, NumberForm::Decimal { places: 1 }),
            ("0.(3)", 1, 3, NumberForm::Repeating),
            ("0.1\\overline{6}", 1, 6, NumberForm::Repeating),
            ("1.\\overline{27}", 14, 11, NumberForm::Repeating),
            ("0.\\overline3", 1, 3, NumberForm::Repeating),
            ("0.\\dot{1}42\\dot{8}", 1428, 9999, NumberForm::Repeating),
            ("0.333...", 1, 3, NumberForm::Repeating),
            ("0.1666\\ldots", 1, 6, NumberForm::Repeating),
            ("0.1818...", 2, 11, NumberForm::Repeating),
            ("3.14...", 157, 50, NumberForm::Decimal { places: 2 }),
            ("1.5e-3", 3, 2000, NumberForm::Scientific),
            ("2E5", 200_000, 1, NumberForm::Scientific),
        ] {
            assert_eq!(value(raw), Ok((ratio(top, bottom), form)), "{raw}");
        }
    }

    #[test]
    fn sizes_are_capped() {
        assert_eq!(value("1e999999999"), Err(ParseError::Undecided));
        assert_eq!(value("1e99999999999999999999999"), Err(ParseError::Undecided));
        assert!(value("1e-19000").is_ok());
        assert!(value(&"9".repeat(16 * 1024)).is_ok());
    }

    #[test]
    fn bases() {
        assert_eq!(in_base("52", 8), Some(ratio(42, 1)));
        assert_eq!(in_base("2BF", 16), Some(ratio(703, 1)));
        assert_eq!(in_base("0.1", 2), Some(ratio(1, 2)));
        assert_eq!(in_base("82", 8), None);
        assert_eq!(in_base("1", 1), None);
    }
}
