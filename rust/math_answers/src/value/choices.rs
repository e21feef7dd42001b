//! What is ambiguous in a tree, and which reading to take.

use super::super::ast::{Ast, Comparison, NamedSet, Node, NodeId, SymbolId};

/// Which of several readings to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Choices {
    /// Which alternative of every [`Node::Either`]; the last one where there are fewer.
    pub either: usize,
    /// Whether a logarithm without base is the natural one; else it has base 10.
    pub natural_log: bool,
    /// Whether arguments of functions that are defined, and letters that are said to be integers, get names of their
    /// own: `f(t) = t²` is `f(x) = x²`, and `kπ, k ∈ ℤ` is `nπ, n ∈ ℤ`.
    pub renamed: bool,
    /// Whether of `40/3 ≈ 13.33` the rounded number counts, as a gold may allow.
    pub rounded: bool,
}

/// Whether [`Choices::rounded`] makes a difference.
#[must_use]
pub fn has_approximations(ast: &Ast) -> bool {
    ast.nodes().iter().any(|node| match node {
        Node::Relation { operators, .. } => operators.contains(&Comparison::Approx),
        _ => false,
    })
}

/// Whether [`Choices::renamed`] makes a difference.
#[must_use]
pub fn has_dummies(ast: &Ast) -> bool {
    ast.nodes().iter().any(|node| integer_letter(ast, node).is_some() || defined_arguments(ast, node).is_some())
}

/// The k of `k ∈ ℤ`.
pub(super) fn integer_letter(ast: &Ast, node: &Node) -> Option<SymbolId> {
    let Node::Relation { operands, operators } = node else { return None };
    match (&operands[..], &operators[..]) {
        ([element, set], [Comparison::In]) => match (ast.node(*element), ast.node(*set)) {
            (Node::Symbol(symbol), Node::NamedSet { set: NamedSet::Integers | NamedSet::Naturals, .. }) => {
                Some(*symbol)
            }
            _ => None,
        },
        _ => None,
    }
}

/// The x of `f(x) = …`.
pub(super) fn defined_arguments(ast: &Ast, node: &Node) -> Option<Vec<SymbolId>> {
    let Node::Relation { operands, operators } = node else { return None };
    let (Some(first), Some(Comparison::Equal)) = (operands.first(), operators.first()) else { return None };
    let Node::Apply { arguments, .. } = ast.node(*first) else { return None };
    let symbol = |id: &NodeId| match ast.node(*id) {
        Node::Symbol(symbol) => Some(*symbol),
        _ => None,
    };
    arguments.iter().map(symbol).collect()
}
