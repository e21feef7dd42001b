//! The syntax tree of one answer: an arena of nodes, in which children stand before their parents.
//!
//! The tree says how an answer is written and never what it is worth: nothing is evaluated but number literals.
//! Where a text has several readings the tree keeps them, as [`Node::Either`] or as a flag, and the comparison with
//! the gold decides.
//!
//! What a consumer may rely on:
//! - a child's [`NodeId`] is smaller than its parent's, so one pass over the arena evaluates bottom-up without
//!   recursion; nodes that the root does not reach may occur (a reading that was given up);
//! - no node is higher than [`MAX_HEIGHT`], so recursion over the tree is safe on any thread;
//! - dropping a tree recurses nowhere.

pub use super::id::{NodeId, SymbolId};
pub use super::kinds::{Comparison, Constant, DegreePart, Function, NamedSet, NumberForm, Separator, SetPart};
pub use super::node::{Node, Range};
use crate::error::ParseError;

/// The height of a tree that is still read; a leaf has height 1.
pub const MAX_HEIGHT: u16 = 200;

/// A syntax tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Ast {
    nodes: Vec<Node>,
    heights: Vec<u16>,
    names: Vec<Box<str>>,
    root: NodeId,
}

impl Default for Ast {
    fn default() -> Self {
        Self::new()
    }
}

impl Ast {
    /// A tree without nodes: to be filled by [`Ast::push`], then [`Ast::set_root`].
    #[must_use]
    pub fn new() -> Self {
        Self { nodes: Vec::new(), heights: Vec::new(), names: Vec::new(), root: NodeId(0) }
    }

    /// A tree of one leaf.
    #[must_use]
    pub fn leaf(node: Node) -> Self {
        Self { nodes: vec![node], heights: Vec::new(), names: Vec::new(), root: NodeId(0) }
    }

    /// Where to start.
    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// All nodes, children before their parents.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The spelling of a symbol.
    #[must_use]
    pub fn name(&self, symbol: SymbolId) -> &str {
        &self.names[symbol.index()]
    }

    /// All spellings, each once.
    #[must_use]
    pub fn names(&self) -> &[Box<str>] {
        &self.names
    }

    /// Make `id` the root.
    pub fn set_root(&mut self, id: NodeId) {
        self.root = id;
    }

    /// Add a node whose operands are in the tree already.
    ///
    /// # Errors
    /// [`ParseError::Undecided`] for a tree higher than [`MAX_HEIGHT`].
    pub fn push(&mut self, node: Node) -> Result<NodeId, ParseError> {
        let mut height = 1;
        node.for_each_child(|child| {
            height = height.max(self.heights.get(child.index()).map_or(2, |height| height + 1));
        });
        let id = u32::try_from(self.nodes.len()).map_err(|_| ParseError::Undecided)?;
        if height > MAX_HEIGHT {
            return Err(ParseError::Undecided);
        }
        self.nodes.push(node);
        self.heights.push(height);
        Ok(NodeId(id))
    }

    /// The id of a name, new or known.
    ///
    /// # Errors
    /// [`ParseError::Undecided`] past a few hundred names.
    pub fn intern(&mut self, name: &str) -> Result<SymbolId, ParseError> {
        let known = self.names.iter().position(|other| **other == *name);
        let index = known.unwrap_or(self.names.len());
        if known.is_none() {
            self.names.push(name.into());
        }
        if index < MAX_NAMES { Ok(SymbolId(index as u32)) } else { Err(ParseError::Undecided) }
    }
}

/// Different names in one answer; interning searches them one by one.
const MAX_NAMES: usize = 256;
