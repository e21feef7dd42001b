"""Episodes of several turns: conversations as tokens, and the scheduler that runs episodes concurrently."""
