//! The reward rules on math answers: against a gold, and against the majority of a group.

use std::borrow::Cow;
use std::collections::HashMap;

use math_answers::answer::{ANSWER_FUEL, Answer};
use math_answers::compare::Options;
use math_answers::equality::Equality;
use math_answers::error::ParseError;
use math_answers::extraction::{after_thinking, all_boxes, percent_box, said, stated};
use math_answers::fuel::Fuel;
use math_answers::sentence::amount;
use rayon::prelude::*;

use crate::error::RuleError;
use crate::{RewardRule, Scores, Status, Verdict};

/// Reading and comparing a number takes as long as a scan of about this much text.
const EXTRA_BYTES: usize = 8 * 1024;

/// The math rule over a batch: each row's gold, read once for each different text.
#[derive(Debug)]
pub struct MathAnswer {
    golds: Vec<Answer>,
    gold_of_row: Vec<usize>,
    options: Options,
}

impl MathAnswer {
    /// A gold is a bare answer, or a solution that boxes it, or states it after its last `####` or "answer is".
    ///
    /// # Errors
    /// [`RuleError::BadGold`] for a gold that cannot be read or has no value.
    pub fn new<T: AsRef<str>>(golds: &[T], options: Options) -> Result<Self, RuleError> {
        let mut rule = Self { golds: Vec::new(), gold_of_row: Vec::with_capacity(golds.len()), options };
        let mut known: HashMap<&str, usize> = HashMap::new();
        for (index, gold) in golds.iter().enumerate() {
            let gold = gold.as_ref();
            let place = match known.get(gold) {
                Some(place) => *place,
                None => {
                    rule.golds.push(read_gold(gold).map_err(|error| RuleError::BadGold {
                        argument: "answer",
                        index,
                        value: gold.to_owned(),
                        reason: reason(error),
                    })?);
                    known.insert(gold, rule.golds.len() - 1);
                    rule.golds.len() - 1
                }
            };
            rule.gold_of_row.push(place);
        }
        Ok(rule)
    }
}

/// `28` as `28\%` where the text boxes it alone and says percent behind the box.
fn as_percent(stated: &str, text: &str) -> Option<String> {
    percent_box(text).filter(|percent| percent.strip_suffix("\\%").is_some_and(|inside| inside.trim() == stated.trim()))
}

fn read_gold(text: &str) -> Result<Answer, ParseError> {
    if let Some(answer) = all_boxes(text) {
        let gold = Answer::gold(&answer)?;
        return Ok(match as_percent(&answer, text).and_then(|percent| Answer::gold(&percent).ok()) {
            Some(percent) => gold.or(percent),
            None => gold,
        });
    }
    let answer = text.rsplit_once("####").map_or(text, |(_, answer)| answer);
    Answer::gold(answer).or_else(|error| match said(text).next_back() {
        // A solution in prose.
        Some(answer) if error == ParseError::Unparseable => Answer::gold(answer),
        _ => Err(error),
    })
}

/// Why a gold was refused.
fn reason(error: ParseError) -> &'static str {
    match error {
        ParseError::NoAnswer => "a gold is not empty",
        ParseError::Undecided => "a gold is shorter and simpler than this",
        ParseError::Unparseable => "a gold is a math answer that can be read and has a value",
    }
}

/// The rows of golds that [`MathAnswer`] cannot read, each with the reason.
#[must_use]
pub fn unreadable<T: AsRef<str>>(golds: &[T]) -> Vec<(usize, &'static str)> {
    let mut known: HashMap<&str, Option<&'static str>> = HashMap::new();
    let mut refused = Vec::new();
    for (index, gold) in golds.iter().enumerate() {
        let gold = gold.as_ref();
        if let Some(reason) = *known.entry(gold).or_insert_with(|| read_gold(gold).err().map(reason)) {
            refused.push((index, reason));
        }
    }
    refused
}

impl RewardRule for MathAnswer {
    fn score(&self, row: usize, completion: &str) -> Verdict {
        let gold = &self.golds[self.gold_of_row[row]];
        let Some(text) = stated(completion) else {
            // `yes` has neither marker nor number.
            let spelled = gold.is_spelled(after_thinking(completion));
            return if spelled { Verdict::right(true) } else { Verdict::none(Status::NoAnswer) };
        };
        let fuel = Fuel::new(ANSWER_FUEL);
        let behind = || as_percent(&text, after_thinking(completion));
        // Where gold and answer say percent, `\boxed{0.28} percent` is not 28%.
        let text = match behind().filter(|_| gold.is_percent()) {
            Some(percent) => Cow::Owned(percent),
            None => text.clone(),
        };
        let equals = |text: &str| {
            Answer::read(text, &fuel).is_ok_and(|answer| gold.equals(&answer, &self.options, &fuel) == Equality::Equal)
        };
        let answer = match Answer::read(&text, &fuel) {
            Ok(answer) => answer,
            Err(_) if gold.is_spelled(&text) || amount(&text).is_some_and(equals) => return Verdict::right(true),
            Err(error) => return Verdict::none(error),
        };
        match gold.equals(&answer, &self.options, &fuel) {
            Equality::Equal => Verdict::right(true),
            Equality::Different if gold.is_spelled(after_thinking(completion)) => Verdict::right(true),
            Equality::Different => {
                Verdict::right(behind().is_some_and(|text| equals(&text)) || amount(&text).is_some_and(equals))
            }
            Equality::Undecided => Verdict::none(Status::Undecided),
        }
    }

    fn extra_bytes(&self) -> usize {
        EXTRA_BYTES
    }
}

/// Score each completion by whether it is right if the answer that most of its group give is the gold.
///
/// `groups` names each row's group. An answer has the votes of all completions that are right with it as their gold.
/// Where several answers have the most votes, each of them is such a gold, so that the order of a group says nothing and
/// a group without any agreement gives no preference. A completion without a readable answer, or with one that is left to
/// compute, scores 0 and has no vote.
#[must_use]
pub fn majority<T: AsRef<str> + Sync>(completions: &[T], groups: &[i64], options: &Options) -> Scores {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<i64, usize> = HashMap::new();
    for (row, group) in groups.iter().enumerate().take(completions.len()) {
        let place = *known.entry(*group).or_insert_with(|| {
            rows.push(Vec::new());
            rows.len() - 1
        });
        rows[place].push(row);
    }
    let score = |rows: &Vec<usize>| vote(completions, rows, options);
    let bytes: usize = completions.iter().map(|text| text.as_ref().len() + EXTRA_BYTES).sum();
    let parallel = rows.len() > 1 && crate::worth_threads(bytes);
    let verdicts: Vec<Vec<Verdict>> =
        if parallel { rows.par_iter().map(score).collect() } else { rows.iter().map(score).collect() };
    let mut ordered = vec![Verdict::none(Status::NoAnswer); completions.len()];
    for (rows, verdicts) in rows.iter().zip(verdicts) {
        for (row, verdict) in rows.iter().zip(verdicts) {
            ordered[*row] = verdict;
        }
    }
    ordered.into_iter().collect()
}

fn vote<T: AsRef<str>>(completions: &[T], rows: &[usize], options: &Options) -> Vec<Verdict> {
    let mut verdicts = vec![Verdict::none(Status::NoAnswer); rows.len()];
    // Each different text that states an answer, with the completions that state it.
    let mut answers: Vec<(Answer, Vec<usize>)> = Vec::new();
    let mut known: HashMap<Cow<'_, str>, usize> = HashMap::new();
    for (member, row) in rows.iter().enumerate() {
        let Some(text) = stated(completions[*row].as_ref()) else { continue };
        if let Some(place) = known.get(&text) {
            answers[*place].1.push(member);
            continue;
        }
        match Answer::read(&text, &Fuel::new(ANSWER_FUEL)) {
            // As a gold it would have the votes of the number and of every other way to leave it uncomputed.
            Ok(answer) if !options.unevaluated_ok && answer.is_unevaluated() => {
                verdicts[member] = Verdict::right(false);
            }
            Ok(answer) if answer.has_value() => {
                known.insert(text, answers.len());
                answers.push((answer, vec![member]));
            }
            Ok(_) => verdicts[member] = Verdict::none(Status::Unparseable),
            Err(error) => verdicts[member] = Verdict::none(error),
        }
    }
    // Equality is not transitive, as 5 equals 5 cm and 5 m: each answer is the gold of all others in turn.
    let right_for = |gold: &Answer| -> Vec<usize> {
        let equals = |answer| gold.equals(answer, options, &Fuel::new(ANSWER_FUEL)) == Equality::Equal;
        (0..answers.len()).filter(|place| equals(&answers[*place].0)).collect()
    };
    let right: Vec<Vec<usize>> = answers.iter().map(|(gold, _)| right_for(gold)).collect();
    let votes = |places: &[usize]| places.iter().map(|place| answers[*place].1.len()).sum::<usize>();
    let most = right.iter().map(|places| votes(places)).max().unwrap_or(0);
    for (_, members) in &answers {
        for member in members {
            verdicts[*member] = Verdict::right(false);
        }
    }
    for places in right.iter().filter(|places| votes(places) == most) {
        for member in places.iter().flat_map(|place| &answers[*place].1) {
            verdicts[*member] = Verdict::right(true);
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majority_is_mathematical_and_ties_are_shared() {
        let texts = ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{2}", "none", "\\boxed{50\\%}", "1", "2"];
        let scores = majority(&texts, &[7, 7, 7, 7, 7, 8, 8], &Options::default());
        assert_eq!(scores.scores, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        assert_eq!(scores.statuses, [0, 0, 0, 1, 0, 0, 0]);
        let texts = ["\\boxed{3\\cdot4}", "\\boxed{4\\cdot3}", "\\boxed{3\\cdot4}", "\\boxed{12}"];
        assert_eq!(majority(&texts, &[0; 4], &Options::default()).scores, [0.0, 0.0, 0.0, 1.0]);
        let lenient = Options { unevaluated_ok: true, ..Options::default() };
        assert_eq!(majority(&texts, &[0; 4], &lenient).scores, [1.0; 4]);
        assert!(majority(&[] as &[&str], &[], &Options::default()).scores.is_empty());
    }

    #[test]
    fn the_order_of_a_group_says_nothing_where_equality_is_not_transitive() {
        for (mut texts, mut expected) in [
            (["\\boxed{5 m}", "\\boxed{5 cm}", "\\boxed{5}", "\\boxed{6}"], [1.0, 1.0, 1.0, 0.0]),
            (["\\boxed{5 m}", "\\boxed{5 cm}", "\\boxed{5 m}", "\\boxed{6}"], [1.0, 0.0, 1.0, 0.0]),
            (["\\boxed{\\ln 100}", "\\boxed{2}", "\\boxed{\\log 100}", "7"], [1.0, 1.0, 1.0, 0.0]),
        ] {
            for _ in 0..4 {
                texts.rotate_left(1);
                expected.rotate_left(1);
                for pair in 0..3 {
                    texts.swap(pair, pair + 1);
                    expected.swap(pair, pair + 1);
                    assert_eq!(majority(&texts, &[0; 4], &Options::default()).scores, expected, "{texts:?}");
                }
            }
        }
    }

    #[test]
    fn golds_are_read_once_and_checked() {
        let rule = MathAnswer::new(&["1/2", "x", "1/2"], Options::default()).unwrap();
        assert_eq!((rule.golds.len(), rule.gold_of_row.as_slice()), (2, &[0, 1, 0][..]));
        let prose = "We add $1 + 1$ [twice]. The final answer is $4$. Note: it is checked.";
        assert!(MathAnswer::new(&[prose], Options::default()).is_ok());
        for bad in ["", "1/0", "\\frac{1}{0}", "We add $a$ to $[2$ and 3 to $4$"] {
            let result = MathAnswer::new(&["1", bad], Options::default());
            assert!(matches!(result, Err(RuleError::BadGold { index: 1, .. })), "{bad}");
        }
    }
}
