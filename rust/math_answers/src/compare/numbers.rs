//! Numbers with their marks, ratios, and the tolerance.

use dashu_int::IBig;
use dashu_int::ops::Abs;
use dashu_ratio::RBig;

use super::super::ball::{Ball, Context};
use super::super::expr::{Class, Evaluator, Exprs, Id, Point};
use super::super::unit::Unit;
use super::super::value::{Mark, Number};
use super::{Comparer, Units};
use crate::equality::Equality;
use crate::expr::identity::compare;

impl Comparer<'_> {
    pub(super) fn numbers(&self, gold: &Number, answer: &Number) -> Equality {
        let values = || self.same(gold.id, answer.id);
        match (&gold.mark, &answer.mark) {
            (Mark::Bare, Mark::Bare) | (Mark::Percent(_), Mark::Percent(_)) | (Mark::Degree(_), Mark::Degree(_)) => {
                values()
            }
            (Mark::Base(_), Mark::Base(_)) => values(),
            (Mark::Percent(face), Mark::Bare) if self.options.percent_optional => {
                values().or(self.same(*face, answer.id))
            }
            (Mark::Bare, Mark::Percent(face)) if self.options.percent_optional => {
                values().or(self.same(gold.id, *face))
            }
            (Mark::Percent(_), Mark::Bare) | (Mark::Bare, Mark::Percent(_)) => values(),
            // The degree sign may be missing, as any unit.
            (Mark::Degree(face), Mark::Bare) => values().or(self.missing_unit(*face, answer.id)),
            (Mark::Bare, Mark::Degree(face)) => values().or(self.missing_unit(gold.id, *face)),
            (Mark::Base(face), Mark::Bare) => values().or(self.digits(face.as_ref(), self.answer, answer.id)),
            (Mark::Bare, Mark::Base(face)) => values().or(self.digits(face.as_ref(), self.gold, gold.id)),
            (Mark::Unit(left), Mark::Unit(right)) => self.quantities(gold.id, left, answer.id, right),
            (Mark::Unit(_), Mark::Bare) | (Mark::Bare, Mark::Unit(_)) => self.missing_unit(gold.id, answer.id),
            (Mark::Unit(unit), Mark::Percent(_) | Mark::Degree(_) | Mark::Base(_))
            | (Mark::Percent(_) | Mark::Degree(_) | Mark::Base(_), Mark::Unit(unit)) => {
                if self.options.units == Units::Ignore || unit.placeholder || *unit == Unit::one() {
                    values()
                } else {
                    Equality::Different
                }
            }
            (
                Mark::Percent(_) | Mark::Degree(_) | Mark::Base(_),
                Mark::Percent(_) | Mark::Degree(_) | Mark::Base(_),
            ) => Equality::Different,
        }
    }

    fn missing_unit(&self, gold: Id, answer: Id) -> Equality {
        if self.options.units == Units::Exact { Equality::Different } else { self.same(gold, answer) }
    }

    fn digits(&self, face: Option<&RBig>, exprs: &Exprs, bare: Id) -> Equality {
        Equality::of(self.options.base_optional && face.is_some() && exprs.as_rational(bare) == face)
    }

    fn quantities(&self, gold: Id, left: &Unit, answer: Id, right: &Unit) -> Equality {
        let same_unit = left == right || left.stands_for(right);
        if same_unit || self.options.units == Units::Ignore {
            return self.same(gold, answer);
        }
        if !left.commensurable(right) {
            return Equality::Different;
        }
        if left.factor == right.factor {
            return self.same(gold, answer);
        }
        if self.options.units != Units::Convert {
            // Zero is zero in every unit that has no offset; any other number is not.
            return Equality::Different;
        }
        if self.fuel.spend(10 * (self.gold.len() + self.answer.len()) as u64).is_err() {
            return Equality::Undecided;
        }
        let (mut gold_exprs, mut answer_exprs) = (self.gold.clone(), self.answer.clone());
        let scale = |exprs: &mut Exprs, id: Id, factor: &RBig| {
            let factor = exprs.rational(factor.clone(), self.fuel)?;
            exprs.product(&[id, factor], self.fuel)
        };
        match (scale(&mut gold_exprs, gold, &left.factor), scale(&mut answer_exprs, answer, &right.factor)) {
            (Ok(gold), Ok(answer)) => {
                let exact = compare((&gold_exprs, gold), (&answer_exprs, answer), self.fuel);
                self.within((&gold_exprs, gold), (&answer_exprs, answer), exact)
            }
            _ => Equality::Undecided,
        }
    }

    pub(super) fn constants_within(&self, gold: Id, answer: Id, exact: Equality) -> Equality {
        self.within(self.gold(gold), self.answer(answer), exact)
    }

    /// The exact verdict, or that of the tolerance where one is given and both are constants.
    fn within(&self, gold: (&Exprs, Id), answer: (&Exprs, Id), exact: Equality) -> Equality {
        let Some(tolerance) = &self.options.tolerance else { return exact };
        let class = gold.0.class(gold.1) | answer.0.class(answer.1);
        if exact == Equality::Equal || class.has(Class::SYMBOL) {
            return exact;
        }
        if let (Some(gold), Some(answer)) = (gold.0.as_rational(gold.1), answer.0.as_rational(answer.1)) {
            let gap = (answer - gold).abs();
            let reach = if gold.is_zero() { tolerance.clone() } else { tolerance * gold.clone().abs() };
            return Equality::of(gap <= reach);
        }
        self.within_balls(gold, answer, tolerance).unwrap_or(Equality::Undecided)
    }

    fn within_balls(&self, gold: (&Exprs, Id), answer: (&Exprs, Id), tolerance: &RBig) -> Option<Equality> {
        let point = Point { seed: 0, range: 0, natural: false };
        for bits in [96, 400] {
            let context = Context { bits, fuel: self.fuel };
            let gold = Evaluator::new(gold.0, point, context).value(gold.1).ok()?;
            let answer = Evaluator::new(answer.0, point, context).value(answer.1).ok()?;
            let gap = gold.minus(&answer, context).ok()?.absolute(context).ok()?;
            let tolerance = Ball::rational(tolerance, context).ok()?;
            let reach = if gold.is_zero() {
                tolerance
            } else {
                gold.absolute(context).ok()?.times(&tolerance, context).ok()?
            };
            if let Some(sign) = gap.minus(&reach, context).ok()?.sign() {
                return Some(Equality::of(sign <= 0));
            }
        }
        None
    }

    /// The integer value of a constant, for residues.
    pub(super) fn integer(exprs: &Exprs, id: Id) -> Option<IBig> {
        exprs.as_integer(id).cloned()
    }
}
