//! Number tokens: where a literal ends, and which marks belong to it.

use super::Lexer;
use super::token::Kind;

/// Thousands marks; those that can be nothing else come first.
const MARKS: [&str; 11] = ["{,}", ",\\!", "\\!,", "{\\,}", "\\,", "\\ ", "\\;", "\\:", "~", ",", " "];

/// Digits of a numeral with letters in it.
const LONGEST_NUMERAL: usize = 256;

impl Lexer<'_> {
    fn digits_at(&self, at: usize) -> usize {
        self.bytes.get(at..).unwrap_or_default().iter().take_while(|byte| byte.is_ascii_digit()).count()
    }

    /// A number from here on; a point may lead it.
    pub(super) fn number(&mut self) {
        if self.single > 0 && self.byte(0) != b'.' {
            let digit = &self.text[self.at..=self.at];
            return self.emit(Kind::Number(digit), 1);
        }
        if self.numeral() {
            return;
        }
        let start = self.at;
        let lead = self.digits_at(start);
        let mut end = start + lead;
        let grouped = self.thousands(start, lead);
        if let Some(groups_end) = grouped {
            end = groups_end;
        }
        let mut decimal = false;
        if let Some(decimals_end) = self.decimals_at(end) {
            decimal = true;
            end = decimals_end;
            if self.bytes.get(end) == Some(&b'.') && self.digits_at(end + 1) > 0 {
                // `1.2.3` is a version or a section.
                while self.bytes.get(end).is_some_and(|byte| byte.is_ascii_digit() || *byte == b'.') {
                    end += 1;
                }
                return self.emit(Kind::Word(&self.text[start..end]), end - start);
            }
        } else if self.ordinal(end) {
            return self.emit(Kind::Word(&self.text[start..end + 2]), end + 2 - start);
        }
        if let Some(exponent_end) = self.exponent(start, end, decimal) {
            end = exponent_end;
        }
        self.emit(Kind::Number(&self.text[start..end]), end - start);
    }

    /// The end of groups of three digits with one kind of mark between them.
    fn thousands(&mut self, start: usize, lead: usize) -> Option<usize> {
        if !(1..=3).contains(&lead) || self.bytes[start] == b'0' || start < self.ungrouped_until {
            return None;
        }
        let mut end = start + lead;
        let follows = |at: usize, mark: &str| self.text[at..].starts_with(mark) && self.digits_at(at + mark.len()) > 0;
        let mark = MARKS.iter().find(|mark| follows(end, mark))?;
        let (mut good, mut zero) = (true, false);
        while follows(end, mark) {
            let count = self.digits_at(end + mark.len());
            // No number of a list starts with 0, but groups of thousands do.
            zero |= self.bytes[end + mark.len()] == b'0';
            good &= count == 3;
            end += mark.len() + count;
        }
        if *mark == " " && self.bytes.get(end) == Some(&b'/') {
            good = false;
        }
        if !good {
            self.ungrouped_until = end;
        }
        if *mark == "," {
            let currency = matches!(self.last(), Some(Kind::Currency(_)));
            let clear = zero || currency || (self.bytes.get(end) == Some(&b'.') && self.digits_at(end + 1) > 0);
            self.out.has_groups |= good && !clear;
            if !good || !(self.options.grouped || clear) {
                self.ungrouped_until = end;
                return None;
            }
        }
        good.then_some(end)
    }

    /// The end of a point and its decimals, a repeating part and dots that go on included.
    pub(super) fn decimals_at(&self, at: usize) -> Option<usize> {
        if self.bytes.get(at) != Some(&b'.') {
            return None;
        }
        let count = self.digits_at(at + 1);
        let mut end = at + 1 + count;
        let repeating = self.repeating_at(end);
        if count == 0 && repeating.is_none() {
            return None;
        }
        if let Some(repeating_end) = repeating {
            return Some(repeating_end);
        }
        let rest = &self.text[end..];
        if let Some(dots) = ["...", "\\ldots", "\\dots", "\\cdots"].iter().find(|dots| rest.starts_with(**dots)) {
            end += dots.len();
        }
        Some(end)
    }

    /// The end of `\overline{3}`, `\bar3`, `(3)` or `\dot{1}4\dot{2}`.
    fn repeating_at(&self, at: usize) -> Option<usize> {
        let rest = &self.text[at..];
        let argument = |at: usize| {
            if self.bytes.get(at) == Some(&b'{') {
                let count = self.digits_at(at + 1);
                (count > 0 && self.bytes.get(at + 1 + count) == Some(&b'}')).then_some(at + count + 2)
            } else {
                (self.digits_at(at) > 0).then_some(at + 1)
            }
        };
        if rest.starts_with('(') {
            let count = self.digits_at(at + 1);
            return (count > 0 && self.bytes.get(at + 1 + count) == Some(&b')')).then_some(at + count + 2);
        }
        if let Some(name) = ["\\overline", "\\bar"].iter().find(|name| rest.starts_with(**name)) {
            return argument(at + name.len());
        }
        let mut end = None;
        let mut from = at;
        while self.text[from..].starts_with("\\dot") {
            let Some(dotted) = argument(from + "\\dot".len()) else { break };
            end = Some(dotted);
            from = dotted + self.digits_at(dotted);
        }
        end
    }

    /// `st`, `nd`, `rd` or `th` directly behind an integer.
    fn ordinal(&self, end: usize) -> bool {
        let rest = &self.text[end..];
        rest.get(..2).is_some_and(|suffix| matches!(suffix, "st" | "nd" | "rd" | "th"))
            && !rest[2..].starts_with(char::is_alphabetic)
    }

    /// The end of `e-3`, unless it is Euler's number less three.
    fn exponent(&mut self, start: usize, end: usize, decimal: bool) -> Option<usize> {
        let letter = *self.bytes.get(end)?;
        if !matches!(letter, b'e' | b'E') {
            return None;
        }
        let signed = matches!(self.bytes.get(end + 1), Some(b'+' | b'-'));
        let digits = end + 1 + usize::from(signed);
        let count = self.digits_at(digits);
        if count == 0 || self.text[digits + count..].starts_with(char::is_alphabetic) {
            return None;
        }
        let clear = letter == b'E' || decimal || !signed || &self.text[start..end] == "1";
        if !clear {
            self.out.has_exponents = true;
            if !self.options.exponents {
                return None;
            }
        }
        Some(digits + count)
    }

    /// Digits and capital letters with a base above ten: `2BF_{16}`. Emits the token if that is what stands here.
    pub(super) fn numeral(&mut self) -> bool {
        let run = self.bytes[self.at..].iter().take(LONGEST_NUMERAL);
        let length = run.take_while(|byte| byte.is_ascii_digit() || byte.is_ascii_uppercase()).count();
        let digits = &self.text[self.at..self.at + length];
        if length < 2 || !digits.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return false;
        }
        let Some(subscript) = self.text[self.at + length..].strip_prefix('_') else { return false };
        let base = subscript.trim_start_matches('{');
        let braces = subscript.len() - base.len();
        let count = base.bytes().take_while(u8::is_ascii_digit).count();
        let closes = base[count..].bytes().take_while(|byte| *byte == b'}').count();
        let Some(value) = base[..count].parse::<u8>().ok().filter(|base| (11..=36).contains(base)) else {
            return false;
        };
        if braces > 1 || closes < braces || !digits.chars().all(|c| c.is_digit(u32::from(value))) {
            return false;
        }
        self.emit(Kind::Numeral { digits, base: value }, length + 1 + braces + count + braces);
        true
    }
}
