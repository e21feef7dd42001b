//! LaTeX commands: what each one means to the lexer.

use super::super::ast::{Comparison, Constant, Function, NamedSet};
use super::token::{Bracket, Kind, Style};

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// It is a token.
    Emit(Kind<'static>),
    /// It is space.
    Space,
    /// It changes nothing.
    Skip,
    /// It changes nothing, and neither does its first argument.
    SkipArgument,
    /// Its argument is prose.
    Text,
    /// Its argument is in this font.
    Font(Style),
    /// Its argument is grouped and otherwise as it stands.
    Group,
    /// Its argument names a set.
    Blackboard,
    /// A delimiter follows.
    Left,
    /// A delimiter follows.
    Right,
    /// A bar follows.
    Middle,
    /// A relation follows, to be denied.
    Not,
    /// An environment begins.
    Begin,
    /// An environment ends.
    End,
}

/// Whether `\name` is known here.
#[must_use]
pub fn is_command(name: &str) -> bool {
    action(name) != Action::Emit(Kind::Unknown)
}

/// The meaning of `\name`, letters only.
pub fn action(name: &str) -> Action {
    use Action::{Emit, Skip, SkipArgument, Space};
    if let Some(greek) = greek(name) {
        return Emit(Kind::Name { name: greek, style: Style::Plain });
    }
    if let Some(function) = function(name) {
        return Emit(function);
    }
    match name {
        "frac" | "dfrac" | "tfrac" | "cfrac" | "nicefrac" | "sfrac" => Emit(Kind::Frac),
        "binom" | "dbinom" | "tbinom" => Emit(Kind::Binom),
        "sqrt" | "surd" => Emit(Kind::Sqrt),
        "overline" | "bar" | "widebar" => Emit(Kind::Overline),
        "vec" | "hat" | "overrightarrow" | "widehat" | "tilde" | "widetilde" => Emit(Kind::Arrow(None)),
        "dot" => Emit(Kind::Arrow(Some("."))),
        "ddot" => Emit(Kind::Arrow(Some(".."))),
        "angle" | "measuredangle" => Emit(Kind::Figure("angle")),
        "triangle" => Emit(Kind::Figure("triangle")),
        "aleph" => Emit(Kind::Name { name: "aleph", style: Style::Plain }),
        "mho" => Emit(Kind::Name { name: "mho", style: Style::Plain }),
        "ker" | "dim" | "deg" | "hom" | "coker" | "sup" | "inf" => Emit(Kind::Operator(operator(name))),
        "sum" => Emit(Kind::Sum),
        "prod" => Emit(Kind::Product),
        "pi" => Emit(Kind::Constant(Constant::Pi)),
        "infty" | "infin" => Emit(Kind::Constant(Constant::Infinity)),
        "imath" => Emit(Kind::Constant(Constant::I)),
        "cdot" | "times" | "ast" | "centerdot" => Emit(Kind::Times),
        "div" => Emit(Kind::Divide),
        "over" => Emit(Kind::Over),
        "choose" => Emit(Kind::Choose),
        "pm" => Emit(Kind::PlusMinus),
        "mp" => Emit(Kind::MinusPlus),
        "lbrace" => Emit(Kind::Open(Bracket::Curly)),
        "rbrace" => Emit(Kind::Close(Bracket::Curly)),
        "lparen" => Emit(Kind::Open(Bracket::Round)),
        "rparen" => Emit(Kind::Close(Bracket::Round)),
        "lbrack" => Emit(Kind::Open(Bracket::Square)),
        "rbrack" => Emit(Kind::Close(Bracket::Square)),
        "lfloor" => Emit(Kind::Open(Bracket::Floor)),
        "rfloor" => Emit(Kind::Close(Bracket::Floor)),
        "lceil" => Emit(Kind::Open(Bracket::Ceil)),
        "rceil" => Emit(Kind::Close(Bracket::Ceil)),
        "langle" => Emit(Kind::Open(Bracket::Angle)),
        "rangle" => Emit(Kind::Close(Bracket::Angle)),
        "lvert" => Emit(Kind::Open(Bracket::Abs)),
        "rvert" => Emit(Kind::Close(Bracket::Abs)),
        "lVert" => Emit(Kind::Open(Bracket::Norm)),
        "rVert" => Emit(Kind::Close(Bracket::Norm)),
        "vert" => Emit(Kind::Bar),
        "mid" => Emit(Kind::Mid),
        "circ" => Emit(Kind::Circ),
        "degree" | "degrees" | "textdegree" => Emit(Kind::Degree),
        "prime" => Emit(Kind::Prime),
        "colon" => Emit(Kind::Colon),
        "ldots" | "dots" | "cdots" | "dotsc" | "dotsb" | "textellipsis" | "ddots" | "vdots" => Emit(Kind::Ellipsis),
        "land" | "wedge" => Emit(Kind::And),
        "lor" | "vee" => Emit(Kind::Or),
        "cup" | "bigcup" => Emit(Kind::Cup),
        "cap" | "bigcap" => Emit(Kind::Cap),
        "setminus" | "backslash" | "smallsetminus" => Emit(Kind::SetMinus),
        "emptyset" | "varnothing" | "oslash" | "O" => Emit(Kind::EmptySet),
        "R" | "reals" | "Reals" => Emit(Kind::NamedSet(NamedSet::Reals)),
        "Z" | "integers" => Emit(Kind::NamedSet(NamedSet::Integers)),
        "N" | "naturals" => Emit(Kind::NamedSet(NamedSet::Naturals)),
        "Q" => Emit(Kind::NamedSet(NamedSet::Rationals)),
        "C" | "Complex" => Emit(Kind::NamedSet(NamedSet::Complexes)),
        "bmod" | "mod" => Emit(Kind::Mod),
        "pmod" | "pod" => Emit(Kind::PMod),
        "top" | "intercal" => Emit(Kind::Top),
        "euro" | "texteuro" => Emit(Kind::Currency("EUR")),
        "pounds" | "textsterling" => Emit(Kind::Currency("GBP")),
        "yen" | "textyen" => Emit(Kind::Currency("JPY")),
        "rupee" => Emit(Kind::Currency("INR")),
        "textdollar" => Emit(Kind::Currency("USD")),
        "quad" | "qquad" | "space" | "thinspace" | "nobreakspace" | "enspace" | "medspace" | "par" | "newline" => Space,
        "displaystyle" | "textstyle" | "scriptstyle" | "scriptscriptstyle" | "limits" | "nolimits" | "big" | "Big"
        | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr" | "biggl" | "biggr" | "Biggl" | "Biggr" | "bigm"
        | "hline" | "rm" | "bf" | "it" | "sf" | "tt" | "cal" | "normalfont" | "bfseries" | "em" | "large" | "Large"
        | "huge" | "Huge" | "small" | "tiny" | "normalsize" | "boldmath" | "unboldmath" | "nonumber" | "noindent"
        | "num" | "negthinspace" | "therefore" | "because" | "strut" | "mathstrut" | "centering" | "protect"
        | "cancel" => Skip,
        "color" | "textcolor" | "colorbox" | "hspace" | "vspace" | "label" | "tag" | "phantom" | "hphantom"
        | "vphantom" | "kern" | "fontsize" => SkipArgument,
        "text" | "textbf" | "textit" | "textrm" | "textsf" | "texttt" | "textnormal" | "mbox" | "hbox" | "emph"
        | "textup" | "textsc" | "intertext" => Action::Text,
        "mathrm" | "operatorname" | "rom" | "mathup" | "mathsf" | "mathtt" | "unit" | "si" => {
            Action::Font(Style::Upright)
        }
        "mathbf" | "boldsymbol" | "bm" | "pmb" | "bold" | "mathbfit" => Action::Font(Style::Bold),
        "mathit" | "mathnormal" | "mathcal" | "mathscr" | "mathfrak" | "ensuremath" | "underline" => {
            Action::Font(Style::Plain)
        }
        "boxed" | "fbox" | "framebox" => Action::Group,
        "mathbb" | "Bbb" | "mathds" => Action::Blackboard,
        "left" | "bigleft" | "mleft" => Action::Left,
        "right" | "bigright" | "mright" => Action::Right,
        "middle" => Action::Middle,
        "not" => Action::Not,
        "begin" => Action::Begin,
        "end" => Action::End,
        _ => relation(name).map_or(Emit(Kind::Unknown), |sign| Emit(Kind::Relation(sign))),
    }
}

/// The name of an operator that is known and not evaluated.
fn operator(name: &str) -> &'static str {
    ["ker", "dim", "deg", "hom", "coker", "sup", "inf"].into_iter().find(|known| *known == name).unwrap_or("operator")
}

/// Commands that are not read, or are words of their own, and begin like one that is read.
const NOT_READ: [&str; 28] = [
    "int", "iint", "iiint", "oint", "partial", "nabla", "infer", "limsup", "liminf", "lim", "notag", "parbox",
    "inline", "section", "neg", "dotfill", "mathop", "let", "get", "gets", "new", "net", "toc", "trans", "Ref", "ref",
    "leads", "inj",
];

/// The command that a name without meaning begins with, by its length, where a variable or two are glued to it: `\leqx`,
/// `\piR`, `\timesab`. Only what has one reading: the longest known command counts, at most three letters are left (one
/// behind a relation of two letters), and no name of a command that LaTeX has is cut.
pub fn glued(name: &str) -> Option<(usize, Action)> {
    const MOST_LETTERS: usize = 3;
    const SHORTEST: usize = 2;
    let shortest = name.len().saturating_sub(MOST_LETTERS).max(SHORTEST);
    for length in (shortest..name.len()).rev() {
        let head = &name[..length];
        if NOT_READ.contains(&head) || NOT_READ.contains(&name) {
            return None;
        }
        let found = action(head);
        let known = match found {
            Action::Emit(Kind::Unknown) => continue,
            Action::Emit(Kind::Relation(_)) => length > SHORTEST || name.len() == length + 1,
            Action::Emit(Kind::Function(_) | Kind::Log(_)) => length > SHORTEST || matches!(head, "ln" | "lg" | "tg"),
            Action::Emit(
                Kind::Name { .. }
                | Kind::Constant(_)
                | Kind::Det
                | Kind::Times
                | Kind::Divide
                | Kind::PlusMinus
                | Kind::MinusPlus
                | Kind::Sqrt
                | Kind::Cup
                | Kind::Cap
                | Kind::SetMinus
                | Kind::Ellipsis
                | Kind::Circ,
            )
            | Action::Space => true,
            _ => false,
        };
        return known.then_some((length, found));
    }
    None
}

fn relation(name: &str) -> Option<Comparison> {
    Some(match name {
        "ne" | "neq" => Comparison::NotEqual,
        "lt" => Comparison::Less,
        "gt" => Comparison::Greater,
        "le" | "leq" | "leqslant" | "leqq" => Comparison::LessEqual,
        "ge" | "geq" | "geqslant" | "geqq" => Comparison::GreaterEqual,
        "in" | "isin" => Comparison::In,
        "notin" => Comparison::NotIn,
        "subset" | "subseteq" | "subsetneq" => Comparison::Subset,
        "approx" | "simeq" | "doteq" | "cong" | "thickapprox" => Comparison::Approx,
        "equiv" => Comparison::Identical,
        "sim" | "propto" => Comparison::Similar,
        "parallel" => Comparison::Parallel,
        "perp" | "bot" => Comparison::Perpendicular,
        "to" | "rightarrow" | "longrightarrow" | "mapsto" | "Rightarrow" | "Longrightarrow" | "implies" | "iff"
        | "Leftrightarrow" | "Longleftrightarrow" => Comparison::To,
        "coloneqq" => Comparison::Equal,
        _ => return None,
    })
}

/// The opposite of a relation behind `\not`.
pub fn denied(sign: Comparison) -> Option<Comparison> {
    match sign {
        Comparison::Equal => Some(Comparison::NotEqual),
        Comparison::In => Some(Comparison::NotIn),
        Comparison::Less => Some(Comparison::GreaterEqual),
        Comparison::Greater => Some(Comparison::LessEqual),
        _ => None,
    }
}

/// The functions by their LaTeX and their plain names, sorted by name.
const FUNCTIONS: [(&str, Kind<'static>); 71] = [
    ("Arg", Kind::Function(Function::Arg)),
    ("Im", Kind::Function(Function::Im)),
    ("Re", Kind::Function(Function::Re)),
    ("Tr", Kind::Function(Function::Trace)),
    ("acos", Kind::Function(Function::Arccos)),
    ("acosh", Kind::Function(Function::Arcosh)),
    ("acot", Kind::Function(Function::Arccot)),
    ("acoth", Kind::Function(Function::Arcoth)),
    ("acsc", Kind::Function(Function::Arccsc)),
    ("acsch", Kind::Function(Function::Arcsch)),
    ("arccos", Kind::Function(Function::Arccos)),
    ("arccosh", Kind::Function(Function::Arcosh)),
    ("arccot", Kind::Function(Function::Arccot)),
    ("arccoth", Kind::Function(Function::Arcoth)),
    ("arccsc", Kind::Function(Function::Arccsc)),
    ("arccsch", Kind::Function(Function::Arcsch)),
    ("arcctg", Kind::Function(Function::Arccot)),
    ("arcosh", Kind::Function(Function::Arcosh)),
    ("arcoth", Kind::Function(Function::Arcoth)),
    ("arcsch", Kind::Function(Function::Arcsch)),
    ("arcsec", Kind::Function(Function::Arcsec)),
    ("arcsech", Kind::Function(Function::Arsech)),
    ("arcsin", Kind::Function(Function::Arcsin)),
    ("arcsinh", Kind::Function(Function::Arsinh)),
    ("arctan", Kind::Function(Function::Arctan)),
    ("arctanh", Kind::Function(Function::Artanh)),
    ("arctg", Kind::Function(Function::Arctan)),
    ("arg", Kind::Function(Function::Arg)),
    ("arsech", Kind::Function(Function::Arsech)),
    ("arsinh", Kind::Function(Function::Arsinh)),
    ("artanh", Kind::Function(Function::Artanh)),
    ("asec", Kind::Function(Function::Arcsec)),
    ("asech", Kind::Function(Function::Arsech)),
    ("asin", Kind::Function(Function::Arcsin)),
    ("asinh", Kind::Function(Function::Arsinh)),
    ("atan", Kind::Function(Function::Arctan)),
    ("atanh", Kind::Function(Function::Artanh)),
    ("cis", Kind::Function(Function::Cis)),
    ("conj", Kind::Function(Function::Conj)),
    ("cos", Kind::Function(Function::Cos)),
    ("cosec", Kind::Function(Function::Csc)),
    ("cosh", Kind::Function(Function::Cosh)),
    ("cot", Kind::Function(Function::Cot)),
    ("cotan", Kind::Function(Function::Cot)),
    ("coth", Kind::Function(Function::Coth)),
    ("csc", Kind::Function(Function::Csc)),
    ("csch", Kind::Function(Function::Csch)),
    ("ctg", Kind::Function(Function::Cot)),
    ("det", Kind::Det),
    ("exp", Kind::Function(Function::Exp)),
    ("gcd", Kind::Function(Function::Gcd)),
    ("lb", Kind::Log(Some(2))),
    ("lcm", Kind::Function(Function::Lcm)),
    ("lg", Kind::Log(Some(10))),
    ("ln", Kind::Function(Function::Ln)),
    ("log", Kind::Log(None)),
    ("max", Kind::Function(Function::Max)),
    ("min", Kind::Function(Function::Min)),
    ("rank", Kind::Function(Function::Rank)),
    ("real", Kind::Function(Function::Re)),
    ("sec", Kind::Function(Function::Sec)),
    ("sech", Kind::Function(Function::Sech)),
    ("sgn", Kind::Function(Function::Sgn)),
    ("sign", Kind::Function(Function::Sgn)),
    ("sin", Kind::Function(Function::Sin)),
    ("sinh", Kind::Function(Function::Sinh)),
    ("tan", Kind::Function(Function::Tan)),
    ("tanh", Kind::Function(Function::Tanh)),
    ("tg", Kind::Function(Function::Tan)),
    ("tr", Kind::Function(Function::Trace)),
    ("trace", Kind::Function(Function::Trace)),
];

/// Greek letters but π, which is a constant; sorted.
const GREEK: [&str; 35] = [
    "Delta", "Gamma", "Lambda", "Omega", "Phi", "Pi", "Psi", "Sigma", "Theta", "Upsilon", "Xi", "alpha", "beta", "chi",
    "delta", "ell", "epsilon", "eta", "gamma", "hbar", "iota", "kappa", "lambda", "mu", "nu", "omega", "phi", "psi",
    "rho", "sigma", "tau", "theta", "upsilon", "xi", "zeta",
];

const FUNCTION_KEYS: [u64; FUNCTIONS.len()] = {
    let mut keys = [0; FUNCTIONS.len()];
    let mut at = 0;
    while at < keys.len() {
        keys[at] = key(FUNCTIONS[at].0.as_bytes());
        at += 1;
    }
    keys
};

const GREEK_KEYS: [u64; GREEK.len()] = {
    let mut keys = [0; GREEK.len()];
    let mut at = 0;
    while at < keys.len() {
        keys[at] = key(GREEK[at].as_bytes());
        at += 1;
    }
    keys
};

/// The first eight bytes as a number that sorts as they do: every word of a text is looked up here, several times.
const fn key(name: &[u8]) -> u64 {
    let mut key = 0;
    let mut at = 0;
    while at < 8 {
        key = key << 8 | if at < name.len() { name[at] as u64 } else { 0 };
        at += 1;
    }
    key
}

/// The function of a LaTeX or a plain name.
pub fn function(name: &str) -> Option<Kind<'static>> {
    let (known, kind) = FUNCTIONS[FUNCTION_KEYS.binary_search(&key(name.as_bytes())).ok()?];
    (known == name).then_some(kind)
}

/// The name of a Greek letter; variants under one name.
pub fn greek(name: &str) -> Option<&'static str> {
    let plain = name.strip_prefix("var").unwrap_or(name);
    let known = GREEK[GREEK_KEYS.binary_search(&key(plain.as_bytes())).ok()?];
    (known == plain).then_some(known)
}

/// Whether the name of a function or a Greek letter begins with these two letters.
pub fn begins_name(start: &str) -> bool {
    let first = key(start.as_bytes());
    let begins =
        |keys: &[u64]| keys.get(keys.partition_point(|key| *key < first)).is_some_and(|key| key ^ first < 1 << 48);
    start == "va" || begins(&FUNCTION_KEYS) || begins(&GREEK_KEYS)
}

/// The set that a blackboard letter names.
pub fn blackboard(letter: char) -> Option<NamedSet> {
    Some(match letter {
        'N' => NamedSet::Naturals,
        'Z' => NamedSet::Integers,
        'Q' => NamedSet::Rationals,
        'R' => NamedSet::Reals,
        'C' => NamedSet::Complexes,
        'P' => NamedSet::Primes,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted() {
        // Different in their first eight bytes.
        assert!(FUNCTION_KEYS.is_sorted_by(|a, b| a < b));
        assert!(GREEK_KEYS.is_sorted_by(|a, b| a < b));
        assert_eq!((function("sin"), function("sine")), (Some(Kind::Function(Function::Sin)), None));
        assert_eq!((greek("varphi"), greek("pi")), (Some("phi"), None));
        assert!(begins_name("ar") && begins_name("ep") && begins_name("va") && !begins_name("hy"));
    }
}
