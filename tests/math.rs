//! Properties of the math verdict: what rewriting leaves alone, and what a small change breaks.

use proptest::prelude::*;
use rlox_grpo::rewards::math::answer::compare;
use rlox_grpo::rewards::math::compare::Options;
use rlox_grpo::rewards::math::expr::identity::Equality;

fn verdict(gold: &str, answer: &str) -> Equality {
    compare(gold, answer, &Options::default())
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

fn rational() -> impl Strategy<Value = Pair> {
    (-999i64..999, 1i64..99, 1i64..20).prop_flat_map(|(top, bottom, scale)| {
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
    #![proptest_config(ProptestConfig::with_cases(300))]

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
    fn equations_are_the_same_up_to_a_factor(a in 1i64..9, b in -9i64..9, c in -9i64..9, factor in 2i64..9) {
        let gold = format!("{a}x+({b})y={c}");
        let scaled = format!("{}x = {}-({})y", a * factor, c * factor, b * factor);
        prop_assert_eq!(verdict(&gold, &scaled), Equality::Equal, "{} | {}", gold, scaled);
        let other = format!("{}x = {}-({})y", a * factor, c * factor + 1, b * factor);
        prop_assert_eq!(verdict(&gold, &other), Equality::Different, "{} | {}", gold, other);
        prop_assert_ne!(verdict(&gold, "0=0"), Equality::Equal);
    }

    #[test]
    fn any_text_has_a_verdict(gold in "[0-9x+*/^(){},=<\\\\a-z $%.-]{1,40}", answer in ".{0,60}") {
        let _ = compare(&gold, &answer, &Options::default());
        let _ = compare("1", &answer, &Options::default());
    }
}
