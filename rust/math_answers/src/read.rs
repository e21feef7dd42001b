//! Text to tree: the readings of what is ambiguous, and what is read when the whole is not.

use dashu_ratio::RBig;

use super::ast::{Ast, Comparison, Node, NodeId, NumberForm};
use super::label::{self, labelled};
use super::lexer::token::{Kind, Token};
use super::lexer::{self, Options};
use super::notation;
use super::outside::{cut_tail, keep_conclusion, plain_number, unwrapped};
use super::parser::{Choices, Parser, Seen, is_text, value_start};
use super::sentence;
use super::word;
use crate::error::ParseError;
use crate::extraction::denied::is_denial;
use crate::extraction::legible;

/// A longer text is read as a whole or not at all, so that its parts are not read again and again.
const LONGEST_STATEMENT: usize = 1024;
/// Right sides of one answer that are tried.
const MOST_SIDES: usize = 4;
/// A longer answer is not read.
pub const LONGEST_ANSWER: usize = 16 * 1024;

/// Read an answer, in LaTeX or plain notation.
///
/// Linear in the length of the text, and bounded: [`LONGEST_ANSWER`] bytes, 2048 tokens, about 100 brackets within each
/// other, trees of height [`super::ast::MAX_HEIGHT`], numbers of about 64 kbit.
///
/// What is no mathematics as a whole is tried again with a statement on each line, then as the only formula of its prose,
/// as a statement whose left side alone cannot be read, and as a sentence that ends with a value; what is left is text, if
/// it is prose.
///
/// # Errors
/// [`ParseError::NoAnswer`] for an empty text, [`ParseError::Undecided`] past a bound, [`ParseError::Unparseable`] for what is neither
/// mathematics that is known here nor prose.
pub fn parse(text: &str) -> Result<Ast, ParseError> {
    if text.len() > LONGEST_ANSWER {
        return Err(ParseError::Undecided);
    }
    let text = legible(text);
    let text = notation::unescaped(&text);
    let text = unwrapped(&text);
    if let Some(number) = plain_number(text) {
        return Ok(Ast::leaf(number));
    }
    if text.is_empty() {
        return Err(ParseError::NoAnswer);
    }
    let text = notation::spelled_out(text);
    // `3२`: digits of two scripts, of which only the first are read.
    if !text.is_ascii()
        && text.contains(|c: char| c.is_ascii_digit())
        && text.contains(|c: char| !c.is_ascii() && c.is_numeric())
    {
        return Err(ParseError::Unparseable);
    }
    let mut ast = Ast::new();
    let mut options = Options { grouped: true, exponents: true, lines: false };
    let mut roots = readings(&text, options, &mut ast)?;
    if roots.is_empty() && text.contains('\n') {
        options.lines = true;
        roots = readings(&text, options, &mut ast)?;
    }
    let short = text.len() <= LONGEST_STATEMENT;
    if roots.is_empty()
        && let Some(formula) = only_formula(&text)
    {
        options.lines = false;
        roots = readings(formula, options, &mut ast)?;
        if roots.is_empty() && short {
            roots = right_side(formula, options, &mut ast)?;
        }
    }
    if roots.is_empty() && short {
        options.lines = false;
        roots = right_side(&text, options, &mut ast)?;
    }
    if roots.is_empty()
        && short
        && let Some(value) = sentence::value(&text)
    {
        roots = readings(value, options, &mut ast)?;
        roots.retain(|root| !matches!(ast.node(*root), Node::Text(_)));
    }
    if roots.is_empty() {
        let text = words(&text, options)?.ok_or(ParseError::Unparseable)?;
        roots.push(ast.push(Node::Text(text))?);
    }
    let root = match roots[..] {
        [root] => labelled(&mut ast, root)?,
        _ => ast.push(Node::Either(roots))?,
    };
    ast.set_root(root);
    Ok(ast)
}

/// Prose as text, or the sign of comparison that is all of it: `<`, `\parallel`.
fn words(text: &str, options: Options) -> Result<Option<String>, ParseError> {
    if let [Token { kind: Kind::Relation(sign), .. }] = lexer::tokens(text, options)?.tokens[..] {
        return Ok(Some(format!("{sign:?}")));
    }
    let compared = sentence::compared(text);
    let text = compared.as_deref().unwrap_or(text);
    let folded = word::folded(text);
    Ok((!folded.is_empty() && is_text(&lexer::tokens(text, options)?.tokens)).then_some(folded))
}

/// The readings of `\lim_{x \to 0} f(x) = 1`: a statement about its left side, whose text is the name; empty where the right
/// side of no `=` can be read either.
fn right_side(text: &str, options: Options, ast: &mut Ast) -> Result<Vec<NodeId>, ParseError> {
    let tokens = lexer::tokens(text, options)?.tokens;
    for (left, right) in sentence::sides(text, &tokens).take(MOST_SIDES) {
        if left.split(|c: char| !c.is_alphabetic()).any(|word| is_denial(word) || word == "isn") {
            break;
        }
        let found = readings(right, options, ast)?;
        let mut roots = Vec::with_capacity(found.len());
        for root in found {
            let (mut operands, mut operators) = (Vec::new(), vec![Comparison::Equal]);
            match ast.node(root) {
                Node::Text(_) => continue,
                Node::Relation { operands: more, operators: signs }
                    if signs.iter().all(|sign| matches!(sign, Comparison::Equal | Comparison::Approx)) =>
                {
                    operands.extend(more);
                    operators.extend(signs);
                }
                _ => operands.push(root),
            }
            let name = ast.push(Node::Text(word::folded(left)))?;
            operands.insert(0, name);
            roots.push(ast.push(Node::Relation { operands, operators })?);
        }
        if !roots.is_empty() {
            return Ok(roots);
        }
    }
    Ok(Vec::new())
}

/// All readings of a text, the likeliest first; none for what cannot be read.
fn readings(text: &str, first: Options, ast: &mut Ast) -> Result<Vec<NodeId>, ParseError> {
    let mut lexed = lexer::tokens(text, first)?;
    let mut roots = Vec::new();
    let seen = read(text, &mut lexed.tokens, ast, Choices::default(), &mut roots)?;
    let mut again = |options: Options, choices: Choices| {
        let mut tokens = lexer::tokens(text, options)?.tokens;
        read(text, &mut tokens, ast, choices, &mut roots)
    };
    if lexed.has_groups {
        again(Options { grouped: false, ..first }, Choices::default())?;
    }
    if lexed.has_exponents {
        again(Options { exponents: false, ..first }, Choices::default())?;
    }
    if seen.division {
        again(first, Choices { tight_division: true, ..Choices::default() })?;
    }
    if seen.letter_unit {
        again(first, Choices { letter_units: true, ..Choices::default() })?;
    }
    if seen.i && seen.j {
        again(first, Choices { unit_vectors: true, ..Choices::default() })?;
    }
    Ok(roots)
}

/// Add the readings under one set of choices. A reading that is too large ends the matter.
fn read<'t>(
    text: &'t str,
    tokens: &mut Vec<Token<'t>>,
    ast: &mut Ast,
    choices: Choices,
    roots: &mut Vec<NodeId>,
) -> Result<Seen, ParseError> {
    let denies = |token: &Token<'_>| matches!(token.kind, Kind::Word(word) if is_denial(word));
    let judged = |token: &Token<'_>| matches!(token.kind, Kind::Word("wrong" | "incorrect" | "false"));
    if tokens.len() > 1 && tokens.iter().any(judged) {
        return Ok(Seen::default());
    }
    cut_tail(tokens);
    keep_conclusion(text, tokens);
    if tokens.iter().any(denies) {
        return Ok(Seen::default());
    }
    if let Some(letter) = label::alone(tokens) {
        roots.extend(label::readings(letter, ast)?);
        return Ok(Seen::default());
    }
    let labelled = label::before(tokens);
    let start = labelled.map_or_else(|| value_start(tokens), |(_, start)| start);
    let (root, seen) = Parser::answer(text, tokens, start, ast, choices);
    match root {
        Err(ParseError::Undecided) => return Err(ParseError::Undecided),
        Err(_) => {}
        Ok(root) => {
            match ast.node(root) {
                Node::Either(items) => roots.extend_from_slice(items),
                _ => roots.push(root),
            }
            roots.extend(components(ast, root)?);
        }
    }
    if let Some((letter, _)) = labelled.filter(|_| !roots.is_empty()) {
        roots.push(ast.push(Node::Text(letter.to_owned()))?);
    }
    Ok(seen)
}

/// `2i - 3j` as the vector ⟨2, -3⟩: a sum of multiples of two or three of the unit vectors i, j and k.
fn components(ast: &mut Ast, root: NodeId) -> Result<Option<NodeId>, ParseError> {
    let Node::Add(terms) = ast.node(root) else { return Ok(None) };
    let terms = terms.clone();
    let unit = |ast: &Ast, node: NodeId| match ast.node(node) {
        Node::Symbol(symbol) => ["i", "j", "k"].iter().position(|name| *name == ast.name(*symbol)),
        _ => None,
    };
    let mut found: [Option<NodeId>; 3] = [None; 3];
    for term in &terms {
        let (term, negative) = match ast.node(*term) {
            Node::Neg(inner) => (*inner, true),
            _ => (*term, false),
        };
        let (last, others) = match ast.node(term) {
            Node::Mul { factors, .. } => match factors.split_last() {
                Some((last, others)) => (*last, others.to_vec()),
                None => return Ok(None),
            },
            _ => (term, Vec::new()),
        };
        let Some(place) = unit(ast, last).filter(|place| found[*place].is_none()) else { return Ok(None) };
        if others.iter().any(|factor| unit(ast, *factor).is_some()) {
            return Ok(None);
        }
        let length = match others[..] {
            [] => ast.push(Node::Number { value: RBig::ONE, form: NumberForm::Integer })?,
            [only] => only,
            _ => ast.push(Node::Mul { factors: others, implicit: true })?,
        };
        let signed = match ast.node(length) {
            Node::Number { value, form } if negative => Some(Node::Number { value: -value.clone(), form: *form }),
            _ if negative => Some(Node::Neg(length)),
            _ => None,
        };
        found[place] = Some(match signed {
            Some(node) => ast.push(node)?,
            None => length,
        });
    }
    let count = found.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    let mut items = Vec::with_capacity(count);
    for item in found.into_iter().take(count) {
        items.push(match item {
            Some(item) => item,
            None => ast.push(Node::Number { value: RBig::ZERO, form: NumberForm::Integer })?,
        });
    }
    ast.push(Node::Vector(items)).map(Some)
}

/// The formula of a text that has one, and no digit outside of it.
fn only_formula(text: &str) -> Option<&str> {
    let (start, end) = crate::extraction::last_formula(text)?;
    let outside = [&text[..start], &text[end..]];
    let marks = |text: &str| text.matches(['$', '\\']).count();
    let formula = &text[start..end];
    let compares = ["<", ">", "\\le", "\\ge", "\\ne"].iter().any(|sign| formula.contains(sign));
    let letter = formula.chars().next().filter(char::is_ascii_lowercase);
    let says = |word: &str| !(sentence::denies(word) || compares && sentence::restricts(word, letter));
    let alone = outside.iter().all(|text| {
        marks(text) <= 2
            && !text.contains(|c: char| c.is_ascii_digit())
            && text.split(|c: char| !c.is_alphabetic()).all(says)
    });
    (alone && !sentence::operates(outside[0]) && end - start + 4 < text.len()).then(|| &text[start..end])
}
