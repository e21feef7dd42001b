//! Answers in boxes: `\boxed{…}` and `\fbox{…}`, with the signs and names that stand around them.

use std::borrow::Cow;
use std::collections::HashSet;

use memchr::{memchr3_iter, memmem};

use super::beside::{behind_percent_word, dash_length, sign, suffix};
use super::denied::{denial, is_denied_behind};
use crate::characters::{is_minus, is_space};
use crate::work::looked_at;

/// Longest content of a box in bytes; a longer box is ignored.
pub(super) const LONGEST_BOX: usize = 16 * 1024;
/// Most digits of a box without braces.
const LONGEST_BARE: usize = 32;
/// Longest text between two boxes of one answer, in bytes.
const LONGEST_JOINT: usize = 40;
/// Largest number of boxes in one answer.
const MOST_BOXES: usize = 16;
/// The longest `x_{10} = ` before a box.
const LONGEST_NAME: usize = 24;

/// A box: where its command starts, the bounds of its content, and where the text behind the box starts.
struct Boxed {
    command: usize,
    start: usize,
    end: usize,
    after: usize,
}

/// All balanced boxes, ordered by their ends.
fn boxes(text: &str) -> Vec<Boxed> {
    looked_at(text.len());
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
            b'\\' => {
                found.extend(bare_box(text, at));
                escaped_to = at + 2;
            }
            b'{' => open.push((at + 1, box_command(&bytes[first..at]).map(|command| first + command))),
            _ => {
                if let Some((start, Some(command))) = open.pop()
                    && at - start <= LONGEST_BOX
                {
                    found.push(Boxed { command, start, end: at, after: at + 1 });
                }
            }
        }
    }
    found.retain(|found| denial(&text[..found.command]).is_none() && !is_denied_behind(&text[found.after..]));
    found
}

/// `\boxed 5`, at its backslash: a natural number alone. TeX boxes one token where braces are missing, so that more than a
/// number has two readings.
fn bare_box(text: &str, command: usize) -> Option<Boxed> {
    let rest = &text[command..];
    let rest = rest.strip_prefix("\\boxed").or_else(|| rest.strip_prefix("\\fbox"))?.trim_start_matches(' ');
    let start = text.len() - rest.len();
    let digits = rest.bytes().take(LONGEST_BARE).take_while(u8::is_ascii_digit).count();
    let behind = &rest[digits..];
    let stop = behind.trim_start_matches(['.', ',', ';', ':']);
    let word = || stop.trim_start_matches(' ').bytes().take(2).filter(u8::is_ascii_alphabetic).count() == 2;
    let closed = stop.is_empty() || stop.starts_with(['$', '\n']) || closes_math(stop);
    // `\boxed 5 + 1` may mean the sum.
    let ends = closed || stop.starts_with(' ') && (stop.len() < behind.len() || word());
    (digits > 0 && ends).then_some(Boxed { command, start, end: start + digits, after: start + digits })
}

fn closes_math(text: &str) -> bool {
    text.starts_with("\\)") || text.starts_with("\\]")
}

/// Start of the box command at the end of `before`, the text up to a brace.
fn box_command(before: &[u8]) -> Option<usize> {
    let length = before.len();
    let before = before.trim_ascii_end();
    looked_at(length - before.len() + 1);
    [&b"\\boxed"[..], b"\\fbox"].iter().find(|name| before.ends_with(name)).map(|name| before.len() - name.len())
}

/// Content of the last `\boxed{…}` or `\fbox{…}` with balanced braces, by its start; `\{` and `\}` are text.
#[must_use]
pub fn boxed(text: &str) -> Option<&str> {
    boxes(text).into_iter().max_by_key(|found| found.start).map(|found| &text[found.start..found.end])
}

/// As [`boxed`], with the minus sign before the box and the percent or degree sign, or the word percent, behind it.
#[must_use]
pub fn boxed_with_signs(text: &str) -> Option<Cow<'_, str>> {
    if let Some(percent) = percent_box(text) {
        return Some(Cow::Owned(percent));
    }
    boxes(text).into_iter().max_by_key(|found| found.start).map(|found| content(text, &found))
}

/// The answer from boxes, as in [`stated`](super::stated): the box that starts last, and the boxes of its list.
///
/// In `$x = \boxed{1}$ and $y = \boxed{2}$` the names belong to the answer: `x=1, y=2`. A minus sign before a box and a
/// percent or degree sign behind it belong to its content.
#[must_use]
pub fn listed_boxes(text: &str) -> Option<Cow<'_, str>> {
    let mut found = boxes(text);
    found.sort_unstable_by_key(|found| found.start);
    let last = found.pop()?;
    let mut answers = vec![(name(text, &last), content(text, &last))];
    let mut next = start_with_name(text, &last);
    while let Some(before) = found.pop() {
        let Some(joint) = text.get(before.after..next) else { break };
        if !is_joint(without_suffix(joint)) || answers.len() == MOST_BOXES {
            break;
        }
        next = start_with_name(text, &before);
        let answer = (name(text, &before), content(text, &before));
        if !answers.contains(&answer) {
            answers.push(answer);
        }
    }
    if let [(_, only)] = &answers[..] {
        return Some(only.clone());
    }
    answers.reverse();
    let named = answers.iter().map(|(name, content)| match name {
        Some(name) => format!("{name}={content}"),
        None => content.to_string(),
    });
    Some(Cow::Owned(named.collect::<Vec<_>>().join(", ")))
}

/// The answer of a reference solution: all its boxes that hold no other box, each content once, as one list.
#[must_use]
pub fn all_boxes(text: &str) -> Option<Cow<'_, str>> {
    let mut found = boxes(text);
    found.sort_unstable_by_key(|found| found.start);
    let inner: Vec<&Boxed> = found
        .iter()
        .enumerate()
        .filter(|(at, outer)| found.get(at + 1).is_none_or(|next| next.start > outer.end))
        .map(|(_, found)| found)
        .collect();
    let named = inner.iter().all(|found| name(text, found).is_some());
    let mut answers: Vec<Cow<'_, str>> = Vec::new();
    let mut known = HashSet::new();
    for found in &inner {
        let answer = match name(text, found) {
            Some(name) if named && inner.len() > 1 => Cow::Owned(format!("{name}={}", content(text, found))),
            _ => content(text, found),
        };
        if known.insert(answer.clone()) {
            answers.push(answer);
        }
    }
    if answers.len() < 2 { answers.pop() } else { Some(Cow::Owned(answers.join(", "))) }
}

/// What stands in a box, with its sign.
fn content<'t>(text: &'t str, found: &Boxed) -> Cow<'t, str> {
    // A form feed may be what became of `\f`: see `unescaped`.
    let inside = text[found.start..found.end].trim_matches(|c| is_space(c) && !matches!(c, '\x0b' | '\x0c'));
    let sign = if inside.is_empty() { "" } else { sign(&text[..found.command]) };
    let suffix = if inside.is_empty() || inside.ends_with('%') || inside.contains("circ") || inside.contains('°') {
        ""
    } else {
        suffix(&text[found.after..]).0
    };
    if sign.is_empty() && suffix.is_empty() {
        return Cow::Borrowed(inside);
    }
    Cow::Owned([sign, inside, suffix].concat())
}

/// The last box as so many percent, where a word behind it says so: `\boxed{28} percent`.
#[must_use]
pub fn percent_box(text: &str) -> Option<String> {
    let found = boxes(text).into_iter().max_by_key(|found| found.start)?;
    let after = behind_percent_word(&text[found.after..])?;
    let inside = &text[found.start..found.end];
    let plain = !after.starts_with(char::is_alphabetic) && !inside.contains('%');
    plain.then(|| format!("{inside}\\%"))
}

fn without_suffix(joint: &str) -> &str {
    &joint[suffix(joint).1..]
}

/// The letter of `x_1 = \boxed{…}`, as it is written.
fn name<'t>(text: &'t str, found: &Boxed) -> Option<&'t str> {
    let (start, end) = name_at(text, found)?;
    Some(&text[start..end])
}

/// Where the answer of a box starts: at its name, or at its command.
fn start_with_name(text: &str, found: &Boxed) -> usize {
    match name_at(text, found) {
        Some((start, _)) => start,
        None => {
            let sign = sign(&text[..found.command]);
            if sign.is_empty() {
                return found.command;
            }
            let before = text[..found.command].trim_end_matches(' ');
            before.len() - before.strip_suffix("\\pm").map_or_else(|| dash_length(before), |_| "\\pm".len())
        }
    }
}

/// A Latin letter or a Greek command with an index, before the `=` in front of a box.
fn name_at(text: &str, found: &Boxed) -> Option<(usize, usize)> {
    let mut before = text[..found.command].trim_end_matches(' ');
    if !sign(before).is_empty() {
        before = before.strip_suffix("\\pm").unwrap_or(before.trim_end_matches(is_minus)).trim_end_matches(' ');
    }
    let before = before.strip_suffix('=')?.trim_end_matches(' ');
    let end = before.len();
    let (first, _) = before.char_indices().rev().take(LONGEST_NAME).last()?;
    let window = &before[first..];
    // The index.
    let letters = match window.rfind('_') {
        Some(at) if window[at + 1..].trim_matches(['{', '}']).bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
            &window[..at]
        }
        _ => window,
    };
    let run = letters.bytes().rev().take_while(u8::is_ascii_alphabetic).count();
    let greek = letters[..letters.len() - run].ends_with('\\');
    let length = match (run, greek) {
        (0, _) => return None,
        (run, true) => run + 1,
        (1, false) => 1,
        _ => return None,
    };
    Some((first + letters.len() - length, end))
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
        // `\boxed{2} for part (a) and \boxed{3}`
        let part = rest.strip_prefix("for ").map(|rest| rest.strip_prefix("part ").unwrap_or(rest));
        if let Some([b'(', b'a'..=b'h' | b'A'..=b'H', b')']) = part.and_then(|part| part.as_bytes().get(..3)) {
            rest = &part.unwrap_or_default()[3..];
            continue;
        }
        let words = ["and", "or", ",", ";", "、", "，", "和", "或"];
        let word = words.iter().find(|word| rest.starts_with(**word));
        joins |= word.is_some();
        let length = match word.or_else(|| marks.iter().find(|mark| rest.starts_with(**mark))) {
            Some(known) => known.len(),
            None if rest.starts_with(is_space) => rest.chars().next().map_or(1, char::len_utf8),
            None => return false,
        };
        rest = &rest[length..];
    }
    joins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_balance() {
        assert_eq!(boxed(r"\boxed{1} \fbox{\frac{1}{2}} \boxed{3"), Some(r"\frac{1}{2}"));
        assert_eq!(boxed(r"\boxed{a \boxed{b} c}"), Some("b"));
        assert_eq!(boxed(r"\boxed {x \} y}"), Some(r"x \} y"));
        assert_eq!(boxed(r"{ } } \boxed{1}"), Some("1"));
        assert_eq!(boxed(r"\boxed{}"), Some(""));
        assert_eq!(boxed(r"\boxed{5"), None);
        assert_eq!(boxed(&format!("\\boxed{{{}}}", "1".repeat(LONGEST_BOX + 1))), None);
    }

    #[test]
    fn a_number_needs_no_braces() {
        for (text, expected) in [
            (r"\boxed 5", Some("5")),
            (r"\boxed{4} or \boxed 5, from the set {1,2}", Some("5")),
            (r"$\boxed 12$.", Some("12")),
            (r"\(\fbox7\)", Some("7")),
            (r"\boxed 5 and \boxed{6}", Some("6")),
        ] {
            assert_eq!(boxed(text), expected, "{text}");
        }
        for text in [
            r"\boxed 5x",
            r"\boxed 1.5",
            r"\boxed 1,000",
            r"\boxed -5",
            r"\boxed 5!",
            r"\boxed 5^2",
            r"\boxed x",
            r"\boxed 5\%",
            r"\boxed 5 + 1",
        ] {
            assert_eq!(boxed(text), None, "{text}");
        }
        assert_eq!(listed_boxes(r"\boxed 2 and \boxed 3").as_deref(), Some("2, 3"));
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
            (r"$x=\boxed{2}$ or $x = \boxed{3}$", "x=2, x=3"),
            (r"$x_1=\boxed{2}$, $x_{2}=-\boxed{3}$", "x_1=2, x_{2}=-3"),
            (r"$\alpha=\boxed{2}$ and $b=\boxed{3}$", r"\alpha=2, b=3"),
            (r"$x=\boxed{3}$", "3"),
            (r"\boxed{20}\% and \boxed{30}\%", r"20\%, 30\%"),
            (r"$\boxed{2} \text{ for part (a) and } \boxed{3}$", "2, 3"),
            (r"\boxed{2} for (a), \boxed{3} for (b)", "2, 3"),
            (r"\boxed{2} for part (a). \boxed{3}", "3"),
            (r"\boxed{2} for n=3 and \boxed{3}", "3"),
            (r"$\boxed{2}$ 和 $\boxed{3}$", "2, 3"),
        ] {
            assert_eq!(listed_boxes(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn signs_beside_a_box_belong_to_it() {
        for (text, expected) in [
            (r"\boxed{28}\%", r"28\%"),
            (r"$\boxed{28}$%", r"28\%"),
            (r"$\boxed{28}\,\%$", r"28\%"),
            (r"$\boxed{28\%}\%$", r"28\%"),
            (r"$\boxed{60}^\circ$", r"60^\circ"),
            (r"$\boxed{60}^{\circ}$", r"60^\circ"),
            (r"$x = -\boxed{5}$", "-5"),
            (r"$x = \pm\boxed{5}$", r"\pm 5"),
            (r"$3 - \boxed{5}$", "5"),
            ("- \\boxed{5}", "5"),
            (r"\boxed{5} cm", "5"),
        ] {
            assert_eq!(listed_boxes(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn a_word_behind_a_box_says_percent() {
        for (text, expected) in [
            (r"$\boxed{28}$ pct", Some(r"28\%")),
            (r"\boxed{1} or $\boxed{28}\text{ percent}$.", Some(r"28\%")),
            (r"\[\boxed{28}\] Percent", Some(r"28\%")),
            (r"**\boxed{28}** per cent", Some(r"28\%")),
            (r"$$\boxed{28}$$~\mathrm{pct}", Some(r"28\%")),
            ("\\boxed{28}\n\nPercent errors add", None),
            (r"\boxed{28} percentage points", None),
            (r"\boxed{28\%} percent", None),
            (r"\boxed{28} of 100 percent", None),
            ("28 percent", None),
        ] {
            assert_eq!(percent_box(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_reference_means_all_its_boxes() {
        for (text, expected) in [
            (r"so \boxed{2}, and for (b) we get \boxed{3}.", "2, 3"),
            (r"so \boxed{3}. Check: \boxed{3}.", "3"),
            (r"\boxed{a \boxed{b} c}", "b"),
            (r"$x=\boxed{1}$, $y=\boxed{2}$", "x=1, y=2"),
            (r"\boxed{7}", "7"),
        ] {
            assert_eq!(all_boxes(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(all_boxes("7"), None);
        let many: Vec<String> = (0..100_000).map(|number| format!("\\boxed{{{number}}}")).collect();
        // Comparing each box with all before it took some seconds.
        assert_eq!(all_boxes(&many.concat()).map(|list| list.matches(", ").count()), Some(99_999));
    }
}
