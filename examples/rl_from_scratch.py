"""RLFromScratch: four updates on each batch, the learning rate warmed up and let down.

python examples/rl_from_scratch.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("rl_from_scratch", word_problems)
