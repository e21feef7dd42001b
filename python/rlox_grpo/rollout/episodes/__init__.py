"""Episodes of several turns: the conversation as tokens, and the scheduler that runs episodes beside each other."""
