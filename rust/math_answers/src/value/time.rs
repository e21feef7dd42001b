//! The value of a time of day.

use super::super::ast::{Node, NodeId};
use super::super::fuel::Stop;
use super::Value;
use super::read::{Fail, Reader};

impl Reader<'_> {
    /// A time, and the ratio that its text may be instead.
    pub(super) fn time(&mut self, seconds: u32, known: bool, ratio: Option<NodeId>) -> Result<Value, Fail> {
        let Some(node) = ratio else { return Ok(Value::Time { seconds, known, ratio: None, lowest: false }) };
        // `12:00` has no ratio.
        let ratio = match self.value(node) {
            Ok(ratio) => Some(Box::new(ratio)),
            Err(Fail::Stop(Stop::Undefined)) => None,
            Err(fail) => return Err(fail),
        };
        let terms = match self.ast.node(node) {
            Node::Ratio(items) => items.iter().filter_map(|item| small(self.ast.node(*item))).collect(),
            _ => Vec::new(),
        };
        let lowest = terms.iter().fold(0, |divisor, term| gcd(divisor, *term)) == 1 && !terms.contains(&0);
        Ok(Value::Time { seconds, known, ratio, lowest })
    }
}

fn small(node: &Node) -> Option<u32> {
    match node {
        Node::Number { value, .. } => u32::try_from(value.numerator()).ok(),
        _ => None,
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
