"""verl's GSM8K example: mini-batches of one batch, a step each; the loss is a mean over all their tokens.

python examples/verl.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("verl", word_problems)
