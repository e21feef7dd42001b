//! The last value of a completion without a marker: a formula in delimiters, an unmarked formula, or a number.

use memchr::memchr2_iter;

use super::boxes::LONGEST_BOX;
use super::denied::{MOST_DENIED, before_denial, denial, is_denied_behind};
use super::pieces::{Kind, Piece, pieces};
use crate::characters::{is_letter, is_minus, starts_with_scale, strip};
use crate::number::{self, Token as Number};
use crate::work::looked_at;

/// How far from its last number an unmarked formula may reach, in bytes.
const FARTHEST: usize = 256;

/// The last formula or the last number, whichever ends later. A number inside an unmarked formula stands for that
/// formula: `x^2 + 1` is not 1. None where such a formula has brackets that do not close.
pub(super) fn last_value(text: &str) -> Option<&str> {
    let mut text = text;
    for _ in 0..MOST_DENIED {
        let value = value_at_end(text)?;
        let start = value.as_ptr() as usize - text.as_ptr() as usize;
        let Some(denied) = denial(&text[..start]) else {
            return Some(value).filter(|_| !is_denied_behind(&text[start + value.len()..]));
        };
        text = before_denial(text, denied)?;
    }
    None
}

fn value_at_end(text: &str) -> Option<&str> {
    let formula = last_formula(text);
    match (formula, number::last(text)) {
        (Some((start, end)), Some(number)) if number.start < end => Some(with_percent(text, start, end)),
        (_, Some(number)) => whole(text).or_else(|| unmarked(text, &number)),
        (Some((start, end)), None) => Some(with_percent(text, start, end)),
        (None, None) => None,
    }
}

/// A text that is one unmarked formula and nothing else: `2, 3`, `(-\infty, 1) \cup (2, 3)`, a matrix. A calculation with `=`
/// is read from its end instead.
fn whole(text: &str) -> Option<&str> {
    let text = strip(text);
    if text.len() > FARTHEST {
        return None;
    }
    if text.starts_with("\\begin{") && text.ends_with('}') && text.matches("\\begin").count() == 1 {
        return text.rfind("\\end{").filter(|at| !text[*at..text.len() - 1].contains('}')).map(|_| text);
    }
    if text.contains(['\n', '=', '≈']) {
        return None;
    }
    let pieces = pieces(text, 0..text.len(), text.len()..text.len());
    let (first, last) = (pieces.first()?, pieces.last()?);
    let starts = matches!(first.kind, Kind::Operand | Kind::Prefix | Kind::Open)
        || (first.kind == Kind::Operator
            && text.starts_with(is_minus)
            && pieces.get(1).is_some_and(|next| !next.space));
    let ends = matches!(last.kind, Kind::Operand | Kind::Close | Kind::Postfix);
    let mut depth = 0i32;
    let closed = pieces.iter().all(|piece| {
        depth += step(piece.kind);
        depth >= 0
    });
    let one = pieces.windows(2).all(|pair| joined(pair[0], pair[1], true));
    (pieces.len() > 1 && starts && ends && closed && depth == 0 && one).then_some(text)
}

/// The content of a formula; with its delimiters where a percent sign stands behind them: `$28$ %`.
fn with_percent(text: &str, start: usize, end: usize) -> &str {
    let opening = if text[..start].ends_with("$$") || text[..start].ends_with(['(', '[']) { 2 } else { 1 };
    let after = &text[end..];
    let closing = if after.starts_with("$$") || after.starts_with('\\') { 2 } else { 1 };
    let rest = after[closing..].trim_start_matches(' ');
    let sign = ["\\%", "%", "percent", "pct"].iter().find(|sign| rest.starts_with(**sign));
    match sign {
        Some(sign) if !rest[sign.len()..].starts_with(char::is_alphanumeric) => {
            &text[start - opening..text.len() - rest.len() + sign.len()]
        }
        _ => &text[start..end],
    }
}

/// Bounds of the content of the last `$…$`, `$$…$$`, `\(…\)` or `\[…\]` that contains a letter or a digit.
pub(crate) fn last_formula(text: &str) -> Option<(usize, usize)> {
    looked_at(text.len());
    let bytes = text.as_bytes();
    let mut found = None;
    // Start of the open formula, and whether a dollar opened it.
    let mut open: Option<(usize, bool)> = None;
    let mut skip_to = 0;
    for at in memchr2_iter(b'$', b'\\', bytes) {
        if at < skip_to {
            continue;
        }
        let next = bytes.get(at + 1).copied().unwrap_or(0);
        let (dollar, opens, closes) = match (bytes[at], next) {
            (b'$', _) => (true, true, true),
            (_, b'(' | b'[') => (false, true, false),
            (_, b')' | b']') => (false, false, true),
            _ => {
                skip_to = at + 2;
                continue;
            }
        };
        let length = if dollar { 1 + usize::from(next == b'$') } else { 2 };
        skip_to = at + length;
        if closes && let Some((start, _)) = open.filter(|(_, by_dollar)| *by_dollar == dollar) {
            let inside = &text[start..at];
            // `$5 and $10`: the second dollar starts another amount and closes no formula.
            let amount =
                dollar && length == 1 && next.is_ascii_digit() && inside.ends_with(|c: char| " -+/,(=".contains(c));
            if !amount {
                let says = inside.len() <= LONGEST_BOX && inside.contains(char::is_alphanumeric);
                found = if says { Some((start, at)) } else { found };
                open = None;
                continue;
            }
        }
        // `how many $? about 1$`: a dollar that ends a clause is money and opens nothing.
        let money =
            dollar && length == 1 && b"?!.,;:".contains(&next) && bytes.get(at + 2).is_none_or(u8::is_ascii_whitespace);
        if opens && !money {
            open = Some((skip_to, dollar));
        }
    }
    found
}

/// The unmarked formula around a number, or the number itself where it stands alone. A calculation in numbers counts for
/// what follows its last `=`.
fn unmarked<'t>(text: &'t str, number: &Number) -> Option<&'t str> {
    let floor = |mut at: usize| {
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let line = text[..number.start].rfind('\n').map_or(0, |at| at + 1);
    let from = line.max(floor(number.start.saturating_sub(FARTHEST)));
    let to = text[number.end..].find('\n').map_or(text.len(), |at| number.end + at);
    let to = to.min(floor((number.end + FARTHEST).min(text.len())));
    // The number was found by rules of its own; its sign and its currency are left to the formula.
    let digits = number.start + first_digit(&text[number.start..number.end]);
    let pieces = pieces(text, from..to, digits..number.end);
    // 5万 is fifty thousand, 百分之50 is a half, and 500 is a part of 12'500.
    let scaled = starts_with_scale(&text[number.end..]);
    if scaled || text[..digits].ends_with("分之") || number::follows_mark(&text[..digits]) {
        return None;
    }
    let alone = Some(&text[number.start..number.end]);
    let Some(at) = pieces.iter().position(|piece| piece.start == digits) else { return alone };
    let (first, last) = run(&pieces, at);
    let (first, last) = trimmed(text, &pieces, (first, last), at, first == 0 && from == line);
    let mut depth = 0i32;
    let mut result = first;
    for (place, piece) in pieces.iter().enumerate().take(last + 1).skip(first) {
        depth += step(piece.kind);
        // `3 * 4 = 12` counts for 12, but `2x = 12` is an equation.
        if piece.kind == Kind::Relation(true)
            && depth == 0
            && place < at
            && !pieces[first..place].iter().any(|piece| piece.symbolic)
        {
            result = place + 1;
        }
        if depth < 0 {
            return None;
        }
    }
    if depth != 0 {
        return None;
    }
    let (start, end) = match &pieces[result..=last] {
        [_] => (groups_before(text, from, number.start, digits), number.end),
        [sign, _] if sign.kind == Kind::Operator && last == at => (number.start, number.end),
        [first, .., last] => (first.start, last.end),
        [] => return None,
    };
    Some(&text[start..end + half_of_day(&text[start..end], &text[end..])])
}

/// Where the thousands of a number start that are set off by spaces: `1 000`, `12 500`. The number starts at `start`, and its
/// digits at `digits`.
fn groups_before(text: &str, from: usize, start: usize, digits: usize) -> usize {
    let count = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if start != digits || count(&text.as_bytes()[digits..]) != 3 {
        return start;
    }
    let mut first = start;
    while let Some(before) = text[from..first].strip_suffix([' ', '\u{a0}', '\u{202f}']) {
        let group = before.bytes().rev().take_while(u8::is_ascii_digit).count();
        let lead = &before[..before.len() - group];
        match group {
            // Digits, letters and marks before the group make it part of something else.
            1..=3 if !lead.ends_with(|c: char| is_letter(c) || ".,:/-−_^\\$€£".contains(c)) => {
                first = from + lead.len();
            }
            _ => return start,
        }
        if group < 3 || !lead.ends_with([' ', '\u{a0}', '\u{202f}']) || !ends_with_group(lead) {
            break;
        }
    }
    if text[first..].starts_with('0') { start } else { first }
}

fn ends_with_group(text: &str) -> bool {
    text.trim_end_matches([' ', '\u{a0}', '\u{202f}']).ends_with(|c: char| c.is_ascii_digit())
}

/// The length of ` p.m.` behind a time such as `3` or `3:30`; without it the time would be another.
fn half_of_day(time: &str, after: &str) -> usize {
    if time.len() > "12:30:00".len() || !time.bytes().all(|byte| byte.is_ascii_digit() || byte == b':') {
        return 0;
    }
    let spaces = after.len() - after.trim_start_matches([' ', '\u{a0}', '\u{202f}']).len();
    let rest = &after[spaces..];
    for half in ["a.m.", "p.m.", "a.m", "p.m", "am", "pm"] {
        let found = rest.get(..half.len()).is_some_and(|start| start.eq_ignore_ascii_case(half));
        if found && !rest[half.len()..].starts_with(char::is_alphanumeric) {
            return spaces + half.len();
        }
    }
    0
}

/// Where a number starts behind its sign and its currency.
fn first_digit(number: &str) -> usize {
    let bytes = number.as_bytes();
    let digit = |at: usize| match bytes[at] {
        b'\\' => bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic),
        byte => byte.is_ascii_digit() || byte == b'.',
    };
    (0..bytes.len()).find(|at| digit(*at)).unwrap_or(0)
}

/// The pieces from the one at `at` outwards that are written as one formula.
fn run(pieces: &[Piece], at: usize) -> (usize, usize) {
    let (mut first, mut last) = (at, at);
    // Commas belong to a formula inside of its brackets alone.
    let mut depth = 0i32;
    while first > 0 {
        let piece = pieces[first - 1];
        match piece.kind {
            Kind::Close => depth += 1,
            Kind::Open => depth -= 1,
            _ => {}
        }
        let comma = piece.kind == Kind::Comma || pieces[first].kind == Kind::Comma;
        if !joined(piece, pieces[first], comma && (depth != 0 || opens_before(pieces, first - 1))) {
            break;
        }
        first -= 1;
    }
    let mut depth: i32 = pieces[first..=at].iter().map(|piece| step(piece.kind)).sum();
    while let Some(piece) = pieces.get(last + 1) {
        if !joined(pieces[last], *piece, depth > 0) {
            break;
        }
        depth += step(piece.kind);
        last += 1;
    }
    (first, last)
}

fn step(kind: Kind) -> i32 {
    match kind {
        Kind::Open => 1,
        Kind::Close => -1,
        _ => 0,
    }
}

/// Whether a bracket that only formulas follow is open before `at`.
fn opens_before(pieces: &[Piece], at: usize) -> bool {
    let mut depth = 0i32;
    for piece in pieces[..=at].iter().rev() {
        match piece.kind {
            Kind::Other => return false,
            Kind::Open if depth == 0 => return true,
            kind => depth -= step(kind),
        }
    }
    false
}

fn joined(left: Piece, right: Piece, inside: bool) -> bool {
    use Kind::{Close, Comma, Open, Operand, Operator, Other, Postfix, Prefix, Relation, Script};
    match (left.kind, right.kind) {
        (Other, _) | (_, Other) => false,
        (Comma, _) | (_, Comma) => inside,
        (Operator | Relation(_) | Script | Open | Prefix, _) => true,
        (_, Operator | Relation(_) | Script | Close | Postfix) => true,
        // `2 sin x` and `2 \pi`, but not `5 (five)`.
        (_, Prefix) => true,
        (Operand | Postfix | Close, Operand | Open) => !right.space || (right.symbolic && right.end - right.start > 1),
    }
}

/// The run without what only touches it: a bullet or a dash, relations, and brackets without a partner.
fn trimmed(
    text: &str,
    pieces: &[Piece],
    (mut first, mut last): (usize, usize),
    at: usize,
    starts_line: bool,
) -> (usize, usize) {
    let depth = |first: usize, last: usize| pieces[first..=last].iter().map(|piece| step(piece.kind)).sum::<i32>();
    while last > at {
        let dangling = match pieces[last].kind {
            Kind::Close => depth(first, last) < 0,
            Kind::Operator | Kind::Relation(_) | Kind::Script | Kind::Open | Kind::Comma | Kind::Prefix => true,
            _ => false,
        };
        if !dangling {
            break;
        }
        last -= 1;
    }
    let mut relation = false;
    while first < at {
        let dangling = match pieces[first].kind {
            Kind::Open => depth(first, last) > 0,
            Kind::Relation(_) | Kind::Script | Kind::Close | Kind::Comma | Kind::Postfix => true,
            // A sign touches its value; apart from it, a dash or a star opens the line.
            Kind::Operator => {
                let sign = text[pieces[first].start..].starts_with(|c| is_minus(c) || c == '±' || c == '\\');
                !(sign && (relation || !pieces[first + 1].space)) || (starts_line && pieces[first + 1].space)
            }
            _ => false,
        };
        if !dangling {
            break;
        }
        relation |= matches!(pieces[first].kind, Kind::Relation(_));
        first += 1;
    }
    (first, last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_found() {
        let last = |text: &'static str| last_formula(text).map(|(start, end)| &text[start..end]);
        assert_eq!(last("$1$ and $$x$$ and"), Some("x"));
        assert_eq!(last(r"\(a\) \[b\] $"), Some("b"));
        assert_eq!(last("pays $5 and $10"), None);
        assert_eq!(last(r"\$5 $x$ \$7"), Some("x"));
        assert_eq!(last("$.$"), None);
        assert_eq!(last("how many $? just about 1$"), None);
        assert_eq!(last("prices in $. So $x$ is"), Some("x"));
    }

    #[test]
    fn unmarked_formulas_are_read_whole_or_not_at_all() {
        for (text, expected) in [
            ("x^2", "x^2"),
            ("-1 + sqrt(3)", "-1 + sqrt(3)"),
            ("So the area is 3x^2 + 4.", "3x^2 + 4"),
            ("2√3", "2√3"),
            ("2π", "2π"),
            ("2 π", "2 π"),
            ("it is (2, 3)", "(2, 3)"),
            ("f(3)", "f(3)"),
            ("sin 7", "sin 7"),
            ("log_2 10", "log_2 10"),
            ("x**2", "x**2"),
            ("n-1", "n-1"),
            ("x ≤ 5", "x ≤ 5"),
            ("2x = 10", "2x = 10"),
            ("so 2x = 10 => x = 5", "x = 5"),
            ("3!", "3!"),
            (r"\frac{x}{2}", r"\frac{x}{2}"),
            (r"\frac{3}{4}", r"\frac{3}{4}"),
            ("2:3", "2:3"),
            ("at 3:45", "3:45"),
            ("They meet at 3:45 p.m. on Monday", "3:45 p.m."),
            ("at 3:45PM.", "3:45PM"),
            ("They meet at 3 pm", "3 pm"),
            ("They met 3 amateurs", "3"),
            // Numbers that stand alone.
            ("2 + 3 = 5", "5"),
            ("100/3 = 33.33", "33.33"),
            ("$12 * 3 = $36.", "$36"),
            ("Total = 15", "15"),
            ("- 15", "15"),
            ("* 15", "15"),
            ("is **15**.", "15"),
            ("5 apples + 3 apples = 8 apples", "8"),
            ("It weighs 5 kg", "5"),
            ("I have 2 cats, 3 dogs", "3"),
            ("Step 3: we get 12", "12"),
            ("(so 5)", "5"),
            ("it is 5 (five)", "5"),
            ("I got 3!", "3"),
            ("-5", "-5"),
            ("= -5", "-5"),
        ] {
            assert_eq!(last_value(text).map(str::trim_start), Some(expected), "{text}");
        }
        for text in ["f(2", "共5万元", "占百分之50", "3分之2"] {
            assert_eq!(last_value(text), None, "{text}");
        }
    }
}
