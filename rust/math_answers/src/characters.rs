//! Kinds of characters, as Python's `str` and `re` sort them, and signs and scripts that stand beside numbers.
//!
//! `inline`, because the scans of other crates ask them for each character.

/// Whitespace as in Python's `str.isspace` and `re`'s `\s`: Unicode's, and the four ASCII separators.
#[inline]
#[must_use]
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// A character that shows nothing: of the property Default_Ignorable_Code_Point (Unicode 16), a control character, or a
/// blank that is no whitespace.
#[inline]
#[must_use]
pub fn is_invisible(c: char) -> bool {
    !is_space(c)
        && (c.is_control()
            || matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
                | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
                | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'))
}

/// Whether a text shows nothing.
#[inline]
#[must_use]
pub fn is_blank(text: &str) -> bool {
    text.chars().all(|c| is_space(c) || is_invisible(c))
}

/// A minus sign, or a hyphen or dash that stands for one before a number.
#[inline]
#[must_use]
pub fn is_minus(c: char) -> bool {
    matches!(c, '-' | '−' | '‐' | '‑' | '‒' | '–' | '—' | '―' | '﹣' | '－')
}

/// Whether a character belongs to a script that writes words without spaces between them (Chinese, Japanese, Korean
/// syllables, Thai): a digit beside it is a number of its own.
#[inline]
#[must_use]
pub fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{0e00}'..='\u{0e7f}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}')
}

/// A letter of a script that joins it to the digits beside it: `x2`, `5th`.
#[inline]
#[must_use]
pub fn is_letter(c: char) -> bool {
    c.is_alphabetic() && !is_ideograph(c)
}

/// Whether a Chinese word for a power of ten or a part starts `text`, so that the number before it is none by itself: 5千 is
/// 5,000. A unit is none: 千克 is a kilogram and 分钟 a minute.
#[must_use]
pub fn starts_with_scale(text: &str) -> bool {
    let mut letters = text.chars();
    let (first, next) = (letters.next(), letters.next().unwrap_or(' '));
    match first {
        Some('千') => !"克米瓦卡焦帕赫伏安升".contains(next),
        Some('分') => next == '之',
        Some('十' | '百' | '万' | '亿') => true,
        _ => false,
    }
}

/// `text` without leading and trailing [`is_space`].
#[inline]
#[must_use]
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// The zeros of every run of ten decimal digits (category Nd, Unicode 14, as in Python 3.11): what `\d` matches.
#[rustfmt::skip]
const DIGIT_ZEROS: [u32; 66] = [
    0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xde6, 0xe50, 0xed0,
    0xf20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620,
    0xa8d0, 0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0xff10, 0x104a0, 0x10d30, 0x11066, 0x110f0, 0x11136, 0x111d0,
    0x112f0, 0x11450, 0x114d0, 0x11650, 0x116c0, 0x11730, 0x118e0, 0x11950, 0x11c50, 0x11d50, 0x11da0, 0x16a60,
    0x16ac0, 0x16b50, 0x1d7ce, 0x1d7d8, 0x1d7e2, 0x1d7ec, 0x1d7f6, 0x1e140, 0x1e2f0, 0x1e950, 0x1fbf0,
];

/// A decimal digit of any script, as `\d` of Python's `re` matches.
#[inline]
#[must_use]
pub fn is_decimal_digit(c: char) -> bool {
    let code = u32::from(c);
    let after = DIGIT_ZEROS.partition_point(|&zero| zero <= code);
    after > 0 && code - DIGIT_ZEROS[after - 1] < 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_no_scales() {
        for (text, expected) in [
            ("千", true),
            ("千元", true),
            ("千克", false),
            ("分之一", true),
            ("分钟", false),
            ("分", false),
            ("颗", false),
        ] {
            assert_eq!(starts_with_scale(text), expected, "{text}");
        }
    }

    #[test]
    fn strip_takes_what_python_strips() {
        assert_eq!(strip("\x1c \u{a0}\u{3000}a b\x1f\n"), "a b");
        assert_eq!(strip("\u{200b}a"), "\u{200b}a");
    }

    #[test]
    fn decimal_digits_are_those_of_every_script() {
        assert!("0९９𝟗".chars().all(is_decimal_digit));
        assert!(!"/:²½٪Ⅷ".chars().any(is_decimal_digit));
    }
}
