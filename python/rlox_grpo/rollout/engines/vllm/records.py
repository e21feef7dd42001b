"""Records of running vLLM servers: URL, token and log file, for trainers of the same user on the same host."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE

FOLDER_VARIABLE = "RLOX_GRPO_STATE_DIR"
_TAIL_LINES = 15


@dataclass(frozen=True)
class ServerRecord:
    """A server on this host: URL, token, log file, and the process id of its launcher."""

    url: str
    token: str
    log: str
    launcher_pid: int

    def launcher_is_alive(self) -> bool:
        """Whether the launcher runs; it restarts a server that has died."""
        try:
            os.kill(self.launcher_pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process took the number
            return False
        return True

    def log_tail(self) -> str:
        """The last lines of the server's log; empty where there are none."""
        try:
            lines = Path(self.log).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


def write_record(record: ServerRecord) -> Path:
    """Write ``record`` to a file that only this user can read. Returns its path."""
    path = _path(record.url)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(record), file)
    os.replace(partial, path)
    return path


def find_record(url: str) -> ServerRecord | None:
    """Read the record of the server at ``url``; None if it was not started on this host."""
    try:
        return ServerRecord(**json.loads(_path(url).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none, or cut short
        return None


def remove_record(url: str) -> None:
    """Remove the record of the server at ``url``."""
    _path(url).unlink(missing_ok=True)


def find_token(url: str) -> str:
    """Find the token of the server at ``url`` in the environment, else in its record.

    Raises:
        ValueError: neither has one.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    record = find_record(url)
    if record is None:
        raise ValueError(
            f"no token for the server at {url}: set {TOKEN_VARIABLE}, or start it on this host with `rlox-grpo serve`"
        )
    return record.token


def _path(url: str) -> Path:
    parts = urlsplit(url)
    folder = os.environ.get(FOLDER_VARIABLE) or str(Path.home() / ".cache" / "rlox-grpo" / "servers")
    return Path(folder) / f"{parts.hostname}_{parts.port}.json"
