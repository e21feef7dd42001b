//! Number tokens: where a literal ends, and which marks belong to it.

use super::Lexer;
use super::token::Kind;

/// What may stand beside the comma of a thousands mark, or alone in its place.
const SPACINGS: [&str; 9] = ["\\!", "\\,", "\\ ", "\\;", "\\:", "{\\,}", "{\\!}", "~", " "];
/// Pieces of one thousands mark: `,\! ` has three.
const LONGEST_MARK: usize = 4;

/// What separates two groups of digits.
#[derive(Clone, Copy)]
struct Mark<'t> {
    text: &'t str,
    /// Whether it may as well be the comma of a list: `,` and `,\,`, but not `{,}`, `,\!` or a space.
    doubtful: bool,
}

/// Parts of a numeral in fonts of their own.
const MOST_PARTS: usize = 4;
/// Digits of a numeral with letters in it.
const LONGEST_NUMERAL: usize = 256;

impl<'t> Lexer<'t> {
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
        } else if self.bytes.get(end..end + 2) == Some(b"./") && self.digits_at(end + 2) > 0 && lead > 0 {
            // `1./3`: a decimal without decimals.
            return self.emit(Kind::Number(&self.text[start..end]), end + 1 - start);
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
        let mark = self.mark_at(end)?;
        let follows = |at: usize| self.text[at..].starts_with(mark.text) && self.digits_at(at + mark.text.len()) > 0;
        let (mut good, mut zero) = (true, false);
        while follows(end) {
            let count = self.digits_at(end + mark.text.len());
            // No number of a list starts with 0, but groups of thousands do.
            zero |= self.bytes[end + mark.text.len()] == b'0';
            good &= count == 3;
            end += mark.text.len() + count;
        }
        if mark.text == " " && self.bytes.get(end) == Some(&b'/') {
            good = false;
        }
        if !good {
            self.ungrouped_until = end;
        }
        if mark.doubtful {
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

    /// The thousands mark here, if a digit follows it: a comma, spacing, or a comma with thin or negative space behind it.
    fn mark_at(&self, start: usize) -> Option<Mark<'t>> {
        let rest: &'t str = &self.text[start..];
        let mut length = 0;
        let (mut comma, mut braced, mut negative, mut wide) = (false, false, false, false);
        for _ in 0..LONGEST_MARK {
            let here = &rest[length..];
            if here.starts_with(|c: char| c.is_ascii_digit()) {
                break;
            }
            if let Some(mark) = ["{,}", "{, }", ","].iter().find(|mark| here.starts_with(**mark)).filter(|_| !comma) {
                comma = true;
                braced |= mark.len() > 1;
                length += mark.len();
            } else {
                let spacing = SPACINGS.iter().find(|spacing| here.starts_with(**spacing))?;
                negative |= spacing.contains('!');
                wide |= !(spacing.contains('!') || spacing.contains("\\,"));
                length += spacing.len();
            }
        }
        let text = &rest[..length];
        // `1, 2` is a list, and so is `1,\ 2`.
        let list = comma && wide && !negative && !braced;
        (length > 0 && self.digits_at(start + length) > 0 && !list)
            .then_some(Mark { text, doubtful: comma && !braced && !negative })
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

    /// Digits and capital letters with a base above ten: `2BF_{16}`, also `\text{A5}_{11}` and `5\text{A}_{11}`. Emits the
    /// token if that is what stands here.
    pub(super) fn numeral(&mut self) -> bool {
        let rest = self.rest();
        let (mut length, mut letters, mut plain) = (0, false, true);
        for _ in 0..MOST_PARTS {
            let run = |text: &str| {
                text.bytes().take(LONGEST_NUMERAL).take_while(|c| c.is_ascii_digit() || c.is_ascii_uppercase()).count()
            };
            let bare = run(&rest[length..]);
            let font = ["\\text{", "\\mathrm{"].iter().find(|font| rest[length..].starts_with(**font));
            let (inside, next) = match font {
                Some(font) if bare == 0 => {
                    let inside = length + font.len();
                    let count = run(&rest[inside..]);
                    if count == 0 || rest.as_bytes().get(inside + count) != Some(&b'}') {
                        break;
                    }
                    plain = false;
                    (inside..inside + count, inside + count + 1)
                }
                _ if bare > 0 => (length..length + bare, length + bare),
                _ => break,
            };
            letters |= rest[inside].bytes().any(|byte| byte.is_ascii_uppercase());
            length = next;
            if length > LONGEST_NUMERAL {
                return false;
            }
        }
        let digits = &rest[..length];
        if !letters || (plain && length < 2) {
            return false;
        }
        let Some(subscript) = rest[length..].strip_prefix('_') else { return false };
        let base = subscript.trim_start_matches('{');
        let braces = subscript.len() - base.len();
        let count = base.bytes().take_while(u8::is_ascii_digit).count();
        let closes = base[count..].bytes().take_while(|byte| *byte == b'}').count();
        let Some(value) = base[..count].parse::<u8>().ok().filter(|base| (11..=36).contains(base)) else {
            return false;
        };
        let fits = |c: char| !(c.is_ascii_digit() || c.is_ascii_uppercase()) || c.is_digit(u32::from(value));
        if braces > 1 || closes < braces || !digits.chars().all(fits) {
            return false;
        }
        self.emit(Kind::Numeral { digits, base: value }, length + 1 + braces + count + braces);
        true
    }
}
