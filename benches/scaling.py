"""A model of a step's time from sizes and data sheets, beside what was measured and what others published.

    python benches/scaling.py            # the tables of docs/guides/scaling.md

It counts bytes that decoding has to read, operations that the update has to do, and bytes that weights take over the
network; it knows nothing of kernels. So it gives the shape of the answer and a floor, and the table says how far above
its floor a real system was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """One GPU: dense bfloat16 FLOP/s, bytes/s of its memory and of its link to other hosts; shares that are reached."""

    flops: float
    memory: float
    network: float
    update_share: float = 0.40
    memory_share: float = 0.70


@dataclass(frozen=True)
class Policy:
    """Parameters, and bytes that the keys and values of one token take."""

    parameters: float
    kv_bytes: float


@dataclass(frozen=True)
class Job:
    """``prompts`` × ``group`` completions, geometric in length with mean ``new`` and cut at ``longest`` tokens.

    ``passes`` are forwards beside the update (old or reference log-probs); ``shares_prompts`` is our update.
    """

    prompts: int
    group: int
    prompt: int
    new: int
    longest: int
    passes: int = 1
    shares_prompts: bool = True

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def forwarded(self) -> float:
        """Tokens of one forward over the step's batch."""
        copies = 1 if self.shares_prompts else self.group
        return self.prompts * (self.prompt * copies + self.group * self.new)


@dataclass(frozen=True)
class Step:
    """Seconds of each part."""

    generation: float
    update: float
    sync: float
    host: float

    def whole(self, *, overlapped: bool = False) -> float:
        """One after another, or generation beside the update (``async_steps = 1`` on devices of their own)."""
        together = max(self.generation, self.update) if overlapped else self.generation + self.update
        return together + self.sync + self.host


def generation_seconds(job: Job, policy: Policy, device: Device, gpus: int) -> float:
    """Decoding, one token of each live row a turn; each GPU holds the whole policy and its share of the rows.

    A turn reads the weights once and each live row's keys and values, or computes 2 operations a parameter and row,
    whichever takes longer. The last row decides when it ends, however few are left.
    """
    rows, seconds, turn = job.rows / gpus, 0.0, 0
    stop = 1 / job.new
    bandwidth, flops = device.memory * device.memory_share, device.flops * device.update_share
    while turn < job.longest:
        live = rows * (1 - stop) ** turn
        if live < 0.5:
            break
        read = (2 * policy.parameters + live * (job.prompt + turn) * policy.kv_bytes) / bandwidth
        seconds += max(read, 2 * policy.parameters * live / flops)
        turn += 1
    return seconds


def update_seconds(job: Job, policy: Policy, device: Device, gpus: int) -> float:
    """6 operations a parameter and token forward and backward, 2 for each further forward; or the gathers of ZeRO 3.

    ZeRO 3 moves the weights three times a micro-batch; micro-batches are as large as memory allows, here 32,768 tokens.
    """
    operations = (6 + 2 * job.passes) * policy.parameters * job.forwarded
    computing = operations / (gpus * device.flops * device.update_share)
    micro_batches = max(1.0, job.forwarded / (32_768 * gpus))
    moving = 0.0 if gpus == 1 else (3 + job.passes) * micro_batches * 2 * policy.parameters / device.network
    return max(computing, moving)


def step(job: Job, policy: Policy, device: Device, generators: int, trainers: int) -> Step:
    """A step on so many GPUs for each side; the same ones where the numbers are the whole machine's."""
    return Step(
        generation_seconds(job, policy, device, generators),
        update_seconds(job, policy, device, trainers),
        # A broadcast in pieces goes through every link once, however many receive it.
        2 * policy.parameters / device.network if generators > 1 else 2 * policy.parameters / device.memory,
        # Measured on two CPU cores: rewards, advantages and layout of 8,192 rows of a thousand tokens.
        0.3 * job.rows / 8192,
    )


H100 = Device(flops=989e12, memory=3.35e12, network=50e9)
LLAMA_8B = Policy(8.0e9, 2 * 32 * 8 * 128 * 2)
QWEN_32B = Policy(32.8e9, 2 * 64 * 8 * 128 * 2)
QWEN_7B = Policy(7.6e9, 2 * 28 * 4 * 128 * 2)


def published() -> None:
    """NeMo RL 0.4's own table (docs/about/performance-summary.md of its repository): DGX H100, Megatron, bfloat16."""
    print("| published run | theirs, s a step | model, s | theirs over model |\n| --- | ---: | ---: | ---: |")
    # They state the mean length of whole sequences; prompts of these problems are about 150 tokens.
    llama = Job(32, 64, 150, 910, 4096, passes=2, shares_prompts=False)
    qwen = Job(32, 64, 150, 3056, 4096, passes=2, shares_prompts=False)
    split = replace(llama, new=979)
    tables = (
        ("Llama 3.1 8B, 16 GPUs, on policy, 2,048 rows of 1,060", 97.7, step(llama, LLAMA_8B, H100, 16, 16).whole()),
        (
            "the same, one step off policy, rows of 1,129 (8 + 8 GPUs assumed)",
            74.6,
            step(split, LLAMA_8B, H100, 8, 8).whole(overlapped=True),
        ),
        (
            "Qwen3 32B, 32 GPUs, on policy, 2,048 rows of 3,206 (8 engines of 4 GPUs)",
            393.0,
            step(qwen, QWEN_32B, H100, 32, 32).whole(),
        ),
    )
    for name, theirs, ours in tables:
        print(f"| {name} | {theirs:.0f} | {ours:.0f} | {theirs / ours:.1f} |")


def sizes() -> None:
    """What the model says of this library's layouts for a 7B policy."""
    print(
        "| GPUs | prompts × G | generation | update | sync | host | step | beside each other, half the GPUs each |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for gpus, prompts in ((1, 16), (8, 128), (32, 512), (32, 128), (512, 512), (512, 8192)):
        job = Job(prompts, 16, 512, 1000, 4096)
        alone = step(job, QWEN_7B, H100, gpus, gpus)
        beside = "–"
        if gpus > 1:
            beside = f"{step(job, QWEN_7B, H100, gpus // 2, gpus // 2).whole(overlapped=True):.0f}"
        print(
            f"| {gpus} | {prompts} × 16 | {alone.generation:.0f} | {alone.update:.0f} | {alone.sync:.1f} | "
            f"{alone.host:.1f} | {alone.whole():.0f} | {beside} |"
        )


def measured() -> None:
    """Our step on this CPU, whose rates are taken from one of the two shapes and tried on the other."""
    # Seconds of a step of benches/test_step.py at one thread: rollout, reference and update.
    shapes = {
        "512 + 128, G16 × 2, V 32,768": (Job(2, 16, 512, 128, 128), 4 * 0.73e6, 8.4e6, 2.0, 0.91 + 3.15),
        "200 + 64, G8 × 4, V 8,192": (Job(4, 8, 200, 64, 64), 4 * 0.73e6, 2.1e6, 0.51, 1.65 - 0.51),
    }
    rates = []
    for job, body, head, _, update in shapes.values():
        predicted = job.rows * job.new
        operations = 8 * body * job.forwarded + 10 * head * predicted  # the head's logits are computed once more
        rates.append((operations, update))
    rate = rates[0][0] / rates[0][1]
    print(f"| CPU, one thread | update and reference, s | model, s |\n| --- | ---: | ---: |\n| {next(iter(shapes))} | "
          f"{rates[0][1]:.2f} | {rates[0][1]:.2f} (calibrated: {rate / 1e9:.0f} GFLOP/s) |")  # fmt: skip
    name = list(shapes)[1]
    print(f"| {name} | {rates[1][1]:.2f} | {rates[1][0] / rate:.2f} |")


if __name__ == "__main__":
    measured()
    print()
    published()
    print()
    sizes()
