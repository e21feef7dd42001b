//! Matrices and vectors: entries, products, determinants, lengths.

use super::super::ast::{Node, NodeId};
use super::super::expr::Id;
use super::super::fuel::Stop;
use super::read::{Fail, Reader};
use super::{Shape, Value};

/// Rows of a determinant that is expanded.
const MOST_ROWS: usize = 6;

/// A matrix of expressions.
pub(super) struct Table {
    pub(super) columns: usize,
    pub(super) entries: Vec<Id>,
}

impl Reader<'_> {
    /// The matrix of a node: a literal, or scalar multiples, sums, transposes and products of such.
    pub(super) fn table(&mut self, node: NodeId) -> Result<Table, Fail> {
        self.fuel.spend(4)?;
        let (ast, fuel) = (self.ast, self.fuel);
        match ast.node(node) {
            Node::Matrix { columns, entries, .. } => {
                Ok(Table { columns: (*columns as usize).max(1), entries: self.numbers(entries)? })
            }
            Node::Tuple(items) | Node::Vector(items) => Ok(Table { columns: 1, entries: self.numbers(items)? }),
            Node::Brackets(items) => Ok(Table { columns: items.len().max(1), entries: self.numbers(items)? }),
            Node::Transpose(inner) => {
                let table = self.table(*inner)?;
                let rows = table.entries.len() / table.columns;
                let entries = (0..table.entries.len()).map(|at| table.entries[at % rows * table.columns + at / rows]);
                Ok(Table { columns: rows.max(1), entries: entries.collect() })
            }
            Node::Neg(inner) => {
                let table = self.table(*inner)?;
                let mut entries = Vec::with_capacity(table.entries.len());
                for entry in table.entries {
                    entries.push(self.exprs.negated(entry, fuel)?);
                }
                Ok(Table { entries, ..table })
            }
            Node::Div(inner, divisor) => {
                let divisor = self.number(*divisor)?;
                let table = self.table(*inner)?;
                let mut entries = Vec::with_capacity(table.entries.len());
                for entry in table.entries {
                    entries.push(self.exprs.quotient(entry, divisor, fuel)?);
                }
                Ok(Table { entries, ..table })
            }
            Node::Add(items) => {
                let mut items = items.iter();
                let mut sum = self.table(*items.next().ok_or(Fail::NotNumber)?)?;
                for item in items {
                    let other = self.table(*item)?;
                    if other.columns != sum.columns || other.entries.len() != sum.entries.len() {
                        return Err(Fail::NotNumber);
                    }
                    for (entry, more) in sum.entries.iter_mut().zip(other.entries) {
                        *entry = self.exprs.sum(&[*entry, more], fuel)?;
                    }
                }
                Ok(sum)
            }
            Node::Mul { factors, .. } => {
                let mut scale = self.exprs.integer(1, fuel)?;
                let mut product: Option<Table> = None;
                for factor in factors {
                    match self.number(*factor) {
                        Ok(id) => scale = self.exprs.product(&[scale, id], fuel)?,
                        Err(Fail::NotNumber) => {
                            let table = self.table(*factor)?;
                            product = Some(match product {
                                None => table,
                                Some(left) => self.times(&left, &table)?,
                            });
                        }
                        Err(fail) => return Err(fail),
                    }
                }
                let mut table = product.ok_or(Fail::NotNumber)?;
                for entry in &mut table.entries {
                    *entry = self.exprs.product(&[scale, *entry], fuel)?;
                }
                Ok(table)
            }
            _ => Err(Fail::NotNumber),
        }
    }

    fn times(&mut self, left: &Table, right: &Table) -> Result<Table, Fail> {
        let inner = right.entries.len() / right.columns;
        if left.columns != inner {
            return Err(Fail::NotNumber);
        }
        let mut entries = Vec::new();
        for row in left.entries.chunks(left.columns) {
            for column in 0..right.columns {
                let mut terms = Vec::with_capacity(inner);
                for (at, entry) in row.iter().enumerate() {
                    terms.push(self.exprs.product(&[*entry, right.entries[at * right.columns + column]], self.fuel)?);
                }
                entries.push(self.exprs.sum(&terms, self.fuel)?);
            }
        }
        Ok(Table { columns: right.columns, entries })
    }

    pub(super) fn determinant(&mut self, node: NodeId) -> Result<Id, Fail> {
        let table = self.table(node)?;
        let rows = table.columns;
        if rows * rows != table.entries.len() {
            return Err(Fail::Stop(Stop::Undefined));
        }
        if rows > MOST_ROWS {
            return Err(Fail::Stop(Stop::Fuel));
        }
        let columns: Vec<usize> = (0..rows).collect();
        self.minor(&table, 0, &columns)
    }

    /// Expansion by the rows from `row` on, over the columns given.
    fn minor(&mut self, table: &Table, row: usize, columns: &[usize]) -> Result<Id, Fail> {
        let mut terms = Vec::with_capacity(columns.len());
        for (at, column) in columns.iter().enumerate() {
            let entry = table.entries[row * table.columns + column];
            if columns.len() == 1 {
                return Ok(entry);
            }
            let rest: Vec<usize> = columns.iter().copied().filter(|other| other != column).collect();
            let inner = self.minor(table, row + 1, &rest)?;
            let term = self.exprs.product(&[entry, inner], self.fuel)?;
            terms.push(if at % 2 == 1 { self.exprs.negated(term, self.fuel)? } else { term });
        }
        Ok(self.exprs.sum(&terms, self.fuel)?)
    }

    /// √(Σ entries²) of a vector.
    pub(super) fn length(&mut self, node: NodeId) -> Result<Id, Fail> {
        let entries = self.table(node)?.entries;
        let mut squares = Vec::with_capacity(entries.len());
        for entry in entries {
            squares.push(self.exprs.product(&[entry, entry], self.fuel)?);
        }
        let sum = self.exprs.sum(&squares, self.fuel)?;
        let half = self.exprs.rational(super::number::ratio(1, 2), self.fuel)?;
        Ok(self.exprs.power(sum, half, self.fuel)?)
    }

    /// The value of a node that is no number but arithmetic of matrices or vectors.
    pub(super) fn matrix_value(&mut self, node: NodeId) -> Result<Value, Fail> {
        let table = self.table(node)?;
        if contains_matrix(self, node) {
            return Ok(Value::Matrix { columns: table.columns, entries: table.entries });
        }
        let items = table.entries.into_iter().map(Value::bare).collect();
        Ok(Value::List { items, shape: Shape::Vector })
    }
}

fn contains_matrix(reader: &Reader<'_>, node: NodeId) -> bool {
    let mut stack = vec![node];
    let mut steps = 0;
    while let Some(node) = stack.pop() {
        steps += 1;
        let node = reader.ast.node(node);
        if matches!(node, Node::Matrix { .. }) || steps > 10_000 {
            return true;
        }
        node.for_each_child(|child| stack.push(child));
    }
    false
}
