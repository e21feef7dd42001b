//! A line of plain text as pieces of formulas: operands, signs, brackets, and words.

use std::ops::Range;

use crate::characters::{is_minus, is_space};
use crate::word;
use crate::work::looked_at;

/// What a piece of plain text is in a formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A number, a letter, a Greek letter, `\pi`.
    Operand,
    /// `√`, `sqrt`, `\frac`: takes what follows.
    Prefix,
    /// `!`, `%`, `°`, `²`, `\text{ cm}`
    Postfix,
    /// `+`, `/`, `\cdot`
    Operator,
    /// `=`, `<`, `\le`; whether it is `=` or `≈`.
    Relation(bool),
    /// `^`, `_`
    Script,
    Open,
    Close,
    Comma,
    /// A word, a stop, or anything else that no formula goes on over.
    Other,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) end: usize,
    /// Whether space precedes.
    pub(super) space: bool,
    /// Whether it is no pure arithmetic: a letter, a function, a power.
    pub(super) symbolic: bool,
}

/// The pieces of a part of the text; `number` is one of them.
pub(super) fn pieces(text: &str, part: Range<usize>, number: Range<usize>) -> Vec<Piece> {
    looked_at(part.len());
    let mut found: Vec<Piece> = Vec::new();
    let words = text[part.clone()]
        .split(|c: char| !c.is_alphabetic())
        .any(|word| word.len() > 2 && word::plain_name(word).is_none());
    let mut at = part.start;
    let mut space = true;
    while at < part.end {
        let rest = &text[at..part.end];
        let Some(c) = rest.chars().next() else { break };
        if is_space(c) || c == '~' {
            space = true;
            at += c.len_utf8();
            continue;
        }
        let start = at;
        let kind = if at == number.start {
            at = number.end;
            Some((Kind::Operand, false))
        } else {
            let (kind, length, symbolic) = piece(rest, c, found.last(), space, words);
            at += length.max(1);
            kind.map(|kind| (kind, symbolic))
        };
        // What is no piece says nothing: bold marks, `\left`, `\,`.
        if let Some((mut kind, symbolic)) = kind {
            // The 2 of `log_2 8` is no operand.
            let base = matches!(found[..], [.., Piece { kind: Kind::Prefix, .. }, Piece { kind: Kind::Script, .. }]);
            if base && kind == Kind::Operand && start != number.start {
                kind = Kind::Prefix;
            }
            found.push(Piece { kind, start, end: at, space, symbolic });
            space = false;
        }
    }
    found
}

/// The kind of what starts here, its length, and whether it is more than arithmetic.
fn piece(rest: &str, c: char, before: Option<&Piece>, space: bool, words: bool) -> (Option<Kind>, usize, bool) {
    let length = c.len_utf8();
    let operand_before =
        !space && before.is_some_and(|piece| matches!(piece.kind, Kind::Operand | Kind::Close | Kind::Postfix));
    let next = rest[length..].chars().next().unwrap_or(' ');
    let kind = match c {
        '0'..='9' => return (Some(Kind::Operand), digits(rest), false),
        '.' if next.is_ascii_digit() => return (Some(Kind::Operand), 1 + digits(&rest[1..]), false),
        '\\' => return command(rest),
        'π' | 'α'..='ω' | 'Α'..='Ω' | '∞' => return (Some(Kind::Operand), length, true),
        c if c.is_alphabetic() => return letters(rest, before, space),
        '*' if next == '*' => {
            let power = operand_before && rest[2..].starts_with(|c: char| c.is_alphanumeric() || "(-".contains(c));
            return (power.then_some(Kind::Script), 2, power);
        }
        '$' | '€' | '£' | '₹' if next.is_ascii_digit() => return (None, length, false),
        '-' if next == '>' => Kind::Other,
        '=' if next == '>' => return (Some(Kind::Other), 2, false),
        '<' | '>' | '!' if next == '=' => return (Some(Kind::Relation(false)), 2, true),
        c if is_minus(c) => Kind::Operator,
        '+' | '*' | '/' | '×' | '÷' | '·' | '±' => Kind::Operator,
        ':' if operand_before && next.is_ascii_digit() => return (Some(Kind::Operator), length, true),
        '∪' | '∩' => return (Some(Kind::Operator), length, true),
        '=' | '≈' => Kind::Relation(true),
        '<' | '>' | '≤' | '≥' | '≠' | '∈' => return (Some(Kind::Relation(false)), length, true),
        '^' | '_' => return (Some(Kind::Script), length, true),
        '√' | '∛' => return (Some(Kind::Prefix), length, true),
        '(' | '[' | '{' => Kind::Open,
        ')' | ']' | '}' => Kind::Close,
        ',' => Kind::Comma,
        '%' | '°' => Kind::Postfix,
        // In a sentence a mark of exclamation, in a formula a factorial.
        '!' if operand_before && !words => return (Some(Kind::Postfix), length, true),
        '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | 'ⁿ' | '⁻' | '½' | '¼' | '¾' => {
            return (Some(Kind::Postfix), length, true);
        }
        _ => Kind::Other,
    };
    (Some(kind), length, false)
}

/// Digits with their decimals and thousands marks.
fn digits(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut end = 0;
    while let Some(byte) = bytes.get(end) {
        let mark = matches!(byte, b'.' | b',') && end > 0 && bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        if !(byte.is_ascii_digit() || mark) {
            break;
        }
        end += 1;
    }
    end.max(usize::from(!rest.is_empty()))
}

/// A letter, a function, or a word.
fn letters(rest: &str, before: Option<&Piece>, space: bool) -> (Option<Kind>, usize, bool) {
    let length = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
    let run = &rest[..length];
    let follows = rest[length..].chars().next().unwrap_or(' ');
    if run.chars().count() == 1 && run.is_ascii() {
        let apostrophe = "'’".contains(follows) && rest[length + follows.len_utf8()..].starts_with(char::is_alphabetic);
        return (Some(if apostrophe { Kind::Other } else { Kind::Operand }), length, true);
    }
    match word::plain_name(run) {
        Some(word::PlainName::Function) => return (Some(Kind::Prefix), length, true),
        Some(word::PlainName::Value) => return (Some(Kind::Operand), length, true),
        None => {}
    }
    // `3xy`: short runs that touch a formula's sign are products.
    let touches = !space && before.is_some_and(|piece| matches!(piece.kind, Kind::Script | Kind::Open));
    if run.is_ascii() && length < 4 && (touches || "^_".contains(follows)) {
        return (Some(Kind::Operand), length, true);
    }
    (Some(Kind::Other), length, false)
}

/// A LaTeX command.
fn command(rest: &str) -> (Option<Kind>, usize, bool) {
    let name = rest[1..].bytes().take_while(u8::is_ascii_alphabetic).count();
    if name == 0 {
        let length = rest[1..].chars().next().map_or(1, |c| 1 + c.len_utf8());
        let kind = match rest.as_bytes().get(1) {
            Some(b',' | b';' | b'!' | b':' | b' ' | b'$') => None,
            Some(b'{') => Some(Kind::Open),
            Some(b'}') => Some(Kind::Close),
            Some(b'%') => Some(Kind::Postfix),
            _ => Some(Kind::Other),
        };
        return (kind, length, false);
    }
    let length = name + 1;
    match &rest[1..length] {
        "cdot" | "times" | "div" | "pm" | "mp" => (Some(Kind::Operator), length, false),
        "cup" | "cap" | "setminus" => (Some(Kind::Operator), length, true),
        "approx" => (Some(Kind::Relation(true)), length, false),
        "le" | "leq" | "ge" | "geq" | "lt" | "gt" | "ne" | "neq" | "in" | "equiv" | "leqslant" | "geqslant" => {
            (Some(Kind::Relation(false)), length, true)
        }
        "left" | "right" | "quad" | "displaystyle" => (None, length, false),
        "text" | "mathrm" | "mbox" | "textbf" => {
            let close = rest.find('}').map_or(length, |at| at + 1);
            (Some(Kind::Postfix), close, false)
        }
        "frac" | "dfrac" | "tfrac" | "sqrt" | "binom" | "log" | "ln" | "sin" | "cos" | "tan" => {
            (Some(Kind::Prefix), length, true)
        }
        // The display around a formula; a matrix is a part of one.
        "begin" | "end"
            if ["{align", "{equation", "{gather", "{split", "{multline"]
                .iter()
                .any(|display| rest[length..].starts_with(display)) =>
        {
            (Some(Kind::Other), rest.find('}').map_or(length, |at| at + 1), false)
        }
        "Rightarrow" | "implies" | "therefore" | "to" | "rightarrow" | "item" | "n" => {
            (Some(Kind::Other), length, false)
        }
        _ => (Some(Kind::Operand), length, true),
    }
}
