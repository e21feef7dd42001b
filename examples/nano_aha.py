"""nano-aha-moment: Countdown with a token mean over all responses and a frozen reference.

python examples/nano_aha.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import countdown_problems, run

if __name__ == "__main__":
    run("nano_aha", countdown_problems)
