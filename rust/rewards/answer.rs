//! Find the stated answer in a completion: linear byte scans, no backtracking.
//!
//! Reasoning is not a statement: where a `</think>` occurs, only what follows the last one is searched.

use memchr::{memchr_iter, memchr3_iter, memmem};

use super::strip;

/// A box longer than this is not an answer.
const LONGEST_BOX: usize = 16 * 1024;
/// A spoken answer ("the answer is …") is read no further than this, so that repeating the phrase stays linear.
const LONGEST_SENTENCE: usize = 512;

/// What follows the last `</think>`, or everything.
#[must_use]
pub fn after_thinking(text: &str) -> &str {
    memmem::rfind(text.as_bytes(), b"</think>").map_or(text, |at| &text[at + "</think>".len()..])
}

/// The answer that a completion states: the last balanced `\boxed{…}` or `\fbox{…}`, else the last closed `<answer>`,
/// else the last `####` line, else what follows the last "answer is" or "answer:", else the last number; stripped.
#[must_use]
pub fn stated(text: &str) -> Option<&str> {
    let text = after_thinking(text);
    boxed(text)
        .or_else(|| tagged(text, "answer"))
        .or_else(|| hashed(text).next())
        .or_else(|| said(text).next_back())
        .or_else(|| super::number::last(text).map(|token| &text[token.start..token.end]))
        .map(strip)
}

/// Content of the `\boxed{…}` or `\fbox{…}` that starts last among those whose braces balance (`\{` and `\}` are text).
#[must_use]
pub fn boxed(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let first = [&b"\\boxed"[..], b"\\fbox"].iter().filter_map(|name| memmem::find(bytes, name)).min()?;
    let mut open = Vec::new();
    let mut best: Option<(usize, usize)> = None;
    let mut escaped_to = first;
    for at in memchr3_iter(b'{', b'}', b'\\', &bytes[first..]).map(|at| first + at) {
        match bytes[at] {
            _ if at < escaped_to => {}
            b'\\' => escaped_to = at + 2,
            b'{' => open.push((at + 1, opens_box(&bytes[first..at]))),
            _ => {
                let Some((start, is_box)) = open.pop() else { continue };
                if is_box && at - start <= LONGEST_BOX && best.is_none_or(|(known, _)| start > known) {
                    best = Some((start, at));
                }
            }
        }
    }
    best.map(|(start, end)| &text[start..end])
}

fn opens_box(before: &[u8]) -> bool {
    let before = before.trim_ascii_end();
    before.ends_with(b"\\boxed") || before.ends_with(b"\\fbox")
}

/// Content of the last `<tag>` that is closed, up to its first closing tag.
#[must_use]
pub fn tagged<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    let last_close = memmem::rfind(text.as_bytes(), close.as_bytes())?;
    let start = memmem::rfind(&text.as_bytes()[..last_close], open.as_bytes())? + open.len();
    let end = memmem::find(&text.as_bytes()[start..], close.as_bytes())?;
    Some(&text[start..start + end])
}

/// What follows `####` on its line, or on the next line with any text when that is blank; from the last line upwards.
pub fn hashed(text: &str) -> impl Iterator<Item = &str> {
    let mut before = text;
    std::iter::from_fn(move || {
        let at = memmem::rfind(before.as_bytes(), b"####")?;
        let rest = text[at + 4..].trim_start();
        before = &before[..before[..at].rfind('\n').unwrap_or(0)];
        Some(rest.split_once('\n').map_or(rest, |(line, _)| line))
    })
}

/// What follows each "answer is", "answer:" or "answer =" (any case, bold marks allowed) to the end of its sentence.
pub fn said(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    let bytes = text.as_bytes();
    memchr_iter(b'w', bytes)
        .chain(memchr_iter(b'W', bytes))
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .filter_map(move |at| {
            let start = at.checked_sub(3)?;
            let end = at + 3;
            bytes.get(start..end)?.eq_ignore_ascii_case(b"answer").then_some(())?;
            let marks = |c: char| c == '*' || c == '_' || super::is_space(c);
            let rest = text[end..].trim_start_matches(marks);
            let rest = match rest.strip_prefix([':', '=']) {
                Some(rest) => rest,
                None => rest.strip_prefix("is").filter(|rest| !rest.starts_with(char::is_alphanumeric))?,
            };
            let rest = rest.trim_start_matches(|c| c == ':' || marks(c));
            let rest = sentence(rest);
            (!rest.is_empty()).then_some(rest)
        })
}

/// Up to a newline or to a stop that a space or the end follows, capped.
fn sentence(text: &str) -> &str {
    let cap = (0..=LONGEST_SENTENCE.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    let text = &text[..cap.unwrap_or(0)];
    let bytes = text.as_bytes();
    let ends = |at: &usize| bytes[*at] == b'\n' || bytes.get(at + 1).is_none_or(u8::is_ascii_whitespace);
    let end = memchr3_iter(b'\n', b'.', b'.', bytes).find(ends).unwrap_or(bytes.len());
    text[..end].trim_end_matches(|c| c == '*' || super::is_space(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_markers() {
        let text = "answer is 5. #### 4\n<answer>3</answer> \\boxed{2} 1";
        assert_eq!(stated(text), Some("2"));
        assert_eq!(stated("answer is 5. #### 4\n<answer>3</answer> 1"), Some("3"));
        assert_eq!(stated("the answer is 5. #### 4\n 1"), Some("4"));
        assert_eq!(stated("The Answer is 5. and 1"), Some("5"));
        assert_eq!(stated("so 5, or rather 1."), Some("1"));
        assert_eq!(stated("no idea"), None);
        assert_eq!(stated(""), None);
    }

    #[test]
    fn reasoning_is_not_a_statement() {
        assert_eq!(stated("<think>\\boxed{2}</think> 3"), Some("3"));
        assert_eq!(stated("<think>\\boxed{2}</think>"), None);
        assert_eq!(stated("<think>\\boxed{2}"), Some("2"));
    }

    #[test]
    fn boxes_balance() {
        assert_eq!(boxed(r"\boxed{1} \fbox{\frac{1}{2}} \boxed{3"), Some(r"\frac{1}{2}"));
        assert_eq!(boxed(r"\boxed{a \boxed{b} c}"), Some("b"));
        assert_eq!(boxed(r"\boxed {x \} y}"), Some(r"x \} y"));
        assert_eq!(boxed(r"{ } } \boxed{1}"), Some("1"));
        assert_eq!(boxed(r"\boxed{}"), Some(""));
        assert_eq!(boxed(r"\boxed 5"), None);
        assert_eq!(boxed(r"\boxed{5"), None);
        assert_eq!(boxed(&format!("\\boxed{{{}}}", "1".repeat(LONGEST_BOX + 1))), None);
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

    #[test]
    fn spoken_answers_end_with_their_sentence() {
        let all = |text| said(text).collect::<Vec<_>>();
        assert_eq!(all("The answer is: 3.5. Then"), ["3.5"]);
        assert_eq!(all("**Answer:** 3\nx"), ["3"]);
        assert_eq!(all("ANSWER = 4; answers are many; the answer isn't"), ["4; answers are many; the answer isn't"]);
        assert!(all("sw w ansWER").is_empty());
    }
}
