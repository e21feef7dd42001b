"""Upload a saved model to the Hugging Face hub, by huggingface_hub's own upload."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

from rlox_grpo.distributed.ranks import Ranks


def check_repo_id(repo_id: str) -> None:
    """Raise ValueError for what cannot be a repository's name on the hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}: {error}") from None


def push_checkpoint(
    save: Callable[[str], None],
    repo_id: str,
    ranks: Ranks,
    *,
    private: bool | None,
    token: str | None,
    revision: str | None,
    message: str,
) -> str:
    """Upload a checkpoint as one commit, and return the commit's address on every rank; rank 0 uploads.

    Args:
        save: writes the checkpoint to a folder; called on every rank.
        repo_id: ``owner/name``, or a name of the token's owner; created if there is none.
        ranks: the processes of the run.
        private: of a repository that is created; None: the hub's or the organization's default.
        token: None: that of ``hf auth login`` or of the environment.
        revision: branch, which must exist; None: main.
        message: of the commit.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the hub refuses; its message says why.
    """
    with ranks.failing_together(), tempfile.TemporaryDirectory() as folder:
        save(folder)
        address = ""
        if ranks.is_first:
            api = HfApi(token=token)
            repository = api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository.repo_id, folder_path=folder, revision=revision, commit_message=message
            )
            address = str(commit.commit_url)
        return str(ranks.gather(address)[0])
