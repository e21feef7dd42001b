//! What nodes and names of a syntax tree are called: places in its arena.

/// A node of an [`Ast`](super::ast::Ast).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u32);

impl NodeId {
    /// Its place in [`Ast::nodes`](super::ast::Ast::nodes).
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A name in an [`Ast`](super::ast::Ast); one name has one id in a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SymbolId(pub(super) u32);

impl SymbolId {
    /// Its place in [`Ast::names`](super::ast::Ast::names).
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
