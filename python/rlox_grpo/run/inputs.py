"""Load the prompts of a run and check them against the reward functions, the model and the environment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlox_grpo.advantages.moving import read_key
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.config.train_source import COLUMN
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.comparison import refuse_different_forms, warn_about_prompts
from rlox_grpo.prompts.demonstrations import read_demonstrations
from rlox_grpo.prompts.load import PromptsLike, load_prompts, load_rows, refuse_too_long, refuse_unknown_ids
from rlox_grpo.prompts.media import NO_PROCESSOR
from rlox_grpo.prompts.mixture import Slot
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.prompts.stream import StreamDraws, is_read_once, is_stream
from rlox_grpo.prompts.teacher_prompts import TeacherPrompts
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.reference.teacher import Teacher
from rlox_grpo.reference.teachers import Teachers
from rlox_grpo.rewards import RewardFn, check_rewards
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass
class PromptReader:
    """Loads and checks prompts with the options of a run. Every error names the prompt.

    ``episodes`` is given with an environment, which renders the prompts turn by turn. ``max_length`` is the largest
    number of tokens of a prompt and its completion; None: no limit. ``vocab_size`` is the number of the model's token
    ids; None: unknown. ``reference`` is the reference of the KL penalty. ``teacher`` is the teacher of the run, or
    several teachers, of which each row names one. ``teacher_prompts`` writes the prompts of a teacher that reads its
    own prompts. ``slot`` is the slot of the source in a mixture, by which its prompts are labelled. ``reader`` reads
    pictures; without it ``no_pictures`` says why they are errors. ``end_ids`` are the ids that end a completion, for
    demonstrations. ``default_template`` is a template that rows with a prompt may leave unused, as they may leave that
    of the preset.
    """

    config: GRPOConfig
    tokenizer: PreTrainedTokenizerBase | None
    reward_fns: Sequence[RewardFn]
    episodes: EpisodeRunner | None
    max_length: int | None
    vocab_size: int | None = None
    teacher_prompts: TeacherPrompts | None = None
    reference: Reference | None = None
    teacher: Teacher | Teachers | None = None
    slot: Slot | None = None
    reader: PictureReader | None = None
    no_pictures: str = NO_PROCESSOR
    end_ids: tuple[int, ...] = ()
    default_template: str | None = None
    _stream: tuple[Any, StreamDraws | None] = (None, None)

    def read(self, prompts: PromptsLike, *, trained: bool = True) -> list[Prompt]:
        """Load prompts (see :func:`rlox_grpo.prompts.load.load_prompts`) and check them.

        Training prompts (``trained``) need the column ``baseline_key``, held-out prompts do not.

        Raises:
            TypeError, ValueError, RewardError: a prompt cannot be used; the message names its index.
        """
        if is_stream(prompts):
            raise TypeError(
                f"prompts is a {type(prompts).__name__}, a stream: only train takes one; pass a list of rows"
            )
        loaded = self._load(prompts, trained=trained)
        self._compare(loaded)
        self._warn(loaded)
        return loaded if self.slot is None else [self.slot.label(prompt) for prompt in loaded]

    def _load(self, prompts: PromptsLike, *, trained: bool = True) -> list[Prompt]:
        options = self.config.split().prompts
        template = options.prompt_template
        # A preset's template is its default for rows without a prompt.
        is_default = template in (PRESETS[self.config.preset].values.get("prompt_template"), self.default_template)
        if self.episodes is not None:
            loaded = load_rows(
                prompts,
                prompt_column=options.prompt_column,
                columns=options.columns,
                reader=self.reader,
                no_pictures=self.no_pictures,
            )
            loaded = self._name_source(loaded)
            self.episodes.check_rows(loaded, None if self.slot is None else self.slot.name)
        else:
            loaded = load_prompts(
                prompts,
                self.tokenizer,
                template,
                prompt_column=options.prompt_column,
                columns=options.columns,
                system_prompt=options.system_prompt,
                chat_template_kwargs=options.chat_template_kwargs,
                needs_template=not is_default,
                reader=self.reader,
                no_pictures=self.no_pictures,
            )
            loaded = self._name_source(loaded)
            refuse_unknown_ids(loaded, self.vocab_size)
            refuse_too_long(loaded, self.config.max_new_tokens, self.max_length)
            if trained and self.reference is not None:
                positions = self.reference.max_positions
                refuse_too_long(loaded, self.config.max_new_tokens, positions, owner="the reference")
            if trained and self.teacher_prompts is None and self.teacher is not None:
                positions = self.teacher.max_positions
                refuse_too_long(loaded, self.config.max_new_tokens, positions, owner="the teacher")
        check_rewards(loaded, self.reward_fns)
        if trained and self.config.demo_loss is not None:
            loaded = read_demonstrations(
                loaded,
                self.tokenizer,
                chat_template_kwargs=options.chat_template_kwargs,
                end_ids=self.end_ids,
                stop=self.config.stop,
                max_new_tokens=self.config.max_new_tokens,
                vocab_size=self.vocab_size,
                needs_column=self.slot is None,
            )
        if trained and isinstance(self.teacher, Teachers):
            for prompt in loaded:
                self.teacher.find_name(prompt)
        if trained and self.teacher_prompts is not None:
            has_episodes = self.episodes is not None
            self.teacher_prompts.check(loaded, self.config.max_new_tokens, with_episodes=has_episodes)
        if trained and (key := self.config.baseline_key) is not None:
            for prompt in loaded:
                read_key(prompt, key)
        return loaded

    def _name_source(self, loaded: list[Prompt]) -> list[Prompt]:
        """Return the prompts with the name of their source as a column, in a mixture.

        Raises:
            ValueError: a row has another value there.
        """
        if self.slot is None:
            return loaded
        for prompt in loaded:
            if (value := prompt.columns.get(COLUMN, self.slot.name)) != self.slot.name:
                raise ValueError(
                    f"prompts[{prompt.index}] has a column {COLUMN!r}, {value!r}, which in a mixture holds the name of "
                    f"the source: rename it, by columns={{'row_{COLUMN}': {COLUMN!r}}} of its TrainSource, or drop it"
                )
        return [replace(prompt, columns={**prompt.columns, COLUMN: self.slot.name}) for prompt in loaded]

    def _compare(self, loaded: Sequence[Prompt]) -> None:
        if self.episodes is None:  # an environment writes its prompts
            refuse_different_forms(loaded, continue_final_message=self.config.continue_final_message)

    def _warn(self, loaded: Sequence[Prompt]) -> None:
        warn_about_prompts(loaded, getattr(self.tokenizer, "bos_token_id", None), are_rows=self.episodes is not None)

    def open_stream(self, prompts: PromptsLike, draws: int) -> StreamDraws:
        """Read and check the first rows of a stream; see :func:`rlox_grpo.prompts.stream.is_stream`.

        ``draws`` is the number of prompts drawn so far: a stream that was opened earlier and has not passed them is
        used again.

        Raises:
            ConfigError: no ``max_steps``, or an option that needs all prompts at once.
            ValueError: a generator has passed these prompts already.
        """
        config, kind = self.config, type(prompts).__name__
        if config.max_steps is None:
            raise ConfigError(
                f"prompts is a {kind}, whose length is not known: set max_steps, or pass list(prompts) to read it whole"
            )
        whole = {
            "async_steps": config.async_steps > 0,
            "partial_rollout_turns": config.partial_rollout_turns is not None,
            "curriculum": config.curriculum != "none",
            "max_group_size": config.max_group_size is not None,
            "on_collapse": config.on_collapse == "restore",
        }
        for name in [name for name, is_set in whole.items() if is_set]:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} with prompts that are a {kind}: it needs all prompts at once; leave "
                "it out, or pass list(prompts)"
            )
        before, stream = self._stream
        if stream is not None and before is prompts and stream.draws > draws and is_read_once(prompts):
            raise ValueError(
                f"prompts is a {kind} that has yielded {stream.draws} rows, and the run continues at row {draws}: pass "
                "a new one, or a function that returns it, which can be read again"
            )
        if stream is None or before is not prompts or stream.draws > draws:
            label = {} if self.slot is None else {"label": self.slot.label}
            stream = StreamDraws(prompts, self._load, self._compare, **label)
            self._warn(stream.first)
            self._stream = prompts, stream  # a generator can be read only once
        return stream
