//! Search for tags, `<name>` and `</name>`, with the meaning of Python's `str.count`, `re` anchors and slices.

use math_answers::work::looked_at;
use memchr::memmem::Finder;

/// The two literals of a tag, `<name>` and `</name>`, each with its searcher.
#[derive(Debug)]
pub(super) struct Tag {
    pub(super) open: Finder<'static>,
    pub(super) close: Finder<'static>,
}

impl Tag {
    pub(super) fn new(name: &str) -> Self {
        Self { open: finder(&format!("<{name}>")), close: finder(&format!("</{name}>")) }
    }

    /// Whether the text opens the tag and closes it later.
    pub(super) fn is_closed(&self, text: &[u8]) -> bool {
        find(&self.open, text, 0).is_some_and(|at| find(&self.close, text, at).is_some())
    }
}

/// A searcher for `needle`.
pub(super) fn finder(needle: &str) -> Finder<'static> {
    Finder::new(needle.as_bytes()).into_owned()
}

/// Length of the literal in bytes.
pub(super) fn len(finder: &Finder<'_>) -> usize {
    finder.needle().len()
}

/// First occurrence at or after `from`.
pub(super) fn find(finder: &Finder<'_>, text: &[u8], from: usize) -> Option<usize> {
    let found = finder.find(text.get(from..)?).map(|at| from + at);
    looked_at(found.unwrap_or(text.len()) - from);
    found
}

/// Place of the literal if it occurs exactly once; counts occurrences that do not overlap, as `str.count` does.
pub(super) fn only(finder: &Finder<'_>, text: &[u8]) -> Option<usize> {
    looked_at(text.len());
    let mut places = finder.find_iter(text);
    let first = places.next();
    if places.next().is_some() { None } else { first }
}

/// Whether the literal stands at `at`.
pub(super) fn starts(text: &[u8], at: usize, finder: &Finder<'_>) -> bool {
    text.get(at..).is_some_and(|rest| rest.starts_with(finder.needle()))
}

/// Python's `$` without MULTILINE: the end of the text, or before a final newline.
pub(super) fn is_end(text: &[u8], at: usize) -> bool {
    at == text.len() || (at + 1 == text.len() && text[at] == b'\n')
}

/// Start of the closing tag, at or after `from`, that Python's `$` can follow.
pub(super) fn closes_at_end(text: &[u8], from: usize, close: &Finder<'_>) -> Option<usize> {
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let stop = if body.ends_with(close.needle()) { body.len() } else { text.len() };
    let at = stop.checked_sub(len(close))?;
    (at >= from && text[at..stop] == *close.needle()).then_some(at)
}
