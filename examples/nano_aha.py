"""nano-aha-moment: Countdown with vLLM for generation, DeepSpeed for the update, and a frozen reference.

python examples/nano_aha.py [--out DIR] [--steps N] [--any_field value]

Needs the extras vllm and deepspeed. Without them, use the built-in engine and the torch updater:
python examples/nano_aha.py --engine hf --updater torch
"""

from learner import countdown_problems, run

if __name__ == "__main__":
    run("nano_aha", countdown_problems)
