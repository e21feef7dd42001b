"""Simple GRPO: word problems, and a reference policy in a process of its own.

python examples/simple_grpo.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("simple_grpo", word_problems)
