"""Load and tokenise prompts, and draw them in a seeded order that a resumed run continues exactly."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from rlox_grpo.prompts.chat_entries import needs_entries, wrap_texts
from rlox_grpo.prompts.files import read_rows as read_rows
from rlox_grpo.prompts.files import read_table, refuse_paths
from rlox_grpo.prompts.media import NO_PROCESSOR, find_media_in_message, refuse_media
from rlox_grpo.prompts.picture_messages import COLUMNS as PICTURE_COLUMNS
from rlox_grpo.prompts.picture_messages import insert_pictures, is_picture, label_pictures, list_pictures, refuse_tags
from rlox_grpo.prompts.pictures import refuse_unfit_image
from rlox_grpo.prompts.rows import (
    add_system_message,
    refuse_unread_variables,
    rename_columns,
    warn_about_replaced_columns,
)
from rlox_grpo.prompts.templates import apply_template
from rlox_grpo.rewards.copies import copy_row, copy_value
from rlox_grpo.types import Picture, Prompt

if TYPE_CHECKING:
    import datasets
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlox_grpo.prompts.pictures import PictureReader

PromptsLike: TypeAlias = (
    "Tensor | Sequence[str] | Sequence[Any] | datasets.Dataset | datasets.IterableDataset | Iterable[Any] "
    "| Callable[[], Iterable[Any]] | str | Path"
)
"""A token tensor ``[num_prompts, prompt_len]``, strings, chat messages, rows with a ``prompt`` column, the path of a
file of rows, or a stream of rows (:mod:`rlox_grpo.prompts.stream`)."""


def load_prompts(
    prompts: PromptsLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    template: str | None = None,
    *,
    prompt_column: str = "prompt",
    columns: Mapping[str, str] = MappingProxyType({}),
    system_prompt: str | None = None,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    needs_template: bool = False,
    reader: PictureReader | None = None,
    no_pictures: str = NO_PROCESSOR,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Prompt]:
    """Tokenise ``prompts``.

    Args:
        prompts: token tensor ``[num_prompts, prompt_len]``; list of strings, of chat messages (lists of
            ``{"role", "content"}``) or of token id lists; rows (list of dicts or ``datasets.Dataset``) with a
            ``prompt`` column in any of these forms, whose other columns reach the reward functions; or the path of a
            ``.jsonl``, ``.parquet`` or ``.csv`` file of such rows.
        tokenizer: needed unless every prompt is token ids. Strings get the special tokens that it adds by itself;
            messages go through its chat template, continued when the last message is the assistant's.
        template: name of a template that writes the prompts of rows without a ``prompt`` column; see
            :mod:`rlox_grpo.prompts.templates`.
        prompt_column: the column with the prompt.
        columns: new name of a column → its name in the rows.
        system_prompt: system message before each prompt. A prompt that is text becomes a user message.
        chat_template_kwargs: variables for the chat template.
        needs_template: every prompt must be written by ``template``; a prompt in the rows raises an error.
        reader: reads pictures, in the columns ``images`` and ``image`` and in messages. If a row has pictures, prompts
            that are text become user messages. None: pictures raise an error.
        no_pictures: why there is no reader.
        tools: JSON schemas of tools, which the chat template writes into prompts that are messages.

    Raises:
        ValueError: there is no prompt, or one is invalid: empty or blank, a row without a column that is needed, a
            picture that cannot be read, text without a tokenizer, text to which the tokenizer adds its end token,
            chat messages as JSON text, a lone surrogate, a message without role or content or with an unknown role, a
            second system message, a variable that the chat template does not read. The message names the index.
        TypeError: a prompt has another type, a column cannot be copied, or ``prompts`` is a mapping such as a
            ``DatasetDict``.
    """
    rows = list_rows(
        prompts,
        template,
        prompt_column,
        columns,
        needs_template=needs_template,
        no_pictures="" if reader is not None else no_pictures,
    )
    if system_prompt is not None:
        rows = [
            (add_system_message(source, system_prompt, f"prompts[{index}]"), row)
            for index, (source, row) in enumerate(rows)
        ]
    rows = [(source.tolist() if hasattr(source, "tolist") else source, row) for source, row in rows]
    pictures: list[tuple[Picture, ...]] = [()] * len(rows)
    if reader is not None:
        folder = Path(prompts).parent if isinstance(prompts, (str, Path)) else Path()
        rows, pictures = _read_pictures(rows, reader, folder)
    refuse_unread_variables(chat_template_kwargs, tokenizer, [source for source, _ in rows])
    has_chat = any(isinstance(source, list) and source and isinstance(source[0], Mapping) for source, _ in rows)
    # A reader wraps them itself, for its processor's template.
    wraps_texts = reader is None and tokenizer is not None and has_chat and needs_entries(tokenizer)
    variables = {**chat_template_kwargs, "tools": [*tools]} if tools else chat_template_kwargs
    rendered = [
        _render(source, index, tokenizer, variables, reader, no_pictures, wraps_texts=wraps_texts)
        for index, (source, _) in enumerate(rows)
    ]
    loaded: list[Prompt] = []
    for index, (token_ids, prompt, (source, row)) in enumerate(
        zip(_tokenise(rendered, tokenizer), rendered, rows, strict=True)
    ):
        if not token_ids:
            raise ValueError(f"prompts[{index}] is empty: a completion needs at least one token to start from")
        try:
            ids = np.asarray(token_ids, dtype=np.int64)
        except OverflowError:
            raise ValueError(f"prompts[{index}] has the token id {max(token_ids, key=abs)}: it is no int64") from None
        if reader is not None:
            ids = reader.expand(ids, pictures[index], f"prompts[{index}]")
        text, source = (prompt.text, source) if isinstance(prompt, _Text) else (None, None)
        loaded.append(Prompt(ids, index, text, source, row, pictures=pictures[index]))
    return loaded


def _read_pictures(
    rows: Sequence[tuple[Any, Mapping[str, Any]]], reader: PictureReader, folder: Path
) -> tuple[list[tuple[Any, Mapping[str, Any]]], list[tuple[Picture, ...]]]:
    """Return the rows with prompts as messages, if any row has pictures or a column of them, and the pictures.

    The column decides where no row has pictures, because the rows of a stream are read one at a time.
    """
    sources, values = [], []
    for index, (source, row) in enumerate(rows):
        # A column renamed to `prompt` may be written by a template, so the pictures are those of the row.
        written, ordered = insert_pictures(source, list_pictures(row, f"prompts[{index}]"), f"prompts[{index}]")
        sources.append(written)
        values.append(ordered)
    if not any(values) and not any(name in row for _, row in rows for name in PICTURE_COLUMNS):
        return list(rows), [()] * len(rows)
    for index, (source, ordered) in enumerate(zip(sources, values, strict=True)):
        if not ordered:
            refuse_tags(source, f"prompts[{index}]")
    pictures = [
        tuple(reader.read(value, folder, f"prompts[{index}], picture {number}") for number, value in enumerate(ordered))
        for index, ordered in enumerate(values)
    ]
    # Equal messages with other pictures are other prompts, for rules that compare prompts too.
    sources = [label_pictures(source, several) for source, several in zip(sources, pictures, strict=True)]
    # Reward functions get a column of every row or of none, and rows without pictures may lack it.
    names = [name for name in PICTURE_COLUMNS if any(name in row for _, row in rows)]
    missing: dict[str, Any] = {"images": [], "image": None}
    filled = [{**row, **{name: missing[name] for name in names if name not in row}} for _, row in rows]
    return list(zip(sources, filled, strict=True)), pictures


def load_rows(
    prompts: PromptsLike,
    *,
    prompt_column: str = "prompt",
    columns: Mapping[str, str] = MappingProxyType({}),
    reader: PictureReader | None = None,
    no_pictures: str = NO_PROCESSOR,
) -> list[Prompt]:
    """Load rows for an environment, which writes the prompts itself. ``token_ids`` are empty.

    The column ``prompt``, text or chat messages, is optional and is passed to the environment unchanged. With pictures
    it is passed as messages whose entries of pictures have their digests. For the arguments see :func:`load_prompts`.

    Raises:
        ValueError: there is no row, a row lacks a column that ``columns`` renames, or a row has pictures that cannot be
            read, or pictures and no prompt.
        TypeError: as :func:`load_prompts`, or a prompt is token ids.
    """
    rows = list_rows(
        prompts,
        None,
        prompt_column,
        columns,
        needs_prompt=False,
        no_pictures="" if reader is not None else no_pictures,
    )
    pictures: list[tuple[Picture, ...]] = [()] * len(rows)
    if reader is not None:
        for index, (source, row) in enumerate(rows):
            if source is None and list_pictures(row, f"prompts[{index}]"):
                raise ValueError(
                    f"prompts[{index}] has pictures and no prompt that shows them: add the column 'prompt', or if the "
                    "environment alone reads them, rename the column: columns={'reference_images': 'images'}"
                )
        folder = Path(prompts).parent if isinstance(prompts, (str, Path)) else Path()
        rows, pictures = _read_pictures(rows, reader, folder)
    for index, (source, _) in enumerate(rows):
        if isinstance(source, str):
            _refuse_written_messages(source, index)
        is_chat = isinstance(source, list) and all(isinstance(message, Mapping) for message in source)
        if not (source is None or isinstance(source, str) or is_chat):
            raise TypeError(
                f"prompts[{index}] is {type(source).__name__}: an environment takes rows, texts or messages"
            )
    nothing = np.empty(0, dtype=np.int64)
    return [
        Prompt(nothing, index, None, source, row, pictures=pictures[index]) for index, (source, row) in enumerate(rows)
    ]


def list_entries(prompts: PromptsLike) -> list[Any]:
    """Return the rows of a file, a dataset, a frame or a list, or the prompts of a tensor or a list.

    Raises:
        TypeError: ``prompts`` is a mapping such as a ``DatasetDict``, or is not an object that has rows.
        ValueError: a tensor does not have two dimensions, or a file cannot be read.
    """
    if isinstance(prompts, (str, Path)):
        return list(read_rows(prompts))
    table: Any = prompts
    if not hasattr(table, "__iter__") and not hasattr(table, "__getitem__"):
        raise TypeError(f"prompts is {type(table).__name__}: expected a list of rows, a data set or a file's path")
    if isinstance(table, Mapping):
        kind, names = type(table).__name__, ", ".join(map(repr, table))
        if any(hasattr(split, "column_names") for split in table.values()):  # datasets.DatasetDict
            first = next(iter(table))
            raise TypeError(
                f"prompts is a {kind} with the splits {names}: pass one of them, such as prompts[{first!r}]"
            )
        raise TypeError(
            f"prompts is a {kind} with the keys {names}: expected a list of rows, each with a 'prompt'. To train on "
            "several data sets, name each, as {'math': rows}, and none as a column"
        )
    if hasattr(table, "ndim") and hasattr(table, "tolist"):  # a tensor or an array
        if table.ndim != 2:
            raise ValueError(f"prompts has shape {tuple(table.shape)}: expected [num_prompts, prompt_len]")
        return list(table.tolist())
    entries = list(read_table(table))
    refuse_paths(entries)
    return entries


def list_rows(
    prompts: PromptsLike,
    template: str | None = None,
    prompt_column: str = "prompt",
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    needs_prompt: bool = True,
    needs_template: bool = False,
    no_pictures: str = NO_PROCESSOR,
) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the source of each prompt and its other columns, under their new names.

    For the arguments and the errors see :func:`load_prompts`. Without ``needs_prompt``, the source of a row without a
    prompt is None. ``no_pictures`` says why pictures raise an error; if it is empty, the columns ``images`` and
    ``image`` may hold them.
    """
    renamed = {**columns, **({} if prompt_column == "prompt" else {"prompt": prompt_column})}
    entries = list_entries(prompts)
    if renamed and not any(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"columns are renamed ({renamed}) and prompts has no columns: pass rows, as a list of dicts")
    warn_about_replaced_columns(entries, renamed)
    rows: list[tuple[Any, Mapping[str, Any]]] = []
    for index, entry in enumerate(entries):
        if not no_pictures:
            named = rename_columns(entry, renamed, index) if isinstance(entry, Mapping) else {"prompt": entry}
            _refuse_unfit_images(named, index)
        if isinstance(entry, Mapping):
            row = rename_columns(copy_row(entry, f"prompts[{index}]"), renamed, index)
        else:
            row = {"prompt": copy_value(entry)}
        shown = () if no_pictures else PICTURE_COLUMNS
        refuse_media(
            {name: row[name] for name in row if name not in shown}, index, columns, no_pictures or NO_PROCESSOR
        )
        if "prompt" in row:
            if template is not None and needs_template:
                raise ValueError(
                    f"prompts[{index}] has a prompt, and prompt_template={template!r} is ignored: it writes the "
                    "prompts of rows without one. Leave prompt_template out, or drop the column 'prompt'"
                )
            rows.append((row["prompt"], {name: value for name, value in row.items() if name != "prompt"}))
        elif template is not None:
            try:
                rows.append((apply_template(template, row), row))
            except (ValueError, TypeError) as error:
                raise ValueError(f"prompts[{index}]: {error}") from error
        elif not needs_prompt:
            rows.append((None, row))
        else:
            raise ValueError(
                f"prompts[{index}] has no 'prompt' column; it has {', '.join(map(repr, row))}. Set prompt_template "
                "to build the prompt from them (such as 'boxed', which reads 'question'), or prompt_column to the "
                "column that holds it"
            )
    if not rows:
        raise ValueError("prompts is empty: there is nothing to train on")
    return rows


def _refuse_unfit_images(row: Mapping[str, Any], index: int) -> None:
    """Raise ValueError for a PIL image of a row that is animated, empty or too large; see `refuse_unfit_image`."""
    where = f"prompts[{index}]"
    values = list_pictures(row, where)
    if isinstance(row.get("prompt"), (str, list)):
        _, values = insert_pictures(row["prompt"], values, where)
    for number, value in enumerate(values):
        refuse_unfit_image(value, f"{where}, picture {number}")


class _Text(NamedTuple):
    """The text of a prompt, and whether the tokenizer adds special tokens."""

    text: str
    special: bool


def _render(
    source: Any,
    index: int,
    tokenizer: PreTrainedTokenizerBase | None,
    variables: Mapping[str, Any],
    reader: PictureReader | None = None,
    no_pictures: str = NO_PROCESSOR,
    *,
    wraps_texts: bool = False,
) -> _Text | list[int]:
    """Return the text of a prompt, or its token ids if it is given as token ids.

    With ``wraps_texts``, the chat template gets the contents of messages as lists of entries.
    """
    if isinstance(source, str):
        _require_tokenizer(tokenizer, index)
        _refuse_surrogates(source, index)
        _refuse_blank([source], index)
        _refuse_written_messages(source, index)
        return _Text(source, special=True)
    if isinstance(source, list) and source and isinstance(source[0], Mapping):
        tokenizer = _require_tokenizer(tokenizer, index)
        template = getattr(tokenizer, "chat_template", None) if reader is None else reader.chat_template
        if template is None:
            raise ValueError(
                f"prompts[{index}] is chat messages and the tokenizer has no chat_template: set "
                "tokenizer.chat_template, take model and tokenizer of an instruct version, or write the prompts as text"
            )
        _check_messages(source, index, str(template), "" if reader is not None else no_pictures)
        shown = wrap_texts(source) if wraps_texts else source
        prefilled = source[-1]["role"] == "assistant"
        write = partial(tokenizer.apply_chat_template, tokenize=False) if reader is None else reader.render
        try:
            rendered = write(shown, add_generation_prompt=not prefilled, continue_final_message=prefilled, **variables)
        except Exception as error:  # jinja2's errors, and those that a template raises
            raise ValueError(f"prompts[{index}]: the tokenizer's chat template refuses it: {error}") from error
        _refuse_surrogates(str(rendered), index)
        return _Text(str(rendered), special=False)  # the template writes its own special tokens
    if isinstance(source, (list, tuple)) and all(isinstance(token, int) for token in source):
        return list(source)
    raise TypeError(
        f"prompts[{index}] is {type(source).__name__}: expected a string, chat messages (a list of dicts) or a list of "
        "token ids"
    )


_TEXTS_PER_CALL = 1024
"""A call of the tokenizer has a high fixed cost, and holds large objects for all its texts in memory."""


def _tokenise(rendered: Sequence[_Text | list[int]], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Return the token ids of each prompt."""
    token_ids = [[] if isinstance(prompt, _Text) else prompt for prompt in rendered]
    for special in (True, False):
        texts = [
            (index, prompt.text)
            for index, prompt in enumerate(rendered)
            if isinstance(prompt, _Text) and prompt.special is special
        ]
        for begin in range(0, len(texts), _TEXTS_PER_CALL):
            indices, some = zip(*texts[begin : begin + _TEXTS_PER_CALL], strict=True)
            assert tokenizer is not None  # _render
            encoded = tokenizer(list(some), add_special_tokens=special)["input_ids"]
            for index, text, row_ids in zip(indices, some, encoded, strict=True):
                if special:
                    _refuse_added_end(text, row_ids, tokenizer, index)
                token_ids[index] = row_ids
    return token_ids


def _refuse_added_end(text: str, token_ids: Sequence[int], tokenizer: Any, index: int) -> None:
    """Raise ValueError if the tokenizer adds its end token to a text, which the completion continues."""
    end = getattr(tokenizer, "eos_token", None)
    if end and not text.endswith(end) and token_ids and token_ids[-1] == tokenizer.eos_token_id:
        raise ValueError(
            f"prompts[{index}]: the tokenizer puts its end token {end!r} behind a text, where the completion begins: "
            "set tokenizer.add_eos_token = False, or pass chat messages"
        )


ROLES = ("system", "user", "assistant", "tool", "developer")
"""Roles of chat messages that every prompt may use; others must occur in the tokenizer's chat template."""


def _check_messages(messages: Sequence[Any], index: int, template: str, no_pictures: str) -> None:
    """Raise ValueError for a message without role or content, or with a role that the template does not contain.

    ``no_pictures`` says why pictures raise an error; if it is empty, messages may have entries ``{"type": "image"}``.
    """
    for position, message in enumerate(messages):
        where = f"prompts[{index}], message {position}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {type(message).__name__}: expected {{'role': …, 'content': …}}")
        if message.get("role") is None and "from" in message and "value" in message:  # ShareGPT's form
            raise ValueError(
                f"{where} has no 'role'; it has {', '.join(map(repr, message))}: convert ShareGPT's messages to "
                "{'role': 'user' for 'human' and 'assistant' for 'gpt', 'content': message['value']}"
            )
        for key in ("role", "content"):
            if message.get(key) is None and not (key == "content" and message.get("tool_calls")):
                has = "it is None" if key in message else f"it has {', '.join(map(repr, message)) or 'nothing'}"
                raise ValueError(f"{where} has no {key!r}; {has}")
        content = message.get("content")
        if not no_pictures and isinstance(content, list):  # its pictures are read
            content = [entry for entry in content if not is_picture(entry)]
        content = [content] if is_picture(content) else content  # alone, without a list: templates write nothing for it
        if media := find_media_in_message({**message, "content": content}):
            raise ValueError(f"{where} has {media}: leave it out; {no_pictures or NO_PROCESSOR}")
        for entry in content if isinstance(content, list) else ():
            if isinstance(entry, Mapping) and entry.get("type") != "text":
                raise ValueError(
                    f"{where} has a part of the type {entry.get('type')!r}: leave it out; {no_pictures or NO_PROCESSOR}"
                )
        refuse_unknown_role(message["role"], template, where)
    _refuse_blank(
        [message.get("content") for message in messages if message["role"] not in ("system", "assistant")], index
    )


def refuse_unknown_role(role: Any, template: str, where: str) -> None:
    """Raise ValueError, about the message ``where``, if neither :data:`ROLES` nor the chat template has its role."""
    if role not in ROLES and str(role) not in template:
        raise ValueError(f"{where} has the role {role!r}: expected one of {', '.join(ROLES)}")


def _refuse_blank(contents: Sequence[Any], index: int) -> None:
    """Raise ValueError if a prompt is only white space; ``contents`` are the contents of its messages to the model."""
    if contents and all(isinstance(text, str) and not text.strip() for text in contents):
        kind = "blank" if any(contents) else "empty"
        raise ValueError(f"prompts[{index}] is {kind}: a completion needs at least one token to start from")


_WRITTEN_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*["'](role|content|from|value)["']\s*:""")


def _refuse_written_messages(text: str, index: int) -> None:
    """Raise ValueError for text that is a list of chat messages, as JSON or as Python's ``repr``."""
    if _WRITTEN_MESSAGES.match(text):
        raise ValueError(
            f"prompts[{index}] is the text {text[:40]!r}…, chat messages that are not parsed: read the column by "
            "json.loads and pass lists of messages; if the text itself is the prompt, pass it as one user message"
        )


def _refuse_surrogates(text: str, index: int) -> None:
    """Raise ValueError for a lone surrogate (half of a UTF-16 pair), which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompts[{index}] holds the lone surrogate {text[error.start]!r} at character {error.start}, which is no "
            "text: replace it, by text.encode('utf-8', 'replace').decode() for example"
        ) from None


def _require_tokenizer(tokenizer: PreTrainedTokenizerBase | None, index: int) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ValueError(
            f"prompts[{index}] is text and there is no tokenizer: pass tokenizer=, or prompts as token ids"
        )
    return tokenizer


def refuse_too_long(
    prompts: Sequence[Prompt], max_new_tokens: int, positions: int | None, *, owner: str = "the model"
) -> None:
    """Raise ValueError if a prompt and ``max_new_tokens`` exceed ``positions``; it names the prompt and ``owner``."""
    if positions is None:
        return
    for prompt in prompts:
        if len(prompt.token_ids) + max_new_tokens > positions:
            shown = ""
            if prompt.pictures:
                count = sum(len(picture.token_ids) for picture in prompt.pictures)
                shown = f", {count} of them for {len(prompt.pictures)} pictures, which smaller pictures lower"
            raise ValueError(
                f"prompts[{prompt.index}] has {len(prompt.token_ids)} tokens{shown}: with "
                f"max_new_tokens={max_new_tokens} "
                f"it passes {owner}'s {positions} positions; drop or shorten the prompt, or lower max_new_tokens"
            )


def refuse_unknown_ids(prompts: Sequence[Prompt], vocab_size: int | None) -> None:
    """Raise ValueError for a token id below 0 or from ``vocab_size`` on; it names the prompt and the position."""
    for prompt in prompts:
        ids = np.asarray(prompt.token_ids)
        beyond = (ids < 0) | (ids >= vocab_size) if vocab_size is not None else ids < 0
        if beyond.any():
            position = int(beyond.argmax())
            size = "" if vocab_size is None else f", and the model has the ids 0 to {vocab_size - 1}"
            raise ValueError(
                f"prompts[{prompt.index}] has the token id {ids[position]} at position {position}"
                f"{size or ', and ids are not negative'}: tokenize it with the model's own tokenizer"
            )


def shuffle_prompts(num_prompts: int, seed: int, start: int) -> Iterator[int]:
    """Yield the indices of an endless sequence of seeded permutations of all prompts, from draw ``start`` on.

    The order depends only on the arguments, so a resumed run needs only the number of draws.
    """
    epoch, offset = divmod(start, num_prompts)
    while True:
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_prompts)
        yield from (int(index) for index in order[offset:])
        epoch, offset = epoch + 1, 0


class PromptDraws:
    """Draw prompts in the order of :func:`shuffle_prompts`.

    Attributes:
        draws: Number of draws, including skipped prompts; a resumed run continues there.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, start: int, chance: Callable[[int], float] | None = None
    ) -> None:
        """Begin at draw ``start``.

        Args:
            prompts: all prompts.
            seed: seed of the order and of the skipped prompts.
            start: number of earlier draws.
            chance: function from the index of a prompt to the probability, above 0, that it is not skipped.
        """
        self._prompts, self._seed, self._chance = prompts, seed, chance
        self._order = shuffle_prompts(len(prompts), seed, start)
        self.draws = start

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts."""
        taken: list[Prompt] = []
        while len(taken) < count:
            index = next(self._order)
            # Seeded by the number of the draw, so that a resumed run skips the same prompts.
            random = np.random.default_rng([self._seed, self.draws, *b"skip"])
            if self._chance is None or random.random() < self._chance(index):
                taken.append(self._prompts[index])
            self.draws += 1
        return taken


def fingerprint_prompts(prompts: Sequence[Prompt]) -> str:
    """Return a digest of all token ids and pictures, with which a resumed run checks that the prompts are the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.token_ids).to_bytes(8, "little"))
        digest.update(prompt.token_ids.tobytes())
        for picture in prompt.pictures:  # all have the same ids
            digest.update(picture.digest.encode())
    return digest.hexdigest()[:16]
