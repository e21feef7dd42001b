//! Answer extraction: find the answer that a completion states, by linear byte scans without backtracking.
//!
//! Reasoning states no answer: only the text after the last `</think>` is searched, up to a `<think>` without a
//! `</think>`. One module for each kind of answer: [`boxes`], [`spoken`] ("the answer is"), [`formula`] (the last formula
//! or number).

mod beside;
mod boxes;
pub mod denied;
mod formula;
mod pieces;
mod spoken;
mod struck;

use std::borrow::Cow;

use memchr::memmem;

use crate::characters::strip;
use crate::work::looked_at;

pub use boxes::{all_boxes, boxed, boxed_with_signs, listed_boxes, percent_box};
use denied::{denial, is_denial};
pub(crate) use formula::last_formula;
use formula::last_value;
pub use spoken::said;
pub use struck::legible;

/// The text after the last `</think>`, or the whole text; without an unclosed think block.
#[must_use]
pub fn after_thinking(text: &str) -> &str {
    const OPEN: &[u8] = b"<think>";
    const CLOSE: &[u8] = b"</think>";
    looked_at(text.len());
    let text = memmem::rfind(text.as_bytes(), CLOSE).map_or(text, |at| &text[at + CLOSE.len()..]);
    memmem::find(text.as_bytes(), OPEN).map_or(text, |at| &text[..at])
}

/// The answer that a completion states, stripped. The first of these that the text contains:
///
/// 1. the last balanced `\boxed{…}` or `\fbox{…}`, with the boxes of the same list
/// 2. the last closed `<answer>`
/// 3. the last `####` line
/// 4. the text after the last "answer is" or "answer:"
/// 5. the last formula (`$…$`, `\(…\)`, `\[…\]`) or number, whichever ends later
/// 6. the letter of a choice, where the text is nothing else: `C`, `(b)`, `**D.**`
///
/// Boxes form a list when only `and`, `or`, a comma and math delimiters separate them: `\boxed{2} and \boxed{3}` states
/// `2, 3`. Equal boxes count once. A number inside an unmarked formula stands for the formula: `x^2 + 1` states
/// `x^2 + 1`, never 1.
#[must_use]
pub fn stated(text: &str) -> Option<Cow<'_, str>> {
    match legible(text) {
        Cow::Borrowed(text) => stated_in(text),
        Cow::Owned(text) => stated_in(&text).map(|answer| Cow::Owned(answer.into_owned())),
    }
}

fn stated_in(text: &str) -> Option<Cow<'_, str>> {
    let text = after_thinking(text);
    if let Some(answer) = listed_boxes(text) {
        return Some(answer);
    }
    tagged(text, "answer")
        .or_else(|| hashed(text).next())
        .or_else(|| said(text).rfind(|answer| !is_denied(text, answer)))
        .or_else(|| last_value(text))
        .or_else(|| lone_label(text))
        .map(|answer| Cow::Borrowed(strip(answer)))
}

/// Whether the words before a part of the text, or its first word, deny it.
#[must_use]
pub fn is_denied(text: &str, part: &str) -> bool {
    let start = part.as_ptr() as usize - text.as_ptr() as usize;
    let first =
        part.trim_start_matches(['*', '_', ' ']).split(|c: char| !(c.is_alphabetic() || c == '\'' || c == '’')).next();
    first.is_some_and(is_denial) || denial(&text[..start]).is_some()
}

/// The letter of a choice in a text that is this letter and marks around it.
fn lone_label(text: &str) -> Option<&str> {
    const LONGEST: usize = 12;
    let text = strip(text);
    if text.len() > LONGEST {
        return None;
    }
    let letter = text.trim_matches(['*', '_', '`', '"', '(', ')', '[', ']', '.', ':']);
    matches!(letter.as_bytes(), [b'A'..=b'J' | b'a'..=b'j']).then_some(letter)
}

/// Content of the last closed `<tag>`, up to its first closing tag.
#[must_use]
pub fn tagged<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    looked_at(text.len());
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let last_close = memmem::rfind(text.as_bytes(), close.as_bytes())?;
    let start = memmem::rfind(&text.as_bytes()[..last_close], open.as_bytes())? + open.len();
    let end = memmem::find(&text.as_bytes()[start..], close.as_bytes())?;
    Some(&text[start..start + end])
}

/// The text after `####` on its line, or the next line that is not blank; from the last `####` line upwards.
pub fn hashed(text: &str) -> impl Iterator<Item = &str> {
    let mut before = text;
    std::iter::from_fn(move || {
        let end = before.len();
        let at = memmem::rfind(before.as_bytes(), b"####")?;
        let rest = text[at + 4..].trim_start();
        before = &before[..before[..at].rfind('\n').unwrap_or(0)];
        let line = rest.split_once('\n').map_or(rest, |(line, _)| line);
        looked_at(end - before.len() + text.len() - at - rest.len() + line.len());
        Some(line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_markers() {
        let text = "answer is 5. #### 4\n<answer>3</answer> \\boxed{2} 1";
        assert_eq!(stated(text).as_deref(), Some("2"));
        assert_eq!(stated("answer is 5. #### 4\n<answer>3</answer> 1").as_deref(), Some("3"));
        assert_eq!(stated("the answer is 5. #### 4\n 1").as_deref(), Some("4"));
        assert_eq!(stated("The Answer is 5. and 1").as_deref(), Some("5"));
        assert_eq!(stated("so $x = 5$, or rather 1.").as_deref(), Some("1"));
        assert_eq!(stated("so 1, or rather $x = 5$.").as_deref(), Some("x = 5"));
        assert_eq!(stated("so 5, or rather 1.").as_deref(), Some("1"));
        assert_eq!(stated("no idea"), None);
        assert_eq!(stated(""), None);
    }

    #[test]
    fn a_letter_alone_is_a_choice() {
        for (text, letter) in [("C", "C"), (" (b)\n", "b"), ("**D.**", "D"), ("<think>A or B</think>[J]", "J")] {
            assert_eq!(stated(text).as_deref(), Some(letter), "{text}");
        }
        for text in ["A or B", "K", "CD", "", "**", "It is C", "<think>C</think>", "<think>C"] {
            assert_eq!(stated(text), None, "{text}");
        }
    }

    #[test]
    fn reasoning_states_no_answer() {
        assert_eq!(stated("<think>\\boxed{2}</think> 3").as_deref(), Some("3"));
        assert_eq!(stated("<think>\\boxed{2}</think>"), None);
        assert_eq!(stated("<think>\\boxed{2}"), None);
        assert_eq!(stated("<think>a</think>\\boxed{1}<think>\\boxed{2}").as_deref(), Some("1"));
        assert_eq!(stated("<think>a</think>\\boxed{1}<think>\\boxed{2}</think>"), None);
    }

    #[test]
    fn the_last_closed_tag_counts() {
        assert_eq!(tagged("<answer>1</answer><answer>2</answer>", "answer"), Some("2"));
        assert_eq!(tagged("<answer>1</answer><answer>2", "answer"), Some("1"));
        assert_eq!(tagged("<answer>1</answer></answer>", "answer"), Some("1"));
        assert_eq!(tagged("<answer>1<answer>2</answer>", "answer"), Some("2"));
        assert_eq!(tagged("</answer><answer>", "answer"), None);
    }

    #[test]
    fn hash_lines_come_last_first() {
        assert_eq!(hashed("#### 1\n#### 2 #### 3\n####\n\n 4 \nx").collect::<Vec<_>>(), ["4 ", "3", "1"]);
    }
}
