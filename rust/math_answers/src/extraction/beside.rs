//! What stands beside a box and belongs to it: signs before it, and percent and degrees behind it.

use crate::characters::is_minus;
use crate::work::looked_at;

/// The sign that a box inherits: `x = -\boxed{5}`. A dash that opens a line is a bullet, and `3 - \boxed{5}` a difference.
pub(super) fn sign(before: &str) -> &'static str {
    let before = before.trim_end_matches(' ');
    let (rest, sign) = match (before.strip_suffix(is_minus), before.strip_suffix("\\pm")) {
        (Some(rest), _) => (rest, "-"),
        (_, Some(rest)) => (rest, "\\pm "),
        _ => return "",
    };
    let rest = rest.trim_end_matches(' ');
    if ["=", "$", "\\(", "\\[", "\\approx", "≈"].iter().any(|start| rest.ends_with(start)) { sign } else { "" }
}

/// A percent or degree sign directly behind a box, also behind the end of its formula, and its length with that end.
pub(super) fn suffix(after: &str) -> (&'static str, usize) {
    const SIGNS: [(&str, &str); 7] = [
        ("\\%", "\\%"),
        ("%", "\\%"),
        ("^\\circ", "^\\circ"),
        ("^{\\circ}", "^\\circ"),
        ("\\degree", "^\\circ"),
        ("°", "^\\circ"),
        ("\\text{%}", "\\%"),
    ];
    let rest = ["\\,", "\\!", "\\;", "\\ ", " ", "$", "\\)"]
        .iter()
        .find_map(|mark| after.strip_prefix(*mark))
        .filter(|_| !after.starts_with("$$"))
        .unwrap_or(after);
    match SIGNS.iter().find(|(sign, _)| rest.starts_with(*sign)) {
        Some((sign, meaning)) => (meaning, after.len() - rest.len() + sign.len()),
        None => ("", 0),
    }
}

/// What follows the word percent that stands behind a box.
pub(super) fn behind_percent_word(after: &str) -> Option<&str> {
    let mut rest = after;
    // What closes a formula or bold text, and space.
    while let Some(mark) =
        [" ", "~", "$", "*", "\\)", "\\]", "\\,", "\\;", "\\!", "\\ "].iter().find(|mark| rest.starts_with(**mark))
    {
        looked_at(mark.len());
        rest = &rest[mark.len()..];
    }
    let rest = ["\\text{", "\\mathrm{"].iter().find_map(|text| rest.strip_prefix(*text)).unwrap_or(rest);
    let rest = rest.trim_start_matches(' ');
    ["percent", "pct", "per cent"].iter().find_map(|word| {
        let start = rest.get(..word.len())?;
        start.eq_ignore_ascii_case(word).then(|| &rest[word.len()..])
    })
}

/// The length of the dash that a text ends with.
pub(super) fn dash_length(before: &str) -> usize {
    before.chars().next_back().filter(|c| is_minus(*c)).map_or(0, char::len_utf8)
}
