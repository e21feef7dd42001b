"""nano-aha-moment: Countdown; vLLM samples, DeepSpeed updates, each with weights of its own, and a frozen reference.

python examples/nano_aha.py [--out DIR] [--steps N] [--any_field value]

It needs both extras: pip install "rlox-grpo[vllm,deepspeed]". Without them transformers samples and torch updates:
python examples/nano_aha.py --engine hf --updater torch
"""

from learner import countdown_problems, run

if __name__ == "__main__":
    run("nano_aha", countdown_problems)
