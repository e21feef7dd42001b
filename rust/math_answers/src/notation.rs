//! Unicode notation to ASCII and LaTeX, so that the lexer reads one alphabet: `½` is `\frac{1}{2}`, `x²` is `x^{2}`.

use std::borrow::Cow;

use super::lexer::command::is_command;
use crate::characters::is_invisible;

/// `text` with every mathematical character spelled out; borrowed when it is ASCII. Linear, at most about eight bytes for each
/// byte. Characters of other scripts stay: they are words.
#[must_use]
pub fn spelled_out(text: &str) -> Cow<'_, str> {
    if let Some(circled) = circled(text) {
        return Cow::Owned(spelled_out(&circled).into_owned());
    }
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c.is_ascii() {
            // A combining overline marks a repeating digit.
            if c.is_ascii_digit() && rest.peek().copied().is_some_and(is_overline) {
                overlined(&mut out, c, &mut rest);
                continue;
            }
            out.push(c);
        } else if let Some(raised) = superscript(c) {
            script(&mut out, "^{", raised, || rest.next_if(|c| superscript(*c).is_some()).and_then(superscript));
        } else if let Some(lowered) = subscript(c) {
            script(&mut out, "_{", lowered, || rest.next_if(|c| subscript(*c).is_some()).and_then(subscript));
        } else if let Some(spelled) = spelling(c) {
            out.push_str(spelled);
        } else if let Some(plain) = plain(c) {
            out.push(plain);
        } else if !is_invisible(c) {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// `\textcircled{3}` as `③`, the label of a statement; `None` without one.
fn circled(text: &str) -> Option<String> {
    const COMMAND: &str = "\\textcircled{";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(COMMAND) {
        let (digit, behind) = (after.chars().next()?, after.get(1..)?.strip_prefix('}')?);
        out.push_str(before);
        out.push(char::from_u32('①' as u32 + digit.to_digit(10)?.checked_sub(1)?)?);
        rest = behind;
    }
    (rest.len() < text.len()).then(|| out + rest)
}

/// `text` as it was before an escape too many or too few: `\\\\frac{1}{2}`, where every backslash is doubled and a command follows
/// one, and the control character that became of `\f` in `\frac`. Other texts stay as they are.
#[must_use]
pub fn unescaped(text: &str) -> Cow<'_, str> {
    let control = |c: char| match c {
        '\x07' => Some('a'),
        '\x08' => Some('b'),
        '\x0b' => Some('v'),
        '\x0c' => Some('f'),
        _ => None,
    };
    if text.contains(|c| control(c).is_some()) {
        let mut out = String::with_capacity(text.len() + 8);
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match control(c).filter(|_| rest.peek().is_some_and(char::is_ascii_lowercase)) {
                Some(letter) => {
                    // Of `\\` and a form feed the backslash is one already.
                    if !out.ends_with('\\') {
                        out.push('\\');
                    }
                    out.push(letter);
                }
                None => out.push(c),
            }
        }
        return Cow::Owned(out);
    }
    if is_doubled(text) {
        return Cow::Owned(text.replace("\\\\", "\\"));
    }
    // Outside of tables no line starts with the name of a fraction: `\\dfrac{1}{2} + \frac{1}{72}`.
    if text.contains("\\\\") && text.contains("frac{") && !text.contains("\\begin") {
        return Cow::Owned(single_before_fractions(text));
    }
    Cow::Borrowed(text)
}

fn single_before_fractions(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\\\\") {
        let after = rest[at..].trim_start_matches('\\');
        let run = rest.len() - at - after.len();
        let fraction = ["frac{", "dfrac{", "tfrac{"].iter().any(|name| after.starts_with(name));
        out.push_str(&rest[..at + if run == 2 && fraction { 1 } else { run }]);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Whether every backslash is doubled, and a known command follows one. A line break before a word is none.
fn is_doubled(text: &str) -> bool {
    const WORDS: [&str; 8] = ["and", "or", "to", "in", "not", "min", "max", "mod"];
    let bytes = text.as_bytes();
    let (mut at, mut command) = (0, false);
    while let Some(found) = memchr::memchr(b'\\', &bytes[at..]) {
        at += found;
        let run = bytes[at..].iter().take_while(|byte| **byte == b'\\').count();
        if run % 2 == 1 {
            return false;
        }
        at += run;
        let length = bytes[at..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        let name = &text[at..at + length];
        command |= run == 2 && length > 1 && !WORDS.contains(&name) && is_command(name);
    }
    command
}

fn script(out: &mut String, open: &str, first: char, mut more: impl FnMut() -> Option<char>) {
    out.push_str(open);
    out.push(first);
    while let Some(c) = more() {
        out.push(c);
    }
    out.push('}');
}

/// A run of digits that each carry an overline, from `first` on.
fn overlined(out: &mut String, first: char, rest: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    out.push_str("\\overline{");
    out.push(first);
    rest.next();
    let mut unmarked = None;
    while let Some(digit) = rest.next_if(char::is_ascii_digit) {
        if rest.next_if(|c| is_overline(*c)).is_none() {
            unmarked = Some(digit);
            break;
        }
        out.push(digit);
    }
    out.push('}');
    out.extend(unmarked);
}

fn is_overline(c: char) -> bool {
    matches!(c, '\u{304}' | '\u{305}')
}

fn superscript(c: char) -> Option<char> {
    Some(match c {
        '⁰' => '0',
        '¹' => '1',
        '²' => '2',
        '³' => '3',
        '⁴'..='⁹' => char::from(b'4' + (c as u32 - '⁴' as u32) as u8),
        '⁺' => '+',
        '⁻' => '-',
        '⁽' => '(',
        '⁾' => ')',
        'ⁿ' => 'n',
        'ⁱ' => 'i',
        'ˣ' => 'x',
        'ᵏ' => 'k',
        'ᵐ' => 'm',
        'ᵗ' => 't',
        _ => return None,
    })
}

fn subscript(c: char) -> Option<char> {
    Some(match c {
        '₀'..='₉' => char::from(b'0' + (c as u32 - '₀' as u32) as u8),
        '₊' => '+',
        '₋' => '-',
        '₍' => '(',
        '₎' => ')',
        'ₙ' => 'n',
        'ₖ' => 'k',
        'ₘ' => 'm',
        'ᵢ' => 'i',
        'ⱼ' => 'j',
        'ₐ' => 'a',
        'ₓ' => 'x',
        _ => return None,
    })
}

/// Full-width forms, mathematical alphabets and look-alikes, as one ASCII character.
fn plain(c: char) -> Option<char> {
    let letter = |offset: u32| {
        let offset = (offset % 52) as u8;
        char::from(if offset < 26 { b'A' + offset } else { b'a' + offset - 26 })
    };
    Some(match c {
        '！'..='～' => char::from_u32(c as u32 - 0xFEE0)?,
        '\u{1d400}'..='\u{1d6a3}' => letter(c as u32 - 0x1d400),
        '\u{1d7ce}'..='\u{1d7ff}' => char::from(b'0' + ((c as u32 - 0x1d7ce) % 10) as u8),
        'ℎ' => 'h',
        'ℯ' => 'e',
        'ⅈ' | 'ⅉ' => 'i',
        '−' | '‐' | '‑' | '‒' | '–' | '—' | '―' | '﹣' => '-',
        '∕' | '⁄' => '/',
        '∗' => '*',
        '’' | '‘' | '′' | 'ʹ' => '\'',
        '“' | '”' | '„' => '"',
        '、' => ',',
        '。' => '.',
        '∶' => ':',
        '∣' | '❘' => '|',
        '〈' => '<',
        '〉' => '>',
        '【' => '[',
        '】' => ']',
        '\u{a0}' | '\u{2007}' | '\u{2009}' | '\u{200a}' | '\u{202f}' | '\u{205f}' => '~',
        _ if c.is_whitespace() => ' ',
        _ => return None,
    })
}

/// A character's LaTeX.
fn spelling(c: char) -> Option<&'static str> {
    Some(match c {
        '½' => "\\frac{1}{2}",
        '⅓' => "\\frac{1}{3}",
        '⅔' => "\\frac{2}{3}",
        '¼' => "\\frac{1}{4}",
        '¾' => "\\frac{3}{4}",
        '⅕' => "\\frac{1}{5}",
        '⅖' => "\\frac{2}{5}",
        '⅗' => "\\frac{3}{5}",
        '⅘' => "\\frac{4}{5}",
        '⅙' => "\\frac{1}{6}",
        '⅚' => "\\frac{5}{6}",
        '⅐' => "\\frac{1}{7}",
        '⅛' => "\\frac{1}{8}",
        '⅜' => "\\frac{3}{8}",
        '⅝' => "\\frac{5}{8}",
        '⅞' => "\\frac{7}{8}",
        '⅑' => "\\frac{1}{9}",
        '⅒' => "\\frac{1}{10}",
        '√' => "\\sqrt ",
        '∛' => "\\sqrt[3]",
        '∜' => "\\sqrt[4]",
        '∞' => "\\infty ",
        '×' | '✕' | '⨯' => "\\times ",
        '÷' => "\\div ",
        '·' | '⋅' | '∙' | '•' => "\\cdot ",
        '±' => "\\pm ",
        '∓' => "\\mp ",
        '≤' | '⩽' | '≦' => "\\le ",
        '≥' | '⩾' | '≧' => "\\ge ",
        '≠' => "\\ne ",
        '≈' | '≃' | '≅' => "\\approx ",
        '≡' => "\\equiv ",
        '∼' => "\\sim ",
        '∝' => "\\propto ",
        '∪' | '⋃' => "\\cup ",
        '∩' | '⋂' => "\\cap ",
        '∖' => "\\setminus ",
        '∈' => "\\in ",
        '∉' => "\\notin ",
        '⊂' => "\\subset ",
        '⊆' => "\\subseteq ",
        '∅' | 'Ø' | '⌀' => "\\emptyset ",
        'ℝ' => "\\mathbb{R}",
        'ℤ' => "\\mathbb{Z}",
        'ℕ' => "\\mathbb{N}",
        'ℚ' => "\\mathbb{Q}",
        'ℂ' => "\\mathbb{C}",
        '°' | 'º' | '˚' => "\\degree ",
        '℃' => "\\degree C",
        '℉' => "\\degree F",
        '″' => "''",
        '‴' => "'''",
        '…' | '⋯' => "\\ldots ",
        '→' | '⟶' => "\\to ",
        '⇒' | '⟹' => "\\Rightarrow ",
        '⇔' | '⟺' => "\\iff ",
        '∧' => "\\land ",
        '∨' => "\\lor ",
        '⌊' => "\\lfloor ",
        '⌋' => "\\rfloor ",
        '⌈' => "\\lceil ",
        '⌉' => "\\rceil ",
        '⟨' => "\\langle ",
        '⟩' => "\\rangle ",
        '‖' | '∥' => "\\|",
        '∑' => "\\sum ",
        '∏' => "\\prod ",
        '∫' => "\\int ",
        '⊥' => "\\perp ",
        'ℵ' => "\\aleph ",
        '∠' => "\\angle ",
        '△' => "\\triangle ",
        '€' => "\\euro ",
        '£' => "\\pounds ",
        '¥' | '￥' => "\\yen ",
        '₹' => "\\rupee ",
        '¢' => "\\text{ cents}",
        'π' => "\\pi ",
        'α' => "\\alpha ",
        'β' => "\\beta ",
        'γ' => "\\gamma ",
        'δ' => "\\delta ",
        'ε' | 'ϵ' => "\\epsilon ",
        'ζ' => "\\zeta ",
        'η' => "\\eta ",
        'θ' | 'ϑ' => "\\theta ",
        'κ' => "\\kappa ",
        'λ' => "\\lambda ",
        'µ' | 'μ' => "\\mu ",
        'ν' => "\\nu ",
        'ξ' => "\\xi ",
        'ρ' => "\\rho ",
        'σ' => "\\sigma ",
        'τ' => "\\tau ",
        'φ' | 'ϕ' => "\\phi ",
        'χ' => "\\chi ",
        'ψ' => "\\psi ",
        'ω' => "\\omega ",
        'Γ' => "\\Gamma ",
        'Δ' => "\\Delta ",
        'Θ' => "\\Theta ",
        'Λ' => "\\Lambda ",
        'Σ' => "\\Sigma ",
        'Φ' => "\\Phi ",
        'Ψ' => "\\Psi ",
        'Ω' => "\\Omega ",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_backslashes_are_single_where_a_command_follows() {
        for (text, expected) in [
            (r"\\frac{1}{2}", r"\frac{1}{2}"),
            (r"\\left(1\\right)", r"\left(1\right)"),
            (r"1 \\ 2", r"1 \\ 2"),
            (r"1 \\and 2", r"1 \\and 2"),
            (r"\\frac12 \frac13", r"\\frac12 \frac13"),
            (r"\\dfrac{1}{2} + \frac{1}{72}", r"\dfrac{1}{2} + \frac{1}{72}"),
            (r"1 \\\frac{1}{2} \\ 2", r"1 \\\frac{1}{2} \\ 2"),
            (r"\begin{pmatrix}\frac{1}{2}\\frac{1}{3}", r"\begin{pmatrix}\frac{1}{2}\\frac{1}{3}"),
            (r"\begin{matrix}1\\2\end{matrix}", r"\begin{matrix}1\\2\end{matrix}"),
            ("\x0crac{1}{2}", r"\frac{1}{2}"),
            ("\\\x0crac{1}{2}", r"\frac{1}{2}"),
            ("1\x0c", "1\x0c"),
        ] {
            assert_eq!(unescaped(text), expected, "{text:?}");
        }
    }

    #[test]
    fn notation_is_spelled_out() {
        for (text, expected) in [
            ("3/4", "3/4"),
            ("3½", "3\\frac{1}{2}"),
            ("x² + 10⁻¹²", "x^{2} + 10^{-12}"),
            ("52₈", "52_{8}"),
            ("2√3", "2\\sqrt 3"),
            ("−５", "-5"),
            ("𝑥≤∞", "x\\le \\infty "),
            ("0.3̅", "0.\\overline{3}"),
            ("0.1̅6̅", "0.\\overline{16}"),
            ("0.1̅6", "0.\\overline{1}6"),
            ("1\u{202f}234", "1~234"),
            ("a\u{200b}b", "ab"),
            ("naïve 東京", "naïve 東京"),
        ] {
            assert_eq!(spelled_out(text), expected, "{text}");
        }
        assert!(matches!(spelled_out("x"), Cow::Borrowed(_)));
    }
}
