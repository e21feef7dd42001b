//! Golds with a brace too few or too many, where they have one reading.

use super::ast::Ast;
use super::read::parse;
use crate::error::ParseError;

/// A longer gold is not mended.
const LONGEST: usize = 256;
/// Bytes of all texts that are tried: what takes one or two milliseconds to read.
const MOST_BYTES: usize = 3 * 1024;

/// How much less than reading a text it takes to see that a group ends inside of its brackets.
const CHEAPER: usize = 16;

/// The tree of a text whose braces do not balance: the one that every place for the missing brace, or every choice of the
/// superfluous one, gives where it can be read at all. `\frac{1}{2` is a half; `\sqrt{3+2`, which may be √3 + 2 or √5, has
/// no such tree. Past [`MOST_BYTES`] there is none either.
pub(super) fn balanced(text: &str) -> Option<Ast> {
    if text.len() > LONGEST {
        return None;
    }
    let edits = Edits::of(text)?;
    let mut left = MOST_BYTES;
    let mut found: Option<(String, Ast)> = None;
    for candidate in edits.candidates() {
        if !edits.are_brackets_whole(&candidate) {
            left = left.checked_sub(1 + candidate.len() / CHEAPER)?;
            continue;
        }
        left = left.checked_sub(candidate.len())?;
        match parse(&candidate) {
            Ok(ast) => {
                let shown = ast.to_string();
                if found.as_ref().is_some_and(|(known, _)| *known != shown) {
                    return None;
                }
                found = Some((shown, ast));
            }
            Err(ParseError::Undecided) => return None,
            Err(_) => {}
        }
    }
    found.map(|(_, ast)| ast)
}

/// The places where one or two braces may be added or taken away. Every text made so is another, and its braces balance.
struct Edits<'t> {
    text: &'t str,
    add: bool,
    /// Whether the brackets that are no braces close one another.
    brackets: bool,
    /// The places of the first edit, and those of the second, which is not before the first.
    places: Vec<Vec<usize>>,
}

impl<'t> Edits<'t> {
    fn of(text: &'t str) -> Option<Self> {
        let braces = braces(text);
        let missing = braces.iter().map(|(_, step)| step).sum::<i32>();
        let edits = usize::try_from(missing.abs()).ok().filter(|edits| (1..=2).contains(edits))?;
        let add = missing > 0;
        // Behind each brace: its place, and how many are open then.
        let depths: Vec<(usize, i32)> = braces
            .iter()
            .scan(0, |depth, (at, step)| {
                *depth += step;
                Some((*at, *depth))
            })
            .collect();
        let places = (0..edits).map(|edit| {
            let edit = i32::try_from(edit).unwrap_or(0);
            if add {
                // As many stay open to the end as are added.
                let last = depths.iter().rev().find(|(_, depth)| *depth <= edit).map_or(0, |(at, _)| at + 1);
                let closed = |at: usize| braces.iter().any(|(place, step)| place + 1 == at && *step < 0);
                (last..=text.len()).filter(|at| is_boundary(text, *at) && !closed(*at)).collect()
            } else {
                // And none may close more than are open.
                let first = depths.iter().find(|(_, depth)| *depth == -1 - edit).map_or(text.len(), |(at, _)| *at);
                let closing = braces.iter().filter(|(at, step)| *step < 0 && *at <= first);
                closing.map(|(at, _)| *at).collect()
            }
        });
        let even = !add || depths.iter().all(|(_, depth)| *depth >= 0);
        even.then(|| Self { text, add, brackets: are_brackets_whole(text, false), places: places.collect() })
    }

    /// Whether no group of a text so made holds half of a bracket, as far as the whole text has none.
    fn are_brackets_whole(&self, candidate: &str) -> bool {
        !self.brackets || are_brackets_whole(candidate, true)
    }

    fn candidates(&self) -> impl Iterator<Item = String> {
        let first = self.places.first().map_or(&[][..], Vec::as_slice);
        let second = self.places.get(1);
        let later = move |earlier: usize| match second {
            None => vec![earlier],
            Some(places) if self.add => places.iter().copied().filter(|later| *later >= earlier).collect(),
            // Of braces side by side the first ones go.
            Some(places) => {
                let other = |later: &usize| *later == earlier + 1 || *later > earlier && !self.follows_a_brace(*later);
                places.iter().copied().filter(other).collect()
            }
        };
        first.iter().filter(|earlier| self.add || !self.follows_a_brace(**earlier)).flat_map(move |earlier| {
            later(*earlier).into_iter().map(|later| {
                // The later place first, so that the earlier one stays where it was.
                let text = self.edit(later, self.text);
                if self.places.len() == 1 { text } else { self.edit(*earlier, &text) }
            })
        })
    }

    fn follows_a_brace(&self, at: usize) -> bool {
        self.text[..at].ends_with('}') && !self.text[..at].ends_with("\\}")
    }

    fn edit(&self, at: usize, text: &str) -> String {
        let (before, after) = text.split_at(at);
        if self.add { format!("{before}}}{after}") } else { format!("{before}{}", &after[1..]) }
    }
}

/// Whether each `(` or `[` is closed by a `)` or `]`; and that inside of the group where it stands, if `groups` count.
fn are_brackets_whole(text: &str, groups: bool) -> bool {
    let mut open = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let whole = match byte {
            b'\\' => {
                bytes.next();
                true
            }
            b'{' if groups => {
                open.push(byte);
                true
            }
            b'}' if groups => open.pop() == Some(b'{'),
            b'(' | b'[' => {
                open.push(b'(');
                true
            }
            b')' | b']' => open.pop() == Some(b'('),
            _ => true,
        };
        if !whole {
            return false;
        }
    }
    open.is_empty()
}

/// The braces that group, with +1 for those that open; `\{` and `\}` are signs.
fn braces(text: &str) -> Vec<(usize, i32)> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 1,
            b'{' => found.push((at, 1)),
            b'}' => found.push((at, -1)),
            _ => {}
        }
        at += 1;
    }
    found
}

/// Whether a brace may close a group here: not inside of a number, a word or a command, and not right behind a brace.
fn is_boundary(text: &str, at: usize) -> bool {
    let Some((before, after)) = text.split_at_checked(at) else { return false };
    let (Some(left), right) = (before.chars().next_back(), after.chars().next().unwrap_or(' ')) else { return false };
    let command = before.trim_end_matches(|c: char| c.is_ascii_alphabetic()).ends_with('\\');
    let number = |c: char| c.is_ascii_digit() || c == '.';
    !(matches!(left, '\\' | '{')
        || number(left) && number(right)
        || left.is_alphabetic() && right.is_alphabetic()
        || command && (left.is_alphabetic() && right == '{'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reading_or_none() {
        for (text, expected) in [
            (r"\frac{1}{2", Some(r"\frac{1}{2}")),
            (r"\frac{\sqrt{3}{2}", Some(r"\frac{\sqrt{3}}{2}")),
            (r"\frac{7}{12", Some(r"\frac{7}{12}")),
            (r"\sqrt{3}}", Some(r"\sqrt{3}")),
            (r"\frac{1}}{2}", Some(r"\frac{1}{2}")),
            (r"\frac{\sqrt{3", None),
            (r"\sqrt{3+2", None),
            ("x^{2", Some("x^2")),
            ("x^{2y", None),
            ("{{{1", None),
            ("1", None),
            (r"\frac{\sqrt{3}}}}{2}", Some(r"\frac{\sqrt{3}}{2}")),
            ("} {1", None),
            // Two lost braces among many places.
            (&format!("{{{{{}", "x?y".repeat(42)), None),
        ] {
            let expected = expected.map(|text| parse(text).unwrap().to_string());
            assert_eq!(balanced(text).map(|ast| ast.to_string()), expected, "{text}");
        }
    }

    #[test]
    fn every_text_tried_balances_and_is_another() {
        for (text, expected) in [
            (r"\frac{1}{2", 1),
            (r"\frac{\sqrt{3}{2}", 2),
            (r"\frac{\sqrt{3", 1),
            (r"\sqrt{3}}", 1),
            (r"\frac{1}}{2}}", 2),
            (r"\frac{1}{2}}}", 2),
            ("} 7", 1),
            ("} {1", 0),
            (r"\frac{1}{2} + \frac{1}{2", 1),
        ] {
            let tried: Vec<String> = Edits::of(text).map_or(Vec::new(), |edits| edits.candidates().collect());
            assert_eq!(tried.len(), expected, "{text}: {tried:?}");
            for (place, candidate) in tried.iter().enumerate() {
                assert_eq!(braces(candidate).iter().map(|(_, step)| step).sum::<i32>(), 0, "{candidate}");
                assert!(!tried[..place].contains(candidate), "{candidate}");
            }
        }
    }
}
