//! Whether an answer has its numbers written out: `56088` does, `123 \times 456` leaves arithmetic to do.
//!
//! A problem that asks for the value of an expression states that expression, so a policy can copy it. Numbers are
//! written out as integers, decimals, fractions, mixed numbers, powers of ten, percentages, in degrees and with units.

use dashu_ratio::RBig;

use super::ast::{Ast, Comparison, Constant, Node, NodeId, NumberForm};

/// Whether every number of the tree is written out, in one reading at least. False for letters and for expressions, such as `2x`, `\sqrt2`.
#[must_use]
pub fn is_written_out(ast: &Ast) -> bool {
    at(ast, ast.root(), false)
}

/// Whether a gold is made of numbers alone, so that its answers have to be: `x = 5`, but not `x + y = 0`. An angle in
/// degrees may be answered in multiples of π.
#[must_use]
pub fn asks_for_numbers(ast: &Ast) -> bool {
    let is_name = |operand: &NodeId| matches!(ast.node(*operand), Node::Symbol(_)) || at(ast, *operand, true);
    at(ast, ast.root(), true)
        && ast.nodes().iter().all(|node| match node {
            Node::Relation { operands, .. } => operands.iter().all(is_name),
            Node::Degree { .. } | Node::Congruence { .. } | Node::SetBuilder { .. } | Node::BaseNumeral { .. } => false,
            _ => true,
        })
}

fn at(ast: &Ast, id: NodeId, in_every_reading: bool) -> bool {
    let at = |id: &NodeId| at(ast, *id, in_every_reading);
    let all = |items: &[NodeId]| items.iter().all(at);
    match ast.node(id) {
        // 84/12 is 7; 2/4 is a fraction as 1/2 is.
        Node::Number { value, form } => !(matches!(form, NumberForm::Fraction { lowest: false }) && value.is_int()),
        Node::BaseNumeral { base, .. } => *base == 10,
        Node::Constant { value, .. } => *value == Constant::Infinity,
        Node::Text(_)
        | Node::Time { .. }
        | Node::Ellipsis
        | Node::EmptySet
        | Node::NamedSet { .. }
        | Node::SetBuilder { .. }
        | Node::Congruence { .. } => true,
        Node::Neg(inner) | Node::Percent(inner) | Node::Transpose(inner) => at(inner),
        Node::Degree { value, .. } | Node::Quantity { value, .. } => at(value),
        Node::PlusMinus { left, right, .. } => left.as_ref().is_none_or(at) && at(right),
        Node::Pow(base, exponent) => is_power_of_ten(ast, *base, *exponent),
        // 3 · 10^5
        Node::Mul { factors, .. } => match factors.as_slice() {
            [digits, power] => {
                matches!(ast.node(*digits), Node::Number { .. })
                    && matches!(ast.node(*power), Node::Pow(base, exponent) if is_power_of_ten(ast, *base, *exponent))
            }
            _ => false,
        },
        // 42 mod 100, but not 17 mod 5
        Node::Mod(residue, modulus) => match (ast.node(*residue), ast.node(*modulus)) {
            (Node::Number { value, .. }, Node::Number { value: modulus, .. }) => {
                *value >= RBig::ZERO && value < modulus
            }
            _ => false,
        },
        Node::Add(items) => is_measure(ast, items) && all(items),
        Node::List { items, .. }
        | Node::Set(items)
        | Node::Tuple(items)
        | Node::Brackets(items)
        | Node::Vector(items)
        | Node::Matrix { entries: items, .. }
        | Node::Ratio(items)
        | Node::Union(items)
        | Node::Intersection(items)
        | Node::And(items)
        | Node::Or(items) => all(items),
        Node::Difference(a, b) | Node::Interval { low: a, high: b, .. } => at(a) && at(b),
        // `2 + 3 = 5` states 5, and `5 = x` too; `2 < x < 5` states both ends. What letters leave to solve is
        // another matter.
        Node::Relation { operands, operators } => {
            let mut stated = operands.iter().filter(|operand| !has_letters(ast, **operand)).peekable();
            if operators.iter().all(|operator| *operator == Comparison::Equal) {
                stated.peek().is_none() || stated.any(at)
            } else {
                stated.all(at)
            }
        }
        Node::Either(items) if in_every_reading => all(items),
        Node::Either(items) => items.iter().any(at),
        _ => false,
    }
}

fn has_letters(ast: &Ast, id: NodeId) -> bool {
    let mut has = matches!(ast.node(id), Node::Symbol(_) | Node::Apply { .. });
    ast.node(id).for_each_child(|child| has = has || has_letters(ast, child));
    has
}

fn is_power_of_ten(ast: &Ast, base: NodeId, exponent: NodeId) -> bool {
    let is_integer = |id| matches!(ast.node(id), Node::Number { form: NumberForm::Integer, .. });
    matches!(ast.node(base), Node::Number { value, form: NumberForm::Integer } if *value == 10.into())
        && is_integer(exponent)
}

/// Whether a sum is one measure in several units: 5 ft 3 in, 12° 30'.
fn is_measure(ast: &Ast, items: &[NodeId]) -> bool {
    items.iter().enumerate().all(|(place, item)| {
        let others = items[..place].iter().map(|other| ast.node(*other));
        match ast.node(*item) {
            Node::Quantity { unit, .. } => {
                others.into_iter().all(|other| matches!(other, Node::Quantity { unit: known, .. } if known != unit))
            }
            Node::Degree { part, .. } => {
                others.into_iter().all(|other| matches!(other, Node::Degree { part: known, .. } if known != part))
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use crate::answer::compare;
    use crate::compare::Options;
    use crate::equality::Equality;
    use crate::parse;

    #[test]
    fn numbers_are_written_out_and_expressions_are_not() {
        for text in [
            "56088",
            "-5",
            "3.50",
            r"\frac{3}{4}",
            "2/4",
            r"3\frac12",
            r"0.\overline{3}",
            r"1.5\times10^{-3}",
            "10^{9}",
            r"3\cdot10^5",
            "50\\%",
            "1,234",
            r"90^\circ",
            r"12^\circ 30'",
            "5 ft 3 in",
            r"\$18.90",
            "1, 2",
            "(1,2)",
            r"[0,\infty)",
            "x = 5",
            "5 = x",
            "2+3=5",
            "5=2+3",
            r"\pm 3",
            "1:2",
            "2 < x < 5",
            "x = 1, y = 2",
            "Yes",
            "twelve",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            "3:30 p.m.",
        ] {
            assert!(super::is_written_out(&parse(text).unwrap()), "{text}");
        }
        for text in [
            r"123\times456",
            "12 + 30",
            "84/12",
            r"84\div12",
            "2^{10}",
            "5!",
            r"\binom{5}{2}",
            r"\sqrt{16}",
            "7 - (-2)",
            "x = 12 + 30",
            "(1+1, 2)",
            r"\{1+1, 2\}",
            "10^{2+1}",
            "5 cm + 3 cm",
            "|-3|",
            "17 mod 5",
            r"\gcd(12,18)",
            "2x",
            r"\pi",
            r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
            "1 + 1/2",
            "101_2",
            "2+2 < x",
        ] {
            assert!(!super::is_written_out(&parse(text).unwrap()), "{text}");
        }
    }

    #[test]
    fn a_copy_of_the_problem_is_wrong_for_a_number() {
        let lenient = Options { unevaluated_ok: true, ..Options::default() };
        for (gold, answer) in [
            ("56088", r"123\times456"),
            ("7", "84/12"),
            ("10", r"\binom{5}{2}"),
            ("4", r"\sqrt{16}"),
            ("42", "x=12+30"),
            ("30 cm", r"10\times3\text{ cm}"),
            ("2, 5", "1+1, 2+3"),
            ("(2,5)", "2 < x < 2+3"),
            ("5", "101_2"),
            ("-2", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
        ] {
            assert_eq!(compare(gold, answer, &Options::default()), Equality::Different, "{gold} {answer}");
            assert_eq!(compare(gold, answer, &lenient), Equality::Equal, "{gold} {answer}");
        }
        // What the gold leaves to do, an answer may leave too.
        for (gold, answer) in [
            ("2^{100}", "4^{50}"),
            (r"\sqrt{8}", r"2\sqrt{2}"),
            (r"5\sqrt2", r"\sqrt{8}+\sqrt{18}"),
            ("2x", "x+x"),
            ("123*456", r"456\cdot123"),
            ("0.5", "3/6"),
            ("5", "2+3=5"),
            (r"3\frac12", "3.5"),
            ("60°", r"\frac{\pi}{3}"),
            ("C", "(c)"),
        ] {
            assert_eq!(compare(gold, answer, &Options::default()), Equality::Equal, "{gold} {answer}");
        }
    }
}
