//! Numbers in text, read as exact rationals.
//!
//! Accepted: thousands separators between groups of three (`1,234`, `1{,}234`; not `12,34`), decimals, `e` and `× 10^n`
//! exponents, `3/4`, `3 1/2`, `\frac{3}{4}`, a sign (also `−`), currency signs, bold and math marks, a percent sign, the
//! words hundred to trillion, and units after the number. Refused: text with a doubtful value, such as `1.2.3`, `5k`,
//! `5x`, `3 + 4`, `5 or 6`.

mod reader;
mod surroundings;
mod value;

use crate::characters::{is_decimal_digit, is_ideograph, is_invisible, is_letter, is_minus, is_space, strip};
use crate::error::ParseError;
use crate::extraction::denied::{denial, is_denied_behind};
use crate::work::looked_at;
use reader::{Reader, fraction_command, run};
use surroundings::{closes, continues, opens};
pub use value::Number;

const CURRENCY: [&str; 6] = ["\\$", "$", "€", "£", "¥", "₹"];

/// A number in a text: `text[start..end]`, with its sign and without units.
#[derive(Debug, Clone)]
pub struct Token {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// The value, or [`ParseError::Unparseable`], or [`ParseError::Undecided`] for too many digits.
    pub number: Result<Number, ParseError>,
}

/// Read a text that consists of one number, marks and units. With an `=`, the text after the last one counts.
///
/// # Errors
/// [`ParseError::NoAnswer`] without any digit, [`ParseError::Undecided`] for too many digits, else [`ParseError::Unparseable`].
pub fn read(text: &str) -> Result<Number, ParseError> {
    looked_at(text.len());
    let text = strip(text);
    let (left, body) = text.rsplit_once('=').unwrap_or(("", text));
    if left.contains(char::is_alphabetic) && left.contains(|c: char| c.is_ascii_digit()) {
        return Err(ParseError::Unparseable);
    }
    let token = next(body, 0, true).ok_or(ParseError::NoAnswer)?;
    let number = token.number?;
    if opens(&body[..token.start]) && closes(&body[token.end..]) { Ok(number) } else { Err(ParseError::Unparseable) }
}

/// Read the first number of a sentence. When it starts a calculation, read the number after the last `=` instead.
///
/// # Errors
/// As [`read`].
pub fn first(text: &str) -> Result<Number, ParseError> {
    looked_at(text.len());
    let token = next(text, 0, true).ok_or(ParseError::NoAnswer)?;
    if denial(&text[..token.start]).is_some() || is_denied_behind(&text[token.end..]) {
        return Err(ParseError::Unparseable);
    }
    if continues(&text[token.end..]) {
        return match text[token.end..].rsplit_once('=') {
            Some((_, result)) => read(result),
            None => Err(ParseError::Unparseable),
        };
    }
    token.number
}

/// The last number of a text.
#[must_use]
pub fn last(text: &str) -> Option<Token> {
    let digit = text.bytes().rposition(|byte| byte.is_ascii_digit())?;
    let line = text[..digit].rfind('\n').map_or(0, |at| at + 1);
    looked_at(text.len() - line);
    let last_from = |start: usize| {
        let mut found = None;
        let mut from = start;
        while let Some(token) = next(&text[line..], from - line, false) {
            from = line + token.end;
            found = Some(Token { start: line + token.start, end: from, ..token });
        }
        found
    };
    let near = parting(&text.as_bytes()[line..digit]).and_then(|at| last_from(line + at));
    near.or_else(|| last_from(line))
}

/// Whether what stands beside a number makes it a part of another value: `5²`, `5½`, `5k`, `2^10`, `√25`, and the 500 of
/// `12 500` and `12'500`.
#[must_use]
pub fn is_part(text: &str, token: &Token) -> bool {
    let (before, after) = (&text[..token.start], &text[token.end..]);
    let touches = |c: char| c.is_alphanumeric() || is_invisible(c) || "^√π∞‰‱".contains(c);
    before.trim_end_matches(['{', '(']).ends_with(['^', '√'])
        || follows_mark(before)
        || follows_thousands(before) && run(&text.as_bytes()[token.start..], u8::is_ascii_digit) == 3
        || after.starts_with('_') && after[1..].starts_with(|c: char| c.is_ascii_digit())
        || after.starts_with(touches) && continues(after)
}

/// Whether a mark stands between a number and the digits before it: `12'500`, `12_500`.
pub(crate) fn follows_mark(before: &str) -> bool {
    before.strip_suffix(['\'', '’', '_']).is_some_and(|digits| digits.ends_with(|c: char| c.is_ascii_digit()))
}

/// Whether one space stands between a number and one to three digits before it.
fn follows_thousands(before: &str) -> bool {
    let Some(before) = before.strip_suffix([' ', '\u{a0}', '\u{202f}']) else { return false };
    let rest = before.trim_end_matches(|c: char| c.is_ascii_digit());
    (1..=3).contains(&(before.len() - rest.len())) && !rest.ends_with(['.', ',', '/'])
}

/// The last sign in `text` that is part of no number, so that a line of numbers is not read from its start.
fn parting(text: &[u8]) -> Option<usize> {
    text.iter().enumerate().rposition(|(at, byte)| match byte {
        b'=' | b'(' | b')' | b';' | b':' | b'?' | b'<' | b'>' | b'|' | b'&' => true,
        // Not the sign of an exponent.
        b'+' => at > 0 && text[at - 1].is_ascii_digit(),
        _ => false,
    })
}

/// The next number at or after `from`. With `leads`, the text is a statement by itself: a leading `- 5` is a negative
/// number and not a list item.
fn next(text: &str, from: usize, leads: bool) -> Option<Token> {
    let bytes = text.as_bytes();
    let mut at = from;
    loop {
        at += bytes.get(at..)?.iter().position(|&byte| byte.is_ascii_digit() || byte == b'\\' || byte == b'.')?;
        let identifier = text[from..at]
            .chars()
            .next_back()
            .is_some_and(|c| is_letter(c) || c == '_' || !c.is_ascii() && is_decimal_digit(c));
        let digit_follows = bytes.get(at + 1).is_some_and(u8::is_ascii_digit);
        match bytes[at] {
            b'\\' if fraction_command(&text[at..]).is_some() => break,
            b'\\' => at += 1,
            b'.' if !digit_follows || identifier => at += 1,
            _ if identifier => at += run(&bytes[at..], |byte| byte.is_ascii_alphanumeric() || *byte == b'_'),
            _ => break,
        }
    }
    let mut reader = Reader { text, at, digits: 0 };
    let number = reader.number();
    let (start, negative) = sign(text, from, at, leads);
    let number = number.map(|number| if negative { Number { face: -number.face, ..number } } else { number });
    looked_at(reader.at.max(at + 1) - from);
    Some(Token { start, end: reader.at.max(at + 1), number })
}

/// Start of the number at `at`, its sign and currency included, and whether it is negative.
fn sign(text: &str, from: usize, at: usize, leads: bool) -> (usize, bool) {
    let bare = trim_currency(&text[from..at]);
    let spaced = bare.trim_end_matches(is_space);
    let Some(before) = spaced.strip_suffix(is_minus) else {
        return (from + bare.len(), false);
    };
    let previous = before.trim_end_matches(is_space).chars().next_back();
    let touches = spaced.len() == bare.len();
    let unary = match previous {
        // `is -3` is a negative number; `10 -3` and `apples - 3 each` are not.
        Some(c) if is_letter(c) => touches && before.ends_with(is_space),
        Some(c) => !((c.is_alphanumeric() && !is_ideograph(c)) || is_minus(c) || ")]}%.".contains(c)),
        // At the start of a line, a minus sign apart from its number marks a list item; after a number, a difference.
        None => from == 0 && (leads || touches),
    };
    if unary { (from + trim_currency(before).len(), true) } else { (from + bare.len(), false) }
}

fn trim_currency(text: &str) -> &str {
    let spaced = text.trim_end_matches(' ');
    CURRENCY.iter().find_map(|sign| spaced.strip_suffix(sign)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dashu_ratio::RBig;

    fn ratio(top: i64, bottom: u64) -> RBig {
        RBig::from_parts_signed(top.into(), bottom.into())
    }

    #[test]
    fn values_are_exact() {
        for (text, top, bottom) in [
            ("12", 12, 1),
            ("1,234,567", 1_234_567, 1),
            ("1{,}234", 1234, 1),
            ("1\\,234", 1234, 1),
            (".5", 1, 2),
            ("-0.10", -1, 10),
            ("3/4", 3, 4),
            ("-3 / 4", -3, 4),
            ("3 1/2", 7, 2),
            ("-3 1/2", -7, 2),
            ("\\frac{3}{4}", 3, 4),
            ("-\\dfrac34", -3, 4),
            ("2\\frac{1}{2}", 5, 2),
            ("1e-3", 1, 1000),
            ("1.5 \\times 10^{3}", 1500, 1),
            ("2 × 10^3", 2000, 1),
            ("50%", 1, 2),
            ("50 percent", 1, 2),
            ("5 million", 5_000_000, 1),
            ("$5", 5, 1),
            ("-$5.50", -11, 2),
            ("**5**", 5, 1),
            ("x = 5", 5, 1),
            ("5 cm", 5, 1),
            ("5m", 5, 1),
            ("60^\\circ", 60, 1),
            ("\\text{5 dollars}", 5, 1),
            ("(5)", 5, 1),
            ("2 + 3 = 5", 5, 1),
            ("5 apples.", 5, 1),
            ("5颗", 5, 1),
            ("共5颗。", 5, 1),
        ] {
            assert_eq!(read(text).map(|number| number.value()), Ok(ratio(top, bottom)), "{text}");
        }
    }

    #[test]
    fn doubtful_values_are_refused() {
        for text in [
            "12,34",
            "1,2345",
            "0,123",
            "1234,567",
            "1.2.3",
            "1.234,56",
            "1/0",
            "1/2/3",
            "3 5/2",
            "5k",
            "5x",
            "2\\pi",
            "2\\sqrt{3}",
            "5!",
            "5 or 6",
            "5-6",
            "5:30",
            "(5, 6)",
            "3 + 4",
            "2x = 10",
            "5 and a half",
            "\\frac{1}{x}",
            "about 5",
            "5½",
            "5²",
            "2^3",
        ] {
            assert_eq!(read(text).map(|number| number.value()), Err(ParseError::Unparseable), "{text}");
        }
        assert_eq!(read("five"), Err(ParseError::NoAnswer));
        assert_eq!(read(&"1".repeat(4097)), Err(ParseError::Undecided));
    }

    #[test]
    fn the_last_number_is_read_as_a_whole() {
        for (text, span) in [
            ("a 1 b 2.50 c", "2.50"),
            ("x2 is 3rd", "3"),
            ("5 - 3", "3"),
            ("is -3", "-3"),
            ("1\n- 7 apples", "7"),
            ("is 3/4.", "3/4"),
            ("一共有99颗糖", "99"),
            ("答案是-99。", "-99"),
            ("ข้อ 3คือ12ตัว", "12"),
        ] {
            let token = last(text).unwrap();
            assert_eq!(&text[token.start..token.end], span, "{text}");
        }
        assert!(last("none, H2O").is_none());
    }

    #[test]
    fn a_part_of_another_value_is_no_value() {
        let part = |text: &str| is_part(text, &last(text).unwrap());
        for text in [
            "5²",
            "5½",
            "it is 5k",
            "5x.",
            "5π",
            "5√3",
            "2^10",
            "2^{10}",
            "√25",
            "√(25)",
            "5万",
            "5\u{200b}½",
            "12 500",
            "12\u{202f}500",
            "1 234 567",
            "12'500",
            "12’500",
            "12_500",
        ] {
            assert!(part(text), "{text}");
        }
        for text in [
            "5",
            "5.",
            "5!",
            "5cm",
            "5m",
            "5颗",
            "5th",
            "5°C",
            "5 x",
            "5 ²",
            "(5)",
            "5\u{200b}.",
            "5€",
            "12ตัว",
            "in 2020 500",
            "5 50",
            "3, 500",
            "2  500",
            "'500'",
        ] {
            assert!(!part(text), "{text}");
        }
    }

    #[test]
    fn the_last_number_is_that_of_the_whole_line() {
        for text in [
            "1+1+12",
            "1e+5",
            "2 x 10^{+3}",
            "a=-3",
            "a = - 3",
            "(-3)",
            "x=x2",
            "5=\\frac{1}{0} million",
            "1;2 3/4",
            "3:-4",
            "1+x2",
            "7 = y_2",
            "5)-3",
            "5|-3",
            "1<-2.5%",
            "2+3 1/2",
            "9+ 5 million",
        ] {
            let mut from = 0;
            let mut whole = None;
            while let Some(token) = next(text, from, false) {
                from = token.end;
                whole = Some(token);
            }
            let spans = [last(text), whole].map(|token| token.map(|token| (token.start, token.end, token.number)));
            assert_eq!(format!("{:?}", spans[0]), format!("{:?}", spans[1]), "{text}");
        }
    }
}
