//! Golds with a brace too few or too many, where they have one reading.

use super::super::Status;
use super::ast::Ast;
use super::read::parse;

/// A longer gold is not mended.
const LONGEST: usize = 256;
/// Texts that are tried.
const MOST_TRIED: usize = 1200;

/// The tree of a text whose braces do not balance: the one that every place for the missing brace, or every choice of the
/// superfluous one, gives where it can be read at all. `\frac{1}{2` is a half; `\sqrt{3+2`, which may be √3 + 2 or √5, has
/// no such tree.
pub(super) fn balanced(text: &str) -> Option<Ast> {
    let braces = braces(text);
    let missing = braces.iter().map(|(_, step)| step).sum::<i32>();
    if text.len() > LONGEST || !(1..=2).contains(&missing.abs()) {
        return None;
    }
    let places: Vec<usize> = if missing > 0 {
        let first = braces.first().map_or(0, |(at, _)| at + 1);
        (first..=text.len()).filter(|at| is_boundary(text, *at)).collect()
    } else {
        braces.iter().filter(|(_, step)| *step < 0).map(|(at, _)| *at).collect()
    };
    let edit = |at: usize, text: &str| {
        let (before, after) = text.split_at(at);
        if missing > 0 { format!("{before}}}{after}") } else { format!("{before}{}", &after[1..]) }
    };
    let mut tried = 0;
    let mut found: Option<(String, Ast)> = None;
    for (index, later) in places.iter().enumerate() {
        // The later place first, so that the earlier one stays where it was.
        let once = edit(*later, text);
        let both: Vec<String> = match missing.abs() {
            1 => vec![once],
            _ => places[..=index]
                .iter()
                .filter(|earlier| missing > 0 || *earlier != later)
                .map(|earlier| edit(*earlier, &once))
                .collect(),
        };
        for candidate in both {
            tried += 1;
            if tried > MOST_TRIED {
                return None;
            }
            match parse(&candidate) {
                Ok(ast) => {
                    let shown = ast.to_string();
                    if found.as_ref().is_some_and(|(known, _)| *known != shown) {
                        return None;
                    }
                    found = Some((shown, ast));
                }
                Err(Status::Undecided) => return None,
                Err(_) => {}
            }
        }
    }
    found.map(|(_, ast)| ast)
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

/// Whether a brace may stand here: not inside of a number, a word or a command.
fn is_boundary(text: &str, at: usize) -> bool {
    let Some((before, after)) = text.split_at_checked(at) else { return false };
    let (Some(left), right) = (before.chars().next_back(), after.chars().next().unwrap_or(' ')) else { return false };
    let command = before.trim_end_matches(|c: char| c.is_ascii_alphabetic()).ends_with('\\');
    let number = |c: char| c.is_ascii_digit() || c == '.';
    !(left == '\\'
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
        ] {
            let expected = expected.map(|text| parse(text).unwrap().to_string());
            assert_eq!(balanced(text).map(|ast| ast.to_string()), expected, "{text}");
        }
    }
}
