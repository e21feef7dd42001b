//! Text that is struck through: it states nothing.

use std::borrow::Cow;

use memchr::memmem;

use crate::work::looked_at;

/// LaTeX commands that strike their last argument through, and how many arguments they take.
const COMMANDS: [(&str, usize); 14] = [
    ("cancel", 1),
    ("bcancel", 1),
    ("xcancel", 1),
    ("hcancel", 1),
    ("cancelto", 2),
    ("sout", 1),
    ("xout", 1),
    ("st", 1),
    ("strike", 1),
    ("strikeout", 1),
    ("strikethrough", 1),
    ("slashed", 1),
    ("centernot", 1),
    ("enclose", 2),
];
/// HTML elements that are struck through.
const ELEMENTS: [(&str, &str); 3] = [("<s>", "</s>"), ("<del>", "</del>"), ("<strike>", "</strike>")];
/// Longest argument of a command, in bytes.
const LONGEST_ARGUMENT: usize = 256;

/// A combining stroke or overlay, which strikes the character before it through.
fn is_stroke(c: char) -> bool {
    matches!(c, '\u{334}'..='\u{338}' | '\u{20d2}' | '\u{20d3}' | '\u{20d8}'..='\u{20da}' | '\u{20e0}' | '\u{20e5}'
        | '\u{20e6}' | '\u{20ea}' | '\u{20eb}')
}

/// `text` without what is struck through: `\cancel{4}`, `\not 4`, `~~4~~`, `<s>4</s>`, digits with a combining stroke.
/// Linear; borrowed where nothing is.
#[must_use]
pub fn legible(text: &str) -> Cow<'_, str> {
    looked_at(text.len());
    let has = |part: &str| memmem::find(text.as_bytes(), part.as_bytes()).is_some();
    let command = || COMMANDS.iter().any(|(name, _)| has(&["\\", name].concat())) || has("\\not");
    let marked = has("~~") || ELEMENTS.iter().any(|(open, _)| has(open)) || (has("\\") && command());
    if !marked && (text.is_ascii() || !text.contains(is_stroke)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    // Where the line ends, once it was looked for, and before where no closing mark follows.
    let (mut line, mut unclosed_line, mut unclosed) = (0, 0, [false; ELEMENTS.len()]);
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let struck = match c {
            '~' if rest.starts_with("~~") && at >= unclosed_line => {
                if at >= line {
                    line = at + memchr::memchr(b'\n', rest.as_bytes()).unwrap_or(rest.len());
                    looked_at(line - at);
                }
                let length = tilde_length(&out, &text[at..line]);
                if length == 0 && !text[(at + 2).min(line)..line].contains("~~") {
                    unclosed_line = line;
                }
                length
            }
            '<' => ELEMENTS
                .iter()
                .enumerate()
                .find_map(|(kind, (open, close))| {
                    if unclosed[kind] || !rest.starts_with(open) {
                        return None;
                    }
                    looked_at(rest.len());
                    let end = memmem::find(rest.as_bytes(), close.as_bytes());
                    unclosed[kind] = end.is_none();
                    end.map(|end| end + close.len())
                })
                .unwrap_or(0),
            '\\' => command_length(rest),
            c if is_stroke(c) => {
                match out.pop() {
                    Some('=') => out.push('≠'),
                    Some('∈') => out.push('∉'),
                    _ => {}
                }
                c.len_utf8()
            }
            _ => 0,
        };
        if struck > 0 {
            at += struck;
        } else {
            out.push(c);
            at += c.len_utf8();
        }
    }
    Cow::Owned(out)
}

/// The length of `~~…~~` at the start of a line's rest: between `1,~~2` and in `~~\text{or}~~` they are TeX's spaces.
fn tilde_length(before: &str, line: &str) -> usize {
    let opens = before.chars().next_back().is_none_or(|c| c.is_whitespace() || "([{$*_>:".contains(c));
    let inside = &line[2..];
    let content = inside.find("~~").map(|end| &inside[..end]);
    looked_at(content.unwrap_or(inside).len());
    let Some(content) = content.filter(|_| opens) else { return 0 };
    let behind = &inside[content.len() + 2..];
    let formula = ["\\boxed", "\\fbox", "\\(", "\\["].iter().any(|start| content.starts_with(start));
    let struck = !content.is_empty()
        && !content.starts_with(|c: char| c.is_whitespace() || c == '\\' && !formula)
        && !content.ends_with(char::is_whitespace)
        && !behind.starts_with(|c: char| c.is_alphanumeric() || c == '~');
    if struck { content.len() + 4 } else { 0 }
}

/// The length of a command that strikes its argument through, with its arguments; of `\not` only before a digit.
fn command_length(rest: &str) -> usize {
    let name = rest[1..].bytes().take_while(u8::is_ascii_alphabetic).count();
    let (name, mut at) = (&rest[1..=name], 1 + name);
    let arguments = COMMANDS.iter().find(|(known, _)| *known == name).map_or(0, |(_, arguments)| *arguments);
    if name == "not" {
        let operand = rest[at..].trim_start_matches([' ', '{']);
        if !operand.starts_with(|c: char| c.is_ascii_digit()) {
            return 0;
        }
        let digits = operand.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
        let braces = rest[at..].len() - rest[at..].trim_start_matches(' ').len();
        return if rest[at + braces..].starts_with('{') {
            argument_end(rest, at).unwrap_or(0)
        } else {
            rest.len() - operand.len() + digits
        };
    }
    if arguments == 0 {
        return 0;
    }
    for _ in 0..arguments {
        match argument_end(rest, at) {
            Some(end) => at = end,
            None => return 0,
        }
    }
    at
}

/// The end of a braced argument at `at`, or of one character, behind the commands that apply to it: `\mathbf{4}`. None
/// where commands and spaces, or the argument, are longer than [`LONGEST_ARGUMENT`].
fn argument_end(text: &str, mut at: usize) -> Option<usize> {
    let limit = at + LONGEST_ARGUMENT;
    loop {
        at += text[at..].bytes().take(LONGEST_ARGUMENT).take_while(|byte| *byte == b' ').count();
        let rest = &text[at..];
        let first = rest.chars().next().filter(|_| at < limit)?;
        looked_at(1);
        match first {
            '\\' => {
                let name = rest[1..].bytes().take_while(u8::is_ascii_alphabetic).count();
                looked_at(name);
                if name == 0 {
                    return None;
                }
                at += 1 + name;
            }
            '{' => break,
            _ => return Some(at + first.len_utf8()),
        }
    }
    let mut depth = 0usize;
    for (offset, byte) in text[at..].bytes().enumerate().take(LONGEST_ARGUMENT) {
        looked_at(1);
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at + offset + 1),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::counted;

    #[test]
    fn what_is_struck_through_is_left_out() {
        for (text, expected) in [
            (r"\boxed{\cancel{4}}", r"\boxed{}"),
            (r"\boxed{\cancel{4} 5}", r"\boxed{ 5}"),
            (r"\xcancel {4}5 \bcancel4 \cancelto{0}{4}", "5  "),
            (r"\sout{\boxed{4}}", ""),
            (r"\not 4 \not{4} x \not= 4", r"  x \not= 4"),
            (r"\cancel\mathbf{4}5 \sout \text {4}.", "5 ."),
            ("~~4~~ 5", " 5"),
            (r"so ~~\boxed{4}~~.", "so ."),
            ("5 ~~so 4~~", "5 "),
            ("<s>4</s><del>5</del><strike>6</strike>7", "7"),
            ("4\u{336}2\u{336}7", "7"),
            ("x =\u{338} 4", "x ≠ 4"),
        ] {
            assert_eq!(legible(text), expected, "{text}");
        }
        for text in ["x=1,~~y=2", r"1 ~~\text{or}~~ 2", "~~4", "<s>4", r"\star \stop", r"\cancel{4", "a ~~ b ~~ c"] {
            assert_eq!(legible(text), text);
        }
    }

    #[test]
    fn a_chain_of_commands_needs_no_stack() {
        let text = [r"\cancel", &r"\a".repeat(1 << 17), "4"].concat();
        assert_eq!(legible(&text), text);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn marks_take_linear_time() {
        for piece in ["~~", "~~ ", "~~a~~ ", "~~\n", "~~a", "a~~", r"\cancel", r"\cancel ", r"\cancelto{a}", r"\not{"] {
            let text = piece.repeat((1 << 17) / piece.len());
            let looks = counted(|| drop(legible(&text)));
            // Quadratic work looks at each byte some ten thousand times.
            assert!(looks <= 300 * text.len() as u64, "{piece}: {looks}");
        }
    }
}
