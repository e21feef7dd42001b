//! Answer extraction: find the answer that a completion states, by linear byte scans without backtracking.
//!
//! Reasoning states no answer: where a `</think>` occurs, only the text after the last one is searched.

use std::borrow::Cow;

use memchr::{memchr_iter, memchr2_iter, memchr3_iter, memmem};

use super::strip;

/// Longest content of a box in bytes; a longer box is ignored.
const LONGEST_BOX: usize = 16 * 1024;
/// Longest sentence read after "the answer is", in bytes: text that repeats the phrase still takes linear time.
const LONGEST_SENTENCE: usize = 512;
/// Longest text between two boxes of one answer, in bytes.
const LONGEST_JOINT: usize = 40;
/// Largest number of boxes in one answer.
const MOST_BOXES: usize = 16;

/// The text after the last `</think>`, or the whole text.
#[must_use]
pub fn after_thinking(text: &str) -> &str {
    memmem::rfind(text.as_bytes(), b"</think>").map_or(text, |at| &text[at + "</think>".len()..])
}

/// The answer that a completion states, stripped. The first of these that the text contains:
///
/// 1. the last balanced `\boxed{…}` or `\fbox{…}`, with the boxes of the same list
/// 2. the last closed `<answer>`
/// 3. the last `####` line
/// 4. the text after the last "answer is" or "answer:"
/// 5. the last formula (`$…$`, `\(…\)`, `\[…\]`) or number, whichever ends later
///
/// Boxes form a list when only `and`, `or`, a comma and math delimiters separate them: `\boxed{2} and \boxed{3}` states
/// `2, 3`. Equal boxes count once.
#[must_use]
pub fn stated(text: &str) -> Option<Cow<'_, str>> {
    let text = after_thinking(text);
    if let Some(answer) = listed_boxes(text) {
        return Some(answer);
    }
    tagged(text, "answer")
        .or_else(|| hashed(text).next())
        .or_else(|| said(text).next_back())
        .or_else(|| last_value(text))
        .map(|answer| Cow::Borrowed(strip(answer)))
}

/// Content of the last `\boxed{…}` or `\fbox{…}` with balanced braces, by its start; `\{` and `\}` are text.
#[must_use]
pub fn boxed(text: &str) -> Option<&str> {
    boxes(text).into_iter().max_by_key(|found| found.start).map(|found| &text[found.start..found.end])
}

/// A box: where its command starts, and its content.
struct Boxed {
    command: usize,
    start: usize,
    end: usize,
}

/// All balanced boxes, ordered by their ends.
fn boxes(text: &str) -> Vec<Boxed> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let Some(first) = [&b"\\boxed"[..], b"\\fbox"].iter().filter_map(|name| memmem::find(bytes, name)).min() else {
        return found;
    };
    let mut open = Vec::new();
    let mut escaped_to = first;
    for at in memchr3_iter(b'{', b'}', b'\\', &bytes[first..]).map(|at| first + at) {
        match bytes[at] {
            _ if at < escaped_to => {}
            b'\\' => escaped_to = at + 2,
            b'{' => open.push((at + 1, box_command(&bytes[first..at]).map(|command| first + command))),
            _ => {
                if let Some((start, Some(command))) = open.pop()
                    && at - start <= LONGEST_BOX
                {
                    found.push(Boxed { command, start, end: at });
                }
            }
        }
    }
    found
}

/// Start of the box command at the end of `before`, the text up to a brace.
fn box_command(before: &[u8]) -> Option<usize> {
    let before = before.trim_ascii_end();
    [&b"\\boxed"[..], b"\\fbox"].iter().find(|name| before.ends_with(name)).map(|name| before.len() - name.len())
}

/// The answer from boxes, as in [`stated`]: the box that starts last, and the boxes of its list.
#[must_use]
pub fn listed_boxes(text: &str) -> Option<Cow<'_, str>> {
    let mut found = boxes(text);
    found.sort_unstable_by_key(|found| found.start);
    let last = found.pop()?;
    let content = |found: &Boxed| strip(&text[found.start..found.end]);
    let mut answers = vec![content(&last)];
    let mut command = last.command;
    while let Some(before) = found.pop() {
        // `found.end` is the closing brace.
        let Some(joint) = text.get(before.end + 1..command) else { break };
        if !is_joint(joint) || answers.len() == MOST_BOXES {
            break;
        }
        if !answers.contains(&content(&before)) {
            answers.push(content(&before));
        }
        command = before.command;
    }
    if let [only] = answers[..] {
        return Some(Cow::Borrowed(only));
    }
    answers.reverse();
    Some(Cow::Owned(answers.join(", ")))
}

/// Whether the text between two boxes joins them: commas, `and`, `or` and math delimiters only.
fn is_joint(text: &str) -> bool {
    if text.len() > LONGEST_JOINT {
        return false;
    }
    let mut joins = false;
    let mut rest = text;
    while !rest.is_empty() {
        let marks =
            ["$", "\\(", "\\)", "\\[", "\\]", "\\text{", "}", "\\quad", "\\qquad", "\\,", "\\;", "\\ ", "~", "*"];
        let words = ["and", "or", ",", ";"];
        let word = words.iter().find(|word| rest.starts_with(**word));
        joins |= word.is_some();
        let length = match word.or_else(|| marks.iter().find(|mark| rest.starts_with(**mark))) {
            Some(known) => known.len(),
            None if rest.starts_with(super::is_space) => rest.chars().next().map_or(1, char::len_utf8),
            None => return false,
        };
        rest = &rest[length..];
    }
    joins
}

/// Content of the last closed `<tag>`, up to its first closing tag.
#[must_use]
pub fn tagged<'t>(text: &'t str, tag: &str) -> Option<&'t str> {
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
        let at = memmem::rfind(before.as_bytes(), b"####")?;
        let rest = text[at + 4..].trim_start();
        before = &before[..before[..at].rfind('\n').unwrap_or(0)];
        Some(rest.split_once('\n').map_or(rest, |(line, _)| line))
    })
}

/// The text after each "answer is", "answer:" or "answer =", to the end of its sentence. Any case; bold marks allowed.
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
                None => after_is(rest)?,
            };
            let rest = rest.trim_start_matches(|c| c == ':' || marks(c));
            let rest = sentence(rest);
            (!rest.is_empty()).then_some(rest)
        })
}

/// The text after "is", directly or after "to …" as in "the answer to this question is".
fn after_is(rest: &str) -> Option<&str> {
    const LONGEST: usize = 80;
    if let Some(rest) = rest.strip_prefix("is") {
        return (!rest.starts_with(char::is_alphanumeric)).then_some(rest);
    }
    let question = rest.strip_prefix("to ")?;
    let end = question.bytes().take(LONGEST).position(|byte| b".:?!,;$\n".contains(&byte)).unwrap_or(LONGEST);
    let at = memmem::find(&question.as_bytes()[..end.min(question.len())], b" is ")?;
    question.get(at + 4..)
}

/// The first sentence, of at most [`LONGEST_SENTENCE`] bytes: up to a newline, or a full stop before whitespace or the
/// end. Display math at the start is read across newlines. A stop inside closing marks, as in `$5.$`, ends the sentence
/// after the marks.
fn sentence(text: &str) -> &str {
    let cap = (0..=LONGEST_SENTENCE.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    let text = &text[..cap.unwrap_or(0)];
    for (open, close) in [("$$", "$$"), ("\\[", "\\]")] {
        if let Some(inside) = text.strip_prefix(open)
            && let Some(end) = inside.find(close)
        {
            return &text[..open.len() + end + close.len()];
        }
    }
    let bytes = text.as_bytes();
    let end = memchr2_iter(b'\n', b'.', bytes).find_map(|at| {
        if bytes[at] == b'\n' {
            return Some(at);
        }
        let marks = bytes[at + 1..].iter().take_while(|byte| b"$)]*\\\"'".contains(byte)).count();
        let ends = bytes.get(at + 1 + marks).is_none_or(u8::is_ascii_whitespace);
        ends.then_some(if marks == 0 { at } else { at + 1 + marks })
    });
    let text = &text[..end.unwrap_or(bytes.len())];
    text.trim_end_matches(|c| c == '*' || super::is_space(c))
}

/// The last formula or the last number, whichever ends later.
fn last_value(text: &str) -> Option<&str> {
    let formula = last_formula(text);
    let number = super::number::last(text);
    match (formula, number) {
        (Some((start, end)), Some(number)) if number.start < end => Some(&text[start..end]),
        (_, Some(number)) => Some(&text[number.start..number.end]),
        (Some((start, end)), None) => Some(&text[start..end]),
        (None, None) => None,
    }
}

/// Bounds of the content of the last `$…$`, `$$…$$`, `\(…\)` or `\[…\]` that contains a letter or a digit.
pub(super) fn last_formula(text: &str) -> Option<(usize, usize)> {
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
                dollar && length == 1 && next.is_ascii_digit() && inside.ends_with(|c: char| " -+/,(".contains(c));
            if !amount {
                let says = inside.len() <= LONGEST_BOX && inside.contains(char::is_alphanumeric);
                found = if says { Some((start, at)) } else { found };
                open = None;
                continue;
            }
        }
        if opens {
            open = Some((skip_to, dollar));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Option<String> {
        stated(text).map(Cow::into_owned)
    }

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
    fn reasoning_states_no_answer() {
        assert_eq!(stated("<think>\\boxed{2}</think> 3").as_deref(), Some("3"));
        assert_eq!(stated("<think>\\boxed{2}</think>"), None);
        assert_eq!(stated("<think>\\boxed{2}").as_deref(), Some("2"));
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
    fn boxes_of_one_answer_are_joined() {
        for (text, expected) in [
            (r"\boxed{2} and \boxed{3}", "2, 3"),
            (r"$\boxed{2}$, $\boxed{3}$, and $\boxed{5}$.", "2, 3, 5"),
            (r"\boxed{1}. Then \boxed{2} \text{ or } \boxed{3}", "2, 3"),
            (r"\boxed{5}, \boxed{5}", "5"),
            (r"\boxed{4} \boxed{5}", "5"),
            (r"\boxed{4}\n\boxed{5}", "5"),
            (r"\boxed{4} is wrong and \boxed{5}", "5"),
            (r"\boxed{a \boxed{b} c}", "b"),
            (r"\boxed{a, \boxed{b}}", "b"),
        ] {
            assert_eq!(answer(text).as_deref(), Some(expected), "{text}");
        }
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
        assert_eq!(
            all("Final Answer: The final answer is $x=2.5$. I hope it is correct."),
            ["The final answer is $x=2.5$", "$x=2.5$"]
        );
        assert_eq!(all("The answer is $5.$ Then 3"), ["$5.$"]);
        assert_eq!(all("The answer to this question is 5."), ["5"]);
        assert!(all("The answer to this, which is 5").is_empty());
        assert_eq!(all("The answer is:\n\\[\nx = 5.\n\\] as 3"), ["\\[\nx = 5.\n\\]"]);
        assert!(all("sw w ansWER").is_empty());
    }

    #[test]
    fn formulas_are_found() {
        let last = |text: &'static str| last_formula(text).map(|(start, end)| &text[start..end]);
        assert_eq!(last("$1$ and $$x$$ and"), Some("x"));
        assert_eq!(last(r"\(a\) \[b\] $"), Some("b"));
        assert_eq!(last("pays $5 and $10"), None);
        assert_eq!(last(r"\$5 $x$ \$7"), Some("x"));
        assert_eq!(last("$.$"), None);
    }
}
