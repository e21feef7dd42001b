"""Transfer the policy's weights to vLLM servers by a file, Ray's object store or NCCL, then check the canary prompt."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlox_grpo.distributed.ray_cluster.remote_file import SCHEME, require_served
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.canary import CANARY_GAP, Canary, CanaryCheck
from rlox_grpo.rollout.engines.vllm.auth import LOADING
from rlox_grpo.rollout.engines.vllm.connection import MARK, POLL_SECONDS, Outdated, ServerConnection, Unavailable
from rlox_grpo.rollout.engines.vllm.picture_requests import RequestMaker
from rlox_grpo.rollout.engines.vllm.requests import SCORING
from rlox_grpo.rollout.engines.weight_file import write_weights
from rlox_grpo.rollout.engines.weight_folder import WeightFolder
from rlox_grpo.rollout.engines.weight_sync import Manifest, check_weights, digest_weights, hold_weights

logger = logging.getLogger(__name__)


class WeightTransfer:
    """Stores the weights of one version, and transfers them to servers.

    Attributes:
        mark: ``version:digest`` of the weights; ``"none"`` before the first weights.
        file: the safetensors file of the weights; None with NCCL, and before the first weights.
        canary: the canary prompt that is checked after each transfer; None: no check.
        is_loading: whether ``load_weights`` is running. When it has ended, the trainer may change the tensors.
    """

    def __init__(
        self,
        sync_dir: str | Path | None,
        nccl_address: str | None,
        *,
        is_first: bool,
        timeout: float,
        note: Callable[..., None],
        requests: RequestMaker | None = None,
    ) -> None:
        """Prepare the transfers of one rank.

        Args:
            sync_dir, nccl_address: see :class:`rlox_grpo.rollout.engines.vllm.client.VLLMServerEngine`.
            is_first: whether this is rank 0, which writes the files and sends by NCCL.
            timeout: maximum seconds to wait for a server.
            note: called after each transfer: ``note(server, seconds, is_restart=…)``.
            requests: makes the request for the canary prompt; None: the model is trained on text.
        """
        self._requests = requests or RequestMaker(None, None)
        self._timeout, self._note = timeout, note
        self._loaded: set[ServerConnection] = set()
        """Servers that have received weights before."""
        self.mark = "none"
        self.file: Path | None = None
        self.canary: Canary | None = None
        self.is_loading = False
        self._version = -1
        self._weights: Iterable[tuple[str, Tensor]] = ()
        self._nccl_address, self._is_first = nccl_address, is_first
        self._scheme = ""
        if sync_dir == SCHEME:
            require_served()
            sync_dir, self._scheme = None, SCHEME
        self._checks: dict[ServerConnection, CanaryCheck] = {}
        self._folder: WeightFolder | None = None
        if is_first and nccl_address is None:
            self._folder = WeightFolder(sync_dir)
            weakref.finalize(self, self._folder.remove)

    def hold(self, weights: Iterable[tuple[str, Tensor]], expected: Manifest, version: int) -> None:
        """Store new weights on rank 0, and write their file, which replaces the previous one.

        For NCCL, weights that can be iterated only once are stored as a list, because each transfer iterates them.

        Raises:
            WeightMismatchError: names, shapes or types are not those of ``expected``; the previous weights stay.
        """
        if self._folder is not None:
            file = self._folder.path / f"{version}.safetensors"
            before = self.file
            digest = write_weights(weights, expected, file)
            if before is not None and before != file:
                before.unlink(missing_ok=True)
            self.adopt(f"{version}:{digest}", file, version)
            return
        self._weights = hold_weights(weights)
        check_weights(self._weights, expected)
        self.adopt(f"{version}:{digest_weights(self._weights)}", None, version)

    def adopt(self, mark: str, file: Path | None, version: int) -> None:
        """Use the weights of rank 0 from now on."""
        self.mark, self.file, self._version = mark, file, version

    def bring_up(self, server: ServerConnection, deadline: float, waits: bool) -> None:
        """Transfer the current weights to a server that does not have them; exclude the server if that fails.

        With ``waits``, retry until the deadline, because the server may be restarting. If several threads call this for
        the same server, the first transfers the weights and the others wait.
        """
        with server.lock:
            while True:
                try:
                    held = server.held_weights(deadline)
                    if held != self.mark:
                        start = time.monotonic()
                        self.send(server, deadline)
                        is_restart = held == "none" and (not self.is_loading or server in self._loaded)
                        self._note(server, time.monotonic() - start, is_restart=is_restart)
                        self._loaded.add(server)
                    elif self._requests.reader is not None and server not in self._checks:
                        self.check_canary(server, deadline)  # an earlier run may have had another processor
                    server.is_up, server.trouble = True, ""
                    return
                except server.failures as error:
                    if waits:
                        server.note_while_waiting(self._timeout, error)
                    server.note(error)
                    if isinstance(error, Outdated) or not (waits and server.may_come_back(deadline)):
                        server.is_up = False
                        logger.warning("%s is left out until the next sync: %s", server.url, error)
                        return
                    time.sleep(POLL_SECONDS)

    def send(self, server: ServerConnection, deadline: float) -> None:
        """Transfer the weights to a server, and check its log-probs.

        Raises:
            Unavailable, httpx.TransportError: a failure of the server.
            EngineError: the server refused the weights, or its log-probs differ from the canary's.
        """
        # The server first finishes its running requests with the old weights. It then clears its caches, also those of
        # processed pictures and of their features.
        server.post("/pause?mode=wait", deadline)
        if self._nccl_address is None:
            self._send_file(server, deadline)
        else:
            self._send_by_nccl(server, deadline)
        # The blocks of the cache have keys and values of the old weights.
        if not server.post("/reset_prefix_cache", deadline).json()["success"]:
            raise Unavailable("it did not clear its prefix cache: requests are still running")
        server.post("/resume", deadline, headers={MARK: self.mark})
        self.check_canary(server, deadline)

    def check_canary(self, server: ServerConnection, deadline: float) -> None:
        """Compare a server's log-probs of the canary prompt with the trainer's; do nothing without a canary.

        Raises:
            EngineError: the log-probs differ.
        """
        canary = self.canary
        if canary is None:
            return
        dtype = str(server.post("/collective_rpc", deadline, json={"method": "rlox_dtype"}).json()["results"][0])
        request = self._requests.make_scoring(
            np.asarray(canary.token_ids, np.int64), canary.pictures, SCORING, "the prompt that checks the weights"
        )
        answer = server.post(request.path, deadline, json=request.body)
        self.check_mark(answer.headers.get(MARK, "no mark"))
        answered = request.read_scores(answer.json(), server.url)
        if canary.pictures:
            answered = answered[-len(canary.log_probs) :]
        check = self._checks.setdefault(server, CanaryCheck())
        check.compare(canary, answered, self._version, source=server.url, dtype=dtype)

    def check_mark(self, held: str) -> None:
        """Raise Unavailable if a server answered with other weights."""
        if held != self.mark:
            raise Unavailable(f"it held other weights ({held}) than it was given ({self.mark})")

    def take_metrics(self) -> dict[str, float]:
        """Return ``mismatch/canary_gap_max`` of the transfers since the last call."""
        gaps = [check.gap for check in self._checks.values() if check.gap is not None]
        for check in self._checks.values():
            check.gap = None
        return {CANARY_GAP: max(gaps)} if gaps else {}

    def close(self) -> None:
        """Remove the folder of the weights. The end of the process removes it too."""
        if self._folder is not None:
            self._folder.remove()
        self._weights, self.file = (), None

    def _send_file(self, server: ServerConnection, deadline: float) -> None:
        call = {"method": "rlox_load", "args": [f"{self._scheme}{self.file}"]}
        results = server.post("/collective_rpc", deadline, json=call, headers={MARK: LOADING}).json()["results"]
        refused = [result["refused"] for result in results if "refused" in result]
        if refused:
            raise EngineError(f"{server.url} refused the weights: {refused[0]}")

    def _send_by_nccl(self, server: ServerConnection, deadline: float) -> None:
        from rlox_grpo.rollout.engines.vllm.nccl_transfer import NCCLTransfer

        if not self._is_first:
            raise Unavailable("it holds other weights, and only rank 0 sends them by NCCL")

        def post(path: str, body: dict[str, Any] | None) -> None:
            server.post(path, deadline, json=body, headers={MARK: LOADING})

        seconds = deadline - time.monotonic()
        group, server.nccl = server.nccl, None  # restored on success: a group that failed cannot be used again
        try:
            if group is None:
                num_workers = int(server.get("/get_world_size", deadline).json()["world_size"])
                group = NCCLTransfer(post, num_workers, str(self._nccl_address))
            group.send(self._weights, seconds)
        except (TimeoutError, RuntimeError) as error:
            raise Unavailable(f"NCCL: {error or 'no answer within the deadline'}") from error
        server.nccl = group
        # With async_steps, the trainer changes the policy's tensors after load_weights has returned.
        if not self.is_loading and f"{self._version}:{digest_weights(self._weights)}" != self.mark:
            raise Outdated(
                f"it started again, and the trainer has changed the weights of version {self._version} since"
            )
