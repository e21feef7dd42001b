"""The R1 article: composite reward, curriculum by measured pass rates, and a decreasing KL weight.

python examples/r1_blog.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import run, word_problems

if __name__ == "__main__":
    run("r1_blog", word_problems)
