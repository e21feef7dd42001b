//! Text around a number: marks and units that leave its value unchanged.

use super::reader::run;
use crate::characters::{is_ideograph, is_invisible, is_letter, is_minus, is_space, starts_with_scale, strip};

/// Single letters that are units directly after a number. Any other letter is algebra or a magnitude (`5k`).
const UNIT_LETTERS: &str = "mghslLWVANJCFa";

/// LaTeX commands that wrap a number or its unit without changing its value.
fn is_wrapper(command: &str) -> bool {
    matches!(
        command,
        "text"
            | "textbf"
            | "textrm"
            | "textit"
            | "mathrm"
            | "mathbf"
            | "mbox"
            | "quad"
            | "left"
            | "right"
            | "displaystyle"
            | "circ"
            | "degree"
            | "bf"
            | "rm"
    )
}

/// Whether all LaTeX commands are wrappers and all other characters are `allowed`.
fn only_marks(mut text: &str, allowed: impl Fn(char) -> bool) -> bool {
    while let Some(c) = text.chars().next() {
        let rest = &text[c.len_utf8()..];
        if c == '\\' {
            let length = run(rest.as_bytes(), u8::is_ascii_alphabetic);
            let symbol = length == 0 && rest.starts_with([',', ';', '!', ' ', '(', ')', '[', ']', '$', '%']);
            if !symbol && !is_wrapper(&rest[..length]) {
                return false;
            }
            text = &rest[length.max(usize::from(symbol))..];
        } else if c == '^' {
            let rest = rest.trim_start_matches('{');
            if !rest.starts_with("\\circ") {
                return false;
            }
            text = rest;
        } else if allowed(c) {
            text = rest;
        } else {
            return false;
        }
    }
    true
}

/// Whether the text before a number consists of marks and currency.
pub(super) fn opens(text: &str) -> bool {
    let text = ["US", "USD", "Rs.", "Rs"].iter().find_map(|code| strip(text).strip_prefix(code)).unwrap_or(text);
    only_marks(text, |c| is_space(c) || "*_`'\"([{$€£¥₹+".contains(c) || is_ideograph(c))
}

/// Whether the text after a number leaves its value unchanged: units, words and closing marks, without digits.
pub(super) fn closes(text: &str) -> bool {
    if continues(text) {
        return false;
    }
    let mark = |c: char| is_space(c) || ".,;:?'\"’°²³/-*_`()[]{}$€£¥₹。，".contains(c) || c.is_alphabetic();
    only_marks(text, mark)
}

/// Whether the text after a number changes its value: an operator, a list, a range, algebra.
pub(super) fn continues(text: &str) -> bool {
    // Digits that only seem to be another number: an invisible character stands between.
    let seen = text.trim_start_matches(is_invisible);
    if seen.len() < text.len() && seen.starts_with(|c: char| c.is_numeric()) {
        return true;
    }
    // 5万 is fifty thousand.
    if starts_with_scale(text) || text.starts_with('半') {
        return true;
    }
    let emphasis = text.trim_start_matches('*');
    if emphasis.len() < text.len() && emphasis.starts_with(char::is_alphanumeric) {
        return true;
    }
    let rest = emphasis.trim_start_matches(|c| is_space(c) || "$)}`".contains(c));
    let word = &rest[..rest.find(|c: char| !is_letter(c)).unwrap_or(rest.len())];
    let mut letters = word.chars();
    if let (Some(letter), None) = (letters.next(), letters.next())
        && !UNIT_LETTERS.contains(letter)
    {
        return true;
    }
    let tail = &rest[word.len()..];
    let operand = |text: &str| {
        let text = text.trim_start_matches(|c| is_space(c) || "($£€{*-−+".contains(c));
        text.starts_with(|c: char| c.is_ascii_digit() || c == '\\')
    };
    if matches!(word, "and" | "or" | "to" | "times" | "plus" | "minus" | "over") {
        let part = ["a ", "one "].iter().any(|article| tail.trim_start().starts_with(article));
        if operand(tail) || (word == "and" && part) {
            return true;
        }
    }
    if joins_another(rest, operand) {
        return true;
    }
    if !word.is_empty() {
        return false;
    }
    match rest.chars().next() {
        Some(c @ ('+' | '*' | '/' | '×' | '÷' | '·' | '=' | '<' | '>' | ':' | ';' | ',' | '(' | '|' | '&' | '~')) => {
            operand(&rest[c.len_utf8()..])
        }
        Some(c) if is_minus(c) => operand(&rest[c.len_utf8()..]),
        Some('\\') => {
            let command = &rest[1..1 + run(&rest.as_bytes()[1..], u8::is_ascii_alphabetic)];
            !command.is_empty() && !is_wrapper(command)
        }
        Some('^') => !rest[1..].trim_start_matches('{').starts_with("\\circ"),
        Some(c) => c.is_numeric() || "√π∞!_≈%％‰‱".contains(c) && c != '!' && c != '_',
        None => false,
    }
}

/// Whether a conjunction and a second number follow the number's unit: `cm or 8 cm`, `, or maybe 8`, `days and 3 hours`.
/// Any other word starts a remark, which is not part of the answer.
fn joins_another(text: &str, operand: impl Fn(&str) -> bool) -> bool {
    let mut rest = text;
    let mut joined = false;
    loop {
        rest = rest.trim_start_matches(|c| is_space(c) || ",(".contains(c));
        let length = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
        joined = match &rest[..length] {
            "" => return joined && operand(rest),
            "and" | "or" | "maybe" | "perhaps" | "possibly" => true,
            _ => false,
        };
        rest = &rest[length..];
    }
}
