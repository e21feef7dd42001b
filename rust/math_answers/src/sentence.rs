//! Where a sentence, or a statement whose left side cannot be read, says its value; words that deny or limit it.

use super::ast::Comparison;
use super::lexer::token::{Kind, Token};
use super::word;
use crate::characters::is_ideograph;

/// What stands right of the one `is`, `are` or `equals` of a sentence: `The number of edges of a graph with 10 vertices is
/// 19`. None where a condition, an alternative or a denial stands in the sentence, or the left side says nothing in words.
pub(super) fn value(text: &str) -> Option<&str> {
    if let Some(value) = after_chinese_copula(text) {
        return Some(value);
    }
    const COPULAS: [&str; 5] = ["is", "are", "equals", "was", "were"];
    const DOUBTS: [&str; 24] = [
        "if", "when", "where", "whether", "because", "since", "unless", "not", "or", "but", "either", "neither", "nor",
        "than", "between", "maybe", "perhaps", "possibly", "least", "most", "except", "isn", "what", "which",
    ];
    let mut found = None;
    let mut words = 0;
    // Braces and dollars: the words of a formula are none of the sentence.
    let (mut depth, mut math, mut at) = (0i32, false, 0);
    while let Some(c) = text[at..].chars().next() {
        let length = c.len_utf8();
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            '$' => math = !math,
            '\\' => at += text[at + 1..].chars().next().map_or(0, char::len_utf8),
            c if c.is_alphabetic() => {
                let run = text[at..].find(|c: char| !c.is_alphabetic()).unwrap_or(text.len() - at);
                let run_text = &text[at..at + run];
                at += run;
                if depth != 0 || math {
                    continue;
                }
                let is = |known: &&str| known.eq_ignore_ascii_case(run_text);
                if DOUBTS.iter().any(is) {
                    return None;
                }
                if COPULAS.iter().any(is) {
                    if found.is_some() {
                        return None;
                    }
                    found = Some(at);
                }
                words += usize::from(found.is_none() && run_text.chars().count() > 1);
                continue;
            }
            _ => {}
        }
        at += length;
    }
    let value = text.get(found?..)?.trim();
    (words > 0 && !value.is_empty()).then_some(value)
}

/// What follows 是, 为, 等于 or 有 where only Chinese words precede it: 答案是99.
fn after_chinese_copula(text: &str) -> Option<&str> {
    let words = text.find(|c: char| !is_ideograph(c))?;
    let start = ["等于", "是", "为", "有"].iter().find_map(|verb| {
        let at = text[..words].rfind(verb)? + verb.len();
        (at == words).then_some(at)
    })?;
    text.get(start..)
}

/// The sides of each `=` or `≈` outside of brackets, from the first: the text before it, and behind it. None past anything
/// that lists, compares or joins statements, so that no hedge hides in a left side.
pub(super) fn sides<'t, 'a>(text: &'t str, tokens: &'a [Token<'t>]) -> impl Iterator<Item = (&'t str, &'t str)> + 'a {
    let mut depth = 0i32;
    let mut clear = true;
    let says = move |token: &Token<'t>| match token.kind {
        Kind::Word(word) => {
            !word::is_function_word(word) || matches!(word, "and" | "or" | "per" | "in" | "a" | "an" | "of" | "to")
        }
        _ => true,
    };
    tokens.iter().enumerate().filter_map(move |(at, token)| {
        match token.kind {
            Kind::Open(_) | Kind::Begin(_) => depth += 1,
            Kind::Close(_) | Kind::End(_) => depth -= 1,
            _ if depth != 0 => {}
            Kind::Comma | Kind::Semicolon | Kind::And | Kind::Or | Kind::Newline | Kind::Question => clear = false,
            Kind::Word(word) if ["or", "and"].iter().any(|known| known.eq_ignore_ascii_case(word)) => clear = false,
            Kind::Relation(Comparison::Equal | Comparison::Approx) => {
                let right = &tokens[at + 1..];
                if clear && at > 0 && !right.is_empty() && right.iter().all(says) {
                    return Some((text.get(..token.start)?, text.get(token.end..)?));
                }
            }
            Kind::Relation(Comparison::To) => {}
            Kind::Relation(_) => clear = false,
            _ => {}
        }
        None
    })
}

/// Words that deny, weaken or set limits: a formula beside them is not what the text says.
#[must_use]
pub fn denies(word: &str) -> bool {
    const WORDS: [&str; 28] = [
        "false",
        "wrong",
        "incorrect",
        "unlikely",
        "not",
        "no",
        "never",
        "cannot",
        "isn",
        "than",
        "least",
        "most",
        "except",
        "but",
        "unless",
        "without",
        "neither",
        "nor",
        "either",
        "or",
        "if",
        "maybe",
        "perhaps",
        "possibly",
        "between",
        "whether",
        "below",
        "above",
    ];
    WORDS.iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// Words for some of the numbers that an inequality about this letter holds for: `all even integers k ≥ 2` is not `k ≥ 2`. The
/// letters i to n are integers anyway.
#[must_use]
pub fn restricts(word: &str, letter: Option<char>) -> bool {
    if matches!(letter, Some('i'..='n')) && matches!(word, "integer" | "integers") {
        return false;
    }
    const WORDS: [&str; 22] = [
        "even",
        "odd",
        "prime",
        "primes",
        "integer",
        "integers",
        "natural",
        "naturals",
        "whole",
        "rational",
        "rationals",
        "irrational",
        "composite",
        "multiple",
        "multiples",
        "square",
        "squares",
        "power",
        "powers",
        "positive",
        "negative",
        "divisible",
    ];
    WORDS.iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// Whether the words before a formula make another value of it: `half of`, `minus`, `integers in`. Of the nouns with `of`
/// only those state a value that are measured or counted: `an area of`, but not `the derivative of`.
pub(super) fn operates(before: &str) -> bool {
    const NEXT_TO: [&str; 14] = [
        "minus", "negative", "twice", "double", "triple", "thrice", "outside", "after", "before", "plus", "times",
        "from", "almost", "nearly",
    ];
    const MEASURED: [&str; 52] = [
        "total",
        "value",
        "values",
        "area",
        "volume",
        "length",
        "width",
        "height",
        "depth",
        "distance",
        "speed",
        "velocity",
        "rate",
        "cost",
        "price",
        "profit",
        "loss",
        "probability",
        "chance",
        "maximum",
        "minimum",
        "max",
        "min",
        "answer",
        "result",
        "score",
        "average",
        "mean",
        "median",
        "age",
        "weight",
        "mass",
        "perimeter",
        "circumference",
        "radius",
        "diameter",
        "angle",
        "slope",
        "time",
        "period",
        "range",
        "domain",
        "interval",
        "form",
        "amount",
        "fraction",
        "percentage",
        "ratio",
        "difference",
        "sum",
        "solution",
        "equation",
    ];
    const NEAR: [&str; 8] = ["close", "proportional", "opposite", "perpendicular", "parallel", "next", "similar", "up"];
    let one_of = |known: &[&str], word: &str| known.iter().any(|known| known.eq_ignore_ascii_case(word));
    let before = before.trim_end_matches(['$', '\\', '(', '[', ' ']);
    if before.ends_with(|c: char| !c.is_alphabetic()) {
        return false;
    }
    let mut words = before.rsplit(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    let (last, previous) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    match last {
        "of" => !one_of(&MEASURED, previous),
        "to" => one_of(&NEAR, previous),
        "by" => one_of(&["divisible", "divided", "multiplied"], previous),
        "in" => restricts(previous, None),
        _ => one_of(&NEXT_TO, last),
    }
}

/// The amount of a sentence that states one: `6 marbles left` of `Tom has 6 marbles left`. A verb such as `has` or `costs`
/// stands before the only number, and no word denies or weakens it or is another number.
#[must_use]
pub fn amount(text: &str) -> Option<&str> {
    const LONGEST: usize = 160;
    const STATES: &str = "has have had need needs needed take takes took get gets got make makes made earn earns earned pay \
        pays paid cost costs spend spends spent save saves saved sell sells sold buy buys bought use uses used eat eats ate \
        give gives gave receive receives received contain contains require requires required weigh weighs collects \
        collected owes exactly only";
    const WEAKENS: &str = "each every about around over under more less fewer another other others extra twice double triple \
        dozen dozens pair pairs couple score when where while which would could should might may";
    const TAILS: [&str; 10] =
        [" in total", " in all", " in the ", " on ", " for ", " of ", " from ", " with ", " at ", " altogether"];
    let text = text.trim();
    let formula = ['\\', '=', '+', '*', '/', '^', '_', '<', '>', '(', '[', '{', '?', ':', ';'];
    if text.len() > LONGEST || text.contains(formula) || text.contains("n't") || text.contains("n’t") {
        return None;
    }
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let digits = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let end = text[start..].find(|c| !digits(c)).map_or(text.len(), |length| start + length);
    let amount = text[..start].strip_suffix('$').map_or(start, str::len);
    let (before, behind) = (text[..amount].strip_suffix(' ')?, &text[end..]);
    let clear = behind.is_empty() || behind.starts_with([' ', '%']);
    let alone = clear && !behind.contains(|c: char| c.is_ascii_digit() || c == '$');
    let is = |known: &str, word: &str| known.split_ascii_whitespace().any(|known| known.eq_ignore_ascii_case(word));
    let changes = |word: &str| {
        denies(word)
            || is(WEAKENS, word)
            || word::small_number(word).is_some()
            || word::magnitude(word).is_some()
            || word::part(word).is_some()
    };
    let mut words = [before, behind].into_iter().flat_map(|part| part.split(|c: char| !c.is_alphabetic()));
    let stated = is(STATES, before.rsplit(|c: char| !c.is_alphabetic()).next()?) && !words.any(changes);
    // `15 dollars in total`; what follows a `per` belongs to the unit.
    let tail = TAILS.iter().filter_map(|tail| behind.find(tail)).min().unwrap_or(behind.len());
    (alone && stated).then(|| &text[amount..end + tail])
}

/// Prose with one comparison in it, spelled as text: `all integers $k \geq 2$` is `all integers k ge 2`. None where there is
/// more than that.
#[must_use]
pub fn compared(text: &str) -> Option<String> {
    const LONGEST: usize = 96;
    const SIGNS: [(&str, &str); 14] = [
        ("\\geqslant", " ge "),
        ("\\geq", " ge "),
        ("\\ge", " ge "),
        (">=", " ge "),
        ("\\leqslant", " le "),
        ("\\leq", " le "),
        ("\\le", " le "),
        ("<=", " le "),
        ("\\neq", " ne "),
        ("\\ne", " ne "),
        ("\\gt", " gt "),
        ("\\lt", " lt "),
        (">", " gt "),
        ("<", " lt "),
    ];
    if text.len() > LONGEST {
        return None;
    }
    let (at, (sign, spelled)) = (0..text.len())
        .filter(|at| text.is_char_boundary(*at))
        .find_map(|at| Some((at, SIGNS.iter().find(|(sign, _)| text[at..].starts_with(sign))?)))?;
    let rest = &text[at + sign.len()..];
    if sign.starts_with('\\') && rest.starts_with(char::is_alphabetic) {
        return None;
    }
    let out = [&text[..at], spelled, rest].concat().replace('$', " ");
    (!out.contains(['\\', '<', '>', '=', '^', '_', '{'])).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_with_their_value() {
        for (text, expected) in [
            ("The maximum number of edges in a graph with 10 vertices is 19", Some("19")),
            ("The area of $ABC$ with $x = 3$ equals $\\frac{1}{2}$", Some("$\\frac{1}{2}$")),
            ("The answer is 5 if x is 3", None),
            ("The number of 3s is 5 or 6", None),
            ("The number of 3s is not 5", None),
            ("5 is 6", None),
            ("答案是99", Some("99")),
            ("答案不99", None),
            ("The value of 3x is 4 and of 5x is 6", None),
        ] {
            assert_eq!(value(text), expected, "{text}");
        }
    }

    #[test]
    fn a_sentence_may_state_one_amount() {
        for (text, expected) in [
            ("Tom has 6 marbles left", Some("6 marbles left")),
            ("He paid $15 in total", Some("$15")),
            ("she spent 40 dollars on food", Some("40 dollars")),
            ("she earns 40 dollars per hour", Some("40 dollars per hour")),
            ("she earns 40 dollars each", None),
            ("we need 1,200 apples", Some("1,200 apples")),
            ("Tom has 6 of the 12 marbles", None),
            ("Tom does not have 6 marbles", None),
            ("Tom has 6 dozen marbles", None),
            ("Tom has 6 more marbles", None),
            ("Tom has two bags and needs 6 marbles", None),
            ("Step 6 shows it", None),
            ("it takes 6-8 hours", None),
            ("she has 3rd place", None),
        ] {
            assert_eq!(amount(text), expected, "{text}");
        }
    }

    #[test]
    fn words_before_a_formula_may_make_another_value_of_it() {
        for before in ["half of $", "It is the derivative of ", "minus ", "integers in \\(", "far from ", "close to "] {
            assert!(operates(before), "{before}");
        }
        for before in ["", "The area of the square is ", "half of them, so ", "The square has the area ", "a total of "]
        {
            assert!(!operates(before), "{before}");
        }
    }
}
