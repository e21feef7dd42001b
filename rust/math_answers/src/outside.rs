//! The outside of an answer: marks around it, words behind it, and plain numbers, which need no tokens.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::ast::{Comparison, Node, NumberForm};
use super::lexer::token::{Bracket, Kind, Token};
use super::word;
use crate::characters::strip;

/// Without the marks around an answer: space, quotes, bold, delimiters of math, the period of its sentence.
pub(super) fn unwrapped(text: &str) -> &str {
    let mut text = strip(text);
    loop {
        let before = text.len();
        for (open, close) in [
            ("**", "**"),
            ("*", "*"),
            ("_", "_"),
            ("$$", "$$"),
            ("\\(", "\\)"),
            ("\\[", "\\]"),
            ("\"", "\""),
            ("`", "`"),
            ("“", "”"),
        ] {
            if let Some(inner) = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close))
                && !inner.contains(open)
                && !inner.contains(close)
            {
                text = strip(inner);
            }
        }
        if let Some(inner) = text.strip_prefix('$').and_then(|rest| rest.strip_suffix('$'))
            && !inner.contains('$')
            && !inner.ends_with('\\')
        {
            text = strip(inner);
        }
        // `5\ ` without its space, and a line break.
        if text.ends_with('\\') {
            text = strip(text.trim_end_matches('\\'));
        }
        let ellipsis = text.ends_with("..");
        if let Some(rest) = text.strip_suffix(['.', ',', ';'])
            && !ellipsis
            && !rest.ends_with('\\')
        {
            text = strip(rest);
        }
        if text.len() == before {
            return text;
        }
    }
}

/// Of a derivation keep the conclusion: what follows the last `\Rightarrow`, `\implies` or `\iff` outside of brackets. What
/// stands before it has to state something, so that `x \Rightarrow 5` stays as it is.
pub(super) fn keep_conclusion(text: &str, tokens: &mut Vec<Token<'_>>) {
    const ARROWS: [&str; 7] =
        ["=>", "\\Rightarrow", "\\Longrightarrow", "\\implies", "\\iff", "\\Leftrightarrow", "\\Longleftrightarrow"];
    let (mut depth, mut states, mut last) = (0i32, false, None);
    for (at, token) in tokens.iter().enumerate() {
        match token.kind {
            Kind::Open(_) | Kind::Begin(_) => depth += 1,
            Kind::Close(_) | Kind::End(_) => depth -= 1,
            Kind::Relation(Comparison::To)
                if depth == 0
                    && states
                    && text.get(token.start..token.end).is_some_and(|text| ARROWS.contains(&text)) =>
            {
                last = Some(at);
            }
            Kind::Relation(Comparison::To) => {}
            Kind::Relation(_) => states = true,
            _ => {}
        }
    }
    if let Some(at) = last.filter(|at| at + 1 < tokens.len()) {
        tokens.drain(..=at);
    }
}

/// Take off the tail what says nothing of the value: stops, reasons, `is the answer`, words in brackets.
pub(super) fn cut_tail(tokens: &mut Vec<Token<'_>>) {
    while matches!(
        tokens.last(),
        Some(Token { kind: Kind::Period | Kind::Comma | Kind::Semicolon | Kind::Question, .. })
    ) {
        tokens.pop();
    }
    // `5 because …`
    let reason = |token: &Token<'_>| matches!(token.kind, Kind::Word("because" | "since" | "as" | "which" | "due"));
    if let Some(at) = tokens.iter().position(reason)
        && (tokens[..at].iter().any(|token| !matches!(token.kind, Kind::Word(_) | Kind::Name { .. }))
            || matches!(
                tokens[..],
                [Token { kind: Kind::Name { .. }, .. }, Token { kind: Kind::Word("because"), .. }, ..]
            ))
    {
        tokens.truncate(at);
        if matches!(tokens.last(), Some(Token { kind: Kind::Comma, .. })) {
            tokens.pop();
        }
    }
    // `7, not 8`
    let has_number = |tokens: &[Token<'_>]| tokens.iter().any(|token| matches!(token.kind, Kind::Number(_)));
    let not = |pair: &[Token<'_>]| pair[0].kind == Kind::Comma && pair[1].kind == Kind::Word("not");
    if let Some(at) = tokens.windows(2).position(not)
        && has_number(&tokens[..at])
        && has_number(&tokens[at..])
    {
        tokens.truncate(at);
    }
    cut_quantifier(tokens);
    let is_word = |token: &&Token<'_>| matches!(token.kind, Kind::Word(_));
    let words = tokens.iter().rev().take(4).take_while(is_word).count();
    let tail = tokens.len() - words;
    if let [Token { kind: Kind::Word("is"), .. }, .., Token { kind: Kind::Word("answer"), .. }] = tokens[tail..]
        && tail > 0
    {
        tokens.truncate(tail);
    }
    cut_approximation(tokens);
    // `12 (approximately)`
    if let Some(Token { kind: Kind::Close(Bracket::Round), .. }) = tokens.last() {
        const MOST_WORDS: usize = 8;
        let aside = |token: &&Token<'_>| matches!(token.kind, Kind::Word(text) if is_aside(text));
        let words = tokens.iter().rev().skip(1).take(MOST_WORDS).take_while(aside).count();
        let open = tokens.len().saturating_sub(words + 2);
        if words > 0 && open > 0 && tokens.get(open).is_some_and(|token| token.kind == Kind::Open(Bracket::Round)) {
            tokens.truncate(open);
        }
    }
}

/// Take off `(about 18.9 cards)` and `(\approx 4.15)`: the value before it counts.
fn cut_approximation(tokens: &mut Vec<Token<'_>>) {
    const FARTHEST: usize = 32;
    let mut depth = 0i32;
    let open = tokens.iter().rev().take(FARTHEST).position(|token| {
        depth += match token.kind {
            Kind::Close(Bracket::Round) => 1,
            Kind::Open(Bracket::Round) => -1,
            _ => 0,
        };
        depth <= 0
    });
    let Some(at) = open.filter(|from_end| *from_end > 1).map(|from_end| tokens.len() - 1 - from_end) else { return };
    let about = match tokens.get(at + 1).map(|token| token.kind) {
        Some(Kind::Word(word)) => matches!(word, "about" | "approx" | "approximately" | "roughly"),
        Some(Kind::Relation(Comparison::Approx)) => true,
        _ => false,
    };
    if at > 0 && about && tokens[at].kind == Kind::Open(Bracket::Round) {
        tokens.truncate(at);
    }
}

/// Take off `for all x`, and the range of the argument of a function as in `f(x) = x for all real numbers x`. The range of
/// another letter stays, as `2^k for all positive integers k` is not `2^k for all integers k`; so does `for all odd n`.
fn cut_quantifier(tokens: &mut Vec<Token<'_>>) {
    const KINDS: [&str; 18] = [
        "real",
        "reals",
        "rational",
        "rationals",
        "complex",
        "integer",
        "integers",
        "natural",
        "positive",
        "nonnegative",
        "non-negative",
        "number",
        "numbers",
        "value",
        "values",
        "of",
        "in",
        "and",
    ];
    let is = |token: Option<&Token<'_>>, words: &[&str]| match token.map(|token| token.kind) {
        Some(Kind::Word(text)) => words.iter().any(|word| word.eq_ignore_ascii_case(text)),
        _ => false,
    };
    let start = (1..tokens.len())
        .find(|at| is(tokens.get(*at), &["for"]) && is(tokens.get(at + 1), &["all", "every", "any", "each"]));
    let Some(start) = start else { return };
    let rest = &tokens[start + 2..];
    // The `odd` of `for all odd n` is three letters here.
    let name = |token: &Token<'_>| matches!(token.kind, Kind::Name { .. });
    let spelled = rest.windows(2).any(|pair| name(&pair[0]) && name(&pair[1]) && !pair[1].space);
    let plain = !spelled
        && rest.iter().all(|token| {
            is(Some(token), &KINDS)
                || matches!(
                    token.kind,
                    Kind::Name { .. } | Kind::Comma | Kind::NamedSet(_) | Kind::Relation(Comparison::In)
                )
        });
    let mut letters = rest.iter().filter_map(|token| match token.kind {
        Kind::Name { name, .. } => Some(name),
        _ => None,
    });
    let is_argument = |letter: &str| match &tokens[..] {
        [first, open, argument, close, ..] => {
            matches!(first.kind, Kind::Name { .. })
                && open.kind == Kind::Open(Bracket::Round)
                && matches!(argument.kind, Kind::Name { name, .. } if name == letter)
                && close.kind == Kind::Close(Bracket::Round)
        }
        _ => false,
    };
    let bare = rest.iter().all(|token| name(token) || token.kind == Kind::Comma);
    let ranged = letters.next().is_some_and(|letter| bare || is_argument(letter)) && (bare || letters.next().is_none());
    if plain && ranged {
        tokens.truncate(start);
        if matches!(tokens.last(), Some(Token { kind: Kind::Comma, .. })) {
            tokens.pop();
        }
    }
}

/// A word that is no number and changes none.
fn is_aside(text: &str) -> bool {
    text.len() > 1
        && word::small_number(text).is_none()
        && word::magnitude(text).is_none()
        && !["base", "mod", "modulo", "or", "and", "not", "negative", "minus", "percent", "degrees"].contains(&text)
        && super::unit::Unit::known(text).is_none()
}

/// `-12`, `3.5`, `3/4`, `\frac{3}{4}` without going through tokens.
pub(super) fn plain_number(text: &str) -> Option<Node> {
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if rest.len() > 40 || !rest.is_ascii() {
        return None;
    }
    let (value, form) = match rest.as_bytes() {
        [b'0'..=b'9', ..] => {
            let (whole, after) = digits(rest)?;
            match after.as_bytes() {
                [] => (RBig::from(whole), NumberForm::Integer),
                [b'.', ..] => {
                    let places = after.len() - 1;
                    let (decimals, end) = digits(&after[1..])?;
                    if !end.is_empty() || places > 18 {
                        return None;
                    }
                    let power = 10u64.checked_pow(u32::try_from(places).ok()?)?;
                    let top = UBig::from(whole) * UBig::from(power) + UBig::from(decimals);
                    let form = NumberForm::Decimal { places: u16::try_from(places).ok()? };
                    (RBig::from_parts(IBig::from(top), UBig::from(power)), form)
                }
                [b'/', ..] => {
                    let (bottom, end) = digits(&after[1..])?;
                    fraction(whole, bottom, end)?
                }
                _ => return None,
            }
        }
        [b'\\', ..] => {
            let rest = rest.strip_prefix("\\frac{").or_else(|| rest.strip_prefix("\\dfrac{"))?;
            let (top, rest) = digits(rest)?;
            let (bottom, end) = digits(rest.strip_prefix("}{")?)?;
            fraction(top, bottom, end.strip_prefix('}')?)?
        }
        _ => return None,
    };
    Some(Node::Number { value: if negative { -value } else { value }, form })
}

fn fraction(top: u64, bottom: u64, rest: &str) -> Option<(RBig, NumberForm)> {
    if !rest.is_empty() || bottom == 0 {
        return None;
    }
    let value = RBig::from_parts(IBig::from(top), UBig::from(bottom));
    let lowest = *value.denominator() == UBig::from(bottom);
    Some((value, NumberForm::Fraction { lowest }))
}

/// Leading digits, up to eighteen, and the rest.
fn digits(text: &str) -> Option<(u64, &str)> {
    let count = text.bytes().take_while(u8::is_ascii_digit).count();
    if !(1..=18).contains(&count) {
        return None;
    }
    let value = text.bytes().take(count).fold(0, |value, digit| value * 10 + u64::from(digit - b'0'));
    Some((value, &text[count..]))
}
