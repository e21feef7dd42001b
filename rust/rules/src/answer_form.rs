//! The answer of a completion by the form that the prompt asked for, as text for a scorer of another package.

use math_answers::characters::strip;
use math_answers::extraction::{after_thinking, boxed, legible, tagged};
use math_answers::number;

/// Where the answer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerForm {
    /// In the last closed `<answer>`.
    Tag,
    /// In the last balanced `\boxed{…}` or `\fbox{…}`.
    Box,
    /// The last number.
    Number,
    /// The whole text.
    Text,
}

impl AnswerForm {
    /// Each form and its name.
    pub const NAMES: [(&'static str, Self); 4] =
        [("tag", Self::Tag), ("box", Self::Box), ("number", Self::Number), ("text", Self::Text)];

    /// The form of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, form)| *form)
    }

    /// The answer after the last `</think>`, stripped; none if it is missing or blank.
    ///
    /// A number is without currency signs and the marks between its digits, and its sign is `-`, so that any scorer reads
    /// it. What is no number here (`12,34`, `5k`) is none.
    #[must_use]
    pub fn extract(self, completion: &str) -> Option<String> {
        let legible = legible(completion);
        let text = after_thinking(&legible);
        let answer = match self {
            Self::Tag => tagged(text, "answer")?.to_owned(),
            Self::Box => boxed(text)?.to_owned(),
            Self::Number => {
                let token = number::last(text).filter(|token| token.number.is_ok() && !number::is_part(text, token))?;
                let plain = text[token.start..token.end].replace('−', "-").replace("{,}", "").replace("\\,", "");
                plain.replace("\\$", "").replace([',', '$', '€', '£', '¥', '₹'], "")
            }
            Self::Text => text.to_owned(),
        };
        let answer = strip(&answer);
        (!answer.is_empty()).then(|| answer.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::AnswerForm::{self, Box, Number, Tag, Text};

    #[test]
    fn each_form_reads_its_own_place() {
        let text =
            "<think>7 <answer>0</answer></think> So <answer> a b </answer>, or \\boxed{x_{1}}, or −$1,234.50 in all.";
        for (form, expected) in [
            (Tag, "a b"),
            (Box, "x_{1}"),
            (Number, "-1234.50"),
            (Text, "So <answer> a b </answer>, or \\boxed{x_{1}}, or −$1,234.50 in all."),
        ] {
            assert_eq!(form.extract(text).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_number_is_without_marks_or_none() {
        for (text, expected) in [
            (r"-\$1,234.50", Some("-1234.50")),
            (r"1{,}234", Some("1234")),
            (r"1\,234", Some("1234")),
            ("5 million", Some("5 million")),
            ("12,34", None),
            ("1.234,56", None),
            ("5k", None),
            ("5²", None),
        ] {
            assert_eq!(Number.extract(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_missing_or_blank_answer_is_none() {
        for (form, text) in [(Tag, "<answer> </answer>"), (Tag, "4"), (Box, "4"), (Number, "four"), (Text, "<think>4")]
        {
            assert_eq!(form.extract(text), None, "{text}");
        }
    }

    #[test]
    fn names_are_unique() {
        for (name, form) in AnswerForm::NAMES {
            assert_eq!(AnswerForm::from_name(name), Some(form));
        }
        assert_eq!(AnswerForm::from_name("json"), None);
    }
}
