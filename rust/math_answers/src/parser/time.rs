//! Times of day: `8:34 p.m.`, `15:30`, `3 PM`, `12 noon`.

use super::super::ast::{Node, NodeId};
use super::super::lexer::token::{Bracket, Kind};
use super::super::literal;
use super::{Parsed, Parser};

const HOUR: u32 = 3600;

/// What says which half of the day is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Half {
    Morning,
    Afternoon,
    Noon,
    Midnight,
}

impl Parser<'_, '_> {
    /// A time of day, where one stands alone here; `None` leaves everything as it was.
    ///
    /// Two digits of minutes make `4:20` a time. It keeps its reading as a ratio for comparison with what can only be a
    /// ratio or a number. `4 : 20` with space is a ratio, unless `p.m.` follows.
    pub(super) fn time(&mut self) -> Parsed<Option<NodeId>> {
        let start = self.at;
        let Some(hour) = self.clock_digits(0, 1..=2) else { return Ok(None) };
        let mut parts = vec![hour];
        let mut spaced = false;
        let mut padded = false;
        let mut length = 1;
        while parts.len() < 3 && self.kind_at(length) == Some(Kind::Colon) {
            let Some(part) = self.clock_digits(length + 1, 2..=2).filter(|part| part.value < 60) else {
                return Ok(None);
            };
            spaced |= self.space_at(length) || self.space_at(length + 1);
            padded |= part.padded;
            parts.push(part);
            length += 2;
        }
        let half = self.half_of_day(length);
        if parts.len() == 1 && half.is_none() || spaced && half.is_none() && !padded {
            return Ok(None);
        }
        let end = length + half.map_or(0, |(_, words)| words);
        if !self.ends_time(end) {
            return Ok(None);
        }
        let mut hours = parts[0].value;
        let known = match half {
            Some(_) if !(1..=12).contains(&hours) => return Ok(None),
            Some((half, _)) => {
                let late = matches!(half, Half::Afternoon | Half::Noon);
                if matches!(half, Half::Noon | Half::Midnight) && hours != 12 {
                    return Ok(None);
                }
                hours = hours % 12 + if late { 12 } else { 0 };
                true
            }
            None => hours == 0 || hours > 12,
        };
        let place = |at: usize| parts.get(at).map_or(0, |part| part.value);
        let seconds = hours * HOUR + place(1) * 60 + place(2);
        if seconds > 24 * HOUR {
            return Ok(None);
        }
        let ratio = if half.is_none() && !padded && !parts[0].padded { Some(self.ratio_of(&parts)?) } else { None };
        self.at = start + end;
        // 24:00 is midnight.
        self.push(Node::Time { seconds: seconds % (24 * HOUR), known, ratio }).map(Some)
    }

    /// `noon` and `midnight`.
    pub(super) fn time_word(&mut self, text: &str) -> Parsed<Option<NodeId>> {
        let seconds = match text {
            "noon" | "12 noon" => 12 * HOUR,
            "midnight" | "12 midnight" => 0,
            _ => return Ok(None),
        };
        self.push(Node::Time { seconds, known: true, ratio: None }).map(Some)
    }

    fn ratio_of(&mut self, parts: &[Part]) -> Parsed<NodeId> {
        let mut items = Vec::with_capacity(parts.len());
        for part in parts {
            let (value, form) = literal::value(&part.value.to_string())?;
            items.push(self.push(Node::Number { value, form })?);
        }
        self.push(Node::Ratio(items))
    }

    /// The digits of an hour, a minute or a second, `offset` tokens ahead.
    fn clock_digits(&self, offset: usize, lengths: std::ops::RangeInclusive<usize>) -> Option<Part> {
        let Some(Kind::Number(raw)) = self.kind_at(offset) else { return None };
        if !lengths.contains(&raw.len()) || !raw.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        Some(Part { value: raw.parse().ok()?, padded: raw.starts_with('0') })
    }

    /// `p.m.`, `in the afternoon`, `noon`, and how many tokens it takes.
    fn half_of_day(&self, offset: usize) -> Option<(Half, usize)> {
        let Some(Kind::Word(word)) = self.kind_at(offset) else { return None };
        let stop = |length: usize| length + usize::from(self.kind_at(offset + length) == Some(Kind::Period));
        let lower = word.to_ascii_lowercase();
        match lower.as_str() {
            "am" | "a.m" => Some((Half::Morning, stop(1))),
            "pm" | "p.m" => Some((Half::Afternoon, stop(1))),
            "noon" => Some((Half::Noon, 1)),
            "midnight" => Some((Half::Midnight, 1)),
            "in" | "at" => {
                let article = usize::from(self.word_at(offset + 1, "the"));
                let Some(Kind::Word(part)) = self.kind_at(offset + 1 + article) else { return None };
                let half = match part {
                    "morning" => Half::Morning,
                    "afternoon" | "evening" => Half::Afternoon,
                    _ => return None,
                };
                Some((half, 2 + article))
            }
            _ => None,
        }
    }

    /// Whether nothing that continues a value follows.
    fn ends_time(&self, offset: usize) -> bool {
        match self.kind_at(offset) {
            None
            | Some(
                Kind::Comma
                | Kind::Semicolon
                | Kind::Newline
                | Kind::And
                | Kind::Or
                | Kind::Period
                | Kind::Close(Bracket::Round | Bracket::Group | Bracket::Curly | Bracket::Square),
            ) => true,
            Some(Kind::Word(word)) => ["and", "or"].iter().any(|known| known.eq_ignore_ascii_case(word)),
            _ => false,
        }
    }
}

/// Digits of a clock.
#[derive(Debug, Clone, Copy)]
struct Part {
    value: u32,
    /// Whether a zero leads it, as no term of a ratio has.
    padded: bool,
}
