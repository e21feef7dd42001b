"""Several teachers: a column of the rows names the teacher of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from rlox_grpo.batch.select import select_rows
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.reference.teacher import Teacher, reorder
from rlox_grpo.types import Batch, Prompt, ScoredGroup


@dataclass(frozen=True, eq=False)
class Teachers:
    """A teacher for each name that the rows use.

    Attributes:
        by_name: the teachers; their models do not change.
        column: the column of the rows with the name of their teacher.
    """

    by_name: Mapping[str, Teacher]
    column: str

    @property
    def fingerprint(self) -> dict[str, str | None]:
        """What a resumed run must have: the fingerprint of each teacher by name."""
        return {name: teacher.fingerprint for name, teacher in sorted(self.by_name.items())}

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights of all teachers on the device between two steps."""
        return sum(teacher.held_bytes for teacher in self.by_name.values())

    @property
    def moving(self) -> Reference | None:
        """Return None: none of several teachers takes over the policy's weights."""
        return None

    @property
    def max_positions(self) -> int | None:
        """The lowest limit of the teachers; None: no teacher has a limit."""
        return min((teacher.max_positions for teacher in self.by_name.values() if teacher.max_positions), default=None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Move all offloaded models to the device."""
        with ExitStack() as stack:
            for teacher in self.by_name.values():
                stack.enter_context(teacher.in_use())
            yield

    def find_name(self, prompt: Prompt) -> str:
        """Return the name of a prompt's teacher.

        Raises:
            ValueError: the row has no such column, or it holds another name; the message names the prompt.
        """
        choices = ", ".join(map(repr, self.by_name))
        if self.column not in prompt.columns:
            has = ", ".join(map(repr, prompt.columns)) or "none"
            raise ValueError(
                f"prompts[{prompt.index}] has no column {self.column!r} (teacher_column) with the name of its teacher, "
                f"one of {choices}; its columns: {has}"
            )
        name = prompt.columns[self.column]
        if not isinstance(name, str) or name not in self.by_name:
            raise ValueError(
                f"prompts[{prompt.index}]: teacher_column={self.column!r} holds {name!r:.80}, and teacher has {choices}"
            )
        return name

    def list_names(self, scored: Sequence[ScoredGroup]) -> list[str]:
        """Return the name of the teacher of each completion, prompt-major."""
        return [
            name for group in scored for name in [self.find_name(group.group.prompt)] * len(group.group.completions)
        ]

    @torch.no_grad()
    def add(self, batch: Batch, names: Sequence[str], lay_out: Callable[[Batch], list[Batch] | None]) -> Batch:
        """Return ``batch`` with the log-probs of its loss tokens, each row's by its own teacher.

        A teacher runs over its own rows alone.

        Args:
            batch: a micro-batch.
            names: the name of the teacher of each completion of the step, by ``batch.row_index``.
            lay_out: rows → their layouts for :meth:`Teacher.add`.
        """
        row_names = [names[index] for index in batch.row_index.tolist()]
        numbers, log_probs, tops = [], [], []
        for name in dict.fromkeys(row_names):
            rows = torch.tensor([row for row, other in enumerate(row_names) if other == name]).to(
                batch.row_index.device
            )
            selected = select_rows(batch, rows)
            scored = self.by_name[name].add(selected, lay_out(selected)).log_probs
            assert scored.teacher is not None
            numbers.append(rows)
            log_probs.append(scored.teacher)
            tops.append(scored.is_teacher_top)
        order = torch.cat(numbers)  # int64 [N], the row of each value below
        scores = replace(batch.log_probs, teacher=reorder(torch.cat(log_probs), order))
        if all(teacher.has_distributions for teacher in self.by_name.values()):  # the same metrics in each micro-batch
            scores = replace(scores, is_teacher_top=reorder(torch.cat([top for top in tops if top is not None]), order))
        return replace(batch, log_probs=scores)
