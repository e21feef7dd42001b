//! A tree as one line of text, for tests and error reports: `(Add x (Neg 2))`.

use std::fmt::{self, Display, Formatter};

use super::ast::{Ast, Node, NodeId, NumberForm};

impl Display for Ast {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.render(self.root(), f)
    }
}

impl Ast {
    fn render(&self, id: NodeId, f: &mut Formatter<'_>) -> fmt::Result {
        match self.node(id) {
            Node::Number { value, form } => {
                write!(f, "{value}")?;
                match form {
                    NumberForm::Mixed => f.write_str("m"),
                    _ => Ok(()),
                }
            }
            Node::BaseNumeral { digits, base, value } => write!(f, "{digits}_{base}={value}"),
            Node::Constant { value, letter } => write!(f, "{value:?}{}", if letter.is_some() { "?" } else { "" }),
            Node::Symbol(symbol) => f.write_str(self.name(*symbol)),
            Node::Text(text) => write!(f, "{text:?}"),
            Node::Time { seconds, known, .. } => {
                let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
                write!(f, "Time[{hours}:{minutes:02}:{seconds:02}{}]", if *known { "" } else { "?" })
            }
            Node::Ellipsis => f.write_str("..."),
            Node::EmptySet => f.write_str("EmptySet"),
            Node::NamedSet { set, part } => write!(f, "{set:?}/{part:?}"),
            node => {
                f.write_str("(")?;
                self.head(node, f)?;
                let mut result = Ok(());
                node.for_each_child(|child| {
                    if result.is_ok() {
                        result = f.write_str(" ").and_then(|()| self.render(child, f));
                    }
                });
                result?;
                f.write_str(")")
            }
        }
    }

    fn head(&self, node: &Node, f: &mut Formatter<'_>) -> fmt::Result {
        match node {
            Node::Function { name, .. } => write!(f, "{name:?}"),
            Node::Apply { name, product, .. } => {
                write!(f, "Apply{} {}", if *product { "?" } else { "" }, self.name(*name))
            }
            Node::PlusMinus { flipped, .. } => f.write_str(if *flipped { "MinusPlus" } else { "PlusMinus" }),
            Node::Sum(range) => write!(f, "Sum {}", self.name(range.variable)),
            Node::Product(range) => write!(f, "Product {}", self.name(range.variable)),
            Node::Degree { part, .. } => write!(f, "{part:?}"),
            Node::Quantity { unit, .. } => {
                write!(f, "Quantity[")?;
                write!(f, "{}", unit.factor)?;
                for (letter, exponent) in "LMTIKNJB".chars().zip(unit.dimension).filter(|(_, exponent)| *exponent != 0)
                {
                    write!(f, " {letter}{exponent}")?;
                }
                for (name, exponent) in &unit.named {
                    write!(f, " {name}^{exponent}")?;
                }
                f.write_str("]")
            }
            Node::List { separator, .. } => write!(f, "List/{separator:?}"),
            Node::Interval { low_closed, high_closed, .. } => {
                write!(f, "Interval{}{}", if *low_closed { '[' } else { '(' }, if *high_closed { ']' } else { ')' })
            }
            Node::Matrix { rows, columns, .. } => write!(f, "Matrix{rows}x{columns}"),
            Node::Relation { operators, .. } => write!(f, "{operators:?}"),
            node => {
                let debug = format!("{node:?}");
                let end = debug.find(|c: char| !c.is_alphanumeric()).unwrap_or(debug.len());
                f.write_str(&debug[..end])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    /// Every kind of notation that is read, and what it is read as.
    #[test]
    fn answers_and_their_trees() {
        let mut wrong = Vec::new();
        for line in include_str!("examples.txt").lines().filter(|line| !line.starts_with("# ")) {
            let (text, expected) = line.split_once('\t').unwrap();
            let found = parse(text).map_or_else(|status| format!("{status:?}"), |ast| ast.to_string());
            if found != expected {
                wrong.push(format!("{text}\n  expected {expected}\n  found    {found}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
