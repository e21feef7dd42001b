"""verl's GSM8K example: one optimizer step for each mini-batch of a batch, with a mean over all its tokens.

python examples/verl.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("verl", word_problems)
