//! Text to tree: the outside of an answer, the fast path for plain numbers, and the readings of what is ambiguous.

use dashu_int::{IBig, UBig};
use dashu_ratio::RBig;

use super::super::{Status, strip};
use super::ast::{Ast, Node, NodeId, NumberForm};
use super::lexer::{self, Options};
use super::notation;
use super::parser::{Choices, Parser, Seen, is_text, value_start};
use super::token::{Bracket, Kind, Token};
use super::word;

/// A longer answer is not read.
pub const LONGEST_ANSWER: usize = 16 * 1024;

/// Read an answer, in LaTeX or plain notation.
///
/// Linear in the length of the text, and bounded: [`LONGEST_ANSWER`] bytes, [`lexer::MAX_TOKENS`] tokens, brackets
/// [`super::parser::MAX_NESTING`] deep, numbers of about 64 kbit.
///
/// # Errors
/// [`Status::NoAnswer`] for an empty text, [`Status::Undecided`] past a bound, [`Status::Unparseable`] for what is neither
/// mathematics that is known here nor prose.
pub fn parse(text: &str) -> Result<Ast, Status> {
    if text.len() > LONGEST_ANSWER {
        return Err(Status::Undecided);
    }
    let text = unwrapped(text);
    if let Some(number) = plain_number(text) {
        return Ok(Ast::leaf(number));
    }
    if text.is_empty() {
        return Err(Status::NoAnswer);
    }
    let text = notation::spelled_out(text);
    readings(&text)
}

/// All readings of a text in one tree.
fn readings(text: &str) -> Result<Ast, Status> {
    let mut ast = Ast::new();
    let first = Options { grouped: true, exponents: true };
    let mut lexed = lexer::tokens(text, first)?;
    let is_text = is_text(&lexed.tokens);
    let mut roots = Vec::new();
    let (root, seen) = read(text, &mut lexed.tokens, &mut ast, Choices::default());
    let mut failed = keep(&mut roots, root)?;
    let mut again = |options: Options, choices: Choices, roots: &mut Vec<NodeId>| {
        let mut tokens = lexer::tokens(text, options)?.tokens;
        let (root, _) = read(text, &mut tokens, &mut ast, choices);
        keep(roots, root)
    };
    if lexed.has_groups {
        failed |= again(Options { grouped: false, ..first }, Choices::default(), &mut roots)?;
    }
    if lexed.has_exponents {
        failed |= again(Options { exponents: false, ..first }, Choices::default(), &mut roots)?;
    }
    if seen.division {
        failed |= again(first, Choices { tight_division: true, ..Choices::default() }, &mut roots)?;
    }
    if seen.letter_unit {
        failed |= again(first, Choices { letter_units: true, ..Choices::default() }, &mut roots)?;
    }
    if failed && roots.is_empty() {
        let folded = word::folded(text);
        if !is_text || folded.is_empty() {
            return Err(Status::Unparseable);
        }
        let root = ast.push(Node::Text(folded))?;
        roots.push(root);
    }
    if let [root] = roots[..] {
        let root = labelled(&mut ast, root)?;
        ast.set_root(root);
    } else {
        let root = ast.push(Node::Either(roots))?;
        ast.set_root(root);
    }
    Ok(ast)
}

/// Add a reading; whether there was none. A reading that is too large ends the matter.
fn keep(roots: &mut Vec<NodeId>, root: Result<NodeId, Status>) -> Result<bool, Status> {
    match root {
        Ok(root) => {
            roots.push(root);
            Ok(false)
        }
        Err(Status::Undecided) => Err(Status::Undecided),
        Err(_) => Ok(true),
    }
}

fn read<'t>(
    text: &'t str,
    tokens: &mut Vec<Token<'t>>,
    ast: &mut Ast,
    choices: Choices,
) -> (Result<NodeId, Status>, Seen) {
    while matches!(
        tokens.last(),
        Some(Token { kind: Kind::Period | Kind::Comma | Kind::Semicolon | Kind::Question, .. })
    ) {
        tokens.pop();
    }
    // `5 is the answer`
    let tail =
        tokens.len() - tokens.iter().rev().take(4).take_while(|token| matches!(token.kind, Kind::Word(_))).count();
    if let [Token { kind: Kind::Word("is"), .. }, .., Token { kind: Kind::Word("answer"), .. }] = tokens[tail..]
        && tail > 0
    {
        tokens.truncate(tail);
    }
    if let Some(name) = option_letter(tokens) {
        return (option(name, ast), Seen::default());
    }
    let start = value_start(tokens);
    Parser::answer(text, tokens, start, ast, choices)
}

/// `(b)`, `B)`, `option B`: the letter of a choice.
fn option_letter<'t>(tokens: &[Token<'t>]) -> Option<&'t str> {
    use Kind::{Close, Name, Open, Word};
    let kinds: Vec<Kind<'t>> = tokens.iter().take(4).map(|token| token.kind).collect();
    let (Name { name, .. } | Word(name)) = (match kinds[..] {
        [Open(Bracket::Round), letter, Close(Bracket::Round)] | [letter, Close(Bracket::Round)] => letter,
        [Word(option), letter] if is_option(option) => letter,
        [Word(option), Open(Bracket::Round), letter, Close(Bracket::Round)] if is_option(option) => letter,
        _ => return None,
    }) else {
        return None;
    };
    (name.len() == 1 && name.starts_with(|c: char| c.is_ascii_alphabetic())).then_some(name)
}

fn is_option(word: &str) -> bool {
    ["option", "choice", "answer", "choose"].iter().any(|known| known.eq_ignore_ascii_case(word))
}

fn option(name: &str, ast: &mut Ast) -> Result<NodeId, Status> {
    let symbol = ast.intern(name)?;
    let symbol = ast.push(Node::Symbol(symbol))?;
    let text = ast.push(Node::Text(name.to_ascii_lowercase()))?;
    ast.push(Node::Either(vec![text, symbol]))
}

/// Capital letters alone, and in lists, may be labels of choices.
fn labelled(ast: &mut Ast, root: NodeId) -> Result<NodeId, Status> {
    if let Some(label) = label(ast, root)? {
        return Ok(label);
    }
    let Node::List { items, separator } = ast.node(root) else { return Ok(root) };
    let (items, separator) = (items.clone(), *separator);
    let mut labels = Vec::with_capacity(items.len());
    for item in items {
        let Some(label) = label(ast, item)? else { return Ok(root) };
        labels.push(label);
    }
    ast.push(Node::List { items: labels, separator })
}

/// A capital letter, or a letter as text, in both readings.
fn label(ast: &mut Ast, id: NodeId) -> Result<Option<NodeId>, Status> {
    let name = match ast.node(id) {
        Node::Symbol(symbol) => ast.name(*symbol).to_owned(),
        Node::Text(text) if text.len() == 1 => {
            let symbol = ast.intern(&text.to_ascii_uppercase())?;
            let symbol = ast.push(Node::Symbol(symbol))?;
            return ast.push(Node::Either(vec![id, symbol])).map(Some);
        }
        _ => return Ok(None),
    };
    if name.len() != 1 || !name.starts_with(|c: char| c.is_ascii_uppercase()) {
        return Ok(None);
    }
    let text = ast.push(Node::Text(name.to_ascii_lowercase()))?;
    ast.push(Node::Either(vec![id, text])).map(Some)
}

/// Without the marks around an answer: space, quotes, bold, delimiters of math, the period of its sentence.
fn unwrapped(text: &str) -> &str {
    let mut text = strip(text);
    loop {
        let before = text.len();
        for (open, close) in
            [("**", "**"), ("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\"", "\""), ("`", "`"), ("“", "”")]
        {
            if let Some(inner) = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close))
                && !inner.contains(open)
                && !inner.contains(close)
            {
                text = strip(inner);
            }
        }
        if let Some(inner) = text.strip_prefix('$').and_then(|rest| rest.strip_suffix('$'))
            && !inner.contains('$')
            && !inner.ends_with('\\')
        {
            text = strip(inner);
        }
        let ellipsis = text.ends_with("..");
        if let Some(rest) = text.strip_suffix(['.', ',', ';'])
            && !ellipsis
            && !rest.ends_with('\\')
        {
            text = strip(rest);
        }
        if text.len() == before {
            return text;
        }
    }
}

/// `-12`, `3.5`, `3/4`, `\frac{3}{4}` without going through tokens.
fn plain_number(text: &str) -> Option<Node> {
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if rest.len() > 40 || !rest.is_ascii() {
        return None;
    }
    let (value, form) = match rest.as_bytes() {
        [b'0'..=b'9', ..] => {
            let (whole, after) = digits(rest)?;
            match after.as_bytes() {
                [] => (RBig::from(whole), NumberForm::Integer),
                [b'.', ..] => {
                    let places = after.len() - 1;
                    let (decimals, end) = digits(&after[1..])?;
                    if !end.is_empty() || places > 18 {
                        return None;
                    }
                    let power = 10u64.checked_pow(u32::try_from(places).ok()?)?;
                    let top = UBig::from(whole) * UBig::from(power) + UBig::from(decimals);
                    let form = NumberForm::Decimal { places: u16::try_from(places).ok()? };
                    (RBig::from_parts(IBig::from(top), UBig::from(power)), form)
                }
                [b'/', ..] => {
                    let (bottom, end) = digits(&after[1..])?;
                    (fraction(whole, bottom, end)?, NumberForm::Fraction)
                }
                _ => return None,
            }
        }
        [b'\\', ..] => {
            let rest = rest.strip_prefix("\\frac{").or_else(|| rest.strip_prefix("\\dfrac{"))?;
            let (top, rest) = digits(rest)?;
            let (bottom, end) = digits(rest.strip_prefix("}{")?)?;
            (fraction(top, bottom, end.strip_prefix('}')?)?, NumberForm::Fraction)
        }
        _ => return None,
    };
    Some(Node::Number { value: if negative { -value } else { value }, form })
}

fn fraction(top: u64, bottom: u64, rest: &str) -> Option<RBig> {
    (rest.is_empty() && bottom != 0).then(|| RBig::from_parts(IBig::from(top), UBig::from(bottom)))
}

/// Leading digits, up to eighteen, and the rest.
fn digits(text: &str) -> Option<(u64, &str)> {
    let count = text.bytes().take_while(u8::is_ascii_digit).count();
    if !(1..=18).contains(&count) {
        return None;
    }
    let value = text.bytes().take(count).fold(0, |value, digit| value * 10 + u64::from(digit - b'0'));
    Some((value, &text[count..]))
}
