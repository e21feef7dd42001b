//! Properties of the math verdict: what rewriting leaves alone, and what a small change breaks.

use math_answers::answer::compare;
use math_answers::compare::Options;
use math_answers::equality::Equality;
use proptest::prelude::*;

/// The values alone: an answer may leave arithmetic to do.
fn verdict(gold: &str, answer: &str) -> Equality {
    compare(gold, answer, &Options { unevaluated_ok: true, ..Options::default() })
}

/// Equal by the house rules, each pair by hand; tests/unit/test_math_answer.py has more.
const EQUAL: &[(&str, &str)] = &[
    ("x+y=0", "2x=-2y"),
    ("x-y=3", "2x=2y+6"),
    (r"(\pm 1,\mp 2)", "(1,-2),(-1,2)"),
    (r"x+\pi y>0", r"-x-\pi y<0"),
    ("x+y>1", "-x-y<-1"),
    ("x+y>1", "2x>2-2y"),
    ("(2,3)", r"(1,1)\cup(2,3)"),
    (r"x^2+y^2\le 4", r"4\ge y^2+x^2"),
    ("0.5", "1/2"),
    (r"\frac12", "0.50"),
    ("1234", "1{,}234"),
    (r"1<x\le 3", "(1,3]"),
    ("|x|<2", "(-2,2)"),
    ("x = 5", "5"),
    ("f(x)=x^2", "x^2"),
    ("y=2x+1", "2x-y+1=0"),
    (r"x=1\pm\sqrt2", r"1+\sqrt{2}, 1-\sqrt{2}"),
    (r"\pm 3", "3, -3"),
    (r"\cos 60^\circ", "1/2"),
    (r"60^\circ", "60"),
    (r"\frac{\pi}{3}", r"60^\circ"),
    (r"5\text{ cm}", "5"),
    ("52_8", "42"),
    (r"3\frac12", "7/2"),
    ("2^{2024}", "4^{1012}"),
    (r"\log_2 8", "3"),
    (r"\lg 100", "2"),
    (r"\sin 2x", r"2\sin x\cos x"),
    ("(1+i)^2", "2i"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    ("2:4", "1:2"),
    ("1,2", r"\{2,1\}"),
    ("(1,2)", "(1,2)"),
    (r"(3,\infty)\cup(-\infty,1)", r"(-\infty,1)\cup(3,\infty)"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\langle 1,2\rangle"),
    (r"\binom{5}{2}", "10"),
    ("-2x<4", "x>-2"),
    (r"x^2-5x+6\ge 0", r"(-\infty,2]\cup[3,\infty)"),
    ("x=1, y=2", "(1,2)"),
    ("x=1,y=2", "y=2, x=1"),
    (r"\text{Yes}", "yes"),
    ("B", r"\text{B}"),
    (r"\$5", "5"),
    (r"-\frac{1}{2}", "-0.5"),
    ("10^{-20}", "0.00000000000000000001"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("123,456,789", "123456789"),
    ("1, 2, 3", "x = 1, x = 2, x = 3"),
    ("2,3", r"x \in \{2,3\}"),
    (r"\emptyset", r"\{\}"),
    ("5", "2+3=5"),
    ("5", r"\boxed{5}"),
    (r"\frac{1}{2}\ln 4", r"\ln 2"),
    (r"\tan x", r"\frac{\sin x}{\cos x}"),
    ("√2/2", r"\frac{\sqrt{2}}{2}"),
    ("−3", "-3"),
    ("90°", r"\frac{\pi}{2}"),
    (r"-\infty", r"-\infty"),
    (r"\frac{1}{x+1}+\frac{1}{x-1}", r"\frac{2x}{x^2-1}"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\gcd(12,18)", "6"),
    ("i^2", "-1"),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36"),
    ("x > 2", "2 < x"),
    ("1:2:3", "2:4:6"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    (r"\arcsin\frac12", r"\frac{\pi}{6}"),
    (r"\cot x", r"1/\tan x"),
    (r"(a,\infty)", "x>a"),
    ("1:2", "1/2"),
    (r"A \text{ and } C", "A, C"),
    (r"x\in(1,2)", "(1,2)"),
    (r"k=\pm 2", "k=2, -2"),
    ("x^2+x+1=0", "2x^2+2x+2=0"),
    ("2x", r"\frac{dy}{dx}=2x"),
    ("5", "a+b=5"),
    (r"\frac{1}{2}", r"P(A)=\frac12"),
    (r"60^\circ", r"\angle ABC=60^\circ"),
    (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
    (r"x\in(-\infty,1]\cup[2,\infty)", r"(-\infty,1]\cup[2,\infty)"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"),
    (r"x\neq 0", r"\{x\mid x\neq0\}"),
    ("1<x<2", r"x>1\text{ and }x<2"),
    (r"y=\sin x", r"\sin x"),
    (r"\ln\frac{1}{2}", r"-\ln 2"),
    (r"\log_4 9", r"\log_2 3"),
    (r"\sqrt{50}", r"5\sqrt{2}"),
    (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\sin 15^\circ"),
    (r"3+\frac{1}{4}", r"3\frac{1}{4}"),
    (r"\frac{22}{7}", r"3\frac{1}{7}"),
    ("0.1", r"10\%"),
    (r"\text{June 20}", "June 20"),
    (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    (r"\begin{pmatrix}-1/2\\3\end{pmatrix}", r"\begin{pmatrix}-0.5\\3\end{pmatrix}"),
    (r"\frac{-1+i\sqrt{3}}{2}", r"e^{2\pi i/3}"),
    ("3-4i", "3 - 4 i"),
    ("|3+4i|", "5"),
    ("(x-1)(x-2)", "x^2-3x+2"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\frac{n!}{(n-2)!}", "n(n-1)"),
    (r"\binom{10}{3}", "120"),
    (r"\pm\sqrt{2}", r"\sqrt2,-\sqrt2"),
    ("x=-2,2", r"\pm2"),
    (r"\frac{1}{2},-3", r"\left\{-3,0.5\right\}"),
    (r"\textbf{(C)}", "C"),
    ("(C)", "C"),
    (r"15\text{ cm}^2", r"15\,\mathrm{cm}^2"),
    ("12.50", r"\$12.50"),
    (r"\frac{\pi}{4}", r"45^\circ"),
    ("1011_2", "11"),
    (r"4\sqrt{3}\pi", r"4\pi\sqrt{3}"),
    (r"\sec^2x-\tan^2x", "1"),
    (r"\cosh^2x-\sinh^2x", "1"),
    (r"\arccos(-1)", r"\pi"),
    (r"\sin^{-1}(1/2)", r"\pi/6"),
    (r"e^{\ln 5}", "5"),
    (r"2^{\log_2 7}", "7"),
    (r"\{(0,0),(1,1)\}", "(1,1),(0,0)"),
    (r"x=0, y=0 \text{ or } x=1,y=1", "(0,0),(1,1)"),
    ("a=1,b=2,c=3", "(1,2,3)"),
    (r"k\geq 4", r"[4,\infty)"),
    ("[-1,1]", r"-1\leq y\leq 1"),
    (r"\left[\frac{1}{2},\infty\right)", r"[0.5,\infty)"),
    (r"y=-\frac{2}{3}x+4", "2x+3y=12"),
    ("x^2+y^2-4x=0", "(x-2)^2+y^2=4"),
    (r"r=2\cos\theta", r"r = 2 \cos(\theta)"),
    ("3:4:5", "6:8:10"),
    (".5", r"\frac{1}{2}"),
    ("1{,}000", "1000"),
    ("x", "1x"),
    ("xy", "yx"),
    (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}"),
    (r"\max(3,5)", "5"),
    (r"\lceil 2.1\rceil", "3"),
    (r"n\equiv 3\pmod 7", r"3 \pmod 7"),
    (r"0.9999\ldots", r"0.9999\ldots"),
    (r"\frac{2^{100}}{2^{98}}", "4"),
    (r"x\le 5", r"5\ge x"),
    (r"-3<2x+1\le 7", "(-2,3]"),
    (r"|x-3|\ge 2", r"(-\infty,1]\cup[5,\infty)"),
    (r"x^2\ge 0", r"\mathbb{R}"),
    ("x^2-2<0", r"(-\sqrt2,\sqrt2)"),
    ("(x-1)^2=4", "x^2-2x-3=0"),
    (r"\text{odd}", r"\text{odd}"),
    ("x^{1/2}", r"\sqrt{x}"),
    (r"\frac{x+y}{xy}", r"\frac1x+\frac1y"),
    (r"\frac{1-\cos 2x}{2}", r"\sin^2x"),
    (r"\log_3(x)", r"\frac{\ln x}{\ln 3}"),
    (r"\frac{1}{2}\ln|\frac{x-1}{x+1}|", r"\frac{1}{2}(\ln|x-1|-\ln|x+1|)"),
    (r"\sqrt[3]{x^2}", "x^{2/3}"),
    (r"\cos n\pi", "(-1)^n"),
    (r"k\pi, k\in\mathbb{Z}", r"n\pi, n\in\mathbb{Z}"),
    ("f(x)=x^2", "f(t)=t^2"),
    (r"2 \text{ and } 3", "3, 2"),
    (r"\text{none}", r"\text{None}"),
    (r"x=3,\ y=4,\ z=5", "(3,4,5)"),
    (r"\mathbf{i}+2\mathbf{j}", r"\mathbf{i}+2\mathbf{j}"),
    ("10^{10^{10}}+1", "1+10^{10^{10}}"),
    ("A", "(A) 5"),
    ("5", "(A) 5"),
    ("x", "(A) x"),
    ("f(x) = x^2", "f(x) = x^2 for all x"),
    ("f(x, y) = xy", "f(x, y) = xy for all x, y"),
];

/// Different: near misses, other shapes, hedges, restatements, and what has no value.
const DIFFERENT: &[(&str, &str)] = &[
    ("x=5", "2x=10"),
    ("x>2", "2x-4>0"),
    ("(-2,2)", "x^2<4"),
    (r"(\pm 1,\mp 2)", "(1,2),(-1,-2)"),
    (r"x+\pi y>0", r"-x-\pi y>0"),
    ("x+y>1", "-x-y>-1"),
    ("x+y>1", "x+y<1"),
    ("1,2", "1,2,3"),
    (r"x^2+y^2\le 4", r"x^2+y^2\ge 4"),
    ("(2,3)", r"[1,1]\cup(2,3)"),
    ("x+y=1", "x+y=x+y"),
    ("1/3", "0.33"),
    (r"\pi", "3.14"),
    ("10^{-20}", r"2\cdot 10^{-20}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("2", "1, 2"),
    ("5", "x"),
    ("x+y=5", "0=0"),
    ("x+y=5", "x+y=6"),
    ("5", "6=5"),
    ("0", "0/0"),
    ("0", r"\infty-\infty"),
    ("(1,2)", "[1,2]"),
    ("x>2", r"x\ge 2"),
    ("x>2", "y>2"),
    (r"100\text{ cm}", "1 m"),
    (r"50\%", "50"),
    ("52_8", "52"),
    (r"\{1,2\}", "(1,2)"),
    (r"60^\circ", r"60\text{ cm}"),
    ("x^2", "x^3"),
    ("9^{9^{9^9}}", "0"),
    ("x=1,y=2", "(2,1)"),
    ("A", "B"),
    ("yes", "no"),
    ("1:2", "2:1"),
    ("[1,2]", r"\{1,2\}"),
    (r"\sqrt2", r"\sqrt2+10^{-400}"),
    (r"(-\infty,1)\cup(3,\infty)", r"(-\infty,1]\cup(3,\infty)"),
    ("5", "x>5"),
    ("x=5", "2x"),
    ("3", r"\pm 3"),
    ("x^2+y^2=1", "x^2+y^2=-1"),
    (r"5\text{ dollars}", r"5\text{ euros}"),
    (r"x\equiv 1\pmod 5", r"x\equiv 2\pmod 5"),
    (r"\frac{1}{x}", r"\frac{1}{x+10^{-30}}"),
    (r"\emptyset", "0"),
    (r"\ln x", r"\log_{2} x"),
    ("f(x)=2", "g(x)=3"),
    ("7", "7 or 8"),
    ("(1,2)", "1"),
    ("-x", "x"),
    ("x^2+x+1=0", "x^2+x+2=0"),
    ("x+y=5", "5"),
    ("10", "2x=10"),
    ("2x", r"\frac{dy}{dx}=3x"),
    (r"x\neq 0", r"x\neq 1"),
    ("(1,2)", "(1,2,3)"),
    ("[1,2)", r"1\le x\le2"),
    ("i", "-i"),
    ("3-4i", "3+4i"),
    (r"\sin x", r"\cos x"),
    (r"15\text{ cm}^2", r"15\text{ cm}"),
    (r"\$12.50", r"12.50\text{ euros}"),
    (r"\tan 45", "1"),
    ("x=1", "x=1,y=2"),
    ("f(x)=x+1", "f(x)=x-1"),
    (r"\mathbb{R}", r"\mathbb{Q}"),
    ("(0,0),(1,1)", "(0,0)"),
    ("2x+3", "2x+3=0"),
    ("1", "1=1=2"),
    ("x^2", "x^2+C"),
    ("7", r"7\text{ or maybe }8"),
    ("2", r"1\le x\le 3"),
    ("2", "(1,3)"),
    (r"\{2\}", r"\mathbb{N}"),
    ("x>2", r"\mathbb{R}"),
    ("2", r"\sqrt{4}\text{ or }-\sqrt4"),
    ("3", r"\lfloor x\rfloor"),
    (r"\frac{22}{7}", r"\pi"),
    (r"0.\overline{3}", "0.3333333333"),
    ("1", r"0.\overline{9}-10^{-100}"),
    ("(2,3]", "[2,3)"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("5", "5x"),
    ("24", "4"),
    ("AB", "A+B"),
    ("123", "1,2,3"),
    ("1,234", "1,2,3,4"),
    ("10", "10_2"),
    (r"\sqrt{x}+\sqrt{y}", r"\sqrt{x+y}"),
    ("(a+b)^2", "a^2+b^2"),
    (r"\sin(a+b)", r"\sin a+\sin b"),
    ("x^{-1}", "-x"),
    ("-2^2", "4"),
    ("1/2x", r"\frac{1}{3x}"),
    (r"k\pi", r"2k\pi"),
    ("A", "A, B"),
    (r"\text{yes}", r"\text{yes and no}"),
    (r"\text{Evelyn}", r"\text{Carla}"),
    (r"5 \pmod 7", r"5 \pmod 8"),
    ("0", "10^{-10^{10}}"),
    ("1", "(1+10^{-50})^{1}"),
    ("x", r"x+0\cdot\frac{1}{0}"),
    ("1", r"\frac{x-x}{x-x}"),
    ("1", "0^0"),
    // Two choices name none, in whatever order.
    ("A", "(A) (B)"),
    ("B", "(A) (B)"),
    ("A", "(B) (A)"),
    ("B", "A. B"),
    ("B", "A) option B"),
    ("B", r"\textbf{(A)}\ \textbf{(B)}"),
    ("f(x) = x^2", "f(x) = x^2 for all odd x"),
    ("x^2", "x^2 for all odd x"),
];

#[test]
fn pairs_by_hand() {
    for (gold, answer) in EQUAL {
        assert_eq!(verdict(gold, answer), Equality::Equal, "{gold} | {answer}");
    }
    for (gold, answer) in DIFFERENT {
        assert_eq!(verdict(gold, answer), Equality::Different, "{gold} | {answer}");
    }
}

/// What is written once and used many times must not be visited many times; what nests must not exhaust a stack.
#[test]
fn deep_and_shared_expressions_are_bounded() {
    let nested = |open: &str, close: &str, inner: &str| format!("{}{inner}{}", open.repeat(97), close.repeat(97));
    for (open, close) in [
        ("\\tanh(", ")"),
        ("\\sinh(", ")"),
        ("\\tan(", ")"),
        ("\\operatorname{arsinh}(", ")"),
        ("\\binom{", "}{60}"),
        ("\\binom{60}{", "}"),
        ("\\sqrt{1+", "}"),
        ("\\frac{1}{1+", "}"),
        ("|1-", "|"),
        ("(", ")^{1/3}(1+x)"),
        ("\\log_{2}(", ")"),
        ("2^{", "}"),
        ("(1,", ")"),
        ("\\{", ",1\\}"),
        ("\\max(1,", ")"),
        ("\\lfloor ", "\\rfloor"),
        ("\\sum_{k=1}^{2}(k+", ")"),
    ] {
        for inner in ["x", "\\sqrt{2}", "i", "2"] {
            for text in [nested(open, close, inner), format!("\\operatorname{{Re}}({})", nested(open, close, inner))] {
                let _ = verdict(&text, "1");
                let _ = verdict("\\sqrt[3]{2}", &text);
                let _ = verdict(&format!("{text}>1"), &format!("x>{text}"));
            }
        }
    }
}

/// A random expression, and another spelling of the same value.
#[derive(Debug, Clone)]
struct Pair {
    left: String,
    right: String,
}

fn pair(left: impl Into<String>, right: impl Into<String>) -> Pair {
    Pair { left: left.into(), right: right.into() }
}

/// Not 0: a letter with 0 in brackets, `x(0)`, is read as the value of a function.
fn rational() -> impl Strategy<Value = Pair> {
    ((-999i64..999).prop_filter("x(0)", |top| *top != 0), 1i64..99, 1i64..20).prop_flat_map(|(top, bottom, scale)| {
        prop_oneof![
            Just(pair(format!("\\frac{{{top}}}{{{bottom}}}"), format!("{}/{}", top * scale, bottom * scale))),
            Just(pair(format!("{top}"), format!("{top}.0"))),
            Just(pair(
                format!("{top}"),
                if top < 0 { format!("-\\frac{{{}}}{{{scale}}}", -top * scale) } else { format!("{top}") }
            )),
            Just(pair(format!("{}", top as f64 / 4.0), format!("\\frac{{{}}}{{8}}", 2 * top))),
        ]
    })
}

fn leaf() -> impl Strategy<Value = Pair> {
    prop_oneof![
        rational(),
        prop::sample::select(vec!["x", "y", "n", "\\pi", "\\alpha"]).prop_map(|name| pair(name, name)),
        (2u32..60).prop_map(|n| pair(format!("\\sqrt{{{n}}}"), format!("\\frac{{{n}}}{{\\sqrt{{{n}}}}}"))),
        (1u32..12).prop_map(|n| pair(format!("\\ln {}", n + 1), format!("\\frac{{1}}{{2}}\\ln {}", (n + 1) * (n + 1)))),
    ]
}

/// Sums, products and powers whose right side is expanded, commuted or written with brackets.
fn expression() -> impl Strategy<Value = Pair> {
    leaf().prop_recursive(3, 12, 2, |inner| {
        (inner.clone(), inner, 0..5u8).prop_map(|(a, b, kind)| {
            let ((l, r), (m, s)) = ((&a.left, &a.right), (&b.left, &b.right));
            match kind {
                0 => pair(format!("({l})+({m})"), format!("({s})+({r})")),
                1 => pair(format!("({l})({m})"), format!("({s})\\cdot({r})")),
                2 => pair(format!("({l}+({m}))^2"), format!("({r})^2+2({r})({s})+({s})^2")),
                3 => pair(format!("({l})-({m})"), format!("-(({s})-({r}))")),
                _ => pair(format!("({l}-({m}))({l}+({m}))"), format!("({r})^2-({s})^2")),
            }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_gold_equals_itself(Pair { left, .. } in expression()) {
        prop_assert_eq!(verdict(&left, &left), Equality::Equal);
        prop_assert_eq!(verdict(&left, &format!("({left})")), Equality::Equal);
    }

    #[test]
    fn rewriting_changes_nothing(Pair { left, right } in expression()) {
        prop_assert_eq!(verdict(&left, &right), Equality::Equal, "{} | {}", left, right);
        prop_assert_eq!(verdict(&right, &left), Equality::Equal, "{} | {}", right, left);
    }

    #[test]
    fn a_small_change_is_seen(Pair { left, right } in expression(), digits in 1u32..60) {
        let changed = format!("{right}+10^{{-{digits}}}");
        prop_assert_eq!(verdict(&left, &changed), Equality::Different, "{} | {}", left, changed);
        let scaled = format!("({right})(1+10^{{-{digits}}})+1");
        prop_assert_ne!(verdict(&left, &scaled), Equality::Equal, "{} | {}", left, scaled);
    }

    #[test]
    fn order_matters_only_in_tuples(items in prop::collection::vec(rational(), 2..6), turn in 1usize..5) {
        let left: Vec<&str> = items.iter().map(|item| item.left.as_str()).collect();
        let mut right: Vec<&str> = items.iter().map(|item| item.right.as_str()).collect();
        prop_assert_eq!(verdict(&format!("({})", left.join(", ")), &format!("({})", right.join(", "))), Equality::Equal);
        right.rotate_left(turn % items.len());
        prop_assert_eq!(verdict(&left.join(", "), &right.join(", ")), Equality::Equal);
        let sets = (format!("\\{{{}\\}}", left.join(", ")), format!("\\{{{}\\}}", right.join(", ")));
        prop_assert_eq!(verdict(&sets.0, &sets.1), Equality::Equal);
        let one_off = format!("{}, {}", right[1..].join(", "), "1000000");
        prop_assert_eq!(verdict(&left.join(", "), &one_off), Equality::Different);
    }

    #[test]
    fn intervals_and_inequalities_say_the_same(low in -50i64..50, width in 1i64..50, closed: (bool, bool), scale in 1i64..9) {
        let high = low + width;
        let interval = format!("{}{low}, {high}{}", if closed.0 { '[' } else { '(' }, if closed.1 { ']' } else { ')' });
        let sign = |closed: bool| if closed { "\\le" } else { "<" };
        let chain = format!("{} {} {scale}x {} {}", low * scale, sign(closed.0), sign(closed.1), high * scale);
        prop_assert_eq!(verdict(&interval, &chain), Equality::Equal, "{} | {}", interval, chain);
        prop_assert_eq!(verdict(&chain, &interval), Equality::Equal, "{} | {}", interval, chain);
        let other = format!("{}{low}, {high}{}", if closed.0 { '(' } else { '[' }, if closed.1 { ']' } else { ')' });
        prop_assert_eq!(verdict(&chain, &other), Equality::Different, "{} | {}", chain, other);
    }

    #[test]
    fn equations_are_the_same_up_to_a_factor(a in 1i64..9, b in 1i64..9, c in -9i64..9, factor in 2i64..9) {
        let gold = format!("{a}x+({b})y={c}");
        let scaled = format!("{}x = {}-({})y", a * factor, c * factor, b * factor);
        prop_assert_eq!(verdict(&gold, &scaled), Equality::Equal, "{} | {}", gold, scaled);
        let other = format!("{}x = {}-({})y", a * factor, c * factor + 1, b * factor);
        prop_assert_eq!(verdict(&gold, &other), Equality::Different, "{} | {}", gold, other);
        prop_assert_ne!(verdict(&gold, "0=0"), Equality::Equal);
    }

    #[test]
    fn any_text_has_a_verdict(gold in "[0-9x+*/^(){},=<\\\\a-z $%.-]{1,40}", answer in ".{0,60}") {
        let _ = verdict(&gold, &answer);
        let _ = verdict("1", &answer);
    }
}
