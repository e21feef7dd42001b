"""The chat templates of a run: one for each list of tools, tested once for rewrites and its format of tool calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.config.records.prompts import PromptConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.rows import refuse_unread_variables
from rlox_grpo.rollout.episodes.proof import find_rewrite
from rlox_grpo.rollout.episodes.template import Template, find_call_format

logger = logging.getLogger(__name__)

_MAX_TEMPLATES = 256
"""Maximum number of different tool lists in a run."""

Schemas = Sequence[Mapping[str, Any]]


class RunTemplates:
    """Creates the template for a list of tools, and stores it."""

    def __init__(self, tokenizer: Any, config: EpisodeConfig, prompts: PromptConfig) -> None:
        """Check the tokenizer and the variables of its chat template.

        Raises:
            ConfigError: there is no tokenizer, or its template does not read a variable of ``chat_template_kwargs``.
        """
        if tokenizer is None:
            raise ConfigError("environment= and tools= need a tokenizer with a chat_template")
        try:
            refuse_unread_variables(prompts.chat_template_kwargs, tokenizer, [[{"role": "user"}]])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._tokenizer = tokenizer
        self._config = config
        self._variables = prompts.chat_template_kwargs
        self._templates: dict[str, Template] = {}

    def give(self, schemas: Schemas) -> Template:
        """Return the template for JSON schemas of tools.

        Raises:
            ConfigError: the template cannot be used, or the run has too many lists of tools.
        """
        name = json.dumps(schemas)
        if name not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                raise ConfigError(f"the environment gave {_MAX_TEMPLATES} lists of tools: give the same ones each time")
            try:
                template = Template(self._tokenizer, schemas, self._variables)
                rewrite = find_rewrite(template)
                self._choose_call_format(template)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            if rewrite is not None and self._config.history == "template":
                template.rewrites = True
                self._warn_of_rewrites(rewrite)
            self._templates[name] = template
        return self._templates[name]

    def _warn_of_rewrites(self, rewrite: str) -> None:
        if any(template.rewrites for template in self._templates.values()):
            return
        logger.warning(
            "the chat template rewrites history: %s. Each reply to a rewritten history opens a branch, a further row "
            "of its episode; the update forwards its tokens from the first changed one on (episode/branches counts "
            "branches). Set history='keep' to show the policy its earlier replies as it sampled them, in one row",
            rewrite,
        )

    def _choose_call_format(self, template: Template) -> None:
        """Set the format of tool calls: that of the option, or the one that the template writes."""
        asked = self._config.call_format
        found = find_call_format(template) if asked == "auto" and template.tools else asked
        if found is None:
            logger.warning(
                "the chat template writes tool calls in an unknown format: replies are parsed in Hermes' format, "
                "<tool_call>{…}</tool_call>, and as JSON; set call_format to choose another"
            )
        elif found != "auto":
            template.call_format = found
