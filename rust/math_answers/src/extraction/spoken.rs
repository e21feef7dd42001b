//! Answers in words: what follows "answer is", "answer:" or 答案是, to the end of its sentence.

use memchr::{memchr_iter, memchr2_iter, memmem};

use crate::characters::is_space;
use crate::work::looked_at;

/// Longest sentence read after "the answer is", in bytes: text that repeats the phrase still takes linear time.
const LONGEST_SENTENCE: usize = 512;

/// The text after each "answer is", "answer:" or "answer =", to the end of its sentence, and after 答案是, 答案为 or 答案：.
/// Any case; bold marks allowed.
pub fn said(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    looked_at(text.len());
    let bytes = text.as_bytes();
    // The end of each `answer` and each 答案.
    let english = memchr_iter(b'w', bytes).chain(memchr_iter(b'W', bytes)).filter_map(|at| {
        let word = bytes.get(at.checked_sub(3)?..at + 3)?;
        word.eq_ignore_ascii_case(b"answer").then_some((at + 3, false))
    });
    let chinese = memmem::find_iter(bytes, "答案").map(|at| (at + "答案".len(), true));
    let option = ["ption is ", "hoice is "].into_iter().flat_map(move |phrase| {
        memmem::find_iter(bytes, phrase).filter_map(move |at| {
            let (end, before) = (at + phrase.len(), text[..at].trim_end_matches(['o', 'O', 'c', 'C']).trim_end());
            let named = ["correct", "right", "best"].iter().any(|word| before.ends_with(word));
            (named && is_label(&text[end..])).then_some((end, false))
        })
    });
    let mut ends: Vec<(usize, bool)> = english.chain(chinese).chain(option).collect();
    ends.sort_unstable();
    ends.into_iter().filter_map(move |(end, chinese)| {
        if is_label(&text[end..]) {
            return Some(sentence(&text[end..]));
        }
        let marks = |c: char| c == '*' || c == '_' || is_space(c);
        let rest = text[end..].trim_start_matches(marks);
        let rest = match rest.strip_prefix([':', '=', '：']) {
            Some(rest) => rest,
            None if chinese => ["是", "为", "等于"].iter().find_map(|verb| rest.strip_prefix(verb))?,
            None => after_is(rest)?,
        };
        let rest = sentence(rest.trim_start_matches(|c| c == ':' || c == '：' || marks(c)));
        (!rest.is_empty()).then_some(rest)
    })
}

/// Whether the letter of a choice stands here: `(B)`, `**C**`, `D.`
fn is_label(rest: &str) -> bool {
    let rest = rest.trim_start_matches(['*', '(', '$']);
    let mut rest = rest.chars();
    matches!(rest.next(), Some('A'..='J')) && rest.next().is_none_or(|c| ").*$,: \n".contains(c))
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

/// The first sentence, of at most [`LONGEST_SENTENCE`] bytes: up to a newline, a `。`, or a full stop before whitespace or
/// the end. Display math at the start is read across newlines. A stop inside closing marks, as in `$5.$`, ends the
/// sentence after the marks.
fn sentence(text: &str) -> &str {
    let cap = (0..=LONGEST_SENTENCE.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    let text = &text[..cap.unwrap_or(0)];
    looked_at(text.len());
    for (open, close) in [("$$", "$$"), ("\\[", "\\]")] {
        if let Some(inside) = text.strip_prefix(open)
            && let Some(end) = inside.find(close)
        {
            return &text[..open.len() + end + close.len()];
        }
    }
    let text = text.split_once('。').map_or(text, |(sentence, _)| sentence);
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
    text.trim_end_matches(|c| c == '*' || c == '_' || is_space(c))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(all("所以答案是99。共3步。"), ["99"]);
        assert_eq!(all("**答案：** 3\n答案为4"), ["3", "4"]);
        assert!(all("答案有很多").is_empty());
        assert_eq!(all("So the correct option is (B)."), ["(B)"]);
        assert_eq!(all("The best choice is **C** here. Done"), ["**C** here"]);
        assert!(all("One option is B. The correct option is 5, the best choice is Apples.").is_empty());
    }
}
