//! Words: which plain letters are prose and which a product of variables; number words; text as it is compared.

use super::lexer::command;

/// Words that separate, relate or qualify: never a unit, never a thing that is counted.
pub fn is_function_word(word: &str) -> bool {
    const WORDS: &[&str] = &[
        "a",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "base",
        "be",
        "because",
        "but",
        "by",
        "choose",
        "divided",
        "each",
        "equal",
        "equals",
        "every",
        "for",
        "from",
        "has",
        "have",
        "if",
        "in",
        "is",
        "it",
        "its",
        "minus",
        "mod",
        "modulo",
        "not",
        "of",
        "on",
        "only",
        "or",
        "otherwise",
        "over",
        "per",
        "plus",
        "since",
        "so",
        "such",
        "than",
        "that",
        "the",
        "their",
        "then",
        "there",
        "they",
        "this",
        "times",
        "to",
        "union",
        "was",
        "we",
        "were",
        "when",
        "where",
        "which",
        "with",
    ];
    WORDS.iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// How a run of plain letters reads in a formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// A product of one-letter variables.
    Product,
    /// A word.
    Word,
}

/// Short words that would pass for products.
const SHORT_WORDS: [&str; 65] = [
    "all", "no", "is", "of", "in", "to", "at", "by", "an", "it", "on", "so", "we", "he", "me", "up", "am", "pm", "as",
    "be", "do", "go", "if", "my", "us", "or", "st", "nd", "rd", "th", "cm", "mm", "km", "kg", "mg", "ml", "ft", "yd",
    "oz", "lb", "hr", "cc", "dm", "hz", "hp", "kj", "kw", "mw", "why", "try", "dry", "fly", "sky", "cry", "mph", "kph",
    "lbs", "hrs", "yds", "dne", "vs", "bc", "ad", "pct", "sq",
];

/// Letters of the plain formula `abc`; there is no dictionary, so the shape decides. `formula` says that the text has LaTeX in it.
#[must_use]
pub fn classify(run: &str, formula: bool) -> Run {
    let length = run.len();
    let lower = run.bytes().all(|c| c.is_ascii_lowercase());
    if SHORT_WORDS.iter().any(|word| word.eq_ignore_ascii_case(run)) && !matches!(run, "bc" | "ad" | "BC" | "AD" | "st")
    {
        return Run::Word;
    }
    let capitalised = length > 2
        && run.starts_with(|c: char| c.is_ascii_uppercase())
        && run[1..].bytes().all(|c| c.is_ascii_lowercase());
    if !run.is_ascii() || capitalised || is_function_word(run) {
        return Run::Word;
    }
    let all_in = |letters: &str| run.chars().all(|c| letters.contains(c.to_ascii_lowercase()));
    let vowel = run.bytes().any(|c| b"aeiouAEIOU".contains(&c));
    let product = match length {
        0..=2 => true,
        3 => formula || (lower && (!vowel || all_in("abcxyz"))),
        4 => {
            (formula && (!vowel || run.bytes().all(|c| c.is_ascii_uppercase())))
                || (lower && all_in("abcdxyzw") && run.contains(['x', 'z', 'b']))
        }
        _ => false,
    };
    if product { Run::Product } else { Run::Word }
}

/// A run that is known functions and Greek letters with at most two variables: `sinx`, `xlnx`, `pir`. The pieces in
/// order, as byte lengths; `None` when it is no such run.
#[must_use]
pub fn segments(run: &str) -> Option<Vec<usize>> {
    const LONGEST: usize = 24;
    const LONGEST_NAME: usize = "varepsilon".len();
    if run.len() > LONGEST || !run.is_ascii() {
        return None;
    }
    // `DeltaV`
    if let Some(letter) = run.strip_prefix("Delta")
        && letter.len() == 1
    {
        return Some(vec!["Delta".len(), 1]);
    }
    let mut pieces = Vec::new();
    let (mut at, mut letters, mut names) = (0, 0, 0);
    while at < run.len() {
        let rest = &run[at..];
        let begins = rest.get(..2).is_some_and(begins_name);
        let known = begins.then(|| (2..=rest.len().min(LONGEST_NAME)).rev().find(|length| is_name(&rest[..*length])));
        match known.flatten() {
            Some(length) => {
                names += 1;
                pieces.push(length);
                at += length;
            }
            None => {
                if !b"xyznrRhABC".contains(&run.as_bytes()[at]) {
                    return None;
                }
                letters += 1;
                pieces.push(1);
                at += 1;
            }
        }
    }
    (names > 0 && letters <= 2).then_some(pieces)
}

/// Whether a run is one letter and a function with its bracket: `isin(t)`, `Mcos(x)`; any letter before any name is too
/// often a word.
#[must_use]
pub fn is_factor_of_function(run: &str) -> bool {
    const FUNCTIONS: [&str; 11] = ["sin", "cos", "tan", "sec", "csc", "cot", "exp", "ln", "sinh", "cosh", "sqrt"];
    run.as_bytes().first().is_some_and(u8::is_ascii_alphabetic) && FUNCTIONS.contains(&run.get(1..).unwrap_or_default())
}

/// Whether a name of [`is_name`] begins with these two letters.
fn begins_name(start: &str) -> bool {
    matches!(start, "pi" | "Pi" | "PI" | "sq" | "cb" | "ab" | "Ab" | "fl" | "ce" | "in") || command::begins_name(start)
}

/// Whether plain letters name a function, a Greek letter or a constant.
#[must_use]
pub fn is_name(run: &str) -> bool {
    if matches!(run, "real" | "sign" | "rank" | "trace") {
        return false;
    }
    matches!(run, "pi" | "Pi" | "PI" | "sqrt" | "cbrt" | "abs" | "Abs" | "floor" | "ceil" | "infinity" | "infty")
        || command::function(run).is_some()
        || (command::greek(run).is_some() && !matches!(run, "ell" | "Pi"))
}

/// What plain letters name in a formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainName {
    /// `sin`, `sqrt`: takes an argument.
    Function,
    /// `pi`, `alpha`: a value.
    Value,
}

/// What a run of plain letters names, if it is no word.
#[must_use]
pub fn plain_name(run: &str) -> Option<PlainName> {
    let value = matches!(run, "pi" | "Pi" | "PI" | "infinity" | "infty") || command::greek(run).is_some();
    is_name(run).then_some(if value { PlainName::Value } else { PlainName::Function })
}

/// The number that a word names: `zero` to `twenty`, tens, `half`; `second` is no number.
#[must_use]
pub fn small_number(word: &str) -> Option<u32> {
    const SMALL: [&str; 21] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
        "twenty",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let equal = |known: &&str| known.eq_ignore_ascii_case(word);
    if let Some(value) = SMALL.iter().position(equal) {
        return Some(value as u32);
    }
    if let Some(ten) = TENS.iter().position(equal) {
        return Some(20 + 10 * ten as u32);
    }
    let (ten, one) = word.split_once('-')?;
    let ten = TENS.iter().position(|known| known.eq_ignore_ascii_case(ten))?;
    let one = SMALL[1..10].iter().position(|known| known.eq_ignore_ascii_case(one))?;
    Some(21 + 10 * ten as u32 + one as u32)
}

/// The power of ten of a magnitude: `thousand`, `million`.
#[must_use]
pub fn magnitude(word: &str) -> Option<u32> {
    const POWERS: [(&str, u32); 9] = [
        ("hundred", 2),
        ("thousand", 3),
        ("million", 6),
        ("billion", 9),
        ("trillion", 12),
        ("百", 2),
        ("千", 3),
        ("万", 4),
        ("亿", 8),
    ];
    POWERS.iter().find(|(name, _)| name.eq_ignore_ascii_case(word)).map(|(_, power)| *power)
}

/// The denominator of a part: `half`, `third`, `quarters`.
#[must_use]
pub fn part(word: &str) -> Option<u32> {
    let parts = [
        ("half", 2),
        ("halves", 2),
        ("third", 3),
        ("thirds", 3),
        ("fourth", 4),
        ("fourths", 4),
        ("quarter", 4),
        ("quarters", 4),
        ("fifth", 5),
        ("fifths", 5),
        ("sixth", 6),
        ("sixths", 6),
        ("seventh", 7),
        ("sevenths", 7),
        ("eighth", 8),
        ("eighths", 8),
        ("ninth", 9),
        ("ninths", 9),
        ("tenth", 10),
        ("tenths", 10),
    ];
    parts.iter().find(|(name, _)| name.eq_ignore_ascii_case(word)).map(|(_, value)| *value)
}

/// Text as it is compared: lower case but for a single letter, letters and digits with single spaces, no articles, no LaTeX commands. A sign
/// directly after a letter or before a digit stays (`A+`, `-5`); apostrophes go (`Sam's` is `sams`).
#[must_use]
pub fn folded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut word_start = 0;
    let mut rest = text.chars().peekable();
    let mut previous = ' ';
    while let Some(c) = rest.next() {
        let next = rest.peek().copied().unwrap_or(' ');
        let sign = match c {
            '+' => !next.is_alphanumeric() && previous.is_alphanumeric(),
            '-' => {
                (next.is_ascii_digit() && !previous.is_alphanumeric())
                    || (!next.is_alphanumeric() && previous.is_alphanumeric())
            }
            '.' | ':' | '/' => previous.is_ascii_digit() && next.is_ascii_digit(),
            _ => false,
        };
        if c == '\\' {
            let mut command = false;
            while rest.next_if(char::is_ascii_alphabetic).is_some() {
                command = true;
            }
            if !command {
                rest.next();
            }
            end_word(&mut out, &mut word_start);
        } else if c.is_alphanumeric() || sign || is_mark(c) {
            out.extend(c.to_lowercase());
        } else if !(previous.is_alphanumeric() && (c == '\'' || (c == '.' && next.is_alphanumeric()))) {
            end_word(&mut out, &mut word_start);
        }
        previous = c;
    }
    end_word(&mut out, &mut word_start);
    out.truncate(out.trim_end().len());
    // `a parabola`; the letter of `a b` stays.
    if out.strip_prefix("a ").is_some_and(|rest| rest.bytes().take_while(u8::is_ascii_lowercase).count() > 2) {
        out.drain(..2);
    }
    // The case of a single letter counts in mathematics.
    if out.len() == 1
        && let Some(letter) =
            text.chars().rev().find(|c| c.is_ascii_uppercase() && out.starts_with(c.to_ascii_lowercase()))
    {
        return letter.to_string();
    }
    out
}

/// Combining marks belong to the letter before.
fn is_mark(c: char) -> bool {
    ('\u{300}'..='\u{36f}').contains(&c)
}

fn end_word(out: &mut String, word_start: &mut usize) {
    if matches!(&out[*word_start..], "a" | "an" | "the") && *word_start + 1 < out.len() {
        out.truncate(*word_start);
    } else if out.len() > *word_start {
        out.push(' ');
    }
    *word_start = out.len();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_letters() {
        for run in ["ab", "xy", "abc", "xyz", "mn", "pqr", "BC"] {
            assert_eq!(classify(run, false), Run::Product, "{run}");
        }
        for run in ["no", "cm", "red", "yes", "Bob", "east", "ABC", "even", "Monday", "NO"] {
            assert_eq!(classify(run, false), Run::Word, "{run}");
        }
        assert_eq!(classify("ABC", true), Run::Product);
        assert_eq!(segments("xsinx"), Some(vec![1, 3, 1]));
        assert_eq!(segments("pir"), Some(vec![2, 1]));
        for run in ["using", "since", "business", "cost", "xy"] {
            assert_eq!(segments(run), None, "{run}");
        }
    }

    #[test]
    fn text_is_folded() {
        for (text, expected) in [
            ("  The  Cat!", "cat"),
            ("\\text{ east }", "east"),
            ("Sam's house.", "sams house"),
            ("p.m.", "pm"),
            ("3:30 p.m.", "3:30 pm"),
            ("A+", "a+"),
            ("a parabola", "parabola"),
            ("a b", "a b"),
            ("well-known", "well known"),
            ("a", "a"),
            ("\\text{ R }", "R"),
            ("É t", "é t"),
        ] {
            assert_eq!(folded(text), expected, "{text}");
        }
    }

    #[test]
    fn number_words() {
        assert_eq!(small_number("Twelve"), Some(12));
        assert_eq!(small_number("thirty"), Some(30));
        assert_eq!(small_number("Forty-two"), Some(42));
        assert_eq!(small_number("many"), None);
        assert_eq!(part("halves"), Some(2));
    }
}
