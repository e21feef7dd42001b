//! Labels of choices: `B`, `(B)`, `option b`, `(B) 12`. A label is text, and may be a symbol as well.

use super::ast::{Ast, Constant, Node, NodeId};
use super::lexer::token::{Bracket, Kind, Token};
use crate::error::ParseError;

/// The letter of an answer that is a label and nothing else: `(b)`, `B)`, `option B`.
pub(super) fn alone<'t>(tokens: &[Token<'t>]) -> Option<&'t str> {
    let (letter, length) = leading(tokens)?;
    (length == tokens.len()).then_some(letter)
}

/// The letter of a choice whose content follows, and where that starts: `(B) 12`, `B. 12`, `option B: 12`.
pub(super) fn before<'t>(tokens: &[Token<'t>]) -> Option<(&'t str, usize)> {
    let (letter, length) = leading(tokens)?;
    let first = tokens.get(length)?;
    let continues = matches!(
        first.kind,
        Kind::Relation(_)
            | Kind::Plus
            | Kind::Times
            | Kind::Slash
            | Kind::Caret
            | Kind::Comma
            | Kind::Cup
            | Kind::Cap
            | Kind::Underscore
            | Kind::Semicolon
            | Kind::Colon
            | Kind::And
            | Kind::Or
    );
    let joins = matches!(first.kind, Kind::Word(word) if matches!(word, "and" | "or" | "is"));
    let colons = tokens.iter().filter(|token| token.kind == Kind::Colon).count();
    let choice = colons <= 1 && is_choice(letter) && !is_label(&tokens[length..]);
    (choice && first.space && !continues && !joins).then_some((letter, length))
}

fn is_choice(letter: &str) -> bool {
    letter.len() == 1 && letter.starts_with(|c: char| ('A'..='J').contains(&c))
}

/// Whether the tokens are another choice: `(A) (B)` and `A. B` name two, of which each would count.
fn is_label(tokens: &[Token<'_>]) -> bool {
    match tokens {
        [Token { kind: Kind::Name { name, .. } | Kind::Word(name), .. }] => is_choice(name),
        _ => alone(tokens).is_some_and(is_choice),
    }
}

/// A label at the start, and how many tokens it takes.
fn leading<'t>(tokens: &[Token<'t>]) -> Option<(&'t str, usize)> {
    use Kind::{Close, Colon, Open, Period};
    let kind = |at: usize| tokens.get(at).map(|token| token.kind);
    let option = usize::from(matches!(kind(0), Some(Kind::Word(word)) if is_option(word)));
    let bracketed = usize::from(kind(option) == Some(Open(Bracket::Round)));
    let (Kind::Name { name, .. } | Kind::Word(name)) = kind(option + bracketed)? else { return None };
    if name.len() != 1 || !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let mut length = option + bracketed + 1;
    let closed = kind(length) == Some(Close(Bracket::Round));
    length += usize::from(closed);
    if bracketed == 1 && !closed {
        return None;
    }
    let stop = matches!(kind(length), Some(Period | Colon));
    length += usize::from(stop);
    (option == 1 || closed || stop).then_some((name, length))
}

fn is_option(word: &str) -> bool {
    ["option", "choice", "answer", "choose"].iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// The readings of a letter that is a label.
pub(super) fn readings(letter: &str, ast: &mut Ast) -> Result<[NodeId; 2], ParseError> {
    let symbol = ast.intern(letter)?;
    let symbol = ast.push(Node::Symbol(symbol))?;
    let text = ast.push(Node::Text(letter.to_owned()))?;
    Ok([text, symbol])
}

/// The capital letters A to J alone, and in lists, may be labels of choices.
pub(super) fn labelled(ast: &mut Ast, root: NodeId) -> Result<NodeId, ParseError> {
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

/// A capital letter that may be a label, or a letter as text, in both readings.
fn label(ast: &mut Ast, id: NodeId) -> Result<Option<NodeId>, ParseError> {
    let name = match ast.node(id) {
        Node::Symbol(symbol) => ast.name(*symbol).to_owned(),
        Node::Text(text) if text.len() == 1 => {
            let text = text.clone();
            let letter = ast.intern(&text)?;
            // `\text{e}` is upright, as Euler's number often is.
            let symbol = match &*text {
                "e" => ast.push(Node::Constant { value: Constant::E, letter: Some(letter) })?,
                _ => ast.push(Node::Symbol(letter))?,
            };
            return ast.push(Node::Either(vec![id, symbol])).map(Some);
        }
        _ => return Ok(None),
    };
    if !is_choice(&name) {
        return Ok(None);
    }
    let text = ast.push(Node::Text(name))?;
    ast.push(Node::Either(vec![id, text])).map(Some)
}
