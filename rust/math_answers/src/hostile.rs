//! Tests: whatever a policy writes, reading it ends soon and without a panic.

use proptest::prelude::*;

use super::answer::{Answer, compare};
use super::ast::{MAX_HEIGHT, Node};
use super::compare::Options;
use super::parse;
use crate::equality::Equality;
use crate::error::ParseError;
use crate::extraction::stated;

/// Pieces of answers, whole and broken.
const PIECES: [&str; 148] = [
    "8:34",
    " p.m.",
    "noon",
    "\\leqx",
    "\\piR",
    "\\Rightarrow ",
    "\\int_0^1 ",
    " is ",
    " or ",
    "x_1",
    ",\\! ",
    "\\text{A5}_{11}",
    "颗",
    "答案是",
    "5万",
    "\\aleph_0",
    "\\ker ",
    "\\parallel ",
    " units",
    "^2_n",
    "0",
    "1",
    "23",
    "4,567",
    "1,2",
    ".",
    ".5",
    "3.14",
    "e-3",
    "E5",
    "1e999",
    "x",
    "y",
    "f",
    "e",
    "i",
    "C",
    "P",
    "T",
    "U",
    " ",
    "  ",
    "~",
    "\n",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "|",
    "||",
    "<",
    ">",
    "=",
    "!=",
    "<=",
    ":",
    ";",
    ",",
    "!",
    "!!",
    "%",
    "'",
    "''",
    "$",
    "$$",
    "^",
    "_",
    "+",
    "-",
    "--",
    "*",
    "**",
    "/",
    "&",
    "\\",
    "\\\\",
    "\\{",
    "\\}",
    "\\(",
    "\\)",
    "\\[",
    "\\]",
    "\\,",
    "\\!",
    "\\|",
    "\\%",
    "\\$",
    "\\frac",
    "\\frac12",
    "\\sqrt",
    "\\sqrt[",
    "\\binom",
    "\\left",
    "\\right",
    "\\left|",
    "\\right.",
    "\\text{",
    "\\mathrm{",
    "\\mathbf",
    "\\mathbb",
    "\\mathbb{R}",
    "\\begin{pmatrix}",
    "\\end{pmatrix}",
    "\\begin{",
    "\\end{cases}",
    "\\begin{cases}",
    "\\begin{array}{c|c}",
    "\\overline{",
    "\\vec",
    "\\dot{3}",
    "\\overline{3}",
    "(3)",
    "\\sum",
    "_{i=1}^",
    "\\prod",
    "\\log",
    "\\log_28",
    "\\sin",
    "^{-1}",
    "\\pm",
    "\\mp",
    "\\cup",
    "\\setminus",
    "\\in",
    "\\not",
    "\\pmod",
    "\\mod",
    "\\circ",
    "\\infty",
    "\\choose",
    "\\over",
    "\\boxed{",
    "\\color{red}",
    "and",
    " or ",
    " base ",
    " cm ",
    "miles per hour",
    "two hundred",
    "half",
    " is ",
    "½",
    "√",
    "²",
    "₈",
    "３",
];

fn checked(text: &str) {
    let _ = stated(text);
    let _ = Answer::gold(text);
    let Ok(ast) = parse(text) else { return };
    for (index, node) in ast.nodes().iter().enumerate() {
        node.for_each_child(|child| assert!(child.index() < index, "{text:?}"));
        if let Node::Matrix { rows, columns, entries } = node {
            assert_eq!((rows * columns) as usize, entries.len(), "{text:?}");
        }
        if let Node::Relation { operands, operators } = node {
            assert_eq!(operands.len(), operators.len() + 1, "{text:?}");
        }
    }
    assert!(!ast.to_string().is_empty());
}

proptest! {
    #[test]
    fn pieces_never_panic(pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..24)) {
        checked(&pieces.concat());
    }

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,40}") {
        checked(&text);
    }

    #[test]
    fn ascii_never_panics(text in "[ -~]{0,40}") {
        checked(&text);
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = |open: &str, middle: &str, close: &str, times: usize| {
        parse(&[&open.repeat(times), middle, &close.repeat(times)].concat()).map(|ast| ast.to_string())
    };
    assert_eq!(deep("(", "1", ")", 90), Ok("1".into()));
    for (open, middle, close) in [
        ("(", "1", ")"),
        ("[", "1", "]"),
        ("{", "1", "}"),
        ("\\{", "1", "\\}"),
        ("|", "1", "|"),
        ("\\frac{", "1", "}{2}"),
        ("\\sqrt{", "2", "}"),
        ("\\left(", "2", "\\right)"),
        ("2^{", "2", "}"),
        ("2^", "2", ""),
        ("\\sin ", "x", ""),
        ("\\pm ", "x", ""),
        ("f(", "x", ")"),
        ("\\begin{pmatrix}", "1", "\\end{pmatrix}"),
        ("x", "", "!"),
        ("", "1", "/x"),
        ("", "5", "\\%"),
        ("\\{\\{1:2\\}:2 ", "", "\\}"),
        ("]", "1", "["),
        ("<", "1,2", ">"),
    ] {
        let result = deep(open, middle, close, 1000);
        assert!(matches!(result, Err(ParseError::Undecided | ParseError::Unparseable)), "{open}: {result:?}");
    }
    let chain = ["1", &"/x".repeat(usize::from(MAX_HEIGHT))].concat();
    assert_eq!(parse(&chain).map(|_| ()), Err(ParseError::Undecided));
}

#[test]
fn a_small_stack_is_enough() {
    let texts =
        ["(", "\\frac{", "2^{", "\\sqrt{", "f(", "\\sin ", "|", "\\{\\{1:2\\}:", "\\begin{pmatrix}", "\\pm ", "\\not"];
    let deep = move || texts.iter().all(|text| parse(&text.repeat(1000)).is_err());
    let thread = std::thread::Builder::new().stack_size(768 * 1024).spawn(deep).unwrap();
    assert!(thread.join().unwrap());
}

/// The element of a membership lies in the arena of its own side.
#[test]
fn a_membership_beside_a_statement_is_compared() {
    for (gold, answer) in
        [(r"x=1", r"x^2+y^3\in\mathbb{R}"), (r"x^2+y^3\in\mathbb{R}", "x=1"), (r"\int f=2", r"x^2\in\mathbb{R}")]
    {
        assert_eq!(compare(gold, answer, &Options::default()), Equality::Different, "{gold} | {answer}");
    }
}

#[test]
fn long_literals_are_counted() {
    assert_eq!(parse(&r"2\sqrt31e999".repeat(1000)).err(), Some(ParseError::Undecided));
    assert!(parse(&"1e999+".repeat(10)).is_err());
    assert!(parse("1e999+1e999").is_ok());
}

#[test]
fn sizes_are_bounded() {
    assert_eq!(parse(&"(".repeat(1_000_000)).err(), Some(ParseError::Undecided));
    assert_eq!(parse(&"x+".repeat(5000)).err(), Some(ParseError::Undecided));
    assert_eq!(parse("1e999999999").err(), Some(ParseError::Undecided));
    assert_eq!(parse("").err(), Some(ParseError::NoAnswer));
    assert!(parse(&"9".repeat(16 * 1024)).is_ok());
    assert!(parse("9^{9^{9^{9}}}").is_ok());
    assert!(parse("10^{9}!").is_ok());
    let names: String = (0..1000).map(|index| format!("x_{{{index}}}+")).collect();
    assert_eq!(parse(&names).err(), Some(ParseError::Undecided));
}

/// Each dollar sign looks for its partner; the ones behind a line break are not escaped.
#[test]
fn dollars_pair_up() {
    assert_eq!(parse(r"x = 1 \\$").err(), parse(r"x = 1 \\ $").err());
    assert_eq!(parse(r"$x \\$").map(|ast| ast.to_string()), parse(r"x \\").map(|ast| ast.to_string()));
}

/// Work is counted, not timed: nodes made for n repetitions of a text, abandoned readings included.
#[test]
fn work_grows_with_length() {
    for piece in [
        "x+",
        "1 ",
        "1,",
        "1,234,",
        "5 cats to ",
        "f(x,",
        "C(1;2",
        "\\{1:2,",
        "|x",
        "5 m ",
        "1/2x",
        "2e-3+",
        "x_{1",
        "\\overline{A",
        "$5 and ",
        "\\{\\{1:2\\}:2\\}+",
        "3 1/2+",
        "1A",
        "\\dot{3}",
        "\\text{a b} ",
        "two hundred ",
        "(1,2)\\cup",
        "a | b ",
        "\\log_28+",
        "5 feet ",
        "8:34 p.m.,",
        "x_1=2,",
        "\\leqx",
        "\\int=",
        "a \\Rightarrow ",
        ",\\! 234",
        "\\text{A5}",
        "5万颗",
        "the sum is ",
    ] {
        let nodes = |times: usize| parse(&piece.repeat(times)).map_or(0, |ast| ast.nodes().len());
        let (few, many) = (nodes(10), nodes(80));
        assert!(many <= 10 * few.max(10), "{piece}: {few} {many}");
    }
}
