"""Options of prompts: how rows of a dataset become prompts."""

from __future__ import annotations

from rlox_grpo.config.records.option import Record, option
from rlox_grpo.prompts.templates import TEMPLATES


class PromptConfig(Record, title="Prompts"):
    """How rows become prompts, in training, evaluations and ``rlox-grpo eval``."""

    prompt_template: str | None = option(
        None,
        "Template that writes the prompts of rows without a prompt column.",
        choices={name: template.form for name, template in TEMPLATES.items()},
    )
    prompt_column: str = option("prompt", "Column of the data that holds the prompt.")
    columns: dict[str, str] = option(
        {},
        "Name that a reward function reads → name of the column in the data, such as {answer = 'solution'}, or of a "
        "key in it, such as {answer = 'reward_model.ground_truth'}.",
    )
    continue_final_message: bool = option(
        False,
        "Let the model continue last messages of the role assistant that differ from prompt to prompt. By default "
        "such messages raise an error, because they are probably reference replies; a message that is the same in all "
        "prompts is always continued.",
    )
    system_prompt: str | None = option(
        None, "System message before every prompt. A prompt that is text becomes a user message."
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = option(
        {}, "Variables for the tokenizer's chat template, such as {enable_thinking = false}."
    )
    image_max_pixels: int | None = option(
        None,
        "Most pixels of a picture. Larger pictures are made smaller before the processor reads them, in the same "
        "proportions. None: the processor's own sizes.",
        ge=1,
    )
