//! Tag format, such as `<think>…</think><answer>…</answer>`: the strict rule, and the published rules by name.
//!
//! The published rules are regular expressions that take quadratic or cubic time on hostile text. Here each is a linear
//! scan that accepts the same texts as Python's `re`; the parity tests compare the two.

use math_answers::characters::{is_blank, is_decimal_digit, is_space, strip};

use crate::tags::{Tag, closes_at_end, find, is_end, len, only, starts};
use crate::{RewardRule, Verdict};

/// A named format rule. `T1` and `T2` are the two tag names; `…` is any text, newlines included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatMode {
    /// 1 for `<T1>A</T1>`, whitespace, `<T2>B</T2>`, trimmed outside; each tag once, `A` and `B` not blank. Else 0.
    Strict,
    /// nano-aha-moment: `^<T1>…</T1>\n<T2>B</T2>$` with no first tag inside the first block; 1 when the stripped `B`
    /// consists of digits, `+-*/().` and whitespace, 0.5 when it holds anything else or nothing. Else 0.
    NanoAha,
    /// GRPO-Zero: 1 for `^<T1>…</T1>\n<T2>…</T2>$`; else 0.1 for a first block plus 0.5 for a second one, anywhere.
    GrpoZero,
    /// simple_GRPO (vLLM version): 1.25 for `^<T1>…</T1>[\n ]*<T2>…</T2>$` with two tags of each name; else −1.
    SimpleGrpo,
    /// simple_GRPO, first version: 1.25 for `^<T1>…</T1><T2>…</T2>$`; else −1.
    SimpleGrpoV1,
    /// RLFromScratch: 1 for `^<T1>A</T1>\n<T2>B</T2>$` with no newline and no own closing tag in `A` and `B`. Else 0.
    RlFromScratch,
    /// open-r1: 1 for `^<T1>\n…\n</T1>\n<T2>\n…\n</T2>$`, where `$` is the end of any line. Else 0.
    OpenR1,
    /// TRL `think_format_reward`: 1 when the text starts with the only `<T1>` and closes it; `T2` is ignored.
    TrlThink,
}

impl FormatMode {
    /// All modes, by the name that Python uses.
    pub const NAMES: [(&'static str, Self); 8] = [
        ("strict", Self::Strict),
        ("nano_aha", Self::NanoAha),
        ("grpo_zero", Self::GrpoZero),
        ("simple_grpo", Self::SimpleGrpo),
        ("simple_grpo_v1", Self::SimpleGrpoV1),
        ("rl_from_scratch", Self::RlFromScratch),
        ("open_r1", Self::OpenR1),
        ("trl_think", Self::TrlThink),
    ];

    /// The mode with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, mode)| *mode)
    }
}

/// Reward rule for the tag format, by one [`FormatMode`].
#[derive(Debug)]
pub struct TagFormat {
    mode: FormatMode,
    prefix: String,
    first: Tag,
    second: Tag,
}

impl TagFormat {
    /// `prefix` is the start of the completion that the prompt already contains, such as `<think>`; each text is scored
    /// with it in front.
    #[must_use]
    pub fn new(first: &str, second: &str, mode: FormatMode, prefix: &str) -> Self {
        Self { mode, prefix: prefix.to_owned(), first: Tag::new(first), second: Tag::new(second) }
    }

    fn score_text(&self, text: &str) -> f64 {
        let bytes = text.as_bytes();
        match self.mode {
            FormatMode::Strict => flag(self.strict(text)),
            FormatMode::NanoAha => self.nano_aha(text),
            FormatMode::GrpoZero => self.grpo_zero(bytes),
            FormatMode::SimpleGrpo => gain(self.simple_grpo(bytes)),
            FormatMode::SimpleGrpoV1 => gain(self.starts_joined_ends(bytes, b"")),
            FormatMode::RlFromScratch => flag(self.rl_from_scratch(bytes)),
            FormatMode::OpenR1 => flag(self.open_r1(bytes)),
            FormatMode::TrlThink => flag(self.trl_think(bytes)),
        }
    }

    fn strict(&self, text: &str) -> bool {
        let text = strip(text);
        let bytes = text.as_bytes();
        let (Some(open1), Some(close1)) = (only(&self.first.open, bytes), only(&self.first.close, bytes)) else {
            return false;
        };
        let (Some(open2), Some(close2)) = (only(&self.second.open, bytes), only(&self.second.close, bytes)) else {
            return false;
        };
        let (body1, gap, body2) =
            (open1 + len(&self.first.open), close1 + len(&self.first.close), open2 + len(&self.second.open));
        // Compared by their ends: tags whose names hold `<` or `>` could overlap.
        if open1 != 0 || close1 < body1 || open2 < gap || close2 < body2 {
            return false;
        }
        close2 + len(&self.second.close) == bytes.len()
            && strip(&text[gap..open2]).is_empty()
            && !is_blank(&text[body1..close1])
            && !is_blank(&text[body2..close2])
    }

    fn nano_aha(&self, text: &str) -> f64 {
        let bytes = text.as_bytes();
        if !starts(bytes, 0, &self.first.open) {
            return 0.0;
        }
        let body1 = len(&self.first.open);
        let Some(close1) = find(&self.first.close, bytes, body1) else { return 0.0 };
        if self.first.open.find(&bytes[body1..close1]).is_some() {
            return 0.0;
        }
        let open2 = close1 + len(&self.first.close) + 1;
        if bytes.get(open2 - 1) != Some(&b'\n') || !starts(bytes, open2, &self.second.open) {
            return 0.0;
        }
        let body2 = open2 + len(&self.second.open);
        let Some(close2) = closes_at_end(bytes, body2, &self.second.close) else { return 0.0 };
        let body = strip(&text[body2..close2]);
        let arithmetic = |c: char| "+-*/().".contains(c) || is_decimal_digit(c) || is_space(c);
        if !body.is_empty() && body.chars().all(arithmetic) { 1.0 } else { 0.5 }
    }

    fn grpo_zero(&self, text: &[u8]) -> f64 {
        if self.starts_joined_ends(text, b"\n") {
            return 1.0;
        }
        let points = |tag: &Tag, points| if tag.is_closed(text) { points } else { 0.0 };
        points(&self.first, 0.1) + points(&self.second, 0.5)
    }

    fn simple_grpo(&self, text: &[u8]) -> bool {
        // A match contains one tag of each kind, so two of each name are exactly those.
        let (Some(0), Some(close1)) = (only(&self.first.open, text), only(&self.first.close, text)) else {
            return false;
        };
        let (Some(open2), Some(close2)) = (only(&self.second.open, text), only(&self.second.close, text)) else {
            return false;
        };
        let gap = close1 + len(&self.first.close);
        gap <= open2
            && text[gap..open2].iter().all(|byte| matches!(byte, b'\n' | b' '))
            && closes_at_end(text, open2, &self.second.close) == Some(close2)
    }

    /// `^<T1>…</T1>{between}<T2>…</T2>$`. Only the earliest joint matters: it leaves the most text behind it.
    fn starts_joined_ends(&self, text: &[u8], between: &[u8]) -> bool {
        if !starts(text, 0, &self.first.open) {
            return false;
        }
        let mut from = len(&self.first.open);
        while let Some(close1) = find(&self.first.close, text, from) {
            from = close1 + len(&self.first.close);
            if text[from..].starts_with(between) && starts(text, from + between.len(), &self.second.open) {
                let body2 = from + between.len() + len(&self.second.open);
                return closes_at_end(text, body2, &self.second.close).is_some();
            }
        }
        false
    }

    fn rl_from_scratch(&self, text: &[u8]) -> bool {
        let one_line = |from: usize, to: usize| memchr::memchr(b'\n', &text[from..to]).is_none();
        if !starts(text, 0, &self.first.open) {
            return false;
        }
        let body1 = len(&self.first.open);
        let Some(close1) = find(&self.first.close, text, body1) else { return false };
        let open2 = close1 + len(&self.first.close) + 1;
        if text.get(open2 - 1) != Some(&b'\n') || !starts(text, open2, &self.second.open) || !one_line(body1, close1) {
            return false;
        }
        let body2 = open2 + len(&self.second.open);
        let Some(close2) = find(&self.second.close, text, body2) else { return false };
        one_line(body2, close2) && is_end(text, close2 + len(&self.second.close))
    }

    fn open_r1(&self, text: &[u8]) -> bool {
        let newline = |at: usize| text.get(at) == Some(&b'\n');
        let mut from = len(&self.first.open) + 1;
        if !starts(text, 0, &self.first.open) || !newline(from - 1) {
            return false;
        }
        let mut inside = None;
        while let Some(close1) = find(&self.first.close, text, from + 1) {
            let after = close1 + len(&self.first.close);
            let body2 = after + 1 + len(&self.second.open) + 1;
            if newline(close1 - 1) && newline(after) && starts(text, after + 1, &self.second.open) && newline(body2 - 1)
            {
                inside = Some(body2);
                break;
            }
            from = after - 1;
        }
        let Some(mut from) = inside else { return false };
        while let Some(close2) = find(&self.second.close, text, from + 1) {
            let after = close2 + len(&self.second.close);
            if newline(close2 - 1) && (after == text.len() || newline(after)) {
                return true;
            }
            from = after - 1;
        }
        false
    }

    fn trl_think(&self, text: &[u8]) -> bool {
        only(&self.first.open, text) == Some(0) && find(&self.first.close, text, 0).is_some()
    }
}

impl RewardRule for TagFormat {
    fn score(&self, _row: usize, completion: &str) -> Verdict {
        if self.prefix.is_empty() {
            return Verdict::ok(self.score_text(completion));
        }
        Verdict::ok(self.score_text(&[self.prefix.as_str(), completion].concat()))
    }
}

fn flag(right: bool) -> f64 {
    if right { 1.0 } else { 0.0 }
}

fn gain(right: bool) -> f64 {
    if right { 1.25 } else { -1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(mode: FormatMode, text: &str) -> f64 {
        TagFormat::new("think", "answer", mode, "").score(0, text).score
    }

    #[test]
    fn strict_takes_one_of_each_tag_in_order_and_nothing_else() {
        for text in [
            "<think>a</think><answer>b</answer>",
            "\n <think>a\n</think> \n\t<answer>\nb</answer>\n",
            "<think>a < b > c </ think></think><answer>b</answer>",
        ] {
            assert_eq!(score(FormatMode::Strict, text), 1.0, "{text:?}");
        }
        for text in [
            "",
            "<think></think><answer>b</answer>",
            "<think> \n</think><answer>b</answer>",
            "<think>a</think><answer>\u{3000}</answer>",
            "x<think>a</think><answer>b</answer>",
            "<think>a</think>x<answer>b</answer>",
            "<think>a</think><answer>b</answer>x",
            "<think>a</think><answer>b</answer><answer>b</answer>",
            "<think>a<think></think><answer>b</answer>",
            "<think>a<answer>b</answer></think><answer>c</answer>",
            "<answer>b</answer><think>a</think>",
            "<Think>a</Think><answer>b</answer>",
            "<think >a</think><answer>b</answer>",
            "<think>a</think><answer>b",
            "<think><answer>a</think>b</answer>",
            "</think><think>a<answer>b</answer>",
        ] {
            assert_eq!(score(FormatMode::Strict, text), 0.0, "{text:?}");
        }
    }

    #[test]
    fn tag_names_that_overlap_are_no_error() {
        for (first, second, text) in [
            ("a></a", "b", "<a></a></a><b>x</b>"),
            ("a", "/a", "<a>x</a></a><//a>"),
            ("", "/", "<></></><//>"),
            ("a><b", "b", "<a><b>x</a><b>y</b>"),
        ] {
            for (_, mode) in FormatMode::NAMES {
                let _ = TagFormat::new(first, second, mode, "").score(0, text);
            }
        }
    }

    #[test]
    fn the_prefix_is_part_of_the_text() {
        let format = TagFormat::new("think", "answer", FormatMode::Strict, "<think>");
        assert_eq!(format.score(0, "a</think><answer>b</answer>").score, 1.0);
        assert_eq!(format.score(0, "<think>a</think><answer>b</answer>").score, 0.0);
    }

    #[test]
    fn each_published_value_is_reachable() {
        let good = "<think>a</think>\n<answer>1+2</answer>";
        assert_eq!(score(FormatMode::NanoAha, good), 1.0);
        assert_eq!(score(FormatMode::NanoAha, "<think>a</think>\n<answer>1+x</answer>\n"), 0.5);
        assert_eq!(score(FormatMode::NanoAha, "<think>a</think><answer>1+2</answer>"), 0.0);
        assert_eq!(score(FormatMode::GrpoZero, good), 1.0);
        assert_eq!(score(FormatMode::GrpoZero, "x<think>a</think>\n<answer>1+2</answer>"), 0.1 + 0.5);
        assert_eq!(score(FormatMode::GrpoZero, "<answer>1+2</answer>"), 0.5);
        assert_eq!(score(FormatMode::GrpoZero, "</think><think>"), 0.0);
        assert_eq!(score(FormatMode::SimpleGrpo, good), 1.25);
        assert_eq!(score(FormatMode::SimpleGrpo, "<think>a</think>\t<answer>1</answer>"), -1.0);
        assert_eq!(score(FormatMode::SimpleGrpoV1, good), -1.0);
        assert_eq!(score(FormatMode::SimpleGrpoV1, "<think>a</think><answer>1</answer>"), 1.25);
        assert_eq!(score(FormatMode::RlFromScratch, good), 1.0);
        assert_eq!(score(FormatMode::RlFromScratch, "<think>a\nb</think>\n<answer>1</answer>"), 0.0);
        assert_eq!(score(FormatMode::OpenR1, "<think>\na\n</think>\n<answer>\nb\n</answer>\ntail"), 1.0);
        assert_eq!(score(FormatMode::OpenR1, "<think>\n</think>\n<answer>\nb\n</answer>"), 0.0);
        assert_eq!(score(FormatMode::TrlThink, "<think>a</think> anything"), 1.0);
        assert_eq!(score(FormatMode::TrlThink, "<think><think></think>"), 0.0);
    }

    #[test]
    fn every_name_names_its_mode() {
        for (name, mode) in FormatMode::NAMES {
            assert_eq!(FormatMode::from_name(name), Some(mode));
        }
        assert_eq!(FormatMode::from_name("Strict"), None);
    }
}
