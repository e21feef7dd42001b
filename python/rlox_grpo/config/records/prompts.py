"""Options of prompts: how the rows of a data set become what the model is asked."""

from __future__ import annotations

from rlox_grpo.config.records.option import Record, option


class PromptConfig(Record, title="Prompts"):
    """How rows become prompts, in training, evaluations and ``rlox-grpo eval``."""

    prompt_template: str | None = option(
        None, "Template for rows without a prompt column; rlox_grpo.prompts.templates has each."
    )
    prompt_column: str = option("prompt", "Column of the data that holds the prompt.")
    columns: dict[str, str] = option(
        {}, "New name of a column → its name in the data, such as {answer = 'solution'} for a reward that reads answer."
    )
    system_prompt: str | None = option(
        None, "System message that is put before every prompt; a prompt that is text becomes a user message."
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = option(
        {}, "Variables for the tokenizer's chat template, such as {enable_thinking = false}."
    )
