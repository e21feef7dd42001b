"""``python -m rlox_grpo`` is ``rlox-grpo``."""

from rlox_grpo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
