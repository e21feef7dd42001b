"""Whether variants of a case run that runs in any case.

``RLOX_GRPO_THOROUGH=1 make test test-engines test-cluster`` runs them.
"""

import os

THOROUGH = "RLOX_GRPO_THOROUGH" in os.environ
