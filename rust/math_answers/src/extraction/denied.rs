//! Words that deny a value beside them: `the answer isn't 4`, `5, not 4`, `4 is wrong`.

use crate::work::looked_at;

/// How far before a value its denial may stand, in bytes, and how many words may stand between.
const FARTHEST: usize = 80;
const MOST_WORDS: usize = 8;
/// Most values at the end of a text that are denied one after the other.
pub const MOST_DENIED: usize = 4;

/// Whether a word denies what follows it.
#[must_use]
pub fn is_denial(word: &str) -> bool {
    const WORDS: [&str; 14] = [
        "not",
        "never",
        "neither",
        "nor",
        "cannot",
        "non",
        "unlikely",
        "except",
        "wrong",
        "incorrect",
        "isnt",
        "wasnt",
        "arent",
        "cant",
    ];
    let contracted = ["n't", "n’t"].iter().any(|end| {
        word.len() > end.len()
            && word.is_char_boundary(word.len() - end.len())
            && word[word.len() - end.len()..].eq_ignore_ascii_case(end)
    });
    contracted || WORDS.iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// Where the words start that deny the value behind `before`: `not`, `isn't`, `cannot be`, `≠`, `neither`, `other than`.
#[must_use]
pub fn denial(before: &str) -> Option<usize> {
    const LINKS: [&str; 26] = [
        "be", "been", "equal", "equals", "to", "the", "a", "an", "is", "was", "are", "longer", "exactly", "simply",
        "actually", "really", "just", "only", "answer", "final", "correct", "think", "believe", "that", "true", "sure",
    ];
    const PAIRS: [(&str, &str); 5] =
        [("other", "than"), ("rather", "than"), ("different", "from"), ("instead", "of"), ("anything", "but")];
    const SIGNS: [&str; 14] = [
        "≠",
        "\\ne",
        "\\neq",
        "\\not=",
        "\\not =",
        "\\lnot",
        "\\neg",
        "¬",
        "!=",
        "不是",
        "不等于",
        "并非",
        "不为",
        "不会是",
    ];
    let from = (before.len().saturating_sub(FARTHEST)..=before.len()).find(|at| before.is_char_boundary(*at))?;
    looked_at(before.len() - from);
    let mut rest = &before[from..];
    let mut next = "";
    for _ in 0..MOST_WORDS {
        rest = unmarked(rest);
        if let Some(sign) = SIGNS.iter().find(|sign| rest.ends_with(**sign)) {
            return Some(from + rest.len() - sign.len());
        }
        if next == "or" {
            rest = unmarked(rest.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == ','));
        }
        let letter = |c: char| c.is_alphabetic() || c == '\'' || c == '’';
        let start = rest.len() - rest.chars().rev().take_while(|c| letter(*c)).map(char::len_utf8).sum::<usize>();
        let word = &rest[start..];
        let paired =
            |(first, second): &(&str, &str)| word.eq_ignore_ascii_case(first) && next.eq_ignore_ascii_case(second);
        if is_denial(word) || PAIRS.iter().any(paired) {
            return Some(from + start);
        }
        let linked = LINKS.iter().chain(&["or"]).any(|known| known.eq_ignore_ascii_case(word))
            || PAIRS.iter().any(|(_, second)| second.eq_ignore_ascii_case(word));
        if !linked {
            return None;
        }
        (rest, next) = (&rest[..start], word);
    }
    None
}

/// The text before a denial, where it ends in the value that counts instead: `5` of `5, not 4`.
#[must_use]
pub fn before_denial(text: &str, denial: usize) -> Option<&str> {
    let before = text[..denial].trim_end_matches([' ', ',', '*']);
    before.ends_with(|c: char| c.is_ascii_digit() || c == '$').then_some(before)
}

/// Without the marks that open a formula, bold text, a quotation or a bracket, and a colon.
fn unmarked(text: &str) -> &str {
    let mut rest = text;
    loop {
        let before = rest.len();
        rest = rest
            .trim_end_matches([' ', '\u{a0}', '$', '*', '_', '`', '"', '“', '‘', '(', '[', '{', '}', ':', '：', '-']);
        for mark in ["\\boxed", "\\fbox", "\\(", "\\[", "\\text", "\\textbf", "\\mathbf", "\\mathrm", "\\"] {
            rest = rest.strip_suffix(mark).unwrap_or(rest);
        }
        if rest.len() == before {
            return rest;
        }
    }
}

/// Whether the words behind a value deny it: `4 is wrong`, `4 is not the answer`.
#[must_use]
pub fn is_denied_behind(after: &str) -> bool {
    const LONGEST: usize = 40;
    let rest = after.trim_start_matches([' ', '$', '*', '_', '`', '"', '”', ')', ']', '}', '\\', ',', '.']);
    let end = (0..=LONGEST.min(rest.len())).rev().find(|at| rest.is_char_boundary(*at)).unwrap_or(0);
    let words = rest[..end].replace('’', "'").to_ascii_lowercase();
    let words = words.strip_prefix("(").unwrap_or(&words);
    let words = words.strip_prefix("which ").unwrap_or(words);
    let verdict = ["isn't ", "wasn't ", "is not ", "was not "].iter().find_map(|verb| words.strip_prefix(verb));
    if let Some(verdict) = verdict {
        let noun =
            ["the ", "my ", "our ", "a "].iter().find_map(|article| verdict.strip_prefix(article)).unwrap_or(verdict);
        return ["answer", "correct", "right", "final answer"].iter().any(|word| noun.starts_with(word));
    }
    let words = ["is ", "was "].iter().find_map(|verb| words.strip_prefix(verb));
    words.is_some_and(|words| ["wrong", "incorrect", "false"].iter().any(|word| words.starts_with(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_before_a_value_deny_it() {
        for text in [
            "The answer isn't ",
            "The answer isn’t $",
            "It is not **",
            "cannot be ",
            "x ≠ ",
            r"$x \neq ",
            "neither 3 nor ",
            "not 3 or ",
            "It does not equal ",
            "can not be equal to ",
            "It is no longer not the ",
            "5 rather than ",
            "anything but ",
            "答案不是",
            r"\text{not }",
            "I don't think the answer is ",
            "The answer isn't: ",
        ] {
            assert!(denial(text).is_some(), "{text}");
        }
        for text in [
            "The answer is ",
            "did not eat ",
            "It is not 3. ",
            "It is not 3, but ",
            "knot ",
            "more than ",
            "",
            "is ",
            "He did not go. The answer is ",
            "not\n",
        ] {
            assert_eq!(denial(text), None, "{text}");
        }
    }

    #[test]
    fn words_behind_a_value_deny_it() {
        for text in [" is wrong", "$ is not the answer.", "}$ isn’t correct", ", which is wrong", " was incorrect"] {
            assert!(is_denied_behind(text), "{text}");
        }
        for text in ["", " is not prime", " is the answer", " apples", " is right"] {
            assert!(!is_denied_behind(text), "{text}");
        }
    }
}
