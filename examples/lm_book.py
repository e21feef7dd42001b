"""The Hundred-Page Language Models Book: an outer loop that updates the reference, and an inner GRPO loop.

python examples/lm_book.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("lm_book", word_problems)
