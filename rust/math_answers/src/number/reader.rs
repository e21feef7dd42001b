//! Reader of one number: digits and their separators, as an exact rational.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::value::Number;
use crate::error::ParseError;

/// Largest number of digits in one number, and largest exponent.
const MOST_DIGITS: usize = 4096;

/// Percent signs: plain, of TeX, and those of full and of half width.
const PERCENT_SIGNS: [&str; 4] = ["%", "\\%", "％", "﹪"];

/// Reads one number from `at` on.
pub(super) struct Reader<'t> {
    pub(super) text: &'t str,
    pub(super) at: usize,
    pub(super) digits: usize,
}

impl<'t> Reader<'t> {
    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn take(&mut self, prefix: &str) -> bool {
        let found = self.rest().starts_with(prefix);
        if found {
            self.at += prefix.len();
        }
        found
    }

    fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start_matches([' ', '\u{a0}', '\u{202f}']).len();
    }

    fn digit_at(&self, offset: usize) -> bool {
        self.text.as_bytes().get(self.at + offset).is_some_and(u8::is_ascii_digit)
    }

    pub(super) fn number(&mut self) -> Result<Number, ParseError> {
        let mut face = if fraction_command(self.rest()).is_some() { self.fraction_command()? } else { self.plain()? };
        let after = self.at;
        let percent = self.percent();
        if !percent {
            self.skip_spaces();
            let words = [
                ("hundred", 100u64),
                ("thousand", 1000),
                ("million", 1_000_000),
                ("billion", 1_000_000_000),
                ("trillion", 1_000_000_000_000),
            ];
            match words.iter().find(|(word, _)| self.word(word)) {
                Some((_, factor)) => face *= RBig::from(*factor),
                None => self.at = after,
            }
        }
        Ok(Number { face, percent })
    }

    /// Take a percent sign or its word, also behind the end of a formula or of bold text: `$50$%`, `**50** percent`.
    fn percent(&mut self) -> bool {
        const BETWEEN: [&str; 10] = [" ", "\u{a0}", "\u{202f}", "~", "$", "*", "\\)", "\\,", "\\;", "\\ "];
        let before = self.at;
        while BETWEEN.iter().any(|mark| self.take(mark)) {}
        let signed = PERCENT_SIGNS.iter().any(|sign| self.take(sign)) || {
            let _ = self.take("\\text{") || self.take("\\mathrm{");
            self.skip_spaces();
            self.take("%") || self.take("\\%") || ["percent", "pct", "per cent"].iter().any(|word| self.word(word))
        };
        if !signed {
            self.at = before;
        }
        signed
    }

    /// Take a whole word.
    fn word(&mut self, word: &str) -> bool {
        let found = self.rest().get(..word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word))
            && !self.rest()[word.len()..].starts_with(char::is_alphabetic);
        if found {
            self.at += word.len();
        }
        found
    }

    /// A number with or without separators, a fraction, a mixed number, or scientific notation.
    fn plain(&mut self) -> Result<RBig, ParseError> {
        let mut digits = String::new();
        let whole = self.grouped(&mut digits);
        let mut decimals = 0;
        if self.rest().starts_with('.') && self.digit_at(1) {
            let count = run(&self.rest().as_bytes()[1..], u8::is_ascii_digit);
            digits.push_str(&self.rest()[1..=count]);
            (self.at, decimals) = (self.at + 1 + count, count);
        }
        // `1.2.3`, `1.234,5`: consumed whole, so that no part is read as another number.
        let mut clean = whole;
        while self.rest().starts_with(['.', ',']) && self.digit_at(1) {
            clean = false;
            self.at += 1 + run(&self.rest().as_bytes()[1..], u8::is_ascii_digit);
        }
        let exponent = self.exponent()?;
        let value = if clean { self.integer(&digits) } else { Err(ParseError::Unparseable) };
        if decimals == 0 && exponent == 0 {
            let before = self.at;
            self.skip_spaces();
            let spaced = self.at > before;
            if fraction_command(self.rest()).is_some() {
                let part = self.fraction_command()?;
                return if part.is_one() || part > RBig::ONE {
                    Err(ParseError::Unparseable)
                } else {
                    Ok(RBig::from(value?) + part)
                };
            }
            if spaced
                && self.digit_at(0)
                && let Some(part) = self.proper_fraction()
            {
                return Ok(RBig::from(value?) + part?);
            }
            self.at = before;
            if let Some(denominator) = self.denominator() {
                return ratio(value?, denominator?);
            }
        }
        let shift = exponent - decimals as i64;
        let power = IBig::from(10u8).pow(shift.unsigned_abs() as usize);
        if shift < 0 { ratio(value?, power) } else { Ok(RBig::from(value? * power)) }
    }

    /// Read digits with thousands separators into `digits`; true if the groups have three digits.
    fn grouped(&mut self, digits: &mut String) -> bool {
        let mut groups = 0;
        let mut good = true;
        let mut lead = 0;
        loop {
            let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
            digits.push_str(&self.rest()[..count]);
            self.at += count;
            groups += 1;
            if groups == 1 {
                lead = count;
            } else {
                good &= count == 3 && (1..=3).contains(&lead) && !digits.starts_with('0');
            }
            let mark =
                ["{,}", "\\,", ","].iter().find(|mark| self.rest().starts_with(**mark) && self.digit_at(mark.len()));
            match mark {
                Some(mark) => self.at += mark.len(),
                None => return good,
            }
        }
    }

    fn integer(&mut self, digits: &str) -> Result<IBig, ParseError> {
        self.digits += digits.len();
        if self.digits > MOST_DIGITS {
            return Err(ParseError::Undecided);
        }
        if digits.len() < 19 {
            return Ok(IBig::from(digits.bytes().fold(0u64, |value, digit| value * 10 + u64::from(digit - b'0'))));
        }
        UBig::from_str_radix(digits, 10).map(IBig::from).map_err(|_| ParseError::Unparseable)
    }

    /// The exponent of `e±n`, or of a multiplication sign and `10^n`; 0 without one.
    fn exponent(&mut self) -> Result<i64, ParseError> {
        let before = self.at;
        if self.rest().starts_with(['e', 'E']) {
            self.at += 1;
            if let Some(value) = self.signed_digits() {
                return value;
            }
            self.at = before;
            return Ok(0);
        }
        self.skip_spaces();
        if ["\\times", "\\cdot", "×", "·", "*", "x"].iter().any(|sign| self.take(sign)) {
            self.skip_spaces();
            if self.take("10^") {
                let braced = self.take("{");
                if let Some(value) = self.signed_digits()
                    && (!braced || self.take("}"))
                {
                    return value;
                }
            }
        }
        self.at = before;
        Ok(0)
    }

    fn signed_digits(&mut self) -> Option<Result<i64, ParseError>> {
        let negative = self.take("-") || self.take("−");
        if !negative {
            self.take("+");
        }
        let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
        let digits = &self.rest()[..count];
        self.at += count;
        if count == 0 || self.rest().starts_with(char::is_alphabetic) {
            return None;
        }
        let value = digits.parse::<i64>().ok().filter(|value| *value <= MOST_DIGITS as i64);
        Some(value.map(|value| if negative { -value } else { value }).ok_or(ParseError::Undecided))
    }

    /// The whole number `n` of `/ n`, not followed by another `/ n` or a decimal.
    fn denominator(&mut self) -> Option<Result<IBig, ParseError>> {
        let before = self.at;
        self.skip_spaces();
        if !self.take("/") {
            self.at = before;
            return None;
        }
        self.skip_spaces();
        if !self.digit_at(0) {
            self.at = before;
            return None;
        }
        let mut digits = String::new();
        let good = self.grouped(&mut digits);
        let more = self.rest().starts_with(['.', '/']) && self.digit_at(1);
        Some(if good && !more { self.integer(&digits) } else { Err(ParseError::Unparseable) })
    }

    /// The `1/2` of `3 1/2`; None where no fraction follows.
    fn proper_fraction(&mut self) -> Option<Result<RBig, ParseError>> {
        let before = self.at;
        let count = run(self.rest().as_bytes(), u8::is_ascii_digit);
        let digits = &self.rest()[..count];
        self.at += count;
        let Some(denominator) = self.denominator() else {
            self.at = before;
            return None;
        };
        let part = self.integer(digits).and_then(|top| ratio(top, denominator?));
        Some(part.and_then(|part| if part < RBig::ONE { Ok(part) } else { Err(ParseError::Unparseable) }))
    }

    /// `\frac{a}{b}` or `\frac12` of whole numbers.
    fn fraction_command(&mut self) -> Result<RBig, ParseError> {
        self.at += fraction_command(self.rest()).unwrap_or(0);
        let top = self.argument()?;
        let bottom = self.argument()?;
        ratio(top, bottom)
    }

    fn argument(&mut self) -> Result<IBig, ParseError> {
        self.skip_spaces();
        if !self.take("{") {
            let digit = self.rest().get(..1).filter(|_| self.digit_at(0)).ok_or(ParseError::Unparseable)?;
            self.at += 1;
            return self.integer(digit);
        }
        self.skip_spaces();
        let negative = self.take("-") || self.take("−");
        let mut digits = String::new();
        let good = self.digit_at(0) && self.grouped(&mut digits);
        self.skip_spaces();
        if !good || !self.take("}") {
            return Err(ParseError::Unparseable);
        }
        self.integer(&digits).map(|value| if negative { -value } else { value })
    }
}

fn ratio(top: IBig, bottom: IBig) -> Result<RBig, ParseError> {
    if bottom == IBig::ZERO { Err(ParseError::Unparseable) } else { Ok(RBig::from_parts_signed(top, bottom)) }
}

/// Number of leading bytes for which `inside` holds.
pub(super) fn run(bytes: &[u8], inside: impl Fn(&u8) -> bool) -> usize {
    bytes.iter().position(|byte| !inside(byte)).unwrap_or(bytes.len())
}

/// Length of a leading `\frac`, `\dfrac`, `\tfrac` or `\cfrac`.
pub(super) fn fraction_command(text: &str) -> Option<usize> {
    ["\\frac", "\\dfrac", "\\tfrac", "\\cfrac"].iter().find(|name| text.starts_with(**name)).map(|name| name.len())
}
